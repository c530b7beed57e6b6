/* Selection and weights for one token, in the order of docs/numerics.md: scores, choice, weights, scale. */
#include "routing/router.h"

#include "numerics/scores.h"

/*
 * The `count` largest of keys[0..n), in descending order. Only a strictly larger key passes another, so a tie
 * goes to the lower id, and -0 equals +0. allowed: NULL or one flag per id. Slots that find no id hold -1.
 */
static void choose_largest(const float *keys, uint32_t n, const bool *allowed, uint32_t count, int32_t *ids) {
    uint32_t found = 0;
    for (uint32_t k = 0; k < count; k++) ids[k] = -1;
    for (uint32_t e = 0; e < n; e++) {
        uint32_t k = found < count ? found : count;
        if (allowed && !allowed[e]) continue;
        if (k == count && !(keys[e] > keys[ids[count - 1]])) continue;
        if (k == count) k--;
        for (; k > 0 && keys[e] > keys[ids[k - 1]]; k--) ids[k] = ids[k - 1];
        ids[k] = (int32_t)e;
        if (found < count) found++;
    }
}

/* Group-limited routing: only experts of the best groups are allowed; a group counts by its two best keys. */
static void allow_best_groups(const megamoe_shape *shape, const float *keys, bool *allowed) {
    uint32_t group_size = shape->expert_count / shape->group_count;
    float group_keys[MM_EXPERTS_MAX];
    int32_t groups[MM_EXPERTS_MAX];
    for (uint32_t g = 0; g < shape->group_count; g++) {
        const float *members = keys + (size_t)g * group_size;
        int32_t best[2];
        choose_largest(members, group_size, NULL, 2, best);
        group_keys[g] = members[best[0]] + (best[1] < 0 ? 0.0f : members[best[1]]);
    }
    choose_largest(group_keys, shape->group_count, NULL, shape->groups_per_token, groups);
    for (uint32_t e = 0; e < shape->expert_count; e++) allowed[e] = false;
    for (uint32_t g = 0; g < shape->groups_per_token; g++)
        for (uint32_t i = 0; i < group_size; i++) allowed[(uint32_t)groups[g] * group_size + i] = true;
}

static float score(megamoe_score kind, float z) {
    return kind == MEGAMOE_SQRTSOFTPLUS ? mm_score_sqrtsoftplus(z) : mm_score_sigmoid(z);
}

/* DeepSeek and GLM: scores element by element; the bias takes part in the choice and never in a weight. */
static void choose_by_score(const megamoe_shape *shape, const mm_router *router, const float *logits, int32_t *ids) {
    float keys[MM_EXPERTS_MAX];
    bool allowed[MM_EXPERTS_MAX];
    bool limited = shape->group_count > 1;
    for (uint32_t e = 0; e < shape->expert_count; e++)
        keys[e] = score(shape->score, logits[e]) + (router->bias ? router->bias[e] : 0.0f);
    if (limited) allow_best_groups(shape, keys, allowed);
    choose_largest(keys, shape->expert_count, limited ? allowed : NULL, shape->experts_per_token, ids);
}

/* Qwen: the softmax is monotone, so the choice is made on the logits and ties of rounded probabilities cannot
 * matter. */
static void weigh_by_softmax(const megamoe_shape *shape, const float *logits, float largest, const int32_t *ids,
                             float *weights) {
    float total = 0.0f;
    for (uint32_t e = 0; e < shape->expert_count; e++) total += mm_score_exp(logits[e], largest);
    for (uint32_t k = 0; k < shape->experts_per_token; k++) weights[k] = mm_score_exp(logits[ids[k]], largest) / total;
}

/* Mixtral, gpt-oss: the router's bias belongs to its linear layer, hence to the logits and to the weights. */
static void choose_then_softmax(const megamoe_shape *shape, const mm_router *router, const float *logits, int32_t *ids,
                                float *weights) {
    float keys[MM_EXPERTS_MAX], total = 0.0f;
    for (uint32_t e = 0; e < shape->expert_count; e++) keys[e] = logits[e] + (router->bias ? router->bias[e] : 0.0f);
    choose_largest(keys, shape->expert_count, NULL, shape->experts_per_token, ids);
    for (uint32_t k = 0; k < shape->experts_per_token; k++)
        total += weights[k] = mm_score_exp(keys[ids[k]], keys[ids[0]]);
    for (uint32_t k = 0; k < shape->experts_per_token; k++) weights[k] /= total;
}

/* Divides by the sum if the model says so, applies the routed scale once; false if a weight is not finite. */
static bool finish_weights(const megamoe_shape *shape, float *weights) {
    float sum = 0.0f, divisor;
    for (uint32_t k = 0; k < shape->experts_per_token; k++) sum += weights[k];
    if (!isfinite(sum)) return false;
    divisor = !shape->normalize_weights || shape->score == MEGAMOE_TOPK_SOFTMAX ? 1.0f : sum;
    if (shape->normalize_weights && shape->score == MEGAMOE_SIGMOID) divisor += 1e-20f;
    for (uint32_t k = 0; k < shape->experts_per_token; k++)
        weights[k] = divisor > 0.0f ? weights[k] / divisor * shape->routed_scale : 0.0f;
    return true;
}

void mm_router_choose(const megamoe_shape *shape, const mm_router *router, const float *logits, int32_t token_id,
                      int32_t *ids, float *weights, mm_router_counts *counts) {
    float largest = -INFINITY;
    bool routed = true;
    for (uint32_t e = 0; e < shape->expert_count; e++) {
        routed &= logits[e] == logits[e];
        if (logits[e] > largest) largest = logits[e];
    }
    routed &= largest > -INFINITY;
    if (shape->hash_routed) routed &= token_id >= 0 && (uint32_t)token_id < router->vocabulary;
    if (routed) {
        if (shape->hash_routed)
            memcpy(ids, router->token_experts + (size_t)token_id * shape->experts_per_token,
                   shape->experts_per_token * sizeof *ids);
        else if (shape->score == MEGAMOE_SOFTMAX_TOPK)
            choose_largest(logits, shape->expert_count, NULL, shape->experts_per_token, ids);
        else if (shape->score != MEGAMOE_TOPK_SOFTMAX)
            choose_by_score(shape, router, logits, ids);

        if (shape->score == MEGAMOE_SOFTMAX_TOPK)
            weigh_by_softmax(shape, logits, largest, ids, weights);
        else if (shape->score == MEGAMOE_TOPK_SOFTMAX)
            choose_then_softmax(shape, router, logits, ids, weights);
        else
            for (uint32_t k = 0; k < shape->experts_per_token; k++) weights[k] = score(shape->score, logits[ids[k]]);
        routed = finish_weights(shape, weights);
    }
    if (routed) return;
    counts->unrouted_tokens++;
    for (uint32_t k = 0; k < shape->experts_per_token; k++) {
        ids[k] = -1;
        weights[k] = 0.0f;
    }
}
