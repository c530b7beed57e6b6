/* Quantize, dequantize and the grouped GEMM by the formulas of docs/numerics.md, one value at a time. */
#include "backend/reference/single.h"

#include <math.h>
#include <stdlib.h>

#include "error.h"

static double read_value(const megamoe_tensor *t, size_t index) {
    if (t->dtype == MEGAMOE_F32) return ((const float *)t->data)[index];
    return mm_reference_bf16(((const uint16_t *)t->data)[index]);
}

static void write_value(const megamoe_tensor *t, size_t index, double value) {
    if (t->dtype == MEGAMOE_F32)
        ((float *)t->data)[index] = (float)value;
    else
        ((uint16_t *)t->data)[index] = mm_reference_to_bf16((float)value);
}

/* amax / 2688, ignoring what is not finite; 1 if that is 0. */
static float token_global(const megamoe_tensor *values, size_t row, size_t columns) {
    float amax = 0.0f;
    for (size_t k = 0; k < columns; k++) {
        float a = (float)fabs(read_value(values, row * columns + k));
        if (isfinite(a)) amax = fmaxf(amax, a);
    }
    return amax / 2688.0f > 0.0f ? amax / 2688.0f : 1.0f;
}

megamoe_status mm_reference_quantize_rows(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                                          megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals,
                                          void *stream) {
    size_t columns = (size_t)values->extent[1];
    (void)stream;
    for (size_t r = 0; r < (size_t)values->extent[0]; r++) {
        float g = global ? *global : token_global(values, r, columns);
        ((float *)globals->data)[r] = g;
        for (size_t k = r * columns; k < (r + 1) * columns; k += 16) {
            float block[16];
            for (unsigned i = 0; i < 16; i++) block[i] = (float)read_value(values, k + i);
            mm_reference_block q = mm_reference_quantize(&state->tables, block, g);
            ((uint8_t *)scales->data)[k / 16] = q.scale;
            for (unsigned i = 0; i < 16; i += 2)
                ((uint8_t *)codes->data)[(k + i) / 2] = (uint8_t)(q.codes[i] | q.codes[i + 1] << 4);
        }
    }
    return MEGAMOE_OK;
}

/* code * scale of element k of a row of `columns`. */
static double code_times_scale(const mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                               size_t index) {
    const mm_reference_tables *t = &state->tables;
    unsigned code = ((const uint8_t *)codes->data)[index / 2] >> (index % 2 * 4) & 15u;
    if (scales->dtype == MEGAMOE_E8M0) return t->e2m1[code] * t->e8m0[((const uint8_t *)scales->data)[index / 32]];
    return t->e2m1[code] * t->e4m3[((const uint8_t *)scales->data)[index / 16]];
}

megamoe_status mm_reference_dequantize_rows(mm_backend_state *state, const megamoe_tensor *codes,
                                            const megamoe_tensor *scales, const megamoe_tensor *globals,
                                            megamoe_tensor *values, void *stream) {
    size_t columns = (size_t)codes->extent[1];
    (void)stream;
    for (size_t r = 0; r < (size_t)codes->extent[0]; r++) {
        float g = globals ? ((const float *)globals->data)[globals->extent[0] == 1 ? 0 : r] : 1.0f;
        for (size_t k = r * columns; k < (r + 1) * columns; k++)
            write_value(values, k, code_times_scale(state, codes, scales, k) * (double)g);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_reference_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                         const megamoe_tensor *row_scales, const mm_matrix *matrices,
                                         const int32_t *offsets, uint32_t group_count, megamoe_tensor *output,
                                         void *stream) {
    size_t columns = matrices[0].columns, out_columns = matrices[0].rows;
    double *weight = malloc(columns * sizeof *weight);
    (void)stream;
    if (!weight) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a row of %zu weights", columns);
    for (uint32_t g = 0; g < group_count; g++) {
        size_t first = g == 0 ? 0 : (size_t)offsets[g - 1], end = (size_t)offsets[g];
        for (uint32_t n = 0; n < matrices[g].rows; n++) {
            mm_reference_row(&state->tables, &matrices[g], n, weight);
            for (size_t r = first; r < end; r++) {
                double sum = 0.0;
                for (size_t k = 0; k < columns; k++)
                    sum += weight[k] * (rows->dtype == MEGAMOE_BF16
                                            ? read_value(rows, r * columns + k)
                                            : code_times_scale(state, rows, row_scales, r * columns + k));
                write_value(output, r * out_columns + n,
                            sum * (double)matrices[g].global + mm_reference_bias(&matrices[g], n));
            }
        }
    }
    free(weight);
    return MEGAMOE_OK;
}
