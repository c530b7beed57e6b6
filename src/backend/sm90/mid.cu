/* MID: token tiles of up to 64 rows. Conversion and latency bind: four consumer warpgroups, stages of two 128-groups.
 */
#include "backend/sm90/tile.cuh"

using shape = tile_shape<4, 2, 3, MM_CUDA_MID_WIDTHS>;

#define TILE_KERNEL(name, l1, mx)                                                                                      \
    extern "C" __global__ void __launch_bounds__(shape::threads, 1)                                                    \
        name(MM_GRID_CONSTANT(mm_cuda_token_maps, maps), MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {                  \
        tile_kernel<l1, mx, shape>(maps, args);                                                                        \
    }

TILE_KERNEL(mm_mid_l1_nvfp4, true, false)
TILE_KERNEL(mm_mid_l2_nvfp4, false, false)
TILE_KERNEL(mm_mid_l1_mxfp4, true, true)
TILE_KERNEL(mm_mid_l2_mxfp4, false, true)
