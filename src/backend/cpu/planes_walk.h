/*
 * A few packed operand rows times four-bit weights, for every vector width. A level file defines before it
 * includes this:
 *
 *     plane_weights, plane_sum   128 columns of a weight row, decoded; fp32 sums in 16 lanes, 8 columns to a
 * lane plane_zero, plane_decode, plane_multiply, plane_reduce
 */
#include "backend/cpu/planes.h"
#include "backend/cpu/unroll.h"

#define AHEAD_BYTES 3072u /* how far before the walk codes are prefetched, per row: measured */

/* Weight rows side by side. */
typedef struct walk {
    const uint8_t *codes[4], *scales[4];
    const plane_columns *operands[4];
    plane_sum sums[4][4];
    bool nan[4]; /* a scale of the row is NaN, which the decoders do not see */
} walk;

/*
 * Prefetches into L2 what the rows `distance` further down hold at the same place. Rows are only kilobytes
 * long: the hardware would start anew with each, and L1 cannot wait for as many lines at a time as memory can
 * deliver.
 */
MM_TEMPLATE void prefetch_rows(const mm_matrix *m, const walk *w, size_t at, size_t distance, const unsigned rows) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++)
        _mm_prefetch((const char *)w->codes[i] + distance * m->row_bytes + at, _MM_HINT_T1);
    if (at % 512 == 0)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            _mm_prefetch((const char *)w->scales[i] + distance * m->scale_row_bytes + at / 8, _MM_HINT_T1);
}

/* 128 columns: block `b` of the operands. low: the lowest plane is not all zero. */
MM_TEMPLATE void walk_block(walk *w, size_t b, unsigned row, const uint8_t *codes, const uint8_t *scales,
                            const unsigned operands, const bool low, const unsigned group_shift) {
    plane_weights weights = plane_decode(codes, scales, group_shift);
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w->sums[row][j] =
        plane_multiply(&weights, w->operands[j] + b, low, w->sums[row][j]);
}

/* The last columns of a row are fewer than 128: copied, so that nothing behind them is read. */
MM_TEMPLATE void walk_tail(walk *w, size_t b, unsigned row, size_t bytes, const unsigned operands, const bool low,
                           const unsigned group_shift) {
    uint8_t codes[64] = {0}, scales[8] = {0};
    memcpy(codes, w->codes[row] + 64 * b, bytes);
    memcpy(scales, w->scales[row] + (64 * b >> (group_shift - 1)), bytes >> (group_shift - 1));
    walk_block(w, b, row, codes, scales, operands, low, group_shift);
}

/* NaN scales, eight bytes at a time: E4M3 0x7F with either sign carries into its upper bit, E8M0 0xFF is all
 * ones. */
static inline bool has_nan_scale(const uint8_t *scales, size_t count, const unsigned group_shift) {
    const uint64_t ones = 0x0101010101010101;
    uint64_t any = 0;
    for (size_t i = 0; i < count; i += 8) {
        uint64_t word = 0;
        memcpy(&word, scales + i, count - i < 8 ? count - i : 8);
        any |= (group_shift == 4 ? (word & 127 * ones) + ones : (~word - ones) & word) & 128 * ones;
    }
    return any != 0;
}

/* `rows` weight rows from `row` of the call on, times `operands` packed operand rows from `first` on. */
MM_TEMPLATE void walk_rows(const mm_gemm *g, uint32_t row, uint32_t first, const unsigned rows, const unsigned operands,
                           const bool low, const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    size_t bytes = m->columns / 2, blocks = bytes / 64, distance = rows * ((AHEAD_BYTES + bytes - 1) / bytes);
    walk w;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        w.codes[i] = m->codes + (g->row_first + row + i) * m->row_bytes;
        w.scales[i] = m->scales + (g->row_first + row + i) * m->scale_row_bytes;
        w.nan[i] = has_nan_scale(w.scales[i], m->columns >> group_shift, group_shift);
        MM_UNROLL for (unsigned j = 0; j < operands; j++) w.sums[i][j] = plane_zero();
    }
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w.operands[j] =
        (const plane_columns *)g->packed + (first + j) * (padded_columns(m->columns) / 128);
    for (size_t b = 0; b < blocks; b++) {
        prefetch_rows(m, &w, 64 * b, distance, rows);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) walk_block(
            &w, b, i, w.codes[i] + 64 * b, w.scales[i] + (64 * b >> (group_shift - 1)), operands, low, group_shift);
    }
    if (bytes % 64)
        MM_UNROLL for (unsigned i = 0; i < rows; i++) walk_tail(&w, blocks, i, bytes % 64, operands, low, group_shift);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) MM_UNROLL for (unsigned j = 0; j < operands; j++)
        g->sums[(first + j) * g->sums_pitch + row + i] =
        w.nan[i] ? NAN : plane_reduce(w.sums[i][j]) * (group_shift == 4 ? 256.0f : 1.0f);
}

/* Whether any of these operand rows uses its lowest plane. */
static bool uses_low_plane(const mm_gemm *g, uint32_t first, uint32_t count) {
    size_t blocks = padded_columns(g->matrix->columns) / 128;
    const plane_columns *block = (const plane_columns *)g->packed + first * blocks;
    uint64_t any = 0, words[16];
    for (size_t b = 0; b < count * blocks; b++) {
        memcpy(words, block[b].planes[0], sizeof words);
        for (int i = 0; i < 16; i++) any |= words[i];
    }
    return any != 0;
}

MM_TEMPLATE void walk_operands(const mm_gemm *g, uint32_t first, const unsigned operands, const bool low,
                               const unsigned group_shift) {
    uint32_t row = 0;
    for (; row + WALK_ROWS <= g->row_count; row += WALK_ROWS)
        walk_rows(g, row, first, WALK_ROWS, operands, low, group_shift);
    for (; row < g->row_count; row++) walk_rows(g, row, first, 1, operands, low, group_shift);
}

MM_TEMPLATE void walk_shift(const mm_gemm *g, uint32_t first, const unsigned operands, const bool low) {
    if (g->matrix->format == MM_NVFP4)
        walk_operands(g, first, operands, low, 4);
    else
        walk_operands(g, first, operands, low, 5);
}

/* Operand rows in pairs. */
static void walk_all(const mm_gemm *g) {
    for (uint32_t r = 0; r < g->count; r += 2) {
        bool two = g->count - r >= 2, low = uses_low_plane(g, r, two ? 2 : 1);
        if (two && low)
            walk_shift(g, r, 2, true);
        else if (two)
            walk_shift(g, r, 2, false);
        else if (low)
            walk_shift(g, r, 1, true);
        else
            walk_shift(g, r, 1, false);
    }
}
