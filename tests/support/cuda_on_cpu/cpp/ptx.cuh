// The functions of ptx.cuh without PTX.
//
// A copy of cp.async is done when it has been waited for, and its place holds NaN until then: what
// forgets to wait, or forgets the barrier behind the wait, computes NaN.
#pragma once

#include "cuda_on_cpu.h"

#define DYNAMIC_SHARED(name) unsigned char* const name = cuda_on_cpu::dynamic_shared

inline uint32_t shared_address(const void* pointer) {
  cuda_on_cpu::need_shared("shared_address", pointer, 1);
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               cuda_on_cpu::dynamic_shared);
}

inline void cp_async_16(void* shared, const void* global, bool valid) {
  cuda_on_cpu::need_aligned("cp_async_16", global, 16);  // also where nothing is read
  cuda_on_cpu::start_copy(shared, valid ? global : nullptr);
}
inline void cp_async_16_cached(void* shared, const void* global, bool valid) {
  cp_async_16(shared, global, valid);
}
inline void cp_async_commit() { cuda_on_cpu::end_copy_group(); }
template <int PENDING>
inline void cp_async_wait() {
  cuda_on_cpu::finish_copies(PENDING);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrices(r, row, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrices(r, row, true);
}
inline uint32_t movmatrix_trans(uint32_t r) { return cuda_on_cpu::transpose_matrix(r); }

template <typename T>
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  if (std::is_same_v<T, __half>) {
    cuda_on_cpu::multiply_fp16(c, a, b);
  } else {
    cuda_on_cpu::multiply_bf16(c, a, b);
  }
}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < FLT_MIN ? 0.0f : y;
}

inline uint4 load_16_once(const void* global) {
  cuda_on_cpu::need_aligned("load_16_once", global, 16);
  return *static_cast<const uint4*>(global);
}

inline uint4 load_16_once_in_order(const void* global) {
  cuda_on_cpu::need_aligned("load_16_once_in_order", global, 16);
  return *static_cast<const uint4*>(global);
}

inline int count_arrival(int* counter, int more) { return atomicAdd(counter, more); }
