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

/* The same from memory, or (a small batch) from shared memory, where every thread has looked up its pairs at once. */
MM_DEVICE int plan_local(const mm_cuda_plan_args &p, const int16_t *locals, uint32_t pair) {
    int32_t id;
    return locals ? locals[pair] : plan_expert(p, pair, &id);
}

MM_DEVICE plan_run plan_warp_run(const mm_cuda_plan_args &p, uint32_t block) {
    const uint32_t pairs = p.token_count * p.slots_per_token, warp = threadIdx.x / 32;
    const unsigned long long parts = (unsigned long long)p.block_count * p.warp_count;
    const unsigned long long part = (unsigned long long)block * p.warp_count + warp;
    if (warp >= p.warp_count) return {0, 0};
    return {(uint32_t)(pairs * part / parts), (uint32_t)(pairs * (part + 1) / parts)};
}

/* counts: [warp_count, expert_count] in shared memory; becomes, per expert, the exclusive sums over warps. */
MM_DEVICE void plan_count(const mm_cuda_plan_args &p, plan_run run, const int16_t *locals, uint32_t *counts,
                          uint32_t *totals) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t *mine = counts + threadIdx.x / 32 * p.expert_count;
    for (uint32_t i = threadIdx.x; i < p.warp_count * p.expert_count; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (uint32_t base = run.first; base < run.last; base += 32) {
        const int local = base + lane < run.last ? plan_local(p, locals, base + lane) : -1;
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
        const int local = pair < run.last ? plan_local(p, locals, pair) : -1;
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

/* Dynamic shared memory of all: counts [warp_count, expert_count], totals [expert_count], seen [E], locals [pairs]. */
#define PLAN_SHARED() MM_SHARED_DYNAMIC(uint32_t, plan_shared, 4)

/* Two blocks: the first sorts, the second keeps the layer's counters, which nobody waits for. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_whole(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count, *seen = totals + p.expert_count;
    int16_t *locals = (int16_t *)(seen + p.expert_total);
    ptx::griddepcontrol_wait();
    const plan_run run = plan_warp_run(p, 0);
    if (blockIdx.x == 1) {
        plan_account(p, run, seen);
        return;
    }
    for (uint32_t pair = threadIdx.x; pair < p.token_count * p.slots_per_token; pair += PLAN_THREADS) {
        int32_t id;
        locals[pair] = (int16_t)plan_expert(p, pair, &id);
    }
    plan_count(p, run, locals, counts, totals); /* synchronizes before it reads locals */
    plan_scan(p, totals);
    plan_place(p, run, locals, counts, totals);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_count(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count, *seen = totals + p.expert_count;
    ptx::griddepcontrol_wait();
    const plan_run run = plan_warp_run(p, blockIdx.x);
    plan_count(p, run, NULL, counts, totals);
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x)
        p.block_counts[blockIdx.x * p.expert_count + e] = totals[e];
    plan_account(p, run, seen);
}

/* One block. block_counts become where each block's rows of an expert begin. */
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_scan(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *totals = plan_shared;
    ptx::griddepcontrol_wait();
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x) {
        uint32_t sum = 0;
#pragma unroll 8
        for (uint32_t b = 0; b < p.block_count; b++) sum += p.block_counts[b * p.expert_count + e];
        totals[e] = sum;
    }
    __syncthreads();
    plan_scan(p, totals);
    for (uint32_t e = threadIdx.x; e < p.expert_count; e += blockDim.x) {
        uint32_t row = totals[e];
#pragma unroll 8
        for (uint32_t b = 0; b < p.block_count; b++) {
            uint32_t c = p.block_counts[b * p.expert_count + e];
            p.block_counts[b * p.expert_count + e] = row;
            row += c;
        }
    }
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1) mm_plan_place(MM_GRID_CONSTANT(mm_cuda_plan_args, p)) {
    PLAN_SHARED();
    uint32_t *counts = plan_shared, *totals = counts + p.warp_count * p.expert_count;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const plan_run run = plan_warp_run(p, blockIdx.x);
    plan_count(p, run, NULL, counts, totals);
    plan_place(p, run, NULL, counts, p.block_counts + blockIdx.x * p.expert_count);
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
