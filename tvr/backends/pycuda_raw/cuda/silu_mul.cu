// Gated activation of the MLP: out = gate / (1 + exp(-gate)) * up, where a row of x is its gate
// columns, then its up columns. Reads x once and writes out once.
//
// Grid: (tokens, parts of a row: packs of 16 bytes / block, rounded up). Block: up to 256 threads,
// each for one pack of the result. Shared memory: none.
// Compile with: DTYPE=bf16 | fp16 | fp32.
// SMs: 80 and up.
// Numerics: fp32, rounded to DTYPE once. exp never sees a positive number, so nothing overflows.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 silu_mul.cu

#include "rows.cuh"
#include "silu.cuh"

template <int WIDTH>
__device__ __forceinline__ void silu_mul_run(const scalar_t* __restrict__ gate,
                                             const scalar_t* __restrict__ up,
                                             scalar_t* __restrict__ out, int column) {
  const Run<scalar_t, WIDTH> gates = load_run<WIDTH>(gate + column);
  const Run<scalar_t, WIDTH> ups = load_run<WIDTH>(up + column);
  Run<scalar_t, WIDTH> results;
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) results.values[e] = silu_mul(gates.values[e], ups.values[e]);
  store_run<WIDTH>(out + column, results);
}

extern "C" __global__ void __launch_bounds__(256)
    KERNEL_NAME(silu_mul)(const scalar_t* __restrict__ x,  // [tokens, 2 * width], stride x_stride
                          scalar_t* __restrict__ out,      // [tokens, width], stride out_stride
                          int64_t x_stride, int64_t out_stride, int width) {
  const bool aligned = is_aligned(x, x_stride, width) && is_aligned(out, out_stride);
  const scalar_t* gate = x + blockIdx.x * x_stride;
  const scalar_t* up = gate + width;
  out += blockIdx.x * out_stride;
  const int first = blockIdx.y * blockDim.x;  // pack of this block
  if (aligned) {
    const int column = (first + threadIdx.x) * WIDE;
    if (column < width) silu_mul_run<WIDE>(gate, up, out, column);
    return;
  }
  const int end = min(width, (first + static_cast<int>(blockDim.x)) * WIDE);
  for (int column = first * WIDE + threadIdx.x; column < end; column += blockDim.x) {
    silu_mul_run<1>(gate, up, out, column);
  }
}
