/*
 * Whole layers on the functional model: exact on integer-valued data under many schedules, and the same bits however
 * the layer is launched, which is what docs/numerics.md promises under "Determinism".
 *
 * The model adds the last four terms of an instruction in an order that its seed chooses, because the manual does not
 * say which. So where sums are rounded, two runs are compared under one seed: all that differs is the launch.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "layer_problem.h"

/* Sizes that are multiples of 16 and of nothing larger; 12 experts of 4 slots each. */
static const struct layer_problem_options base = {
    .hidden = 208, .intermediate = 144, .experts = 12, .slots = 4, .multiprocessors = 4};

/* `count` rows of tokens: token t of one result stands at place[t] of the other (NULL: at t). Returns how many of
 * their bytes differ, and fails at the first if `what` says what the two should have in common. */
static size_t compare_rows(const void *a, const void *b, size_t row_bytes, const uint32_t *place, uint32_t count,
                           const char *what) {
    size_t differ = 0;
    for (uint32_t t = 0; t < count; t++)
        for (size_t i = 0; i < row_bytes; i++) {
            const uint8_t *x = (const uint8_t *)a + (place ? place[t] : t) * row_bytes, *y = (const uint8_t *)b;
            if (x[i] == y[t * row_bytes + i]) continue;
            if (what) fail_msg("%s: token %u of %u differs at byte %zu of %zu", what, t, count, i, row_bytes);
            differ++;
        }
    return differ;
}

static size_t compare(const struct layer_problem_options *o, const struct layer_result *a, const struct layer_result *b,
                      const uint32_t *place, uint32_t count, const char *what) {
    size_t hidden = o->hidden, pairs = o->slots;
    return compare_rows(a->l1, b->l1, pairs * 2 * o->intermediate * sizeof *a->l1, place, count, what) +
           compare_rows(a->l2, b->l2, pairs * hidden * sizeof *a->l2, place, count, what) +
           compare_rows(a->partials, b->partials, pairs * hidden * sizeof *a->partials, place, count, what) +
           compare_rows(a->output, b->output, hidden * sizeof *a->output, place, count, what);
}

/* ---- exact, whatever the schedule ---- */

/* What a router may leave: all on one expert, experts without a token, ids that are not there; and a shared expert,
 * and a token too large for the global scale. */
static void distort(struct layer_batch *b, const struct layer_problem_options *o, uint32_t kind) {
    uint32_t pairs = b->token_count * o->slots;
    for (uint32_t i = 0; i < pairs; i++) {
        if (kind == 1 && i % o->slots == 0) b->ids[i] = 5 % (int32_t)o->experts;
        if (kind == 1 && i % o->slots) b->ids[i] = -1;
        if (kind == 2) b->ids[i] = (3 + (int32_t)(i % o->slots) * 2) % (int32_t)o->experts;
        if (kind == 3 && i % 7 == 3) b->ids[i] = i % 2 ? -1 : 1000;
    }
    if (kind != 3) return;
    for (uint32_t i = 0; i < o->hidden; i++) /* the first token times 64, in the exponent */
        b->hidden[i] = (uint16_t)(b->hidden[i] + (b->hidden[i] & 0x7FFF ? 6 << 7 : 0));
    b->shared = malloc((size_t)b->token_count * o->hidden * sizeof *b->shared);
    assert_non_null(b->shared);
    for (uint32_t i = 0; i < b->token_count * o->hidden; i++) b->shared[i] = 0.37f * (float)(i % 101) - 11.0f;
}

/* Returns how many blocks were clipped. */
static uint64_t exact_run(struct layer_problem *p, uint32_t tokens, uint32_t kind, uint64_t seed) {
    struct layer_batch *b = malloc(sizeof *b);
    struct layer_result r;
    assert_non_null(b);
    layer_batch_open(p, b, tokens, (uint32_t)seed);
    distort(b, &p->options, kind);
    layer_run(p, b, seed, &r);
    layer_expect(p, b, &r);
    layer_result_close(&r);
    layer_batch_close(b);
    free(b);
    return r.counts.saturated_blocks;
}

/* A layer is run again and again, so that each run finds what the one before left in the scratch. */
static void exact_under_every_schedule(void **state) {
    static const uint32_t tokens[] = {1, 5, 70, 40, 2, 17, 210, 9};
    static struct layer_problem p;
    uint64_t clipped = 0;
    (void)state;
    for (uint32_t layer = 0; layer < 6; layer++) {
        struct layer_problem_options o = base;
        if (layer % 2) o.experts = 4; /* so that some batches take the large tiles */
        o.weight_before = layer == 1;
        o.token_global = layer == 2;
        o.hidden_f32 = layer == 3;
        o.biased = layer == 4;
        o.multiprocessors = (const uint32_t[]){4, 1, 7, 2, 3, 16}[layer];
        if (layer == 4) o.hidden = 80, o.intermediate = 272;
        if (layer == 5) o.experts = 1, o.slots = 1;
        layer_open(&p, &o);
        for (uint32_t i = 0; i < 8; i++)
            clipped += exact_run(&p, tokens[i], o.experts == 1 ? 0 : (i + layer) % 4, 6 * (8 * layer + i) + 1);
        layer_close(&p);
    }
    assert_true(clipped > 0);
}

/* ---- the same bits ---- */

/* The GEMMs have a worker per multiprocessor of the budget at most, the others eight CTAs. */
static void expect_within_budget(const struct layer_problem *p) {
    const struct layer_problem_options *o = &p->options;
    uint32_t most = o->sm_budget ? o->sm_budget : o->multiprocessors;
    for (uint32_t kernel = 0; kernel < SM100_KERNEL_COUNT; kernel++)
        if (kernel != SM100_KERNEL_PLAN)
            assert_true(p->state.grid[kernel] <= (kernel < SM100_KERNEL_PLAN ? most : 8 * most));
    assert_true(p->state.grid[SM100_KERNEL_COMBINE] > 0);
}

static void run_with(const struct layer_problem_options *o, const struct layer_batch *b, uint64_t seed,
                     struct layer_result *r) {
    static struct layer_problem p;
    layer_open(&p, o);
    layer_run(&p, b, seed, r);
    expect_within_budget(&p);
    layer_close(&p);
}

static struct layer_problem_options rounded(bool gated) {
    struct layer_problem_options o = base;
    o.inexact = true;
    o.gated = gated;
    return o;
}

static void batch_for(const struct layer_problem_options *o, struct layer_batch *b, uint32_t tokens) {
    struct layer_problem shape = {.options = *o};
    layer_batch_open(&shape, b, tokens, 9);
}

/* The data can tell: with the additions in another order it does not give the same bits. */
static void expect_order_matters(const struct layer_problem_options *o, const struct layer_batch *b, uint64_t seed,
                                 const struct layer_result *first) {
    size_t differ = 0;
    for (uint64_t other = seed + 1; other < seed + 6; other++) {
        struct layer_result r;
        run_with(o, b, other, &r);
        differ += compare(o, &r, first, NULL, b->token_count, NULL);
        layer_result_close(&r);
    }
    assert_true(differ > 0);
}

/* Few multiprocessors walk many tiles each, on 148 every tile has a worker of its own; 1 has no pair of CTAs, and
 * takes other instances than the rest. */
static void any_number_of_multiprocessors(void **state) {
    static const uint32_t counts[] = {1, 2, 4, 7, 148}, budgets[] = {1, 2, 3, 5};
    static struct layer_batch b;
    (void)state;
    for (uint32_t round = 0; round < 2; round++) {
        struct layer_problem_options o = rounded(round == 0);
        struct layer_result first, again;
        uint32_t tokens = round ? 30 : 216; /* small tiles, and large ones where there are pairs */
        batch_for(&o, &b, tokens);
        run_with(&o, &b, 3 + round, &first);
        for (uint32_t i = 0; i < 9; i++) {
            o.multiprocessors = i < 5 ? counts[i] : 8;
            o.sm_budget = i < 5 ? 0 : budgets[i - 5];
            run_with(&o, &b, 3 + round, &again);
            compare(&o, &again, &first, NULL, tokens, i < 5 ? "multiprocessors" : "budget");
            layer_result_close(&again);
        }
        if (round) expect_order_matters(&o, &b, 3 + round, &first);
        layer_result_close(&first);
        layer_batch_close(&b);
    }
}

static void move_token(const struct layer_problem_options *o, const struct layer_batch *from, uint32_t t,
                       struct layer_batch *to, uint32_t place) {
    memcpy(to->hidden + (size_t)place * o->hidden, from->hidden + (size_t)t * o->hidden, o->hidden * 2);
    memcpy(to->ids + place * o->slots, from->ids + t * o->slots, o->slots * sizeof *to->ids);
    memcpy(to->weights + place * o->slots, from->weights + t * o->slots, o->slots * sizeof *to->weights);
}

/* The same tokens in another order. */
static void any_position(void **state) {
    static struct layer_batch a, b;
    struct layer_problem_options o = rounded(true);
    struct layer_result ra, rb;
    uint32_t place[130], count = 130;
    (void)state;
    batch_for(&o, &a, count);
    batch_for(&o, &b, count);
    for (uint32_t t = 0; t < count; t++) {
        place[t] = (t * 37 + 11) % count;
        move_token(&o, &b, t, &a, place[t]);
    }
    run_with(&o, &a, 6, &ra);
    run_with(&o, &b, 6, &rb);
    compare(&o, &ra, &rb, place, count, "position");
    layer_result_close(&ra);
    layer_result_close(&rb);
    layer_batch_close(&a);
    layer_batch_close(&b);
}

/* The same 7 tokens alone and among others: in small tiles, and where the batch has grown to the large ones. All
 * instances add along K in the same order, so that here the bits are more alike than "Determinism" promises. */
static void any_batch(void **state) {
    static const uint32_t sizes[] = {7, 8, 31, 33, 129, 216, 400};
    static struct layer_batch few, many;
    struct layer_problem_options o = rounded(true);
    struct layer_result alone, among;
    uint32_t place[7];
    (void)state;
    batch_for(&o, &few, 7);
    run_with(&o, &few, 8, &alone);
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct layer_problem shape = {.options = o};
        layer_batch_open(&shape, &many, sizes[i], 50 + i);
        for (uint32_t t = 0; t < 7; t++) {
            place[t] = t * sizes[i] / 7;
            move_token(&o, &few, t, &many, place[t]);
        }
        run_with(&o, &many, 8, &among);
        compare(&o, &among, &alone, place, 7, "batch");
        layer_result_close(&among);
        layer_batch_close(&many);
    }
    layer_result_close(&alone);
    layer_batch_close(&few);
}

/* One rank's share of a batch: rows of L2 and counts are those of a rank with all experts; others' slots are skipped.
 */
static void expect_share(const struct layer_problem_options *o, const struct layer_batch *b, uint32_t rank,
                         uint32_t ranks, const struct layer_result *own, const struct layer_result *whole) {
    uint64_t skipped = 0;
    for (uint32_t pair = 0; pair < b->token_count * o->slots; pair++) {
        size_t at = (size_t)pair * o->hidden;
        if ((uint32_t)b->ids[pair] % ranks == rank)
            compare_rows(own->l2 + at, whole->l2 + at, o->hidden * sizeof *own->l2, NULL, 1, "rank");
        else
            skipped++;
    }
    assert_int_equal(own->counts.skipped_slots, skipped);
    for (uint32_t id = 0; id < o->experts; id++)
        assert_int_equal(own->expert_tokens[id], id % ranks == rank ? whole->expert_tokens[id] : 0);
}

/* Experts spread over two and three ranks. */
static void any_placement(void **state) {
    static struct layer_batch b;
    (void)state;
    for (uint32_t ranks = 2; ranks <= 3; ranks++) {
        struct layer_problem_options o = rounded(true), part;
        struct layer_result whole, own;
        batch_for(&o, &b, 100);
        run_with(&o, &b, 11, &whole);
        for (uint32_t rank = 0; rank < ranks; rank++) {
            part = o;
            part.first = rank;
            part.step = ranks;
            run_with(&part, &b, 11, &own);
            expect_share(&o, &b, rank, ranks, &own, &whole);
            layer_result_close(&own);
        }
        layer_result_close(&whole);
        layer_batch_close(&b);
    }
}

/* ---- layers of one device ---- */

/* They share what a batch leaves between its launches, and no bits: a small layer before and after a larger one, which
 * makes the buffers grow. A layer like another wants no more. */
static void layers_share_scratch(void **state) {
    static struct layer_problem small, large, another;
    static struct layer_batch b, c;
    struct sm100_scratch scratch = {0};
    struct layer_problem_options o = rounded(true), p = rounded(true);
    struct layer_result before, between, after;
    (void)state;
    p.hidden += 112;
    p.intermediate += 144;
    p.experts += 3;
    o.scratch = p.scratch = &scratch;
    layer_open(&small, &o);
    layer_batch_open(&small, &b, 216, 9);
    layer_run(&small, &b, 31, &before);
    layer_open(&large, &p);
    layer_batch_open(&large, &c, 400, 10);
    layer_run(&large, &c, 32, &between);
    layer_run(&small, &b, 31, &after);
    compare(&o, &after, &before, NULL, 216, "after another layer");
    assert_true(small.moe->scratch.partials != large.moe->scratch.partials); /* graphs may hold the old address */
    layer_result_close(&after);
    layer_open(&another, &o);
    assert_ptr_equal(another.moe->scratch.partials, large.moe->scratch.partials);
    layer_run(&another, &b, 31, &after);
    compare(&o, &after, &before, NULL, 216, "in another layer's buffers");
    layer_result_close(&before);
    layer_result_close(&between);
    layer_result_close(&after);
    layer_batch_close(&b);
    layer_batch_close(&c);
    layer_close(&small);
    layer_close(&large);
    layer_close(&another);
    mm_sm100_scratch_free(&small.machine, &scratch);
}

/* With batch_invariant one token runs in the instances of a full batch. */
static void one_instance_at_every_size(void **state) {
    static const uint32_t sizes[] = {1, LAYER_TOKENS_MAX};
    static struct layer_problem p;
    static struct layer_batch b;
    struct layer_problem_options o = rounded(true);
    struct layer_result r;
    (void)state;
    o.batch_invariant = true;
    layer_open(&p, &o);
    uint32_t small = model_schedule_count(SM100_KERNEL_L1_SMALL) + model_schedule_count(SM100_KERNEL_L2_SMALL);
    for (uint32_t i = 0; i < 2; i++) {
        layer_batch_open(&p, &b, sizes[i], 9);
        layer_run(&p, &b, 1000000 + 100 * i, &r); /* seeds of no other test */
        layer_result_close(&r);
        layer_batch_close(&b);
    }
    layer_close(&p);
    assert_int_equal(model_schedule_count(SM100_KERNEL_L1_SMALL) + model_schedule_count(SM100_KERNEL_L2_SMALL), small);
}

/* ---- what is not a number, not there, or lost ---- */

/* A NaN or an infinity in one token leaves its scale in padding rows of later batches, and those batches as they were.
 * Every block that cannot be quantized is counted once per token on the way in and once per row in between. */
static void nothing_stays_behind(void **state) {
    static struct layer_problem p;
    static struct layer_batch good, bad;
    struct layer_result before, meanwhile, after;
    (void)state;
    for (uint32_t round = 0; round < 2; round++) {
        struct layer_problem_options o = rounded(true);
        uint32_t tokens = 216, blocks = (tokens / 2) * (1 + o.slots * o.intermediate / 16);
        o.token_global = round == 1;
        layer_open(&p, &o);
        layer_batch_open(&p, &good, 19, 9);
        layer_batch_open(&p, &bad, tokens, 10);
        for (uint32_t t = 0; t < tokens; t += 2)
            bad.hidden[(size_t)t * o.hidden + t % o.hidden] = t % 4 ? 0x7FC0 : 0xFF80; /* NaN, -infinity */
        layer_run(&p, &good, 21, &before);
        layer_run(&p, &bad, 22, &meanwhile);
        for (uint32_t i = 0; i < tokens * o.hidden; i++) { /* NaN in every feature of its token, and nowhere else */
            bool is_nan = (meanwhile.output[i] & 0x7FFF) > 0x7F80;
            assert_int_equal(is_nan, i / o.hidden % 2 == 0);
        }
        assert_int_equal(meanwhile.counts.nonfinite_blocks, blocks);
        for (uint32_t row = 0; row < tokens * o.slots; row++) /* from what is finite in the token */
            assert_true(p.moe->scratch.row_globals[row] > 0 && p.moe->scratch.row_globals[row] < 1);
        layer_run(&p, &good, 21, &after);
        compare(&o, &after, &before, NULL, 19, "after a batch with NaN");
        layer_result_close(&before);
        layer_result_close(&meanwhile);
        layer_result_close(&after);
        layer_batch_close(&good);
        layer_batch_close(&bad);
        layer_close(&p);
    }
}

static void too_many_tokens(void **state) {
    static struct layer_problem p;
    struct mm_mega_moe_batch batch = {.token_count = LAYER_TOKENS_MAX + 1};
    (void)state;
    layer_open(&p, &base);
    assert_int_equal(mm_nvfp4_mega_moe_full(p.moe, &batch, NULL), MEGAMOE_INVALID_ARGUMENT);
    assert_non_null(strstr(megamoe_error_message(), "401 tokens"));
    assert_int_equal(p.state.launches, 0);
    layer_close(&p);
}

/* MXFP4 experts whose scales span too much: all the changed values are counted, and the first such expert is named. */
static void losses_are_reported(void **state) {
    enum { EXPERTS = 4, SIZE = 64 };
    static uint8_t codes[SIZE * SIZE / 2], scales[2][SIZE * SIZE / 32];
    struct model_state model = {0};
    struct sm100_machine machine = model_machine(&model, 4);
    mm_expert experts[EXPERTS] = {0};
    struct mm_mega_moe_weights weights;
    struct mm_mega_moe_loss loss, once;
    int32_t local_index[EXPERTS];
    (void)state;
    memset(codes, 0x11, sizeof codes); /* 0.5 */
    for (uint32_t i = 0; i < sizeof scales[0]; i++) {
        scales[0][i] = (uint8_t)(100 + i % 18);
        scales[1][i] = (uint8_t)(i == 5 ? 90 : 110 + i % 8); /* one block of 32 is below all that NVFP4 has */
    }
    for (uint32_t e = 0; e < EXPERTS; e++) {
        mm_matrix *all[] = {&experts[e].gate, &experts[e].up, &experts[e].down};
        for (uint32_t m = 0; m < 3; m++)
            *all[m] = (mm_matrix){.codes = codes,
                                  .scales = scales[e == 1 || e == 2],
                                  .row_bytes = SIZE / 2,
                                  .scale_row_bytes = SIZE / 32,
                                  .rows = SIZE,
                                  .columns = SIZE,
                                  .format = MM_MXFP4,
                                  .global = 1.0f};
    }
    mm_layer_weights layer = {.shape = {.expert_count = EXPERTS},
                              .intermediate_mode = MEGAMOE_GLOBAL_UNIT,
                              .experts = experts,
                              .expert_count = 2,
                              .local_index = local_index};
    for (uint32_t e = 0; e < EXPERTS; e++) local_index[e] = (int32_t)e;
    assert_int_equal(mm_transform_nvfp4_weights_for_mega_moe(&machine, &layer, false, &weights, &once), MEGAMOE_OK);
    mm_mega_moe_weights_free(&machine, &weights);
    layer.expert_count = EXPERTS;
    assert_int_equal(mm_transform_nvfp4_weights_for_mega_moe(&machine, &layer, false, &weights, &loss), MEGAMOE_OK);
    for (uint32_t e = 0; e < EXPERTS; e++) assert_true(weights.h_globals[e] == 1.0f);
    mm_mega_moe_weights_free(&machine, &weights);
    assert_int_equal(once.values, 3 * 32);
    assert_int_equal(loss.values, 2 * 3 * 32);
    assert_int_equal(loss.expert, 1);
    assert_string_equal(loss.matrix, "gate");
    layer.strict = true;
    assert_int_equal(mm_transform_nvfp4_weights_for_mega_moe(&machine, &layer, false, &weights, &loss),
                     MEGAMOE_UNSUPPORTED_MODEL);
}

/* Last, because it looks at what the tests before it did. */
static void schedules_were_many(void **state) {
    static const struct {
        enum sm100_kernel kernel;
        const char *name;
    } kernels[] = {{SM100_KERNEL_PLAN, "plan"},         {SM100_KERNEL_STAGE, "stage"},
                   {SM100_KERNEL_L1_SMALL, "L1 small"}, {SM100_KERNEL_L1_LARGE, "L1 large"},
                   {SM100_KERNEL_L2_SMALL, "L2 small"}, {SM100_KERNEL_L2_LARGE, "L2 large"},
                   {SM100_KERNEL_COMBINE, "combine"}};
    (void)state;
    printf("test_layer: %u schedules:", model_schedule_count(SM100_KERNEL_COUNT));
    for (uint32_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        printf(" %s %u", kernels[i].name, model_schedule_count(kernels[i].kernel));
    printf("\n");
    assert_true(model_schedule_count(SM100_KERNEL_COUNT) >= 200);
    assert_true(model_schedule_count(SM100_KERNEL_PLAN) >= 40);
    assert_true(model_schedule_count(SM100_KERNEL_STAGE) >= 40);
    assert_true(model_schedule_count(SM100_KERNEL_COMBINE) >= 40);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_under_every_schedule),
        cmocka_unit_test(any_number_of_multiprocessors),
        cmocka_unit_test(any_position),
        cmocka_unit_test(any_batch),
        cmocka_unit_test(any_placement),
        cmocka_unit_test(layers_share_scratch),
        cmocka_unit_test(one_instance_at_every_size),
        cmocka_unit_test(nothing_stays_behind),
        cmocka_unit_test(too_many_tokens),
        cmocka_unit_test(losses_are_reported),
        cmocka_unit_test(schedules_were_many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
