// A persistent NVFP4 GEMM with everything a real kernel has: a TMA ring, per-stage scale columns, accumulator stages,
// an epilogue with TMA stores, one CTA or pairs. It exists to be broken: args.fault plants one of the mistakes listed
// in gemm_kernel.h. D[tiles * 128 * cta_group][n] = A * B^T in fp32; every cluster takes `tiles` row blocks.
//
// Warps: 0 loads, 1 issues mma (leader CTA), 2 allocates, 4..7 are the epilogue.
#include "../../src/backend/sm100/device.h"
#include "gemm_kernel.h"

enum {
    stages = 3,
    a_bytes = 16384,
    sfa_offset = 49152, // within a stage: A 16 KB, B up to 32 KB, then the scales
    sfb_offset = sfa_offset + 2048,
    stage_bytes = 56 * 1024,
    staging_offset = stages * stage_bytes, // 128 rows of 32 fp32
    bar_offset = staging_offset + 16384,
    scale_columns = 48 // of a stage: four steps of 4 (A) and 8 (B)
};

struct gemm_place {
    uint32_t base, full, empty, tfull, tempty, slot; // shared addresses
    uint32_t rank, leader_mask, accumulators;
};

SM100_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
    }
}

SM100_DEVICE uint32_t stage_address(const struct gemm_args &args, const struct gemm_place &p, uint32_t s) {
    uint32_t step = stage_bytes;
    if (args.fault == FAULT_STAGE_ALIGNMENT) step += 128;
    if (args.fault == FAULT_STAGE_OVERLAP) step = 49152 + 1024;
    return p.base + s * step;
}

// ---- Loads. ----

template <int cta_group>
SM100_DEVICE void load_stage(const struct gemm_args &args, const struct gemm_place &p, uint32_t s, uint32_t tile,
                             uint32_t k) {
    const uint32_t at = stage_address(args, p, s), n_own = args.n / cta_group, sfb_blocks = (args.n + 127) / 128;
    const uint32_t bytes = a_bytes + n_own * 128 + 2048 + sfb_blocks * 2048;
    uint32_t bar = p.full + 8 * s;
    if (p.rank == 0) {
        uint32_t expected = bytes * cta_group;
        if (args.fault == FAULT_EXPECT_MORE) expected += 16;
        if (args.fault == FAULT_EXPECT_LESS) expected -= 16;
        if (args.fault == FAULT_EXPECT_ONE_CTA) expected = bytes;
        if (args.fault == FAULT_NO_EXPECT)
            ptx::mbarrier_arrive(bar);
        else
            ptx::mbarrier_arrive_expect_tx(bar, expected);
    }
    if (args.fault != FAULT_PEER_BARRIER) bar &= p.leader_mask;
    const int32_t row_a = (int32_t)((tile * cta_group + p.rank) * 128), block = (int32_t)(8 * k);
    const int32_t rows_sf = (int32_t)(8 * args.k_tiles); // rows of 256 bytes for 128 rows of the operand
    if constexpr (cta_group == 1) {
        ptx::cp_async_bulk_tensor_2d(at, &args.map_a, (int32_t)(128 * k), row_a, bar, ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_2d(at + a_bytes, &args.map_b, (int32_t)(128 * k), 0, bar, ptx::cache_evict_normal);
        ptx::cp_async_bulk_tensor_2d(at + sfa_offset, &args.map_sfa, 0, row_a / 128 * rows_sf + block, bar,
                                     ptx::cache_evict_first);
        for (uint32_t b = 0; b < sfb_blocks; b++)
            ptx::cp_async_bulk_tensor_2d(at + sfb_offset + 2048 * b, &args.map_sfb, 0, (int32_t)b * rows_sf + block,
                                         bar, ptx::cache_evict_normal);
    } else {
        ptx::cp_async_bulk_tensor_2d_cta_group_2(at, &args.map_a, (int32_t)(128 * k), row_a, bar,
                                                 ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_2d_cta_group_2(at + a_bytes, &args.map_b, (int32_t)(128 * k),
                                                 (int32_t)(p.rank * n_own), bar, ptx::cache_evict_normal);
        ptx::cp_async_bulk_tensor_2d_cta_group_2(at + sfa_offset, &args.map_sfa, 0, row_a / 128 * rows_sf + block, bar,
                                                 ptx::cache_evict_first);
        for (uint32_t b = 0; b < sfb_blocks; b++)
            ptx::cp_async_bulk_tensor_2d_cta_group_2(at + sfb_offset + 2048 * b, &args.map_sfb, 0,
                                                     (int32_t)b * rows_sf + block, bar, ptx::cache_evict_normal);
    }
}

template <int cta_group>
SM100_DEVICE void load_loop(const struct gemm_args &args, const struct gemm_place &p, uint32_t first_tile) {
    uint32_t i = 0;
    for (uint32_t t = 0; t < args.tiles; t++)
        for (uint32_t k = 0; k < args.k_tiles; k++, i++) {
            const uint32_t s = i % stages, parity = (i / stages & 1) ^ (args.fault != FAULT_EMPTY_PARITY);
            if (args.fault != FAULT_NO_EMPTY_WAIT) wait_for(p.empty + 8 * s, parity);
            load_stage<cta_group>(args, p, s, first_tile + t, k);
        }
    // Commits may still be on their way to our mbarriers: see them all before this CTA may end.
    if (args.fault == FAULT_NO_DRAIN) return;
    for (uint32_t last = i < stages ? 0 : i - stages; last < i; last++)
        wait_for(p.empty + 8 * (last % stages), last / stages & 1);
}

// ---- mma. ----

SM100_DEVICE uint64_t operand_desc(const struct gemm_args &args, uint32_t addr) {
    uint64_t desc = 0x4000404000010000ull | ((addr & 0x3FFFF) >> 4);
    if (args.fault == FAULT_DESC_VERSION) desc &= ~0x0000400000000000ull;
    if (args.fault == FAULT_DESC_STRIDE) desc ^= 0x0000006000000000ull;
    if (args.fault == FAULT_DESC_SWIZZLE) desc ^= 0xC000000000000000ull;
    return desc;
}
SM100_DEVICE uint64_t scale_desc(const struct gemm_args &args, uint32_t addr) {
    return (args.fault == FAULT_SCALE_STRIDE ? 0x0000401000000000ull : 0x0000400800000000ull) | ((addr & 0x3FFFF) >> 4);
}

template <int cta_group> SM100_DEVICE uint32_t instruction_desc(const struct gemm_args &args) {
    uint32_t m = 128 * cta_group, n = args.n, desc = 0x00000480u;
    if (args.fault == FAULT_IDESC_TYPE) desc = 5u << 7 | 1u << 10;
    if (args.fault == FAULT_IDESC_M) m = 64;
    if (args.fault == FAULT_IDESC_N) n = 0;
    return desc | (n >> 3) << 17 | (m >> 4) << 24;
}

// One step of 64 elements: scales to tensor memory, then the mma. They stay in order by themselves.
template <int cta_group>
SM100_DEVICE void mma_step(const struct gemm_args &args, uint32_t at, uint32_t k, uint32_t d, uint32_t sfa,
                           uint32_t accumulate) {
    const uint32_t sfb = sfa + 4, step = args.fault == FAULT_K_STEP ? 4 : 2;
    if (args.fault == FAULT_NO_WARPX4)
        ptx::tcgen05_cp_128x128b<cta_group>(sfa, scale_desc(args, at + sfa_offset + 512 * k));
    else
        ptx::tcgen05_cp_32x128b_warpx4<cta_group>(sfa, scale_desc(args, at + sfa_offset + 512 * k));
    for (uint32_t b = 0; b < (args.n + 127) / 128; b++) {
        if (args.fault == FAULT_SCALE_ROWS_MISSING && b) break;
        ptx::tcgen05_cp_32x128b_warpx4<cta_group>(sfb + 4 * b, scale_desc(args, at + sfb_offset + 2048 * b + 512 * k));
    }
    const bool swapped = args.fault == FAULT_SCALES_SWAPPED;
    ptx::tcgen05_mma_mxf4nvf4_block16<cta_group>(
        d, operand_desc(args, at) + step * k, operand_desc(args, at + a_bytes) + step * k,
        instruction_desc<cta_group>(args), swapped ? sfb : sfa, swapped ? sfa : sfb, accumulate);
}

template <int cta_group> SM100_DEVICE void commit_to(const struct gemm_args &args, uint32_t bar) {
#if !defined(__CUDACC__) // ptxas refuses a kernel that mixes values of cta_group
    if (args.fault == FAULT_MIXED_GROUP) return ptx::tcgen05_commit<3 - cta_group>(bar);
#endif
    if (cta_group == 1 || args.fault == FAULT_NO_MULTICAST)
        ptx::tcgen05_commit<cta_group>(bar);
    else
        ptx::tcgen05_commit_multicast<cta_group>(bar, 3);
}

template <int cta_group>
SM100_DEVICE void mma_loop(const struct gemm_args &args, const struct gemm_place &p, uint32_t taddr) {
    uint32_t i = 0;
    for (uint32_t t = 0; t < args.tiles; t++) {
        const uint32_t acc = t % p.accumulators, d = taddr + 128 * acc, acc_parity = (t / p.accumulators & 1) ^ 1;
        if (args.fault != FAULT_NO_TEMPTY_WAIT) wait_for(p.tempty + 8 * acc, acc_parity);
        ptx::tcgen05_fence_after_thread_sync();
        for (uint32_t k = 0; k < args.k_tiles; k++, i++) {
            const uint32_t s = i % stages, parity = (i / stages & 1) ^ (args.fault == FAULT_FULL_PARITY);
            if (args.fault != FAULT_NO_FULL_WAIT) wait_for(p.full + 8 * s, parity);
            ptx::tcgen05_fence_after_thread_sync();
            const uint32_t scales = taddr + 256 + (args.fault == FAULT_SCALES_SINGLE ? 0 : s) * scale_columns;
            for (uint32_t step = 0; step < 4; step++) {
                uint32_t accumulate = (k | step) != 0;
                if (args.fault == FAULT_ACCUMULATE_FIRST) accumulate = 1;
                if (args.fault == FAULT_ACCUMULATE_NEVER) accumulate = 0;
                mma_step<cta_group>(args, stage_address(args, p, s), step, d, scales + 12 * step, accumulate);
            }
            if (args.fault != FAULT_NO_COMMIT_EMPTY) commit_to<cta_group>(args, p.empty + 8 * s);
        }
        if (args.fault != FAULT_NO_COMMIT_FULL) commit_to<cta_group>(args, p.tfull + 8 * acc);
    }
}

// ---- Epilogue. ----

// 32 columns of this thread's row, through 128-byte swizzled staging, to D.
SM100_DEVICE void store_columns(const struct gemm_args &args, const struct gemm_place &p, const uint32_t (&r)[32],
                                uint32_t row, uint32_t first_row, uint32_t n) {
    const uint32_t staging = p.base + staging_offset;
    SM100_UNROLL
    for (uint32_t u = 0; u < 8; u++) {
        const ptx::u32x4 v = {r[4 * u], r[4 * u + 1], r[4 * u + 2], r[4 * u + 3]};
        ptx::st_shared_v4_u32(staging + row * 128 + ((u ^ (row & 7)) << 4), v);
    }
    if (args.fault == FAULT_PROXY_FENCE_ONE_LANE) {
        if (row == 0) ptx::fence_proxy_async_shared_cta();
    } else if (args.fault != FAULT_NO_PROXY_FENCE) {
        ptx::fence_proxy_async_shared_cta();
    }
    if (args.fault != FAULT_NO_STORE_BARRIER) ptx::bar_sync(1, 128);
    if (row == 0) {
        ptx::cp_async_bulk_tensor_2d_store(&args.map_d, (int32_t)n, (int32_t)first_row, staging);
        if (args.fault != FAULT_NO_STORE_COMMIT) ptx::cp_async_bulk_commit_group();
        if (args.fault != FAULT_NO_STORE_WAIT) ptx::cp_async_bulk_wait_group_read<0>();
    }
    ptx::bar_sync(1, 128);
}

template <int cta_group>
SM100_DEVICE void epilogue_tile(const struct gemm_args &args, const struct gemm_place &p, uint32_t d, uint32_t warp,
                                uint32_t tempty, uint32_t first_row) {
    uint32_t quadrant = warp % 4;
    if (args.fault == FAULT_QUADRANT) quadrant = (quadrant + 1) % 4;
    if (args.fault == FAULT_QUADRANT_MISSING) quadrant = 0;
    for (uint32_t n = 0; n < args.n; n += 32) {
        uint32_t r[32];
        ptx::tcgen05_ld_32x32b<32>(r, d + (quadrant << 21) + n);
        if (args.fault != FAULT_NO_WAIT_LD) ptx::tcgen05_wait_ld();
        if (args.fault == FAULT_DIVERGED && ptx::laneid() < 16) ptx::bar_warp_sync(0xffffffffu);
        if (n + 32 >= args.n) { // the accumulator is free
            if (args.fault != FAULT_NO_FENCE_BEFORE) ptx::tcgen05_fence_before_thread_sync();
            ptx::bar_warp_sync(0xffffffffu);
            if (args.fault == FAULT_ARRIVE_TWICE || ptx::laneid() == 0) ptx::mbarrier_arrive_release_cluster(tempty);
        }
        store_columns(args, p, r, ptx::tid_x() % 128, first_row, n);
    }
}

template <int cta_group>
SM100_DEVICE void epilogue_loop(const struct gemm_args &args, const struct gemm_place &p, uint32_t taddr, uint32_t warp,
                                uint32_t first_tile) {
    for (uint32_t t = 0; t < args.tiles; t++) {
        const uint32_t acc = t % p.accumulators, own = p.tempty + 8 * acc;
        const uint32_t tempty = args.fault == FAULT_LOCAL_ARRIVE ? own : ptx::mapa_shared_cluster(own, 0);
        wait_for(p.tfull + 8 * acc, t / p.accumulators & 1);
        if (args.fault != FAULT_NO_FENCE_AFTER) ptx::tcgen05_fence_after_thread_sync();
        epilogue_tile<cta_group>(args, p, taddr + 128 * acc, warp, tempty,
                                 ((first_tile + t) * cta_group + p.rank) * 128);
    }
    if (ptx::tid_x() % 128 == 0) ptx::cp_async_bulk_wait_group<0>();
}

// ---- The kernel. ----

template <int cta_group> SM100_DEVICE void barriers_init(const struct gemm_args &args, const struct gemm_place &p) {
    for (uint32_t s = 0; s < stages; s++) {
        ptx::mbarrier_init(p.full + 8 * s, 1);
        ptx::mbarrier_init(p.empty + 8 * s, 1);
        shared_name(p.full + 8 * s, "full[%u]", s);
        shared_name(p.empty + 8 * s, "empty[%u]", s);
    }
    for (uint32_t a = 0; a < p.accumulators; a++) {
        ptx::mbarrier_init(p.tfull + 8 * a, 1);
        ptx::mbarrier_init(p.tempty + 8 * a, 4 * cta_group - (args.fault == FAULT_TEMPTY_COUNT));
        shared_name(p.tfull + 8 * a, "tfull[%u]", a);
        shared_name(p.tempty + 8 * a, "tempty[%u]", a);
    }
    if (args.fault != FAULT_NO_INIT_FENCE) ptx::fence_mbarrier_init_release_cluster();
}

SM100_DEVICE void cluster_sync(void) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

template <int cta_group> SM100_DEVICE void gemm_body(const struct gemm_args &args) {
    const uint32_t base = shared_base(), bars = base + bar_offset;
    const uint32_t rank = cta_group == 2 ? ptx::cluster_ctarank() : 0;
    const struct gemm_place p = {base,
                                 bars,
                                 bars + 32,
                                 bars + 64,
                                 bars + 96,
                                 bars + 128,
                                 rank,
                                 cta_group == 2 ? 0xFEFFFFFFu : ~0u,
                                 args.n <= 128 ? 2u : 1u};
    const uint32_t warp = ptx::shfl_sync_idx(ptx::tid_x() / 32, 0, 0xffffffffu);
    const uint32_t first_tile = ptx::ctaid_x() / cta_group * args.tiles;
    if (ptx::tid_x() == 0) barriers_init<cta_group>(args, p);
    if (warp == 2) ptx::tcgen05_alloc<cta_group>(p.slot, args.fault == FAULT_ALLOC_COUNT ? 500 : 512);
    ptx::tcgen05_fence_before_thread_sync();
    if (args.fault != FAULT_NO_INIT_BARRIER) cluster_sync();
    ptx::tcgen05_fence_after_thread_sync();
    if (warp == 0) {
        if (ptx::elect_sync(0xffffffffu)) load_loop<cta_group>(args, p, first_tile);
    } else if (warp == 1) {
        const uint32_t taddr = ptx::ld_shared_u32(p.slot) + (args.fault == FAULT_COLUMN_OFFSET ? 32 : 0);
        const bool issues = rank == 0 || args.fault == FAULT_BOTH_ISSUE;
        if (issues && (args.fault == FAULT_NO_ELECT || ptx::elect_sync(0xffffffffu)))
            mma_loop<cta_group>(args, p, taddr);
    } else if (warp >= 4) {
        epilogue_loop<cta_group>(args, p, ptx::ld_shared_u32(p.slot), warp, first_tile);
    }
    if (args.fault == FAULT_DEALLOC_EARLY && warp == 2)
        ptx::tcgen05_dealloc<cta_group>(ptx::ld_shared_u32(p.slot), 512);
    ptx::bar_warp_sync(0xffffffffu);
    ptx::tcgen05_fence_before_thread_sync();
    if (args.fault == FAULT_NO_CLUSTER_BARRIER && rank == 1) {
        if (warp == 2) ptx::tcgen05_relinquish_alloc_permit<cta_group>();
        return;
    }
    cluster_sync();
    if (warp == 2 && args.fault != FAULT_NO_DEALLOC && args.fault != FAULT_DEALLOC_EARLY) {
        ptx::tcgen05_relinquish_alloc_permit<cta_group>();
        ptx::tcgen05_dealloc<cta_group>(ptx::ld_shared_u32(p.slot), 512);
    }
}

SM100_KERNEL(256) void gemm_kernel_1(SM100_ARGS(struct gemm_args, args)) {
    gemm_body<1>(args);
}
SM100_KERNEL(256) void gemm_kernel_2(SM100_ARGS(struct gemm_args, args)) {
    gemm_body<2>(args);
}
