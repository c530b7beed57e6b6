/* Every code of every format, against values derived from the formats' definitions, and every exact product.
 */
#include "golden.h"

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

/* Equal bits, except that any NaN serves for a NaN. */
static bool same_value(float got, uint32_t expected_bits) {
    bool expected_nan = (expected_bits & 0x7FFFFFFFu) > 0x7F800000u;
    return expected_nan ? got != got : mm_f32_bits(got) == expected_bits;
}

static void decode_all_codes(void **state) {
    golden g;
    golden_open(&g, "tests/golden/codes.txt");
    while (golden_next(&g, 16 + 256 + 256)) {
        const char *format = golden_word(&g);
        unsigned code = golden_hex(&g);
        uint32_t expected = golden_hex(&g);
        float got = !strcmp(format, "e2m1")   ? mm_e2m1_to_f32(code)
                    : !strcmp(format, "e4m3") ? mm_e4m3_to_f32(code)
                                              : mm_e8m0_to_f32(code);
        if (!same_value(got, expected))
            fail_msg("%s code 0x%02x: %a, expected bits %08x", format, code, (double)got, expected);
    }
    (void)state;
}

/* A finite code must come back from its own value; the sign of zero included. */
static void encode_returns_every_code(void **state) {
    for (unsigned code = 0; code < 16; code++) assert_int_equal(mm_e2m1_from_f32(mm_e2m1_to_f32(code)), code);
    for (unsigned code = 0; code < 256; code++) {
        unsigned expected = (code & 0x7Fu) == 0x7Fu ? 0x7Fu : code;
        assert_int_equal(mm_e4m3_from_f32(mm_e4m3_to_f32(code)), expected);
    }
    (void)state;
}

static void upper_nibble_is_ignored(void **state) {
    for (unsigned byte = 0; byte < 256; byte++)
        assert_int_equal(mm_f32_bits(mm_e2m1_to_f32(byte)), mm_f32_bits(mm_e2m1_to_f32(byte & 15u)));
    (void)state;
}

static void even_element_is_the_low_nibble(void **state) {
    const uint8_t codes[3] = {0x72, 0x1F, 0xA5};
    const unsigned expected[6] = {0x2, 0x7, 0xF, 0x1, 0x5, 0xA};
    for (size_t i = 0; i < 6; i++) assert_int_equal(mm_e2m1_unpack(codes, i), expected[i]);
    (void)state;
}

/* All 65,536: the value by ldexp from sign, exponent and mantissa, and the way back. */
static void bf16_all_values(void **state) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        int exponent = (int)(bits >> 7 & 255u), mantissa = (int)(bits & 127u);
        float got = mm_bf16_to_f32((uint16_t)bits);
        double magnitude = exponent == 0     ? ldexp(mantissa, -133)
                           : exponent == 255 ? (mantissa ? NAN : INFINITY)
                                             : ldexp(128 + mantissa, exponent - 134);
        if (isnan(magnitude)) {
            assert_true(isnan(got));
            /* quiet, the sign and the payload kept: never an infinity, never a number */
            assert_int_equal(mm_bf16_from_f32(got), bits | 0x40u);
            continue;
        }
        assert_true((double)fabsf(got) == magnitude);
        assert_int_equal(signbit(got) != 0, bits >> 15);
        assert_int_equal(mm_bf16_from_f32(got), bits);
    }
    (void)state;
}

/* A NaN whose payload lies in the lower half only would become an infinity if it were simply cut. */
static void bf16_keeps_nan(void **state) {
    const uint32_t nans[] = {0x7F800001u, 0x7F80FFFFu, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FC00000u};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        uint16_t got = mm_bf16_from_f32(mm_f32_from_bits(nans[i]));
        assert_true((got & 0x7FFF) > 0x7F80);
        assert_int_equal(got >> 15, nans[i] >> 31);
    }
    (void)state;
}

/* code * scale is exact in BF16 for all 16 x 254 pairs: what lets BF16 kernels be judged as if they were FP4.
 */
static void products_are_exact_in_bf16(void **state) {
    golden g;
    golden_open(&g, "tests/golden/products.txt");
    while (golden_next(&g, 254)) {
        unsigned scale = golden_hex(&g);
        for (unsigned code = 0; code < 16; code++) {
            float product = mm_e2m1_to_f32(code) * mm_e4m3_to_f32(scale);
            uint32_t expected = golden_hex(&g) << 16;
            if (mm_f32_bits(product) != expected || mm_f32_bits(mm_bf16_round(product)) != expected)
                fail_msg("code %x times scale %02x: %a, expected bits %08x", code, scale, (double)product, expected);
        }
    }
    (void)state;
}

static void mxfp4_values(void **state) {
    golden g;
    golden_open(&g, "tests/golden/mxfp4.txt");
    while (golden_next(&g, 255)) {
        unsigned scale = golden_hex(&g);
        for (unsigned code = 0; code < 16; code++) {
            float product = mm_e2m1_to_f32(code) * mm_e8m0_to_f32(scale);
            uint32_t expected = golden_hex(&g);
            if (mm_f32_bits(product) != expected)
                fail_msg("code %x times scale %02x: %a, expected bits %08x", code, scale, (double)product, expected);
        }
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_all_codes),
        cmocka_unit_test(encode_returns_every_code),
        cmocka_unit_test(upper_nibble_is_ignored),
        cmocka_unit_test(even_element_is_the_low_nibble),
        cmocka_unit_test(bf16_all_values),
        cmocka_unit_test(bf16_keeps_nan),
        cmocka_unit_test(products_are_exact_in_bf16),
        cmocka_unit_test(mxfp4_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
