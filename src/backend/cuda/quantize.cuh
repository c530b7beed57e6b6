/*
 * h to nvfp4 and back in the epilogue of L1: the same bits as numerics/nvfp4.h and staging give, in a fraction of the
 * instructions and registers. docs/numerics.md, "Activations".
 */
#ifndef MM_CUDA_QUANTIZE_CUH
#define MM_CUDA_QUANTIZE_CUH

#include "backend/cuda/device.cuh"
#include "numerics/nvfp4.h"

/* The scale of a block under `global`, as fp32. */
MM_DEVICE float quantize_scale(float amax, float global, mm_nvfp4_block_report *report) {
    *report = {0, 0};
    if (!(amax <= 3.402823466e+38f)) {
        report->nonfinite = 1;
        return mm_f32_from_bits(0x7FC00000u);
    }
    const float target = (amax / 6.0f) / global;
    report->saturated = target > MM_NVFP4_SATURATED;
    const uint16_t code = ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, fmaxf(target, MM_E4M3_MIN));
    return ptx::cvt_f32_f16((uint16_t)ptx::cvt_rn_f16x2_e4m3x2(code));
}

/*
 * e2m1(x / step) as a value. `near` is x times a power of two that keeps b = step times the same and 1 / b normal, and
 * inverse = 1 / b correctly rounded: two corrections of near * inverse then give the correctly rounded quotient
 * (Markstein). Rounding to one bit of mantissa, or to halves below 1, is an addition to the number whose last place
 * that is, and a subtraction.
 */
MM_DEVICE float quantize_value(float x, float near, float b, float inverse) {
    float q = near * inverse;
    q = __fmaf_rn(__fmaf_rn(-q, b, near), inverse, q);
    q = __fmaf_rn(__fmaf_rn(-q, b, near), inverse, q);
    const float place = mm_f32_from_bits((mm_f32_bits(fmaxf(q, 1.0f)) & 0x7F800000u) + (22u << 23));
    const float rounded = fminf((q + place) - place, 6.0f);
    return mm_f32_from_bits(mm_f32_bits(rounded) | (mm_f32_bits(x) & 0x80000000u));
}

/* Two values of a block of that scale as code * scale, which is exact in BF16. */
MM_DEVICE float2 quantize_pair(float2 x, float scale, float global) {
    const float step = scale * global, shift = step < 0x1p-64f ? 0x1p64f : step > 0x1p64f ? 0x1p-64f : 1.0f;
    const float b = step * shift, inverse = 1.0f / b, most = step * 16.0f; /* whatever is larger is code 6 too */
    return make_float2(quantize_value(x.x, fminf(fabsf(x.x), most) * shift, b, inverse) * scale,
                       quantize_value(x.y, fminf(fabsf(x.y), most) * shift, b, inverse) * scale);
}

#endif
