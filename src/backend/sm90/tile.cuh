/*
 * Expert GEMMs for experts with many rows, on wgmma: 256 weight rows x N tokens per tile, N chosen per entry.
 *
 * Weights are the M operand, dequantized in registers from the checkpoint's bytes; activations are staged BF16 rows
 * (K-permuted, see convert.cuh), a stage of them in one 128-byte-swizzled tensor copy. Four consumer warpgroups of one
 * m64 sub-tile, or two of two, and one producer warpgroup. MMA rows g and g + 8 of a sub-tile are a gate and an up row
 * of one feature (L1), or rows r and r + 128 (L2). A stage is GROUPS 128-groups of K. Its scales come by cp.async, a
 * thread of the producer's per row of a half, since tensor boxes of 16-byte rows cost a request per row. So consumers
 * read nothing from global memory before a tile's sums are complete: the producer tells them, too, which tile is next.
 *
 * A word of codes per lane and row is a batch: convert, fence, wgmma, commit, and wait for the batch before. All N
 * accumulate K in the same order, so a token's bits do not depend on N.
 *
 * How many widths a kernel can have is for ptxas to say: it serializes the wgmma of a function that it finds too large,
 * which compile.cmake refuses. Few instructions per loop, sums shared by all widths and one epilogue help.
 */
#ifndef MM_SM90_TILE_CUH
#define MM_SM90_TILE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "backend/cuda/epilogue.cuh"
#include "backend/sm90/copy.cuh"
#include "backend/sm90/wgmma.cuh"

enum {
    TILE_ROWS = 256,
    TILE_HALF = TILE_ROWS / 2,
    TILE_PRODUCERS = 128, /* threads: one brings the scales of row r of each half */
};
static_assert(TILE_HALF == TILE_PRODUCERS, "a thread per row of a half");

template <int... WIDTHS> constexpr int tile_widest() {
    int n = 0;
    ((n = WIDTHS > n ? WIDTHS : n), ...);
    return n;
}

/* The shape of a kernel instance, and where a stage's parts lie. CONSUMERS: warpgroups. Widths ascend. */
template <int CONSUMERS, int GROUPS, int STAGES, int... WIDTHS> struct tile_shape {
    static constexpr int consumers = CONSUMERS, subtiles = TILE_ROWS / 64 / CONSUMERS;
    static constexpr int threads = CONSUMERS * 128 + TILE_PRODUCERS;
    /* 384 threads x 168 = 256 x 240 + 128 x 24; 640 x 96 = 512 x 112 + 128 x 32 */
    static constexpr int consumer_registers = CONSUMERS == 2 ? 240 : 112;
    static constexpr int producer_registers = CONSUMERS == 2 ? 24 : 32;
    static constexpr int groups = GROUPS, stages = STAGES, n_max = tile_widest<WIDTHS...>();
    static constexpr uint32_t token_bytes = n_max * 256 * GROUPS, code_bytes = TILE_ROWS * 64 * GROUPS;
    static constexpr uint32_t scale_pitch = 8 * GROUPS;
    static constexpr uint32_t stage_bytes = token_bytes + code_bytes + TILE_ROWS * scale_pitch;
    static_assert(stage_bytes % 1024 == 0, "swizzled token tiles must begin at a multiple of 1024 bytes");

    /* The widths that are too narrow for so many rows; the narrowest that is not. */
    static __device__ __forceinline__ int narrower(int count) { return (... + (WIDTHS < count)); }
    static __device__ __forceinline__ int width(int count) {
        int n = n_max;
        ((n = WIDTHS >= count && WIDTHS < n ? WIDTHS : n), ...);
        return n;
    }
};

/* A tile as the producer announces it; count 0: there are no more. */
struct tile_work {
    int expert, block, row, count; /* block: of TILE_HALF features (L1) or TILE_ROWS rows (L2) */
};

template <bool L1> MM_DEVICE int tile_blocks(const mm_cuda_gemm_args &p) {
    return (p.n + (L1 ? TILE_HALF : TILE_ROWS) - 1) / (L1 ? TILE_HALF : TILE_ROWS);
}

template <class SHAPE> MM_DEVICE int tile_stages(const mm_cuda_gemm_args &p) {
    return ((int)p.k + 128 * SHAPE::groups - 1) / (128 * SHAPE::groups);
}

/* ---- producer ------------------------------------------------------------------------------------------- */

/* A stage of one row's scales. What lies beyond the row's last scales multiplies zeros. */
template <bool MX, class SHAPE>
MM_DEVICE void tile_copy_scales(const mm_cuda_gemm_args &p, bool aligned, const uint8_t *row, int stage, uint32_t to) {
    constexpr int BYTES = (MX ? 4 : 8) * SHAPE::groups;
    if (aligned) {
        mm_cp_async<BYTES>(to, row + stage * BYTES);
        return;
    }
    const int last = (int)p.k / (MX ? 32 : 16) - 2;
#pragma unroll 1
    for (int b = 0; b < BYTES; b += 2)
        ptx::st_shared_u16(to + b, ptx::ld_global_nc_u16(row + min(stage * BYTES + b, last)));
}

/* The stages of one tile. Rows beyond the matrix repeat its last scales. */
template <bool L1, bool MX, class SHAPE>
MM_DEVICE void tile_produce(const mm_cuda_gemm_args &p, const mm_cuda_token_maps &maps, const tile_work &work,
                            tile_work *announced, uint32_t shared, uint32_t full, uint32_t empty, uint32_t &done) {
    constexpr int GROUPS = SHAPE::groups;
    const int thread = threadIdx.x % TILE_PRODUCERS, stages = tile_stages<SHAPE>(p);
    const int low_row = work.block * (L1 ? TILE_HALF : TILE_ROWS), high_row = L1 ? low_row : low_row + TILE_HALF;
    const bool aligned = p.scale_row_bytes % ((MX ? 4 : 8) * GROUPS) == 0;
    const mm_cuda_expert *e = p.experts + work.expert;
    const uint8_t *low_scales =
        (L1 ? e->gate.scales : e->down.scales) + (size_t)min(low_row + thread, (int)p.n - 1) * p.scale_row_bytes;
    const uint8_t *high_scales =
        (L1 ? e->up.scales : e->down.scales) + (size_t)min(high_row + thread, (int)p.n - 1) * p.scale_row_bytes;
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++, done++) {
        const uint32_t slot = done % SHAPE::stages, bar = full + slot * 8;
        const uint32_t tokens = shared + slot * SHAPE::stage_bytes, codes = tokens + SHAPE::token_bytes;
        const uint32_t scales = codes + SHAPE::code_bytes + thread * SHAPE::scale_pitch;
        ptx::mbarrier_wait_parity(empty + slot * 8, (done / SHAPE::stages & 1) ^ 1);
        if (thread == 0) {
            const CUtensorMap *map = p.maps + (size_t)work.expert * 3;
            if (stage == 0) *announced = work;
            ptx::mbarrier_arrive_expect_tx(bar, SHAPE::code_bytes + GROUPS * SHAPE::width(work.count) * 256);
            ptx::cp_async_bulk_tensor_2d_no_hint(codes, L1 ? map : map + 2, stage * GROUPS * 64, low_row, bar);
            ptx::cp_async_bulk_tensor_2d_no_hint(codes + SHAPE::code_bytes / 2, L1 ? map + 1 : map + 2,
                                                 stage * GROUPS * 64, high_row, bar);
            mm_tensor_copy_3d(tokens, &maps.width[SHAPE::narrower(work.count)], 0, work.row, stage * GROUPS * 2, bar);
        }
        tile_copy_scales<MX, SHAPE>(p, aligned, low_scales, stage, scales);
        tile_copy_scales<MX, SHAPE>(p, aligned, high_scales, stage, scales + TILE_HALF * SHAPE::scale_pitch);
        if (aligned)
            mm_cp_async_arrive(bar);
        else
            ptx::mbarrier_arrive(bar);
    }
}

/* ---- consumers ------------------------------------------------------------------------------------------ */

/* One batch: a word of each of a lane's two rows, times 32 values of every token. */
template <int N>
MM_DEVICE void tile_batch(float *sum, const uint2 (&w)[2], const uint32_t (&scale)[2], int word, uint32_t tokens) {
    float(&sums)[N / 2] = *(float(*)[N / 2]) sum;
    uint32_t low[4], high[4];
    mm_codes_convert(word ? w[0].y : w[0].x, scale[0], low);
    mm_codes_convert(word ? w[1].y : w[1].x, scale[1], high);
    mm_wgmma_fence();
    const uint32_t at = tokens + word * 4;
    mm_wgmma<N>::m64k16(sums, low[0], high[0], low[1], high[1], mm_wgmma_descriptor(at));
    mm_wgmma<N>::m64k16(sums, low[2], high[2], low[3], high[3], mm_wgmma_descriptor(at + 2));
    mm_wgmma_commit();
    mm_wgmma_wait<1>();
}

/* All of K. A step is half a 128-group: two words and one scale per lane and row, one column of swizzled token rows. */
template <bool MX, int N, class SHAPE>
MM_DEVICE void tile_multiply(const mm_cuda_gemm_args &p, float (&sum)[SHAPE::subtiles][SHAPE::n_max / 2], int lane_row,
                             int t, uint32_t shared, uint32_t full, uint32_t empty, uint32_t &done) {
    const int stages = tile_stages<SHAPE>(p);
    const bool elected = threadIdx.x % 128 == 0;
    uint32_t before = 0;
    for (int stage = 0; stage < stages; stage++, done++) {
        const uint32_t slot = done % SHAPE::stages, base = shared + slot * SHAPE::stage_bytes;
        ptx::mbarrier_wait_parity(full + slot * 8, done / SHAPE::stages & 1);
#pragma unroll 1
        for (int step = 0; step < 2 * SHAPE::groups; step++) {
            const int group = step >> 1, half = step & 1;
            const uint32_t tokens = mm_wgmma_descriptor_low(base + step * (N * 128));
            const uint32_t codes =
                base + SHAPE::token_bytes + lane_row * (64 * SHAPE::groups) + group * 64 + t * 16 + half * 8;
            const uint32_t scales = base + SHAPE::token_bytes + SHAPE::code_bytes + lane_row * SHAPE::scale_pitch +
                                    (MX ? group * 4 + t : group * 8 + t * 2 + half);
            uint2 w[SHAPE::subtiles][2];
            uint32_t s[SHAPE::subtiles][2];
#pragma unroll
            for (int m = 0; m < SHAPE::subtiles; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = h * TILE_HALF + m * 32;
                    w[m][h] = ptx::ld_shared_v2_u32(codes + row * (64 * SHAPE::groups));
                    s[m][h] = mm_block_scale<MX>(ptx::ld_shared_u8(scales + row * SHAPE::scale_pitch));
                }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < SHAPE::subtiles; m++) {
                    tile_batch<N>(sum[m], w[m], s[m], i, tokens);
                    /* The wait inside the batch proved that the stage before is no longer read. */
                    if (step == 0 && i == 0 && m == 0 && stage > 0 && elected) ptx::mbarrier_arrive(empty + before * 8);
                }
        }
        before = slot;
    }
    mm_wgmma_wait<0>();
    if (elected) ptx::mbarrier_arrive(empty + before * 8);
}

/* One piece of code for all widths: what is unrolled over every accumulator fills the instruction cache. */
template <bool L1, class SHAPE>
MM_DEVICE void tile_store(const mm_cuda_gemm_args &p, const tile_work &work,
                          const float (&sum)[SHAPE::subtiles][SHAPE::n_max / 2], int lane_row, int g, int t) {
    const mm_cuda_expert *e = p.experts + work.expert;
    const int feature = work.block * (L1 ? TILE_HALF : TILE_ROWS) + lane_row; /* of sub-tile 0 */
    mm_l1_feature f1[SHAPE::subtiles];
    mm_l2_feature f2[SHAPE::subtiles];
#pragma unroll
    for (int m = 0; m < SHAPE::subtiles; m++) {
        if (L1)
            f1[m] = mm_l1_feature_read(p, e, feature + m * 32);
        else
            f2[m] = mm_l2_feature_read(p, e, feature + m * 32, TILE_HALF);
    }
#pragma unroll
    for (int j = 0; j < SHAPE::n_max / 8; j++) {
        if (8 * j >= work.count) break;
        const int row = work.row + 8 * j + 2 * t, left = work.count - 8 * j - 2 * t;
        mm_row_terms r;
        if (L1) r = mm_row_terms_read(p, row, left);
#pragma unroll
        for (int m = 0; m < SHAPE::subtiles; m++) {
            const float s0 = sum[m][4 * j], s1 = sum[m][4 * j + 1], s2 = sum[m][4 * j + 2], s3 = sum[m][4 * j + 3];
            if (L1)
                mm_l1_store<false>(p, f1[m], r, MM_CODE_FACTOR, feature - g + m * 32, s0, s1, s2, s3, row, left, g);
            else
                mm_l2_store<false>(p, f2[m], MM_CODE_FACTOR, feature + m * 32, TILE_HALF, s0, s1, s2, s3, row, left);
        }
    }
}

/* One tile. Sums of every width are the same registers. */
template <bool L1, bool MX, int CONSUMERS, int GROUPS, int STAGES, int... WIDTHS>
MM_DEVICE void tile_consume(const mm_cuda_gemm_args &p, const tile_work *announced, int count, uint32_t shared,
                            uint32_t full, uint32_t empty, uint32_t &done,
                            tile_shape<CONSUMERS, GROUPS, STAGES, WIDTHS...> shape) {
    using SHAPE = decltype(shape);
    const int thread = (int)ptx::tid_x(), lane = thread % 32, g = lane >> 2, t = lane & 3, n = SHAPE::width(count);
    const int lane_row = thread / 128 * (32 * SHAPE::subtiles) + thread / 32 % 4 * 8 + g;
    float sum[SHAPE::subtiles][SHAPE::n_max / 2];
#pragma unroll
    for (int m = 0; m < SHAPE::subtiles; m++)
#pragma unroll
        for (int i = 0; i < SHAPE::n_max / 2; i++) sum[m][i] = 0.0f;
    ((n == WIDTHS ? tile_multiply<MX, WIDTHS, SHAPE>(p, sum, lane_row, t, shared, full, empty, done) : (void)0), ...);
    tile_store<L1, SHAPE>(p, *announced, sum, lane_row, g, t);
}

/* ---- kernel --------------------------------------------------------------------------------------------- */

/*
 * Tiles are announced in a ring: when the producer announces a tile, it may be as many stages, hence tiles, ahead of
 * the tile that consumers have released and are still storing as there are stages.
 */
template <bool L1, bool MX, class SHAPE>
MM_DEVICE void tile_kernel(const mm_cuda_token_maps &maps, const mm_cuda_gemm_args &p) {
    constexpr int RING = SHAPE::stages + 1;
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(uint64_t, bars, [2 * SHAPE::stages]);
    MM_SHARED(tile_work, announced, [RING]);
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u;
    const uint32_t full = ptx::cvta_to_shared(bars), empty = ptx::cvta_to_shared(bars + SHAPE::stages);
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::stages; i++) {
            ptx::mbarrier_init(full + i * 8, TILE_PRODUCERS + 1); /* scales of a thread's rows; tensor copies */
            ptx::mbarrier_init(empty + i * 8, SHAPE::consumers);
        }
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    uint32_t done = 0; /* stages */
    int tile = 0;
    if (threadIdx.x >= SHAPE::consumers * 128) {
        ptx::setmaxnreg_dec<SHAPE::producer_registers>();
        const int blocks = tile_blocks<L1>(p), tiles = p.plan->count[p.list] * blocks;
        for (int i = blockIdx.x; i < tiles; i += gridDim.x, tile++) {
            const mm_cuda_entry e = p.entries[i / blocks];
            const tile_work work = {e.expert, i % blocks, e.row, e.count};
            tile_produce<L1, MX, SHAPE>(p, maps, work, announced + tile % RING, shared, full, empty, done);
        }
        const uint32_t slot = done % SHAPE::stages;
        ptx::mbarrier_wait_parity(empty + slot * 8, (done / SHAPE::stages & 1) ^ 1);
        if (threadIdx.x % TILE_PRODUCERS == 0) {
            announced[tile % RING] = {0, 0, 0, 0};
            ptx::mbarrier_arrive(full + slot * 8);
        }
        ptx::mbarrier_arrive(full + slot * 8);
    } else {
        ptx::setmaxnreg_inc<SHAPE::consumer_registers>();
        for (;; tile++) {
            const tile_work *work = announced + tile % RING;
            ptx::mbarrier_wait_parity(full + done % SHAPE::stages * 8, done / SHAPE::stages & 1);
            if (work->count == 0) break;
            tile_consume<L1, MX>(p, work, work->count, shared, full, empty, done, SHAPE());
        }
    }
}

#endif
