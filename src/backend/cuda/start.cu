/*
 * The beginning of a small batch in one launch: one block plans, one keeps the layer's counters, and the others stage
 * the tokens, each of which finds its rows for itself by counting the pairs that come before. The next launch begins
 * when the plan is written (it may read it at once, see run.c) and every other block has begun; what else is written
 * here it waits for. Same results as plan.cu and stage.cu.
 */
#include "backend/cuda/plan.cuh"
#include "backend/cuda/stage.cuh"

enum {
    START_THREADS = 256,
    START_PAIRS = 512, /* at most: two per thread */
    START_ROUNDS = START_PAIRS / START_THREADS,
    START_PLAN_BLOCK = 0,
    START_COUNT_BLOCK = 1,
    START_OTHER_BLOCKS = 2,
};

/* Entry counts of an expert in 16 bits each, above its rows: heavy and light ones of DECODE, and MID's. */
MM_DEVICE uint64_t start_counts(const mm_cuda_plan_args &p, uint32_t rows) {
    const int list = plan_list(p, rows);
    if (list < 0) return 0;
    const uint64_t count = (rows + p.entry_rows[list] - 1) / p.entry_rows[list];
    return rows | count << (list == MM_CUDA_LIST_MID ? 48 : rows > MM_CUDA_DECODE_LIGHT ? 16 : 32);
}

/* Offsets, entries and the head of the plan. Thread e has expert e; at: the sums over the experts before it. */
MM_DEVICE void start_lists(const mm_cuda_plan_args &p, uint32_t rows, uint64_t counts, uint64_t at, uint64_t total) {
    const uint32_t e = threadIdx.x, heavy = (uint32_t)(total >> 16 & 0xFFFF);
    if (e < p.expert_count) p.offsets[e] = (int32_t)(at & 0xFFFF);
    for (int field = 1; field < 4; field++) {
        const uint32_t count = (uint32_t)(counts >> (16 * field) & 0xFFFF);
        const uint32_t place = (uint32_t)(at >> (16 * field) & 0xFFFF) + (field == 2 ? heavy : 0);
        if (count)
            plan_entries_write(p, field == 3 ? MM_CUDA_LIST_MID : MM_CUDA_LIST_DECODE, place, count, e,
                               (uint32_t)(at & 0xFFFF), rows);
    }
    if (e != 0) return;
    p.offsets[p.expert_count] = (int32_t)(total & 0xFFFF);
    p.plan->count[MM_CUDA_LIST_DECODE] = (int32_t)(heavy + (total >> 32 & 0xFFFF));
    p.plan->count[MM_CUDA_LIST_MID] = (int32_t)(total >> 48);
    p.plan->count[MM_CUDA_LIST_WIDE] = 0;
    p.plan->heavy = (int32_t)heavy;
    p.plan->rows = (int32_t)(total & 0xFFFF);
    p.counters->tokens += p.token_count;
}

/* pairs [expert_count][words]: bit i of an expert's set is pair i. A warp's 32 pairs are one word. */
MM_DEVICE void start_plan(const mm_cuda_plan_args &p, uint32_t *sets) {
    MM_SHARED(uint32_t, offsets, [START_THREADS]);
    const uint32_t pairs = p.token_count * p.slots_per_token, words = (pairs + 31) / 32, e = threadIdx.x;
    const uint32_t below = (1u << threadIdx.x % 32) - 1;
    int local[START_ROUNDS];
#pragma unroll
    for (int r = 0; r < START_ROUNDS; r++) {
        const uint32_t pair = r * START_THREADS + threadIdx.x;
        int32_t id;
        local[r] = pair < pairs ? plan_expert(p, pair, &id) : -1;
    }
#pragma unroll
    for (int r = 0; r < START_ROUNDS; r++) {
        const uint32_t peers = __match_any_sync(~0u, local[r]), word = r * (START_THREADS / 32) + threadIdx.x / 32;
        if (local[r] >= 0 && (peers & below) == 0) sets[local[r] * words + word] = peers;
    }
    __syncthreads();
    uint32_t rows = 0;
    for (uint32_t w = 0; e < p.expert_count && w < words; w++) rows += __popc(sets[e * words + w]);
    uint64_t total = 0;
    const uint64_t counts = start_counts(p, rows), at = plan_block_scan<START_THREADS>(counts, &total);
    offsets[e] = (uint32_t)(at & 0xFFFF);
    start_lists(p, rows, counts, at, total);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_acq_rel_gpu();
        ptx::griddepcontrol_launch_dependents();
    }
#pragma unroll
    for (int r = 0; r < START_ROUNDS; r++) {
        const uint32_t pair = r * START_THREADS + threadIdx.x;
        if (pair < pairs) p.pair_row[pair] = -1;
        if (local[r] < 0) continue;
        const uint32_t *set = sets + local[r] * words;
        uint32_t row = offsets[local[r]] + __popc(set[pair / 32] & below);
        for (uint32_t w = 0; w < pair / 32; w++) row += __popc(set[w]);
        p.row_pair[row] = (int32_t)pair;
        p.pair_row[pair] = (int32_t)row;
    }
}

/* The rows of a token's slots in the sorted order, -1 where there is none. Returns whether there is any. */
MM_DEVICE bool start_rows(const mm_cuda_plan_args &p, uint32_t token, int32_t *rows) {
    MM_SHARED(int16_t, locals, [START_PAIRS]);
    const uint32_t pairs = p.token_count * p.slots_per_token, lane = threadIdx.x % 32;
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += START_THREADS) {
        int32_t id;
        locals[pair] = (int16_t)plan_expert(p, pair, &id);
    }
    __syncthreads();
    for (uint32_t k = threadIdx.x / 32; k < p.slots_per_token; k += START_THREADS / 32) {
        const uint32_t mine = token * p.slots_per_token + k;
        uint32_t before = 0;
        for (uint32_t i = lane; i < pairs; i += 32)
            before += locals[i] >= 0 && (locals[i] < locals[mine] || (locals[i] == locals[mine] && i < mine));
        before = __reduce_add_sync(~0u, before);
        if (lane == 0) rows[k] = locals[mine] >= 0 ? (int32_t)before : -1;
    }
    __syncthreads();
    bool any = false;
    for (uint32_t k = 0; k < p.slots_per_token; k++) any |= rows[k] >= 0;
    return any;
}

/* One part of a token's groups, quantized once for all its rows. */
MM_DEVICE void start_stage(const mm_cuda_plan_args &p, const mm_cuda_stage_args &s, uint32_t token, uint32_t part,
                           uint32_t parts) {
    MM_SHARED(int32_t, rows, [MM_EXPERTS_PER_TOKEN_MAX]);
    const uint32_t first = part * (START_THREADS / 8) + threadIdx.x / 8, t = threadIdx.x & 3;
    const size_t source = (size_t)token * s.columns;
    float value[STAGE_VALUES], global = s.global;
    stage_blocks blocks = {0, 0};
    if (first * 128 + stage_offset() < s.columns) stage_read(s, source + first * 128 + stage_offset(), value);
    if (!start_rows(p, token, rows)) return;
    if (s.quantize && s.global_mode == MEGAMOE_GLOBAL_TOKEN)
        global = mm_nvfp4_global_from_amax(stage_row_amax(s, token));
    if (s.globals && part == 0 && threadIdx.x < p.slots_per_token && rows[threadIdx.x] >= 0)
        s.globals[rows[threadIdx.x]] = global;
    for (uint32_t group = first; group * 128 < s.pitch; group += parts * (START_THREADS / 8)) {
        const uint32_t k = group * 128 + stage_offset();
        if (k < s.columns) {
            if (group != first) stage_read(s, source + k, value);
            if (s.quantize) {
                const mm_nvfp4_block_report report = stage_quantize(s, source + k, global, value);
                blocks.saturated += report.saturated, blocks.nonfinite += report.nonfinite;
            }
        } else
#pragma unroll
            for (int i = 0; i < STAGE_VALUES; i++) value[i] = 0.0f;
        const uint4 word[2] = {stage_word(value, t), stage_word(value + 8, t)};
        for (uint32_t slot = 0; slot < p.slots_per_token; slot++)
            if (rows[slot] >= 0) stage_pair_store(s, rows[slot], k, word);
    }
    if (s.counters) stage_blocks_add(s, blocks);
}

/* Dynamic shared memory: sets [expert_count, words]; of the counting block: seen [E]. */
extern "C" __global__ void __launch_bounds__(START_THREADS, 1)
    mm_start(MM_GRID_CONSTANT(mm_cuda_plan_args, p), MM_GRID_CONSTANT(mm_cuda_stage_args, s)) {
    MM_SHARED_DYNAMIC(uint32_t, start_shared, 4);
    const uint32_t pairs = p.token_count * p.slots_per_token, parts = (gridDim.x - START_OTHER_BLOCKS) / p.token_count;
    if (blockIdx.x == START_PLAN_BLOCK) {
        for (uint32_t i = threadIdx.x; i < p.expert_count * ((pairs + 31) / 32); i += START_THREADS)
            start_shared[i] = 0;
        __syncthreads();
        ptx::griddepcontrol_wait();
        start_plan(p, start_shared);
        return;
    }
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x == START_COUNT_BLOCK) {
        const uint32_t warp = threadIdx.x / 32, warps = START_THREADS / 32;
        plan_account(p, {pairs * warp / warps, pairs * (warp + 1) / warps}, start_shared);
        return;
    }
    const uint32_t unit = blockIdx.x - START_OTHER_BLOCKS;
    start_stage(p, s, unit / parts, unit % parts, parts);
}
