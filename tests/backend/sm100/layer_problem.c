/* See layer_problem.h. Formats and roundings come from the command's own, which shares none with the library. */
#include "layer_problem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "../../../tools/megamoe/formats.h"

static uint32_t next_random(uint32_t *state) {
    return *state = *state * 1664525u + 1013904223u, *state >> 12;
}

static void *filled(size_t bytes) {
    void *memory = malloc(bytes + 1);
    assert_non_null(memory);
    return memset(memory, 0xAA, bytes + 1);
}

/* ---- weights ---- */

static mm_matrix make_matrix(const struct layer_problem_options *o, uint32_t rows, uint32_t columns, uint32_t *random) {
    uint8_t *codes = filled((size_t)rows * columns / 2), *scales = filled((size_t)rows * columns / 16);
    for (size_t i = 0; i < (size_t)rows * columns / 2; i++) codes[i] = (uint8_t)next_random(random);
    for (size_t i = 0; i < (size_t)rows * columns / 16; i++) /* 1/2, 1 or 2; else any with all its bits */
        scales[i] = (uint8_t)(o->inexact ? 1 + next_random(random) % 0x6E : 0x30 + 8 * (next_random(random) % 3));
    return (mm_matrix){.codes = codes,
                       .scales = scales,
                       .row_bytes = columns / 2,
                       .scale_row_bytes = columns / 16,
                       .rows = rows,
                       .columns = columns,
                       .format = MM_NVFP4,
                       .global = ldexpf(o->inexact ? 0x1.5ep-6f : 1.0f, (int)(next_random(random) % 3) - 6)};
}

/* Small integers: BF16 values 4 bytes apart, or F32 ones 8, as in rows that alternate between two matrices. */
static void add_bias(mm_matrix *m, bool bf16, uint32_t *random) {
    uint32_t stride = bf16 ? 4 : 8;
    uint8_t *bytes = filled((size_t)m->rows * stride);
    for (uint32_t i = 0; i < m->rows; i++) {
        float value = (float)(next_random(random) % 65) - 32.0f;
        uint16_t half = bf16_nearest((double)value);
        memcpy(bytes + (size_t)stride * i, bf16 ? (const void *)&half : &value, bf16 ? sizeof half : sizeof value);
    }
    m->bias = bytes;
    m->bias_stride = stride;
    m->bias_dtype = bf16 ? MEGAMOE_BF16 : MEGAMOE_F32;
}

static float bias_of(const mm_matrix *m, uint32_t row) {
    const uint8_t *at = m->bias;
    uint16_t half;
    float value;
    if (!at) return 0;
    at += row * m->bias_stride;
    memcpy(&half, at, sizeof half);
    memcpy(&value, at, sizeof value);
    return m->bias_dtype == MEGAMOE_BF16 ? bf16_value(half) : value;
}

static void make_expert(const struct layer_problem_options *o, mm_expert *e, uint32_t index) {
    uint32_t random = 77 + index;
    memset(e, 0, sizeof *e);
    if (o->gated) e->gate = make_matrix(o, o->intermediate, o->hidden, &random);
    e->up = make_matrix(o, o->intermediate, o->hidden, &random);
    e->down = make_matrix(o, o->hidden, o->intermediate, &random);
    if (o->biased && o->gated) add_bias(&e->gate, true, &random);
    if (o->biased) add_bias(&e->up, true, &random);
    if (o->biased) add_bias(&e->down, false, &random);
    e->intermediate_global = ldexpf(1.0f, (int)(index % 3) + 3);
}

void layer_open(struct layer_problem *p, const struct layer_problem_options *options) {
    int32_t local_index[LAYER_EXPERTS_MAX];
    uint32_t count = 0;
    memset(p, 0, sizeof *p);
    p->options = *options;
    p->machine = model_machine(&p->state, options->multiprocessors);
    for (uint32_t i = 0; i < options->experts; i++) {
        bool here = !options->step || (i >= options->first && (i - options->first) % options->step == 0);
        make_expert(options, &p->experts[i], i);
        local_index[i] = here ? (int32_t)count : -1;
        if (here) p->loaded[count++] = p->experts[i];
    }
    struct mm_mega_moe_shape shape = {.hidden = options->hidden,
                                      .intermediate = options->intermediate,
                                      .expert_count = options->experts,
                                      .slots = options->slots,
                                      .max_tokens = LAYER_TOKENS_MAX,
                                      .swiglu = {1.0f, 0.0f, 10.0f, !options->gated},
                                      .routing_weight_before = options->weight_before,
                                      .batch_invariant = options->batch_invariant,
                                      .input_global = options->token_global ? 0.0f : 0.5f,
                                      .sm_budget = options->sm_budget,
                                      .timeout_ns = 1000000000};
    struct mm_mega_moe_weights weights;
    struct mm_mega_moe_loss loss;
    mm_layer_weights layer = {.shape = {.expert_count = options->experts},
                              .intermediate_mode = MEGAMOE_GLOBAL_STATIC,
                              .experts = p->loaded,
                              .expert_count = count,
                              .local_index = local_index};
    if (mm_transform_nvfp4_weights_for_mega_moe(&p->machine, &layer, false, &weights, &loss) ||
        mm_mega_moe_open(&p->machine, &shape, &weights, local_index, options->scratch ? options->scratch : &p->scratch,
                         &p->moe))
        fail_msg("%s", megamoe_error_message());
}

void layer_close(struct layer_problem *p) {
    mm_mega_moe_close(p->moe);
    mm_sm100_scratch_free(&p->machine, &p->scratch);
    for (uint32_t i = 0; i < p->options.experts; i++) {
        const mm_matrix *const all[] = {&p->experts[i].gate, &p->experts[i].up, &p->experts[i].down};
        for (int m = 0; m < 3; m++) {
            free((void *)all[m]->codes);
            free((void *)all[m]->scales);
            free((void *)all[m]->bias);
        }
    }
}

/* ---- batch ---- */

/* Integers up to 63 in magnitude; else any value. Blocks of 16 have maxima that differ, none of them tiny. */
static uint16_t make_value(const struct layer_problem_options *o, uint32_t *random) {
    uint32_t r = next_random(random);
    double value = (double)(r % 127) - 63;
    return bf16_nearest(o->inexact ? value * 0.173 : value);
}

void layer_batch_open(const struct layer_problem *p, struct layer_batch *b, uint32_t token_count, uint32_t salt) {
    const struct layer_problem_options *o = &p->options;
    assert_true(token_count <= LAYER_TOKENS_MAX && o->slots <= LAYER_SLOTS_MAX);
    b->token_count = token_count;
    b->shared = NULL;
    b->hidden = filled((size_t)token_count * o->hidden * 2);
    for (uint32_t t = 0; t < token_count; t++) {
        uint32_t random = 1000 * salt + t, first = next_random(&random) % o->experts;
        for (uint32_t i = 0; i < o->hidden; i++) b->hidden[(size_t)t * o->hidden + i] = make_value(o, &random);
        for (uint32_t k = 0; k < o->slots; k++) {
            b->ids[t * o->slots + k] = (int32_t)((first + k * (1 + t % 2)) % o->experts);
            b->weights[t * o->slots + k] = 0.05f + 0.01f * (float)(next_random(&random) % 90);
        }
    }
}

void layer_batch_close(struct layer_batch *b) {
    free(b->hidden);
    free(b->shared);
}

void layer_result_close(struct layer_result *r) {
    free(r->output);
    free(r->partials);
    free(r->l1);
    free(r->l2);
}

/* ---- run ---- */

static void *upload(struct layer_problem *p, const void *data, size_t bytes, const char *name) {
    void *memory = p->machine.alloc(p->machine.context, bytes + 16, name);
    assert_non_null(memory);
    return data ? memcpy(memory, data, bytes) : memory;
}

/* A copy, in the order of the pairs, of rows that lie by pair, or by the row that a pair has. */
static void *read_rows(const struct layer_problem *p, size_t pairs, const void *rows, size_t row_bytes, bool by_pair) {
    uint8_t *copy = filled(pairs * row_bytes);
    for (size_t pair = 0; pair < pairs; pair++) {
        int32_t row = p->moe->scratch.pair_row[pair];
        memset(copy + pair * row_bytes, 0, row_bytes);
        if (row >= 0)
            memcpy(copy + pair * row_bytes, (const uint8_t *)rows + (by_pair ? pair : (size_t)row) * row_bytes,
                   row_bytes);
    }
    return copy;
}

static void read_result(const struct layer_problem *p, const struct layer_batch *b, const struct mm_mega_moe_batch *d,
                        const float *l2, struct layer_result *r) {
    size_t hidden = p->options.hidden, pairs = (size_t)b->token_count * p->options.slots;
    r->output = filled(b->token_count * hidden * 2);
    memcpy(r->output, d->output, b->token_count * hidden * 2);
    r->counts = *p->moe->scratch.counts;
    memcpy(r->expert_tokens, p->moe->scratch.expert_tokens, p->options.experts * sizeof *r->expert_tokens);
    r->partials = read_rows(p, pairs, p->moe->scratch.partials, hidden * sizeof *r->partials, true);
    r->l1 = read_rows(p, pairs, d->l1, 2 * p->options.intermediate * sizeof *r->l1, false);
    r->l2 = read_rows(p, pairs, l2, hidden * sizeof *r->l2, true);
}

/* As BF16, or as F32 values that are not BF16 and round to the same. */
static void *upload_hidden(struct layer_problem *p, const struct layer_batch *b) {
    size_t values = (size_t)b->token_count * p->options.hidden;
    if (!p->options.hidden_f32) return upload(p, b->hidden, values * 2, "hidden");
    float *wide = upload(p, NULL, values * sizeof *wide, "hidden");
    for (size_t i = 0; i < values; i++) wide[i] = bf16_value(b->hidden[i]) * (i % 2 ? 0x1.004p0f : 0x1.ffcp-1f);
    return wide;
}

/* Counters begin at zero, everything else as the run before left it. */
static void forget_counts(struct layer_problem *p) {
    *p->moe->scratch.counts = (struct mm_mega_moe_counts){0};
    memset(p->moe->scratch.expert_tokens, 0, p->options.experts * sizeof(uint64_t));
}

/* Rows are sorted by expert and, within one, in the order of the batch. */
static void expect_sorted(const struct layer_problem *p) {
    const struct mm_mega_moe_scratch *c = &p->moe->scratch;
    int32_t row = 0;
    for (uint32_t group = 0; group < p->moe->weights.up.groups; group++)
        for (int32_t first = row; row < c->ends[group]; row++)
            assert_true(row == first || c->row_pair[row] > c->row_pair[row - 1]);
}

void layer_run(struct layer_problem *p, const struct layer_batch *b, uint64_t seed, struct layer_result *r) {
    size_t hidden = p->options.hidden, pairs = (size_t)b->token_count * p->options.slots;
    struct mm_mega_moe_batch d = {.token_count = b->token_count, .hidden_f32 = p->options.hidden_f32};
    d.hidden = upload_hidden(p, b);
    d.expert_ids = upload(p, b->ids, pairs * sizeof *b->ids, "ids");
    d.expert_weights = upload(p, b->weights, pairs * sizeof *b->weights, "weights");
    if (b->shared) d.shared = upload(p, b->shared, b->token_count * hidden * sizeof *b->shared, "shared");
    d.output = upload(p, NULL, b->token_count * hidden * 2, "output");
    d.l1 = upload(p, NULL, pairs * 2 * p->options.intermediate * sizeof *d.l1, "l1");
    float *l2 = upload(p, NULL, pairs * hidden * sizeof *l2, "l2");
    p->state.seed = seed;
    forget_counts(p);
    if (mm_nvfp4_mega_moe_full(p->moe, &d, NULL) || mm_nvfp4_mega_moe_l2(p->moe, &d, l2, true, NULL) ||
        mm_mega_moe_check(p->moe))
        fail_msg("seed %llu, %u tokens: %s", (unsigned long long)seed, b->token_count, megamoe_error_message());
    expect_sorted(p);
    read_result(p, b, &d, l2, r);
    const void *const memory[] = {d.hidden, d.expert_ids, d.expert_weights, d.shared, d.output, d.l1, l2};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        p->machine.release(p->machine.context, (void *)memory[i]);
}

/* ---- what must come out ---- */

/* One vector under NVFP4: values without the global scale. docs/numerics.md, "Activations". Returns how many blocks
 * were clipped. */
static uint64_t quantize(const float *values, uint32_t count, float global, double *quantized) {
    uint64_t clipped = 0;
    for (uint32_t block = 0; block < count; block += 16) {
        float amax = 0;
        for (uint32_t i = block; i < block + 16; i++) amax = fmaxf(amax, fabsf(values[i]));
        clipped += (double)(amax / 6.0f / global) > 448 * (1 + 0x1p-21);
        double scale = e4m3_value(e4m3_nearest(fmax((double)(amax / 6.0f / global), 0x1p-9)));
        for (uint32_t i = block; i < block + 16; i++)
            quantized[i] = scale * e2m1_value(e2m1_nearest((double)(values[i] / ((float)scale * global))));
    }
    return clipped;
}

static double product(const mm_matrix *m, uint32_t row, const double *x) {
    double sum = 0;
    for (uint32_t i = 0; i < m->columns; i++) {
        unsigned byte = m->codes[row * m->row_bytes + i / 2], code = byte >> i % 2 * 4 & 15;
        sum += x[i] * e2m1_value(code) * e4m3_value(m->scales[row * m->scale_row_bytes + i / 16]);
    }
    return sum;
}

/* p of one pair, as it is stored; returns how many blocks of h were clipped. */
static uint64_t expected_partial(const struct layer_problem *p, const mm_expert *e, const double *x, float input_global,
                                 float weight, uint16_t *partial) {
    const struct layer_problem_options *o = &p->options;
    float *h = filled(o->intermediate * sizeof *h);
    double *quantized = filled(o->intermediate * sizeof *quantized);
    for (uint32_t i = 0; i < o->intermediate; i++) {
        float up = (float)product(&e->up, i, x) * (input_global * e->up.global);
        float r = fmaxf(up + bias_of(&e->up, i), 0);
        h[i] = r * r * (o->weight_before ? weight : 1.0f);
    }
    uint64_t clipped = quantize(h, o->intermediate, e->intermediate_global, quantized);
    for (uint32_t i = 0; i < o->hidden; i++) {
        float sum = (float)product(&e->down, i, quantized) * (e->intermediate_global * e->down.global);
        partial[i] = bf16_nearest((double)(sum + bias_of(&e->down, i)));
    }
    free(h);
    free(quantized);
    return clipped;
}

static float stage(const struct layer_problem *p, const uint16_t *hidden, double *x, uint64_t *clipped) {
    uint32_t count = p->options.hidden;
    float *values = filled(count * sizeof *values), amax = 0, global = 0.5f;
    for (uint32_t i = 0; i < count; i++) {
        values[i] = bf16_value(hidden[i]);
        amax = fmaxf(amax, fabsf(values[i]));
    }
    if (p->options.token_global) global = amax > 0 ? amax / 2688.0f : 1.0f;
    *clipped += quantize(values, count, global, x);
    free(values);
    return global;
}

/* What a run must have counted. */
struct expected_counts {
    struct mm_mega_moe_counts counts;
    uint64_t expert_tokens[LAYER_EXPERTS_MAX];
};

static void expect_token(const struct layer_problem *p, const struct layer_batch *b, const struct layer_result *r,
                         uint32_t t, struct expected_counts *counted) {
    const struct layer_problem_options *o = &p->options;
    double *x = filled(o->hidden * sizeof *x);
    struct mm_mega_moe_counts *c = &counted->counts;
    float global = stage(p, b->hidden + (size_t)t * o->hidden, x, &c->saturated_blocks),
          *y = calloc(o->hidden, sizeof *y);
    uint16_t *partial = filled(o->hidden * sizeof *partial);
    assert_non_null(y);
    for (uint32_t k = 0; k < o->slots; k++) {
        uint32_t pair = t * o->slots + k;
        int32_t id = b->ids[pair];
        const uint16_t *got = r->partials + (size_t)pair * o->hidden;
        c->skipped_slots += id == -1;
        c->bad_slots += id < -1 || id >= (int32_t)o->experts;
        if (id < 0 || (uint32_t)id >= o->experts) continue;
        counted->expert_tokens[id]++;
        c->saturated_blocks += expected_partial(p, &p->experts[id], x, global, b->weights[pair], partial);
        for (uint32_t i = 0; i < o->hidden; i++) {
            if (bf16_value(got[i]) != bf16_value(partial[i]))
                fail_msg("token %u slot %u feature %u of %u tokens is %g and not %g", t, k, i, b->token_count,
                         (double)bf16_value(got[i]), (double)bf16_value(partial[i]));
            y[i] += (o->weight_before ? 1.0f : b->weights[pair]) * bf16_value(partial[i]);
        }
    }
    for (uint32_t i = 0; i < o->hidden; i++) {
        if (b->shared) y[i] += b->shared[(size_t)t * o->hidden + i];
        assert_true(bf16_value(r->output[(size_t)t * o->hidden + i]) == bf16_value(bf16_nearest((double)y[i])));
    }
    free(x);
    free(y);
    free(partial);
}

void layer_expect(const struct layer_problem *p, const struct layer_batch *b, const struct layer_result *r) {
    assert_true(!p->options.gated && !p->options.inexact && p->options.step == 0);
    struct expected_counts counted = {0};
    for (uint32_t t = 0; t < b->token_count; t++) expect_token(p, b, r, t, &counted);
    assert_int_equal(r->counts.skipped_slots, counted.counts.skipped_slots);
    assert_int_equal(r->counts.bad_slots, counted.counts.bad_slots);
    assert_int_equal(r->counts.saturated_blocks, counted.counts.saturated_blocks);
    assert_int_equal(r->counts.nonfinite_blocks, 0);
    for (uint32_t i = 0; i < p->options.experts; i++) assert_int_equal(r->expert_tokens[i], counted.expert_tokens[i]);
}
