/* The machine table (machine.h) over a GPU: memory, maps and launches through the driver. */
#ifndef MM_SM100_GPU_H
#define MM_SM100_GPU_H

#include "backend/cuda/state.h"
#include "backend/sm100/machine.h"

/* The modules of sm_100f and the device they are loaded on; one per open device. */
struct sm100_gpu {
    mm_backend_state *device; /* of cuda-portable, whose context and stream are used */
    CUmodule modules[4];
    uint32_t module_count;
    CUfunction functions[SM100_KERNEL_COUNT];
    uint64_t bytes; /* allocated */
};

/* Loads the kernels into the device's context. On failure nothing stays loaded. */
megamoe_status mm_sm100_gpu_open(mm_backend_state *device, struct sm100_gpu *gpu, struct sm100_machine *machine);
void mm_sm100_gpu_close(struct sm100_gpu *gpu);

#endif
