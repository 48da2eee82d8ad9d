// What prefill_sm90.cu works on, and how it is brought: tiles of Q, K and V in shared memory.
//
// They are copied by cp.async, 16 bytes a thread: a block of the cache may hold just 16 tokens,
// and rows behind the last key have to become zeros.
#pragma once

#include "common.cuh"
#include "prefill_work.cuh"
#include "wgmma.cuh"

#if !defined(HEAD_DIM)
#error "compile with -DHEAD_DIM=64, 128 or 256"
#endif

constexpr int NUM_CONSUMERS = HEAD_DIM == 64 ? 3 : 2;  // warpgroups that multiply, 64 rows each
constexpr int TILE_ROWS = 64 * NUM_CONSUMERS;
constexpr int TILE_KEYS = HEAD_DIM == 256 ? 64 : 128;  // more do not fit beside the output
constexpr int NUM_STAGES = 2;
constexpr int NUM_THREADS = WARPGROUP * (NUM_CONSUMERS + 1);
// Of 65536 registers the copying threads leave all but these to the others.
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;

constexpr int CHUNK = 8;  // 16-bit numbers in 16 bytes
constexpr int CHUNKS = HEAD_DIM / CHUNK;
constexpr int Q_BYTES = TILE_ROWS * HEAD_DIM * 2;
constexpr int TILE_BYTES = TILE_KEYS * HEAD_DIM * 2;  // of K or V
constexpr int SLICE = 16;                             // tokens that are sure to lie in one block
constexpr int SLICES = TILE_KEYS / SLICE;
constexpr int PASS_ROWS = WARPGROUP / CHUNKS;              // rows that a warpgroup copies at once
constexpr int OWN_BARRIER = 1;                             // of each multiplying warpgroup
constexpr int TURN_BARRIER = OWN_BARRIER + NUM_CONSUMERS;  // says that it is that one's turn

static_assert(sizeof(scalar_t) == 2, "tensor cores take 16-bit numbers");
static_assert(HEAD_DIM % PANEL_COLUMNS == 0, "tiles are made of whole panels");
static_assert(WARPGROUP % CHUNKS == 0 && SLICE % PASS_ROWS == 0, "a slice is whole passes");
static_assert(SLICES <= WARP, "each lane looks up the block of one slice");
// A thread starts with as many as all can have, in steps of 8. More than that is not given out, and
// a warpgroup that asks for more waits for ever.
constexpr int START_REGISTERS = 65536 / NUM_THREADS / 8 * 8;
static_assert(PRODUCER_REGISTERS + NUM_CONSUMERS * CONSUMER_REGISTERS <=
                  (NUM_CONSUMERS + 1) * START_REGISTERS,
              "what the copying threads leave must be enough for the others");

// Barriers of each stage. Full: every copying thread's part has landed. Empty: every multiplying
// warp is done with it.
struct Barriers {
  uint64_t k_full[NUM_STAGES], k_empty[NUM_STAGES], v_full[NUM_STAGES], v_empty[NUM_STAGES];
};

// Starts copying a tile of keys or values. Lane j of each warp brings the id of slice j's block.
// Rows from num_valid on become zeros, and are not read: they may hold NaN, of which 0 * NaN would
// be left in the sum.
__device__ __forceinline__ void copy_tile(unsigned char* tile, const scalar_t* __restrict__ cache,
                                          int64_t block_stride, int block_id, int first_key,
                                          int num_valid, int kv_head, int block_shift) {
  const int thread = threadIdx.x % WARPGROUP;
  const int row = thread / CHUNKS;
  const int chunk = thread % CHUNKS;
  const int block_size = 1 << block_shift;
#pragma unroll 2  // all at once take more registers than the copying threads keep
  for (int slice = 0; slice < SLICES; ++slice) {
    const int key = slice * SLICE;
    const int in_block = kv_head * block_size + ((first_key + key) & (block_size - 1));
    const scalar_t* source = cache + __shfl_sync(0xffffffffu, block_id, slice) * block_stride +
                             (in_block + row) * HEAD_DIM + chunk * CHUNK;
#pragma unroll
    for (int r = 0; r < SLICE; r += PASS_ROWS) {
      cp_async_16(tile + panel_offset(TILE_KEYS, key + row + r, chunk), source + r * HEAD_DIM,
                  key + row + r < num_valid);
    }
  }
}

// The copying warpgroup: brings all tiles of K and V, as stages become free.
__device__ __forceinline__ void produce(unsigned char* stages, Barriers& barriers,
                                        const scalar_t* __restrict__ k_cache,
                                        const scalar_t* __restrict__ v_cache,
                                        int64_t k_block_stride, int64_t v_block_stride,
                                        const Work& work, int num_tiles, int block_shift) {
  const int num_keys = work.num_keys;
  const int kv_head = work.kv_head;
  const int* blocks = work.blocks;
  // The block of this lane's slice; entries of the table past the last key may be anything.
  auto block_of_slice = [&](int tile) {
    const int key = tile * TILE_KEYS + threadIdx.x % WARP % SLICES * SLICE;
    return key < num_keys ? __ldg(blocks + (key >> block_shift)) : 0;
  };
  int next_block_id = block_of_slice(0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int block_id = next_block_id;
    next_block_id = block_of_slice(tile + 1);  // on its way while this tile is copied
    const int stage = tile % NUM_STAGES;
    const int parity = (tile / NUM_STAGES) % 2 ^ 1;
    const int first_key = tile * TILE_KEYS;
    unsigned char* k_tile = stages + stage * 2 * TILE_BYTES;
    barrier_wait(&barriers.k_empty[stage], parity);
    copy_tile(k_tile, k_cache, k_block_stride, block_id, first_key, num_keys - first_key, kv_head,
              block_shift);
    barrier_arrive_after_copies(&barriers.k_full[stage]);
    barrier_wait(&barriers.v_empty[stage], parity);
    copy_tile(k_tile + TILE_BYTES, v_cache, v_block_stride, block_id, first_key,
              num_keys - first_key, kv_head, block_shift);
    barrier_arrive_after_copies(&barriers.v_full[stage]);
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// Copies the warpgroup's 64 rows of queries; rows that do not exist become zeros.
__device__ __forceinline__ void copy_queries(unsigned char* q_tile, const scalar_t* __restrict__ q,
                                             int64_t token_stride, int64_t head_stride,
                                             const Work& work, int group_size, int first_in_tile) {
  const int chunk = threadIdx.x % CHUNKS;
  for (int row = first_in_tile + threadIdx.x % WARPGROUP / CHUNKS; row < first_in_tile + 64;
       row += PASS_ROWS) {
    const int in_sequence = work.first_row + min(row, work.num_rows - 1);
    const int head = work.kv_head * group_size + in_sequence % group_size;
    const scalar_t* source = q + (work.first_token + in_sequence / group_size) * token_stride +
                             head * head_stride + chunk * CHUNK;
    cp_async_16(q_tile + panel_offset(TILE_ROWS, row, chunk), source, row < work.num_rows);
  }
  cp_async_commit();
  cp_async_wait<0>();
}
