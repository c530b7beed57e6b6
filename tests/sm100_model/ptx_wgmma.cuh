// Hopper's warpgroup mma, one shape, for sm90_common.cu only: it reads shared memory through the same K-major swizzled
// layouts as tcgen05, so it shows on hardware that the model addresses operands correctly. PTX ISA 9.7.15.
#ifndef SM100_MODEL_PTX_WGMMA_CUH
#define SM100_MODEL_PTX_WGMMA_CUH

#include <stdint.h>

namespace ptx {
#if defined(__CUDACC__)

static __device__ __forceinline__ void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit_group(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_wait_group_0(void) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// D[64][64] = A[64][32] * B[64][32]^T + (scale_d ? D : 0), E4M3, by four warps.
static __device__ __forceinline__ void wgmma_m64n64k32_f32_e4m3_e4m3(float (&d)[32], uint64_t a_desc, uint64_t b_desc,
                                                                     uint32_t scale_d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
                 "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
                 "%31}, %32, %33, p, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
                   "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a_desc), "l"(b_desc), "r"(scale_d)
                 : "memory");
}

#else

void wgmma_fence(void);
void wgmma_commit_group(void);
void wgmma_wait_group_0(void);
void wgmma_m64n64k32_f32_e4m3_e4m3(float (&d)[32], uint64_t a_desc, uint64_t b_desc, uint32_t scale_d);

#endif
} // namespace ptx

#endif
