/* The argument struct of example_kernel.cu, shared by the kernel and the host code that launches it. */
#ifndef EXAMPLE_KERNEL_H
#define EXAMPLE_KERNEL_H
#include "../../src/backend/sm100/tensor_map.h"

struct example_args {
    struct sm100_tensor_map map_a, map_b; /* 128 rows of 128 bytes of packed E2M1, 128-byte swizzle */
    const void *sfa, *sfb;                /* four 512-byte scale blocks each */
    float *d;
};
#ifdef MEGAMOE_SM100_MODEL
extern "C" void example_kernel(const struct example_args &args);
#endif
#endif
