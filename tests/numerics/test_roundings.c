/*
 * fp32 to E2M1, E4M3 and BF16: the golden vectors, then a sweep of the fp32 line judged by comparison with
 * exact midpoints in double. `--exhaustive` sweeps all 2^32 floats (some minutes); the default takes every
 * exponent with every upper mantissa and the low bits around a tie, and two million random patterns.
 */
#include "golden.h"

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

/* Magnitudes by code, read from the golden file, so that the judge shares no decoder with what it judges. */
typedef struct judge {
    double midpoint[127]; /* midpoint[c]: between the values of codes c and c + 1 */
    unsigned top, sign;
} judge;

static void judge_load(judge *j, const char *wanted, unsigned top, unsigned sign) {
    double value[128];
    golden g;
    golden_open(&g, "tests/golden/codes.txt");
    while (golden_next(&g, 1)) {
        bool ours = !strcmp(golden_word(&g), wanted);
        unsigned code = golden_hex(&g);
        uint32_t bits = golden_hex(&g);
        if (ours && code <= top) value[code] = (double)mm_f32_from_bits(bits);
    }
    for (unsigned c = 0; c < top; c++) j->midpoint[c] = (value[c] + value[c + 1]) / 2;
    j->top = top;
    j->sign = sign;
}

/* The code nearest to x: past midpoint c the answer is above c, on it the even one of c and c + 1. */
static unsigned judge_code(const judge *j, float x) {
    double a = fabs((double)x);
    unsigned low = 0, high = j->top; /* the answer lies in [low, high] */
    while (low < high) {
        unsigned c = (low + high) / 2;
        bool above = a > j->midpoint[c] || (a == j->midpoint[c] && c % 2 == 1);
        if (above)
            low = c + 1;
        else
            high = c;
    }
    return low | (signbit(x) ? j->sign : 0);
}

/* The neighbors of x in BF16 as doubles; beyond the largest finite the next one is 2^128 and stands for
 * infinity. */
static unsigned judge_bf16(uint32_t bits) {
    uint32_t below = bits & 0x7FFF0000u, above = below + 0x10000u;
    double x = fabs((double)mm_f32_from_bits(bits)), low = (double)mm_f32_from_bits(below);
    double high = above == 0x7F800000u ? ldexp(1, 128) : (double)mm_f32_from_bits(above);
    double middle = (low + high) / 2;
    bool up = x > middle || (x == middle && (below >> 16) % 2 == 1);
    return (up ? above : below) >> 16 | (bits >> 31) << 15;
}

static judge e2m1, e4m3;

static void judge_all(uint32_t bits) {
    float x = mm_f32_from_bits(bits);
    if (x != x) {
        if (mm_e2m1_from_f32(x) != 0 || mm_e4m3_from_f32(x) != 0x7F || (mm_bf16_from_f32(x) & 0x7FFF) <= 0x7F80)
            fail_msg("NaN %08x", bits);
        return;
    }
    if (mm_e2m1_from_f32(x) != judge_code(&e2m1, x))
        fail_msg("e2m1 of %a (%08x): %x, expected %x", (double)x, bits, mm_e2m1_from_f32(x), judge_code(&e2m1, x));
    if (mm_e4m3_from_f32(x) != judge_code(&e4m3, x))
        fail_msg("e4m3 of %a (%08x): %x, expected %x", (double)x, bits, mm_e4m3_from_f32(x), judge_code(&e4m3, x));
    if (isinf(x)) {
        assert_int_equal(mm_bf16_from_f32(x), bits >> 16);
        return;
    }
    if (mm_bf16_from_f32(x) != judge_bf16(bits))
        fail_msg("bf16 of %a (%08x): %x, expected %x", (double)x, bits, mm_bf16_from_f32(x), judge_bf16(bits));
}

static void golden_roundings(void **state) {
    golden g;
    golden_open(&g, "tests/golden/roundings.txt");
    while (golden_next(&g, 3000)) {
        const char *format = golden_word(&g);
        uint32_t bits = golden_hex(&g);
        unsigned expected = golden_hex(&g);
        float x = mm_f32_from_bits(bits);
        unsigned got = !strcmp(format, "e2m1")   ? mm_e2m1_from_f32(x)
                       : !strcmp(format, "e4m3") ? mm_e4m3_from_f32(x)
                                                 : mm_bf16_from_f32(x);
        if (got != expected) fail_msg("%s of %a (%08x): %x, expected %x", format, (double)x, bits, got, expected);
    }
    (void)state;
}

/* Every midpoint of both narrow formats itself, one ulp below and one above, both signs. */
static void every_tie(void **state) {
    const judge *judges[2] = {&e2m1, &e4m3};
    for (unsigned f = 0; f < 2; f++)
        for (unsigned c = 0; c < judges[f]->top; c++) {
            uint32_t tie = mm_f32_bits((float)judges[f]->midpoint[c]);
            assert_true((double)mm_f32_from_bits(tie) == judges[f]->midpoint[c]);
            for (uint32_t bits = tie - 1; bits <= tie + 1; bits++) {
                judge_all(bits);
                judge_all(bits | 0x80000000u);
            }
        }
    (void)state;
}

/* All signs, exponents and upper 7 mantissa bits, with the lower 16 around 0 and around the BF16 tie. */
static void dense_sweep(void **state) {
    const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (uint32_t upper = 0; upper < 65536; upper++)
        for (unsigned i = 0; i < sizeof lower / sizeof *lower; i++) judge_all(upper << 16 | lower[i]);
    (void)state;
}

static void random_sweep(void **state) {
    uint64_t seed = 0x9E3779B97F4A7C15u; /* xorshift: any bits will do, as long as each run sees the same */
    for (unsigned i = 0; i < 2000000; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        judge_all((uint32_t)(seed >> 32));
        /* and one in the range where the narrow formats differ: exponents 2^-12 .. 2^10 */
        judge_all((uint32_t)(seed & 0x807FFFFFu) | (115u + (uint32_t)(seed >> 40) % 23u) << 23);
    }
    (void)state;
}

static void all_floats(void **state) {
    uint32_t bits = 0;
    do judge_all(bits);
    while (++bits);
    (void)state;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_roundings),
        cmocka_unit_test(every_tie),
        cmocka_unit_test(dense_sweep),
        cmocka_unit_test(random_sweep),
    };
    const struct CMUnitTest exhaustive[] = {cmocka_unit_test(all_floats)};
    judge_load(&e2m1, "e2m1", 7, 8);
    judge_load(&e4m3, "e4m3", 0x7E, 0x80);
    if (argc > 1 && !strcmp(argv[1], "--exhaustive")) return cmocka_run_group_tests(exhaustive, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
