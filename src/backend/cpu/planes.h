/*
 * Activations as whole numbers, for processors whose integer dot products are much faster than their BF16
 * ones (and for those that have only the former). Each group of 16 activations is a power of two times
 * integers below 2^21, cut into three planes of seven bits; code * scale of nvfp4 activations is half the scale
 * times integers up to 12, and one plane holds them. Four-bit weights are the integers 12 + 2 * E2M1, 0 .. 24; the
 * 12 is taken off by a correction known beforehand. Products and their sums over a group are exact,
 * 16 * 24 * 2^21 < 2^31; fp32 begins after them.
 *
 * An activation is exact unless it is below 2^-13 of the largest of its group, and then off by at most 2^-21
 * of that; nvfp4 activations always are.
 */
#ifndef MM_CPU_PLANES_H
#define MM_CPU_PLANES_H

#include <assert.h>
#include <immintrin.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

#define PLANE_COLUMNS 256u
_Static_assert(MM_OPERAND_PAD % PLANE_COLUMNS == 0, "operand rows are whole blocks");

/*
 * What 256 columns of an operand row become. A lane of 32 bits stands for a group of 16: lane l for group
 * l / 2 of the first 128 columns if l is even, of the other 128 if it is odd. Its bytes in the four vectors
 * are columns 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15: the order in which two shuffles of the weights' codes
 * leave their nibbles.
 */
typedef struct plane_columns {
    _Alignas(64) int32_t corrections[16]; /* -12 times the sum of the group */
    float steps[16];                      /* what 1 is worth, and a half for the doubled E2M1 */
    int8_t planes[3][4][64];              /* worth 1, 2^7, 2^14; a row of one plane has only the first of them */
} plane_columns;

/* Bytes of a block of `planes` planes, and of a packed operand row per column. */
MM_TEMPLATE size_t plane_block_bytes(const unsigned planes) {
    return offsetof(plane_columns, planes) + planes * sizeof(int8_t[4][64]);
}
static inline unsigned plane_bytes(unsigned planes) {
    return planes == 1 ? 2 : 4;
}

static inline unsigned plane_count(bool nvfp4) {
    return nvfp4 ? 1 : 3;
}

/* mm_kernels.packs of a level whose nvfp4 operands always are planes, and BF16 ones if at most `few` rows decide. */
static inline unsigned plane_packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4, uint32_t few) {
    bool four_bits = m->format == MM_NVFP4 || m->format == MM_MXFP4;
    return four_bits && (nvfp4 || deciding_rows <= few) ? plane_bytes(plane_count(nvfp4)) : 0;
}

/* Eight activations from column k on, as fp32. */
MM_TEMPLATE __m256 plane_values(const uint8_t *row, size_t k, const bool bf16) {
    if (!bf16) return _mm256_load_ps((const float *)row + k);
    __m256i wide = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)((const uint16_t *)row + k)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* The largest magnitude of 16 values; infinity if one of them is not finite. */
static inline float group_amax(__m256 a, __m256 b) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    __m256i both = _mm256_max_epi32(_mm256_castps_si256(_mm256_and_ps(a, magnitude)),
                                    _mm256_castps_si256(_mm256_and_ps(b, magnitude))); /* NaN is above infinity */
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    float amax = mm_f32_from_bits((uint32_t)_mm_cvtsi128_si32(four));
    return amax < INFINITY ? amax : INFINITY;
}

/* Whether all 16 are `step` times integers up to 12, as E2M1 codes are times half their scale. */
static inline bool step_divides(__m256 a, __m256 b, float step) {
    __m256 s = _mm256_set1_ps(step), inverse = _mm256_set1_ps(1.0f / step);
    __m256 wholes[2] = {_mm256_round_ps(_mm256_mul_ps(a, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                        _mm256_round_ps(_mm256_mul_ps(b, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    __m256 equal = _mm256_and_ps(_mm256_cmp_ps(_mm256_mul_ps(wholes[0], s), a, _CMP_EQ_OQ),
                                 _mm256_cmp_ps(_mm256_mul_ps(wholes[1], s), b, _CMP_EQ_OQ));
    return _mm256_movemask_ps(equal) == 0xFF && (mm_f32_bits(step) & 0xFFFF) == 0;
}

/* What 1 is worth in a group of nvfp4 activations; its largest magnitude is one of E2M1. */
static inline float common_step(__m256 a, __m256 b, float amax) {
    static const float largest[] = {12, 8, 6, 4, 3, 2, 1};
    for (unsigned c = 0; c < sizeof largest / sizeof *largest; c++)
        if (step_divides(a, b, amax / largest[c])) return amax / largest[c];
    assert(!"nvfp4 activations are code * scale");
    return NAN;
}

/* 16 numbers of one plane to the places of a lane. */
static inline void store_plane(__m128i bytes, unsigned lane, int8_t (*plane)[64]) {
    bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    for (unsigned v = 0; v < 4; v++, bytes = _mm_srli_si128(bytes, 4)) _mm_storeu_si32(plane[v] + 4 * lane, bytes);
}

/* 16 numbers of 32 bits, of which the lowest eight count, to bytes in their order. */
static inline __m128i lowest_bytes(__m256i a, __m256i b) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

static inline int32_t sum_lanes(__m256i v) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

/* One group of 16 into the place of group `g` of its block. */
MM_TEMPLATE void split_group(__m256 a, __m256 b, unsigned g, plane_columns *to, const unsigned planes) {
    unsigned lane = g % 8 * 2 + g / 8;
    float amax = group_amax(a, b), step = 1.0f;
    int exponent = 0;
    if (amax == INFINITY) {
        a = b = _mm256_setzero_ps();
        step = NAN;
    } else if (planes == 1 && amax > 0.0f) {
        step = common_step(a, b, amax);
    } else if (planes == 3) {
        if (amax > 0.0f) frexpf(amax, &exponent); /* amax < 2^exponent */
        step = ldexpf(1.0f, (exponent < -80 ? -80 : exponent) - 21);
    }
    __m256 inverse = _mm256_set1_ps(amax == INFINITY ? 0.0f : 1.0f / step);
    __m256i whole[2] = {_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse))};
    to->corrections[lane] = -12 * sum_lanes(_mm256_add_epi32(whole[0], whole[1]));
    to->steps[lane] = 0.5f * step;
    if (planes == 1) {
        store_plane(lowest_bytes(whole[0], whole[1]), lane, to->planes[0]);
        return;
    }
    const __m256i seven = _mm256_set1_epi32(127);
    for (unsigned p = 0; p < 2; p++) {
        store_plane(lowest_bytes(_mm256_and_si256(whole[0], seven), _mm256_and_si256(whole[1], seven)), lane,
                    to->planes[p]);
        whole[0] = _mm256_srai_epi32(whole[0], 7);
        whole[1] = _mm256_srai_epi32(whole[1], 7);
    }
    store_plane(lowest_bytes(whole[0], whole[1]), lane, to->planes[2]);
}

MM_TEMPLATE void pack_row(const uint8_t *row, size_t padded, const bool bf16, const unsigned planes, uint8_t *to) {
    for (size_t k = 0; k < padded; k += 16) /* operand rows are zero-padded */
        split_group(plane_values(row, k, bf16), plane_values(row, k + 8, bf16), k / 16 % 16,
                    (plane_columns *)(void *)(to + k / PLANE_COLUMNS * plane_block_bytes(planes)), planes);
}

/* Rows first .. of one packed block: fp32 or BF16 operand rows to planes. */
MM_TEMPLATE void pack_planes(const mm_gemm *g, uint32_t columns, uint32_t first, const bool bf16, unsigned planes,
                             uint8_t *packed) {
    size_t padded = padded_columns(columns);
    for (uint32_t r = first; r < g->count && r < first + MM_PACK_ROWS; r++) {
        const uint8_t *row = g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r);
        uint8_t *to = packed + (r - first) * padded * plane_bytes(planes);
        planes == 1 ? pack_row(row, padded, bf16, 1, to) : pack_row(row, padded, bf16, 3, to);
    }
}

#endif
