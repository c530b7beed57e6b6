/*
 * The stages that an engine may call alone: quantize and dequantize against the golden vectors, the grouped
 * GEMM against 64-bit integers.
 */
#include "api.h"

#include "numerics/golden.h"

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void quantize_golden_blocks(void **state) {
    megamoe_device *device = api_device(1);
    golden g;
    golden_open(&g, "tests/golden/blocks.txt");
    while (golden_next(&g, 300)) {
        float values[16], global, written = 0;
        uint8_t codes[8], scale = 0xAA;
        char hex[17];
        const char *kind = golden_word(&g);
        megamoe_tensor v = api_tensor(values, MEGAMOE_F32, 2, 1, 16, 0);
        megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, 1, 16, 0);
        megamoe_tensor s = api_tensor(&scale, MEGAMOE_E4M3, 2, 1, 1, 0);
        megamoe_tensor w = api_tensor(&written, MEGAMOE_F32, 1, 1, 0, 0);
        global = from_bits(golden_hex(&g));
        for (unsigned i = 0; i < 16; i++) values[i] = from_bits(golden_hex(&g));
        memset(codes, 0xAA, sizeof codes);
        assert_ok(megamoe_quantize(device, &v, &global, &c, &s, &w, NULL));
        for (unsigned i = 0; i < 8; i++) snprintf(hex + 2 * i, 3, "%02x", codes[i]);
        if (scale != golden_hex(&g) || strcmp(hex, golden_word(&g)))
            fail_msg("%s:%u (%s): scale %02x, codes %s", g.path, g.line_number, kind, scale, hex);
        assert_true(written == global);
    }
    megamoe_device_close(device);
    (void)state;
}

/* Without a given global scale each row has its own: amax / 2688, and 1 for a row of zeros. */
static void quantize_per_token(void **state) {
    enum { ROWS = 5, COLUMNS = 48 };
    megamoe_device *device = api_device(1);
    float values[ROWS * COLUMNS] = {0}, globals[ROWS], one[ROWS];
    uint8_t codes[ROWS * COLUMNS / 2], scales[ROWS * COLUMNS / 16];
    uint8_t same_codes[ROWS * COLUMNS / 2], same_scales[ROWS * COLUMNS / 16];
    megamoe_tensor v = api_tensor(values, MEGAMOE_F32, 2, ROWS, COLUMNS, 0);
    megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, ROWS, COLUMNS, 0);
    megamoe_tensor s = api_tensor(scales, MEGAMOE_E4M3, 2, ROWS, COLUMNS / 16, 0);
    megamoe_tensor g = api_tensor(globals, MEGAMOE_F32, 1, ROWS, 0, 0);
    uint32_t seed = 3;
    for (unsigned i = 0; i < (ROWS - 1) * COLUMNS; i++) /* the last row stays zero */
        values[i] = ((float)(api_random(&seed) % 20001) - 10000.0f) * (i / COLUMNS % 2 ? 0.00037f : 1.9f);
    memset(codes, 0xAA, sizeof codes);
    assert_ok(megamoe_quantize(device, &v, NULL, &c, &s, &g, NULL));
    for (unsigned r = 0; r < ROWS; r++) {
        float amax = 0;
        for (unsigned k = 0; k < COLUMNS; k++) amax = fmaxf(amax, fabsf(values[r * COLUMNS + k]));
        assert_int_equal(bits_of(globals[r]), bits_of(amax > 0 ? amax / 2688.0f : 1.0f));
        v = api_tensor(values + r * COLUMNS, MEGAMOE_F32, 2, 1, COLUMNS, 0);
        c = api_tensor(same_codes + r * COLUMNS / 2, MEGAMOE_E2M1X2, 2, 1, COLUMNS, 0);
        s = api_tensor(same_scales + r * COLUMNS / 16, MEGAMOE_E4M3, 2, 1, COLUMNS / 16, 0);
        g = api_tensor(one + r, MEGAMOE_F32, 1, 1, 0, 0);
        assert_ok(megamoe_quantize(device, &v, &globals[r], &c, &s, &g, NULL));
    }
    assert_memory_equal(codes, same_codes, sizeof codes);
    assert_memory_equal(scales, same_scales, sizeof scales);
    for (unsigned i = 0; i < COLUMNS / 16; i++) assert_int_equal(scales[(ROWS - 1) * COLUMNS / 16 + i], 0x01);
    megamoe_device_close(device);
    (void)state;
}

/* All codes under all scales, as F32 and as BF16, with and without a global scale. */
static void dequantize_every_product(void **state) {
    static const uint8_t every_code[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
    megamoe_device *device = api_device(1);
    golden g;
    golden_open(&g, "tests/golden/products.txt");
    while (golden_next(&g, 254)) {
        uint8_t codes[8], scale = (uint8_t)golden_hex(&g);
        float wide[16], global = 0.25f;
        uint16_t narrow[16];
        megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, 1, 16, 0);
        megamoe_tensor s = api_tensor(&scale, MEGAMOE_E4M3, 2, 1, 1, 0);
        megamoe_tensor q = api_tensor(&global, MEGAMOE_F32, 1, 1, 0, 0);
        megamoe_tensor w = api_tensor(wide, MEGAMOE_F32, 2, 1, 16, 0);
        megamoe_tensor n = api_tensor(narrow, MEGAMOE_BF16, 2, 1, 16, 0);
        memcpy(codes, every_code, sizeof codes);
        assert_ok(megamoe_dequantize(device, &c, &s, &q, &w, NULL));
        assert_ok(megamoe_dequantize(device, &c, &s, NULL, &n, NULL));
        for (unsigned i = 0; i < 16; i++) {
            uint32_t product = golden_hex(&g);
            assert_int_equal(narrow[i], product);
            assert_int_equal(bits_of(wide[i]), bits_of(from_bits(product << 16) * 0.25f));
        }
    }
    megamoe_device_close(device);
    (void)state;
}

static void dequantize_mxfp4(void **state) {
    megamoe_device *device = api_device(1);
    golden g;
    golden_open(&g, "tests/golden/mxfp4.txt");
    while (golden_next(&g, 255)) {
        uint8_t codes[16], scale = (uint8_t)golden_hex(&g);
        float values[32];
        megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, 1, 32, 0);
        megamoe_tensor s = api_tensor(&scale, MEGAMOE_E8M0, 2, 1, 1, 0);
        megamoe_tensor v = api_tensor(values, MEGAMOE_F32, 2, 1, 32, 0);
        for (unsigned i = 0; i < 16; i++) codes[i] = (uint8_t)(2 * i % 16 | (2 * i + 1) % 16 << 4);
        assert_ok(megamoe_dequantize(device, &c, &s, NULL, &v, NULL));
        for (unsigned i = 0; i < 16; i++) {
            uint32_t expected = golden_hex(&g);
            assert_int_equal(bits_of(values[i]), expected);
            assert_int_equal(bits_of(values[16 + i]), expected);
        }
    }
    megamoe_device_close(device);
    (void)state;
}

/* ---- grouped GEMM ---- */

enum { GROUPS = 5, N = 80, DEPTH = 96, ROWS = 23 };

static int64_t weight_at(const api_layer *l, size_t group, size_t n, size_t k) {
    static const int8_t values[16] = {0, 0, 1, 0, 2, 0, 0, 0, 0, 0, -1, 0, -2, 0, 0, 0}; /* codes in use only */
    size_t row = group * N + n;
    unsigned byte = l->codes[1][(row * DEPTH + k) / 2];
    return values[k % 2 == 0 ? byte & 15u : byte >> 4] * (l->scales[1][(row * DEPTH + k) / 16] == 0x38 ? 1 : 2);
}

/* output[r][n] for the group that row r belongs to by the cumulative ends. */
static void check_product(const api_layer *l, const int64_t *rows, const int32_t *ends, const float *output) {
    for (size_t r = 0; r < ROWS; r++) {
        size_t group = 0;
        while ((int32_t)r >= ends[group]) group++;
        for (size_t n = 0; n < N; n++) {
            int64_t sum = 0;
            for (size_t k = 0; k < DEPTH; k++) sum += rows[r * DEPTH + k] * weight_at(l, group, n, k);
            float expected = (float)sum * l->globals[1][group];
            if (output[r * N + n] != expected)
                fail_msg("row %zu of group %zu, column %zu: %g instead of %g", r, group, n, (double)output[r * N + n],
                         (double)expected);
        }
    }
}

/* Ragged groups, empty ones first, between and last; BF16 rows and NVFP4 rows. */
static void grouped_gemm(void **state) {
    static const int32_t ends[][GROUPS] = {
        {0, 9, 9, 22, ROWS}, {ROWS, ROWS, ROWS, ROWS, ROWS}, {1, 2, 3, 4, ROWS}, {0, 0, 0, 0, ROWS}};
    megamoe_device *device = api_device(ROWS);
    api_layer l = api_layer_integers(api_shape(DEPTH, N, GROUPS, 1), 21);
    int64_t rows[ROWS * DEPTH];
    uint16_t narrow[ROWS * DEPTH];
    uint8_t codes[ROWS * DEPTH / 2], scales[ROWS * DEPTH / 16];
    float output[ROWS * N];
    megamoe_tensor x = api_tensor(narrow, MEGAMOE_BF16, 2, ROWS, DEPTH, 0);
    megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, ROWS, DEPTH, 0);
    megamoe_tensor s = api_tensor(scales, MEGAMOE_E4M3, 2, ROWS, DEPTH / 16, 0);
    megamoe_tensor y = api_tensor(output, MEGAMOE_F32, 2, ROWS, N, 0);
    uint32_t seed = 8;
    for (unsigned g = 0; g < GROUPS; g++) l.globals[1][g] = 0.1f * (float)(g + 1);
    memset(codes, 0, sizeof codes);
    for (size_t i = 0; i < ROWS * DEPTH; i++) {
        static const uint8_t nibbles[5] = {0xC, 0xA, 0x0, 0x2, 0x4}; /* -2 .. 2 */
        unsigned pick = api_random(&seed) % 5;
        scales[i / 16] = i / 16 % 3 == 0 ? 0x48 : 0x38; /* 4 or 1 */
        rows[i] = ((int64_t)pick - 2) * (i / 16 % 3 == 0 ? 4 : 1);
        narrow[i] = api_to_bf16((float)rows[i]);
        codes[i / 2] |= (uint8_t)(nibbles[pick] << i % 2 * 4);
    }
    for (unsigned i = 0; i < sizeof ends / sizeof *ends; i++) {
        memset(output, 0xAA, sizeof output);
        assert_ok(megamoe_grouped_gemm(device, &x, NULL, &l.desc.up, ends[i], GROUPS, &y, NULL));
        check_product(&l, rows, ends[i], output);
        memset(output, 0xAA, sizeof output);
        assert_ok(megamoe_grouped_gemm(device, &c, &s, &l.desc.up, ends[i], GROUPS, &y, NULL));
        check_product(&l, rows, ends[i], output);
    }
    megamoe_device_close(device);
    (void)state;
}

static void grouped_gemm_checks_its_offsets(void **state) {
    if (api_backend == MEGAMOE_CUDA_PORTABLE) skip(); /* there they are in the GPU's memory */
    static const int32_t bad[][2] = {{3, 2}, {-1, 4}, {2, 5}};
    megamoe_device *device = api_device(4);
    api_layer l = api_layer_integers(api_shape(32, 16, 2, 1), 2);
    uint16_t rows[4 * 32] = {0};
    float output[4 * 16];
    megamoe_tensor x = api_tensor(rows, MEGAMOE_BF16, 2, 4, 32, 0);
    megamoe_tensor y = api_tensor(output, MEGAMOE_F32, 2, 4, 16, 0);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(megamoe_grouped_gemm(device, &x, NULL, &l.desc.up, bad[i], 2, &y, NULL),
                         MEGAMOE_INVALID_ARGUMENT);
    megamoe_device_close(device);
    (void)state;
}

static void quantize_checks_its_arguments(void **state) {
    static const float bad_globals[] = {0.0f, -1.0f, NAN, INFINITY};
    megamoe_device *device = api_device(1);
    float values[24] = {0}, globals[1] = {7};
    uint8_t codes[12], scales[2] = {0xAA, 0xAA};
    megamoe_tensor v = api_tensor(values, MEGAMOE_F32, 2, 1, 16, 0);
    megamoe_tensor c = api_tensor(codes, MEGAMOE_E2M1X2, 2, 1, 16, 0);
    megamoe_tensor s = api_tensor(scales, MEGAMOE_E4M3, 2, 1, 1, 0);
    megamoe_tensor g = api_tensor(globals, MEGAMOE_F32, 1, 1, 0, 0);
    const megamoe_status bad = MEGAMOE_INVALID_ARGUMENT;
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(megamoe_quantize(device, &v, &bad_globals[i], &c, &s, &g, NULL), bad);
    assert_int_equal(megamoe_quantize(NULL, &v, NULL, &c, &s, &g, NULL), bad);
    assert_int_equal(megamoe_quantize(device, NULL, NULL, &c, &s, &g, NULL), bad);
    assert_int_equal(megamoe_quantize(device, &v, NULL, NULL, &s, &g, NULL), bad);
    assert_int_equal(megamoe_quantize(device, &v, NULL, &c, &s, NULL, NULL), bad);
    v.extent[1] = 24;
    assert_int_equal(megamoe_quantize(device, &v, NULL, &c, &s, &g, NULL), bad);
    assert_int_equal(scales[0], 0xAA);
    assert_true(globals[0] == 7);
    megamoe_device_close(device);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantize_golden_blocks),
        cmocka_unit_test(quantize_per_token),
        cmocka_unit_test(dequantize_every_product),
        cmocka_unit_test(dequantize_mxfp4),
        cmocka_unit_test(grouped_gemm),
        cmocka_unit_test(grouped_gemm_checks_its_offsets),
        cmocka_unit_test(quantize_checks_its_arguments),
    };
    return API_RUN(tests);
}
