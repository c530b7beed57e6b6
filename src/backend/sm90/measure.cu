/*
 * A plain BF16 product, C = A B^T, the yardstick that bench reports matrix rates against: 128 x 256 tiles, K in steps
 * of 64, two consumer warpgroups and a producer, four stages of 128-byte-swizzled tensor copies. M, N, K multiples of
 * the tile.
 */
#include "backend/cuda/args.h"
#include "backend/sm90/wgmma.cuh"

enum {
    GEMM_M = 128,
    GEMM_N = 256,
    GEMM_K = 64,
    GEMM_STAGES = 4,
    GEMM_STAGE_BYTES = (GEMM_M + GEMM_N) * GEMM_K * 2,
    GEMM_GROUP = 8
};

/* Tiles walk down GEMM_GROUP rows of tiles before the next column, so that operands are met again in L2. */
MM_DEVICE void gemm_tile(uint32_t i, uint32_t rows, uint32_t columns, uint32_t *m, uint32_t *n) {
    const uint32_t band = i / (GEMM_GROUP * columns), within = i % (GEMM_GROUP * columns);
    const uint32_t height = min((uint32_t)GEMM_GROUP, rows - band * GEMM_GROUP);
    *m = band * GEMM_GROUP + within % height, *n = within / height;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    mm_gemm_bf16(MM_GRID_CONSTANT(CUtensorMap, a), MM_GRID_CONSTANT(CUtensorMap, b), uint16_t *c, uint32_t m,
                 uint32_t n, uint32_t k) {
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(uint64_t, bars, [2 * GEMM_STAGES]);
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u, full = ptx::cvta_to_shared(bars),
                   empty = full + GEMM_STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GEMM_STAGES; i++) ptx::mbarrier_init(full + i * 8, 1), ptx::mbarrier_init(empty + i * 8, 2);
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    const uint32_t rows = m / GEMM_M, columns = n / GEMM_N, steps = k / GEMM_K;
    uint32_t done = 0, tile_m, tile_n;
    if (threadIdx.x >= 256) {
        ptx::setmaxnreg_dec<40>();
        if (threadIdx.x != 256) return;
        for (uint32_t i = blockIdx.x; i < rows * columns; i += gridDim.x) {
            gemm_tile(i, rows, columns, &tile_m, &tile_n);
            for (uint32_t s = 0; s < steps; s++, done++) {
                const uint32_t slot = done % GEMM_STAGES, base = shared + slot * GEMM_STAGE_BYTES,
                               bar = full + slot * 8;
                ptx::mbarrier_wait_parity(empty + slot * 8, (done / GEMM_STAGES & 1) ^ 1);
                ptx::mbarrier_arrive_expect_tx(bar, GEMM_STAGE_BYTES);
                ptx::cp_async_bulk_tensor_2d_no_hint(base, &a, s * GEMM_K, tile_m * GEMM_M, bar);
                ptx::cp_async_bulk_tensor_2d_no_hint(base + GEMM_M * GEMM_K * 2, &b, s * GEMM_K, tile_n * GEMM_N, bar);
            }
        }
        return;
    }
    ptx::setmaxnreg_inc<232>();
    const uint32_t group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (uint32_t i = blockIdx.x; i < rows * columns; i += gridDim.x) {
        float sum[128];
#pragma unroll
        for (int j = 0; j < 128; j++) sum[j] = 0.0f;
        for (uint32_t s = 0; s < steps; s++, done++) {
            const uint32_t slot = done % GEMM_STAGES, base = shared + slot * GEMM_STAGE_BYTES;
            const uint32_t from_a = mm_wgmma_descriptor_low(base + group * 64 * GEMM_K * 2);
            const uint32_t from_b = mm_wgmma_descriptor_low(base + GEMM_M * GEMM_K * 2);
            ptx::mbarrier_wait_parity(full + slot * 8, done / GEMM_STAGES & 1);
            mm_wgmma_fence();
#pragma unroll
            for (int q = 0; q < GEMM_K / 16; q++)
                mm_wgmma_m64n256k16(sum, mm_wgmma_descriptor(from_a + q * 2), mm_wgmma_descriptor(from_b + q * 2));
            mm_wgmma_commit();
            mm_wgmma_wait<1>();
            if (s > 0 && threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty + (done - 1) % GEMM_STAGES * 8);
        }
        mm_wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty + (done - 1) % GEMM_STAGES * 8);
        gemm_tile(i, rows, columns, &tile_m, &tile_n);
        uint16_t *to =
            c + (size_t)(tile_m * GEMM_M + group * 64 + warp * 16 + lane / 4) * n + tile_n * GEMM_N + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; j++) {
            *(uint32_t *)(to + j * 8) = ptx::cvt_rn_bf16x2_f32(sum[j * 4 + 1], sum[j * 4]);
            *(uint32_t *)(to + j * 8 + (size_t)8 * n) = ptx::cvt_rn_bf16x2_f32(sum[j * 4 + 3], sum[j * 4 + 2]);
        }
    }
}
