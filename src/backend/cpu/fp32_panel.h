/*
 * Weights as a panel of fp32 values, for the levels whose tiles multiply in fp32: codes become FP16 by a byte
 * shuffle (E2M1 needs only the upper byte), FP16 becomes fp32, and the scale is multiplied in: all exact. A file
 * defines its tiles (see tiles.h) before it includes this.
 */
#include <immintrin.h>

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

/* Eight codes of E4M3: shifted into FP16 they are the values times 2^-8, but for NaN; bit 14 would repeat the sign. */
static inline __m256 decode_fp8(__m128i codes) {
    __m128i wide = _mm_cvtepi8_epi16(codes),
            nan = _mm_cmpeq_epi8(_mm_and_si128(codes, _mm_set1_epi8(127)), _mm_set1_epi8(127));
    __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBFFF));
    half = _mm_or_si128(half, _mm_and_si128(_mm_cvtepi8_epi16(nan), _mm_set1_epi16(0x7E00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
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
            __m256 values = decode_fp8(_mm_loadl_epi64((const __m128i *)(codes + k)));
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
