/*
 * Which tile comes next: ragged tokens x stacked experts, cut into tiles without any table in memory.
 *
 * The tokens of group g are rows ends[g-1] .. ends[g]. Each group's tokens are cut into equal tiles of at
 * most n_max rows, its output features into m_tiles tiles; the token tile is the faster index, so that CTAs
 * that run at the same time read the same weights. Every worker (a CTA or a pair) takes tiles first, first +
 * stride, ... and every role of a CTA walks the same list by itself: there is nothing to hand over, and
 * nothing that depends on timing. Host and device run the same code; the host tests it.
 */
#ifndef MM_SM100_SCHEDULER_H
#define MM_SM100_SCHEDULER_H

#include "backend/sm100/layout.h"

struct sm100_schedule {
    const int32_t *ends; /* [group_count] cumulative ends of the groups' rows; empty groups are legal */
    uint32_t group_count, m_tiles;
    uint32_t n_max;  /* rows of the largest tile */
    uint32_t n_step; /* where a group has several tiles, their rows are a multiple of this */
    uint32_t n_unit; /* rows of any tile are rounded up to this: 8, or 16 for a pair */
};

/* A place in the list of tiles; it only moves forward. All zero at the beginning. */
struct sm100_cursor {
    uint32_t group, group_first_tile, group_first_row, group_first_stripe;
};

struct sm100_work {
    uint32_t group, m_tile;
    uint32_t row;          /* first token row */
    uint32_t row_in_group; /* the same, counted from the group's first */
    uint32_t rows;         /* tokens in the tile, at least 1 */
    uint32_t n;            /* rows rounded up to the unit: the N of the instruction */
    uint32_t first_stripe; /* of the group's token scales */
};

/* Rows per token tile of a group of `rows` tokens: as equal as the steps allow, so that no tile is a
 * leftover. */
MM_HD uint32_t sm100_tile_rows(const struct sm100_schedule *schedule, uint32_t rows) {
    uint32_t tiles = (rows + schedule->n_max - 1) / schedule->n_max;
    if (tiles <= 1) return sm100_round_up(rows, schedule->n_unit);
    return sm100_round_up((rows + tiles - 1) / tiles, schedule->n_step);
}

/* The tile with this index, or 0 past the last. Indices must not decrease from call to call of one cursor. */
MM_HD int sm100_schedule_find(const struct sm100_schedule *schedule, struct sm100_cursor *cursor, uint32_t index,
                              struct sm100_work *work) {
    for (; cursor->group < schedule->group_count; cursor->group++) {
        uint32_t end = (uint32_t)schedule->ends[cursor->group];
        uint32_t rows = end - cursor->group_first_row, n = sm100_tile_rows(schedule, rows);
        uint32_t token_tiles = rows ? (rows + n - 1) / n : 0, tiles = token_tiles * schedule->m_tiles;
        uint32_t local = index - cursor->group_first_tile;
        if (local < tiles) {
            work->group = cursor->group;
            work->m_tile = local / token_tiles;
            work->row_in_group = local % token_tiles * n;
            work->row = cursor->group_first_row + work->row_in_group;
            work->rows = rows - work->row_in_group < n ? rows - work->row_in_group : n;
            work->n = sm100_round_up(work->rows, schedule->n_unit);
            work->first_stripe = cursor->group_first_stripe;
            return 1;
        }
        cursor->group_first_tile += tiles;
        cursor->group_first_row = end;
        cursor->group_first_stripe += sm100_stripes(rows);
    }
    return 0;
}

/* Stripes of token scales that a tile touches. */
MM_HD uint32_t sm100_work_stripes(const struct sm100_work *work) {
    return (work->row_in_group % SM100_STRIPE_ROWS + work->rows + SM100_STRIPE_ROWS - 1) / SM100_STRIPE_ROWS;
}

#endif
