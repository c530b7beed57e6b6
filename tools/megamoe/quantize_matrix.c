/*
 * The arithmetic of `megamoe quantize`, docs/numerics.md, "Quantizing weights". MXFP4 needs no rounding: its
 * scales are powers of two, which E4M3 has from 2^-9 to 2^8 under a power-of-two global scale, so the codes
 * stay as they are.
 */
#include "quantize.h"

#include <stdlib.h>

#include "formats.h"

enum { BLOCK = 16, MXFP4_BLOCK = 32 };

bool cli_matrix_is_mxfp4(const cli_source_matrix *m) {
    return m->weight.dtype == MEGAMOE_I8 || m->weight.dtype == MEGAMOE_U8 || m->weight.dtype == MEGAMOE_E2M1X2;
}

static const uint8_t *mxfp4_codes(const cli_source_matrix *m, uint64_t row, uint64_t block) {
    return (const uint8_t *)m->weight.data + row * m->columns / 2 + block * MXFP4_BLOCK / 2;
}

static int mxfp4_exponent(const cli_source_matrix *m, uint64_t row, uint64_t block) {
    return ((const uint8_t *)m->scale.data)[row * (m->columns / MXFP4_BLOCK) + block] - 127;
}

static bool all_zero(const uint8_t *codes) {
    for (unsigned i = 0; i < MXFP4_BLOCK / 2; i++)
        if (codes[i] & 0x77) return false;
    return true;
}

static float fp8_scale(const cli_source_matrix *m, uint64_t row, uint64_t column) {
    uint64_t block_rows = (m->rows + (uint64_t)m->scale.extent[0] - 1) / (uint64_t)m->scale.extent[0];
    uint64_t block_columns = (m->columns + (uint64_t)m->scale.extent[1] - 1) / (uint64_t)m->scale.extent[1];
    uint64_t at = row / block_rows * (uint64_t)m->scale.extent[1] + column / block_columns;
    float value;
    if (m->scale.dtype != MEGAMOE_F32) return ldexpf(1.0f, ((const uint8_t *)m->scale.data)[at] - 127);
    memcpy(&value, (const uint8_t *)m->scale.data + 4 * at, sizeof value);
    return value;
}

/* Sixteen weights in fp32; FP8 values by a table, which is made on the first call. */
static void read_block(const cli_source_matrix *m, uint64_t row, uint64_t column, float values[BLOCK]) {
    static float e4m3[256];
    uint64_t at = row * m->columns + column;
    if (e4m3[0x38] == 0)
        for (unsigned i = 0; i < 256; i++) e4m3[i] = (float)e4m3_value(i);
    if (m->weight.dtype == MEGAMOE_E4M3) {
        const uint8_t *bytes = (const uint8_t *)m->weight.data + at;
        for (unsigned i = 0; i < BLOCK; i++) values[i] = e4m3[bytes[i]] * fp8_scale(m, row, column + i);
        return;
    }
    for (unsigned i = 0; i < BLOCK; i++) {
        uint16_t bits;
        memcpy(&bits, (const uint8_t *)m->weight.data + 2 * (at + i), sizeof bits);
        values[i] = bf16_value(bits);
    }
}

static float block_amax(const float *values) {
    float amax = 0;
    for (unsigned i = 0; i < BLOCK; i++)
        if (fabsf(values[i]) > amax || isnan(values[i])) amax = fabsf(values[i]); /* nothing is larger than NaN */
    return amax;
}

void cli_matrix_measure(cli_source_matrix *m) {
    float values[BLOCK];
    m->exponent = -127;
    for (uint64_t row = 0; row < m->rows && cli_matrix_is_mxfp4(m); row++)
        for (uint64_t block = 0; block < m->columns / MXFP4_BLOCK; block++) {
            int exponent = mxfp4_exponent(m, row, block);
            if (exponent > m->exponent && !all_zero(mxfp4_codes(m, row, block))) m->exponent = exponent;
        }
    for (uint64_t row = 0; row < m->rows && !cli_matrix_is_mxfp4(m); row++)
        for (uint64_t column = 0; column < m->columns; column += BLOCK) {
            read_block(m, row, column, values);
            float amax = block_amax(values);
            if (amax > m->amax || isnan(amax)) m->amax = amax;
        }
}

void cli_matrix_choose_global(cli_source_matrix *m, unsigned scale_rule) {
    if (cli_matrix_is_mxfp4(m))
        m->global = ldexpf(1.0f, m->exponent - 8);
    else
        m->global = m->amax > 0 ? m->amax / (scale_rule == CLI_SCALE_4OVER6 ? 6.0f * 256.0f : 2688.0f) : 1.0f;
}

static unsigned scale_for(float amax, float largest_code, float global) {
    float target = amax / largest_code / global;
    return e4m3_nearest(fmin(fmax((double)target, 0x1p-9), 448.0));
}

/* Codes of a block under a scale byte; returns the squared error. */
static double encode(const float *values, unsigned scale, float global, uint8_t codes[BLOCK]) {
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float step = (float)e4m3_value(scale) * global;
    double error = 0;
    for (unsigned i = 0; i < BLOCK; i++) {
        codes[i] = (uint8_t)e2m1_nearest((double)(values[i] / step));
        double difference = fabs((double)values[i]) - (double)(magnitudes[codes[i] & 7] * step);
        error += difference * difference;
    }
    return error;
}

/* The scale byte that --scale asks for, and the codes under it. */
static unsigned quantize_block(const float *values, float global, unsigned rule, uint8_t codes[BLOCK]) {
    float amax = block_amax(values);
    unsigned best = scale_for(amax, 6.0f, global);
    double least = encode(values, best, global, codes);
    unsigned first = rule == CLI_SCALE_SEARCH ? 1 : best, last = rule == CLI_SCALE_SEARCH ? 0x7E : best;
    if (rule == CLI_SCALE_4OVER6) first = last = scale_for(amax, 4.0f, global);
    for (unsigned scale = first; scale <= last; scale++) {
        uint8_t tried[BLOCK];
        double error = encode(values, scale, global, tried);
        if (!(error < least)) continue;
        least = error;
        best = scale;
        memcpy(codes, tried, BLOCK);
    }
    return best;
}

/* An MXFP4 block is kept, or, more than 17 octaves below the largest, rounded under the smallest scale. */
static void convert_mxfp4(cli_source_matrix *m, uint64_t row, uint64_t block, uint8_t *codes, uint8_t *scales) {
    const uint8_t *from = mxfp4_codes(m, row, block);
    int octave = mxfp4_exponent(m, row, block) - (m->exponent - 8);
    bool zero = all_zero(from), kept = zero || octave >= -9;
    if (scales) {
        scales[0] = scales[1] = zero ? 0x38 : (uint8_t)e4m3_nearest(ldexp(1, octave < -9 ? -9 : octave));
        m->lost += !kept;
    }
    for (unsigned i = 0; codes && i < MXFP4_BLOCK / 2; i++) {
        unsigned low = from[i] & 15, high = from[i] >> 4;
        if (!kept) {
            low = e2m1_nearest(ldexp(e2m1_value(low), octave + 9));
            high = e2m1_nearest(ldexp(e2m1_value(high), octave + 9));
        }
        codes[i] = (uint8_t)(low | high << 4);
    }
}

void cli_matrix_quantize(cli_source_matrix *m, unsigned rule, uint64_t first, uint64_t count, uint8_t *codes,
                         uint8_t *scales) {
    uint64_t code_row = m->columns / 2, scale_row = m->columns / BLOCK;
    for (uint64_t r = 0; r < count; r++) {
        uint8_t *code = codes ? codes + r * code_row : NULL, *scale = scales ? scales + r * scale_row : NULL;
        for (uint64_t block = 0; cli_matrix_is_mxfp4(m) && block < m->columns / MXFP4_BLOCK; block++)
            convert_mxfp4(m, first + r, block, code ? code + block * MXFP4_BLOCK / 2 : NULL,
                          scale ? scale + 2 * block : NULL);
        for (uint64_t block = 0; !cli_matrix_is_mxfp4(m) && block < scale_row; block++) {
            float values[BLOCK];
            uint8_t quantized[BLOCK];
            read_block(m, first + r, block * BLOCK, values);
            unsigned chosen = quantize_block(values, m->global, rule, quantized);
            if (scale) scale[block] = (uint8_t)chosen;
            for (unsigned i = 0; code && i < BLOCK; i += 2)
                code[block * BLOCK / 2 + i / 2] = (uint8_t)(quantized[i] | quantized[i + 1] << 4);
        }
    }
}
