// What the kernels that touch each row once share: runs of elements that are moved in one
// instruction, and the test whether rows stand where that is allowed.
#pragma once

#include "common.cuh"

// WIDTH neighbours, moved in one instruction of at most 16 bytes (two for 8 floats).
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Run {
  T values[WIDTH];
};

template <int WIDTH, typename T>
__device__ __forceinline__ Run<T, WIDTH> load_run(const T* from) {
  return *reinterpret_cast<const Run<T, WIDTH>*>(from);
}

template <int WIDTH, typename T>
__device__ __forceinline__ void store_run(T* to, const Run<T, WIDTH>& run) {
  *reinterpret_cast<Run<T, WIDTH>*>(to) = run;
}

// Elements in the widest run.
constexpr int WIDE = Pack<scalar_t>::SIZE;

// Whether a tensor's rows all start at multiples of 16 bytes. The same answer in every thread, so
// branching on it costs next to nothing. Strides are in elements.
template <typename T, typename... Strides>
__device__ __forceinline__ bool is_aligned(const T* base, Strides... strides) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && ((strides % Pack<T>::SIZE == 0) && ...);
}
