// What all kernels share: the dtype they are compiled for, their names, conversions, sums.
//
// Compile with -DDTYPE=bf16 | fp16 | fp32, and -DHEAD_DIM=64 | 80 | 96 | 128 | 256 where a kernel
// has heads. KERNEL_NAME(rope) is then rope_bf16_h64, so that a profile says what ran.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"

#ifndef DTYPE
#error "compile with -DDTYPE=bf16, fp16 or fp32"
#endif

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
using scalar_t = DTYPE;  // of activations, weights and the KV cache

#define JOIN_(a, b, c) a##_##b##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#ifdef HEAD_DIM
static_assert(HEAD_DIM == 64 || HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 128 ||
                  HEAD_DIM == 256,
              "no kernel was written for this head_dim");
#define HEAD_SUFFIX_(d) _h##d
#define HEAD_SUFFIX(d) HEAD_SUFFIX_(d)
#define KERNEL_NAME(base) JOIN(base, DTYPE, HEAD_SUFFIX(HEAD_DIM))
#else
#define KERNEL_NAME(base) JOIN(base, DTYPE, )
#endif

constexpr int WARP = 32;
constexpr float LN_2 = 0.693147180559945f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

// Writes element `i` of a tensor whose dtype the launch says: 0 fp32, 1 fp16, 2 bf16.
__device__ __forceinline__ void store_as(void* to, int64_t i, float x, int dtype) {
  if (dtype == 0) static_cast<float*>(to)[i] = x;
  if (dtype == 1) static_cast<fp16*>(to)[i] = from_float<fp16>(x);
  if (dtype == 2) static_cast<bf16*>(to)[i] = from_float<bf16>(x);
}

// 16 bytes of T, loaded and stored at once.
template <typename T>
struct alignas(16) Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  T values[SIZE];
};

template <typename T>
struct alignas(4) Two {
  T values[2];
};

// Two 16-bit numbers as tensor cores take them: in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(T low, T high) {
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit numbers");
  const Two<T> two = {{low, high}};
  return *reinterpret_cast<const uint32_t*>(&two);
}

template <typename T = scalar_t>
__device__ __forceinline__ uint32_t pack_floats(float low, float high) {
  return pack_two(from_float<T>(low), from_float<T>(high));
}

// The sum over the warp, in every lane; the order of adding is always the same.
__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}
