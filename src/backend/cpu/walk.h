/*
 * A GEMM that takes the weights through registers, written once for every vector width and kind of operand:
 * blocks of 256 columns of a few matrix rows times a few operand rows. A level file defines before it includes
 * this:
 *
 *     walk_sum                            fp32 sums in 16 lanes
 *     walk_zero, walk_reduce
 *     walk_block                          a block; see its call in walk_rows
 *     walk_nan_scales                     whether there is a NaN among a row's scales, which walk_block does not see
 *     WALK_ROWS_FEW, WALK_ROWS_MANY       matrix rows side by side for up to two operand rows, for more
 *     WALK_OPERANDS                       operand rows side by side, at most 4
 *
 * The order of summation of one (operand, row) pair depends on neither how many there are nor on how many go
 * side by side.
 */
#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"
#include "numerics/e8m0.h"

enum {
    WALK_COLUMNS = 256,           /* of a block */
    WALK_AHEAD_BYTES = 12288,     /* how far before the walk codes are prefetched: measured */
    WALK_SCALE_COLUMNS = 32,      /* that an FP8 scale covers at least */
    WALK_FP8_COLUMNS_MAX = 65536, /* of a matrix, for its scales to fit the scratch */
};
_Static_assert(MM_OPERAND_PAD % WALK_COLUMNS == 0, "operand rows are whole blocks");

/* The scratch of one call. */
typedef struct walk_scratch {
    float fp8_scales[MM_ROWS_MAX][WALK_FP8_COLUMNS_MAX / WALK_SCALE_COLUMNS];
    float units[MM_ROWS_MAX]; /* of the sums of a matrix row; NaN if one of its scales is */
} walk_scratch;
_Static_assert(sizeof(walk_scratch) <= MM_PANEL_BYTES, "the scratch of a thread suffices");

/* Bytes of a block of a matrix row: of codes, and of scales (FP8: as in walk_scratch). */
MM_TEMPLATE size_t walk_code_bytes(const mm_format format) {
    return format == MM_BF16 ? 512 : format == MM_FP8 ? 256 : 128;
}
MM_TEMPLATE size_t walk_scale_bytes(const mm_format format) {
    return format == MM_NVFP4 ? 16 : format == MM_MXFP4 ? 8 : format == MM_FP8 ? 32 : 0;
}

/* Bytes of a block of an operand row; `planes` as in planes.h, 0: BF16. */
MM_TEMPLATE size_t walk_operand_bytes(const unsigned planes) {
    return planes == 0 ? 512 : planes == 1 ? 384 : 896;
}
MM_TEMPLATE const uint8_t *walk_operand(const mm_gemm *g, uint32_t r, const unsigned planes) {
    if (!g->packed) return g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r);
    unsigned per_value = planes == 3 ? 4 : 2;
    return g->packed + r / MM_PACK_ROWS * packed_block_bytes(g->matrix->columns, per_value) +
           r % MM_PACK_ROWS * padded_columns(g->matrix->columns) * per_value;
}

/*
 * Prefetches into L2 what rows further down hold at the same place: rows are only kilobytes long, so the hardware
 * would start anew with each, and L1 cannot wait for as many lines at a time as memory can deliver.
 */
MM_TEMPLATE void walk_prefetch(const mm_matrix *m, const uint8_t *const *codes, const uint8_t *const *scales,
                               size_t block, size_t down, const unsigned rows, const mm_format format,
                               const unsigned planes) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        const char *at = (const char *)codes[i];
        MM_UNROLL for (unsigned line = 0; line < walk_code_bytes(format); line += 64) {
            _mm_prefetch(at + down * m->row_bytes + line, _MM_HINT_T1);
            if (planes > 0) _mm_prefetch(at + 512 + line, _MM_HINT_T0); /* from L2 by now; BF16 has no time for it */
        }
    }
    if (format != MM_BF16 && format != MM_FP8 && block * walk_scale_bytes(format) % 64 == 0)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            _mm_prefetch((const char *)scales[i] + down * m->scale_row_bytes, _MM_HINT_T1);
}

/* The last columns of a row are fewer than a block: copied, so that nothing behind them is read. */
MM_TEMPLATE void walk_tail(const mm_gemm *g, const uint8_t *const *codes, const uint8_t *const *scales,
                           const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                           const unsigned operand_count, const mm_format format, const unsigned planes) {
    uint8_t codes_copy[4][512] = {{0}}, scales_copy[4][32] = {{0}};
    const uint8_t *codes_at[4], *scales_at[4];
    size_t columns = g->matrix->columns % WALK_COLUMNS, scale_bytes = walk_scale_bytes(format);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        codes_at[i] = memcpy(codes_copy[i], codes[i], walk_code_bytes(format) * columns / WALK_COLUMNS);
        scales_at[i] = scales_copy[i];
        if (format == MM_FP8)
            memcpy(scales_copy[i], scales[i], scale_bytes);
        else if (format != MM_BF16)
            memcpy(scales_copy[i], scales[i], scale_bytes * columns / WALK_COLUMNS);
    }
    walk_block(g, codes_at, scales_at, operands, sums, rows, operand_count, format, planes);
}

/* `rows` matrix rows from `row` of the call on, times `operand_count` operand rows from `first` on. */
MM_TEMPLATE void walk_rows(const mm_gemm *g, uint32_t row, uint32_t first, const unsigned rows,
                           const unsigned operand_count, const mm_format format, const unsigned planes) {
    const mm_matrix *m = g->matrix;
    const walk_scratch *scratch = g->panel;
    size_t down = 4 * ((WALK_AHEAD_BYTES / 4 + m->row_bytes - 1) / m->row_bytes);
    const uint8_t *codes[4], *scales[4], *operands[4];
    walk_sum sums[4][4];
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        codes[i] = m->codes + (g->row_first + row + i) * m->row_bytes;
        scales[i] = format == MM_BF16  ? NULL
                    : format == MM_FP8 ? (const uint8_t *)scratch->fp8_scales[row + i]
                                       : m->scales + (g->row_first + row + i) * m->scale_row_bytes;
        MM_UNROLL for (unsigned j = 0; j < operand_count; j++) sums[i][j] = walk_zero();
    }
    MM_UNROLL for (unsigned j = 0; j < operand_count; j++) operands[j] = walk_operand(g, first + j, planes);
    for (size_t b = 0; b < m->columns / WALK_COLUMNS; b++) {
        walk_prefetch(m, codes, scales, b, down, rows, format, planes);
        walk_block(g, codes, scales, operands, sums, rows, operand_count, format, planes);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) {
            codes[i] += walk_code_bytes(format);
            if (format != MM_BF16) scales[i] += walk_scale_bytes(format);
        }
        MM_UNROLL for (unsigned j = 0; j < operand_count; j++) operands[j] += walk_operand_bytes(planes);
    }
    if (m->columns % WALK_COLUMNS) walk_tail(g, codes, scales, operands, sums, rows, operand_count, format, planes);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) MM_UNROLL for (unsigned j = 0; j < operand_count; j++)
        g->sums[(first + j) * g->sums_pitch + row + i] = walk_reduce(sums[i][j]) * scratch->units[row + i];
}

/* Operand rows first .. first + operand_count times all matrix rows of the call. */
MM_TEMPLATE void walk_operands(const mm_gemm *g, uint32_t first, const unsigned operand_count, const mm_format format,
                               const unsigned planes) {
    const unsigned side_by_side = operand_count > 2 ? WALK_ROWS_MANY : WALK_ROWS_FEW;
    uint32_t row = 0;
    for (; row + side_by_side <= g->row_count; row += side_by_side)
        walk_rows(g, row, first, side_by_side, operand_count, format, planes);
    for (; row < g->row_count; row++) walk_rows(g, row, first, 1, operand_count, format, planes);
}

/* Row i of the call: FP8 scales, one for every 32 columns. */
static void walk_fp8_scales(const mm_gemm *g, uint32_t i) {
    const mm_matrix *m = g->matrix;
    const uint8_t *row = m->scales + (g->row_first + i) / m->block_rows * m->scale_row_bytes;
    walk_scratch *scratch = g->panel;
    float *to = scratch->fp8_scales[i];
    size_t count = padded_columns(m->columns) / WALK_SCALE_COLUMNS;
    if (i > 0 && (g->row_first + i) % m->block_rows != 0) { /* the block goes on */
        memcpy(to, scratch->fp8_scales[i - 1], count * sizeof *to);
        return;
    }
    for (size_t c = 0; c < count; c++) {
        size_t block = c * WALK_SCALE_COLUMNS / m->block_columns;
        if (c * WALK_SCALE_COLUMNS >= m->columns)
            to[c] = 0.0f;
        else if (m->scale_dtype == MEGAMOE_E8M0)
            to[c] = mm_e8m0_to_f32(row[block]);
        else
            memcpy(&to[c], row + block * sizeof to[c], sizeof to[c]);
    }
}

/* Decoded E4M3 scales of four-bit weights are 2^-8 of what they mean. */
static float walk_unit(const mm_matrix *m, uint32_t n) {
    unsigned group_shift = m->format == MM_NVFP4 ? 4 : 5;
    if (m->format != MM_NVFP4 && m->format != MM_MXFP4) return 1.0f;
    if (walk_nan_scales(m->scales + n * m->scale_row_bytes, m->columns >> group_shift, group_shift)) return NAN;
    return m->format == MM_NVFP4 ? 256.0f : 1.0f;
}

/* All operand rows, up to WALK_OPERANDS (three planes: two) at a time. */
MM_TEMPLATE void walk_gemm(const mm_gemm *g, const mm_format format, const unsigned planes) {
    const uint32_t most = planes == 3 && WALK_OPERANDS > 2 ? 2 : WALK_OPERANDS;
    for (uint32_t i = 0; i < g->row_count; i++) {
        ((walk_scratch *)g->panel)->units[i] = walk_unit(g->matrix, g->row_first + i);
        if (format == MM_FP8) walk_fp8_scales(g, i);
    }
    for (uint32_t r = 0, count; r < g->count; r += count) {
        count = g->count - r < most ? g->count - r : most;
        if (count == 1)
            walk_operands(g, r, 1, format, planes);
        else if (count == 2)
            walk_operands(g, r, 2, format, planes);
        else if (most > 2 && count == 3)
            walk_operands(g, r, 3, format, planes);
        else if (most > 2)
            walk_operands(g, r, 4, format, planes);
    }
}
