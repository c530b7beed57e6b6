/*
 * The CPU backend against the reference, stage by stage, for every weight format and option; and its
 * promises: bits that depend on neither threads nor position, bad routing counted, nothing allocated while
 * running, experts timed, fork.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/cpu/synthetic.h"
#include "numerics/bf16.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#        define COUNTS_ALLOCATIONS 0
#    endif
#endif
#ifndef COUNTS_ALLOCATIONS
#    define COUNTS_ALLOCATIONS 1
#endif

#if COUNTS_ALLOCATIONS
static unsigned long allocations;
void *__libc_malloc(size_t bytes);
void *malloc(size_t bytes) {
    allocations++;
    return __libc_malloc(bytes);
}
#endif

/* ---- running a backend ---- */

typedef struct rig {
    const mm_backend *backend;
    mm_backend_state *state;
    mm_backend_layer *layer;
} rig;

static rig rig_open(const mm_backend *backend, const mm_layer_weights *weights, uint32_t threads, uint32_t max_tokens,
                    bool invariant) {
    megamoe_device_options options = {
        .struct_size = sizeof options, .threads = threads, .max_tokens = max_tokens, .batch_invariant = invariant};
    megamoe_layer_options layer_options = {.struct_size = sizeof layer_options};
    rig r = {.backend = backend};
    assert_int_equal(backend->open(&options, &r.state), MEGAMOE_OK);
    assert_int_equal(backend->layer_create(r.state, weights, false, &layer_options, &r.layer), MEGAMOE_OK);
    return r;
}

static void rig_close(rig *r) {
    r->backend->layer_close(r->layer);
    r->backend->close(r->state);
}

/* ---- stages in memory ---- */

enum { STAGES = 17 };

static megamoe_stages stages_make(synthetic *owner, const megamoe_shape *s, size_t tokens, uint8_t poison) {
    size_t h = s->hidden, i = s->intermediate, k = s->experts_per_token;
    size_t e = s->expert_count;
    size_t bytes[STAGES] = {4 * k, 4 * k,     h / 2, h / 16, 4,     8 * k * i, 2 * k * i, k * i / 2, k * i / 16,
                            4 * k, 4 * k * h, 4 * h, 2 * h,  4 * e, 8 * k * i, 4 * k * h, 4 * e};
    megamoe_stages m = {.struct_size = sizeof m};
    void **fields[STAGES] = {(void **)&m.expert_ids,
                             (void **)&m.expert_weights,
                             (void **)&m.x_codes,
                             (void **)&m.x_scales,
                             (void **)&m.x_globals,
                             (void **)&m.l1,
                             (void **)&m.h,
                             (void **)&m.h_codes,
                             (void **)&m.h_scales,
                             (void **)&m.h_globals,
                             (void **)&m.l2,
                             (void **)&m.shared,
                             (void **)&m.output,
                             (void **)&m.logits,
                             (void **)&m.l1_magnitude,
                             (void **)&m.l2_magnitude,
                             (void **)&m.logits_magnitude};
    for (int f = 0; f < STAGES; f++) {
        *fields[f] = synthetic_block(owner, bytes[f] * tokens);
        memset(*fields[f], poison, bytes[f] * tokens);
    }
    return m;
}

/* Largest difference relative to the root mean square of the expected values, which must not be all zero. */
static double relative_error(const float *got, const float *expected, size_t count) {
    double worst = 0.0, power = 0.0;
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)got[i] - (double)expected[i]);
        if (!(difference <= worst)) worst = difference;
        power += (double)expected[i] * (double)expected[i];
    }
    assert_true(power > 0.0);
    return worst / sqrt(power / (double)count);
}

static void assert_close(const char *stage, const float *got, const float *expected, size_t count, double bound) {
    double error = relative_error(got, expected, count);
    if (!(error <= bound)) fail_msg("%s: error %g of the rms, allowed %g", stage, error, bound);
}

/* Products are exact, K of them are summed in fp32 in some order, then come scales, bias and a rounding. */
typedef struct sums {
    const char *stage;
    uint32_t k;
    const float *got, *expected, *magnitude; /* magnitude: sum of |a_k W_nk| */
} sums;

static void assert_within(const sums *s, size_t count) {
    double unit = ldexp(1.0, -24), bound = (s->k + 5) * unit / (1.0 - (s->k + 5) * unit);
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)s->got[i] - (double)s->expected[i]);
        double allowed = bound * (double)s->magnitude[i] + 2.0 * unit * fabs((double)s->expected[i]);
        if (!(difference <= allowed))
            fail_msg("%s[%zu]: %g instead of %g, allowed %g", s->stage, i, (double)s->got[i], (double)s->expected[i],
                     allowed);
    }
}

static size_t differing(const void *a, const void *b, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) count += ((const uint8_t *)a)[i] != ((const uint8_t *)b)[i];
    return count;
}

static void assert_few_differ(const char *stage, const void *a, const void *b, size_t bytes) {
    size_t count = differing(a, b, bytes);
    if (count > bytes / 500) fail_msg("%s: %zu of %zu bytes differ", stage, count, bytes);
}

static void assert_outputs_close(const uint16_t *got, const uint16_t *expected, size_t count, double bound) {
    float *a = malloc(count * sizeof *a), *b = malloc(count * sizeof *b);
    for (size_t i = 0; i < count; i++) a[i] = mm_bf16_to_f32(got[i]), b[i] = mm_bf16_to_f32(expected[i]);
    assert_close("output", a, b, count, bound);
    free(a);
    free(b);
}

/* ---- stage by stage ---- */

static void random_routing(synthetic *made, const megamoe_shape *s, uint32_t tokens, int32_t *ids, float *weights) {
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t k = 0; k < s->experts_per_token; k++) {
            ids[t * s->experts_per_token + k] =
                (int32_t)((synthetic_random(made) % s->expert_count + k) % s->expert_count);
            weights[t * s->experts_per_token + k] = 0.1f + 0.2f * (float)(synthetic_random(made) % 10);
        }
}

static void compare_stages(const synthetic_spec *spec, uint32_t tokens) {
    synthetic made;
    synthetic_make(spec, &made);
    const megamoe_shape *s = &made.weights.shape;
    size_t pairs = (size_t)tokens * s->experts_per_token, h = s->hidden, i = s->intermediate;
    megamoe_stages got = stages_make(&made, s, tokens, 0xAA), want = stages_make(&made, s, tokens, 0x55);
    uint16_t *hidden = synthetic_block(&made, tokens * h * 2), *out = synthetic_block(&made, tokens * h * 2);
    int32_t *ids = synthetic_block(&made, pairs * 4);
    float *weights = synthetic_block(&made, pairs * 4);
    uint32_t written = 0, reference_written = 0;
    synthetic_tokens(&made, tokens, s->hidden, spec->whole_numbers, hidden);
    random_routing(&made, s, tokens, ids, weights);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = out,
                           .expert_ids = spec->router_dtype ? NULL : ids,
                           .expert_weights = spec->router_dtype ? NULL : weights};
    rig cpu = rig_open(&mm_backend_cpu, &made.weights, 2, tokens, false);
    rig reference = rig_open(&mm_backend_reference, &made.weights, 1, tokens, false);
    assert_int_equal(cpu.backend->run(cpu.layer, &batch, NULL, &got, &written, NULL), MEGAMOE_OK);
    assert_int_equal(reference.backend->run(reference.layer, &batch, &got, &want, &reference_written, NULL),
                     MEGAMOE_OK);
    assert_int_equal(written, reference_written & (MM_STAGE_LOGITS * 2 - 1)); /* all but the magnitudes */

    assert_memory_equal(got.expert_ids, want.expert_ids, pairs * 4);
    assert_close("weights", got.expert_weights, want.expert_weights, pairs, 2e-6);
    if (written & MM_STAGE_LOGITS)
        assert_within(&(sums){"logits", s->hidden, got.logits, want.logits, want.logits_magnitude},
                      (size_t)tokens * s->expert_count);
    if (written & MM_STAGE_X_CODES) {
        assert_memory_equal(got.x_codes, want.x_codes, tokens * h / 2);
        assert_memory_equal(got.x_scales, want.x_scales, tokens * h / 16);
        assert_memory_equal(got.x_globals, want.x_globals, (size_t)tokens * 4);
    }
    assert_within(&(sums){"l1", s->hidden, got.l1, want.l1, want.l1_magnitude}, pairs * 2 * i);
    if (written & MM_STAGE_H) assert_few_differ("h", got.h, want.h, pairs * i * 2);
    if (written & MM_STAGE_H_CODES) {
        assert_few_differ("h_codes", got.h_codes, want.h_codes, pairs * i / 2);
        assert_few_differ("h_scales", got.h_scales, want.h_scales, pairs * i / 16);
        assert_memory_equal(got.h_globals, want.h_globals, pairs * 4);
    }
    assert_within(&(sums){"l2", s->intermediate, got.l2, want.l2, want.l2_magnitude}, pairs * h);
    if (written & MM_STAGE_SHARED) assert_close("shared", got.shared, want.shared, tokens * h, 5e-3);
    assert_outputs_close(got.output, want.output, tokens * h, 0.02);
    if (spec->whole_numbers) {
        assert_memory_equal(got.l1, want.l1, pairs * 2 * i * 4);
        assert_memory_equal(got.l2, want.l2, pairs * h * 4);
    }
    rig_close(&cpu);
    rig_close(&reference);
    synthetic_free(&made);
}

static const synthetic_spec base = {.hidden = 176, .intermediate = 112, .experts = 5, .slots = 3, .format = MM_NVFP4};

static void formats_match_reference(void **unused) {
    static const mm_format formats[] = {MM_NVFP4, MM_MXFP4, MM_BF16, MM_FP8};
    (void)unused;
    for (size_t f = 0; f < 4; f++)
        for (size_t shared = 0; shared < 5; shared++)
            for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
                synthetic_spec spec = base;
                spec.format = formats[f];
                spec.shared_format = shared ? formats[shared - 1] : 0;
                spec.activations = nvfp4 ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16;
                spec.input_mode = MEGAMOE_GLOBAL_TOKEN;
                spec.intermediate_mode = MEGAMOE_GLOBAL_STATIC;
                spec.fp8_scale_dtype = shared % 2 ? MEGAMOE_F32 : MEGAMOE_E8M0;
                spec.seed = f * 10 + shared;
                if (spec.format == MM_MXFP4 || spec.shared_format == MM_MXFP4)
                    spec.hidden = 160, spec.intermediate = 96;
                compare_stages(&spec, 7);
            }
}

static void options_match_reference(void **unused) {
    (void)unused;
    for (int i = 0; i < 12; i++) {
        synthetic_spec spec = base;
        spec.activations = i % 2 ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16;
        spec.input_mode = (megamoe_global)(MEGAMOE_GLOBAL_STATIC + i / 2 % 3);
        spec.intermediate_mode = i / 2 % 2 ? MEGAMOE_GLOBAL_STATIC : MEGAMOE_GLOBAL_UNIT;
        spec.bias_dtype = i % 3 == 0 ? 0 : i % 3 == 1 ? MEGAMOE_F32 : MEGAMOE_BF16;
        spec.router_dtype = i % 4 < 2 ? (i % 4 == 0 ? MEGAMOE_BF16 : MEGAMOE_F32) : 0;
        spec.weight_before = i % 5 == 1;
        spec.relu2 = i % 6 == 5;
        spec.alpha = i % 2 ? 1.702f : 0.0f;
        spec.beta = i % 2 ? 1.0f : 0.0f;
        spec.limit = i % 3 ? 0.05f : 0.0f;
        spec.skip_expert = (uint32_t)i % 4;
        spec.shared_format = i % 3 == 0 ? MM_FP8 : 0;
        spec.seed = 100 + (uint64_t)i;
        compare_stages(&spec, i == 0 ? 1 : 13);
    }
}

/* Sums of whole numbers below 2^24 are exact in any order, so here every bit must be the reference's. */
static void whole_numbers_are_exact(void **unused) {
    static const mm_format formats[] = {MM_NVFP4, MM_MXFP4, MM_BF16, MM_FP8};
    (void)unused;
    for (size_t f = 0; f < 4; f++) {
        synthetic_spec spec = base;
        spec.hidden = 160;
        spec.intermediate = 96;
        spec.format = formats[f];
        spec.whole_numbers = true;
        spec.alpha = 1e6f; /* the sigmoid is 0 or 1, so h stays a whole number, */
        spec.limit = 3.0f; /* and small */
        compare_stages(&spec, 40);
    }
}

/* ---- promises ---- */

typedef struct scene {
    synthetic made;
    uint32_t tokens;
    uint16_t *hidden, *expected, *output;
    int32_t *ids;
    float *weights;
    megamoe_batch batch;
} scene;

static void scene_make(scene *s, const synthetic_spec *spec, uint32_t tokens) {
    synthetic_make(spec, &s->made);
    size_t h = spec->hidden, pairs = (size_t)tokens * spec->slots;
    s->tokens = tokens;
    s->hidden = synthetic_block(&s->made, tokens * h * 2);
    s->expected = synthetic_block(&s->made, tokens * h * 2);
    s->output = synthetic_block(&s->made, tokens * h * 2);
    s->ids = synthetic_block(&s->made, pairs * 4);
    s->weights = synthetic_block(&s->made, pairs * 4);
    synthetic_tokens(&s->made, tokens, spec->hidden, false, s->hidden);
    random_routing(&s->made, &s->made.weights.shape, tokens, s->ids, s->weights);
    s->batch = (megamoe_batch){.struct_size = sizeof s->batch,
                               .token_count = tokens,
                               .hidden = s->hidden,
                               .hidden_dtype = MEGAMOE_BF16,
                               .output = s->output,
                               .expert_ids = s->ids,
                               .expert_weights = s->weights};
}

static void run_ok(const rig *r, const megamoe_batch *batch) {
    assert_int_equal(r->backend->run(r->layer, batch, NULL, NULL, NULL, NULL), MEGAMOE_OK);
}

static synthetic_spec promise_spec(bool nvfp4) {
    synthetic_spec spec = base;
    spec.shared_format = MM_FP8;
    spec.activations = nvfp4 ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16;
    spec.input_mode = MEGAMOE_GLOBAL_TOKEN;
    spec.intermediate_mode = MEGAMOE_GLOBAL_STATIC;
    spec.seed = 7;
    return spec;
}

/* Large enough for L1 and L2 to ask helpers in: smaller layers run on their caller alone. */
static synthetic_spec large_spec(bool nvfp4) {
    synthetic_spec spec = promise_spec(nvfp4);
    spec.hidden = 656;
    spec.intermediate = 272;
    return spec;
}

static void threads_do_not_change_bits(void **unused) {
    (void)unused;
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
        synthetic_spec spec = large_spec(nvfp4);
        scene s;
        scene_make(&s, &spec, 65);
        for (uint32_t threads = 1; threads < 8; threads += 2) {
            rig r = rig_open(&mm_backend_cpu, &s.made.weights, threads, s.tokens, false);
            memset(s.output, 0xAA, (size_t)s.tokens * spec.hidden * 2);
            run_ok(&r, &s.batch);
            if (threads == 1) memcpy(s.expected, s.output, (size_t)s.tokens * spec.hidden * 2);
            assert_memory_equal(s.output, s.expected, (size_t)s.tokens * spec.hidden * 2);
            rig_close(&r);
        }
        synthetic_free(&s.made);
    }
}

/* The batch reversed: every expert keeps its row count, every token changes its place. */
static void position_does_not_change_bits(void **unused) {
    synthetic_spec spec = promise_spec(true);
    scene s;
    (void)unused;
    scene_make(&s, &spec, 33);
    size_t h = spec.hidden, k = spec.slots;
    uint16_t *reversed = synthetic_block(&s.made, s.tokens * h * 2);
    int32_t *ids = synthetic_block(&s.made, s.tokens * k * 4);
    float *weights = synthetic_block(&s.made, s.tokens * k * 4);
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
    run_ok(&r, &s.batch);
    memcpy(s.expected, s.output, s.tokens * h * 2);
    for (size_t t = 0; t < s.tokens; t++) {
        size_t from = s.tokens - 1 - t;
        memcpy(reversed + t * h, s.hidden + from * h, h * 2);
        memcpy(ids + t * k, s.ids + from * k, k * 4);
        memcpy(weights + t * k, s.weights + from * k, k * 4);
    }
    s.batch.hidden = reversed, s.batch.expert_ids = ids, s.batch.expert_weights = weights;
    run_ok(&r, &s.batch);
    for (size_t t = 0; t < s.tokens; t++)
        assert_memory_equal(s.output + t * h, s.expected + (s.tokens - 1 - t) * h, h * 2);
    rig_close(&r);
    synthetic_free(&s.made);
}

/* batch_invariant: a token alone and the token inside any batch, several chunks long, give the same bits. */
static void invariant_bits_ignore_the_batch(void **unused) {
    (void)unused;
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
        synthetic_spec spec = promise_spec(nvfp4);
        scene s;
        spec.hidden = 96;
        spec.intermediate = 48;
        scene_make(&s, &spec, 2100);
        size_t h = spec.hidden, k = spec.slots;
        static const uint32_t probes[] = {0, 1, 17, 1023, 1024, 1500, 2099}, lengths[] = {1, 2, 5, 16, 64, 257};
        rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, true);
        run_ok(&r, &s.batch);
        memcpy(s.expected, s.output, s.tokens * h * 2);
        for (size_t p = 0; p < sizeof probes / sizeof *probes; p++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                size_t t = probes[p];
                megamoe_batch part = s.batch;
                part.token_count = s.tokens - t < lengths[l] ? (uint32_t)(s.tokens - t) : lengths[l];
                part.hidden = s.hidden + t * h;
                part.expert_ids = s.ids + t * k;
                part.expert_weights = s.weights + t * k;
                run_ok(&r, &part);
                assert_memory_equal(s.output, s.expected + t * h, part.token_count * h * 2);
            }
        rig_close(&r);
        synthetic_free(&s.made);
    }
}

static void bad_routing_is_skipped_and_counted(void **unused) {
    synthetic_spec spec = base;
    scene s;
    (void)unused;
    spec.skip_expert = 5; /* id 4 is not loaded */
    scene_make(&s, &spec, 6);
    const int32_t ids[18] = {0, -1, 1, 5, 2, 1000004, INT32_MIN, -2, 3, -1, -1, -1, 4, 0, 4, 2, 2, 2};
    memcpy(s.ids, ids, sizeof ids);
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
    memset(s.output, 0xAA, (size_t)s.tokens * spec.hidden * 2);
    run_ok(&r, &s.batch);
    megamoe_counters counts = {.struct_size = sizeof counts};
    uint64_t per_expert[5];
    assert_int_equal(r.backend->counters(r.layer, &counts, per_expert), MEGAMOE_OK);
    assert_int_equal(counts.tokens, 6);
    assert_int_equal(counts.bad_slots, 4);
    assert_int_equal(counts.skipped_slots, 1 + 3 + 2);
    assert_int_equal(per_expert[2], 4);
    assert_int_equal(per_expert[4], 2);
    for (uint32_t n = 0; n < spec.hidden; n++) assert_int_equal(s.output[3 * spec.hidden + n], 0);
    memcpy(s.expected, s.output, (size_t)s.tokens * spec.hidden * 2);

    /* the same slots with weight 0 and good ids: the others must not notice */
    for (int i = 0; i < 18; i++)
        if (ids[i] < 0 || ids[i] > 3) s.ids[i] = 3, s.weights[i] = 0.0f;
    run_ok(&r, &s.batch);
    assert_outputs_close(s.output, s.expected, (size_t)s.tokens * spec.hidden, 0.0);
    rig_close(&r);
    synthetic_free(&s.made);
}

static void nan_stays_in_its_token(void **unused) {
    (void)unused;
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
        synthetic_spec spec = promise_spec(nvfp4);
        scene s;
        scene_make(&s, &spec, 9);
        size_t h = spec.hidden;
        rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
        run_ok(&r, &s.batch);
        memcpy(s.expected, s.output, s.tokens * h * 2);
        s.hidden[4 * h + 33] = nvfp4 ? 0x7F80 : 0x7FC0; /* infinity; NaN */
        run_ok(&r, &s.batch);
        for (size_t t = 0; t < s.tokens; t++)
            if (t != 4) assert_memory_equal(s.output + t * h, s.expected + t * h, h * 2);
        for (size_t n = 0; n < h; n++) assert_true(isnan(mm_bf16_to_f32(s.output[4 * h + n])));
        rig_close(&r);
        synthetic_free(&s.made);
    }
}

static void float_input_is_rounded_to_bf16(void **unused) {
    synthetic_spec spec = promise_spec(true);
    scene s;
    (void)unused;
    scene_make(&s, &spec, 5);
    size_t count = s.tokens * (size_t)spec.hidden;
    float *floats = synthetic_block(&s.made, count * sizeof *floats);
    for (size_t i = 0; i < count; i++) {
        floats[i] = mm_bf16_to_f32(s.hidden[i]) * 1.003f;
        s.hidden[i] = mm_bf16_from_f32(floats[i]);
    }
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
    run_ok(&r, &s.batch);
    memcpy(s.expected, s.output, count * 2);
    s.batch.hidden = floats;
    s.batch.hidden_dtype = MEGAMOE_F32;
    run_ok(&r, &s.batch);
    assert_memory_equal(s.output, s.expected, count * 2);
    rig_close(&r);
    synthetic_free(&s.made);
}

static uint64_t saturated_blocks(const rig *r) {
    megamoe_counters counters = {.struct_size = sizeof counters};
    assert_int_equal(r->backend->counters(r->layer, &counters, NULL), MEGAMOE_OK);
    return counters.saturated_blocks;
}

/* Tokens are staged for the router, and once more for the experts if the batch is longer than a chunk. */
static void blocks_are_counted_once(void **unused) {
    synthetic_spec spec = promise_spec(true);
    scene s;
    (void)unused;
    spec.input_mode = MEGAMOE_GLOBAL_STATIC;
    spec.router_dtype = MEGAMOE_F32;
    scene_make(&s, &spec, 1030);
    for (uint32_t t = 1; t < s.tokens; t++) memcpy(s.hidden + t * spec.hidden, s.hidden, spec.hidden * 2);
    s.batch.expert_ids = NULL;
    s.batch.expert_weights = NULL;
    s.batch.token_count = 1;
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, true);
    run_ok(&r, &s.batch);
    uint64_t of_one = saturated_blocks(&r);
    assert_true(of_one > 0);
    s.batch.token_count = s.tokens;
    run_ok(&r, &s.batch);
    assert_int_equal(saturated_blocks(&r), (1 + s.tokens) * of_one);
    assert_int_equal(r.backend->route(r.layer, &s.batch, s.ids, s.weights, NULL), MEGAMOE_OK);
    assert_int_equal(saturated_blocks(&r), (1 + s.tokens) * of_one);
    rig_close(&r);
    synthetic_free(&s.made);
}

static void no_tokens_is_no_work(void **unused) {
    scene s;
    (void)unused;
    scene_make(&s, &base, 1);
    s.batch.token_count = 0;
    s.batch.hidden = s.batch.output = NULL;
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, 1, false);
    run_ok(&r, &s.batch);
    rig_close(&r);
    synthetic_free(&s.made);
}

static void running_allocates_nothing(void **unused) {
    (void)unused;
#if COUNTS_ALLOCATIONS
    synthetic_spec spec = large_spec(true);
    scene s;
    scene_make(&s, &spec, 40);
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
    mm_device_facts before = {0}, after = {0};
    run_ok(&r, &s.batch);
    r.backend->describe(r.state, &before);
    unsigned long count = allocations;
    run_ok(&r, &s.batch);
    s.batch.token_count = 3;
    run_ok(&r, &s.batch);
    assert_int_equal(allocations, count);
    r.backend->describe(r.state, &after);
    assert_int_equal(before.host_bytes, after.host_bytes);
    rig_close(&r);
    synthetic_free(&s.made);
#else
    skip();
#endif
}

static double expert_seconds(const rig *r) {
    megamoe_counters counters = {.struct_size = sizeof counters};
    assert_int_equal(r->backend->counters(r->layer, &counters, NULL), MEGAMOE_OK);
    return counters.expert_seconds;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* More with every run and never more than passed; the shared expert's time, which is in the same regions, is not in it.
 */
static void routed_experts_are_timed(void **unused) {
    (void)unused;
    for (int shared = 0; shared < 2; shared++) {
        synthetic_spec spec = large_spec(true);
        spec.shared_format = shared ? MM_FP8 : 0;
        scene s;
        scene_make(&s, &spec, 40);
        rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
        double before = 0.0, began = seconds_now();
        assert_true(expert_seconds(&r) == 0.0);
        for (int run = 0; run < 3; run++) {
            run_ok(&r, &s.batch);
            assert_true(expert_seconds(&r) > before);
            before = expert_seconds(&r);
        }
        assert_true(before < seconds_now() - began);
        for (uint32_t p = 0; p < s.tokens * spec.slots; p++) s.ids[p] = -1;
        run_ok(&r, &s.batch);
        assert_true(expert_seconds(&r) == before);
        rig_close(&r);
        synthetic_free(&s.made);
    }
}

static void child_of_a_fork_runs(void **unused) {
    synthetic_spec spec = large_spec(false);
    scene s;
    int status = 1;
    (void)unused;
#if defined(__SANITIZE_THREAD__)
    skip(); /* it cannot start threads in a child */
#endif
    scene_make(&s, &spec, 20);
    rig r = rig_open(&mm_backend_cpu, &s.made.weights, 2, s.tokens, false);
    run_ok(&r, &s.batch);
    memcpy(s.expected, s.output, s.tokens * (size_t)spec.hidden * 2);
    pid_t child = fork();
    if (child == 0) {
        alarm(300);
        memset(s.output, 0xAA, s.tokens * (size_t)spec.hidden * 2);
        if (r.backend->run(r.layer, &s.batch, NULL, NULL, NULL, NULL) != MEGAMOE_OK) _exit(2);
        _exit(memcmp(s.output, s.expected, s.tokens * (size_t)spec.hidden * 2) == 0 ? 0 : 3);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    rig_close(&r);
    synthetic_free(&s.made);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_match_reference),
        cmocka_unit_test(options_match_reference),
        cmocka_unit_test(whole_numbers_are_exact),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(position_does_not_change_bits),
        cmocka_unit_test(invariant_bits_ignore_the_batch),
        cmocka_unit_test(bad_routing_is_skipped_and_counted),
        cmocka_unit_test(nan_stays_in_its_token),
        cmocka_unit_test(float_input_is_rounded_to_bf16),
        cmocka_unit_test(blocks_are_counted_once),
        cmocka_unit_test(no_tokens_is_no_work),
        cmocka_unit_test(running_allocates_nothing),
        cmocka_unit_test(routed_experts_are_timed),
        cmocka_unit_test(child_of_a_fork_runs),
    };
    return cmocka_run_group_tests_name("cpu_layer", tests, NULL, NULL);
}
