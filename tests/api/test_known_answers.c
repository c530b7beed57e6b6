/*
 * Layers small enough to work out by hand, after what users of other systems reported: each assertion
 * separates the right answer from the wrong one that was reported.
 */
#include "api.h"

/*
 * Tokens of a single 6, through `expert` with weight `weight`; all 64 outputs of each must be `expected`. Few rows and
 * many: they meet different kernels.
 */
static void expect_fx(const api_layer *l, const megamoe_layer_options *options, int32_t expert, float weight,
                      double expected, const char *what) {
    enum { TOKENS = 40 };
    static const uint32_t counts[] = {1, 3, 7, TOKENS};
    uint16_t hidden[TOKENS * 64] = {0};
    int32_t experts[TOKENS];
    float weights[TOKENS];
    megamoe_device *device = api_device(TOKENS);
    megamoe_layer *layer = api_create(device, l, options);
    for (unsigned t = 0; t < TOKENS; t++) {
        hidden[64 * t] = api_to_bf16(6.0f);
        experts[t] = expert;
        weights[t] = weight;
    }
    for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint16_t *output = api_run(layer, &l->desc.shape, counts[i], hidden, experts, weights);
        for (unsigned n = 0; n < 64 * counts[i]; n++) {
            double got = (double)api_from_bf16(output[n]);
            if (!(fabs(got - expected) <= fabs(expected) / 256)) /* half an ulp of BF16, relative */
                fail_msg("%s: output %u of %u tokens is %.9g instead of %.9g", what, n, counts[i], got, expected);
        }
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

static void expect_both(const api_layer *l, int32_t expert, float weight, double w4a16, double w4a4, const char *what) {
    megamoe_layer_options bf16 = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer_options nvfp4 = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
    expect_fx(l, &bf16, expert, weight, w4a16, what);
    expect_fx(l, &nvfp4, expert, weight, w4a4, what);
}

/* Swapped halves would give 0.9197713 and 0.9375. */
static void gate_and_up_are_not_swapped(void **state) {
    api_layer l = api_layer_fx();
    expect_both(&l, 0, 1.0f, 0.7640760, 0.75, "FX");
    (void)state;
}

/* 0.75 for the second: gate's scale used for up as well. */
static void gate_and_up_keep_their_global_scales(void **state) {
    api_layer l = api_layer_fx();
    l.globals[1][0] = 0.5f;
    expect_both(&l, 0, 1.0f, 3.0563041, 3.0, "up global 0.5");
    (void)state;
}

/* 16.5: down's scale never applied; 1.03125: applied twice. */
static void each_expert_has_its_own_scales(void **state) {
    api_layer l = api_layer_fx();
    l.globals[0][1] = l.globals[1][1] = 0.5f;
    l.globals[2][1] = 0.25f;
    expect_both(&l, 1, 1.0f, 17.1463343 * 0.25, 4.125, "expert 1");
    expect_both(&l, 0, 1.0f, 0.7640760, 0.75, "expert 0");
    (void)state;
}

/* Scale byte 0x01 is 2^-9, a subnormal: with 64 as global scale everything else is as before, bit for bit. */
static void subnormal_scales(void **state) {
    api_layer l = api_layer_fx();
    memset(l.scales[0], 0x01, 2 * 64 * 4);
    l.globals[0][0] = l.globals[0][1] = 64.0f;
    expect_both(&l, 0, 1.0f, 0.7640760, 0.75, "subnormal gate scales");
    (void)state;
}

static void routing_weight_is_applied_once(void **state) {
    api_layer l = api_layer_fx();
    megamoe_layer_options before = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
    before.routing_weight_before = true;
    expect_both(&l, 0, 0.5f, 0.3820380, 0.375, "weight 0.5");
    /* 0.3 times h before and after h is rounded to E2M1 differ */
    expect_both(&l, 0, 0.3f, 0.2292228, 0.2246, "weight 0.3, after L2");
    expect_fx(&l, &before, 0, 0.3f, 0.2344, "weight 0.3, before L2");
    (void)state;
}

/* The clamp: gate from above only, up from both sides, before the activation. Units are physical ones. */
static void clamped_swiglu(void **state) {
    static const struct {
        float gate, up;
        double h;
    } cases[] = {{12, 3, 29.99864},   {-12, 3, -0.0002211903}, {3, 12, 28.57722},
                 {3, -12, -28.57722}, {-12, -12, 0.000737301}, {12, 12, 99.99546}};
    static const float globals[] = {0.125f, 8.0f};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        for (unsigned j = 0; j < 2; j++) {
            api_layer l = api_layer_fx();
            megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
            l.desc.shape.swiglu_limit = 10.0f;
            /* 6 * code 1 * scale 1 * global: the wanted value comes from the global scale and the codes' sign
             */
            memset(l.codes[0], cases[i].gate < 0 ? 0xAA : 0x22, 2 * 64 * 32);
            memset(l.codes[1], cases[i].up < 0 ? 0xAA : 0x22, 2 * 64 * 32);
            l.globals[0][0] = fabsf(cases[i].gate) / 6.0f;
            l.globals[1][0] = fabsf(cases[i].up) / 6.0f;
            l.globals[2][0] = globals[j];
            expect_fx(&l, &options, 0, 1.0f, cases[i].h * (double)globals[j], "clamp");
        }
    (void)state;
}

/* A low nibble is the even element: 1 at k = 0, 6 at k = 1; for few rows and for many. */
static void nibble_order(void **state) {
    enum { TOKENS = 40 };
    float l1[TOKENS * 128], weights[TOKENS];
    uint16_t hidden[TOKENS * 64] = {0}, output[TOKENS * 64];
    int32_t experts[TOKENS] = {0};
    api_layer l = api_layer_fx();
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_device *device = api_device(TOKENS);
    megamoe_layer *layer;
    megamoe_stages stages = {.struct_size = sizeof stages, .l1 = l1};
    l.codes[0][0] = 0x72;
    l.globals[0][0] = 1.0f;
    layer = api_create(device, &l, &options);
    for (unsigned t = 0; t < TOKENS; t++) {
        hidden[64 * t + t % 2] = api_to_bf16(6.0f);
        weights[t] = 1.0f;
    }
    for (uint32_t count = 2; count <= TOKENS; count += 19) {
        megamoe_batch batch = {.struct_size = sizeof batch,
                               .token_count = count,
                               .hidden = hidden,
                               .output = output,
                               .expert_ids = experts,
                               .expert_weights = weights};
        uint32_t written = 0;
        assert_ok(megamoe_layer_run_stages(layer, &batch, NULL, &stages, &written));
        assert_true(written & 1u << 5);
        for (unsigned t = 0; t < count; t++) {
            assert_true(l1[128 * t] == (t % 2 == 0 ? 6.0f : 36.0f));
            assert_true(l1[128 * t + 1] == 6.0f); /* another row, untouched by it */
        }
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    (void)state;
}

/* The layer stages with the largest input_scale of ALL its experts, also those that the token does not visit.
 */
static void static_scale_is_the_maximum(void **state) {
    api_layer l = api_layer_fx();
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
    megamoe_device *device = api_device(1);
    megamoe_layer *layer;
    uint8_t codes[32], scales[4];
    float globals[1], weight = 1.0f;
    uint16_t hidden[64], output[64];
    const int32_t expert = 0;
    megamoe_stages stages = {.struct_size = sizeof stages, .x_codes = codes, .x_scales = scales, .x_globals = globals};
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = 1,
                           .hidden = hidden,
                           .output = output,
                           .expert_ids = &expert,
                           .expert_weights = &weight};
    l.inputs[1][1] = 4.0f;
    for (unsigned i = 0; i < 64; i++) hidden[i] = api_to_bf16(0.0029296875f); /* about 0.003 */
    layer = api_create(device, &l, &options);
    assert_ok(megamoe_layer_run_stages(layer, &batch, NULL, &stages, NULL));
    assert_true(globals[0] == 4.0f);
    for (unsigned i = 0; i < 4; i++) assert_int_equal(scales[i], 0x01); /* the floor, 2^-9 */
    /* 0.0029296875 / (4 * 2^-9) = 0.375: code 0.5, stored value 0.00390625 */
    for (unsigned i = 0; i < 32; i++) assert_int_equal(codes[i], 0x11);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gate_and_up_are_not_swapped),
        cmocka_unit_test(gate_and_up_keep_their_global_scales),
        cmocka_unit_test(each_expert_has_its_own_scales),
        cmocka_unit_test(subnormal_scales),
        cmocka_unit_test(routing_weight_is_applied_once),
        cmocka_unit_test(clamped_swiglu),
        cmocka_unit_test(nibble_order),
        cmocka_unit_test(static_scale_is_the_maximum),
    };
    return API_RUN(tests);
}
