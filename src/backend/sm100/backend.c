/*
 * The sm100 backend: native NVFP4 on Blackwell, beside the portable kernels and not instead of them. The
 * portable backend opens the GPU, routes, and computes the shared expert; where activations are nvfp4 and the
 * kernels of this folder have passed their self-check on this very GPU, the routed experts run here, and
 * otherwise there.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/sm100/gpu.h"
#include "backend/sm100/self_check.h"
#include "backend/sm100/stages.h"
#include "backend/sm100/steps.h"
#include "error.h"

#define TIMEOUT_NS 2000000000ull /* of one wait inside a kernel; a tile takes microseconds */

/* The table's mm_backend_state and mm_backend_layer are the portable backend's; these are ours behind them.
 */
struct sm100_device {
    mm_backend_state *portable;
    struct sm100_gpu gpu;
    struct sm100_machine machine;
    struct sm100_scratch scratch;
    uint32_t max_tokens, sm_budget;
    bool batch_invariant;
    bool trusted; /* the self-check passed */
    megamoe_log log;
    void *log_context;
};

struct sm100_layer {
    struct sm100_device *device;
    const mm_layer_weights *weights;
    mm_layer_weights others; /* without routed experts, where those run here */
    int32_t *none_local;     /* [E], all -1 */
    mm_backend_layer *portable;
    struct mm_mega_moe *moe; /* NULL: the whole layer is portable */
};

static struct sm100_device *device_of(const mm_backend_state *state) {
    return (struct sm100_device *)(uintptr_t)state;
}

static struct sm100_layer *layer_of(const mm_backend_layer *layer) {
    return (struct sm100_layer *)(uintptr_t)layer;
}

/* ---- device ---- */

/* 10.0 and 10.3 are the family of the image sm_100f; no other GPU runs it, whatever its number. */
static megamoe_status probe(uint32_t ordinal) {
    const mm_driver *driver;
    CUdevice device;
    int major = 0, minor = 0;
    megamoe_status status = mm_backend_cuda_portable.probe(ordinal);
    if (status != MEGAMOE_OK) return mm_fail_in(status, "backend sm100");
    MM_TRY(mm_driver_load(&driver));
    CUresult result = driver->device_get(&device, (int)ordinal);
    if (result == CUDA_SUCCESS)
        result = driver->device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (result == CUDA_SUCCESS)
        result = driver->device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    MM_TRY(mm_driver_status(driver, result, "reading a GPU attribute"));
    if (major == 10 && (minor == 0 || minor == 3)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                   "backend sm100 needs compute capability 10.0 or 10.3 (image sm_100f); GPU %u has %d.%d: use "
                   "--backend cuda",
                   ordinal, major, minor);
}

/* Once per process and GPU: the kernels do not change, and neither does the answer. */
static megamoe_status self_check(struct sm100_device *d) {
    enum { GPUS = 64 };
    static struct {
        megamoe_status status;
        bool done;
        char sentence[512];
    } known[GPUS];
    uint32_t ordinal = d->portable->gpu.ordinal % GPUS;
    if (!known[ordinal].done) {
        const struct sm100_portable portable = {&d->gpu, mm_sm100_gpu_multiply};
        known[ordinal].status = mm_sm100_self_check(&d->machine, &portable);
        if (known[ordinal].status != MEGAMOE_OK)
            snprintf(known[ordinal].sentence, sizeof known[ordinal].sentence, "%s", megamoe_error_message());
        known[ordinal].done = true;
    }
    if (known[ordinal].status == MEGAMOE_OK) return MEGAMOE_OK;
    return mm_fail(known[ordinal].status, "%s", known[ordinal].sentence);
}

static void warn(const struct sm100_device *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void warn(const struct sm100_device *d, const char *format, ...) {
    char sentence[640];
    va_list arguments;
    if (!d->log) return;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    d->log(d->log_context, 1, sentence);
}

/* An explicit wish for sm100 that cannot be fulfilled is an error; otherwise the portable path, and a warning, unless
 * that path is what failed. */
static megamoe_status decide_trust(struct sm100_device *d, megamoe_backend wanted) {
    megamoe_status status = self_check(d);
    d->trusted = status == MEGAMOE_OK;
    if (d->trusted || wanted == MEGAMOE_SM100 || status == MEGAMOE_UNSUPPORTED_DEVICE) return status;
    warn(d, "the portable kernels are used instead of sm100's: %s", megamoe_error_message());
    return MEGAMOE_OK;
}

static void close_device(mm_backend_state *state) {
    struct sm100_device *d = device_of(state);
    if (!d) return;
    if (d->gpu.device) {
        mm_sm100_scratch_free(&d->machine, &d->scratch);
        mm_sm100_gpu_close(&d->gpu);
    }
    mm_backend_cuda_portable.close(d->portable);
    free(d);
}

static megamoe_status open_device(const megamoe_device_options *options, mm_backend_state **state) {
    struct sm100_device *d = calloc(1, sizeof *d);
    if (!d) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a GPU device");
    d->max_tokens = options->max_tokens;
    d->sm_budget = options->sm_budget;
    d->batch_invariant = options->batch_invariant;
    d->log = options->log;
    d->log_context = options->log_context;
    megamoe_status status = mm_backend_cuda_portable.open(options, &d->portable);
    if (status == MEGAMOE_OK) status = mm_sm100_gpu_open(d->portable, &d->gpu, &d->machine);
    if (status == MEGAMOE_OK) status = decide_trust(d, options->backend);
    if (status == MEGAMOE_OK)
        *state = (mm_backend_state *)(uintptr_t)d;
    else
        close_device((mm_backend_state *)(uintptr_t)d);
    return status;
}

static void describe(const mm_backend_state *state, mm_device_facts *facts) {
    const struct sm100_device *d = device_of(state);
    mm_backend_cuda_portable.describe(d->portable, facts);
    snprintf(facts->description, sizeof facts->description, "sm100%s (GPU %u: %.40s, %u multiprocessors)",
             d->trusted ? "" : ", not trusted: portable kernels", d->portable->gpu.ordinal, d->portable->gpu.name,
             d->portable->sm_count);
    facts->device_bytes += mm_sm100_gpu_bytes(&d->gpu);
}

static megamoe_status measure(mm_backend_state *state, megamoe_limits *limits) {
    return mm_backend_cuda_portable.measure(device_of(state)->portable, limits);
}

static megamoe_status read_memory(mm_backend_state *state, void *host, const void *source, size_t bytes) {
    return mm_backend_cuda_portable.read(device_of(state)->portable, host, source, bytes);
}

static megamoe_status zero_memory(mm_backend_state *state, void *target, size_t bytes, void *stream) {
    return mm_backend_cuda_portable.zero(device_of(state)->portable, target, bytes, stream);
}

/* ---- layer ---- */

static void layer_close(mm_backend_layer *layer) {
    struct sm100_layer *l = layer_of(layer);
    if (!l) return;
    if (l->portable) mm_backend_cuda_portable.layer_close(l->portable);
    mm_mega_moe_close(l->moe);
    free(l->none_local);
    free(l);
}

static bool runs_here(const struct sm100_device *d, const mm_layer_weights *w) {
    bool fp4 = w->expert_count > 0 && (w->experts[0].up.format == MM_NVFP4 || w->experts[0].up.format == MM_MXFP4);
    return d->trusted && fp4 && w->activations == MEGAMOE_ACTIVATIONS_NVFP4;
}

static struct mm_mega_moe_shape shape_of(const struct sm100_layer *l) {
    const mm_layer_weights *w = l->weights;
    struct mm_mega_moe_shape shape = {.hidden = w->shape.hidden,
                                      .intermediate = w->shape.intermediate,
                                      .expert_count = w->shape.expert_count,
                                      .slots = w->shape.experts_per_token,
                                      .max_tokens = l->device->max_tokens,
                                      .swiglu = w->swiglu,
                                      .routing_weight_before = w->routing_weight_before,
                                      .batch_invariant = l->device->batch_invariant,
                                      .sm_budget = l->device->sm_budget,
                                      .timeout_ns = TIMEOUT_NS};
    if (w->input_mode == MEGAMOE_GLOBAL_STATIC) shape.input_global = w->input_global;
    if (w->input_mode == MEGAMOE_GLOBAL_UNIT) shape.input_global = 1.0f;
    return shape;
}

static megamoe_status open_moe(struct sm100_layer *l, bool on_device) {
    const mm_layer_weights *w = l->weights;
    const struct sm100_machine *machine = &l->device->machine;
    struct mm_mega_moe_shape shape = shape_of(l);
    struct mm_mega_moe_weights weights;
    struct mm_mega_moe_loss loss;
    MM_TRY(mm_transform_nvfp4_weights_for_mega_moe(machine, w, on_device, &weights, &loss));
    if (loss.values)
        warn(l->device,
             "%llu MXFP4 values are too small beside others of their matrix for NVFP4 and were rounded; the "
             "first are in expert %u, %s",
             (unsigned long long)loss.values, loss.expert, loss.matrix);
    megamoe_status status = mm_mega_moe_open(machine, &shape, &weights, w->local_index, &l->device->scratch, &l->moe);
    if (status != MEGAMOE_OK) mm_mega_moe_weights_free(machine, &weights);
    return status;
}

/* What stays with the portable kernels when the routed experts run here. */
static megamoe_status keep_others(struct sm100_layer *l, bool on_device) {
    uint32_t experts = l->weights->shape.expert_count;
    l->none_local = malloc(experts * sizeof *l->none_local);
    if (!l->none_local) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", experts);
    for (uint32_t i = 0; i < experts; i++) l->none_local[i] = -1;
    l->others.expert_count = 0;
    l->others.local_index = l->none_local;
    return open_moe(l, on_device);
}

static megamoe_status layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool on_device,
                                   const megamoe_layer_options *options, mm_backend_layer **layer) {
    struct sm100_layer *l = calloc(1, sizeof *l);
    if (!l) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    l->device = device_of(state);
    l->weights = weights;
    l->others = *weights;
    megamoe_status status = MEGAMOE_OK;
    on_device = on_device && mm_cuda_weights_on_device(l->device->portable, weights);
    if (runs_here(l->device, weights)) status = keep_others(l, on_device);
    if (status == MEGAMOE_OK)
        status =
            mm_backend_cuda_portable.layer_create(l->device->portable, &l->others, on_device, options, &l->portable);
    if (status == MEGAMOE_OK)
        *layer = (mm_backend_layer *)(uintptr_t)l;
    else
        layer_close((mm_backend_layer *)(uintptr_t)l);
    return status;
}

/* ---- run ---- */

/* What the portable part of the run (router, shared expert) left in its scratch, as the kernels here take it.
 */
static struct mm_mega_moe_batch batch_of(const struct sm100_layer *l, const megamoe_batch *batch, bool host) {
    struct mm_mega_moe_batch b = {.token_count = batch->token_count, .hidden_f32 = batch->hidden_dtype == MEGAMOE_F32};
    mm_scratch s;
    mm_cuda_scratch(l->portable, &s);
    b.hidden = host ? (const void *)s.hidden : batch->hidden;
    b.output = host ? s.output : batch->output;
    b.expert_ids = !batch->expert_ids ? s.expert_ids : host ? s.given_ids : batch->expert_ids;
    b.expert_weights = !batch->expert_ids ? s.weights : host ? s.given_weights : batch->expert_weights;
    b.shared = l->weights->shared ? s.shared_out : NULL;
    return b;
}

static megamoe_status run_stages(struct sm100_layer *l, const megamoe_stages *stages, struct mm_mega_moe_batch *b,
                                 uint32_t *written, void *stream) {
    megamoe_status status = mm_sm100_stages_open(l->moe, b);
    if (status == MEGAMOE_OK) status = mm_nvfp4_mega_moe_full(l->moe, b, stream);
    if (status == MEGAMOE_OK) status = mm_mega_moe_check(l->moe);
    if (status == MEGAMOE_OK) status = mm_sm100_stages_read(l->moe, b, stages, written);
    mm_sm100_stages_close(l->moe, b);
    return status;
}

static megamoe_status run_here(struct sm100_layer *l, const megamoe_batch *batch, const megamoe_stages *stages,
                               uint32_t *written, void *stream) {
    bool host = mm_cuda_is_host(l->device->portable, batch->hidden);
    uint32_t theirs = 0, ours = 0;
    if (host) stream = l->device->portable->stream;
    MM_TRY(mm_backend_cuda_portable.run(l->portable, batch, NULL, stages, &theirs, stream));
    struct mm_mega_moe_batch b = batch_of(l, batch, host);
    if (stages)
        MM_TRY(run_stages(l, stages, &b, &ours, stream));
    else
        MM_TRY(mm_nvfp4_mega_moe_full(l->moe, &b, stream));
    if (host)
        MM_TRY(l->device->machine.copy_out(l->device->machine.context, batch->output, b.output,
                                           (size_t)batch->token_count * l->weights->shape.hidden * 2));
    if (written) *written = ours | (theirs & (MM_STAGE_IDS | MM_STAGE_WEIGHTS | MM_STAGE_LOGITS | MM_STAGE_SHARED));
    return MEGAMOE_OK;
}

static megamoe_status run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream) {
    struct sm100_layer *l = layer_of(layer);
    if (!l->moe || batch->token_count == 0)
        return mm_backend_cuda_portable.run(l->portable, batch, given, stages, written, stream);
    return run_here(l, batch, stages, written, stream);
}

static megamoe_status route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                            float *expert_weights, void *stream) {
    return mm_backend_cuda_portable.route(layer_of(layer)->portable, batch, expert_ids, expert_weights, stream);
}

static megamoe_status counters(mm_backend_layer *layer, megamoe_counters *out, uint64_t *tokens_per_expert) {
    struct sm100_layer *l = layer_of(layer);
    struct mm_mega_moe_counts counts;
    MM_TRY(mm_backend_cuda_portable.counters(l->portable, out, l->moe ? NULL : tokens_per_expert));
    if (!l->moe) return MEGAMOE_OK;
    const struct sm100_machine *m = &l->device->machine;
    MM_TRY(mm_mega_moe_check(l->moe));
    MM_TRY(m->copy_out(m->context, &counts, l->moe->scratch.counts, sizeof counts));
    out->skipped_slots = counts.skipped_slots; /* theirs has every slot: no routed expert is loaded there */
    out->bad_slots = counts.bad_slots;
    out->saturated_blocks += counts.saturated_blocks;
    out->nonfinite_blocks += counts.nonfinite_blocks;
    if (!tokens_per_expert) return MEGAMOE_OK;
    return m->copy_out(m->context, tokens_per_expert, l->moe->scratch.expert_tokens,
                       l->weights->shape.expert_count * sizeof *tokens_per_expert);
}

/* ---- steps ---- */

static megamoe_status need_moe(const struct sm100_layer *l) {
    const mm_layer_weights *w = l->weights;
    if (l->moe) return MEGAMOE_OK;
    if (!l->device->trusted)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the mega-MoE kernels failed their self-check on this GPU");
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                   "the mega-MoE kernels take nvfp4 or mxfp4 experts with nvfp4 activations, and this layer has %s "
                   "experts with %s activations",
                   w->expert_count ? mm_format_name(w->experts[0].up.format) : "no",
                   w->activations == MEGAMOE_ACTIVATIONS_NVFP4 ? "nvfp4" : "bf16");
}

static megamoe_status step(mm_backend_layer *layer, mm_step which, const megamoe_batch *batch,
                           const megamoe_tensor *partials, void *stream) {
    const struct sm100_layer *l = layer_of(layer);
    const mm_backend_state *portable = l->device->portable;
    struct mm_mega_moe_batch b = {.token_count = batch->token_count,
                                  .hidden = batch->hidden,
                                  .hidden_f32 = batch->hidden_dtype == MEGAMOE_F32,
                                  .output = batch->output,
                                  .expert_ids = batch->expert_ids,
                                  .expert_weights = batch->expert_weights};
    MM_TRY(need_moe(l));
    if (mm_cuda_is_host(portable, batch->hidden) || mm_cuda_is_host(portable, batch->expert_ids) ||
        (partials && mm_cuda_is_host(portable, partials->data)))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "a step takes device memory; megamoe_layer_run takes batches in host memory, too");
    return mm_sm100_step(l->moe, which, &b, partials, stream);
}

static megamoe_status step_weights(const mm_backend_layer *layer, megamoe_mega_moe_weights *weights) {
    const struct sm100_layer *l = layer_of(layer);
    MM_TRY(need_moe(l));
    mm_sm100_weights_describe(&l->moe->weights, weights);
    return MEGAMOE_OK;
}

const mm_backend mm_backend_sm100 = {
    .name = "sm100",
    .id = MEGAMOE_SM100,
    .native_nvfp4 = true,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .measure = measure,
    .read = read_memory,
    .zero = zero_memory,
    .layer_create = layer_create,
    .layer_close = layer_close,
    .route = route,
    .run = run,
    .counters = counters,
    .step = step,
    .step_weights = step_weights,
};
