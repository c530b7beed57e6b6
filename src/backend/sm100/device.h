/* How one kernel source becomes two programs: a Blackwell kernel under nvcc, and a function that the
 * functional model runs once per thread under a host compiler (with MEGAMOE_SM100_MODEL defined).
 *
 * The rules that make this possible are few. A kernel takes one argument struct. It reaches shared memory
 * only through 32-bit addresses that start at shared_base(), tensor memory only through tcgen05 wrappers,
 * and memory that anybody writes during the launch only through the wrappers of ptx.cuh; that is how the
 * model sees every access. Read-only tables may be read through plain pointers. No __shared__ variables,
 * no threadIdx, no __syncthreads: ptx.cuh has a wrapper for each.
 * tests/sm100_model/README.md shows a whole kernel. */
#ifndef MEGAMOE_SM100_DEVICE_H
#define MEGAMOE_SM100_DEVICE_H

#include <stdint.h>
#include "tensor_map.h"

#if defined(__CUDACC__)

/* SM100_KERNEL(256) void name(SM100_ARGS(struct name_args, args)) { ... args.member ... } */
#    define SM100_KERNEL(threads_max) extern "C" __global__ __launch_bounds__(threads_max, 1)
#    define SM100_ARGS(type, name) const __grid_constant__ type name
#    define SM100_DEVICE static __device__ __forceinline__
#    define SM100_UNROLL _Pragma("unroll") // before loops that index register arrays

/* The address of the first byte of dynamic shared memory. Kernels have no static shared memory, so the
 * hardware puts it at a multiple of 1024, which is what 128-byte swizzles need. */
SM100_DEVICE uint32_t shared_base(void) {
    extern __shared__ __align__(1024) unsigned char sm100_dynamic_shared[];
    return (uint32_t)__cvta_generic_to_shared(sm100_dynamic_shared);
}

// Names the mbarrier at addr in the model's messages, for instance "full[%u]"; nothing on the hardware.
SM100_DEVICE void shared_name(uint32_t, const char *, uint32_t) {}

#elif defined(MEGAMOE_SM100_MODEL)

#    define SM100_KERNEL(threads_max) extern "C"
#    define SM100_ARGS(type, name) const type &name
#    define SM100_DEVICE static inline
#    define SM100_UNROLL

#else
#    error "Compile this with nvcc, or for the functional model with MEGAMOE_SM100_MODEL defined."
#endif

#include "backend/cuda/ptx.cuh"

#endif
