/* Finds libcuda.so.1 and its functions. */
#include "backend/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "error.h"

static mm_driver table;
static const char *missing = "libcuda.so.1"; /* what could not be found; NULL: all is there */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    missing = NULL;
#define MM_DRIVER_FIND(field, symbol)                                                                                  \
    *(void **)&table.field = dlsym(library, MM_DRIVER_NAME(symbol));                                                   \
    if (!table.field) missing = MM_DRIVER_NAME(symbol);
#define MM_DRIVER_NAME(symbol) MM_DRIVER_STRING(symbol)
#define MM_DRIVER_STRING(symbol) #symbol
    MM_DRIVER_FUNCTIONS(MM_DRIVER_FIND)
}

megamoe_status mm_driver_load(const mm_driver **driver) {
    pthread_once(&once, load);
    if (missing == NULL) {
        *driver = &table;
        return MEGAMOE_OK;
    }
    if (!table.init)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                       "no NVIDIA driver: libcuda.so.1 was not found; install the driver or use --backend cpu");
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the NVIDIA driver is too old: it has no %s; install 580 or later",
                   missing);
}

megamoe_status mm_driver_status(const mm_driver *driver, CUresult result, const char *what) {
    const char *words = NULL;
    if (result == CUDA_SUCCESS) return MEGAMOE_OK;
    if (driver->error_string(result, &words) != CUDA_SUCCESS || !words) words = "unknown error";
    return mm_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? MEGAMOE_OUT_OF_MEMORY : MEGAMOE_DEVICE_ERROR, "%s: %s", what,
                   words);
}
