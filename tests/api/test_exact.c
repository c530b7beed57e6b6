/*
 * Whole layers of integers with relu2: every sum fits 24 bits, so that any order of accumulation gives one
 * answer. It is worked out here in 64-bit integers, and every backend must give it exactly: a dropped,
 * doubled or misplaced term cannot hide behind a tolerance.
 */
#include "api.h"

#define H 160u
#define I 96u
#define E 4u
#define K 3u
#define TOKENS_MAX 70u

static void check_layer(const api_layer *l, uint32_t tokens, int32_t only_expert) {
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_device *device = api_device(TOKENS_MAX);
    megamoe_layer *layer = api_create(device, l, &options);
    uint16_t *hidden = api_hidden_integers(tokens, H), *output, expected[H];
    int32_t ids[TOKENS_MAX * K];
    float weights[TOKENS_MAX * K];
    for (int32_t i = 0; i < (int32_t)(tokens * K); i++) {
        int32_t t = i / (int32_t)K, k = i % (int32_t)K;
        ids[i] = only_expert >= 0 ? (k == t % (int32_t)K ? only_expert : -1) : (t + k) % (int32_t)E;
        weights[i] = (float)(1 + i % 3);
    }
    output = api_run(layer, &l->desc.shape, tokens, hidden, ids, weights);
    for (size_t t = 0; t < tokens; t++) {
        api_expected_integers(l, hidden + t * H, ids + t * K, weights + t * K, expected);
        for (size_t n = 0; n < H; n++)
            if (output[t * H + n] != expected[n])
                fail_msg("%u tokens, token %zu, column %zu: %g instead of %g", tokens, t, n,
                         (double)api_from_bf16(output[t * H + n]), (double)api_from_bf16(expected[n]));
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

static void check_sizes(const api_layer *l) {
    static const uint32_t sizes[] = {1, 2, 7, 8, 9, 16, 17, 33, TOKENS_MAX};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) check_layer(l, sizes[i], -1);
    check_layer(l, TOKENS_MAX, 2); /* every token on one expert */
}

static megamoe_shape relu2_shape(void) {
    megamoe_shape shape = api_shape(H, I, E, K);
    shape.not_gated = true;
    return shape;
}

static void nvfp4_weights(void **state) {
    api_layer l = api_layer_integers(relu2_shape(), 3);
    check_sizes(&l);
    (void)state;
}

/* The same codes under one E8M0 scale per 32, without global scales. */
static void mxfp4_weights(void **state) {
    api_layer l = api_layer_integers(relu2_shape(), 4);
    megamoe_projection *projections[3] = {&l.desc.gate, &l.desc.up, &l.desc.down};
    uint32_t seed = 9;
    l.desc.shape.group_size = 32;
    for (unsigned p = 0; p < 3; p++) {
        for (size_t i = 0; i < (size_t)E * H * I / 32; i++) l.scales[p][i] = (uint8_t)(127 + api_random(&seed) % 2);
        projections[p]->scales.dtype = MEGAMOE_E8M0;
        projections[p]->scales.extent[2] /= 2;
        projections[p]->global.data = NULL;
    }
    check_sizes(&l);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvfp4_weights),
        cmocka_unit_test(mxfp4_weights),
    };
    return API_RUN(tests);
}
