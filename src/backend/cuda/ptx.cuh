/*
 * One PTX instruction per wrapper, operands named as in the PTX manual (its section in the comment). No inline
 * assembly elsewhere in this folder.
 */
#ifndef MM_CUDA_PTX_CUH
#define MM_CUDA_PTX_CUH

#include <stdint.h>

#define MM_DEVICE static __device__ __forceinline__

MM_DEVICE uint32_t mm_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 9.7.9.7 prmt: bytes of {b, a} chosen by the nibbles of c */
MM_DEVICE uint32_t mm_prmt(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* 9.7.4.3 mul, half precision: two BF16 products, rounded to nearest even, subnormals kept */
MM_DEVICE uint32_t mm_mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/* 9.7.9.22 cvt: d = {hi, lo} as BF16, rounded to nearest even */
MM_DEVICE uint32_t mm_cvt_bf16x2(float hi, float lo) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

/* 9.7.3.21 ex2 and 9.7.3.14 rcp, approximate: within 2 and 1 ulp */
MM_DEVICE float mm_ex2(float a) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
MM_DEVICE float mm_rcp(float a) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}

/* 9.7.3.11 min and max that let NaN through */
MM_DEVICE float mm_min_nan(float a, float b) {
    float d;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
MM_DEVICE float mm_max_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

/* 9.7.15.5.8 mma.m16n8k16, BF16 operands, fp32 accumulators */
MM_DEVICE void mm_mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 9.7.15.5.15 ldmatrix, four 8x8 matrices of 16-bit values */
MM_DEVICE uint4 mm_ldmatrix_x4(uint32_t p) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(p)
                 : "memory");
    return r;
}

/* 9.7.9.8 ld.shared. Not ordered against each other; ordered after barrier waits, which clobber memory. */
MM_DEVICE uint4 mm_ld_shared_v4(uint32_t a) {
    uint4 d;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "r"(a));
    return d;
}
MM_DEVICE uint2 mm_ld_shared_v2(uint32_t a) {
    uint2 d;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(a));
    return d;
}
MM_DEVICE uint32_t mm_ld_shared_u32(uint32_t a) {
    uint32_t d;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(a));
    return d;
}
MM_DEVICE uint32_t mm_ld_shared_u16(uint32_t a) {
    uint16_t d;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(a));
    return d;
}
MM_DEVICE uint32_t mm_ld_shared_u8(uint32_t a) {
    uint32_t d;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(d) : "r"(a));
    return d;
}
MM_DEVICE float4 mm_ld_shared_f32x4(uint32_t a) {
    float4 d;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
                 : "r"(a)
                 : "memory");
    return d;
}
/* 9.7.9.11 st.shared */
MM_DEVICE void mm_st_shared_f32x4(uint32_t a, float b0, float b1, float b2, float b3) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(b0), "f"(b1), "f"(b2), "f"(b3) : "memory");
}

MM_DEVICE void mm_st_shared_v4(uint32_t a, uint4 b) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w)
                 : "memory");
}

/* 9.7.9.8 ld.global. volatile: the order of the source is kept, so that a batch of loads is in flight before its use */
MM_DEVICE uint4 mm_ld_global_v4(const void *a) {
    uint4 d;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "l"(a)
                 : "memory");
    return d;
}
MM_DEVICE uint32_t mm_ld_global_nc_u16(const void *a) {
    uint16_t d;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(d) : "l"(a));
    return d;
}
MM_DEVICE uint4 mm_ld_global_nc_v4(const void *a) {
    uint4 d;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(a));
    return d;
}
/* 9.7.9.15 prefetch */
MM_DEVICE void mm_prefetch_l2(const void *a) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a));
}

/* 9.7.13.15 mbarrier: init, arrive, arrive.expect_tx, try_wait.parity in a loop (the one multi-instruction wrapper) */
MM_DEVICE void mm_mbarrier_init(uint32_t addr, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(addr), "r"(count));
}
MM_DEVICE void mm_mbarrier_arrive(uint32_t addr) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(addr) : "memory");
}
MM_DEVICE void mm_mbarrier_expect(uint32_t addr, uint32_t tx_count) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(addr), "r"(tx_count)
                 : "memory");
}
MM_DEVICE void mm_mbarrier_wait(uint32_t addr, uint32_t phase_parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again%=: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=;\n"
                 "}" ::"r"(addr),
                 "r"(phase_parity)
                 : "memory");
}
/* 9.7.13.4 fence: makes mbarrier.init visible to the asynchronous proxy */
MM_DEVICE void mm_fence_mbarrier_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* 9.7.9.16 createpolicy */
MM_DEVICE uint64_t mm_createpolicy_evict_first(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* 9.7.9.25 cp.async.bulk, global to shared, 16-byte granularity */
MM_DEVICE void mm_bulk_load(uint32_t dst, const void *src, uint32_t size, uint32_t mbar, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(size), "r"(mbar), "l"(policy)
                 : "memory");
}
/* 9.7.9.26 cp.async.bulk.prefetch, global to the L2 cache */
MM_DEVICE void mm_bulk_prefetch_l2(const void *src, uint32_t size) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(size) : "memory");
}
/* 9.7.9.27 cp.async.bulk.tensor, two dimensions, global to shared */
MM_DEVICE void mm_tensor_load_2d(uint32_t dst, const void *map, int32_t x, int32_t y, uint32_t mbar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(mbar)
                 : "memory");
}

/* 9.7.19.5 setmaxnreg. On sm_120 ptxas ignores it: there warps keep what they were launched with. */
template <int COUNT> MM_DEVICE void mm_setmaxnreg_dec(void) {
#if __CUDA_ARCH__ < 1200
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT> MM_DEVICE void mm_setmaxnreg_inc(void) {
#if __CUDA_ARCH__ < 1200
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

/* 9.7.13.13 griddepcontrol: programmatic dependent launch */
MM_DEVICE void mm_launch_dependents(void) {
    asm volatile("griddepcontrol.launch_dependents;");
}
MM_DEVICE void mm_grid_wait(void) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

#endif
