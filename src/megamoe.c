/* The public functions on devices and layers: argument checks, then one call. */
#include "megamoe/megamoe.h"

#include <stdlib.h>
#include <string.h>

#include "debug.h"
#include "error.h"
#include "layer.h"
#include "layer_tensors.h"

struct megamoe_device {
    const mm_backend *backend;
    mm_backend_state *state;
    megamoe_device_options options;
    uint64_t copied_bytes; /* of its layers: weights whose layout allows no use in place */
    bool zero_output;      /* MEGA_MOE_STATIC=1 */
    bool debug;            /* MEGAMOE_DEBUG=1, and there is a log to write to */
};

struct megamoe_layer {
    megamoe_device *device;
    const megamoe_checkpoint *checkpoint; /* NULL: made of the caller's tensors */
    mm_layer_parts parts;
    mm_backend_layer *state;
};

#define QUOTE(x) #x
#define VERSION_STRING(major, minor, patch) QUOTE(major) "." QUOTE(minor) "." QUOTE(patch)

const char *megamoe_version(void) {
    return VERSION_STRING(MEGAMOE_VERSION_MAJOR, MEGAMOE_VERSION_MINOR, MEGAMOE_VERSION_PATCH);
}

/* A caller compiled against another version of a struct is refused rather than misread. */
#define CHECK_SIZE(options, type)                                                                                      \
    do {                                                                                                               \
        if ((options)->struct_size != sizeof(type))                                                                    \
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "struct_size of " #type " is %zu, and this library knows %zu",    \
                           (options)->struct_size, sizeof(type));                                                      \
    } while (0)

static megamoe_status need(const void *pointer, const char *name) {
    return pointer ? MEGAMOE_OK : mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s is NULL", name);
}

/* ---- device ---- */

megamoe_status megamoe_device_probe(megamoe_backend backend, uint32_t ordinal) {
    const mm_backend *found;
    return mm_backend_find(backend, ordinal, &found);
}

static bool is_set(const char *variable) {
    const char *value = getenv(variable);
    return value && strcmp(value, "1") == 0;
}

static void log_message(const megamoe_device *device, const char *message) {
    if (device->options.log) device->options.log(device->options.log_context, 1, message);
}

megamoe_status megamoe_device_open(const megamoe_device_options *options, megamoe_device **out) {
    megamoe_device made = {0}, *device;
    MM_TRY(need(options, "options"));
    MM_TRY(need(out, "device"));
    CHECK_SIZE(options, megamoe_device_options);
    if (options->max_tokens == 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "max_tokens is 0; it is the largest batch that will be run");
    if (options->group.transport != MEGAMOE_SOLO || options->group.rank_count > 1)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                       "this megamoe has no expert-parallel transport yet; rank_count must be 0 or 1");
    made.options = *options;
    made.zero_output = is_set("MEGA_MOE_STATIC");
    made.debug = options->log && (is_set("MEGAMOE_DEBUG") || is_set("MEGA_MOE_DEBUG"));
    MM_TRY(mm_backend_find(options->backend, options->ordinal, &made.backend));
    MM_TRY(made.backend->open(&made.options, &made.state));
    device = malloc(sizeof *device);
    if (!device) {
        made.backend->close(made.state);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a device");
    }
    *device = made;
    if (device->zero_output)
        log_message(device, "MEGA_MOE_STATIC=1: experts are skipped and every layer returns ZEROS");
    *out = device;
    return MEGAMOE_OK;
}

void megamoe_device_close(megamoe_device *device) {
    if (!device) return;
    device->backend->close(device->state);
    free(device);
}

static mm_device_facts facts_of(const megamoe_device *device) {
    mm_device_facts facts = {0};
    device->backend->describe(device->state, &facts);
    return facts;
}

/* The description is made anew for each caller's thread, so that it can be read without a lock. */
const char *megamoe_device_describe(const megamoe_device *device) {
    static _Thread_local mm_device_facts facts;
    facts = facts_of(device);
    return facts.description;
}

const char *megamoe_device_backend(const megamoe_device *device) {
    return device->backend->name;
}
const char *megamoe_device_isa(const megamoe_device *device) {
    return facts_of(device).isa;
}
uint32_t megamoe_device_threads(const megamoe_device *device) {
    return facts_of(device).threads;
}

void megamoe_device_memory(const megamoe_device *device, uint64_t *host_bytes, uint64_t *device_bytes) {
    mm_device_facts facts = facts_of(device);
    if (host_bytes) *host_bytes = facts.host_bytes + device->copied_bytes;
    if (device_bytes) *device_bytes = facts.device_bytes;
}

megamoe_status megamoe_device_measure(megamoe_device *device, megamoe_limits *limits) {
    MM_TRY(need(device, "device"));
    MM_TRY(need(limits, "limits"));
    CHECK_SIZE(limits, megamoe_limits);
    if (!device->backend->measure)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the %s backend has no limits to measure", device->backend->name);
    return device->backend->measure(device->state, limits);
}

/* ---- layer ---- */

static megamoe_status check_layer_options(const megamoe_layer_options *options) {
    CHECK_SIZE(options, megamoe_layer_options);
    if (options->activations > MEGAMOE_ACTIVATIONS_NVFP4 || options->input_global > MEGAMOE_GLOBAL_UNIT ||
        options->intermediate_global > MEGAMOE_GLOBAL_UNIT)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "activations %d, input_global %d, intermediate_global %d: one is unknown",
                       (int)options->activations, (int)options->input_global, (int)options->intermediate_global);
    return MEGAMOE_OK;
}

static const megamoe_layer_options default_layer_options = {.struct_size = sizeof(megamoe_layer_options)};

/* An empty layer of the device, after the checks that both ways to make one share. */
static megamoe_status layer_begin(megamoe_device *device, const megamoe_layer_options **options,
                                  megamoe_layer **layer) {
    if (!*options) *options = &default_layer_options;
    MM_TRY(check_layer_options(*options));
    *layer = calloc(1, sizeof **layer);
    if (!*layer) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    (*layer)->device = device;
    return MEGAMOE_OK;
}

/* Hands the decided weights to the backend; a layer that failed, here or before, is closed. */
static megamoe_status layer_finish(megamoe_layer *layer, megamoe_status status, bool weights_on_device,
                                   const megamoe_layer_options *options, megamoe_layer **out) {
    const megamoe_device *device = layer->device;
    if (status == MEGAMOE_OK)
        status = device->backend->layer_create(device->state, &layer->parts.weights, weights_on_device, options,
                                               &layer->state);
    if (status != MEGAMOE_OK) {
        megamoe_layer_close(layer);
        return status;
    }
    *out = layer;
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_load(megamoe_device *device, const megamoe_checkpoint *checkpoint, uint32_t index,
                                  const megamoe_layer_options *options, megamoe_layer **out) {
    megamoe_layer *layer;
    megamoe_status status;
    bool decided;
    MM_TRY(need(device, "device"));
    MM_TRY(need(checkpoint, "checkpoint"));
    MM_TRY(need(out, "layer"));
    MM_TRY(layer_begin(device, &options, &layer));
    layer->checkpoint = checkpoint;
    status = mm_layer_from_checkpoint(device->backend, checkpoint, index, options, &device->options, &layer->parts);
    decided = status == MEGAMOE_OK; /* what fails from here on, a backend says, who does not know the layer's number */
    status = layer_finish(layer, status, false, options, out);
    if (status != MEGAMOE_OK) return decided ? mm_fail_in(status, "layer %u", index) : status;
    device->copied_bytes += layer->parts.source.copied_bytes;
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_create(megamoe_device *device, const megamoe_layer_desc *desc,
                                    const megamoe_layer_options *options, megamoe_layer **out) {
    megamoe_layer *layer;
    megamoe_status status;
    MM_TRY(need(device, "device"));
    MM_TRY(need(desc, "desc"));
    MM_TRY(need(out, "layer"));
    CHECK_SIZE(desc, megamoe_layer_desc);
    MM_TRY(layer_begin(device, &options, &layer));
    const mm_memory memory = {device->backend, device->state};
    status = mm_layer_from_tensors(&memory, desc, options, &layer->parts);
    return layer_finish(layer, status, !device->backend->host_memory, options, out);
}

void megamoe_layer_close(megamoe_layer *layer) {
    if (!layer) return;
    if (layer->state) {
        layer->device->backend->layer_close(layer->state);
        layer->device->copied_bytes -= layer->parts.source.copied_bytes;
    }
    mm_layer_parts_free(&layer->parts);
    free(layer);
}

void megamoe_layer_describe(const megamoe_layer *layer, megamoe_layer_facts *facts) {
    const mm_layer_weights *w = &layer->parts.weights;
    size_t size = facts->struct_size;
    uint32_t first = 0;
    while (first < w->shape.expert_count && w->local_index[first] < 0) first++;
    *facts = (megamoe_layer_facts){
        .struct_size = size,
        .shape = w->shape,
        .activations = w->activations,
        .input_global = w->input_mode,
        .intermediate_global = w->intermediate_mode,
        .expert_first = first,
        .expert_count = w->expert_count,
        .routes = w->router.weight != NULL,
        .has_shared_expert = w->shared != NULL,
        .routing_weight_before = w->routing_weight_before,
    };
    if (w->expert_count == 0) return;
    facts->expert_bytes = mm_matrix_bytes(&w->experts[0].up) + mm_matrix_bytes(&w->experts[0].down);
    if (!w->shape.not_gated) facts->expert_bytes += mm_matrix_bytes(&w->experts[0].gate);
}

/* ---- a batch ---- */

static megamoe_status check_hidden(const megamoe_layer *layer, megamoe_batch *batch) {
    const megamoe_shape *shape = &layer->parts.weights.shape;
    uint32_t max_tokens = layer->device->options.max_tokens;
    CHECK_SIZE(batch, megamoe_batch);
    if (batch->token_count > max_tokens)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "a batch of %u tokens on a device opened for max_tokens %u",
                       batch->token_count, max_tokens);
    if (batch->hidden_dtype == 0) batch->hidden_dtype = MEGAMOE_BF16;
    if (batch->hidden_dtype != MEGAMOE_BF16 && batch->hidden_dtype != MEGAMOE_F32)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "hidden states can be BF16 or F32, not dtype %d",
                       (int)batch->hidden_dtype);
    if (batch->token_count > 0) MM_TRY(need(batch->hidden, "hidden"));
    if (batch->expert_ids && !batch->expert_weights)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "expert_ids without expert_weights");
    if (!batch->expert_ids && !layer->parts.weights.router.weight)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "this layer has no router, so the caller must give expert_ids");
    if (!batch->expert_ids && shape->hash_routed && !batch->token_ids && batch->token_count > 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "this layer routes by token id, so the batch needs token_ids");
    return MEGAMOE_OK;
}

/* On the host a bad id is refused before any work. On a GPU the host does not look: the kernels count it. */
static megamoe_status check_routing(const megamoe_layer *layer, const megamoe_batch *batch) {
    const mm_layer_weights *w = &layer->parts.weights;
    uint32_t k_count = w->shape.experts_per_token;
    if (!layer->device->backend->host_memory || batch->allow_bad_routing) return MEGAMOE_OK;
    for (uint32_t t = 0; t < batch->token_count && batch->expert_ids; t++)
        for (uint32_t k = 0; k < k_count; k++) {
            int32_t id = batch->expert_ids[(size_t)t * k_count + k];
            if (id < -1 || id >= (int32_t)w->shape.expert_count)
                return mm_fail(MEGAMOE_INVALID_ARGUMENT, "token %u, slot %u has expert id %d; ids are 0 to %u, or -1",
                               t, k, id, w->shape.expert_count - 1);
        }
    for (uint32_t t = 0; t < batch->token_count && !batch->expert_ids && w->shape.hash_routed; t++)
        if (batch->token_ids[t] < 0 || (uint32_t)batch->token_ids[t] >= w->router.vocabulary)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "token %u has id %d, outside the hash table of %u tokens", t,
                           batch->token_ids[t], w->router.vocabulary);
    return MEGAMOE_OK;
}

static megamoe_status check_output(const megamoe_layer *layer, const megamoe_batch *batch) {
    uint64_t values = (uint64_t)batch->token_count * layer->parts.weights.shape.hidden;
    uintptr_t in = (uintptr_t)batch->hidden, out = (uintptr_t)batch->output;
    uint64_t in_bytes = values * (batch->hidden_dtype == MEGAMOE_F32 ? 4 : 2), out_bytes = values * 2;
    if (batch->token_count == 0) return MEGAMOE_OK;
    MM_TRY(need(batch->output, "output"));
    if (in < out + out_bytes && out < in + in_bytes)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "output overlaps hidden; the layer does not run in place");
    return MEGAMOE_OK;
}

/* A shard that shrank after it was mapped would end the process when it is read, so its length is checked
 * first. */
static megamoe_status check_files(const megamoe_layer *layer) {
    if (!layer->checkpoint) return MEGAMOE_OK;
    return mm_checkpoint_unchanged(layer->checkpoint, layer->parts.source.shards, layer->parts.source.shard_count);
}

/* All that is checked before a run; completes the batch's defaults. */
static megamoe_status check_run(const megamoe_layer *layer, megamoe_batch *batch) {
    MM_TRY(check_hidden(layer, batch));
    MM_TRY(check_output(layer, batch));
    MM_TRY(check_routing(layer, batch));
    return check_files(layer);
}

megamoe_status megamoe_layer_route(megamoe_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                                   float *expert_weights, void *stream) {
    megamoe_batch checked;
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(batch, "batch"));
    MM_TRY(need(expert_ids, "expert_ids"));
    MM_TRY(need(expert_weights, "expert_weights"));
    checked = *batch;
    checked.expert_ids = NULL;
    MM_TRY(check_hidden(layer, &checked));
    MM_TRY(check_routing(layer, &checked));
    MM_TRY(check_files(layer));
    return layer->device->backend->route(layer->state, &checked, expert_ids, expert_weights, stream);
}

static megamoe_status zero_output(const megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    const megamoe_device *device = layer->device;
    const size_t bytes = (size_t)batch->token_count * layer->parts.weights.shape.hidden * sizeof(uint16_t);
    if (bytes == 0) return MEGAMOE_OK;
    if (device->backend->zero) return device->backend->zero(device->state, batch->output, bytes, stream);
    memset(batch->output, 0, bytes);
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_time(megamoe_layer *layer, const megamoe_batch *batches, uint32_t batch_count,
                                  megamoe_times *times) {
    megamoe_times found = {.struct_size = sizeof found};
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(batches, "batches"));
    MM_TRY(need(times, "times"));
    CHECK_SIZE(times, megamoe_times);
    const mm_backend *backend = layer->device->backend;
    if (!backend->time)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the %s backend has no clock of its own", backend->name);
    megamoe_batch *checked = batch_count ? malloc(batch_count * sizeof *checked) : NULL;
    megamoe_status status = MEGAMOE_OK;
    if (!checked) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "there is no batch to time");
    for (uint32_t i = 0; i < batch_count && status == MEGAMOE_OK; i++) {
        checked[i] = batches[i];
        status = check_hidden(layer, &checked[i]);
        if (status == MEGAMOE_OK) status = check_routing(layer, &checked[i]);
        if (status == MEGAMOE_OK &&
            (!checked[i].expert_ids || checked[i].token_count == 0 || checked[i].token_count != checked[0].token_count))
            status =
                mm_fail(MEGAMOE_INVALID_ARGUMENT, "batch %u has no routing, no tokens, or not as many as the first", i);
    }
    if (status == MEGAMOE_OK) status = backend->time(layer->state, checked, batch_count, &found);
    free(checked);
    if (status == MEGAMOE_OK) *times = found;
    return status;
}

megamoe_status megamoe_layer_run(megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    megamoe_batch checked;
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(batch, "batch"));
    checked = *batch;
    MM_TRY(check_run(layer, &checked));
    if (layer->device->zero_output) return zero_output(layer, &checked, stream);
    if (layer->device->debug)
        return mm_debug_run(layer->device->backend, layer->state, &layer->parts.weights, &checked,
                            &layer->device->options);
    return layer->device->backend->run(layer->state, &checked, NULL, NULL, NULL, stream);
}

megamoe_status megamoe_layer_run_stages(megamoe_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                                        const megamoe_stages *stages, uint32_t *written) {
    megamoe_batch checked;
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(batch, "batch"));
    MM_TRY(need(stages, "stages"));
    CHECK_SIZE(stages, megamoe_stages);
    if (given) CHECK_SIZE(given, megamoe_stages);
    if (given && layer->device->backend != &mm_backend_reference)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "only the reference backend takes given stages, not %s",
                       layer->device->backend->name);
    checked = *batch;
    MM_TRY(check_run(layer, &checked));
    return layer->device->backend->run(layer->state, &checked, given, stages, written, NULL);
}

megamoe_status megamoe_layer_counters(megamoe_layer *layer, megamoe_counters *counters, uint64_t *tokens_per_expert) {
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(counters, "counters"));
    CHECK_SIZE(counters, megamoe_counters);
    return layer->device->backend->counters(layer->state, counters, tokens_per_expert);
}

/* ---- steps and single stages ---- */

static megamoe_status check_matrix(const megamoe_tensor *t, const char *name, int64_t rows, int64_t columns,
                                   megamoe_dtype first, megamoe_dtype second) {
    MM_TRY(need(t, name));
    MM_TRY(mm_tensor_check(t, name, 2));
    if (t->dtype != first && t->dtype != second)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has dtype %d instead of %d or %d", name, (int)t->dtype, (int)first,
                       (int)second);
    if (t->extent[0] != rows || t->extent[1] != columns)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s is [%lld, %lld] instead of [%lld, %lld]", name,
                       (long long)t->extent[0], (long long)t->extent[1], (long long)rows, (long long)columns);
    if (t->stride[0] != 0 &&
        mm_tensor_pitch(t, 0) !=
            mm_tensor_pitch(&(megamoe_tensor){.dtype = t->dtype, .rank = 2, .extent = {rows, columns}}, 0))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s must be contiguous", name);
    return MEGAMOE_OK;
}

static megamoe_status check_globals(const megamoe_tensor *t, int64_t rows) {
    MM_TRY(mm_tensor_check(t, "globals", 1));
    if (t->dtype != MEGAMOE_F32 || (t->extent[0] != rows && t->extent[0] != 1) || t->stride[0] > 1)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "globals must be contiguous F32 [%lld] or [1]", (long long)rows);
    return MEGAMOE_OK;
}

static megamoe_status no_steps(const megamoe_device *device) {
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                   "the %s backend has no mega-MoE kernels; they need a device of backend sm100, and megamoe_layer_run "
                   "runs everywhere",
                   device->backend->name);
}

megamoe_status megamoe_transform_nvfp4_weights_for_mega_moe(megamoe_device *device, const megamoe_layer_desc *desc,
                                                            const megamoe_layer_options *options,
                                                            megamoe_mega_moe_weights *weights, megamoe_layer **out) {
    megamoe_mega_moe_weights made = {.struct_size = sizeof made};
    megamoe_layer *layer;
    MM_TRY(need(device, "device"));
    MM_TRY(need(out, "layer"));
    if (weights) CHECK_SIZE(weights, megamoe_mega_moe_weights);
    if (!device->backend->step_weights) return no_steps(device);
    MM_TRY(megamoe_layer_create(device, desc, options, &layer));
    megamoe_status status = device->backend->step_weights(layer->state, &made);
    if (status != MEGAMOE_OK) {
        megamoe_layer_close(layer);
        return status;
    }
    if (weights) *weights = made;
    *out = layer;
    return MEGAMOE_OK;
}

static megamoe_status run_step(megamoe_layer *layer, mm_step step, const megamoe_batch *batch,
                               const megamoe_tensor *partials, void *stream) {
    megamoe_batch checked;
    MM_TRY(need(layer, "layer"));
    MM_TRY(need(batch, "batch"));
    if (!layer->device->backend->step) return no_steps(layer->device);
    checked = *batch;
    if (!checked.expert_ids) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "expert_ids is NULL, and a step does not route");
    MM_TRY(check_hidden(layer, &checked));
    if (checked.token_count == 0) return MEGAMOE_OK;
    MM_TRY(check_routing(layer, &checked));
    if (step == MM_STEP_FULL) MM_TRY(check_output(layer, &checked));
    if (step == MM_STEP_L2) {
        const megamoe_shape *shape = &layer->parts.weights.shape;
        MM_TRY(check_matrix(partials, "partials", (int64_t)checked.token_count * shape->experts_per_token,
                            shape->hidden, MEGAMOE_BF16, MEGAMOE_F32));
    }
    return layer->device->backend->step(layer->state, step, &checked, partials, stream);
}

megamoe_status megamoe_stage_activation(megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    return run_step(layer, MM_STEP_STAGE, batch, NULL, stream);
}
megamoe_status megamoe_nvfp4_mega_moe_l1(megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    return run_step(layer, MM_STEP_L1, batch, NULL, stream);
}
megamoe_status megamoe_nvfp4_mega_moe_l2(megamoe_layer *layer, const megamoe_batch *batch,
                                         const megamoe_tensor *partials, void *stream) {
    return run_step(layer, MM_STEP_L2, batch, partials, stream);
}
megamoe_status megamoe_nvfp4_mega_moe_full(megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    return run_step(layer, MM_STEP_FULL, batch, NULL, stream);
}

static megamoe_status no_stage(const megamoe_device *device, const char *stage) {
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the %s backend has no stage of its own to %s", device->backend->name,
                   stage);
}

megamoe_status megamoe_quantize(megamoe_device *device, const megamoe_tensor *values, const float *global,
                                megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream) {
    MM_TRY(need(device, "device"));
    MM_TRY(need(values, "values"));
    MM_TRY(mm_tensor_check(values, "values", 2));
    int64_t rows = values->extent[0], columns = values->extent[1];
    MM_TRY(check_matrix(values, "values", rows, columns, MEGAMOE_BF16, MEGAMOE_F32));
    if (columns % 16 != 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "rows of %lld values are not whole blocks of 16", (long long)columns);
    MM_TRY(check_matrix(codes, "codes", rows, columns, MEGAMOE_E2M1X2, MEGAMOE_E2M1X2));
    MM_TRY(check_matrix(scales, "scales", rows, columns / 16, MEGAMOE_E4M3, MEGAMOE_E4M3));
    MM_TRY(need(globals, "globals"));
    MM_TRY(check_globals(globals, rows));
    if (globals->extent[0] != rows)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "globals has room for 1 of %lld rows", (long long)rows);
    if (global && !(*global > 0.0f && *global <= 3.402823466e+38f))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "the global scale is %g; it must be finite and positive",
                       (double)*global);
    if (!device->backend->quantize) return no_stage(device, "quantize");
    return device->backend->quantize(device->state, values, global, codes, scales, globals, stream);
}

megamoe_status megamoe_dequantize(megamoe_device *device, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                  const megamoe_tensor *globals, megamoe_tensor *values, void *stream) {
    MM_TRY(need(device, "device"));
    MM_TRY(need(codes, "codes"));
    MM_TRY(need(scales, "scales"));
    MM_TRY(mm_tensor_check(codes, "codes", 2));
    int64_t rows = codes->extent[0], columns = codes->extent[1], group = scales->dtype == MEGAMOE_E8M0 ? 32 : 16;
    if (columns % group != 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "rows of %lld values are not whole groups of %lld", (long long)columns,
                       (long long)group);
    MM_TRY(check_matrix(codes, "codes", rows, columns, MEGAMOE_E2M1X2, MEGAMOE_E2M1X2));
    MM_TRY(check_matrix(scales, "scales", rows, columns / group, MEGAMOE_E4M3, MEGAMOE_E8M0));
    MM_TRY(check_matrix(values, "values", rows, columns, MEGAMOE_BF16, MEGAMOE_F32));
    if (globals) MM_TRY(check_globals(globals, rows));
    if (!device->backend->dequantize) return no_stage(device, "dequantize");
    return device->backend->dequantize(device->state, codes, scales, globals, values, stream);
}

/* The ends must not decrease nor pass the rows there are. On a GPU they are device memory and not looked at.
 */
static megamoe_status check_offsets(const megamoe_device *device, const int32_t *offsets, uint32_t count,
                                    int64_t rows) {
    int32_t before = 0;
    for (uint32_t g = 0; g < count && device->backend->host_memory; g++) {
        if (offsets[g] < before || offsets[g] > rows)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "group %u ends at row %d, after %d, of %lld rows", g, offsets[g],
                           before, (long long)rows);
        before = offsets[g];
    }
    return MEGAMOE_OK;
}

megamoe_status megamoe_grouped_gemm(megamoe_device *device, const megamoe_tensor *rows,
                                    const megamoe_tensor *row_scales, const megamoe_projection *weights,
                                    const int32_t *offsets, uint32_t group_count, megamoe_tensor *output,
                                    void *stream) {
    MM_TRY(need(device, "device"));
    MM_TRY(need(rows, "rows"));
    MM_TRY(need(weights, "weights"));
    MM_TRY(need(offsets, "offsets"));
    if (!device->backend->grouped_gemm) return no_stage(device, "multiply");
    if (group_count == 0) return MEGAMOE_OK;
    MM_TRY(mm_tensor_check(rows, "rows", 2));
    mm_matrix *matrices = malloc(group_count * sizeof *matrices);
    if (!matrices) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u groups", group_count);
    const mm_memory memory = {device->backend, device->state};
    megamoe_status status = MEGAMOE_OK;
    for (uint32_t g = 0; g < group_count && status == MEGAMOE_OK; g++)
        status = mm_matrix_from_projection(&memory, weights, "weights", group_count, g, &matrices[g]);
    int64_t count = rows->extent[0], columns = (int64_t)matrices[0].columns;
    if (status == MEGAMOE_OK) status = check_matrix(rows, "rows", count, columns, MEGAMOE_BF16, MEGAMOE_E2M1X2);
    if (status == MEGAMOE_OK && rows->dtype == MEGAMOE_E2M1X2)
        status = check_matrix(row_scales, "row_scales", count, columns / 16, MEGAMOE_E4M3, MEGAMOE_E4M3);
    if (status == MEGAMOE_OK)
        status = check_matrix(output, "output", count, (int64_t)matrices[0].rows, MEGAMOE_F32, MEGAMOE_BF16);
    if (status == MEGAMOE_OK) status = check_offsets(device, offsets, group_count, count);
    if (status == MEGAMOE_OK)
        status = device->backend->grouped_gemm(device->state, rows, row_scales, matrices, offsets, group_count, output,
                                               stream);
    free(matrices);
    return status;
}
