/* Weights as the kernels read them: nothing lost, nothing left over, and MXFP4 brought over exactly where
 * possible. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "backend/sm100/operands.h"

static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static double code_value(uint8_t byte, uint32_t index) {
    unsigned code = byte >> index % 2 * 4 & 15u;
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

static double e4m3_value(uint8_t byte) {
    int e = byte >> 3, m = byte & 7;
    return e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
}

static size_t place(uint32_t row, uint32_t group, uint32_t k) {
    return (size_t)(row / 128 * ((k + 63) / 64) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

struct written {
    uint8_t *codes, *scales;
    uint32_t row_bytes;
    float global;
    struct sm100_loss loss;
};

/* Into buffers that are full of `poison`. */
static struct written write_matrix(const mm_matrix *m, uint8_t poison) {
    struct written w = {0};
    w.row_bytes = sm100_code_row_bytes(m->columns);
    w.codes = malloc((size_t)m->rows * w.row_bytes);
    w.scales = malloc(sm100_scale_bytes(m->rows, m->columns));
    assert_non_null(w.codes);
    assert_non_null(w.scales);
    memset(w.codes, poison, (size_t)m->rows * w.row_bytes);
    memset(w.scales, poison, sm100_scale_bytes(m->rows, m->columns));
    assert_int_equal(mm_sm100_matrix_write(m, w.codes, w.scales, &w.global, &w.loss), MEGAMOE_OK);
    return w;
}

static void free_written(struct written *w) {
    free(w->codes);
    free(w->scales);
}

static double written_value(const struct written *w, uint32_t row, uint32_t column, uint32_t k) {
    return code_value(w->codes[(size_t)row * w->row_bytes + column / 2], column) *
           e4m3_value(w->scales[place(row, column / 16, k)]) * w->global;
}

/* Codes and scales that encode their own place; rows longer than they need be. */
static mm_matrix make_matrix(uint32_t rows, uint32_t columns, mm_format format) {
    uint32_t block = format == MM_MXFP4 ? 32 : 16;
    mm_matrix m = {0};
    m.rows = rows;
    m.columns = columns;
    m.format = format;
    m.row_bytes = columns / 2 + 3;
    m.scale_row_bytes = columns / block + 5;
    m.global = 0.37f;
    uint8_t *codes = malloc(rows * m.row_bytes), *scales = malloc(rows * m.scale_row_bytes);
    assert_non_null(codes);
    assert_non_null(scales);
    for (size_t i = 0; i < rows * m.row_bytes; i++) codes[i] = (uint8_t)(i * 167 + i / 251);
    for (size_t i = 0; i < rows * m.scale_row_bytes; i++)
        scales[i] = (uint8_t)(format == MM_MXFP4 ? 110 + i * 7 % 18 : 1 + i * 31 % 125);
    m.codes = codes;
    m.scales = scales;
    return m;
}

static void free_matrix(mm_matrix *m) {
    free((void *)m->codes);
    free((void *)m->scales);
}

static void check_nvfp4(uint32_t rows, uint32_t columns) {
    mm_matrix m = make_matrix(rows, columns, MM_NVFP4);
    struct written a = write_matrix(&m, 0x7F), b = write_matrix(&m, 0xAA);
    size_t scale_bytes = sm100_scale_bytes(rows, columns), sum = 0, expected = 0;
    assert_memory_equal(a.codes, b.codes, (size_t)rows * a.row_bytes); /* every byte was written */
    assert_memory_equal(a.scales, b.scales, scale_bytes);
    assert_true(a.global == m.global && a.loss.values == 0);
    for (uint32_t row = 0; row < rows; row++) {
        const uint8_t *codes = a.codes + (size_t)row * a.row_bytes;
        assert_memory_equal(codes, m.codes + row * m.row_bytes, columns / 2);
        for (uint32_t i = columns / 2; i < a.row_bytes; i++) assert_int_equal(codes[i], 0);
        for (uint32_t group = 0; group < columns / 16; group++) {
            assert_int_equal(a.scales[place(row, group, columns)], m.scales[row * m.scale_row_bytes + group]);
            expected += m.scales[row * m.scale_row_bytes + group];
        }
    }
    for (size_t i = 0; i < scale_bytes; i++) sum += a.scales[i]; /* the padding adds nothing: it is zero */
    assert_int_equal(sum, expected);
    free_written(&a);
    free_written(&b);
    free_matrix(&m);
}

static void nvfp4_is_moved(void **state) {
    (void)state;
    const uint32_t columns[] = {16, 64, 80, 96, 160, 2880}, rows[] = {1, 5, 31, 32, 33, 80, 127, 128, 129, 232};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) check_nvfp4(rows[j], columns[i]);
}

static double mxfp4_value(const mm_matrix *m, uint32_t row, uint32_t column) {
    return code_value(m->codes[row * m->row_bytes + column / 2], column) *
           ldexp(1, m->scales[row * m->scale_row_bytes + column / 32] - 127);
}

/* 18 exponents fit, wherever they lie: every value is the same double. */
static void mxfp4_lossless(void **state) {
    (void)state;
    for (int base = 10; base <= 230; base += 55) {
        mm_matrix m = make_matrix(37, 160, MM_MXFP4);
        uint8_t *scales = (uint8_t *)m.scales;
        for (size_t i = 0; i < m.rows * m.scale_row_bytes; i++) scales[i] = (uint8_t)(base + i * 7 % 18);
        struct written w = write_matrix(&m, 0x7F);
        assert_int_equal(w.loss.values, 0);
        assert_int_equal(w.loss.octaves, 17);
        for (uint32_t row = 0; row < m.rows; row++)
            for (uint32_t column = 0; column < m.columns; column++)
                assert_true(written_value(&w, row, column, m.columns) == mxfp4_value(&m, row, column));
        free_written(&w);
        free_matrix(&m);
    }
}

/* Two octaves too many: the smallest values go to the nearest there is, and exactly the changed ones are
 * counted. */
static void mxfp4_counts_its_loss(void **state) {
    (void)state;
    mm_matrix m = make_matrix(64, 64, MM_MXFP4);
    uint8_t *scales = (uint8_t *)m.scales;
    for (size_t i = 0; i < m.rows * m.scale_row_bytes; i++) scales[i] = (uint8_t)(100 + i * 7 % 20);
    struct written w = write_matrix(&m, 0xAA);
    uint64_t changed = 0;
    for (uint32_t row = 0; row < m.rows; row++)
        for (uint32_t column = 0; column < m.columns; column++) {
            double before = mxfp4_value(&m, row, column), after = written_value(&w, row, column, m.columns);
            double unit = ldexp(1, 102 - 127); /* the smallest scale that is left */
            changed += before != after;
            assert_true(fabs(before - after) <= unit / 4); /* half the distance of 0 and 0.5 */
        }
    assert_true(changed > 0);
    assert_int_equal(w.loss.values, changed);
    assert_int_equal(w.loss.octaves, 19);
    free_written(&w);
    free_matrix(&m);
}

/* Blocks of zeros do not widen the span, and a NaN scale stays one and is no exponent. */
static void mxfp4_zeros_and_nans(void **state) {
    (void)state;
    mm_matrix m = make_matrix(2, 64, MM_MXFP4);
    uint8_t *codes = (uint8_t *)m.codes, *scales = (uint8_t *)m.scales;
    memset(codes, 0x80, 16); /* row 0, block 0: zeros, one of each sign */
    scales[0] = 254;
    scales[1] = 120;
    scales[m.scale_row_bytes] = 0xFF;
    scales[m.scale_row_bytes + 1] = 103;
    struct written w = write_matrix(&m, 0xAA);
    assert_int_equal(w.loss.octaves, 17);
    assert_int_equal(w.loss.values, 0);
    assert_int_equal(w.scales[place(1, 0, 64)], 0x7F);
    assert_int_equal(w.scales[place(1, 1, 64)], 0x7F);
    for (uint32_t column = 0; column < 32; column++) assert_true(written_value(&w, 0, column, 64) == 0);
    for (uint32_t column = 32; column < 64; column++)
        assert_true(written_value(&w, 1, column, 64) == mxfp4_value(&m, 1, column));
    free_written(&w);
    free_matrix(&m);
}

static void refusals(void **state) {
    (void)state;
    mm_matrix m = make_matrix(4, 48, MM_MXFP4);
    uint8_t codes[4 * 32], scales[512];
    float global = 5;
    struct sm100_loss loss;
    assert_int_equal(mm_sm100_matrix_write(&m, codes, scales, &global, &loss), MEGAMOE_UNSUPPORTED_MODEL);
    assert_non_null(strstr(megamoe_error_message(), "48 columns"));
    m.format = MM_FP8;
    assert_int_equal(mm_sm100_matrix_write(&m, codes, scales, &global, &loss), MEGAMOE_UNSUPPORTED_MODEL);
    assert_non_null(strstr(megamoe_error_message(), "fp8"));
    assert_true(global == 5);
    free_matrix(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvfp4_is_moved),
        cmocka_unit_test(mxfp4_lossless),
        cmocka_unit_test(mxfp4_counts_its_loss),
        cmocka_unit_test(mxfp4_zeros_and_nans),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
