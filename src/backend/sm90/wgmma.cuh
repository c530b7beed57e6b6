/*
 * wgmma: A (weights) from registers, B (activations) K-major in shared memory, fp32 accumulators. One wrapper per N,
 * because N is part of the instruction. PTX manual, section 9.7.16.
 */
#ifndef MM_SM90_WGMMA_CUH
#define MM_SM90_WGMMA_CUH

#include "backend/cuda/device.cuh"

/* 9.7.16.7.1 wgmma.fence, 9.7.16.7.2 commit_group, 9.7.16.7.3 wait_group */
MM_DEVICE void mm_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
MM_DEVICE void mm_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> MM_DEVICE void mm_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/*
 * 9.7.16.5.1 matrix descriptor of a K-major tile with 128-byte swizzle: address / 16 below, stride 1024 bytes between
 * groups of 8 rows (64 << 32), swizzle mode 1 (1 << 62). The upper word is constant, so only the lower one is computed.
 */
MM_DEVICE uint32_t mm_wgmma_descriptor_low(uint32_t address) {
    return (address & 0x3FFFFu) >> 4 | 0x10000u;
}
MM_DEVICE uint64_t mm_wgmma_descriptor(uint32_t low) {
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(0x40000040u));
    return descriptor;
}

/* The accumulators of an instruction, as text of the assembly and as its operands: %0 .. and d[0] .. */
// clang-format off
#define MM_QUAD(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MM_TEXT_4 "%0, %1, %2, %3"
#define MM_TEXT_8 MM_TEXT_4 ", %4, %5, %6, %7"
#define MM_TEXT_12 MM_TEXT_8 ", %8, %9, %10, %11"
#define MM_TEXT_16 MM_TEXT_12 ", %12, %13, %14, %15"
#define MM_TEXT_20 MM_TEXT_16 ", %16, %17, %18, %19"
#define MM_TEXT_24 MM_TEXT_20 ", %20, %21, %22, %23"
#define MM_TEXT_32 MM_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MM_TEXT_40 MM_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MM_TEXT_48 MM_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MM_TEXT_56 MM_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MM_TEXT_64 MM_TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MM_TEXT_68 MM_TEXT_64 ", %64, %65, %66, %67"
#define MM_TEXT_72 MM_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MM_TEXT_76 MM_TEXT_72 ", %72, %73, %74, %75"
#define MM_TEXT_80 MM_TEXT_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MM_TEXT_88 MM_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MM_TEXT_96 MM_TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MM_TEXT_104 MM_TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MM_TEXT_112 MM_TEXT_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MM_TEXT_120 MM_TEXT_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MM_TEXT_128 MM_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MM_REGISTERS_4 MM_QUAD(0)
#define MM_REGISTERS_8 MM_REGISTERS_4, MM_QUAD(4)
#define MM_REGISTERS_12 MM_REGISTERS_8, MM_QUAD(8)
#define MM_REGISTERS_16 MM_REGISTERS_12, MM_QUAD(12)
#define MM_REGISTERS_20 MM_REGISTERS_16, MM_QUAD(16)
#define MM_REGISTERS_24 MM_REGISTERS_20, MM_QUAD(20)
#define MM_REGISTERS_32 MM_REGISTERS_24, MM_QUAD(24), MM_QUAD(28)
#define MM_REGISTERS_40 MM_REGISTERS_32, MM_QUAD(32), MM_QUAD(36)
#define MM_REGISTERS_48 MM_REGISTERS_40, MM_QUAD(40), MM_QUAD(44)
#define MM_REGISTERS_56 MM_REGISTERS_48, MM_QUAD(48), MM_QUAD(52)
#define MM_REGISTERS_64 MM_REGISTERS_56, MM_QUAD(56), MM_QUAD(60)
#define MM_REGISTERS_68 MM_REGISTERS_64, MM_QUAD(64)
#define MM_REGISTERS_72 MM_REGISTERS_64, MM_QUAD(64), MM_QUAD(68)
#define MM_REGISTERS_76 MM_REGISTERS_72, MM_QUAD(72)
#define MM_REGISTERS_80 MM_REGISTERS_72, MM_QUAD(72), MM_QUAD(76)
#define MM_REGISTERS_88 MM_REGISTERS_80, MM_QUAD(80), MM_QUAD(84)
#define MM_REGISTERS_96 MM_REGISTERS_88, MM_QUAD(88), MM_QUAD(92)
#define MM_REGISTERS_104 MM_REGISTERS_96, MM_QUAD(96), MM_QUAD(100)
#define MM_REGISTERS_112 MM_REGISTERS_104, MM_QUAD(104), MM_QUAD(108)
#define MM_REGISTERS_120 MM_REGISTERS_112, MM_QUAD(112), MM_QUAD(116)
#define MM_REGISTERS_128 MM_REGISTERS_120, MM_QUAD(120), MM_QUAD(124)
// clang-format on

/* 9.7.16.5.2 wgmma.mma_async, m64 n<N> k16: d += a * b. COUNT = N / 2 accumulators, numbers of the operands behind
 * them. */
template <int N> struct mm_wgmma;
#define MM_WGMMA(N, COUNT, A1, A2, A3, B)                                                                              \
    template <> struct mm_wgmma<N> {                                                                                   \
        static __device__ __forceinline__ void m64k16(float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2,        \
                                                      uint32_t a3, uint64_t b) {                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MM_TEXT_##COUNT                  \
                         "}, {%" #COUNT ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                        \
                         : MM_REGISTERS_##COUNT                                                                        \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                \
        }                                                                                                              \
    };
MM_WGMMA(24, 12, 13, 14, 15, 16)
MM_WGMMA(32, 16, 17, 18, 19, 20)
MM_WGMMA(40, 20, 21, 22, 23, 24)
MM_WGMMA(48, 24, 25, 26, 27, 28)
MM_WGMMA(64, 32, 33, 34, 35, 36)
MM_WGMMA(80, 40, 41, 42, 43, 44)
MM_WGMMA(96, 48, 49, 50, 51, 52)
MM_WGMMA(112, 56, 57, 58, 59, 60)
MM_WGMMA(128, 64, 65, 66, 67, 68)
MM_WGMMA(136, 68, 69, 70, 71, 72)
MM_WGMMA(152, 76, 77, 78, 79, 80)

/* Both operands from shared memory, for the plain BF16 product that limits are measured with. */
MM_DEVICE void mm_wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MM_TEXT_128 "}, %128, %129, 1, 1, 1, 0, 0;"
                 : MM_REGISTERS_128
                 : "l"(a), "l"(b));
}

/* The same by the number of accumulators: n256, n192, n128 and n64. */
MM_DEVICE void mm_wgmma_shared(float (&d)[128], uint64_t a, uint64_t b) {
    mm_wgmma_m64n256k16(d, a, b);
}
MM_DEVICE void mm_wgmma_shared(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MM_TEXT_32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : MM_REGISTERS_32
                 : "l"(a), "l"(b));
}
MM_DEVICE void mm_wgmma_shared(float (&d)[96], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" MM_TEXT_96 "}, %96, %97, 1, 1, 1, 0, 0;"
                 : MM_REGISTERS_96
                 : "l"(a), "l"(b));
}
MM_DEVICE void mm_wgmma_shared(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MM_TEXT_64 "}, %64, %65, 1, 1, 1, 0, 0;"
                 : MM_REGISTERS_64
                 : "l"(a), "l"(b));
}

#endif
