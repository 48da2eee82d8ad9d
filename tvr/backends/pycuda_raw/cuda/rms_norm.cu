// RMSNorm: out = x / sqrt(mean(x^2) + eps) * weight, for every row of x.
// Reads each row once and writes it once.
//
// Grid: (rows). Block: a thread for every two packs of 16 bytes of a row, at most 1024; a multiple
// of 32. Shared memory: 128 bytes, static.
// Compile with: DTYPE=bf16 | fp16 | fp32.
// SMs: 80 and up.
// Numerics: squares, their sum and the root in fp32; rounded to DTYPE after the division and again
// after the product with the weight.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 rms_norm.cu

#include "norm.cuh"

template <bool ALIGNED>
__device__ __forceinline__ void norm_row(const scalar_t* __restrict__ x,
                                         const scalar_t* __restrict__ weight, scalar_t* out,
                                         int hidden, float eps, float* warp_sums) {
  RowPack kept[KEPT];
  RowPack weights[KEPT];
  // All loads first: a thread that adds in between waits for memory once a pack.
  load_kept<ALIGNED>(kept, x, hidden);
  load_kept<ALIGNED>(weights, weight, hidden);
  float sum = 0.0f;
  if constexpr (ALIGNED) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) sum = add_squares(sum, kept[k]);
  }
  for (int i = first_not_kept<ALIGNED>(); i * WIDE < hidden; i += blockDim.x) {
    sum = add_squares(sum, load_pack<ALIGNED>(x, i, hidden));
  }
  write_normed<ALIGNED>(kept, weights, x, sum, weight, out, hidden, eps, warp_sums);
}

extern "C" __global__ void __launch_bounds__(1024)
    KERNEL_NAME(rms_norm)(const scalar_t* __restrict__ x,       // [rows, hidden], stride x_stride
                          const scalar_t* __restrict__ weight,  // [hidden]
                          scalar_t* __restrict__ out,           // [rows, hidden], stride out_stride
                          int64_t x_stride, int64_t out_stride, int hidden, float eps) {
  __shared__ float warp_sums[MAX_WARPS];
  const bool aligned =
      is_aligned(x, x_stride, hidden) && is_aligned(out, out_stride) && is_aligned(weight);
  x += blockIdx.x * x_stride;
  out += blockIdx.x * out_stride;
  if (aligned) {
    norm_row<true>(x, weight, out, hidden, eps, warp_sums);
  } else {
    norm_row<false>(x, weight, out, hidden, eps, warp_sums);
  }
}
