/*
 * A few packed operand rows times four-bit weights, for every vector width. A level file defines before it
 * includes this:
 *
 *     plane_weights, plane_sum     256 columns of a weight row, decoded; fp32 sums in 16 lanes
 *     plane_zero, plane_decode, plane_multiply, plane_reduce
 *     plane_nan_scales             whether a row has a NaN among its scales, which plane_decode does not see
 *     WALK_ROWS, WALK_OPERANDS     weight rows, and operand rows of one plane, side by side
 */
#include "backend/cpu/planes.h"
#include "backend/cpu/unroll.h"

#define AHEAD_BYTES 3072u /* how far before the walk codes are prefetched, per row: measured */

#define BLOCK_BYTES (PLANE_COLUMNS / 2) /* of codes */

typedef struct walk {
    const uint8_t *codes[4], *scales[4];
    const plane_columns *operands[4];
    plane_sum sums[4][4];
} walk;

/*
 * Prefetches into L2 what the rows `distance` further down hold at the same place. Rows are only kilobytes
 * long: the hardware would start anew with each, and L1 cannot wait for as many lines at a time as memory can
 * deliver.
 */
MM_TEMPLATE void prefetch_rows(const mm_matrix *m, const walk *w, size_t at, size_t distance, const unsigned rows) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        _mm_prefetch((const char *)w->codes[i] + distance * m->row_bytes + at, _MM_HINT_T1);
        _mm_prefetch((const char *)w->codes[i] + distance * m->row_bytes + at + 64, _MM_HINT_T1);
        _mm_prefetch((const char *)w->codes[i] + at + 512, _MM_HINT_T0); /* from L2 by now */
        _mm_prefetch((const char *)w->codes[i] + at + 576, _MM_HINT_T0);
    }
    if (at % 512 == 0)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            _mm_prefetch((const char *)w->scales[i] + distance * m->scale_row_bytes + at / 8, _MM_HINT_T1);
}

static inline const plane_operand *operand_at(const mm_gemm *g, uint32_t r) {
    return plane_row((uint8_t *)(uintptr_t)g->packed, g->matrix->columns, r);
}

/* Block `b` of a weight row times the operands; `planes` of theirs are not all zero. */
MM_TEMPLATE void walk_block(walk *w, size_t b, unsigned row, const uint8_t *codes, const uint8_t *scales,
                            const unsigned operands, const unsigned planes, const unsigned group_shift) {
    plane_weights weights = plane_decode(codes, scales, group_shift);
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w->sums[row][j] =
        plane_multiply(&weights, w->operands[j] + b, planes, w->sums[row][j]);
}

/* The last columns of a row are fewer than a block: copied, so that nothing behind them is read. */
MM_TEMPLATE void walk_tail(walk *w, size_t b, unsigned row, size_t bytes, const unsigned operands,
                           const unsigned planes, const unsigned group_shift) {
    uint8_t codes[BLOCK_BYTES] = {0}, scales[16] = {0};
    memcpy(codes, w->codes[row] + BLOCK_BYTES * b, bytes);
    memcpy(scales, w->scales[row] + (BLOCK_BYTES * b >> (group_shift - 1)), bytes >> (group_shift - 1));
    walk_block(w, b, row, codes, scales, operands, planes, group_shift);
}

/* `rows` weight rows from `row` of the call on, times `operands` packed operand rows from `first` on. */
MM_TEMPLATE void walk_rows(const mm_gemm *g, uint32_t row, uint32_t first, const unsigned rows, const unsigned operands,
                           const unsigned planes, const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    size_t bytes = m->columns / 2, blocks = bytes / BLOCK_BYTES, distance = rows * ((AHEAD_BYTES + bytes - 1) / bytes);
    walk w;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        w.codes[i] = m->codes + (g->row_first + row + i) * m->row_bytes;
        w.scales[i] = m->scales + (g->row_first + row + i) * m->scale_row_bytes;
        MM_UNROLL for (unsigned j = 0; j < operands; j++) w.sums[i][j] = plane_zero();
    }
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w.operands[j] = operand_at(g, first + j)->blocks;
    for (size_t b = 0; b < blocks; b++) {
        size_t at = BLOCK_BYTES * b;
        prefetch_rows(m, &w, at, distance, rows);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) walk_block(
            &w, b, i, w.codes[i] + at, w.scales[i] + (at >> (group_shift - 1)), operands, planes, group_shift);
    }
    if (bytes % BLOCK_BYTES)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            walk_tail(&w, blocks, i, bytes % BLOCK_BYTES, operands, planes, group_shift);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        float unit = group_shift == 4 ? 256.0f : 1.0f; /* of the decoded scales */
        if (plane_nan_scales(w.scales[i], m->columns >> group_shift, group_shift)) unit = NAN;
        MM_UNROLL for (unsigned j = 0; j < operands; j++) g->sums[(first + j) * g->sums_pitch + row + i] =
            plane_reduce(w.sums[i][j]) * unit;
    }
}

MM_TEMPLATE void walk_operands(const mm_gemm *g, uint32_t first, const unsigned operands, const unsigned planes,
                               const unsigned group_shift) {
    uint32_t row = 0;
    for (; row + WALK_ROWS <= g->row_count; row += WALK_ROWS)
        walk_rows(g, row, first, WALK_ROWS, operands, planes, group_shift);
    for (; row < g->row_count; row++) walk_rows(g, row, first, 1, operands, planes, group_shift);
}

MM_TEMPLATE void walk_shift(const mm_gemm *g, uint32_t first, const unsigned operands, const unsigned planes) {
    if (g->matrix->format == MM_NVFP4)
        walk_operands(g, first, operands, planes, 4);
    else
        walk_operands(g, first, operands, planes, 5);
}

/* Operand rows r .. r + count of one plane, or up to two of three: the sums and the weights fit the registers. */
static void walk_some(const mm_gemm *g, uint32_t r, uint32_t count, bool single) {
    if (count == 1)
        single ? walk_shift(g, r, 1, 1) : walk_shift(g, r, 1, 3);
    else if (count == 2)
        single ? walk_shift(g, r, 2, 1) : walk_shift(g, r, 2, 3);
    else if (WALK_OPERANDS > 2 && count == 3)
        walk_shift(g, r, 3, 1);
    else if (WALK_OPERANDS > 2)
        walk_shift(g, r, 4, 1);
}

/* A plane that is all zero changes no sum, so a row's bits do not depend on the rows beside it. */
static void walk_all(const mm_gemm *g) {
    for (uint32_t r = 0, count; r < g->count; r += count) {
        bool single = true;
        for (uint32_t i = r; i < g->count && i < r + WALK_OPERANDS; i++) single &= operand_at(g, i)->planes == 1;
        uint32_t most = single ? WALK_OPERANDS : 2;
        count = g->count - r < most ? g->count - r : most;
        walk_some(g, r, count, single);
    }
}
