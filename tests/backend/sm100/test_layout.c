/* The scale layout: against tables made with the vendor's layout algebra, as a bijection, and at awkward
 * sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "backend/sm100/layout.h"

static void check_table(const char *path, uint32_t k, uint32_t entries) {
    uint32_t row, group, count = 0;
    unsigned long long offset;
    char header[64];
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(header, sizeof header, file));
    while (fscanf(file, "%u,%u,%llu", &row, &group, &offset) == 3) {
        assert_int_equal(sm100_scale_offset(row, group, sm100_blocks_along_k(k)), offset);
        count++;
    }
    fclose(file);
    assert_int_equal(count, entries);
}

static void golden_tables(void **state) {
    (void)state;
    check_table("tests/sm100_model/golden/sf_layout_384x1024.csv", 1024, 384 * 64);
    check_table("tests/sm100_model/golden/sf_layout_256x192.csv", 192, 256 * 12);
}

/* Every (row, group) of the padded rectangle has a byte of its own, and every byte of the buffer is one of
 * them. */
static void check_bijection(uint32_t rows, uint32_t k) {
    uint32_t blocks = sm100_blocks_along_k(k);
    uint64_t bytes = sm100_scale_bytes(rows, k), count = 0;
    uint8_t *used = calloc(bytes, 1);
    assert_non_null(used);
    for (uint32_t row = 0; row < sm100_stripes(rows) * 128; row++)
        for (uint32_t group = 0; group < blocks * 4; group++, count++) {
            uint64_t offset = sm100_scale_offset(row, group, blocks);
            assert_true(offset < bytes);
            assert_int_equal(used[offset], 0);
            used[offset] = 1;
        }
    assert_int_equal(count, bytes);
    free(used);
}

static void bijection(void **state) {
    (void)state;
    const uint32_t columns[] = {16, 48, 192, 7168}, rows[] = {1, 33, 127, 128, 129, 384};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) check_bijection(rows[j], columns[i]);
}

/* Published failures: rows not padded to 128, groups not padded to 4. Numbers by hand. */
static void padding_by_hand(void **state) {
    (void)state;
    const struct {
        uint32_t row, group, offset;
    } at[] = {{0, 0, 0},   {0, 5, 513},   {1, 0, 16},     {32, 0, 4},
              {33, 0, 20}, {127, 0, 508}, {128, 0, 1024}, {129, 5, 1553}};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        assert_int_equal(sm100_scale_offset(at[i].row, at[i].group, sm100_blocks_along_k(96)), at[i].offset);
    const uint32_t rows[] = {1, 5, 127, 128, 129}, bytes[] = {1024, 1024, 1024, 1024, 2048};
    for (size_t i = 0; i < 5; i++) assert_int_equal(sm100_scale_bytes(rows[i], 96), bytes[i]);
}

/* Sizes that others published as failing (CASES.md, C3; the last eight, C5, are slices of an intermediate size). By
 * hand: blocks of 64 values, bytes of the scales of up to 128 rows, bytes from a row of codes to the next. */
static void published_sizes(void **state) {
    (void)state;
    const struct {
        uint32_t k, blocks, stripe_bytes, row_bytes;
    } sizes[] = {{64, 1, 512, 32},        {80, 2, 1024, 48},   {96, 2, 1024, 48},   {160, 3, 1536, 80},
                 {2880, 45, 23040, 1440}, {240, 4, 2048, 128}, {352, 6, 3072, 176}, {720, 12, 6144, 368},
                 {672, 11, 5632, 336},    {192, 3, 1536, 96},  {384, 6, 3072, 192}, {224, 4, 2048, 112},
                 {80, 2, 1024, 48}};
    const uint32_t rows[] = {1, 5, 31, 32, 33, 127, 128, 129}, stripes[] = {1, 1, 1, 1, 1, 1, 1, 2};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert_int_equal(sm100_blocks_along_k(sizes[i].k), sizes[i].blocks);
        assert_int_equal(sm100_code_row_bytes(sizes[i].k), sizes[i].row_bytes);
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            uint32_t row = rows[j] - 1, group = sizes[i].k / 16 - 1;
            assert_int_equal(sm100_scale_bytes(rows[j], sizes[i].k), stripes[j] * sizes[i].stripe_bytes);
            assert_int_equal(sm100_scale_offset(row, group, sizes[i].blocks),
                             (row / 128 * sizes[i].blocks + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
                                 group % 4);
            check_bijection(rows[j], sizes[i].k);
        }
    }
}

/* Far beyond 32 bits: the last byte of 385 experts of 2 x 3072 rows and K = 7168 is where 64-bit arithmetic
 * puts it. */
static void no_overflow(void **state) {
    (void)state;
    uint32_t rows = 385u * 6144u * 8u;
    assert_int_equal(sm100_scale_offset(rows - 1, 447, 112), (uint64_t)(rows / 128) * 112 * 512 - 1);
}

static void code_rows(void **state) {
    (void)state;
    assert_int_equal(sm100_code_row_bytes(7168), 3584);
    assert_int_equal(sm100_code_row_bytes(80), 48);
    assert_int_equal(sm100_code_row_bytes(16), 16);
}

/* The bound holds for every way of spreading the rows, and is reached. */
static void stripes_bound(void **state) {
    (void)state;
    for (uint32_t a = 0; a < 300; a += 7)
        for (uint32_t b = 0; b < 300; b += 5)
            assert_true(sm100_stripes(a) + sm100_stripes(b) <= sm100_stripes_max(a + b, 2));
    assert_int_equal(sm100_stripes(129) + sm100_stripes(128), sm100_stripes_max(257, 1));
    assert_int_equal(sm100_stripes_max(0, 5), 0);
    assert_int_equal(sm100_stripes_max(3, 5), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_tables),   cmocka_unit_test(bijection),   cmocka_unit_test(padding_by_hand),
        cmocka_unit_test(published_sizes), cmocka_unit_test(no_overflow), cmocka_unit_test(code_rows),
        cmocka_unit_test(stripes_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
