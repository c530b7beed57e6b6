/*
 * AMX with BF16 tiles, for many operand rows: a tile product multiplies 16 weight rows with 16 operand rows
 * over 32 columns. Weight rows are dequantized into a panel of tiles; operands are packed once per layer into
 * tiles of 16 column pairs by 16 rows. Few operand rows are left to walks, whose sums have another order, so
 * here and only here the number of rows of an expert in the whole batch (deciding_rows) shows in the last bits.
 *
 * Tile products take 16 cycles of a unit of their own. The vector units dequantize the next segment meanwhile, a few
 * vectors after each product, so that both find work within the processor's window. Two segments of the panel stay in
 * L1 while operands stream from L2.
 */
#include <immintrin.h>

#include "backend/cpu/avx512_walk.h"
#include "backend/cpu/avx512_weights.h"
#include "backend/cpu/planes.h"
#include "backend/cpu/vnni.h"

/* Up to this many operand rows go through vnni.c, which takes less time than a panel then. */
#define WALKED_ROWS 2u
#define WALKED_ROWS_NVFP4 6u

enum {
    TILE = 16,  /* rows of a tile, and its dwords per row */
    STEP = 32,  /* columns of a tile product */
    QUAD = 128, /* columns that are dequantized together: a cache line of NVFP4 codes, a tile row each in four steps */
    SEGMENT = 256, /* columns of a panel */
    STEPS = SEGMENT / STEP,
    GROUP_ROWS = 128, /* of operands in one call: at 7168 columns they fill L2 */
    PASSES_MAX = GROUP_ROWS / (2 * TILE),
};

typedef struct panel {
    _Alignas(64) uint16_t weights[2][STEPS][2 * TILE][STEP]; /* a step of 32 rows is two tiles */
    _Alignas(64) float sums[PASSES_MAX][2][2][TILE][TILE];   /* [weight half][operand half][weight row][operand row] */
} panel;
_Static_assert(sizeof(panel) <= MM_PANEL_BYTES, "the panel fits the scratch of a thread");
_Static_assert(MM_ROWS_MAX == 2 * TILE && MM_PACK_ROWS == TILE, "a call is two tiles of weight rows");
_Static_assert(MM_OPERAND_PAD % SEGMENT == 0, "operand rows are whole segments");

/* The level below: for routers, the fewest rows, and weights that are not exact in BF16. */
static mm_kernels narrow;

static bool is_fp4(const mm_matrix *m) {
    return m->format == MM_NVFP4 || m->format == MM_MXFP4;
}

/* What does not walk. FP8 under F32 scales is not exact in BF16 once scaled. */
static bool is_tiled(const mm_matrix *m, uint32_t deciding_rows) {
    if (is_fp4(m)) return true;
    return deciding_rows > 2 && !(m->format == MM_FP8 && m->scale_dtype != MEGAMOE_E8M0);
}

static bool is_walked(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    return deciding_rows <= (nvfp4 ? WALKED_ROWS_NVFP4 : WALKED_ROWS) && is_fp4(m);
}

static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    if (is_walked(m, deciding_rows, nvfp4)) return plane_bytes(plane_count(nvfp4));
    return is_tiled(m, deciding_rows) ? 2 : narrow.packs(m, deciding_rows, nvfp4);
}

/* 16 vectors of 16 dwords become their columns. */
static inline void transpose(__m512i v[TILE]) {
    __m512i t[TILE];
    MM_UNROLL for (unsigned i = 0; i < TILE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    MM_UNROLL for (unsigned i = 0; i < TILE; i += 4) MM_UNROLL for (unsigned j = 0; j < 2; j++) {
        v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
        v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
    MM_UNROLL for (unsigned i = 0; i < TILE; i += 8) MM_UNROLL for (unsigned j = 0; j < 4; j++) {
        t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0x88);
        t[i + 4 + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0xDD);
    }
    MM_UNROLL for (unsigned j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    }
}

/*
 * Four-bit weights come out of their bytes in another order of columns, and operands follow. MXFP4: word 8 i + w of a
 * step is its column 4 w + i. NVFP4: word w of step i is column 4 w + i of the quad.
 */
static inline void order_columns(__m512i quad[4], mm_format format) {
    const __m512i by_four = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 4, 8, 12, 16, 20, 24, 28));
    const __m512i lanes = _mm512_set_epi64(0x0003000300030003, 0x0003000300030003, 0x0002000200020002,
                                           0x0002000200020002, 0x0001000100010001, 0x0001000100010001, 0, 0);
    if (format != MM_NVFP4 && format != MM_MXFP4) return;
    for (unsigned s = 0; s < 4; s++) quad[s] = _mm512_permutexvar_epi16(_mm512_add_epi16(by_four, lanes), quad[s]);
    if (format == MM_MXFP4) return;
    /* lane i of all four vectors to vector i */
    __m512i low[2] = {_mm512_shuffle_i32x4(quad[0], quad[1], 0x44), _mm512_shuffle_i32x4(quad[2], quad[3], 0x44)};
    __m512i high[2] = {_mm512_shuffle_i32x4(quad[0], quad[1], 0xEE), _mm512_shuffle_i32x4(quad[2], quad[3], 0xEE)};
    quad[0] = _mm512_shuffle_i32x4(low[0], low[1], 0x88);
    quad[1] = _mm512_shuffle_i32x4(low[0], low[1], 0xDD);
    quad[2] = _mm512_shuffle_i32x4(high[0], high[1], 0x88);
    quad[3] = _mm512_shuffle_i32x4(high[0], high[1], 0xDD);
}

/*
 * NVFP4 weights are 2^-112 of their value in the panel (see decode_quad), so their operands are multiplied by 2^112;
 * rows that would overflow, with values from 2^16 on, by less. Returns what their sums are to be multiplied by.
 */
static float operand_factor(const uint8_t *row, uint32_t columns, float *factor) {
    __m512i most = _mm512_setzero_si512();
    for (size_t k = 0; k < padded_columns(columns); k += STEP) {
        __m512i magnitudes = _mm512_and_si512(_mm512_load_si512(row + 2 * k), _mm512_set1_epi16(0x7FFF));
        __mmask32 finite = _mm512_cmplt_epi16_mask(magnitudes, _mm512_set1_epi16(0x7F80));
        most = _mm512_mask_max_epi16(most, finite, most, magnitudes);
    }
    most = _mm512_max_epi32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xFFFF)));
    int exponent = (_mm512_reduce_max_epi32(most) >> 7) - 127, excess = exponent > 15 ? exponent - 15 : 0;
    *factor = ldexpf(1.0f, 112 - excess);
    return ldexpf(1.0f, excess);
}

/* A tile for every 32 columns: row p holds dword p, a pair of columns, of the 16 operand rows. Factors of the sums
 * follow. */
static void pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    if (is_walked(g->matrix, g->deciding_rows, g->nvfp4)) {
        mm_vnni_pack(g, columns, first, plane_count(g->nvfp4), packed);
        return;
    }
    if (!is_tiled(g->matrix, g->deciding_rows)) {
        narrow.pack(g, columns, first, packed);
        return;
    }
    uint32_t rows = g->count - first < TILE ? g->count - first : TILE;
    const uint8_t *source[TILE];
    float factors[TILE], *sum_factors = (float *)(packed + padded_columns(columns) * 2 * TILE);
    const mm_format format = g->matrix->format;
    for (uint32_t r = 0; r < TILE; r++) sum_factors[r] = 1.0f;
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t row = first + r;
        source[r] = g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[row] : row);
        if (format == MM_NVFP4) sum_factors[r] = operand_factor(source[r], columns, &factors[r]);
    }
    for (size_t k = 0; k < padded_columns(columns); k += QUAD, packed += QUAD * 2 * TILE) {
        __m512i v[QUAD / STEP][TILE] = {{{0}}};
        for (uint32_t r = 0; r < rows; r++) {
            __m512i quad[4];
            for (unsigned s = 0; s < 4; s++) {
                quad[s] = _mm512_load_si512(source[r] + 2 * (k + s * STEP));
                if (format == MM_NVFP4) quad[s] = scale_bf16(quad[s], _mm512_set1_ps(factors[r]));
            }
            order_columns(quad, format);
            for (unsigned s = 0; s < 4; s++) v[s][r] = quad[s];
        }
        for (unsigned s = 0; s < 4; s++) {
            transpose(v[s]);
            for (uint32_t r = 0; r < TILE; r++) _mm512_store_si512(packed + (s * TILE + r) * 64, v[s][r]);
        }
    }
}

/* ---- the panel ---- */

/* 32 columns of MXFP4 to BF16: nibbles to words, words to the products of their scale with the codes. */
static inline __m512i decode_mxfp4(const uint8_t *codes, const products *table, uint8_t scale) {
    const __m512i shifts = _mm512_set_epi64(0x000C000C000C000C, 0x000C000C000C000C, 0x0008000800080008,
                                            0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
    __m512i index = _mm512_srlv_epi16(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes)), shifts);
    /* more bits than a nibble's are in the index, but both halves of the table are the same */
    return _mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)table[scale])));
}

/*
 * 128 columns of NVFP4 to `values`, a step each. E2M1 becomes 256 times its value as FP16, E4M3 2^-8 times its value,
 * and their product has at most six significant bits: exact. Its five bits of exponent, moved to where BF16 has eight,
 * count 2^-112 times as much. NaN scales come out as 480: see row_unit. Products of a table (as above) take two loads
 * for 16 weights, which is what seemed to bind this on a Xeon (by timing; no counters could be read).
 */
static inline void decode_quad(const uint8_t *codes, const uint8_t *scales, __m512i values[4]) {
    const __m512i e2m1 = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66, -0x80, -0x28,
                                                              -0x24, -0x22, -0x20, -0x1E, -0x1C, -0x1A));
    const __m512i upper_bytes = _mm512_set_epi32(0x07FF07FF, 0x07FF07FF, 0x06FF06FF, 0x06FF06FF, 0x05FF05FF, 0x05FF05FF,
                                                 0x04FF04FF, 0x04FF04FF, 0x03FF03FF, 0x03FF03FF, 0x02FF02FF, 0x02FF02FF,
                                                 0x01FF01FF, 0x01FF01FF, 0x00FF00FF, 0x00FF00FF);
    const __m512i no_repeated_sign = _mm512_set1_epi16((short)0xBFFF),
                  exponent_moved = _mm512_set1_epi16((short)0x8FFF);
    int64_t eight;
    memcpy(&eight, scales, sizeof eight);
    __m512i scale = _mm512_srai_epi16(_mm512_shuffle_epi8(_mm512_set1_epi64(eight), upper_bytes), 1);
    scale = _mm512_and_si512(scale, no_repeated_sign);
    __m512i words = _mm512_loadu_si512(codes);
    __m512i nibbles[4] = {_mm512_slli_epi16(words, 8), _mm512_slli_epi16(words, 4), words, _mm512_srli_epi16(words, 4)};
    MM_UNROLL for (unsigned i = 0; i < 4;
                   i++) { /* the nibble is at the bottom of the upper byte; vpermb reads six bits */
        __m512i halves = _mm512_maskz_permutexvar_epi8(0xAAAAAAAAAAAAAAAA, nibbles[i], e2m1);
        halves = _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(halves), _mm512_castsi512_ph(scale)));
        values[i] = _mm512_and_si512(_mm512_srai_epi16(halves, 3), exponent_moved);
    }
}

/* What the sums of matrix row n are to be multiplied by: NaN if there is a NaN scale that decode_quad took for a
 * number. */
static float row_unit(const mm_matrix *m, uint32_t n) {
    return m->format == MM_NVFP4 && walk_nan_scales(m->scales + n * m->scale_row_bytes, m->columns / 16, 4) ? NAN
                                                                                                            : 1.0f;
}

/* Row i of the call in the segment at column k, whatever is there of it, to panel `half`; the rest is zero. */
static __attribute__((noinline)) void unpack_any(const mm_gemm *g, uint32_t i, uint32_t k, unsigned half) {
    const mm_matrix *m = g->matrix;
    uint32_t n = g->row_first + i, end = m->columns - k < SEGMENT ? m->columns : k + SEGMENT;
    const uint8_t *codes = m->codes + n * m->row_bytes, *scales = m->scales + n * m->scale_row_bytes;
    uint16_t(*to)[2 * TILE][STEP] = ((panel *)g->panel)->weights[half];
    for (uint32_t s = 0; s < STEPS; s++) memset(to[s][i], 0, sizeof to[s][i]);
    for (uint32_t s = 0; m->format == MM_NVFP4 && k < end; s += 4, k += QUAD) {
        uint8_t codes_copy[QUAD / 2] = {0}, scales_copy[QUAD / 16] = {0};
        uint32_t there = end - k < QUAD ? end - k : QUAD;
        __m512i values[4];
        memcpy(codes_copy, codes + k / 2, there / 2);
        memcpy(scales_copy, scales + k / 16, there / 16);
        decode_quad(codes_copy, scales_copy, values);
        for (uint32_t q = 0; q < 4; q++) _mm512_store_si512(to[s + q][i], values[q]);
    }
    for (uint32_t s = 0; k < end; s++, k += STEP) {
        uint32_t there = end - k < STEP ? end - k : STEP;
        if (m->format == MM_MXFP4)
            _mm512_store_si512(to[s][i], decode_mxfp4(codes + k / 2, g->table->products_bf16, scales[k / 32]));
        else if (m->format == MM_BF16)
            memcpy(to[s][i], codes + 2 * (size_t)k, there * sizeof(uint16_t));
        else
            unpack_fp8(g, n, k, k + there, to[s][i]);
    }
}

/* What goes on while tiles are multiplied: `left` more rows of the segment at column `begin` go to panel `half`. */
typedef struct unpacking {
    const products *table;
    const uint8_t *codes, *scales; /* of the next row, of four-bit weights */
    uint16_t *to;
    uint32_t left, begin;
    uint32_t due, blocks; /* after `blocks` tile products, two rows are due */
    unsigned half;
} unpacking;

static unpacking unpack_begin(const mm_gemm *g, uint32_t k, unsigned half) {
    const mm_matrix *m = g->matrix;
    unpacking u = {.to = ((panel *)g->panel)->weights[half][0][0], .left = g->row_count, .begin = k, .half = half};
    if (!is_fp4(m)) return u;
    u.table = g->table->products_bf16;
    u.codes = m->codes + g->row_first * m->row_bytes + k / 2;
    u.scales = m->scales + g->row_first * m->scale_row_bytes + k / (m->format == MM_NVFP4 ? 16 : 32);
    return u;
}

/* Whole segments of four-bit weights are what takes the time. */
MM_TEMPLATE void unpack_row(const mm_gemm *g, unpacking *u, const mm_format format, bool whole) {
    const mm_matrix *m = g->matrix;
    if ((format == MM_NVFP4 || format == MM_MXFP4) && whole) {
        const char *ahead = (const char *)u->codes + MM_ROWS_MAX * m->row_bytes; /* the next call's rows */
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + 64, _MM_HINT_T1);
        if (u->begin % 1024 == 0) _mm_prefetch((const char *)u->scales + MM_ROWS_MAX * m->scale_row_bytes, _MM_HINT_T1);
        MM_UNROLL for (unsigned s = 0; s < STEPS; s += 4) {
            const uint8_t *codes = u->codes + s * (STEP / 2);
            __m512i values[4];
            if (format == MM_NVFP4)
                decode_quad(codes, u->scales + s * (STEP / 16), values);
            else
                MM_UNROLL for (unsigned q = 0; q < 4; q++) values[q] =
                    decode_mxfp4(codes + q * (STEP / 2), u->table, u->scales[s + q]);
            MM_UNROLL for (unsigned q = 0; q < 4; q++) _mm512_store_si512(u->to + (s + q) * 2 * TILE * STEP, values[q]);
        }
        u->codes += m->row_bytes;
        u->scales += m->scale_row_bytes;
    } else {
        unpack_any(g, g->row_count - u->left, u->begin, u->half);
    }
    u->to += STEP;
    u->left--;
}

MM_TEMPLATE void unpack_due(const mm_gemm *g, unpacking *u, const mm_format format) {
    for (u->due += 2; u->due >= u->blocks; u->due -= u->blocks)
        if (u->left > 0) unpack_row(g, u, format, true);
}

/* ---- tiles: 0 to 3 are sums, 4 and 5 weights, 6 and 7 operands ---- */

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Constant: compilers take _tile_loadconfig for a read of eight bytes and may drop the stores of the others. */
static const tile_config config = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};

/* One segment times 32 operand rows, or 16 if there is no second block. Sums are in memory before if `resumes`, and
 * after if `pauses`; else in their tiles. */
MM_TEMPLATE void multiply(const mm_gemm *g, uint32_t begin, uint32_t pass, unsigned half, unpacking *u, const bool two,
                          const mm_format format, size_t block_bytes, uint32_t steps, bool resumes, bool pauses) {
    panel *p = g->panel;
    float(*sums)[2][TILE][TILE] = p->sums[pass];
    const uint8_t *b0 = g->packed + 2 * pass * block_bytes + (size_t)begin * 2 * TILE, *b1 = b0 + block_bytes;
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(2);
        if (two) _tile_zero(1);
        if (two) _tile_zero(3);
    } else if (resumes) {
        _tile_loadd(0, sums[0][0], 64);
        _tile_loadd(2, sums[1][0], 64);
        if (two) _tile_loadd(1, sums[0][1], 64);
        if (two) _tile_loadd(3, sums[1][1], 64);
    }
    for (uint32_t step = 0; step < steps; step++) {
        uint16_t(*a)[STEP] = p->weights[half][step];
        _tile_loadd(4, a[0], 64);
        _tile_loadd(6, b0 + step * TILE * 64, 64);
        _tile_dpbf16ps(0, 4, 6);
        unpack_due(g, u, format);
        _tile_loadd(5, a[TILE], 64);
        _tile_dpbf16ps(2, 5, 6);
        unpack_due(g, u, format);
        if (!two) continue;
        _tile_loadd(7, b1 + step * TILE * 64, 64);
        _tile_dpbf16ps(1, 4, 7);
        unpack_due(g, u, format);
        _tile_dpbf16ps(3, 5, 7);
        unpack_due(g, u, format);
    }
    if (!pauses) return;
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(2, sums[1][0], 64);
    if (two) _tile_stored(1, sums[0][1], 64);
    if (two) _tile_stored(3, sums[1][1], 64);
}

/* Sums lie by weight row; the caller wants them by operand row. */
static void write_sums(const mm_gemm *g, uint32_t columns) {
    const panel *p = g->panel;
    float units[2 * TILE];
    for (uint32_t i = 0; i < g->row_count; i++) units[i] = g->matrix ? row_unit(g->matrix, g->row_first + i) : 1.0f;
    for (uint32_t first = 0; first < g->count; first += TILE) {
        const uint8_t *block = g->packed + first / TILE * packed_block_bytes(columns, 2);
        const __m512 factors = _mm512_load_ps(block + padded_columns(columns) * 2 * TILE);
        uint32_t rows = g->count - first < TILE ? g->count - first : TILE;
        for (uint32_t half = 0; half * TILE < g->row_count; half++) {
            uint32_t left = g->row_count - half * TILE < TILE ? g->row_count - half * TILE : TILE;
            float *to = g->sums + first * g->sums_pitch + half * TILE;
            __m512i v[TILE] = {{0}};
            for (uint32_t i = 0; i < left; i++) {
                __m512 sums = _mm512_load_ps(p->sums[first / (2 * TILE)][half][first / TILE % 2][i]);
                v[i] = _mm512_castps_si512(
                    _mm512_mul_ps(_mm512_mul_ps(sums, factors), _mm512_set1_ps(units[half * TILE + i])));
            }
            transpose(v);
            for (uint32_t r = 0; r < rows; r++)
                _mm512_mask_storeu_epi32(to + r * g->sums_pitch, (__mmask16)(0xFFFFu >> (TILE - left)), v[r]);
        }
    }
}

/* unpacks: false leaves the panel as it is, to time the tiles alone. */
MM_TEMPLATE void packed_gemm(const mm_gemm *g, uint32_t columns, const bool unpacks, const mm_format format) {
    uint32_t blocks = (g->count + TILE - 1) / TILE, passes = (blocks + 1) / 2;
    size_t block_bytes = packed_block_bytes(columns, 2);
    bool spills = passes > 1;
    unpacking u = {.blocks = UINT32_MAX};
    _tile_loadconfig(&config);
    if (unpacks)
        for (u = unpack_begin(g, 0, 0); u.left > 0;) unpack_row(g, &u, format, columns >= SEGMENT);
    for (uint32_t k = 0; k < columns; k += SEGMENT) {
        bool last = k + SEGMENT >= columns, next_whole = k + 2 * SEGMENT <= columns;
        unsigned half = k / SEGMENT % 2;
        uint32_t steps = last ? (columns - k + QUAD - 1) / QUAD * (QUAD / STEP) : STEPS;
        if (unpacks && !last) u = unpack_begin(g, k + SEGMENT, half ^ 1);
        u.blocks = unpacks && next_whole ? blocks : UINT32_MAX;
        for (uint32_t pass = 0; pass < passes; pass++) {
            if (2 * pass + 1 < blocks)
                multiply(g, k, pass, half, &u, true, format, block_bytes, steps, spills, spills || last);
            else
                multiply(g, k, pass, half, &u, false, format, block_bytes, steps, spills, spills || last);
        }
        while (u.left > 0) unpack_row(g, &u, format, next_whole);
    }
    _tile_release();
    write_sums(g, columns);
}

static void gemm(const mm_gemm *g) {
    const mm_matrix *m = g->matrix;
    if (is_walked(m, g->deciding_rows, g->nvfp4))
        mm_vnni_gemm(g, plane_count(g->nvfp4));
    else if (!is_tiled(m, g->deciding_rows))
        narrow.gemm(g);
    else if (m->format == MM_NVFP4)
        packed_gemm(g, m->columns, true, MM_NVFP4);
    else if (m->format == MM_MXFP4)
        packed_gemm(g, m->columns, true, MM_MXFP4);
    else if (m->format == MM_BF16)
        packed_gemm(g, m->columns, true, MM_BF16);
    else
        packed_gemm(g, m->columns, true, MM_FP8);
}

/* Any bytes are operands here: they need not be packed to be multiplied. */
static void tiles(const mm_gemm *g, uint32_t columns) {
    mm_gemm packed = *g;
    packed.packed = g->operands;
    packed_gemm(&packed, columns, false, MM_NVFP4);
}

void mm_kernels_amx(mm_kernels *kernels) {
    narrow = *kernels;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->tiles = tiles;
    kernels->group_rows = GROUP_ROWS;
}
