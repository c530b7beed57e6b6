/* Instances of the portable tile kernel: L1 and L2 of every weight format; L2 also serves plain products. */
#include "backend/cuda/tile.cuh"

#define TILE_KERNEL(name, l1, format)                                                                                  \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) name(MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {    \
        tile_kernel<l1, format>(args);                                                                                 \
    }

TILE_KERNEL(mm_tile_l1_nvfp4, true, MM_NVFP4)
TILE_KERNEL(mm_tile_l1_mxfp4, true, MM_MXFP4)
TILE_KERNEL(mm_tile_l1_bf16, true, MM_BF16)
TILE_KERNEL(mm_tile_l1_fp8, true, MM_FP8)
TILE_KERNEL(mm_tile_l2_nvfp4, false, MM_NVFP4)
TILE_KERNEL(mm_tile_l2_mxfp4, false, MM_MXFP4)
TILE_KERNEL(mm_tile_l2_bf16, false, MM_BF16)
TILE_KERNEL(mm_tile_l2_fp8, false, MM_FP8)
