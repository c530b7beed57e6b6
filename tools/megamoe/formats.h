/*
 * The number formats as the command needs them: to make data, and to judge stages. Written from
 * docs/numerics.md and on purpose not shared with the library, since `megamoe check` must not repeat a
 * mistake of what it judges: values come from their definition, roundings from a search for the nearest value
 * with ties to the even code.
 */
#ifndef CLI_FORMATS_H
#define CLI_FORMATS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float bf16_value(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Nearest, ties to even; NaN stays NaN. */
static inline uint16_t bf16_nearest(double exact) {
    float value = (float)exact;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7FC0;
    /* float and double may round in two steps: step back where the first one made a tie */
    if ((bits & 0xFFFF) == 0x8000 && (double)value != exact) bits += (fabs(exact) > fabs((double)value)) ? 1u : ~0u;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Sign, two exponent bits with bias 1, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6. */
static inline double e2m1_value(unsigned code) {
    unsigned exponent = code >> 1 & 3, mantissa = code & 1;
    double magnitude = exponent ? ldexp(1.0 + 0.5 * mantissa, (int)exponent - 1) : 0.5 * mantissa;
    return code & 8 ? -magnitude : magnitude;
}

/* Sign, four exponent bits with bias 7, three mantissa bits; 0x7F and 0xFF are NaN. */
static inline double e4m3_value(unsigned byte) {
    unsigned exponent = byte >> 3 & 15, mantissa = byte & 7;
    double magnitude = exponent ? ldexp(1.0 + mantissa / 8.0, (int)exponent - 7) : ldexp(mantissa, -9);
    if ((byte & 0x7F) == 0x7F) return NAN;
    return byte & 0x80 ? -magnitude : magnitude;
}

/* The seven midpoints, each to the even code; beyond 6 it is 6. */
static inline unsigned e2m1_nearest(double exact) {
    double a = fabs(exact);
    unsigned code = (a > 0.25) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0);
    return code | (signbit(exact) ? 8u : 0u);
}

/* The byte up to 0x7E whose value is nearest to |exact|: bytes rise with their values, and the last one
 * saturates. */
static inline unsigned e4m3_nearest(double exact) {
    unsigned low = 0, high = 0x7E, sign = signbit(exact) ? 0x80u : 0u;
    double magnitude = fabs(exact);
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (e4m3_value(middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - e4m3_value(low), above = e4m3_value(high) - magnitude;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

#endif
