/*
 * Activations as whole numbers, for processors whose integer dot products are much faster than their BF16
 * ones (and for those that have only the former). Each group of 16 activations is a power of two times
 * integers below 2^21, cut into three planes of seven bits. Four-bit weights are the integers 12 + 2 * E2M1,
 * 0 .. 24; the 12 is taken off by a correction known beforehand. Products and their sums over half a group
 * are exact; fp32 begins after them.
 *
 * An activation is exact unless it is below 2^-13 of the largest of its group, and then off by at most 2^-21
 * of that; code * scale of nvfp4 activations is always exact and fits the lower two planes.
 */
#ifndef MM_CPU_PLANES_H
#define MM_CPU_PLANES_H

#include <immintrin.h>

#include "backend/cpu/kernels.h"

/* What 128 columns of an operand row become. The 64 bytes of their weights' codes hold even columns in low
 * nibbles. */
typedef struct plane_columns {
    _Alignas(64) int8_t planes[3][2][64]; /* weight 1, 2^7, 2^14; even columns, odd columns */
    int32_t corrections[16];              /* lane l: -12 times the sum of columns 8 l .. 8 l + 7 */
    float steps[16];                      /* lane l: what 1 is worth, and a half for the doubled E2M1 */
} plane_columns;
_Static_assert(sizeof(plane_columns) == 128 * 4, "planes take four bytes per column");

/* One group of 16 into the place of group `g` of its 128 columns. */
static inline void split_group(const float *values, unsigned g, plane_columns *to) {
    float amax = 0.0f, step, inverse;
    bool finite = true;
    int exponent = 0;
    for (unsigned i = 0; i < 16; i++) {
        finite &= fabsf(values[i]) < INFINITY;
        if (fabsf(values[i]) > amax) amax = fabsf(values[i]);
    }
    if (finite && amax > 0.0f) frexpf(amax, &exponent); /* amax < 2^exponent */
    if (exponent < -80) exponent = -80;
    step = ldexpf(1.0f, exponent - 21);
    inverse = ldexpf(1.0f, 21 - exponent);
    to->corrections[2 * g] = to->corrections[2 * g + 1] = 0;
    to->steps[2 * g] = to->steps[2 * g + 1] = finite ? 0.5f * step : NAN;
    for (unsigned i = 0; i < 16; i++) {
        int32_t whole = finite ? (int32_t)rintf(values[i] * inverse) : 0;
        unsigned at = 8 * g + i / 2;
        to->planes[0][i % 2][at] = (int8_t)(whole & 127);
        to->planes[1][i % 2][at] = (int8_t)(whole >> 7 & 127);
        to->planes[2][i % 2][at] = (int8_t)(whole >> 14);
        to->corrections[2 * g + i / 8] -= 12 * whole;
    }
}

/* Rows first .. of one packed block: fp32 or BF16 operand rows to planes. */
static inline void pack_planes(const mm_gemm *g, uint32_t columns, uint32_t first, bool bf16, uint8_t *packed) {
    size_t blocks = padded_columns(columns) / 128;
    for (uint32_t r = first; r < g->count && r < first + MM_PACK_ROWS; r++) {
        const uint8_t *row = g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r);
        plane_columns *to = (plane_columns *)packed + (r - first) * blocks;
        for (size_t k = 0; k < 128 * blocks; k += 16) {
            float values[16] = {0.0f};
            for (size_t i = 0; i < 16 && k < columns; i++)
                values[i] = bf16 ? mm_bf16_to_f32(((const uint16_t *)row)[k + i]) : ((const float *)row)[k + i];
            split_group(values, k / 16 % 8, &to[k / 128]);
        }
    }
}

#endif
