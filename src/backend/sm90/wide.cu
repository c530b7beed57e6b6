/* WIDE: token tiles of up to 152 rows. Two consumer warpgroups have the registers for their sums; a stage is one
 * 128-group. */
#include "backend/sm90/tile.cuh"

using shape = tile_shape<2, 1, 4, MM_CUDA_WIDE_WIDTHS>;

#define TILE_KERNEL(name, l1, mx)                                                                                      \
    extern "C" __global__ void __launch_bounds__(shape::threads, 1)                                                    \
        name(MM_GRID_CONSTANT(mm_cuda_token_maps, maps), MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {                  \
        tile_kernel<l1, mx, shape>(maps, args);                                                                        \
    }

TILE_KERNEL(mm_wide_l1_nvfp4, true, false)
TILE_KERNEL(mm_wide_l2_nvfp4, false, false)
TILE_KERNEL(mm_wide_l1_mxfp4, true, true)
TILE_KERNEL(mm_wide_l2_mxfp4, false, true)
