/* The walk over planes with AVX-512 VNNI: on Intel its dot products are several times as fast as those of
 * BF16. */
#include <immintrin.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/vnni.h"
#include "backend/cpu/unroll.h"

typedef struct plane_weights {
    __m512i even, odd; /* 12 + 2 * E2M1, a byte each */
    __m512 scale;      /* E4M3: times 2^-8 */
} plane_weights;
typedef __m512 plane_sum;

static inline plane_sum plane_zero(void) {
    return _mm512_setzero_ps();
}

MM_TEMPLATE plane_weights plane_decode(const uint8_t *codes, const uint8_t *scales, const unsigned group_shift) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i packed = _mm512_loadu_si512(codes);
    plane_weights w;
    w.even = _mm512_shuffle_epi8(values, _mm512_and_si512(packed, nibble));
    w.odd = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble));
    if (group_shift == 4) { /* E4M3 shifted into an FP16 is the value times 2^-8; bit 14 would repeat the sign */
        __m128i bytes = _mm_loadl_epi64((const __m128i *)scales);
        __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)), 7);
        w.scale = _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBFFF)));
    } else { /* E8M0 shifted into an fp32; 2^-127 counts as 0 */
        __m128i bytes =
            _mm_shuffle_epi8(_mm_loadu_si32(scales), _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
        w.scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
    }
    return w;
}

MM_TEMPLATE __m512i multiply_plane(const plane_weights *w, const int8_t (*plane)[64], __m512i sum) {
    sum = _mm512_dpbusd_epi32(sum, w->even, _mm512_load_si512(plane[0]));
    return _mm512_dpbusd_epi32(sum, w->odd, _mm512_load_si512(plane[1]));
}

MM_TEMPLATE plane_sum plane_multiply(const plane_weights *w, const plane_columns *a, const bool low, plane_sum sum) {
    __m512i total = multiply_plane(w, a->planes[2], _mm512_setzero_si512());
    __m512i middle = multiply_plane(w, a->planes[1], _mm512_setzero_si512());
    __m512i rest = _mm512_load_si512(a->corrections);
    if (low) rest = multiply_plane(w, a->planes[0], rest);
    total = _mm512_add_epi32(_mm512_slli_epi32(total, 7), middle);
    total = _mm512_add_epi32(_mm512_slli_epi32(total, 7), rest);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(w->scale, _mm512_load_ps(a->steps)), sum);
}

static inline float plane_reduce(plane_sum sum) {
    __m256 v = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

enum { WALK_ROWS = 4 };

#include "backend/cpu/planes_walk.h"

void mm_vnni_gemm(const mm_gemm *g) {
    walk_all(g);
}

void mm_vnni_pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    pack_planes(g, columns, first, true, packed);
}
