// See trap_kernel.h. 64 threads; some cases run as a cluster of two. The model only: half of this would hang a GPU.
#include "../../src/backend/sm100/device.h"
#include "trap_kernel.h"

enum { data = 0, bar_at = 8192, slot_at = 8256 };

struct trap_place {
    uint32_t base, bar, slot, warp, t, rank;
};

SM100_DEVICE void barrier_open(const struct trap_place &p, uint32_t count) {
    if (p.t == 0) {
        ptx::mbarrier_init(p.bar, count);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

SM100_DEVICE uint32_t alloc_one(const struct trap_place &p, uint32_t columns) {
    if (p.warp == 0) ptx::tcgen05_alloc<1>(p.slot, columns);
    ptx::bar_sync(0, 64);
    return ptx::ld_shared_u32(p.slot);
}

SM100_DEVICE void tensor_cases(const struct trap_args &args, const struct trap_place &p) {
    const uint32_t lane = ptx::laneid(), quadrant = p.warp << 21;
    uint32_t r[1] = {p.t * 3 + 1};
    if (args.kind == TRAP_GROUP_2_ALONE) {
        if (p.warp == 0) ptx::tcgen05_alloc<2>(p.slot, 32);
        return;
    }
    if (args.kind == TRAP_PAIR_ALLOC_DIFFERS) {
        if (p.warp == 0) ptx::tcgen05_alloc<2>(p.slot, p.rank ? 64 : 32);
        return;
    }
    if (args.kind == TRAP_ALLOC_HALF_WARP) {
        if (p.warp == 0 && lane < 16) ptx::tcgen05_alloc<1>(p.slot, 32);
        return;
    }
    const uint32_t columns = args.kind == TRAP_ALLOC_TOO_MUCH ? 512 : 32, taddr = alloc_one(p, columns);
    if (p.warp == 0) {
        if (args.kind == TRAP_ALLOC_AFTER_RELINQUISH) ptx::tcgen05_relinquish_alloc_permit<1>();
        if (args.kind == TRAP_ALLOC_GROWS) ptx::tcgen05_alloc<1>(p.slot, 64);
        if (args.kind == TRAP_ALLOC_TOO_MUCH || args.kind == TRAP_ALLOC_AFTER_RELINQUISH)
            ptx::tcgen05_alloc<1>(p.slot, 32);
        if (args.kind == TRAP_DEALLOC_OTHER_COUNT) ptx::tcgen05_dealloc<1>(taddr, 64);
    }
    if (args.kind == TRAP_LD_NOT_UNIFORM) ptx::tcgen05_ld_32x32b<1>(r, taddr + quadrant + (lane & 1));
    if (args.kind == TRAP_LD_NOT_ALLOCATED) ptx::tcgen05_ld_32x32b<1>(r, quadrant + (taddr + 32) % 512);
    ptx::tcgen05_st_32x32b<1>(taddr + quadrant + 5, r);
    if (args.kind != TRAP_ST_WITHOUT_WAIT) ptx::tcgen05_wait_st();
    r[0] = 0;
    ptx::tcgen05_ld_32x32b<1>(r, taddr + quadrant + 5);
    ptx::tcgen05_wait_ld();
    ptx::st_global_u32(args.memory + 4 * p.t, r[0]);
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_sync(0, 64);
    if (p.warp == 0) ptx::tcgen05_dealloc<1>(taddr, columns);
}

// One mma with scales and descriptors that are wrong in one bit.
SM100_DEVICE void mma_cases(const struct trap_args &args, const struct trap_place &p) {
    const uint32_t taddr = alloc_one(p, 128), bytes = 8192;
    for (uint32_t i = 4 * p.t; i < bytes; i += 256)
        ptx::st_shared_u32(p.base + i, args.kind == TRAP_SCALE_SIGN ? 0xB8383838u : 0);
    ptx::fence_proxy_async_shared_cta();
    barrier_open(p, 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (p.t == 0) {
        uint64_t a = 0xC000401000010000ull | p.base >> 4;
        if (args.kind == TRAP_RESERVED_BITS) a |= 1ull << 55;
        ptx::tcgen05_cp_32x128b_warpx4<1>(taddr + 64, 0x0000400800000000ull | p.base >> 4);
        ptx::tcgen05_cp_32x128b_warpx4<1>(taddr + 68, 0x0000400800000000ull | p.base >> 4);
        ptx::tcgen05_mma_mxf4nvf4_block16<1>(taddr, a, a, 0x08000480u | 1u << 17, taddr + 64, taddr + 68, 0);
        ptx::tcgen05_commit<1>(p.bar);
    }
    ptx::bar_warp_sync(0xffffffffu);
    while (!ptx::mbarrier_try_wait_parity(p.bar, 0)) {
    }
    ptx::bar_sync(0, 64);
    if (p.warp == 0) ptx::tcgen05_dealloc<1>(taddr, 128);
}

SM100_DEVICE void barrier_cases(const struct trap_args &args, const struct trap_place &p) {
    if (args.kind != TRAP_NOT_INITIALIZED) barrier_open(p, 2);
    if (args.kind == TRAP_BAR_COUNT) ptx::bar_sync(1, p.warp ? 64 : 96);
    if (p.t != 0) return;
    if (args.kind == TRAP_INIT_TWICE) ptx::mbarrier_init(p.bar, 2);
    if (args.kind == TRAP_NOT_INITIALIZED) ptx::mbarrier_arrive(p.bar);
    if (args.kind == TRAP_BARRIER_OVERWRITTEN) ptx::st_shared_u32(p.bar + 4, 1);
    if (args.kind == TRAP_PARITY) ptx::mbarrier_try_wait_parity(p.bar, 2);
    if (args.kind == TRAP_TX_LEFT) ptx::mbarrier_arrive_expect_tx(p.bar, 64);
}

SM100_DEVICE void copy_cases(const struct trap_args &args, const struct trap_place &p) {
    barrier_open(p, 1);
    if (p.t != 0 || p.rank != 0) return;
    struct sm100_tensor_map copied = args.map;
    const struct sm100_tensor_map *map = args.kind == TRAP_TMA_MAP_COPIED ? &copied : &args.map;
    const uint32_t to = p.base + (args.kind == TRAP_TMA_ALIGNMENT ? 128 : 0);
    ptx::st_shared_u32(p.base + 4096, 7);
    switch (args.kind) {
    case TRAP_TMA_STORE_NEGATIVE: ptx::cp_async_bulk_tensor_2d_store(map, 0, -1, p.base); return;
    case TRAP_BULK_SIZE: ptx::cp_async_bulk_shared_cluster_global(p.base, args.memory, 24, p.bar); return;
    case TRAP_BULK_NO_FENCE: ptx::cp_async_bulk_global_shared_cta(args.memory, p.base + 4096, 16); return;
    case TRAP_TMA_RANK: ptx::cp_async_bulk_tensor_3d(to, map, 0, 0, 0, p.bar, ptx::cache_evict_first); return;
    case TRAP_MULTICAST_MASK:
        ptx::cp_async_bulk_tensor_2d_multicast(to, map, 0, 0, p.bar, 4, ptx::cache_evict_first);
        return;
    default: break;
    }
    ptx::mbarrier_arrive_expect_tx(p.bar, 1024);
    ptx::cp_async_bulk_tensor_2d(to, map, args.kind == TRAP_TMA_START ? 8 : 0, 0, p.bar, ptx::cache_evict_first);
}

SM100_DEVICE void memory_cases(const struct trap_args &args, const struct trap_place &p) {
    uint8_t *memory = args.memory + 4 * p.t;
    switch (args.kind) {
    case TRAP_NC_OF_WRITTEN:
        ptx::st_global_u32(memory, 1);
        ptx::ld_global_nc_u32(memory);
        break;
    case TRAP_READ_ONLY: ptx::st_global_u32(args.read_only + 4 * p.t, 1); break;
    case TRAP_GLOBAL_BOUNDS: ptx::ld_global_v4_u32(args.memory + 8192 - 16 * 63 + 16 * p.t); break;
    case TRAP_GLOBAL_ALIGNMENT: ptx::ld_global_u32(args.memory + 2); break;
    case TRAP_SHARED_BOUNDS: ptx::st_shared_u32(p.base + 9000, 1); break;
    case TRAP_SHARED_UNWRITTEN: ptx::ld_shared_u32(p.base + 4 * p.t); break;
    case TRAP_SHARED_RACE:
        ptx::st_shared_u32(p.base + 4 * p.t, p.t);
        ptx::st_global_u32(memory, ptx::ld_shared_u32(p.base + 4 * (p.t ^ 32)));
        break;
    case TRAP_REMOTE_FORM: ptx::st_shared_u32(p.base ^ 1u << 24, 1); break;
    case TRAP_MAPA_RANK: ptx::mapa_shared_cluster(p.base, 2); break;
    case TRAP_CLUSTER_WAIT: ptx::barrier_cluster_wait(); break;
    case TRAP_ENDED_CTA:
        if (p.rank == 0 && p.t == 0) {
            while (ptx::globaltimer() < ~0ull >> 1) {
                ptx::st_shared_cluster_u32(ptx::mapa_shared_cluster(p.base, 1), 1);
                ptx::nanosleep(100);
            }
        }
        break;
    default: break;
    }
}

SM100_DEVICE void warp_cases(const struct trap_args &args) {
    const uint32_t lane = ptx::laneid();
    switch (args.kind) {
    case TRAP_SHFL_OUTSIDE: ptx::shfl_sync_idx(1, 31, lane < 16 ? 0x0000ffffu : 0xffff0000u); break;
    case TRAP_DIVERGED:
        if (lane < 16)
            ptx::shfl_sync_idx(1, 0, 0xffffffffu);
        else
            ptx::vote_sync_ballot(1, 0xffffffffu);
        break;
    case TRAP_EXITED_LANE:
        if (lane == 5) return;
        ptx::bar_warp_sync(0xffffffffu);
        break;
    case TRAP_REGISTERS: ptx::setmaxnreg_dec<100>(); break;
    case TRAP_TRAP: ptx::trap(); break;
    case TRAP_ENDLESS:
        for (uint32_t i = 0; i != 1; i = 0) ptx::ld_global_u32(args.memory);
        break;
    case TRAP_SLEEPING_LOOP:
        while (!ptx::ld_relaxed_gpu_u32(args.flag)) ptx::nanosleep(50);
        break;
    default: break;
    }
}

SM100_DEVICE void right_cases(const struct trap_args &args, const struct trap_place &p) {
    if (args.kind == RIGHT_GATHER4) {
        barrier_open(p, 1);
        if (p.t == 0) {
            ptx::mbarrier_arrive_expect_tx(p.bar, 512);
            ptx::cp_async_bulk_tensor_2d_gather4(p.base, &args.map_row, 0, 5, 63, 64, 2, p.bar); // row 64 is outside
        }
        ptx::bar_warp_sync(0xffffffffu);
        while (!ptx::mbarrier_try_wait_parity(p.bar, 0)) {
        }
        for (uint32_t i = p.t; i < 512; i += 64)
            ptx::st_global_u8(args.memory + 65536 / 16 + i, ptx::ld_shared_u8(p.base + i));
    } else if (args.kind == RIGHT_SUB_WORDS) { // neighbors in one word belong to different warps
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t byte = 4 * (p.t % 32) + 2 * p.warp + i % 2;
            ptx::st_shared_u8(p.base + 128 * (i / 2) + byte, (uint8_t)(byte + i));
            ptx::st_global_u8(args.memory + 128 * (i / 2) + byte, (uint8_t)(byte + i));
        }
        ptx::bar_sync(0, 64);
        ptx::st_global_u32(args.memory + 256 + 4 * p.t,
                           ptx::ld_shared_u32(p.base + 4 * p.t) ^ ptx::ld_global_u32(args.memory + 4 * p.t));
    } else if (args.kind == RIGHT_SPLIT_BARRIERS) { // one warp arrives early, works, and only then waits
        for (uint32_t round = 0; round < 5; round++) {
            ptx::st_shared_u32(p.base + 4 * p.t + 256 * (round & 1), p.t + round);
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
            ptx::st_global_u32(args.memory + 256 * p.rank + 4 * p.t,
                               ptx::ld_shared_u32(p.base + 4 * (63 - p.t) + 256 * (round & 1)));
        }
    } else if (args.kind == RIGHT_SLEEPING_LOOP) {
        if (p.t == 0)
            ptx::st_release_gpu_u32(args.flag, 1);
        else
            while (!ptx::ld_acquire_gpu_u32(args.flag)) ptx::nanosleep(50);
    }
}

SM100_KERNEL(64) void trap_kernel(SM100_ARGS(struct trap_args, args)) {
    const uint32_t base = shared_base();
    const struct trap_place p = {base,         base + bar_at,         base + slot_at, ptx::tid_x() / 32,
                                 ptx::tid_x(), ptx::cluster_ctarank()};
    if (args.kind <= TRAP_PAIR_ALLOC_DIFFERS || args.kind == RIGHT_ST_LD)
        tensor_cases(args, p);
    else if (args.kind <= TRAP_BAR_COUNT)
        barrier_cases(args, p);
    else if (args.kind <= TRAP_BULK_NO_FENCE)
        copy_cases(args, p);
    else if (args.kind <= TRAP_CLUSTER_WAIT)
        memory_cases(args, p);
    else if (args.kind <= TRAP_SLEEPING_LOOP)
        warp_cases(args);
    else if (args.kind <= TRAP_RESERVED_BITS)
        mma_cases(args, p);
    else
        right_cases(args, p);
}
