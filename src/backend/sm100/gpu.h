/* The machine table (machine.h) over a GPU: memory, maps and launches through the driver. */
#ifndef MM_SM100_GPU_H
#define MM_SM100_GPU_H

#include "backend/cuda/state.h"
#include "backend/sm100/machine.h"
#include "backend/sm100/self_check.h"

struct sm100_gpu_block {
    void *memory;
    size_t bytes;
};

/* The modules of sm_100f and the device they are loaded on; one per open device. */
struct sm100_gpu {
    mm_backend_state *device; /* of cuda-portable, whose context and stream are used */
    CUmodule modules[4];
    uint32_t module_count;
    CUfunction functions[SM100_KERNEL_COUNT];
    struct sm100_gpu_block *blocks; /* allocated now */
    uint32_t block_count;
};

/* Loads the kernels into the device's context. On failure nothing stays loaded. */
megamoe_status mm_sm100_gpu_open(mm_backend_state *device, struct sm100_gpu *gpu, struct sm100_machine *machine);
/* After what was allocated has been released. */
void mm_sm100_gpu_close(struct sm100_gpu *gpu);
uint64_t mm_sm100_gpu_bytes(const struct sm100_gpu *gpu); /* allocated now */

/* struct sm100_portable's function; the context is a struct sm100_gpu. */
megamoe_status mm_sm100_gpu_multiply(void *gpu, const struct sm100_product *product, float *results);

#endif
