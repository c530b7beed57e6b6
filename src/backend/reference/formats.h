/*
 * The number formats once more, from their definitions and in double, for the oracle alone: it must not share
 * a table or a rounding with the code it judges, so nothing here includes numerics/.
 */
#ifndef MM_REFERENCE_FORMATS_H
#define MM_REFERENCE_FORMATS_H

#include "weights.h"

typedef struct mm_reference_tables { /* every code's value; NaN where the code is NaN */
    double e2m1[16], e4m3[256], e8m0[256];
} mm_reference_tables;

void mm_reference_tables_fill(mm_reference_tables *tables);

double mm_reference_bf16(uint16_t bits);
uint16_t mm_reference_to_bf16(float value);

/* W[row][0..columns) without the global scale. */
void mm_reference_row(const mm_reference_tables *tables, const mm_matrix *matrix, uint32_t row, double *values);
double mm_reference_bias(const mm_matrix *matrix, uint32_t row); /* 0 if there is none */

/* Quantizes one block of 16 under global scale g, in the fp32 steps of docs/numerics.md. */
typedef struct mm_reference_block {
    uint8_t codes[16], scale;
    bool saturated, nonfinite;
} mm_reference_block;
mm_reference_block mm_reference_quantize(const mm_reference_tables *tables, const float *values, float g);

#endif
