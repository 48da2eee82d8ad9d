// silu(gate) * up = gate / (1 + exp(-gate)) * up, in fp32 and rounded once.
#pragma once

#include <type_traits>

#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// exp of a number that is not positive. The rounding of x * LOG2_E, which the power of two makes at
// most 2^-17 of the result, does not show in half precision. Sparing it nearly doubles the
// instructions of a kernel that is to keep up with memory.
__device__ __forceinline__ float exp_not_positive(float x) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return expf(x);
  } else {
    return exp2_fast(x * LOG2_E);
  }
}

// With e = exp(-|gate|), 1 / (1 + exp(-gate)) is 1 / (1 + e), or e / (1 + e) for a negative gate.
// So the divisor lies between 1 and 2, where the fast division is good to 2 ulps.
__device__ __forceinline__ scalar_t silu_mul(scalar_t gate, scalar_t up) {
  const float x = to_float(gate);
  const float e = exp_not_positive(-fabsf(x));
  const float silu = __fdividef(x < 0.0f ? x * e : x, 1.0f + e);
  return from_float<scalar_t>(silu * to_float(up));
}
