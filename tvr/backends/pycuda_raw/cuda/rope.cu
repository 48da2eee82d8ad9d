// Rotary position embedding of q and k: every head is turned by the angles of its token's position.
// Reads and writes q and k once, in place if so asked.
//
// Grid: (tokens). Block: up to 512 threads, a multiple of 32, which share out the lanes of all
// heads (HEAD_DIM / 2 channel pairs a head, a pack of 16 bytes of pairs a lane).
// Shared memory: none.
// Compile with: DTYPE=bf16 | fp16 | fp32; HEAD_DIM=64 | 80 | 96 | 128 | 256.
// SMs: 80 and up.
// Numerics: the rotation in fp32, rounded to DTYPE once.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 -DHEAD_DIM=64 rope.cu

#include "common.cuh"

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64, 80, 96, 128 or 256"
#endif

#include "rope.cuh"

// Heads of one token: where they start and how far apart they are.
struct Heads {
  const scalar_t* in;
  scalar_t* out;
  int64_t stride;
  int64_t out_stride;
};

template <int WIDTH>
__device__ __forceinline__ void rotate_head(const Heads& heads, int64_t head, int lane,
                                            const float* __restrict__ angles, int half) {
  const Channels at = channels_of<WIDTH>(lane, half);
  Runs<WIDTH> runs = load_runs<WIDTH>(heads.in + head * heads.stride, at);
  turn<WIDTH>(runs, at, angles, half);
  store_runs<WIDTH>(heads.out + head * heads.out_stride, at, runs);
}

template <int WIDTH>
__device__ __forceinline__ void rotate_token(const Heads& q, const Heads& k, int num_heads,
                                             int num_kv_heads, const float* __restrict__ angles,
                                             int half) {
  const int num_lanes = (num_heads + num_kv_heads) * LANES<WIDTH>;
  for (int i = threadIdx.x; i < num_lanes; i += blockDim.x) {
    const int head = i / LANES<WIDTH>;
    const int lane = i % LANES<WIDTH>;
    if (head < num_heads) {
      rotate_head<WIDTH>(q, head, lane, angles, half);
    } else {
      rotate_head<WIDTH>(k, head - num_heads, lane, angles, half);
    }
  }
}

// At most 40 registers, so that 1536 threads of an SM have loads under way.
extern "C" __global__ void __launch_bounds__(512, 3)
    KERNEL_NAME(rope)(const scalar_t* q,                        // [tokens, num_heads, HEAD_DIM]
                      const scalar_t* k,                        // [tokens, num_kv_heads, HEAD_DIM]
                      const int64_t* __restrict__ positions,    // [tokens]
                      const float* __restrict__ cos_sin_cache,  // [max_position, rotary_dim]
                      scalar_t* q_out,                          // as q, which it may be
                      scalar_t* k_out,                          // as k, which it may be
                      int64_t q_token_stride, int64_t q_head_stride, int64_t k_token_stride,
                      int64_t k_head_stride, int64_t q_out_token_stride, int64_t q_out_head_stride,
                      int64_t k_out_token_stride, int64_t k_out_head_stride, int64_t cos_sin_stride,
                      int num_heads, int num_kv_heads, int rotary_dim) {
  const int64_t token = blockIdx.x;
  const float* angles = cos_sin_cache + positions[token] * cos_sin_stride;
  const int half = rotary_dim / 2;
  const Heads queries = {q + token * q_token_stride, q_out + token * q_out_token_stride,
                         q_head_stride, q_out_head_stride};
  const Heads keys = {k + token * k_token_stride, k_out + token * k_out_token_stride, k_head_stride,
                      k_out_head_stride};
  const bool aligned = is_aligned(q, q_token_stride, q_head_stride) &&
                       is_aligned(k, k_token_stride, k_head_stride) &&
                       is_aligned(q_out, q_out_token_stride, q_out_head_stride) &&
                       is_aligned(k_out, k_out_token_stride, k_out_head_stride) &&
                       angles_are_aligned(cos_sin_cache, cos_sin_stride, half);
  if (aligned) {
    rotate_token<WIDE>(queries, keys, num_heads, num_kv_heads, angles, half);
  } else {
    rotate_token<1>(queries, keys, num_heads, num_kv_heads, angles, half);
  }
}
