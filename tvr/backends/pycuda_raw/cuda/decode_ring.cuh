// Each warp's own ring of K and V in shared memory, filled STAGES - 1 slices ahead of its use.
//
// A slice is 16 tokens. It lies in one block of the cache, whose size is a power of two from 16 up,
// so its keys for one KV head are one run of memory, and its values another. A tile is WARPS slices
// side by side, one for each warp. Since warps share nothing but results, they never wait for each
// other while they read.
#pragma once

#include "decode_work.cuh"
#include "swizzle.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int SLICE = 16;            // tokens
constexpr int TILE = WARPS * SLICE;  // tokens
constexpr int SLICE_BYTES = SLICE * HEAD_DIM * static_cast<int>(sizeof(scalar_t));
constexpr int STAGE_BYTES = 2 * SLICE_BYTES;  // K, then V
constexpr int RING_BYTES = STAGES * STAGE_BYTES;

static_assert(STAGES >= 2, "one slice is loaded while another is used");
static_assert(SLICE * CHUNKS % WARP == 0, "every lane copies as many chunks");

// What decode kernels read. Strides are in elements.
struct Inputs {
  const scalar_t* __restrict__ q;        // [num_seqs, num_heads, HEAD_DIM]
  const scalar_t* __restrict__ k_cache;  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
  const scalar_t* __restrict__ v_cache;  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
  const int* __restrict__ block_table;   // [num_seqs, max_blocks]
  int64_t q_seq_stride;
  int64_t q_head_stride;
  int64_t k_block_stride;
  int64_t v_block_stride;
  int64_t table_stride;
  float scale_log2;  // log2(e) * scale: exponentials are powers of two
  int group_size;    // query heads of a KV head
  int block_shift;   // block_size is 1 << block_shift
  int aligned;       // whether every token of the caches lies at a multiple of 16 bytes
};

// The query heads of a segment.
struct Bundle {
  int first_head;
  int num_heads;  // at most HEADS
};

__device__ __forceinline__ Bundle bundle_of(int kv_head, int part, int group_size) {
  const int before = part * HEADS;
  return {kv_head * group_size + before, min(HEADS, group_size - before)};
}

// A block's segments: the lead, then the rest.
struct Work {
  Segment lead;
  const Segment* __restrict__ rest;  // [num_rest]
  int num_rest;
};

// Where a chunk of a token lies in a slice, in bytes.
__device__ __forceinline__ int chunk_offset(int token, int chunk) {
  return (token * CHUNKS + (chunk ^ swizzle(token))) * 16;
}

// Starts copying 16 tokens to a slice; `source` is the lane's first chunk of them. Tokens from
// num_valid on become zeros and are not read: they may hold NaN, and 0 * NaN would stay in the sum.
__device__ __forceinline__ void copy_slice(unsigned char* slice, const scalar_t* source,
                                           int num_valid, bool aligned) {
  const int lane = threadIdx.x % WARP;
  if (aligned) {
    const int num_valid_chunks = num_valid * CHUNKS - lane;  // from this lane's first one on
#pragma unroll
    for (int i = 0; i < SLICE * CHUNKS / WARP; ++i) {
      const int c = i * WARP + lane;
      cp_async_16(slice + chunk_offset(c / CHUNKS, c % CHUNKS), source + i * WARP * CHUNK,
                  i * WARP < num_valid_chunks);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < SLICE * HEAD_DIM / WARP; ++i) {
      const int c = i / CHUNK * WARP + lane, token = c / CHUNKS;
      unsigned char* chunk = slice + chunk_offset(token, c % CHUNKS);
      reinterpret_cast<scalar_t*>(chunk)[i % CHUNK] =
          token < num_valid ? source[i / CHUNK * WARP * CHUNK + i % CHUNK]
                            : from_float<scalar_t>(0.0f);
    }
  }
}

// Walks a warp's slices through all segments of its block, and loads them ahead of their use.
struct Prefetcher {
  const Inputs& in;
  const Work& work;
  Segment segment;  // of the next slice
  Segment next;     // the one behind it, on its way while this one is loaded
  int num_begun = 0;
  int tile = 0;  // of the next slice, within the segment
  int ids = 0;   // lane i: the KV block of the i-th slice of the 32 that this one is among
  const scalar_t* k = nullptr;  // this lane's first chunk of the KV head in block 0
  const scalar_t* v = nullptr;

  __device__ __forceinline__ Prefetcher(const Inputs& in, const Work& work)
      : in(in), work(work), next(work.lead) {
    begin_segment();
  }

  __device__ __forceinline__ void begin_segment() {
    segment = next;
    tile = 0;
    if (num_begun < work.num_rest) next = load_record(work.rest + num_begun);
    ++num_begun;
    const int64_t offset = (static_cast<int64_t>(segment.kv_head) << in.block_shift) * HEAD_DIM +
                           threadIdx.x % WARP * CHUNK;
    k = in.k_cache + offset;
    v = in.v_cache + offset;
  }

  // Starts loading the warp's slice of the next tile, if there is one and it has tokens.
  __device__ __forceinline__ void load_next(unsigned char* stage) {
    if (num_begun > work.num_rest + 1) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int token = (segment.first_tile + tile) * TILE + warp * SLICE;
    const int place = tile & (WARP - 1);
    if (place == 0) {
      // One read of the table for 32 slices. Entries behind the sequence's end are not read.
      const int ahead = token + lane * TILE;
      if (tile + lane < segment.num_tiles && ahead < segment.seq_len) {
        ids = in.block_table[segment.seq * in.table_stride + (ahead >> in.block_shift)];
      }
    }
    const int num_valid = segment.seq_len - token;
    if (num_valid > 0) {
      const int64_t block = __shfl_sync(0xffffffffu, ids, place);
      const int inside = (token & ((1 << in.block_shift) - 1)) * HEAD_DIM;
      copy_slice(stage, k + block * in.k_block_stride + inside, num_valid, in.aligned);
      copy_slice(stage + SLICE_BYTES, v + block * in.v_block_stride + inside, num_valid,
                 in.aligned);
    }
    if (++tile == segment.num_tiles) begin_segment();
  }
};
