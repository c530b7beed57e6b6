/* The tensor map as the kernels and the host see it: 128 opaque bytes, aligned as the driver wants them.
 *
 * It is a type of our own, so that an argument struct can be declared in a file that includes neither CUDA
 * nor the functional model. The driver's cuTensorMapEncodeTiled fills it (cast to CUtensorMap *), or the
 * model's sm100_model_tensor_map_encode. It must reach a kernel inside its __grid_constant__ argument struct,
 * or lie in global memory; never in a local copy. */
#ifndef MEGAMOE_SM100_TENSOR_MAP_H
#define MEGAMOE_SM100_TENSOR_MAP_H

#include <stdint.h>

#ifdef __cplusplus
#    define SM100_ALIGN(n) alignas(n)
#else
#    define SM100_ALIGN(n) _Alignas(n)
#endif

struct sm100_tensor_map {
    SM100_ALIGN(64) uint64_t opaque[16];
};

#endif
