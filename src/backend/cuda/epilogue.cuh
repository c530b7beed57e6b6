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

/*
 * numerics/swiglu.h in a dozen instructions: ex2 and rcp are approximate, so that h is within about 4 ulp for |alpha
 * gate| up to 16. Epilogues are unrolled over every accumulator, and the library's expf and division made them longer
 * than the instruction cache, at a fifth of the whole time. NaN passes the clamps. RELU2: the layer may have no gate.
 */
template <bool RELU2> MM_DEVICE float mm_activation(const mm_swiglu &f, float gate, float up) {
    if (RELU2 && f.relu2) return mm_swiglu_apply(&f, gate, up);
    gate = ptx::min_NaN_f32(gate, f.limit);
    up = ptx::max_NaN_f32(ptx::min_NaN_f32(up, f.limit), -f.limit);
    return gate * ptx::rcp_approx_ftz_f32(1.0f + ptx::ex2_approx_ftz_f32(gate * (f.alpha * -1.4426950408889634f))) *
           (up + f.beta);
}

/* What belongs to a lane's tokens row and row + 1, of which `left` exist. */
typedef struct mm_row_terms {
    float global[2], weight[2];
} mm_row_terms;

MM_DEVICE mm_row_terms mm_row_terms_read(const mm_cuda_gemm_args &p, int row, int left) {
    mm_row_terms r = {{p.x_global, p.x_global}, {1.0f, 1.0f}};
#pragma unroll
    for (int q = 0; q < 2; q++) {
        if (q >= left) continue;
        if (p.row_global) r.global[q] = p.row_global[row + q];
        if (p.weights) r.weight[q] = p.weights[p.row_pair ? p.row_pair[row + q] : row + q];
    }
    return r;
}

/* What belongs to a lane's feature of L1. */
typedef struct mm_l1_feature {
    float gate_global, up_global, gate_bias, up_bias;
} mm_l1_feature;

MM_DEVICE mm_l1_feature mm_l1_feature_read(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int feature) {
    mm_l1_feature f = {0.0f, e->up.global, 0.0f, 0.0f};
    if (p.gated) f.gate_global = e->gate.global;
    if (p.biased && feature < (int)p.n) {
        f.up_bias = mm_bias_read(e->up, feature);
        if (p.gated) f.gate_bias = mm_bias_read(e->gate, feature);
    }
    return f;
}

/* One value of h from the raw sums of gate and up; `factor` undoes the conversion of the codes. */
template <bool RELU2>
MM_DEVICE float mm_l1_value(const mm_cuda_gemm_args &p, const mm_l1_feature &f, float factor, float gate, float up,
                            float global, float weight) {
    gate = __fmaf_rn(gate, factor * (global * f.gate_global), f.gate_bias); /* factor is a power of two */
    up = __fmaf_rn(up, factor * (global * f.up_global), f.up_bias);
    return mm_activation<RELU2>(p.swiglu, gate, up) * weight;
}

/*
 * Features i and i + 4 are neighbors when staged: lanes g and g ^ 4 exchange, so that each has both for one token. From
 * h of feature + g for tokens row and row + 1 to h of feature + (g & 3) and 4 more, for token row + (g >> 2).
 */
MM_DEVICE float2 mm_h_pair(float h0, float h1, int g) {
    const bool second = g & 4;
    const float other = __shfl_xor_sync(~0u, second ? h0 : h1, 16);
    return second ? make_float2(other, h1) : make_float2(h0, other);
}

/* Such a pair, BF16 or exact in it, to its staged place. feature is a multiple of 8. */
MM_DEVICE void mm_h_pair_store(const mm_cuda_gemm_args &p, float2 h, int feature, int row, int left, int g) {
    const int second = g >> 2;
    uint16_t *to = (uint16_t *)p.y + (size_t)(row + second) * p.y_pitch + mm_staged_place(feature + (g & 3));
    if (feature < (int)p.n && left > second) *(uint32_t *)to = ptx::cvt_rn_bf16x2_f32(h.y, h.x);
}

/* h of feature + g for tokens row and row + 1, of which `left` exist, to where and as p says. */
template <bool RELU2>
MM_DEVICE void mm_l1_store(const mm_cuda_gemm_args &p, const mm_l1_feature &f, const mm_row_terms &r, float factor,
                           int feature, float s0, float s1, float s2, float s3, int row, int left, int g) {
    const float h0 = mm_l1_value<RELU2>(p, f, factor, s0, s2, r.global[0], r.weight[0]);
    const float h1 = mm_l1_value<RELU2>(p, f, factor, s1, s3, r.global[1], r.weight[1]);
    const bool exists = feature < (int)p.n;
    if (p.quantized) {
        float *h = (float *)p.y + (size_t)row * p.y_pitch + feature + g;
        if (exists && left > 0) h[0] = h0;
        if (exists && left > 1) h[p.y_pitch] = h1;
        return;
    }
    mm_h_pair_store(p, mm_h_pair(h0, h1, g), feature, row, left, g);
}

/* The same for the two rows `feature` and feature + step of L2, or of any product. */
typedef struct mm_l2_feature {
    float global, bias[2];
} mm_l2_feature;

MM_DEVICE mm_l2_feature mm_l2_feature_read(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, int feature, int step) {
    mm_l2_feature f = {e->h_global * e->down.global, {0.0f, 0.0f}};
    if (p.biased && feature < (int)p.n) f.bias[0] = mm_bias_read(e->down, feature);
    if (p.biased && feature + step < (int)p.n) f.bias[1] = mm_bias_read(e->down, feature + step);
    return f;
}

/* Both rows for tokens row and row + 1. F32: y may be fp32, as args say. */
template <bool F32>
MM_DEVICE void mm_l2_store(const mm_cuda_gemm_args &p, const mm_l2_feature &f, float factor, int feature, int step,
                           float s0, float s1, float s2, float s3, int row, int left) {
    const float sums[2][2] = {{s0, s1}, {s2, s3}};
    const size_t first = (size_t)row * p.y_pitch + feature;
#pragma unroll
    for (int q = 0; q < 2; q++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float value = __fmaf_rn(sums[r][q], factor * f.global, f.bias[r]);
            const size_t at = first + (q ? p.y_pitch : 0) + r * step;
            if (q >= left || feature + r * step >= (int)p.n) continue;
            if (F32 && p.plain_f32)
                ((float *)p.y)[at] = value;
            else
                ((uint16_t *)p.y)[at] = (uint16_t)ptx::cvt_rn_bf16x2_f32(0.0f, value);
        }
}

#endif
