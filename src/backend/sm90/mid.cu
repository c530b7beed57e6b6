/*
 * Entries of up to 64 tokens: memory binds, so a stage holds two 128-groups and more bytes are in flight. Widths in
 * steps of 8 up to 48, where a wider tile costs most.
 */
#include "backend/sm90/tile.cuh"

using shape = tile_shape<64, 2, 3, 32>;

#define TILE_KERNEL(name, l1, mx)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)                                                      \
        name(MM_GRID_CONSTANT(CUtensorMap, rows64), MM_GRID_CONSTANT(CUtensorMap, rows8),                              \
             MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {                                                              \
        tile_kernel<l1, mx, shape, 8, 16, 24, 32, 40, 48, 64>(&rows64, &rows8, args);                                  \
    }

TILE_KERNEL(mm_mid_l1_nvfp4, true, false)
TILE_KERNEL(mm_mid_l2_nvfp4, false, false)
TILE_KERNEL(mm_mid_l1_mxfp4, true, true)
TILE_KERNEL(mm_mid_l2_mxfp4, false, true)
