// The grouped NVFP4 GEMM: D[m][n] = sum over k of weights[m][k] * tokens[n][k], per expert, as a persistent
// kernel of specialized warps. This file owns the pipeline; epilogue.cuh owns what becomes of D; gemm.cu
// lists the instances.
//
//     load warp      --full-->   multiply warp   --accumulator full-->   epilogue warps
//                    <--empty--                  <--accumulator empty--
//
// Every role walks the same list of tiles (scheduler.h). In a pair, each CTA loads its own 128 weight rows
// and half of the tokens, all of it signalling the even CTA, whose multiply warp issues for both.
#ifndef MM_SM100_GEMM_CUH
#define MM_SM100_GEMM_CUH

#include "backend/sm100/epilogue.cuh"

// ---- Load.
// --------------------------------------------------------------------------------------------------

// Stages are used in a ring; `count` is how many were used before.
template <int name> SM100_DEVICE uint32_t ring_stage(uint32_t count) {
    return count % sm100_tiles[name].stages;
}
template <int name> SM100_DEVICE uint32_t ring_parity(uint32_t count) {
    return count / sm100_tiles[name].stages & 1;
}

// Starts the copies of stage `k_stage` of one tile, `full` being the barrier that counts their bytes.
template <int name>
SM100_DEVICE void load_stage(const struct cta &c, const struct sm100_gemm_args &args, const struct sm100_work &work,
                             uint32_t k_stage, uint32_t stage, uint32_t full) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    constexpr bool pair = t.cta_group == 2;
    constexpr auto load_2d = pair ? ptx::cp_async_bulk_tensor_2d_cta_group_2 : ptx::cp_async_bulk_tensor_2d;
    constexpr auto load_3d = pair ? ptx::cp_async_bulk_tensor_3d_cta_group_2 : ptx::cp_async_bulk_tensor_3d;
    const uint32_t base = c.base + stage * sm100_stage_bytes(t), blocks = sm100_blocks_along_k(args.k);
    const uint32_t m = (work.m_tile * t.cta_group + c.rank) * SM100_M, stripes = sm100_stripes(args.m_rows);
    // The second CTA of the last pair may be past the weights: its codes read as zero, its scales need only
    // exist.
    const uint32_t stripe = m / SM100_M < stripes ? m / SM100_M : stripes - 1;
    const uint32_t weight_block = (work.group * stripes + stripe) * blocks + k_stage * SM100_STAGE_STEPS;
    for (uint32_t i = 0; i < t.matrices; i++) {
        load_3d(base + i * SM100_WEIGHT_STAGE_BYTES, &args.weights[i], k_stage * SM100_STAGE_BYTES_K, m, work.group,
                full, pair ? ptx::cache_evict_normal : ptx::cache_evict_first);
        load_2d(base + sm100_weight_scale_stage_offset(t) + i * SM100_SCALE_STAGE_BYTES, &args.weight_scales[i], 0,
                weight_block, full, ptx::cache_evict_first);
    }
    const uint32_t n = work.n / t.cta_group, row = work.row + c.rank * n;
    for (uint32_t i = 0; i < n; i += t.token_box)
        load_2d(base + sm100_token_stage_offset(t) + i * SM100_STAGE_BYTES_K, &args.tokens,
                k_stage * SM100_STAGE_BYTES_K, row + i, full, ptx::cache_evict_normal);
    const uint32_t token_stripe = work.first_stripe + work.row_in_group / SM100_STRIPE_ROWS;
    for (uint32_t i = 0; i < sm100_work_stripes(&work); i++)
        load_2d(base + sm100_token_scale_stage_offset(t) + i * SM100_SCALE_STAGE_BYTES, &args.token_scales, 0,
                (token_stripe + i) * blocks + k_stage * SM100_STAGE_STEPS, full, ptx::cache_evict_normal);
}

template <int name> SM100_DEVICE uint32_t loaded_bytes(const struct sm100_work &work) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    return t.matrices * (SM100_WEIGHT_STAGE_BYTES + SM100_SCALE_STAGE_BYTES) +
           sm100_round_up(work.n / t.cta_group, t.token_box) * SM100_STAGE_BYTES_K +
           sm100_work_stripes(&work) * SM100_SCALE_STAGE_BYTES;
}

// One thread. Fills stages as they become free, then waits until nobody reads them any more, so that no
// arrival finds a CTA that has left.
template <int name>
SM100_DEVICE void load_role(const struct cta &c, const struct sm100_gemm_args &args, struct sm100_watch &watch) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    const uint32_t k_stages = (sm100_blocks_along_k(args.k) + SM100_STAGE_STEPS - 1) / SM100_STAGE_STEPS;
    struct sm100_cursor cursor = {0, 0, 0, 0};
    uint32_t count = 0;
    for (uint32_t index = c.worker; sm100_schedule_find(&c.schedule, &cursor, index, &watch.work); index += c.stride)
        for (uint32_t k_stage = 0; k_stage < k_stages; k_stage++, count++) {
            const uint32_t stage = ring_stage<name>(count), own = c.full + 8 * stage;
            if (!watch_wait(watch, c.empty, SM100_STAGE_EMPTY, stage, ring_parity<name>(count) ^ 1)) return;
            if (c.rank == 0) ptx::mbarrier_arrive_expect_tx(own, t.cta_group * loaded_bytes<name>(watch.work));
            load_stage<name>(c, args, watch.work, k_stage, stage,
                             t.cta_group == 2 ? ptx::mapa_shared_cluster(own, 0) : own);
        }
    for (uint32_t i = 0; i < t.stages; i++, count++)
        if (!watch_wait(watch, c.empty, SM100_STAGE_EMPTY, ring_stage<name>(count), ring_parity<name>(count) ^ 1))
            return;
}

// ---- Multiply.
// ----------------------------------------------------------------------------------------------

// One instruction along K (per matrix), after its scales have been copied to their columns.
template <int name>
SM100_DEVICE void multiply_step(const struct sm100_work &work, uint32_t base, uint32_t step, uint32_t accumulator,
                                uint32_t slot, uint32_t accumulate) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    constexpr uint32_t matrix_columns = SM100_STAGE_STEPS * SM100_SCALE_COLUMNS;
    const uint32_t weight_scales = slot + step * SM100_SCALE_COLUMNS;
    const uint32_t token_scales = slot + t.matrices * matrix_columns + step * t.token_stripes * SM100_SCALE_COLUMNS;
    for (uint32_t i = 0; i < t.matrices; i++)
        ptx::tcgen05_cp_32x128b_warpx4<t.cta_group>(weight_scales + i * matrix_columns,
                                                    sm100_scale_descriptor(base + sm100_weight_scale_stage_offset(t) +
                                                                           i * SM100_SCALE_STAGE_BYTES +
                                                                           step * SM100_BLOCK_BYTES));
    for (uint32_t i = 0; i < sm100_work_stripes(&work); i++)
        ptx::tcgen05_cp_32x128b_warpx4<t.cta_group>(token_scales + i * SM100_SCALE_COLUMNS,
                                                    sm100_scale_descriptor(base + sm100_token_scale_stage_offset(t) +
                                                                           i * SM100_SCALE_STAGE_BYTES +
                                                                           step * SM100_BLOCK_BYTES));
    for (uint32_t i = 0; i < t.matrices; i++)
        ptx::tcgen05_mma_mxf4nvf4_block16<t.cta_group>(
            accumulator + i * t.n_max, sm100_operand_descriptor(base + i * SM100_WEIGHT_STAGE_BYTES + step * 32),
            sm100_operand_descriptor(base + sm100_token_stage_offset(t) + step * 32),
            sm100_instruction_descriptor(SM100_M * t.cta_group, work.n), weight_scales + i * matrix_columns,
            // A tile may begin in the middle of a stripe, at a multiple of the 32 rows of a column.
            token_scales + work.row_in_group % SM100_STRIPE_ROWS / 32, accumulate);
}

template <int cta_group> SM100_DEVICE void commit(uint32_t barrier) {
    if (cta_group == 2)
        ptx::tcgen05_commit_multicast<cta_group>(barrier, 3);
    else
        ptx::tcgen05_commit<cta_group>(barrier);
}

// The instructions of one stage. The columns of its scales are free when the stage that used them last is:
// that is the documented order, which leaves the columns to nobody's luck.
template <int name>
SM100_DEVICE uint32_t multiply_stage(const struct cta &c, struct sm100_watch &watch, uint32_t count, uint32_t k_stage,
                                     uint32_t blocks, uint32_t accumulator) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    const uint32_t stage = ring_stage<name>(count), before = count - t.scale_slots;
    if (t.scale_slots < t.stages && count >= t.scale_slots &&
        !watch_wait(watch, c.empty, SM100_STAGE_EMPTY, ring_stage<name>(before), ring_parity<name>(before)))
        return 0;
    if (!watch_wait(watch, c.full, SM100_STAGE_FULL, stage, ring_parity<name>(count))) return 0;
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t steps = blocks - k_stage * SM100_STAGE_STEPS;
    const uint32_t slot =
        c.tensor + t.accumulators * sm100_accumulator_columns(t) + count % t.scale_slots * sm100_scale_slot_columns(t);
    for (uint32_t step = 0; step < SM100_STAGE_STEPS && step < steps; step++)
        multiply_step<name>(watch.work, c.base + stage * sm100_stage_bytes(t), step, accumulator, slot,
                            k_stage + step > 0);
    commit<t.cta_group>(c.empty + 8 * stage);
    return 1;
}

// One thread, of the even CTA in a pair.
template <int name>
SM100_DEVICE void multiply_role(const struct cta &c, const struct sm100_gemm_args &args, struct sm100_watch &watch) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    const uint32_t blocks = sm100_blocks_along_k(args.k);
    const uint32_t k_stages = (blocks + SM100_STAGE_STEPS - 1) / SM100_STAGE_STEPS;
    struct sm100_cursor cursor = {0, 0, 0, 0};
    uint32_t count = 0, tile_count = 0;
    for (uint32_t index = c.worker; sm100_schedule_find(&c.schedule, &cursor, index, &watch.work);
         index += c.stride, tile_count++) {
        const uint32_t a = tile_count % t.accumulators, parity = tile_count / t.accumulators & 1;
        if (!watch_wait(watch, c.accumulator_empty, SM100_ACCUMULATOR_EMPTY, a, parity ^ 1)) return;
        ptx::tcgen05_fence_after_thread_sync();
        for (uint32_t k_stage = 0; k_stage < k_stages; k_stage++, count++)
            if (!multiply_stage<name>(c, watch, count, k_stage, blocks, c.tensor + a * sm100_accumulator_columns(t)))
                return;
        commit<t.cta_group>(c.accumulator_full + 8 * a);
    }
}

// ---- The kernel.
// --------------------------------------------------------------------------------------------

template <int name> SM100_DEVICE void gemm_kernel(const struct sm100_gemm_args &args) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    static_assert(sm100_shared_bytes(t) <= SM100_SHARED_BYTES_MAX, "the stages of a tile fit into shared memory");
    static_assert(sm100_tensor_columns(t) <= SM100_TENSOR_COLUMNS,
                  "accumulators and scales of a tile fit into tensor memory");
    static_assert(t.scale_slots <= t.stages, "a slot of scales is freed by the stage that filled it");
    static_assert(16 * (t.stages + t.accumulators) + 4 <= SM100_BARRIER_BYTES, "the barriers fit behind the stages");
    const uint32_t warp = ptx::shfl_sync_idx(ptx::tid_x() / 32, 0, 0xffffffffu);
    struct cta c;
    cta_describe<name>(c, args);
    cta_open<name>(c, warp);
    struct sm100_watch watch = {args.record, args.timeout_ns, name, 0, {}};
    if (warp == 0) {
        if (ptx::elect_sync(0xffffffffu)) load_role<name>(c, args, watch);
        ptx::bar_warp_sync(0xffffffffu);
    } else if (warp == 1) {
        if (c.rank == 0 && ptx::elect_sync(0xffffffffu)) multiply_role<name>(c, args, watch);
        ptx::bar_warp_sync(0xffffffffu);
    } else if (warp >= EPILOGUE_FIRST_WARP) {
        epilogue_role<name>(c, args, watch, warp);
    }
    cta_close<name>(c, warp);
}

#endif
