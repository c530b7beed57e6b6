/* docs/numerics.md, "Router", read line by line: sort all experts by key, take the first K. */
#include "backend/reference/choice.h"

#include <math.h>

static double sigmoid(double z) {
    return 1.0 / (1.0 + exp(-z));
}

static double softplus(double z) {
    return fmax(z, 0.0) + log1p(exp(-fabs(z)));
}

/* How many of the allowed experts come before e: those with a larger key, and lower ids with an equal one. */
static uint32_t rank_of(uint32_t e, const float *keys, const bool *allowed, uint32_t count) {
    uint32_t before = 0;
    for (uint32_t i = 0; i < count; i++)
        if (allowed[i] && (keys[i] > keys[e] || (keys[i] == keys[e] && i < e))) before++;
    return before;
}

/* Keeps the experts of the groups_per_token best groups; a group's key is the sum of its two largest keys. */
static void limit_groups(const megamoe_shape *shape, const float *keys, bool *allowed) {
    uint32_t size = shape->expert_count / shape->group_count;
    float group_keys[MM_EXPERTS_MAX] = {0};
    bool all[MM_EXPERTS_MAX];
    for (uint32_t e = 0; e < shape->expert_count; e++) all[e] = true;
    for (uint32_t e = 0; e < shape->expert_count; e++)
        if (rank_of(e % size, keys + e / size * size, all, size) < 2) group_keys[e / size] += keys[e];
    for (uint32_t e = 0; e < shape->expert_count; e++)
        allowed[e] = rank_of(e / size, group_keys, all, shape->group_count) < shape->groups_per_token;
}

static void selection_keys(const megamoe_shape *shape, const mm_router *router, const float *z, float *keys) {
    for (uint32_t e = 0; e < shape->expert_count; e++) {
        float bias = router->bias ? router->bias[e] : 0.0f;
        switch (shape->score) {
        case MEGAMOE_SQRTSOFTPLUS: keys[e] = (float)sqrt(softplus(z[e])) + bias; break;
        case MEGAMOE_SIGMOID: keys[e] = (float)sigmoid(z[e]) + bias; break;
        case MEGAMOE_SOFTMAX_TOPK: keys[e] = z[e]; break;
        case MEGAMOE_TOPK_SOFTMAX: keys[e] = z[e] + bias; break;
        }
    }
}

/* The weight of expert e before normalization; `keys` are the selection keys of the K chosen for
 * topk_softmax. */
static double raw_weight(const megamoe_shape *shape, const float *z, const float *keys, const int32_t *ids,
                         uint32_t e) {
    double total = 0.0;
    switch (shape->score) {
    case MEGAMOE_SQRTSOFTPLUS: return (float)sqrt(softplus(z[e]));
    case MEGAMOE_SIGMOID: return (float)sigmoid(z[e]); /* scores are fp32: far below zero they are 0 */
    case MEGAMOE_SOFTMAX_TOPK:
        for (uint32_t i = 0; i < shape->expert_count; i++) total += exp((double)z[i] - (double)z[e]);
        return 1.0 / total;
    case MEGAMOE_TOPK_SOFTMAX:
        for (uint32_t k = 0; k < shape->experts_per_token; k++) total += exp((double)keys[ids[k]] - (double)keys[e]);
        return 1.0 / total;
    }
    return NAN;
}

bool mm_reference_choose(const megamoe_shape *shape, const mm_router *router, const float *z, int32_t token_id,
                         int32_t *ids, float *weights) {
    uint32_t expert_count = shape->expert_count, k_count = shape->experts_per_token;
    float keys[MM_EXPERTS_MAX];
    bool allowed[MM_EXPERTS_MAX], some_finite = false, good = true;
    double raw[MM_EXPERTS_PER_TOKEN_MAX], sum = 0.0;
    for (uint32_t k = 0; k < k_count; k++) {
        ids[k] = -1;
        weights[k] = 0.0f;
    }
    for (uint32_t e = 0; e < expert_count; e++) {
        if (isnan(z[e])) return false;
        some_finite |= z[e] > -INFINITY;
        allowed[e] = true;
    }
    if (!some_finite) return false;
    if (shape->hash_routed && (token_id < 0 || (uint32_t)token_id >= router->vocabulary)) return false;

    selection_keys(shape, router, z, keys);
    if (shape->group_count > 1) limit_groups(shape, keys, allowed);
    for (uint32_t e = 0; e < expert_count; e++) {
        uint32_t rank = allowed[e] ? rank_of(e, keys, allowed, expert_count) : k_count;
        if (rank < k_count) ids[rank] = (int32_t)e;
    }
    for (uint32_t k = 0; k < k_count && shape->hash_routed; k++)
        ids[k] = router->token_experts[(size_t)token_id * k_count + k];

    for (uint32_t k = 0; k < k_count; k++) {
        raw[k] = raw_weight(shape, z, keys, ids, (uint32_t)ids[k]);
        good &= isfinite((float)raw[k]);
        sum += raw[k];
    }
    good &= isfinite((float)sum);
    for (uint32_t k = 0; k < k_count; k++) {
        double divisor = 1.0;
        if (shape->normalize_weights && shape->score != MEGAMOE_TOPK_SOFTMAX)
            divisor = sum + (shape->score == MEGAMOE_SIGMOID ? 1e-20 : 0.0);
        weights[k] = good && divisor > 0.0 ? (float)(raw[k] / divisor * shape->routed_scale) : 0.0f;
        if (!good) ids[k] = -1;
    }
    return good;
}
