/* What tiles of 512 bits share, whatever they multiply: fp32 sums, for tiles.h. */
#ifndef MM_CPU_AVX512_TILES_H
#define MM_CPU_AVX512_TILES_H

#include "backend/cpu/avx512_walk.h"

typedef __m512 tile_sum;

static inline tile_sum tile_zero(void) {
    return _mm512_setzero_ps();
}
static inline tile_sum tile_load_sum(const float *lanes) {
    return _mm512_load_ps(lanes);
}
static inline void tile_store_sum(float *lanes, tile_sum sum) {
    _mm512_store_ps(lanes, sum);
}
static inline tile_sum tile_scale(tile_sum sum, float scale, tile_sum before) {
    return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), before);
}
static inline float tile_reduce(tile_sum sum) {
    return walk_reduce(sum);
}

#endif
