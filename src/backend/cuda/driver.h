/*
 * The CUDA driver, loaded at run time: the library links neither libcuda nor the CUDA runtime and works without them.
 * Owns the function table and turns a CUresult into a sentence.
 */
#ifndef MM_CUDA_DRIVER_H
#define MM_CUDA_DRIVER_H

#include <cuda.h>

#include "megamoe/megamoe.h"

/* field, symbol: the versioned symbols that cuda.h of CUDA 13 maps its names to. */
#define MM_DRIVER_FUNCTIONS(X)                                                                                         \
    X(init, cuInit)                                                                                                    \
    X(driver_version, cuDriverGetVersion)                                                                              \
    X(error_string, cuGetErrorString)                                                                                  \
    X(device_count, cuDeviceGetCount)                                                                                  \
    X(device_get, cuDeviceGet)                                                                                         \
    X(device_name, cuDeviceGetName)                                                                                    \
    X(device_attribute, cuDeviceGetAttribute)                                                                          \
    X(context_retain, cuDevicePrimaryCtxRetain)                                                                        \
    X(context_release, cuDevicePrimaryCtxRelease_v2)                                                                   \
    X(context_push, cuCtxPushCurrent_v2)                                                                               \
    X(context_pop, cuCtxPopCurrent_v2)                                                                                 \
    X(module_load, cuModuleLoadData)                                                                                   \
    X(module_unload, cuModuleUnload)                                                                                   \
    X(module_function, cuModuleGetFunction)                                                                            \
    X(context_wait, cuCtxSynchronize)                                                                                  \
    X(pointer_attributes, cuPointerGetAttributes)                                                                      \
    X(function_get, cuFuncGetAttribute)                                                                                \
    X(function_set, cuFuncSetAttribute)                                                                                \
    X(launch, cuLaunchKernelEx)                                                                                        \
    X(memory_allocate, cuMemAlloc_v2)                                                                                  \
    X(memory_free, cuMemFree_v2)                                                                                       \
    X(host_allocate, cuMemHostAlloc)                                                                                   \
    X(host_free, cuMemFreeHost)                                                                                        \
    X(copy_to_device, cuMemcpyHtoDAsync_v2)                                                                            \
    X(copy_to_host, cuMemcpyDtoHAsync_v2)                                                                              \
    X(fill, cuMemsetD8Async)                                                                                           \
    X(stream_create, cuStreamCreate)                                                                                   \
    X(stream_destroy, cuStreamDestroy_v2)                                                                              \
    X(copy, cuMemcpyDtoDAsync_v2)                                                                                      \
    X(stream_wait, cuStreamSynchronize)                                                                                \
    X(stream_wait_event, cuStreamWaitEvent)                                                                            \
    X(event_create, cuEventCreate)                                                                                     \
    X(event_destroy, cuEventDestroy_v2)                                                                                \
    X(event_record, cuEventRecord)                                                                                     \
    X(event_wait, cuEventSynchronize)                                                                                  \
    X(event_elapsed, cuEventElapsedTime)                                                                               \
    X(tensor_map_encode, cuTensorMapEncodeTiled)

typedef struct mm_driver {
#define MM_DRIVER_FIELD(field, symbol) __typeof__(symbol) *field;
    MM_DRIVER_FUNCTIONS(MM_DRIVER_FIELD)
#undef MM_DRIVER_FIELD
} mm_driver;

/* The table, loaded once per process. UNSUPPORTED_DEVICE and what to install if there is no usable driver. */
megamoe_status mm_driver_load(const mm_driver **driver);

/* DEVICE_ERROR (or OUT_OF_MEMORY): "<what>: <the driver's own words>". OK for CUDA_SUCCESS. */
megamoe_status mm_driver_status(const mm_driver *driver, CUresult result, const char *what);

#endif
