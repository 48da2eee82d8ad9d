// CUDA's words for a C++ compiler that knows none of them: what a kernel may use but for ptx.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "block.h"
#include "launch.h"

#undef __shared__
#define __shared__ static __attribute__((section("shared_memory")))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

constexpr int warpSize = 32;

// Synchronisation.

inline void __syncthreads() { cuda_on_cpu::barrier(0); }
inline int __syncthreads_count(int predicate) { return cuda_on_cpu::barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return cuda_on_cpu::barrier(predicate != 0) > 0; }
inline int __syncthreads_and(int predicate) { return cuda_on_cpu::barrier(predicate == 0) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_on_cpu::meet("__syncwarp", mask, [](void**, uint32_t) {}, nullptr);
}

// Functions of a warp.

namespace cuda_on_cpu {

struct Shuffle {
  uint64_t value, result;
  int source;  // the lane it reads
};

inline void shuffle(void** operands, uint32_t mask) {
  for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
    Shuffle& own = *static_cast<Shuffle*>(operands[__builtin_ctz(lanes)]);
    if (!(mask >> own.source & 1)) {
      fail("shuffle: lane %d reads lane %d, which is not among the lanes %08x that take part",
           __builtin_ctz(lanes), own.source, mask);
    }
    own.result = static_cast<Shuffle*>(operands[own.source])->value;
  }
}

template <typename T>
T shuffled_value(const char* what, unsigned mask, T value, int source, int width, bool inside) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  if (width < 1 || width > LANES || (width & (width - 1))) fail("%s: width %d", what, width);
  Shuffle own = {0, 0, inside ? source : own_lane()};
  memcpy(&own.value, &value, sizeof(T));
  meet(what, mask, shuffle, &own);
  memcpy(&value, &own.result, sizeof(T));
  return value;
}

struct Vote {
  bool predicate;
  unsigned result;
};

inline void vote(void** operands, uint32_t mask) {
  unsigned ballot = 0;
  for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    if (static_cast<Vote*>(operands[lane])->predicate) ballot |= 1u << lane;
  }
  for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
    static_cast<Vote*>(operands[__builtin_ctz(lanes)])->result = ballot;
  }
}

// Each has a meeting of its own: all lanes of a warp must be in the same function.
template <int KIND>
unsigned ballot_of(const char* what, unsigned mask, bool predicate) {
  Vote own = {predicate, 0};
  meet(what, mask, [](void** operands, uint32_t lanes) { vote(operands, lanes); }, &own);
  return own.result;
}

}  // namespace cuda_on_cpu

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = cuda_on_cpu::own_lane() / width * width;
  return cuda_on_cpu::shuffled_value("__shfl_sync", mask, value,
                                     first + (source & (width - 1)), width, true);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffled_value("__shfl_up_sync", mask, value, source, width,
                                     source >= lane / width * width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffled_value("__shfl_down_sync", mask, value, source, width,
                                     source < lane / width * width + width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane ^ lane_mask;
  return cuda_on_cpu::shuffled_value("__shfl_xor_sync", mask, value, source, width,
                                     source < lane / width * width + width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot_of<0>("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot_of<1>("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot_of<2>("__all_sync", mask, predicate == 0) == 0;
}

// Atomics: one thread runs at a time.

namespace cuda_on_cpu {
template <typename T>
T exchange(T* address, T value) {
  need_aligned("atomic", address, sizeof(T));
  const T old = *address;
  *address = value;
  return old;
}
}  // namespace cuda_on_cpu

template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, *address + value);
}
template <typename T>
T atomicSub(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, *address - value);
}
template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, *address < value ? value : *address);
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, value < *address ? value : *address);
}
template <typename T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, value);
}
template <typename T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, *address == compare ? value : *address);
}
template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return cuda_on_cpu::exchange<T>(address, *address | value);
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return cuda_on_cpu::exchange<unsigned>(address, *address >= last ? 0 : *address + 1);
}

// Loads and stores with a hint to the caches, which must be aligned like any others.

template <typename T>
T __ldg(const T* pointer) {
  cuda_on_cpu::need_aligned("__ldg", pointer, sizeof(T));
  return *pointer;
}
template <typename T>
T __ldcs(const T* pointer) {
  return __ldg(pointer);
}
template <typename T>
T __ldcg(const T* pointer) {
  return __ldg(pointer);
}
template <typename T>
void __stcs(T* pointer, T value) {
  cuda_on_cpu::need_aligned("__stcs", pointer, sizeof(T));
  *pointer = value;
}
template <typename T>
void __stcg(T* pointer, T value) {
  __stcs(pointer, value);
}

// Bits and numbers.

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __uint_as_float(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
// Macros, since the C library has some of these names for itself.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __fdividef(x, y) ((x) / (y))
#define __frcp_rn(x) (1.0f / (x))
#define __fsqrt_rn(x) sqrtf(x)
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define __fmul_rn(x, y) ((x) * (y))
#define __fadd_rn(x, y) ((x) + (y))
#define __builtin_assume(x)
#define __trap() cuda_on_cpu::fail("__trap")
