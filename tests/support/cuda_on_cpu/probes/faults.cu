// Every mistake that the emulation reports, chosen by number; 0 is none: out = in.
// Grid: 1. Block: 64 threads. Shared memory: 256 bytes, dynamic.
#include "ptx.cuh"

enum Fault {
  NONE,
  NO_WAIT,
  WAIT_TOO_FEW,
  NO_BARRIER,
  WRITE_AFTER_READ,
  NO_SYNCWARP,
  DIVERGED,
  DIVERGED_MASKS,
  NOT_IN_MASK,
  ABSENT_LANE,
  HALF_A_WARP,
  DEADLOCK,
  MISALIGNED_COPY,
  MISALIGNED_MATRIX,
  MISALIGNED_ONCE,
  MISALIGNED_ONCE_IN_ORDER,
  MISALIGNED_LOAD,
  MATRIX_ELSEWHERE,
  PAST_SHARED,
  PAST_TENSOR,
  UNWRITTEN,
  PAST_ARRAY,
  OVERFLOW,
  NULL_POINTER,
};

extern "C" __global__ void faults_fp32(const float* __restrict__ in,  // [64]
                                       float* __restrict__ out,       // [64]
                                       int fault) {
  DYNAMIC_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  const int i = threadIdx.x;
  const unsigned all = 0xffffffffu;
  uint32_t matrix[4];
  if (fault <= NO_BARRIER) {
    if (i < 16) cp_async_16(values + 4 * i, in + 4 * i, true);
    cp_async_commit();
    if (fault == WAIT_TOO_FEW) cp_async_wait<1>();
    if (fault != NO_WAIT && fault != WAIT_TOO_FEW) cp_async_wait<0>();
    if (fault != NO_BARRIER) __syncthreads();
    out[i] = values[i];
    return;
  }
  values[i] = in[i];
  __syncthreads();
  if (fault == UNWRITTEN) {
    __shared__ float forgotten[64];
    if (i < 32) forgotten[i] = 0.0f;
    __syncthreads();
    out[i] = forgotten[i];
  }
  if (fault == WRITE_AFTER_READ) {
    const float value = values[63 - i];
    values[i] = value;
  }
  if (fault == NO_SYNCWARP) {
    values[i] = 1.0f;
    out[i] = values[i ^ 1] + __shfl_sync(all, 1.0f, 0);
  }
  if (fault == DIVERGED) out[i] = i % 32 < 16 ? __shfl_sync(all, i, 0) : __any_sync(all, i);
  if (fault == DIVERGED_MASKS) __syncwarp(i % 32 < 16 ? all : 0xffff0001u);
  if (fault == NOT_IN_MASK) out[i] = __shfl_sync(1u, i, 0);
  if (fault == ABSENT_LANE && i % 32 < 16) out[i] = __shfl_xor_sync(0xffffu, i, 16);
  if (fault == HALF_A_WARP) {
    if (i % 32 < 16) return;
    ldmatrix_x4(matrix, values + i % 8 * 4);
  }
  if (fault == DEADLOCK) {
    if (i < 16) {
      __syncthreads();
    } else if (i < 32) {
      __syncwarp();
    }
  }
  if (fault == MISALIGNED_COPY) cp_async_16(shared, in + 1, true);
  if (fault == MISALIGNED_MATRIX) ldmatrix_x4(matrix, values + 2);
  if (fault == MISALIGNED_ONCE) out[i] = load_16_once(in + 2).x;
  if (fault == MISALIGNED_ONCE_IN_ORDER) out[i] = load_16_once_in_order(in + 2).x;
  if (fault == MISALIGNED_LOAD) out[i] = reinterpret_cast<const float4*>(in + 1)->x;
  if (fault == MATRIX_ELSEWHERE) ldmatrix_x4(matrix, in);
  if (fault == PAST_SHARED) values[64 + i] = 1.0f;
  if (fault == PAST_TENSOR) out[i] = in[i + 1];
  if (fault == PAST_ARRAY) {
    __shared__ float few[4];
    few[i % 4] = few[4 + i] = 1.0f;
  }
  if (fault == OVERFLOW) out[i] = in[(i + fault) * (1 << 30) >> 30];
  if (fault == NULL_POINTER) out[i] = *static_cast<const volatile float*>(nullptr);
}
