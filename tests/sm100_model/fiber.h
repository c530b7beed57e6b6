/* Fibers: the stacks that the threads of a kernel run on, and the switch between them.
 *
 * A switch takes a few nanoseconds on x86-64 (it saves six registers); elsewhere ucontext is used. Fibers are
 * abandoned, not unwound, when a kernel traps, so code that runs on them must not own anything. */
#ifndef SM100_MODEL_FIBER_H
#define SM100_MODEL_FIBER_H

#include <stddef.h>

struct Fiber {
    void *state = nullptr; // x86-64: the saved stack pointer; elsewhere: a ucontext_t
};

// Makes the fiber start in entry(argument) at the first switch to it. entry must never return.
void fiber_prepare(Fiber &fiber, void *stack, size_t stack_bytes, void (*entry)(void *), void *argument);
void fiber_switch(Fiber &from, Fiber &to);

// count stacks with an unmapped page below each, in one reservation; memory is used only where it is touched.
constexpr size_t fiber_stack_bytes = 128 * 1024;
void *fiber_stacks_open(size_t count);
void fiber_stacks_close(void *stacks, size_t count);
void *fiber_stack(void *stacks, size_t index);

#endif
