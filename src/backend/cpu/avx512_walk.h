/*
 * What the AVX-512 walks share: their sums, and how the codes and scales of four-bit weights come to lie so that
 * a lane of 32 bits stands for one group of 16 columns (see planes.h) and its scale is applied once.
 */
#ifndef MM_CPU_AVX512_WALK_H
#define MM_CPU_AVX512_WALK_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/cpu/unroll.h"

typedef __m512 walk_sum;
enum { WALK_OPERANDS = 4 };

static inline walk_sum walk_zero(void) {
    return _mm512_setzero_ps();
}
static inline float walk_reduce(walk_sum sum) {
    __m256 v = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

/* The 128 bytes of a block: lane l of eight[h] holds columns 8 h .. 8 h + 7 of its group. */
static inline void group_lanes(const uint8_t *codes, __m512i *eight) {
    __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
    eight[0] = _mm512_mask_shuffle_epi32(a, 0xAAAA, b, _MM_PERM_CCAA);
    eight[1] = _mm512_mask_shuffle_epi32(b, 0x5555, a, _MM_PERM_DDBB);
}

/* Scales of 16 groups, each in the lane of its group. */
MM_TEMPLATE __m512 decode_scales(const uint8_t *scales, const unsigned group_shift) {
    if (group_shift == 4) { /* E4M3 shifted into an FP16 is the value times 2^-8; bit 14 would repeat the sign */
        const __m256i upper_bytes =
            _mm256_setr_epi8(-1, 0, -1, 8, -1, 1, -1, 9, -1, 2, -1, 10, -1, 3, -1, 11, /* lanes 0 to 7 */
                             -1, 4, -1, 12, -1, 5, -1, 13, -1, 6, -1, 14, -1, 7, -1, 15);
        __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)scales));
        __m256i words = _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, upper_bytes), 1);
        return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBFFF)));
    } /* E8M0 shifted into an fp32; 2^-127 counts as 0 */
    const __m128i lanes = _mm_setr_epi8(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7);
    __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)scales), lanes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}

static inline bool walk_nan_scales(const uint8_t *scales, size_t count, const unsigned group_shift) {
    const __m512i magnitude = _mm512_set1_epi8(group_shift == 4 ? 127 : -1); /* of NaN, with either sign */
    __mmask64 nan = 0;
    for (size_t i = 0; i < count; i += 64) {
        __mmask64 there = count - i < 64 ? UINT64_MAX >> (64 - (count - i)) : UINT64_MAX;
        __m512i bytes = _mm512_maskz_loadu_epi8(there, scales + i);
        nan |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(bytes, magnitude), magnitude);
    }
    return nan != 0;
}

#endif
