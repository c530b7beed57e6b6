/* What a layer is judged by (copy bandwidth), and a look at weights before they are trusted. */
#include "backend/cuda/device.cuh"

extern "C" __global__ void __launch_bounds__(512)
    mm_copy(const uint4 *source, uint4 *target, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * 2048ull + threadIdx.x; i < count; i += gridDim.x * 2048ull) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = i + j * 512 < count ? __ldcs(source + i + j * 512) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * 512 < count) __stcs(target + i + j * 512, v[j]);
    }
}

/* The largest byte of rows x columns bytes at a pitch. largest: zeroed before. */
extern "C" __global__ void __launch_bounds__(256) mm_scale_largest(const uint8_t *scales, unsigned long long pitch,
                                                                   unsigned rows, unsigned columns, unsigned *largest) {
    unsigned most = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x)
        for (unsigned i = threadIdx.x; i < columns; i += 256) most = max(most, (unsigned)scales[row * pitch + i]);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0 && most) atomicMax(largest, most);
}
