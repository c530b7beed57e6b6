// A CTA of the grouped GEMM: the parts of its shared and tensor memory, its barriers, its share of the tiles,
// and how it begins and ends.
#ifndef MM_SM100_CTA_CUH
#define MM_SM100_CTA_CUH

#include "backend/sm100/wait.cuh"
#include "backend/sm100/tiles.h"

static constexpr uint32_t TENSOR_MEMORY_WARP = 2, EPILOGUE_FIRST_WARP = 4, EPILOGUE_WARPS = 8;

// Where the parts of a CTA's shared and tensor memory are, and which tiles are its.
struct cta {
    uint32_t base, full, empty, accumulator_full, accumulator_empty,
        tensor_slot;         // addresses in shared memory
    uint32_t tensor;         // address in tensor memory
    uint32_t rank;           // in the pair
    uint32_t worker, stride; // this CTA or pair among all
    struct sm100_schedule schedule;
};

template <int name> SM100_DEVICE void cta_describe(struct cta &c, const struct sm100_gemm_args &args) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    c.base = shared_base();
    c.full = c.base + t.stages * sm100_stage_bytes(t);
    c.empty = c.full + 8 * t.stages;
    c.accumulator_full = c.empty + 8 * t.stages;
    c.accumulator_empty = c.accumulator_full + 8 * t.accumulators;
    c.tensor_slot = c.accumulator_empty + 8 * t.accumulators;
    c.rank = t.cta_group == 2 ? ptx::cluster_ctarank() : 0;
    c.worker = ptx::ctaid_x() / t.cta_group;
    c.stride = ptx::nctaid_x() / t.cta_group;
    c.schedule = sm100_tile_schedule(t, args.ends, args.group_count, args.m_rows);
}

// What every thread of the CTA, or of the pair, did before is visible to all of them after.
template <int cta_group> SM100_DEVICE void cta_sync(void) {
    if (cta_group == 2) {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    } else {
        ptx::bar_sync(0, SM100_THREADS);
    }
}

template <int name> SM100_DEVICE void cta_open(struct cta &c, uint32_t warp) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    if (warp == 0 && ptx::elect_sync(0xffffffffu)) {
        for (uint32_t i = 0; i < t.stages; i++) {
            ptx::mbarrier_init(c.full + 8 * i, 1);
            ptx::mbarrier_init(c.empty + 8 * i, 1);
        }
        for (uint32_t i = 0; i < t.accumulators; i++) {
            ptx::mbarrier_init(c.accumulator_full + 8 * i, 1);
            ptx::mbarrier_init(c.accumulator_empty + 8 * i, EPILOGUE_WARPS * t.cta_group);
        }
        ptx::fence_mbarrier_init_release_cluster();
    }
    if (warp == TENSOR_MEMORY_WARP) ptx::tcgen05_alloc<t.cta_group>(c.tensor_slot, sm100_tensor_columns_allocated(t));
    ptx::tcgen05_fence_before_thread_sync();
    cta_sync<t.cta_group>();
    ptx::tcgen05_fence_after_thread_sync();
    c.tensor = ptx::ld_shared_u32(c.tensor_slot);
}

template <int name> SM100_DEVICE void cta_close(const struct cta &c, uint32_t warp) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    ptx::tcgen05_fence_before_thread_sync();
    cta_sync<t.cta_group>();
    ptx::tcgen05_fence_after_thread_sync();
    if (warp == TENSOR_MEMORY_WARP) {
        ptx::tcgen05_relinquish_alloc_permit<t.cta_group>();
        ptx::tcgen05_dealloc<t.cta_group>(c.tensor, sm100_tensor_columns_allocated(t));
    }
}

#endif
