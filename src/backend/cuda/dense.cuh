/*
 * The shared expert for few tokens, at memory bandwidth: BF16 and FP8 weights, L1 with its activation, and L2.
 *
 * Weights are the M operand of mma.sync m16n8k16, tokens the N. A CTA owns a run of weight rows and all of K. K goes by
 * chunks of up to seven units; a unit is 128 bytes of a row, whatever the format. A producer thread brings, chunk by
 * chunk, the chunk's part of every tile of 16 rows (L1: 8 gate + 8 up rows; L2: 16 rows) into a ring of slots, by 2-D
 * tensor copies with a pitch that spreads rows over banks. A consumer warp takes a unit of a chunk, for every
 * tile, in two steps of 64 bytes: the activations of a step are loaded while the one before is multiplied. Sums stay in
 * registers until K ends; then warps are added in their order through shared memory.
 *
 * K is in its natural order: a lane reads 16 consecutive bytes of weights and as many values of activations, so that
 * hidden states need no staging. FP8 codes become BF16 exactly; the sums of a step, which lies in one block of scales,
 * are multiplied by the block's scale in fp32. All scales of the CTA's rows wait in shared memory.
 */
#ifndef MM_CUDA_DENSE_CUH
#define MM_CUDA_DENSE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/epilogue.cuh"

enum {
    DENSE_TILES = 4, /* whose sums a warp keeps: as many as a CTA has of the published models */
    DENSE_SLOTS_MAX = 8,
    DENSE_UNIT = 128, /* bytes of a row */
};

/* Two CTAs share a multiprocessor, so that L2's begin, and fetch weights, while L1's end: 128 registers a thread. */
enum { DENSE_WARPS = 7, DENSE_PRODUCER = DENSE_WARPS * 32, DENSE_THREADS = DENSE_PRODUCER + 32 };

struct dense_shared {
    uint64_t full[DENSE_SLOTS_MAX], free[DENSE_SLOTS_MAX];
};

/* Rows of a CTA, in eights (L1: of features): what it has, and how many 16-row tiles that makes. */
template <bool L1> struct dense_span {
    int first, tiles, eights;
    __device__ __forceinline__ dense_span(const mm_cuda_dense_args &p) {
        first = blockIdx.x * p.eights_per_cta;
        eights = min((int)p.eights_per_cta, (int)(p.gemm.n / 8) - first);
        tiles = L1 ? eights : (eights + 1) / 2;
    }
    /* First weight row of a tile's upper half, or of its lower one: n, which is brought as zeros, if there is none. */
    __device__ __forceinline__ int row(const mm_cuda_dense_args &p, int tile, int half) const {
        if (L1) return (first + tile) * 8;
        return tile * 2 + half < eights ? (first + tile * 2 + half) * 8 : (int)p.gemm.n;
    }
};

/* The producer thread. */
template <bool L1> MM_DEVICE void dense_produce(const mm_cuda_dense_args &p, dense_shared &sh, uint32_t slots) {
    const dense_span<L1> span(p);
    const CUtensorMap *low = p.gemm.maps + (L1 ? 0 : 2), *high = p.gemm.maps + (L1 ? 1 : 2);
    const uint32_t half_bytes = 8 * p.gemm.code_pitch;
    uint32_t slot = 0, phase = 1;
    for (int first = 0; first < span.tiles; first += DENSE_TILES)
        for (uint32_t chunk = 0; chunk < p.chunks; chunk++)
            for (int tile = first; tile < min(span.tiles, first + DENSE_TILES); tile++) {
                const uint32_t base = slots + slot * p.gemm.slot_bytes, bar = ptx::cvta_to_shared(&sh.full[slot]);
                const int x = (int)(chunk * p.chunk_units * (DENSE_UNIT / 8)); /* in 8-byte elements */
                ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.free[slot]), phase);
                ptx::mbarrier_arrive_expect_tx(bar, 2 * half_bytes);
                ptx::cp_async_bulk_tensor_2d_no_hint(base, low, x, span.row(p, tile, 0), bar);
                ptx::cp_async_bulk_tensor_2d_no_hint(base + half_bytes, high, x, span.row(p, tile, 1), bar);
                if (++slot == p.gemm.slot_count) slot = 0, phase ^= 1;
            }
}

/* The activations of a lane's column (a token) for one step: what meets its 16 bytes of weights. */
template <bool FP8, int GROUPS> struct dense_tokens {
    static constexpr int vectors = FP8 ? 2 : 1;
    uint4 b[GROUPS][vectors];

    static __device__ __forceinline__ uint4 rounded(const float4 &a, const float4 &c) {
        return make_uint4(ptx::cvt_rn_bf16x2_f32(a.y, a.x), ptx::cvt_rn_bf16x2_f32(a.w, a.z),
                          ptx::cvt_rn_bf16x2_f32(c.y, c.x), ptx::cvt_rn_bf16x2_f32(c.w, c.z));
    }
    /* k: of lane 0 of a quad; values beyond K count as zero. */
    __device__ __forceinline__ void load(const mm_cuda_dense_args &p, uint32_t k, uint32_t g, uint32_t t) {
        k += t * vectors * 8;
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const size_t at = (size_t)min(n * 8 + g, p.gemm.row_count - 1) * p.gemm.x_pitch + k;
#pragma unroll
            for (int v = 0; v < vectors; v++) {
                b[n][v] = make_uint4(0, 0, 0, 0);
                if (k + v * 8 >= p.gemm.k) continue;
                if (p.x_f32) {
                    const float4 *x = (const float4 *)((const float *)(const void *)p.gemm.x + at + v * 8);
                    b[n][v] = rounded(x[0], x[1]);
                } else
                    b[n][v] = ptx::ld_global_v4_u32(p.gemm.x + at + v * 8);
            }
        }
    }
    __device__ __forceinline__ uint32_t pair(int n, int i) const {
        const uint4 v = b[n][i / 4];
        return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
    }
};

/* A block's scale. */
MM_DEVICE float dense_scale(const mm_cuda_matrix &m, uint32_t row, uint32_t k) {
    const uint8_t *from = m.scales + (size_t)(row / m.block_rows) * m.scale_row_bytes;
    if (m.scale_f32) return ((const float *)from)[k / m.block_columns];
    const uint32_t exponent = from[k / m.block_columns];
    return __uint_as_float(exponent ? exponent << 23 : 0x00400000u);
}

/* Scales of the tiles from `first` on, by unit, tile and half, for every consumer thread to read. */
template <bool L1>
MM_DEVICE void dense_scales_load(const mm_cuda_dense_args &p, const dense_span<L1> &span, int first, uint32_t scales) {
    const mm_cuda_expert *e = p.gemm.experts;
    const uint32_t units = (p.gemm.k + DENSE_UNIT - 1) / DENSE_UNIT;
    ptx::bar_sync(1, DENSE_WARPS * 32);
    for (uint32_t i = threadIdx.x; i < units * DENSE_TILES * 2; i += DENSE_WARPS * 32) {
        const int tile = first + (int)(i / 2 % DENSE_TILES), half = i % 2;
        const int row = tile < span.tiles ? span.row(p, tile, half) : (int)p.gemm.n;
        float scale = 0.0f;
        if (row < (int)p.gemm.n)
            scale = dense_scale(!L1 ? e->down : half ? e->up : e->gate, row, i / (2 * DENSE_TILES) * DENSE_UNIT);
        ptx::st_shared_f32(scales + i * 4, scale);
    }
    ptx::bar_sync(1, DENSE_WARPS * 32);
}

/* Sixteen bytes of the two rows of a lane against every group of tokens. */
template <bool FP8, int GROUPS>
MM_DEVICE void dense_multiply(float (&sum)[GROUPS][4], const uint4 &low, const uint4 &high,
                              const dense_tokens<FP8, GROUPS> &tokens) {
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, c[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int m = 0; m < (FP8 ? 4 : 2); m++) {
        const int i = m * 2 % 4; /* BF16: words are pairs as they are */
        const uint32_t a0 = FP8 ? mm_fp8_pair<false>(a[m]) : a[i], a2 = FP8 ? mm_fp8_pair<true>(a[m]) : a[i + 1];
        const uint32_t a1 = FP8 ? mm_fp8_pair<false>(c[m]) : c[i], a3 = FP8 ? mm_fp8_pair<true>(c[m]) : c[i + 1];
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            ptx::mma_m16n8k16_f32_bf16(sum[n], a0, a1, a2, a3, tokens.pair(n, m * 2), tokens.pair(n, m * 2 + 1));
    }
}

/* One step of one tile. at: the lane's place in row g; far: bytes to row g + 8; scales: of the two rows. */
template <bool FP8, int GROUPS>
MM_DEVICE void dense_step(float (&sum)[GROUPS][4], uint32_t at, uint32_t far, const dense_tokens<FP8, GROUPS> &tokens,
                          uint32_t scales) {
    const uint4 low = ptx::ld_shared_v4_u32(at), high = ptx::ld_shared_v4_u32(at + far);
    if (!FP8) {
        dense_multiply<FP8, GROUPS>(sum, low, high, tokens);
        return;
    }
    const uint2 scale = ptx::ld_shared_v2_u32(scales);
    float part[GROUPS][4] = {};
    dense_multiply<FP8, GROUPS>(part, low, high, tokens);
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[n][i] = __fmaf_rn(__uint_as_float(i < 2 ? scale.x : scale.y), part[n][i], sum[n][i]);
}

/* What becomes of the sums of rows g and g + 8 of a tile for one token. */
template <bool L1>
MM_DEVICE void dense_result_store(const mm_cuda_dense_args &p, const dense_span<L1> &span, int tile, uint32_t token,
                                  uint32_t g, float s0, float s1) {
    const mm_cuda_expert *e = p.gemm.experts;
#pragma unroll
    for (int half = 0; half < (L1 ? 1 : 2); half++) {
        const int feature = span.row(p, tile, half) + g;
        if (feature >= (int)p.gemm.n) continue;
        const size_t at = (size_t)token * p.gemm.y_pitch + feature;
        if (L1) {
            const mm_l1_feature f = mm_l1_feature_read(p.gemm, e, feature);
            const float h = mm_l1_value<false>(p.gemm, f, 1.0f, s0, s1, 1.0f, 1.0f);
            ((uint16_t *)p.gemm.y)[at] = (uint16_t)ptx::cvt_rn_bf16x2_f32(0.0f, h);
        } else {
            const mm_l2_feature f = mm_l2_feature_read(p.gemm, e, feature, 0);
            ((float *)p.gemm.y)[at] = __fmaf_rn(half ? s1 : s0, f.global, f.bias[0]);
        }
    }
}

/* Adds the warps' sums of one tile. Item i is token i / 8 and row i % 8. */
template <bool L1, int GROUPS>
MM_DEVICE void dense_tile_store(const mm_cuda_dense_args &p, const dense_span<L1> &span, int tile, uint32_t partials) {
    for (uint32_t i = threadIdx.x; i < GROUPS * 64; i += DENSE_WARPS * 32) {
        const uint32_t g = i % 8, token = i / 8;
        const uint32_t from = partials + token / 8 * 512 + (g * 4 + token % 8 / 2) * 16 + token % 2 * 4;
        float s0 = 0.0f, s1 = 0.0f;
        if (token >= p.gemm.row_count) break;
#pragma unroll
        for (int w = 0; w < DENSE_WARPS; w++) {
            s0 += ptx::ld_shared_f32(from + w * GROUPS * 512);
            s1 += ptx::ld_shared_f32(from + w * GROUPS * 512 + 8);
        }
        dense_result_store<L1>(p, span, tile, token, g, s0, s1);
    }
}

/* Partial sums have two buffers, so that one barrier a tile suffices. */
template <bool L1, int GROUPS>
MM_DEVICE void dense_store(const mm_cuda_dense_args &p, const dense_span<L1> &span, int first,
                           const float (&sum)[DENSE_TILES][GROUPS][4], uint32_t partials) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < DENSE_TILES; i++) {
        if (first + i >= span.tiles) break;
        const uint32_t buffer = partials + (i & 1) * DENSE_WARPS * GROUPS * 512;
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            ptx::st_shared_v4_f32(buffer + (warp * GROUPS + n) * 512 + lane * 16, sum[i][n][0], sum[i][n][1],
                                  sum[i][n][2], sum[i][n][3]);
        ptx::bar_sync(1, DENSE_WARPS * 32);
        dense_tile_store<L1, GROUPS>(p, span, first + i, buffer);
    }
    ptx::bar_sync(1, DENSE_WARPS * 32);
}

/* Where a warp is in the ring. */
struct dense_place {
    uint32_t slot, phase;
    __device__ __forceinline__ void advance(uint32_t slot_count) {
        if (++slot == slot_count) slot = 0, phase ^= 1;
    }
};

/* Where the warp's unit of a chunk begins in K; K itself if it has none. */
template <bool FP8> MM_DEVICE uint32_t dense_unit_k(const mm_cuda_dense_args &p, uint32_t chunk) {
    const uint32_t unit = threadIdx.x / 32;
    if (chunk >= p.chunks || unit >= p.chunk_units) return p.gemm.k;
    return min((chunk * p.chunk_units + unit) * (FP8 ? DENSE_UNIT : DENSE_UNIT / 2), p.gemm.k);
}

/*
 * This warp has read all it needs of the slot. The barrier's address is made to depend on the tile's sums, and so on
 * every load from the slot: nothing else keeps the arrival from overtaking loads whose values have not come. p.zero is
 * 0.
 */
template <int GROUPS>
MM_DEVICE void dense_release(const mm_cuda_dense_args &p, dense_shared &sh, uint32_t slot,
                             const float (&sum)[GROUPS][4]) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        ptx::mbarrier_arrive(ptx::cvta_to_shared(&sh.free[slot]) + (ptx::mov_b32_f32(sum[0][0]) & p.zero));
}

/* `tiles` tiles (at most DENSE_TILES count) over all of K. */
template <bool FP8, int GROUPS>
MM_DEVICE void dense_tiles_run(const mm_cuda_dense_args &p, dense_shared &sh, int tiles, uint32_t slots,
                               uint32_t scales, dense_place &place, float (&sum)[DENSE_TILES][GROUPS][4]) {
    constexpr uint32_t COLUMNS = FP8 ? DENSE_UNIT : DENSE_UNIT / 2;
    const uint32_t lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const uint32_t lane_at = slots + g * p.gemm.code_pitch + threadIdx.x / 32 * DENSE_UNIT + t * 16;
    dense_tokens<FP8, GROUPS> tokens[2];
    uint32_t k = dense_unit_k<FP8>(p, 0);
    tokens[0].load(p, k, g, t);
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < p.chunks; chunk++) {
        const uint32_t next = dense_unit_k<FP8>(p, chunk + 1);
        dense_place at = place;
        uint32_t before = 0; /* the slot of the tile before */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            tokens[!half].load(p, half ? next : k + COLUMNS / 2, g, t);
            at = place;
#pragma unroll
            for (int i = 0; i < DENSE_TILES; i++) {
                if (i >= tiles) break;
                if (!half) ptx::mbarrier_wait_parity(ptx::cvta_to_shared(&sh.full[at.slot]), at.phase);
                if (k < p.gemm.k)
                    dense_step<FP8, GROUPS>(sum[i], lane_at + at.slot * p.gemm.slot_bytes + half * 64,
                                            8 * p.gemm.code_pitch, tokens[half],
                                            scales + (k / COLUMNS * DENSE_TILES + i) * 8);
                if (half && i > 0) dense_release(p, sh, before, sum[i - 1]);
                if (half && (i + 1 == tiles || i + 1 == DENSE_TILES)) dense_release(p, sh, at.slot, sum[i]);
                before = at.slot;
                at.advance(p.gemm.slot_count);
            }
        }
        k = next, place = at;
    }
}

template <bool L1, bool FP8, int GROUPS>
MM_DEVICE void dense_consume(const mm_cuda_dense_args &p, dense_shared &sh, uint32_t slots, uint32_t partials,
                             uint32_t scales) {
    const dense_span<L1> span(p);
    dense_place place = {0, 0};
    for (int first = 0; first < span.tiles; first += DENSE_TILES) {
        float sum[DENSE_TILES][GROUPS][4] = {};
        if (FP8) dense_scales_load<L1>(p, span, first, scales);
        if (first == 0) ptx::griddepcontrol_wait();
        dense_tiles_run<FP8, GROUPS>(p, sh, span.tiles - first, slots, scales, place, sum);
        dense_store<L1, GROUPS>(p, span, first, sum, partials);
    }
}

template <bool L1, bool FP8, int GROUPS> MM_DEVICE void dense_kernel(const mm_cuda_dense_args &p) {
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(dense_shared, sh, );
    const uint32_t slots = ptx::cvta_to_shared(dynamic), partials = slots + p.gemm.slot_count * p.gemm.slot_bytes;
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == DENSE_PRODUCER) {
        for (uint32_t i = 0; i < p.gemm.slot_count; i++) {
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.full[i]), 1);
            ptx::mbarrier_init(ptx::cvta_to_shared(&sh.free[i]), DENSE_WARPS);
        }
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    /* Weights depend on no launch: they, and their scales, are read before the wait for those before this one. */
    if (threadIdx.x < DENSE_PRODUCER) {
        dense_consume<L1, FP8, GROUPS>(p, sh, slots, partials, partials + 2 * DENSE_WARPS * GROUPS * 512);
        return;
    }
    if (threadIdx.x == DENSE_PRODUCER) dense_produce<L1>(p, sh, slots);
    ptx::griddepcontrol_wait();
}

#endif
