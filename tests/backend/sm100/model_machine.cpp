// The functional model behind the table that the backend launches through.
#include "model_machine.h"

#include <string.h>
#include <set>

#include "backend/sm100/arguments.h"
#include "sm100_model.h"

extern "C" {
#include "error.h"
}

extern "C" {
void sm100_l1_small(const struct sm100_gemm_args &);
void sm100_l1_large(const struct sm100_gemm_args &);
void sm100_l2_small(const struct sm100_gemm_args &);
void sm100_l2_large(const struct sm100_gemm_args &);
void sm100_l2_wide(const struct sm100_gemm_args &);
void sm100_plan(const struct sm100_plan_args &);
void sm100_stage(const struct sm100_stage_args &);
void sm100_combine(const struct sm100_combine_args &);
}

struct kernel {
    const char *name;
    void (*thunk)(const void *);
};

// In the order of enum sm100_kernel.
static const struct kernel kernels[SM100_KERNEL_COUNT] = {
    {"sm100_l1_small", SM100_MODEL_THUNK(sm100_l1_small, struct sm100_gemm_args)},
    {"sm100_l1_large", SM100_MODEL_THUNK(sm100_l1_large, struct sm100_gemm_args)},
    {"sm100_l2_small", SM100_MODEL_THUNK(sm100_l2_small, struct sm100_gemm_args)},
    {"sm100_l2_large", SM100_MODEL_THUNK(sm100_l2_large, struct sm100_gemm_args)},
    {"sm100_l2_wide", SM100_MODEL_THUNK(sm100_l2_wide, struct sm100_gemm_args)},
    {"sm100_plan", SM100_MODEL_THUNK(sm100_plan, struct sm100_plan_args)},
    {"sm100_stage", SM100_MODEL_THUNK(sm100_stage, struct sm100_stage_args)},
    {"sm100_combine", SM100_MODEL_THUNK(sm100_combine, struct sm100_combine_args)},
};

static void *model_alloc(void *, size_t bytes, const char *name) {
    return sm100_model_memory_alloc(bytes, name, SM100_MODEL_READ_WRITE);
}

static void model_release(void *, void *memory) {
    if (memory) sm100_model_memory_free(memory);
}

static megamoe_status model_copy(void *, void *target, const void *source, size_t bytes) {
    memcpy(target, source, bytes);
    return MEGAMOE_OK;
}

static megamoe_status model_map(void *, const struct sm100_map *map, struct sm100_tensor_map *encoded) {
    if (sm100_model_tensor_map_encode(encoded, map->element_bytes == 1 ? SM100_MODEL_U8 : SM100_MODEL_U16, map->rank,
                                      const_cast<void *>(map->base), map->dims, map->strides, map->box,
                                      map->swizzled ? SM100_MODEL_SWIZZLE_128B : SM100_MODEL_SWIZZLE_NONE))
        return mm_fail(MEGAMOE_DEVICE_ERROR, "the model refused a tensor map: %s", sm100_model_error());
    return MEGAMOE_OK;
}

// Of each kernel, and at the end of all: the seeds of the runs that ended well.
static std::set<uint64_t> seeds[SM100_KERNEL_COUNT + 1];

uint32_t model_schedule_count(enum sm100_kernel kernel) {
    return (uint32_t)seeds[kernel].size();
}

static megamoe_status model_launch(void *context, const struct sm100_launch *launch, void *) {
    struct model_state *state = static_cast<struct model_state *>(context);
    const struct sm100_model_launch one = {kernels[launch->kernel].name,
                                           kernels[launch->kernel].thunk,
                                           launch->args,
                                           launch->grid,
                                           launch->cluster,
                                           launch->block,
                                           launch->shared_bytes};
    struct sm100_model_options options = {};
    options.struct_size = sizeof options;
    options.seed = state->seed++;
    options.time_runs = state->time_runs;
    static struct sm100_model_report report;
    if (sm100_model_run(&one, 1, &options, &report) != SM100_MODEL_OK)
        return mm_fail(MEGAMOE_DEVICE_ERROR, "seed %llu: %s", (unsigned long long)options.seed, report.message);
    seeds[launch->kernel].insert(options.seed);
    seeds[SM100_KERNEL_COUNT].insert(options.seed);
    state->grid[launch->kernel] = launch->grid;
    state->launches++;
    state->mma_count += report.mma_count;
    state->async_ops += report.async_ops;
    return MEGAMOE_OK;
}

struct sm100_machine model_machine(struct model_state *state, uint32_t multiprocessors) {
    return {state, multiprocessors, model_alloc, model_release, model_copy, model_copy, model_map, model_launch};
}
