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
  using namespace cuda_on_cpu;
  need_aligned("cp_async_16", shared, 16);
  need_aligned("cp_async_16", global, 16);
  need_shared("cp_async_16", shared, 16);
  if (is_shared(global, 1)) fail("cp_async_16: its source %p is in shared memory", global);
  memset(shared, POISON, 16);
  Thread& thread = block.threads[block.current];
  thread.copies.push_back({shared, valid ? global : nullptr, thread.num_groups});
}

inline void cp_async_16_cached(void* shared, const void* global, bool valid) {
  cp_async_16(shared, global, valid);
}

inline void cp_async_commit() { ++cuda_on_cpu::block.threads[cuda_on_cpu::block.current].num_groups; }

template <int PENDING>
inline void cp_async_wait() {
  cuda_on_cpu::finish_copies(PENDING);
}

namespace cuda_on_cpu {

struct Matrices {
  const void* row;
  uint32_t* r;
};

template <bool TRANSPOSED>
void load_matrices(void** operands, uint32_t) {
  for (int lane = 0; lane < LANES; ++lane) {
    const Matrices& own = *static_cast<Matrices*>(operands[lane]);
    for (int j = 0; j < 4; ++j) {
      const auto row = [&](int i) {
        return static_cast<const uint16_t*>(static_cast<Matrices*>(operands[8 * j + i])->row);
      };
      const int g = lane / 4, t = lane % 4 * 2;
      const uint32_t low = TRANSPOSED ? row(t)[g] : row(g)[t];
      const uint32_t high = TRANSPOSED ? row(t + 1)[g] : row(g)[t + 1];
      own.r[j] = low | high << 16;
    }
  }
}

template <bool TRANSPOSED>
void ldmatrix(const char* what, uint32_t* r, const void* row) {
  need_aligned(what, row, 16);
  need_shared(what, row, 16);
  Matrices own = {row, r};
  meet(what, ~0u, load_matrices<TRANSPOSED>, &own, true);
}

}  // namespace cuda_on_cpu

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::ldmatrix<false>("ldmatrix_x4", r, row);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::ldmatrix<true>("ldmatrix_x4_trans", r, row);
}

inline uint32_t movmatrix_trans(uint32_t r) {
  uint32_t own[2] = {r, 0};
  const auto transpose = [](void** operands, uint32_t) {
    const auto at = [&](int row, int column) {
      const uint32_t pair = *static_cast<uint32_t*>(operands[row * 4 + column / 2]);
      return column % 2 ? pair >> 16 : pair & 0xffffu;
    };
    for (int lane = 0; lane < cuda_on_cpu::LANES; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      static_cast<uint32_t*>(operands[lane])[1] = at(t, g) | at(t + 1, g) << 16;
    }
  };
  cuda_on_cpu::meet("movmatrix_trans", ~0u, transpose, own, true);
  return own[1];
}

namespace cuda_on_cpu {

inline float widen(__nv_bfloat16, uint32_t bits) { return __uint_as_float(bits << 16); }
inline float widen(__half, uint32_t bits) {
  const uint32_t size = (bits & 0x7fffu) << 13;
  // With the exponent of fp16 read as that of fp32 a number is 2^112 times too small.
  const float finite = __uint_as_float(size) * 0x1p112f;
  const float value = size >= 0x0f800000u ? __uint_as_float(size | 0x7f800000u) : finite;
  return bits & 0x8000u ? -value : value;
}

struct Product {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

template <typename T>
void multiply(void** operands, uint32_t) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < LANES; ++lane) {
    const Product& own = *static_cast<Product*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = t + i / 2 * 8;
      a[row][k] = widen(T(), own.a[i] & 0xffffu);
      a[row][k + 1] = widen(T(), own.a[i] >> 16);
      c[g + i / 2 * 8][t + i % 2] = own.c[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g] = widen(T(), own.b[i] & 0xffffu);
      b[t + i * 8 + 1][g] = widen(T(), own.b[i] >> 16);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < 4; ++i) {
      static_cast<Product*>(operands[lane])->c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  }
}

}  // namespace cuda_on_cpu

template <typename T>
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  cuda_on_cpu::Product own = {c, a, b};
  cuda_on_cpu::meet("mma_m16n8k16", ~0u, cuda_on_cpu::multiply<T>, &own, true);
}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < FLT_MIN ? 0.0f : y;
}

inline uint4 load_16_once(const void* global) {
  cuda_on_cpu::need_aligned("load_16_once", global, 16);
  return *static_cast<const uint4*>(global);
}
