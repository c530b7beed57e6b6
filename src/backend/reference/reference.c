/*
 * The definition as a backend: docs/numerics.md, stage by stage, in double precision sums, one thread,
 * written to be read. It repeats the quantization steps of the layer on the same bytes, so what it gives is
 * the answer that every other backend must come close to, or equal where the definition says exact.
 *
 * Tokens are worked on in blocks, so that scratch memory is fixed when the layer is made and every weight row
 * is dequantized once per block and not once per token.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/reference/choice.h"
#include "backend/reference/formats.h"
#include "backend/reference/single.h"
#include "error.h"

#define BLOCK_TOKENS 64u

struct mm_backend_layer {
    const mm_reference_tables *tables;
    const mm_layer_weights *weights;
    /* Of one block of tokens: T = BLOCK_TOKENS. A pair is token * (K + 1) + slot; slot K is the shared
     * expert's. */
    float *logits;         /* [T, E] */
    int32_t *ids;          /* [T, K] */
    float *expert_weights; /* [T, K] */
    double *x, *x_staged;  /* [T, H] BF16 values, and what nvfp4 staging made of them */
    float *x_globals;      /* [T] */
    double *l1;            /* [T, K + 1, 2, I] */
    double *h;             /* [T, K + 1, I] as staged for L2 */
    float *h_globals;      /* [T, K + 1] */
    double *l2;            /* [T, K + 1, H] */
    uint32_t *pairs;       /* [T * K] those of one expert */
    double *weight_row;    /* [max(H, I)] */
    megamoe_counters counters;
    uint64_t *tokens_per_expert;
};

/* Everything a stage needs to know of the block at hand. */
typedef struct block {
    mm_backend_layer *layer;
    const megamoe_batch *batch;
    const megamoe_stages *given, *stages; /* never NULL: fields may be */
    uint32_t first, count;                /* tokens of the batch */
} block;

static bool quantizes(const mm_layer_weights *w, const mm_matrix *m) {
    return w->activations == MEGAMOE_ACTIVATIONS_NVFP4 && (m->format == MM_NVFP4 || m->format == MM_MXFP4);
}

/* ---- route ---- */

/* Sums of a[k] b[k] and of their absolute values; 16 sums side by side, so that a compiler may vectorize. */
typedef struct dot_result {
    double sum, magnitude;
} dot_result;

static dot_result dot(const double *a, const double *b, uint32_t n) {
    double sums[16] = {0}, magnitudes[16] = {0};
    dot_result result = {0.0, 0.0};
    for (uint32_t k = 0; k < n; k += 16)
        for (uint32_t i = 0; i < 16; i++) {
            double product = a[k + i] * b[k + i];
            sums[i] += product;
            magnitudes[i] += fabs(product);
        }
    for (uint32_t i = 0; i < 16; i++) {
        result.sum += sums[i];
        result.magnitude += magnitudes[i];
    }
    return result;
}

static double read_router(const mm_router *router, uint64_t index) {
    if (router->weight_dtype == MEGAMOE_F32) {
        float value;
        memcpy(&value, (const uint8_t *)router->weight + 4 * index, sizeof value);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, (const uint8_t *)router->weight + 2 * index, sizeof bits);
    return mm_reference_bf16(bits);
}

static void compute_logits(const block *b) {
    const megamoe_shape *shape = &b->layer->weights->shape;
    for (uint32_t e = 0; e < shape->expert_count; e++) {
        double *weight = b->layer->weight_row;
        for (uint32_t k = 0; k < shape->hidden; k++)
            weight[k] = read_router(&b->layer->weights->router, (uint64_t)e * shape->hidden + k);
        for (uint32_t t = 0; t < b->count; t++) {
            const double *x = b->layer->x + (size_t)t * shape->hidden;
            size_t at = (size_t)t * shape->expert_count + e, out = (size_t)b->first * shape->expert_count + at;
            dot_result z = dot(weight, x, shape->hidden);
            b->layer->logits[at] = (float)z.sum;
            if (b->stages->logits_magnitude) b->stages->logits_magnitude[out] = (float)z.magnitude;
        }
    }
}

static void choose_experts(const block *b) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t k_count = w->shape.experts_per_token, e_count = w->shape.expert_count;
    for (uint32_t t = 0; t < b->count; t++) {
        size_t at = (size_t)(b->first + t) * k_count;
        const int32_t *token_id = b->batch->token_ids ? &b->batch->token_ids[b->first + t] : NULL;
        int32_t *ids = b->layer->ids + (size_t)t * k_count;
        float *weights = b->layer->expert_weights + (size_t)t * k_count;
        if (b->batch->expert_ids) {
            memcpy(ids, b->batch->expert_ids + at, k_count * sizeof *ids);
            memcpy(weights, b->batch->expert_weights + at, k_count * sizeof *weights);
        } else if (!mm_reference_choose(&w->shape, &w->router, b->layer->logits + (size_t)t * e_count,
                                        token_id ? *token_id : -1, ids, weights)) {
            b->layer->counters.unrouted_tokens++;
        }
    }
}

static void route(const block *b) {
    const megamoe_shape *shape = &b->layer->weights->shape;
    size_t row = shape->expert_count, first = b->first;
    if (!b->batch->expert_ids) {
        if (b->given->logits)
            memcpy(b->layer->logits, b->given->logits + first * row, b->count * row * sizeof(float));
        else
            compute_logits(b);
        if (b->stages->logits)
            memcpy(b->stages->logits + first * row, b->layer->logits, b->count * row * sizeof(float));
    }
    choose_experts(b);
    size_t k_count = shape->experts_per_token;
    if (b->stages->expert_ids)
        memcpy(b->stages->expert_ids + first * k_count, b->layer->ids, b->count * k_count * sizeof(int32_t));
    if (b->stages->expert_weights)
        memcpy(b->stages->expert_weights + first * k_count, b->layer->expert_weights,
               b->count * k_count * sizeof(float));
}

/* ---- stage: hidden states to what L1 reads ---- */

static void read_hidden(const block *b) {
    size_t row = b->layer->weights->shape.hidden, values = b->count * row;
    for (size_t i = 0; i < values; i++) {
        size_t at = b->first * row + i;
        uint16_t bits = b->batch->hidden_dtype == MEGAMOE_F32
                            ? mm_reference_to_bf16(((const float *)b->batch->hidden)[at])
                            : ((const uint16_t *)b->batch->hidden)[at];
        b->layer->x[i] = mm_reference_bf16(bits);
    }
}

/* Quantizes one row, writes code * scale as values, and the bytes where they are wanted. */
static void quantize_row(const block *b, const double *values, uint32_t columns, float g, double *staged,
                         uint8_t *codes, uint8_t *scales) {
    for (uint32_t k = 0; k < columns; k += 16) {
        float in[16];
        for (unsigned i = 0; i < 16; i++) in[i] = (float)values[k + i];
        mm_reference_block q = mm_reference_quantize(b->layer->tables, in, g);
        b->layer->counters.saturated_blocks += q.saturated;
        b->layer->counters.nonfinite_blocks += q.nonfinite;
        for (unsigned i = 0; i < 16; i++)
            staged[k + i] = b->layer->tables->e2m1[q.codes[i]] * b->layer->tables->e4m3[q.scale];
        for (unsigned i = 0; i < 16 && codes; i += 2) codes[(k + i) / 2] = (uint8_t)(q.codes[i] | q.codes[i + 1] << 4);
        if (scales) scales[k / 16] = q.scale;
    }
}

/* The same from given bytes. */
static void dequantize_row(const block *b, const uint8_t *codes, const uint8_t *scales, uint32_t columns,
                           double *staged) {
    for (uint32_t k = 0; k < columns; k++)
        staged[k] = b->layer->tables->e2m1[codes[k / 2] >> (k % 2 * 4) & 15] * b->layer->tables->e4m3[scales[k / 16]];
}

static float input_global(const mm_layer_weights *w, const double *x) {
    float amax = 0.0f;
    if (w->input_mode == MEGAMOE_GLOBAL_STATIC) return w->input_global;
    if (w->input_mode == MEGAMOE_GLOBAL_UNIT) return 1.0f;
    for (uint32_t k = 0; k < w->shape.hidden; k++)
        if (isfinite(x[k])) amax = fmaxf(amax, (float)fabs(x[k]));
    return amax / 2688.0f > 0.0f ? amax / 2688.0f : 1.0f;
}

static void stage_inputs(const block *b) {
    const mm_layer_weights *w = b->layer->weights;
    const megamoe_stages *given = b->given, *out = b->stages;
    uint32_t columns = w->shape.hidden;
    read_hidden(b);
    for (uint32_t t = 0; t < b->count && w->activations == MEGAMOE_ACTIVATIONS_NVFP4; t++) {
        const double *x = b->layer->x + (size_t)t * columns;
        double *staged = b->layer->x_staged + (size_t)t * columns;
        size_t token = b->first + t, codes_at = token * columns / 2, scales_at = token * columns / 16;
        float g = given->x_globals ? given->x_globals[token] : input_global(w, x);
        b->layer->x_globals[t] = g;
        quantize_row(b, x, columns, g, staged, out->x_codes ? out->x_codes + codes_at : NULL,
                     out->x_scales ? out->x_scales + scales_at : NULL);
        if (given->x_codes && given->x_scales)
            dequantize_row(b, given->x_codes + codes_at, given->x_scales + scales_at, columns, staged);
        if (out->x_globals) out->x_globals[token] = g;
    }
}

/* ---- L1, activation, L2 of one expert ---- */

/* out[pair][n] = rows[pair / pairs_per_row] . W[n] * (row global * W global) + bias[n], for the pairs of one
 * expert. */
typedef struct product {
    const mm_matrix *matrix;
    const double *rows;
    const float *globals; /* one per row; NULL: 1 */
    uint32_t pairs_per_row;
    double *out;
    size_t out_pitch;
    float *magnitudes; /* [T, K] rows of out_pitch: sum of |row * W * scale| + |bias|, routed pairs only; or
                          NULL */
} product;

/* Where a routed pair's row stands in the stages of the whole batch; false for the shared expert's pairs. */
static bool stage_row(const block *b, uint32_t pair, size_t *out_row) {
    uint32_t slots = b->layer->weights->shape.experts_per_token + 1;
    *out_row = (size_t)(b->first + pair / slots) * (slots - 1) + pair % slots;
    return pair % slots != slots - 1;
}

static void multiply(const block *b, const product *p, const uint32_t *pairs, uint32_t count) {
    const mm_matrix *m = p->matrix;
    double *weight = b->layer->weight_row;
    for (uint32_t n = 0; n < m->rows; n++) {
        double bias = mm_reference_bias(m, n);
        mm_reference_row(b->layer->tables, m, n, weight);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t r = pairs[i] / p->pairs_per_row;
            const double *values = p->rows + (size_t)r * m->columns;
            float scale = (p->globals ? p->globals[r] : 1.0f) * m->global;
            dot_result d = dot(weight, values, m->columns);
            size_t out_row;
            p->out[pairs[i] * p->out_pitch + n] = d.sum * (double)scale + bias;
            if (p->magnitudes && stage_row(b, pairs[i], &out_row))
                p->magnitudes[out_row * p->out_pitch + n] = (float)(d.magnitude * (double)scale + fabs(bias));
        }
    }
}

static float *from(float *array, size_t index) {
    return array ? array + index : NULL;
}

/* Copies `count` doubles out as fp32, and replaces them by what was given. */
static void exchange(double *values, size_t count, float *out, const float *given) {
    for (size_t i = 0; i < count; i++) {
        if (out) out[i] = (float)values[i];
        if (given) values[i] = given[i];
    }
}

static double activate(const mm_swiglu *f, double gate, double up) {
    double limit = (double)f->limit;
    if (f->relu2) return up > 0.0 || isnan(up) ? up * up : 0.0;
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
    return gate / (1.0 + exp(-(double)f->alpha * gate)) * (up + (double)f->beta);
}

/* Rounds h in place to what L2 reads: BF16, or code * scale under h_globals. */
static void stage_intermediate(const block *b, const mm_expert *expert, uint32_t pair) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t columns = w->shape.intermediate;
    size_t out;
    bool routed = stage_row(b, pair, &out);
    const megamoe_stages *given = b->given, *stages = b->stages;
    double *h = b->layer->h + (size_t)pair * columns;

    b->layer->h_globals[pair] = 1.0f;
    if (quantizes(w, &expert->down)) {
        float g = w->intermediate_mode == MEGAMOE_GLOBAL_STATIC ? expert->intermediate_global : 1.0f;
        size_t codes_at = out * columns / 2, scales_at = out * columns / 16;
        b->layer->h_globals[pair] = g;
        quantize_row(b, h, columns, g, h, routed && stages->h_codes ? stages->h_codes + codes_at : NULL,
                     routed && stages->h_scales ? stages->h_scales + scales_at : NULL);
        if (routed && given->h_codes && given->h_scales)
            dequantize_row(b, given->h_codes + codes_at, given->h_scales + scales_at, columns, h);
        if (routed && stages->h_globals) stages->h_globals[out] = g;
        return;
    }
    for (uint32_t i = 0; i < columns; i++) {
        uint16_t bits = mm_reference_to_bf16((float)h[i]);
        if (routed && stages->h) stages->h[out * columns + i] = bits;
        if (routed && given->h) bits = given->h[out * columns + i];
        h[i] = mm_reference_bf16(bits);
    }
}

static void run_l1(const block *b, const mm_expert *expert, const uint32_t *pairs, uint32_t count) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t columns = w->shape.intermediate;
    bool staged = quantizes(w, &expert->up);
    product p = {.matrix = &expert->up,
                 .rows = staged ? b->layer->x_staged : b->layer->x,
                 .globals = staged ? b->layer->x_globals : NULL,
                 .pairs_per_row = w->shape.experts_per_token + 1,
                 .out = b->layer->l1 + columns,
                 .out_pitch = 2 * (size_t)columns,
                 .magnitudes = from(b->stages->l1_magnitude, columns)};
    multiply(b, &p, pairs, count);
    if (w->shape.not_gated) return;
    p.matrix = &expert->gate;
    p.out = b->layer->l1;
    p.magnitudes = b->stages->l1_magnitude;
    multiply(b, &p, pairs, count);
}

/* The activation of one pair, from its own L1 or the given one, to the row that L2 reads. */
static void run_activation(const block *b, const mm_expert *expert, const mm_swiglu *swiglu, uint32_t pair) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t columns = w->shape.intermediate;
    double *gate = b->layer->l1 + (size_t)pair * 2 * columns, *up = gate + columns;
    double *h = b->layer->h + (size_t)pair * columns, weight = 1.0;
    size_t out, values = 2 * (size_t)columns;
    if (stage_row(b, pair, &out)) {
        exchange(gate, values, from(b->stages->l1, out * values), from(b->given->l1, out * values));
        if (w->routing_weight_before)
            weight = b->layer->expert_weights[out - (size_t)b->first * w->shape.experts_per_token];
    }
    for (uint32_t n = 0; n < columns; n++) h[n] = activate(swiglu, gate[n], up[n]) * weight;
    stage_intermediate(b, expert, pair);
}

static void run_expert(const block *b, const mm_expert *expert, const mm_swiglu *swiglu, const uint32_t *pairs,
                       uint32_t count) {
    uint32_t hidden = b->layer->weights->shape.hidden;
    product l2 = {.matrix = &expert->down,
                  .rows = b->layer->h,
                  .globals = b->layer->h_globals,
                  .pairs_per_row = 1,
                  .out = b->layer->l2,
                  .out_pitch = hidden,
                  .magnitudes = b->stages->l2_magnitude};
    bool l1_given = b->given->l1 && !b->stages->l1 && !b->stages->l1_magnitude && expert != b->layer->weights->shared;
    if (!l1_given) run_l1(b, expert, pairs, count);
    for (uint32_t i = 0; i < count; i++) run_activation(b, expert, swiglu, pairs[i]);
    multiply(b, &l2, pairs, count);
    for (uint32_t i = 0; i < count; i++) {
        size_t out;
        if (stage_row(b, pairs[i], &out))
            exchange(b->layer->l2 + (size_t)pairs[i] * hidden, hidden, from(b->stages->l2, out * hidden),
                     from(b->given->l2, out * hidden));
    }
}

/* The local expert of a pair's id, or -1: skipped, not loaded, or bad. */
static int32_t local_expert(const mm_layer_weights *w, int32_t id) {
    return id < 0 || (uint32_t)id >= w->shape.expert_count ? -1 : w->local_index[id];
}

static void run_experts(const block *b) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t k_count = w->shape.experts_per_token;
    for (uint32_t e = 0; e < w->expert_count; e++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < b->count * k_count; i++)
            if (local_expert(w, b->layer->ids[i]) == (int32_t)e)
                b->layer->pairs[count++] = i / k_count * (k_count + 1) + i % k_count;
        if (count > 0) run_expert(b, &w->experts[e], &w->swiglu, b->layer->pairs, count);
    }
    for (uint32_t t = 0; t < b->count && w->shared; t++) b->layer->pairs[t] = t * (k_count + 1) + k_count;
    bool shared_given = b->given->shared && !b->stages->shared;
    if (w->shared && !shared_given) run_expert(b, w->shared, &w->shared_swiglu, b->layer->pairs, b->count);
}

/* ---- combine ---- */

static void combine(const block *b) {
    const mm_layer_weights *w = b->layer->weights;
    uint32_t hidden = w->shape.hidden, k_count = w->shape.experts_per_token;
    for (uint32_t t = 0; t < b->count; t++) {
        const double *l2 = b->layer->l2 + (size_t)t * (k_count + 1) * hidden, *shared = l2 + (size_t)k_count * hidden;
        size_t out = (size_t)(b->first + t) * hidden;
        for (uint32_t n = 0; n < hidden; n++) {
            double sum = 0.0;
            for (uint32_t k = 0; k < k_count; k++) {
                size_t i = (size_t)t * k_count + k;
                double weight = w->routing_weight_before ? 1.0 : (double)b->layer->expert_weights[i];
                if (local_expert(w, b->layer->ids[i]) >= 0) sum += weight * l2[(size_t)k * hidden + n];
            }
            if (w->shared) {
                double value = b->given->shared ? (double)b->given->shared[out + n] : shared[n];
                if (b->stages->shared) b->stages->shared[out + n] = (float)shared[n];
                sum += value;
            }
            ((uint16_t *)b->batch->output)[out + n] = mm_reference_to_bf16((float)sum);
        }
    }
    if (b->stages->output)
        memcpy(b->stages->output + (size_t)b->first * hidden, (uint16_t *)b->batch->output + (size_t)b->first * hidden,
               (size_t)b->count * hidden * sizeof(uint16_t));
}

static void count_slots(const block *b) {
    const mm_layer_weights *w = b->layer->weights;
    megamoe_counters *counters = &b->layer->counters;
    for (uint32_t i = 0; i < b->count * w->shape.experts_per_token; i++) {
        int32_t id = b->layer->ids[i];
        if (id >= 0 && (uint32_t)id < w->shape.expert_count) b->layer->tokens_per_expert[id]++;
        if (id < -1 || id >= (int32_t)w->shape.expert_count)
            counters->bad_slots++;
        else if (local_expert(w, id) < 0)
            counters->skipped_slots++;
    }
    counters->tokens += b->count;
}

/* ---- the table ---- */

/* Rows of skipped slots are zero, so every stage starts as zeros. */
static void clear_stages(const megamoe_shape *shape, const megamoe_stages *s, size_t tokens) {
    size_t pairs = tokens * shape->experts_per_token, i = shape->intermediate, h = shape->hidden;
    if (s->l1) memset(s->l1, 0, pairs * 2 * i * sizeof *s->l1);
    if (s->h) memset(s->h, 0, pairs * i * sizeof *s->h);
    if (s->h_codes) memset(s->h_codes, 0, pairs * i / 2);
    if (s->h_scales) memset(s->h_scales, 0, pairs * i / 16);
    if (s->h_globals) memset(s->h_globals, 0, pairs * sizeof *s->h_globals);
    if (s->l2) memset(s->l2, 0, pairs * h * sizeof *s->l2);
    if (s->shared) memset(s->shared, 0, tokens * h * sizeof *s->shared);
    if (s->l1_magnitude) memset(s->l1_magnitude, 0, pairs * 2 * i * sizeof *s->l1_magnitude);
    if (s->l2_magnitude) memset(s->l2_magnitude, 0, pairs * h * sizeof *s->l2_magnitude);
}

static uint32_t stages_of(const mm_layer_weights *w, const megamoe_batch *batch) {
    uint32_t written = MM_STAGE_IDS | MM_STAGE_WEIGHTS | MM_STAGE_L1 | MM_STAGE_L2 | MM_STAGE_OUTPUT |
                       MM_STAGE_L1_MAGNITUDE | MM_STAGE_L2_MAGNITUDE;
    bool nvfp4 = w->activations == MEGAMOE_ACTIVATIONS_NVFP4;
    bool h_nvfp4 = w->expert_count > 0 && quantizes(w, &w->experts[0].down);
    if (!batch->expert_ids) written |= MM_STAGE_LOGITS | MM_STAGE_LOGITS_MAGNITUDE;
    if (nvfp4) written |= MM_STAGE_X_CODES | MM_STAGE_X_SCALES | MM_STAGE_X_GLOBALS;
    written |= h_nvfp4 ? MM_STAGE_H_CODES | MM_STAGE_H_SCALES | MM_STAGE_H_GLOBALS : MM_STAGE_H;
    if (w->shared) written |= MM_STAGE_SHARED;
    return written;
}

static megamoe_status run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream) {
    static const megamoe_stages none = {0};
    block b = {layer, batch, given ? given : &none, stages ? stages : &none, 0, 0};
    (void)stream;
    clear_stages(&layer->weights->shape, b.stages, batch->token_count);
    for (; b.first < batch->token_count; b.first += b.count) {
        b.count = batch->token_count - b.first < BLOCK_TOKENS ? batch->token_count - b.first : BLOCK_TOKENS;
        stage_inputs(&b);
        route(&b);
        count_slots(&b);
        run_experts(&b);
        combine(&b);
    }
    if (written) *written = stages_of(layer->weights, batch);
    return MEGAMOE_OK;
}

static megamoe_status route_only(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                                 float *expert_weights, void *stream) {
    static const megamoe_stages none = {0};
    megamoe_stages out = {.expert_ids = expert_ids, .expert_weights = expert_weights};
    block b = {layer, batch, &none, &out, 0, 0};
    (void)stream;
    for (; b.first < batch->token_count; b.first += b.count) {
        b.count = batch->token_count - b.first < BLOCK_TOKENS ? batch->token_count - b.first : BLOCK_TOKENS;
        read_hidden(&b);
        route(&b);
    }
    return MEGAMOE_OK;
}

static megamoe_status counters(mm_backend_layer *layer, megamoe_counters *counts, uint64_t *tokens_per_expert) {
    size_t size = counts->struct_size;
    *counts = layer->counters;
    counts->struct_size = size;
    if (tokens_per_expert)
        memcpy(tokens_per_expert, layer->tokens_per_expert,
               layer->weights->shape.expert_count * sizeof *tokens_per_expert);
    return MEGAMOE_OK;
}

static void layer_close(mm_backend_layer *layer) {
    free(layer->logits);
    free(layer->ids);
    free(layer->expert_weights);
    free(layer->x);
    free(layer->x_staged);
    free(layer->x_globals);
    free(layer->l1);
    free(layer->h);
    free(layer->h_globals);
    free(layer->l2);
    free(layer->pairs);
    free(layer->weight_row);
    free(layer->tokens_per_expert);
    free(layer);
}

static megamoe_status layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool on_device,
                                   const megamoe_layer_options *options, mm_backend_layer **out) {
    const megamoe_shape *shape = &weights->shape;
    size_t t = BLOCK_TOKENS, k = shape->experts_per_token, h = shape->hidden, i = shape->intermediate;
    mm_backend_layer *l = calloc(1, sizeof *l);
    (void)on_device, (void)options;
    if (!l) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    l->tables = &state->tables;
    l->weights = weights;
    l->logits = calloc(t * shape->expert_count, sizeof *l->logits);
    l->ids = calloc(t * k, sizeof *l->ids);
    l->expert_weights = calloc(t * k, sizeof *l->expert_weights);
    l->x = calloc(t * h, sizeof *l->x);
    l->x_staged = calloc(t * h, sizeof *l->x_staged);
    l->x_globals = calloc(t, sizeof *l->x_globals);
    l->l1 = calloc(t * (k + 1) * 2 * i, sizeof *l->l1);
    l->h = calloc(t * (k + 1) * i, sizeof *l->h);
    l->h_globals = calloc(t * (k + 1), sizeof *l->h_globals);
    l->l2 = calloc(t * (k + 1) * h, sizeof *l->l2);
    l->pairs = calloc(t * k, sizeof *l->pairs);
    l->weight_row = calloc(h > i ? h : i, sizeof *l->weight_row);
    l->tokens_per_expert = calloc(shape->expert_count, sizeof *l->tokens_per_expert);
    if (!l->logits || !l->ids || !l->expert_weights || !l->x || !l->x_staged || !l->x_globals || !l->l1 || !l->h ||
        !l->h_globals || !l->l2 || !l->pairs || !l->weight_row || !l->tokens_per_expert) {
        layer_close(l);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the reference backend's scratch of %u tokens",
                       BLOCK_TOKENS);
    }
    *out = l;
    return MEGAMOE_OK;
}

static megamoe_status probe(uint32_t ordinal) {
    (void)ordinal;
    return MEGAMOE_OK;
}

static megamoe_status open_device(const megamoe_device_options *options, mm_backend_state **out) {
    mm_backend_state *state = malloc(sizeof *state);
    (void)options;
    if (!state) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a device");
    mm_reference_tables_fill(&state->tables);
    *out = state;
    return MEGAMOE_OK;
}

static void close_device(mm_backend_state *state) {
    free(state);
}

static void describe(const mm_backend_state *state, mm_device_facts *facts) {
    (void)state;
    *facts = (mm_device_facts){.description = "reference (double precision, 1 thread)", .isa = "double", .threads = 1};
}

const mm_backend mm_backend_reference = {
    .name = "reference",
    .id = MEGAMOE_REFERENCE,
    .host_memory = true,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .layer_create = layer_create,
    .layer_close = layer_close,
    .route = route_only,
    .run = run,
    .counters = counters,
    .quantize = mm_reference_quantize_rows,
    .dequantize = mm_reference_dequantize_rows,
    .grouped_gemm = mm_reference_grouped_gemm,
};
