// One block of threads: who can run, who waits for whom, its shared memory.
//
// Threads are fibers. One runs until it waits for others (a barrier, a function of the whole warp)
// or returns; a warp runs as far as it gets before the next one does, so that what forgets a
// barrier sees stale data. All of this is of one library, which has one kernel.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fiber.h"
#include "vector_types.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// Static shared arrays, gathered by the linker.
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_shared_memory[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_shared_memory[];

namespace cuda_on_cpu {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;
constexpr int MAX_SHARED = 232448;
constexpr int GUARD = 1024;  // bytes behind the dynamic shared memory that must stay as they are
constexpr int POISON = 0xff;  // what memory holds that nothing was written to: NaN in every dtype

// What a warp function does when all lanes are there: `operands[lane]` of the lanes in `mask`.
using Together = void (*)(void** operands, uint32_t mask);

struct Copy {  // of cp.async, not done yet
  void* shared;
  const void* global;  // null: zeros
  int group;
};

struct Thread {
  Fiber fiber;
  uint3 idx;
  std::vector<Copy> copies;
  size_t num_copied = 0;
  int num_groups = 0;
};

struct Wait {
  const char* what;
  uint32_t mask;
  Together together;
  bool aligned;
};

struct Warp {
  uint32_t live, ready, waiting, at_barrier;
  Wait waits[LANES];
  void* operands[LANES];
};

struct Block {
  Thread threads[MAX_THREADS];
  Warp warps[MAX_THREADS / LANES];
  Fiber scheduler;
  int num_threads, num_live, num_at_barrier;
  int current;         // number of the running thread
  int phase;           // barriers passed
  int sums[2];         // of what threads bring to a barrier, by its phase
  int shared_bytes;
  bool has_failed;
  char error[1024];
};

inline Block block;
alignas(1024) inline unsigned char dynamic_shared[MAX_SHARED + GUARD];

inline Warp& own_warp() { return block.warps[block.current / LANES]; }
inline int own_lane() { return block.current % LANES; }
inline void leave() { switch_fiber(block.threads[block.current].fiber, block.scheduler); }

// Ends the launch; the message is given the block and the thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  const size_t size = sizeof(block.error);
  size_t used = snprintf(block.error, size, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x,
                         blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  va_list args;
  va_start(args, format);
  vsnprintf(block.error + used, size - used, format, args);
  va_end(args);
  block.has_failed = true;
  leave();
  __builtin_unreachable();
}

inline bool is_shared(const void* pointer, size_t bytes) {
  const unsigned char* p = static_cast<const unsigned char*>(pointer);
  return (p >= dynamic_shared && p + bytes <= dynamic_shared + block.shared_bytes) ||
         (p >= __start_shared_memory && p + bytes <= __stop_shared_memory);
}

inline void need_shared(const char* what, const void* pointer, size_t bytes) {
  if (!is_shared(pointer, bytes)) {
    const long offset = static_cast<const unsigned char*>(pointer) - dynamic_shared;
    fail("%s: %p is not in shared memory (byte %ld of %d of dynamic shared memory)", what, pointer,
         offset, block.shared_bytes);
  }
}

inline void need_aligned(const char* what, const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes) {
    fail("%s: misaligned address %p; it must be a multiple of %zu", what, pointer, bytes);
  }
}

// Does what lane `lane` waits for, if all are there.
inline void try_together(Warp& warp, int lane) {
  const Wait& wait = warp.waits[lane];
  const uint32_t needed = wait.mask & warp.live;
  if ((warp.waiting & needed) != needed) return;
  if (wait.aligned && warp.live != ~0u) {
    fail("%s needs all 32 lanes; of this warp only lanes %08x are there", wait.what, warp.live);
  }
  warp.waiting &= ~needed;
  warp.ready |= needed;
  wait.together(warp.operands, needed);
}

// Waits until all lanes in `mask` are here, then does `together` once for all of them.
inline void meet(const char* what, uint32_t mask, Together together, void* operands,
                 bool aligned = false) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  const uint32_t own = 1u << lane;
  if (!(mask & own)) fail("%s: its mask %08x leaves out the calling lane %d", what, mask, lane);
  for (uint32_t others = warp.waiting; others; others &= others - 1) {
    const int other = __builtin_ctz(others);
    const Wait& wait = warp.waits[other];
    const bool same = wait.together == together && wait.mask == mask;
    if (((mask >> other & 1) || (wait.mask & own)) && !same) {
      fail("lanes of a warp diverge: lane %d is in %s (mask %08x), lane %d waits in %s (mask %08x)",
           lane, what, mask, other, wait.what, wait.mask);
    }
    if (same) break;  // the others of this group were compared with it when they came
  }
  warp.waits[lane] = {what, mask, together, aligned};
  warp.operands[lane] = operands;
  warp.waiting |= own;
  try_together(warp, lane);
  if (warp.waiting & own) {
    leave();
  } else {
    warp.ready &= ~own;  // the last to come goes on
  }
}

inline void open_barrier() {
  for (int w = 0; w * LANES < block.num_threads; ++w) {
    Warp& warp = block.warps[w];
    warp.ready |= warp.at_barrier;
    warp.at_barrier = 0;
  }
  block.num_at_barrier = 0;
  block.sums[++block.phase % 2] = 0;
}

// Waits for all threads of the block that have not returned. Returns the sum of their values.
inline int barrier(int value) {
  const uint32_t own = 1u << own_lane();
  const int phase = block.phase;
  block.sums[phase % 2] += value;
  if (++block.num_at_barrier == block.num_live) {
    open_barrier();
  } else {
    own_warp().at_barrier |= own;
    leave();
  }
  return block.sums[phase % 2];
}

// Does the copies of all but the last `pending` groups.
inline void finish_copies(int pending) {
  Thread& thread = block.threads[block.current];
  for (; thread.num_copied < thread.copies.size(); ++thread.num_copied) {
    const Copy& copy = thread.copies[thread.num_copied];
    if (copy.group >= thread.num_groups - pending) return;
    if (copy.global == nullptr) {
      memset(copy.shared, 0, 16);
    } else {
      memcpy(copy.shared, copy.global, 16);
    }
  }
  thread.copies.clear();
  thread.num_copied = 0;
}

inline void (*invoke_kernel)();

// Where every thread begins and ends.
inline void thread_main() {
  invoke_kernel();
  Warp& warp = own_warp();
  warp.live &= ~(1u << own_lane());
  --block.num_live;
  for (uint32_t waiting = warp.waiting; waiting; waiting &= waiting - 1) {
    const int lane = __builtin_ctz(waiting);
    if (warp.waiting >> lane & 1) try_together(warp, lane);
  }
  if (block.num_live && block.num_at_barrier == block.num_live) open_barrier();
  leave();
}

inline void poison_shared(int bytes) {
  block.shared_bytes = bytes;
  memset(dynamic_shared, POISON, bytes + GUARD);
  memset(__start_shared_memory, POISON, __stop_shared_memory - __start_shared_memory);
}

inline void begin_block(dim3 size, unsigned char* stacks, size_t stack_bytes) {
  block.num_threads = block.num_live = size.x * size.y * size.z;
  block.num_at_barrier = block.phase = block.sums[0] = block.sums[1] = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.idx = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    thread.copies.clear();
    thread.num_copied = 0;
    thread.num_groups = 0;
    // Tops that lie a little apart in the cache: at the same place, they would push each other out.
    unsigned char* top = stacks + (i + 1) * stack_bytes - i % 32 * 192;
    make_fiber(thread.fiber, top, stack_bytes - 32 * 192, thread_main);
  }
  for (int w = 0; w * LANES < block.num_threads; ++w) {
    const int lanes = block.num_threads - w * LANES;
    const uint32_t all = lanes >= LANES ? ~0u : (1u << lanes) - 1;
    block.warps[w].live = block.warps[w].ready = all;
    block.warps[w].waiting = block.warps[w].at_barrier = 0;
  }
}

// Says who waits for what; nobody can run.
inline void report_deadlock() {
  const size_t size = sizeof(block.error);
  size_t used = snprintf(block.error, size, "block (%u, %u, %u): deadlock:", blockIdx.x, blockIdx.y,
                         blockIdx.z);
  for (int w = 0; w * LANES < block.num_threads && used < size; ++w) {
    const Warp& warp = block.warps[w];
    if (warp.at_barrier) {
      used += snprintf(block.error + used, size - used,
                       " lanes %08x of warp %d wait in __syncthreads;", warp.at_barrier, w);
    }
    if (warp.waiting && used < size) {
      const Wait& wait = warp.waits[__builtin_ctz(warp.waiting)];
      used += snprintf(block.error + used, size - used,
                       " lanes %08x of warp %d wait in %s (mask %08x);", warp.waiting, w, wait.what,
                       wait.mask);
    }
  }
  block.has_failed = true;
}

// Runs the threads of the block to their end. Of the warps, number `first` begins.
inline void run_threads(unsigned first) {
  const int num_warps = (block.num_threads + LANES - 1) / LANES;
  while (block.num_live && !block.has_failed) {
    bool has_run = false;
    for (int i = 0; i < num_warps; ++i) {
      const int w = (i + first) % num_warps;
      Warp& warp = block.warps[w];
      while (warp.ready) {
        const int lane = __builtin_ctz(warp.ready);
        warp.ready &= ~(1u << lane);
        block.current = w * LANES + lane;
        threadIdx = block.threads[block.current].idx;
        switch_fiber(block.scheduler, block.threads[block.current].fiber);
        if (block.has_failed) return;
        has_run = true;
      }
    }
    if (!has_run) return report_deadlock();
  }
  for (int i = 0; i < GUARD; ++i) {
    if (dynamic_shared[block.shared_bytes + i] != POISON) {
      snprintf(block.error, sizeof(block.error),
               "block (%u, %u, %u) wrote byte %d of its %d of dynamic shared memory", blockIdx.x,
               blockIdx.y, blockIdx.z, block.shared_bytes + i, block.shared_bytes);
      block.has_failed = true;
      return;
    }
  }
}

}  // namespace cuda_on_cpu
