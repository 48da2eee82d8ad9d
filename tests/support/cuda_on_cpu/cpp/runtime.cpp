// All blocks of a launch in turn. Linked with one kernel, whose library this is all of.
#include <setjmp.h>
#include <signal.h>

#include <utility>

#include "block.h"
#include "launch.h"
#include "memory.h"
#include "sanitize.h"
#include "warp.h"

namespace cuda_on_cpu {

sigjmp_buf crashed;

void on_crash(int signal, siginfo_t* info, void*) {
  add_to_error(name_thread(), "signal %d at address %p: %s", signal, info->si_addr,
               signal == SIGFPE ? "a division by zero"
                                : "memory that is not there, or a misaligned address");
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
uint64_t shuffled(uint64_t i, uint64_t n, uint64_t seed) {
  if (seed == 0) return i;
  const auto has_common_divisor = [](uint64_t a, uint64_t b) {
    while (b) a = std::exchange(b, a % b);
    return a != 1;
  };
  // A multiplier without a common divisor with n visits every block once.
  uint64_t step = (seed * 0x9e3779b97f4a7c15u >> 33) % n | 1;
  while (has_common_divisor(step, n)) step += 2;
  return (i * step + seed) % n;
}

const char* run(void (*invoke)(), const Request& request) {
  gridDim = {request.grid[0], request.grid[1], request.grid[2]};
  blockDim = {request.block[0], request.block[1], request.block[2]};
  tensors.assign(request.tensors, request.tensors + request.num_tensors);
  const size_t num_stacks = blockDim.x * blockDim.y * blockDim.z;
  stacks_span = {request.stacks, request.stacks + num_stacks * request.stack_bytes};
  invoke_kernel = invoke;
  block.has_failed = false;
  block.is_running = true;
  CrashGuard guard;
  if (sigsetjmp(crashed, 1) == 0) {
    const uint64_t num_blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
    for (uint64_t i = 0; i < num_blocks && !block.has_failed; ++i) {
      const uint64_t b = shuffled(i, num_blocks, request.seed);
      blockIdx = {static_cast<unsigned>(b % gridDim.x),
                  static_cast<unsigned>(b / gridDim.x % gridDim.y),
                  static_cast<unsigned>(b / gridDim.x / gridDim.y)};
      poison_shared(request.shared_bytes);
      begin_threads(blockDim, request.stacks, request.stack_bytes);
      run_threads(static_cast<unsigned>(request.seed + i));
      check_guard();
    }
  }
  block.is_running = false;
  fflush(stdout);
  return block.has_failed ? block.error : nullptr;
}

}  // namespace cuda_on_cpu
