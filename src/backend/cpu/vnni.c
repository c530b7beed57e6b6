/* The walk over planes with AVX-512 VNNI: on Intel its dot products are several times as fast as those of
 * BF16. */
#include <immintrin.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/vnni.h"
#include "backend/cpu/unroll.h"

typedef struct plane_weights {
    __m512i codes[4]; /* 12 + 2 * E2M1, a byte each, in the order of plane_columns */
    __m512 scale;     /* E4M3: times 2^-8 */
} plane_weights;
typedef __m512 plane_sum;

static inline plane_sum plane_zero(void) {
    return _mm512_setzero_ps();
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

MM_TEMPLATE plane_weights plane_decode(const uint8_t *codes, const uint8_t *scales, const unsigned group_shift) {
    const __m512i values = /* four times, for vpermb reads six bits */
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
    __m512i first = _mm512_mask_shuffle_epi32(a, 0xAAAA, b, _MM_PERM_CCAA); /* eight columns of each group */
    __m512i second = _mm512_mask_shuffle_epi32(b, 0x5555, a, _MM_PERM_DDBB);
    plane_weights w = {.scale = decode_scales(scales, group_shift)};
    w.codes[0] = _mm512_permutexvar_epi8(first, values);
    w.codes[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(first, 4), values);
    w.codes[2] = _mm512_permutexvar_epi8(second, values);
    w.codes[3] = _mm512_permutexvar_epi8(_mm512_srli_epi16(second, 4), values);
    return w;
}

MM_TEMPLATE __m512i multiply_plane(const plane_weights *w, const int8_t (*plane)[64], __m512i sum) {
    MM_UNROLL for (unsigned i = 0; i < 4; i++) sum = _mm512_dpbusd_epi32(sum, w->codes[i], _mm512_load_si512(plane[i]));
    return sum;
}

MM_TEMPLATE plane_sum plane_multiply(const plane_weights *w, const plane_columns *a, const unsigned planes,
                                     plane_sum sum) {
    __m512i total = multiply_plane(w, a->planes[0], _mm512_load_si512(a->corrections));
    if (planes == 3) {
        __m512i upper = multiply_plane(w, a->planes[2], _mm512_setzero_si512());
        upper = multiply_plane(w, a->planes[1], _mm512_slli_epi32(upper, 7));
        total = _mm512_add_epi32(total, _mm512_slli_epi32(upper, 7));
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(w->scale, _mm512_load_ps(a->steps)), sum);
}

static inline bool plane_nan_scales(const uint8_t *scales, size_t count, const unsigned group_shift) {
    __mmask64 nan = 0;
    for (size_t i = 0; i < count; i += 64) {
        __mmask64 there = count - i < 64 ? UINT64_MAX >> (64 - (count - i)) : UINT64_MAX;
        __m512i bytes = _mm512_maskz_loadu_epi8(there, scales + i);
        if (group_shift == 4) /* with either sign */
            nan |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(bytes, _mm512_set1_epi8(127)), _mm512_set1_epi8(127));
        else
            nan |= _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(-1));
    }
    return nan != 0;
}

static inline float plane_reduce(plane_sum sum) {
    __m256 v = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

enum { WALK_ROWS = 4, WALK_OPERANDS = 4 };

#include "backend/cpu/planes_walk.h"

void mm_vnni_gemm(const mm_gemm *g) {
    walk_all(g);
}

void mm_vnni_pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    pack_planes(g, columns, first, true, packed);
}
