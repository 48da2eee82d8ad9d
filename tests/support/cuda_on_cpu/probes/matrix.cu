// ldmatrix, movmatrix and mma: C = A B for one tile a block, and what the lanes hold on the way.
// Grid: tiles. Block: 32 threads.
#include "common.cuh"

extern "C" __global__ void KERNEL_NAME(matrix)(
    const scalar_t* __restrict__ a,  // [tiles, 16, 16]
    const scalar_t* __restrict__ b,  // [tiles, 16, 8]
    float* __restrict__ c,           // [tiles, 16, 8]
    int* __restrict__ held) {        // [tiles, 3, 32, 4]: of ldmatrix, .trans and movmatrix
  __shared__ __align__(16) scalar_t shared_a[16 * 16], shared_b[16 * 8];
  const int lane = threadIdx.x;
  const int64_t tile = blockIdx.x;
  for (int i = lane; i < 256; i += WARP) shared_a[i] = a[tile * 256 + i];
  for (int i = lane; i < 128; i += WARP) shared_b[i] = b[tile * 128 + i];
  __syncwarp();
  uint32_t left[4], transposed[4], right[4];
  const scalar_t* row = shared_a + lane % 16 * 16 + lane / 16 * 8;
  ldmatrix_x4(left, row);
  ldmatrix_x4_trans(transposed, row);
  ldmatrix_x4_trans(right, shared_b + lane % 16 * 8);
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_m16n8k16<scalar_t>(sums, left, {right[0], right[1]});
  for (int i = 0; i < 4; ++i) {
    c[tile * 128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    held[tile * 384 + lane * 4 + i] = left[i];
    held[tile * 384 + 128 + lane * 4 + i] = transposed[i];
    held[tile * 384 + 256 + lane * 4 + i] = movmatrix_trans(left[i]);
  }
}
