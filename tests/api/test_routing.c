/*
 * The router, through megamoe_layer_route: which experts, in which order, with which weights, and what
 * happens to tokens that cannot be routed. x is 1 in one column, so that a column of the router's weights is
 * a token's logits.
 */
#include "api.h"

#define H 16u
#define EXPERTS_MAX 896u

typedef struct router {
    api_layer layer;
    float *weights; /* F32 [E, H]: column t holds the logits of token t */
    megamoe_device *device;
    megamoe_layer *made;
    _Alignas(16) uint16_t hidden[H * H]; /* as device memory is */
    uint32_t tokens;
} router;

static router router_for(megamoe_shape shape, uint32_t tokens) {
    router r = {.tokens = tokens};
    r.layer = api_layer_random(shape, 1);
    r.weights = api_alloc(shape.expert_count * H * sizeof *r.weights);
    memset(r.weights, 0, shape.expert_count * H * sizeof *r.weights);
    r.layer.desc.router_weight = api_tensor(r.weights, MEGAMOE_F32, 2, shape.expert_count, H, 0);
    r.device = api_device(H);
    for (uint32_t t = 0; t < tokens; t++) r.hidden[t * H + t] = api_to_bf16(1.0f);
    return r;
}

static void set_logits(router *r, uint32_t token, const float *logits) {
    for (uint32_t e = 0; e < r->layer.desc.shape.expert_count; e++) r->weights[e * H + token] = logits[e];
}

static void set_bias(router *r, float *bias) {
    r->layer.desc.router_bias = api_tensor(bias, MEGAMOE_F32, 1, r->layer.desc.shape.expert_count, 0, 0);
}

static megamoe_batch batch_of(const router *r, const int32_t *token_ids) {
    return (megamoe_batch){
        .struct_size = sizeof(megamoe_batch), .token_count = r->tokens, .hidden = r->hidden, .token_ids = token_ids};
}

static void route(router *r, int32_t *ids, float *weights) {
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_batch batch = batch_of(r, NULL);
    r->made = api_create(r->device, &r->layer, &options);
    memset(ids, 0x7F, r->tokens * r->layer.desc.shape.experts_per_token * sizeof *ids);
    memset(weights, 0x7F, r->tokens * r->layer.desc.shape.experts_per_token * sizeof *weights);
    assert_ok(megamoe_layer_route(r->made, &batch, ids, weights, NULL));
}

static void done(router *r) {
    megamoe_layer_close(r->made);
    megamoe_device_close(r->device);
}

static void assert_close(float got, double expected) {
    if (!(fabs((double)got - expected) <= 1e-6 * fabs(expected)))
        fail_msg("%.9g instead of %.9g", (double)got, expected);
}

static megamoe_shape shape_of(megamoe_score score, uint32_t experts, uint32_t slots) {
    megamoe_shape shape = api_shape(H, 16, experts, slots);
    shape.score = score;
    return shape;
}

/* Equal logits, with zeros of both signs: the lowest ids win and share the weight, for every score and size.
 */
static void ties_go_to_the_lower_id(void **state) {
    static const uint32_t sizes[][2] = {{896, 16}, {512, 22}, {512, 10}, {384, 6}, {30, 8}, {1, 1}, {8, 8}};
    for (megamoe_score score = MEGAMOE_SQRTSOFTPLUS; score <= MEGAMOE_TOPK_SOFTMAX; score++)
        for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            uint32_t experts = sizes[i][0], slots = sizes[i][1];
            router r = router_for(shape_of(score, experts, slots), 2);
            float zeros[EXPERTS_MAX], ones[EXPERTS_MAX], weights[2 * 32];
            int32_t ids[2 * 32];
            for (unsigned e = 0; e < experts; e++) {
                zeros[e] = e % 3 ? -0.0f : 0.0f;
                ones[e] = 1.0f;
            }
            set_logits(&r, 0, zeros);
            set_logits(&r, 1, ones);
            route(&r, ids, weights);
            for (unsigned k = 0; k < 2 * slots; k++) {
                assert_int_equal(ids[k], k % slots);
                assert_close(weights[k], 1.0 / slots);
            }
            done(&r);
        }
    (void)state;
}

/* Better ones before, worse ones after, and three that tie for the last place: the lowest of the three has it. */
static void ties_at_the_last_place(void **state) {
    static const float logits[9] = {-1.0f, 0.5f, 2.0f, -2.0f, 0.5f, 3.0f, 0.5f, 0.25f, 1.0f};
    static const int32_t best[4] = {5, 2, 8, 1};
    for (megamoe_score score = MEGAMOE_SQRTSOFTPLUS; score <= MEGAMOE_TOPK_SOFTMAX; score++) {
        enum { TOKENS = 16 };
        router r = router_for(shape_of(score, 9, 4), TOKENS);
        int32_t ids[TOKENS * 4];
        float weights[TOKENS * 4];
        for (uint32_t t = 0; t < TOKENS; t++) set_logits(&r, t, logits);
        route(&r, ids, weights);
        for (unsigned i = 0; i < TOKENS * 4; i++) {
            assert_int_equal(ids[i], best[i % 4]);
            assert_true(weights[i] == weights[i % 4]);
        }
        done(&r);
    }
    (void)state;
}

/* In BF16 both of the first biases are 6.90625, and the 238 of the second router are 8 values. */
static void biases_stay_fp32(void **state) {
    static float pair[2] = {6.90f, 6.91f}, many[238];
    const megamoe_score scores[] = {MEGAMOE_SQRTSOFTPLUS, MEGAMOE_SIGMOID};
    for (unsigned i = 0; i < 2; i++) {
        int32_t ids[8];
        float weights[8];
        router two = router_for(shape_of(scores[i], 2, 1), 1);
        router all = router_for(shape_of(scores[i], 238, 8), 1);
        set_bias(&two, pair);
        route(&two, ids, weights);
        assert_int_equal(ids[0], 1);
        assert_close(weights[0], 1); /* the bias has no part in the weight */
        done(&two);
        for (unsigned e = 0; e < 238; e++) many[e] = 6.817f + (float)e * 0.001038f;
        set_bias(&all, many);
        route(&all, ids, weights);
        for (int k = 0; k < 8; k++) {
            assert_int_equal(ids[k], 237 - k); /* in descending order */
            assert_close(weights[k], 1.0 / 8);
        }
        done(&all);
    }
    (void)state;
}

/* Two tokens are chosen by hand; the weights come from the formulas, in double. */
static void weights_by_score(void **state) {
    static const float logits[5] = {0.5f, -1.25f, 2.0f, 1.5f, -3.0f}; /* best: 2, 3, 0 */
    static const int32_t best[3] = {2, 3, 0};
    for (megamoe_score score = MEGAMOE_SQRTSOFTPLUS; score <= MEGAMOE_TOPK_SOFTMAX; score++)
        for (unsigned normalized = 0; normalized < 2; normalized++) {
            megamoe_shape shape = shape_of(score, 5, 3);
            router r;
            double values[5], all = 0, chosen = 0;
            int32_t ids[3];
            float weights[3];
            shape.normalize_weights = normalized != 0;
            shape.routed_scale = 2.5f;
            r = router_for(shape, 1);
            set_logits(&r, 0, logits);
            route(&r, ids, weights);
            for (unsigned e = 0; e < 5; e++) {
                double z = (double)logits[e];
                values[e] = score == MEGAMOE_SQRTSOFTPLUS ? sqrt(log(1 + exp(z)))
                            : score == MEGAMOE_SIGMOID    ? 1 / (1 + exp(-z))
                                                          : exp(z);
                all += values[e];
            }
            for (unsigned k = 0; k < 3; k++) chosen += values[best[k]];
            for (unsigned k = 0; k < 3; k++) {
                double divisor = score == MEGAMOE_TOPK_SOFTMAX || normalized ? chosen
                                 : score == MEGAMOE_SOFTMAX_TOPK             ? all
                                                                             : 1;
                assert_int_equal(ids[k], best[k]);
                assert_close(weights[k], 2.5 * values[best[k]] / divisor);
            }
            done(&r);
        }
    (void)state;
}

/* gpt-oss: the router's bias belongs to the logits, hence to the choice and to the weights. */
static void bias_of_topk_softmax(void **state) {
    static const float logits[3] = {1.0f, 0.0f, 0.5f};
    static float bias[3] = {-2.0f, 1.5f, 0.0f};
    router r = router_for(shape_of(MEGAMOE_TOPK_SOFTMAX, 3, 2), 1);
    int32_t ids[2];
    float weights[2];
    set_logits(&r, 0, logits);
    set_bias(&r, bias);
    route(&r, ids, weights);
    assert_int_equal(ids[0], 1);
    assert_int_equal(ids[1], 2);
    assert_close(weights[0], exp(1.5) / (exp(1.5) + exp(0.5)));
    assert_close(weights[1], exp(0.5) / (exp(1.5) + exp(0.5)));
    done(&r);
    (void)state;
}

/* The best single expert stands in a group that loses by the sum of its two best. */
static void group_limited_routing(void **state) {
    static const float logits[8] = {3.0f, -5.0f, 1.0f, 0.9f, 0.5f, 0.4f, 1.1f, 0.7f};
    megamoe_shape shape = shape_of(MEGAMOE_SIGMOID, 8, 3);
    router r;
    int32_t ids[3];
    float weights[3];
    shape.group_count = 4;
    shape.groups_per_token = 2;
    r = router_for(shape, 1);
    set_logits(&r, 0, logits);
    route(&r, ids, weights);
    /* sums of sigmoids: 0.959, 1.442, 1.221, 1.419: groups 1 and 3 */
    assert_int_equal(ids[0], 6);
    assert_int_equal(ids[1], 2);
    assert_int_equal(ids[2], 3);
    done(&r);
    (void)state;
}

/* A NaN token among good ones: unrouted, counted, output 0, and the others as if it were not there. */
static void nan_token_is_unrouted(void **state) {
    enum { TOKENS = 4, E = 128, K = 8 };
    router r = router_for(shape_of(MEGAMOE_SQRTSOFTPLUS, E, K), TOKENS);
    int32_t clean_ids[TOKENS * K], ids[TOKENS * K];
    float clean_weights[TOKENS * K], weights[TOKENS * K];
    uint16_t output[TOKENS * H];
    megamoe_batch batch = batch_of(&r, NULL);
    megamoe_counters counters = {.struct_size = sizeof counters};
    uint32_t seed = 4;
    for (size_t i = 0; i < E * H; i++) r.weights[i] = (float)(api_random(&seed) % 4001) / 1000 - 2;
    route(&r, clean_ids, clean_weights);
    r.hidden[2 * H + 5] = 0x7FC0;
    assert_ok(megamoe_layer_route(r.made, &batch, ids, weights, NULL));
    for (unsigned i = 0; i < TOKENS * K; i++) {
        bool bad = i / K == 2;
        assert_int_equal(ids[i], bad ? -1 : clean_ids[i]);
        assert_true(weights[i] == (bad ? 0 : clean_weights[i]));
    }
    batch.output = output;
    memset(output, 0x7F, sizeof output);
    assert_ok(megamoe_layer_run(r.made, &batch, NULL));
    for (unsigned n = 0; n < H; n++) assert_int_equal(output[2 * H + n], 0);
    assert_ok(megamoe_layer_counters(r.made, &counters, NULL));
    assert_true(counters.unrouted_tokens >= 1);
    done(&r);
    (void)state;
}

/* One logit is enough to leave a token unrouted: NaN anywhere, or nothing but -infinity. */
static void bad_logits(void **state) {
    for (megamoe_score score = MEGAMOE_SQRTSOFTPLUS; score <= MEGAMOE_TOPK_SOFTMAX; score++)
        for (unsigned kind = 0; kind < 2; kind++) {
            router r = router_for(shape_of(score, 6, 2), 1);
            float logits[6] = {1, 2, -1, 0, 3, 1}, weights[2];
            int32_t ids[2];
            if (kind == 0) logits[2] = NAN; /* not among the best */
            for (unsigned e = 0; e < 6 && kind == 1; e++) logits[e] = -INFINITY;
            set_logits(&r, 0, logits);
            route(&r, ids, weights);
            for (unsigned k = 0; k < 2; k++) {
                assert_int_equal(ids[k], -1);
                assert_true(weights[k] == 0);
            }
            done(&r);
        }
    (void)state;
}

/* An infinite logit: a sigmoid of 1 is a score like others; a softmax or a sum of infinity is none. */
static void infinite_logit(void **state) {
    static const float logits[6] = {1, 2, -1, 0, INFINITY, 1};
    for (megamoe_score score = MEGAMOE_SQRTSOFTPLUS; score <= MEGAMOE_TOPK_SOFTMAX; score++) {
        router r = router_for(shape_of(score, 6, 2), 1);
        float weights[2];
        int32_t ids[2];
        set_logits(&r, 0, logits);
        route(&r, ids, weights);
        if (score == MEGAMOE_SIGMOID) {
            assert_int_equal(ids[0], 4);
            assert_int_equal(ids[1], 1);
            assert_close(weights[0], 1 / (1 + 1 / (1 + exp(-2))));
        } else {
            assert_int_equal(ids[0], -1);
            assert_int_equal(ids[1], -1);
            assert_true(weights[0] == 0 && weights[1] == 0);
        }
        done(&r);
    }
    (void)state;
}

/* Every chosen score underflows to 0: 0 / 0 would be NaN, the weights are 0. */
static void vanishing_scores(void **state) {
    static float bias[8] = {0.1f, 0.7f, 0.3f, 0.2f, 0.9f, 0.4f, 0.5f, 0.6f};
    static const megamoe_score scores[] = {MEGAMOE_SIGMOID, MEGAMOE_SQRTSOFTPLUS};
    for (unsigned i = 0; i < 2; i++) {
        megamoe_shape shape = shape_of(scores[i], 8, 2);
        float logits[8], weights[2];
        int32_t ids[2];
        for (unsigned e = 0; e < 8; e++) logits[e] = i ? -300.0f : -120.0f;
        shape.routed_scale = 2.5f;
        router r = router_for(shape, 1);
        set_logits(&r, 0, logits);
        set_bias(&r, bias);
        route(&r, ids, weights);
        assert_int_equal(ids[0], 4);
        assert_int_equal(ids[1], 1);
        assert_true(weights[0] == 0 && weights[1] == 0);
        done(&r);
    }
    (void)state;
}

/* Sigmoids about as small as the 1e-20 under their sum: each is half of it without, a third with it. */
static void epsilon_of_the_sum(void **state) {
    static const float logits[3] = {-46.0f, -46.5f, -60.0f};
    router r = router_for(shape_of(MEGAMOE_SIGMOID, 3, 2), 1);
    const double s[2] = {1 / (1 + exp(46.0)), 1 / (1 + exp(46.5))};
    float weights[2];
    int32_t ids[2];
    set_logits(&r, 0, logits);
    route(&r, ids, weights);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(ids[k], k);
        assert_close(weights[k], s[k] / (s[0] + s[1] + 1e-20));
    }
    done(&r);
    (void)state;
}

/* ---- hash layers ---- */

enum { VOCABULARY = 8, HASH_EXPERTS = 4 };

static router hash_router(void *table, megamoe_dtype dtype) {
    megamoe_shape shape = shape_of(MEGAMOE_SQRTSOFTPLUS, HASH_EXPERTS, 2);
    router r;
    shape.hash_routed = true;
    r = router_for(shape, 2);
    r.layer.desc.token_experts = api_tensor(table, dtype, 2, VOCABULARY, 2, 0);
    for (uint32_t e = 0; e < HASH_EXPERTS; e++) r.weights[e * H] = r.weights[e * H + 1] = (float)e * 0.5f - 1;
    return r;
}

static void fill_tables(int32_t *narrow, int64_t *wide) {
    for (int32_t i = 0; i < VOCABULARY * 2; i++) wide[i] = narrow[i] = (i * 3 + i / 2) % HASH_EXPERTS;
}

/* The table chooses, in its own order; the unbiased scores of its experts are the weights. */
static void hash_routing(void **state) {
    int32_t narrow[VOCABULARY * 2];
    int64_t wide[VOCABULARY * 2];
    const int32_t tokens[2] = {0, VOCABULARY - 1};
    fill_tables(narrow, wide);
    for (unsigned i = 0; i < 2; i++) {
        router r = hash_router(i ? (void *)wide : (void *)narrow, i ? MEGAMOE_I64 : MEGAMOE_I32);
        megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
        megamoe_batch batch = batch_of(&r, tokens);
        int32_t ids[4];
        float weights[4];
        r.made = api_create(r.device, &r.layer, &options);
        assert_ok(megamoe_layer_route(r.made, &batch, ids, weights, NULL));
        for (unsigned t = 0; t < 2; t++) {
            double s[2], sum = 0;
            for (unsigned k = 0; k < 2; k++) {
                assert_int_equal(ids[t * 2 + k], narrow[tokens[t] * 2 + (int32_t)k]);
                s[k] = sqrt(log(1 + exp(ids[t * 2 + k] * 0.5 - 1)));
                sum += s[k];
            }
            for (unsigned k = 0; k < 2; k++) assert_close(weights[t * 2 + k], s[k] / sum);
        }
        done(&r);
    }
    (void)state;
}

/* Token ids come from outside: refused by name, or unrouted and counted where the caller asks for that. */
static void bad_token_ids(void **state) {
    static const int32_t bad[] = {VOCABULARY, -1, INT32_MAX, INT32_MIN};
    int32_t narrow[VOCABULARY * 2], ids[4], tokens[2] = {3, 0};
    int64_t wide[VOCABULARY * 2];
    float weights[4];
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_batch batch;
    router r;
    fill_tables(narrow, wide);
    r = hash_router(narrow, MEGAMOE_I32);
    r.made = api_create(r.device, &r.layer, &options);
    batch = batch_of(&r, NULL);
    assert_int_equal(megamoe_layer_route(r.made, &batch, ids, weights, NULL), MEGAMOE_INVALID_ARGUMENT);
    assert_non_null(strstr(megamoe_error_message(), "token_ids"));
    batch = batch_of(&r, tokens);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        tokens[1] = bad[i];
        batch.allow_bad_routing = false;
        if (api_backend != MEGAMOE_CUDA_PORTABLE) { /* there they are in the GPU's memory: unrouted in any case */
            assert_int_equal(megamoe_layer_route(r.made, &batch, ids, weights, NULL), MEGAMOE_INVALID_ARGUMENT);
            assert_non_null(strstr(megamoe_error_message(), "token 1"));
        }
        batch.allow_bad_routing = true;
        assert_ok(megamoe_layer_route(r.made, &batch, ids, weights, NULL));
        assert_int_equal(ids[0], narrow[6]);
        assert_int_equal(ids[2], -1);
        assert_int_equal(ids[3], -1);
    }
    done(&r);
    (void)state;
}

static void bad_table_entry(void **state) {
    int32_t narrow[VOCABULARY * 2];
    int64_t wide[VOCABULARY * 2];
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    fill_tables(narrow, wide);
    for (unsigned i = 0; i < 2; i++) {
        router r = hash_router(narrow, MEGAMOE_I32);
        narrow[11] = i ? -1 : 9;
        assert_int_equal(megamoe_layer_create(r.device, &r.layer.desc, &options, &r.made), MEGAMOE_INVALID_ARGUMENT);
        assert_non_null(strstr(megamoe_error_message(), i ? "-1" : "9"));
        assert_null(r.made);
        done(&r);
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_go_to_the_lower_id), cmocka_unit_test(ties_at_the_last_place),
        cmocka_unit_test(biases_stay_fp32),        cmocka_unit_test(weights_by_score),
        cmocka_unit_test(bias_of_topk_softmax),    cmocka_unit_test(group_limited_routing),
        cmocka_unit_test(nan_token_is_unrouted),   cmocka_unit_test(bad_logits),
        cmocka_unit_test(infinite_logit),          cmocka_unit_test(vanishing_scores),
        cmocka_unit_test(epsilon_of_the_sum),      cmocka_unit_test(hash_routing),
        cmocka_unit_test(bad_token_ids),           cmocka_unit_test(bad_table_entry),
    };
    return API_RUN(tests);
}
