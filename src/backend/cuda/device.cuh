/*
 * What the portable kernels and sm90's are written in: CUDA's own words, the PTX wrappers, and a few macros. nvcc makes
 * kernels of them; a host compiler (with MEGAMOE_SM100_MODEL defined) makes functions that the functional model runs
 * once per thread, with its own meaning of threadIdx, __syncthreads and the like. The macros are there because a
 * variable in shared memory cannot be declared in words that mean the same to both.
 */
#ifndef MM_CUDA_DEVICE_CUH
#define MM_CUDA_DEVICE_CUH

#include "backend/cuda/ptx.cuh"

#ifdef __CUDACC__
#    define MM_DEVICE static __device__ __forceinline__
/* MM_SHARED(float, name, [4][8]): a variable of the CTA; an empty last argument for a scalar or a struct. */
#    define MM_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
/* type name[]: the CTA's dynamic shared memory. */
#    define MM_SHARED_DYNAMIC(type, name, alignment)                                                                   \
        extern __shared__ __align__(alignment)                                                                         \
        type name[]
/* A parameter of a kernel that stays where the launch put it. */
#    define MM_GRID_CONSTANT(type, name) const __grid_constant__ type name
#else
#    include "sm100_model_cuda.h"
#endif

#endif
