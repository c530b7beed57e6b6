/*
 * Activations to what the GEMMs read: sorted rows of BF16 in the order of convert.cuh, quantized to nvfp4 and back
 * first if the layer says so (value * scale is exact in BF16; the global scale stays with the row). Used for hidden
 * states, for the intermediate of nvfp4 layers, for the shared expert's input and, without `staged`, to write codes and
 * scales alone.
 *
 * Eight threads share a 128-group: lane t of a quad and half h own the block k = 32t + 16h .. + 15.
 */
#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "numerics/e8m0.h"
#include "numerics/nvfp4.h"

enum { STAGE_THREADS = 256, STAGE_VALUES = 16 };

MM_DEVICE void stage_read(const mm_cuda_stage_args &p, size_t at, float (&value)[STAGE_VALUES]) {
    if (p.source_f32) {
        const float4 *from = (const float4 *)((const float *)p.source + at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 v = from[i];
            value[i * 4] = v.x, value[i * 4 + 1] = v.y, value[i * 4 + 2] = v.z, value[i * 4 + 3] = v.w;
        }
        if (p.round_bf16)
#pragma unroll
            for (int i = 0; i < STAGE_VALUES; i++) value[i] = mm_bf16_round(value[i]);
        return;
    }
    const uint4 *from = (const uint4 *)((const uint16_t *)p.source + at);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 v = from[i];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            value[i * 8 + j * 2] = __uint_as_float(words[j] << 16);
            value[i * 8 + j * 2 + 1] = __uint_as_float(words[j] & 0xFFFF0000u);
        }
    }
}

/* A largest |value| of the row for every thread of the block; NaN and infinity do not count (their block is marked). */
MM_DEVICE float stage_row_amax(const mm_cuda_stage_args &p, size_t row) {
    MM_SHARED(float, warps, [STAGE_THREADS / 32]);
    float amax = 0.0f, value[STAGE_VALUES];
    for (uint32_t k = threadIdx.x * STAGE_VALUES; k < p.columns; k += STAGE_THREADS * STAGE_VALUES) {
        stage_read(p, row * p.columns + k, value);
        for (int i = 0; i < STAGE_VALUES; i++) {
            const float a = fabsf(value[i]);
            if (a <= 3.402823466e+38f && a > amax) amax = a;
        }
    }
    for (int i = 16; i; i >>= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
    __syncthreads();
    for (int i = 0; i < STAGE_THREADS / 32; i++) amax = fmaxf(amax, warps[i]);
    __syncthreads();
    return amax;
}

MM_DEVICE uint32_t stage_row_expert(const mm_cuda_stage_args &p, uint32_t row) {
    uint32_t low = 0, high = p.expert_count; /* offsets[low] <= row < offsets[high] */
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if ((uint32_t)p.offsets[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Is sorted row `row` its token's first one on this rank? Counters see each token once. */
MM_DEVICE bool stage_counts(const mm_cuda_stage_args &p, uint32_t row) {
    if (!p.counters) return false;
    if (!p.row_pair || !p.pair_row) return true;
    const uint32_t pair = p.row_pair[row], first = pair - pair % p.slots_per_token;
    for (uint32_t i = first; i < pair; i++)
        if (p.pair_row[i] >= 0) return false;
    return true;
}

/* Quantizes a block in place: values become code * scale; codes and scale are stored if asked for. */
MM_DEVICE mm_nvfp4_block_report stage_quantize(const mm_cuda_stage_args &p, size_t at, float global,
                                               float (&value)[STAGE_VALUES]) {
    uint8_t codes[STAGE_VALUES / 2], scale;
    const mm_nvfp4_block_report report = mm_nvfp4_block_quantize(value, global, codes, &scale);
    const float s = mm_e4m3_to_f32(scale);
#pragma unroll
    for (int i = 0; i < STAGE_VALUES; i++) value[i] = mm_e2m1_to_f32(codes[i / 2] >> (i % 2 * 4) & 15u) * s;
    if (p.codes) {
#pragma unroll
        for (int i = 0; i < STAGE_VALUES / 2; i++) p.codes[at / 2 + i] = codes[i];
        p.scales[at / STAGE_VALUES] = scale;
    }
    return report;
}

/*
 * Eight values of a lane as the pairs (0,4) (1,5) (2,6) (3,7), then transposed within the quad: 16 contiguous bytes.
 * Only the quad is converged: the last groups of a row may not fill a warp.
 */
MM_DEVICE uint4 stage_word(const float *v, uint32_t t) {
    return mm_quad_transpose(make_uint4(ptx::cvt_rn_bf16x2_f32(v[4], v[0]), ptx::cvt_rn_bf16x2_f32(v[5], v[1]),
                                        ptx::cvt_rn_bf16x2_f32(v[6], v[2]), ptx::cvt_rn_bf16x2_f32(v[7], v[3])),
                             t, 0xFu << (threadIdx.x & 28));
}

MM_DEVICE void stage_row(const mm_cuda_stage_args &p, uint32_t row) {
    const size_t source = p.row_pair ? (uint32_t)p.row_pair[row] / p.slots_per_token : row;
    const uint32_t thread = threadIdx.x, t = thread & 3, half = thread >> 2 & 1;
    const bool counts = stage_counts(p, row);
    float global = p.global;
    if (p.quantize && p.global_mode == MEGAMOE_GLOBAL_TOKEN)
        global = mm_nvfp4_global_from_amax(stage_row_amax(p, source));
    if (p.experts) global = p.experts[stage_row_expert(p, row)].h_global;
    if (p.globals && thread == 0) p.globals[row] = global;
    uint32_t saturated = 0, nonfinite = 0;
    for (uint32_t group = thread >> 3; group * 128 < p.pitch; group += STAGE_THREADS / 8) {
        const uint32_t k = group * 128 + t * 32 + half * 16;
        float value[STAGE_VALUES];
        if (k < p.columns) {
            stage_read(p, source * p.columns + k, value);
            if (p.quantize) {
                const mm_nvfp4_block_report report = stage_quantize(p, (size_t)row * p.columns + k, global, value);
                saturated += report.saturated, nonfinite += report.nonfinite;
            }
        } else
#pragma unroll
            for (int i = 0; i < STAGE_VALUES; i++) value[i] = 0.0f;
        if (!p.staged) continue;
        uint16_t *to = p.staged + (size_t)row * p.pitch + group * 128 + half * 64 + t * 8;
        *(uint4 *)to = stage_word(value, t);
        *(uint4 *)(to + 32) = stage_word(value + 8, t);
    }
    if (counts && saturated) atomicAdd(&p.counters->saturated_blocks, (unsigned long long)saturated);
    if (counts && nonfinite) atomicAdd(&p.counters->nonfinite_blocks, (unsigned long long)nonfinite);
}

extern "C" __global__ void __launch_bounds__(STAGE_THREADS) mm_stage(MM_GRID_CONSTANT(mm_cuda_stage_args, p)) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const uint32_t rows = p.plan ? (uint32_t)p.plan->rows : p.row_count;
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) stage_row(p, row);
}

/* values[r][k] = code * scale * global: megamoe_dequantize. One row per block, 16 values per thread. */
extern "C" __global__ void __launch_bounds__(STAGE_THREADS)
    mm_dequantize(const uint8_t *codes, const uint8_t *scales, const float *globals, unsigned global_stride,
                  unsigned e8m0, unsigned rows, unsigned columns, unsigned f32, void *values) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (unsigned k = threadIdx.x; k < columns; k += STAGE_THREADS) {
            const size_t at = row * columns + k;
            const float scale = e8m0 ? mm_e8m0_to_f32(scales[at / 32]) : mm_e4m3_to_f32(scales[at / 16]);
            const float value =
                mm_e2m1_to_f32(mm_e2m1_unpack(codes, at)) * scale * (globals ? globals[row * global_stride] : 1.0f);
            if (f32)
                ((float *)values)[at] = value;
            else
                ((uint16_t *)values)[at] = mm_bf16_from_f32(value);
        }
}
