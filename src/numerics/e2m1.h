/* E2M1: sign, two exponent bits, one mantissa bit. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no
 * NaN. */
#ifndef MM_NUMERICS_E2M1_H
#define MM_NUMERICS_E2M1_H

#include "numerics/host_device.h"

/* code = sign << 3 | magnitude; the upper nibble of `code` is ignored. */
MM_HD float mm_e2m1_to_f32(unsigned code) {
    unsigned exponent = code >> 1 & 3u, mantissa = code & 1u;
    /* exponent 0 is subnormal: 0 or 0.5; otherwise (2 + mantissa) * 2^(exponent - 2) */
    float magnitude = exponent == 0 ? 0.5f * (float)mantissa : (float)((2u + mantissa) << (exponent - 1)) * 0.5f;
    return code & 8u ? -magnitude : magnitude;
}

/*
 * Nearest, ties to even, saturating at 6. The seven comparisons are the midpoints between neighbors; a tie
 * goes to the even code, hence the mix of > and >=. NaN gives code 0 (callers mark such a block by its
 * scale).
 */
MM_HD unsigned mm_e2m1_from_f32(float value) {
    float a = fabsf(value);
    unsigned magnitude = (unsigned)(a > 0.25f) + (unsigned)(a >= 0.75f) + (unsigned)(a > 1.25f) +
                         (unsigned)(a >= 1.75f) + (unsigned)(a > 2.5f) + (unsigned)(a >= 3.5f) + (unsigned)(a > 5.0f);
    if (value != value) return 0;
    return magnitude | mm_f32_bits(value) >> 31 << 3;
}

/* Two codes share a byte: the even element is the low nibble. */
MM_HD unsigned mm_e2m1_unpack(const uint8_t *codes, size_t index) {
    return codes[index / 2] >> (index % 2 * 4) & 15u;
}

#endif
