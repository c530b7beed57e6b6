/*
 * AMX with BF16 tiles, for many operand rows: a tile product multiplies 16 weight rows with 16 operand rows
 * over 32 columns. Weight rows are dequantized into a panel and are tiles as they stand; operands are packed
 * once per layer into tiles of 16 column pairs by 16 rows. Few operand rows are left to walks, whose sums
 * have another order, so here and only here the number of rows of an expert in the whole batch
 * (deciding_rows) shows in the last bits.
 *
 * Tile products take 16 cycles of a unit of their own, so the panel of the next segment is dequantized
 * between them.
 */
#include <immintrin.h>

#include "backend/cpu/avx512_weights.h"
#include "backend/cpu/planes.h"
#include "backend/cpu/vnni.h"

/* Up to this many operand rows go through vnni.c: where its instructions, counted, cost what a panel does. */
#define WALKED_ROWS 3u
#define WALKED_ROWS_NVFP4 5u

enum {
    TILE = 16,            /* rows of a tile, and its dwords per row */
    STEP = 32,            /* columns of a tile product */
    SEGMENT = 1024,       /* columns of a panel; two of them and the sums stay in L2 */
    PITCH = SEGMENT + 32, /* one line more spreads the rows over the sets of a cache */
    PASSES_MAX = 32,      /* of 32 operand rows in one call */
};

typedef struct panel {
    _Alignas(64) uint16_t weights[2][MM_ROWS_MAX][PITCH];
    _Alignas(64) float sums[PASSES_MAX][2][2][TILE][TILE]; /* [weight half][operand half][weight row][operand row] */
} panel;
_Static_assert(sizeof(panel) <= MM_PANEL_BYTES, "the panel fits the scratch of a thread");
_Static_assert(MM_ROWS_MAX == 2 * TILE && MM_PACK_ROWS == TILE, "a call is two tiles of weight rows");

/* The level below: for routers, the fewest rows, and weights that are not exact in BF16. */
static mm_kernels narrow;

/* FP8 under F32 scales is not exact in BF16 once scaled. */
static bool is_tiled(const mm_matrix *m, uint32_t deciding_rows) {
    return deciding_rows > 2 && !(m->format == MM_FP8 && m->scale_dtype != MEGAMOE_E8M0);
}

static bool is_walked(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    return deciding_rows <= (nvfp4 ? WALKED_ROWS_NVFP4 : WALKED_ROWS) &&
           (m->format == MM_NVFP4 || m->format == MM_MXFP4);
}

static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    if (is_walked(m, deciding_rows, nvfp4)) return plane_bytes(plane_count(nvfp4));
    return is_tiled(m, deciding_rows) ? 2 : narrow.packs(m, deciding_rows, nvfp4);
}

/* A tile for every 32 columns: row p holds columns 2 p and 2 p + 1 of the 16 operand rows, a dword each. */
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
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t row = first + r;
        source[r] = g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[row] : row);
    }
    for (size_t k = 0; k < columns; k += STEP, packed += TILE * 64) {
        uint32_t *tile = (uint32_t *)packed;
        for (uint32_t r = 0; r < TILE; r++) {
            const __m512i dwords = r < rows ? _mm512_load_si512(source[r] + 2 * k) : _mm512_setzero_si512();
            const __m512i places =
                _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
            _mm512_i32scatter_epi32(tile + r, places, dwords, 4);
        }
    }
}

/* ---- the panel ---- */

/* Columns begin .. of row i of the call, into panel `half`. */
static inline void unpack_row(const mm_gemm *g, uint32_t i, uint32_t begin, unsigned half) {
    const mm_matrix *m = g->matrix;
    uint16_t *row = ((panel *)g->panel)->weights[half][i];
    uint32_t n = g->row_first + i, end = m->columns - begin < SEGMENT ? m->columns : begin + SEGMENT;
    if ((end - begin) % STEP) memset(row + (end - begin), 0, STEP);
    switch (m->format) {
    case MM_NVFP4: unpack_fp4(g, n, begin, end, row, 4); break;
    case MM_MXFP4: unpack_fp4(g, n, begin, end, row, 5); break;
    case MM_BF16: memcpy(row, m->codes + n * m->row_bytes + 2 * (size_t)begin, (end - begin) * sizeof *row); break;
    case MM_FP8: unpack_fp8(g, n, begin, end, row); break;
    }
}

/* ---- tiles: 0 to 3 are sums, 4 and 5 weights, 6 and 7 operands ---- */

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure(void) {
    tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = TILE;
    _tile_loadconfig(&config);
}

/* What goes on while tiles are multiplied: row `next` .. of the segment at `begin` goes to panel `half`. */
typedef struct unpacking {
    uint32_t next, begin;
    unsigned half;
} unpacking;

static inline void unpack_next(const mm_gemm *g, unpacking *u) {
    if (u->next < g->row_count) unpack_row(g, u->next++, u->begin, u->half);
}

/* One segment times 32 operand rows, or 16 if there is no second block. */
MM_TEMPLATE void multiply(const mm_gemm *g, uint32_t begin, uint32_t pass, unsigned half, unpacking *u, const bool two,
                          uint32_t columns) {
    panel *p = g->panel;
    float(*sums)[2][TILE][TILE] = p->sums[pass];
    size_t block_bytes = padded_columns(columns) * 2 * TILE, steps = (columns + STEP - 1) / STEP;
    const uint8_t *b0 = g->packed + 2 * pass * block_bytes + (size_t)begin * 2 * TILE, *b1 = b0 + block_bytes;
    const uint16_t *a0 = p->weights[half][0], *a1 = p->weights[half][TILE];
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(2);
        if (two) _tile_zero(1);
        if (two) _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0][0], 64);
        _tile_loadd(2, sums[1][0], 64);
        if (two) _tile_loadd(1, sums[0][1], 64);
        if (two) _tile_loadd(3, sums[1][1], 64);
    }
    steps -= begin / STEP;
    if (steps > SEGMENT / STEP) steps = SEGMENT / STEP;
    for (size_t step = 0; step < steps; step++) {
        _tile_loadd(4, a0 + step * STEP, PITCH * 2);
        _tile_loadd(6, b0 + step * TILE * 64, 64);
        _tile_loadd(5, a1 + step * STEP, PITCH * 2);
        if (two) _tile_loadd(7, b1 + step * TILE * 64, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_dpbf16ps(3, 5, 7);
        unpack_next(g, u);
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(2, sums[1][0], 64);
    if (two) _tile_stored(1, sums[0][1], 64);
    if (two) _tile_stored(3, sums[1][1], 64);
}

/* Sums lie by weight row; the caller wants them by operand row. */
static void write_sums(const mm_gemm *g) {
    const panel *p = g->panel;
    const __m512i by_row = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    for (uint32_t r = 0; r < g->count; r++)
        for (uint32_t half = 0; half * TILE < g->row_count; half++) {
            uint32_t left = g->row_count - half * TILE;
            const float *column = &p->sums[r / (2 * TILE)][half][r / TILE % 2][0][r % TILE];
            __m512 sums = _mm512_i32gather_ps(by_row, column, 4);
            __mmask16 valid = (__mmask16)(left < TILE ? (1u << left) - 1 : 0xFFFFu);
            _mm512_mask_storeu_ps(g->sums + r * g->sums_pitch + half * TILE, valid, sums);
        }
}

/* unpacks: false leaves the panel as it is, to time the tiles alone. */
MM_TEMPLATE void packed_gemm(const mm_gemm *g, uint32_t columns, const bool unpacks) {
    uint32_t blocks = (g->count + TILE - 1) / TILE, passes = (blocks + 1) / 2;
    unsigned half = 0;
    configure();
    for (uint32_t i = 0; i < g->row_count && unpacks; i++) unpack_row(g, i, 0, 0);
    for (uint32_t k = 0; k < columns; k += SEGMENT, half ^= 1) {
        unpacking u = {
            .next = unpacks && k + SEGMENT < columns ? 0 : UINT32_MAX, .begin = k + SEGMENT, .half = half ^ 1};
        for (uint32_t pass = 0; pass < passes; pass++) {
            if (2 * pass + 1 < blocks)
                multiply(g, k, pass, unpacks ? half : 0, &u, true, columns);
            else
                multiply(g, k, pass, unpacks ? half : 0, &u, false, columns);
        }
        while (u.next < g->row_count) unpack_next(g, &u);
    }
    _tile_release();
    write_sums(g);
}

static void gemm(const mm_gemm *g) {
    if (is_walked(g->matrix, g->deciding_rows, g->nvfp4))
        mm_vnni_gemm(g, plane_count(g->nvfp4));
    else if (is_tiled(g->matrix, g->deciding_rows))
        packed_gemm(g, g->matrix->columns, true);
    else
        narrow.gemm(g);
}

/* Any bytes are operands here: they need not be packed to be multiplied. */
static void tiles(const mm_gemm *g, uint32_t columns) {
    mm_gemm packed = *g;
    packed.packed = g->operands;
    packed_gemm(&packed, columns, false);
}

void mm_kernels_amx(mm_kernels *kernels) {
    narrow = *kernels;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->tiles = tiles;
}
