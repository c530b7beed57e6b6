/*
 * Host memory where a GPU function takes device memory: it is copied to the device and its results back, and the call
 * waits for them. Memory that the device reaches is used as it is, and nothing waits.
 */
#ifndef MM_CUDA_VISIT_H
#define MM_CUDA_VISIT_H

#include "backend/cuda/state.h"

typedef struct mm_visit {
    mm_backend_state *state;
    CUstream stream;
    mm_block *blocks; /* NULL: nobody came from the host */
    struct {
        void *host;
        CUdeviceptr device;
        uint64_t bytes;
    } returns[3];
    uint32_t return_count;
} mm_visit;

/* *p becomes where the device reads those bytes. p NULL stays NULL. */
megamoe_status mm_visit_read(mm_visit *visit, const void *p, uint64_t bytes, const void **device);
/* *p becomes where the device writes them. */
megamoe_status mm_visit_write(mm_visit *visit, void *p, uint64_t bytes, void **device);
/* Brings results home if status is OK, and frees what the visit took. Returns the first failure. */
megamoe_status mm_visit_end(mm_visit *visit, megamoe_status status);

#endif
