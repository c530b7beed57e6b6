/* See visit.h. */
#include "backend/cuda/visit.h"

#include "error.h"

static megamoe_status take_room(mm_visit *visit, uint64_t bytes, void **device) {
    return mm_block_create(visit->state, bytes ? bytes : 1, "a copy of host memory", &visit->blocks, device);
}

megamoe_status mm_visit_read(mm_visit *visit, const void *p, uint64_t bytes, const void **device) {
    void *copy = NULL;
    *device = p;
    if (!mm_cuda_is_host(visit->state, p)) return MEGAMOE_OK;
    MM_TRY(take_room(visit, bytes, &copy));
    *device = copy;
    CUresult result = visit->state->driver->copy_to_device((CUdeviceptr)(uintptr_t)copy, p, bytes, visit->stream);
    return mm_driver_status(visit->state->driver, result, "copying host memory to the GPU");
}

megamoe_status mm_visit_write(mm_visit *visit, void *p, uint64_t bytes, void **device) {
    *device = p;
    if (!mm_cuda_is_host(visit->state, p)) return MEGAMOE_OK;
    MM_TRY(take_room(visit, bytes, device));
    visit->returns[visit->return_count].host = p;
    visit->returns[visit->return_count].device = (CUdeviceptr)(uintptr_t)*device;
    visit->returns[visit->return_count++].bytes = bytes;
    return MEGAMOE_OK;
}

megamoe_status mm_visit_end(mm_visit *visit, megamoe_status status) {
    const mm_driver *driver = visit->state->driver;
    CUresult result = CUDA_SUCCESS;
    if (!visit->blocks) return status;
    for (uint32_t i = 0; i < visit->return_count && status == MEGAMOE_OK && result == CUDA_SUCCESS; i++)
        result = driver->copy_to_host(visit->returns[i].host, visit->returns[i].device, visit->returns[i].bytes,
                                      visit->stream);
    CUresult waited = driver->stream_wait(visit->stream);
    if (result == CUDA_SUCCESS) result = waited;
    mm_blocks_free(visit->state, &visit->blocks);
    return status == MEGAMOE_OK ? mm_driver_status(driver, result, "copying results to the host") : status;
}
