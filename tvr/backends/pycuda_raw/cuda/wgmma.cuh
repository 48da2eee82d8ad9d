// Hopper's matrix product of a warpgroup, and the barriers that feed it: the PTX of sm_90a.
// SMs: 90 only, compiled for sm_90a. A warpgroup is 4 warps in a row, the first a multiple of 4;
// all of its 128 threads call the wgmma functions together.
//
// Tiles in shared memory are made of *panels*: [rows, 64 columns] of 16-bit numbers, a row being
// 128 bytes, a panel starting at a multiple of 1024. The 16-byte chunk c of row r lies at chunk
// c ^ (r % 8) of the row, so that neither reading along rows nor down columns hits a bank twice.
#pragma once

#include <cstdint>

#include "ptx.cuh"

constexpr int WARPGROUP = 128;
constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;

// Where the 16-byte chunk `chunk` of row `row` lies in a tile of [rows, 8 * chunks] numbers.
__device__ __forceinline__ int panel_offset(int rows, int row, int chunk) {
  return (chunk / 8 * rows + row) * PANEL_ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16;
}

// What wgmma is told of a tile: where it starts (bits 0-13, in 16 bytes), how far the next panel
// is (bits 16-29), how far the next 8 rows are (bits 32-45), and that chunks are swizzled over 128
// bytes (1 in bits 62-63). `start` may be 32 bytes further for each 16 columns, or 16 rows further:
// the swizzle is a function of the address, so it stays right.
__device__ __forceinline__ uint64_t tile_descriptor(const void* start, int panel_bytes) {
  constexpr uint64_t SWIZZLE_128 = uint64_t{1} << 62;
  constexpr uint64_t EIGHT_ROWS = uint64_t{8 * PANEL_ROW_BYTES / 16} << 32;
  return SWIZZLE_128 | EIGHT_ROWS | static_cast<uint64_t>(panel_bytes / 16) << 16 |
         (shared_address(start) & 0x3ffff) / 16;
}

// Makes registers that other instructions wrote visible to the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// Ends a group of wgmmas of this warpgroup.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most PENDING groups are still under way; what the others wrote is in `d` then.
// Naming `d` keeps the compiler from reading it before the wait.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a * b, or d += a * b, in fp32, started but not awaited. d is [64 rows, 2N columns]: with
// g = lane / 4 and t = lane % 4, thread `lane` of warp w holds of row 16w + g, in d[4j] and
// d[4j + 1], columns 8j + 2t and the next, and in d[4j + 2], d[4j + 3] these of row 16w + g + 8.
//   wgmma_rows: a [64 rows, 16 k] and b [2N columns, 16 k] in shared memory, k along the rows
//   wgmma_columns: a [64 rows, 16 k] in registers as mma_m16n8k16 has it, 16 rows a warp;
//     b [16 k, 2N columns] in shared memory, k down the columns
template <typename T, int N>
__device__ __forceinline__ void wgmma_rows(float (&d)[N], uint64_t a, uint64_t b, bool add);
template <typename T, int N>
__device__ __forceinline__ void wgmma_columns(float (&d)[N], const uint32_t (&a)[4], uint64_t b);

// The text of the instruction and its operands differ only in how many registers d takes.
#define FLOATS_8_(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_32_(d, i) \
  FLOATS_8_(d, i), FLOATS_8_(d, i + 8), FLOATS_8_(d, i + 16), FLOATS_8_(d, i + 24)
#define FLOATS_32 FLOATS_32_(d, 0)
#define FLOATS_64 FLOATS_32, FLOATS_32_(d, 32)
#define FLOATS_128 FLOATS_64, FLOATS_32_(d, 64), FLOATS_32_(d, 96)
#define NAMES_32                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                            \
  NAMES_32                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                            \
  NAMES_64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "  \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "    \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// After a and b: whether to add to d, then factors of a and b (1), then which of the operands in
// shared memory have k down the columns.
#define WGMMA(T, PTX_T, N, COLUMNS, ROWS_OPERANDS, ADD, COLUMNS_OPERANDS)                    \
  template <>                                                                                \
  __device__ __forceinline__ void wgmma_rows<T, N>(float (&d)[N], uint64_t a, uint64_t b,    \
                                                   bool add) {                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                 \
                 ", 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." PTX_T "." PTX_T      \
                 " {" NAMES_##N "}, " ROWS_OPERANDS ", add, 1, 1, 0, 0;\n}\n"                \
                 : FLOATS_##N                                                                \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                              \
  }                                                                                          \
  template <>                                                                                \
  __device__ __forceinline__ void wgmma_columns<T, N>(float (&d)[N], const uint32_t (&a)[4], \
                                                      uint64_t b) {                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." PTX_T "." PTX_T      \
                 " {" NAMES_##N "}, " COLUMNS_OPERANDS ", 1, 1, 1, 1;\n"                     \
                 : FLOATS_##N                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
  }
#define WGMMA_OF(T, PTX_T)                                                   \
  WGMMA(T, PTX_T, 32, "64", "%32, %33", "%34", "{%32, %33, %34, %35}, %36")  \
  WGMMA(T, PTX_T, 64, "128", "%64, %65", "%66", "{%64, %65, %66, %67}, %68") \
  WGMMA(T, PTX_T, 128, "256", "%128, %129", "%130", "{%128, %129, %130, %131}, %132")
WGMMA_OF(__half, "f16")
WGMMA_OF(__nv_bfloat16, "bf16")

// Gives this warp, and so its warpgroup, REGISTERS registers a thread: more than it had, or fewer.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// A barrier in shared memory: `arrivals` threads have to arrive to end its phase. Phases have
// parities 0, 1, 0, ...; waiting for parity 1 of a new barrier returns at once.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier))
               : "memory");
}

// This thread arrives when all its cp.asyncs so far have written.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(uint64_t* barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until the phase of that parity has ended.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// Makes what ordinary instructions and cp.async wrote to shared memory, as far as this thread
// knows of it, visible to the wgmmas that follow.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Barrier `id` (1 to 15) of `threads` threads: waits for all of them, or only says it was here.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
