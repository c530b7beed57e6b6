/* Arguments of layout_kernel.cu. */
#ifndef LAYOUT_KERNEL_H
#define LAYOUT_KERNEL_H
#include "../../src/backend/sm100/tensor_map.h"

struct layout_args {
    struct sm100_tensor_map map;
    const uint8_t *a, *b, *scales; /* images of shared memory */
    uint8_t *out;
    uint64_t desc_b; /* without its address */
    uint32_t blocks, steps, step_b, bytes_b;
};
#ifdef MEGAMOE_SM100_MODEL
extern "C" void layout_tma_kernel(const struct layout_args &args);
extern "C" void layout_scales_kernel(const struct layout_args &args);
extern "C" void layout_mma_kernel(const struct layout_args &args);
#endif
#endif
