/*
 * The router: logits = hidden x gate weights, then choice and weights per token, as routing/router.c does on the host
 * with the same fp32 functions (numerics/scores.h). docs/numerics.md, "Router".
 *
 * Logits: experts are the M operand, tokens the N, both read straight from memory; K is split over warps and, for few
 * tokens, over blocks, and added in a fixed order. An fp32 weight enters as three BF16 terms that add up to it exactly.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "numerics/bf16.h"
#include "numerics/scores.h"

enum { ROUTE_WARPS = 8, ROUTE_TOKENS = 32, ROUTE_TILES = ROUTE_TOKENS / 8, CHOOSE_WARPS = 4 };

/* Eight values at k of a BF16 or F32 row as four BF16 pairs; F32: the `plane`-th term, for hidden states the rounded
 * value. */
MM_DEVICE uint4 route_values(const void *row, bool f32, uint32_t k, int plane) {
    if (!f32) return *(const uint4 *)((const uint16_t *)row + k);
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[2] = {((const float *)row)[k + i * 2], ((const float *)row)[k + i * 2 + 1]};
#pragma unroll
        for (int j = 0; j < 2; j++)
            for (int q = 0; q < plane; q++) v[j] -= mm_bf16_round(v[j]);
                /* An infinity is all in the first term: its difference from itself, NaN, is not a term. */
#pragma unroll
        for (int j = 0; j < 2; j++) v[j] = plane && !(fabsf(v[j]) <= 3.402823466e+38f) ? 0.0f : v[j];
        pair[i] = ptx::cvt_rn_bf16x2_f32(v[1], v[0]);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Block (16 experts, ROUTE_TOKENS tokens, slice of K): writes logits[slice][token][expert]. */
extern "C" __global__ void __launch_bounds__(ROUTE_WARPS * 32)
    mm_route_logits(MM_GRID_CONSTANT(mm_cuda_route_args, p)) {
    MM_SHARED(float, partial, [ROUTE_WARPS][ROUTE_TILES][32][4]);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const uint32_t steps = p.columns / 32 + (p.columns % 32 != 0), parts = p.split_count * ROUTE_WARPS;
    const uint32_t part = blockIdx.z * ROUTE_WARPS + warp;
    const int planes = p.weight_f32 ? MM_CUDA_PLANES : 1;
    const size_t weight_row = (size_t)p.columns * (p.weight_f32 ? 4 : 2),
                 hidden_row = (size_t)p.columns * (p.hidden_f32 ? 4 : 2);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    float sum[ROUTE_TILES][4] = {};
#pragma unroll 2
    for (uint32_t step = steps * part / parts; step < steps * (part + 1) / parts; step++) {
        const uint32_t k = step * 32 + t * 8;
        const bool inside = k < p.columns;
        uint4 x[ROUTE_TILES];
#pragma unroll
        for (int n = 0; n < ROUTE_TILES; n++) {
            const uint32_t token = blockIdx.y * ROUTE_TOKENS + n * 8 + g;
            x[n] = make_uint4(0, 0, 0, 0);
            if (inside && token < p.token_count)
                x[n] = route_values((const char *)p.hidden + token * hidden_row, p.hidden_f32, k, 0);
        }
        for (int plane = 0; plane < planes; plane++) {
            uint4 w[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t expert = blockIdx.x * 16 + r * 8 + g;
                w[r] = make_uint4(0, 0, 0, 0);
                if (inside && expert < p.expert_total)
                    w[r] = route_values((const char *)p.weight + expert * weight_row, p.weight_f32, k, plane);
            }
#pragma unroll
            for (int n = 0; n < ROUTE_TILES; n++) {
                ptx::mma_m16n8k16_f32_bf16(sum[n], w[0].x, w[1].x, w[0].y, w[1].y, x[n].x, x[n].y);
                ptx::mma_m16n8k16_f32_bf16(sum[n], w[0].z, w[1].z, w[0].w, w[1].w, x[n].z, x[n].w);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < ROUTE_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) partial[warp][n][lane][i] = sum[n][i];
    __syncthreads();
    /* Thread i adds the warps' sums of one (token, expert), in order. */
    for (uint32_t i = threadIdx.x; i < ROUTE_TOKENS * 16; i += ROUTE_WARPS * 32) {
        const uint32_t n = i / 128, at = i / 4 % 32, c = i % 4;
        const uint32_t token = blockIdx.y * ROUTE_TOKENS + n * 8 + (at & 3) * 2 + (c & 1),
                       expert = blockIdx.x * 16 + (at >> 2) + (c >> 1) * 8;
        float total = 0.0f;
        for (int w = 0; w < ROUTE_WARPS; w++) total += partial[w][n][at][c];
        if (token < p.token_count && expert < p.expert_total)
            p.logits[((size_t)blockIdx.z * p.token_count + token) * p.expert_total + expert] = total;
    }
}

struct route_best {
    float key;
    int32_t id;
};

/* Larger key first, then the lower id. NaN never wins: it marks experts that may not be chosen. */
MM_DEVICE bool route_before(float key, int32_t id, const route_best &than) {
    return than.id < 0 || key > than.key || (key == than.key && id < than.id);
}

/* The best of keys[0..n) that comes after `last` in that order, over the lanes of a warp. */
MM_DEVICE route_best route_next(const float *keys, uint32_t n, const route_best &last) {
    route_best best = {0.0f, -1};
    for (uint32_t e = threadIdx.x % 32; e < n; e += 32) {
        const float key = keys[e];
        if (key != key) continue;
        if (last.id >= 0 && !(key < last.key || (key == last.key && (int32_t)e > last.id))) continue;
        if (route_before(key, (int32_t)e, best)) best = {key, (int32_t)e};
    }
    for (int i = 16; i; i >>= 1) {
        const route_best other = {__shfl_xor_sync(~0u, best.key, i), __shfl_xor_sync(~0u, best.id, i)};
        if (other.id >= 0 && route_before(other.key, other.id, best)) best = other;
    }
    return best;
}

/* Group-limited routing: keys of experts outside the best groups become NaN. group_keys: [group_count] scratch. */
MM_DEVICE void route_limit(const mm_cuda_route_args &p, float *keys, float *group_keys) {
    const uint32_t lane = threadIdx.x % 32, size = p.expert_total / p.group_count;
    for (uint32_t group = lane; group < p.group_count; group += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t e = group * size; e < (group + 1) * size; e++) {
            if (keys[e] > first)
                second = first, first = keys[e];
            else if (keys[e] > second)
                second = keys[e];
        }
        group_keys[group] = first + (size > 1 ? second : 0.0f);
    }
    __syncwarp();
    route_best last = {0.0f, -1};
    for (uint32_t i = 0; i < p.groups_per_token; i++) {
        last = route_next(group_keys, p.group_count, last);
        if (lane == 0) group_keys[p.group_count + i] = (float)last.id;
    }
    __syncwarp();
    for (uint32_t e = lane; e < p.expert_total; e += 32) {
        bool allowed = false;
        for (uint32_t i = 0; i < p.groups_per_token; i++)
            allowed |= (uint32_t)group_keys[p.group_count + i] == e / size;
        if (!allowed) keys[e] = __uint_as_float(0x7FC00000u);
    }
    __syncwarp();
}

MM_DEVICE float route_score(uint32_t kind, float z) {
    return kind == MEGAMOE_SQRTSOFTPLUS ? mm_score_sqrtsoftplus(z) : mm_score_sigmoid(z);
}

/* sum over e, in order, of exp(z_e - largest): lanes compute, lane 0 adds. terms: [E] scratch. */
MM_DEVICE float route_softmax_total(const float *z, uint32_t n, float largest, float *terms) {
    for (uint32_t e = threadIdx.x % 32; e < n; e += 32) terms[e] = mm_score_exp(z[e], largest);
    __syncwarp();
    float total = 0.0f;
    if (threadIdx.x % 32 == 0)
        for (uint32_t e = 0; e < n; e++) total += terms[e];
    return __shfl_sync(~0u, total, 0);
}

/* Lane k holds slot k's id. Returns slot k's weight before the division, as routing/router.c orders it. */
MM_DEVICE float route_weight(const mm_cuda_route_args &p, const float *z, float *keys, float largest, int32_t id) {
    const uint32_t lane = threadIdx.x % 32;
    const bool mine = lane < p.slots_per_token;
    if (p.score == MEGAMOE_SOFTMAX_TOPK) {
        const float total = route_softmax_total(z, p.expert_total, largest, keys);
        return mine ? mm_score_exp(z[id], largest) / total : 0.0f;
    }
    if (p.score != MEGAMOE_TOPK_SOFTMAX) return mine ? route_score(p.score, z[id]) : 0.0f;
    const float key = mine ? z[id] + (p.bias ? p.bias[id] : 0.0f) : 0.0f, best = __shfl_sync(~0u, key, 0);
    const float e = mine ? mm_score_exp(key, best) : 0.0f;
    float total = 0.0f;
    for (uint32_t k = 0; k < p.slots_per_token; k++) total += __shfl_sync(~0u, e, k);
    return e / total;
}

/* One warp, one token. z, keys: [E]; groups: [2 group_count]. */
MM_DEVICE void route_token(const mm_cuda_route_args &p, uint32_t token, float *z, float *keys, float *groups) {
    const uint32_t lane = threadIdx.x % 32;
    const bool by_score = p.score == MEGAMOE_SQRTSOFTPLUS || p.score == MEGAMOE_SIGMOID;
    const bool biased = p.bias && p.score != MEGAMOE_SOFTMAX_TOPK;
    float largest = -INFINITY;
    bool nan = false;
    for (uint32_t e = lane; e < p.expert_total; e += 32) {
        float logit = 0.0f;
        for (uint32_t s = 0; s < p.split_count; s++)
            logit += p.logits[((size_t)s * p.token_count + token) * p.expert_total + e];
        p.logits[(size_t)token * p.expert_total + e] = logit; /* this warp alone reads slice 0 of the token */
        z[e] = logit;
        nan |= logit != logit;
        largest = fmaxf(largest, logit);
        if (!p.token_experts) keys[e] = (by_score ? route_score(p.score, logit) : logit) + (biased ? p.bias[e] : 0.0f);
    }
    for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    bool routed = !__any_sync(~0u, nan) && largest > -INFINITY;
    __syncwarp();
    int32_t id = 0;
    if (p.token_experts) {
        const int32_t word = p.token_ids[token];
        routed &= word >= 0 && (uint32_t)word < p.vocabulary;
        if (routed && lane < p.slots_per_token) id = p.token_experts[(size_t)word * p.slots_per_token + lane];
    } else if (routed) {
        if (by_score && p.group_count > 1) route_limit(p, keys, groups);
        route_best last = {0.0f, -1};
        for (uint32_t k = 0; k < p.slots_per_token; k++) {
            last = route_next(keys, p.expert_total, last);
            if (lane == k) id = last.id;
        }
        routed = last.id >= 0;
    }
    float weight = 0.0f, sum = 0.0f;
    if (routed) {
        weight = route_weight(p, z, keys, largest, id);
        for (uint32_t k = 0; k < p.slots_per_token; k++) sum += __shfl_sync(~0u, weight, k);
        routed = fabsf(sum) <= 3.402823466e+38f;
        float divisor = p.normalize && p.score != MEGAMOE_TOPK_SOFTMAX ? sum : 1.0f;
        if (p.normalize && p.score == MEGAMOE_SIGMOID) divisor += 1e-20f;
        weight = divisor > 0.0f ? weight / divisor * p.scale : 0.0f;
    }
    if (lane < p.slots_per_token) {
        p.expert_ids[(size_t)token * p.slots_per_token + lane] = routed ? id : -1;
        p.weights[(size_t)token * p.slots_per_token + lane] = routed ? weight : 0.0f;
    }
    if (lane == 0 && !routed && p.counters) atomicAdd(&p.counters->unrouted_tokens, 1ull);
}

extern "C" __global__ void __launch_bounds__(CHOOSE_WARPS * 32)
    mm_route_choose(MM_GRID_CONSTANT(mm_cuda_route_args, p)) {
    MM_SHARED_DYNAMIC(float, choose_shared, 4); /* per warp: z [E], keys [E], groups [2 group_count] */
    const uint32_t warp = threadIdx.x / 32, token = blockIdx.x * CHOOSE_WARPS + warp;
    float *z = choose_shared + warp * 2 * (p.expert_total + p.group_count), *keys = z + p.expert_total;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (token < p.token_count) route_token(p, token, z, keys, keys + p.expert_total);
}
