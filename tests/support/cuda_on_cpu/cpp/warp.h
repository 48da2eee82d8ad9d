// Functions of a warp: each lane brings its operands, the last to come computes all results.
#pragma once

#include "block.h"
#include "memory.h"

namespace cuda_on_cpu {

void sync_warp(uint32_t mask) {
  meet(
      "__syncwarp", mask,
      [](void**, uint32_t lanes) {
        // Only a whole warp's is counted as ordering its memory: the others' order is not kept.
        if (lanes == own_warp().live) ++own_warp().num_syncs;
      },
      nullptr);
}

struct Shuffle {
  uint64_t value, result;
  int source;
};

uint64_t shuffle(const char* what, uint32_t mask, uint64_t value, int source) {
  Shuffle own = {value, 0, source};
  meet(
      what, mask,
      [](void** operands, uint32_t present) {
        for (uint32_t lanes = present; lanes; lanes &= lanes - 1) {
          Shuffle& one = *static_cast<Shuffle*>(operands[__builtin_ctz(lanes)]);
          if (!(present >> one.source & 1)) {
            fail("shuffle: lane %d reads lane %d, which is not among the lanes %08x that take part",
                 __builtin_ctz(lanes), one.source, present);
          }
          one.result = static_cast<Shuffle*>(operands[one.source])->value;
        }
      },
      &own);
  return own.result;
}

struct Vote {
  bool predicate;
  uint32_t ballot;
};

uint32_t ballot(const char* what, uint32_t mask, bool predicate) {
  Vote own = {predicate, 0};
  meet(
      what, mask,
      [](void** operands, uint32_t present) {
        uint32_t all = 0;
        for (uint32_t lanes = present; lanes; lanes &= lanes - 1) {
          const int lane = __builtin_ctz(lanes);
          if (static_cast<Vote*>(operands[lane])->predicate) all |= 1u << lane;
        }
        for (uint32_t lanes = present; lanes; lanes &= lanes - 1) {
          static_cast<Vote*>(operands[__builtin_ctz(lanes)])->ballot = all;
        }
      },
      &own);
  return own.ballot;
}

struct Matrices {
  const void* row;
  uint32_t* r;
};

template <bool TRANSPOSED>
void load_all_matrices(void** operands, uint32_t) {
  for (int lane = 0; lane < LANES; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int j = 0; j < 4; ++j) {
      const auto at = [&](int row, int column) -> uint32_t {
        return static_cast<const uint16_t*>(
            static_cast<Matrices*>(operands[8 * j + row])->row)[column];
      };
      static_cast<Matrices*>(operands[lane])->r[j] =
          TRANSPOSED ? at(t, g) | at(t + 1, g) << 16 : at(g, t) | at(g, t + 1) << 16;
    }
  }
}

void load_matrices(uint32_t* r, const void* row, bool transposed) {
  need_aligned("ldmatrix", row, 16);
  need_shared("ldmatrix", row, 16);
  check_read(row, 16);
  Matrices own = {row, r};
  if (transposed) {
    meet("ldmatrix.trans", ~0u, load_all_matrices<true>, &own, true);
  } else {
    meet("ldmatrix", ~0u, load_all_matrices<false>, &own, true);
  }
}

uint32_t transpose_matrix(uint32_t r) {
  uint32_t own[2] = {r, 0};
  meet(
      "movmatrix", ~0u,
      [](void** operands, uint32_t) {
        const auto at = [&](int row, int column) {
          const uint32_t pair = *static_cast<uint32_t*>(operands[row * 4 + column / 2]);
          return column % 2 ? pair >> 16 : pair & 0xffffu;
        };
        for (int lane = 0; lane < LANES; ++lane) {
          const int g = lane / 4, t = lane % 4 * 2;
          static_cast<uint32_t*>(operands[lane])[1] = at(t, g) | at(t + 1, g) << 16;
        }
      },
      own, true);
  return own[1];
}

inline float widen_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

inline float widen_fp16(uint32_t bits) {
  const uint32_t size = (bits & 0x7fffu) << 13;
  // With the exponent of fp16 read as that of fp32, a number is 2^112 times too small.
  const float finite = __uint_as_float(size) * 0x1p112f;
  const float value = size >= 0x0f800000u ? __uint_as_float(size | 0x7f800000u) : finite;
  return bits & 0x8000u ? -value : value;
}

struct Product {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

template <float (*WIDEN)(uint32_t)>
void multiply_all(void** operands, uint32_t) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < LANES; ++lane) {
    const Product& own = *static_cast<Product*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = t + i / 2 * 8;
      a[row][k] = WIDEN(own.a[i] & 0xffffu);
      a[row][k + 1] = WIDEN(own.a[i] >> 16);
      c[g + i / 2 * 8][t + i % 2] = own.c[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g] = WIDEN(own.b[i] & 0xffffu);
      b[t + i * 8 + 1][g] = WIDEN(own.b[i] >> 16);
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

void multiply_fp16(float* c, const uint32_t* a, const uint32_t* b) {
  Product own = {c, a, b};
  meet("mma.fp16", ~0u, multiply_all<widen_fp16>, &own, true);
}

void multiply_bf16(float* c, const uint32_t* a, const uint32_t* b) {
  Product own = {c, a, b};
  meet("mma.bf16", ~0u, multiply_all<widen_bf16>, &own, true);
}

}  // namespace cuda_on_cpu
