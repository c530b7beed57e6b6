/* What the kernels that plan a batch share (plan.cu, start.cu). */
#ifndef MM_CUDA_PLAN_CUH
#define MM_CUDA_PLAN_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/device.cuh"

/* The loaded expert of a pair, or -1. known: the id is one of the model's. */
MM_DEVICE int plan_expert(const mm_cuda_plan_args &p, uint32_t pair, int32_t *id) {
    *id = p.expert_ids[pair];
    return *id >= 0 && *id < (int32_t)p.expert_total ? p.local_index[*id] : -1;
}

struct plan_run {
    uint32_t first, last; /* pairs of this warp */
};

/* Adds the block's ids to the layer's counters. seen: [E] in shared memory. */
MM_DEVICE void plan_account(const mm_cuda_plan_args &p, plan_run run, uint32_t *seen) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t skipped = 0, bad = 0;
    for (uint32_t e = threadIdx.x; e < p.expert_total; e += blockDim.x) seen[e] = 0;
    __syncthreads();
    for (uint32_t pair = run.first + lane; pair < run.last; pair += 32) {
        int32_t id;
        const int local = plan_expert(p, pair, &id);
        const bool known = id >= 0 && id < (int32_t)p.expert_total;
        if (known) atomicAdd(&seen[id], 1);
        skipped += local < 0 && (known || id == -1);
        bad += !known && id != -1;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < p.expert_total; e += blockDim.x)
        if (seen[e]) atomicAdd(&p.expert_tokens[e], (unsigned long long)seen[e]);
    skipped = __reduce_add_sync(~0u, skipped), bad = __reduce_add_sync(~0u, bad);
    if (lane == 0 && skipped) atomicAdd(&p.counters->skipped_slots, (unsigned long long)skipped);
    if (lane == 0 && bad) atomicAdd(&p.counters->bad_slots, (unsigned long long)bad);
    __syncthreads();
}

/* Exclusive sum over the block, of THREADS threads, of several counts packed in one word; *total grows by the block's
 * sum. */
template <int THREADS> MM_DEVICE uint64_t plan_block_scan(uint64_t value, uint64_t *total) {
    MM_SHARED(uint64_t, warps, [THREADS / 32]);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = value;
    for (uint32_t i = 1; i < 32; i <<= 1) {
        uint64_t other = __shfl_up_sync(~0u, sum, i);
        if (lane >= i) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    uint64_t before = 0, all = 0;
    for (uint32_t i = 0; i < THREADS / 32; i++) {
        if (i == warp) before = all;
        all += warps[i];
    }
    __syncthreads();
    before += *total + sum - value;
    *total += all;
    return before;
}

/* Which list an expert of `rows` rows belongs to; -1 without rows. Depends on nothing else. */
MM_DEVICE int plan_list(const mm_cuda_plan_args &p, uint32_t rows) {
    if (rows == 0) return -1;
    if (rows <= p.decode_rows) return MM_CUDA_LIST_DECODE;
    return rows <= p.mid_rows ? MM_CUDA_LIST_MID : MM_CUDA_LIST_WIDE;
}

/*
 * Where entry i of `count` begins. Equal parts; but WIDE's token tiles cost the same for every row up to their width,
 * so there all are full but the last, or where the last would be less than half full, the last two, which share.
 */
MM_DEVICE uint32_t plan_entry_begin(const mm_cuda_plan_args &p, int list, uint32_t i, uint32_t count, uint32_t rows) {
    const uint32_t full = p.entry_rows[list], rest = rows - (count - 1) * full;
    if (list != MM_CUDA_LIST_WIDE || i == count) return (uint32_t)((unsigned long long)rows * i / count);
    if (i + 1 < count || i == 0 || rest * 2 >= full) return i * full;
    return (i - 1) * full + (full + rest + 15) / 16 * 8;
}

MM_DEVICE void plan_entries_write(const mm_cuda_plan_args &p, int list, uint32_t at, uint32_t count, uint32_t expert,
                                  uint32_t row, uint32_t rows) {
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t begin = plan_entry_begin(p, list, i, count, rows);
        const uint32_t end = plan_entry_begin(p, list, i + 1, count, rows);
        p.entries[list][at + i] = {(int32_t)(row + begin), (int32_t)(end - begin), (int32_t)expert, 0};
    }
}

#endif
