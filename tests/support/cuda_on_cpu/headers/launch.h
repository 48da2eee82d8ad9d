// Launching a kernel from outside: its parameters by their C++ types, all blocks in turn.
#pragma once

#include <setjmp.h>
#include <signal.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "block.h"

namespace cuda_on_cpu {

// Code of a parameter's type, as Python's `struct` has it; signed for unsigned.
template <typename T>
constexpr char code_of() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_same_v<T, bool>) return '?';
  if (std::is_integral_v<T> && sizeof(T) == 8) return 'q';
  if (std::is_integral_v<T> && sizeof(T) == 4) return 'i';
  return 'x';
}

// The kernel that the library has, and what it was given.
template <typename... P>
struct Launch {
  static inline void (*kernel)(P...);
  static inline std::tuple<P...> args;
  static constexpr char codes[] = {code_of<P>()..., '\0'};

  static void invoke() { std::apply(kernel, args); }

  // Parameters lie at multiples of their size, as in a struct. Returns how many bytes they take.
  static size_t unpack(const unsigned char* packed) {
    size_t offset = 0;
    std::apply(
        [&](auto&... arg) {
          const auto read = [&](auto& value) {
            offset = (offset + alignof(decltype(value)) - 1) / alignof(decltype(value)) *
                     alignof(decltype(value));
            memcpy(&value, packed + offset, sizeof(value));
            offset += sizeof(value);
          };
          (read(arg), ...);
        },
        args);
    return offset;
  }
};

template <typename... P>
Launch<P...> launch_of(void (*)(P...));

inline sigjmp_buf crashed;
inline void on_crash(int signal, siginfo_t* info, void*) {
  snprintf(block.error, sizeof(block.error),
           "block (%u, %u, %u), thread (%u, %u, %u): signal %d at address %p: %s", blockIdx.x,
           blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, signal, info->si_addr,
           signal == SIGFPE ? "a division by zero" : "an access to memory that is not there");
  block.has_failed = true;
  siglongjmp(crashed, 1);
}

// Turns crashes of a kernel into errors for as long as it lives.
class CrashGuard {
 public:
  CrashGuard() {
    stack_t stack = {};
    stack.ss_sp = stack_;
    stack.ss_size = sizeof(stack_);
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &action, &old_actions_[i]);
  }
  ~CrashGuard() {
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_actions_[3];
  stack_t old_stack_;
  alignas(16) inline static char stack_[65536];
};

// The i-th of n blocks in an order that follows from `seed`: 0 is the natural one.
inline uint64_t shuffled(uint64_t i, uint64_t n, uint64_t seed) {
  if (seed == 0) return i;
  // A multiplier without a common divisor with n visits every block once.
  uint64_t step = (seed * 0x9e3779b97f4a7c15u >> 33) % n | 1;
  const auto has_common_divisor = [](uint64_t a, uint64_t b) {
    while (b) a = std::exchange(b, a % b);
    return a != 1;
  };
  while (has_common_divisor(step, n)) step += 2;
  return (i * step + seed) % n;
}

// Runs all blocks. `stacks` has room for a block's threads, `stack_bytes` each. Returns the error,
// or null.
inline const char* run_grid(dim3 grid, dim3 size, int shared_bytes, unsigned char* stacks,
                            size_t stack_bytes, uint64_t seed) {
  gridDim = grid;
  blockDim = size;
  block.has_failed = false;
  CrashGuard guard;
  if (sigsetjmp(crashed, 1) == 0) {
    const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
    for (uint64_t i = 0; i < num_blocks && !block.has_failed; ++i) {
      const uint64_t b = shuffled(i, num_blocks, seed);
      blockIdx = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                  static_cast<unsigned>(b / grid.x / grid.y)};
      poison_shared(shared_bytes);
      begin_block(size, stacks, stack_bytes);
      run_threads(static_cast<unsigned>(seed + i));
    }
  }
  fflush(stdout);
  return block.has_failed ? block.error : nullptr;
}

}  // namespace cuda_on_cpu

// What a library exports of its kernel.
#define CUDA_ON_CPU_EXPORT(function)                                                               \
  using Launched = decltype(cuda_on_cpu::launch_of(function));                                     \
  extern "C" __attribute__((visibility("default"))) const char* codes() { return Launched::codes; } \
  extern "C" __attribute__((visibility("default"))) const char* run(                               \
      const unsigned* grid, const unsigned* size, int shared_bytes, const unsigned char* packed,   \
      unsigned char* stacks, size_t stack_bytes, uint64_t seed) {                                  \
    Launched::kernel = function;                                                                   \
    Launched::unpack(packed);                                                                      \
    cuda_on_cpu::invoke_kernel = Launched::invoke;                                                 \
    return cuda_on_cpu::run_grid({grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]},         \
                                 shared_bytes, stacks, stack_bytes, seed);                         \
  }
