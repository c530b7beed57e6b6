/* The tables of the GPU backends; opening a device, its memory, its launches and its limits. */
#include "backend/cuda/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

/* ---- finding a GPU -------------------------------------------------------------------------------------- */

static megamoe_status attribute(const mm_driver *driver, CUdevice device, CUdevice_attribute which, int *value) {
    return mm_driver_status(driver, driver->device_attribute(value, which, device), "reading a GPU attribute");
}

static megamoe_status gpu_query(const mm_driver *driver, uint32_t ordinal, CUdevice *device, mm_gpu *gpu) {
    CUresult result = driver->init(0);
    memset(gpu, 0, sizeof *gpu);
    gpu->ordinal = ordinal;
    if (result == CUDA_ERROR_NO_DEVICE)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the NVIDIA driver finds no GPU: use --backend cpu");
    if (result != CUDA_SUCCESS) {
        mm_driver_status(driver, result, "starting the NVIDIA driver");
        return mm_fail_in(MEGAMOE_UNSUPPORTED_DEVICE, "no usable GPU");
    }
    MM_TRY(mm_driver_status(driver, driver->driver_version(&gpu->driver_version), "reading the driver's version"));
    MM_TRY(mm_driver_status(driver, driver->device_count(&gpu->count), "counting GPUs"));
    if (ordinal >= (uint32_t)gpu->count) return MEGAMOE_OK; /* mm_gpu_choose says so */
    MM_TRY(mm_driver_status(driver, driver->device_get(device, (int)ordinal), "opening the GPU"));
    MM_TRY(
        mm_driver_status(driver, driver->device_name(gpu->name, sizeof gpu->name, *device), "reading the GPU's name"));
    MM_TRY(attribute(driver, *device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &gpu->major));
    MM_TRY(attribute(driver, *device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &gpu->minor));
    MM_TRY(attribute(driver, *device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &gpu->sm_count));
    return attribute(driver, *device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &gpu->shared_bytes);
}

static megamoe_status probe(uint32_t ordinal, bool native) {
    const mm_driver *driver;
    const char *image;
    CUdevice device;
    mm_gpu gpu;
    MM_TRY(mm_driver_load(&driver));
    MM_TRY(gpu_query(driver, ordinal, &device, &gpu));
    return mm_gpu_choose(&gpu, mm_cuda_images_built, native, &image);
}

static megamoe_status probe_portable(uint32_t ordinal) {
    megamoe_status status = probe(ordinal, false);
    return status == MEGAMOE_OK ? status : mm_fail_in(status, "backend cuda-portable");
}

static megamoe_status probe_native(uint32_t ordinal) {
    megamoe_status status = probe(ordinal, true);
    return status == MEGAMOE_OK ? status : mm_fail_in(status, "backend sm90");
}

/* ---- the device ----------------------------------------------------------------------------------------- */

megamoe_status mm_cuda_enter(const mm_backend_state *state) {
    return mm_driver_status(state->driver, state->driver->context_push(state->context), "making the GPU current");
}

void mm_cuda_leave(const mm_backend_state *state) {
    CUcontext popped;
    state->driver->context_pop(&popped);
}

/* Lets every kernel use all the shared memory a block can have. */
static megamoe_status allow_shared_memory(const mm_backend_state *state) {
    for (mm_kernel i = 0; i < MM_KERNEL_COUNT; i++) {
        CUfunction function = state->kernels.function[i];
        int fixed = 0;
        if (!function) continue;
        MM_TRY(mm_driver_status(state->driver,
                                state->driver->function_get(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
                                "reading a kernel's shared memory"));
        MM_TRY(mm_driver_status(state->driver,
                                state->driver->function_set(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                            state->gpu.shared_bytes - fixed),
                                "raising a kernel's shared memory"));
    }
    return MEGAMOE_OK;
}

/* A branch beside the caller's stream, and the events it begins and ends with. */
static megamoe_status open_side(mm_backend_state *state) {
    const mm_driver *driver = state->driver;
    CUresult result = driver->stream_create(&state->side, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS) result = driver->event_create(&state->forked, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) result = driver->event_create(&state->joined, CU_EVENT_DISABLE_TIMING);
    return mm_driver_status(driver, result, "creating a second stream");
}

static megamoe_status open_kernels(mm_backend_state *state) {
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = mm_driver_status(
        state->driver, state->driver->stream_create(&state->stream, CU_STREAM_NON_BLOCKING), "creating a stream");
    if (status == MEGAMOE_OK) status = open_side(state);
    if (status == MEGAMOE_OK) status = mm_kernels_load(state->driver, state->native, &state->kernels);
    if (status == MEGAMOE_OK) status = allow_shared_memory(state);
    mm_cuda_leave(state);
    return status;
}

static void close_device(mm_backend_state *state) {
    if (!state) return;
    if (state->context) { /* what can be given back is, even if the context cannot be entered any more */
        const bool entered = mm_cuda_enter(state) == MEGAMOE_OK;
        state->driver->context_wait();
        mm_blocks_free(state, &state->scratch_blocks);
        mm_blocks_free(state, &state->single_blocks);
        mm_kernels_unload(state->driver, &state->kernels);
        if (state->joined) state->driver->event_destroy(state->joined);
        if (state->forked) state->driver->event_destroy(state->forked);
        if (state->side) state->driver->stream_destroy(state->side);
        if (state->stream) state->driver->stream_destroy(state->stream);
        if (entered) mm_cuda_leave(state);
        state->driver->context_release(state->device);
    }
    free(state);
}

static megamoe_status open_device(const megamoe_device_options *options, bool native, mm_backend_state **out) {
    mm_backend_state *state = calloc(1, sizeof *state);
    megamoe_status status;
    if (!state) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a GPU device");
    state->native = native;
    state->batch_invariant = options->batch_invariant;
    state->max_tokens = options->max_tokens;
    status = mm_driver_load(&state->driver);
    if (status == MEGAMOE_OK) status = gpu_query(state->driver, options->ordinal, &state->device, &state->gpu);
    if (status == MEGAMOE_OK) status = mm_gpu_choose(&state->gpu, mm_cuda_images_built, native, &state->image);
    if (status == MEGAMOE_OK)
        status = mm_driver_status(state->driver, state->driver->context_retain(&state->context, state->device),
                                  "opening the GPU's context");
    if (status == MEGAMOE_OK) {
        uint32_t all = (uint32_t)state->gpu.sm_count;
        state->sm_count = options->sm_budget && options->sm_budget < all ? options->sm_budget : all;
        status = open_kernels(state);
    }
    if (status != MEGAMOE_OK) {
        close_device(state);
        return status;
    }
    *out = state;
    return MEGAMOE_OK;
}

static megamoe_status open_portable(const megamoe_device_options *options, mm_backend_state **state) {
    return open_device(options, false, state);
}
static megamoe_status open_native(const megamoe_device_options *options, mm_backend_state **state) {
    return open_device(options, true, state);
}

static void describe(const mm_backend_state *state, mm_device_facts *facts) {
    snprintf(facts->description, sizeof facts->description, "%s (GPU %u: %.80s, %u of %d multiprocessors)",
             state->native ? "sm90" : "cuda-portable", state->gpu.ordinal, state->gpu.name, state->sm_count,
             state->gpu.sm_count);
    facts->isa = state->image;
    facts->threads = 0;
    facts->host_bytes = state->host_bytes;
    facts->device_bytes = state->device_bytes;
}

static megamoe_status read_memory(mm_backend_state *state, void *host, const void *source, size_t bytes) {
    MM_TRY(mm_cuda_enter(state));
    CUresult result = state->driver->copy_to_host(host, (CUdeviceptr)(uintptr_t)source, bytes, state->stream);
    if (result == CUDA_SUCCESS) result = state->driver->stream_wait(state->stream);
    mm_cuda_leave(state);
    return mm_driver_status(state->driver, result, "reading GPU memory");
}

static megamoe_status zero_memory(mm_backend_state *state, void *target, size_t bytes, void *stream) {
    CUresult result = CUDA_SUCCESS;
    MM_TRY(mm_cuda_enter(state));
    if (mm_cuda_is_host(state, target))
        memset(target, 0, bytes);
    else
        result = state->driver->fill((CUdeviceptr)(uintptr_t)target, 0, bytes, stream);
    mm_cuda_leave(state);
    return mm_driver_status(state->driver, result, "zeroing GPU memory");
}

/* The caller's, which may be host memory: weights that lie there are copied. */
static megamoe_status read_callers(mm_backend_state *state, void *host, const void *source, size_t bytes) {
    MM_TRY(mm_cuda_enter(state));
    bool in_host = mm_cuda_is_host(state, source);
    mm_cuda_leave(state);
    if (!in_host) return read_memory(state, host, source, bytes);
    memcpy(host, source, bytes);
    return MEGAMOE_OK;
}

/* ---- memory and launches -------------------------------------------------------------------------------- */

megamoe_status mm_block_create(mm_backend_state *state, uint64_t bytes, const char *what, mm_block **chain,
                               void **base) {
    mm_block *block = calloc(1, sizeof *block);
    if (!block) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %s", what);
    CUresult result = state->driver->memory_allocate(&block->base, bytes);
    if (result != CUDA_SUCCESS) {
        free(block);
        return mm_fail_in(mm_driver_status(state->driver, result, what), "%.1f MB of GPU memory", (double)bytes * 1e-6);
    }
    result = state->driver->fill(block->base, 0, bytes, state->stream);
    if (result == CUDA_SUCCESS) result = state->driver->stream_wait(state->stream);
    if (result != CUDA_SUCCESS) {
        state->driver->memory_free(block->base);
        free(block);
        return mm_driver_status(state->driver, result, what);
    }
    block->bytes = bytes;
    block->next = *chain;
    *chain = block;
    state->device_bytes += bytes;
    *base = (void *)(uintptr_t)block->base;
    return MEGAMOE_OK;
}

void mm_blocks_free(mm_backend_state *state, mm_block **chain) {
    for (mm_block *block = *chain, *next; block; block = next) {
        next = block->next;
        state->driver->memory_free(block->base);
        state->device_bytes -= block->bytes;
        free(block);
    }
    *chain = NULL;
}

megamoe_status mm_cuda_launch(const mm_backend_state *state, CUstream stream, mm_kernel kernel, const mm_launch *how,
                              void **arguments) {
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (how->after_start)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                                  .value = {.programmaticStreamSerializationAllowed = 1}};
    if (how->cluster > 1)
        attributes[count++] = (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                                  .value = {.clusterDim = {how->cluster, 1, 1}}};
    CUlaunchConfig config = {.gridDimX = how->grid[0] ? how->grid[0] : 1,
                             .gridDimY = how->grid[1] ? how->grid[1] : 1,
                             .gridDimZ = how->grid[2] ? how->grid[2] : 1,
                             .blockDimX = how->threads,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = how->shared_bytes,
                             .hStream = stream,
                             .attrs = attributes,
                             .numAttrs = count};
    CUresult result = state->driver->launch(&config, state->kernels.function[kernel], arguments, NULL);
    if (result == CUDA_SUCCESS) return MEGAMOE_OK;
    return mm_fail_in(mm_driver_status(state->driver, result, mm_kernel_name(kernel)), "launching a kernel");
}

/* ---- limits --------------------------------------------------------------------------------------------- */

enum { MEASURE_BYTES = 1 << 30, MEASURE_GEMM = 8192, MEASURE_RUNS = 5 };

typedef struct measurement {
    mm_kernel kernel;
    mm_launch how;
    void **arguments;
} measurement;

/* The shortest of a few runs, in seconds, after one to warm up. */
static megamoe_status time_launch(mm_backend_state *state, const measurement *what, double *seconds) {
    const mm_driver *driver = state->driver;
    CUevent begin = NULL, end = NULL;
    megamoe_status status =
        mm_driver_status(driver, driver->event_create(&begin, CU_EVENT_DEFAULT), "creating an event");
    if (status == MEGAMOE_OK)
        status = mm_driver_status(driver, driver->event_create(&end, CU_EVENT_DEFAULT), "creating an event");
    for (int i = 0; status == MEGAMOE_OK && i <= MEASURE_RUNS; i++) {
        float ms = 0.0f;
        status = mm_driver_status(driver, driver->event_record(begin, state->stream), "measuring");
        if (status == MEGAMOE_OK)
            status = mm_cuda_launch(state, state->stream, what->kernel, &what->how, what->arguments);
        if (status == MEGAMOE_OK)
            status = mm_driver_status(driver, driver->event_record(end, state->stream), "measuring");
        if (status == MEGAMOE_OK) status = mm_driver_status(driver, driver->event_wait(end), "measuring");
        if (status == MEGAMOE_OK)
            status = mm_driver_status(driver, driver->event_elapsed(&ms, begin, end), "measuring");
        if (i == 1 || (i > 1 && ms * 1e-3 < *seconds)) *seconds = ms * 1e-3;
    }
    if (begin) driver->event_destroy(begin);
    if (end) driver->event_destroy(end);
    return status;
}

static megamoe_status measure_copy(mm_backend_state *state, char *memory, double *gb_s) {
    void *source = memory, *target = memory + MEASURE_BYTES;
    unsigned long long count = MEASURE_BYTES / 16;
    void *arguments[] = {&source, &target, &count};
    measurement copy = {MM_COPY, {.grid = {state->sm_count * 4}, .threads = 512}, arguments};
    double seconds = 0.0;
    MM_TRY(time_launch(state, &copy, &seconds));
    *gb_s = 2.0 * MEASURE_BYTES / seconds * 1e-9;
    return MEGAMOE_OK;
}

/* Values near 1 of both signs: real data costs a power-limited GPU more than zeros. */
static megamoe_status fill_operands(mm_backend_state *state, char *memory, size_t bytes) {
    uint16_t *values = malloc(bytes);
    uint32_t seed = 1;
    if (!values) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the operands of a measurement");
    for (size_t i = 0; i < bytes / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (uint16_t)((seed >> 16 & 0x80FFu) | 0x3F00u);
    }
    CUresult result = state->driver->copy_to_device((CUdeviceptr)(uintptr_t)memory, values, bytes, state->stream);
    if (result == CUDA_SUCCESS) result = state->driver->stream_wait(state->stream);
    free(values);
    return mm_driver_status(state->driver, result, "filling the operands of a measurement");
}

megamoe_status mm_cuda_operand_map(const mm_driver *driver, const void *base, uint64_t rows, uint64_t columns,
                                   uint32_t box_rows, CUtensorMap *map) {
    cuuint64_t extent[2] = {columns, rows}, pitch[1] = {columns * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    return mm_driver_status(driver,
                            driver->tensor_map_encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)(uintptr_t)base,
                                                      extent, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                            "describing an operand");
}

/* M = N = K = 8192 in BF16 from device memory: the same instructions as the layer's, with nothing to dequantize. */
static megamoe_status measure_matrix(mm_backend_state *state, char *memory, double *tflop_s) {
    const size_t bytes = (size_t)MEASURE_GEMM * MEASURE_GEMM * 2;
    uint32_t size = MEASURE_GEMM;
    void *c = memory + 2 * bytes;
    CUtensorMap a, b;
    double seconds = 0.0;
    if (!state->native) {
        *tflop_s = 0.0;
        return MEGAMOE_OK;
    }
    MM_TRY(fill_operands(state, memory, 2 * bytes));
    MM_TRY(mm_cuda_operand_map(state->driver, memory, size, size, 128, &a));
    MM_TRY(mm_cuda_operand_map(state->driver, memory + bytes, size, size, 256, &b));
    void *arguments[] = {&a, &b, &c, &size, &size, &size};
    measurement gemm = {
        MM_GEMM_BF16, {.grid = {state->sm_count}, .threads = 384, .shared_bytes = 4 * 49152 + 1024}, arguments};
    MM_TRY(time_launch(state, &gemm, &seconds));
    *tflop_s = 2.0 * MEASURE_GEMM * MEASURE_GEMM * (double)MEASURE_GEMM / seconds * 1e-12;
    return MEGAMOE_OK;
}

static megamoe_status measure(mm_backend_state *state, megamoe_limits *limits) {
    mm_block *blocks = NULL;
    void *memory;
    double gb_s = 0.0, tflop_s = 0.0;
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = mm_block_create(state, 2ull * MEASURE_BYTES, "measuring", &blocks, &memory);
    if (status == MEGAMOE_OK) status = measure_copy(state, memory, &gb_s);
    if (status == MEGAMOE_OK) status = measure_matrix(state, memory, &tflop_s);
    mm_blocks_free(state, &blocks);
    mm_cuda_leave(state);
    if (status != MEGAMOE_OK) return status;
    limits->read_gb_s = gb_s;
    limits->matrix_tflop_s = tflop_s;
    return MEGAMOE_OK;
}

/* ---- counters and tables -------------------------------------------------------------------------------- */

static megamoe_status counters(mm_backend_layer *layer, megamoe_counters *counters, uint64_t *tokens_per_expert) {
    mm_backend_state *state = layer->state;
    mm_cuda_counters found;
    MM_TRY(mm_cuda_enter(state));
    CUresult result = state->driver->context_wait();
    mm_cuda_leave(state);
    MM_TRY(mm_driver_status(state->driver, result, "waiting for the GPU"));
    MM_TRY(read_memory(state, &found, layer->counters, sizeof found));
    if (tokens_per_expert)
        MM_TRY(read_memory(state, tokens_per_expert, layer->expert_tokens,
                           layer->weights->shape.expert_count * sizeof *tokens_per_expert));
    counters->tokens = found.tokens;
    counters->unrouted_tokens = found.unrouted_tokens;
    counters->skipped_slots = found.skipped_slots;
    counters->bad_slots = found.bad_slots;
    counters->saturated_blocks = found.saturated_blocks;
    counters->nonfinite_blocks = found.nonfinite_blocks;
    return MEGAMOE_OK;
}

#define MM_CUDA_TABLE                                                                                                  \
    .close = close_device, .describe = describe, .measure = measure, .read = read_callers, .zero = zero_memory,        \
    .layer_create = mm_cuda_layer_create, .layer_close = mm_cuda_layer_close, .route = mm_cuda_route,                  \
    .run = mm_cuda_run, .counters = counters, .time = mm_cuda_time, .quantize = mm_cuda_quantize,                      \
    .dequantize = mm_cuda_dequantize, .grouped_gemm = mm_cuda_grouped_gemm

const mm_backend mm_backend_cuda_portable = {.name = "cuda-portable",
                                             .id = MEGAMOE_CUDA_PORTABLE,
                                             .probe = probe_portable,
                                             .open = open_portable,
                                             MM_CUDA_TABLE};
const mm_backend mm_backend_sm90 = {
    .name = "sm90", .id = MEGAMOE_SM90, .probe = probe_native, .open = open_native, MM_CUDA_TABLE};
