/*
 * What this backend asks of the machine below it: memory, copies, tensor maps, launches. The driver fills
 * this table for a GPU (backend/cuda), tests/backend/sm100 fills it with the functional model; everything
 * above is the same code.
 */
#ifndef MM_SM100_MACHINE_H
#define MM_SM100_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include "backend/sm100/tensor_map.h"
#include "megamoe/megamoe.h"

/* The GEMM instances first, in the order of the tile table. */
enum sm100_kernel {
    SM100_KERNEL_L1_SMALL,
    SM100_KERNEL_L1_LARGE,
    SM100_KERNEL_L2_SMALL,
    SM100_KERNEL_L2_LARGE,
    SM100_KERNEL_L2_WIDE,
    SM100_KERNEL_PLAN,
    SM100_KERNEL_STAGE,
    SM100_KERNEL_COMBINE,
    SM100_KERNEL_COUNT
};

struct sm100_launch {
    enum sm100_kernel kernel;
    uint32_t grid, cluster, block, shared_bytes;
    const void *args; /* copied before the call returns */
    size_t args_bytes;
};

/* A tensor map: elements of element_bytes (1 or 2), innermost first; strides[i] is of dimension i + 1, in
 * bytes. */
struct sm100_map {
    const void *base;
    uint32_t element_bytes, rank;
    uint64_t dims[3], strides[2];
    uint32_t box[3];
    bool swizzled; /* rows of 128 bytes, 128-byte swizzle */
};

struct sm100_machine {
    void *context;
    uint32_t multiprocessors;
    /* NULL: none left. `name` is for messages. The memory's content is undefined. */
    void *(*alloc)(void *context, size_t bytes, const char *name);
    void (*release)(void *context, void *memory); /* NULL is allowed */
    /* Host to device and back; both wait for all work and are done when they return. */
    megamoe_status (*copy_in)(void *context, void *device, const void *host, size_t bytes);
    megamoe_status (*copy_out)(void *context, void *host, const void *device, size_t bytes);
    megamoe_status (*map)(void *context, const struct sm100_map *map, struct sm100_tensor_map *encoded);
    megamoe_status (*launch)(void *context, const struct sm100_launch *launch, void *stream);
};

#endif
