/* The walk over planes with AVX2: byte products are added in pairs, and four pairs fit 16 bits, so no VNNI is
 * needed. */
#include <immintrin.h>

#include "backend/cpu/avx2_planes.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

typedef struct walk_sum {
    __m256 half[2];
} walk_sum;
enum { WALK_ROWS_FEW = 2, WALK_ROWS_MANY = 2, WALK_OPERANDS = 2 };

static inline walk_sum walk_zero(void) {
    return (walk_sum){{_mm256_setzero_ps(), _mm256_setzero_ps()}};
}
static inline float walk_reduce(walk_sum sum) {
    __m256 v = _mm256_add_ps(sum.half[0], sum.half[1]);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

/* Scales of the groups of one half of the lanes. */
MM_TEMPLATE __m256 decode_scales(const uint8_t *scales, unsigned half, const unsigned group_shift) {
    if (group_shift == 4) { /* E4M3 shifted into an FP16 is the value times 2^-8; bit 14 would repeat the sign */
        const __m128i upper_bytes = _mm_setr_epi8(-1, 0, -1, 8, -1, 1, -1, 9, -1, 2, -1, 10, -1, 3, -1, 11);
        __m128i bytes = _mm_loadu_si128((const __m128i *)scales);
        bytes = half ? _mm_srli_epi64(bytes, 32) : bytes;
        __m128i words = _mm_srai_epi16(_mm_shuffle_epi8(bytes, upper_bytes), 1);
        return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16((short)0xBFFF)));
    } /* E8M0 shifted into an fp32; 2^-127 counts as 0 */
    const __m128i lanes = _mm_setr_epi8(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7);
    __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)scales), lanes);
    bytes = half ? _mm_srli_si128(bytes, 8) : bytes;
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}

/* Half of the lanes of a block: its codes as 12 + 2 * E2M1, a byte each, in the order of plane_columns. */
MM_TEMPLATE void decode_codes(const uint8_t *codes, __m256i *bytes) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i a = _mm256_loadu_si256((const __m256i *)codes), b = _mm256_loadu_si256((const __m256i *)(codes + 64));
    __m256i eight[2] = {_mm256_blend_epi32(a, _mm256_shuffle_epi32(b, 0xA0), 0xAA), /* columns of each group */
                        _mm256_blend_epi32(b, _mm256_shuffle_epi32(a, 0xF5), 0x55)};
    MM_UNROLL for (unsigned h = 0; h < 2; h++) {
        bytes[2 * h] = _mm256_shuffle_epi8(values, _mm256_and_si256(eight[h], nibble));
        bytes[2 * h + 1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(eight[h], 4), nibble));
    }
}

/* Sums of a group: at most 8 * 24 * 128 before they leave 16 bits. */
MM_TEMPLATE __m256i multiply_plane(const __m256i *codes, const int8_t (*plane)[64], const unsigned half) {
    __m256i part[4];
    MM_UNROLL for (unsigned i = 0; i < 4; i++) part[i] =
        _mm256_maddubs_epi16(codes[i], _mm256_load_si256((const __m256i *)(plane[i] + 32 * half)));
    __m256i words = _mm256_add_epi16(_mm256_add_epi16(part[0], part[1]), _mm256_add_epi16(part[2], part[3]));
    return _mm256_madd_epi16(words, _mm256_set1_epi16(1));
}

/* One half of the lanes of one matrix row. */
MM_TEMPLATE void multiply_half(const uint8_t *codes, const uint8_t *scales, const uint8_t *const *operands,
                               walk_sum *sums, const unsigned half, const unsigned operand_count,
                               const unsigned group_shift, const unsigned planes) {
    __m256i bytes[4];
    __m256 scale = decode_scales(scales, half, group_shift);
    decode_codes(codes + 32 * half, bytes);
    MM_UNROLL for (unsigned j = 0; j < operand_count; j++) {
        const plane_columns *a = (const plane_columns *)(const void *)operands[j];
        __m256i total = _mm256_load_si256((const __m256i *)(a->corrections + 8 * half));
        total = _mm256_add_epi32(total, multiply_plane(bytes, a->planes[0], half));
        if (planes == 3) {
            __m256i upper = _mm256_slli_epi32(multiply_plane(bytes, a->planes[2], half), 7);
            upper = _mm256_add_epi32(upper, multiply_plane(bytes, a->planes[1], half));
            total = _mm256_add_epi32(total, _mm256_slli_epi32(upper, 7));
        }
        __m256 unit = _mm256_mul_ps(scale, _mm256_load_ps(a->steps + 8 * half));
        sums[j].half[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), unit, sums[j].half[half]);
    }
}

MM_TEMPLATE void walk_block(const mm_gemm *g, const uint8_t *const *codes, const uint8_t *const *scales,
                            const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                            const unsigned operand_count, const mm_format format, const unsigned planes) {
    (void)g;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) MM_UNROLL for (unsigned half = 0; half < 2; half++)
        multiply_half(codes[i], scales[i], operands, sums[i], half, operand_count, format == MM_NVFP4 ? 4 : 5, planes);
}

static inline bool walk_nan_scales(const uint8_t *scales, size_t count, const unsigned group_shift) {
    const __m256i magnitude = _mm256_set1_epi8(group_shift == 4 ? 127 : -1); /* of NaN, with either sign */
    __m256i nan = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += 32) {
        uint8_t last[32] = {0};
        if (count - i < 32) memcpy(last, scales + i, count - i);
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(count - i < 32 ? last : scales + i));
        nan = _mm256_or_si256(nan, _mm256_cmpeq_epi8(_mm256_and_si256(bytes, magnitude), magnitude));
    }
    return _mm256_movemask_epi8(nan) != 0;
}

#include "backend/cpu/walk.h"

void mm_avx2_planes_gemm(const mm_gemm *g, unsigned planes) {
    if (g->matrix->format == MM_NVFP4)
        planes == 1 ? walk_gemm(g, MM_NVFP4, 1) : walk_gemm(g, MM_NVFP4, 3);
    else
        planes == 1 ? walk_gemm(g, MM_MXFP4, 1) : walk_gemm(g, MM_MXFP4, 3);
}

void mm_avx2_planes_pack(const mm_gemm *g, uint32_t columns, uint32_t first, unsigned planes, uint8_t *packed) {
    pack_planes(g, columns, first, false, planes, packed);
}
