// Calls every wrapper of ptx.cuh once, with variables of the types the manual gives. It is compiled by nvcc (sm_100f;
// with -DPTX_CHECK_SM90 the part that Hopper has, for sm_90a) and by the host compilers for the functional model, so
// the two sets of signatures cannot drift apart. It is never run.
#include "../../src/backend/sm100/device.h"

struct check_args {
    struct sm100_tensor_map map;
    void *global;
};

template <int num> SM100_DEVICE uint32_t check_tmem_registers(uint32_t taddr) {
    uint32_t r[num];
    ptx::tcgen05_ld_32x32b<num>(r, taddr);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_st_32x32b<num>(taddr, r);
    ptx::tcgen05_wait_st();
    return r[0];
}

SM100_DEVICE void check_threads(uint32_t addr, void *g) {
    uint32_t v = ptx::tid_x() + ptx::ntid_x() + ptx::ctaid_x() + ptx::nctaid_x() + ptx::laneid() + ptx::smid() +
                 ptx::clusterid_x() + ptx::nclusterid_x() + ptx::cluster_ctarank() + ptx::cluster_nctarank();
    v += (uint32_t)ptx::globaltimer() + ptx::elect_sync(0xffffffffu);
    ptx::bar_sync(1, 128);
    ptx::bar_arrive(2, 64);
    ptx::bar_warp_sync(0xffffffffu);
    v += ptx::shfl_sync_idx(v, 0, 0xffffffffu) + ptx::shfl_sync_bfly(v, 1, 0xffffffffu);
    v += ptx::shfl_sync_down(v, 1, 0xffffffffu) + ptx::shfl_sync_up(v, 1, 0xffffffffu);
    v += ptx::vote_sync_ballot(v & 1, 0xffffffffu) + ptx::redux_sync_add(v, 0xffffffffu);
    v += ptx::redux_sync_min(v, 0xffffffffu) + ptx::redux_sync_max(v, 0xffffffffu) + ptx::redux_sync_or(v, ~0u);
    ptx::setmaxnreg_dec<96>();
    ptx::setmaxnreg_inc<160>();
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    ptx::nanosleep(100);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
    ptx::fence_acq_rel_cta();
    ptx::fence_acq_rel_cluster();
    ptx::fence_acq_rel_gpu();
    ptx::fence_acq_rel_sys();
    ptx::fence_proxy_async();
    ptx::fence_proxy_async_shared_cta();
    ptx::fence_proxy_async_global();
    ptx::mbarrier_init(addr, 1);
    ptx::fence_mbarrier_init_release_cluster();
    ptx::mbarrier_arrive(addr);
    ptx::mbarrier_arrive_count(addr, 2);
    ptx::mbarrier_expect_tx(addr, 16);
    ptx::mbarrier_arrive_expect_tx(addr, 16);
    const uint32_t peer = ptx::mapa_shared_cluster(addr, 1);
    ptx::mbarrier_arrive_release_cluster(peer);
    ptx::mbarrier_arrive_expect_tx_release_cluster(peer, 16);
    while (!ptx::mbarrier_try_wait_parity(addr, 0)) {
    }
    ptx::mbarrier_wait_parity(addr, 0);
    while (!ptx::mbarrier_try_wait_parity_acquire_cluster(addr, 0)) {
    }
    v += ptx::mbarrier_test_wait_parity(addr, 0);
    ptx::mbarrier_inval(addr);
    ptx::st_global_u32(g, v);
    if (v == 0xdeadbeefu) ptx::trap();
}

SM100_DEVICE void check_loads_and_stores(uint32_t a, void *g) {
    ptx::st_shared_u8(a, (uint8_t)ptx::ld_shared_u8(a));
    ptx::st_shared_u16(a, (uint16_t)ptx::ld_shared_u16(a));
    ptx::st_shared_u32(a, ptx::ld_shared_u32(a));
    ptx::st_shared_u64(a, ptx::ld_shared_u64(a));
    ptx::st_shared_f32(a, ptx::ld_shared_f32(a));
    ptx::st_shared_v2_u32(a, ptx::ld_shared_v2_u32(a));
    ptx::st_shared_v4_u32(a, ptx::ld_shared_v4_u32(a));
    ptx::st_shared_v4_u32(a, ptx::ldmatrix_m8n8_x4_b16(a));
    ptx::st_shared_v4_f32(a, ptx::ld_shared_v4_f32(a).x, 1.0f, 2.0f, 3.0f);
    ptx::st_shared_cluster_u32(a, ptx::ld_shared_cluster_u32(a));
    ptx::st_shared_cluster_v4_u32(a, ptx::ld_global_nc_v4_u32(g));
    ptx::st_global_u8(g, (uint8_t)(ptx::ld_global_u8(g) + ptx::ld_global_nc_u8(g)));
    ptx::st_global_u16(g, (uint16_t)(ptx::ld_global_u16(g) + ptx::ld_global_nc_u16(g)));
    ptx::st_global_u32(g, ptx::ld_global_u32(g) + ptx::ld_global_nc_u32(g));
    ptx::st_global_u64(g, ptx::ld_global_u64(g) + ptx::ld_global_nc_u64(g));
    ptx::st_global_f32(g, ptx::ld_global_f32(g) + ptx::ld_global_nc_f32(g));
    ptx::st_global_v2_u32(g, ptx::ld_global_v2_u32(g));
    ptx::st_global_v4_u32(g, ptx::ld_global_v4_u32(g));
    ptx::st_relaxed_gpu_u32(g, ptx::ld_relaxed_gpu_u32(g));
    ptx::st_relaxed_sys_u32(g, ptx::ld_relaxed_sys_u32(g));
    ptx::st_release_gpu_u32(g, ptx::ld_acquire_gpu_u32(g));
    ptx::st_release_gpu_u64(g, ptx::ld_acquire_gpu_u64(g));
    ptx::st_release_sys_u32(g, ptx::ld_acquire_sys_u32(g));
    ptx::st_release_sys_u64(g, ptx::ld_acquire_sys_u64(g));
    ptx::red_relaxed_gpu_add_u32(g, 1);
    ptx::red_release_gpu_add_u32(g, 1);
    ptx::red_release_gpu_add_u64(g, 1);
    ptx::red_release_sys_add_u32(g, 1);
    ptx::red_release_sys_add_u64(g, 1);
    ptx::red_release_gpu_or_b32(g, 1);
    uint32_t v = ptx::atom_shared_add_u32(a, 1) + ptx::atom_relaxed_gpu_add_u32(g, 1);
    v += ptx::atom_acq_rel_gpu_add_u32(g, 1) + ptx::atom_acq_rel_sys_add_u32(g, 1);
    v += (uint32_t)(ptx::atom_relaxed_gpu_add_u64(g, 1) + ptx::atom_acq_rel_gpu_add_u64(g, 1));
    v += (uint32_t)ptx::atom_acq_rel_sys_add_u64(g, 1) + ptx::atom_relaxed_gpu_exch_b32(g, 1);
    v += ptx::atom_acq_rel_gpu_cas_b32(g, 0, 1);
    ptx::st_global_u32(g, v);
}

SM100_DEVICE void check_copies(uint32_t a, void *g, const struct sm100_tensor_map *map) {
    const uint64_t policy = ptx::cache_evict_first + ptx::cache_evict_last + ptx::cache_evict_normal;
    ptx::cp_async_bulk_shared_cluster_global(a, g, 16, a);
    ptx::cp_async_bulk_shared_cluster_global_multicast(a, g, 16, a, 3);
    ptx::cp_async_bulk_shared_cluster_shared_cta(a, a, 16, a);
    ptx::st_async_shared_cluster_v4_u32(a, ptx::ld_shared_v4_u32(a), a);
    ptx::cp_async_bulk_global_shared_cta(g, a, 16);
    ptx::cp_async_bulk_prefetch_L2_global(g, 16);
    ptx::prefetch_tensormap(map);
    ptx::cp_async_bulk_tensor_2d(a, map, 0, 0, a, policy);
    ptx::cp_async_bulk_tensor_2d_no_hint(a, map, 0, 0, a);
    ptx::cp_async_bulk_tensor_3d(a, map, 0, 0, 0, a, policy);
    ptx::cp_async_bulk_tensor_2d_multicast(a, map, 0, 0, a, 3, policy);
    ptx::cp_async_bulk_tensor_3d_multicast(a, map, 0, 0, 0, a, 3, policy);
    ptx::cp_async_bulk_tensor_2d_store(map, 0, 0, a);
    ptx::cp_async_bulk_tensor_3d_store(map, 0, 0, 0, a);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<1>();
    ptx::cp_async_bulk_wait_group<0>();
}

SM100_DEVICE void check_arithmetic(void *g) {
    float x = ptx::ld_global_f32(g);
    x = ptx::add_rn_f32(x, ptx::mul_rn_f32(x, ptx::fma_rn_f32(x, x, ptx::div_rn_f32(x, 3.0f))));
    x = ptx::ex2_approx_ftz_f32(ptx::lg2_approx_ftz_f32(ptx::rcp_approx_ftz_f32(x)));
    x = ptx::min_NaN_f32(x, ptx::max_NaN_f32(x, 1.0f));
    const uint32_t w = ptx::prmt_b32(ptx::mul_rn_bf16x2(ptx::mov_b32_f32(x), 0x3F803F80u), 0, 0x4140) +
                       ptx::mov_b32_low_twice(ptx::mov_b32_f32(x)) + ptx::mov_b32_high_twice(ptx::mov_b32_f32(x));
    float d[4] = {x, x, x, x};
    ptx::mma_m16n8k16_f32_bf16(d, w, w, w, w, w, w);
    x += d[3];
    const uint16_t e4m3x2 = ptx::cvt_rn_satfinite_e4m3x2_f32(x, x);
    x += ptx::cvt_f32_f16((uint16_t)ptx::cvt_rn_f16x2_e4m3x2(e4m3x2));
    ptx::st_global_u32(g, ptx::cvt_rn_bf16x2_f32(x, ptx::mov_f32_b32(ptx::mov_b32_f32(x))));
}

SM100_KERNEL(256) void ptx_check_common(SM100_ARGS(struct check_args, args)) {
    const uint32_t base = shared_base();
    check_threads(base, args.global);
    check_loads_and_stores(base, args.global);
    check_copies(base, args.global, &args.map);
    check_arithmetic(args.global);
}

#ifndef PTX_CHECK_SM90

template <int cta_group> SM100_DEVICE void check_tcgen05(const struct check_args &args) {
    const uint32_t a = shared_base();
    ptx::tcgen05_alloc<cta_group>(a, 512);
    const uint32_t taddr = ptx::ld_shared_u32(a);
    const uint64_t desc = 0x4000404000010000ull;
    ptx::tcgen05_relinquish_alloc_permit<cta_group>();
    if (ptx::elect_sync(0xffffffffu)) {
        ptx::cp_async_bulk_tensor_2d_cta_group_2(a, &args.map, 0, 0, a, ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_3d_cta_group_2(a, &args.map, 0, 0, 0, a, ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_2d_multicast_cta_group_2(a, &args.map, 0, 0, a, 3, ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_3d_multicast_cta_group_2(a, &args.map, 0, 0, 0, a, 3, ptx::cache_evict_first);
        ptx::cp_async_bulk_tensor_2d_gather4(a, &args.map, 0, 1, 2, 3, 4, a);
        ptx::tcgen05_cp_32x128b_warpx4<cta_group>(taddr, desc);
        ptx::tcgen05_cp_128x128b<cta_group>(taddr, desc);
        ptx::tcgen05_mma_mxf4nvf4_block16<cta_group>(taddr, desc, desc, 0x08400480u, taddr, taddr, 1);
        ptx::tcgen05_commit<cta_group>(a);
        ptx::tcgen05_commit_multicast<cta_group>(a, 3);
    }
    ptx::tcgen05_fence_before_thread_sync();
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t v = check_tmem_registers<1>(taddr) + check_tmem_registers<2>(taddr) + check_tmem_registers<4>(taddr);
    v += check_tmem_registers<8>(taddr) + check_tmem_registers<16>(taddr) + check_tmem_registers<32>(taddr);
    v += check_tmem_registers<64>(taddr);
    v += ptx::cvt_rn_satfinite_e2m1x2_f32(1.0f, (float)v);
    ptx::st_global_u32(args.global, v);
    ptx::tcgen05_dealloc<cta_group>(taddr, 512);
}

SM100_KERNEL(256) void ptx_check_cta_group_1(SM100_ARGS(struct check_args, args)) {
    check_tcgen05<1>(args);
}
SM100_KERNEL(256) void ptx_check_cta_group_2(SM100_ARGS(struct check_args, args)) {
    check_tcgen05<2>(args);
}

#endif
