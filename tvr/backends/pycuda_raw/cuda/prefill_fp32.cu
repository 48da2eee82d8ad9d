// Causal attention of chunks of new tokens over the paged cache in fp32 throughout, on CUDA cores:
// tensor cores would round their factors to 10 bits.
//
// Grid: num_kv_heads * (num_tokens * group_size / 32 + num_seqs) blocks, the KV head first; some
//   find nothing to do and leave. Block: 128 threads.
// Dynamic shared memory: 4 * (64 * (HEAD_DIM + 4) + 32 * 33) bytes.
// -DDTYPE=fp32 -DHEAD_DIM=64|80|96|128|256
// SMs: 80 and up. fp32: everything.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=fp32
//   -DHEAD_DIM=64 prefill_fp32.cu
// Source: Dao, "FlashAttention-2" (arXiv 2307.08691), for the loop.
#include "common.cuh"
#include "prefill_work.cuh"

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64, 80, 96, 128 or 256"
#endif

constexpr int NUM_THREADS = 128;
constexpr int TILE_ROWS = 32;
constexpr int TILE_KEYS = 32;
constexpr int LANES = 8;  // threads that share two rows
constexpr int THREAD_KEYS = TILE_KEYS / LANES;
constexpr int CHUNK = 4;  // floats in 16 bytes
constexpr int CHUNKS = HEAD_DIM / CHUNK;
constexpr int THREAD_CHUNKS = (CHUNKS + LANES - 1) / LANES;
constexpr int PADDED = HEAD_DIM + CHUNK;    // the same chunk of 8 rows lies in different banks
constexpr int PADDED_KEYS = TILE_KEYS + 1;  // so does the same key of 4 rows

static_assert(sizeof(scalar_t) == 4, "see prefill.cu for 16-bit numbers");
static_assert(TILE_ROWS * LANES == 2 * NUM_THREADS, "8 threads have two rows");
static_assert(HEAD_DIM % CHUNK == 0 && TILE_KEYS % LANES == 0, "");

__device__ __forceinline__ const float4& chunk_of(const float* tile, int row, int chunk) {
  return *reinterpret_cast<const float4*>(tile + row * PADDED + chunk * CHUNK);
}

// Copies a tile of keys or values; those that the tile of rows does not need become zeros and are
// not read: they may hold NaN, of which 0 * NaN would be left in the sum.
__device__ __forceinline__ void copy_tile(float* __restrict__ tile, const float* __restrict__ cache,
                                          int64_t block_stride, int first_key, const Work& work,
                                          int block_shift) {
  const int block_size = 1 << block_shift;
  for (int i = threadIdx.x; i < TILE_KEYS * HEAD_DIM; i += NUM_THREADS) {
    const int key = first_key + i / HEAD_DIM;
    float value = 0.0f;
    if (key < work.num_keys) {
      const int64_t block = work.blocks[key >> block_shift] * block_stride;
      const int64_t token =
          static_cast<int64_t>(work.kv_head) * block_size + (key & (block_size - 1));
      value = cache[block + token * HEAD_DIM + i % HEAD_DIM];
    }
    tile[i / HEAD_DIM * PADDED + i % HEAD_DIM] = value;
  }
}

// Over the 8 threads that share rows.
__device__ __forceinline__ float max_of_row(float x) {
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
  for (int mask = LANES / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) KERNEL_NAME(prefill_fp32)(
    const float* __restrict__ q,           // [num_tokens, num_heads, HEAD_DIM], strided
    const float* __restrict__ k_cache,     // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const float* __restrict__ v_cache,     // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const int* __restrict__ block_table,   // [num_seqs, table_stride]
    const int* __restrict__ seq_lens,      // [num_seqs]
    const int* __restrict__ cu_seqlens_q,  // [num_seqs + 1]
    float* __restrict__ out,               // [num_tokens, num_heads, HEAD_DIM]
    float* __restrict__ lse,               // [num_tokens, num_heads] or null
    int64_t q_token_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride,
    int64_t table_stride, int num_seqs, int num_kv_heads, int group_size, int block_shift,
    float scale_log2) {  // scale * log2(e)
  DYNAMIC_SHARED(shared);
  float* q_tile = reinterpret_cast<float*>(shared);
  float* kv_tile = q_tile + TILE_ROWS * PADDED;  // keys, then the values of the same tokens
  float* weights = kv_tile + TILE_KEYS * PADDED;
  const Steps steps = {block_table, seq_lens,     cu_seqlens_q, table_stride,
                       num_seqs,    num_kv_heads, group_size,   block_shift};
  __shared__ Work work;
  if (threadIdx.x < WARP) work_of_block(work, steps, TILE_ROWS);
  __syncthreads();
  if (work.num_rows == 0) return;

  for (int i = threadIdx.x; i < TILE_ROWS * HEAD_DIM; i += NUM_THREADS) {
    const int in_tile = i / HEAD_DIM;
    const int row = work.first_row + in_tile;
    const int head = work.kv_head * group_size + row % group_size;
    const int64_t token = work.first_token + row / group_size;
    q_tile[in_tile * PADDED + i % HEAD_DIM] =
        in_tile < work.num_rows ? q[token * q_token_stride + head * q_head_stride + i % HEAD_DIM]
                                : 0.0f;
  }

  const int lane = threadIdx.x % LANES;
  const int first_row = threadIdx.x / LANES * 2;  // of this thread's two, in the tile
  float largest[2] = {-INFINITY, -INFINITY};      // score so far, times log2(e)
  float sum[2] = {0.0f, 0.0f};                    // of the weights of this thread's keys
  float result[2][THREAD_CHUNKS][CHUNK] = {};
  for (int first_key = 0; first_key < work.num_keys; first_key += TILE_KEYS) {
    __syncthreads();  // all are done with the values of the tile before
    copy_tile(kv_tile, k_cache, k_block_stride, first_key, work, block_shift);
    __syncthreads();

    float scores[2][THREAD_KEYS] = {};  // of keys lane, lane + 8, ...
    for (int c = 0; c < CHUNKS; ++c) {
      const float4 q0 = chunk_of(q_tile, first_row, c);
      const float4 q1 = chunk_of(q_tile, first_row + 1, c);
#pragma unroll
      for (int j = 0; j < THREAD_KEYS; ++j) {
        const float4 k = chunk_of(kv_tile, lane + LANES * j, c);
        scores[0][j] += q0.x * k.x + q0.y * k.y + q0.z * k.z + q0.w * k.w;
        scores[1][j] += q1.x * k.x + q1.y * k.y + q1.z * k.z + q1.w * k.w;
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + r;
      const int position = work.first_position + (work.first_row + row) / group_size;
      float tile_largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < THREAD_KEYS; ++j) {
        const bool is_seen = first_key + lane + LANES * j <= position;
        scores[r][j] = is_seen ? scores[r][j] * scale_log2 : -INFINITY;
        tile_largest = fmaxf(tile_largest, scores[r][j]);
      }
      const float before = largest[r];
      largest[r] = fmaxf(before, max_of_row(tile_largest));
      // Of a row that has seen no key, (-inf) - (-inf) would be NaN; its weights are 0.
      const float base = largest[r] == -INFINITY ? 0.0f : largest[r];
      const float factor = exp2f(before - base);
      float of_tile = 0.0f;
#pragma unroll
      for (int j = 0; j < THREAD_KEYS; ++j) {
        const float weight = exp2f(scores[r][j] - base);
        of_tile += weight;
        weights[row * PADDED_KEYS + lane + LANES * j] = weight;
      }
      sum[r] = sum[r] * factor + of_tile;
#pragma unroll
      for (int j = 0; j < THREAD_CHUNKS; ++j) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) result[r][j][i] *= factor;
      }
    }

    __syncthreads();  // all are done with the keys
    copy_tile(kv_tile, v_cache, v_block_stride, first_key, work, block_shift);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < THREAD_CHUNKS; ++j) {
      const int chunk = lane + LANES * j;
      if (chunk >= CHUNKS) continue;
      // A tile's values are added up by themselves: one long sum of 100,000 keys would collect
      // twice the error that fp32 may have.
      float of_tile[2][CHUNK] = {};
      for (int key = 0; key < TILE_KEYS; ++key) {
        const float4 v = chunk_of(kv_tile, key, chunk);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float weight = weights[(first_row + r) * PADDED_KEYS + key];
          of_tile[r][0] += weight * v.x;
          of_tile[r][1] += weight * v.y;
          of_tile[r][2] += weight * v.z;
          of_tile[r][3] += weight * v.w;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) result[r][j][i] += of_tile[r][i];
      }
    }
  }

  const int num_heads = num_kv_heads * group_size;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = sum_of_row(sum[r]);
    if (first_row + r >= work.num_rows) continue;
    const int row = work.first_row + first_row + r;
    const int64_t out_row = (work.first_token + row / group_size) * num_heads +
                            work.kv_head * group_size + row % group_size;
    // log2f(0) is -inf, and so is the largest score of a row without keys.
    if (lse != nullptr && lane == 0) lse[out_row] = (largest[r] + log2f(total)) * LN_2;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;  // a row without keys is 0
#pragma unroll
    for (int j = 0; j < THREAD_CHUNKS; ++j) {
      const int chunk = lane + LANES * j;
      if (chunk >= CHUNKS) continue;
      const float4 value = {result[r][j][0] * inverse, result[r][j][1] * inverse,
                            result[r][j][2] * inverse, result[r][j][3] * inverse};
      *reinterpret_cast<float4*>(out + out_row * HEAD_DIM + chunk * CHUNK) = value;
    }
  }
}
