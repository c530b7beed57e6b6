/*
 * The layer's output: each token's results of L2 in the order of its slots, fp32, the shared expert last, one rounding.
 *
 * Blocks are small enough to stand by on multiprocessors that L2 still fills, with their first slots read: a lane per
 * slot, so that only slots with a row cost anything. The next token's slots are read while this one's rows are.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/device.cuh"

enum { COMBINE_THREADS = 64, COMBINE_VALUES = 8, COMBINE_AHEAD = 4 };
static_assert(MM_EXPERTS_PER_TOKEN_MAX <= 32, "a lane per slot");

/* A lane's slot of a token. */
struct combine_slot {
    int32_t row;
    float weight;
};

MM_DEVICE combine_slot combine_slot_read(const mm_cuda_combine_args &p, uint32_t token) {
    const uint32_t lane = threadIdx.x % 32;
    const size_t pair = (size_t)token * p.slots_per_token + lane;
    combine_slot slot = {-1, 1.0f};
    if (token >= p.token_count || lane >= p.slots_per_token) return slot;
    slot.row = p.pair_row[pair];
    if (p.weights) slot.weight = p.weights[pair];
    return slot;
}

MM_DEVICE void combine_add(float (&sum)[COMBINE_VALUES], const uint4 &v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i * 2] += weight * __uint_as_float(words[i] << 16);
        sum[i * 2 + 1] += weight * __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

/* The token's rows at column n, in the order of their slots; a few are asked for before the first is used. */
MM_DEVICE void combine_rows(const mm_cuda_combine_args &p, const combine_slot &slot, uint32_t n, bool exists,
                            float (&sum)[COMBINE_VALUES]) {
    for (uint32_t left = ptx::vote_sync_ballot(slot.row >= 0, ~0u); left;) {
        uint4 v[COMBINE_AHEAD];
        float weight[COMBINE_AHEAD];
        int count = 0;
#pragma unroll
        for (int i = 0; i < COMBINE_AHEAD; i++) {
            if (!left) continue;
            const uint32_t k = __popc((left & (0u - left)) - 1);
            const int32_t row = __shfl_sync(~0u, slot.row, k);
            weight[i] = __shfl_sync(~0u, slot.weight, k);
            v[i] = make_uint4(0, 0, 0, 0);
            if (exists) v[i] = *(const uint4 *)(p.p + (size_t)row * p.columns + n);
            left &= left - 1, count++;
        }
#pragma unroll
        for (int i = 0; i < COMBINE_AHEAD; i++)
            if (i < count) combine_add(sum, v[i], weight[i]);
    }
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 16)
    mm_combine(MM_GRID_CONSTANT(mm_cuda_combine_args, p)) {
    const uint32_t n = (blockIdx.x * COMBINE_THREADS + threadIdx.x) * COMBINE_VALUES;
    const bool exists = n < p.columns;
    combine_slot next = {-1, 1.0f};
    if (p.early) next = combine_slot_read(p, blockIdx.y);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (!p.early) next = combine_slot_read(p, blockIdx.y);
    for (uint32_t token = blockIdx.y; token < p.token_count; token += gridDim.y) {
        const combine_slot slot = next;
        float sum[COMBINE_VALUES] = {};
        next = combine_slot_read(p, token + gridDim.y);
        combine_rows(p, slot, n, exists, sum);
        if (!exists) continue;
        if (p.shared)
#pragma unroll
            for (int i = 0; i < COMBINE_VALUES; i++) sum[i] += p.shared[(size_t)token * p.columns + n + i];
        *(uint4 *)(p.output + (size_t)token * p.columns + n) =
            make_uint4(ptx::cvt_rn_bf16x2_f32(sum[1], sum[0]), ptx::cvt_rn_bf16x2_f32(sum[3], sum[2]),
                       ptx::cvt_rn_bf16x2_f32(sum[5], sum[4]), ptx::cvt_rn_bf16x2_f32(sum[7], sum[6]));
    }
}
