/* BF16: the upper half of an IEEE binary32, rounded to nearest, ties to even. */
#ifndef MM_NUMERICS_BF16_H
#define MM_NUMERICS_BF16_H

#include "numerics/host_device.h"

MM_HD float mm_bf16_to_f32(uint16_t bits) {
    return mm_f32_from_bits((uint32_t)bits << 16);
}

/* NaN stays NaN (quiet, sign kept); values beyond the largest BF16 round to infinity as IEEE says. */
MM_HD uint16_t mm_bf16_from_f32(float value) {
    uint32_t bits = mm_f32_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* The BF16 nearest to value, as a float. */
MM_HD float mm_bf16_round(float value) {
    return mm_bf16_to_f32(mm_bf16_from_f32(value));
}

#endif
