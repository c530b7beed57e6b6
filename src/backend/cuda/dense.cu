/* Instances of the shared expert's kernel for few tokens: for up to 8, 16 and 32. */
#include "backend/cuda/dense.cuh"

#define DENSE_KERNEL(name, l1, fp8, groups)                                                                            \
    extern "C" __global__ void __launch_bounds__(DENSE_THREADS, groups > 2 ? 1 : 2)                                    \
        name(MM_GRID_CONSTANT(mm_cuda_dense_args, args)) {                                                             \
        dense_kernel<l1, fp8, groups>(args);                                                                           \
    }

DENSE_KERNEL(mm_dense_l1_fp8_8, true, true, 1)
DENSE_KERNEL(mm_dense_l1_fp8_16, true, true, 2)
DENSE_KERNEL(mm_dense_l1_fp8_32, true, true, 4)
DENSE_KERNEL(mm_dense_l2_fp8_8, false, true, 1)
DENSE_KERNEL(mm_dense_l2_fp8_16, false, true, 2)
DENSE_KERNEL(mm_dense_l2_fp8_32, false, true, 4)
DENSE_KERNEL(mm_dense_l1_bf16_8, true, false, 1)
DENSE_KERNEL(mm_dense_l1_bf16_16, true, false, 2)
DENSE_KERNEL(mm_dense_l1_bf16_32, true, false, 4)
DENSE_KERNEL(mm_dense_l2_bf16_8, false, false, 1)
DENSE_KERNEL(mm_dense_l2_bf16_16, false, false, 2)
DENSE_KERNEL(mm_dense_l2_bf16_32, false, false, 4)
