/*
 * The sm100 backend behind the public functions, on a fake driver whose GPU is the functional model
 * (fake_driver.cpp). Which part is tested depends on what the driver was told to be: see CMakeLists.txt.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "megamoe/megamoe.h"

enum { TOKENS = 6, MAX_HIDDEN = 512, MAX_SLOTS = 16 };

static char logged[1024];

static void remember(void *context, int level, const char *message) {
    (void)context, (void)level;
    snprintf(logged, sizeof logged, "%s", message);
}

static megamoe_status open_device(megamoe_backend backend, megamoe_device **device) {
    megamoe_device_options options = {
        .struct_size = sizeof options, .backend = backend, .max_tokens = TOKENS, .log = remember};
    return megamoe_device_open(&options, device);
}

static bool told(const char *variable, const char *value) {
    const char *found = getenv(variable);
    return found && strcmp(found, value) == 0;
}

/* ---- a layer of the fixture, with routing given ---- */

struct run {
    megamoe_checkpoint *checkpoint;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_shape shape;
    uint16_t hidden[TOKENS * MAX_HIDDEN], output[TOKENS * MAX_HIDDEN];
    int32_t ids[TOKENS * MAX_SLOTS];
    float weights[TOKENS * MAX_SLOTS];
};

static void run_open(struct run *r, megamoe_backend backend) {
    megamoe_layer_options options = {.struct_size = sizeof options, .activations = MEGAMOE_ACTIVATIONS_NVFP4};
    assert_int_equal(megamoe_checkpoint_open("tests/fixtures/qwen3-modelopt", NULL, &r->checkpoint), MEGAMOE_OK);
    if (open_device(backend, &r->device) != MEGAMOE_OK) fail_msg("%s", megamoe_error_message());
    if (megamoe_layer_load(r->device, r->checkpoint, 0, &options, &r->layer) != MEGAMOE_OK)
        fail_msg("%s", megamoe_error_message());
    assert_int_equal(megamoe_checkpoint_shape(r->checkpoint, 0, &r->shape), MEGAMOE_OK);
    assert_true(r->shape.hidden <= MAX_HIDDEN && r->shape.experts_per_token <= MAX_SLOTS);
    uint32_t random = 5;
    for (uint32_t i = 0; i < TOKENS * r->shape.hidden; i++) {
        random = random * 1664525u + 1013904223u;
        r->hidden[i] = (uint16_t)(0x3F00u | (random >> 16 & 0x807Fu)); /* 0.5 .. 1, both signs */
    }
    for (uint32_t i = 0; i < TOKENS * r->shape.experts_per_token; i++) {
        r->ids[i] = i == 3 ? -1 : i == 8 ? 9999 : (int32_t)(i * 5 % r->shape.expert_count);
        r->weights[i] = 0.1f + 0.05f * (float)(i % 7);
    }
}

static void run_close(struct run *r) {
    megamoe_layer_close(r->layer);
    megamoe_device_close(r->device);
    megamoe_checkpoint_close(r->checkpoint);
}

static megamoe_batch batch_of(struct run *r) {
    return (megamoe_batch){.struct_size = sizeof(megamoe_batch),
                           .token_count = TOKENS,
                           .hidden = r->hidden,
                           .output = r->output,
                           .expert_ids = r->ids,
                           .expert_weights = r->weights,
                           .allow_bad_routing = true};
}

static double bf16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return (double)value;
}

static struct run ours, theirs;

/* The layer, from host memory through the portable backend's staging and our five launches, against the definition. */
static void layer_is_right(void **state) {
    (void)state;
    run_open(&ours, MEGAMOE_SM100);
    run_open(&theirs, MEGAMOE_REFERENCE);
    megamoe_batch a = batch_of(&ours), b = batch_of(&theirs);
    memset(ours.output, 0x7F, sizeof ours.output);
    if (megamoe_layer_run(ours.layer, &a, NULL) != MEGAMOE_OK) fail_msg("%s", megamoe_error_message());
    assert_int_equal(megamoe_layer_run(theirs.layer, &b, NULL), MEGAMOE_OK);
    double dot = 0, x = 0, y = 0;
    for (uint32_t i = 0; i < TOKENS * ours.shape.hidden; i++) {
        double g = bf16(ours.output[i]), w = bf16(theirs.output[i]);
        dot += g * w, x += g * g, y += w * w;
    }
    assert_true(dot / sqrt(x * y) > 0.99999);
    assert_true(fabs(sqrt(x / y) - 1) < 1e-3);
    assert_non_null(strstr(megamoe_device_describe(ours.device), "sm100 (GPU 0"));

    megamoe_counters counters = {.struct_size = sizeof counters};
    uint64_t tokens[4096] = {0}, sum = 0;
    assert_int_equal(megamoe_layer_counters(ours.layer, &counters, tokens), MEGAMOE_OK);
    for (uint32_t i = 0; i < ours.shape.expert_count; i++) sum += tokens[i];
    assert_int_equal(counters.skipped_slots, 1);
    assert_int_equal(counters.bad_slots, 1);
    assert_int_equal(sum, TOKENS * ours.shape.experts_per_token - 2);
    run_close(&ours);
    run_close(&theirs);
}

/* The stages of a run: inputs bit for bit, and the intermediate but for a rounding here and there. */
static void stages_are_right(void **state) {
    static uint8_t x[2][TOKENS * MAX_HIDDEN / 2], h[2][TOKENS * MAX_SLOTS * 1024];
    uint32_t written[2] = {0, 0}, wrong = 0;
    (void)state;
    run_open(&ours, MEGAMOE_SM100);
    run_open(&theirs, MEGAMOE_REFERENCE);
    size_t x_bytes = (size_t)TOKENS * ours.shape.hidden / 2;
    size_t h_bytes = (size_t)TOKENS * ours.shape.experts_per_token * ours.shape.intermediate / 2;
    assert_true(h_bytes <= sizeof h[0]);
    for (int i = 0; i < 2; i++) {
        struct run *r = i ? &theirs : &ours;
        megamoe_batch batch = batch_of(r);
        megamoe_stages stages = {.struct_size = sizeof stages, .x_codes = x[i], .h_codes = h[i]};
        if (megamoe_layer_run_stages(r->layer, &batch, NULL, &stages, &written[i]) != MEGAMOE_OK)
            fail_msg("%s", megamoe_error_message());
    }
    assert_true(written[0] & 1u << 2 && written[0] & 1u << 7); /* x_codes, h_codes */
    assert_memory_equal(x[0], x[1], x_bytes);
    for (size_t i = 0; i < h_bytes; i++) wrong += h[0][i] != h[1][i];
    assert_true(wrong <= h_bytes / 1000);
    run_close(&ours);
    run_close(&theirs);
}

static void only_its_own_family(void **state) {
    (void)state;
    int capability = atoi(getenv("FAKE_CAPABILITY"));
    megamoe_status expected = capability == 100 || capability == 103 ? MEGAMOE_OK : MEGAMOE_UNSUPPORTED_DEVICE;
    assert_int_equal(megamoe_device_probe(MEGAMOE_SM100, 0), expected);
    megamoe_device *device = NULL;
    assert_int_equal(open_device(MEGAMOE_SM100, &device), expected);
    if (expected != MEGAMOE_OK) assert_null(device);
    megamoe_device_close(device);
}

/* A kernel that gives a wrong bit, or none: an explicit sm100 is refused with what differed, twice the same; otherwise
 * the portable kernels are used, and the log says why. */
static void distrust(void **state) {
    const char *words =
        told("FAKE_FAULT", "flip") ? "the product of token row" : "sm100_l1_small: the fake driver refused";
    megamoe_device *device = NULL;
    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_device(MEGAMOE_SM100, &device), MEGAMOE_DEVICE_ERROR);
        if (!strstr(megamoe_error_message(), words)) fail_msg("%s", megamoe_error_message());
        assert_null(device);
    }
    assert_int_equal(open_device(MEGAMOE_CUDA, &device), MEGAMOE_OK);
    if (!strstr(logged, "portable kernels are used") || !strstr(logged, words)) fail_msg("%s", logged);
    assert_non_null(strstr(megamoe_device_describe(device), "not trusted"));
    megamoe_device_close(device);
}

/* Sums of the portable kernels are wrong: then there is nothing on this GPU to fall back to. */
static void distrust_of_the_portable_kernels(void **state) {
    static const megamoe_backend wanted[] = {MEGAMOE_SM100, MEGAMOE_CUDA};
    megamoe_device *device = NULL;
    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_device(wanted[i], &device), MEGAMOE_UNSUPPORTED_DEVICE);
        if (!strstr(megamoe_error_message(), "self-check of the portable kernels failed: the product of token row 0"))
            fail_msg("%s", megamoe_error_message());
        assert_null(device);
    }
}

int main(void) {
    const struct CMUnitTest right[] = {cmocka_unit_test(layer_is_right), cmocka_unit_test(stages_are_right)};
    const struct CMUnitTest family[] = {cmocka_unit_test(only_its_own_family)};
    const struct CMUnitTest wrong[] = {cmocka_unit_test(distrust)};
    const struct CMUnitTest portable[] = {cmocka_unit_test(distrust_of_the_portable_kernels)};
    if (told("FAKE_FAULT", "portable")) return cmocka_run_group_tests(portable, NULL, NULL);
    if (getenv("FAKE_FAULT")) return cmocka_run_group_tests(wrong, NULL, NULL);
    if (getenv("FAKE_CAPABILITY")) return cmocka_run_group_tests(family, NULL, NULL);
    return cmocka_run_group_tests(right, NULL, NULL);
}
