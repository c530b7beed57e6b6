/*
 * Activations to what the GEMMs read: sorted rows of BF16 in the order of convert.cuh, quantized to nvfp4 and back
 * first if the layer says so (value * scale is exact in BF16; the global scale stays with the row). Used for hidden
 * states, for the intermediate of nvfp4 layers, for the shared expert's input and, without `staged`, to write codes and
 * scales alone.
 *
 * Eight threads share a 128-group: lane t of a quad and half h own the block k = 32t + 16h .. + 15.
 */
#ifndef MM_CUDA_STAGE_CUH
#define MM_CUDA_STAGE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "numerics/e8m0.h"
#include "numerics/nvfp4.h"

enum { STAGE_THREADS_MAX = 448, STAGE_VALUES = 16 };

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
    MM_SHARED(float, warps, [STAGE_THREADS_MAX / 32]);
    float amax = 0.0f, value[STAGE_VALUES];
    for (uint32_t k = threadIdx.x * STAGE_VALUES; k < p.columns; k += blockDim.x * STAGE_VALUES) {
        stage_read(p, row * p.columns + k, value);
        for (int i = 0; i < STAGE_VALUES; i++) {
            const float a = fabsf(value[i]);
            if (a <= 3.402823466e+38f && a > amax) amax = a;
        }
    }
    for (int i = 16; i; i >>= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, i));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
    __syncthreads();
    for (uint32_t i = 0; i < blockDim.x / 32; i++) amax = fmaxf(amax, warps[i]);
    __syncthreads();
    return amax;
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

/* Blocks that a thread has quantized, for the layer's counters. */
struct stage_blocks {
    uint32_t saturated, nonfinite;
};

/* The sums of each warp, once; all threads of the block take part. Were everything to saturate, one atomic for every
 * block would take longer than all else. */
MM_DEVICE void stage_blocks_add(const mm_cuda_stage_args &p, stage_blocks blocks) {
    __syncthreads();
    blocks.saturated = __reduce_add_sync(~0u, blocks.saturated);
    blocks.nonfinite = __reduce_add_sync(~0u, blocks.nonfinite);
    if (threadIdx.x % 32) return;
    if (blocks.saturated) atomicAdd(&p.counters->saturated_blocks, (unsigned long long)blocks.saturated);
    if (blocks.nonfinite) atomicAdd(&p.counters->nonfinite_blocks, (unsigned long long)blocks.nonfinite);
}

/* Sixteen values, quantized or not, as the two staged words that they are; k: where they begin in the row. */
MM_DEVICE void stage_pair_store(const mm_cuda_stage_args &p, size_t row, uint32_t k, const uint4 (&word)[2]) {
    uint16_t *to = p.staged + row * p.pitch + (k & ~127u) + (k >> 4 & 1) * 64 + (k >> 5 & 3) * 8;
    *(uint4 *)to = word[0];
    *(uint4 *)(to + 32) = word[1];
}

/* Where the block's thread begins in a 128-group: see the top. */
MM_DEVICE uint32_t stage_offset(void) {
    return (threadIdx.x & 3) * 32 + (threadIdx.x >> 2 & 1) * 16;
}

#endif
