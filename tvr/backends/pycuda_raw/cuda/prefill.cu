// Causal attention of chunks of new tokens over the paged cache, on tensor cores: flash attention,
// whose scores never leave the registers.
//
// Grid: num_kv_heads * (num_tokens * group_size / TILE_ROWS + num_seqs) blocks, the KV head first;
//   some find nothing to do and leave. Block: 128 threads.
// Dynamic shared memory: (TILE_ROWS + 4 * TILE_KEYS) * HEAD_DIM * 2 bytes, TILE_ROWS being
//   64 * ROW_TILES.
// -DDTYPE=bf16|fp16 -DHEAD_DIM=64|80|96|128|256
// -DROW_TILES=1|2      16-row tiles of a warp: 2 halve its reads of K and V, 1 gives more blocks
// -DTILE_KEYS=32|64    keys worked on at a time
// -DQ_IN_REGISTERS=0|1 keep the queries there, or read them from shared memory for each tile
// -DBLOCKS_PER_SM=1..4 that registers have to suffice for
// SMs: 80 and up. fp32: scores, softmax, sums and output until it is rounded once. The softmax
// weights are rounded to DTYPE for the second product.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16
//   -DHEAD_DIM=64 -DROW_TILES=2 -DTILE_KEYS=64 -DQ_IN_REGISTERS=1 -DBLOCKS_PER_SM=2 prefill.cu
// Sources: Dao, "FlashAttention-2" (arXiv 2307.08691): the loop and its sharing among warps; the
// rescaling that is put off is FlashAttention-4's.
#include "common.cuh"
#include "prefill_tiles.cuh"
#include "prefill_work.cuh"

#if !defined(HEAD_DIM) || !defined(ROW_TILES) || !defined(TILE_KEYS) || \
    !defined(Q_IN_REGISTERS) || !defined(BLOCKS_PER_SM)
#error "compile with -DHEAD_DIM, -DROW_TILES, -DTILE_KEYS, -DQ_IN_REGISTERS and -DBLOCKS_PER_SM"
#endif

constexpr int NUM_WARPS = 4;
constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int TILE_ROWS = NUM_WARPS * WARP_ROWS;
constexpr int K_STEPS = HEAD_DIM / 16;     // of the first product
constexpr int KEY_STEPS = TILE_KEYS / 16;  // of the second
constexpr int SLICES = TILE_KEYS / SLICE;
constexpr int TILE_BYTES = TILE_KEYS * ROW_BYTES;  // of K or V
constexpr int NUM_STAGES = 2;

static_assert(ROW_TILES == 1 || ROW_TILES == 2, "more rows do not fit in the registers");
static_assert(TILE_KEYS == 32 || TILE_KEYS == 64, "");
static_assert(NUM_WARPS % SLICES == 0, "a warp copies one slice of K, of V or of both");

// The rows of a warp, spread over its lanes as mma_m16n8k16 spreads c: a lane has rows lane / 4 and
// 8 more of each 16-row tile (`half` 0 and 1), and two neighbouring columns of every eight.
struct Rows {
  float out[ROW_TILES][HEAD_DIM / 8][4];
  float base[ROW_TILES][2];  // what scores are measured from, times log2(e); -inf: no key yet
  float sum[ROW_TILES][2];   // of the weights in this lane's columns
};

// Where a tile of keys, K and then V, lies behind the queries: the two stages take turns.
__device__ __forceinline__ int stage_offset(int first_key) {
  return first_key / TILE_KEYS % NUM_STAGES * 2 * TILE_BYTES;
}

// Starts copying keys first_key and on of K and V to a stage. Each warp has a slice of 16 tokens,
// which lie in block block_id; keys that the tile does not need become zeros.
__device__ __forceinline__ void copy_keys(unsigned char* stage, const scalar_t* __restrict__ k,
                                          const scalar_t* __restrict__ v, int64_t k_block_stride,
                                          int64_t v_block_stride, int block_id, int first_key,
                                          const Work& work, const Steps& steps, bool aligned) {
  const int warp = threadIdx.x / WARP;
  const int slice = warp % SLICES;
  const int key = first_key + slice * SLICE;
  const int num_valid = work.num_keys - key;
  const int block_size = 1 << steps.block_shift;
  // Within one block of the pool: no 64 bits are needed for that.
  const int offset = (work.kv_head * block_size + (key & (block_size - 1))) * HEAD_DIM;
#pragma unroll
  for (int job = 0; job < 2 * SLICES; job += NUM_WARPS) {
    const bool is_v = job + warp >= SLICES;
    const scalar_t* block = is_v ? v + block_id * v_block_stride : k + block_id * k_block_stride;
    copy_slice(stage + (is_v ? TILE_BYTES : 0), slice * SLICE, block, offset, num_valid, aligned);
  }
}

// The id of the block that this warp's slice of the tile lies in; entries of the table past the
// last key may be anything and are not looked at.
__device__ __forceinline__ int block_of_slice(const Work& work, const Steps& steps, int first_key) {
  const int key = first_key + threadIdx.x / WARP % SLICES * SLICE;
  return key < work.num_keys ? __ldg(work.blocks + (key >> steps.block_shift)) : 0;
}

// Scores of the warp's rows and a tile of keys: S = Q K^T.
__device__ __forceinline__ void multiply_keys(float (&scores)[ROW_TILES][TILE_KEYS / 8][4],
                                              const uint32_t (&q)[ROW_TILES][K_STEPS][4],
                                              const unsigned char* q_tile,
                                              const unsigned char* k_tile) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[r][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    uint32_t a[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if constexpr (Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[r][i] = q[r][step][i];
      } else {
        ldmatrix_x4(a[r], matrix_address(q_tile, 16 * r, step));
      }
    }
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4(b, columns_address(k_tile, 16 * n, step));
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        mma_m16n8k16<scalar_t>(scores[r][2 * n], a[r], {b[0], b[1]});
        mma_m16n8k16<scalar_t>(scores[r][2 * n + 1], a[r], {b[2], b[3]});
      }
    }
  }
}

__device__ __forceinline__ void multiply(float (&scores)[ROW_TILES][TILE_KEYS / 8][4],
                                         float factor) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[r][n][i] *= factor;
    }
  }
}

// Hides the keys behind each row's own position.
__device__ __forceinline__ void hide_later_keys(float (&scores)[ROW_TILES][TILE_KEYS / 8][4],
                                                const Work& work, int group_size, int first_key) {
  const int column = first_key + threadIdx.x % 4 * 2;
  const int first_row = work.first_row + threadIdx.x / WARP * WARP_ROWS + threadIdx.x % WARP / 4;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = work.first_position + (first_row + 16 * r + 8 * half) / group_size;
      const int num_seen = position + 1 - column;  // of the tile, counted from the lane's column
#pragma unroll
      for (int n = 0; n < TILE_KEYS / 8; ++n) {
        if (8 * n >= num_seen) scores[r][n][2 * half] = -INFINITY;
        if (8 * n + 1 >= num_seen) scores[r][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

// Moves the bases of rows whose scores have grown too far above them. Whether a row's base moves
// depends on that row alone, so its result does not depend on what else the tile holds.
__device__ __forceinline__ void follow_largest(Rows& rows,
                                               const float (&scores)[ROW_TILES][TILE_KEYS / 8][4],
                                               float scale_log2) {
  float change[ROW_TILES][2];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < TILE_KEYS / 8; ++n) {
        largest = fmaxf(largest, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float wanted = largest * scale_log2;
      const float base = rows.base[r][half];
      const bool moves = wanted > base + SLACK;  // false while both are -inf
      change[r][half] = moves ? exp2_fast(base - wanted) : 1.0f;
      rows.base[r][half] = moves ? wanted : base;
      moved = moved || moves;
    }
  }
  if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    rows.sum[r][0] *= change[r][0];
    rows.sum[r][1] *= change[r][1];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[r][n][i] *= change[r][i / 2];
    }
  }
}

// Turns scores into weights and adds the weighted values: O += P V, 16 keys at a time, so that the
// exponentials of the next 16 keys are computed while the tensor cores are busy with these.
__device__ __forceinline__ void add_values(Rows& rows,
                                           const float (&scores)[ROW_TILES][TILE_KEYS / 8][4],
                                           float scale_log2, const unsigned char* v_tile) {
  float base[ROW_TILES][2];
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of a row that has seen no key, (-inf) - (-inf) would be NaN; its weights are 0.
      base[r][half] = rows.base[r][half] == -INFINITY ? 0.0f : rows.base[r][half];
    }
  }
#pragma unroll
  for (int step = 0; step < KEY_STEPS; ++step) {
    uint32_t a[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // What a lane holds of c is what it must hold of a: two tiles of 8 columns make one of 16.
        const float* pair = &scores[r][2 * step + i / 2][i % 2 * 2];
        const float low = exp2_fast(fmaf(pair[0], scale_log2, -base[r][i % 2]));
        const float high = exp2_fast(fmaf(pair[1], scale_log2, -base[r][i % 2]));
        rows.sum[r][i % 2] += low + high;
        a[r][i] = pack_floats(low, high);
      }
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, matrix_address(v_tile, 16 * step, n));
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        mma_m16n8k16<scalar_t>(rows.out[r][2 * n], a[r], {b[0], b[1]});
        mma_m16n8k16<scalar_t>(rows.out[r][2 * n + 1], a[r], {b[2], b[3]});
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP, BLOCKS_PER_SM) KERNEL_NAME(prefill)(
    const scalar_t* __restrict__ q,        // [num_tokens, num_heads, HEAD_DIM], strided
    const scalar_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const scalar_t* __restrict__ v_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const int* __restrict__ block_table,   // [num_seqs, table_stride]
    const int* __restrict__ seq_lens,      // [num_seqs]
    const int* __restrict__ cu_seqlens_q,  // [num_seqs + 1]
    scalar_t* __restrict__ out,            // [num_tokens, num_heads, HEAD_DIM]
    float* __restrict__ lse,               // [num_tokens, num_heads] or null
    int64_t q_token_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride,
    int64_t table_stride, int num_seqs, int num_kv_heads, int group_size, int block_shift,
    float scale_log2) {  // scale * log2(e)
  DYNAMIC_SHARED(shared);
  const Steps steps = {block_table, seq_lens,     cu_seqlens_q, table_stride,
                       num_seqs,    num_kv_heads, group_size,   block_shift};
  // In shared memory, since every register is needed in the loop.
  __shared__ Work work;
  if (threadIdx.x < WARP) work_of_block(work, steps, TILE_ROWS);
  __syncthreads();
  if (work.num_rows == 0) return;

  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const int num_heads = num_kv_heads * group_size;
  unsigned char* q_tile = shared + warp * WARP_ROWS * ROW_BYTES;  // the warp's own, till the end
  unsigned char* stages = shared + TILE_ROWS * ROW_BYTES;

  const bool q_aligned =
      ((q_token_stride | q_head_stride) % CHUNK | reinterpret_cast<uintptr_t>(q) % 16) == 0;
  for (int c = lane; c < WARP_ROWS * CHUNKS; c += WARP) {
    const int row = c / CHUNKS;
    const int in_tile = warp * WARP_ROWS + row;
    const int in_sequence = work.first_row + min(in_tile, work.num_rows - 1);
    const int head = work.kv_head * group_size + in_sequence % group_size;
    const scalar_t* source = q + (work.first_token + in_sequence / group_size) * q_token_stride +
                             head * q_head_stride + c % CHUNKS * CHUNK;
    if (q_aligned) {
      copy_chunk(q_tile, row, c % CHUNKS, source, in_tile < work.num_rows);
    } else {
      copy_unaligned_chunk(q_tile, row, c % CHUNKS, source, in_tile < work.num_rows);
    }
  }

  const bool kv_aligned =
      (k_block_stride | v_block_stride) % CHUNK == 0 &&
      (reinterpret_cast<uintptr_t>(k_cache) | reinterpret_cast<uintptr_t>(v_cache)) % 16 == 0;
  int block_id = block_of_slice(work, steps, 0);
  copy_keys(stages, k_cache, v_cache, k_block_stride, v_block_stride, block_id, 0, work, steps,
            kv_aligned);
  cp_async_commit();
  block_id = block_of_slice(work, steps, TILE_KEYS);

  Rows rows;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[r][n][i] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.base[r][half] = -INFINITY;
      rows.sum[r][half] = 0.0f;
    }
  }
  uint32_t q_registers[ROW_TILES][K_STEPS][4];
  // Usually scores are scaled where their exponentials are taken, at no cost. But the largest score
  // is the largest scaled score, and a hidden -inf stays one, only if the scale is above 0.
  const float factor = scale_log2 > 0.0f ? scale_log2 : 1.0f;

  for (int first_key = 0; first_key < work.num_keys; first_key += TILE_KEYS) {
    cp_async_wait<0>();
    // Now this tile is there for all warps, and all are done with the one before, whose stage the
    // next one takes.
    __syncthreads();
    const int next_key = first_key + TILE_KEYS;
    if (next_key < work.num_keys) {
      copy_keys(stages + stage_offset(next_key), k_cache, v_cache, k_block_stride, v_block_stride,
                block_id, next_key, work, steps, kv_aligned);
      cp_async_commit();
      block_id = block_of_slice(work, steps, next_key + TILE_KEYS);
    }
    if (Q_IN_REGISTERS && first_key == 0) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          ldmatrix_x4(q_registers[r][step], matrix_address(q_tile, 16 * r, step));
        }
      }
    }
    const unsigned char* k_tile = stages + stage_offset(first_key);
    float scores[ROW_TILES][TILE_KEYS / 8][4];
    multiply_keys(scores, q_registers, q_tile, k_tile);
    if (scale_log2 <= 0.0f) multiply(scores, scale_log2);
    // The first row sees the fewest keys.
    if (next_key > work.num_keys_of_first) hide_later_keys(scores, work, group_size, first_key);
    follow_largest(rows, scores, factor);
    add_values(rows, scores, factor, k_tile + TILE_BYTES);
  }

  // The warp's queries are used up: its output goes through their place, so as to be written in
  // rows of 16 bytes a lane.
  cp_async_wait<0>();
  __syncwarp();
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[r][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row without keys is 0
      const int row = 16 * r + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const float* pair = &rows.out[r][n][2 * half];
        *reinterpret_cast<uint32_t*>(q_tile + chunk_offset(row, n) + lane % 4 * 4) =
            pack_floats(pair[0] * inverse, pair[1] * inverse);
      }
      const int in_tile = warp * WARP_ROWS + row;
      if (lse != nullptr && lane % 4 == 0 && in_tile < work.num_rows) {
        const int in_sequence = work.first_row + in_tile;
        const int64_t token = work.first_token + in_sequence / group_size;
        // log2f(0) is -inf, and so is the base of a row without keys.
        lse[token * num_heads + work.kv_head * group_size + in_sequence % group_size] =
            (rows.base[r][half] + log2f(sum)) * LN_2;
      }
    }
  }
  __syncwarp();
  for (int c = lane; c < WARP_ROWS * CHUNKS; c += WARP) {
    const int row = c / CHUNKS;
    const int in_tile = warp * WARP_ROWS + row;
    if (in_tile >= work.num_rows) break;
    const int in_sequence = work.first_row + in_tile;
    const int64_t token = work.first_token + in_sequence / group_size;
    const int head = work.kv_head * group_size + in_sequence % group_size;
    *reinterpret_cast<uint4*>(out + (token * num_heads + head) * HEAD_DIM + c % CHUNKS * CHUNK) =
        *reinterpret_cast<const uint4*>(q_tile + chunk_offset(row, c % CHUNKS));
  }
}
