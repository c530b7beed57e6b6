/*
 * Activations as whole numbers, for processors whose integer dot products are much faster than their BF16
 * ones (and for those that have only the former). Each group of 16 activations is a power of two times
 * integers below 2^21, cut into three planes of seven bits; if all groups of a row are a BF16 value times
 * integers up to 12, as code * scale of nvfp4 activations is, one plane holds them. Four-bit weights are the
 * integers 12 + 2 * E2M1, 0 .. 24; the 12 is taken off by a correction known beforehand. Products and their
 * sums over a group are exact, 16 * 24 * 2^21 < 2^31; fp32 begins after them.
 *
 * An activation is exact unless it is below 2^-13 of the largest of its group, and then off by at most 2^-21
 * of that; nvfp4 activations always are.
 */
#ifndef MM_CPU_PLANES_H
#define MM_CPU_PLANES_H

#include <immintrin.h>

#include "backend/cpu/kernels.h"

#define PLANE_COLUMNS 256u
_Static_assert(MM_OPERAND_PAD % PLANE_COLUMNS == 0, "operand rows are whole blocks");

/*
 * What 256 columns of an operand row become. A lane of 32 bits stands for a group of 16: lane l for group
 * l / 2 of the first 128 columns if l is even, of the other 128 if it is odd. Its bytes in the four vectors
 * are columns 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15: the order in which two shuffles of the weights' codes
 * leave their nibbles.
 */
typedef struct plane_columns {
    _Alignas(64) int8_t planes[3][4][64]; /* worth 1, 2^7, 2^14 */
    int32_t corrections[16];              /* -12 times the sum of the group */
    float steps[16];                      /* what 1 is worth, and a half for the doubled E2M1 */
} plane_columns;

typedef struct plane_operand {
    _Alignas(64) uint32_t planes; /* 1 or 3: how many are not all zero */
    plane_columns blocks[];
} plane_operand;

#define PLANE_BYTES 4u /* of a packed operand row per column, padding included */
_Static_assert(sizeof(plane_operand) + sizeof(plane_columns) <= PLANE_BYTES * PLANE_COLUMNS, "a block fits its place");

/* Operand row r. */
static inline plane_operand *plane_row(uint8_t *packed, uint32_t columns, uint32_t r) {
    return (plane_operand *)(packed + r * padded_columns(columns) * PLANE_BYTES);
}

/* The value of which all 16 are multiples by at most 12, as E2M1 codes are of half their scale; 0 if there is none. */
static inline float common_step(const float *values, float amax) {
    static const float largest[] = {12, 8, 6, 4, 3, 2, 1};
    for (unsigned c = 0; c < 7 && amax >= 0x1p-80f; c++) {
        float step = amax / largest[c];
        bool divides = mm_bf16_to_f32(mm_bf16_from_f32(step)) == step;
        for (unsigned i = 0; i < 16 && divides; i++) divides = rintf(values[i] / step) * step == values[i];
        if (divides) return step;
    }
    return amax == 0.0f ? 1.0f : 0.0f;
}

/* One group of 16 into the place of group `g` of its block; *single: one plane has sufficed so far. */
static inline void split_group(const float *values, unsigned g, plane_columns *to, bool *single) {
    unsigned lane = g % 8 * 2 + g / 8;
    float amax = 0.0f, step = 0.0f;
    bool finite = true;
    int exponent = 0;
    for (unsigned i = 0; i < 16; i++) {
        finite &= fabsf(values[i]) < INFINITY;
        if (fabsf(values[i]) > amax) amax = fabsf(values[i]);
    }
    if (finite && *single) step = common_step(values, amax);
    *single = step > 0.0f;
    if (!*single) {
        if (finite && amax > 0.0f) frexpf(amax, &exponent); /* amax < 2^exponent */
        if (exponent < -80) exponent = -80;
        step = ldexpf(1.0f, exponent - 21);
    }
    to->corrections[lane] = 0;
    to->steps[lane] = finite ? 0.5f * step : NAN;
    for (unsigned i = 0; i < 16; i++) {
        int32_t whole = finite ? (int32_t)rintf(values[i] / step) : 0;
        unsigned vector = i / 8 * 2 + i % 2, at = 4 * lane + i % 8 / 2;
        to->planes[0][vector][at] = (int8_t)(*single ? whole : whole & 127);
        to->planes[1][vector][at] = (int8_t)(*single ? 0 : whole >> 7 & 127);
        to->planes[2][vector][at] = (int8_t)(*single ? 0 : whole >> 14);
        to->corrections[lane] -= 12 * whole;
    }
}

/* Rows first .. of one packed block: fp32 or BF16 operand rows to planes. */
static inline void pack_planes(const mm_gemm *g, uint32_t columns, uint32_t first, bool bf16, uint8_t *packed) {
    for (uint32_t r = first; r < g->count && r < first + MM_PACK_ROWS; r++) {
        const uint8_t *row = g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r);
        plane_operand *to = plane_row(packed, columns, r - first);
        bool single = true;
        for (size_t k = 0; k < padded_columns(columns); k += 16) {
            float values[16] = {0.0f};
            for (size_t i = 0; i < 16 && k < columns; i++)
                values[i] = bf16 ? mm_bf16_to_f32(((const uint16_t *)row)[k + i]) : ((const float *)row)[k + i];
            split_group(values, k / 16 % 16, &to->blocks[k / PLANE_COLUMNS], &single);
        }
        to->planes = single ? 1 : 3;
    }
}

#endif
