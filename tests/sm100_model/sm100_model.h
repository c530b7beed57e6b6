/* The host's side of the functional model: what a backend or a test calls in place of the CUDA driver.
 *
 * The model runs kernels written with src/backend/sm100/device.h on the CPU, one fiber per thread, and stops at the
 * first thing that the hardware would turn into garbage, a hang or a fault, with a sentence that says what and where.
 * Nothing here is thread-safe and one run is active at a time; runs are deterministic in their seed.
 * Device memory is ordinary host memory that has been registered. */
#ifndef SM100_MODEL_H
#define SM100_MODEL_H

#include <stddef.h>
#include <stdint.h>
#include "tensor_map.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Device memory. ---- */

enum sm100_model_memory_kind {
    SM100_MODEL_READ_WRITE = 0, /* accesses through ptx wrappers are checked for bounds, races and proxy fences */
    SM100_MODEL_READ_ONLY = 1   /* bounds only; any store is an error */
};
/* Registers [base, base + bytes), base a multiple of 16, under a name used in messages (copied). Regions must not
 * overlap. Every global address that a wrapper or a tensor map touches must lie in one. The host may read and write
 * registered memory between runs. */
void sm100_model_memory_register(void *base, size_t bytes, const char *name, enum sm100_model_memory_kind kind);
void sm100_model_memory_unregister(void *base);
/* Allocation (256-byte aligned, filled with 0xAA poison), registration and their reverse in one call. */
void *sm100_model_memory_alloc(size_t bytes, const char *name, enum sm100_model_memory_kind kind);
void sm100_model_memory_free(void *base);

/* ---- Tensor maps: cuTensorMapEncodeTiled with its argument checks. ---- */

enum sm100_model_data_type {
    SM100_MODEL_U8,
    SM100_MODEL_U16,
    SM100_MODEL_U32,
    SM100_MODEL_F32,
    SM100_MODEL_BF16,
    SM100_MODEL_U4_ALIGN8B,
    SM100_MODEL_U64
};
enum sm100_model_swizzle {
    SM100_MODEL_SWIZZLE_NONE,
    SM100_MODEL_SWIZZLE_32B,
    SM100_MODEL_SWIZZLE_64B,
    SM100_MODEL_SWIZZLE_128B
};
/* As the driver's: dims and box in elements, innermost first; rank - 1 strides in bytes; element strides 1, no
 * interleave, zero fill. Returns 0, or -1 with the reason in sm100_model_error(). */
int sm100_model_tensor_map_encode(struct sm100_tensor_map *map, enum sm100_model_data_type type, uint32_t rank,
                                  void *global_address, const uint64_t *global_dims, const uint64_t *global_strides,
                                  const uint32_t *box_dims, enum sm100_model_swizzle swizzle);
const char *sm100_model_error(void);

/* ---- Launches. ---- */

struct sm100_model_launch {
    const char *name;                 /* for messages */
    void (*kernel)(const void *args); /* SM100_MODEL_THUNK(kernel, struct args) */
    const void *args;                 /* must stay valid during the run */
    uint32_t grid, cluster, block;    /* CTAs, CTAs per cluster (0 means 1), threads per CTA; one dimension each */
    uint32_t dynamic_shared_bytes;    /* at most 232448 */
};

struct sm100_model_options {
    size_t struct_size;
    uint64_t seed;          /* chooses the schedule: which thread runs, when asynchronous work completes */
    uint32_t resident_ctas; /* how many CTAs are in flight at once, per launch; 0 means the whole grid */
    int hardware_order;     /* 1 allows tcgen05.cp over scale factors that an unfinished mma of the same thread
                               still reads: undocumented, but CUTLASS relies on it */
    int time_runs;          /* 1: when nothing else can happen, globaltimer jumps ahead so that bounded waits can
                               expire; 0: that situation is reported as a deadlock */
    uint64_t steps_max;     /* fiber switches before the run is called endless; 0 means 2 billion */
    /* Kernels in CUDA's own words (sm100_model_cuda.h): */
    uint32_t grid_x, grid_y;      /* the launch's grid is x * y * z CTAs; 0 means one dimension */
    uint32_t static_shared_bytes; /* room before the dynamic shared memory for MM_SHARED variables */
};

enum sm100_model_status { SM100_MODEL_OK = 0, SM100_MODEL_TRAP = 1, SM100_MODEL_DEADLOCK = 2, SM100_MODEL_USAGE = 3 };

struct sm100_model_report {
    enum sm100_model_status status;
    char message[8192]; /* empty when all is well */
    uint64_t steps;     /* fiber switches */
    uint64_t async_ops; /* TMA, bulk copies, mma, cp, commits that completed */
    uint64_t mma_count;
};

/* Runs several launches at the same time (one per simulated rank, sharing registered memory) until all have ended or
 * the first error. Returns the status. options may be NULL. */
enum sm100_model_status sm100_model_run(const struct sm100_model_launch *launches, uint32_t launch_count,
                                        const struct sm100_model_options *options, struct sm100_model_report *report);

#ifdef __cplusplus
}

/* Adapts a kernel, void k(const args_type &), to the pointer that sm100_model_launch holds. */
template <typename args_type, void (*kernel)(const args_type &)> static void sm100_model_thunk(const void *args) {
    kernel(*static_cast<const args_type *>(args));
}
#    define SM100_MODEL_THUNK(kernel, args_type) (&sm100_model_thunk<args_type, kernel>)
#endif
#endif
