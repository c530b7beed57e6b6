/* CUDA's own words as the model understands them, for kernels that are written in them: src/backend/cuda and sm90,
 * through src/backend/cuda/device.cuh. Only what those kernels use. Variables in shared memory are reached through
 * plain references, which the model does not see: README.md says what is checked all the same. */
#ifndef SM100_MODEL_CUDA_H
#define SM100_MODEL_CUDA_H

#include "sm100_model_ptx.h"

namespace model {
struct Index3 {
    uint32_t x, y, z;
};
Index3 cta_index(void);
Index3 grid_size(void);
void *shared_variable(const void *key, uint32_t bytes, uint32_t alignment);
void *shared_dynamic(void);
uint32_t atomic_add(uint32_t *address, uint32_t value);
uint32_t atomic_max(uint32_t *address, uint32_t value);
uint32_t match_any(uint32_t mask, uint32_t value);
} // namespace model

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define MM_DEVICE static inline
#define MM_SHARED(type, name, ...)                                                                                     \
    static char name##_key;                                                                                            \
    typedef type name##_type __VA_ARGS__;                                                                              \
    name##_type &name =                                                                                                \
        *static_cast<name##_type *>(model::shared_variable(&name##_key, sizeof(name##_type), alignof(name##_type)))
#define MM_SHARED_DYNAMIC(type, name, alignment)                                                                       \
    static_assert(alignment <= 1024, "dynamic shared memory begins at a multiple of 1024");                            \
    type *const name = static_cast<type *>(model::shared_dynamic())
#define MM_GRID_CONSTANT(type, name) const type &name

#define threadIdx (model::Index3{ptx::tid_x(), 0, 0})
#define blockDim (model::Index3{ptx::ntid_x(), 1, 1})
#define blockIdx (model::cta_index())
#define gridDim (model::grid_size())

inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

inline void __syncthreads(void) {
    ptx::bar_sync(0, ptx::ntid_x());
}
inline void __syncwarp(void) {
    ptx::bar_warp_sync(~0u);
}
inline int __any_sync(uint32_t mask, int predicate) {
    return ptx::vote_sync_ballot(predicate != 0, mask) != 0;
}
inline uint32_t __match_any_sync(uint32_t mask, int value) {
    return model::match_any(mask, static_cast<uint32_t>(value));
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
    return ptx::redux_sync_add(value, mask);
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
    return ptx::redux_sync_max(value, mask);
}

/* Wider values go word by word, as on the hardware. */
template <typename T>
inline T shuffled(uint32_t (*shuffle)(uint32_t, uint32_t, uint32_t), uint32_t mask, T value, uint32_t b) {
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof value);
    for (uint32_t &word : words) word = shuffle(word, b, mask);
    memcpy(&value, words, sizeof value);
    return value;
}
template <typename T> inline T __shfl_sync(uint32_t mask, T value, uint32_t lane) {
    return shuffled(ptx::shfl_sync_idx, mask, value, lane);
}
template <typename T> inline T __shfl_xor_sync(uint32_t mask, T value, uint32_t lanes) {
    return shuffled(ptx::shfl_sync_bfly, mask, value, lanes);
}
template <typename T> inline T __shfl_up_sync(uint32_t mask, T value, uint32_t delta) {
    return shuffled(ptx::shfl_sync_up, mask, value, delta);
}

inline uint32_t atomicAdd(uint32_t *address, uint32_t value) {
    return model::atomic_add(address, value);
}
inline unsigned long long atomicAdd(unsigned long long *address, unsigned long long value) {
    return ptx::atom_relaxed_gpu_add_u64(address, value);
}
inline uint32_t atomicMax(uint32_t *address, uint32_t value) {
    return model::atomic_max(address, value);
}

template <typename T> inline T __ldg(const T *address) {
    return *address;
}
template <typename T> inline T __ldcs(const T *address) {
    return *address;
}
template <typename T> inline void __stcs(T *address, T value) {
    *address = value;
}

inline int __popc(uint32_t value) {
    return __builtin_popcount(value);
}
inline float __uint_as_float(uint32_t bits) {
    return ptx::mov_f32_b32(bits);
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline int min(int a, int b) {
    return a < b ? a : b;
}
inline uint32_t min(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}
inline int max(int a, int b) {
    return a > b ? a : b;
}
inline uint32_t max(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

#endif
