// Sums of a warp's products of 8 weight rows with up to 8 rows of x, for linear.cu.
//
// Lane 4g + t has the 16 bytes of weight row g that start at byte 16t of 64; a step of the product
// takes these 64 bytes of every weight row and every row of x.
#pragma once

#include "common.cuh"

constexpr int TILE_FEATURES = 8;  // weight rows of a block: columns of one mma
constexpr int MAX_ROWS = 8;       // rows of x
constexpr int TILE = MAX_ROWS * TILE_FEATURES;
constexpr int STEP_BYTES = 64;  // of a row

// 64 bytes more than the 512 of a chunk: two rows' 64 bytes then lie in different banks.
constexpr int X_ROW_BYTES = 576;
static_assert(X_ROW_BYTES % 128 == 64, "rows g and g + 1 of a step must not share banks");

// fp16 and bf16, by tensor cores: as many instructions for 8 rows of x as for one.
//
// Which of the 16 numbers k of an mma is which column does not matter as long as x and weight
// agree. So the 8 columns that a lane loaded at once are its k of two mmas, 4 of each, and nothing
// is exchanged between lanes. x is the operand with 16 rows, of which 8 are zero: the other way
// round a tile would have 16 weight rows, too coarse to share 3,072 of them among 132 SMs.
template <typename T>
struct Sums {
  float first[4] = {0.f, 0.f, 0.f, 0.f};   // of two mmas, so that they need not wait for each other
  float second[4] = {0.f, 0.f, 0.f, 0.f};  // [2] and [3] are the rows of zeros

  // x: this step's 64 bytes of row 0, in shared memory.
  __device__ __forceinline__ void add(uint4 weights, const unsigned char* x, int num_rows) {
    const int lane = threadIdx.x % WARP;
    const int row = lane / 4;
    uint4 xs = make_uint4(0, 0, 0, 0);
    if (row < num_rows) {
      xs = *reinterpret_cast<const uint4*>(x + row * X_ROW_BYTES + lane % 4 * 16);
    }
    mma_m16n8k16<T>(first, {xs.x, 0u, xs.y, 0u}, {weights.x, weights.y});
    mma_m16n8k16<T>(second, {xs.z, 0u, xs.w, 0u}, {weights.z, weights.w});
  }

  __device__ __forceinline__ void store(float* sums /* [MAX_ROWS, TILE_FEATURES] */) {
    const int lane = threadIdx.x % WARP;
    float* mine = sums + lane / 4 * TILE_FEATURES + lane % 4 * 2;
    mine[0] = first[0] + second[0];
    mine[1] = first[1] + second[1];
  }
};

// fp32: tensor cores would round the factors to TF32, so plain multiply-adds.
template <>
struct Sums<float> {
  float of_row[MAX_ROWS] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};

  __device__ __forceinline__ void add(uint4 weights, const unsigned char* x, int num_rows) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int row = 0; row < MAX_ROWS; ++row) {
      if (row < num_rows) {
        const float4 xs = *reinterpret_cast<const float4*>(x + row * X_ROW_BYTES + lane % 4 * 16);
        of_row[row] = fmaf(__uint_as_float(weights.x), xs.x, of_row[row]);
        of_row[row] = fmaf(__uint_as_float(weights.y), xs.y, of_row[row]);
        of_row[row] = fmaf(__uint_as_float(weights.z), xs.z, of_row[row]);
        of_row[row] = fmaf(__uint_as_float(weights.w), xs.w, of_row[row]);
      }
    }
  }

  __device__ __forceinline__ void store(float* sums /* [MAX_ROWS, TILE_FEATURES] */) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int row = 0; row < MAX_ROWS; ++row) {
      float sum = of_row[row];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) sums[row * TILE_FEATURES + lane / 4] = sum;
    }
  }
};
