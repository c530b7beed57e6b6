/*
 * What lies in scratch before a run, and in the padding of operands, cannot reach a result: a layer on the functional
 * model, run again and again over memory filled with garbage, with NaN scales, with the leftovers of another batch,
 * must give the same bits. Scales in scratch must be scales (their highest bit is 0), which opening sees to: the
 * model's memory begins as 0xAA, and the model refuses to multiply with that.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "backend/sm100/mega_moe.h"
#include "model_machine.h"

enum { HIDDEN = 80, INTER = 112, EXPERTS = 4, SLOTS = 2, TOKENS = 130, SMALL_BATCH = 21 };

static uint32_t random_state = 7;

static uint8_t random_byte(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (uint8_t)(random_state >> 24);
}

/* ---- a layer: the sizes are no multiple of a block of scales (64), of a stripe (128) or of 32 codes ---- */

static uint8_t codes[EXPERTS][3][HIDDEN * INTER / 2], scales[EXPERTS][3][HIDDEN * INTER / 16];
static mm_expert experts[EXPERTS];
static const int32_t local_index[EXPERTS] = {0, 1, 2, 3};

static mm_matrix make_matrix(uint32_t expert, uint32_t which, uint32_t rows, uint32_t columns) {
    for (size_t i = 0; i < sizeof codes[0][0]; i++) codes[expert][which][i] = random_byte();
    for (size_t i = 0; i < sizeof scales[0][0]; i++) scales[expert][which][i] = (uint8_t)(0x28 + random_byte() % 24);
    return (mm_matrix){.codes = codes[expert][which],
                       .scales = scales[expert][which],
                       .row_bytes = columns / 2,
                       .scale_row_bytes = columns / 16,
                       .rows = rows,
                       .columns = columns,
                       .format = MM_NVFP4,
                       .scale_dtype = MEGAMOE_E4M3,
                       .global = 0.01f * (float)(1 + expert + which)};
}

static mm_layer_weights make_layer(void) {
    for (uint32_t e = 0; e < EXPERTS; e++) {
        experts[e].gate = make_matrix(e, 0, INTER, HIDDEN);
        experts[e].up = make_matrix(e, 1, INTER, HIDDEN);
        experts[e].down = make_matrix(e, 2, HIDDEN, INTER);
    }
    return (mm_layer_weights){.shape = {.expert_count = EXPERTS},
                              .intermediate_mode = MEGAMOE_GLOBAL_UNIT,
                              .experts = experts,
                              .expert_count = EXPERTS,
                              .local_index = local_index};
}

/* ---- the layer on the model ---- */

static struct model_state model;
static struct sm100_machine machine;
static struct sm100_scratch scratch;
static struct mm_mega_moe *moe;
static struct mm_mega_moe_batch batch;
static uint16_t *hidden, *output;
static int32_t *ids;
static float *weights;

static void open_layer(bool weight_before) {
    struct mm_mega_moe_shape shape = {.hidden = HIDDEN,
                                      .intermediate = INTER,
                                      .expert_count = EXPERTS,
                                      .slots = SLOTS,
                                      .max_tokens = TOKENS,
                                      .swiglu = {1.0f, 0.0f, INFINITY, 0},
                                      .routing_weight_before = weight_before,
                                      .timeout_ns = 1000000000};
    struct mm_mega_moe_weights operands;
    struct mm_mega_moe_loss loss;
    mm_layer_weights layer = make_layer();
    machine = model_machine(&model, 4);
    assert_int_equal(mm_transform_nvfp4_weights_for_mega_moe(&machine, &layer, false, &operands, &loss), MEGAMOE_OK);
    assert_int_equal(mm_mega_moe_open(&machine, &shape, &operands, local_index, &scratch, &moe), MEGAMOE_OK);
    hidden = machine.alloc(machine.context, TOKENS * HIDDEN * sizeof *hidden, "hidden");
    output = machine.alloc(machine.context, TOKENS * HIDDEN * sizeof *output, "output");
    ids = machine.alloc(machine.context, TOKENS * SLOTS * sizeof *ids, "ids");
    weights = machine.alloc(machine.context, TOKENS * SLOTS * sizeof *weights, "weights");
    batch =
        (struct mm_mega_moe_batch){.hidden = hidden, .expert_ids = ids, .expert_weights = weights, .output = output};
}

static void close_layer(void) {
    mm_mega_moe_close(moe);
    mm_sm100_scratch_free(&machine, &scratch);
    void *const memory[] = {hidden, output, ids, weights};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) machine.release(machine.context, memory[i]);
}

/* One expert has most rows, one has none; some slots are skipped. */
static void fill_batch(uint32_t tokens, uint32_t seed) {
    random_state = seed;
    batch.token_count = tokens;
    for (size_t i = 0; i < (size_t)tokens * HIDDEN; i++)
        hidden[i] = (uint16_t)(0x3F00 | random_byte() | (random_byte() & 1) << 15); /* 0.5 .. 2, both signs */
    for (size_t i = 0; i < (size_t)tokens * SLOTS; i++) {
        ids[i] = i % 2 ? 1 + random_byte() % 2 : random_byte() % 8 ? 0 : -1;
        weights[i] = 0.25f + (float)random_byte() / 256.0f;
    }
}

/* Everything that a run reads and another run, or nobody, wrote; not what counts across runs. */
static void poison_scratch(int scale) {
    const struct mm_mega_moe_scratch *c = &moe->scratch;
    const size_t rows = TOKENS * SLOTS;
    const uint32_t scale_rows = sm100_stripes_max(TOKENS * SLOTS, EXPERTS) * SM100_STRIPE_ROWS;
    memset(c->ends, 0xAA, EXPERTS * sizeof *c->ends);
    memset(c->pair_row, 0xAA, rows * sizeof *c->pair_row);
    memset(c->row_pair, 0xAA, rows * sizeof *c->row_pair);
    memset(c->row_scale_row, 0xAA, rows * sizeof *c->row_scale_row);
    memset(c->row_weights, 0xFF, rows * sizeof *c->row_weights); /* NaN */
    memset(c->row_globals, 0xFF, rows * sizeof *c->row_globals);
    memset(c->x_codes, 0xAA, rows * sm100_code_row_bytes(HIDDEN));
    memset(c->h_codes, 0xAA, rows * sm100_code_row_bytes(INTER));
    memset(c->partials, 0xFF, rows * HIDDEN * sizeof *c->partials);
    memset(c->x_scales, scale, sm100_scale_bytes(scale_rows, HIDDEN));
    memset(c->h_scales, scale, sm100_scale_bytes(scale_rows, INTER));
}

/* The padding of weights: bytes behind a row's codes, and the scales of rows that only fill a stripe. */
static void poison_weights(const struct sm100_weights *w, int scale) {
    uint32_t pitch = sm100_code_row_bytes(w->columns), blocks = sm100_blocks_along_k(w->columns);
    for (size_t row = 0; row < (size_t)w->groups * w->rows; row++)
        memset(w->codes + row * pitch + w->columns / 2, 0xAA, pitch - w->columns / 2);
    for (uint32_t g = 0; g < w->groups; g++)
        for (uint32_t row = w->rows; row < sm100_stripes(w->rows) * SM100_STRIPE_ROWS; row++)
            for (uint32_t group = 0; group < blocks * SM100_BLOCK_GROUPS; group++)
                w->scales[g * sm100_scale_bytes(w->rows, w->columns) + sm100_scale_offset(row, group, blocks)] =
                    (uint8_t)scale;
}

static void run_batch(uint16_t *result) {
    memset(output, 0xAA, TOKENS * HIDDEN * sizeof *output);
    assert_int_equal(mm_nvfp4_mega_moe_full(moe, &batch, NULL), MEGAMOE_OK);
    assert_int_equal(mm_mega_moe_check(moe), MEGAMOE_OK);
    memcpy(result, output, TOKENS * HIDDEN * sizeof *result);
}

static void check_poisons(uint32_t tokens, bool weight_before) {
    static uint16_t want[TOKENS * HIDDEN], got[TOKENS * HIDDEN];
    static const int poisons[] = {0x7F, 0x7E, 0x2A, 0x00}; /* scales: NaN, the largest, an ordinary one, zero */
    open_layer(weight_before);
    fill_batch(tokens, 11);
    run_batch(want);
    uint32_t nonzero = 0;
    for (size_t i = 0; i < (size_t)tokens * HIDDEN; i++) {
        assert_int_not_equal(want[i] & 0x7F80, 0x7F80); /* finite */
        nonzero += (want[i] & 0x7FFF) != 0;
    }
    assert_true(nonzero > tokens * HIDDEN / 2);
    for (size_t i = 0; i < sizeof poisons / sizeof *poisons; i++) {
        poison_scratch(poisons[i]);
        poison_weights(&moe->weights.gate, poisons[i]);
        poison_weights(&moe->weights.up, poisons[i]);
        poison_weights(&moe->weights.down, poisons[i]);
        run_batch(got);
        assert_memory_equal(got, want, sizeof got);
    }
    fill_batch(TOKENS, 12); /* the leftovers of a larger batch */
    run_batch(got);
    fill_batch(tokens, 11);
    run_batch(got);
    assert_memory_equal(got, want, sizeof got);
    close_layer();
}

static void small_tiles(void **state) {
    (void)state;
    check_poisons(1, false);
    check_poisons(SMALL_BATCH, false);
    check_poisons(SMALL_BATCH, true);
}

/* More than 64 rows for an expert on average: pairs of CTAs. */
static void large_tiles(void **state) {
    (void)state;
    assert_true(TOKENS * SLOTS / EXPERTS > 64);
    check_poisons(TOKENS, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(small_tiles), cmocka_unit_test(large_tiles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
