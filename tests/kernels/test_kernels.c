/*
 * Every kernel at every level this machine runs, against arithmetic in double (GEMM) or against scalar (the
 * rest). With --bench the same program times a layer of the V4-Pro rank shape on every level: see bench.c.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/synthetic.h"
#include "kernels/bench.h"
#include "numerics/bf16.h"

/* The levels of this machine, and amx over emulated tiles where there are none. */
static mm_kernels levels[MM_LEVELS_MAX + 1];
static uint32_t level_count;
static mm_scale_table e4m3, e8m0;

#ifdef TEST_AMX_EMULATED
void mm_kernels_amx_emulated(mm_kernels *kernels);
#endif

/* ---- values by the book, sharing no table with the kernels ---- */

static double power(double base, int exponent) {
    return exponent < 0 ? 1.0 / power(base, -exponent) : exponent == 0 ? 1.0 : base * power(base, exponent - 1);
}

static double e2m1_value(unsigned code) {
    static const double magnitudes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

static double e4m3_value(unsigned byte) {
    int exponent = (int)(byte >> 3 & 15), mantissa = (int)(byte & 7);
    double magnitude =
        exponent == 0 ? mantissa / 8.0 * power(2.0, -6) : (1.0 + mantissa / 8.0) * power(2.0, exponent - 7);
    if ((byte & 0x7F) == 0x7F) return NAN;
    return byte & 0x80 ? -magnitude : magnitude;
}

static double e8m0_value(unsigned byte) {
    return byte == 255 ? NAN : power(2.0, (int)byte - 127);
}

static double bf16_value(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return (double)mm_bf16_to_f32(bits);
}

static double weight_value(const mm_matrix *m, uint32_t n, uint32_t k) {
    const uint8_t *codes = m->codes + n * m->row_bytes, *scales = m->scales;
    float scale;
    if (m->format == MM_BF16) return bf16_value(codes + 2 * (size_t)k);
    if (m->format == MM_FP8) {
        scales += n / m->block_rows * m->scale_row_bytes;
        if (m->scale_dtype == MEGAMOE_E8M0) return e4m3_value(codes[k]) * e8m0_value(scales[k / m->block_columns]);
        memcpy(&scale, scales + k / m->block_columns * sizeof scale, sizeof scale);
        return e4m3_value(codes[k]) * (double)scale;
    }
    scales += n * m->scale_row_bytes;
    return e2m1_value(codes[k / 2] >> (k % 2 * 4) & 15) *
           (m->format == MM_NVFP4 ? e4m3_value(scales[k / 16]) : e8m0_value(scales[k / 32]));
}

/* ---- GEMM ---- */

typedef struct problem {
    synthetic made;
    mm_matrix matrix;
    uint32_t count;
    bool nvfp4;                /* values are code * scale */
    float *values;             /* [count, columns], exact in BF16 */
    double *sums, *magnitudes; /* [count, rows] by the book */
} problem;

static void solve(problem *p) {
    const mm_matrix *m = &p->matrix;
    for (uint32_t n = 0; n < m->rows; n++)
        for (uint32_t r = 0; r < p->count; r++) {
            double sum = 0.0, magnitude = 0.0;
            for (uint32_t k = 0; k < m->columns; k++) {
                double product = weight_value(m, n, k) * (double)p->values[(size_t)r * m->columns + k];
                sum += product;
                magnitude += fabs(product);
            }
            p->sums[(size_t)r * m->rows + n] = sum;
            p->magnitudes[(size_t)r * m->rows + n] = magnitude;
        }
}

static void problem_make(problem *p, mm_format format, megamoe_dtype fp8_scale, uint32_t rows, uint32_t columns,
                         uint32_t count, uint64_t seed) {
    memset(p, 0, sizeof *p);
    p->made.random = seed;
    p->matrix = synthetic_matrix(&p->made, format, fp8_scale, rows, columns, false);
    p->count = count;
    p->values = synthetic_block(&p->made, (size_t)count * columns * sizeof *p->values);
    p->sums = synthetic_block(&p->made, (size_t)count * rows * sizeof *p->sums);
    p->magnitudes = synthetic_block(&p->made, (size_t)count * rows * sizeof *p->magnitudes);
    uint16_t *bits = synthetic_block(&p->made, (size_t)count * columns * 2);
    synthetic_tokens(&p->made, count, columns, false, bits);
    for (size_t i = 0; i < (size_t)count * columns; i++) p->values[i] = mm_bf16_to_f32(bits[i]);
    solve(p);
}

/* Replaces the operands by codes times scales from 2^-9 to 448. */
static void make_nvfp4(problem *p) {
    uint32_t columns = p->matrix.columns;
    size_t groups = (size_t)p->count * columns / 16;
    uint8_t *codes = synthetic_block(&p->made, groups * 8), *scales = synthetic_block(&p->made, groups);
    for (size_t i = 0; i < groups * 8; i++) codes[i] = (uint8_t)synthetic_random(&p->made);
    for (size_t i = 0; i < groups; i++) scales[i] = (uint8_t)(synthetic_random(&p->made) % 127);
    for (size_t i = 0; i < groups * 16; i++)
        p->values[i] = (float)(e2m1_value(codes[i / 2] >> (i % 2 * 4) & 15) * e4m3_value(scales[i / 16]));
    p->nvfp4 = true;
    solve(p);
}

/* Runs rows 0 .. count of the problem at a level; got: [count, rows]. Scratch holds NaN before. */
static void multiply(problem *p, const mm_kernels *kernels, uint32_t first, uint32_t count, uint32_t deciding,
                     float *got) {
    const mm_matrix *m = &p->matrix;
    size_t element = kernels->operands_bf16 ? 2 : 4;
    size_t padded = (m->columns + MM_OPERAND_PAD - 1) / MM_OPERAND_PAD * MM_OPERAND_PAD;
    size_t pitch = (padded * element + 63) / 64 * 64 + 64;
    uint8_t *operands = aligned_alloc(64, pitch * count);
    void *panel = aligned_alloc(64, MM_PANEL_BYTES);
    uint32_t *index = malloc(count * sizeof *index);
    memset(operands, 0x7F, pitch * count);
    memset(panel, 0xFF, MM_PANEL_BYTES);
    memset(got, 0xFF, (size_t)count * m->rows * sizeof *got);
    for (uint32_t r = 0; r < count; r++) { /* stored backwards and gathered by index */
        uint8_t *row = operands + pitch * (count - 1 - r);
        kernels->store(p->values + (size_t)(first + r) * m->columns, m->columns, row);
        memset(row + m->columns * element, 0, padded * element - m->columns * element);
        index[r] = count - 1 - r;
    }
    uint8_t *packed = NULL;
    unsigned packed_bytes = kernels->packs ? kernels->packs(m, deciding, p->nvfp4) : 0;
    if (packed_bytes > 0) {
        size_t block = packed_block_bytes(m->columns, packed_bytes);
        packed = aligned_alloc(64, (count + MM_PACK_ROWS - 1) / MM_PACK_ROWS * block);
        for (uint32_t r = 0; r < count; r += MM_PACK_ROWS)
            kernels->pack(&(mm_gemm){.matrix = m,
                                     .deciding_rows = deciding,
                                     .nvfp4 = p->nvfp4,
                                     .operands = operands,
                                     .operand_pitch = pitch,
                                     .operand_index = index,
                                     .count = count},
                          m->columns, r, packed + r / MM_PACK_ROWS * block);
    }
    for (uint32_t r = 0; r < count; r += kernels->group_rows)
        for (uint32_t n = 0; n < m->rows; n += MM_ROWS_MAX)
            kernels->gemm(&(mm_gemm){
                .matrix = m,
                .table = m->format == MM_MXFP4 ? &e8m0 : &e4m3,
                .row_first = n,
                .row_count = m->rows - n < MM_ROWS_MAX ? m->rows - n : MM_ROWS_MAX,
                .operands = operands,
                .operand_pitch = pitch,
                .operand_index = index + r,
                .packed = packed ? packed + r / MM_PACK_ROWS * packed_block_bytes(m->columns, packed_bytes) : NULL,
                .count = count - r < kernels->group_rows ? count - r : kernels->group_rows,
                .sums = got + (size_t)r * m->rows + n,
                .sums_pitch = m->rows,
                .panel = panel,
                .deciding_rows = deciding,
                .nvfp4 = p->nvfp4});
    free(packed);
    free(operands);
    free(panel);
    free(index);
}

/*
 * K exact products summed in fp32 in any order: gamma_K of the magnitude; FP8's F32 scales round once more.
 * Values below 2^-126 may be flushed on either side of a product.
 */
static void assert_within(const problem *p, const char *isa, uint32_t count, const float *got) {
    const mm_matrix *m = &p->matrix;
    double unit = ldexp(1.0, -24), bound = (m->columns + 2) * unit / (1.0 - (m->columns + 2) * unit);
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t n = 0; n < m->rows; n++) {
            size_t at = (size_t)r * m->rows + n;
            double expected = p->sums[at], difference = fabs((double)got[at] - expected);
            double flushed = m->columns * ldexp(1.0, -126) * 64.0;
            if (isnan(expected) && isnan(got[at])) continue;
            if (!(difference <= bound * p->magnitudes[at] + flushed))
                fail_msg("%s %s [%u, %u]: operand row %u of %u, matrix row %u: %g instead of %g (magnitude %g)", isa,
                         mm_format_name(m->format), m->rows, m->columns, r, count, n, (double)got[at], expected,
                         p->magnitudes[at]);
        }
}

static const struct {
    mm_format format;
    megamoe_dtype scale;
} formats[] = {{MM_NVFP4, 0}, {MM_MXFP4, 0}, {MM_BF16, 0}, {MM_FP8, MEGAMOE_E8M0}, {MM_FP8, MEGAMOE_F32}};

static void check_bounds(bool nvfp4) {
    static const uint32_t columns[] = {32, 64, 96, 160, 544, 1056, 16, 48, 176, 528, 2064}; /* from 16: not MXFP4 */
    static const uint32_t rows[] = {16, 37, 1};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t c = 0; c < sizeof columns / sizeof *columns; c++) {
            if (formats[f].format == MM_MXFP4 && columns[c] % 32 != 0) continue;
            problem p;
            problem_make(&p, formats[f].format, formats[f].scale, rows[c % 3], columns[c], 70, f * 100 + c);
            if (nvfp4) make_nvfp4(&p);
            float *got = malloc((size_t)p.count * p.matrix.rows * sizeof *got);
            for (uint32_t l = 0; l < level_count; l++)
                for (uint32_t count = 1; count <= p.count; count += count < 20 ? 1 : 25) {
                    multiply(&p, &levels[l], 0, count, count, got);
                    assert_within(&p, levels[l].isa, count, got);
                }
            free(got);
            synthetic_free(&p.made);
        }
}

/* From far below 1 to far above what FP16 holds, a row each. */
static void operands_of_any_magnitude_multiply(void **unused) {
    static const int exponents[] = {0, 14, 15, 16, 17, 40, 100, -60};
    static const uint32_t deciding[] = {1, 4, 20};
    (void)unused;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        problem p;
        problem_make(&p, formats[f].format, formats[f].scale, 37, 544, 20, 60 + f);
        for (uint32_t r = 0; r < p.count; r++)
            for (uint32_t k = 0; k < p.matrix.columns; k++)
                p.values[(size_t)r * p.matrix.columns + k] *= ldexpf(1.0f, exponents[r % 8]);
        solve(&p);
        float *got = malloc((size_t)p.count * p.matrix.rows * sizeof *got);
        for (uint32_t l = 0; l < level_count; l++)
            for (size_t d = 0; d < sizeof deciding / sizeof *deciding; d++) {
                multiply(&p, &levels[l], 0, p.count, deciding[d], got);
                assert_within(&p, levels[l].isa, p.count, got);
            }
        free(got);
        synthetic_free(&p.made);
    }
}

static void gemm_is_within_its_bound(void **unused) {
    (void)unused;
    check_bounds(false);
}

static void nvfp4_gemm_is_within_its_bound(void **unused) {
    (void)unused;
    check_bounds(true);
}

/* A row's bits are the same alone and among any number of rows, where one number of rows decides the kernel.
 */
static void bits_depend_only_on_the_deciding_rows(void **unused) {
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 31, 40};
    static const uint32_t deciding[] = {1, 2, 3, 6, 7, 8, 9, 16, 17, 32, 33, UINT32_MAX}; /* the levels' bounds */
    (void)unused;
    for (size_t f = 0; f < 2 * sizeof formats / sizeof *formats; f++) { /* twice: bf16 and nvfp4 operands */
        problem p;
        problem_make(&p, formats[f / 2].format, formats[f / 2].scale, 19, 1056, 40, 7 + f);
        if (f % 2) make_nvfp4(&p);
        size_t row = p.matrix.rows;
        float *all = malloc(p.count * row * sizeof *all), *part = malloc(p.count * row * sizeof *part);
        for (uint32_t l = 0; l < level_count; l++)
            for (size_t d = 0; d < sizeof deciding / sizeof *deciding; d++) {
                multiply(&p, &levels[l], 0, p.count, deciding[d], all);
                for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                    uint32_t first = (uint32_t)c * 5 % (p.count - counts[c] + 1);
                    multiply(&p, &levels[l], first, counts[c], deciding[d], part);
                    assert_memory_equal(part, all + first * row, counts[c] * row * sizeof *part);
                }
            }
        free(all);
        free(part);
        synthetic_free(&p.made);
    }
}

/* Row n has scale byte n everywhere: subnormal scales, the extremes, negative ones and NaN. */
static void all_scale_bytes_decode(void **unused) {
    (void)unused;
    for (size_t f = 0; f < 2; f++) {
        problem p;
        problem_make(&p, formats[f].format, 0, 256, 64, 9, 3);
        uint8_t *scales = (uint8_t *)(uintptr_t)p.matrix.scales;
        for (uint32_t n = 0; n < 256; n++)
            for (uint32_t b = 0; b < 64; b += f ? 32 : 16)
                scales[n * p.matrix.scale_row_bytes + b / (f ? 32 : 16)] = (uint8_t)(f && n > 240 && n < 255 ? 240 : n);
        solve(&p);
        float got[9 * 256];
        for (uint32_t l = 0; l < level_count; l++)
            for (uint32_t count = 1; count <= 9; count += 4) {
                multiply(&p, &levels[l], 0, count, count, got);
                assert_within(&p, levels[l].isa, count, got);
            }
        assert_true(isnan(got[f ? 255 : 127]));
        synthetic_free(&p.made);
    }
}

/* Every byte of FP8 weights, NaN included, and of BF16 weights every exponent. */
static void all_fp8_values_decode(void **unused) {
    problem p;
    (void)unused;
    problem_make(&p, MM_FP8, MEGAMOE_F32, 256, 32, 8, 5);
    uint8_t *codes = (uint8_t *)(uintptr_t)p.matrix.codes;
    for (uint32_t n = 0; n < 256; n++) memset(codes + n * p.matrix.row_bytes, (int)n, 32);
    solve(&p);
    float got[8 * 256];
    for (uint32_t l = 0; l < level_count; l++) {
        multiply(&p, &levels[l], 0, 8, 8, got);
        assert_within(&p, levels[l].isa, 8, got);
        assert_true(isnan(got[0x7F]) && isnan(got[0xFF]));
    }
    synthetic_free(&p.made);
}

static void router_gemm_is_within_its_bound(void **unused) {
    enum { ROWS = 21, COLUMNS = 208, COUNT = 11 };
    synthetic made = {.random = 11};
    uint8_t *file = synthetic_block(&made, ROWS * COLUMNS * 4 + 4), *weights = file + 1; /* not aligned */
    float *values = synthetic_block(&made, COUNT * COLUMNS * 4), got[COUNT][ROWS];
    uint16_t bits[COLUMNS];
    (void)unused;
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        float value = synthetic_normal(&made);
        memcpy(weights + 4 * i, &value, 4);
    }
    for (uint32_t l = 0; l < level_count; l++) {
        size_t pitch = COLUMNS * 4 + 128;
        uint8_t *operands = aligned_alloc(64, pitch * COUNT / 64 * 64 + 64);
        void *panel = aligned_alloc(64, MM_PANEL_BYTES);
        memset(operands, 0, pitch * COUNT);
        memset(panel, 0xFF, MM_PANEL_BYTES);
        for (uint32_t r = 0; r < COUNT; r++) {
            synthetic_tokens(&made, 1, COLUMNS, false, bits);
            for (uint32_t k = 0; k < COLUMNS; k++) values[r * COLUMNS + k] = mm_bf16_to_f32(bits[k]);
            levels[l].store(values + r * COLUMNS, COLUMNS, operands + pitch * r);
        }
        for (uint32_t n = 0; n < ROWS; n += MM_ROWS_MAX)
            levels[l].gemm_f32(weights, COLUMNS,
                               &(mm_gemm){.row_first = n,
                                          .row_count = ROWS - n < MM_ROWS_MAX ? ROWS - n : MM_ROWS_MAX,
                                          .operands = operands,
                                          .operand_pitch = pitch,
                                          .count = COUNT,
                                          .sums = &got[0][n],
                                          .sums_pitch = ROWS,
                                          .panel = panel,
                                          .deciding_rows = 1});
        for (uint32_t r = 0; r < COUNT; r++)
            for (uint32_t n = 0; n < ROWS; n++) {
                double sum = 0.0, magnitude = 0.0;
                for (uint32_t k = 0; k < COLUMNS; k++) {
                    float w;
                    memcpy(&w, weights + 4 * ((size_t)n * COLUMNS + k), 4);
                    sum += (double)w * (double)values[r * COLUMNS + k];
                    magnitude += fabs((double)w * (double)values[r * COLUMNS + k]);
                }
                assert_true(fabs(sum - (double)got[r][n]) <= (COLUMNS + 2) * ldexp(1.0, -24) * magnitude);
            }
        free(operands);
        free(panel);
    }
    synthetic_free(&made);
}

/* ---- rows: equal to scalar ---- */

/* Values that are hard to round: ties, extremes, subnormals, zeros of both signs, and ordinary ones. */
static float hard_value(synthetic *made) {
    uint32_t bits = synthetic_random(made);
    switch (bits % 8) {
    case 0: return mm_f32_from_bits((bits & 0xFFFF0000u) | 0x8000u); /* a BF16 tie, of any exponent */
    case 1: return mm_f32_from_bits(bits & 0x807FFFFFu);             /* subnormal */
    case 2: return bits & 8 ? -0.0f : 0.0f;
    case 3: return 0.25f * (float)(int)(bits >> 8 & 63) - 8.0f; /* E2M1 midpoints under scale 1 */
    default: return synthetic_normal(made) * (bits & 8 ? 100.0f : 0.01f);
    }
}

static void loads_and_stores_equal_scalar(void **unused) {
    enum { COUNT = 4096 };
    synthetic made = {.random = 21};
    float *input = synthetic_block(&made, COUNT * 4), *expected = synthetic_block(&made, COUNT * 4);
    float *got = synthetic_block(&made, COUNT * 4);
    uint16_t *half = synthetic_block(&made, COUNT * 2);
    (void)unused;
    for (int i = 0; i < COUNT; i++) {
        input[i] = hard_value(&made);
        half[i] = (uint16_t)synthetic_random(&made);
        if (i % 100 == 0) input[i] = i % 200 ? NAN : -INFINITY;
    }
    for (uint32_t l = 0; l < level_count; l++) {
        levels[0].load(input, MEGAMOE_F32, COUNT, expected);
        levels[l].load(input, MEGAMOE_F32, COUNT, got);
        assert_memory_equal(got, expected, COUNT * 4);
        levels[0].load(half, MEGAMOE_BF16, COUNT, expected);
        levels[l].load(half, MEGAMOE_BF16, COUNT, got);
        assert_memory_equal(got, expected, COUNT * 4);
        assert_true(levels[l].amax(input, COUNT) == levels[0].amax(input, COUNT));
        levels[l].store(input, COUNT, got);
        for (int i = 0; i < COUNT; i++) {
            uint32_t bits = levels[l].operands_bf16 ? (uint32_t)((uint16_t *)got)[i] << 16 : mm_f32_bits(got[i]);
            assert_int_equal(bits, (uint32_t)mm_bf16_from_f32(input[i]) << 16);
        }
    }
    synthetic_free(&made);
}

static void quantize_equals_scalar(void **unused) {
    enum { COUNT = 16 * 4000 };
    static const float globals[] = {1.0f, 0.0021f, 37.5f, 1e-6f};
    synthetic made = {.random = 31};
    float *input = synthetic_block(&made, COUNT * 4), *expected = synthetic_block(&made, COUNT * 4);
    float *got = synthetic_block(&made, COUNT * 4);
    uint8_t *codes[2] = {synthetic_block(&made, COUNT / 2), synthetic_block(&made, COUNT / 2)};
    uint8_t *scales[2] = {synthetic_block(&made, COUNT / 16), synthetic_block(&made, COUNT / 16)};
    (void)unused;
    for (int i = 0; i < COUNT; i++) {
        int kind = i / 16 % 10;
        input[i] = kind == 0   ? 0.0f
                   : kind < 4  ? 0.25f * (float)(int)(synthetic_random(&made) % 49) - 6.0f
                   : kind == 4 ? hard_value(&made)
                               : synthetic_normal(&made);
        if (kind == 5 && i % 16 == 7) input[i] = i / 160 % 3 == 0 ? NAN : i / 160 % 3 == 1 ? INFINITY : -INFINITY;
        if (kind == 6) input[i] *= 4000.0f;
        if (kind == 7) input[i] *= 1e-5f;
        if (kind == 1 && i % 16 == 3) input[i] = 6.0f; /* scale 1 under g = 1, so quarters are ties */
        /* Scale 0x0F: the quotient is a tie, 1.25, and a multiplication by the reciprocal is above it. */
        if (kind == 2) input[i] = i % 16 == 3 ? 6.0f * 0.029296875f : 0.03662109375f;
    }
    for (uint32_t l = 0; l < level_count; l++)
        for (size_t g = 0; g < sizeof globals / sizeof *globals; g++) {
            mm_quantize_counts counts[2] = {{0, 0}, {0, 0}};
            memcpy(expected, input, COUNT * 4);
            memcpy(got, input, COUNT * 4);
            memset(codes[1], 0xAA, COUNT / 2);
            levels[0].quantize(expected, COUNT, globals[g], codes[0], scales[0], &counts[0]);
            levels[l].quantize(got, COUNT, globals[g], codes[1], scales[1], &counts[1]);
            assert_memory_equal(codes[1], codes[0], COUNT / 2);
            assert_memory_equal(scales[1], scales[0], COUNT / 16);
            for (int i = 0; i < COUNT; i++) /* NaN payloads are free */
                assert_true(got[i] == expected[i] || (isnan(got[i]) && isnan(expected[i])));
            assert_int_equal(counts[1].saturated_blocks, counts[0].saturated_blocks);
            assert_int_equal(counts[1].nonfinite_blocks, counts[0].nonfinite_blocks);
            assert_true(counts[1].nonfinite_blocks > 0);
        }
    synthetic_free(&made);
}

static float g_or_zero(const float *gate, int i) {
    return gate ? gate[i] : 0.0f;
}

/* The exponential is the level's own: a few units of roundoff, 0 where it would be subnormal, specials as in
 * scalar. */
static void activation_is_close_to_scalar(void **unused) {
    enum { COUNT = 4096 };
    static const mm_swiglu functions[] = {{1.0f, 0.0f, INFINITY, 0},
                                          {1.702f, 1.0f, 7.0f, 0},
                                          {1.0f, 0.0f, 10.0f, 0},
                                          {1.0f, 0.0f, INFINITY, 1},
                                          {1e6f, 0.0f, 3.0f, 0}};
    synthetic made = {.random = 41};
    float *gate = synthetic_block(&made, COUNT * 4), *up = synthetic_block(&made, COUNT * 4);
    float *expected = synthetic_block(&made, COUNT * 4), *got = synthetic_block(&made, COUNT * 4);
    (void)unused;
    for (int i = 0; i < COUNT; i++) {
        gate[i] = i < 400 ? 0.5f * (float)i - 100.0f : hard_value(&made);
        up[i] = hard_value(&made);
        if (i % 500 == 3) gate[i] = NAN;
        if (i % 500 == 4) up[i] = NAN;
        if (i % 500 == 5) gate[i] = -INFINITY;
        if (i % 500 == 6) gate[i] = INFINITY;
    }
    for (uint32_t l = 0; l < level_count; l++)
        for (size_t f = 0; f < sizeof functions / sizeof *functions; f++) {
            const float *g = functions[f].relu2 ? NULL : gate;
            levels[0].activate(&functions[f], g, up, 0.37f, COUNT, expected);
            levels[l].activate(&functions[f], g, up, 0.37f, COUNT, got);
            for (int i = 0; i < COUNT; i++) {
                double allowed = 8.0 * ldexp(1.0, -24) * fabs((double)expected[i]) +
                                 2e-38 * (fabs((double)g_or_zero(g, i)) * (fabs((double)up[i]) + 1.0) + 1.0);
                if (isnan(expected[i])
                        ? !isnan(got[i])
                        : got[i] != expected[i] && !(fabs((double)got[i] - (double)expected[i]) <= allowed))
                    fail_msg("%s: gate %g, up %g: %g instead of %g", levels[l].isa, (double)gate[i], (double)up[i],
                             (double)got[i], (double)expected[i]);
            }
        }
    synthetic_free(&made);
}

static void combine_equals_scalar(void **unused) {
    enum { COLUMNS = 208, SLOTS = 7 };
    synthetic made = {.random = 51};
    float *data = synthetic_block(&made, (SLOTS + 1) * COLUMNS * 4), weights[SLOTS];
    const float *rows[SLOTS];
    uint16_t expected[COLUMNS], got[COLUMNS];
    (void)unused;
    for (int i = 0; i < (SLOTS + 1) * COLUMNS; i++) data[i] = i % 91 == 5 ? NAN : hard_value(&made);
    for (int k = 0; k < SLOTS; k++) rows[k] = data + k * COLUMNS, weights[k] = synthetic_normal(&made);
    for (uint32_t l = 0; l < level_count; l++)
        for (uint32_t count = 0; count <= SLOTS; count++)
            for (int variant = 0; variant < 4; variant++) {
                mm_combine c = {
                    COLUMNS, count, rows, variant & 1 ? weights : NULL, variant & 2 ? data + SLOTS * COLUMNS : NULL,
                    expected};
                levels[0].combine(&c);
                memset(got, 0xAA, sizeof got);
                c.output = got;
                levels[l].combine(&c);
                for (int n = 0; n < COLUMNS; n++)
                    assert_true(got[n] == expected[n] ||
                                (isnan(mm_bf16_to_f32(got[n])) && isnan(mm_bf16_to_f32(expected[n]))));
            }
    synthetic_free(&made);
}

/* ---- a layer at every level: packing, long experts, all of it ---- */

static void layer_output(const mm_layer_weights *weights, const mm_kernels *kernels, const megamoe_batch *batch) {
    megamoe_device_options options = {.struct_size = sizeof options, .threads = 2, .max_tokens = batch->token_count};
    megamoe_layer_options layer_options = {.struct_size = sizeof layer_options};
    mm_backend_state *state;
    mm_backend_layer *layer;
    assert_int_equal(mm_backend_cpu.open(&options, &state), MEGAMOE_OK);
    state->kernels = *kernels;
    assert_int_equal(mm_backend_cpu.layer_create(state, weights, false, &layer_options, &layer), MEGAMOE_OK);
    assert_int_equal(mm_backend_cpu.run(layer, batch, NULL, NULL, NULL, NULL), MEGAMOE_OK);
    mm_backend_cpu.layer_close(layer);
    mm_backend_cpu.close(state);
}

static void layers_agree_at_every_level(void **unused) {
    enum { TOKENS = 1100, HIDDEN = 176, SLOTS = 3 }; /* two chunks, and an expert with more rows than a GEMM call */
    const synthetic_spec spec = {.hidden = HIDDEN,
                                 .intermediate = 112,
                                 .experts = 3,
                                 .slots = SLOTS,
                                 .format = MM_NVFP4,
                                 .shared_format = MM_FP8,
                                 .seed = 5};
    synthetic made;
    synthetic_make(&spec, &made);
    uint16_t *hidden = synthetic_block(&made, TOKENS * HIDDEN * 2),
             *output = synthetic_block(&made, TOKENS * HIDDEN * 2);
    uint16_t *expected = synthetic_block(&made, TOKENS * HIDDEN * 2);
    int32_t *ids = synthetic_block(&made, TOKENS * SLOTS * 4);
    float *weights = synthetic_block(&made, TOKENS * SLOTS * 4);
    (void)unused;
    synthetic_tokens(&made, TOKENS, HIDDEN, false, hidden);
    for (int p = 0; p < TOKENS * SLOTS; p++) ids[p] = p % 50 == 7 ? 2 : p % 7 == 3, weights[p] = 0.25f + (float)(p % 5);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = TOKENS,
                           .hidden = hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = expected,
                           .expert_ids = ids,
                           .expert_weights = weights};
    layer_output(&made.weights, &levels[0], &batch);
    batch.output = output;
    for (uint32_t l = 1; l < level_count; l++) {
        double power = 0.0, error = 0.0;
        memset(output, 0xFF, TOKENS * HIDDEN * 2);
        layer_output(&made.weights, &levels[l], &batch);
        for (int i = 0; i < TOKENS * HIDDEN; i++) {
            double a = (double)mm_bf16_to_f32(output[i]), b = (double)mm_bf16_to_f32(expected[i]);
            power += b * b;
            error += (a - b) * (a - b);
        }
        if (!(error <= 1e-5 * power)) fail_msg("%s: relative error %g", levels[l].isa, sqrt(error / power));
    }
    synthetic_free(&made);
}

/* MEGAMOE_ISA names a level; where that has two forms, the better one runs. */
static void a_cap_keeps_the_best_form_of_its_level(void **unused) {
    mm_kernels all[MM_LEVELS_MAX], capped[MM_LEVELS_MAX];
    const char *cap = getenv("MEGAMOE_ISA");
    uint32_t count = mm_kernels_levels(all);
    (void)unused;
    for (uint32_t l = 0; l < count; l++) {
        if (l + 1 < count && strcmp(all[l].isa, all[l + 1].isa) == 0) continue;
        assert_int_equal(setenv("MEGAMOE_ISA", all[l].isa, 1), 0);
        assert_int_equal(mm_kernels_levels(capped), l + 1);
        assert_string_equal(capped[l].isa, all[l].isa);
        assert_ptr_equal(capped[l].gemm, all[l].gemm);
    }
    assert_int_equal(cap ? setenv("MEGAMOE_ISA", all[count - 1].isa, 1) : unsetenv("MEGAMOE_ISA"), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cap_keeps_the_best_form_of_its_level),
        cmocka_unit_test(gemm_is_within_its_bound),
        cmocka_unit_test(operands_of_any_magnitude_multiply),
        cmocka_unit_test(nvfp4_gemm_is_within_its_bound),
        cmocka_unit_test(bits_depend_only_on_the_deciding_rows),
        cmocka_unit_test(all_scale_bytes_decode),
        cmocka_unit_test(all_fp8_values_decode),
        cmocka_unit_test(router_gemm_is_within_its_bound),
        cmocka_unit_test(loads_and_stores_equal_scalar),
        cmocka_unit_test(quantize_equals_scalar),
        cmocka_unit_test(activation_is_close_to_scalar),
        cmocka_unit_test(combine_equals_scalar),
        cmocka_unit_test(layers_agree_at_every_level),
    };
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) return bench_layer(argc - 2, argv + 2);
    mm_scale_table_e4m3(&e4m3);
    mm_scale_table_e8m0(&e8m0);
    level_count = mm_kernels_levels(levels);
    for (uint32_t l = 0; l < level_count; l++) /* the two forms of one level */
        if (strcmp(levels[l].isa, "avx512") == 0 && !levels[l].operands_bf16) levels[l].isa = "avx512 (no bf16)";
#ifdef TEST_AMX_EMULATED
    if (strcmp(levels[level_count - 1].isa, "avx512") == 0 && levels[level_count - 1].operands_bf16) {
        levels[level_count] = levels[level_count - 1];
        levels[level_count].isa = "amx (emulated tiles)";
        mm_kernels_amx_emulated(&levels[level_count++]);
    }
#endif
    printf("levels:");
    for (uint32_t l = 0; l < level_count; l++) printf(" %s", levels[l].isa);
    printf("\n");
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
