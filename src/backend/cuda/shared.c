/*
 * The shared expert on the GPU: every token, in order. Which kernels it takes, and its place beside the routed experts.
 *
 * Few tokens, BF16 and FP8: the kernels of dense.cuh, from the hidden states as they are. They bind on memory while the
 * router, the plan and staging bind on latency, so they run beside these on a stream of their own, forked from the
 * caller's by one event and joined before combine by another; a graph captures both branches. More tokens follow the
 * routed experts on the caller's stream: on sm90 through sm90/dense.cu, where scales are E8M0 and hidden states BF16;
 * everything else, and everything that is batch-invariant, through the portable tile kernels.
 */
#include "backend/cuda/state.h"

#include "error.h"

enum {
    DENSE_TOKENS = 64,     /* beyond them tiles are faster */
    DENSE_FP8_NATIVE = 32, /* and beyond these sm90's kernels, as measured on an H200 */
    DENSE_BF16_NATIVE = 16,
    DENSE_UNIT = 128, /* dense.cuh: bytes of a row that a warp takes of a chunk */
    DENSE_WARPS = 7,  /* and the most units of a chunk */
    DENSE_THREADS = 256,
    DENSE_SLOTS_MAX = 8,
    DENSE_TILES = 4,
    DENSE_STATIC_BYTES = 2048, /* barriers, and what the system reserves of a CTA's half of the shared memory */
    WIDEN_THREADS = 256,
};

/* Instances by tokens: how many they take, and their kernels for L1 and L2 of FP8 and BF16. */
static const struct {
    uint32_t tokens;
    mm_kernel fp8[2], bf16[2];
} dense_instances[] = {
    {8, {MM_DENSE_L1_FP8_8, MM_DENSE_L2_FP8_8}, {MM_DENSE_L1_BF16_8, MM_DENSE_L2_BF16_8}},
    {16, {MM_DENSE_L1_FP8_16, MM_DENSE_L2_FP8_16}, {MM_DENSE_L1_BF16_16, MM_DENSE_L2_BF16_16}},
    {32, {MM_DENSE_L1_FP8_32, MM_DENSE_L2_FP8_32}, {MM_DENSE_L1_BF16_32, MM_DENSE_L2_BF16_32}},
};
enum { DENSE_INSTANCES = sizeof dense_instances / sizeof *dense_instances };

/* ---- which kernels -------------------------------------------------------------------------------------- */

/* Behind the ring: two buffers of every warp's sums of a tile, and the scales of a CTA's tiles. */
static uint32_t dense_other_bytes(uint32_t units, uint32_t instance) {
    return 2 * DENSE_WARPS * dense_instances[instance].tokens / 8 * 512 + units * DENSE_TILES * 8;
}

/* Two CTAs share a multiprocessor where its memory is not too small. A chunk of every tile has to fit the ring at once.
 */
static uint32_t dense_slots(const mm_backend_state *state, const mm_dense_form *f, uint32_t instance) {
    const uint32_t all = (uint32_t)state->gpu.shared_bytes / (state->gpu.shared_bytes < 131072 ? 1 : 2);
    const uint32_t left = all - DENSE_STATIC_BYTES - dense_other_bytes(f->units, instance);
    const uint32_t slots = left / f->slot_bytes;
    return slots < DENSE_SLOTS_MAX ? slots : DENSE_SLOTS_MAX;
}

static bool dense_readable(const mm_cuda_matrix *m) {
    if (!m->codes || m->row_bytes % 16 != 0 || (uintptr_t)m->codes % 16 != 0) return false;
    return m->format == MM_BF16 ||
           (m->format == MM_FP8 && m->block_rows % 8 == 0 && m->block_columns % DENSE_UNIT == 0);
}

/* n: L1's features or L2's rows. Multiprocessors get equal runs of eights; chunks are as long as a ring can hold. */
static mm_dense_form dense_form(const mm_backend_state *state, const mm_cuda_matrix *m, uint32_t k, uint32_t n) {
    const uint32_t units = mm_round_up(k * (m->format == MM_FP8 ? 1 : 2), DENSE_UNIT) / DENSE_UNIT;
    mm_dense_form f = {.units = units};
    for (uint32_t most = DENSE_WARPS; most > 0; most--) {
        f.chunks = (units + most - 1) / most;
        f.chunk_units = (units + f.chunks - 1) / f.chunks;
        f.pitch = f.chunk_units * DENSE_UNIT + 64; /* rows g and g + 1 are read together: 64 bytes each */
        f.slot_bytes = mm_round_up(16 * f.pitch, 128);
        if (dense_slots(state, &f, DENSE_INSTANCES - 1) >= DENSE_TILES) break;
        f.chunks = 0;
    }
    f.eights = (n / 8 + state->sm_count - 1) / state->sm_count;
    f.ctas = (n / 8 + f.eights - 1) / f.eights;
    return f;
}

static megamoe_status dense_maps(mm_backend_layer *layer, const mm_cuda_expert *e, CUtensorMap *maps /* [3] */) {
    const mm_cuda_matrix *matrices[3] = {&e->gate, &e->up, &e->down};
    for (int j = 0; j < 3; j++) {
        const uint32_t k = j == 2 ? layer->weights->shared->up.rows : layer->weights->shape.hidden;
        const uint32_t n = j == 2 ? layer->weights->shape.hidden : layer->weights->shared->up.rows;
        const mm_map_form form = {CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, layer->dense[j == 2].pitch, 8};
        MM_TRY(mm_cuda_rows_map(layer->state->driver, matrices[j]->codes, k * (e->up.format == MM_FP8 ? 1ull : 2ull),
                                matrices[j]->row_bytes, n, &form, &maps[j]));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_shared_create(mm_backend_layer *layer, const mm_cuda_expert *e) {
    const uint32_t h = layer->weights->shape.hidden, i = layer->weights->shared->up.rows;
    CUtensorMap maps[3];
    void *device;
    layer->shared_tile[0] = mm_cuda_portable_tile(true, e->up.format);
    layer->shared_tile[1] = mm_cuda_portable_tile(false, e->up.format);
    if (layer->state->batch_invariant || layer->weights->shared_swiglu.relu2 || h % 16 != 0 || i % 16 != 0)
        return MEGAMOE_OK;
    if (!dense_readable(&e->gate) || !dense_readable(&e->up) || !dense_readable(&e->down)) return MEGAMOE_OK;
    if (e->gate.format != e->up.format || e->down.format != e->up.format) return MEGAMOE_OK;
    layer->dense_native = layer->state->native && !e->gate.scale_f32 && !e->up.scale_f32 && !e->down.scale_f32;
    layer->shared_host = *e;
    layer->dense[0] = dense_form(layer->state, &e->up, h, i),
    layer->dense[1] = dense_form(layer->state, &e->down, i, h);
    if (layer->dense[0].chunks == 0 || layer->dense[1].chunks == 0) {
        layer->dense[0].chunks = 0;
        return MEGAMOE_OK;
    }
    MM_TRY(dense_maps(layer, e, maps));
    MM_TRY(mm_block_create(layer->state, sizeof maps, "tensor maps", &layer->blocks, &device));
    layer->dense_maps = device;
    return mm_cuda_copy_in(layer->state, device, maps, sizeof maps);
}

/* ---- few tokens ----------------------------------------------------------------------------------------- */

/* One batch's shared expert. */
typedef struct shared_run {
    mm_backend_layer *layer;
    const megamoe_batch *batch;
    mm_scratch s;
    CUstream stream;
    bool *started;
} shared_run;

static megamoe_status launch(shared_run *r, mm_kernel kernel, mm_launch how, void **arguments) {
    how.after_start = *r->started;
    *r->started = true;
    return mm_cuda_launch(r->layer->state, r->stream, kernel, &how, arguments);
}

static bool uses_dense(const mm_backend_layer *layer, uint32_t token_count) {
    const bool fp8 = layer->dense[0].chunks > 0 && layer->shared_host.up.format == MM_FP8;
    const uint32_t most = !layer->dense_native ? DENSE_TOKENS : fp8 ? DENSE_FP8_NATIVE : DENSE_BF16_NATIVE;
    return layer->dense[0].chunks > 0 && token_count <= most;
}

/* The instance for so many tokens, or the largest. */
static uint32_t dense_instance(uint32_t tokens) {
    uint32_t i = 0;
    while (i + 1 < DENSE_INSTANCES && dense_instances[i].tokens < tokens) i++;
    return i;
}

/* L1 or L2 of tokens first .. first + count - 1. */
static megamoe_status dense_launch(shared_run *r, int l2, uint32_t first, uint32_t instance) {
    const mm_layer_weights *w = r->layer->weights;
    const mm_dense_form *form = &r->layer->dense[l2];
    const uint32_t left = r->batch->token_count - first, h = w->shape.hidden, i = w->shared->up.rows;
    const bool f32 = !l2 && r->batch->hidden_dtype == MEGAMOE_F32;
    const char *hidden = (const char *)r->batch->hidden + (size_t)first * h * (f32 ? 4 : 2);
    mm_cuda_dense_args args = {
        .gemm = {.experts = r->layer->shared,
                 .maps = r->layer->dense_maps,
                 .row_count = left < dense_instances[instance].tokens ? left : dense_instances[instance].tokens,
                 .k = l2 ? i : h,
                 .n = l2 ? h : i,
                 .x = l2 ? r->s.shared_h + (size_t)first * r->layer->shared_pitch
                         : (const uint16_t *)(const void *)hidden,
                 .x_pitch = l2 ? r->layer->shared_pitch : h,
                 .y = l2 ? (void *)(r->s.shared_out + (size_t)first * h)
                         : (void *)(r->s.shared_h + (size_t)first * r->layer->shared_pitch),
                 .y_pitch = l2 ? h : r->layer->shared_pitch,
                 .gated = 1,
                 .biased = l2 ? w->shared->down.bias != NULL : w->shared->up.bias != NULL,
                 .swiglu = w->shared_swiglu,
                 .slot_count = dense_slots(r->layer->state, form, instance),
                 .slot_bytes = form->slot_bytes,
                 .code_pitch = form->pitch},
        .x_f32 = f32,
        .chunks = form->chunks,
        .chunk_units = form->chunk_units,
        .eights_per_cta = form->eights};
    const mm_launch how = {.grid = {form->ctas},
                           .threads = DENSE_THREADS,
                           .shared_bytes =
                               args.gemm.slot_count * form->slot_bytes + dense_other_bytes(form->units, instance)};
    const bool fp8 = w->shared->up.format == MM_FP8;
    void *arguments[] = {&args};
    return launch(r, fp8 ? dense_instances[instance].fp8[l2] : dense_instances[instance].bf16[l2], how, arguments);
}

static megamoe_status run_dense(shared_run *r) {
    const uint32_t instance = dense_instance(r->batch->token_count), step = dense_instances[instance].tokens;
    for (int l2 = 0; l2 < 2; l2++)
        for (uint32_t first = 0; first < r->batch->token_count; first += step)
            MM_TRY(dense_launch(r, l2, first, instance));
    return MEGAMOE_OK;
}

/* ---- many tokens on sm90 -------------------------------------------------------------------------------- */

static bool uses_native(const mm_backend_layer *layer, const megamoe_batch *batch) {
    return layer->dense_native && !uses_dense(layer, batch->token_count) && batch->hidden_dtype == MEGAMOE_BF16;
}

/* The shapes of sm90/dense.cu, by the most tokens they are chosen for: tokens and weight rows of a tile, stages. */
typedef struct native_shape {
    uint32_t most, tokens, rows, stages, raw_stages;
    mm_kernel bf16[2], fp8[2]; /* fp8 MM_KERNEL_COUNT: weights are widened to BF16 first */
} native_shape;
static const native_shape native_shapes[] = {
    {64, 64, 64, 7, 7, {MM_DENSE_L1_BF16_LOW, MM_DENSE_L2_BF16_LOW}, {MM_DENSE_L1_FP8_LOW, MM_DENSE_L2_FP8_LOW}},
    {256, 128, 64, 7, 7, {MM_DENSE_L1_BF16_MID, MM_DENSE_L2_BF16_MID}, {MM_DENSE_L1_FP8_MID, MM_DENSE_L2_FP8_MID}},
    {UINT32_MAX, 128, 256, 4, 2, {MM_DENSE_L1_WIDE, MM_DENSE_L2_WIDE}, {MM_KERNEL_COUNT, MM_KERNEL_COUNT}},
};

/* Boxes of `rows` x 64 values: BF16, swizzled as wgmma reads it, or bytes. */
static megamoe_status native_map(const mm_driver *driver, const void *base, bool bytes, const cuuint64_t extent[2],
                                 uint64_t pitch, uint32_t rows, CUtensorMap *map) {
    cuuint64_t pitches[1] = {pitch};
    cuuint32_t box[2] = {64, rows}, step[2] = {1, 1};
    return mm_driver_status(
        driver,
        driver->tensor_map_encode(map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                                  (void *)(uintptr_t)base, extent, pitches, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "describing the shared expert's operands");
}

/* Matrix j (gate, up, down): where it lies, or where it was widened to. */
static megamoe_status native_weights(const shared_run *r, const native_shape *shape, int j, CUtensorMap *map) {
    const mm_cuda_expert *e = &r->layer->shared_host;
    const mm_cuda_matrix *m = j == 0 ? &e->gate : j == 1 ? &e->up : &e->down;
    const uint32_t h = r->layer->weights->shape.hidden, i = r->layer->weights->shared->up.rows;
    const cuuint64_t extent[2] = {j == 2 ? i : h, j == 2 ? h : i};
    const bool codes = m->format == MM_FP8 && shape->fp8[0] != MM_KERNEL_COUNT, wide = m->format == MM_FP8 && !codes;
    const void *rows = wide ? (const void *)(r->s.shared_bf16 + (size_t)j * h * i) : m->codes;
    return native_map(r->layer->state->driver, rows, codes, extent, wide ? extent[0] * 2 : m->row_bytes,
                      shape->rows / 2, map);
}

static megamoe_status native_launch(shared_run *r, const native_shape *shape, int l2) {
    const mm_layer_weights *w = r->layer->weights;
    const uint32_t h = w->shape.hidden, i = w->shared->up.rows, t = r->batch->token_count;
    const cuuint64_t extent[2] = {l2 ? i : h, t};
    const bool codes = w->shared->up.format == MM_FP8 && shape->fp8[0] != MM_KERNEL_COUNT;
    CUtensorMap x, low, high;
    mm_cuda_gemm_args args = {.experts = r->layer->shared,
                              .row_count = t,
                              .k = l2 ? i : h,
                              .n = l2 ? h : i,
                              .y = l2 ? (void *)r->s.shared_out : (void *)r->s.shared_h,
                              .y_pitch = l2 ? h : r->layer->shared_pitch,
                              .gated = 1,
                              .biased = l2 ? w->shared->down.bias != NULL : w->shared->up.bias != NULL,
                              .swiglu = w->shared_swiglu};
    void *arguments[] = {&x, &low, &high, &args};
    const mm_launch how = {.grid = {r->layer->state->sm_count},
                           .threads = (shape->tokens / 64 + 1 + codes) * 128,
                           .shared_bytes = shape->stages * (shape->tokens + shape->rows) * 128 +
                                           (codes ? shape->raw_stages * shape->rows * 64 : 0) + 1024};
    MM_TRY(native_map(r->layer->state->driver, l2 ? (const void *)r->s.shared_h : r->batch->hidden, false, extent,
                      l2 ? r->layer->shared_pitch * 2ull : h * 2ull, shape->tokens, &x));
    MM_TRY(native_weights(r, shape, l2 ? 2 : 0, &low));
    MM_TRY(native_weights(r, shape, l2 ? 2 : 1, &high));
    return launch(r, codes ? shape->fp8[l2] : shape->bf16[l2], how, arguments);
}

static megamoe_status run_native(shared_run *r) {
    const native_shape *shape = native_shapes;
    while (shape->most < r->batch->token_count) shape++;
    mm_cuda_widen_args args = {.expert = r->layer->shared,
                               .hidden = r->layer->weights->shape.hidden,
                               .intermediate = r->layer->weights->shared->up.rows,
                               .bf16 = r->s.shared_bf16};
    void *arguments[] = {&args};
    const mm_launch how = {.grid = {r->layer->state->sm_count * 8}, .threads = WIDEN_THREADS};
    if (r->layer->shared_host.up.format == MM_FP8 && shape->fp8[0] == MM_KERNEL_COUNT)
        MM_TRY(launch(r, MM_DENSE_WIDEN, how, arguments));
    MM_TRY(native_launch(r, shape, 0));
    return native_launch(r, shape, 1);
}

/* ---- any number of tokens ------------------------------------------------------------------------------- */

static megamoe_status stage(shared_run *r, const mm_cuda_stage_args *args) {
    const bool after = *r->started;
    *r->started = true;
    return mm_cuda_stage_launch(r->layer->state, args, r->batch->token_count, after, r->stream);
}

static megamoe_status run_tile(shared_run *r, int l2, mm_cuda_gemm_args *args) {
    void *arguments[] = {args};
    return launch(r, r->layer->shared_tile[l2], mm_cuda_tile_launch(r->layer->state), arguments);
}

/* Through the portable tile kernels. BF16 and FP8 weights always take bf16 activations. */
static megamoe_status run_tiles(shared_run *r) {
    const mm_layer_weights *w = r->layer->weights;
    const uint32_t i = w->shared->up.rows;
    const bool quantize = mm_cuda_quantizes(w, w->shared);
    mm_cuda_stage_args x = mm_cuda_hidden_args(r->layer, r->batch, quantize);
    x.row_count = r->batch->token_count, x.staged = r->s.token_x;
    x.globals = r->s.row_global; /* the routed experts are done with theirs */
    MM_TRY(stage(r, &x));
    mm_cuda_gemm_args l1 = {.experts = r->layer->shared,
                            .row_count = r->batch->token_count,
                            .k = w->shape.hidden,
                            .n = i,
                            .x = r->s.token_x,
                            .x_pitch = r->layer->h_pitch,
                            .x_global = 1.0f,
                            .row_global = quantize ? r->s.row_global : NULL,
                            .gated = w->shared->gate.codes != NULL,
                            .biased = w->shared->up.bias != NULL,
                            .quantized = quantize,
                            .y = quantize ? (void *)r->s.shared_h32 : (void *)r->s.shared_h,
                            .y_pitch = quantize ? i : r->layer->shared_pitch,
                            .swiglu = w->shared_swiglu};
    MM_TRY(run_tile(r, 0, &l1));
    if (quantize) {
        mm_cuda_stage_args h = {.source = r->s.shared_h32,
                                .source_f32 = 1,
                                .row_count = r->batch->token_count,
                                .slots_per_token = 1,
                                .columns = i,
                                .pitch = r->layer->shared_pitch,
                                .quantize = 1,
                                .global_mode = w->intermediate_mode,
                                .experts = r->layer->shared,
                                .expert_count = 1,
                                .global = 1.0f,
                                .staged = r->s.shared_h,
                                .counters = r->layer->counters};
        MM_TRY(stage(r, &h));
    }
    mm_cuda_gemm_args l2 = {.experts = r->layer->shared,
                            .row_count = r->batch->token_count,
                            .k = i,
                            .n = w->shape.hidden,
                            .x = r->s.shared_h,
                            .x_pitch = r->layer->shared_pitch,
                            .y = r->s.shared_out,
                            .y_pitch = w->shape.hidden,
                            .plain_f32 = 1,
                            .biased = w->shared->down.bias != NULL};
    return run_tile(r, 1, &l2);
}

/* ---- its place in a layer ------------------------------------------------------------------------------- */

static shared_run shared_run_of(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream, bool *started) {
    shared_run r = {.layer = layer, .batch = batch, .stream = stream, .started = started};
    mm_cuda_scratch(layer, &r.s);
    return r;
}

/* With a budget of multiprocessors, two branches at once would take more than it. */
static bool forks(const mm_backend_layer *layer, uint32_t token_count) {
    return uses_dense(layer, token_count) && layer->state->sm_count == (uint32_t)layer->state->gpu.sm_count;
}

static megamoe_status run_all(shared_run *r) {
    if (uses_dense(r->layer, r->batch->token_count)) return run_dense(r);
    return uses_native(r->layer, r->batch) ? run_native(r) : run_tiles(r);
}

static megamoe_status branch(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream) {
    const mm_backend_state *state = layer->state;
    const mm_driver *driver = state->driver;
    bool started = false;
    shared_run r = shared_run_of(layer, batch, state->side, &started);
    CUresult result = driver->event_record(state->forked, stream);
    if (result == CUDA_SUCCESS) result = driver->stream_wait_event(state->side, state->forked, 0);
    MM_TRY(mm_driver_status(driver, result, "forking the shared expert's stream"));
    MM_TRY(run_dense(&r));
    return mm_driver_status(driver, driver->event_record(state->joined, state->side),
                            "joining the shared expert's stream");
}

megamoe_status mm_cuda_shared_begin(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream,
                                    bool *started) {
    if (forks(layer, batch->token_count)) return branch(layer, batch, stream);
    if (!uses_dense(layer, batch->token_count)) return MEGAMOE_OK;
    shared_run r = shared_run_of(layer, batch, stream, started);
    return run_dense(&r);
}

megamoe_status mm_cuda_shared_end(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream, bool *started) {
    const mm_driver *driver = layer->state->driver;
    if (forks(layer, batch->token_count)) {
        *started = false; /* a launch that waits for two branches begins when both have ended */
        return mm_driver_status(driver, driver->stream_wait_event(stream, layer->state->joined, 0),
                                "joining the shared expert's stream");
    }
    if (uses_dense(layer, batch->token_count)) return MEGAMOE_OK;
    shared_run r = shared_run_of(layer, batch, stream, started);
    return run_all(&r);
}

megamoe_status mm_cuda_run_shared(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream,
                                  bool first_launch) {
    bool started = !first_launch;
    shared_run r = shared_run_of(layer, batch, stream, &started);
    return run_all(&r);
}
