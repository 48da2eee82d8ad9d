// out = x @ weight^T (+ bias) for 1 to 8 rows of x: a matrix-vector product as fast as the weight
// can be read, which is read once for all rows.
//
// Grid: (ceil(out_features / 8)); a block computes 8 output features of all rows.
// Block: 32 threads for each of 2 to 16 warps, which share out the columns in chunks of 512 bytes.
// Shared memory: dynamic, 4,864 bytes a warp.
// Constants: -DDTYPE=bf16 | fp16 | fp32.
// SMs: 80 and up.
// Numerics: products summed in fp32 in an order that follows from in_features alone, whatever
//   num_rows is; bias added in fp32; rounded once, to the dtype of out. fp32 never becomes TF32.
// Compile: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16 linear.cu
#include <cstring>

#include "common.cuh"
#include "linear_sums.cuh"

constexpr int MAX_WARPS = 16;
// Blocks an SM, which hold a thread to 64 registers; the eight rows of sums in fp32 need more.
constexpr int MIN_BLOCKS = sizeof(scalar_t) == 4 ? 1 : 2;

constexpr int PACK = Pack<scalar_t>::SIZE;  // columns of a lane's load
constexpr int STEP = 4 * PACK;              // columns of all lanes' loads of a weight row
constexpr int STEPS = 8;                    // loads that a lane has under way at once
constexpr int CHUNK = STEPS * STEP;         // columns a warp takes at a time
static_assert(CHUNK == WARP * PACK, "a lane copies one pack of each row of x");
static_assert(STEP * sizeof(scalar_t) == STEP_BYTES, "a step is what the sums take at a time");
static_assert(STEPS * STEP_BYTES <= X_ROW_BYTES, "a chunk of x is one row there");

constexpr int X_BYTES = MAX_ROWS * X_ROW_BYTES;  // of a warp

// Returns PACK numbers of which `left` are in the row, and zeros for the others.
__device__ __forceinline__ uint4 load_singly(const scalar_t* from, int left) {
  Pack<scalar_t> pack;
  for (int i = 0; i < PACK; ++i) {
    pack.values[i] = i < left ? from[i] : from_float<scalar_t>(0.f);
  }
  uint4 bits;
  memcpy(&bits, &pack, sizeof(bits));
  return bits;
}

// Copies this lane's pack of every row of x to shared memory; `left` columns are in the row, and
// zeros stand for the others.
template <bool PACKED>
__device__ __forceinline__ void copy_x(unsigned char* shared, const scalar_t* from,
                                       int64_t x_stride, int num_rows, int left) {
#pragma unroll 1  // one row is the usual case
  for (int row = 0; row < num_rows; ++row, from += x_stride, shared += X_ROW_BYTES) {
    if (PACKED) {
      // The address must be good even if nothing is read.
      cp_async_16_cached(shared, left > 0 ? from : from + left - PACK, left > 0);
    } else {
      *reinterpret_cast<uint4*>(shared) = load_singly(from, left);
    }
  }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS* WARP, MIN_BLOCKS)
    KERNEL_NAME(linear)(const scalar_t* __restrict__ x,       // [num_rows, in_features]
                        const scalar_t* __restrict__ weight,  // [out_features, in_features]
                        const scalar_t* __restrict__ bias,    // [out_features], or null
                        void* __restrict__ out,  // [num_rows, out_features], contiguous
                        int num_rows, int in_features, int out_features, int64_t x_stride,
                        int64_t weight_stride,
                        int packed,       // all rows of x and weight are whole packs of 16 bytes
                        int out_dtype) {  // 0 fp32, 1 fp16, 2 bf16
  DYNAMIC_SHARED(shared);                 // x of each warp, then the sums of each warp
  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const int num_warps = blockDim.x / WARP;
  const int first_feature = blockIdx.x * TILE_FEATURES;
  unsigned char* x_chunk = shared + warp * X_BYTES;

  // Lanes past the last weight row take that row again; nobody stores their sums.
  const int weight_row = min(first_feature + lane / 4, out_features - 1);
  weight += weight_row * weight_stride + lane % 4 * PACK;
  x += lane * PACK;
  Sums<scalar_t> sums;

  for (int start = warp * CHUNK; start < in_features; start += num_warps * CHUNK) {
    const int left = in_features - start - lane % 4 * PACK;  // columns of the weight row
    const int x_left = in_features - start - lane * PACK;
    if (packed) {
      // All loads are on their way before anything waits. The weights take longest and come first.
      uint4 weights[STEPS];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        weights[step] = make_uint4(0, 0, 0, 0);
        if (step * STEP < left) weights[step] = load_16_once(weight + start + step * STEP);
      }
      copy_x<true>(x_chunk + lane * 16, x + start, x_stride, num_rows, x_left);
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();  // every lane's part of x is there
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        sums.add(weights[step], x_chunk + step * STEP_BYTES, num_rows);
      }
    } else {
      copy_x<false>(x_chunk + lane * 16, x + start, x_stride, num_rows, x_left);
      __syncwarp();
#pragma unroll 1  // any width and stride will do, but slowly
      for (int step = 0; step < STEPS; ++step) {
        const uint4 weights = load_singly(weight + start + step * STEP, left - step * STEP);
        sums.add(weights, x_chunk + step * STEP_BYTES, num_rows);
      }
    }
    __syncwarp();  // x was read by all lanes before the next chunk takes its place
  }

  const int row = threadIdx.x / TILE_FEATURES;
  const int feature = first_feature + threadIdx.x % TILE_FEATURES;
  const bool stores = row < num_rows && feature < out_features;
  // On its way while the other warps finish.
  const scalar_t bias_of_feature =
      stores && bias != nullptr ? bias[feature] : from_float<scalar_t>(0.f);

  float* sums_of_warps = reinterpret_cast<float*>(shared + num_warps * X_BYTES);
  sums.store(sums_of_warps + warp * TILE);
  __syncthreads();
  if (!stores) return;

  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < MAX_WARPS; ++w) {
    if (w < num_warps) sum += sums_of_warps[w * TILE + threadIdx.x];
  }
  sum += to_float(bias_of_feature);
  store_as(out, static_cast<int64_t>(row) * out_features + feature, sum, out_dtype);
}
