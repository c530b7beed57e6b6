/*
 * Running a batch for a caller: from device memory on the caller's stream, or from host memory through scratch; and
 * with every intermediate that the kernels leave behind brought to the host for tests and bisection.
 */
#include "backend/cuda/state.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "numerics/bf16.h"

static megamoe_status to_host(const mm_backend_state *state, CUstream stream, void *host, const void *device,
                              size_t bytes) {
    CUresult result = state->driver->copy_to_host(host, (CUdeviceptr)(uintptr_t)device, bytes, stream);
    if (result == CUDA_SUCCESS) result = state->driver->stream_wait(stream);
    return mm_driver_status(state->driver, result, "reading a stage");
}

static megamoe_status to_device(const mm_backend_state *state, CUstream stream, void *device, const void *host,
                                size_t bytes) {
    if (!host) return MEGAMOE_OK;
    return mm_driver_status(state->driver,
                            state->driver->copy_to_device((CUdeviceptr)(uintptr_t)device, host, bytes, stream),
                            "copying a batch to the GPU");
}

bool mm_cuda_is_host(const mm_backend_state *state, const void *p) {
    CUpointer_attribute which = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    unsigned type = 0;
    void *into = &type;
    return p && (state->driver->pointer_attributes(1, &which, &into, (CUdeviceptr)(uintptr_t)p) != CUDA_SUCCESS ||
                 type == 0);
}

/* A batch in host memory: copied in, run, and copied out. Waits, unlike one in device memory. */
static megamoe_status run_host(mm_backend_layer *layer, const megamoe_batch *batch, bool stages, CUstream stream) {
    mm_backend_state *state = layer->state;
    const megamoe_shape *shape = &layer->weights->shape;
    const size_t tokens = batch->token_count, pairs = tokens * shape->experts_per_token;
    megamoe_batch copy = *batch;
    mm_scratch s;
    if (tokens == 0) return MEGAMOE_OK;
    mm_cuda_scratch(layer, &s);
    copy.hidden = s.hidden, copy.output = s.output;
    copy.token_ids = batch->token_ids ? s.token_ids : NULL;
    copy.expert_ids = batch->expert_ids ? s.given_ids : NULL;
    copy.expert_weights = batch->expert_weights ? s.given_weights : NULL;
    MM_TRY(to_device(state, stream, s.hidden, batch->hidden,
                     tokens * shape->hidden * (batch->hidden_dtype == MEGAMOE_F32 ? 4 : 2)));
    MM_TRY(to_device(state, stream, s.token_ids, batch->token_ids, tokens * 4));
    MM_TRY(to_device(state, stream, s.given_ids, batch->expert_ids, pairs * 4));
    MM_TRY(to_device(state, stream, s.given_weights, batch->expert_weights, pairs * 4));
    MM_TRY((stages ? mm_cuda_run_stages : mm_cuda_run_batch)(layer, &copy, stream));
    return to_host(state, stream, batch->output, s.output, tokens * shape->hidden * 2);
}

/* ---- stages --------------------------------------------------------------------------------------------- */

/* What gather needs to bring sorted rows to their slots. */
typedef struct rows {
    mm_backend_layer *layer;
    CUstream stream;
    size_t tokens, pairs, row_count;
    int32_t *pair_row; /* host */
} rows;

static megamoe_status rows_open(mm_backend_layer *layer, uint32_t token_count, CUstream stream, rows *r) {
    mm_cuda_plan plan;
    mm_scratch s;
    mm_cuda_scratch(layer, &s);
    *r = (rows){.layer = layer, .stream = stream, .tokens = token_count};
    r->pairs = r->tokens * layer->weights->shape.experts_per_token;
    r->pair_row = malloc(r->pairs * sizeof *r->pair_row);
    if (!r->pair_row) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %zu slots", r->pairs);
    MM_TRY(to_host(layer->state, stream, r->pair_row, s.pair_row, r->pairs * sizeof *r->pair_row));
    MM_TRY(to_host(layer->state, stream, &plan, s.plan, sizeof plan));
    r->row_count = (size_t)plan.rows;
    return MEGAMOE_OK;
}

/* Sorted device rows at a pitch to [T, K, row_bytes] in host memory; skipped slots are zero. */
static megamoe_status gather(const rows *r, const void *device, size_t pitch, size_t row_bytes, void *out) {
    char *copy = malloc(r->row_count * pitch + 1);
    if (!copy) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a stage of %zu rows", r->row_count);
    megamoe_status status = MEGAMOE_OK;
    if (r->row_count) status = to_host(r->layer->state, r->stream, copy, device, r->row_count * pitch);
    for (size_t i = 0; status == MEGAMOE_OK && i < r->pairs; i++) {
        char *to = (char *)out + i * row_bytes;
        if (r->pair_row[i] < 0)
            memset(to, 0, row_bytes);
        else
            memcpy(to, copy + (size_t)r->pair_row[i] * pitch, row_bytes);
    }
    free(copy);
    return status;
}

/* The inverse of mm_staged_place (convert.cuh), written out: place p of a 128-group holds value k. */
static size_t staged_source(size_t p) {
    return (p & ~(size_t)127) | (p >> 5 & 3) << 3 | (p >> 4 & 1) << 1 | (p >> 3 & 1) | (p >> 1 & 3) << 5 | (p & 1) << 2;
}

static megamoe_status write_h(const rows *r, const uint16_t *h, uint16_t *out) {
    const size_t pitch = r->layer->i_pitch, columns = r->layer->weights->shape.intermediate;
    uint16_t *staged = malloc(r->pairs * pitch * 2 + 1);
    if (!staged) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %zu slots", r->pairs);
    megamoe_status status = gather(r, h, pitch * 2, pitch * 2, staged);
    for (size_t i = 0; status == MEGAMOE_OK && i < r->pairs; i++)
        for (size_t p = 0; p < pitch; p++)
            if (staged_source(p) < columns) out[i * columns + staged_source(p)] = staged[i * pitch + p];
    free(staged);
    return status;
}

static megamoe_status write_l2(const rows *r, const uint16_t *p, float *out) {
    const size_t count = r->pairs * r->layer->weights->shape.hidden, row = r->layer->weights->shape.hidden * 2ull;
    uint16_t *values = malloc(count * 2 + 1);
    if (!values) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %zu slots", r->pairs);
    megamoe_status status = gather(r, p, row, row, values);
    for (size_t i = 0; status == MEGAMOE_OK && i < count; i++) out[i] = mm_bf16_to_f32(values[i]);
    free(values);
    return status;
}

/* Codes and scales of rows, by running the quantization again for them alone. row_count: device rows to quantize. */
typedef struct quantized {
    mm_block *blocks;
    uint8_t *codes, *scales;
    float *globals;
} quantized;

static megamoe_status quantize_rows(mm_backend_layer *layer, mm_cuda_stage_args args, size_t row_count, CUstream stream,
                                    quantized *q) {
    mm_backend_state *state = layer->state;
    void *base;
    MM_TRY(mm_block_create(state, row_count * (args.columns / 2 + args.columns / 16 + 4) + 1024, "a stage", &q->blocks,
                           &base));
    q->globals = base;
    q->codes = (uint8_t *)(q->globals + row_count), q->scales = q->codes + row_count * (args.columns / 2);
    args.codes = q->codes, args.scales = q->scales, args.globals = q->globals;
    args.staged = NULL, args.counters = NULL, args.plan = NULL;
    args.row_count = (uint32_t)row_count;
    if (row_count == 0) return MEGAMOE_OK;
    return mm_cuda_stage_launch(state, &args, (uint32_t)row_count, false, stream);
}

static megamoe_status write_x(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *stages,
                              CUstream stream, uint32_t *written) {
    const mm_layer_weights *w = layer->weights;
    const size_t tokens = batch->token_count, h = w->shape.hidden;
    mm_cuda_stage_args args = {.source = batch->hidden,
                               .source_f32 = batch->hidden_dtype == MEGAMOE_F32,
                               .round_bf16 = 1,
                               .slots_per_token = 1,
                               .columns = w->shape.hidden,
                               .pitch = layer->h_pitch,
                               .quantize = 1,
                               .global_mode = w->input_mode,
                               .global = w->input_global};
    quantized q = {0};
    megamoe_status status = quantize_rows(layer, args, tokens, stream, &q);
    if (status == MEGAMOE_OK && stages->x_codes) {
        status = to_host(layer->state, stream, stages->x_codes, q.codes, tokens * h / 2);
        *written |= MM_STAGE_X_CODES;
    }
    if (status == MEGAMOE_OK && stages->x_scales) {
        status = to_host(layer->state, stream, stages->x_scales, q.scales, tokens * h / 16);
        *written |= MM_STAGE_X_SCALES;
    }
    if (status == MEGAMOE_OK && stages->x_globals) {
        status = to_host(layer->state, stream, stages->x_globals, q.globals, tokens * sizeof(float));
        *written |= MM_STAGE_X_GLOBALS;
    }
    mm_blocks_free(layer->state, &q.blocks);
    return status;
}

static megamoe_status write_h_quantized(const rows *r, const mm_scratch *s, const megamoe_stages *stages,
                                        uint32_t *written) {
    const mm_layer_weights *w = r->layer->weights;
    const size_t i = w->shape.intermediate;
    mm_cuda_stage_args args = {.source = s->h32,
                               .source_f32 = 1,
                               .slots_per_token = 1,
                               .columns = w->shape.intermediate,
                               .pitch = r->layer->i_pitch,
                               .quantize = 1,
                               .global_mode = w->intermediate_mode,
                               .global = 1.0f,
                               .experts = r->layer->experts,
                               .offsets = s->offsets,
                               .expert_count = w->expert_count};
    quantized q = {0};
    megamoe_status status = quantize_rows(r->layer, args, r->row_count, r->stream, &q);
    if (status == MEGAMOE_OK && stages->h_codes) {
        status = gather(r, q.codes, i / 2, i / 2, stages->h_codes);
        *written |= MM_STAGE_H_CODES;
    }
    if (status == MEGAMOE_OK && stages->h_scales) {
        status = gather(r, q.scales, i / 16, i / 16, stages->h_scales);
        *written |= MM_STAGE_H_SCALES;
    }
    if (status == MEGAMOE_OK && stages->h_globals) {
        status = gather(r, q.globals, sizeof(float), sizeof(float), stages->h_globals);
        *written |= MM_STAGE_H_GLOBALS;
    }
    mm_blocks_free(r->layer->state, &q.blocks);
    return status;
}

/* Routing, as given or as the router left it. */
static megamoe_status write_routing(mm_backend_layer *layer, const megamoe_batch *batch, const mm_scratch *s,
                                    const megamoe_stages *stages, CUstream stream, uint32_t *written) {
    const size_t pairs = (size_t)batch->token_count * layer->weights->shape.experts_per_token;
    const bool given = batch->expert_ids != NULL;
    if (stages->expert_ids) {
        MM_TRY(to_host(layer->state, stream, stages->expert_ids, given ? batch->expert_ids : s->expert_ids, pairs * 4));
        *written |= MM_STAGE_IDS;
    }
    if (stages->expert_weights) {
        MM_TRY(to_host(layer->state, stream, stages->expert_weights, given ? batch->expert_weights : s->weights,
                       pairs * 4));
        *written |= MM_STAGE_WEIGHTS;
    }
    if (stages->logits && !given) {
        MM_TRY(to_host(layer->state, stream, stages->logits, s->logits,
                       (size_t)batch->token_count * layer->weights->shape.expert_count * 4));
        *written |= MM_STAGE_LOGITS;
    }
    return MEGAMOE_OK;
}

static megamoe_status write_rows(const rows *r, const mm_scratch *s, const megamoe_stages *stages, uint32_t *written) {
    if (r->layer->weights->expert_count == 0) return MEGAMOE_OK;
    const bool nvfp4 = mm_cuda_quantizes(r->layer->weights, r->layer->weights->experts);
    if (stages->h && !nvfp4) {
        MM_TRY(write_h(r, s->h, stages->h));
        *written |= MM_STAGE_H;
    }
    if (nvfp4 && (stages->h_codes || stages->h_scales || stages->h_globals))
        MM_TRY(write_h_quantized(r, s, stages, written));
    if (stages->l2) {
        MM_TRY(write_l2(r, s->p, stages->l2));
        *written |= MM_STAGE_L2;
    }
    return MEGAMOE_OK;
}

/* batch: in device memory, already run on `stream`. */
static megamoe_status write_stages(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *stages,
                                   CUstream stream, uint32_t *written) {
    const size_t values = (size_t)batch->token_count * layer->weights->shape.hidden;
    mm_scratch s;
    rows r;
    mm_cuda_scratch(layer, &s);
    MM_TRY(write_routing(layer, batch, &s, stages, stream, written));
    if (stages->x_codes || stages->x_scales || stages->x_globals)
        if (layer->weights->activations == MEGAMOE_ACTIVATIONS_NVFP4)
            MM_TRY(write_x(layer, batch, stages, stream, written));
    megamoe_status status = rows_open(layer, batch->token_count, stream, &r);
    if (status == MEGAMOE_OK) status = write_rows(&r, &s, stages, written);
    free(r.pair_row);
    if (status == MEGAMOE_OK && stages->shared && layer->weights->shared) {
        status = to_host(layer->state, stream, stages->shared, s.shared_out, values * sizeof(float));
        *written |= MM_STAGE_SHARED;
    }
    if (status == MEGAMOE_OK && stages->output) {
        status = to_host(layer->state, stream, stages->output, batch->output, values * sizeof(uint16_t));
        *written |= MM_STAGE_OUTPUT;
    }
    return status;
}

static megamoe_status run_entered(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *stages,
                                  uint32_t *written, void *stream) {
    mm_backend_state *state = layer->state;
    const bool host = batch->token_count > 0 && mm_cuda_is_host(state, batch->hidden);
    megamoe_batch device = *batch;
    uint32_t done = 0;
    mm_scratch s;
    if (host) {
        MM_TRY(run_host(layer, batch, stages != NULL, state->stream));
        mm_cuda_scratch(layer, &s);
        stream = state->stream;
        device.hidden = s.hidden, device.output = s.output, device.token_ids = s.token_ids;
        device.expert_ids = batch->expert_ids ? s.given_ids : NULL;
        device.expert_weights = batch->expert_weights ? s.given_weights : NULL;
    } else
        MM_TRY((stages ? mm_cuda_run_stages : mm_cuda_run_batch)(layer, batch, stream));
    if (!stages) return MEGAMOE_OK;
    if (batch->token_count > 0) MM_TRY(write_stages(layer, &device, stages, stream, &done));
    if (written) *written = done;
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                           const megamoe_stages *stages, uint32_t *written, void *stream) {
    (void)given; /* the reference's alone */
    MM_TRY(mm_cuda_enter(layer->state));
    megamoe_status status = run_entered(layer, batch, stages, written, stream);
    mm_cuda_leave(layer->state);
    return status;
}
