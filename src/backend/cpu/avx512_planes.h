/*
 * The walk over planes with AVX-512 VNNI, for the files of the levels that have it: each compiles it with the
 * instructions that it may use.
 */
#include "backend/cpu/avx512_walk.h"
#include "backend/cpu/planes.h"

enum { WALK_ROWS_FEW = 4, WALK_ROWS_MANY = 4 };

/* Bytes to what their lower four bits stand for: 12 + 2 * E2M1. */
static inline __m512i decode_nibbles(__m512i bytes) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#ifdef __AVX512VBMI__ /* the table four times, for vpermb reads six bits; no mask is needed */
    return _mm512_permutexvar_epi8(bytes, values);
#else
    return _mm512_shuffle_epi8(values, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
#endif
}

/* The 256 codes of a block in the order of plane_columns. */
MM_TEMPLATE void decode_codes(const uint8_t *codes, __m512i *bytes) {
    __m512i eight[2];
    group_lanes(codes, eight);
    MM_UNROLL for (unsigned h = 0; h < 2; h++) {
        bytes[2 * h] = decode_nibbles(eight[h]);
        bytes[2 * h + 1] = decode_nibbles(_mm512_srli_epi16(eight[h], 4));
    }
}

/* Up to two matrix rows: what an operand row has is loaded once for both. */
MM_TEMPLATE void multiply_pair(const uint8_t *const *codes, const uint8_t *const *scales,
                               const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                               const unsigned operand_count, const unsigned group_shift, const unsigned planes) {
    __m512i bytes[2][4];
    __m512 scale[2];
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        decode_codes(codes[i], bytes[i]);
        scale[i] = decode_scales(scales[i], group_shift);
    }
    MM_UNROLL for (unsigned j = 0; j < operand_count; j++) {
        const plane_columns *a = (const plane_columns *)(const void *)operands[j];
        __m512i corrections = _mm512_load_si512(a->corrections), total[2][3];
        __m512 steps = _mm512_load_ps(a->steps);
        MM_KEEP(corrections);
        MM_KEEP(steps);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) {
            total[i][0] = corrections;
            total[i][1] = total[i][2] = _mm512_setzero_si512();
        }
        MM_UNROLL for (unsigned p = 0; p < planes; p++) MM_UNROLL for (unsigned v = 0; v < 4; v++) {
            __m512i x = _mm512_load_si512(a->planes[p][v]);
            MM_KEEP(x);
            MM_UNROLL for (unsigned i = 0; i < rows; i++) total[i][p] =
                _mm512_dpbusd_epi32(total[i][p], bytes[i][v], x);
        }
        MM_UNROLL for (unsigned i = 0; i < rows; i++) {
            if (planes == 3) {
                __m512i upper = _mm512_add_epi32(total[i][1], _mm512_slli_epi32(total[i][2], 7));
                total[i][0] = _mm512_add_epi32(total[i][0], _mm512_slli_epi32(upper, 7));
            }
            sums[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[i][0]), _mm512_mul_ps(scale[i], steps), sums[i][j]);
        }
    }
}

MM_TEMPLATE void walk_block(const mm_gemm *g, const uint8_t *const *codes, const uint8_t *const *scales,
                            const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                            const unsigned operand_count, const mm_format format, const unsigned planes) {
    (void)g;
    MM_UNROLL for (unsigned i = 0; i < rows; i += 2)
        multiply_pair(codes + i, scales + i, operands, sums + i, rows - i < 2 ? 1 : 2, operand_count,
                      format == MM_NVFP4 ? 4 : 5, planes);
}

#include "backend/cpu/walk.h"

/* g->packed by pack_planes; NVFP4 or MXFP4 weights. */
static void planes_gemm(const mm_gemm *g, unsigned planes) {
    if (g->matrix->format == MM_NVFP4)
        planes == 1 ? walk_gemm(g, MM_NVFP4, 1) : walk_gemm(g, MM_NVFP4, 3);
    else
        planes == 1 ? walk_gemm(g, MM_MXFP4, 1) : walk_gemm(g, MM_MXFP4, 3);
}
