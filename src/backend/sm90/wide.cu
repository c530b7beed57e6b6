/*
 * Entries of 65 to 160 tokens: the tensor cores bind. Accumulators of 2 x m64 x n160 leave room for nothing else, and
 * more than three widths make ptxas serialize the wgmma or spill.
 */
#include "backend/sm90/tile.cuh"

using shape = tile_shape<160, 1, 4, 0>;

#define TILE_KERNEL(name, l1, mx)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)                                                      \
        name(MM_GRID_CONSTANT(CUtensorMap, rows64), MM_GRID_CONSTANT(CUtensorMap, rows8),                              \
             MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {                                                              \
        tile_kernel<l1, mx, shape, 128, 144, 160>(&rows64, &rows8, args);                                              \
    }

TILE_KERNEL(mm_wide_l1_nvfp4, true, false)
TILE_KERNEL(mm_wide_l2_nvfp4, false, false)
TILE_KERNEL(mm_wide_l1_mxfp4, true, true)
TILE_KERNEL(mm_wide_l2_mxfp4, false, true)
