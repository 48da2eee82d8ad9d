// out = x @ weight^T (+ bias) for a single row x, as fast as the weight can be read; if asked for,
// x is normed first, and silu_mul is applied to the product or a residual added to it.
//
// Grid: (ceil(out_columns / columns of a block)). A block has 4 weight rows, and so 4 columns of
//   out; with SILU 2, each of a gate row and an up row.
// Block: 256 threads. Thread t has the packs (16 bytes) t, t + 256, t + 512, ... of every row.
// Shared memory: static, 160 bytes.
// Compile with: DTYPE=bf16 | fp16 | fp32; PACKS=1 | 2, of a thread at a time; TILED=1 where rows
//   have more packs than the block takes at a time; NORM=1, SILU=1 where these are asked for.
// SMs: 80 and up.
// Numerics: products summed in fp32, in an order that follows from in_features alone; bias added in
//   fp32; rounded where the op of each part rounds. fp32 never becomes TF32.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 -DPACKS=1 -DTILED=0 -DNORM=1 -DSILU=1
//   gemv.cu
//
// Blocks are many and short: while one adds up its sums, the loads of others are under way. So
// every instruction before the first load and behind the last one counts.

#include "norm.cuh"
#include "silu.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS = 4;  // of the weight, that a block has
constexpr int COLUMNS = SILU ? ROWS / 2 : ROWS;
constexpr int TILE = PACKS * THREADS;  // packs of a row that the block takes at a time
// Blocks an SM, which hold a thread to 40 registers with one pack, and to 80 or 128 with two.
constexpr int MIN_BLOCKS = TILED && NORM ? 2 : PACKS == 1 ? 6 : 3;

// A pack as it was loaded. Between load and use it is kept so: as numbers of 16 bits the compiler
// would give each a register.
using PackBits = uint4;

__device__ __forceinline__ RowPack numbers(const PackBits& bits) {
  return *reinterpret_cast<const RowPack*>(&bits);
}

__device__ __forceinline__ PackBits zeros() { return make_uint4(0, 0, 0, 0); }

// The sum of one number of each warp.
__device__ __forceinline__ float sum_of_warps(const float* of_warp /* shared [WARPS] */) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp += 4) {
    const float4 four = *reinterpret_cast<const float4*>(of_warp + warp);
    sum += (four.x + four.y) + (four.z + four.w);
  }
  return sum;
}

// What x is multiplied by before the norm's weight, given this thread's sum of squares.
__device__ __forceinline__ float scale_of(float squares, int in_features, float eps,
                                          float* of_warp /* shared [WARPS] */) {
  squares = warp_sum(squares);
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = squares;
  __syncthreads();
  return norm_scale(sum_of_warps(of_warp), in_features, eps);
}

// Four sums over the warp, with a third of the instructions of four warp sums: lanes 8r to 8r + 7
// get that of row r.
__device__ __forceinline__ float sums_over_warp(const float (&sums)[ROWS]) {
  constexpr unsigned ALL = 0xffffffffu;
  const bool second_half = threadIdx.x & 16;
  const bool odd_eight = threadIdx.x & 8;
  // A lane keeps two of its sums, then one, and gives the others to the lane that keeps those.
  float first = second_half ? sums[2] : sums[0];
  float second = second_half ? sums[3] : sums[1];
  first += __shfl_xor_sync(ALL, second_half ? sums[0] : sums[2], 16);
  second += __shfl_xor_sync(ALL, second_half ? sums[1] : sums[3], 16);
  float sum = odd_eight ? second : first;
  sum += __shfl_xor_sync(ALL, odd_eight ? first : second, 8);
  for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL, sum, mask);
  return sum;
}

// This thread's products of x with each row, summed.
__device__ __forceinline__ void add_products(float (&sums)[ROWS],
                                             const scalar_t* const (&rows)[ROWS], const scalar_t* x,
                                             const scalar_t* norm_weight, int in_features,
                                             float eps, float* of_warp) {
  const auto packs = [](const scalar_t* row) {
    return reinterpret_cast<const PackBits*>(row) + threadIdx.x;
  };
  const int left = in_features / WIDE - static_cast<int>(threadIdx.x);  // packs, from this one on
  // All loads are on their way before anything waits: first those that take longest.
  PackBits weights[PACKS][ROWS];
  PackBits norms[PACKS];
  PackBits xs[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const bool there = p * THREADS < left;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      weights[p][r] = there ? load_16_once_in_order(packs(rows[r]) + p * THREADS) : zeros();
    }
    if (NORM) norms[p] = there ? packs(norm_weight)[p * THREADS] : zeros();
  }
  __syncwarp();  // or the compiler would have them wait for x, to save registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) xs[p] = p * THREADS < left ? packs(x)[p * THREADS] : zeros();
  float scale = 1.0f;
  if (NORM) {
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) squares = add_squares(squares, numbers(xs[p]));
    if (TILED) {
#pragma unroll 1
      for (int p = TILE; p < left; p += THREADS) {
        squares = add_squares(squares, numbers(packs(x)[p]));
      }
    }
    scale = scale_of(squares, in_features, eps, of_warp);
  }
  int start = 0;
  do {
    const int next = start + TILE;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int next_pack = next + p * THREADS;
      const bool there = TILED && next_pack < left;
      RowPack factors = numbers(xs[p]);
      if (NORM) {
        // Behind the row's end too x is to stay zero, which times an infinite scale it would not.
        const bool in_row = start + p * THREADS < left;
        factors = scaled(factors, in_row ? scale : 0.0f, numbers(norms[p]));
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const RowPack ready = numbers(weights[p][r]);
        if (TILED) {
          weights[p][r] = there ? load_16_once_in_order(packs(rows[r]) + next_pack) : zeros();
        }
#pragma unroll
        for (int e = 0; e < WIDE; ++e) {
          sums[r] = fmaf(to_float(factors.values[e]), to_float(ready.values[e]), sums[r]);
        }
      }
      if (TILED) xs[p] = there ? packs(x)[next_pack] : zeros();
      if (TILED && NORM) norms[p] = there ? packs(norm_weight)[next_pack] : zeros();
    }
    start = next;
  } while (TILED && start * WIDE < in_features);
}

// The same bits where rows are not aligned, element by element: slowly.
__device__ __forceinline__ void add_products_singly(float (&sums)[ROWS],
                                                    const scalar_t* const (&rows)[ROWS],
                                                    const scalar_t* x, const scalar_t* norm_weight,
                                                    int in_features, float eps, float* of_warp) {
  float scale = 1.0f;
  if (NORM) {
    float squares = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i * WIDE < in_features; i += THREADS) {
      squares = add_squares(squares, load_pack<false>(x, i, in_features));
    }
    scale = scale_of(squares, in_features, eps, of_warp);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i * WIDE < in_features; i += THREADS) {
#pragma unroll 1
    for (int column = i * WIDE; column < min((i + 1) * WIDE, in_features); ++column) {
      scalar_t factor = x[column];
      if (NORM) factor = scaled(factor, scale, norm_weight[column]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        sums[r] = fmaf(to_float(factor), to_float(rows[r][column]), sums[r]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    // x, norm_weight: with __restrict__ their loads may be moved behind the barrier.
    KERNEL_NAME(gemv)(const scalar_t* x,                    // [in_features]
                      const scalar_t* __restrict__ weight,  // [out_features, in_features]
                      const scalar_t* __restrict__ bias,    // [out_features], or null
                      const scalar_t* norm_weight,          // [in_features]; null without NORM
                      const scalar_t* residual,  // [out_columns], or null; may be where out is
                      void* out,  // [out_columns]; out_features, with SILU half of them
                      int64_t weight_stride, int in_features, int out_columns, float eps,
                      int out_dtype) {  // 0 fp32, 1 fp16, 2 bf16; DTYPE with SILU or a residual
  __shared__ __align__(16) float squares_of_warp[WARPS];
  __shared__ __align__(16) float of_warp[ROWS][WARPS];
  const int first = blockIdx.x * COLUMNS;
  const auto feature_of = [&](int column, int is_up) { return column + is_up * out_columns; };
  const scalar_t* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    // Past the last column it is that one again, and nobody stores it.
    const int column = min(first + (SILU ? r / 2 : r), out_columns - 1);
    rows[r] = weight + feature_of(column, SILU ? r % 2 : 0) * weight_stride;
  }

  float sums[ROWS] = {};
  if (is_aligned(weight, weight_stride, in_features) && is_aligned(x) && is_aligned(norm_weight)) {
    add_products(sums, rows, x, norm_weight, in_features, eps, squares_of_warp);
  } else {
    add_products_singly(sums, rows, x, norm_weight, in_features, eps, squares_of_warp);
  }

  const int column = first + threadIdx.x;
  const bool stores = threadIdx.x < COLUMNS && column < out_columns;
  // On its way while the warps finish.
  float bias_of[2] = {0.0f, 0.0f};  // of the column, or of its gate and its up
  float added = 0.0f;
  if (stores && bias != nullptr) {
    for (int i = 0; i <= SILU; ++i) bias_of[i] = to_float(bias[feature_of(column, i)]);
  }
  if (stores && residual != nullptr) added = to_float(residual[column]);

  const float sum = sums_over_warp(sums);
  const int lane = threadIdx.x % WARP;
  if (lane % 8 == 0) of_warp[lane / 8][threadIdx.x / WARP] = sum;
  __syncthreads();
  if (!stores) return;

  if (SILU) {
    const float gate = sum_of_warps(of_warp[2 * threadIdx.x]) + bias_of[0];
    const float up = sum_of_warps(of_warp[2 * threadIdx.x + 1]) + bias_of[1];
    static_cast<scalar_t*>(out)[column] =
        silu_mul(from_float<scalar_t>(gate), from_float<scalar_t>(up));
    return;
  }
  float result = sum_of_warps(of_warp[threadIdx.x]) + bias_of[0];
  if (residual != nullptr) result = added + to_float(from_float<scalar_t>(result));
  store_as(out, column, result, out_dtype);
}
