// Memory: poison, asynchronous copies, and in libraries that are built to be checked, every access.
//
// A check refuses what lies outside of all tensors, is misaligned, or is shared memory that nothing
// wrote, and races in shared memory: two threads, one of them writing, with no __syncthreads
// between (in a warp also no __syncwarp).
#pragma once

#include "block.h"

// Static shared arrays, gathered by the linker; and the library's image.
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_shared_memory[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_shared_memory[];
extern "C" __attribute__((visibility("hidden"))) unsigned char __ehdr_start[], _end[];

namespace cuda_on_cpu {

constexpr int MAX_SHARED = 232448;
constexpr int MAX_STATIC = 49152;
constexpr int GUARD = 1024;   // bytes behind the dynamic shared memory that must stay as they are
constexpr int POISON = 0xff;  // what memory holds that nothing was written to: NaN in every dtype

alignas(1024) unsigned char dynamic_shared[MAX_SHARED + GUARD];

// Memory that a launch may touch; none: any.
struct Span {
  const unsigned char* begin;
  const unsigned char* end;
};
inline std::vector<Span> tensors;
inline Span stacks_span;

// Who touched a byte of shared memory last. Of several readers since the last barrier it is known
// whether they are lanes of one warp.
struct Shadow {
  uint32_t write_epoch, read_epoch;
  uint32_t write_sync, read_sync;  // of the thread's warp
  int writer, reader;
};
constexpr int MANY_LANES = 1 << 16;  // + the warp
constexpr int MANY_WARPS = 1 << 17;
inline Shadow shadows[MAX_SHARED + MAX_STATIC];

inline bool lies_in(const void* pointer, size_t bytes, Span span) {
  const unsigned char* p = static_cast<const unsigned char*>(pointer);
  return p >= span.begin && p + bytes <= span.end;
}

inline Span dynamic_span() { return {dynamic_shared, dynamic_shared + block.shared_bytes}; }
inline Span static_span() { return {__start_shared_memory, __stop_shared_memory}; }

inline bool is_shared(const void* pointer, size_t bytes) {
  return lies_in(pointer, bytes, dynamic_span()) || lies_in(pointer, bytes, static_span());
}

void need_shared(const char* what, const void* pointer, size_t bytes) {
  if (is_shared(pointer, bytes)) return;
  const long offset = static_cast<const unsigned char*>(pointer) - dynamic_shared;
  fail("%s: %p is not in shared memory (byte %ld of %d of dynamic shared memory)", what, pointer,
       offset, block.shared_bytes);
}

void need_aligned(const char* what, const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes) {
    fail("%s: misaligned address %p; it must be a multiple of %zu", what, pointer, bytes);
  }
}

inline void poison_shared(int bytes) {
  block.shared_bytes = bytes;
  memset(dynamic_shared, POISON, bytes + GUARD);
  memset(__start_shared_memory, POISON, __stop_shared_memory - __start_shared_memory);
}

inline void check_guard() {
  for (int i = 0; i < GUARD && !block.has_failed; ++i) {
    if (dynamic_shared[block.shared_bytes + i] != POISON) {
      add_to_error(name_block(), " wrote byte %d of its %d of dynamic shared memory",
                   block.shared_bytes + i, block.shared_bytes);
    }
  }
}

// Whether two threads, the first of which touched something at `epoch`, were not kept apart.
inline bool is_unordered(int other, uint32_t epoch, uint32_t sync) {
  if (epoch != block.epoch || other == block.current) return false;
  if (other == MANY_WARPS) return true;
  const int warp = other >= MANY_LANES ? other - MANY_LANES : other / LANES;
  return warp != block.current / LANES || sync == own_warp().num_syncs;
}

[[noreturn]] inline void fail_race(const char* what, size_t offset, const char* did, int other) {
  char who[32];
  snprintf(who, sizeof(who), other >= MANY_LANES ? "other threads" : "thread %d", other);
  fail("race: %s byte %zu of shared memory, which %s %s with no barrier between", what, offset, who,
       did);
}

inline void check_shared_read(Shadow* shadow, size_t offset, size_t bytes) {
  const uint32_t sync = own_warp().num_syncs;
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = shadow[i];
    if (s.write_epoch < block.first_epoch) {
      fail("reads byte %zu of shared memory, which nothing wrote", offset + i);
    }
    if (is_unordered(s.writer, s.write_epoch, s.write_sync)) {
      fail_race("reads", offset + i, "wrote", s.writer);
    }
    const int warp = block.current / LANES;
    int reader = block.current;
    if (is_unordered(s.reader, s.read_epoch, s.read_sync)) {
      const bool one_warp =
          s.reader != MANY_WARPS &&
          (s.reader >= MANY_LANES ? s.reader - MANY_LANES : s.reader / LANES) == warp;
      reader = one_warp ? MANY_LANES + warp : MANY_WARPS;
    }
    s.reader = reader;
    s.read_epoch = block.epoch;
    s.read_sync = sync;
  }
}

inline void check_shared_write(Shadow* shadow, size_t offset, size_t bytes) {
  const uint32_t sync = own_warp().num_syncs;
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = shadow[i];
    if (is_unordered(s.writer, s.write_epoch, s.write_sync)) {
      fail_race("writes", offset + i, "wrote", s.writer);
    }
    if (is_unordered(s.reader, s.read_epoch, s.read_sync)) {
      fail_race("writes", offset + i, "read", s.reader);
    }
    s = {block.epoch, 0, sync, 0, block.current, block.current};
  }
}

// Refuses an access that is wrong. `alignment`: of the type, as far as it is known.
inline void check_access(const void* pointer, size_t bytes, bool writes, size_t alignment) {
  if (!block.is_running) return;  // the launch itself reads its arguments
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) {
    fail("misaligned address %p of %zu bytes", pointer, bytes);
  }
  if (lies_in(pointer, bytes, stacks_span)) return;
  const unsigned char* p = static_cast<const unsigned char*>(pointer);
  if (is_shared(pointer, bytes)) {
    const bool is_dynamic = lies_in(pointer, bytes, dynamic_span());
    const size_t offset = is_dynamic ? p - dynamic_shared : p - __start_shared_memory;
    Shadow* shadow = shadows + offset + (is_dynamic ? 0 : MAX_SHARED);
    return writes ? check_shared_write(shadow, offset, bytes)
                  : check_shared_read(shadow, offset, bytes);
  }
  if (p >= dynamic_shared && p < dynamic_shared + sizeof(dynamic_shared)) {
    fail("%s byte %td of %d of dynamic shared memory", writes ? "writes" : "reads",
         p - dynamic_shared, block.shared_bytes);
  }
  if (lies_in(pointer, bytes, {__ehdr_start, _end})) return;
  for (const Span& tensor : tensors) {
    if (lies_in(pointer, bytes, tensor)) return;
  }
  fail("%s %zu bytes at %p, in none of the tensors it was given", writes ? "writes" : "reads",
       bytes, pointer);
}

inline bool is_checked() { return !tensors.empty(); }

void check_read(const void* pointer, size_t bytes) {
  if (is_checked()) check_access(pointer, bytes, false, 1);
}
void check_write(void* pointer, size_t bytes) {
  if (is_checked()) check_access(pointer, bytes, true, 1);
}

void start_copy(void* shared, const void* global) {
  need_aligned("cp.async", shared, 16);
  need_aligned("cp.async", global, 16);
  need_shared("cp.async", shared, 16);
  if (is_shared(global, 1)) fail("cp.async: its source %p is in shared memory", global);
  check_write(shared, 16);
  if (global != nullptr) check_read(global, 16);
  memset(shared, POISON, 16);
  Thread& thread = block.threads[block.current];
  thread.copies.push_back({static_cast<unsigned char*>(shared),
                           static_cast<const unsigned char*>(global), thread.num_groups});
}

void end_copy_group() { ++block.threads[block.current].num_groups; }

// Does the copies of all but the last `pending` groups.
void finish_copies(int pending) {
  Thread& thread = block.threads[block.current];
  for (; thread.num_copied < thread.copies.size(); ++thread.num_copied) {
    const Copy& copy = thread.copies[thread.num_copied];
    if (copy.group >= thread.num_groups - pending) return;
    check_write(copy.shared, 16);
    if (copy.global == nullptr) {
      memset(copy.shared, 0, 16);
    } else {
      memcpy(copy.shared, copy.global, 16);
    }
  }
  thread.copies.clear();
  thread.num_copied = 0;
}

}  // namespace cuda_on_cpu
