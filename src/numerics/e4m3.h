/* E4M3 (e4m3fn): bias 7, largest 448 (0x7E), NaN 0x7F and 0xFF, subnormals in steps of 2^-9; no infinity. */
#ifndef MM_NUMERICS_E4M3_H
#define MM_NUMERICS_E4M3_H

#include "numerics/host_device.h"

#define MM_E4M3_MAX 448.0f
#define MM_E4M3_MIN 0.001953125f /* 2^-9, the smallest above zero */
#define MM_E4M3_NAN 0x7Fu

MM_HD float mm_e4m3_to_f32(unsigned byte) {
    unsigned exponent = byte >> 3 & 15u, mantissa = byte & 7u;
    float magnitude;
    if ((byte & 0x7Fu) == MM_E4M3_NAN)
        magnitude = mm_f32_from_bits(0x7FC00000u);
    else if (exponent == 0)
        magnitude = (float)mantissa * MM_E4M3_MIN;
    else
        magnitude = mm_f32_from_bits((exponent + 120u) << 23 | mantissa << 20);
    return byte & 0x80u ? -magnitude : magnitude;
}

/* Nearest, ties to even, saturating at 448 (infinity included); NaN gives 0x7F. */
MM_HD unsigned mm_e4m3_from_f32(float value) {
    uint32_t bits = mm_f32_bits(value), sign = bits >> 24 & 0x80u;
    float a = fabsf(value);
    if (value != value) return MM_E4M3_NAN;
    if (a >= MM_E4M3_MAX) return sign | 0x7Eu;
    if (a < 0.015625f) /* below 2^-6 the step is 2^-9: adding 1.5 * 2^23 of them rounds to an integer */
        return sign | (mm_f32_bits(a / MM_E4M3_MIN + 12582912.0f) & 0xFu);
    bits &= 0x7FFFFFFFu;
    bits += 0x7FFFFu + (bits >> 20 & 1u);
    return sign | ((bits >> 20) - (120u << 3));
}

#endif
