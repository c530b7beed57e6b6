/*
 * The GEMM over a panel, written once for every vector width. A level file defines before it includes this:
 *
 *     tile_element, tile_vector, tile_sum   an operand value; a vector of them; a vector of fp32 sums
 *     TILE_COLUMNS                          values in a tile_vector
 *     TILE_ROWS, TILE_OPERANDS              sums that fit the registers, with the vectors they are made of
 *     TILE_SEGMENT                          columns of a panel: 16 rows of it stay in L1
 *     tile_scales_sums                      whether FP8 scales of this matrix are applied to sums, not in the panel
 *     tile_zero, tile_load_sum, tile_store_sum, tile_load, tile_multiply, tile_scale, tile_reduce
 *
 * Columns are taken a segment at a time: its weights are dequantized into the panel and multiplied with all
 * operands of a block, whose sums wait between segments as vectors. The order of summation of one (operand,
 * row) pair depends on neither how many there are nor on the shape of the tile.
 */
#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

static inline const tile_element *operand_row(const mm_gemm *g, uint32_t r) {
    return (const tile_element *)(g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r));
}

enum {
    PANEL_PITCH = TILE_SEGMENT + 64 / sizeof(tile_element), /* one line more spreads rows over the sets of a cache */
    SUM_LANES = sizeof(tile_sum) / sizeof(float),
    BLOCK_OPERANDS = 96, /* sums of a block, like its operands, stay in L2 */
};

/* The scratch of one call. */
typedef struct tile_panel {
    _Alignas(64) tile_element weights[MM_ROWS_MAX][PANEL_PITCH];
    _Alignas(64) float sums[BLOCK_OPERANDS][MM_ROWS_MAX][SUM_LANES];
} tile_panel;
_Static_assert(sizeof(tile_panel) <= MM_PANEL_BYTES, "the panel fits the scratch of a thread");

/* Part of a call's columns: one block of FP8 scales at most, so that scales apply to its sums. */
typedef struct tile_segment {
    uint32_t begin, end;
    bool scaled;
    float scales[MM_ROWS_MAX];
} tile_segment;

/* TILE_ROWS panel rows from `row` on times `operands` operand rows, whose sums are `sums`. */
MM_TEMPLATE void tile(const tile_panel *panel, uint32_t row, const tile_segment *segment, const tile_element *const *a,
                      float (*lanes)[MM_ROWS_MAX][SUM_LANES], const unsigned operands) {
    tile_sum sums[TILE_ROWS][TILE_OPERANDS];
    const tile_element *weights = panel->weights[row];
    bool first = segment->begin == 0, resume = !first && !segment->scaled;
    MM_UNROLL for (unsigned i = 0; i < TILE_ROWS; i++) MM_UNROLL for (unsigned j = 0; j < operands; j++) sums[i][j] =
        resume ? tile_load_sum(lanes[j][row + i]) : tile_zero();
    for (size_t k = 0; k < segment->end - segment->begin; k += TILE_COLUMNS) {
        tile_vector w[TILE_ROWS];
        MM_UNROLL for (unsigned i = 0; i < TILE_ROWS; i++) w[i] = tile_load(weights + i * PANEL_PITCH + k);
        MM_UNROLL for (unsigned j = 0; j < operands; j++) {
            tile_vector x = tile_load(a[j] + k);
            MM_UNROLL for (unsigned i = 0; i < TILE_ROWS; i++) sums[i][j] = tile_multiply(sums[i][j], x, w[i]);
        }
    }
    MM_UNROLL for (unsigned i = 0; i < TILE_ROWS; i++) MM_UNROLL for (unsigned j = 0; j < operands; j++) {
        if (segment->scaled)
            sums[i][j] = tile_scale(sums[i][j], segment->scales[row + i],
                                    first ? tile_zero() : tile_load_sum(lanes[j][row + i]));
        tile_store_sum(lanes[j][row + i], sums[i][j]);
    }
}

/* All panel rows times operand rows first .. first + operands of the call. */
MM_TEMPLATE void tile_column(const mm_gemm *g, const tile_segment *segment, uint32_t first,
                             float (*lanes)[MM_ROWS_MAX][SUM_LANES], const unsigned operands) {
    const tile_element *a[TILE_OPERANDS];
    MM_UNROLL for (unsigned j = 0; j < operands; j++) a[j] = operand_row(g, first + j) + segment->begin;
    for (uint32_t row = 0; row < g->row_count; row += TILE_ROWS) tile(g->panel, row, segment, a, lanes, operands);
}

/* Operand rows are shared out evenly, so that 7 of them are 4 + 3 and not 6 + 1. */
static void tile_block(const mm_gemm *g, const tile_segment *segment, uint32_t first, uint32_t count) {
    tile_panel *panel = g->panel;
    uint32_t passes = (count + TILE_OPERANDS - 1) / TILE_OPERANDS;
    for (uint32_t pass = 0; pass < passes; pass++) {
        uint32_t begin = count * pass / passes, end = count * (pass + 1) / passes;
        float(*lanes)[MM_ROWS_MAX][SUM_LANES] = panel->sums + begin;
        switch (end - begin) {
        case 1: tile_column(g, segment, first + begin, lanes, 1); break;
        case 2: tile_column(g, segment, first + begin, lanes, 2); break;
        case 3: tile_column(g, segment, first + begin, lanes, 3); break;
        case 4: tile_column(g, segment, first + begin, lanes, 4); break;
        case 5: tile_column(g, segment, first + begin, lanes, 5); break;
        default: tile_column(g, segment, first + begin, lanes, 6); break;
        }
    }
}
_Static_assert(TILE_OPERANDS == 6, "the switch has a tile for every number of operands");

static void reduce_block(const mm_gemm *g, uint32_t first, uint32_t count) {
    const tile_panel *panel = g->panel;
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t i = 0; i < g->row_count; i++)
            g->sums[(first + r) * g->sums_pitch + i] = tile_reduce(tile_load_sum(panel->sums[r][i]));
}

/* The segment that begins at column k, with its FP8 scales. */
static tile_segment segment_at(const mm_gemm *g, uint32_t columns, uint32_t k) {
    const mm_matrix *m = g->matrix;
    tile_segment s = {.begin = k, .end = columns - k < TILE_SEGMENT ? columns : k + TILE_SEGMENT};
    s.scaled = m && m->format == MM_FP8 && tile_scales_sums(m);
    if (!s.scaled) return s;
    uint32_t block = k / m->block_columns;
    if (s.end - block * m->block_columns > m->block_columns) s.end = (block + 1) * m->block_columns;
    for (uint32_t i = 0; i < MM_ROWS_MAX; i++) {
        uint32_t n = g->row_first + (i < g->row_count ? i : 0);
        const uint8_t *row = m->scales + n / m->block_rows * m->scale_row_bytes;
        memcpy(&s.scales[i], row + block * sizeof(float), sizeof(float));
    }
    return s;
}

/* fill(g, segment, panel) dequantizes the call's rows; NULL leaves the panel as it is, to time the tiles
 * alone. */
MM_TEMPLATE void tiled_gemm(const mm_gemm *g, const void *weights, uint32_t columns,
                            void (*fill)(const mm_gemm *g, const void *weights, const tile_segment *segment)) {
    for (uint32_t first = 0; first < g->count; first += BLOCK_OPERANDS) {
        uint32_t count = g->count - first < BLOCK_OPERANDS ? g->count - first : BLOCK_OPERANDS;
        for (uint32_t k = 0; k < columns;) {
            tile_segment segment = segment_at(g, columns, k);
            if (fill) fill(g, weights, &segment);
            tile_block(g, &segment, first, count);
            k = segment.end;
        }
        reduce_block(g, first, count);
    }
}
