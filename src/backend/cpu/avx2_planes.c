/* The walk over planes with AVX2: byte products are added in pairs, and four pairs fit 16 bits, so no VNNI is
 * needed. */
#include <immintrin.h>

#include "backend/cpu/avx2_planes.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

typedef struct plane_weights {
    __m256i even[2], odd[2]; /* 12 + 2 * E2M1, a byte each; the halves of 128 columns */
    __m256 scale[2];         /* E4M3: times 2^-8 */
} plane_weights;
typedef struct plane_sum {
    __m256 half[2];
} plane_sum;

static inline plane_sum plane_zero(void) {
    return (plane_sum){{_mm256_setzero_ps(), _mm256_setzero_ps()}};
}

MM_TEMPLATE __m256 decode_scales(const uint8_t *scales, const unsigned group_shift) {
    if (group_shift == 4) { /* E4M3 shifted into an FP16 is the value times 2^-8; bit 14 would repeat the sign */
        __m128i bytes = _mm_loadu_si32(scales);
        __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)), 7);
        return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xBFFF)));
    } /* E8M0 shifted into an fp32; 2^-127 counts as 0 */
    __m128i bytes =
        _mm_shuffle_epi8(_mm_loadu_si16(scales), _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}

MM_TEMPLATE plane_weights plane_decode(const uint8_t *codes, const uint8_t *scales, const unsigned group_shift) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    plane_weights w;
    MM_UNROLL for (unsigned i = 0; i < 2; i++) {
        __m256i packed = _mm256_loadu_si256((const __m256i *)(codes + 32 * i));
        w.even[i] = _mm256_shuffle_epi8(values, _mm256_and_si256(packed, nibble));
        w.odd[i] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
        w.scale[i] = decode_scales(scales + i * (group_shift == 4 ? 4 : 2), group_shift);
    }
    return w;
}

/* Sums of eight columns: at most 4 * 24 * 128 before they leave 16 bits. */
MM_TEMPLATE __m256i multiply_plane(const plane_weights *w, const int8_t (*plane)[64], const unsigned i) {
    __m256i even = _mm256_maddubs_epi16(w->even[i], _mm256_load_si256((const __m256i *)(plane[0] + 32 * i)));
    __m256i odd = _mm256_maddubs_epi16(w->odd[i], _mm256_load_si256((const __m256i *)(plane[1] + 32 * i)));
    return _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
}

MM_TEMPLATE plane_sum plane_multiply(const plane_weights *w, const plane_columns *a, const bool low, plane_sum sum) {
    MM_UNROLL for (unsigned i = 0; i < 2; i++) {
        __m256i total = multiply_plane(w, a->planes[2], i);
        __m256i rest = _mm256_load_si256((const __m256i *)(a->corrections + 8 * i));
        total = _mm256_add_epi32(_mm256_slli_epi32(total, 7), multiply_plane(w, a->planes[1], i));
        if (low) rest = _mm256_add_epi32(rest, multiply_plane(w, a->planes[0], i));
        total = _mm256_add_epi32(_mm256_slli_epi32(total, 7), rest);
        __m256 scale = _mm256_mul_ps(w->scale[i], _mm256_load_ps(a->steps + 8 * i));
        sum.half[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, sum.half[i]);
    }
    return sum;
}

static inline float plane_reduce(plane_sum sum) {
    __m256 v = _mm256_add_ps(sum.half[0], sum.half[1]);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

enum { WALK_ROWS = 2 };

#include "backend/cpu/planes_walk.h"

void mm_avx2_planes_gemm(const mm_gemm *g) {
    walk_all(g);
}

void mm_avx2_planes_pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    pack_planes(g, columns, first, false, packed);
}
