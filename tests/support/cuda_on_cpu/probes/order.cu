// Which block comes when, sums over the threads of a block, and threads that leave early.
// Grid: any, three-dimensional. Block: 96 threads.
#include "ptx.cuh"

extern "C" __global__ void order_fp32(int* __restrict__ counter,  // [1]
                                      int* __restrict__ turns,    // [blocks]
                                      int* __restrict__ sums) {   // [blocks]
  __shared__ int parts[96];
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x >= 80) return;  // barriers do not wait for these
  parts[threadIdx.x] = threadIdx.x;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half && threadIdx.x + half < 80) {
      parts[threadIdx.x] += parts[threadIdx.x + half];
    }
  }
  if (threadIdx.x > 0) return;
  turns[block] = atomicAdd(counter, 1);
  sums[block] = parts[0];
}
