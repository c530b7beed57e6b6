/*
 * The copies that only the tile kernels of sm90 use: cp.async of a few bytes onto an mbarrier, and a tensor copy of
 * three dimensions without a cache policy. PTX manual, section 9.7.9.25.
 */
#ifndef MM_SM90_COPY_CUH
#define MM_SM90_COPY_CUH

#include "backend/cuda/device.cuh"

/* 9.7.9.25.3 cp.async: 4, 8 or 16 bytes, aligned to their number. */
template <int BYTES> MM_DEVICE void mm_cp_async(uint32_t to, const void *from) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
/* 9.7.13.15.17: arrives when this thread's copies have; the arrival is one of those that the barrier was made for. */
MM_DEVICE void mm_cp_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/* 9.7.9.25.5.2 cp.async.bulk.tensor */
MM_DEVICE void mm_tensor_copy_3d(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

#endif
