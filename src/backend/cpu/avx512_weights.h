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
#include "numerics/e8m0.h"

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

/* 64 codes of E4M3 to BF16: the two bytes of each are looked up by its magnitude. values[0] are columns 16 i .. 16 i +
 * 7, values[1] columns 16 i + 8 .. 16 i + 15. */
static inline void decode_fp8(__m512i codes, const mm_scale_table *table, __m512i *values) {
    __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(table->bf16_low), codes, _mm512_load_si512(table->bf16_low + 64));
    __m512i high =
        _mm512_permutex2var_epi8(_mm512_load_si512(table->bf16_high), codes, _mm512_load_si512(table->bf16_high + 64));
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8); /* high | (codes & sign) */
    values[0] = _mm512_unpacklo_epi8(low, high);
    values[1] = _mm512_unpackhi_epi8(low, high);
}

/* BF16 values times a power of two; the even and the odd words of a vector are fp32 values but for their place. */
static inline __m512i scale_bf16(__m512i values, __m512 scale) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), scale);
    __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(values, upper)), scale);
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                           _mm512_and_si512(_mm512_castps_si512(odd), upper));
}

/* FP8 likewise. E8M0 scales are multiplied in, which is exact; F32 scales would not be, and are left to the sums. */
static inline void unpack_fp8(const mm_gemm *g, uint32_t n, uint32_t begin, uint32_t end, uint16_t *row) {
    const mm_matrix *m = g->matrix;
    const uint8_t *codes = m->codes + n * m->row_bytes, *scales = m->scales + n / m->block_rows * m->scale_row_bytes;
    for (uint32_t k = begin; k < end; k += 32) { /* under one scale */
        uint64_t there = end - k < 32 ? UINT64_MAX >> (64 - (end - k)) : UINT32_MAX;
        __m512i bytes = _mm512_maskz_loadu_epi8(there, codes + k), values[2];
        decode_fp8(_mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), bytes), g->table, values);
        if (m->scale_dtype == MEGAMOE_E8M0)
            values[0] = scale_bf16(values[0], _mm512_set1_ps(mm_e8m0_to_f32(scales[k / m->block_columns])));
        _mm512_store_si512(row + (k - begin), values[0]);
        if (k % 64 == 0) _mm_prefetch((const char *)codes + k + 2 * m->row_bytes, _MM_HINT_T1);
    }
}

#endif
