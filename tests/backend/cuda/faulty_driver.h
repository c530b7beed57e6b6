/*
 * Stands between the library and its CUDA driver (fake_driver.cpp): counts every call, fails the one that is asked for,
 * and keeps the books on what was taken from the driver and not given back. Kernels are not launched.
 */
#ifndef FAULTY_DRIVER_H
#define FAULTY_DRIVER_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/cuda/driver.h"

typedef struct faulty_driver {
    const char *only;   /* count the calls of this function of mm_driver alone; NULL: of all that can fail */
    uint32_t fail_at;   /* the so-manyth counted call fails; 0: none */
    bool ever_after;    /* and with it all that come after, as in a process whose kernel crashed */
    CUresult result;    /* what it fails with */
    uint32_t calls;     /* counted since `calls` was set to 0 */
    const char *failed; /* the function that failed last, or NULL */
    int64_t held;       /* objects taken from the driver minus those given back, context and current context included */
    uint64_t allocations, allocated_bytes; /* of device memory, ever */
    uint64_t copies, copied_bytes;         /* from host to device, ever */
    uint64_t launches, shared_bytes_max;   /* dynamic shared memory of the largest launch */
    CUstream fill_stream;                  /* of the last fill */
} faulty_driver;

extern faulty_driver faults;

/* Puts itself into the library's table, once; the table, for tests that replace more of it. NULL: there is no driver.
 */
mm_driver *faulty_driver_install(void);

#ifdef __cplusplus
}
#endif

#endif
