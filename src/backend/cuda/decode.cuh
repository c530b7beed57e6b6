/*
 * Expert GEMMs for experts with at most 16 rows, at memory bandwidth: L1 with its activation, and L2.
 *
 * Weights are the M operand of mma.sync m16n8k16, tokens the N. A CTA (one per multiprocessor) works on a contiguous
 * run of items, brought by bulk copies into a ring of shared-memory slots:
 *     split item: 32 rows (L1: 16 gate + 16 up rows), K or half of K, by padded 2-D tensor copies
 *     full item:  L1 of light entries where K needs two passes: 8 gate + 8 up rows, all of K, by plain bulk copies
 * A producer thread fills slots. Sixteen consumer warps split an item's K; their activations stay in registers for as
 * long as the CTA stays with one entry. Partial sums go through shared memory to three service warps, which add them in
 * a fixed order, apply the epilogue and store. Where sixteen rows of all of K do not fit in registers (more than 28
 * groups of 128), heavy entries take two passes over the CTA's own run of items, with fp32 partial sums in global
 * scratch that only the thread that wrote them reads.
 *
 * MMA rows g and g + 8 are a gate and an up row of the same feature, so that a lane ends up with both.
 * Numbers and what failed before: docs/decisions, "GPU kernels: predictions and outcomes".
 */
#ifndef MM_CUDA_DECODE_CUH
#define MM_CUDA_DECODE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/quantize.cuh"

enum {
    DECODE_WARPS = 16,
    DECODE_SERVICE_WARPS = 3, /* tokens 0..7 of tile 0, of tile 1, and tokens 8..15 of both */
    DECODE_PRODUCER = (DECODE_WARPS + DECODE_SERVICE_WARPS) * 32, /* the first thread of the last warp */
    DECODE_THREADS = DECODE_PRODUCER + 32,
    DECODE_BUFFERS = 2,                    /* of partial sums, one per tile of an item */
    DECODE_PARTIALS = DECODE_WARPS * 1024, /* bytes of a buffer: 16 warps x 2 token groups x 16 x 8 fp32 */
    DECODE_SLOTS_MAX = 8,
    DECODE_LARGEST_BARRIER = 1, /* of service warps 0 and 1; 0 is everybody's */
    /* setmaxnreg deals in what the launch got: 20 warps x 96 = 16 x 104 + 4 x 64. A 21st warp would leave 80 each. */
    DECODE_CONSUMER_REGISTERS = 104,
    DECODE_SERVICE_REGISTERS = 64,
};

/*
 * A warp's share of `quarters * 16` quarters of 128-groups: whole groups first, then a half, then a quarter, each dealt
 * out warp by warp, so that whole groups are read by 16-byte loads and every lane keeps its place t in a group.
 */
template <int QUARTERS> struct decode_share {
    static constexpr int whole = QUARTERS / 4, half = QUARTERS / 2 % 2, quarter = QUARTERS % 2;
    static constexpr int units = whole + half + quarter;
};

/*
 * Byte offset of a lane's first code in a row, per kind of unit. Its scale is at an eighth (E8M0: a sixteenth) of it.
 * Units beyond the row are read as well, from whatever lies there: they meet activations of zero.
 */
template <bool MX, int QUARTERS> struct decode_places {
    uint32_t code[3], row_bytes;
    __device__ __forceinline__ decode_places(int warp, int t, int groups) {
        using share = decode_share<QUARTERS>;
        row_bytes = groups * 64;
        code[0] = warp * 64 + t * 16;
        code[1] = (share::whole * 16 + (warp >> 1)) * 64 + t * 16 + (warp & 1) * 8;
        code[2] = (share::whole * 16 + share::half * 8 + (warp >> 2)) * 64 + t * 16 + (warp & 3) * 4;
    }
    __device__ __forceinline__ uint32_t scale(int kind) const { return code[kind] >> (MX ? 4 : 3); }
};

/* Loads a warp's share of one row of staged activations; `groups` 128-groups exist, the others count as zero. */
template <int QUARTERS>
MM_DEVICE void decode_activations_load(const uint16_t *row, int groups, int warp, int t, uint4 *b /* [QUARTERS] */) {
    using share = decode_share<QUARTERS>;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int half_group = share::whole * 16 + (warp >> 1), half = warp & 1;
    const int quarter_group = share::whole * 16 + share::half * 8 + (warp >> 2), word = warp & 3;
#pragma unroll
    for (int i = 0; i < share::whole; i++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int group = i * 16 + warp;
            b[i * 4 + w] = group < groups ? ptx::ld_global_v4_u32(row + group * 128 + w * 32 + t * 8) : zero;
        }
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

/* A lane's codes and scales of one unit, for its rows g and g + 8. */
struct decode_unit {
    uint4 code[2];
    uint32_t scale[2];
};

template <bool MX, int QUARTERS>
MM_DEVICE void decode_unit_load(decode_unit &u, int i, const decode_places<MX, QUARTERS> &at, uint32_t codes,
                                uint32_t code_step, uint32_t scales, uint32_t scale_step) {
    using share = decode_share<QUARTERS>;
    const int kind = i < share::whole ? 0 : share::half && i == share::whole ? 1 : 2;
    shared_reads_unused(at.code[kind] + (kind ? 0 : i * 1024) >= at.row_bytes);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t c = codes + r * code_step, s = scales + r * scale_step;
        if (i < share::whole) {
            u.code[r] = ptx::ld_shared_v4_u32(c + at.code[0] + i * 1024);
            u.scale[r] =
                MX ? ptx::ld_shared_u8(s + at.scale(0) + i * 64) : ptx::ld_shared_u16(s + at.scale(0) + i * 128);
        } else if (share::half && i == share::whole) {
            uint2 v = ptx::ld_shared_v2_u32(c + at.code[1]);
            u.code[r].x = v.x, u.code[r].y = v.y;
            u.scale[r] = ptx::ld_shared_u8(s + at.scale(1));
        } else {
            u.code[r].x = ptx::ld_shared_u32(c + at.code[2]);
            u.scale[r] = ptx::ld_shared_u8(s + at.scale(2));
        }
    }
    shared_reads_unused(false);
}

template <bool MX, int QUARTERS, bool HEAVY>
MM_DEVICE void decode_unit_multiply(float (&sum)[2][4], const decode_unit &u, int i,
                                    const uint4 *b /* [tokens][QUARTERS] */) {
    using share = decode_share<QUARTERS>;
    const uint4 *b1 = HEAVY ? b + QUARTERS : b;
    if (i < share::whole) {
        uint2 s0 = mm_group_scales<MX>(u.scale[0]), s1 = mm_group_scales<MX>(u.scale[1]);
        decode_word<HEAVY>(sum, u.code[0].x, u.code[1].x, s0.x, s1.x, b[i * 4], b1[i * 4]);
        decode_word<HEAVY>(sum, u.code[0].y, u.code[1].y, s0.x, s1.x, b[i * 4 + 1], b1[i * 4 + 1]);
        decode_word<HEAVY>(sum, u.code[0].z, u.code[1].z, s0.y, s1.y, b[i * 4 + 2], b1[i * 4 + 2]);
        decode_word<HEAVY>(sum, u.code[0].w, u.code[1].w, s0.y, s1.y, b[i * 4 + 3], b1[i * 4 + 3]);
        return;
    }
    uint32_t s0 = mm_block_scale<MX>(u.scale[0]), s1 = mm_block_scale<MX>(u.scale[1]);
    bool half = share::half && i == share::whole;
    const int at = half ? share::whole * 4 : QUARTERS - 1;
    decode_word<HEAVY>(sum, u.code[0].x, u.code[1].x, s0, s1, b[at], b1[at]);
    if (half) decode_word<HEAVY>(sum, u.code[0].y, u.code[1].y, s0, s1, b[at + 1], b1[at + 1]);
}

/* What a warp needs to walk the CTA's items. */
struct decode_run {
    int32_t first, last, heavy, items; /* item run [first, last); entries below `heavy` are heavy; items per entry */
};

struct decode_shared {
    uint64_t partials_full[DECODE_BUFFERS], partials_free[DECODE_BUFFERS];
    uint64_t slot_full[DECODE_SLOTS_MAX], slot_free[DECODE_SLOTS_MAX];
    /* What service warps keep for decode_store_quantized: gate's, up's, h's global scale; blocks saturated, not finite.
     */
    alignas(16) float globals[DECODE_SERVICE_WARPS][4];
    uint32_t blocks[DECODE_SERVICE_WARPS][2];
    float largest[2][2][8]; /* by turn, tile, token: see decode_store_quantized */
    decode_run run;
};

template <bool L1> MM_DEVICE int decode_items_per_entry(const mm_cuda_gemm_args &p) {
    return L1 ? p.n / 16 : (p.n + 31) / 32;
}

/* Heavy items take longer (weight to p.weight_light): runs are equal in weight, not in number. */
MM_DEVICE int decode_run_bound(const mm_cuda_gemm_args &p, uint32_t weight, int heavy_items, int light_items, int cta) {
    int heavy_weight = heavy_items * weight;
    int at = (int)((long long)(heavy_weight + light_items * (int)p.weight_light) * cta / gridDim.x);
    return at < heavy_weight ? at / weight : heavy_items + (at - heavy_weight) / p.weight_light;
}

/* What is read of the plan before griddepcontrol.wait: start.cu may still be running, but the plan is in memory. */
MM_DEVICE int32_t decode_plan_read(const int32_t *at) {
    return (int32_t)ptx::ld_relaxed_gpu_u32(at);
}

template <bool L1> MM_DEVICE decode_run decode_run_find(const mm_cuda_gemm_args &p) {
    decode_run run;
    run.items = decode_items_per_entry<L1>(p);
    run.heavy = decode_plan_read(&p.plan->heavy);
    const int heavy_items = run.heavy * run.items;
    const int light_items = (decode_plan_read(&p.plan->count[p.list]) - run.heavy) * run.items;
    run.first = decode_run_bound(p, p.weight_heavy, heavy_items, light_items, blockIdx.x);
    run.last = decode_run_bound(p, p.weight_heavy, heavy_items, light_items, blockIdx.x + 1);
    return run;
}

/* Brings the 16 rows of a full item: 8 gate and 8 up rows, contiguous in the checkpoint (interleaved: 16 rows
 * together). */
MM_DEVICE void decode_full_issue(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int tile, uint32_t dst,
                                 uint32_t bar, uint64_t policy) {
    const uint32_t code_bytes = p.k / 2, scale_bytes = p.scale_row_bytes;
    ptx::mbarrier_arrive_expect_tx(bar, 16 * (code_bytes + scale_bytes));
#pragma unroll 2
    for (int c = 0; c < 4; c++) {
        const mm_cuda_matrix *m = c < 2 ? &e->gate : &e->up;
        size_t row = (size_t)tile * 8 + c % 2 * 4;
        ptx::cp_async_bulk_shared_cluster_global_cache_hint(dst + c * 4 * code_bytes, m->codes + row * code_bytes,
                                                            4 * code_bytes, bar, policy);
        ptx::cp_async_bulk_shared_cluster_global_cache_hint(
            dst + 16 * code_bytes + c * 4 * scale_bytes, m->scales + row * scale_bytes, 4 * scale_bytes, bar, policy);
    }
}

/* Brings 32 rows of one pass over K; rows and columns beyond the matrix arrive as zeros. */
template <bool L1, int PASSES>
MM_DEVICE void decode_split_issue(const mm_cuda_gemm_args &p, int expert, int item, int pass, uint32_t dst,
                                  uint32_t bar) {
    const CUtensorMap *map = p.maps + (size_t)expert * 6 + (L1 ? 0 : 4);
    const uint32_t scales = dst + 32 * p.code_pitch;
    /* In 8-byte elements. The first of two passes starts 32 bytes early, so that both have the same bank-shifting
     * pitch. */
    const int code_x = pass ? (int)p.k / 32 : PASSES == 2 ? -4 : 0, scale_x = pass * (int)p.scale_row_bytes / 16;
    const int row0 = L1 ? item * 16 : item * 32, row1 = L1 ? row0 : row0 + 16, up = L1 ? 2 : 0;
    ptx::mbarrier_arrive_expect_tx(bar, 32 * (p.code_pitch + p.scale_pitch));
    ptx::cp_async_bulk_tensor_2d_no_hint(dst, map, code_x, row0, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(dst + 16 * p.code_pitch, map + up, code_x, row1, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(scales, map + 1, scale_x, row0, bar);
    ptx::cp_async_bulk_tensor_2d_no_hint(scales + 16 * p.scale_pitch, map + up + 1, scale_x, row1, bar);
}

/*
 * While this GEMM drains and L2's prologue runs, memory would idle: fetch the first items that this multiprocessor's
 * CTA of L2 will ask for into the L2 cache. Rows of 32 are contiguous in the checkpoint.
 */
MM_DEVICE void decode_next_prefetch(const mm_cuda_gemm_args &p, int heavy, int entries) {
    const int items = (p.k + 31) / 32, heavy_items = heavy * items, light_items = (entries - heavy) * items;
    const int first = decode_run_bound(p, p.next_weight_heavy, heavy_items, light_items, blockIdx.x);
    const int end = decode_run_bound(p, p.next_weight_heavy, heavy_items, light_items, blockIdx.x + 1);
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
template <bool L1, int PASSES>
MM_DEVICE void decode_produce(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run &run, uint32_t slots) {
    const uint64_t policy = ptx::createpolicy_evict_first();
    const uint32_t full = ptx::cvta_to_shared(sh.slot_full), free = ptx::cvta_to_shared(sh.slot_free);
    uint32_t slot = 0, phase = 1;
    auto advance = [&]() {
        if (++slot == p.slot_count) slot = 0, phase ^= 1;
    };
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, begin = i - a * run.items, end = min(run.last - a * run.items, run.items);
        const int expert = decode_plan_read(&p.entries[a].expert);
        if (L1 && PASSES == 2 && a >= run.heavy) {
            const mm_cuda_expert *e = p.experts + expert;
#pragma unroll 1
            for (int tile = begin * 2; tile < end * 2; tile++, advance()) {
                ptx::mbarrier_wait_parity(free + slot * 8, phase);
                decode_full_issue(p, e, tile, slots + slot * p.slot_bytes, full + slot * 8, policy);
            }
        } else
#pragma unroll 1
            for (int pass = 0; pass < PASSES; pass++)
#pragma unroll 1
                for (int item = begin; item < end; item++, advance()) {
                    ptx::mbarrier_wait_parity(free + slot * 8, phase);
                    decode_split_issue<L1, PASSES>(p, expert, item, pass, slots + slot * p.slot_bytes, full + slot * 8);
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

MM_DEVICE void decode_globals_keep(float *globals, const decode_entry &d) {
    __syncwarp(); /* the entry before is done with them */
    if (threadIdx.x % 32 == 0)
        ptx::st_shared_v4_f32(ptx::cvta_to_shared(globals), d.gate_global, d.up_global, d.expert->h_global, 0.0f);
    __syncwarp();
}

/* Read where it is used: there is no register to keep it in. */
MM_DEVICE float decode_h_global(const decode_shared &sh) {
    return ptx::ld_shared_f32(ptx::cvta_to_shared(&sh.globals[ptx::tid_x() / 32 - DECODE_WARPS][2]));
}

/* A pair of h under its block: quantized and back, stored. */
MM_DEVICE void decode_pair_quantize(const mm_cuda_gemm_args &p, const decode_entry &d, float scale, float h_global,
                                    float2 h, int tile, int g) {
    const int second = g >> 2;
    if (p.h32 && d.left > second) {
        float *to = p.h32 + (size_t)(d.row + second) * p.n + tile * 8 + (g & 3);
        to[0] = h.x, to[4] = h.y;
    }
    mm_h_pair_store(p, quantize_pair(h, scale, h_global), tile * 8, d.row, d.left, g);
}

/* Blocks are counted by the warp that has the second tile; lanes g & 3 = 0 stand for their tokens. */
MM_DEVICE void decode_blocks_count(decode_shared &sh, const decode_entry &d, mm_nvfp4_block_report report, int tile,
                                   int g) {
    const bool counts = tile % 2 && (g & 3) == 0 && d.left > g >> 2;
    const uint32_t saturated = ptx::vote_sync_ballot(counts && report.saturated, ~0u);
    const uint32_t nonfinite = ptx::vote_sync_ballot(counts && report.nonfinite, ~0u);
    if (saturated + nonfinite == 0 || threadIdx.x % 32) return;
    sh.blocks[threadIdx.x / 32 - DECODE_WARPS][0] += __popc(saturated);
    sh.blocks[threadIdx.x / 32 - DECODE_WARPS][1] += __popc(nonfinite);
}

/* To memory, once: where everything saturates, atomics on one address would take longer than all else. */
MM_DEVICE void decode_blocks_add(const mm_cuda_gemm_args &p, const decode_shared &sh) {
    const uint32_t *blocks = sh.blocks[threadIdx.x / 32 - DECODE_WARPS];
    if (threadIdx.x % 32) return;
    if (blocks[0]) atomicAdd(&p.counters->saturated_blocks, (unsigned long long)blocks[0]);
    if (blocks[1]) atomicAdd(&p.counters->nonfinite_blocks, (unsigned long long)blocks[1]);
}

/* What a service warp keeps between the tiles that it quantizes. */
struct decode_blocks {
    float2 first; /* h of the item's first tile */
    int turn;     /* whose half of `largest` is next: with two, one barrier per item is enough */
};

/*
 * The epilogue of one tile of L1 where h is quantized. A block of nvfp4 is the item's two tiles for one token: of
 * tokens 0..7 two warps have one each and tell each other their largest magnitudes; of tokens 8..15 one warp has both.
 */
MM_DEVICE void decode_store_quantized(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_entry &d, int tile,
                                      const float4 &s, decode_blocks &blocks) {
    const int thread = (int)ptx::tid_x(), g = thread >> 2 & 7, group = thread / 32 == DECODE_WARPS + 2;
    /* There are no registers to keep any of this for the entry. */
    const float *globals = sh.globals[thread / 32 - DECODE_WARPS];
    const mm_row_terms rows = mm_row_terms_read(p, d.row, d.left);
    mm_l1_feature f = {globals[0], globals[1], 0.0f, 0.0f};
    if (p.biased) f = mm_l1_feature_read(p, d.expert, tile * 8 + g);
    const float2 h = mm_h_pair(mm_l1_value<false>(p, f, MM_CODE_FACTOR, s.x, s.z, rows.global[0], rows.weight[0]),
                               mm_l1_value<false>(p, f, MM_CODE_FACTOR, s.y, s.w, rows.global[1], rows.weight[1]), g);
    if (group && tile % 2 == 0) {
        blocks.first = h;
        return;
    }
    float largest = ptx::max_NaN_f32(fabsf(h.x), fabsf(h.y));
    if (group) largest = ptx::max_NaN_f32(largest, ptx::max_NaN_f32(fabsf(blocks.first.x), fabsf(blocks.first.y)));
    largest = ptx::max_NaN_f32(largest, __shfl_xor_sync(~0u, largest, 4));
    largest = ptx::max_NaN_f32(largest, __shfl_xor_sync(~0u, largest, 8));
    if (!group) {
        const int token = (thread & 3) * 2 + (g >> 2);
        if ((g & 3) == 0) sh.largest[blocks.turn][tile % 2][token] = largest;
        ptx::bar_sync(DECODE_LARGEST_BARRIER, 64);
        largest = ptx::max_NaN_f32(largest, sh.largest[blocks.turn][tile % 2 ^ 1][token]);
        blocks.turn ^= 1;
    }
    mm_nvfp4_block_report report;
    const float scale = quantize_scale(largest, decode_h_global(sh), &report);
    decode_blocks_count(sh, d, report, tile, g);
    if (group) decode_pair_quantize(p, d, scale, decode_h_global(sh), blocks.first, tile - 1, g);
    decode_pair_quantize(p, d, scale, decode_h_global(sh), h, tile, g);
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

/* s plus the sixteen warps' sums of a tile for a group of tokens, in their order; then the buffer is free again. */
MM_DEVICE float4 decode_partials_add(decode_shared &sh, int tile, int group, int done, bool active, uint32_t partials,
                                     float4 s) {
    const uint32_t lane = threadIdx.x % 32, from = partials + tile * DECODE_PARTIALS + group * 512 + lane * 16;
    ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.partials_full[tile]), done & 1);
    if (active) {
#pragma unroll 4
        for (int k = 0; k < DECODE_WARPS; k++) {
            float4 v = ptx::ld_shared_v4_f32(from + k * 1024);
            s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
        }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.partials_free[tile]));
    return s;
}

template <bool L1, int PASSES, bool QUANTIZED>
MM_DEVICE void decode_serve(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run &run, uint32_t partials) {
    const int warp = threadIdx.x / 32 - DECODE_WARPS, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int group = warp / 2, first_tile = warp & 1, last_tile = group ? 1 : first_tile;
    decode_blocks blocks = {make_float2(0.0f, 0.0f), 0};
    if (QUANTIZED && lane == 0) sh.blocks[warp][0] = sh.blocks[warp][1] = 0;
    int done = 0;
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, end = min(run.last - a * run.items, run.items);
        const bool full = L1 && PASSES == 2 && a >= run.heavy;
        bool active;
        const decode_entry entry = decode_entry_read<L1>(p, a, group, t, &active);
        if (QUANTIZED) decode_globals_keep(sh.globals[warp], entry);
#pragma unroll 1
        for (int pass = full ? PASSES - 1 : 0; pass < PASSES; pass++)
#pragma unroll 1
            for (int item = i - a * run.items; item < end; item++, done++) {
                const bool add = PASSES == 2 && pass && active && !full, keep = PASSES == 2 && pass < PASSES - 1;
                float4 next = make_float4(0.0f, 0.0f, 0.0f, 0.0f); /* the first pass's sums of the tile at hand */
                if (add && !QUANTIZED)
                    next = ((float4 *)
                                p.scratch)[((size_t)(a * run.items + item) * 4 + first_tile * 2 + group) * 32 + lane];
#pragma unroll 1
                for (int tile = first_tile; tile <= last_tile; tile++) {
                    float4 *scratch =
                        (float4 *)p.scratch + ((size_t)(a * run.items + item) * 4 + tile * 2 + group) * 32 + lane;
                    float4 s = next;
                    if (add && QUANTIZED) s = *scratch; /* no registers to have it early */
                    if (add && tile < last_tile && !QUANTIZED) next = scratch[64];
                    s = decode_partials_add(sh, tile, group, done, active, partials, s);
                    if (keep && active) *scratch = s;
                    if (keep || !active) continue;
                    if (QUANTIZED)
                        decode_store_quantized(p, sh, entry, item * 2 + tile, s, blocks);
                    else
                        decode_store<L1>(p, entry, item * 2 + tile, s, g);
                }
            }
        i = a * run.items + end;
    }
    if (QUANTIZED) decode_blocks_add(p, sh);
}

/* A consumer warp's partial sums into the tile's buffer. */
template <bool HEAVY>
MM_DEVICE void decode_partials_store(decode_shared &sh, int tile, int done, uint32_t partials,
                                     const float (&sum)[2][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t at = partials + tile * DECODE_PARTIALS + warp * 1024 + lane * 16;
    ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.partials_free[tile]), (done & 1) ^ 1);
    ptx::st_shared_v4_f32(at, sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
    if (HEAVY) ptx::st_shared_v4_f32(at + 512, sum[1][0], sum[1][1], sum[1][2], sum[1][3]);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.partials_full[tile]));
}

template <bool MX, int QUARTERS, bool HEAVY>
MM_DEVICE void decode_tile(float (&sum)[2][4], const decode_places<MX, QUARTERS> &at, uint32_t codes,
                           uint32_t code_step, uint32_t scales, uint32_t scale_step, const uint4 *b) {
    using share = decode_share<QUARTERS>;
    decode_unit u[2]; /* the next unit is loaded while one is multiplied */
    decode_unit_load<MX, QUARTERS>(u[0], 0, at, codes, code_step, scales, scale_step);
#pragma unroll
    for (int i = 0; i < share::units; i++) {
        if (i + 1 < share::units)
            decode_unit_load<MX, QUARTERS>(u[(i + 1) & 1], i + 1, at, codes, code_step, scales, scale_step);
        decode_unit_multiply<MX, QUARTERS, HEAVY>(sum, u[i & 1], i, b);
    }
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

template <bool L1, bool MX, int QUARTERS>
MM_DEVICE void decode_consume(const mm_cuda_gemm_args &p, decode_shared &sh, const decode_run run, uint32_t slots,
                              uint32_t partials) {
    constexpr int PASSES = QUARTERS > 7 ? 2 : 1, SPLIT = (QUARTERS + PASSES - 1) / PASSES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int groups = (int)p.x_pitch / 128, pass_groups = groups / PASSES;
    const uint32_t slot_bar = ptx::cvta_to_shared(sh.slot_full);
    const decode_places<MX, SPLIT> split_at(warp, t, pass_groups);
    uint4 b[2 * SPLIT > QUARTERS ? 2 * SPLIT : QUARTERS];
    uint32_t slot = 0, phase = 0;
    int done = 0;
    auto advance = [&]() {
        if (++slot == p.slot_count) slot = 0, phase ^= 1;
    };
    auto split_item = [&](auto heavy, int pass) {
        constexpr bool HEAVY = decltype(heavy)::value;
        const uint32_t base = slots + slot * p.slot_bytes;
        const uint32_t codes = base + g * p.code_pitch + (PASSES == 2 && !pass ? 32 : 0);
        const uint32_t scales = base + 32 * p.code_pitch + g * p.scale_pitch;
        const uint32_t near = L1 ? 16 : 8, next = L1 ? 8 : 16; /* rows to the other MMA half, and to the second tile */
        ptx::mbarrier_wait_parity(slot_bar + slot * 8, phase);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float sum[2][4] = {};
            decode_tile<MX, SPLIT, HEAVY>(sum, split_at, codes + m * next * p.code_pitch, near * p.code_pitch,
                                          scales + m * next * p.scale_pitch, near * p.scale_pitch, b);
            decode_partials_store<HEAVY>(sh, m, done, partials, sum);
            if (m == 1) decode_slot_release(sh, slot);
        }
        done++;
        advance();
    };
    for (int i = run.first; i < run.last;) {
        const int a = i / run.items, begin = i - a * run.items, end = min(run.last - a * run.items, run.items);
        const mm_cuda_entry entry = p.entries[a];
        const uint16_t *x0 = p.x + (size_t)(entry.row + min(g, entry.count - 1)) * p.x_pitch;
        const uint16_t *x1 = p.x + (size_t)(entry.row + min(8 + g, entry.count - 1)) * p.x_pitch;
        if (L1 && PASSES == 2 && a >= run.heavy) {
            const decode_places<MX, QUARTERS> at(warp, t, groups);
            const uint32_t code_bytes = p.k / 2;
            decode_activations_load<QUARTERS>(x0, groups, warp, t, b);
            decode_activations_transpose<QUARTERS>(t, b);
            for (int sub = begin * 2; sub < end * 2; sub++) {
                const uint32_t codes = slots + slot * p.slot_bytes + g * code_bytes;
                const uint32_t scales = slots + slot * p.slot_bytes + 16 * code_bytes + g * p.scale_row_bytes;
                float sum[2][4] = {};
                ptx::mbarrier_wait_parity(slot_bar + slot * 8, phase);
                decode_tile<MX, QUARTERS, false>(sum, at, codes, 8 * code_bytes, scales, 8 * p.scale_row_bytes, b);
                decode_partials_store<false>(sh, sub & 1, done, partials, sum);
                decode_slot_release(sh, slot);
                done += sub & 1;
                advance();
            }
        } else
            for (int pass = 0; pass < PASSES; pass++) {
                decode_activations_load<SPLIT>(x0 + pass * pass_groups * 128, pass_groups, warp, t, b);
                if (PASSES == 2 || entry.count > MM_CUDA_DECODE_LIGHT)
                    decode_activations_load<SPLIT>(x1 + pass * pass_groups * 128, pass_groups, warp, t, b + SPLIT);
                decode_activations_transpose<2 * SPLIT>(t, b);
                if (PASSES == 2 || entry.count > MM_CUDA_DECODE_LIGHT)
                    for (int item = begin; item < end; item++) split_item(decode_flag<true>(), pass);
                else
                    for (int item = begin; item < end; item++) split_item(decode_flag<false>(), pass);
            }
        i = a * run.items + end;
    }
}

template <bool L1, bool MX, int QUARTERS> MM_DEVICE void decode_kernel(const mm_cuda_gemm_args &p) {
    constexpr int PASSES = QUARTERS > 7 ? 2 : 1;
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(decode_shared, sh, );
    const uint32_t slots = ptx::cvta_to_shared(dynamic), partials = slots + p.slot_count * p.slot_bytes;
    if (threadIdx.x == DECODE_PRODUCER) {
        for (int i = 0; i < DECODE_BUFFERS; i++) {
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.partials_full[i]), DECODE_WARPS);
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.partials_free[i]), 2);
        }
        for (uint32_t i = 0; i < p.slot_count; i++) {
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.slot_full[i]), 1);
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.slot_free[i]), DECODE_WARPS);
        }
        ptx::fence_mbarrier_init_release_cluster();
        /* The plan was complete before the launch before this one began (see run.c): weights may be fetched right away.
         */
        sh.run = decode_run_find<L1>(p);
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp >= DECODE_WARPS) {
        ptx::setmaxnreg_dec<DECODE_SERVICE_REGISTERS>();
        if (threadIdx.x == DECODE_PRODUCER) decode_produce<L1, PASSES>(p, sh, sh.run, slots);
        ptx::griddepcontrol_wait();
        if (warp == DECODE_WARPS + DECODE_SERVICE_WARPS) return;
        if (L1 && p.quantized)
            decode_serve<L1, PASSES, L1>(p, sh, sh.run, partials);
        else
            decode_serve<L1, PASSES, false>(p, sh, sh.run, partials);
    } else {
        ptx::setmaxnreg_inc<DECODE_CONSUMER_REGISTERS>();
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents(); /* whatever comes next reads the plan at once, and what goes with it */
        decode_consume<L1, MX, QUARTERS>(p, sh, sh.run, slots, partials);
    }
}

#endif
