/*
 * Router logits of many tokens on wgmma: 128 tokens (the M operand) x N experts per tile, both BF16 from shared memory,
 * K in steps of 64, two consumer warpgroups and a producer, 128-byte-swizzled tensor copies. The tiles of one run of
 * tokens follow each other, so that hidden states come from memory once. Few tokens: K is cut into parts, which
 * mm_route_choose adds in order.
 */
#include "backend/cuda/args.h"
#include "backend/sm90/wgmma.cuh"

enum { ROUTE_TOKENS = 128, ROUTE_K = 64, ROUTE_STAGES = 4, ROUTE_CONSUMERS = 2 };

struct route_work {
    uint32_t expert, token, part, first, steps; /* steps of K */
};

/* Tile i: experts change fastest, then tokens, then parts of K. */
MM_DEVICE route_work route_find(const mm_cuda_route_args &p, uint32_t i, uint32_t width) {
    const uint32_t experts = (p.expert_total + width - 1) / width,
                   tokens = (p.token_count + ROUTE_TOKENS - 1) / ROUTE_TOKENS, part = i / (experts * tokens),
                   steps = (p.columns + ROUTE_K - 1) / ROUTE_K, first = steps * part / p.part_count;
    return {i % experts * width, i / experts % tokens * ROUTE_TOKENS, part, first,
            steps * (part + 1) / p.part_count - first};
}

template <int N>
MM_DEVICE void route_store(const mm_cuda_route_args &p, const route_work &work, const float (&sum)[N / 2]) {
    const uint32_t lane = threadIdx.x % 32, token = work.token + threadIdx.x / 32 * 16 + lane / 4;
    float *to = p.logits + ((size_t)work.part * p.token_count + token) * p.expert_total;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) {
        const uint32_t expert = work.expert + i / 4 * 8 + lane % 4 * 2, row = i / 2 % 2 * 8;
        float *at = to + (size_t)row * p.expert_total + expert;
        if (token + row >= p.token_count || expert >= p.expert_total) continue;
        if (p.expert_total % 2 == 0)
            *(float2 *)at = make_float2(sum[i], sum[i + 1]);
        else {
            at[0] = sum[i];
            if (expert + 1 < p.expert_total) at[1] = sum[i + 1];
        }
    }
}

template <int N>
MM_DEVICE void route_wide(const CUtensorMap *weights, const CUtensorMap *hidden, const mm_cuda_route_args &p) {
    constexpr uint32_t token_bytes = ROUTE_TOKENS * ROUTE_K * 2, stage_bytes = token_bytes + N * ROUTE_K * 2;
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    MM_SHARED(uint64_t, bars, [2 * ROUTE_STAGES]);
    const uint32_t shared = (ptx::cvta_to_shared(dynamic) + 1023u) & ~1023u, full = ptx::cvta_to_shared(bars),
                   empty = full + ROUTE_STAGES * 8;
    const uint32_t tiles =
        (p.expert_total + N - 1) / N * ((p.token_count + ROUTE_TOKENS - 1) / ROUTE_TOKENS) * p.part_count;
    if (threadIdx.x == 0) {
        for (int i = 0; i < ROUTE_STAGES; i++)
            ptx::mbarrier_init(full + i * 8, 1), ptx::mbarrier_init(empty + i * 8, ROUTE_CONSUMERS);
        ptx::fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    uint32_t done = 0;
    if (threadIdx.x >= ROUTE_CONSUMERS * 128) {
        ptx::setmaxnreg_dec<40>();
        for (uint32_t i = blockIdx.x; i < tiles && threadIdx.x == ROUTE_CONSUMERS * 128; i += gridDim.x) {
            const route_work work = route_find(p, i, N);
            for (uint32_t s = 0; s < work.steps; s++, done++) {
                const uint32_t slot = done % ROUTE_STAGES, base = shared + slot * stage_bytes, bar = full + slot * 8;
                const int k = (int)((work.first + s) * ROUTE_K);
                ptx::mbarrier_wait_parity(empty + slot * 8, (done / ROUTE_STAGES & 1) ^ 1);
                ptx::mbarrier_arrive_expect_tx(bar, stage_bytes);
                ptx::cp_async_bulk_tensor_2d_no_hint(base, hidden, k, (int)work.token, bar);
                ptx::cp_async_bulk_tensor_2d_no_hint(base + token_bytes, weights, k, (int)work.expert, bar);
            }
        }
        return;
    }
    ptx::setmaxnreg_inc<232>();
    const uint32_t group = threadIdx.x / 128;
    for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
        const route_work work = route_find(p, i, N);
        float sum[N / 2];
#pragma unroll
        for (int j = 0; j < N / 2; j++) sum[j] = 0.0f;
        for (uint32_t s = 0; s < work.steps; s++, done++) {
            const uint32_t slot = done % ROUTE_STAGES, base = shared + slot * stage_bytes;
            const uint32_t tokens = mm_wgmma_descriptor_low(base + group * 64 * ROUTE_K * 2),
                           experts = mm_wgmma_descriptor_low(base + token_bytes);
            ptx::mbarrier_wait_parity(full + slot * 8, done / ROUTE_STAGES & 1);
            mm_wgmma_fence();
#pragma unroll
            for (int q = 0; q < ROUTE_K / 16; q++)
                mm_wgmma_shared(sum, mm_wgmma_descriptor(tokens + q * 2), mm_wgmma_descriptor(experts + q * 2));
            mm_wgmma_commit();
            mm_wgmma_wait<1>();
            if (s > 0 && threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty + (done - 1) % ROUTE_STAGES * 8);
        }
        mm_wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty + (done - 1) % ROUTE_STAGES * 8);
        route_store<N>(p, work, sum);
    }
}

#define ROUTE_KERNEL(width)                                                                                            \
    extern "C" __global__ void __launch_bounds__(ROUTE_CONSUMERS * 128 + 128, 1)                                       \
        mm_route_wide_##width(MM_GRID_CONSTANT(CUtensorMap, weights), MM_GRID_CONSTANT(CUtensorMap, hidden),           \
                              MM_GRID_CONSTANT(mm_cuda_route_args, args)) {                                            \
        route_wide<width>(&weights, &hidden, args);                                                                    \
    }

ROUTE_KERNEL(128)
ROUTE_KERNEL(192)
ROUTE_KERNEL(256)
