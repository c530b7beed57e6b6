/*
 * AVX2 with FMA and F16C: fp32 products over a panel. nvfp4 operands, and a few rows of BF16 ones, go to
 * avx2_planes.c, which sums in another order, so which of the two runs depends on deciding_rows only.
 */
#include <immintrin.h>
#include <stdint.h>

#include "backend/cpu/avx2_planes.h"

#define FEW_OPERANDS MM_PACK_ROWS /* up to this many BF16 rows walk; more have no room as three planes */

/* ---- tiles: 2 x 6 sums, 2 weights and an operand take 15 of the 16 registers ---- */

typedef float tile_element;
typedef __m256 tile_vector;
typedef __m256 tile_sum;
enum { TILE_COLUMNS = 8, TILE_ROWS = 2, TILE_OPERANDS = 6, TILE_SEGMENT = 1024 };

static inline bool tile_scales_sums(const mm_matrix *m) {
    (void)m;
    return false;
}
static inline tile_sum tile_zero(void) {
    return _mm256_setzero_ps();
}
static inline tile_sum tile_load_sum(const float *lanes) {
    return _mm256_load_ps(lanes);
}
static inline void tile_store_sum(float *lanes, tile_sum sum) {
    _mm256_store_ps(lanes, sum);
}
static inline tile_vector tile_load(const tile_element *values) {
    return _mm256_load_ps(values);
}
static inline tile_sum tile_multiply(tile_sum sum, tile_vector x, tile_vector w) {
    return _mm256_fmadd_ps(x, w, sum);
}
static inline tile_sum tile_scale(tile_sum sum, float scale, tile_sum before) {
    return _mm256_fmadd_ps(sum, _mm256_set1_ps(scale), before);
}
static inline float tile_reduce(tile_sum sum) {
    __m128 w = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    w = _mm_add_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}

#include "backend/cpu/fp32_panel.h"

static unsigned packs(const mm_matrix *m, uint32_t deciding_rows, bool nvfp4) {
    return plane_packs(m, deciding_rows, nvfp4, FEW_OPERANDS);
}

static void pack(const mm_gemm *g, uint32_t columns, uint32_t first, uint8_t *packed) {
    mm_avx2_planes_pack(g, columns, first, plane_count(g->nvfp4), packed);
}

static void gemm(const mm_gemm *g) {
    if (g->packed)
        mm_avx2_planes_gemm(g, plane_count(g->nvfp4));
    else
        tiled_gemm(g, NULL, g->matrix->columns, fill_panel);
}

static void store(const float *values, uint32_t count, void *operand) {
    for (uint32_t i = 0; i < count; i += 8) {
        __m256 v = _mm256_loadu_ps(values + i);
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
        __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        __m256 quiet = _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
        __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan);
        _mm256_storeu_ps((float *)operand + i,
                         _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000))));
    }
}

void mm_kernels_avx2(mm_kernels *kernels) {
    mm_kernels_avx2_rows(kernels);
    kernels->store = store;
    kernels->gemm = gemm;
    kernels->packs = packs;
    kernels->pack = pack;
    kernels->gemm_f32 = gemm_f32;
    kernels->tiles = tiles;
}
