// Three kernels that lay bare where bytes go: a swizzled TMA box, scale factors in tensor memory, mma operands that the
// host has arranged byte by byte. test_layouts.cpp compares with golden tables.
#include "../../src/backend/sm100/device.h"
#include "layout_kernel.h"

enum { a_at = 0, b_at = 16384, scales_at = 20480, bar_at = 40960 };

SM100_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
    }
}

// Four warps, one mbarrier pair, 512 columns. Returns the tensor memory address.
SM100_DEVICE uint32_t open(uint32_t base) {
    const uint32_t bar = base + bar_at;
    if (ptx::tid_x() < 32) ptx::tcgen05_alloc<1>(bar + 16, 512);
    if (ptx::tid_x() == 32) {
        ptx::mbarrier_init(bar, 1);
        ptx::mbarrier_init(bar + 8, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_sync(0, 128);
    ptx::tcgen05_fence_after_thread_sync();
    return ptx::ld_shared_u32(bar + 16);
}

SM100_DEVICE void close(uint32_t taddr) {
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_sync(0, 128);
    if (ptx::tid_x() < 32) ptx::tcgen05_dealloc<1>(taddr, 512);
}

SM100_KERNEL(128) void layout_tma_kernel(SM100_ARGS(struct layout_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_at;
    if (ptx::tid_x() == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init_release_cluster();
        ptx::mbarrier_arrive_expect_tx(bar, args.bytes_b);
        ptx::cp_async_bulk_tensor_2d(base, &args.map, 0, 0, bar, ptx::cache_evict_first);
    }
    ptx::bar_sync(0, 128);
    wait_for(bar, 0);
    for (uint32_t i = ptx::tid_x(); i < args.bytes_b; i += 128)
        ptx::st_global_u8(args.out + i, ptx::ld_shared_u8(base + i));
}

// Each 512-byte block to four columns, then all lanes of all columns to out[lane][4 * blocks].
SM100_KERNEL(128) void layout_scales_kernel(SM100_ARGS(struct layout_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_at, taddr = open(base), warp = ptx::tid_x() / 32;
    if (ptx::tid_x() == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 512 * args.blocks);
        ptx::cp_async_bulk_shared_cluster_global(base + scales_at, args.scales, 512 * args.blocks, bar);
        wait_for(bar, 0);
        for (uint32_t b = 0; b < args.blocks; b++)
            ptx::tcgen05_cp_32x128b_warpx4<1>(taddr + 4 * b, 0x0000400800000000ull | (base + scales_at + 512 * b) >> 4);
        ptx::tcgen05_commit<1>(bar + 8);
    }
    ptx::bar_warp_sync(0xffffffffu);
    wait_for(bar + 8, 0);
    ptx::tcgen05_fence_after_thread_sync();
    for (uint32_t b = 0; b < args.blocks; b++) {
        uint32_t r[4];
        ptx::tcgen05_ld_32x32b<4>(r, taddr + (warp << 21) + 4 * b);
        ptx::tcgen05_wait_ld();
        for (uint32_t i = 0; i < 4; i++)
            ptx::st_global_u32(args.out + 4 * ((ptx::tid_x() * args.blocks + b) * 4 + i), r[i]);
    }
    close(taddr);
}

// D[128][16] of images that the host arranged; A in the 128-byte swizzle, B as desc_b says, scales from memory.
SM100_KERNEL(128) void layout_mma_kernel(SM100_ARGS(struct layout_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_at, taddr = open(base), warp = ptx::tid_x() / 32;
    if (ptx::tid_x() == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 16384 + args.bytes_b + 512);
        ptx::cp_async_bulk_shared_cluster_global(base + a_at, args.a, 16384, bar);
        ptx::cp_async_bulk_shared_cluster_global(base + b_at, args.b, args.bytes_b, bar);
        ptx::cp_async_bulk_shared_cluster_global(base + scales_at, args.scales, 512, bar);
        wait_for(bar, 0);
        const uint64_t sf_desc = 0x0000400800000000ull | (base + scales_at) >> 4;
        ptx::tcgen05_cp_32x128b_warpx4<1>(taddr + 256, sf_desc);
        ptx::tcgen05_cp_32x128b_warpx4<1>(taddr + 260, sf_desc);
        for (uint32_t k = 0; k < args.steps; k++)
            ptx::tcgen05_mma_mxf4nvf4_block16<1>(taddr, (0x4000404000010000ull | (base + a_at) >> 4) + 2 * k,
                                                 args.desc_b + ((base + b_at) >> 4) + k * args.step_b,
                                                 0x08000480u | 16u / 8 << 17, taddr + 256, taddr + 260, k > 0);
        ptx::tcgen05_commit<1>(bar + 8);
    }
    ptx::bar_warp_sync(0xffffffffu);
    wait_for(bar + 8, 0);
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t r[16];
    ptx::tcgen05_ld_32x32b<16>(r, taddr + (warp << 21));
    ptx::tcgen05_wait_ld();
    for (uint32_t i = 0; i < 16; i++) ptx::st_global_u32(args.out + 4 * (ptx::tid_x() * 16 + i), r[i]);
    close(taddr);
}
