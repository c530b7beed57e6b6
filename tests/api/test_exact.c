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

/* Twice the value of an E2M1 code, from the definition: sign, exponent with bias 1, one mantissa bit. */
static int64_t twice(unsigned code) {
    int64_t exponent = code >> 1 & 3, mantissa = code & 1;
    int64_t magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
    return code & 8 ? -magnitude : magnitude;
}

/* W[e][n][k] of projection p; scales are 1 (0x38, or E8M0 127) or 2. */
static int64_t weight_of(const api_layer *l, unsigned p, uint32_t group, size_t row, size_t k,
                         size_t columns) {
    unsigned byte = l->codes[p][(row * columns + k) / 2], scale = l->scales[p][(row * columns + k) / group];
    int64_t value = twice(k % 2 == 0 ? byte & 15u : byte >> 4) / 2;
    return scale == 0x38 || scale == 127 ? value : 2 * value;
}

/* Nearest BF16, ties to even, of an integer below 2^24. */
static uint16_t bf16_of(int64_t value) {
    uint64_t magnitude = (uint64_t)(value < 0 ? -value : value), unit = 1;
    while (magnitude / unit >= 256) unit *= 2;
    uint64_t whole = magnitude / unit, rest = magnitude % unit;
    if (2 * rest > unit || (2 * rest == unit && whole % 2 == 1)) whole++;
    float rounded = (float)(whole * unit);
    return api_to_bf16(value < 0 ? -rounded : rounded);
}

static void expected_token(const api_layer *l, uint32_t group, const uint16_t *hidden, const int32_t *ids,
                           const float *weights, uint16_t *output) {
    int64_t sums[H] = {0};
    for (unsigned k = 0; k < K; k++) {
        int64_t h[I];
        if (ids[k] < 0) continue;
        for (size_t n = 0; n < I; n++) {
            int64_t up = 0;
            for (size_t c = 0; c < H; c++)
                up +=
                    weight_of(l, 1, group, (size_t)ids[k] * I + n, c, H) * (int64_t)api_from_bf16(hidden[c]);
            h[n] = up > 0 ? up * up : 0;
        }
        for (size_t n = 0; n < H; n++) {
            int64_t p = 0;
            for (size_t c = 0; c < I; c++) p += weight_of(l, 2, group, (size_t)ids[k] * H + n, c, I) * h[c];
            sums[n] += (int64_t)weights[k] * p;
        }
    }
    for (size_t n = 0; n < H; n++) output[n] = bf16_of(sums[n]);
}

static void check_layer(const api_layer *l, uint32_t group, uint32_t tokens, int32_t only_expert) {
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
        expected_token(l, group, hidden + t * H, ids + t * K, weights + t * K, expected);
        for (size_t n = 0; n < H; n++)
            if (output[t * H + n] != expected[n])
                fail_msg("%u tokens, token %zu, column %zu: %g instead of %g", tokens, t, n,
                         (double)api_from_bf16(output[t * H + n]), (double)api_from_bf16(expected[n]));
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

static void check_sizes(const api_layer *l, uint32_t group) {
    static const uint32_t sizes[] = {1, 2, 7, 8, 9, 16, 17, 33, TOKENS_MAX};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) check_layer(l, group, sizes[i], -1);
    check_layer(l, group, TOKENS_MAX, 2); /* every token on one expert */
}

static megamoe_shape relu2_shape(void) {
    megamoe_shape shape = api_shape(H, I, E, K);
    shape.not_gated = true;
    return shape;
}

static void nvfp4_weights(void **state) {
    api_layer l = api_layer_integers(relu2_shape(), 3);
    check_sizes(&l, 16);
    (void)state;
}

/* The same codes under one E8M0 scale per 32, without global scales. */
static void mxfp4_weights(void **state) {
    api_layer l = api_layer_integers(relu2_shape(), 4);
    megamoe_projection *projections[3] = {&l.desc.gate, &l.desc.up, &l.desc.down};
    uint32_t seed = 9;
    l.desc.shape.group_size = 32;
    for (unsigned p = 0; p < 3; p++) {
        for (size_t i = 0; i < (size_t)E * H * I / 32; i++)
            l.scales[p][i] = (uint8_t)(127 + api_random(&seed) % 2);
        projections[p]->scales.dtype = MEGAMOE_E8M0;
        projections[p]->scales.extent[2] /= 2;
        projections[p]->global.data = NULL;
    }
    check_sizes(&l, 32);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvfp4_weights),
        cmocka_unit_test(mxfp4_weights),
    };
    return API_RUN(tests);
}
