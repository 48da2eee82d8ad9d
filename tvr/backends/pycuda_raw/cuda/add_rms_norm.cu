// Residual add and RMSNorm in one: residual_out = x + residual, out = norm(residual_out) * weight.
// Reads both inputs once and writes both outputs once.
//
// Grid: (rows). Block: a thread for every two packs of 16 bytes of a row, at most 1024; a multiple
// of 32. Shared memory: 128 bytes, static.
// Compile with: DTYPE=bf16 | fp16 | fp32.
// SMs: 80 and up.
// Numerics: the sum in fp32, rounded to DTYPE before the norm reads it; the norm as in rms_norm.cu.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 add_rms_norm.cu

#include "norm.cuh"

__device__ __forceinline__ RowPack rounded_sum(const RowPack& a, const RowPack& b) {
  RowPack sum;
#pragma unroll
  for (int e = 0; e < WIDE; ++e) {
    sum.values[e] = from_float<scalar_t>(to_float(a.values[e]) + to_float(b.values[e]));
  }
  return sum;
}

// residual and residual_out may be one tensor. A thread reads all it adds before it writes, and no
// thread reads what another writes.
template <bool ALIGNED>
__device__ __forceinline__ void add_norm_row(const scalar_t* __restrict__ x,
                                             const scalar_t* residual,
                                             const scalar_t* __restrict__ weight, scalar_t* out,
                                             scalar_t* residual_out, int hidden, float eps,
                                             float* warp_sums) {
  RowPack kept[KEPT];
  RowPack added[KEPT];
  RowPack weights[KEPT];
  // All loads first: none may pass a store that could go to the same place.
  load_kept<ALIGNED>(kept, x, hidden);
  load_kept<ALIGNED>(added, residual, hidden);
  load_kept<ALIGNED>(weights, weight, hidden);
  float sum = 0.0f;
  if constexpr (ALIGNED) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      kept[k] = rounded_sum(kept[k], added[k]);
      store_pack<true>(residual_out, threadIdx.x + k * blockDim.x, hidden, kept[k]);
      sum = add_squares(sum, kept[k]);
    }
  }
  for (int i = first_not_kept<ALIGNED>(); i * WIDE < hidden; i += blockDim.x) {
    const RowPack total =
        rounded_sum(load_pack<ALIGNED>(x, i, hidden), load_pack<ALIGNED>(residual, i, hidden));
    store_pack<ALIGNED>(residual_out, i, hidden, total);
    sum = add_squares(sum, total);
  }
  write_normed<ALIGNED>(kept, weights, residual_out, sum, weight, out, hidden, eps, warp_sums);
}

extern "C" __global__ void __launch_bounds__(1024)
    KERNEL_NAME(add_rms_norm)(const scalar_t* __restrict__ x,  // [rows, hidden], stride x_stride
                              const scalar_t* residual,  // [rows, hidden], stride residual_stride
                              const scalar_t* __restrict__ weight,  // [hidden]
                              scalar_t* __restrict__ out,  // [rows, hidden], stride out_stride
                              scalar_t* residual_out,  // [rows, hidden], stride residual_out_stride
                              int64_t x_stride, int64_t residual_stride, int64_t out_stride,
                              int64_t residual_out_stride, int hidden, float eps) {
  __shared__ float warp_sums[MAX_WARPS];
  const bool aligned = is_aligned(x, x_stride, hidden) && is_aligned(residual, residual_stride) &&
                       is_aligned(out, out_stride) &&
                       is_aligned(residual_out, residual_out_stride) && is_aligned(weight);
  x += blockIdx.x * x_stride;
  residual += blockIdx.x * residual_stride;
  out += blockIdx.x * out_stride;
  residual_out += blockIdx.x * residual_out_stride;
  if (aligned) {
    add_norm_row<true>(x, residual, weight, out, residual_out, hidden, eps, warp_sums);
  } else {
    add_norm_row<false>(x, residual, weight, out, residual_out, hidden, eps, warp_sums);
  }
}
