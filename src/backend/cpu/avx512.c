/*
 * AVX-512 with BF16 dot products. Both operands of every product are exact in BF16, and vdpbf16ps keeps fp32
 * sums. A few operand rows are multiplied while the weights pass through registers (`walk`); for more of them
 * the weights are dequantized into a panel (tiles.h). The two sum in different orders, so which of them runs
 * depends on deciding_rows only: the rows of an expert in the whole batch.
 */
#include <immintrin.h>
#include <stdint.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/planes.h"
#include "backend/cpu/vnni.h"

#define FEW_OPERANDS 16u  /* up to this many operand rows walk; measured crossover */
#define AHEAD_BYTES 3072u /* how far before the walk codes are prefetched: measured */

/* ---- tiles: 4 x 6 sums, 4 weights and an operand take 29 of the 32 registers ---- */

typedef uint16_t tile_element;
typedef __m512bh tile_vector;
typedef __m512 tile_sum;
enum { TILE_COLUMNS = 32, TILE_ROWS = 4, TILE_OPERANDS = 6, TILE_SEGMENT = 2048 };

/* F32 scales times E4M3 are not exact in BF16. */
static inline bool tile_scales_sums(const mm_matrix *m) {
    return m->scale_dtype == MEGAMOE_F32;
}
static inline tile_sum tile_zero(void) {
    return _mm512_setzero_ps();
}
static inline tile_sum tile_load_sum(const float *lanes) {
    return _mm512_load_ps(lanes);
}
static inline void tile_store_sum(float *lanes, tile_sum sum) {
    _mm512_store_ps(lanes, sum);
}
static inline tile_vector tile_load(const tile_element *values) {
    return (__m512bh)_mm512_load_si512(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm512_dpbf16_ps(sum, x, w);
}
static inline tile_sum tile_scale(tile_sum sum, float scale, tile_sum before) {
    return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), before);
}

/* Eight sums in one fixed order. */
static inline float sum_lanes(__m256 low, __m256 high) {
    __m256 v = _mm256_add_ps(low, high);
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

static inline float tile_reduce(tile_sum sum) {
    return sum_lanes(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
}

#include "backend/cpu/avx512_weights.h"
#include "backend/cpu/tiles.h"

/* ---- few operand rows: weights pass through registers once, scales are applied to sums ---- */

/*
 * 128 columns at a time: the 64 bytes of their codes are 32 words of four nibbles, so word i of vector s
 * holds column 4 i + s, and lane l of the sums takes columns 8 l .. 8 l + 7, half a group of 16. Operands are
 * packed in that order.
 */
typedef struct walk {
    const uint8_t *codes[4], *scales[4];
    const uint16_t *operands[4];
    __m512 sums[4][4];
    __m128i largest_scales[4]; /* bytes without sign: the largest one is NaN */
} walk;

/* E4M3 scales of eight groups, each in two lanes, times 2^-8: their bits are those of an FP16, but for NaN.
 */
static inline __m512 decode_e4m3(__m128i bytes) {
    __m256i words = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xBFFF)); /* bit 14: sign again */
    return _mm512_cvtph_ps(words);
}

/* E8M0 scales of four groups of 32, each in four lanes; 2^-127 counts as 0, and 255 becomes infinity. */
static inline __m512 decode_e8m0(__m128i bytes) {
    bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}

/* The 128 columns whose codes begin at byte `at`; `bytes` of them are there, 64 but at the end of a row. */
MM_TEMPLATE void walk_columns(walk *w, size_t at, size_t bytes, const unsigned rows, const unsigned operands,
                              const unsigned group_shift) {
    /* E2M1 as BF16, twice, for vpermw reads five bits */
    const __m512i values = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00,
                          (short)0xBF80, (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0));
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        const uint8_t *codes_at = w->codes[i] + at, *scales_at = w->scales[i] + (at >> (group_shift - 1));
        __m512i codes;
        __m128i scales;
        if (bytes == 64) {
            codes = _mm512_loadu_si512(codes_at);
            scales = group_shift == 4 ? _mm_loadl_epi64((const __m128i *)scales_at) : _mm_loadu_si32(scales_at);
        } else {
            codes = _mm512_maskz_loadu_epi8(UINT64_MAX >> (64 - bytes), codes_at);
            scales = _mm_maskz_loadu_epi8((__mmask16)(0xFFFF >> (16 - (bytes >> (group_shift - 1)))), scales_at);
        }
        w->largest_scales[i] =
            _mm_max_epu8(w->largest_scales[i], group_shift == 4 ? _mm_and_si128(scales, _mm_set1_epi8(0x7F)) : scales);
        __m512 scale = group_shift == 4 ? decode_e4m3(scales) : decode_e8m0(scales);
        __m512 part[4];
        MM_UNROLL for (unsigned j = 0; j < operands; j++) part[j] = _mm512_setzero_ps();
        MM_UNROLL for (unsigned s = 0; s < 4; s++) {
            __m512bh weights = (__m512bh)_mm512_permutexvar_epi16(s ? _mm512_srli_epi16(codes, 4 * s) : codes, values);
            MM_UNROLL for (unsigned j = 0; j < operands; j++) part[j] =
                _mm512_dpbf16_ps(part[j], (__m512bh)_mm512_load_si512(w->operands[j] + 2 * at + 32 * s), weights);
        }
        MM_UNROLL for (unsigned j = 0; j < operands; j++) w->sums[i][j] =
            _mm512_fmadd_ps(part[j], scale, w->sums[i][j]);
    }
}

/*
 * Prefetches into L2 what the rows `distance` further down hold at the same place. Rows are only kilobytes
 * long: the hardware would start anew with each, and L1 cannot wait for as many lines at a time as memory can
 * deliver.
 */
MM_TEMPLATE void prefetch_rows(const mm_matrix *m, const walk *w, size_t at, size_t distance, const unsigned rows) {
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        _mm_prefetch((const char *)w->codes[i] + distance * m->row_bytes + at, _MM_HINT_T1);
    }
    if (at % 512 == 0)
        MM_UNROLL for (unsigned i = 0; i < rows; i++)
            _mm_prefetch((const char *)w->scales[i] + distance * m->scale_row_bytes + at / 8, _MM_HINT_T1);
}

/* `rows` weight rows from `row` of the call on, times `operands` packed operand rows. */
MM_TEMPLATE void walk_rows(const mm_gemm *g, uint32_t row, uint32_t first, const unsigned rows, const unsigned operands,
                           const unsigned group_shift) {
    const mm_matrix *m = g->matrix;
    size_t at = 0, bytes = m->columns / 2, distance = rows * ((AHEAD_BYTES + bytes - 1) / bytes);
    walk w;
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        w.codes[i] = m->codes + (g->row_first + row + i) * m->row_bytes;
        w.scales[i] = m->scales + (g->row_first + row + i) * m->scale_row_bytes;
        w.largest_scales[i] = _mm_setzero_si128();
        MM_UNROLL for (unsigned j = 0; j < operands; j++) w.sums[i][j] = _mm512_setzero_ps();
    }
    MM_UNROLL for (unsigned j = 0; j < operands; j++) w.operands[j] =
        (const uint16_t *)g->packed + (first + j) * padded_columns(m->columns);
    for (; at + 64 <= bytes; at += 64) {
        prefetch_rows(m, &w, at, distance, rows);
        walk_columns(&w, at, 64, rows, operands, group_shift);
    }
    if (at < bytes) walk_columns(&w, at, bytes - at, rows, operands, group_shift);
    MM_UNROLL for (unsigned i = 0; i < rows; i++) {
        __m128i nan = _mm_set1_epi8(group_shift == 4 ? 0x7F : (char)0xFF);
        float unit = group_shift == 4 ? 256.0f : 1.0f; /* of the decoded scales */
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(w.largest_scales[i], nan))) unit = NAN;
        MM_UNROLL for (unsigned j = 0; j < operands; j++) g->sums[(first + j) * g->sums_pitch + row + i] =
            tile_reduce(w.sums[i][j]) * unit;
    }
}

/* Operand rows by fours, threes, ...; weight rows so that the sums stay in registers. */
MM_TEMPLATE void walk_all(const mm_gemm *g, const unsigned group_shift) {
    for (uint32_t r = 0; r < g->count;) {
        uint32_t left = g->count - r;
        for (uint32_t row = 0; row < g->row_count;) {
            bool four = g->row_count - row >= 4;
            if (left == 1 && four)
                walk_rows(g, row, r, 4, 1, group_shift), row += 4;
            else if (left == 2 && four)
                walk_rows(g, row, r, 4, 2, group_shift), row += 4;
            else if (left == 3 && four)
                walk_rows(g, row, r, 4, 3, group_shift), row += 4;
            else if (left >= 4 && four)
                walk_rows(g, row, r, 4, 4, group_shift), row += 4;
            else {
                for (uint32_t j = 0; j < left && j < 4; j++) walk_rows(g, row, r + j, 1, 1, group_shift);
                row++;
            }
        }
        r += left < 4 ? left : 4;
    }
}

/* Whether a few operand rows are worth their own kernel. */
static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    if (deciding_rows > FEW_OPERANDS || (m->format != MM_NVFP4 && m->format != MM_MXFP4)) return 0;
    return nvfp4 ? PLANE_BYTES : 2; /* nvfp4 operands are one plane of integers */
}

/* Operand rows in the order of walk_columns: word i of the s-th 32 of 128 columns is column 4 i + s. */
static void pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    size_t padded = padded_columns(columns);
    if (g->nvfp4) {
        mm_vnni_pack(g, columns, first, packed);
        return;
    }
    for (uint32_t r = first; r < g->count && r < first + MM_PACK_ROWS; r++) {
        const uint16_t *source = operand_row(g, r);
        uint16_t *to = (uint16_t *)packed + (r - first) * padded;
        for (size_t k = 0; k < padded; k += 128)
            for (size_t s = 0; s < 4; s++)
                for (size_t i = 0; i < 32; i++)
                    to[k + 32 * s + i] = k + 4 * i + s < columns ? source[k + 4 * i + s] : 0;
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
    if (g->packed && g->nvfp4)
        mm_vnni_gemm(g);
    else if (g->packed && g->matrix->format == MM_NVFP4)
        walk_all(g, 4);
    else if (g->packed)
        walk_all(g, 5);
    else
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
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

void mm_kernels_avx512(mm_kernels *kernels) {
    kernels->operands_bf16 = true;
    kernels->store = store;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
