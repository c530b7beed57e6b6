/*
 * Expert GEMMs for experts with at most 16 rows, at memory bandwidth: L1 with its activation, and L2.
 *
 * Weights are the M operand of mma.sync m16n8k16, tokens the N. A CTA (one per multiprocessor) works on a contiguous
 * run of items of 32 weight rows (L1: 16 gate + 16 up rows), brought by padded 2-D tensor copies into a ring of
 * shared-memory slots. A producer thread fills slots. Sixteen consumer warps split an item's K; their activations stay
 * in registers for as long as the CTA stays with one entry. Partial sums go through shared memory to three service
 * warps, which add them in a fixed order, apply the epilogue and store.
 *
 * Sixteen rows of more than 28 groups of 128 do not fit in registers: then a cluster of two CTAs works on the same
 * items, each on half of K, and an item's two tiles of 16 MMA rows are finished by one CTA each. CTA r multiplies the
 * other's tile first and sends the sum through distributed shared memory while it multiplies tile r, so that neither
 * waits.
 *
 * MMA rows g and g + 8 are a gate and an up row of the same feature, so that a lane ends up with both.
 * Numbers and what failed before: docs/decisions, "GPU kernels: predictions and outcomes".
 */
#ifndef MM_CUDA_DECODE_CUH
#define MM_CUDA_DECODE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "backend/cuda/epilogue.cuh"

enum {
    DECODE_WARPS = 16,
    DECODE_SERVICE_WARPS = 3, /* tokens 0..7 of the first tile, of the second (not in clusters), tokens 8..15 of both */
    DECODE_PRODUCER = (DECODE_WARPS + DECODE_SERVICE_WARPS) * 32, /* the first thread of the last warp */
    DECODE_THREADS = DECODE_PRODUCER + 32,
    DECODE_BUFFERS = 2,                    /* of partial sums, one per tile of an item */
    DECODE_PARTIALS = DECODE_WARPS * 1024, /* bytes of a buffer: 16 warps x 2 token groups x 16 x 8 fp32 */
    DECODE_SENT = 512,                     /* bytes of a tile's sums for a group of tokens, as they are sent */
    DECODE_SLOTS_MAX = 8,
    /* setmaxnreg deals in what the launch got: 20 warps x 96 = 16 x 104 + 4 x 64. A 21st warp would leave 80 each. */
    DECODE_CONSUMER_REGISTERS = 104,
    DECODE_SERVICE_REGISTERS = 64,
};

/*
 * A warp's share of `quarters * 16` quarters of 128-groups: whole groups first, then a half, then a quarter, each dealt
 * out warp by warp, so that whole groups are read by 16-byte loads and every lane keeps its place t in a group. The
 * pitches of a slot are those of the instance, so that they are constants; see args.h.
 */
template <bool MX, int QUARTERS> struct decode_share {
    static constexpr int whole = QUARTERS / 4, half = QUARTERS / 2 % 2, quarter = QUARTERS % 2;
    static constexpr int units = whole + half + quarter;
    static constexpr uint32_t code_pitch = MM_CUDA_DECODE_CODE_PITCH(QUARTERS);
    static constexpr uint32_t scale_pitch = MM_CUDA_DECODE_SCALE_PITCH(MX, QUARTERS);
    static_assert(QUARTERS <= 7, "a lane holds sixteen tokens' activations of seven quarters, in 56 registers");
};

/* ptxas computes a lane's addresses again in every item rather than keep them; what a shuffle returns it has to keep.
 */
MM_DEVICE uint32_t decode_keep(uint32_t value) {
    return ptx::shfl_sync_idx(value, threadIdx.x % 32, ~0u);
}

/*
 * Where in a slot a lane's first code and scale of its row g are, per kind of unit. A scale is at an eighth (E8M0: a
 * sixteenth) of its code's place in the row; `early` bytes stand before the first code.
 */
template <bool MX, int QUARTERS> struct decode_places {
    uint32_t code[3], scale[3];
    __device__ __forceinline__ decode_places(int warp, int g, int t, uint32_t early) {
        using share = decode_share<MX, QUARTERS>;
        code[0] = warp * 64 + t * 16;
        code[1] = (share::whole * 16 + (warp >> 1)) * 64 + t * 16 + (warp & 1) * 8;
        code[2] = (share::whole * 16 + share::half * 8 + (warp >> 2)) * 64 + t * 16 + (warp & 3) * 4;
        for (int i = 0; i < 3; i++) {
            scale[i] = decode_keep(32 * share::code_pitch + g * share::scale_pitch + (code[i] >> (MX ? 4 : 3)));
            code[i] = decode_keep(code[i] + g * share::code_pitch + early);
        }
    }
};

/* Loads a warp's share of one row of staged activations; `groups` 128-groups exist, the others count as zero. */
template <int QUARTERS>
MM_DEVICE void decode_activations_load(const uint16_t *row, int groups, int warp, int t, uint4 *b /* [QUARTERS] */) {
    using share = decode_share<false, QUARTERS>;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int half_group = share::whole * 16 + (warp >> 1), half = warp & 1;
    const int quarter_group = share::whole * 16 + share::half * 8 + (warp >> 2), word = warp & 3;
    if (share::whole)
#pragma unroll
        for (int w = 0; w < 4; w++)
            b[w] = warp < groups ? ptx::ld_global_v4_u32(row + warp * 128 + w * 32 + t * 8) : zero;
    if (share::half)
#pragma unroll
        for (int w = 0; w < 2; w++)
            b[share::whole * 4 + w] = half_group < groups
                                          ? ptx::ld_global_v4_u32(row + half_group * 128 + (half * 2 + w) * 32 + t * 8)
                                          : zero;
    if (share::quarter)
        b[QUARTERS - 1] =
            quarter_group < groups ? ptx::ld_global_v4_u32(row + quarter_group * 128 + word * 32 + t * 8) : zero;
}

template <int COUNT> MM_DEVICE void decode_activations_transpose(int t, uint4 *b) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) b[i] = mm_quad_transpose(b[i], t, ~0u);
}

/* One word of the two rows of a lane against one or two groups of eight tokens. */
template <bool HEAVY>
MM_DEVICE void decode_word(float (&sum)[2][4], uint32_t q0, uint32_t q1, uint32_t s0, uint32_t s1, uint4 b0, uint4 b1) {
    uint32_t low[4], high[4];
    mm_codes_convert(q0, s0, low);
    mm_codes_convert(q1, s1, high);
    ptx::mma_m16n8k16_f32_bf16(sum[0], low[0], high[0], low[1], high[1], b0.x, b0.y);
    if (HEAVY) ptx::mma_m16n8k16_f32_bf16(sum[1], low[0], high[0], low[1], high[1], b1.x, b1.y);
    ptx::mma_m16n8k16_f32_bf16(sum[0], low[2], high[2], low[3], high[3], b0.z, b0.w);
    if (HEAVY) ptx::mma_m16n8k16_f32_bf16(sum[1], low[2], high[2], low[3], high[3], b1.z, b1.w);
}

/* A lane's codes and scale bytes of its rows g and g + 8 of a tile: the whole group, or the half and the quarter. */
struct decode_whole {
    uint4 code[2];
    uint32_t scale[2];
};
struct decode_rest {
    uint2 half[2];
    uint32_t quarter[2], half_scale[2], quarter_scale[2];
};

/* STEP: rows from row g to row g + 8 of the tile. */
template <bool MX, int QUARTERS, int STEP>
MM_DEVICE void decode_whole_load(decode_whole &u, const decode_places<MX, QUARTERS> &at, uint32_t codes,
                                 uint32_t scales) {
    using share = decode_share<MX, QUARTERS>;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t s = scales + at.scale[0] + r * STEP * share::scale_pitch;
        u.code[r] = ptx::ld_shared_v4_u32(codes + at.code[0] + r * STEP * share::code_pitch);
        u.scale[r] = MX ? ptx::ld_shared_u8(s) : ptx::ld_shared_u16(s);
    }
}

template <bool MX, int QUARTERS, int STEP>
MM_DEVICE void decode_rest_load(decode_rest &u, const decode_places<MX, QUARTERS> &at, uint32_t codes,
                                uint32_t scales) {
    using share = decode_share<MX, QUARTERS>;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t c = codes + r * STEP * share::code_pitch, s = scales + r * STEP * share::scale_pitch;
        if (share::half) u.half[r] = ptx::ld_shared_v2_u32(c + at.code[1]);
        if (share::half) u.half_scale[r] = ptx::ld_shared_u8(s + at.scale[1]);
        if (share::quarter) u.quarter[r] = ptx::ld_shared_u32(c + at.code[2]);
        if (share::quarter) u.quarter_scale[r] = ptx::ld_shared_u8(s + at.scale[2]);
    }
}

/* between: what to load halfway, when registers have become free. */
template <bool MX, int QUARTERS, bool HEAVY, typename BETWEEN>
MM_DEVICE void decode_whole_multiply(float (&sum)[2][4], const decode_whole &u, const uint4 *b /* [tokens][QUARTERS] */,
                                     BETWEEN between) {
    const uint4 *b1 = HEAVY ? b + QUARTERS : b;
    const uint2 s0 = mm_group_scales<MX>(u.scale[0]), s1 = mm_group_scales<MX>(u.scale[1]);
    decode_word<HEAVY>(sum, u.code[0].x, u.code[1].x, s0.x, s1.x, b[0], b1[0]);
    decode_word<HEAVY>(sum, u.code[0].y, u.code[1].y, s0.x, s1.x, b[1], b1[1]);
    between();
    decode_word<HEAVY>(sum, u.code[0].z, u.code[1].z, s0.y, s1.y, b[2], b1[2]);
    decode_word<HEAVY>(sum, u.code[0].w, u.code[1].w, s0.y, s1.y, b[3], b1[3]);
}

template <bool MX, int QUARTERS, bool HEAVY>
MM_DEVICE void decode_rest_multiply(float (&sum)[2][4], const decode_rest &u, const uint4 *b /* [tokens][QUARTERS] */) {
    using share = decode_share<MX, QUARTERS>;
    constexpr int first = share::whole * 4, last = QUARTERS - 1;
    const uint4 *b1 = HEAVY ? b + QUARTERS : b;
    uint2 s[2]; /* of the half and of the quarter */
#pragma unroll
    for (int r = 0; r < 2; r++)
        s[r] = mm_two_scales<MX>(share::half ? u.half_scale[r] : 0, share::quarter ? u.quarter_scale[r] : 0);
    if (share::half) {
        decode_word<HEAVY>(sum, u.half[0].x, u.half[1].x, s[0].x, s[1].x, b[first], b1[first]);
        decode_word<HEAVY>(sum, u.half[0].y, u.half[1].y, s[0].x, s[1].x, b[first + 1], b1[first + 1]);
    }
    if (share::quarter) decode_word<HEAVY>(sum, u.quarter[0], u.quarter[1], s[0].y, s[1].y, b[last], b1[last]);
}

/* What a warp needs to walk the CTA's items. */
struct decode_run {
    int32_t first, last, heavy, items; /* item run [first, last); entries below `heavy` are heavy; items per entry */
};

struct decode_shared {
    uint64_t partials_full[DECODE_BUFFERS], partials_free[DECODE_BUFFERS];
    uint64_t slot_full[DECODE_SLOTS_MAX], slot_free[DECODE_SLOTS_MAX];
    uint64_t sent_full[2][2]; /* by token group and turn: the other CTA's sums have come */
    decode_run run;
};

template <bool L1> MM_DEVICE int decode_items_per_entry(const mm_cuda_gemm_args &p) {
    return L1 ? p.n / 16 : (p.n + 31) / 32;
}

/* Heavy items take longer (weight to p.weight_light): runs are equal in weight, not in number. */
MM_DEVICE int decode_run_bound(const mm_cuda_gemm_args &p, uint32_t weight, int heavy_items, int light_items, int part,
                               int parts) {
    int heavy_weight = heavy_items * weight;
    int at = (int)((long long)(heavy_weight + light_items * (int)p.weight_light) * part / parts);
    return at < heavy_weight ? at / weight : heavy_items + (at - heavy_weight) / p.weight_light;
}

/* What is read of the plan before griddepcontrol.wait: start.cu may still be running, but the plan is in memory. */
MM_DEVICE int32_t decode_plan_read(const int32_t *at) {
    return (int32_t)ptx::ld_relaxed_gpu_u32(at);
}

template <bool L1, int CTAS> MM_DEVICE decode_run decode_run_find(const mm_cuda_gemm_args &p) {
    decode_run run;
    run.items = decode_items_per_entry<L1>(p);
    run.heavy = decode_plan_read(&p.plan->heavy);
    const int heavy_items = run.heavy * run.items;
    const int light_items = (decode_plan_read(&p.plan->count[p.list]) - run.heavy) * run.items;
    const int part = blockIdx.x / CTAS, parts = gridDim.x / CTAS;
    run.first = decode_run_bound(p, p.weight_heavy, heavy_items, light_items, part, parts);
    run.last = decode_run_bound(p, p.weight_heavy, heavy_items, light_items, part + 1, parts);
    return run;
}

/*
 * The 128-groups of K that are this CTA's: all, or the first or second part. The first part's are whole steps of 16
 * bytes of scales (MXFP4: four groups), as tensor copies ask of where a box begins.
 */
struct decode_part {
    int rank, first, count;
};
template <int CTAS> MM_DEVICE decode_part decode_part_find(const mm_cuda_gemm_args &p) {
    const int groups = (int)p.x_pitch / 128, half = (groups + 7) / 8 * 4;
    if (CTAS == 1) return {0, 0, groups};
    return ptx::cluster_ctarank() ? decode_part{1, half, groups - half} : decode_part{0, 0, half};
}

/* Brings the CTA's part of 32 rows; rows and columns beyond the matrix arrive as zeros. */
template <bool L1, bool MX, int QUARTERS, int CTAS>
MM_DEVICE void decode_issue(const mm_cuda_gemm_args &p, int expert, int item, int first_group, uint32_t dst,
                            uint32_t bar) {
    using share = decode_share<MX, QUARTERS>;
    const CUtensorMap *map = p.maps + (size_t)expert * 6 + (L1 ? 0 : 4);
    const uint32_t scales = dst + 32 * share::code_pitch;
    /* In 8-byte elements. The first of two parts starts 32 bytes early, so that both have the same bank-shifting pitch.
     */
    const int code_x = CTAS == 2 && first_group == 0 ? -4 : first_group * 8, scale_x = first_group * (MX ? 4 : 8) / 8;
    const int row0 = L1 ? item * 16 : item * 32, row1 = L1 ? row0 : row0 + 16, up = L1 ? 2 : 0;
    ptx::mbarrier_arrive_expect_tx(bar, 32 * (share::code_pitch + share::scale_pitch));
    ptx::cp_async_bulk_tensor_2d_no_hint(dst, map, code_x, row0, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(dst + 16 * share::code_pitch, map + up, code_x, row1, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(scales, map + 1, scale_x, row0, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(scales + 16 * share::scale_pitch, map + up + 1, scale_x, row1, bar);
}

/*
 * While this GEMM drains and L2's prologue runs, memory would idle: fetch the first items that this multiprocessor's
 * CTA of L2 will ask for into the L2 cache. Rows of 32 are contiguous in the checkpoint.
 */
MM_DEVICE void decode_next_prefetch(const mm_cuda_gemm_args &p, int heavy, int entries) {
    const int items = (p.k + 31) / 32, heavy_items = heavy * items, light_items = (entries - heavy) * items;
    const int first = decode_run_bound(p, p.next_weight_heavy, heavy_items, light_items, blockIdx.x, gridDim.x);
    const int end = decode_run_bound(p, p.next_weight_heavy, heavy_items, light_items, blockIdx.x + 1, gridDim.x);
    const int last = min(end, first + (int)p.next_items);
#pragma unroll 1
    for (int i = first; i < last; i++) {
        const mm_cuda_matrix *m = &p.experts[decode_plan_read(&p.entries[i / items].expert)].down;
        const uint32_t row = i % items * 32, rows = min(32u, p.k - row);
        ptx::cp_async_bulk_prefetch_L2_global(m->codes + row * m->row_bytes, rows * (uint32_t)m->row_bytes);
        ptx::cp_async_bulk_prefetch_L2_global(m->scales + row * m->scale_row_bytes,
                                              rows * (uint32_t)m->scale_row_bytes);
    }
}

/* The producer thread: every item of the CTA's run, in the order in which consumers walk it. */
template <bool L1, bool MX, int QUARTERS, int CTAS>
MM_DEVICE void decode_produce(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run &run, uint32_t slots) {
    const int first_group = decode_part_find<CTAS>(p).first;
    const uint32_t full = ptx::cvta_to_shared(sh.slot_full), free = ptx::cvta_to_shared(sh.slot_free);
    uint32_t slot = 0, phase = 1;
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, begin = i - a * run.items, end = min(run.last - a * run.items, run.items);
        const int expert = decode_plan_read(&p.entries[a].expert);
#pragma unroll 1
        for (int item = begin; item < end; item++) {
            ptx::mbarrier_wait_parity(free + slot * 8, phase);
            decode_issue<L1, MX, QUARTERS, CTAS>(
                p, expert, item, first_group, slots + slot * MM_CUDA_DECODE_SLOT_BYTES(MX, QUARTERS), full + slot * 8);
            if (++slot == p.slot_count) slot = 0, phase ^= 1;
        }
        i = a * run.items + end;
    }
    if (L1 && p.next_items) decode_next_prefetch(p, run.heavy, decode_plan_read(&p.plan->count[p.list]));
}

/* What a service warp knows of an entry: read once, so that no item waits for memory. */
struct decode_entry {
    const mm_cuda_expert *expert;
    mm_row_terms rows;            /* of the lane's tokens row and row + 1 */
    float gate_global, up_global; /* L2: up_global is down's */
    int row, left;
};

template <bool L1>
MM_DEVICE decode_entry decode_entry_read(const mm_cuda_gemm_args &p, int a, int group, int t, bool *active) {
    const mm_cuda_entry entry = p.entries[a];
    decode_entry d;
    d.expert = p.experts + entry.expert;
    d.row = entry.row + group * 8 + 2 * t, d.left = entry.count - group * 8 - 2 * t;
    d.gate_global = L1 ? d.expert->gate.global : 0.0f;
    d.up_global = L1 ? d.expert->up.global : d.expert->h_global * d.expert->down.global;
    if (L1) d.rows = mm_row_terms_read(p, d.row, d.left);
    *active = entry.count > group * 8;
    return d;
}

/* The epilogue of one tile of an item. */
template <bool L1>
MM_DEVICE void decode_store(const mm_cuda_gemm_args &p, const decode_entry &d, int tile, const float4 &s, int g) {
    if (L1) {
        mm_l1_feature f = {d.gate_global, d.up_global, 0.0f, 0.0f};
        if (p.biased) f = mm_l1_feature_read(p, d.expert, tile * 8 + g);
        mm_l1_store<false>(p, f, d.rows, MM_CODE_FACTOR, tile * 8, s.x, s.y, s.z, s.w, d.row, d.left, g);
    } else {
        mm_l2_feature f = {d.up_global, {0.0f, 0.0f}};
        if (p.biased) f = mm_l2_feature_read(p, d.expert, tile * 16 + g, 8);
        mm_l2_store<false>(p, f, MM_CODE_FACTOR, tile * 16 + g, 8, s.x, s.y, s.z, s.w, d.row, d.left);
    }
}

/* The sixteen warps' sums of a tile for a group of tokens, in their order; then the buffer is free again. */
MM_DEVICE float4 decode_partials_add(decode_shared &sh, int buffer, int group, int done, bool active,
                                     uint32_t partials) {
    const uint32_t lane = threadIdx.x % 32, from = partials + buffer * DECODE_PARTIALS + group * 512 + lane * 16;
    float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.partials_full[buffer]), done & 1);
    if (active) {
#pragma unroll 4
        for (int k = 0; k < DECODE_WARPS; k++) {
            float4 v = ptx::ld_shared_v4_f32(from + k * 1024);
            s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
        }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.partials_free[buffer]));
    return s;
}

/*
 * The turn-th sums of a group, to the same lanes of CTA `peer` of the cluster. A place is free again when its reader
 * sends the turn after: it has stored what it made of the sums before that, and this warp has received that turn.
 */
MM_DEVICE void decode_send(decode_shared &sh, uint32_t peer, int group, uint32_t turn, uint32_t sent, const float4 &s) {
    const uint32_t lane = threadIdx.x % 32, place = turn & 1;
    const ptx::u32x4 bits = {ptx::mov_b32_f32(s.x), ptx::mov_b32_f32(s.y), ptx::mov_b32_f32(s.z),
                             ptx::mov_b32_f32(s.w)};
    ptx::st_async_shared_cluster_v4_u32(
        ptx::mapa_shared_cluster(sent + (group * 2 + place) * DECODE_SENT + lane * 16, peer), bits,
        ptx::mapa_shared_cluster(ptx::cvta_to_shared(&sh.sent_full[group][place]), peer));
}

MM_DEVICE float4 decode_receive(decode_shared &sh, int group, uint32_t turn, uint32_t sent) {
    const uint32_t lane = threadIdx.x % 32, place = turn & 1;
    const uint32_t bar = ptx::cvta_to_shared(&sh.sent_full[group][place]);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(bar, DECODE_SENT);
    ptx::mbarrier_wait_parity(bar, turn >> 1 & 1);
    return ptx::ld_shared_v4_f32(sent + (group * 2 + place) * DECODE_SENT + lane * 16);
}

template <bool L1, int CTAS>
MM_DEVICE void decode_serve(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run &run, uint32_t partials) {
    const int warp = threadIdx.x / 32 - DECODE_WARPS, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int group = warp / 2, first = CTAS == 2 ? 0 : warp & 1, last = CTAS == 2 || group ? 1 : first; /* buffers */
    const uint32_t rank = CTAS == 2 ? ptx::cluster_ctarank() : 0, sent = partials + DECODE_BUFFERS * DECODE_PARTIALS;
    uint32_t turn = 0;
    int done = 0;
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, end = min(run.last - a * run.items, run.items);
        bool active;
        const decode_entry entry = decode_entry_read<L1>(p, a, group, t, &active);
#pragma unroll 1
        for (int item = i - a * run.items; item < end; item++, done++) {
#pragma unroll 1
            for (int buffer = first; buffer <= last; buffer++) {
                float4 s = decode_partials_add(sh, buffer, group, done, active, partials);
                if (!active) continue;
                if (CTAS == 2 && buffer == 0) {
                    decode_send(sh, rank ^ 1, group, turn, sent, s);
                    continue;
                }
                if (CTAS == 2) { /* the sum of two: their order does not matter */
                    const float4 other = decode_receive(sh, group, turn++, sent);
                    s.x += other.x, s.y += other.y, s.z += other.z, s.w += other.w;
                }
                decode_store<L1>(p, entry, item * 2 + (CTAS == 2 ? (int)rank : buffer), s, g);
            }
        }
        i = a * run.items + end;
    }
}

/* A consumer warp's partial sums into a buffer; `mine` is the lane's place in the first. */
template <bool HEAVY>
MM_DEVICE void decode_partials_store(decode_shared &sh, int buffer, int done, uint32_t mine, const float (&sum)[2][4]) {
    const uint32_t at = mine + buffer * DECODE_PARTIALS;
    ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.partials_free[buffer]), (done & 1) ^ 1);
    ptx::st_shared_v4_f32(at, sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
    if (HEAVY) ptx::st_shared_v4_f32(at + 512, sum[1][0], sum[1][1], sum[1][2], sum[1][3]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.partials_full[buffer]));
}

/*
 * This warp has read all it needs of the slot. Only after the sums are stored: they depend on every load from the slot,
 * whereas nothing keeps the barrier's arrival from overtaking loads whose values have not come, and the next bulk copy
 * from overwriting what those will read. (It did, twice in a thousand items.)
 */
MM_DEVICE void decode_slot_release(decode_shared &sh, uint32_t slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.slot_free[slot]));
}

template <bool VALUE> struct decode_flag { static constexpr bool value = VALUE; };

template <bool L1, bool MX, int QUARTERS, int CTAS>
MM_DEVICE void decode_consume(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run run, uint32_t slots,
                              uint32_t partials) {
    using share = decode_share<MX, QUARTERS>;
    constexpr uint32_t STEP = L1 ? 16 : 8, NEXT = L1 ? 8 : 16; /* rows to the other MMA half, and to the second tile */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const decode_part part = decode_part_find<CTAS>(p);
    const decode_places<MX, QUARTERS> at(warp, g, t, CTAS == 2 && part.rank == 0 ? 32 : 0);
    const uint32_t slot_bar = ptx::cvta_to_shared(sh.slot_full);
    const uint32_t swap = CTAS == 2 && part.rank == 0 ? 1 : 0; /* the tile that comes first */
    uint4 b[2 * QUARTERS];
    const uint32_t mine = decode_keep(partials + warp * 1024 + lane * 16);
    uint32_t slot = 0, phase = 0;
    int done = 0;
    auto item = [&](auto heavy) {
        constexpr bool HEAVY = decltype(heavy)::value;
        const uint32_t base = slots + slot * MM_CUDA_DECODE_SLOT_BYTES(MX, QUARTERS);
        decode_whole whole;
        decode_rest rest;
        auto codes = [&](uint32_t m) { return base + (m ^ swap) * (NEXT * share::code_pitch); };
        auto scales = [&](uint32_t m) { return base + (m ^ swap) * (NEXT * share::scale_pitch); };
        ptx::mbarrier_wait_parity(slot_bar + slot * 8, phase);
        if (share::whole) decode_whole_load<MX, QUARTERS, STEP>(whole, at, codes(0), scales(0));
#pragma unroll
        for (int m = 0; m < 2; m++) { /* what comes next is loaded while something else is multiplied */
            float sum[2][4] = {};
            auto load = [&]() { decode_rest_load<MX, QUARTERS, STEP>(rest, at, codes(m), scales(m)); };
            if (share::whole)
                decode_whole_multiply<MX, QUARTERS, HEAVY>(sum, whole, b, load);
            else
                load();
            if (share::whole && m == 0) decode_whole_load<MX, QUARTERS, STEP>(whole, at, codes(1), scales(1));
            decode_rest_multiply<MX, QUARTERS, HEAVY>(sum, rest, b);
            decode_partials_store<HEAVY>(sh, m, done, mine, sum);
        }
        decode_slot_release(sh, slot);
        done++;
        if (++slot == p.slot_count) slot = 0, phase ^= 1;
    };
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, begin = i - a * run.items, end = min(run.last - a * run.items, run.items);
        const mm_cuda_entry entry = p.entries[a];
        const uint16_t *x = p.x + part.first * 128;
        decode_activations_load<QUARTERS>(x + (size_t)(entry.row + min(g, entry.count - 1)) * p.x_pitch, part.count,
                                          warp, t, b);
        if (entry.count > MM_CUDA_DECODE_LIGHT)
            decode_activations_load<QUARTERS>(x + (size_t)(entry.row + min(8 + g, entry.count - 1)) * p.x_pitch,
                                              part.count, warp, t, b + QUARTERS);
        decode_activations_transpose<2 * QUARTERS>(t, b);
        if (entry.count > MM_CUDA_DECODE_LIGHT)
            for (int n = begin; n < end; n++) item(decode_flag<true>());
        else
            for (int n = begin; n < end; n++) item(decode_flag<false>());
        i = a * run.items + end;
    }
}

template <int CTAS> MM_DEVICE void decode_barriers_init(const mm_cuda_gemm_args &p, decode_shared &sh) {
    for (int i = 0; i < DECODE_BUFFERS; i++) {
        ptx::mbarrier_init(ptx::cvta_to_shared(&sh.partials_full[i]), DECODE_WARPS);
        ptx::mbarrier_init(ptx::cvta_to_shared(&sh.partials_free[i]), 2);
    }
    for (uint32_t i = 0; i < p.slot_count; i++) {
        ptx::mbarrier_init(ptx::cvta_to_shared(&sh.slot_full[i]), 1);
        ptx::mbarrier_init(ptx::cvta_to_shared(&sh.slot_free[i]), DECODE_WARPS);
    }
    for (int i = 0; CTAS == 2 && i < 4; i++) ptx::mbarrier_init(ptx::cvta_to_shared(&sh.sent_full[i / 2][i % 2]), 1);
    ptx::fence_mbarrier_init_release_cluster();
}

/* QUARTERS of the whole K. */
template <bool L1, bool MX, int QUARTERS> MM_DEVICE void decode_kernel(const mm_cuda_gemm_args &p) {
    constexpr int CTAS = MM_CUDA_DECODE_CTAS(QUARTERS), MINE = QUARTERS / CTAS;
    static_assert(QUARTERS % CTAS == 0, "both CTAs of a cluster have the same share");
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(decode_shared, sh, );
    const uint32_t slots = ptx::cvta_to_shared(dynamic);
    const uint32_t partials = slots + p.slot_count * MM_CUDA_DECODE_SLOT_BYTES(MX, MINE);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == DECODE_PRODUCER) {
        decode_barriers_init<CTAS>(p, sh);
        /* The plan is in memory (see run.c): weights may be fetched right away. */
        sh.run = decode_run_find<L1, CTAS>(p);
    }
    __syncthreads();
    if (CTAS == 2) ptx::barrier_cluster_arrive_relaxed(); /* waited for before the first sum is sent, or at the end */
    if (warp >= DECODE_WARPS) {
        ptx::setmaxnreg_dec<DECODE_SERVICE_REGISTERS>();
        if (threadIdx.x == DECODE_PRODUCER) decode_produce<L1, MX, MINE, CTAS>(p, sh, sh.run, slots);
        __syncwarp();
        ptx::griddepcontrol_wait();
        if (CTAS == 2) ptx::barrier_cluster_wait();
        /* With a cluster one warp serves both tiles of a group, in turn: that is what frees the places of sums sent. */
        if (warp < DECODE_WARPS + DECODE_SERVICE_WARPS && (CTAS == 1 || warp != DECODE_WARPS + 1))
            decode_serve<L1, CTAS>(p, sh, sh.run, partials);
    } else {
        ptx::setmaxnreg_inc<DECODE_CONSUMER_REGISTERS>();
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents(); /* whatever comes next reads the plan at once, and what goes with it */
        decode_consume<L1, MX, MINE, CTAS>(p, sh, sh.run, slots, partials);
        if (CTAS == 2) ptx::barrier_cluster_wait();
    }
}

#endif
