// rope and kv_write in one: turns q and k by their positions and stores the turned k, and v, in the
// paged caches. Reads q, k and v once; k is written twice, to k_out and to its slot.
//
// Grid: (tokens). Block: up to 512 threads, a multiple of 32, which share out the lanes of all
// heads of q, k and v (HEAD_DIM / 2 channel pairs a head, a pack of 16 bytes of pairs a lane).
// Shared memory: none.
// Compile with: DTYPE=bf16 | fp16 | fp32; HEAD_DIM=64 | 80 | 96 | 128 | 256.
// SMs: 80 and up.
// Numerics: the rotation in fp32, rounded to DTYPE once; v is copied bit by bit.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 -DHEAD_DIM=64 rope_kv_write.cu

#include "common.cuh"

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64, 80, 96, 128 or 256"
#endif

#include "rope.cuh"
#include "slots.cuh"

// Heads of one token, which are read, written turned (null: they are not), and cached (null: not).
struct Heads {
  const scalar_t* in;
  scalar_t* out;
  scalar_t* slot;
  int64_t stride;
  int64_t out_stride;
};

template <int WIDTH>
__device__ __forceinline__ void write_head(const Heads& heads, int64_t head, int lane,
                                           int64_t slot_head_stride,
                                           const float* __restrict__ angles, int half) {
  const Channels at = channels_of<WIDTH>(lane, half);
  Runs<WIDTH> runs = load_runs<WIDTH>(heads.in + head * heads.stride, at);
  if (heads.out != nullptr) {
    turn<WIDTH>(runs, at, angles, half);
    store_runs<WIDTH>(heads.out + head * heads.out_stride, at, runs);
  }
  if (heads.slot != nullptr) store_runs<WIDTH>(heads.slot + head * slot_head_stride, at, runs);
}

template <int WIDTH>
__device__ __forceinline__ void write_token(const Heads& q, const Heads& k, const Heads& v,
                                            int num_heads, int num_kv_heads,
                                            int64_t slot_head_stride,
                                            const float* __restrict__ angles, int half) {
  const int num_lanes = (num_heads + 2 * num_kv_heads) * LANES<WIDTH>;
  for (int i = threadIdx.x; i < num_lanes; i += blockDim.x) {
    const int head = i / LANES<WIDTH>;
    const int lane = i % LANES<WIDTH>;
    const int k_head = head - num_heads;
    const int v_head = k_head - num_kv_heads;
    if (k_head < 0) {
      write_head<WIDTH>(q, head, lane, slot_head_stride, angles, half);
    } else if (v_head < 0) {
      write_head<WIDTH>(k, k_head, lane, slot_head_stride, angles, half);
    } else {
      write_head<WIDTH>(v, v_head, lane, slot_head_stride, angles, half);
    }
  }
}

extern "C" __global__ void __launch_bounds__(512) KERNEL_NAME(rope_kv_write)(
    const scalar_t* q,                         // [tokens, num_heads, HEAD_DIM]
    const scalar_t* k,                         // [tokens, num_kv_heads, HEAD_DIM]
    const scalar_t* __restrict__ v,            // [tokens, num_kv_heads, HEAD_DIM]
    const int64_t* __restrict__ positions,     // [tokens]
    const float* __restrict__ cos_sin_cache,   // [max_position, rotary_dim]
    scalar_t* __restrict__ k_cache,            // [blocks, num_kv_heads, block_size, HEAD_DIM]
    scalar_t* __restrict__ v_cache,            // [blocks, num_kv_heads, block_size, HEAD_DIM]
    const int64_t* __restrict__ slot_mapping,  // [tokens]; -1: write nothing to the caches
    scalar_t* q_out,                           // as q, which it may be
    scalar_t* k_out,                           // as k, which it may be
    int64_t q_token_stride, int64_t q_head_stride, int64_t k_token_stride, int64_t k_head_stride,
    int64_t v_token_stride, int64_t v_head_stride, int64_t q_out_token_stride,
    int64_t q_out_head_stride, int64_t k_out_token_stride, int64_t k_out_head_stride,
    int64_t cos_sin_stride, int64_t k_block_stride, int64_t v_block_stride, int num_heads,
    int num_kv_heads, int rotary_dim, int block_shift) {
  const int64_t token = blockIdx.x;
  const float* angles = cos_sin_cache + positions[token] * cos_sin_stride;
  const int half = rotary_dim / 2;
  const int64_t slot = slot_mapping[token];
  scalar_t* k_slot = nullptr;
  scalar_t* v_slot = nullptr;
  if (slot >= 0) {
    k_slot = k_cache + slot_offset(slot, k_block_stride, block_shift);
    v_slot = v_cache + slot_offset(slot, v_block_stride, block_shift);
  }
  const Heads queries = {q + token * q_token_stride, q_out + token * q_out_token_stride, nullptr,
                         q_head_stride, q_out_head_stride};
  const Heads keys = {k + token * k_token_stride, k_out + token * k_out_token_stride, k_slot,
                      k_head_stride, k_out_head_stride};
  const Heads values = {v + token * v_token_stride, nullptr, v_slot, v_head_stride, 0};
  const int64_t slot_head_stride = int64_t{HEAD_DIM} << block_shift;
  const bool aligned = is_aligned(q, q_token_stride, q_head_stride) &&
                       is_aligned(k, k_token_stride, k_head_stride) &&
                       is_aligned(v, v_token_stride, v_head_stride) &&
                       is_aligned(q_out, q_out_token_stride, q_out_head_stride) &&
                       is_aligned(k_out, k_out_token_stride, k_out_head_stride) &&
                       is_aligned(k_cache, k_block_stride) && is_aligned(v_cache, v_block_stride) &&
                       angles_are_aligned(cos_sin_cache, cos_sin_stride, half);
  if (aligned) {
    write_token<WIDE>(queries, keys, values, num_heads, num_kv_heads, slot_head_stride, angles,
                      half);
  } else {
    write_token<1>(queries, keys, values, num_heads, num_kv_heads, slot_head_stride, angles, half);
  }
}
