/*
 * A layer on the GPU: its weights, which kernels its shape, formats and alignment allow, the tensor maps those kernels
 * read weights through, and scratch for the largest batch.
 */
#include "backend/cuda/state.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

/* ---- which kernels -------------------------------------------------------------------------------------- */

/* Decode instances: by GEMM and format, the shares of K there are (see decode.cu), smallest first. */
static const struct {
    mm_kernel kernel;
    int l1;
    mm_format format;
    uint32_t quarters;
} decode_instances[] = {
    {MM_DECODE_L1_NVFP4_4, 1, MM_NVFP4, 4},   {MM_DECODE_L1_NVFP4_6, 1, MM_NVFP4, 6},
    {MM_DECODE_L1_NVFP4_8, 1, MM_NVFP4, 8},   {MM_DECODE_L1_NVFP4_10, 1, MM_NVFP4, 10},
    {MM_DECODE_L1_NVFP4_14, 1, MM_NVFP4, 14}, {MM_DECODE_L2_NVFP4_2, 0, MM_NVFP4, 2},
    {MM_DECODE_L2_NVFP4_3, 0, MM_NVFP4, 3},   {MM_DECODE_L2_NVFP4_4, 0, MM_NVFP4, 4},
    {MM_DECODE_L2_NVFP4_5, 0, MM_NVFP4, 5},   {MM_DECODE_L2_NVFP4_6, 0, MM_NVFP4, 6},
    {MM_DECODE_L1_MXFP4_4, 1, MM_MXFP4, 4},   {MM_DECODE_L1_MXFP4_8, 1, MM_MXFP4, 8},
    {MM_DECODE_L1_MXFP4_14, 1, MM_MXFP4, 14}, {MM_DECODE_L2_MXFP4_2, 0, MM_MXFP4, 2},
    {MM_DECODE_L2_MXFP4_4, 0, MM_MXFP4, 4},   {MM_DECODE_L2_MXFP4_6, 0, MM_MXFP4, 6},
};

enum {
    DECODE_PARTIAL_BYTES = 2 * 16 * 1024, /* decode.cuh: two buffers of 16 warps' partial sums */
    DECODE_STATIC_BYTES = 1024,           /* barriers, and what the system reserves */
    DECODE_SLOTS_MAX = 8,
};

/* Can tensor copies read this matrix, and is it of the format and size of the layer's others? */
static bool matrix_copyable(const mm_cuda_matrix *m, const mm_cuda_matrix *like) {
    return m->codes && m->format == like->format && m->row_bytes == like->row_bytes &&
           m->scale_row_bytes == like->scale_row_bytes && m->row_bytes % 16 == 0 && (uintptr_t)m->codes % 16 == 0 &&
           (uintptr_t)m->scales % 16 == 0;
}

static bool experts_copyable(const mm_backend_layer *layer, const mm_cuda_expert *experts, bool l1) {
    for (uint32_t i = 0; i < layer->weights->expert_count; i++) {
        const mm_cuda_expert *e = &experts[i], *first = &experts[0];
        if (l1 && !(matrix_copyable(&e->gate, &first->up) && matrix_copyable(&e->up, &first->up))) return false;
        if (!l1 && !matrix_copyable(&e->down, &first->down)) return false;
    }
    return layer->weights->expert_count > 0;
}

/* Bank-shifting pitch: 16-byte steps, off the multiples of 64 at which eight rows would meet in the same banks. */
static uint32_t scale_pitch(uint32_t bytes) {
    uint32_t pitch = mm_round_up(bytes, 16);
    return pitch % 64 == 0 ? pitch + 16 : pitch;
}

/* Fills in how one decode GEMM runs; leaves kernel at MM_KERNEL_COUNT where it cannot. */
static void choose_decode(const mm_backend_layer *layer, const mm_cuda_matrix *m, bool l1, uint32_t k,
                          mm_decode_form *form) {
    const uint32_t groups = mm_round_up(k, 128) / 128, quarters = (groups + 3) / 4;
    const uint32_t scale_bytes = m->format == MM_MXFP4 ? k / 32 : k / 16;
    mm_decode_form f = {.kernel = MM_KERNEL_COUNT};
    *form = f;
    if (k % 64 != 0 || scale_bytes % 16 != 0 || m->scale_row_bytes % 16 != 0) return;
    for (size_t i = 0; i < sizeof decode_instances / sizeof *decode_instances; i++)
        if (decode_instances[i].l1 == l1 && decode_instances[i].format == (mm_format)m->format &&
            decode_instances[i].quarters >= quarters && f.kernel == MM_KERNEL_COUNT) {
            f.kernel = decode_instances[i].kernel;
            f.passes = decode_instances[i].quarters > 7 ? 2 : 1;
        }
    if (f.kernel == MM_KERNEL_COUNT) return;
    if (f.passes == 2 && (groups % 2 != 0 || m->row_bytes != k / 2 || m->scale_row_bytes != scale_bytes)) return;
    f.code_pitch = k / 2 / f.passes + 32;
    f.scale_pitch = scale_pitch(scale_bytes / f.passes);
    f.slot_bytes = 32 * (f.code_pitch + f.scale_pitch);
    if (f.passes == 2 && f.slot_bytes < 16 * (k / 2 + scale_bytes)) f.slot_bytes = 16 * (k / 2 + scale_bytes);
    f.slot_bytes = mm_round_up(f.slot_bytes, 128);
    f.slot_count =
        ((uint32_t)layer->state->gpu.shared_bytes - DECODE_PARTIAL_BYTES - DECODE_STATIC_BYTES) / f.slot_bytes;
    if (f.slot_count < 2 || f.code_pitch > 2048) return;
    if (f.slot_count > DECODE_SLOTS_MAX) f.slot_count = DECODE_SLOTS_MAX;
    f.shared_bytes = f.slot_count * f.slot_bytes + DECODE_PARTIAL_BYTES;
    *form = f;
}

mm_kernel mm_cuda_portable_tile(bool l1, uint32_t format) {
    switch ((mm_format)format) {
    case MM_NVFP4: return l1 ? MM_TILE_L1_NVFP4 : MM_TILE_L2_NVFP4;
    case MM_MXFP4: return l1 ? MM_TILE_L1_MXFP4 : MM_TILE_L2_MXFP4;
    case MM_BF16: return l1 ? MM_TILE_L1_BF16 : MM_TILE_L2_BF16;
    case MM_FP8: break;
    }
    return l1 ? MM_TILE_L1_FP8 : MM_TILE_L2_FP8;
}

static void choose_native(mm_backend_layer *layer, const mm_cuda_matrix *m, bool l1, uint32_t k, uint32_t n) {
    layer->mid[!l1] = layer->wide[!l1] = MM_KERNEL_COUNT;
    if (!layer->state->native || k % 64 != 0 || n < 64) return;
    if (m->format == MM_NVFP4) {
        layer->mid[!l1] = l1 ? MM_MID_L1_NVFP4 : MM_MID_L2_NVFP4;
        layer->wide[!l1] = l1 ? MM_WIDE_L1_NVFP4 : MM_WIDE_L2_NVFP4;
    } else if (m->format == MM_MXFP4) {
        layer->mid[!l1] = l1 ? MM_MID_L1_MXFP4 : MM_MID_L2_MXFP4;
        layer->wide[!l1] = l1 ? MM_WIDE_L1_MXFP4 : MM_WIDE_L2_MXFP4;
    }
}

static bool rows_contiguous(const mm_cuda_matrix *m, uint32_t k) {
    return m->row_bytes == k / 2 && m->scale_row_bytes == k / (m->format == MM_MXFP4 ? 32 : 16);
}

/*
 * Both GEMMs of a list use kernels of one kind, because the plan's entries are cut for it. Formats and pitches must
 * agree over the experts; anything else takes the portable tile kernels.
 */
static void choose_kernels(mm_backend_layer *layer, const mm_cuda_expert *experts) {
    const megamoe_shape *shape = &layer->weights->shape;
    const bool gated = !shape->not_gated;
    const bool copyable = gated && experts_copyable(layer, experts, true) && experts_copyable(layer, experts, false);
    for (int l2 = 0; l2 < 2; l2++) {
        const mm_cuda_matrix *m = l2 ? &experts[0].down : &experts[0].up;
        const uint32_t k = l2 ? shape->intermediate : shape->hidden, n = l2 ? shape->hidden : shape->intermediate;
        layer->decode[l2].kernel = layer->mid[l2] = layer->wide[l2] = MM_KERNEL_COUNT;
        if (layer->weights->expert_count == 0) continue;
        layer->tile[l2] = mm_cuda_portable_tile(!l2, m->format);
        layer->scale_row_bytes[l2] = (uint32_t)m->scale_row_bytes;
        if (!copyable) continue;
        if (l2) layer->down_contiguous = rows_contiguous(m, k);
        choose_decode(layer, m, !l2, k, &layer->decode[l2]);
        choose_native(layer, m, !l2, k, n);
    }
    if (layer->state->batch_invariant || layer->decode[0].kernel == MM_KERNEL_COUNT ||
        layer->decode[1].kernel == MM_KERNEL_COUNT)
        layer->decode[0].kernel = layer->decode[1].kernel = MM_KERNEL_COUNT;
    if (layer->mid[0] == MM_KERNEL_COUNT || layer->mid[1] == MM_KERNEL_COUNT)
        layer->mid[0] = layer->mid[1] = layer->wide[0] = layer->wide[1] = MM_KERNEL_COUNT;
}

/* ---- tensor maps ---------------------------------------------------------------------------------------- */

typedef struct map_form {
    CUtensorMapDataType type;
    uint32_t value_bytes, box_bytes, box_rows;
} map_form;

static megamoe_status encode(const mm_driver *driver, const uint8_t *base, uint64_t row_bytes, uint64_t pitch,
                             uint32_t rows, const map_form *form, CUtensorMap *map) {
    cuuint64_t extent[2] = {row_bytes / form->value_bytes, rows}, pitches[1] = {pitch};
    cuuint32_t box[2] = {form->box_bytes / form->value_bytes, form->box_rows}, step[2] = {1, 1};
    return mm_driver_status(driver,
                            driver->tensor_map_encode(map, form->type, 2, (void *)(uintptr_t)base, extent, pitches, box,
                                                      step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                            "describing a weight matrix");
}

/* Codes and scales of one matrix as the decode kernels read them: 8-byte elements, so that a row fits a box. */
static megamoe_status encode_decode(const mm_backend_layer *layer, const mm_cuda_matrix *m, int l2, CUtensorMap *maps) {
    const megamoe_shape *shape = &layer->weights->shape;
    const uint32_t k = l2 ? shape->intermediate : shape->hidden, n = l2 ? shape->hidden : shape->intermediate;
    const mm_decode_form *d = &layer->decode[l2];
    const map_form codes = {CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, d->code_pitch, 16};
    const map_form scales = {CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, d->scale_pitch, 16};
    MM_TRY(encode(layer->state->driver, m->codes, k / 2, m->row_bytes, n, &codes, &maps[0]));
    return encode(layer->state->driver, m->scales, m->format == MM_MXFP4 ? k / 32 : k / 16, m->scale_row_bytes, n,
                  &scales, &maps[1]);
}

static megamoe_status encode_tile(const mm_backend_layer *layer, const mm_cuda_matrix *m, int l2, uint32_t groups,
                                  CUtensorMap *map) {
    const megamoe_shape *shape = &layer->weights->shape;
    const uint32_t k = l2 ? shape->intermediate : shape->hidden, n = l2 ? shape->hidden : shape->intermediate;
    const map_form codes = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 64 * groups, 128};
    return encode(layer->state->driver, m->codes, k / 2, m->row_bytes, n, &codes, map);
}

/* maps: per expert 6 of decode, 3 of MID, 3 of WIDE, in three arrays one after the other. */
static megamoe_status encode_expert(const mm_backend_layer *layer, const mm_cuda_expert *e, uint32_t i,
                                    CUtensorMap *maps) {
    const uint32_t count = layer->weights->expert_count;
    const mm_cuda_matrix *matrices[3] = {&e->gate, &e->up, &e->down};
    for (uint32_t j = 0; j < 3; j++) {
        if (layer->decode[0].kernel != MM_KERNEL_COUNT)
            MM_TRY(encode_decode(layer, matrices[j], j == 2, maps + i * 6 + j * 2));
        if (layer->mid[0] == MM_KERNEL_COUNT) continue;
        MM_TRY(encode_tile(layer, matrices[j], j == 2, 2, maps + count * 6 + i * 3 + j));
        MM_TRY(encode_tile(layer, matrices[j], j == 2, 1, maps + count * 9 + i * 3 + j));
    }
    return MEGAMOE_OK;
}

static megamoe_status copy_in(mm_backend_state *state, void *device, const void *host, size_t bytes) {
    CUresult result = state->driver->copy_to_device((CUdeviceptr)(uintptr_t)device, host, bytes, state->stream);
    if (result == CUDA_SUCCESS) result = state->driver->stream_wait(state->stream);
    return mm_driver_status(state->driver, result, "copying a layer's tables to the GPU");
}

static megamoe_status create_maps(mm_backend_layer *layer, const mm_cuda_expert *experts) {
    const uint32_t count = layer->weights->expert_count;
    const size_t bytes = (size_t)count * 12 * sizeof(CUtensorMap);
    void *device;
    if (layer->decode[0].kernel == MM_KERNEL_COUNT && layer->mid[0] == MM_KERNEL_COUNT) return MEGAMOE_OK;
    CUtensorMap *maps = aligned_alloc(64, bytes);
    if (!maps) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts' tensor maps", count);
    memset(maps, 0, bytes);
    megamoe_status status = MEGAMOE_OK;
    for (uint32_t i = 0; status == MEGAMOE_OK && i < count; i++) status = encode_expert(layer, &experts[i], i, maps);
    if (status == MEGAMOE_OK) status = mm_block_create(layer->state, bytes, "tensor maps", &layer->blocks, &device);
    if (status == MEGAMOE_OK) status = copy_in(layer->state, device, maps, bytes);
    free(maps);
    if (status != MEGAMOE_OK) return status;
    layer->decode_maps = device;
    layer->mid_maps = layer->decode_maps + count * 6;
    layer->wide_maps = layer->mid_maps + count * 3;
    return MEGAMOE_OK;
}

/* ---- checks --------------------------------------------------------------------------------------------- */

/* The conversion of E8M0 scales reaches 2^9: nothing published comes near, and beyond it would be wrong. */
static megamoe_status check_e8m0(mm_backend_layer *layer, const mm_cuda_expert *experts) {
    mm_backend_state *state = layer->state;
    mm_block *blocks = NULL;
    void *largest;
    uint32_t found = 0;
    megamoe_status status = MEGAMOE_OK;
    if (experts[0].up.format != MM_MXFP4) return MEGAMOE_OK;
    MM_TRY(mm_block_create(state, sizeof found, "a scan of scales", &blocks, &largest));
    for (uint32_t i = 0; status == MEGAMOE_OK && i < layer->weights->expert_count * 3; i++) {
        const mm_cuda_expert *e = &experts[i / 3];
        const mm_cuda_matrix *m = i % 3 == 0 ? &e->gate : i % 3 == 1 ? &e->up : &e->down;
        uint32_t k = i % 3 == 2 ? layer->weights->shape.intermediate : layer->weights->shape.hidden;
        uint32_t rows = i % 3 == 2 ? layer->weights->shape.hidden : layer->weights->shape.intermediate,
                 columns = k / 32;
        const uint8_t *scales = m->scales;
        unsigned long long pitch = m->scale_row_bytes;
        if (!m->codes) continue;
        void *arguments[] = {&scales, &pitch, &rows, &columns, &largest};
        mm_launch how = {.grid = {state->sm_count}, .threads = 256};
        status = mm_cuda_launch(state, state->stream, MM_SCALE_LARGEST, &how, arguments);
    }
    if (status == MEGAMOE_OK)
        status = mm_driver_status(
            state->driver,
            state->driver->copy_to_host(&found, (CUdeviceptr)(uintptr_t)largest, sizeof found, state->stream),
            "scanning scales");
    CUresult result = state->driver->stream_wait(state->stream);
    if (status == MEGAMOE_OK) status = mm_driver_status(state->driver, result, "scanning scales");
    mm_blocks_free(state, &blocks);
    if (status == MEGAMOE_OK && found > 136)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "a weight has E8M0 scale byte %u (2^%d); the GPU kernels reach 136 (2^9)", found,
                       (int)found - 127);
    return status;
}

static megamoe_status check_matrix(const mm_cuda_matrix *m, const char *what) {
    if (!m->codes) return MEGAMOE_OK;
    if (m->row_bytes % 8 != 0 || (uintptr_t)m->codes % (m->format == MM_NVFP4 || m->format == MM_MXFP4 ? 8 : 16) != 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "%s begins at %p with rows of %llu bytes; the GPU kernels need multiples of %d", what,
                       (const void *)m->codes, (unsigned long long)m->row_bytes,
                       m->format == MM_NVFP4 || m->format == MM_MXFP4 ? 8 : 16);
    if (m->format == MM_FP8 && m->scale_f32 && m->block_columns % 128 != 0)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "%s has fp32 scales per %u columns; the GPU kernels take multiples of 128", what,
                       m->block_columns);
    return MEGAMOE_OK;
}

static megamoe_status check_experts(const mm_backend_layer *layer, const mm_cuda_expert *experts) {
    for (uint32_t i = 0; i < layer->weights->expert_count + (layer->weights->shared ? 1u : 0u); i++) {
        const char *of = i < layer->weights->expert_count ? "expert" : "the shared expert";
        megamoe_status status = check_matrix(&experts[i].gate, "gate");
        if (status == MEGAMOE_OK) status = check_matrix(&experts[i].up, "up");
        if (status == MEGAMOE_OK) status = check_matrix(&experts[i].down, "down");
        if (status == MEGAMOE_OK && experts[i].up.format != experts[i < layer->weights->expert_count ? 0 : i].up.format)
            status = mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "its format differs from expert 0's");
        if (status == MEGAMOE_OK && experts[i].gate.codes && experts[i].gate.scale_f32 != experts[i].up.scale_f32)
            status = mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "gate and up have scales of different types");
        if (status != MEGAMOE_OK) return mm_fail_in(status, "%s %u", of, i);
    }
    return MEGAMOE_OK;
}

/* ---- scratch -------------------------------------------------------------------------------------------- */

/* Deals out consecutive 256-byte-aligned parts of a block; with base NULL it only counts. */
typedef struct arena {
    char *base;
    uint64_t used;
} arena;

static void *take(arena *a, uint64_t count, uint64_t size) {
    char *at = a->base ? a->base + a->used : NULL;
    a->used += (count * size + 255) / 256 * 256;
    return at;
}

static void scratch_lay(const mm_backend_layer *layer, arena *a, mm_scratch *s) {
    const mm_layer_weights *w = layer->weights;
    const megamoe_shape *shape = &w->shape;
    const uint64_t tokens = layer->state->max_tokens, pairs = tokens * shape->experts_per_token, e = w->expert_count;
    const uint64_t rows = pairs + 160; /* tiles may read (never use) rows past the last */
    const bool nvfp4 = w->activations == MEGAMOE_ACTIVATIONS_NVFP4;
    const uint64_t shared_i = w->shared ? w->shared->up.rows : 0;
    s->hidden = take(a, tokens * shape->hidden, 4), s->output = take(a, tokens * shape->hidden, 2);
    s->token_ids = take(a, tokens, 4), s->given_ids = take(a, pairs, 4), s->given_weights = take(a, pairs, 4);
    s->expert_ids = take(a, pairs, 4), s->weights = take(a, pairs, 4);
    s->row_pair = take(a, pairs, 4), s->pair_row = take(a, pairs, 4), s->offsets = take(a, e + 1, 4);
    s->logits = take(a, (tokens + 512) * shape->expert_count, 4);
    s->block_counts = take(a, e * 64, 4), s->plan = take(a, 1, sizeof *s->plan);
    for (int i = 0; i < MM_CUDA_LIST_COUNT; i++) s->entries[i] = take(a, e + pairs / 8 + 1, sizeof(mm_cuda_entry));
    s->row_global = take(a, rows, 4);
    s->x = take(a, rows * layer->h_pitch, 2), s->h = take(a, rows * layer->i_pitch, 2),
    s->p = take(a, rows * shape->hidden, 2);
    s->h32 = take(a, nvfp4 ? rows * shape->intermediate : 0, 4);
    /* 1 KB per tile of 16 MMA rows of every heavy entry */
    s->partials = take(a,
                       layer->decode[0].kernel != MM_KERNEL_COUNT && layer->decode[0].passes == 2
                           ? (e + pairs / 8 + 1) * (shape->intermediate / 8)
                           : 0,
                       1024);
    s->token_x = take(a, w->shared ? (tokens + 160) * layer->h_pitch : 0, 2);
    s->shared_h = take(a, (tokens + 160) * layer->shared_pitch, 2);
    s->shared_h32 = take(a, nvfp4 ? tokens * shared_i : 0, 4);
    s->shared_out = take(a, w->shared ? tokens * shape->hidden : 0, 4);
}

static megamoe_status grow_scratch(mm_backend_layer *layer) {
    mm_backend_state *state = layer->state;
    arena a = {0};
    mm_scratch scratch;
    void *base;
    scratch_lay(layer, &a, &scratch);
    if (a.used <= state->scratch.bytes) return MEGAMOE_OK;
    MM_TRY(mm_block_create(state, a.used, "scratch for max_tokens", &state->scratch_blocks, &base));
    state->scratch.bytes = a.used;
    return MEGAMOE_OK;
}

/* ---- the layer ------------------------------------------------------------------------------------------ */

static megamoe_status create_tables(mm_backend_layer *layer, const mm_cuda_expert *experts) {
    mm_backend_state *state = layer->state;
    const mm_layer_weights *w = layer->weights;
    const uint32_t total = w->expert_count + (w->shared ? 1u : 0u), e = w->shape.expert_count;
    void *base;
    MM_TRY(mm_block_create(state, sizeof *experts * (total + 1), "expert table", &layer->blocks, &base));
    MM_TRY(copy_in(state, base, experts, sizeof *experts * total));
    layer->experts = base;
    layer->shared = w->shared ? layer->experts + w->expert_count : NULL;
    MM_TRY(mm_block_create(state, e * sizeof(int32_t), "expert table", &layer->blocks, &base));
    MM_TRY(copy_in(state, base, w->local_index, e * sizeof(int32_t)));
    layer->local_index = base;
    MM_TRY(mm_block_create(state, sizeof(mm_cuda_counters), "counters", &layer->blocks, &base));
    layer->counters = base;
    MM_TRY(mm_block_create(state, e * sizeof(unsigned long long), "counters", &layer->blocks, &base));
    layer->expert_tokens = base;
    return MEGAMOE_OK;
}

static megamoe_status create(mm_backend_layer *layer, bool on_device, const megamoe_layer_options *options) {
    const mm_layer_weights *w = layer->weights;
    mm_cuda_expert *experts = calloc((size_t)w->expert_count + 1, sizeof *experts);
    megamoe_status status;
    if (!experts) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", w->expert_count);
    status = mm_cuda_weights_load(layer, on_device, options, experts);
    if (status == MEGAMOE_OK) status = check_experts(layer, experts);
    if (status == MEGAMOE_OK && w->expert_count > 0) status = check_e8m0(layer, experts);
    if (status == MEGAMOE_OK) {
        choose_kernels(layer, experts);
        if (w->shared) {
            const uint32_t format = experts[w->expert_count].up.format;
            layer->shared_tile[0] = mm_cuda_portable_tile(true, format),
            layer->shared_tile[1] = mm_cuda_portable_tile(false, format);
        }
        status = create_maps(layer, experts);
    }
    if (status == MEGAMOE_OK) status = create_tables(layer, experts);
    if (status == MEGAMOE_OK) status = grow_scratch(layer);
    free(experts);
    return status;
}

megamoe_status mm_cuda_layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool weights_on_device,
                                    const megamoe_layer_options *options, mm_backend_layer **out) {
    mm_backend_layer *layer = calloc(1, sizeof *layer);
    if (!layer) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    layer->state = state;
    layer->weights = weights;
    layer->h_pitch = mm_round_up(weights->shape.hidden, MM_CUDA_GROUP);
    layer->i_pitch = mm_round_up(weights->shape.intermediate, MM_CUDA_GROUP);
    layer->shared_pitch = weights->shared ? mm_round_up(weights->shared->up.rows, MM_CUDA_GROUP) : 0;
    megamoe_status status = mm_cuda_enter(state);
    if (status == MEGAMOE_OK) {
        weights_on_device = weights_on_device && mm_cuda_weights_on_device(state, weights);
        status = create(layer, weights_on_device, options);
        mm_cuda_leave(state);
    }
    if (status != MEGAMOE_OK) {
        mm_cuda_layer_close(layer);
        return status;
    }
    *out = layer;
    return MEGAMOE_OK;
}

void mm_cuda_layer_close(mm_backend_layer *layer) {
    if (!layer) return;
    if (layer->blocks) { /* what can be given back is, even if the context cannot be entered any more */
        const bool entered = mm_cuda_enter(layer->state) == MEGAMOE_OK;
        layer->state->driver->context_wait();
        mm_blocks_free(layer->state, &layer->blocks);
        if (entered) mm_cuda_leave(layer->state);
    }
    free(layer);
}

void mm_cuda_scratch(const mm_backend_layer *layer, mm_scratch *scratch) {
    arena a = {.base = (char *)(uintptr_t)layer->state->scratch_blocks->base};
    scratch_lay(layer, &a, scratch);
}
