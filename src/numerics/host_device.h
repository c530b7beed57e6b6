/* MM_HD marks the functions of numerics/ that both a C11 compiler and nvcc compile. */
#ifndef MM_NUMERICS_HOST_DEVICE_H
#define MM_NUMERICS_HOST_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#    define MM_HD static __host__ __device__ __forceinline__
#else
#    define MM_HD static inline
#endif

MM_HD uint32_t mm_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MM_HD float mm_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
