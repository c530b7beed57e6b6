/*
 * AVX-512 with VNNI, without the BF16 and VBMI of later processors (Cascade Lake, Ice Lake): operands are fp32 as
 * with AVX2. nvfp4 ones, and a few rows of BF16 ones, are multiplied as integers (planes.h); more of these over a
 * panel in fp32. The two sum in different orders, so which of them runs depends on deciding_rows only.
 */
#include "backend/cpu/avx512_planes.h"
#include "backend/cpu/avx512_tiles.h"

#define FEW_OPERANDS MM_PACK_ROWS /* up to this many BF16 rows walk; more have no room as three planes */

/* ---- tiles: 4 x 6 sums, 4 weights and an operand take 29 of the 32 registers ---- */

typedef float tile_element;
typedef __m512 tile_vector;
enum { TILE_COLUMNS = 16, TILE_ROWS = 4, TILE_OPERANDS = 6, TILE_SEGMENT = 1024 };

static inline bool tile_scales_sums(const mm_matrix *m) {
    (void)m;
    return false;
}
static inline tile_vector tile_load(const tile_element *values) {
    return _mm512_load_ps(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm512_fmadd_ps(x, w, sum);
}

#include "backend/cpu/fp32_panel.h"

static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    return plane_packs(m, deciding_rows, nvfp4, FEW_OPERANDS);
}

static void pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    pack_planes(g, columns, first, false, plane_count(g->nvfp4), packed);
}

static void gemm(const mm_gemm *g) {
    if (g->packed)
        planes_gemm(g, plane_count(g->nvfp4));
    else
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
}

void mm_kernels_avx512(mm_kernels *kernels) {
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
