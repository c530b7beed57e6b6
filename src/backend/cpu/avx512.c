/*
 * AVX-512 with BF16 dot products. Both operands of every product are exact in BF16, and vdpbf16ps keeps fp32
 * sums.
 *
 * One order of summation for all: lane l of 16 fp32 sums takes k = 32 j + 2 l and 2 l + 1 for j = 0, 1, ...;
 * then the lanes are added as a tree. A few rows of operands are multiplied while the weights pass through
 * registers
 * (`direct`); for more of them 16 rows of weights are dequantized once into a panel that stays in L2
 * (`tiles`). Both give the same bits, so the number of rows never shows in a result.
 */
#include <immintrin.h>
#include <stdint.h>

#define DIRECT_OPERANDS 4u /* up to this many operand rows go direct; measured crossover */
#define AHEAD_BYTES 3072u  /* how far before the walk codes are prefetched: measured */

/* ---- tiles: 4 x 6 sums, 4 weights and an operand take 29 of the 32 registers ---- */

typedef uint16_t tile_element;
typedef __m512bh tile_vector;
typedef __m512 tile_sum;
enum { TILE_COLUMNS = 32, TILE_ROWS = 4, TILE_OPERANDS = 6, TILE_SEGMENT = 2048 };

static inline tile_sum tile_zero(void) {
    return _mm512_setzero_ps();
}
static inline tile_sum tile_load_sum(const float *lanes) {
    return _mm512_load_ps(lanes);
}
static inline void tile_store_sum(float *lanes, tile_sum sum) {
    _mm512_store_ps(lanes, sum);
}
static inline tile_vector tile_load(const tile_element *values) {
    return (__m512bh)_mm512_load_si512(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm512_dpbf16_ps(sum, x, w);
}
static inline tile_sum tile_scale(tile_sum sum, float scale, tile_sum before) {
    return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), before);
}

/* Eight sums in one fixed order. */
static inline float sum_lanes(__m256 low, __m256 high) {
    __m256 v = _mm256_add_ps(low, high);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

static inline float tile_reduce(tile_sum sum) {
    return sum_lanes(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
}

#include "backend/cpu/avx512_weights.h"
#include "backend/cpu/tiles.h"

/* ---- four-bit weights ---- */

/* Weight rows and operands side by side, as far as they have been walked. */
typedef struct walk {
    const products *table;
    const uint8_t *codes[4], *scales[4];
    const uint16_t *operands[4];
    __m256 sums[4][4][2]; /* lanes 0 .. 7 and 8 .. 15 */
} walk;

/*
 * Group `group` after byte `at` of the rows' codes (16 columns are 8 bytes; `at` is a multiple of 16 bytes).
 * group_shift is 4 or 5: 16 or 32 columns to a scale.
 */
MM_TEMPLATE void walk_group(walk *w, size_t at, const unsigned group, const unsigned rows,
                            const unsigned operands, const unsigned group_shift) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        uint8_t scale = w->scales[i][(at >> (group_shift - 1)) + (group >> (group_shift - 4))];
        __m256bh weights = (__m256bh)decode_group(w->codes[i] + at + 8 * group, w->table, scale);
        MM_UNROLL for (unsigned j = 0; j < operands; j++) {
            __m256bh x = (__m256bh)_mm256_load_si256((const __m256i *)(w->operands[j] + 2 * at + 16 * group));
            w->sums[i][j][group % 2] = _mm256_dpbf16_ps(w->sums[i][j][group % 2], x, weights);
        }
    }
}

/*
 * Prefetches into L2 what the rows `distance` further down hold at the same place. Rows are only kilobytes
 * long: the hardware would start anew with each, and L1 cannot wait for as many lines at a time as memory can
 * deliver.
 */
MM_TEMPLATE void prefetch_codes(const mm_matrix *m, const uint8_t *const *codes, const uint8_t *const *scales,
                                size_t at, size_t distance, const unsigned rows) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++)
        _mm_prefetch((const char *)codes[i] + distance * m->row_bytes + at, _MM_HINT_T1);
    if (at % 512 == 0)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            _mm_prefetch((const char *)scales[i] + distance * m->scale_row_bytes + at / 8, _MM_HINT_T1);
}

/* Rows between the walk and the prefetches: whole groups of `rows`, AHEAD_BYTES or more per row. */
static inline size_t prefetch_distance(const mm_matrix *m, unsigned rows) {
    return rows * ((AHEAD_BYTES + m->columns / 2 - 1) / (m->columns / 2));
}

/* `rows` weight rows times `operands` operand rows. */
MM_TEMPLATE void direct(const mm_gemm *g, uint32_t row, uint32_t first, const unsigned rows,
                        const unsigned operands, const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    size_t at = 0, bytes = m->columns / 2, distance = prefetch_distance(m, rows);
    walk w;
    w.table = g->table->products_bf16;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        w.codes[i] = m->codes + (g->row_first + row + i) * m->row_bytes;
        w.scales[i] = m->scales + (g->row_first + row + i) * m->scale_row_bytes;
        MM_UNROLL for (unsigned j = 0; j < operands; j++) w.sums[i][j][0] = w.sums[i][j][1] =
            _mm256_setzero_ps();
    }
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w.operands[j] = operand_row(g, first + j);
    for (; at + 64 <= bytes; at += 64) {
        prefetch_codes(m, w.codes, w.scales, at, distance, rows);
        MM_UNROLL for (unsigned c = 0; c < 8; c++) walk_group(&w, at, c, rows, operands, group_shift);
    }
    for (; at + 16 <= bytes; at += 16)
        MM_UNROLL for (unsigned c = 0; c < 2; c++) walk_group(&w, at, c, rows, operands, group_shift);
    if (at < bytes) walk_group(&w, at, 0, rows, operands, group_shift);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) MM_UNROLL for (unsigned j = 0; j < operands; j++)
        g->sums[(first + j) * g->sums_pitch + row + i] = sum_lanes(w.sums[i][j][0], w.sums[i][j][1]);
}

/* All rows of the call, by the widest tile that fits the registers. */
MM_TEMPLATE void direct_rows(const mm_gemm *g, const unsigned group_shift) {
    for (uint32_t row = 0; row < g->row_count;) {
        uint32_t left = g->row_count - row;
        if (g->count == 1 && left >= 4)
            direct(g, row, 0, 4, 1, group_shift), row += 4;
        else if (g->count == 2 && left >= 4)
            direct(g, row, 0, 4, 2, group_shift), row += 4;
        else if (g->count == 3 && left >= 2)
            direct(g, row, 0, 2, 3, group_shift), row += 2;
        else if (g->count == 4 && left >= 2)
            direct(g, row, 0, 2, 4, group_shift), row += 2;
        else {
            for (uint32_t r = 0; r < g->count; r++) direct(g, row, r, 1, 1, group_shift);
            row++;
        }
    }
}

/* ---- the panel: 16 rows of BF16 weights, zero-padded to whole vectors ---- */

static void fill_panel(const mm_gemm *g, const void *weights, const tile_segment *s) {
    const mm_matrix *m = g->matrix;
    size_t columns = s->end - s->begin;
    (void)weights;
    for (uint32_t i = 0; i < g->row_count; i++) {
        uint16_t *row = ((tile_panel *)g->panel)->weights[i];
        uint32_t n = g->row_first + i;
        if (columns % TILE_COLUMNS) memset(row + columns, 0, TILE_COLUMNS);
        switch (m->format) {
        case MM_NVFP4: unpack_fp4(g, n, s->begin, s->end, row, 4); break;
        case MM_MXFP4: unpack_fp4(g, n, s->begin, s->end, row, 5); break;
        case MM_BF16: memcpy(row, m->codes + n * m->row_bytes + 2 * (size_t)s->begin, columns * 2); break;
        case MM_FP8: unpack_fp8(g, n, s->begin, s->end, row); break;
        }
    }
}

static void gemm(const mm_gemm *g) {
    if (g->matrix->format == MM_NVFP4 && g->count <= DIRECT_OPERANDS)
        direct_rows(g, 4);
    else if (g->matrix->format == MM_MXFP4 && g->count <= DIRECT_OPERANDS)
        direct_rows(g, 5);
    else
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
}

static void tiles(const mm_gemm *g, uint32_t columns) {
    tiled_gemm(g, NULL, columns, NULL);
}

/* ---- fp32 weights of a router ---- */

static void gemm_f32(const void *weights, uint32_t columns, const mm_gemm *g) {
    for (uint32_t i = 0; i < g->row_count; i++) {
        const uint8_t *row = (const uint8_t *)weights + (g->row_first + i) * (size_t)columns * sizeof(float);
        for (uint32_t r = 0; r < g->count; r++) {
            const uint16_t *a = operand_row(g, r);
            __m512 sums = _mm512_setzero_ps();
            for (uint32_t k = 0; k < columns; k += 16) {
                __m512i x = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)(a + k)));
                sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                       _mm512_loadu_ps(row + k * sizeof(float)), sums);
            }
            g->sums[r * g->sums_pitch + i] = tile_reduce(sums);
        }
    }
}

/* BF16 as numerics/bf16.h rounds it; vcvtneps2bf16 would flush subnormals. */
static void store(const float *values, uint32_t count, void *operand) {
    for (uint32_t i = 0; i < count; i += 16) {
        __m512 v = _mm512_loadu_ps(values + i);
        __m512i bits = _mm512_castps_si512(v), upper = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        __m512i rounded =
            _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF)), 16);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256((__m256i *)((uint16_t *)operand + i), _mm512_cvtepi32_epi16(rounded));
    }
}

void mm_kernels_avx512(mm_kernels *kernels) {
    kernels->operands_bf16 = true;
    kernels->store = store;
    kernels->gemm = gemm;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
