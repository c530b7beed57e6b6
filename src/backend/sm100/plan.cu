// The plan on the device: which row of the sorted tokens each (token, slot) pair gets. A stable counting sort
// by expert, one CTA per loaded expert, no communication between CTAs: each counts every expert's pairs for
// itself, which for the 49,152 ids of an 8,192-token batch costs it 192 reads per thread.
#include "backend/sm100/device.h"
#include "backend/sm100/arguments.h"
#include "backend/sm100/layout.h"

static constexpr uint32_t PLAN_THREADS = SM100_PLAN_THREADS, PLAN_WARPS = PLAN_THREADS / 32;

// Shared memory: the sums of the warps, then a count per expert.
SM100_DEVICE uint32_t warp_sums(void) {
    return shared_base();
}
SM100_DEVICE uint32_t counts(void) {
    return shared_base() + 4 * PLAN_WARPS;
}

// The group of a pair, -1: none here.
SM100_DEVICE int32_t pair_group(const struct sm100_plan_args &args, uint32_t pair) {
    const int32_t id = args.ids[pair];
    return id < 0 || (uint32_t)id >= args.expert_count ? -1 : args.local_index[id];
}

SM100_DEVICE void count_pairs(const struct sm100_plan_args &args) {
    for (uint32_t i = ptx::tid_x(); i < args.group_count; i += PLAN_THREADS) ptx::st_shared_u32(counts() + 4 * i, 0);
    ptx::bar_sync(0, PLAN_THREADS);
    for (uint32_t pair = ptx::tid_x(); pair < args.pair_count; pair += PLAN_THREADS) {
        const int32_t group = pair_group(args, pair);
        if (group >= 0) ptx::atom_shared_add_u32(counts() + 4 * group, 1);
    }
    ptx::bar_sync(0, PLAN_THREADS);
}

// Once per batch: what the caller wants to know of its routing, and the pairs that have no row.
SM100_DEVICE void account(const struct sm100_plan_args &args) {
    for (uint32_t pair = ptx::tid_x(); pair < args.pair_count; pair += PLAN_THREADS) {
        const int32_t id = args.ids[pair];
        if (pair_group(args, pair) >= 0) {
            ptx::atom_relaxed_gpu_add_u64(args.expert_tokens + id, 1);
            continue;
        }
        ptx::st_global_u32(args.pair_row + pair, 0xffffffffu);
        const uint32_t bad = id < -1 || (id >= 0 && (uint32_t)id >= args.expert_count);
        ptx::atom_relaxed_gpu_add_u64(bad ? args.bad_slots : args.skipped_slots, 1);
    }
}

// Gives this CTA's expert its rows, in the order of the batch: a running rank over 256 pairs at a time.
SM100_DEVICE void place_pairs(const struct sm100_plan_args &args, uint32_t group, uint32_t first_row,
                              uint32_t first_scale_row) {
    const uint32_t warp = ptx::tid_x() / 32, lane = ptx::laneid();
    uint32_t placed = 0;
    for (uint32_t first = 0; first < args.pair_count; first += PLAN_THREADS) {
        const uint32_t pair = first + ptx::tid_x();
        const uint32_t mine = pair < args.pair_count && pair_group(args, pair) == (int32_t)group;
        const uint32_t ballot = ptx::vote_sync_ballot(mine, 0xffffffffu);
        if (lane == 0) ptx::st_shared_u32(warp_sums() + 4 * warp, (uint32_t)__builtin_popcount(ballot));
        ptx::bar_sync(0, PLAN_THREADS);
        uint32_t rank = placed + (uint32_t)__builtin_popcount(ballot & ((1u << lane) - 1));
        for (uint32_t i = 0; i < PLAN_WARPS; i++) {
            const uint32_t sum = ptx::ld_shared_u32(warp_sums() + 4 * i);
            placed += sum;
            rank += i < warp ? sum : 0;
        }
        ptx::bar_sync(0, PLAN_THREADS);
        if (!mine) continue;
        ptx::st_global_u32(args.pair_row + pair, first_row + rank);
        ptx::st_global_u32(args.row_pair + first_row + rank, pair);
        ptx::st_global_u32(args.row_scale_row + first_row + rank, first_scale_row + rank);
        if (args.row_weights) ptx::st_global_f32(args.row_weights + first_row + rank, args.pair_weights[pair]);
    }
}

SM100_KERNEL(SM100_PLAN_THREADS) void sm100_plan(SM100_ARGS(struct sm100_plan_args, args)) {
    const uint32_t group = ptx::ctaid_x();
    count_pairs(args);
    uint32_t first_row = 0, stripes = 0;
    for (uint32_t i = 0; i < group; i++) {
        const uint32_t count = ptx::ld_shared_u32(counts() + 4 * i);
        first_row += count;
        stripes += sm100_stripes(count);
    }
    if (ptx::tid_x() == 0) ptx::st_global_u32(args.ends + group, first_row + ptx::ld_shared_u32(counts() + 4 * group));
    if (group == 0) account(args);
    place_pairs(args, group, first_row, stripes * SM100_STRIPE_ROWS);
}
