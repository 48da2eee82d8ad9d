// The id of each row's largest logit: the lowest among equals, 0 for a row of -inf, -1 for a row
// with a NaN. Reads the logits once. Several blocks share a row; the last to arrive combines.
//
// Grid: (rows, parts of a row). Block: 256 threads. Shared memory: 65 bytes, static.
// Compile with: DTYPE=bf16 | fp16 | fp32, which is that of the logits.
// SMs: 80 and up.
// Numerics: exact. What is compared is a 64-bit key, so the order of arrival does not matter.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DDTYPE=bf16 argmax.cu

#include "rows.cuh"

using Key = unsigned long long;

constexpr int THREADS = 256;
constexpr Key NAN_KEY = ~0ull;

// The largest key has the largest logit and, among equals, the lowest id.
__device__ __forceinline__ Key key_of(float logit, int id) {
  const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0, its equal
  // As unsigned numbers, floats are in order but for the negative ones, which are in reverse.
  const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | ~static_cast<unsigned>(id);
}

__device__ __forceinline__ int64_t id_of(Key key) {
  return key == NAN_KEY ? -1 : static_cast<int64_t>(~static_cast<unsigned>(key));
}

// What a thread has seen; ids come in rising order, so of equals the first is the lowest. Id 0 to
// begin with is the answer of a row that holds nothing above -inf, and of no other.
struct Best {
  float logit = -INFINITY;
  int id = 0;
  bool has_nan = false;
};

__device__ __forceinline__ void consider(Best& best, scalar_t value, int id) {
  const float logit = to_float(value);
  if (logit > best.logit) {  // false for a NaN
    best.logit = logit;
    best.id = id;
  }
  best.has_nan |= logit != logit;
}

// The thread's share of columns begin to end.
__device__ __forceinline__ Key scan(const scalar_t* __restrict__ row, int begin, int end,
                                    bool aligned) {
  Best best;
  int next = begin;
  if (aligned) {  // and so is begin
    next = end - end % WIDE;
#pragma unroll 4
    for (int id = begin + threadIdx.x * WIDE; id < next; id += THREADS * WIDE) {
      const Run<scalar_t, WIDE> logits = load_run<WIDE>(row + id);
#pragma unroll
      for (int e = 0; e < WIDE; ++e) consider(best, logits.values[e], id + e);
    }
  }
  for (int id = next + threadIdx.x; id < end; id += THREADS) consider(best, row[id], id);
  return best.has_nan ? NAN_KEY : key_of(best.logit, best.id);
}

// The largest key of the block, in thread 0.
__device__ __forceinline__ Key block_max(Key key, Key* warp_keys /* shared [THREADS / WARP] */) {
  for (int step = WARP / 2; step > 0; step /= 2) {
    const Key other = __shfl_xor_sync(0xffffffffu, key, step);
    key = other > key ? other : key;
  }
  __syncthreads();  // warp_keys may still be read, from a call before
  if (threadIdx.x % WARP == 0) warp_keys[threadIdx.x / WARP] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / WARP; ++warp) {
      key = warp_keys[warp] > key ? warp_keys[warp] : key;
    }
  }
  return key;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(argmax)(const scalar_t* __restrict__ logits,  // [rows, vocab], stride row_stride
                        int64_t* __restrict__ out,            // [rows]
                        int64_t* partials,  // [rows, parts] keys; not used if parts is 1
                        int* counters,      // [rows] zeros, and zeros again at the end
                        int64_t row_stride, int vocab, int part_size) {
  __shared__ Key warp_keys[THREADS / WARP];
  __shared__ bool is_last;
  const int row = blockIdx.x;
  const int part = blockIdx.y;
  const int parts = gridDim.y;
  const bool aligned = is_aligned(logits, row_stride, part_size);
  const int begin = part * part_size;
  const int end = min(vocab, begin + part_size);
  Key best = block_max(scan(logits + row * row_stride, begin, end, aligned), warp_keys);
  if (parts == 1) {
    if (threadIdx.x == 0) out[row] = id_of(best);
    return;
  }
  // Volatile: other blocks write these, so they are to be read from L2, where they arrive.
  volatile int64_t* of_row = partials + static_cast<int64_t>(row) * parts;
  if (threadIdx.x == 0) {
    of_row[part] = static_cast<int64_t>(best);
    __threadfence();  // the key is there before the count says so
    is_last = atomicAdd(counters + row, 1) == parts - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  best = 0;  // below any key
  for (int i = threadIdx.x; i < parts; i += THREADS) {
    const Key key = static_cast<Key>(of_row[i]);
    best = key > best ? key : best;
  }
  best = block_max(best, warp_keys);
  if (threadIdx.x == 0) {
    out[row] = id_of(best);
    counters[row] = 0;
  }
}
