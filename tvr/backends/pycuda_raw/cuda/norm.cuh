// RMSNorm of one row by one block, whose threads keep the row in registers between the sum of its
// squares and its scaling.
//
// A thread has the packs (16 bytes) threadIdx.x, threadIdx.x + blockDim.x, ... of the row. Where
// rows are not aligned it has the same elements, read one by one: the order of the sum, and so
// every bit of the result, does not depend on where a row stands.
#pragma once

#include "rows.cuh"

// Packs of a thread that stay in registers. The rest of longer rows is read again, from L2, and so
// are rows that are not aligned.
constexpr int KEPT = 2;
constexpr int MAX_WARPS = 32;

using RowPack = Run<scalar_t, WIDE>;

// Pack `i` of a row, with zeros past the row's end.
template <bool ALIGNED>
__device__ __forceinline__ RowPack load_pack(const scalar_t* row, int i, int hidden) {
  RowPack pack;
  if constexpr (ALIGNED) {
    if (i * WIDE < hidden) return load_run<WIDE>(row + i * WIDE);
    for (int e = 0; e < WIDE; ++e) pack.values[e] = from_float<scalar_t>(0.0f);
  } else {
    for (int e = 0; e < WIDE; ++e) {
      const int column = i * WIDE + e;
      pack.values[e] = column < hidden ? row[column] : from_float<scalar_t>(0.0f);
    }
  }
  return pack;
}

template <bool ALIGNED>
__device__ __forceinline__ void store_pack(scalar_t* row, int i, int hidden, const RowPack& pack) {
  if constexpr (ALIGNED) {
    if (i * WIDE < hidden) store_run<WIDE>(row + i * WIDE, pack);
  } else {
    for (int e = 0; e < WIDE; ++e) {
      if (i * WIDE + e < hidden) row[i * WIDE + e] = pack.values[e];
    }
  }
}

// The first packs of a thread; none that are not aligned.
template <bool ALIGNED>
__device__ __forceinline__ void load_kept(RowPack (&kept)[KEPT], const scalar_t* row, int hidden) {
  if constexpr (ALIGNED) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      kept[k] = load_pack<true>(row, threadIdx.x + k * blockDim.x, hidden);
    }
  }
}

// The first pack of a thread that it does not keep.
template <bool ALIGNED>
__device__ __forceinline__ int first_not_kept() {
  return threadIdx.x + (ALIGNED ? KEPT * blockDim.x : 0);
}

__device__ __forceinline__ float add_squares(float sum, const RowPack& pack) {
#pragma unroll
  for (int e = 0; e < WIDE; ++e) {
    const float x = to_float(pack.values[e]);
    sum = fmaf(x, x, sum);
  }
  return sum;
}

// The sum over the block, in every thread. One barrier: each warp adds up all warps' sums itself.
__device__ __forceinline__ float block_sum(float x, float* warp_sums /* shared [MAX_WARPS] */) {
  x = warp_sum(x);
  const int lane = threadIdx.x % WARP;
  if (lane == 0) warp_sums[threadIdx.x / WARP] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / WARP ? warp_sums[lane] : 0.0f);
}

// What a row is multiplied by, given the sum of its squares. Division and root to 2 ulps each: an
// exact one would put a slow path behind the barrier.
__device__ __forceinline__ float norm_scale(float squares, int hidden, float eps) {
  return rsqrtf(__fdividef(squares, static_cast<float>(hidden)) + eps);
}

// Rounds where transformers does: the normalised row, then its product with the weight.
__device__ __forceinline__ scalar_t scaled(scalar_t x, float scale, scalar_t weight) {
  const scalar_t normed = from_float<scalar_t>(to_float(x) * scale);
  return from_float<scalar_t>(to_float(normed) * to_float(weight));
}

__device__ __forceinline__ RowPack scaled(const RowPack& x, float scale, const RowPack& weight) {
  RowPack out;
#pragma unroll
  for (int e = 0; e < WIDE; ++e) out.values[e] = scaled(x.values[e], scale, weight.values[e]);
  return out;
}

// Writes the normed row. `sum` is of the squares of this thread's elements, `kept` its first packs
// and `weights` those of the weight; what is not kept is read again from `row`.
template <bool ALIGNED>
__device__ __forceinline__ void write_normed(const RowPack (&kept)[KEPT],
                                             const RowPack (&weights)[KEPT], const scalar_t* row,
                                             float sum, const scalar_t* __restrict__ weight,
                                             scalar_t* __restrict__ out, int hidden, float eps,
                                             float* warp_sums) {
  const float scale = norm_scale(block_sum(sum, warp_sums), hidden, eps);
  if constexpr (ALIGNED) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      const RowPack normed = scaled(kept[k], scale, weights[k]);
      store_pack<true>(out, threadIdx.x + k * blockDim.x, hidden, normed);
    }
  }
  for (int i = first_not_kept<ALIGNED>(); i * WIDE < hidden; i += blockDim.x) {
    const RowPack x = load_pack<ALIGNED>(row, i, hidden);
    store_pack<ALIGNED>(out, i, hidden, scaled(x, scale, load_pack<ALIGNED>(weight, i, hidden)));
  }
}
