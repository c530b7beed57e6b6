// See fiber.h. The assembly follows the System V ABI: only callee-saved registers survive a switch.
#include "fiber.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#if defined(__x86_64__) && !defined(SM100_MODEL_UCONTEXT)
#    define FIBER_ASSEMBLY
#else
#    include <ucontext.h>
#endif

static constexpr size_t guard_bytes = 64 * 1024; // a multiple of every page size in use

// A guard splits the mapping in two, and Linux allows a process 65530 of them by default. A larger run, 85 CTAs of 384
// threads, goes without guards: what it does to a stack, a smaller one does as well.
static constexpr size_t guarded_stacks_max = 30000;

void *fiber_stacks_open(size_t count) {
    const size_t bytes = count * (fiber_stack_bytes + guard_bytes);
    void *stacks = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        perror("sm100_model: cannot reserve fiber stacks");
        exit(2);
    }
    const bool guarded = count <= guarded_stacks_max;
    for (size_t i = 0; i < (guarded ? count : 1); i++)
        if (mprotect(guarded ? fiber_stack(stacks, i) : stacks, guarded ? fiber_stack_bytes : bytes,
                     PROT_READ | PROT_WRITE)) {
            perror("sm100_model: cannot map a fiber stack (too many threads for vm.max_map_count?)");
            exit(2);
        }
    return stacks;
}

void fiber_stacks_close(void *stacks, size_t count) {
    munmap(stacks, count * (fiber_stack_bytes + guard_bytes));
}

void *fiber_stack(void *stacks, size_t index) {
    return static_cast<char *>(stacks) + index * (fiber_stack_bytes + guard_bytes) + guard_bytes;
}

#if defined(FIBER_ASSEMBLY)

extern "C" void sm100_fiber_switch(void **from, void *to);
extern "C" void sm100_fiber_start(void);

__asm__(".text\n"
        ".globl sm100_fiber_switch\n"
        "sm100_fiber_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".globl sm100_fiber_start\n"
        "sm100_fiber_start:\n"
        "  movq %rbx, %rdi\n"
        "  callq *%r12\n"
        "  ud2\n");

void fiber_prepare(Fiber &fiber, void *stack, size_t stack_bytes, void (*entry)(void *), void *argument) {
    // What the first switch pops: r15, r14, r13, r12 = entry, rbx = argument, rbp, then the return address.
    // Popping the return address leaves the stack pointer 7 words above sp, where the ABI wants a multiple of 16.
    uintptr_t top = reinterpret_cast<uintptr_t>(static_cast<char *>(stack) + stack_bytes) & ~uintptr_t{15};
    uintptr_t *sp = reinterpret_cast<uintptr_t *>(top - 16) - 7;
    sp[3] = reinterpret_cast<uintptr_t>(entry);
    sp[4] = reinterpret_cast<uintptr_t>(argument);
    sp[6] = reinterpret_cast<uintptr_t>(&sm100_fiber_start);
    fiber.state = sp;
}

void fiber_switch(Fiber &from, Fiber &to) {
    sm100_fiber_switch(&from.state, to.state);
}

#else

static void start(unsigned entry_high, unsigned entry_low, unsigned argument_high, unsigned argument_low) {
    const uintptr_t entry = (static_cast<uintptr_t>(entry_high) << 32) | entry_low;
    const uintptr_t argument = (static_cast<uintptr_t>(argument_high) << 32) | argument_low;
    reinterpret_cast<void (*)(void *)>(entry)(reinterpret_cast<void *>(argument));
}

void fiber_prepare(Fiber &fiber, void *stack, size_t stack_bytes, void (*entry)(void *), void *argument) {
    ucontext_t *context = static_cast<ucontext_t *>(stack); // the low end of the stack, far from its use
    getcontext(context);
    context->uc_stack.ss_sp = static_cast<char *>(stack) + sizeof(ucontext_t);
    context->uc_stack.ss_size = stack_bytes - sizeof(ucontext_t);
    context->uc_link = nullptr;
    const uintptr_t e = reinterpret_cast<uintptr_t>(entry), a = reinterpret_cast<uintptr_t>(argument);
    makecontext(context, reinterpret_cast<void (*)()>(start), 4, static_cast<unsigned>(e >> 32),
                static_cast<unsigned>(e), static_cast<unsigned>(a >> 32), static_cast<unsigned>(a));
    fiber.state = context;
}

void fiber_switch(Fiber &from, Fiber &to) {
    static ucontext_t main_context;
    if (!from.state) from.state = &main_context;
    swapcontext(static_cast<ucontext_t *>(from.state), static_cast<ucontext_t *>(to.state));
}

#endif
