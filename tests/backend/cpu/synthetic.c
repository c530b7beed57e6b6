/* See synthetic.h. */
#include "backend/cpu/synthetic.h"

#include <stdlib.h>
#include <string.h>

#include "numerics/bf16.h"

enum { PADDING = 24 }; /* bytes behind each row of codes and of scales */

void *synthetic_block(synthetic *made, size_t bytes) {
    void *block = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    made->blocks = realloc(made->blocks, (made->block_count + 1) * sizeof *made->blocks);
    made->blocks[made->block_count++] = block;
    memset(block, 0xAA, bytes);
    return block;
}

void synthetic_free(synthetic *made) {
    for (size_t i = 0; i < made->block_count; i++) free(made->blocks[i]);
    free(made->blocks);
}

uint32_t synthetic_random(synthetic *made) { /* splitmix64 */
    uint64_t z = made->random += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

static float uniform(synthetic *made) {
    return (float)(synthetic_random(made) >> 8) / 16777216.0f;
}

float synthetic_normal(synthetic *made) {
    float sum = 0.0f;
    for (int i = 0; i < 12; i++) sum += uniform(made);
    return sum - 6.0f;
}

static void fill_four_bit(synthetic *made, mm_matrix *m, bool whole) {
    static const uint8_t whole_scales[] = {0x40, 0x48, 0x44, 0x4C}; /* E4M3 2, 4, 3, 6 */
    uint32_t group = m->format == MM_NVFP4 ? 16 : 32;
    m->row_bytes = m->columns / 2 + PADDING;
    m->scale_row_bytes = (m->columns + group - 1) / group + PADDING;
    m->scale_dtype = m->format == MM_NVFP4 ? MEGAMOE_E4M3 : MEGAMOE_E8M0;
    uint8_t *codes = synthetic_block(made, m->rows * m->row_bytes);
    uint8_t *scales = synthetic_block(made, m->rows * m->scale_row_bytes);
    memset(codes, 0x7F, m->rows * m->row_bytes);
    memset(scales, m->format == MM_NVFP4 ? 0x7F : 0xFF, m->rows * m->scale_row_bytes); /* NaN, if it is read */
    for (uint32_t n = 0; n < m->rows; n++) {
        for (uint32_t k = 0; k < m->columns / 2; k++) codes[n * m->row_bytes + k] = (uint8_t)synthetic_random(made);
        for (uint32_t k = 0; k < m->columns; k += group) {
            uint32_t bits = synthetic_random(made);
            uint8_t scale = (uint8_t)(m->format == MM_NVFP4 ? 0x20 + bits % 48 : 120 + bits % 6);
            if (whole) scale = m->format == MM_NVFP4 ? whole_scales[bits % 4] : (uint8_t)(128 + bits % 2);
            scales[n * m->scale_row_bytes + k / group] = scale;
        }
    }
    m->codes = codes;
    m->scales = scales;
    m->global = whole ? 1.0f : 0.003f * (1.0f + uniform(made));
}

static void fill_bf16(synthetic *made, mm_matrix *m, bool whole) {
    m->row_bytes = 2 * (uint64_t)m->columns + PADDING;
    uint8_t *codes = synthetic_block(made, m->rows * m->row_bytes);
    memset(codes, 0x7F, m->rows * m->row_bytes);
    for (uint32_t n = 0; n < m->rows; n++)
        for (uint32_t k = 0; k < m->columns; k++) {
            float value = whole ? (float)(int)(synthetic_random(made) % 25) - 12.0f : 0.03f * synthetic_normal(made);
            uint16_t bits = mm_bf16_from_f32(value);
            memcpy(codes + n * m->row_bytes + 2 * (size_t)k, &bits, sizeof bits);
        }
    m->codes = codes;
}

static void fill_fp8(synthetic *made, mm_matrix *m, bool whole) {
    uint32_t block_columns = (m->columns + m->block_columns - 1) / m->block_columns;
    uint32_t block_rows = (m->rows + m->block_rows - 1) / m->block_rows;
    size_t element = m->scale_dtype == MEGAMOE_F32 ? 4 : 1;
    m->row_bytes = m->columns + PADDING;
    m->scale_row_bytes = block_columns * element + PADDING;
    uint8_t *codes = synthetic_block(made, m->rows * m->row_bytes);
    uint8_t *scales = synthetic_block(made, block_rows * m->scale_row_bytes);
    memset(codes, 0x7F, m->rows * m->row_bytes);
    memset(scales, 0xFF, block_rows * m->scale_row_bytes);
    for (uint32_t n = 0; n < m->rows; n++)
        for (uint32_t k = 0; k < m->columns; k++) {
            uint32_t bits = synthetic_random(made);
            /* E4M3 2 .. 15 with a sign, or anything but NaN */
            uint8_t code = (uint8_t)(whole ? (bits & 0x80) | (0x40 + bits % 16) : bits);
            if (!whole && (code & 0x7F) == 0x7F) code = 0x11;
            codes[n * m->row_bytes + k] = code;
        }
    for (uint32_t i = 0; i < block_rows; i++)
        for (uint32_t j = 0; j < block_columns; j++) {
            uint8_t *at = scales + i * m->scale_row_bytes + j * element;
            float scale = whole ? 2.0f : 0.0001f * (1.0f + uniform(made));
            if (m->scale_dtype == MEGAMOE_F32)
                memcpy(at, &scale, sizeof scale);
            else
                *at = (uint8_t)(whole ? 127 + synthetic_random(made) % 2 : 112 + synthetic_random(made) % 5);
        }
    m->codes = codes;
    m->scales = scales;
}

mm_matrix synthetic_matrix(synthetic *made, mm_format format, megamoe_dtype fp8_scale_dtype, uint32_t rows,
                           uint32_t columns, bool whole) {
    mm_matrix m = {.rows = rows, .columns = columns, .format = format, .global = 1.0f};
    if (format == MM_FP8) {
        m.scale_dtype = fp8_scale_dtype ? fp8_scale_dtype : MEGAMOE_E8M0;
        m.block_rows = m.block_columns = m.scale_dtype == MEGAMOE_F32 ? 128 : 32;
        fill_fp8(made, &m, whole);
    } else if (format == MM_BF16) {
        fill_bf16(made, &m, whole);
    } else {
        fill_four_bit(made, &m, whole);
    }
    return m;
}

static void add_bias(synthetic *made, const synthetic_spec *spec, mm_matrix *m) {
    if (!spec->bias_dtype) return;
    m->bias_dtype = spec->bias_dtype;
    m->bias_stride = spec->bias_dtype == MEGAMOE_F32 ? 8 : 4; /* interleaved with another bias */
    uint8_t *bias = synthetic_block(made, m->rows * m->bias_stride);
    for (uint32_t n = 0; n < m->rows; n++) {
        float value = 0.1f * synthetic_normal(made);
        uint16_t bits = mm_bf16_from_f32(value);
        memcpy(bias + n * m->bias_stride, spec->bias_dtype == MEGAMOE_F32 ? (void *)&value : (void *)&bits,
               spec->bias_dtype == MEGAMOE_F32 ? sizeof value : sizeof bits);
    }
    m->bias = bias;
}

static mm_expert make_expert(synthetic *made, const synthetic_spec *spec, mm_format format) {
    mm_expert e = {.input_global = 0.001f * (1.0f + uniform(made)),
                   .intermediate_global = spec->whole_numbers ? 1.0f : 0.0005f * (1.0f + uniform(made))};
    bool whole = spec->whole_numbers;
    if (!spec->relu2)
        e.gate = synthetic_matrix(made, format, spec->fp8_scale_dtype, spec->intermediate, spec->hidden, whole);
    e.up = synthetic_matrix(made, format, spec->fp8_scale_dtype, spec->intermediate, spec->hidden, whole);
    e.down = synthetic_matrix(made, format, spec->fp8_scale_dtype, spec->hidden, spec->intermediate, whole);
    if (!spec->relu2) add_bias(made, spec, &e.gate);
    add_bias(made, spec, &e.up);
    add_bias(made, spec, &e.down);
    return e;
}

static void make_router(synthetic *made, const synthetic_spec *spec, mm_router *router) {
    size_t count = (size_t)spec->experts * spec->hidden;
    uint8_t *weight = synthetic_block(made, count * 4 + 2);
    float *bias = synthetic_block(made, spec->experts * sizeof *bias);
    if (!spec->router_dtype) return;
    router->weight_dtype = spec->router_dtype;
    if (spec->router_dtype == MEGAMOE_F32) weight += 2; /* files do not align their tensors */
    for (size_t i = 0; i < count; i++) {
        float value = 0.02f * synthetic_normal(made);
        uint16_t bits = mm_bf16_from_f32(value);
        if (spec->router_dtype == MEGAMOE_F32)
            memcpy(weight + 4 * i, &value, sizeof value);
        else
            memcpy(weight + 2 * i, &bits, sizeof bits);
    }
    for (uint32_t e = 0; e < spec->experts; e++) bias[e] = 0.1f * synthetic_normal(made);
    router->weight = weight;
    router->bias = bias;
}

void synthetic_make(const synthetic_spec *spec, synthetic *made) {
    mm_layer_weights *w = &made->weights;
    uint32_t loaded = 0;
    memset(made, 0, sizeof *made);
    made->random = spec->seed + 1;
    mm_expert *experts = synthetic_block(made, spec->experts * sizeof *experts);
    int32_t *local = synthetic_block(made, spec->experts * sizeof *local);
    w->shape = (megamoe_shape){.hidden = spec->hidden,
                               .intermediate = spec->intermediate,
                               .expert_count = spec->experts,
                               .experts_per_token = spec->slots,
                               .group_size = spec->format == MM_MXFP4 ? 32 : 16,
                               .score = MEGAMOE_SQRTSOFTPLUS,
                               .normalize_weights = true,
                               .not_gated = spec->relu2,
                               .routed_scale = 1.5f,
                               .swiglu_alpha = spec->alpha > 0.0f ? spec->alpha : 1.0f,
                               .swiglu_beta = spec->beta,
                               .swiglu_limit = spec->limit};
    w->swiglu = (mm_swiglu){.alpha = w->shape.swiglu_alpha,
                            .beta = spec->beta,
                            .limit = spec->limit > 0.0f ? spec->limit : INFINITY,
                            .relu2 = spec->relu2};
    w->shared_swiglu = w->swiglu;
    w->shared_swiglu.limit = INFINITY;
    w->activations = spec->activations;
    w->input_mode = spec->input_mode;
    w->intermediate_mode = spec->intermediate_mode;
    w->input_global = spec->input_mode == MEGAMOE_GLOBAL_STATIC ? 0.0021f : 1.0f;
    w->routing_weight_before = spec->weight_before;
    for (uint32_t e = 0; e < spec->experts; e++) {
        local[e] = e + 1 == spec->skip_expert ? -1 : (int32_t)loaded;
        if (local[e] >= 0) experts[loaded++] = make_expert(made, spec, spec->format);
    }
    w->experts = experts;
    w->expert_count = loaded;
    w->local_index = local;
    make_router(made, spec, &w->router);
    if (!spec->shared_format) return;
    mm_expert *shared = synthetic_block(made, sizeof *shared);
    *shared = make_expert(made, spec, spec->shared_format);
    w->shared = shared;
}

void synthetic_tokens(synthetic *made, uint32_t tokens, uint32_t columns, bool whole, uint16_t *hidden) {
    for (size_t i = 0; i < (size_t)tokens * columns; i++) {
        float value = whole ? (float)(int)(synthetic_random(made) % 7) - 3.0f : synthetic_normal(made);
        if (!whole && synthetic_random(made) % 97 == 0) value *= 20.0f; /* outliers, as real activations have */
        hidden[i] = mm_bf16_from_f32(value);
    }
}
