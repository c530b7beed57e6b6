/*
 * The sm100-model backend: the Blackwell kernels, unchanged, on the functional model, behind the table that
 * every backend fills. `megamoe check --backend sm100-model` judges them with it. What is not sm100's own
 * (the router, and a shared expert, which the portable kernels compute on a GPU) is borrowed from the
 * reference.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/plugin.h"
#include "backend/sm100/stages.h"
#include "backend/sm100/steps.h"
#include "error.h"
#include "model_machine.h"

enum { MULTIPROCESSORS = 4 };

static const mm_plugin_host *host;

struct mm_backend_state {
    struct model_state model;
    struct sm100_machine machine;
    struct sm100_scratch scratch;
    mm_backend_state *reference;
    uint32_t max_tokens;
    bool batch_invariant;
};

struct mm_backend_layer {
    mm_backend_state *device;
    const mm_layer_weights *weights;
    mm_layer_weights others; /* without routed experts, for the reference */
    int32_t *none_local;     /* [E], all -1 */
    mm_backend_layer *reference;
    struct mm_mega_moe *moe;
    megamoe_counters counters; /* of what the kernels do not count */
};

/* ---- error.h, through the library that loaded us ---- */

static megamoe_status fail_with(megamoe_status (*fail)(megamoe_status, const char *), megamoe_status status,
                                const char *format, va_list arguments) {
    char sentence[8192];
    vsnprintf(sentence, sizeof sentence, format, arguments);
    return fail(status, sentence);
}

megamoe_status mm_fail(megamoe_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with(host->fail, status, format, arguments);
    va_end(arguments);
    return status;
}

megamoe_status mm_fail_in(megamoe_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with(host->fail_in, status, format, arguments);
    va_end(arguments);
    return status;
}

/* ---- device ---- */

static megamoe_status probe(uint32_t ordinal) {
    (void)ordinal;
    return MEGAMOE_OK;
}

static megamoe_status open_device(const megamoe_device_options *options, mm_backend_state **out) {
    mm_backend_state *state = calloc(1, sizeof *state);
    if (!state) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a device");
    state->machine = model_machine(&state->model, MULTIPROCESSORS);
    state->model.seed = 1;
    state->max_tokens = options->max_tokens;
    state->batch_invariant = options->batch_invariant;
    megamoe_status status = mm_backend_reference.open(options, &state->reference);
    if (status != MEGAMOE_OK) {
        free(state);
        return status;
    }
    *out = state;
    return MEGAMOE_OK;
}

static void close_device(mm_backend_state *state) {
    mm_sm100_scratch_free(&state->machine, &state->scratch);
    mm_backend_reference.close(state->reference);
    free(state);
}

static void describe(const mm_backend_state *state, mm_device_facts *facts) {
    *facts = (mm_device_facts){.isa = "sm_100f on its functional model"};
    snprintf(facts->description, sizeof facts->description, "sm100 kernels on a functional model of %u multiprocessors",
             state->machine.multiprocessors);
}

/* ---- layer ---- */

static void layer_close(mm_backend_layer *layer) {
    if (layer->reference) mm_backend_reference.layer_close(layer->reference);
    mm_mega_moe_close(layer->moe);
    free(layer->none_local);
    free(layer);
}

/* The reference with the router and the shared expert, and no routed expert. */
static megamoe_status open_others(mm_backend_layer *layer, const megamoe_layer_options *options) {
    uint32_t experts = layer->weights->shape.expert_count;
    layer->none_local = malloc(experts * sizeof *layer->none_local);
    if (!layer->none_local) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", experts);
    for (uint32_t i = 0; i < experts; i++) layer->none_local[i] = -1;
    layer->others = *layer->weights;
    layer->others.expert_count = 0;
    layer->others.local_index = layer->none_local;
    return mm_backend_reference.layer_create(layer->device->reference, &layer->others, false, options,
                                             &layer->reference);
}

static megamoe_status open_moe(mm_backend_layer *layer) {
    const mm_layer_weights *w = layer->weights;
    struct mm_mega_moe_shape shape = {.hidden = w->shape.hidden,
                                      .intermediate = w->shape.intermediate,
                                      .expert_count = w->shape.expert_count,
                                      .slots = w->shape.experts_per_token,
                                      .max_tokens = layer->device->max_tokens,
                                      .swiglu = w->swiglu,
                                      .routing_weight_before = w->routing_weight_before,
                                      .batch_invariant = layer->device->batch_invariant,
                                      .timeout_ns = 1000000000};
    struct mm_mega_moe_weights weights;
    struct mm_mega_moe_loss loss;
    if (w->input_mode == MEGAMOE_GLOBAL_STATIC) shape.input_global = w->input_global;
    if (w->input_mode == MEGAMOE_GLOBAL_UNIT) shape.input_global = 1.0f;
    MM_TRY(mm_transform_nvfp4_weights_for_mega_moe(&layer->device->machine, w, false, &weights, &loss));
    megamoe_status status = mm_mega_moe_open(&layer->device->machine, &shape, &weights, w->local_index,
                                             &layer->device->scratch, &layer->moe);
    if (status != MEGAMOE_OK) mm_mega_moe_weights_free(&layer->device->machine, &weights);
    return status;
}

static megamoe_status layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool on_device,
                                   const megamoe_layer_options *options, mm_backend_layer **out) {
    (void)on_device;
    if (weights->activations != MEGAMOE_ACTIVATIONS_NVFP4)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "the sm100 kernels take nvfp4 activations; bf16 ones run on the portable path");
    if (weights->expert_count == 0)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "no expert of this layer is loaded, so there is nothing to model");
    mm_backend_layer *layer = calloc(1, sizeof *layer);
    if (!layer) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    layer->device = state;
    layer->weights = weights;
    megamoe_status status = open_others(layer, options);
    if (status == MEGAMOE_OK) status = open_moe(layer);
    if (status == MEGAMOE_OK)
        *out = layer;
    else
        layer_close(layer);
    return status;
}

/* ---- run ---- */

/* The model's memory of one run, and what the host knows of it. */
struct run {
    mm_backend_layer *layer;
    const megamoe_batch *batch;
    const megamoe_stages *stages; /* never NULL: fields may be */
    int32_t *ids;                 /* [T, K], host */
    float *weights, *shared;      /* [T, K], and [T, H] or NULL, host */
    struct mm_mega_moe_batch device;
};

static void *model_copy_of(struct run *r, const void *data, size_t bytes, const char *name) {
    struct sm100_machine *m = &r->layer->device->machine;
    void *memory = m->alloc(m->context, bytes ? bytes : 16, name);
    if (data) memcpy(memory, data, bytes);
    return memory;
}

/* Router and shared expert, which the reference computes; ids of the caller pass through it as they are. */
static megamoe_status run_others(struct run *r, uint32_t *written) {
    const megamoe_shape *shape = &r->layer->weights->shape;
    size_t pairs = (size_t)r->batch->token_count * shape->experts_per_token;
    size_t values = (size_t)r->batch->token_count * shape->hidden;
    megamoe_batch batch = *r->batch;
    megamoe_stages out = {.struct_size = sizeof out, .logits = r->stages->logits};
    r->ids = malloc(pairs * sizeof *r->ids + 1);
    r->weights = malloc(pairs * sizeof *r->weights + 1);
    r->shared = malloc(values * sizeof *r->shared + 1);
    if (!r->ids || !r->weights || !r->shared)
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u tokens", r->batch->token_count);
    out.expert_ids = r->ids;
    out.expert_weights = r->weights;
    out.shared = r->layer->weights->shared ? r->shared : NULL;
    return mm_backend_reference.run(r->layer->reference, &batch, NULL, &out, written, NULL);
}

static void upload(struct run *r, const int32_t *ids, const float *weights) {
    const megamoe_shape *shape = &r->layer->weights->shape;
    size_t tokens = r->batch->token_count, pairs = tokens * shape->experts_per_token, values = tokens * shape->hidden;
    struct mm_mega_moe_batch *d = &r->device;
    d->token_count = r->batch->token_count;
    d->hidden_f32 = r->batch->hidden_dtype == MEGAMOE_F32;
    d->hidden = model_copy_of(r, r->batch->hidden, values * (d->hidden_f32 ? 4 : 2), "hidden");
    d->expert_ids = model_copy_of(r, ids, pairs * sizeof *ids, "expert ids");
    d->expert_weights = model_copy_of(r, weights, pairs * sizeof *weights, "expert weights");
    if (r->shared && r->layer->weights->shared)
        d->shared = model_copy_of(r, r->shared, values * sizeof *r->shared, "shared");
    d->output = model_copy_of(r, NULL, values * sizeof *d->output, "output");
}

static void run_free(struct run *r) {
    struct sm100_machine *m = &r->layer->device->machine;
    const struct mm_mega_moe_batch *d = &r->device;
    const void *const memory[] = {d->hidden, d->expert_ids, d->expert_weights, d->shared, d->output};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) m->release(m->context, (void *)memory[i]);
    if (r->layer->moe) mm_sm100_stages_close(r->layer->moe, &r->device);
    free(r->ids);
    free(r->weights);
    free(r->shared);
}

static megamoe_status run_kernels(struct run *r, uint32_t *written) {
    struct mm_mega_moe *moe = r->layer->moe;
    const megamoe_stages *s = r->stages;
    size_t pairs = (size_t)r->batch->token_count * moe->shape.slots;
    upload(r, r->ids, r->weights);
    MM_TRY(mm_sm100_stages_open(moe, &r->device));
    MM_TRY(mm_nvfp4_mega_moe_full(moe, &r->device, NULL));
    MM_TRY(mm_mega_moe_check(moe));
    if (s->expert_ids) memcpy(s->expert_ids, r->ids, pairs * sizeof *r->ids);
    if (s->expert_weights) memcpy(s->expert_weights, r->weights, pairs * sizeof *r->weights);
    if (s->shared && r->device.shared)
        memcpy(s->shared, r->shared, (size_t)r->batch->token_count * moe->shape.hidden * sizeof *r->shared);
    memcpy(r->batch->output, r->device.output, (size_t)r->batch->token_count * moe->shape.hidden * 2);
    return mm_sm100_stages_read(moe, &r->device, s, written);
}

static megamoe_status run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream) {
    static const megamoe_stages none = {0};
    struct run r = {.layer = layer, .batch = batch, .stages = stages ? stages : &none};
    uint32_t of_reference = 0, kernels = 0;
    (void)given, (void)stream;
    megamoe_status status = run_others(&r, &of_reference);
    if (status == MEGAMOE_OK && batch->token_count) status = run_kernels(&r, &kernels);
    if (status == MEGAMOE_OK && written)
        *written = (of_reference & (MM_STAGE_LOGITS | MM_STAGE_SHARED)) | MM_STAGE_IDS | MM_STAGE_WEIGHTS | kernels;
    layer->counters.tokens += batch->token_count;
    run_free(&r);
    return status;
}

static megamoe_status route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                            float *expert_weights, void *stream) {
    return mm_backend_reference.route(layer->reference, batch, expert_ids, expert_weights, stream);
}

static megamoe_status counters(mm_backend_layer *layer, megamoe_counters *out, uint64_t *tokens_per_expert) {
    const struct mm_mega_moe_scratch *scratch = &layer->moe->scratch;
    megamoe_counters others = {.struct_size = sizeof others};
    MM_TRY(mm_backend_reference.counters(layer->reference, &others, NULL));
    *out = (megamoe_counters){.struct_size = sizeof *out,
                              .tokens = layer->counters.tokens,
                              .unrouted_tokens = others.unrouted_tokens,
                              .skipped_slots = scratch->counts->skipped_slots,
                              .bad_slots = scratch->counts->bad_slots,
                              .saturated_blocks = scratch->counts->saturated_blocks,
                              .nonfinite_blocks = scratch->counts->nonfinite_blocks};
    if (tokens_per_expert)
        memcpy(tokens_per_expert, scratch->expert_tokens,
               layer->weights->shape.expert_count * sizeof *tokens_per_expert);
    return MEGAMOE_OK;
}

/* One step. Its memory is the caller's, as on the CPU, and so is brought to the model and back. */
static megamoe_status step(mm_backend_layer *layer, mm_step which, const megamoe_batch *batch,
                           const megamoe_tensor *partials, void *stream) {
    struct mm_mega_moe *moe = layer->moe;
    struct sm100_machine *m = &layer->device->machine;
    struct run r = {.layer = layer, .batch = batch};
    size_t pairs = (size_t)batch->token_count * moe->shape.slots,
           values = (size_t)batch->token_count * moe->shape.hidden;
    megamoe_tensor rows = partials ? *partials : (megamoe_tensor){0};
    size_t bytes = partials ? pairs * moe->shape.hidden * (partials->dtype == MEGAMOE_F32 ? 4 : 2) : 0;
    upload(&r, batch->expert_ids, batch->expert_weights);
    rows.data = model_copy_of(&r, rows.data, bytes, "partials");
    megamoe_status status = mm_sm100_step(moe, which, &r.device, &rows, stream);
    if (status == MEGAMOE_OK) status = mm_mega_moe_check(moe);
    if (status == MEGAMOE_OK && partials) memcpy(partials->data, rows.data, bytes);
    if (status == MEGAMOE_OK && which == MM_STEP_FULL) memcpy(batch->output, r.device.output, values * 2);
    m->release(m->context, rows.data);
    run_free(&r);
    return status;
}

static megamoe_status step_weights(const mm_backend_layer *layer, megamoe_mega_moe_weights *weights) {
    mm_sm100_weights_describe(&layer->moe->weights, weights);
    return MEGAMOE_OK;
}

static const mm_backend backend = {
    .name = "sm100-model",
    .id = MEGAMOE_SM100_ON_MODEL,
    .host_memory = true,
    .native_nvfp4 = true,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .layer_create = layer_create,
    .layer_close = layer_close,
    .route = route,
    .run = run,
    .counters = counters,
    .step = step,
    .step_weights = step_weights,
};

__attribute__((visibility("default"))) const mm_backend *megamoe_plugin(const mm_plugin_host *lender);
const mm_backend *megamoe_plugin(const mm_plugin_host *lender) {
    host = lender;
    return lender->backend_size == sizeof(mm_backend) ? &backend : NULL;
}
