// The functions of a warp, each lane's result in a row of `out`.
// Grid: 1. Block: 32 threads.
#include "ptx.cuh"

extern "C" __global__ void warp_fp32(const float* __restrict__ in,  // [32]
                                     float* __restrict__ out) {     // [11, 32]
  const unsigned all = 0xffffffffu;
  const int lane = threadIdx.x;
  const float x = in[lane];
  out[lane] = __shfl_sync(all, x, lane * 7 + 3);
  out[32 + lane] = __shfl_sync(all, x, 5, 8);
  out[64 + lane] = __shfl_xor_sync(all, x, 21);
  out[96 + lane] = __shfl_up_sync(all, x, 3);
  out[128 + lane] = __shfl_down_sync(all, x, 5, 16);
  out[160 + lane] = __popc(__ballot_sync(all, x > 0.0f));
  out[192 + lane] = __any_sync(all, lane == 31);
  out[224 + lane] = __all_sync(all, lane != 31);
  if (lane % 2) {
    out[256 + lane] = __shfl_xor_sync(0xaaaaaaaau, x, 2);
  } else {
    out[256 + lane] = __shfl_xor_sync(0x55555555u, x, 4);
  }
  int count = 0;
  for (int i = 0; i < lane; ++i) count += __popc(__ballot_sync(all << (i + 1), 1));
  out[288 + lane] = count;
  if (lane >= 8) return;
  out[320 + lane] = __shfl_down_sync(all, x, 1, 8);  // lanes that have returned need not come
}
