/*
 * SwiGLU and the router's scores against 60-digit values. Each fp32 operation may err by half an ulp and expf
 * and log1pf by one, so the results lie within a few 2^-24 of the golden ones, and within a few steps of
 * 2^-149 where the exponential is subnormal.
 */
#include "golden.h"

#include "numerics/scores.h"
#include "numerics/swiglu.h"

static const double rounding = 0x1p-24, smallest = 0x1p-149;

static void golden_swiglu(void **state) {
    golden g;
    golden_open(&g, "tests/golden/swiglu.txt");
    while (golden_next(&g, 300)) {
        mm_swiglu f;
        float gate, up;
        double expected, got, bound;
        f.alpha = mm_f32_from_bits(golden_hex(&g));
        f.beta = mm_f32_from_bits(golden_hex(&g));
        f.limit = mm_f32_from_bits(golden_hex(&g));
        if (f.limit == 0) f.limit = INFINITY;
        f.relu2 = golden_hex(&g) != 0;
        gate = mm_f32_from_bits(golden_hex(&g));
        up = mm_f32_from_bits(golden_hex(&g));
        expected = golden_real(&g);
        got = (double)mm_swiglu_apply(&f, f.relu2 ? NAN : gate, up); /* relu2 does not read the gate */
        bound = 8 * rounding * fabs(expected) + 4 * smallest * (1 + fabs((double)gate * (1 + fabs((double)up))));
        if (!(fabs(got - expected) <= bound))
            fail_msg("%s:%u: h(%a, %a) = %a, expected %a", g.path, g.line_number, (double)gate, (double)up, got,
                     expected);
    }
    (void)state;
}

/* The clamp must let NaN through, in either operand, with and without a limit: a NaN that vanishes hides a
 * fault. */
static void swiglu_keeps_nan(void **state) {
    const mm_swiglu families[] = {{1, 0, INFINITY, 0}, {1, 0, 10, 0}, {1.702f, 1, 7, 0}};
    const mm_swiglu relu2 = {1, 0, INFINITY, 1};
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        assert_true(isnan(mm_swiglu_apply(&families[i], NAN, 1)));
        assert_true(isnan(mm_swiglu_apply(&families[i], 1, NAN)));
    }
    assert_true(isnan(mm_swiglu_apply(&relu2, 1, NAN)));
    (void)state;
}

/* The nearest fp32 to `expected`, or so near to a midpoint that double precision cannot tell. */
static bool rounded_once(float got, double expected) {
    if (expected > 0x1.fffffefp+127) return got == INFINITY;
    return fabs((double)got - expected) <= rounding * 1.0000001 * fabs(expected) + smallest * 0.5000001;
}

/* Scores are computed in double and rounded once, so that near ties are broken alike by every backend. */
static void golden_scores(void **state) {
    golden g;
    golden_open(&g, "tests/golden/scores.txt");
    while (golden_next(&g, 100)) {
        float z = mm_f32_from_bits(golden_hex(&g));
        double root = golden_real(&g), sigmoid = golden_real(&g), exponential = golden_real(&g);
        if (!rounded_once(mm_score_sqrtsoftplus(z), root))
            fail_msg("sqrtsoftplus(%a) = %a, expected %a", (double)z, (double)mm_score_sqrtsoftplus(z), root);
        if (!rounded_once(mm_score_sigmoid(z), sigmoid))
            fail_msg("sigmoid(%a) = %a, expected %a", (double)z, (double)mm_score_sigmoid(z), sigmoid);
        if (!rounded_once(mm_score_exp(z, 3), exponential))
            fail_msg("exp(%a - 3) = %a, expected %a", (double)z, (double)mm_score_exp(z, 3), exponential);
    }
    (void)state;
}

/* A NaN logit must stay one, so that the router can leave the token unrouted. */
static void scores_of_special_logits(void **state) {
    assert_true(isnan(mm_score_sqrtsoftplus(NAN)));
    assert_true(isnan(mm_score_sigmoid(NAN)));
    assert_true(mm_score_sqrtsoftplus(INFINITY) == INFINITY);
    assert_true(mm_score_sqrtsoftplus(-INFINITY) == 0);
    assert_true(mm_score_sigmoid(INFINITY) == 1);
    assert_true(mm_score_sigmoid(-INFINITY) == 0);
    assert_true(mm_score_sqrtsoftplus(-0.0f) == mm_score_sqrtsoftplus(0.0f));
    (void)state;
}

/* Larger logits never score less: otherwise the choice of experts would depend on rounding accidents. */
static void scores_are_monotone(void **state) {
    float z = -110, root = 0, sigmoid = 0;
    for (; z < 40; z += 0.0009765625f) {
        float next_root = mm_score_sqrtsoftplus(z), next_sigmoid = mm_score_sigmoid(z);
        assert_true(next_root >= root && next_sigmoid >= sigmoid);
        root = next_root;
        sigmoid = next_sigmoid;
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_swiglu),       cmocka_unit_test(swiglu_keeps_nan),
        cmocka_unit_test(golden_scores),       cmocka_unit_test(scores_of_special_logits),
        cmocka_unit_test(scores_are_monotone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
