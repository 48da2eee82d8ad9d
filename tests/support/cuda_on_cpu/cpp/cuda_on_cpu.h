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

// Where things are that a kernel names without having them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// What runtime.cpp does for a kernel.
namespace cuda_on_cpu {

extern unsigned char dynamic_shared[];

// Ends the launch; the message is given the block and the thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
void need_aligned(const char* what, const void* pointer, size_t bytes);
void need_shared(const char* what, const void* pointer, size_t bytes);

// Waits for all threads of the block that have not returned. Returns the sum of their values.
int barrier(int value);
int own_lane();
void sync_warp(uint32_t mask);
uint64_t shuffle(const char* what, uint32_t mask, uint64_t value, int source);
uint32_t ballot(const char* what, uint32_t mask, bool predicate);

// cp.async: `global` null means zeros. ldmatrix, movmatrix, mma: as ptx.cuh says.
void start_copy(void* shared, const void* global);
void end_copy_group();
void finish_copies(int pending);
void load_matrices(uint32_t* r, const void* row, bool transposed);
uint32_t transpose_matrix(uint32_t r);
void multiply_fp16(float* c, const uint32_t* a, const uint32_t* b);
void multiply_bf16(float* c, const uint32_t* a, const uint32_t* b);

}  // namespace cuda_on_cpu

#undef __shared__
#define __shared__ static __attribute__((section("shared_memory")))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

// Synchronisation.

inline void __syncthreads() { cuda_on_cpu::barrier(0); }
inline int __syncthreads_count(int predicate) { return cuda_on_cpu::barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return cuda_on_cpu::barrier(predicate != 0) > 0; }
inline int __syncthreads_and(int predicate) { return cuda_on_cpu::barrier(predicate == 0) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_on_cpu::sync_warp(mask); }

// Shuffles. `inside`: whether the source is in the lane's part of the warp.

namespace cuda_on_cpu {
template <typename T>
T shuffled(const char* what, unsigned mask, T value, int source, int width, bool inside) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  if (width < 1 || width > warpSize || (width & (width - 1))) fail("%s: width %d", what, width);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shuffle(what, mask, bits, inside ? source : own_lane());
  memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace cuda_on_cpu

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = cuda_on_cpu::own_lane() / width * width;
  return cuda_on_cpu::shuffled("__shfl_sync", mask, value, first + (source & (width - 1)), width,
                               true);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffled("__shfl_up_sync", mask, value, source, width,
                               source >= lane / width * width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffled("__shfl_down_sync", mask, value, source, width,
                               source < lane / width * width + width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = cuda_on_cpu::own_lane(), source = lane ^ lane_mask;
  return cuda_on_cpu::shuffled("__shfl_xor_sync", mask, value, source, width,
                               source < lane / width * width + width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::ballot("__all_sync", mask, predicate == 0) == 0;
}

// Atomics: one thread runs at a time. None of them is a race.

namespace cuda_on_cpu {
template <typename T, typename F>
__attribute__((noinline, no_sanitize_thread)) T atomic(T* address, F change) {
  need_aligned("atomic", address, sizeof(T));
  const T old = *address;
  *address = change(old);
  return old;
}
}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ATOMIC(name, result)                                \
  template <typename T>                                                 \
  T name(T* address, std::common_type_t<T> value) {                     \
    return cuda_on_cpu::atomic(address, [=](T old) { return result; }); \
  }
CUDA_ON_CPU_ATOMIC(atomicAdd, old + value)
CUDA_ON_CPU_ATOMIC(atomicSub, old - value)
CUDA_ON_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_CPU_ATOMIC(atomicOr, old | value)
CUDA_ON_CPU_ATOMIC(atomicExch, (static_cast<void>(old), value))
CUDA_ON_CPU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
template <typename T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  return cuda_on_cpu::atomic(address, [=](T old) { return old == compare ? value : old; });
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
