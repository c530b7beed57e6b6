/*
 * AVX2 with FMA and F16C: fp32 products. Codes become FP16 by a byte shuffle (E2M1 needs only the upper
 * byte), FP16 becomes fp32, and the scale is multiplied in: all exact. A few operand rows go to
 * avx2_planes.c, which sums in another order, so which of the two runs depends on deciding_rows only.
 */
#include <immintrin.h>
#include <stdint.h>

#include "backend/cpu/avx2_planes.h"

#define FEW_OPERANDS 8u /* up to this many operand rows walk over planes; measured crossover */

/* ---- tiles: 2 x 6 sums, 2 weights and an operand take 15 of the 16 registers ---- */

typedef float tile_element;
typedef __m256 tile_vector;
typedef __m256 tile_sum;
enum { TILE_COLUMNS = 8, TILE_ROWS = 2, TILE_OPERANDS = 6, TILE_SEGMENT = 1024 };

static inline bool tile_scales_sums(const mm_matrix *m) {
    (void)m;
    return false;
}
static inline tile_sum tile_zero(void) {
    return _mm256_setzero_ps();
}
static inline tile_sum tile_load_sum(const float *lanes) {
    return _mm256_load_ps(lanes);
}
static inline void tile_store_sum(float *lanes, tile_sum sum) {
    _mm256_store_ps(lanes, sum);
}
static inline tile_vector tile_load(const tile_element *values) {
    return _mm256_load_ps(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm256_fmadd_ps(x, w, sum);
}
static inline tile_sum tile_scale(tile_sum sum, float scale, tile_sum before) {
    return _mm256_fmadd_ps(sum, _mm256_set1_ps(scale), before);
}
static inline float tile_reduce(tile_sum sum) {
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

#include "backend/cpu/tiles.h"
#include "numerics/e8m0.h"

/* ---- four-bit weights ---- */

/* 16 codes, a byte each in order of k, to the upper bytes of FP16 values, and those times the scale to fp32.
 */
static inline void decode_group(__m128i codes, float scale, __m256 *w0, __m256 *w1) {
    const __m128i upper = _mm_setr_epi8(0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xB8, (char)0xBC,
                                        (char)0xBE, (char)0xC0, (char)0xC2, (char)0xC4, (char)0xC6);
    __m128i bytes = _mm_shuffle_epi8(upper, codes), zero = _mm_setzero_si128();
    __m256 s = _mm256_set1_ps(scale);
    *w0 = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, bytes)), s);
    *w1 = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, bytes)), s);
}

/* 32 codes of 16 bytes, as two groups of bytes in order of k. */
static inline void split_nibbles(__m128i packed, __m128i *first, __m128i *second) {
    const __m128i mask = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(packed, mask), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
    *first = _mm_unpacklo_epi8(even, odd);
    *second = _mm_unpackhi_epi8(even, odd);
}

/* Four vectors of eight weights, columns k .. k + 31 of `columns`; a last group of 16 fills two. */
MM_TEMPLATE void decode_columns(const mm_gemm *g, const uint8_t *codes, const uint8_t *scales, size_t k, size_t columns,
                                const unsigned group_shift, __m256 *w) {
    const float *table = g->table->scales;
    __m128i packed, first, second;
    if (k + 32 <= columns)
        packed = _mm_loadu_si128((const __m128i *)(codes + k / 2));
    else
        packed = _mm_loadl_epi64((const __m128i *)(codes + k / 2));
    split_nibbles(packed, &first, &second);
    decode_group(first, table[scales[k >> group_shift]], &w[0], &w[1]);
    if (k + 32 <= columns) decode_group(second, table[scales[(k + 16) >> group_shift]], &w[2], &w[3]);
}

/* ---- the panel: 16 rows of fp32 weights ---- */

MM_TEMPLATE void unpack_fp4(const mm_gemm *g, uint32_t n, const tile_segment *s, float *row,
                            const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    const uint8_t *codes = m->codes + n * m->row_bytes + s->begin / 2;
    const uint8_t *scales = m->scales + n * m->scale_row_bytes + (s->begin >> group_shift);
    size_t columns = s->end - s->begin;
    for (size_t k = 0; k < columns; k += 32) {
        __m256 w[4];
        decode_columns(g, codes, scales, k, columns, group_shift, w);
        for (unsigned v = 0; v < (k + 32 <= columns ? 4 : 2); v++) _mm256_store_ps(row + k + 8 * v, w[v]);
    }
}

static void unpack_bf16(const mm_gemm *g, uint32_t n, const tile_segment *s, float *row) {
    const uint8_t *codes = g->matrix->codes + n * g->matrix->row_bytes + 2 * (size_t)s->begin;
    for (size_t k = 0; k < s->end - s->begin; k += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(codes + 2 * k)));
        _mm256_store_ps(row + k, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
}

/* Scales are multiplied in: exact for powers of two, else one more rounding of each product. */
static void unpack_fp8(const mm_gemm *g, uint32_t n, const tile_segment *s, float *row) {
    const mm_matrix *m = g->matrix;
    const uint8_t *codes = m->codes + n * m->row_bytes, *scales = m->scales + n / m->block_rows * m->scale_row_bytes;
    for (uint32_t k = s->begin; k < s->end;) { /* a block of columns under one scale */
        uint32_t block = k / m->block_columns, left = (block + 1) * m->block_columns - k;
        uint32_t stop = s->end - k < left ? s->end : k + left;
        float scale;
        if (m->scale_dtype == MEGAMOE_E8M0)
            scale = mm_e8m0_to_f32(scales[block]);
        else
            memcpy(&scale, scales + block * sizeof scale, sizeof scale);
        for (; k < stop; k += 8) {
            __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + k)));
            __m256 values = _mm256_i32gather_ps(g->table->scales, index, 4);
            _mm256_store_ps(row + (k - s->begin), _mm256_mul_ps(values, _mm256_set1_ps(scale)));
        }
    }
}

static void fill_panel(const mm_gemm *g, const void *weights, const tile_segment *s) {
    (void)weights;
    for (uint32_t i = 0; i < g->row_count; i++) {
        float *row = ((tile_panel *)g->panel)->weights[i];
        switch (g->matrix->format) {
        case MM_NVFP4: unpack_fp4(g, g->row_first + i, s, row, 4); break;
        case MM_MXFP4: unpack_fp4(g, g->row_first + i, s, row, 5); break;
        case MM_BF16: unpack_bf16(g, g->row_first + i, s, row); break;
        case MM_FP8: unpack_fp8(g, g->row_first + i, s, row); break;
        }
    }
}

/* Whether a few operand rows are worth the walk over planes. */
static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    (void)nvfp4;
    return deciding_rows <= FEW_OPERANDS && (m->format == MM_NVFP4 || m->format == MM_MXFP4) ? 4 : 0;
}

static void gemm(const mm_gemm *g) {
    if (g->packed)
        mm_avx2_planes_gemm(g);
    else
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
}

/* A router's fp32 rows need only be aligned to become a panel. */
typedef struct f32_rows {
    const uint8_t *data;
    size_t row_bytes;
} f32_rows;

static void copy_f32(const mm_gemm *g, const void *weights, const tile_segment *s) {
    const f32_rows *rows = weights;
    for (uint32_t i = 0; i < g->row_count; i++)
        memcpy(((tile_panel *)g->panel)->weights[i],
               rows->data + (g->row_first + i) * rows->row_bytes + s->begin * sizeof(float),
               (s->end - s->begin) * sizeof(float));
}

static void gemm_f32(const void *weights, uint32_t columns, const mm_gemm *g) {
    const f32_rows rows = {weights, columns * sizeof(float)};
    mm_gemm plain = *g;
    plain.matrix = NULL;
    tiled_gemm(&plain, &rows, columns, copy_f32);
}

static void tiles(const mm_gemm *g, uint32_t columns) {
    tiled_gemm(g, NULL, columns, NULL);
}

static void store(const float *values, uint32_t count, void *operand) {
    for (uint32_t i = 0; i < count; i += 8) {
        __m256 v = _mm256_loadu_ps(values + i);
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
        __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        __m256 quiet = _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
        __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan);
        _mm256_storeu_ps((float *)operand + i,
                         _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000))));
    }
}

void mm_kernels_avx2(mm_kernels *kernels) {
    mm_kernels_avx2_rows(kernels);
    kernels->store = store;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = mm_avx2_planes_pack;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
