/*
 * Four-bit and FP8 weights to BF16 with AVX-512, for the levels that have it. `products` holds, for every
 * scale byte, the exact products with the 16 codes, so that dequantizing is two shuffles: nibbles to words,
 * words to products.
 */
#ifndef MM_CPU_AVX512_WEIGHTS_H
#define MM_CPU_AVX512_WEIGHTS_H

#include <immintrin.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

typedef uint16_t products[16]; /* of one scale with the 16 codes */

/* 16 codes as BF16 values: word i takes its nibble from 8 broadcast bytes, and its value from the products.
 */
static inline __m256i decode_group(const uint8_t *codes, const products *table, uint8_t scale) {
    const __m256i nibbles =
        _mm256_set_epi64x(0x003C003800340030, 0x002C002800240020, 0x001C001800140010, 0x000C000800040000);
    int64_t bytes;
    memcpy(&bytes, codes, sizeof bytes);
    __m256i index = _mm256_multishift_epi64_epi8(nibbles, _mm256_set1_epi64x(bytes));
    return _mm256_permutexvar_epi16(index, _mm256_load_si256((const __m256i *)table[scale]));
}

/* Columns begin .. end of row n to `row`, aligned to 64; group_shift is 4 or 5: 16 or 32 columns to a scale.
 */
MM_TEMPLATE void unpack_fp4(const mm_gemm *g, uint32_t n, uint32_t begin, uint32_t end, uint16_t *row,
                            const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    const products *table = g->table->products_bf16;
    const uint8_t *codes = m->codes + n * m->row_bytes + begin / 2;
    const uint8_t *scales = m->scales + n * m->scale_row_bytes + (begin >> group_shift);
    size_t at = 0, bytes = (end - begin) / 2;
    /* the next segment is fetched meanwhile, or the first one of the next call's rows */
    const uint8_t *ahead = end < m->columns ? codes + bytes : m->codes + (n + MM_ROWS_MAX) * m->row_bytes;
    const uint8_t *scales_ahead =
        end < m->columns ? scales + ((end - begin) >> group_shift) : m->scales + (n + MM_ROWS_MAX) * m->scale_row_bytes;
    for (size_t line = 0; line < (end - begin) >> group_shift; line += 64)
        _mm_prefetch((const char *)scales_ahead + line, _MM_HINT_T1);
    for (; at + 64 <= bytes; at += 64) {
        _mm_prefetch((const char *)ahead + at, _MM_HINT_T1);
        MM_UNROLL for (unsigned c = 0; c < 8; c++) {
            uint8_t scale = scales[(at >> (group_shift - 1)) + (c >> (group_shift - 4))];
            _mm256_store_si256((__m256i *)(row + 2 * at + 16 * c), decode_group(codes + at + 8 * c, table, scale));
        }
    }
    for (; at < bytes; at += 8)
        _mm256_store_si256((__m256i *)(row + 2 * at), decode_group(codes + at, table, scales[at >> (group_shift - 1)]));
}

/* E4M3 to BF16 through a table of the 128 magnitudes. */
static inline void unpack_fp8(const mm_gemm *g, uint32_t n, uint32_t begin, uint32_t end, uint16_t *row) {
    const uint8_t *codes = g->matrix->codes + n * g->matrix->row_bytes + begin;
    const uint16_t *table = g->table->values_bf16;
    const __m512i t0 = _mm512_load_si512(table), t1 = _mm512_load_si512(table + 32);
    const __m512i t2 = _mm512_load_si512(table + 64), t3 = _mm512_load_si512(table + 96);
    for (size_t k = 0; k < end - begin; k += 32) {
        __mmask32 valid = end - begin - k < 32 ? 0xFFFF : 0xFFFFFFFF;
        __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, codes + k));
        __m512i low = _mm512_permutex2var_epi16(t0, code, t1), high = _mm512_permutex2var_epi16(t2, code, t3);
        __m512i value = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), low, high);
        __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16((short)0x8000));
        _mm512_store_si512(row + k, _mm512_or_si512(value, sign));
    }
}

#endif
