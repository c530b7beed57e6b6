/*
 * Instances of the decode kernel. QUARTERS is a warp's share of K, ceil(K / 128 / 4): an instance serves every K up to
 * 512 * QUARTERS (missing groups count as zero), so the table needs only the sizes that models have:
 *     14: 7168 (V4-Pro, R1)   10: 5120 (V4.1-Flash)   8: 4096 (V4-Flash, Qwen3)   6: 3072   5: 2304   4: 2048   3: 1536
 * 2: 768
 */
#include "backend/cuda/decode.cuh"

#define DECODE_KERNEL(name, l1, mx, quarters)                                                                          \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1) name(MM_GRID_CONSTANT(mm_cuda_gemm_args, args)) {  \
        decode_kernel<l1, mx, quarters>(args);                                                                         \
    }

DECODE_KERNEL(mm_decode_l1_nvfp4_10, true, false, 10)
DECODE_KERNEL(mm_decode_l1_nvfp4_8, true, false, 8)
DECODE_KERNEL(mm_decode_l1_nvfp4_6, true, false, 6)
DECODE_KERNEL(mm_decode_l1_nvfp4_4, true, false, 4)
DECODE_KERNEL(mm_decode_l2_nvfp4_6, false, false, 6)
DECODE_KERNEL(mm_decode_l2_nvfp4_5, false, false, 5)
DECODE_KERNEL(mm_decode_l2_nvfp4_4, false, false, 4)
DECODE_KERNEL(mm_decode_l2_nvfp4_3, false, false, 3)
DECODE_KERNEL(mm_decode_l2_nvfp4_2, false, false, 2)
DECODE_KERNEL(mm_decode_l1_mxfp4_8, true, true, 8)
DECODE_KERNEL(mm_decode_l1_mxfp4_4, true, true, 4)
DECODE_KERNEL(mm_decode_l2_mxfp4_6, false, true, 6)
DECODE_KERNEL(mm_decode_l2_mxfp4_4, false, true, 4)
DECODE_KERNEL(mm_decode_l2_mxfp4_2, false, true, 2)

/* K beyond 5120 takes 64 KB a slot, which the 99 KB of sm_120 hold once: no ring, and never chosen there. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1200
DECODE_KERNEL(mm_decode_l1_nvfp4_14, true, false, 14)
DECODE_KERNEL(mm_decode_l1_mxfp4_14, true, true, 14)
#else
extern "C" __global__ void mm_decode_l1_nvfp4_14(MM_GRID_CONSTANT(mm_cuda_gemm_args, )) {}
extern "C" __global__ void mm_decode_l1_mxfp4_14(MM_GRID_CONSTANT(mm_cuda_gemm_args, )) {}
#endif
