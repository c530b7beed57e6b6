/*
 * Expert GEMMs for experts with many rows, on wgmma: 256 weight rows x N tokens per tile, N chosen per entry.
 *
 * Weights are the M operand, dequantized in registers from the checkpoint's bytes; activations are staged BF16 rows
 * (K-permuted, see convert.cuh), brought by 128-byte-swizzled tensor copies. Two consumer warpgroups of two m64
 * sub-tiles each, one producer warp. MMA rows g and g + 8 of a sub-tile are a gate and an up row of one feature (L1),
 * or rows r and r + 128 (L2). A stage is GROUPS 128-groups of K; scales are read from global memory one stage ahead,
 * since tensor boxes of 16-byte rows cost a request per row.
 *
 * A word of codes per lane and row (or two) is a batch: convert, fence, wgmma, commit, and wait for the batch before.
 * All N accumulate K in the same order, so a token's bits do not depend on N.
 */
#ifndef MM_SM90_TILE_CUH
#define MM_SM90_TILE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "backend/cuda/epilogue.cuh"
#include "backend/sm90/wgmma.cuh"

enum {
    TILE_CONSUMERS = 2, /* warpgroups */
    TILE_SUBTILES = 2,  /* m64 each, per warpgroup */
    TILE_ROWS = TILE_CONSUMERS * TILE_SUBTILES * 64,
    TILE_HALF = TILE_ROWS / 2,
    TILE_THREADS = TILE_CONSUMERS * 128 + 128,
    TILE_CONSUMER_REGISTERS = 240, /* 384 threads x 168 = 256 x 240 + 128 x 24 */
    TILE_PRODUCER_REGISTERS = 24,
};

/* Where a stage's parts lie; the shape of a kernel instance. */
template <int N_MAX, int GROUPS, int STAGES, int LONG_BATCH> struct tile_shape {
    static constexpr int n_max = N_MAX, groups = GROUPS, stages = STAGES;
    static constexpr int long_batch = LONG_BATCH; /* widths up to which a batch is two words */
    static constexpr uint32_t token_bytes = N_MAX * 256 * GROUPS, code_bytes = TILE_ROWS * 64 * GROUPS;
    static constexpr uint32_t stage_bytes = token_bytes + code_bytes;
    static_assert(stage_bytes % 1024 == 0, "swizzled token tiles must begin at a multiple of 1024 bytes");
};

struct tile_work {
    int expert, block, row, count; /* block: of TILE_HALF features (L1) or TILE_ROWS rows (L2) */
};

template <bool L1> MM_DEVICE int tile_blocks(const mm_cuda_gemm_args &p) {
    return (p.n + (L1 ? TILE_HALF : TILE_ROWS) - 1) / (L1 ? TILE_HALF : TILE_ROWS);
}

template <bool L1> MM_DEVICE tile_work tile_find(const mm_cuda_gemm_args &p, int index) {
    const int blocks = tile_blocks<L1>(p);
    const mm_cuda_entry e = p.entries[index / blocks];
    return {e.expert, index % blocks, e.row, e.count};
}

/* Scales of the next stage, one register per (sub-tile, half, group). Rows beyond the matrix repeat some inside it (n
 * >= 64). */
template <bool L1, bool MX, int GROUPS> struct tile_scales {
    const uint8_t *row[2];
    uint32_t next[TILE_SUBTILES][2][GROUPS];

    __device__ __forceinline__ void begin(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int block,
                                          int lane_row) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const mm_cuda_matrix *w = L1 ? (h ? &e->up : &e->gate) : &e->down;
            const int r = block * (L1 ? TILE_HALF : TILE_ROWS) + (L1 ? 0 : h * TILE_HALF) + lane_row;
            row[h] = w->scales + (size_t)min(r, (int)p.n - 64 + (lane_row & 31)) * p.scale_row_bytes;
        }
    }
    /* Offsets are bounded by the row's last scales: what lies beyond multiplies zeros. */
    __device__ __forceinline__ void fetch(const mm_cuda_gemm_args &p, int stage, int t) {
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            const uint32_t at =
                min((stage * GROUPS + q) * (MX ? 4 : 8) + t * (MX ? 1 : 2), (int)p.k / (MX ? 32 : 16) - (MX ? 1 : 2));
#pragma unroll
            for (int m = 0; m < TILE_SUBTILES; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint8_t *from = row[h] + (m * 32 * p.scale_row_bytes + at);
                    next[m][h][q] = MX ? (uint32_t)__ldg(from) : ptx::ld_global_nc_u16(from);
                }
        }
    }
};

/*
 * One batch of WORDS words of a lane's two rows, 2 wgmma each. Narrow tiles take two words: their wgmma are short, and
 * it is the fence and the wait that would be paid per word.
 */
template <int N, int WORDS>
MM_DEVICE void tile_batch(float (&sum)[N / 2], const uint4 &a, const uint4 &b, const uint2 &s0, const uint2 &s1,
                          int first, uint32_t tokens) {
    uint32_t low[WORDS][4], high[WORDS][4];
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        const int i = first + j;
        mm_codes_convert(i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w, i < 2 ? s0.x : s0.y, low[j]);
        mm_codes_convert(i == 0 ? b.x : i == 1 ? b.y : i == 2 ? b.z : b.w, i < 2 ? s1.x : s1.y, high[j]);
    }
    mm_wgmma_fence();
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        const uint32_t at = tokens + (((first + j) >> 1) * (N * 128) + ((first + j) & 1) * 64) / 16;
        mm_wgmma<N>::m64k16(sum, low[j][0], high[j][0], low[j][1], high[j][1], mm_wgmma_descriptor(at));
        mm_wgmma<N>::m64k16(sum, low[j][2], high[j][2], low[j][3], high[j][3], mm_wgmma_descriptor(at + 2));
    }
    mm_wgmma_commit();
    mm_wgmma_wait<1>();
}

template <bool L1, int N>
MM_DEVICE void tile_store(const mm_cuda_gemm_args &p, const tile_work &work, const float (&sum)[TILE_SUBTILES][N / 2],
                          int lane_row, int g, int t) {
    const mm_cuda_expert *e = p.experts + work.expert;
    const int feature = work.block * (L1 ? TILE_HALF : TILE_ROWS) + lane_row; /* of sub-tile 0 */
    mm_l1_feature f1[TILE_SUBTILES];
    mm_l2_feature f2[TILE_SUBTILES];
#pragma unroll
    for (int m = 0; m < TILE_SUBTILES; m++) {
        if (L1)
            f1[m] = mm_l1_feature_read(p, e, feature + m * 32);
        else
            f2[m] = mm_l2_feature_read(p, e, feature + m * 32, TILE_HALF);
    }
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int row = work.row + 8 * j + 2 * t, left = work.count - 8 * j - 2 * t;
        mm_row_terms r;
        if (L1) r = mm_row_terms_read(p, row, left);
#pragma unroll
        for (int m = 0; m < TILE_SUBTILES; m++) {
            const float s0 = sum[m][4 * j], s1 = sum[m][4 * j + 1], s2 = sum[m][4 * j + 2], s3 = sum[m][4 * j + 3];
            if (L1)
                mm_l1_store<false>(p, f1[m], r, MM_CODE_FACTOR, feature - g + m * 32, s0, s1, s2, s3, row, left, g);
            else
                mm_l2_store<false>(p, f2[m], MM_CODE_FACTOR, feature + m * 32, TILE_HALF, s0, s1, s2, s3, row, left);
        }
    }
}

template <bool L1, bool MX, int N, class SHAPE>
MM_DEVICE void tile_consume(const mm_cuda_gemm_args &p, int index, uint32_t shared, uint32_t full, uint32_t empty,
                            uint32_t &done) {
    constexpr int GROUPS = SHAPE::groups, WORDS = N <= SHAPE::long_batch ? 2 : 1;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2,
              t = lane & 3;
    const int lane_row = group * (32 * TILE_SUBTILES) + warp * 8 + g;
    const int stages = ((int)p.k + 128 * GROUPS - 1) / (128 * GROUPS);
    const bool elected = threadIdx.x % 128 == 0;
    float sum[TILE_SUBTILES][N / 2];
#pragma unroll
    for (int m = 0; m < TILE_SUBTILES; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) sum[m][i] = 0.0f;
    tile_scales<L1, MX, GROUPS> scales;
    {
        const tile_work work = tile_find<L1>(p, index);
        scales.begin(p, p.experts + work.expert, work.block, lane_row);
    }
    scales.fetch(p, 0, t);
    uint32_t before = 0;
    for (int stage = 0; stage < stages; stage++, done++) {
        const uint32_t slot = done % SHAPE::stages, base = shared + slot * SHAPE::stage_bytes;
        uint32_t bytes[TILE_SUBTILES][2][GROUPS];
#pragma unroll
        for (int i = 0; i < TILE_SUBTILES * 2 * GROUPS; i++)
            bytes[i / (2 * GROUPS)][i / GROUPS % 2][i % GROUPS] =
                scales.next[i / (2 * GROUPS)][i / GROUPS % 2][i % GROUPS];
        if (stage + 1 < stages) scales.fetch(p, stage + 1, t);
        ptx::mbarrier_wait_parity(full + slot * 8, done / SHAPE::stages & 1);
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            const uint32_t codes = base + SHAPE::token_bytes + q * 64 + t * 16;
            const uint32_t tokens = mm_wgmma_descriptor_low(base + q * (N * 256));
            uint4 w[TILE_SUBTILES][2];
            uint2 s[TILE_SUBTILES][2];
#pragma unroll
            for (int m = 0; m < TILE_SUBTILES; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    w[m][h] = ptx::ld_shared_v4_u32(codes + (h * TILE_HALF + lane_row + m * 32) * (64 * GROUPS));
                    s[m][h] = mm_group_scales<MX>(bytes[m][h][q]);
                }
#pragma unroll
            for (int i = 0; i < 4; i += WORDS)
#pragma unroll
                for (int m = 0; m < TILE_SUBTILES; m++) {
                    tile_batch<N, WORDS>(sum[m], w[m][0], w[m][1], s[m][0], s[m][1], i, tokens);
                    /* The wait inside the batch proved that the stage before is no longer read. */
                    if (q == 0 && i == 0 && m == 0 && stage > 0 && elected) ptx::mbarrier_arrive(empty + before * 8);
                }
        }
        before = slot;
    }
    mm_wgmma_wait<0>();
    if (elected) ptx::mbarrier_arrive(empty + before * 8);
    tile_store<L1, N>(p, tile_find<L1>(p, index), sum, lane_row, g,
                      t); /* found again: registers are short in the loop */
}

/* One thread: the stages of one tile. N is the instance's width that the consumers will use. */
template <bool L1, class SHAPE>
MM_DEVICE void tile_produce(const mm_cuda_gemm_args &p, const CUtensorMap *rows64, const CUtensorMap *rows8,
                            const tile_work &work, int n, uint32_t shared, uint32_t full, uint32_t empty,
                            uint32_t &done) {
    constexpr int GROUPS = SHAPE::groups;
    const CUtensorMap *map = p.maps + (size_t)work.expert * 3;
    const CUtensorMap *low = L1 ? map : map + 2, *high = L1 ? map + 1 : map + 2;
    const int low_row = work.block * (L1 ? TILE_HALF : TILE_ROWS), high_row = L1 ? low_row : low_row + TILE_HALF;
    const int stages = ((int)p.k + 128 * GROUPS - 1) / (128 * GROUPS);
    for (int stage = 0; stage < stages; stage++, done++) {
        const uint32_t slot = done % SHAPE::stages, base = shared + slot * SHAPE::stage_bytes, bar = full + slot * 8;
        ptx::mbarrier_wait_parity(empty + slot * 8, (done / SHAPE::stages & 1) ^ 1);
        ptx::mbarrier_arrive_expect_tx(bar, SHAPE::code_bytes + GROUPS * n * 256);
        ptx::cp_async_bulk_tensor_2d_no_hint(base + SHAPE::token_bytes, low, stage * GROUPS * 64, low_row, bar);
        ptx::cp_async_bulk_tensor_2d_no_hint(base + SHAPE::token_bytes + SHAPE::code_bytes / 2, high,
                                             stage * GROUPS * 64, high_row, bar);
        for (int half = 0; half < 2 * GROUPS; half++) {
            const uint32_t at = base + half * n * 128;
            const int x = (stage * GROUPS * 2 + half) * 64;
            int r = 0;
            for (; r + 64 <= n; r += 64)
                ptx::cp_async_bulk_tensor_2d_no_hint(at + r * 128, rows64, x, work.row + r, bar);
            for (; r < n; r += 8) ptx::cp_async_bulk_tensor_2d_no_hint(at + r * 128, rows8, x, work.row + r, bar);
        }
    }
}

template <bool L1, bool MX, class SHAPE, int... WIDTHS> struct tile_widths {
    static __device__ __forceinline__ int choose(int count) {
        int n = SHAPE::n_max;
        ((n = WIDTHS >= count && WIDTHS < n ? WIDTHS : n), ...);
        return n;
    }
    static __device__ __forceinline__ void consume(const mm_cuda_gemm_args &p, int index, int n, uint32_t shared,
                                                   uint32_t full, uint32_t empty, uint32_t &done) {
        ((n == WIDTHS ? tile_consume<L1, MX, WIDTHS, SHAPE>(p, index, shared, full, empty, done) : (void)0), ...);
    }
};

template <bool L1, bool MX, class SHAPE, int... WIDTHS>
MM_DEVICE void tile_kernel(const CUtensorMap *rows64, const CUtensorMap *rows8, const mm_cuda_gemm_args &p) {
    using widths = tile_widths<L1, MX, SHAPE, WIDTHS...>;
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(uint64_t, bars, [2 * SHAPE::stages]);
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u;
    const uint32_t full = ptx::cvta_to_shared(bars), empty = ptx::cvta_to_shared(bars + SHAPE::stages);
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::stages; i++) {
            ptx::mbarrier_init(full + i * 8, 1);
            ptx::mbarrier_init(empty + i * 8, TILE_CONSUMERS);
        }
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    const int tiles = p.plan->count[p.list] * tile_blocks<L1>(p);
    uint32_t done = 0;
    if (threadIdx.x >= TILE_CONSUMERS * 128) {
        ptx::setmaxnreg_dec<TILE_PRODUCER_REGISTERS>();
        if (threadIdx.x == TILE_CONSUMERS * 128)
            for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
                const tile_work work = tile_find<L1>(p, i);
                tile_produce<L1, SHAPE>(p, rows64, rows8, work, widths::choose(work.count), shared, full, empty, done);
            }
    } else {
        ptx::setmaxnreg_inc<TILE_CONSUMER_REGISTERS>();
        for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
            widths::consume(p, i, widths::choose(tile_find<L1>(p, i).count), shared, full, empty, done);
        }
    }
}

#endif
