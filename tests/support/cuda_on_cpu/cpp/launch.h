// What a library exports: the types of its kernel's parameters, and a launch.
#pragma once

#include <tuple>

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

struct Span;

// As Python gives it.
struct Request {
  unsigned grid[3];
  unsigned block[3];
  int shared_bytes;
  int num_tensors;
  const Span* tensors;  // memory that the kernel may touch; none: any
  unsigned char* stacks;
  size_t stack_bytes;  // of a thread
  uint64_t seed;       // of the order of blocks and warps
};

// Runs a kernel in every thread. Returns the error, or null.
const char* run(void (*invoke)(), const Request& request);

// Code of a parameter's type as Python's `struct` has it; signed for unsigned.
template <typename T>
constexpr char code_of() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_integral_v<T> && sizeof(T) == 8) return 'q';
  if (std::is_integral_v<T> && sizeof(T) == 4) return 'i';
  return 'x';
}

template <typename... P>
struct Launch {
  static constexpr char codes[] = {code_of<P>()..., '\0'};
  static inline void (*kernel)(P...);
  static inline std::tuple<P...> args;

  static void invoke() { std::apply(kernel, args); }

  // Parameters lie at multiples of their size, as in a struct.
  static void unpack(const unsigned char* packed) {
    size_t offset = 0;
    const auto read = [&](auto& value) {
      constexpr size_t bytes = sizeof(value);
      offset = (offset + bytes - 1) / bytes * bytes;
      memcpy(&value, packed + offset, bytes);
      offset += bytes;
    };
    std::apply([&](auto&... arg) { (read(arg), ...); }, args);
  }
};

template <typename... P>
Launch<P...> launch_of(void (*)(P...));

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_EXPORT(function)                                             \
  using Launched = decltype(cuda_on_cpu::launch_of(function));                   \
  extern "C" __attribute__((visibility("default"))) const char* kernel_codes() { \
    return Launched::codes;                                                      \
  }                                                                              \
  extern "C" __attribute__((visibility("default"))) const char* kernel_run(      \
      const cuda_on_cpu::Request* request, const unsigned char* packed) {        \
    Launched::kernel = function;                                                 \
    Launched::unpack(packed);                                                    \
    return cuda_on_cpu::run(Launched::invoke, *request);                         \
  }
