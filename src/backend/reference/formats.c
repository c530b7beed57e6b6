/* Values by their formulas; rounding by searching all candidates for the nearest. Slow, and easy to believe.
 */
#include "backend/reference/formats.h"

#include <math.h>
#include <string.h>

static double minifloat(unsigned exponent, unsigned mantissa, unsigned mantissa_bits, int bias) {
    double fraction = (double)mantissa / (double)(1u << mantissa_bits);
    if (exponent == 0) return ldexp(fraction, 1 - bias);
    return ldexp(1.0 + fraction, (int)exponent - bias);
}

void mm_reference_tables_fill(mm_reference_tables *t) {
    for (unsigned c = 0; c < 16; c++) t->e2m1[c] = (c & 8 ? -1.0 : 1.0) * minifloat(c >> 1 & 3, c & 1, 1, 1);
    for (unsigned c = 0; c < 256; c++) {
        t->e4m3[c] = (c & 0x80 ? -1.0 : 1.0) * minifloat(c >> 3 & 15, c & 7, 3, 7);
        if ((c & 0x7F) == 0x7F) t->e4m3[c] = NAN;
        t->e8m0[c] = c == 255 ? NAN : ldexp(1.0, (int)c - 127);
    }
}

double mm_reference_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Of the BF16 below and the BF16 above in magnitude, the nearer; the even one of two equally near. */
uint16_t mm_reference_to_bf16(float value) {
    uint32_t bits;
    double below, above, x = fabs((double)value);
    uint16_t low;
    memcpy(&bits, &value, sizeof bits);
    low = (uint16_t)(bits >> 16);
    if (isnan(value)) return low | 0x40;
    if (isinf(value)) return low;
    below = fabs(mm_reference_bf16(low));
    above = (low & 0x7FFF) == 0x7F7F ? ldexp(1.0, 128) : fabs(mm_reference_bf16((uint16_t)(low + 1)));
    if (x - below < above - x || (x - below == above - x && low % 2 == 0)) return low;
    return (uint16_t)(low + 1);
}

static double fp8_scale(const mm_reference_tables *t, const mm_matrix *m, uint32_t row, uint32_t column) {
    const uint8_t *scales = m->scales + row / m->block_rows * m->scale_row_bytes;
    uint32_t block = column / m->block_columns;
    float value;
    if (m->scale_dtype == MEGAMOE_E8M0) return t->e8m0[scales[block]];
    memcpy(&value, scales + 4u * block, sizeof value);
    return value;
}

/* Groups of one scale: `group` codes of two to a byte. */
static void read_groups(const mm_reference_tables *t, const uint8_t *codes, const uint8_t *scales,
                        const double *scale_values, uint32_t group, uint32_t columns, double *values) {
    for (uint32_t k = 0; k < columns; k += 2) {
        double scale = scale_values[scales[k / group]];
        values[k] = t->e2m1[codes[k / 2] & 15] * scale;
        values[k + 1] = t->e2m1[codes[k / 2] >> 4] * scale;
    }
}

void mm_reference_row(const mm_reference_tables *t, const mm_matrix *m, uint32_t row, double *values) {
    const uint8_t *codes = m->codes + row * m->row_bytes;
    const uint8_t *scales = m->scales ? m->scales + row * m->scale_row_bytes : NULL;
    switch (m->format) {
    case MM_NVFP4: read_groups(t, codes, scales, t->e4m3, 16, m->columns, values); break;
    case MM_MXFP4: read_groups(t, codes, scales, t->e8m0, 32, m->columns, values); break;
    case MM_BF16:
        for (uint32_t k = 0; k < m->columns; k++)
            values[k] = mm_reference_bf16((uint16_t)(codes[2 * k] | codes[2 * k + 1] << 8));
        break;
    case MM_FP8:
        for (uint32_t k = 0; k < m->columns; k++) values[k] = t->e4m3[codes[k]] * fp8_scale(t, m, row, k);
        break;
    }
}

double mm_reference_bias(const mm_matrix *m, uint32_t row) {
    const uint8_t *at = m->bias ? (const uint8_t *)m->bias + row * m->bias_stride : NULL;
    float value;
    uint16_t bits;
    if (!at) return 0.0;
    if (m->bias_dtype == MEGAMOE_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&bits, at, sizeof bits);
    return mm_reference_bf16(bits);
}

/* The candidate nearest to |x|; of two equally near the even code. Beyond the last: the last. */
static unsigned nearest(const double *values, unsigned count, double x) {
    unsigned best = 0;
    if (fabs(x) >= values[count - 1]) return count - 1; /* far beyond, all distances round to the same */
    for (unsigned c = 1; c < count; c++) {
        double d = fabs(values[c] - fabs(x)), b = fabs(values[best] - fabs(x));
        if (d < b || (d == b && c % 2 == 0)) best = c;
    }
    return best;
}

mm_reference_block mm_reference_quantize(const mm_reference_tables *t, const float *values, float g) {
    mm_reference_block block = {0};
    float amax = 0.0f, target, step;
    for (unsigned i = 0; i < 16; i++) {
        block.nonfinite |= !isfinite(values[i]);
        amax = fmaxf(amax, fabsf(values[i]));
    }
    if (block.nonfinite) {
        block.scale = 0x7F;
        return block;
    }
    target = amax / 6.0f;
    target = target / g;
    block.saturated = target > 448.0f * (1.0f + 0x1p-21f); /* by more than the roundings of target */
    target = fminf(fmaxf(target, 0x1p-9f), 448.0f);
    block.scale = (uint8_t)nearest(t->e4m3, 127, target);
    step = (float)t->e4m3[block.scale] * g;
    for (unsigned i = 0; i < 16; i++) {
        float quotient = values[i] / step;
        block.codes[i] = (uint8_t)(nearest(t->e2m1, 8, quotient) | (signbit(quotient) ? 8u : 0u));
    }
    return block;
}
