// What the compiler calls in libraries that are built to be checked. No sanitizer is linked.
#pragma once

#include "memory.h"

// -fsanitize=thread: before each access to memory.
#define CHECKED_ACCESS(bytes)                                                                   \
  void __tsan_read##bytes(void* p) { cuda_on_cpu::check_access(p, bytes, false, bytes); }       \
  void __tsan_write##bytes(void* p) { cuda_on_cpu::check_access(p, bytes, true, bytes); }       \
  void __tsan_unaligned_read##bytes(void* p) { cuda_on_cpu::check_access(p, bytes, false, 1); } \
  void __tsan_unaligned_write##bytes(void* p) { cuda_on_cpu::check_access(p, bytes, true, 1); }

// -fsanitize=bounds and its like: where something is wrong. What they are given first is the place.
struct SourceLocation {
  const char* file;
  unsigned line, column;
};

#define FOUND_FAULT(name, words, ...)                                                             \
  void __ubsan_handle_##name(const SourceLocation* at, ##__VA_ARGS__) {                           \
    if (cuda_on_cpu::block.is_running) cuda_on_cpu::fail("%s:%u: %s", at->file, at->line, words); \
  }

extern "C" {
CHECKED_ACCESS(1)
CHECKED_ACCESS(2)
CHECKED_ACCESS(4)
CHECKED_ACCESS(8)
CHECKED_ACCESS(16)
void __tsan_read_range(void* p, size_t n) { cuda_on_cpu::check_access(p, n, false, 1); }
void __tsan_write_range(void* p, size_t n) { cuda_on_cpu::check_access(p, n, true, 1); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_init() {}

FOUND_FAULT(type_mismatch_v1, "a misaligned address", void*)
FOUND_FAULT(out_of_bounds, "an index outside of its array", void*)
FOUND_FAULT(shift_out_of_bounds, "a shift by too much", void*, void*)
FOUND_FAULT(add_overflow, "a sum that overflows", void*, void*)
FOUND_FAULT(sub_overflow, "a difference that overflows", void*, void*)
FOUND_FAULT(mul_overflow, "a product that overflows", void*, void*)
FOUND_FAULT(negate_overflow, "a negation that overflows", void*)
FOUND_FAULT(divrem_overflow, "a quotient that overflows, or a division by zero", void*, void*)
}
