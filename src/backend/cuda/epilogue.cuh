/*
 * From a lane's fp32 sums to what is stored: global scales, bias, the activation, and the staged place of h. Shared by
 * every GEMM whose accumulators are laid out as mma m16n8 (wgmma's are too): a lane (g, t) holds, for an MMA tile of
 * 16 weight rows by 8 tokens, s.x s.y = row g, tokens 2t, 2t + 1 and s.z s.w = row g + 8, the same tokens.
 */
#ifndef MM_CUDA_EPILOGUE_CUH
#define MM_CUDA_EPILOGUE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "numerics/bf16.h"

MM_DEVICE float mm_bias_read(const mm_cuda_matrix &m, uint32_t row) {
    if (!m.bias) return 0.0f;
    const char *at = (const char *)m.bias + row * m.bias_stride;
    return m.bias_f32 ? *(const float *)at : mm_bf16_to_f32(*(const uint16_t *)at);
}

/* MM_FP8 and MM_BF16 values enter the MMA as they are; E2M1 ones scaled by 2^-8. */
MM_DEVICE float mm_format_factor(uint32_t format) { return format <= MM_MXFP4 ? MM_CODE_FACTOR : 1.0f; }

/* What turns a lane's sums of one feature into h, read once per tile. */
typedef struct mm_l1_feature {
    float gate_global, up_global, gate_bias, up_bias;
} mm_l1_feature;

MM_DEVICE mm_l1_feature mm_l1_feature_read(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int feature) {
    mm_l1_feature f = {0.0f, e->up.global, 0.0f, 0.0f};
    if (p.gated) f.gate_global = e->gate.global;
    if (feature < (int)p.n) {
        f.up_bias = mm_bias_read(e->up, feature);
        if (p.gated) f.gate_bias = mm_bias_read(e->gate, feature);
    }
    return f;
}

/* One value of h from the raw sums of gate and up; `factor` undoes the conversion of the codes. */
MM_DEVICE float mm_l1_value(const mm_cuda_gemm_args &p, const mm_l1_feature &f, float factor, float gate, float up, int row) {
    const float global = p.row_global ? p.row_global[row] : p.x_global;
    gate = gate * factor * (global * f.gate_global) + f.gate_bias;
    up = up * factor * (global * f.up_global) + f.up_bias;
    const float h = mm_swiglu_apply(&p.swiglu, gate, up);
    return p.weights ? h * p.weights[p.row_pair ? p.row_pair[row] : row] : h;
}

/*
 * h of feature + g for tokens row and row + 1, of which `left` exist. feature is a multiple of 8. Features i and i + 4
 * are neighbors when staged: lanes g and g ^ 4 exchange, so that each stores both for one token.
 */
MM_DEVICE void mm_l1_store(const mm_cuda_gemm_args &p, const mm_l1_feature &f, float factor, int feature, float s0, float s1,
                           float s2, float s3, int row, int left, int g) {
    const bool exists = feature < (int)p.n;
    const float h0 = exists && left > 0 ? mm_l1_value(p, f, factor, s0, s2, row) : 0.0f;
    const float h1 = exists && left > 1 ? mm_l1_value(p, f, factor, s1, s3, row + 1) : 0.0f;
    if (p.quantized) {
        float *h = (float *)p.y + (size_t)row * p.y_pitch + feature + g;
        if (exists && left > 0) h[0] = h0;
        if (exists && left > 1) h[p.y_pitch] = h1;
        return;
    }
    const bool second = g & 4;
    const float other = __shfl_xor_sync(~0u, second ? h0 : h1, 16);
    const uint32_t pair = second ? mm_cvt_bf16x2(h1, other) : mm_cvt_bf16x2(other, h0);
    uint16_t *h = (uint16_t *)p.y + (size_t)(row + second) * p.y_pitch + mm_staged_place(feature + (g & 3));
    if (exists && left > (int)second) *(uint32_t *)h = pair;
}

/* The same for the two rows `feature` and feature + step of L2, or of any product. */
typedef struct mm_l2_feature {
    float global, bias[2];
} mm_l2_feature;

MM_DEVICE mm_l2_feature mm_l2_feature_read(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int feature, int step) {
    mm_l2_feature f = {e->h_global * e->down.global, {0.0f, 0.0f}};
    if (feature < (int)p.n) f.bias[0] = mm_bias_read(e->down, feature);
    if (feature + step < (int)p.n) f.bias[1] = mm_bias_read(e->down, feature + step);
    return f;
}

/* Both rows for tokens row and row + 1. */
MM_DEVICE void mm_l2_store(const mm_cuda_gemm_args &p, const mm_l2_feature &f, float factor, int feature, int step, float s0,
                           float s1, float s2, float s3, int row, int left) {
    const float sums[2][2] = {{s0, s1}, {s2, s3}};
#pragma unroll
    for (int q = 0; q < 2; q++) {
        if (q >= left) continue;
        const size_t at = (size_t)(row + q) * p.y_pitch + feature;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (feature + r * step >= (int)p.n) continue;
            const float value = sums[r][q] * factor * f.global + f.bias[r];
            if (p.plain_f32) ((float *)p.y)[at + r * step] = value;
            else ((uint16_t *)p.y)[at + r * step] = (uint16_t)mm_cvt_bf16x2(0.0f, value);
        }
    }
}

#endif
