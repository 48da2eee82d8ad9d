// Copies each token's keys and values to its slot of the paged caches; a token of slot -1 is left
// out. Reads k and v once and writes as much.
//
// Grid: (tokens). Block: up to 512 threads, a multiple of 32, each for a pack of 16 bytes of k and
// the same of v. Shared memory: none.
// Compile with: DTYPE=bf16 | fp16 | fp32; HEAD_DIM=64 | 80 | 96 | 128 | 256.
// SMs: 80 and up.
// Numerics: none, bits are copied.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 -DHEAD_DIM=64 kv_write.cu

#include "common.cuh"

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64, 80, 96, 128 or 256"
#endif

#include "slots.cuh"

static_assert(HEAD_DIM % WIDE == 0, "a head must be packs of 16 bytes");

// Heads of one token: where they start and how far apart they are.
struct Heads {
  const scalar_t* first;
  int64_t stride;
};

template <int WIDTH>
__device__ __forceinline__ void write_token(const Heads& k, const Heads& v, scalar_t* k_slot,
                                            scalar_t* v_slot, int num_kv_heads,
                                            int64_t slot_head_stride) {
  constexpr int LANES = HEAD_DIM / WIDTH;
  for (int i = threadIdx.x; i < num_kv_heads * LANES; i += blockDim.x) {
    const int64_t head = i / LANES;
    const int channel = i % LANES * WIDTH;
    const Run<scalar_t, WIDTH> key = load_run<WIDTH>(k.first + head * k.stride + channel);
    const Run<scalar_t, WIDTH> value = load_run<WIDTH>(v.first + head * v.stride + channel);
    const int64_t to = head * slot_head_stride + channel;
    store_run<WIDTH>(k_slot + to, key);
    store_run<WIDTH>(v_slot + to, value);
  }
}

extern "C" __global__ void __launch_bounds__(512) KERNEL_NAME(kv_write)(
    const scalar_t* __restrict__ k,            // [tokens, num_kv_heads, HEAD_DIM]
    const scalar_t* __restrict__ v,            // [tokens, num_kv_heads, HEAD_DIM]
    scalar_t* __restrict__ k_cache,            // [blocks, num_kv_heads, block_size, HEAD_DIM]
    scalar_t* __restrict__ v_cache,            // [blocks, num_kv_heads, block_size, HEAD_DIM]
    const int64_t* __restrict__ slot_mapping,  // [tokens]; -1: write nothing
    int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride,
    int64_t k_block_stride, int64_t v_block_stride, int num_kv_heads, int block_shift) {
  const int64_t token = blockIdx.x;
  const int64_t slot = slot_mapping[token];
  if (slot < 0) return;
  const Heads keys = {k + token * k_token_stride, k_head_stride};
  const Heads values = {v + token * v_token_stride, v_head_stride};
  scalar_t* k_slot = k_cache + slot_offset(slot, k_block_stride, block_shift);
  scalar_t* v_slot = v_cache + slot_offset(slot, v_block_stride, block_shift);
  const int64_t slot_head_stride = int64_t{HEAD_DIM} << block_shift;
  const bool aligned = is_aligned(k, k_token_stride, k_head_stride) &&
                       is_aligned(v, v_token_stride, v_head_stride) &&
                       is_aligned(k_cache, k_block_stride) && is_aligned(v_cache, v_block_stride);
  if (aligned) {
    write_token<WIDE>(keys, values, k_slot, v_slot, num_kv_heads, slot_head_stride);
  } else {
    write_token<1>(keys, values, k_slot, v_slot, num_kv_heads, slot_head_stride);
  }
}
