/*
 * AVX-512 with BF16 dot products. Both operands of every product are exact in BF16, and vdpbf16ps keeps fp32
 * sums. A few operand rows are multiplied while the weights pass through registers (`walk`); for more of them
 * the weights are dequantized into a panel (tiles.h). The two sum in different orders, so which of them runs
 * depends on deciding_rows only: the rows of an expert in the whole batch.
 */
#include <immintrin.h>
#include <stdint.h>

#include "backend/cpu/avx512_tiles.h"
#include "backend/cpu/planes.h"
#include "backend/cpu/vnni.h"

/* Up to this many operand rows walk; measured crossovers */
#define FEW_OPERANDS 32u
#define FEW_OPERANDS_WIDE 8u /* of BF16 and FP8 weights */

/* ---- tiles: 4 x 6 sums, 4 weights and an operand take 29 of the 32 registers ---- */

typedef uint16_t tile_element;
typedef __m512bh tile_vector;
enum { TILE_COLUMNS = 32, TILE_ROWS = 4, TILE_OPERANDS = 6, TILE_SEGMENT = 2048 };

/* F32 scales times E4M3 are not exact in BF16. */
static inline bool tile_scales_sums(const mm_matrix *m) {
    return m->scale_dtype == MEGAMOE_F32;
}
static inline tile_vector tile_load(const tile_element *values) {
    return (__m512bh)_mm512_load_si512(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm512_dpbf16_ps(sum, x, w);
}

#include "backend/cpu/avx512_weights.h"
#include "backend/cpu/tiles.h"

/* ---- the walk ---- */

enum { WALK_ROWS_FEW = 4, WALK_ROWS_MANY = 2 }; /* more sums than registers otherwise */

/* Two matrix rows at a time: operands are loaded once for both. */
typedef __m512 pair_sums[2][WALK_OPERANDS];

MM_TEMPLATE void multiply_pair(pair_sums sums, const __m512bh *weights, const uint8_t *const *operands, size_t at,
                               const unsigned rows, const unsigned operand_count) {
    MM_UNROLL for (unsigned j = 0; j < operand_count; j++) {
        __m512bh x = (__m512bh)_mm512_load_si512(operands[j] + at);
        MM_KEEP(x);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, weights[i]);
    }
}

/*
 * Four-bit weights: lane l of a vector holds two of the eight columns that two shuffles brought there (see
 * planes.h), s and 4 + s in vector s, so that a lane sums one group and its scale is applied once.
 */
MM_TEMPLATE void multiply_four_bits(const uint8_t *const *codes, const uint8_t *const *scales,
                                    const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                                    const unsigned operand_count, const unsigned group_shift) {
    /* E2M1 as BF16, twice, for vpermw reads five bits */
    const __m512i values = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00,
                          (short)0xBF80, (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0));
    __m512i eight[2][2];
    pair_sums parts;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        group_lanes(codes[i], eight[i]);
        MM_UNROLL for (unsigned j = 0; j < operand_count; j++) parts[i][j] = _mm512_setzero_ps();
    }
    MM_UNROLL for (unsigned v = 0; v < 8; v++) {
        __m512bh weights[2];
        MM_UNROLL for (unsigned i = 0; i < rows; i++) weights[i] =
            (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(eight[i][v / 4], 4 * (v % 4)), values);
        multiply_pair(parts, weights, operands, 64 * v, rows, operand_count);
    }
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        __m512 scale = decode_scales(scales[i], group_shift);
        MM_UNROLL for (unsigned j = 0; j < operand_count; j++) sums[i][j] =
            _mm512_fmadd_ps(parts[i][j], scale, sums[i][j]);
    }
}

/*
 * FP8 weights, 64 columns at a time: the low and the high bytes of their BF16 values are looked up and
 * interleaved within 128 bits, where 16 columns stand. The scales of two 32 columns are applied to sums.
 */
MM_TEMPLATE void multiply_fp8(const mm_scale_table *table, const uint8_t *const *codes, const uint8_t *const *scales,
                              const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                              const unsigned operand_count) {
    MM_UNROLL for (unsigned c = 0; c < 4; c++) {
        __m512bh weights[2][2];
        pair_sums parts;
        MM_UNROLL for (unsigned i = 0; i < rows; i++) {
            __m512i values[2];
            decode_fp8(_mm512_loadu_si512(codes[i] + 64 * c), table, values);
            weights[0][i] = (__m512bh)values[0];
            weights[1][i] = (__m512bh)values[1];
            MM_UNROLL for (unsigned j = 0; j < operand_count; j++) parts[i][j] = _mm512_setzero_ps();
        }
        multiply_pair(parts, weights[0], operands, 128 * c, rows, operand_count);
        multiply_pair(parts, weights[1], operands, 128 * c + 64, rows, operand_count);
        MM_UNROLL for (unsigned i = 0; i < rows; i++) {
            const float *pair = (const float *)(const void *)scales[i] + 2 * c;
            __m512 scale = _mm512_insertf32x8(_mm512_set1_ps(pair[0]), _mm256_set1_ps(pair[1]), 1);
            MM_UNROLL for (unsigned j = 0; j < operand_count; j++) sums[i][j] =
                _mm512_fmadd_ps(parts[i][j], scale, sums[i][j]);
        }
    }
}

MM_TEMPLATE void multiply_bf16(const uint8_t *const *codes, const uint8_t *const *operands, walk_sum (*sums)[4],
                               const unsigned rows, const unsigned operand_count) {
    MM_UNROLL for (unsigned v = 0; v < 8; v++) {
        __m512bh weights[2];
        MM_UNROLL for (unsigned i = 0; i < rows; i++) weights[i] = (__m512bh)_mm512_loadu_si512(codes[i] + 64 * v);
        MM_UNROLL for (unsigned j = 0; j < operand_count; j++) {
            __m512bh x = (__m512bh)_mm512_load_si512(operands[j] + 64 * v);
            MM_KEEP(x);
            MM_UNROLL for (unsigned i = 0; i < rows; i++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, weights[i]);
        }
    }
}

MM_TEMPLATE void walk_block(const mm_gemm *g, const uint8_t *const *codes, const uint8_t *const *scales,
                            const uint8_t *const *operands, walk_sum (*sums)[4], const unsigned rows,
                            const unsigned operand_count, const mm_format format, const unsigned planes) {
    (void)planes;
    MM_UNROLL for (unsigned i = 0; i < rows; i += 2) {
        const unsigned two = rows - i < 2 ? 1 : 2;
        if (format == MM_BF16)
            multiply_bf16(codes + i, operands, sums + i, two, operand_count);
        else if (format == MM_FP8)
            multiply_fp8(g->table, codes + i, scales + i, operands, sums + i, two, operand_count);
        else
            multiply_four_bits(codes + i, scales + i, operands, sums + i, two, operand_count,
                               format == MM_NVFP4 ? 4 : 5);
    }
}

#include "backend/cpu/walk.h"

/* nvfp4 operands of four-bit weights are always one plane of integers. */
static bool is_plane(const mm_matrix *m, bool nvfp4) {
    return nvfp4 && (m->format == MM_NVFP4 || m->format == MM_MXFP4);
}

/* Many operand rows are worth a panel. */
static bool is_walked(const mm_matrix *m, uint32_t deciding_rows) {
    if (m->format == MM_FP8 && m->columns > WALK_FP8_COLUMNS_MAX) return false;
    return deciding_rows <= (m->format == MM_BF16 || m->format == MM_FP8 ? FEW_OPERANDS_WIDE : FEW_OPERANDS);
}

static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    if (is_plane(m, nvfp4)) return plane_bytes(1);
    return m->format != MM_BF16 && is_walked(m, deciding_rows) ? 2 : 0;
}

/* 16 columns of an operand row to where multiply_fp8 wants them. */
static inline void pack_fp8(__m256i words, size_t k, uint16_t *to) {
    uint16_t *block = to + k / 64 * 64 + k % 64 / 2;
    _mm_store_si128((__m128i *)block, _mm256_castsi256_si128(words));
    _mm_store_si128((__m128i *)(block + 32), _mm256_extracti128_si256(words, 1));
}

/* 16 columns of an operand row, a group, to where multiply_four_bits wants them. */
static inline void pack_group(__m256i words, size_t k, uint16_t *to) {
    const __m256i pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)); /* columns s and 4 + s */
    size_t group = k / 16 % 16;
    uint16_t *at = to + k / 256 * 256 + 2 * (group % 8 * 2 + group / 8);
    words = _mm256_shuffle_epi8(words, pairs);
    for (unsigned half = 0; half < 2; half++) {
        __m128i four = half ? _mm256_extracti128_si256(words, 1) : _mm256_castsi256_si128(words);
        for (unsigned s = 0; s < 4; s++, four = _mm_srli_si128(four, 4))
            _mm_storeu_si32(at + 32 * (4 * half + s), four);
    }
}

/* Operand rows as the walk wants them; BF16 weights take them as they are. */
static void pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    size_t padded = padded_columns(columns);
    if (is_plane(g->matrix, g->nvfp4)) {
        mm_vnni_pack(g, columns, first, 1, packed);
        return;
    }
    for (uint32_t r = first; r < g->count && r < first + MM_PACK_ROWS; r++) {
        const uint16_t *source = operand_row(g, r);
        uint16_t *to = (uint16_t *)packed + (r - first) * padded;
        for (size_t k = 0; k < padded; k += 16) { /* operand rows are zero-padded */
            __m256i words = _mm256_load_si256((const __m256i *)(source + k));
            g->matrix->format == MM_FP8 ? pack_fp8(words, k, to) : pack_group(words, k, to);
        }
    }
}

/* ---- the panel: 16 rows of BF16 weights, zero-padded to whole vectors ---- */

static void fill_panel(const mm_gemm *g, const void *weights, const tile_segment *s) {
    const mm_matrix *m = g->matrix;
    size_t columns = s->end - s->begin;
    (void)weights;
    for (uint32_t i = 0; i < g->row_count; i++) {
        uint16_t *row = ((tile_panel *)g->panel)->weights[i];
        uint32_t n = g->row_first + i;
        if (columns % TILE_COLUMNS) memset(row + columns, 0, TILE_COLUMNS);
        switch (m->format) {
        case MM_NVFP4: unpack_fp4(g, n, s->begin, s->end, row, 4); break;
        case MM_MXFP4: unpack_fp4(g, n, s->begin, s->end, row, 5); break;
        case MM_BF16: memcpy(row, m->codes + n * m->row_bytes + 2 * (size_t)s->begin, columns * 2); break;
        case MM_FP8: unpack_fp8(g, n, s->begin, s->end, row); break;
        }
    }
}

static void gemm(const mm_gemm *g) {
    mm_format format = g->matrix->format;
    if (is_plane(g->matrix, g->nvfp4))
        mm_vnni_gemm(g, 1);
    else if (format == MM_BF16 && is_walked(g->matrix, g->deciding_rows))
        walk_gemm(g, MM_BF16, 0);
    else if (!g->packed)
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
    else if (format == MM_NVFP4)
        walk_gemm(g, MM_NVFP4, 0);
    else if (format == MM_MXFP4)
        walk_gemm(g, MM_MXFP4, 0);
    else
        walk_gemm(g, MM_FP8, 0);
}

static void tiles(const mm_gemm *g, uint32_t columns) {
    tiled_gemm(g, NULL, columns, NULL);
}

/* ---- fp32 weights of a router ---- */

static void gemm_f32(const void *weights, uint32_t columns, const mm_gemm *g) {
    for (uint32_t i = 0; i < g->row_count; i++) {
        const uint8_t *row = (const uint8_t *)weights + (g->row_first + i) * (size_t)columns * sizeof(float);
        for (uint32_t r = 0; r < g->count; r++) {
            const uint16_t *a = operand_row(g, r);
            __m512 sums = _mm512_setzero_ps();
            for (uint32_t k = 0; k < columns; k += 16) {
                __m512i x = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)(a + k)));
                sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                       _mm512_loadu_ps(row + k * sizeof(float)), sums);
            }
            g->sums[r * g->sums_pitch + i] = tile_reduce(sums);
        }
    }
}

/* BF16 as numerics/bf16.h rounds it; vcvtneps2bf16 would flush subnormals. */
static void store(const float *values, uint32_t count, void *operand) {
    for (uint32_t i = 0; i < count; i += 16) {
        __m512 v = _mm512_loadu_ps(values + i);
        __m512i bits = _mm512_castps_si512(v), upper = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        __m512i rounded =
            _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF)), 16);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256((__m256i *)((uint16_t *)operand + i), _mm512_cvtepi32_epi16(rounded));
    }
}

void mm_kernels_avx512_bf16(mm_kernels *kernels) {
    kernels->operands_bf16 = true;
    kernels->store = store;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
