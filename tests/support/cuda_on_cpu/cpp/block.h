// One block of threads: who can run, who waits for whom.
//
// Threads are fibers. One runs until it waits for others (a barrier, a function of the whole warp)
// or returns; a warp runs as far as it gets before the next one does, so that what forgets a
// barrier sees stale data.
#pragma once

#include <cstdarg>
#include <vector>

#include "cuda_on_cpu.h"
#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_cpu {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;

// What a warp function does when all lanes are there: `operands[lane]` of the lanes in `mask`.
using Together = void (*)(void** operands, uint32_t mask);

struct Copy {  // of cp.async, not done yet
  unsigned char* shared;
  const unsigned char* global;  // null: zeros
  int group;
};

struct Thread {
  Fiber fiber;
  uint3 idx;
  std::vector<Copy> copies;
  size_t num_copied;
  int num_groups;
};

struct Wait {
  const char* what;
  uint32_t mask;
  Together together;
  bool aligned;
};

struct Warp {
  uint32_t live, ready, waiting, at_barrier;
  uint32_t num_syncs;  // of memory, by the whole warp
  Wait waits[LANES];
  void* operands[LANES];
};

struct Block {
  Thread threads[MAX_THREADS];
  Warp warps[MAX_THREADS / LANES];
  Fiber scheduler;
  int num_threads, num_live, num_at_barrier;
  int current;           // number of the running thread
  bool is_running;       // a launch is under way
  uint32_t epoch;        // barriers passed and blocks begun, in all of the library's life
  uint32_t first_epoch;  // of this block
  int sums[2];           // of what threads bring to a barrier, by its epoch
  int shared_bytes;
  bool has_failed;
  char error[1024];
};

Block block = {};

inline Warp& own_warp() { return block.warps[block.current / LANES]; }
inline void leave() { switch_fiber(block.threads[block.current].fiber, block.scheduler); }

// Writes the end of a message: `used` bytes of it are there. Returns how many then are.
__attribute__((format(printf, 2, 3))) inline size_t add_to_error(size_t used, const char* format,
                                                                 ...) {
  if (used >= sizeof(block.error)) return used;
  va_list args;
  va_start(args, format);
  used += vsnprintf(block.error + used, sizeof(block.error) - used, format, args);
  va_end(args);
  block.has_failed = true;
  return used;
}

inline size_t name_block() {
  return add_to_error(0, "block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
}

inline size_t name_thread() {
  return add_to_error(name_block(), ", thread (%u, %u, %u): ", threadIdx.x, threadIdx.y,
                      threadIdx.z);
}

void fail(const char* format, ...) {
  char message[512];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  add_to_error(name_thread(), "%s", message);
  leave();
  __builtin_unreachable();
}

int own_lane() { return block.current % LANES; }

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
    const bool same_call = wait.what == what || strcmp(wait.what, what) == 0;
    const bool same = same_call && wait.mask == mask;
    if ((mask >> other & 1) && (wait.mask & own) && !same) {  // each waits for the other
      fail("lanes of a warp diverge: lane %d is in %s (mask %08x), lane %d waits in %s (mask %08x)",
           lane, what, mask, other, wait.what, wait.mask);
    }
    if (same) break;  // what comes behind was compared with this one when it came
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
  block.sums[++block.epoch % 2] = 0;
}

int barrier(int value) {
  const uint32_t own = 1u << own_lane();
  const uint32_t epoch = block.epoch;
  block.sums[epoch % 2] += value;
  if (++block.num_at_barrier == block.num_live) {
    open_barrier();
  } else {
    own_warp().at_barrier |= own;
    leave();
  }
  return block.sums[epoch % 2];
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

inline void begin_threads(dim3 size, unsigned char* stacks, size_t stack_bytes) {
  constexpr size_t APART = 192;  // stacks at the same place of a cache would push each other out
  block.num_threads = block.num_live = size.x * size.y * size.z;
  block.num_at_barrier = 0;
  block.first_epoch = ++block.epoch;
  block.sums[block.epoch % 2] = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.idx = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    thread.copies.clear();
    thread.num_copied = 0;
    thread.num_groups = 0;
    unsigned char* top = stacks + (i + 1) * stack_bytes - i % LANES * APART;
    make_fiber(thread.fiber, top, stack_bytes - LANES * APART, thread_main);
  }
  for (int w = 0; w * LANES < block.num_threads; ++w) {
    const int lanes = block.num_threads - w * LANES;
    const uint32_t all = lanes >= LANES ? ~0u : (1u << lanes) - 1;
    Warp& warp = block.warps[w];
    warp.live = warp.ready = all;
    warp.waiting = warp.at_barrier = warp.num_syncs = 0;
  }
}

// Says who waits for what, when nobody can run.
inline void report_deadlock() {
  size_t used = add_to_error(name_block(), ": deadlock:");
  for (int w = 0; w * LANES < block.num_threads; ++w) {
    const Warp& warp = block.warps[w];
    if (warp.at_barrier) {
      used =
          add_to_error(used, " lanes %08x of warp %d wait in __syncthreads;", warp.at_barrier, w);
    }
    if (warp.waiting) {
      const Wait& wait = warp.waits[__builtin_ctz(warp.waiting)];
      used = add_to_error(used, " lanes %08x of warp %d wait in %s (mask %08x);", warp.waiting, w,
                          wait.what, wait.mask);
    }
  }
}

// Runs the threads of the block to their end. Of the warps, number `first` begins.
inline void run_threads(unsigned first) {
  const int num_warps = (block.num_threads + LANES - 1) / LANES;
  while (block.num_live) {
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
}

}  // namespace cuda_on_cpu
