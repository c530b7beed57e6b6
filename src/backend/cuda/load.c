/*
 * Weights to the device, as they are: mapped shards are copied in large pinned chunks, each matrix to its own aligned
 * place; a device's tensors are used where they lie. The only thing that changes is a pitch (interleaved rows become
 * plain ones).
 */
#include "backend/cuda/state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { CHUNK_COUNT = 3, ALIGNMENT = 256, COPY_THREADS = 4, COPY_SHARE = 1 << 20 };
#define CHUNK_BYTES (32u << 20)

/* Host bytes on their way to consecutive device addresses. Without a device it only counts. */
typedef struct uploader {
    mm_backend_state *state; /* NULL: count */
    char *target;            /* device address of byte 0 */
    uint64_t done, sent, total;
    char *chunks[CHUNK_COUNT];
    CUevent copied[CHUNK_COUNT];
    uint32_t chunk;
    const megamoe_layer_options *options;
} uploader;

/* One thread's memcpy from page cache is slower than PCIe: large copies are shared, at least COPY_SHARE each. */
typedef struct copy_share {
    char *to;
    const char *from;
    size_t bytes;
} copy_share;

static void *copy_run(void *share) {
    const copy_share *s = share;
    memcpy(s->to, s->from, s->bytes);
    return NULL;
}

static void copy_shared(char *to, const char *from, size_t bytes) {
    size_t wanted = bytes / COPY_SHARE, count = wanted < COPY_THREADS ? wanted : COPY_THREADS, started = 0;
    copy_share shares[COPY_THREADS];
    pthread_t threads[COPY_THREADS];
    for (size_t i = 0; i + 1 < count; i++) {
        size_t first = bytes * i / count;
        shares[i] = (copy_share){to + first, from + first, bytes * (i + 1) / count - first};
        if (pthread_create(&threads[i], NULL, copy_run, &shares[i]) != 0) break;
        started++;
    }
    size_t rest = count > 1 ? bytes * started / count : 0; /* what no other thread copies */
    memcpy(to + rest, from + rest, bytes - rest);
    for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

static megamoe_status uploader_flush(uploader *up) {
    const mm_driver *driver = up->state->driver;
    uint64_t bytes = up->done - up->sent;
    if (bytes == 0) return MEGAMOE_OK;
    CUresult result = driver->copy_to_device((CUdeviceptr)(uintptr_t)(up->target + up->sent), up->chunks[up->chunk],
                                             bytes, up->state->stream);
    if (result == CUDA_SUCCESS) result = driver->event_record(up->copied[up->chunk], up->state->stream);
    up->sent = up->done;
    up->chunk = (up->chunk + 1) % CHUNK_COUNT;
    if (result == CUDA_SUCCESS) result = driver->event_wait(up->copied[up->chunk]); /* the chunk that is filled next */
    MM_TRY(mm_driver_status(driver, result, "copying weights to the GPU"));
    if (up->options && up->options->progress &&
        !up->options->progress(up->options->progress_context, up->done, up->total))
        return mm_fail(MEGAMOE_CANCELLED, "loading was cancelled after %llu bytes", (unsigned long long)up->done);
    return MEGAMOE_OK;
}

static megamoe_status uploader_append(uploader *up, const void *source, uint64_t bytes) {
    const char *from = source;
    while (up->state && bytes > 0) {
        uint64_t room = CHUNK_BYTES - (up->done - up->sent), part = bytes < room ? bytes : room;
        copy_shared(up->chunks[up->chunk] + (up->done - up->sent), from, part);
        up->done += part, from += part, bytes -= part;
        if (part == room) MM_TRY(uploader_flush(up));
    }
    up->done += bytes;
    return MEGAMOE_OK;
}

/* Rows at a pitch become consecutive rows at an aligned address, which is returned. */
static megamoe_status upload_rows(uploader *up, const void *rows, uint64_t row_bytes, uint64_t pitch, uint64_t count,
                                  void *address) {
    static const char zeros[ALIGNMENT];
    const void *at = NULL;
    uint64_t padding = (ALIGNMENT - up->done % ALIGNMENT) % ALIGNMENT;
    if (rows) {
        MM_TRY(uploader_append(up, zeros, padding));
        at = up->state ? up->target + up->done : rows;
        if (pitch == row_bytes)
            MM_TRY(uploader_append(up, rows, row_bytes * count));
        else
            for (uint64_t i = 0; i < count; i++) MM_TRY(uploader_append(up, (const char *)rows + i * pitch, row_bytes));
    }
    memcpy(address, &at, sizeof at);
    return MEGAMOE_OK;
}

static uint64_t code_row_bytes(const mm_matrix *m) {
    switch (m->format) {
    case MM_BF16: return (uint64_t)m->columns * 2;
    case MM_FP8: return m->columns;
    case MM_NVFP4:
    case MM_MXFP4: break;
    }
    return m->columns / 2;
}

static uint64_t scale_row_bytes(const mm_matrix *m) {
    switch (m->format) {
    case MM_NVFP4: return m->columns / 16;
    case MM_MXFP4: return m->columns / 32;
    case MM_FP8:
        return (uint64_t)((m->columns + m->block_columns - 1) / m->block_columns) *
               (m->scale_dtype == MEGAMOE_F32 ? 4 : 1);
    case MM_BF16: break;
    }
    return 0;
}

static uint64_t scale_rows(const mm_matrix *m) {
    return m->format == MM_FP8 ? (m->rows + m->block_rows - 1) / m->block_rows : m->rows;
}

uint64_t mm_cuda_code_bytes(const mm_matrix *m) {
    return m->rows ? (m->rows - 1) * m->row_bytes + code_row_bytes(m) : 0;
}

uint64_t mm_cuda_scale_bytes(const mm_matrix *m) {
    return m->rows ? (scale_rows(m) - 1) * m->scale_row_bytes + scale_row_bytes(m) : 0;
}

mm_cuda_matrix mm_cuda_matrix_borrow(const mm_matrix *m) {
    return (mm_cuda_matrix){.codes = m->codes,
                            .scales = m->scales,
                            .bias = m->bias,
                            .row_bytes = m->row_bytes,
                            .scale_row_bytes = m->scale_row_bytes,
                            .bias_stride = m->bias_stride,
                            .format = m->format,
                            .scale_f32 = m->scale_dtype == MEGAMOE_F32,
                            .bias_f32 = m->bias_dtype == MEGAMOE_F32,
                            .block_rows = m->block_rows,
                            .block_columns = m->block_columns,
                            .global = m->global};
}

static megamoe_status matrix_upload(uploader *up, const mm_matrix *m, mm_cuda_matrix *out) {
    *out = mm_cuda_matrix_borrow(m);
    if (!m->codes) return MEGAMOE_OK;
    out->row_bytes = code_row_bytes(m);
    out->scale_row_bytes = scale_row_bytes(m);
    out->bias_stride = out->bias_f32 ? 4 : 2;
    MM_TRY(upload_rows(up, m->codes, out->row_bytes, m->row_bytes, m->rows, &out->codes));
    if (out->scale_row_bytes)
        MM_TRY(upload_rows(up, m->scales, out->scale_row_bytes, m->scale_row_bytes, scale_rows(m), &out->scales));
    return upload_rows(up, m->bias, out->bias_stride, m->bias_stride, m->rows, &out->bias);
}

/* All experts, the shared one and the router, in one order for counting and for copying. */
static megamoe_status upload_all(uploader *up, mm_backend_layer *layer, mm_cuda_expert *experts) {
    const mm_layer_weights *w = layer->weights;
    const uint64_t e_count = w->shape.expert_count, slots = w->shape.experts_per_token;
    for (uint32_t i = 0; i < w->expert_count + (w->shared ? 1u : 0u); i++) {
        const mm_expert *e = i < w->expert_count ? &w->experts[i] : w->shared;
        MM_TRY(matrix_upload(up, &e->gate, &experts[i].gate));
        MM_TRY(matrix_upload(up, &e->up, &experts[i].up));
        MM_TRY(matrix_upload(up, &e->down, &experts[i].down));
    }
    uint64_t row = w->shape.hidden * (w->router.weight_dtype == MEGAMOE_F32 ? 4ull : 2ull);
    MM_TRY(upload_rows(up, w->router.weight, row, row, e_count, &layer->router_weight));
    MM_TRY(upload_rows(up, w->router.bias, 4, 4, e_count, &layer->router_bias));
    return upload_rows(up, w->router.token_experts, slots * 4, slots * 4, w->router.vocabulary, &layer->token_experts);
}

/* Waits for the copies, whose failures may come as late as that, and frees the chunks. */
static megamoe_status uploader_close(uploader *up, megamoe_status status) {
    const mm_driver *driver = up->state->driver;
    CUresult result = driver->stream_wait(up->state->stream);
    for (int i = 0; i < CHUNK_COUNT; i++) {
        if (up->copied[i]) driver->event_destroy(up->copied[i]);
        if (up->chunks[i]) driver->host_free(up->chunks[i]);
    }
    return status == MEGAMOE_OK ? mm_driver_status(driver, result, "copying weights to the GPU") : status;
}

static megamoe_status uploader_open(uploader *up) {
    const mm_driver *driver = up->state->driver;
    for (int i = 0; i < CHUNK_COUNT; i++) {
        void *chunk = NULL;
        CUresult result = driver->host_allocate(&chunk, CHUNK_BYTES, 0);
        if (result != CUDA_SUCCESS)
            return mm_fail_in(mm_driver_status(driver, result, "chunks of weights on their way to the GPU"),
                              "%.1f MB of pinned host memory", CHUNK_BYTES * 1e-6);
        up->chunks[i] = chunk;
        MM_TRY(mm_driver_status(driver, driver->event_create(&up->copied[i], CU_EVENT_DISABLE_TIMING),
                                "creating an event"));
    }
    return MEGAMOE_OK;
}

bool mm_cuda_weights_on_device(const mm_backend_state *state, const mm_layer_weights *weights) {
    return weights->experts && !mm_cuda_is_host(state, weights->experts[0].up.codes);
}

/* The router's tables, which are in host memory whoever holds the weights. */
static megamoe_status table_upload(mm_backend_layer *layer, const void *table, uint64_t bytes, void *address) {
    const mm_driver *driver = layer->state->driver;
    void *base = NULL;
    if (table) {
        MM_TRY(mm_block_create(layer->state, bytes, "router tables", &layer->blocks, &base));
        CUresult result = driver->copy_to_device((CUdeviceptr)(uintptr_t)base, table, bytes, layer->state->stream);
        if (result == CUDA_SUCCESS) result = driver->stream_wait(layer->state->stream);
        MM_TRY(mm_driver_status(driver, result, "copying router tables to the GPU"));
    }
    memcpy(address, &base, sizeof base);
    return MEGAMOE_OK;
}

static megamoe_status borrow_all(mm_backend_layer *layer, mm_cuda_expert *experts) {
    const mm_layer_weights *w = layer->weights;
    for (uint32_t i = 0; i < w->expert_count + (w->shared ? 1u : 0u); i++) {
        const mm_expert *e = i < w->expert_count ? &w->experts[i] : w->shared;
        experts[i].gate = mm_cuda_matrix_borrow(&e->gate);
        experts[i].up = mm_cuda_matrix_borrow(&e->up);
        experts[i].down = mm_cuda_matrix_borrow(&e->down);
    }
    memcpy(&layer->router_weight, &w->router.weight, sizeof layer->router_weight);
    MM_TRY(table_upload(layer, w->router.bias, w->shape.expert_count * 4ull, &layer->router_bias));
    return table_upload(layer, w->router.token_experts, w->router.vocabulary * 4ull * w->shape.experts_per_token,
                        &layer->token_experts);
}

/* The global scale of an expert's intermediate, which the down projection's results carry. */
static float intermediate_global(const mm_layer_weights *w, const mm_expert *e) {
    bool fp4 = e->down.format == MM_NVFP4 || e->down.format == MM_MXFP4;
    return fp4 && w->activations == MEGAMOE_ACTIVATIONS_NVFP4 && w->intermediate_mode == MEGAMOE_GLOBAL_STATIC
               ? e->intermediate_global
               : 1.0f;
}

megamoe_status mm_cuda_weights_load(mm_backend_layer *layer, bool on_device, const megamoe_layer_options *options,
                                    mm_cuda_expert *experts) {
    const mm_layer_weights *w = layer->weights;
    uploader count = {0}, up = {.state = layer->state, .options = options};
    for (uint32_t i = 0; i < w->expert_count; i++) experts[i].h_global = intermediate_global(w, &w->experts[i]);
    if (w->shared) experts[w->expert_count].h_global = intermediate_global(w, w->shared);
    if (on_device) return borrow_all(layer, experts);
    MM_TRY(upload_all(&count, layer, experts));
    if (count.done == 0) return MEGAMOE_OK;
    void *base;
    MM_TRY(mm_block_create(layer->state, count.done + ALIGNMENT, "weights", &layer->blocks, &base));
    up.target = base;
    up.total = count.done;
    megamoe_status status = uploader_open(&up);
    if (status == MEGAMOE_OK) status = upload_all(&up, layer, experts);
    if (status == MEGAMOE_OK) status = uploader_flush(&up);
    return uploader_close(&up, status);
}
