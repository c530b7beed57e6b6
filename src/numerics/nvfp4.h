/*
 * NVFP4: blocks of 16 E2M1 codes under one E4M3 scale, and one fp32 global scale g above them:
 * value = e2m1(code) * e4m3(scale) * g. docs/numerics.md, "Activations".
 */
#ifndef MM_NUMERICS_NVFP4_H
#define MM_NUMERICS_NVFP4_H

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

#define MM_NVFP4_BLOCK 16u
#define MM_NVFP4_MAX 2688.0f /* 6 * 448: the largest code times the largest scale */

/*
 * A block counts as saturated above 448 (1 + 2^-21). Between 448 and this the excess may be no more than the
 * three roundings of (amax / 6) / (amax / 2688), which happens to a healthy token under its own global scale.
 */
#define MM_NVFP4_SATURATED 448.000213623046875f

typedef struct mm_nvfp4_block_report {
    unsigned saturated : 1; /* the scale was clipped at 448, by more than rounding */
    unsigned nonfinite : 1; /* a NaN or an infinity: the scale is NaN */
} mm_nvfp4_block_report;

/*
 * Quantizes 16 values under global scale g. True divisions, so that no reciprocal moves a value across a
 * midpoint. The scale is never 0: a zero block has scale 2^-9 and codes 0.
 */
MM_HD mm_nvfp4_block_report mm_nvfp4_block_quantize(const float *values, float g, uint8_t *codes /* [8] */,
                                                    uint8_t *scale) {
    mm_nvfp4_block_report report = {0, 0};
    float amax = 0.0f, target, step;
    for (unsigned i = 0; i < MM_NVFP4_BLOCK; i++) {
        float a = fabsf(values[i]);
        if (!(a <= 3.402823466e+38f)) report.nonfinite = 1;
        if (a > amax) amax = a;
    }
    if (report.nonfinite) {
        *scale = MM_E4M3_NAN;
        for (unsigned i = 0; i < MM_NVFP4_BLOCK / 2; i++) codes[i] = 0;
        return report;
    }
    target = (amax / 6.0f) / g;
    report.saturated = target > MM_NVFP4_SATURATED;
    if (target < MM_E4M3_MIN) target = MM_E4M3_MIN;
    *scale = (uint8_t)mm_e4m3_from_f32(target);
    step = mm_e4m3_to_f32(*scale) * g;
    for (unsigned i = 0; i < MM_NVFP4_BLOCK; i += 2)
        codes[i / 2] = (uint8_t)(mm_e2m1_from_f32(values[i] / step) | mm_e2m1_from_f32(values[i + 1] / step) << 4);
    return report;
}

/*
 * The global scale that maps amax to the largest code under the largest scale; 1 for an all-zero token, and
 * for one so small that the quotient is 0, which would be divided by.
 */
MM_HD float mm_nvfp4_global_from_amax(float amax) {
    float g = amax / MM_NVFP4_MAX;
    return g > 0.0f ? g : 1.0f;
}

#endif
