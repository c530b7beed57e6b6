/* The layer's output: each token's results of L2 in the order of its slots, fp32, the shared expert last, one rounding.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/device.cuh"

enum { COMBINE_THREADS = 256, COMBINE_VALUES = 8, COMBINE_SLOTS = MM_EXPERTS_PER_TOKEN_MAX };

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) mm_combine(MM_GRID_CONSTANT(mm_cuda_combine_args, p)) {
    MM_SHARED(int32_t, rows, [COMBINE_SLOTS]);
    MM_SHARED(float, weights, [COMBINE_SLOTS]);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    for (uint32_t token = blockIdx.y; token < p.token_count; token += gridDim.y) {
        __syncthreads();
        if (threadIdx.x < p.slots_per_token) {
            const size_t pair = (size_t)token * p.slots_per_token + threadIdx.x;
            rows[threadIdx.x] = p.pair_row[pair];
            weights[threadIdx.x] = p.weights ? p.weights[pair] : 1.0f;
        }
        __syncthreads();
        for (uint32_t n = (blockIdx.x * COMBINE_THREADS + threadIdx.x) * COMBINE_VALUES; n < p.columns;
             n += gridDim.x * COMBINE_THREADS * COMBINE_VALUES) {
            float sum[COMBINE_VALUES] = {};
            for (uint32_t k = 0; k < p.slots_per_token; k++) {
                if (rows[k] < 0) continue;
                const uint4 v = *(const uint4 *)(p.p + (size_t)rows[k] * p.columns + n);
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[i * 2] += weights[k] * __uint_as_float(words[i] << 16);
                    sum[i * 2 + 1] += weights[k] * __uint_as_float(words[i] & 0xFFFF0000u);
                }
            }
            if (p.shared)
#pragma unroll
                for (int i = 0; i < COMBINE_VALUES; i++) sum[i] += p.shared[(size_t)token * p.columns + n + i];
            *(uint4 *)(p.output + (size_t)token * p.columns + n) =
                make_uint4(ptx::cvt_rn_bf16x2_f32(sum[1], sum[0]), ptx::cvt_rn_bf16x2_f32(sum[3], sum[2]),
                           ptx::cvt_rn_bf16x2_f32(sum[5], sum[4]), ptx::cvt_rn_bf16x2_f32(sum[7], sum[6]));
        }
    }
}
