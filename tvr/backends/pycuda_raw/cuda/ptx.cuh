// The PTX instructions that the kernels use, and nothing else: no other file has inline assembly.
// So a kernel can be run on a CPU by giving this one file another content.
// SMs: 80 and up. Every function is called by all 32 lanes of a warp, but for the cp_async ones.
#pragma once

#include <cstdint>

// Shared memory whose size the launch decides; one per kernel.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts copying 16 bytes from global to shared memory, past L1. With `valid` false nothing is
// read and the 16 bytes become zeros. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// The same by way of L1, for what other blocks of this SM will read too.
__device__ __forceinline__ void cp_async_16_cached(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of 16-bit numbers. Lane i gives the address of row i % 8 of matrix i / 8
// (16 bytes, aligned). Of matrix j, lane i gets in r[j] columns 2 * (i % 4) and the next of row
// i / 4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed: lane i gets rows 2 * (i % 4) and the next of column i / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit numbers that is spread over the warp as ldmatrix spreads it.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t r) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(r));
  return transposed;
}

// c += a * b in fp32. With g = lane / 4 and t = lane % 4:
//   a [16 rows, 16 k]: a[0] row g, k 2t and 2t+1; a[1] row g+8; a[2] row g, k 2t+8; a[3] both
//   b [16 k, 8 columns]: b[0] k 2t and 2t+1, column g; b[1] k 2t+8 and 2t+9
//   c [16 rows, 8 columns]: c[0], c[1] row g, columns 2t and 2t+1; c[2], c[3] row g+8
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                            const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^x, to 2 ulp; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Reads 16 bytes that this kernel reads once: L1 keeps none of it.
__device__ __forceinline__ uint4 load_16_once(const void* global) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

// The same, which stays in front of the next __syncwarp; a load by .nc may be moved behind.
__device__ __forceinline__ uint4 load_16_once_in_order(const void* global) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

// Adds to a number that several blocks count with, and returns what it was. What this thread wrote
// before, or saw written through a barrier, is seen by whoever reads the count; and it sees what
// the others wrote before they counted. Cheaper than an atomicAdd between two fences.
__device__ __forceinline__ int count_arrival(int* counter, int more) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(counter), "r"(more)
               : "memory");
  return before;
}
