// Threads that switch when they say so: each has a stack, and only one runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

// A fiber is its stack pointer; what a function must preserve lies on its stack.
struct Fiber {
  void* stack_pointer = nullptr;
};

extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
  .text
  .hidden cuda_on_cpu_switch
  .globl cuda_on_cpu_switch
  .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");

// Makes a fiber that begins in `entry`, which never returns. `top`: end of its stack.
inline void make_fiber(Fiber& fiber, unsigned char* top, size_t, void (*entry)()) {
  uintptr_t* stack =
      reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  *--stack = 0;  // where a return address would be: the stack is now aligned as after a call
  *--stack = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--stack = 0;
  fiber.stack_pointer = stack;
}

inline void switch_fiber(Fiber& from, Fiber& to) {
  cuda_on_cpu_switch(&from.stack_pointer, to.stack_pointer);
}

#else

}  // namespace cuda_on_cpu
#include <ucontext.h>
namespace cuda_on_cpu {

struct Fiber {
  ucontext_t context;
};

inline void make_fiber(Fiber& fiber, unsigned char* top, size_t stack_bytes, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = top - stack_bytes;
  fiber.context.uc_stack.ss_size = stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

}  // namespace cuda_on_cpu
