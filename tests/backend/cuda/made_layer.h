/*
 * A layer made for tests and measurements: random weights of any format in host memory, routing, and hidden states.
 * Every scale and every global scale is different, gate and up differ, and nothing is uniform.
 */
#ifndef MADE_LAYER_H
#define MADE_LAYER_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "numerics/bf16.h"
#include "numerics/e4m3.h"

typedef struct made_layer {
    mm_layer_weights weights;
    mm_expert *experts;
    mm_expert shared;
    int32_t *local_index;
    uint64_t seed;
    uint8_t *pool; /* random bytes that large layers share; NULL: each matrix has its own */
    size_t pool_bytes;
} made_layer;

static inline uint32_t made_random(uint64_t *seed) {
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*seed >> 33);
}
static inline float made_uniform(uint64_t *seed) {
    return (float)made_random(seed) * 0x1p-31f;
} /* [0, 1) */
static inline float made_normal(uint64_t *seed) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += made_uniform(seed);
    return sum;
}

/* Bytes that the matrices of a large layer share; the upper half serves as scales too, `span` of them from `low` on. */
static inline void made_pool_fill(made_layer *l, unsigned low, unsigned span) {
    uint64_t seed = 7;
    l->pool_bytes = 64 << 20;
    l->pool = malloc(l->pool_bytes);
    for (size_t i = 0; i < l->pool_bytes; i++)
        l->pool[i] = (uint8_t)(i < l->pool_bytes / 2 ? made_random(&seed) >> 7 : low + made_random(&seed) % span);
}

static inline uint8_t made_scale(made_layer *l, mm_format format) {
    return (uint8_t)(format == MM_MXFP4 ? 115 + made_random(&l->seed) % 8 : 0x30 + made_random(&l->seed) % 0x28);
}

/* rows x columns in `format`; values come out with a spread of about `spread`. */
static inline mm_matrix made_matrix(made_layer *l, mm_format format, uint32_t rows, uint32_t columns, bool bias) {
    mm_matrix m = {.rows = rows,
                   .columns = columns,
                   .format = format,
                   .global = 1.0f,
                   .block_rows = 1,
                   .block_columns = 1,
                   .scale_dtype = MEGAMOE_E4M3,
                   .bias_dtype = MEGAMOE_F32};
    size_t scale_count = (size_t)rows * columns / 16;
    const float spread = 1.0f / sqrtf((float)columns);
    m.row_bytes = format == MM_BF16 ? columns * 2ull : format == MM_FP8 ? columns : columns / 2;
    m.scale_row_bytes = columns / 16;
    if (format == MM_MXFP4) m.scale_row_bytes = columns / 32, m.scale_dtype = MEGAMOE_E8M0;
    if (format == MM_FP8) {
        m.block_rows = m.block_columns = 128;
        m.scale_dtype = (rows + columns) / 128 % 2 ? MEGAMOE_F32 : MEGAMOE_E8M0; /* alike for gate and up */
        m.scale_row_bytes = (columns + 127) / 128 * (m.scale_dtype == MEGAMOE_F32 ? 4ull : 1ull);
        scale_count = (rows + 127) / 128 * m.scale_row_bytes;
    } else
        scale_count = (size_t)rows * m.scale_row_bytes;
    if (l->pool) {
        m.codes = l->pool + made_random(&l->seed) % (l->pool_bytes / 4) / 256 * 256;
        m.scales = l->pool + l->pool_bytes - scale_count - made_random(&l->seed) % (1 << 20) / 256 * 256;
    } else {
        uint8_t *codes = malloc(rows * m.row_bytes), *scales = malloc(scale_count + 4);
        for (size_t i = 0; i < rows * m.row_bytes; i++) codes[i] = (uint8_t)(made_random(&l->seed) >> 7);
        for (size_t i = 0; i < scale_count; i++) scales[i] = made_scale(l, format);
        if (format == MM_BF16)
            for (size_t i = 0; i < (size_t)rows * columns; i++)
                ((uint16_t *)codes)[i] = mm_bf16_from_f32(made_normal(&l->seed) * spread);
        if (format == MM_FP8)
            for (size_t i = 0; i < (size_t)rows * columns; i++)
                codes[i] = (uint8_t)mm_e4m3_from_f32(made_normal(&l->seed));
        if (format == MM_FP8)
            for (size_t i = 0; i < scale_count; i++) {
                if (m.scale_dtype == MEGAMOE_E8M0)
                    scales[i] = (uint8_t)(120 + made_random(&l->seed) % 3);
                else if (i % 4 == 0)
                    ((float *)scales)[i / 4] = spread * (0.7f + made_uniform(&l->seed));
            }
        if (format == MM_BF16) free(scales), scales = NULL;
        m.codes = codes, m.scales = scales;
    }
    if (format == MM_NVFP4) m.global = spread * (0.3f + 0.4f * made_uniform(&l->seed));
    if (format == MM_MXFP4) m.global = 1.0f;
    if (bias) {
        float *b = malloc(rows * sizeof *b);
        for (uint32_t i = 0; i < rows; i++) b[i] = made_normal(&l->seed) * 0.3f;
        m.bias = b, m.bias_stride = sizeof *b;
    }
    return m;
}

static inline void made_matrix_free(mm_matrix *m, bool pool) {
    if (!pool) free((void *)(uintptr_t)m->codes), free((void *)(uintptr_t)m->scales);
    free((void *)(uintptr_t)m->bias);
}

static inline mm_expert made_expert(made_layer *l, mm_format format, uint32_t h, uint32_t i, bool gated, bool bias) {
    mm_expert e = {.input_global = 0.01f * (1.0f + made_uniform(&l->seed)),
                   .intermediate_global = 0.002f * (1.0f + made_uniform(&l->seed))};
    if (gated) e.gate = made_matrix(l, format, i, h, bias);
    e.up = made_matrix(l, format, i, h, bias);
    e.down = made_matrix(l, format, h, i, bias);
    return e;
}

typedef struct made_form {
    uint32_t hidden, intermediate, expert_count, loaded, slots;
    mm_format format, shared_format; /* shared_format 0: no shared expert */
    bool bias, not_gated, weight_before;
    megamoe_activations activations;
    megamoe_global input_mode, intermediate_mode;
    float alpha, beta, limit;
} made_form;

/* The loaded experts are the odd ids first, so that loaded order differs from the order of ids. */
static inline void made_layer_open(made_layer *l, const made_form *f, uint64_t seed) {
    mm_layer_weights *w = &l->weights;
    memset(w, 0, sizeof *w);
    l->seed = seed;
    w->shape = (megamoe_shape){.hidden = f->hidden,
                               .intermediate = f->intermediate,
                               .expert_count = f->expert_count,
                               .experts_per_token = f->slots,
                               .group_size = f->format == MM_MXFP4 ? 32 : 16,
                               .score = MEGAMOE_SQRTSOFTPLUS,
                               .normalize_weights = true,
                               .not_gated = f->not_gated,
                               .routed_scale = 1.5f,
                               .swiglu_alpha = f->alpha,
                               .swiglu_beta = f->beta};
    w->swiglu = (mm_swiglu){
        .alpha = f->alpha, .beta = f->beta, .limit = f->limit > 0 ? f->limit : INFINITY, .relu2 = f->not_gated};
    w->shared_swiglu = w->swiglu;
    w->activations = f->activations;
    w->input_mode = f->input_mode, w->intermediate_mode = f->intermediate_mode;
    w->input_global = f->input_mode == MEGAMOE_GLOBAL_STATIC ? 0.0123f : 1.0f;
    w->routing_weight_before = f->weight_before;
    l->experts = calloc(f->loaded + 1, sizeof *l->experts);
    for (uint32_t i = 0; i < f->loaded; i++)
        l->experts[i] = made_expert(l, f->format, f->hidden, f->intermediate, !f->not_gated, f->bias);
    w->experts = l->experts, w->expert_count = f->loaded;
    if (f->shared_format) {
        l->shared = made_expert(l, f->shared_format, f->hidden, f->intermediate, !f->not_gated, false);
        w->shared = &l->shared;
    }
    l->local_index = malloc(f->expert_count * sizeof *l->local_index);
    int32_t next = 0;
    for (uint32_t e = 0; e < f->expert_count; e++) l->local_index[e] = -1;
    for (uint32_t odd = 2; odd-- > 0;)
        for (uint32_t e = odd; e < f->expert_count; e += 2)
            if (next < (int32_t)f->loaded) l->local_index[e] = next++;
    w->local_index = l->local_index;
}

static inline void made_expert_free(mm_expert *e, bool pool) {
    made_matrix_free(&e->gate, pool), made_matrix_free(&e->up, pool), made_matrix_free(&e->down, pool);
}

static inline void made_layer_close(made_layer *l) {
    for (uint32_t i = 0; i < l->weights.expert_count; i++) made_expert_free(&l->experts[i], l->pool);
    if (l->weights.shared) made_expert_free(&l->shared, l->pool);
    free(l->experts), free(l->local_index);
}

/* K distinct ids of E per token; `hot` of 0..1 is the share of tokens that also visit the first loaded expert. */
static inline void made_routing(made_layer *l, uint32_t tokens, float hot, int32_t *ids, float *weights) {
    const uint32_t e = l->weights.shape.expert_count, k = l->weights.shape.experts_per_token;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t i = 0; i < k; i++) {
            int32_t id;
            bool taken = false;
            do {
                id = (int32_t)(made_random(&l->seed) % e);
                if (i == 0 && made_uniform(&l->seed) < hot) id = e > 1;
                taken = false;
                for (uint32_t j = 0; j < i; j++) taken |= ids[t * k + j] == id;
            } while (taken);
            ids[t * k + i] = id;
            weights[t * k + i] = 0.05f + made_uniform(&l->seed);
        }
}

static inline void made_hidden(made_layer *l, uint32_t tokens, uint16_t *hidden) {
    for (size_t i = 0; i < (size_t)tokens * l->weights.shape.hidden; i++) {
        float v = made_normal(&l->seed);
        if (made_random(&l->seed) % 500 == 0) v *= 8.0f; /* outliers, as real hidden states have */
        hidden[i] = mm_bf16_from_f32(v);
    }
}

#endif
