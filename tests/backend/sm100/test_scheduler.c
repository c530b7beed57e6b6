/* The list of tiles: each product of a weight row and a token is in exactly one tile, whatever the groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "backend/sm100/tiles.h"

static uint32_t next_random(uint32_t *state) {
    return *state = *state * 1664525u + 1013904223u, *state >> 16;
}

/* The rules of one tile that the kernel relies on. */
static void check_work(struct sm100_tile t, const struct sm100_work *work, const int32_t *ends) {
    uint32_t first = work->group ? (uint32_t)ends[work->group - 1] : 0, end = (uint32_t)ends[work->group];
    assert_true(work->rows >= 1 && work->rows <= work->n && work->n <= t.n_max);
    assert_int_equal(work->n % (8 * t.cta_group), 0);
    assert_true(work->n - work->rows < 8 * t.cta_group);
    assert_int_equal(work->row, first + work->row_in_group);
    assert_true(work->row + work->rows <= end);
    assert_int_equal(work->row_in_group % 32, 0); /* a column of token scales has 32 rows */
    assert_true(sm100_work_stripes(work) <= t.token_stripes);
}

/* All workers together visit every (feature tile, token) of every group once. */
static void check_cover(struct sm100_tile t, const int32_t *ends, uint32_t groups, uint32_t m_rows, uint32_t workers) {
    struct sm100_schedule schedule = sm100_tile_schedule(t, ends, groups, m_rows);
    uint32_t rows = groups ? (uint32_t)ends[groups - 1] : 0, visited = 0;
    uint8_t *seen = calloc((size_t)schedule.m_tiles * (rows + 1), 1);
    assert_non_null(seen);
    for (uint32_t worker = 0; worker < workers; worker++) {
        struct sm100_cursor cursor = {0, 0, 0, 0};
        struct sm100_work work;
        for (uint32_t index = worker; sm100_schedule_find(&schedule, &cursor, index, &work); index += workers) {
            uint32_t stripe = 0;
            check_work(t, &work, ends);
            for (uint32_t g = 0; g < work.group; g++)
                stripe += sm100_stripes((uint32_t)(ends[g] - (g ? ends[g - 1] : 0)));
            assert_int_equal(work.first_stripe, stripe);
            for (uint32_t i = 0; i < work.rows; i++, visited++) {
                uint8_t *place = &seen[(size_t)work.m_tile * rows + work.row + i];
                assert_int_equal(*place, 0);
                *place = 1;
            }
        }
    }
    assert_int_equal(visited, rows * schedule.m_tiles);
    free(seen);
}

static void check_all_tiles(const int32_t *ends, uint32_t groups) {
    const uint32_t workers[] = {1, 2, 3, 66, 148};
    for (uint32_t tile = 0; tile < SM100_TILE_COUNT; tile++)
        for (size_t i = 0; i < sizeof workers / sizeof *workers; i++)
            check_cover(sm100_tiles[tile], ends, groups, 400, workers[i]);
}

static void every_count_of_one_group(void **state) {
    (void)state;
    for (int32_t rows = 0; rows <= 1100; rows += rows < 300 ? 1 : 37) check_all_tiles(&rows, 1);
}

static void ragged_groups(void **state) {
    (void)state;
    uint32_t random = 7;
    for (int round = 0; round < 40; round++) {
        int32_t ends[24], end = 0;
        uint32_t spread = 1u << next_random(&random) % 10;
        for (int g = 0; g < 24; g++) {
            if (next_random(&random) % 3) end += (int32_t)(next_random(&random) % spread);
            ends[g] = end;
        }
        check_all_tiles(ends, 24);
    }
}

static void edges(void **state) {
    (void)state;
    const int32_t none[3] = {0, 0, 0}, last_only[3] = {0, 0, 77}, first_only[3] = {513, 513, 513};
    check_all_tiles(none, 3);
    check_all_tiles(last_only, 3);
    check_all_tiles(first_only, 3);
    check_all_tiles(NULL, 0);
}

/* Tiles of a group differ by less than a step: no expert ends in a sliver that reads all the weights again.
 */
static void tiles_are_balanced(void **state) {
    (void)state;
    for (uint32_t tile = 0; tile < SM100_TILE_COUNT; tile++)
        for (uint32_t rows = 1; rows < 2000; rows++) {
            struct sm100_schedule schedule = sm100_tile_schedule(sm100_tiles[tile], NULL, 0, 128);
            uint32_t n = sm100_tile_rows(&schedule, rows), fewest = (rows + schedule.n_max - 1) / schedule.n_max;
            assert_true(n <= schedule.n_max);
            assert_int_equal((rows + n - 1) / n, fewest);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_count_of_one_group),
        cmocka_unit_test(ragged_groups),
        cmocka_unit_test(edges),
        cmocka_unit_test(tiles_are_balanced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
