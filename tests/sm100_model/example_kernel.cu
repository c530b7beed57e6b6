// The smallest whole kernel: D[128][n] = A[128][256] * B[n][256]^T in NVFP4 on one CTA of four warps, n = 128.
// It is the example of README.md, compiled by nvcc and run on the model by test_mma.cpp.
#include "../../src/backend/sm100/device.h"
#include "example_kernel.h"

enum { a_offset = 0, b_offset = 16384, sfa_offset = 32768, sfb_offset = 34816, bar_offset = 36864 };

// K-major, 128-byte swizzle: 8 rows of 128 bytes per 1024-byte atom.
SM100_DEVICE uint64_t operand_desc(uint32_t addr) {
    return 0x4000404000010000ull | ((addr & 0x3FFFF) >> 4);
}
// No swizzle, 128 bytes from one group of eight 16-byte rows to the next.
SM100_DEVICE uint64_t scale_desc(uint32_t addr) {
    return 0x0000400800000000ull | ((addr & 0x3FFFF) >> 4);
}

SM100_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
    }
}

SM100_DEVICE void load_and_multiply(const struct example_args &args, uint32_t base, uint32_t taddr) {
    const uint32_t full = base + bar_offset, done = full + 8;
    ptx::mbarrier_arrive_expect_tx(full, 2 * 16384 + 2 * 2048);
    ptx::cp_async_bulk_tensor_2d(base + a_offset, &args.map_a, 0, 0, full, ptx::cache_evict_first);
    ptx::cp_async_bulk_tensor_2d(base + b_offset, &args.map_b, 0, 0, full, ptx::cache_evict_normal);
    ptx::cp_async_bulk_shared_cluster_global(base + sfa_offset, args.sfa, 2048, full);
    ptx::cp_async_bulk_shared_cluster_global(base + sfb_offset, args.sfb, 2048, full);
    wait_for(full, 0);
    ptx::tcgen05_fence_after_thread_sync();
    for (uint32_t k = 0; k < 4; k++) { // 64 elements of K, that is 32 bytes of a row, per instruction
        const uint32_t sfa = taddr + 128 + 8 * k, sfb = sfa + 4;
        ptx::tcgen05_cp_32x128b_warpx4<1>(sfa, scale_desc(base + sfa_offset + 512 * k));
        ptx::tcgen05_cp_32x128b_warpx4<1>(sfb, scale_desc(base + sfb_offset + 512 * k));
        ptx::tcgen05_mma_mxf4nvf4_block16<1>(taddr, operand_desc(base + a_offset) + 2 * k,
                                             operand_desc(base + b_offset) + 2 * k, 0x08200480u, sfa, sfb, k > 0);
    }
    ptx::tcgen05_commit<1>(done);
}

SM100_KERNEL(128) void example_kernel(SM100_ARGS(struct example_args, args)) {
    const uint32_t base = shared_base(), full = base + bar_offset, done = full + 8, taddr_slot = full + 16;
    const uint32_t warp = ptx::shfl_sync_idx(ptx::tid_x() / 32, 0, 0xffffffffu);
    if (warp == 0) ptx::tcgen05_alloc<1>(taddr_slot, 256);
    if (ptx::tid_x() == 32) {
        ptx::mbarrier_init(full, 1);
        ptx::mbarrier_init(done, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_sync(0, 128);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t taddr = ptx::ld_shared_u32(taddr_slot);
    if (warp == 1 && ptx::elect_sync(0xffffffffu)) load_and_multiply(args, base, taddr);
    ptx::bar_warp_sync(0xffffffffu);
    wait_for(done, 0);
    ptx::tcgen05_fence_after_thread_sync();
    for (uint32_t n = 0; n < 128; n += 32) { // row of D = lane of tensor memory = thread
        uint32_t r[32];
        ptx::tcgen05_ld_32x32b<32>(r, taddr + (warp << 21) + n);
        ptx::tcgen05_wait_ld();
        for (uint32_t i = 0; i < 32; i++)
            ptx::st_global_f32(args.d + ptx::tid_x() * 128 + n + i, ptx::mov_f32_b32(r[i]));
    }
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_sync(0, 128);
    if (warp == 0) {
        ptx::tcgen05_relinquish_alloc_permit<1>();
        ptx::tcgen05_dealloc<1>(taddr, 256);
    }
}
