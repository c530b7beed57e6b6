/*
 * The shared expert for many tokens, L1 with its activation and L2, on wgmma. A tile is up to 128 tokens x N weight
 * rows (L1: N / 2 gate rows and the up rows of the same features, so that a lane ends up with both), K in steps of 64;
 * both operands lie in shared memory, 128-byte-swizzled, in K's natural order. What lies beyond rows or columns is
 * zero.
 *
 * A warpgroup per 64 tokens multiplies, one thread brings operands by tensor copies. FP8 codes arrive in a ring of
 * their own; another warpgroup writes them into the stage as BF16 with their E8M0 scale, exactly.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/epilogue.cuh"
#include "backend/sm90/wgmma.cuh"

enum { DENSE_K = 64, DENSE_GROUP = 8 };

template <bool FP8_, int N_, int TOKENS_> struct dense_shape {
    static constexpr bool fp8 = FP8_, many = N_ == 256; /* many: accumulators want more registers than others need */
    static constexpr int n = N_, tokens = TOKENS_, consumers = tokens / 64;
    static constexpr int stages = many ? 4 : 7, raw_stages = many ? 2 : 7;
    static constexpr uint32_t token_bytes = tokens * 128, weight_bytes = n * 128, raw_bytes = n * 64;
    static constexpr uint32_t stage_bytes = token_bytes + weight_bytes, raw_at = stages * stage_bytes;
    static constexpr int producer = (consumers + fp8) * 128, threads = producer + 128;
};

/* full: a stage's operands are there; raw: the codes. */
template <class SHAPE> struct dense_bars {
    uint64_t full[SHAPE::stages], empty[SHAPE::stages], raw_full[SHAPE::raw_stages], raw_empty[SHAPE::raw_stages];
};

/* One ring's place: which slot, and the parity of its present use. */
template <int COUNT> struct dense_place {
    uint32_t slot = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == COUNT) slot = 0, phase ^= 1;
    }
};

struct dense_tile {
    uint32_t token, row; /* first token; first feature of L1 or weight row of L2 */
};

template <bool L1, class SHAPE> MM_DEVICE uint32_t dense_tile_rows(void) {
    return L1 ? SHAPE::n / 2 : SHAPE::n;
}
template <bool L1, class SHAPE> MM_DEVICE uint32_t dense_columns(const mm_cuda_gemm_args &p) {
    return (p.n + dense_tile_rows<L1, SHAPE>() - 1) / dense_tile_rows<L1, SHAPE>();
}

/* Tiles walk down DENSE_GROUP rows of tiles before the next column, so that operands are met again in L2. */
template <bool L1, class SHAPE> MM_DEVICE dense_tile dense_find(const mm_cuda_gemm_args &p, uint32_t i) {
    const uint32_t rows = (p.row_count + SHAPE::tokens - 1) / SHAPE::tokens, columns = dense_columns<L1, SHAPE>(p);
    const uint32_t band = i / (DENSE_GROUP * columns), within = i % (DENSE_GROUP * columns);
    const uint32_t height = min((uint32_t)DENSE_GROUP, rows - band * DENSE_GROUP);
    return {(band * DENSE_GROUP + within % height) * SHAPE::tokens, within / height * dense_tile_rows<L1, SHAPE>()};
}

MM_DEVICE uint32_t dense_bar(uint64_t &bar) {
    return ptx::cvta_to_shared(&bar);
}

/* One thread: the stages of one tile. */
template <bool L1, class SHAPE>
MM_DEVICE void dense_produce(const CUtensorMap *x, const CUtensorMap *low, const CUtensorMap *high,
                             const dense_tile &tile, uint32_t steps, uint32_t shared, dense_bars<SHAPE> &bars,
                             dense_place<SHAPE::stages> &at, dense_place<SHAPE::raw_stages> &raw) {
    const int row = (int)tile.row, high_row = row + (L1 ? 0 : SHAPE::n / 2);
    for (uint32_t s = 0; s < steps; s++) {
        const uint32_t base = shared + at.slot * SHAPE::stage_bytes, bar = dense_bar(bars.full[at.slot]);
        const int k = (int)(s * DENSE_K);
        if (SHAPE::fp8) {
            const uint32_t codes = shared + SHAPE::raw_at + raw.slot * SHAPE::raw_bytes;
            const uint32_t raw_bar = dense_bar(bars.raw_full[raw.slot]);
            ptx::mbarrier_wait_parity(dense_bar(bars.raw_empty[raw.slot]), raw.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(raw_bar, SHAPE::raw_bytes);
            ptx::cp_async_bulk_tensor_2d_no_hint(codes, low, k, row, raw_bar);
            ptx::cp_async_bulk_tensor_2d_no_hint(codes + SHAPE::raw_bytes / 2, high, k, high_row, raw_bar);
            raw.advance();
        }
        ptx::mbarrier_wait_parity(dense_bar(bars.empty[at.slot]), at.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(bar, SHAPE::token_bytes + (SHAPE::fp8 ? 0 : SHAPE::weight_bytes));
        ptx::cp_async_bulk_tensor_2d_no_hint(base, x, k, (int)tile.token, bar);
        if (!SHAPE::fp8) {
            const uint32_t weights = base + SHAPE::token_bytes;
            ptx::cp_async_bulk_tensor_2d_no_hint(weights, low, k, row, bar);
            ptx::cp_async_bulk_tensor_2d_no_hint(weights + SHAPE::weight_bytes / 2, high, k, high_row, bar);
        }
        at.advance();
    }
}

/* Sixteen codes of one row with their scale to the row's two 16-byte chunks 2q and 2q + 1 of a swizzled tile. */
MM_DEVICE void dense_codes_store(const uint4 &codes, uint32_t scale, uint32_t weights, uint32_t row, uint32_t q) {
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t pair[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pair[j * 2] = ptx::mul_rn_bf16x2(mm_fp8_pair<false>(word[j]), scale);
        pair[j * 2 + 1] = ptx::mul_rn_bf16x2(mm_fp8_pair<true>(word[j]), scale);
    }
#pragma unroll
    for (int c = 0; c < 2; c++)
        ptx::st_shared_v4_u32(weights + row * 128 + (((q * 2 + c) ^ (row & 7)) << 4),
                              make_uint4(pair[c * 4], pair[c * 4 + 1], pair[c * 4 + 2], pair[c * 4 + 3]));
}

/* The converting warpgroup: each warp takes every fourth stage, so that four are under way. Lane i has the 16-byte
 * units i, i + 32, .. of a tile's codes, four to a row. */
template <bool L1, class SHAPE>
MM_DEVICE void dense_convert(const mm_cuda_gemm_args &p, const dense_tile &tile, uint32_t steps, uint32_t shared,
                             dense_bars<SHAPE> &bars, dense_place<SHAPE::stages> &at,
                             dense_place<SHAPE::raw_stages> &raw, uint32_t &done) {
    constexpr int UNITS = SHAPE::n / 8;
    const uint32_t lane = threadIdx.x % 32, q = lane % 4, warp = threadIdx.x / 32 % 4;
    const mm_cuda_expert *e = p.experts;
    const uint8_t *scales[UNITS]; /* of the rows of its units */
    const uint32_t columns = (L1 ? e->up : e->down).block_columns;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const mm_cuda_matrix *m = !L1 ? &e->down : i * 2 < UNITS ? &e->gate : &e->up;
        const uint32_t local = lane / 4 + i * 8 - (L1 && i * 2 >= UNITS ? SHAPE::n / 2 : 0);
        scales[i] = m->scales + (size_t)(min(tile.row + local, p.n - 1) / m->block_rows) * m->scale_row_bytes;
    }
    for (uint32_t s = 0; s < steps; s++, at.advance(), raw.advance(), done++) {
        if (done % 4 != warp) continue;
        const uint32_t weights = shared + at.slot * SHAPE::stage_bytes + SHAPE::token_bytes;
        const uint32_t codes = shared + SHAPE::raw_at + raw.slot * SHAPE::raw_bytes + lane * 16;
        uint32_t scale[UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const uint32_t byte = __ldg(scales[i] + s * DENSE_K / columns);
            scale[i] = (byte ? byte << 7 : 0x40u) * 0x00010001u;
        }
        ptx::mbarrier_wait_parity(dense_bar(bars.raw_full[raw.slot]), raw.phase);
        ptx::mbarrier_wait_parity(dense_bar(bars.empty[at.slot]), at.phase ^ 1);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            dense_codes_store(ptx::ld_shared_v4_u32(codes + i * 512), scale[i], weights, lane / 4 + i * 8, q);
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(dense_bar(bars.full[at.slot]));
            ptx::mbarrier_arrive(dense_bar(bars.raw_empty[raw.slot]));
        }
    }
}

template <class SHAPE>
MM_DEVICE void dense_multiply(float (&sum)[SHAPE::n / 2], uint32_t steps, uint32_t shared, dense_bars<SHAPE> &bars,
                              dense_place<SHAPE::stages> &at) {
    const uint32_t group = threadIdx.x / 128;
    const bool elected = threadIdx.x % 128 == 0;
    uint32_t before = 0;
#pragma unroll
    for (int j = 0; j < SHAPE::n / 2; j++) sum[j] = 0.0f;
    for (uint32_t s = 0; s < steps; s++) {
        const uint32_t base = shared + at.slot * SHAPE::stage_bytes;
        const uint32_t tokens = mm_wgmma_descriptor_low(base + group * 64 * 128);
        const uint32_t weights = mm_wgmma_descriptor_low(base + SHAPE::token_bytes);
        ptx::mbarrier_wait_parity(dense_bar(bars.full[at.slot]), at.phase);
        mm_wgmma_fence();
#pragma unroll
        for (int q = 0; q < DENSE_K / 16; q++)
            mm_wgmma_shared(sum, mm_wgmma_descriptor(tokens + q * 2), mm_wgmma_descriptor(weights + q * 2));
        mm_wgmma_commit();
        mm_wgmma_wait<1>();
        if (s > 0 && elected) ptx::mbarrier_arrive(dense_bar(bars.empty[before]));
        before = at.slot;
        at.advance();
    }
    mm_wgmma_wait<0>();
    if (elected) ptx::mbarrier_arrive(dense_bar(bars.empty[before]));
}

/* sum[4 j + 2 r + c] is token row + 8 r and weight row 8 j + 2 t + c of the tile, of which the first half is gate's. */
template <int N>
MM_DEVICE void dense_l1_store(const mm_cuda_gemm_args &p, const float (&sum)[N / 2], uint32_t token, uint32_t feature) {
#pragma unroll
    for (int j = 0; j < N / 16; j++, feature += 8) {
        if (feature >= p.n) break;
        const mm_l1_feature f0 = mm_l1_feature_read(p, p.experts, feature);
        const mm_l1_feature f1 = mm_l1_feature_read(p, p.experts, feature + 1);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float *gate = sum + j * 4 + r * 2, *up = gate + N / 4;
            const float h0 = mm_l1_value<false>(p, f0, 1.0f, gate[0], up[0], 1.0f, 1.0f);
            const float h1 = mm_l1_value<false>(p, f1, 1.0f, gate[1], up[1], 1.0f, 1.0f);
            if (token + r * 8 < p.row_count)
                *(uint32_t *)((uint16_t *)p.y + (size_t)(token + r * 8) * p.y_pitch + feature) =
                    ptx::cvt_rn_bf16x2_f32(h1, h0);
        }
    }
}

template <int N>
MM_DEVICE void dense_l2_store(const mm_cuda_gemm_args &p, const float (&sum)[N / 2], uint32_t token, uint32_t row) {
#pragma unroll
    for (int j = 0; j < N / 8; j++, row += 8) {
        if (row >= p.n) break;
        const mm_l2_feature f = mm_l2_feature_read(p, p.experts, row, 1);
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (token + r * 8 < p.row_count)
                *(float2 *)((float *)p.y + (size_t)(token + r * 8) * p.y_pitch + row) =
                    make_float2(__fmaf_rn(sum[j * 4 + r * 2], f.global, f.bias[0]),
                                __fmaf_rn(sum[j * 4 + r * 2 + 1], f.global, f.bias[1]));
    }
}

template <class SHAPE> MM_DEVICE void dense_bars_init(dense_bars<SHAPE> &bars) {
    for (int i = 0; i < SHAPE::stages; i++) {
        ptx::mbarrier_init(dense_bar(bars.full[i]), SHAPE::fp8 ? 2 : 1); /* the producer, and a converting warp */
        ptx::mbarrier_init(dense_bar(bars.empty[i]), SHAPE::consumers);
    }
    for (int i = 0; i < SHAPE::raw_stages; i++) {
        ptx::mbarrier_init(dense_bar(bars.raw_full[i]), 1);
        ptx::mbarrier_init(dense_bar(bars.raw_empty[i]), 1);
    }
    ptx::fence_mbarrier_init_release_cluster();
}

template <bool L1, class SHAPE>
MM_DEVICE void dense_kernel(const CUtensorMap *x, const CUtensorMap *low, const CUtensorMap *high,
                            const mm_cuda_gemm_args &p) {
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(dense_bars<SHAPE>, bars, );
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u;
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) dense_bars_init(bars);
    __syncthreads();
    ptx::griddepcontrol_wait();
    const uint32_t tiles = (p.row_count + SHAPE::tokens - 1) / SHAPE::tokens * dense_columns<L1, SHAPE>(p);
    const uint32_t steps = (p.k + DENSE_K - 1) / DENSE_K;
    dense_place<SHAPE::stages> at;
    dense_place<SHAPE::raw_stages> raw;
    if (threadIdx.x >= SHAPE::producer) {
        if (SHAPE::many) ptx::setmaxnreg_dec<40>();
        if (threadIdx.x == SHAPE::producer)
            for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x)
                dense_produce<L1, SHAPE>(x, low, high, dense_find<L1, SHAPE>(p, i), steps, shared, bars, at, raw);
    } else if (SHAPE::fp8 && threadIdx.x >= SHAPE::consumers * 128) {
        uint32_t done = 0;
        for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x)
            dense_convert<L1, SHAPE>(p, dense_find<L1, SHAPE>(p, i), steps, shared, bars, at, raw, done);
    } else {
        if (SHAPE::many) ptx::setmaxnreg_inc<232>();
        for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
            float sum[SHAPE::n / 2];
            dense_multiply<SHAPE>(sum, steps, shared, bars, at);
            const dense_tile tile = dense_find<L1, SHAPE>(p, i);
            const uint32_t token = tile.token + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
            if (L1)
                dense_l1_store<SHAPE::n>(p, sum, token, tile.row + threadIdx.x % 4 * 2);
            else
                dense_l2_store<SHAPE::n>(p, sum, token, tile.row + threadIdx.x % 4 * 2);
        }
    }
}

#define DENSE_KERNEL(name, l1, fp8, n, tokens)                                                                         \
    extern "C" __global__ void __launch_bounds__(dense_shape<fp8, n, tokens>::threads, 1)                              \
        name(MM_GRID_CONSTANT(CUtensorMap, x), MM_GRID_CONSTANT(CUtensorMap, low),                                     \
             MM_GRID_CONSTANT(CUtensorMap, high), MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {                         \
        dense_kernel<l1, dense_shape<fp8, n, tokens>>(&x, &low, &high, args);                                          \
    }

DENSE_KERNEL(mm_dense_l1_wide, true, false, 256, 128)
DENSE_KERNEL(mm_dense_l2_wide, false, false, 256, 128)
DENSE_KERNEL(mm_dense_l1_fp8_mid, true, true, 64, 128)
DENSE_KERNEL(mm_dense_l2_fp8_mid, false, true, 64, 128)
DENSE_KERNEL(mm_dense_l1_bf16_mid, true, false, 64, 128)
DENSE_KERNEL(mm_dense_l2_bf16_mid, false, false, 64, 128)
DENSE_KERNEL(mm_dense_l1_fp8_low, true, true, 64, 64)
DENSE_KERNEL(mm_dense_l2_fp8_low, false, true, 64, 64)
DENSE_KERNEL(mm_dense_l1_bf16_low, true, false, 64, 64)
DENSE_KERNEL(mm_dense_l2_bf16_low, false, false, 64, 64)

/* E4M3 codes with E8M0 scales to BF16, rows x columns without a pitch: sixteen codes per thread, which share a scale.
 */
extern "C" __global__ void __launch_bounds__(256) mm_dense_widen(MM_GRID_CONSTANT(mm_cuda_widen_args, p)) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const mm_cuda_expert *e = p.expert;
    const uint32_t per_row_l1 = p.hidden / 16, per_row_l2 = p.intermediate / 16;
    const uint32_t each = p.hidden * per_row_l2;
    for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < 3 * each; i += gridDim.x * 256) {
        const mm_cuda_matrix *m = i < each ? &e->gate : i < 2 * each ? &e->up : &e->down;
        const uint32_t at = i % each, per_row = i < 2 * each ? per_row_l1 : per_row_l2;
        const uint32_t row = at / per_row, k = at % per_row * 16;
        const uint4 v = ptx::ld_global_nc_v4_u32(m->codes + (size_t)row * m->row_bytes + k);
        const uint32_t byte = m->scales[(size_t)(row / m->block_rows) * m->scale_row_bytes + k / m->block_columns];
        const uint32_t scale = (byte ? byte << 7 : 0x40u) * 0x00010001u, word[4] = {v.x, v.y, v.z, v.w};
        uint32_t pair[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            pair[j * 2] = ptx::mul_rn_bf16x2(mm_fp8_pair<false>(word[j]), scale);
            pair[j * 2 + 1] = ptx::mul_rn_bf16x2(mm_fp8_pair<true>(word[j]), scale);
        }
        uint4 *to = (uint4 *)(p.bf16 + (size_t)i * 16);
        to[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        to[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
    }
}
