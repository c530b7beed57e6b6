/*
 * The plan of a batch, on the device: pairs (token, slot) sorted by loaded expert, stably, as routing/plan.c does on
 * the host; and the lists of entries that the GEMM kernels work through. Small batches take one block (mm_plan_whole);
 * large ones count and place in parallel with one scan between (mm_plan_count, mm_plan_scan, mm_plan_place).
 *
 * A block deals its run of pairs to warps in order; each warp counts per expert in shared memory, so that the sums over
 * blocks and warps before it give every pair its place without atomics on positions.
 */
#include "backend/cuda/plan.cuh"

enum { PLAN_THREADS = 1024 };

/* The block's pairs, looked up at once by all its threads: [block_pairs] in shared memory. */
MM_DEVICE void plan_locals_read(const mm_cuda_plan_args &p, plan_run run, int16_t *locals) {
    const uint32_t pairs = p.token_count * p.slots_per_token;
    for (uint32_t i = threadIdx.x; i < p.block_pairs && run.block + i < pairs; i += blockDim.x) {
        int32_t id;
        locals[i] = (int16_t)plan_expert(p, run.block + i, &id);
    }
}

MM_DEVICE plan_run plan_warp_run(const mm_cuda_plan_args &p, uint32_t block) {
    const uint32_t pairs = p.token_count * p.slots_per_token, warp = threadIdx.x / 32;
    const uint32_t first = min(block * p.block_pairs, pairs), count = min(p.block_pairs, pairs - first);
    if (warp >= p.warp_count) return {0, 0, first};
    return {first + count * warp / p.warp_count, first + count * (warp + 1) / p.warp_count, first};
}

/* counts: [warp_count, expert_count] in shared memory; becomes, per expert, the exclusive sums over warps. */
MM_DEVICE void plan_count(const mm_cuda_plan_args &p, plan_run run, const int16_t *locals, uint32_t *counts,
                          uint32_t *totals) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t *mine = counts + threadIdx.x / 32 * p.expert_count;
    for (uint32_t i = threadIdx.x; i < p.warp_count * p.expert_count; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (uint32_t base = run.first; base < run.last; base += 32) {
        const int local = base + lane < run.last ? locals[base + lane - run.block] : -1;
        const uint32_t peers = __match_any_sync(~0u, local);
        if (local >= 0 && (peers & ((1u << lane) - 1)) == 0) mine[local] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x) {
        uint32_t sum = 0;
        for (uint32_t w = 0; w < p.warp_count; w++) {
            uint32_t c = counts[w * p.expert_count + e];
            counts[w * p.expert_count + e] = sum;
            sum += c;
        }
        totals[e] = sum;
    }
    __syncthreads();
}

/*
 * One block of PLAN_THREADS: offsets and entries from totals [expert_count], which become the offsets too. Heavy decode
 * entries stand before light ones. Counts are scanned packed: rows | heavy entries, then light | MID | WIDE entries.
 */
MM_DEVICE void plan_scan(const mm_cuda_plan_args &p, uint32_t *totals) {
    uint64_t rows_heavy = 0, others = 0;
    for (uint32_t base = 0; base < p.expert_count; base += PLAN_THREADS) {
        const uint32_t e = base + threadIdx.x, rows = e < p.expert_count ? totals[e] : 0;
        const bool heavy = plan_list(p, rows) == MM_CUDA_LIST_DECODE && rows > MM_CUDA_DECODE_LIGHT;
        const uint32_t count = heavy ? (rows + p.entry_rows[0] - 1) / p.entry_rows[0] : 0;
        const uint64_t at = plan_block_scan<PLAN_THREADS>((uint64_t)rows | (uint64_t)count << 32, &rows_heavy);
        if (heavy) plan_entries_write(p, MM_CUDA_LIST_DECODE, (uint32_t)(at >> 32), count, e, (uint32_t)at, rows);
        if (e < p.expert_count) p.offsets[e] = (int32_t)at;
    }
    const uint32_t heavy_total = (uint32_t)(rows_heavy >> 32), rows_total = (uint32_t)rows_heavy;
    for (uint32_t base = 0; base < p.expert_count; base += PLAN_THREADS) {
        const uint32_t e = base + threadIdx.x, rows = e < p.expert_count ? totals[e] : 0;
        const int list = plan_list(p, rows);
        const bool other = list >= 0 && !(list == MM_CUDA_LIST_DECODE && rows > MM_CUDA_DECODE_LIGHT);
        const uint32_t count = other ? (rows + p.entry_rows[list] - 1) / p.entry_rows[list] : 0;
        const uint64_t at = plan_block_scan<PLAN_THREADS>((uint64_t)count << (21 * (list < 0 ? 0 : list)), &others);
        const uint32_t position = (uint32_t)(at >> (21 * (list < 0 ? 0 : list)) & 0x1FFFFF);
        const uint32_t row = e < p.expert_count ? (uint32_t)p.offsets[e] : 0;
        if (other)
            plan_entries_write(p, list, position + (list == MM_CUDA_LIST_DECODE ? heavy_total : 0), count, e, row,
                               rows);
        if (e < p.expert_count) totals[e] = row;
    }
    if (threadIdx.x == 0) {
        p.offsets[p.expert_count] = (int32_t)rows_total;
        for (int l = 0; l < MM_CUDA_LIST_COUNT; l++) p.plan->count[l] = (int32_t)(others >> (21 * l) & 0x1FFFFF);
        p.plan->count[MM_CUDA_LIST_DECODE] += (int32_t)heavy_total;
        p.plan->heavy = (int32_t)heavy_total;
        p.plan->rows = (int32_t)rows_total;
        p.counters->tokens += p.token_count;
    }
    __syncthreads();
}

/* counts: this block's sums over warps before; before: [expert_count] where this block's rows of an expert begin. */
MM_DEVICE void plan_place(const mm_cuda_plan_args &p, plan_run run, const int16_t *locals, uint32_t *counts,
                          const uint32_t *before) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t *mine = counts + threadIdx.x / 32 * p.expert_count;
    for (uint32_t base = run.first; base < run.last; base += 32) {
        const uint32_t pair = base + lane;
        const int local = pair < run.last ? locals[pair - run.block] : -1;
        const uint32_t peers = __match_any_sync(~0u, local), ahead = peers & ((1u << lane) - 1);
        uint32_t row = 0;
        if (local >= 0) row = before[local] + mine[local] + __popc(ahead);
        __syncwarp();
        if (local >= 0 && !ahead) mine[local] += __popc(peers);
        __syncwarp();
        if (local >= 0) p.row_pair[row] = (int32_t)pair;
        if (pair < run.last) p.pair_row[pair] = local >= 0 ? (int32_t)row : -1;
    }
}

/* Dynamic shared memory of all: counts [warp_count, expert_count], totals [expert_count], seen [E], locals
 * [block_pairs]. */
#define PLAN_SHARED() MM_SHARED_DYNAMIC(uint32_t, plan_shared, 4)

/* Two blocks: the first sorts, the second keeps the layer's counters, which nobody waits for. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_whole(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count, *seen = totals + p.expert_count;
    int16_t *locals = (int16_t *)(seen + p.expert_total);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents(); /* staging, which waits for the plan before it lets the next one begin */
    const plan_run run = plan_warp_run(p, 0);
    if (blockIdx.x == 1) {
        plan_account(p, run, seen);
        return;
    }
    plan_locals_read(p, run, locals);
    plan_count(p, run, locals, counts, totals); /* synchronizes before it reads locals */
    plan_scan(p, totals);
    plan_place(p, run, locals, counts, totals);
}

/* Twice block_count blocks: the second half keeps the layer's counters. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_count(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count, *seen = totals + p.expert_count;
    int16_t *locals = (int16_t *)(seen + p.expert_total);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const plan_run run = plan_warp_run(p, blockIdx.x % p.block_count);
    if (blockIdx.x >= p.block_count) {
        plan_account(p, run, seen);
        return;
    }
    plan_locals_read(p, run, locals);
    plan_count(p, run, locals, counts, totals);
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x)
        p.block_counts[blockIdx.x * p.expert_count + e] = totals[e];
}

/* One block, a warp per expert. block_counts become how many rows of an expert the blocks before have. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_scan(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *totals = plan_shared;
    const uint32_t lane = threadIdx.x % 32;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    for (uint32_t e = threadIdx.x / 32; e < p.expert_count; e += PLAN_THREADS / 32) {
        uint32_t before = 0;
#pragma unroll 2
        for (uint32_t base = 0; base < p.block_count; base += 32) {
            uint32_t *at = p.block_counts + (base + lane) * p.expert_count + e;
            const uint32_t count = base + lane < p.block_count ? *at : 0;
            uint32_t sum = count;
            for (uint32_t i = 1; i < 32; i <<= 1) {
                const uint32_t other = __shfl_up_sync(~0u, sum, i);
                if (lane >= i) sum += other;
            }
            if (base + lane < p.block_count) *at = before + sum - count;
            before += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) totals[e] = before;
    }
    __syncthreads();
    plan_scan(p, totals);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_place(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count;
    int16_t *locals = (int16_t *)(totals + p.expert_count + p.expert_total);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const plan_run run = plan_warp_run(p, blockIdx.x);
    plan_locals_read(p, run, locals);
    plan_count(p, run, locals, counts, totals);
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x)
        totals[e] = (uint32_t)p.offsets[e] + p.block_counts[blockIdx.x * p.expert_count + e];
    __syncthreads();
    plan_place(p, run, locals, counts, totals);
}

/* The plan of rows that are sorted already: ends [group_count] are cumulative, clipped to row_count. One block. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    mm_plan_groups(const int32_t *ends, uint32_t group_count, uint32_t row_count, mm_cuda_plan *plan,
                   mm_cuda_entry *entries) {
    uint64_t total = 0;
    for (uint32_t base = 0; base < group_count; base += PLAN_THREADS) {
        const uint32_t g = base + threadIdx.x;
        const int limit = (int)row_count, begin = g && g < group_count ? min(max(ends[g - 1], 0), limit) : 0;
        const int rows = g < group_count ? max(min(ends[g], limit) - begin, 0) : 0;
        const uint32_t count = (rows + MM_CUDA_MID_ROWS - 1) / MM_CUDA_MID_ROWS,
                       at = (uint32_t)plan_block_scan<PLAN_THREADS>(count, &total);
        for (uint32_t i = 0; i < count; i++) {
            const int row = (int)i * MM_CUDA_MID_ROWS;
            entries[at + i] = {begin + row, min(rows - row, (int)MM_CUDA_MID_ROWS), (int32_t)g, 0};
        }
    }
    if (threadIdx.x == 0) plan->count[MM_CUDA_LIST_MID] = (int32_t)total;
}
