/*
 * The router: logits = hidden x gate weights, then choice and weights per token, as routing/router.c does on the host
 * with the same fp32 functions (numerics/scores.h). docs/numerics.md, "Router".
 *
 * Logits have three kernels. For few tokens, and for fp32 operands or batch_invariant at any count, both operands go
 * from memory to registers, and K is split into slices over blocks and into parts over warps; the sums are added in the
 * same order whatever the batch. An fp32 weight enters as three BF16 terms that add up to it exactly. For many tokens
 * mm_route_tile (and sm90/route.cu, on wgmma) multiplies tiles of shared memory. Experts are the M operand, tokens the
 * N.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "numerics/scores.h"

enum {
    ROUTE_WARPS = 8,
    CHOOSE_WARPS = 8,
    ROUTE_TILE = 128, /* experts and tokens of mm_route_tile */
    ROUTE_TILE_K = 64,
    ROUTE_STAGES = 3, /* 96 KiB, what sm_120 has */
    ROUTE_STAGE_BYTES = 2 * ROUTE_TILE * ROUTE_TILE_K * 2,
};

/* Eight values of a BF16 or F32 row, as they lie there. */
struct route_raw {
    uint4 part[2];
};

MM_DEVICE route_raw route_read(const void *rows, size_t row, uint32_t columns, bool f32, uint32_t k, bool inside) {
    route_raw raw = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}};
    if (!inside) return raw;
    const uint4 *from = (const uint4 *)((const char *)rows + (row * columns + k) * (f32 ? 4 : 2));
    raw.part[0] = from[0];
    if (f32) raw.part[1] = from[1];
    return raw;
}

/* The next BF16 term of two fp32 values, which lose it. An infinity is all in the first term: its difference from
 * itself, NaN, is not a term. */
MM_DEVICE uint32_t route_term(uint32_t &low, uint32_t &high) {
    const uint32_t pair = ptx::cvt_rn_bf16x2_f32(__uint_as_float(high), __uint_as_float(low));
    const float rest[2] = {__uint_as_float(low) - __uint_as_float(pair << 16),
                           __uint_as_float(high) - __uint_as_float(pair & 0xFFFF0000u)};
    low = fabsf(rest[0]) <= 3.402823466e+38f ? ptx::mov_b32_f32(rest[0]) : 0u;
    high = fabsf(rest[1]) <= 3.402823466e+38f ? ptx::mov_b32_f32(rest[1]) : 0u;
    return pair;
}

/* Eight values as four BF16 pairs; F32: the next term of each. */
MM_DEVICE uint4 route_pairs(route_raw &raw, bool f32) {
    if (!f32) return raw.part[0];
    uint4 pairs;
    pairs.x = route_term(raw.part[0].x, raw.part[0].y), pairs.y = route_term(raw.part[0].z, raw.part[0].w);
    pairs.z = route_term(raw.part[1].x, raw.part[1].y), pairs.w = route_term(raw.part[1].z, raw.part[1].w);
    return pairs;
}

/* Adds one part of K: M x 16 experts from `expert` on, N x 8 tokens from `token` on. F32: either operand is. */
template <int M, int N, bool F32>
MM_DEVICE void route_part(const mm_cuda_route_args &p, uint32_t part, uint32_t expert, uint32_t token,
                          float (&sum)[M][N][4]) {
    enum { FLIGHT = M * N > 1 ? F32 ? 1 : 2 : 4 }; /* steps that are read at a time */
    const uint32_t lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const uint32_t steps = (p.columns + 31) / 32, parts = p.split_count * ROUTE_WARPS;
    const bool weight_f32 = F32 && p.weight_f32, hidden_f32 = F32 && p.hidden_f32;
    const uint32_t end = steps * (part + 1) / parts;
    for (uint32_t step = steps * part / parts; step < end; step += FLIGHT) {
        route_raw x[FLIGHT][N], w[FLIGHT][M][2];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const uint32_t k = (step + i) * 32 + t * 8;
            const bool inside = step + i < end && k < p.columns;
#pragma unroll
            for (int m = 0; m < M * 2; m++) {
                const uint32_t row = expert + m * 8 + g;
                w[i][m / 2][m % 2] =
                    route_read(p.weight, row, p.columns, weight_f32, k, inside && row < p.expert_total);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint32_t row = token + n * 8 + g;
                x[i][n] = route_read(p.hidden, row, p.columns, hidden_f32, k, inside && row < p.token_count);
            }
        }
        __syncwarp(); /* or the loads would be moved down, each to its use */
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            uint4 term[N]; /* the first one is the rounded value */
#pragma unroll
            for (int n = 0; n < N; n++) term[n] = route_pairs(x[i][n], hidden_f32);
            for (int plane = 0; plane < (weight_f32 ? MM_CUDA_PLANES : 1); plane++)
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const uint4 low = route_pairs(w[i][m][0], weight_f32), high = route_pairs(w[i][m][1], weight_f32);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        ptx::mma_m16n8k16_f32_bf16(sum[m][n], low.x, high.x, low.y, high.y, term[n].x, term[n].y);
                        ptx::mma_m16n8k16_f32_bf16(sum[m][n], low.z, high.z, low.w, high.w, term[n].z, term[n].w);
                    }
                }
        }
    }
}

/* Block (M x 16 experts, N x 8 tokens, slice of K): writes logits[slice][token][expert]. One block for all slices adds
 * them in the order in which mm_route_choose would. */
template <int M, int N, bool F32> MM_DEVICE void route_logits(const mm_cuda_route_args &p) {
    constexpr int count = M * N * 128, each = (count + ROUTE_WARPS * 32 - 1) / (ROUTE_WARPS * 32);
    MM_SHARED_DYNAMIC(float, partial, 16); /* [ROUTE_WARPS][M][N][32][4] */
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t first_expert = blockIdx.x * M * 16, first_token = blockIdx.y * N * 8;
    float total[each] = {};
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    for (uint32_t slice = blockIdx.z; slice < p.split_count; slice += gridDim.z) {
        float sum[M][N][4] = {};
        route_part<M, N, F32>(p, slice * ROUTE_WARPS + warp, first_expert, first_token, sum);
#pragma unroll
        for (int i = 0; i < M * N; i++)
            *(float4 *)(partial + warp * count + i * 128 + lane * 4) =
                make_float4(sum[i / N][i % N][0], sum[i / N][i % N][1], sum[i / N][i % N][2], sum[i / N][i % N][3]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < each; i++) { /* the warps' sums of one (token, expert), in order */
            const uint32_t at = threadIdx.x + i * ROUTE_WARPS * 32;
            float slice_sum = 0.0f;
            for (int w = 0; w < ROUTE_WARPS && at < count; w++) slice_sum += partial[w * count + at];
            total[i] += slice_sum;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        const uint32_t at = threadIdx.x + i * ROUTE_WARPS * 32, in = at / 4 % 32, c = at % 4;
        const uint32_t token = first_token + at / 128 % N * 8 + (in & 3) * 2 + (c & 1),
                       expert = first_expert + at / (N * 128) * 16 + (in >> 2) + (c >> 1) * 8;
        if (at < count && token < p.token_count && expert < p.expert_total)
            p.logits[((size_t)blockIdx.z * p.token_count + token) * p.expert_total + expert] = total[i];
    }
}

#define ROUTE_KERNEL(name, m, n, f32)                                                                                  \
    extern "C" __global__ void __launch_bounds__(ROUTE_WARPS * 32) name(MM_GRID_CONSTANT(mm_cuda_route_args, args)) {  \
        route_logits<m, n, f32>(args);                                                                                 \
    }

ROUTE_KERNEL(mm_route_logits_few, 1, 1, false)
ROUTE_KERNEL(mm_route_logits, 2, 4, false)
ROUTE_KERNEL(mm_route_logits_f32_few, 1, 1, true)
ROUTE_KERNEL(mm_route_logits_f32, 2, 4, true)

/* The address of 16 bytes of a 128-byte row under the 128-byte swizzle of tensor copies. */
MM_DEVICE uint32_t route_place(uint32_t base, uint32_t row, uint32_t chunk) {
    return base + row * 128 + ((chunk ^ (row & 7)) << 4);
}

/* One stage: 4 k16-steps of a warp's 64 experts x 32 tokens. */
MM_DEVICE void route_multiply(float (&sum)[4][4][4], uint32_t weights, uint32_t tokens) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < ROUTE_TILE_K / 16; s++) {
        uint4 a[4], b[2];
#pragma unroll
        for (int m = 0; m < 4; m++)
            a[m] = ptx::ldmatrix_m8n8_x4_b16(route_place(weights, m * 16 + (lane & 15), s * 2 + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 2; n++)
            b[n] = ptx::ldmatrix_m8n8_x4_b16(
                route_place(tokens, n * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + (lane >> 3 & 1)));
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                ptx::mma_m16n8k16_f32_bf16(sum[m][n * 2], a[m].x, a[m].y, a[m].z, a[m].w, b[n].x, b[n].y);
                ptx::mma_m16n8k16_f32_bf16(sum[m][n * 2 + 1], a[m].x, a[m].y, a[m].z, a[m].w, b[n].z, b[n].w);
            }
    }
}

/* Block (128 experts, 128 tokens, part of K), BF16 operands: eight warps multiply, the ninth copies. */
extern "C" __global__ void __launch_bounds__(288)
    mm_route_tile(MM_GRID_CONSTANT(CUtensorMap, weights), MM_GRID_CONSTANT(CUtensorMap, hidden),
                  MM_GRID_CONSTANT(mm_cuda_route_args, p)) {
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(uint64_t, bars, [2 * ROUTE_STAGES]);
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u, full = ptx::cvta_to_shared(bars),
                   empty = full + ROUTE_STAGES * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t steps = (p.columns + ROUTE_TILE_K - 1) / ROUTE_TILE_K;
    const uint32_t first = steps * blockIdx.z / gridDim.z, count = steps * (blockIdx.z + 1) / gridDim.z - first;
    if (threadIdx.x == 0) {
        for (int i = 0; i < ROUTE_STAGES; i++)
            ptx::mbarrier_init(full + i * 8, 1), ptx::mbarrier_init(empty + i * 8, 8);
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (warp == 8) {
        for (uint32_t i = 0; i < count && lane == 0; i++) {
            const uint32_t slot = i % ROUTE_STAGES, base = shared + slot * ROUTE_STAGE_BYTES, bar = full + slot * 8;
            const int k = (int)(first + i) * ROUTE_TILE_K;
            ptx::mbarrier_wait_parity(empty + slot * 8, (i / ROUTE_STAGES & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(bar, ROUTE_STAGE_BYTES);
            ptx::cp_async_bulk_tensor_2d_no_hint(base, &weights, k, blockIdx.x * ROUTE_TILE, bar);
            ptx::cp_async_bulk_tensor_2d_no_hint(base + ROUTE_STAGE_BYTES / 2, &hidden, k, blockIdx.y * ROUTE_TILE,
                                                 bar);
        }
        return;
    }
    float sum[4][4][4] = {};
    const uint32_t row = warp / 4 * 64, column = warp % 4 * 32;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t slot = i % ROUTE_STAGES, base = shared + slot * ROUTE_STAGE_BYTES;
        ptx::mbarrier_wait_parity(full + slot * 8, i / ROUTE_STAGES & 1);
        /* A stage late: an arrival may overtake loads, and only that the products of the stage before were begun says
         * that its loads are done. */
        if (lane == 0 && i > 0) ptx::mbarrier_arrive(empty + (i - 1) % ROUTE_STAGES * 8);
        route_multiply(sum, base + row * 128, base + ROUTE_STAGE_BYTES / 2 + column * 128);
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const uint32_t token = blockIdx.y * ROUTE_TILE + column + i / 4 % 4 * 8 + (lane & 3) * 2 + (i & 1),
                       expert = blockIdx.x * ROUTE_TILE + row + i / 16 * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
        if (token < p.token_count && expert < p.expert_total)
            p.logits[((size_t)blockIdx.z * p.token_count + token) * p.expert_total + expert] =
                sum[i / 16][i / 4 % 4][i % 4];
    }
}

/* Keys as integers of the same order: -0 equals +0, and NaN, which marks experts that may not be chosen, is 0. */
MM_DEVICE uint32_t route_order(float key) {
    const uint32_t bits = ptx::mov_b32_f32(key + 0.0f);
    return key != key ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

MM_DEVICE float route_key(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}

struct route_best {
    uint32_t order;
    int32_t id;
};

/* The lane's largest of keys[lane + 32 i], the first of equals. */
MM_DEVICE route_best route_lane_best(const float *keys, uint32_t n) {
    route_best best = {0, -1};
#pragma unroll 4
    for (uint32_t e = threadIdx.x % 32; e < n; e += 32) {
        const uint32_t order = route_order(keys[e]);
        if (order > best.order) best = {order, (int32_t)e};
    }
    return best;
}

/* The ids of the `count` largest keys, largest first, ties to the lower id, at lanes 0 .. count - 1; -1 where there are
 * no more. Chosen keys become NaN. */
MM_DEVICE int32_t route_largest(float *keys, uint32_t n, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32;
    route_best best = route_lane_best(keys, n);
    int32_t chosen = -1;
    for (uint32_t k = 0; k < count; k++) {
        const uint32_t order = ptx::redux_sync_max(best.order, ~0u);
        const uint32_t id = ptx::redux_sync_min(best.order == order ? (uint32_t)best.id : ~0u, ~0u);
        if (order == 0) break;
        if (lane == k) chosen = (int32_t)id;
        if ((uint32_t)best.id == id) {
            keys[id] = __uint_as_float(0x7FC00000u);
            best = route_lane_best(keys, n);
        }
        __syncwarp();
    }
    return chosen;
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
    route_largest(group_keys, p.group_count, p.groups_per_token);
    for (uint32_t e = lane; e < p.expert_total; e += 32)
        if (group_keys[e / size] == group_keys[e / size]) keys[e] = __uint_as_float(0x7FC00000u);
    __syncwarp();
}

MM_DEVICE float route_score(uint32_t kind, float z) {
    return kind == MEGAMOE_SQRTSOFTPLUS ? mm_score_sqrtsoftplus(z) : mm_score_sigmoid(z);
}

/* About the same: off by less than 2^-20 of it, or by less than 2^-10 where softplus is so small that its own error
 * (2^-21) is what the root is taken of. Enough to tell which experts' scores have to be known. */
MM_DEVICE float route_score_near(uint32_t kind, float z) {
    constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;
    if (kind == MEGAMOE_SIGMOID) return ptx::rcp_approx_ftz_f32(1.0f + ptx::ex2_approx_ftz_f32(-z * log2_e));
    const float softplus =
        fmaxf(z, 0.0f) + ln_2 * ptx::lg2_approx_ftz_f32(1.0f + ptx::ex2_approx_ftz_f32(-fabsf(z) * log2_e));
    return ptx::ex2_approx_ftz_f32(0.5f * ptx::lg2_approx_ftz_f32(softplus));
}

MM_DEVICE bool route_by_score(const mm_cuda_route_args &p) {
    return p.score == MEGAMOE_SQRTSOFTPLUS || p.score == MEGAMOE_SIGMOID;
}

/* Whether the keys that a token begins with are only near the ones that decide. Groups need all of these. */
MM_DEVICE bool route_near(const mm_cuda_route_args &p) {
    return route_by_score(p) && (p.group_count == 1 || p.token_experts);
}

MM_DEVICE float route_bias(const mm_cuda_route_args &p, uint32_t e) {
    return p.bias && p.score != MEGAMOE_SOFTMAX_TOPK ? p.bias[e] : 0.0f;
}

/* What the warps of a token found among their logits. */
struct route_found {
    float largest, reach; /* reach: of |score| + |bias|, hence of a key's error */
    uint32_t nan;
};

/* Logits and keys of a token's experts first, first + stride, ...: the parts of K added in order. z: [E] logits, or the
 * scores where they are known. */
MM_DEVICE route_found route_keys(const mm_cuda_route_args &p, uint32_t token, uint32_t first, uint32_t stride, float *z,
                                 float *keys) {
    enum { FLIGHT = 4 }; /* loads at a time */
    route_found found = {-INFINITY, 0.0f, 0};
    for (uint32_t e0 = first; e0 < p.expert_total; e0 += FLIGHT * stride) {
        float logit[FLIGHT] = {};
#pragma unroll 4
        for (uint32_t s = 0; s < p.part_count; s++)
#pragma unroll
            for (int i = 0; i < FLIGHT; i++)
                if (e0 + i * stride < p.expert_total)
                    logit[i] += p.logits[((size_t)s * p.token_count + token) * p.expert_total + e0 + i * stride];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const uint32_t e = e0 + i * stride;
            if (e >= p.expert_total) break;
            if (p.part_count > 1) p.logits[(size_t)token * p.expert_total + e] = logit[i];
            z[e] = logit[i];
            found.nan |= logit[i] != logit[i];
            found.largest = fmaxf(found.largest, logit[i]);
            if (p.token_experts) continue;
            const float bias = route_bias(p, e), score = route_near(p) ? route_score_near(p.score, logit[i]) : logit[i];
            keys[e] = score + bias;
            found.reach = fmaxf(found.reach, fabsf(score) + fabsf(bias));
        }
    }
    if (route_by_score(p) && !route_near(p))
        for (uint32_t e = first; e < p.expert_total; e += stride) {
            z[e] = route_score(p.score, z[e]);
            keys[e] = z[e] + route_bias(p, e);
        }
    for (int i = 16; i; i >>= 1) found.largest = fmaxf(found.largest, __shfl_xor_sync(~0u, found.largest, i));
    for (int i = 16; i; i >>= 1) found.reach = fmaxf(found.reach, __shfl_xor_sync(~0u, found.reach, i));
    found.nan = __any_sync(~0u, found.nan);
    return found;
}

/* The lowest lane for which `is` holds; there is one. */
MM_DEVICE uint32_t route_first_lane(bool is) {
    const uint32_t lanes = ptx::vote_sync_ballot(is, ~0u);
    return (uint32_t)__popc((lanes & (0u - lanes)) - 1);
}

/* A bound that at least slots_per_token keys reach: that many lanes' largest do. */
MM_DEVICE uint32_t route_bound(const float *keys, uint32_t n, uint32_t count, float margin) {
    uint32_t best = route_lane_best(keys, n).order, bound = 0;
    for (uint32_t k = 0; k < count; k++) {
        bound = ptx::redux_sync_max(best, ~0u);
        if (threadIdx.x % 32 == route_first_lane(best == bound)) best = 0;
    }
    return bound ? route_order(route_key(bound) - margin) : 0;
}

/* The experts whose keys may be among the largest, in ascending order, as far as the list goes; how many there are. */
MM_DEVICE uint32_t route_candidates(const mm_cuda_route_args &p, float *keys, float *groups, float reach,
                                    uint32_t *list) {
    enum { FLIGHT = 4 };
    const uint32_t lane = threadIdx.x % 32;
    if (!route_near(p) && route_by_score(p) && p.group_count > 1) route_limit(p, keys, groups);
    const float margin = route_near(p) ? 0x1p-9f + reach * 0x1p-18f : 0.0f;
    const uint32_t bound = route_bound(keys, p.expert_total, p.slots_per_token, margin);
    uint32_t count = 0;
    for (uint32_t e0 = 0; e0 < p.expert_total; e0 += 32 * FLIGHT) {
        uint32_t order[FLIGHT];
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            const uint32_t e = e0 + i * 32 + lane;
            order[i] = e < p.expert_total ? route_order(keys[e]) : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            const uint32_t reached = ptx::vote_sync_ballot(order[i] != 0 && order[i] >= bound, ~0u);
            const uint32_t at = count + (uint32_t)__popc(reached & ((1u << lane) - 1));
            if ((reached >> lane & 1) && at < 32) list[at] = e0 + i * 32 + lane;
            count += (uint32_t)__popc(reached);
        }
    }
    return count;
}

/* Slot k's id at lane k, -1 if there is none, and its score. list: [32] scratch. */
MM_DEVICE int32_t route_choose(const mm_cuda_route_args &p, int32_t word, float *z, float *keys, float *groups,
                               uint32_t *list, float reach, float *score) {
    const uint32_t lane = threadIdx.x % 32, slots = p.slots_per_token;
    uint32_t count = slots;
    if (!p.token_experts)
        count = route_candidates(p, keys, groups, reach, list);
    else if (lane < slots)
        list[lane] = (uint32_t)p.token_experts[(size_t)word * slots + lane];
    __syncwarp();
    const bool all = count > 32; /* rare: many equal or nearly equal keys */
    const uint32_t mine = lane < count ? list[lane] : 0;
    float own = z[mine];
    if (route_near(p))
        for (uint32_t i = lane; i < (all ? p.expert_total : count); i += 32) {
            own = route_score(p.score, z[all ? i : mine]);
            if (all) z[i] = own, keys[i] = own + route_bias(p, i);
        }
    __syncwarp();
    if (p.token_experts) {
        *score = own;
        return lane < slots ? (int32_t)mine : -1;
    }
    if (all) {
        const int32_t id = route_largest(keys, p.expert_total, slots);
        if (id >= 0) *score = z[id];
        return id;
    }
    const float key = route_near(p) ? own + route_bias(p, mine) : keys[mine];
    uint32_t order = lane < count ? route_order(key) : 0;
    int32_t id = -1;
    for (uint32_t k = 0; k < slots; k++) { /* the list ascends: the first of equals is the lowest id */
        const uint32_t largest = ptx::redux_sync_max(order, ~0u), winner = route_first_lane(order == largest);
        const uint32_t its_id = __shfl_sync(~0u, mine, winner);
        const float its_score = __shfl_sync(~0u, own, winner);
        if (largest == 0) break;
        if (lane == k) id = (int32_t)its_id, *score = its_score;
        if (lane == winner) order = 0;
    }
    return id;
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

/* Lane k holds slot k's id and score. Returns slot k's weight before the division, as routing/router.c orders it. */
MM_DEVICE float route_weight(const mm_cuda_route_args &p, const float *z, float *keys, float largest, int32_t id,
                             float score) {
    const uint32_t lane = threadIdx.x % 32;
    const bool mine = lane < p.slots_per_token;
    if (p.score == MEGAMOE_SOFTMAX_TOPK) {
        const float total = route_softmax_total(z, p.expert_total, largest, keys);
        return mine ? mm_score_exp(z[id], largest) / total : 0.0f;
    }
    if (p.score != MEGAMOE_TOPK_SOFTMAX) return mine ? score : 0.0f;
    const float key = mine ? z[id] + (p.bias ? p.bias[id] : 0.0f) : 0.0f, best = __shfl_sync(~0u, key, 0);
    const float e = mine ? mm_score_exp(key, best) : 0.0f;
    float total = 0.0f;
    for (uint32_t k = 0; k < p.slots_per_token; k++) total += __shfl_sync(~0u, e, k);
    return e / total;
}

/* One warp, one token whose logits and keys are there. */
MM_DEVICE void route_token(const mm_cuda_route_args &p, uint32_t token, const route_found &found, float *z, float *keys,
                           float *groups, uint32_t *list) {
    const uint32_t lane = threadIdx.x % 32;
    const bool mine = lane < p.slots_per_token;
    const int32_t word = p.token_experts ? p.token_ids[token] : 0;
    bool routed = !found.nan && found.largest > -INFINITY && word >= 0 && (!word || (uint32_t)word < p.vocabulary);
    int32_t id = -1;
    float score = 0.0f, weight = 0.0f, sum = 0.0f;
    if (routed) {
        id = route_choose(p, word, z, keys, groups, list, found.reach, &score);
        routed = !__any_sync(~0u, mine && id < 0);
    }
    if (routed) {
        weight = route_weight(p, z, keys, found.largest, id, score);
        for (uint32_t k = 0; k < p.slots_per_token; k++) sum += __shfl_sync(~0u, weight, k);
        routed = fabsf(sum) <= 3.402823466e+38f;
        float divisor = p.normalize && p.score != MEGAMOE_TOPK_SOFTMAX ? sum : 1.0f;
        if (p.normalize && p.score == MEGAMOE_SIGMOID) divisor += 1e-20f;
        weight = divisor > 0.0f ? weight / divisor * p.scale : 0.0f;
    }
    if (mine) {
        p.expert_ids[(size_t)token * p.slots_per_token + lane] = routed ? id : -1;
        p.weights[(size_t)token * p.slots_per_token + lane] = routed ? weight : 0.0f;
    }
    if (lane == 0 && !routed && p.counters) atomicAdd(&p.counters->unrouted_tokens, 1ull);
}

/* token_warps warps read a token's logits, and the first of them chooses: many where there are few tokens. */
extern "C" __global__ void __launch_bounds__(CHOOSE_WARPS * 32)
    mm_route_choose(MM_GRID_CONSTANT(mm_cuda_route_args, p)) {
    MM_SHARED_DYNAMIC(float, choose_shared, 4); /* per token: list [32], z [E], keys [E], groups [group_count] */
    MM_SHARED(route_found, found, [CHOOSE_WARPS]);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / p.token_warps;
    const uint32_t token = blockIdx.x * (CHOOSE_WARPS / p.token_warps) + team, within = warp % p.token_warps;
    uint32_t *list = (uint32_t *)choose_shared + team * (32 + 2 * p.expert_total + p.group_count);
    float *z = (float *)list + 32, *keys = z + p.expert_total;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (token < p.token_count) {
        const route_found mine = route_keys(p, token, within * 32 + lane, p.token_warps * 32, z, keys);
        if (lane == 0) found[warp] = mine;
    }
    if (p.token_warps > 1)
        __syncthreads();
    else
        __syncwarp();
    if (token >= p.token_count || within > 0) return;
    route_found all = found[warp];
    for (uint32_t i = 1; i < p.token_warps; i++) {
        all.largest = fmaxf(all.largest, found[warp + i].largest);
        all.reach = fmaxf(all.reach, found[warp + i].reach);
        all.nan |= found[warp + i].nan;
    }
    route_token(p, token, all, z, keys, keys + p.expert_total, list);
}
