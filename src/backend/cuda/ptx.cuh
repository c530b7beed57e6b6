// One PTX instruction per function, operands in the manual's order and under the manual's names. All kernels, the
// portable ones, sm90's and sm100's, use this one set; wgmma, with a wrapper for every width, is in sm90/wgmma.cuh.
//
// Under nvcc the functions are inline assembly. Under a host compiler the same signatures come from the
// functional model (tests/sm100_model/sm100_model_ptx.h), which was written from the manual and not from here.
// tests/sm100_model/ptx_compile_check.cu calls every function once and is compiled both ways.
//
// Conventions: shared-memory addresses are 32-bit; those of another CTA of the cluster come from
// mapa_shared_cluster. Global addresses are pointers. cta_group is a template argument because one kernel must
// use one value throughout (ptxas refuses a mixture). Predicates are 0 or 1 in a uint32_t. Section numbers are
// those of the PTX ISA manual 9.0, chapter 9.7 unless another chapter is named.
//
// Portable kernels and sm90's were measured on an H200. Whoever changes a constraint here compares their machine code.
#ifndef MM_CUDA_PTX_CUH
#define MM_CUDA_PTX_CUH

#include <stdint.h>

#if !defined(__CUDACC__)
#    include "sm100_model_ptx.h"
#else

namespace ptx {

#    define PTX_FN static __device__ __forceinline__

// ---- Special registers (chapter 10). ----------------------------------------------------------------------

#    define PTX_SPECIAL_REGISTER(name, reg)                                                                            \
        PTX_FN uint32_t name(void) {                                                                                   \
            uint32_t d;                                                                                                \
            asm volatile("mov.u32 %0, %%" reg ";" : "=r"(d));                                                          \
            return d;                                                                                                  \
        }
PTX_SPECIAL_REGISTER(tid_x, "tid.x")
PTX_SPECIAL_REGISTER(ntid_x, "ntid.x")
PTX_SPECIAL_REGISTER(ctaid_x, "ctaid.x")
PTX_SPECIAL_REGISTER(nctaid_x, "nctaid.x")
PTX_SPECIAL_REGISTER(laneid, "laneid")
PTX_SPECIAL_REGISTER(smid, "smid")
PTX_SPECIAL_REGISTER(clusterid_x, "clusterid.x")
PTX_SPECIAL_REGISTER(nclusterid_x, "nclusterid.x")
PTX_SPECIAL_REGISTER(cluster_ctarank, "cluster_ctarank")
PTX_SPECIAL_REGISTER(cluster_nctarank, "cluster_nctarank")
#    undef PTX_SPECIAL_REGISTER

// Nanoseconds since an arbitrary start. Its resolution may be as coarse as a microsecond.
PTX_FN uint64_t globaltimer(void) {
    uint64_t d;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(d));
    return d;
}

// ---- Warps and CTAs. --------------------------------------------------------------------------------------

// 9.7.13 elect.sync: true in exactly one lane of membermask. The warp must be converged.
PTX_FN uint32_t elect_sync(uint32_t membermask) {
    uint32_t p;
    asm volatile("{\n.reg .pred P;\nelect.sync _|P, %1;\nselp.u32 %0, 1, 0, P;\n}" : "=r"(p) : "r"(membermask));
    return p;
}

// 9.7.13 bar.sync a, b: barrier a (0..15) for b threads (a multiple of 32).
PTX_FN void bar_sync(uint32_t a, uint32_t b) {
    asm volatile("bar.sync %0, %1;" ::"r"(a), "r"(b) : "memory");
}

// 9.7.13 bar.arrive a, b: counts in, does not wait.
PTX_FN void bar_arrive(uint32_t a, uint32_t b) {
    asm volatile("bar.arrive %0, %1;" ::"r"(a), "r"(b) : "memory");
}

// 9.7.13 bar.warp.sync.
PTX_FN void bar_warp_sync(uint32_t membermask) {
    asm volatile("bar.warp.sync %0;" ::"r"(membermask) : "memory");
}

// 9.7.9 shfl.sync with the whole warp as segment (c = 0x1f, or 0 for up).
#    define PTX_SHFL(mode, c)                                                                                          \
        PTX_FN uint32_t shfl_sync_##mode(uint32_t a, uint32_t b, uint32_t membermask) {                                \
            uint32_t d;                                                                                                \
            asm volatile("shfl.sync." #mode ".b32 %0, %1, %2, " c ", %3;"                                              \
                         : "=r"(d)                                                                                     \
                         : "r"(a), "r"(b), "r"(membermask)                                                             \
                         : "memory");                                                                                  \
            return d;                                                                                                  \
        }
PTX_SHFL(idx, "0x1f")
PTX_SHFL(bfly, "0x1f")
PTX_SHFL(down, "0x1f")
PTX_SHFL(up, "0")
#    undef PTX_SHFL

// 9.7.13 vote.sync.ballot.
PTX_FN uint32_t vote_sync_ballot(uint32_t a, uint32_t membermask) {
    uint32_t d;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.ballot.b32 %0, p, %2;\n}"
                 : "=r"(d)
                 : "r"(a), "r"(membermask)
                 : "memory");
    return d;
}

// 9.7.13 redux.sync on 32-bit unsigned integers.
#    define PTX_REDUX(op, type)                                                                                        \
        PTX_FN uint32_t redux_sync_##op(uint32_t src, uint32_t membermask) {                                           \
            uint32_t dst;                                                                                              \
            asm volatile("redux.sync." #op "." type " %0, %1, %2;" : "=r"(dst) : "r"(src), "r"(membermask));           \
            return dst;                                                                                                \
        }
PTX_REDUX(add, "u32")
PTX_REDUX(min, "u32")
PTX_REDUX(max, "u32")
PTX_REDUX(or, "b32")
#    undef PTX_REDUX

// 9.7.19 setmaxnreg: whole warpgroup, imm_reg_count 24..256 in steps of 8. On sm_120 ptxas ignores it: there warps keep
// what they were launched with.
template <int imm_reg_count> PTX_FN void setmaxnreg_inc(void) {
#    if __CUDA_ARCH__ < 1200
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(imm_reg_count));
#    endif
}
template <int imm_reg_count> PTX_FN void setmaxnreg_dec(void) {
#    if __CUDA_ARCH__ < 1200
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(imm_reg_count));
#    endif
}

// 9.7.13 griddepcontrol: wait blocks until the grids before this one have finished and flushed.
PTX_FN void griddepcontrol_wait(void) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
PTX_FN void griddepcontrol_launch_dependents(void) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 9.7.19 nanosleep and trap.
PTX_FN void nanosleep(uint32_t t) {
    asm volatile("nanosleep.u32 %0;" ::"r"(t) : "memory");
}
PTX_FN void trap(void) {
    asm volatile("trap;" ::: "memory");
}

// ---- Clusters. --------------------------------------------------------------------------------------------

// 9.7.13 barrier.cluster: arrive releases (or not, when relaxed), wait acquires. All threads of the cluster.
PTX_FN void barrier_cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
PTX_FN void barrier_cluster_arrive_relaxed(void) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
PTX_FN void barrier_cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 9.7.9 mapa: the address, in CTA b of the cluster, of what lies at a in this CTA.
PTX_FN uint32_t mapa_shared_cluster(uint32_t a, uint32_t b) {
    uint32_t d;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// ---- Fences (9.7.13). -------------------------------------------------------------------------------------

PTX_FN void fence_acq_rel_cta(void) {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}
PTX_FN void fence_acq_rel_cluster(void) {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}
PTX_FN void fence_acq_rel_gpu(void) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
PTX_FN void fence_acq_rel_sys(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Between ordinary stores and an asynchronous read or write (TMA, tcgen05) of the same bytes: executed by each
// storing thread before it signals.
PTX_FN void fence_proxy_async(void) {
    asm volatile("fence.proxy.async;" ::: "memory");
}
PTX_FN void fence_proxy_async_shared_cta(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PTX_FN void fence_proxy_async_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// After mbarrier_init, before the barrier that lets other threads and engines use the mbarrier.
PTX_FN void fence_mbarrier_init_release_cluster(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- mbarrier (9.7.13.15). --------------------------------------------------------------------------------

PTX_FN void mbarrier_init(uint32_t addr, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(addr), "r"(count) : "memory");
}
PTX_FN void mbarrier_inval(uint32_t addr) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(addr) : "memory");
}
PTX_FN void mbarrier_arrive(uint32_t addr) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(addr) : "memory");
}
PTX_FN void mbarrier_arrive_count(uint32_t addr, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(addr), "r"(count) : "memory");
}
PTX_FN void mbarrier_expect_tx(uint32_t addr, uint32_t tx_count) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(addr), "r"(tx_count) : "memory");
}
// Expect tx_count more bytes, then arrive once.
PTX_FN void mbarrier_arrive_expect_tx(uint32_t addr, uint32_t tx_count) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(addr), "r"(tx_count)
                 : "memory");
}
// The same on an mbarrier of any CTA of the cluster (an address from mapa_shared_cluster).
PTX_FN void mbarrier_arrive_release_cluster(uint32_t addr) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(addr) : "memory");
}
PTX_FN void mbarrier_arrive_expect_tx_release_cluster(uint32_t addr, uint32_t tx_count) {
    asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(addr), "r"(tx_count)
                 : "memory");
}
// True once the phase with this parity has completed. May return false early: call it in a loop.
PTX_FN uint32_t mbarrier_try_wait_parity(uint32_t addr, uint32_t phaseParity) {
    uint32_t wait_complete;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(wait_complete)
                 : "r"(addr), "r"(phaseParity)
                 : "memory");
    return wait_complete;
}
// The same with acquire at cluster scope, for what another CTA of the cluster wrote with ordinary stores.
PTX_FN uint32_t mbarrier_try_wait_parity_acquire_cluster(uint32_t addr, uint32_t phaseParity) {
    uint32_t wait_complete;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(wait_complete)
                 : "r"(addr), "r"(phaseParity)
                 : "memory");
    return wait_complete;
}
// try_wait in a loop until the phase has completed: the one function of more than one instruction.
PTX_FN void mbarrier_wait_parity(uint32_t addr, uint32_t phaseParity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again%=: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=;\n"
                 "}" ::"r"(addr),
                 "r"(phaseParity)
                 : "memory");
}
// Like try_wait, but never suspends the thread.
PTX_FN uint32_t mbarrier_test_wait_parity(uint32_t addr, uint32_t phaseParity) {
    uint32_t wait_complete;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(wait_complete)
                 : "r"(addr), "r"(phaseParity)
                 : "memory");
    return wait_complete;
}

// ---- Loads and stores (9.7.9). ----------------------------------------------------------------------------

using u32x2 = uint2;
using u32x4 = uint4;

// name(a): ld.<spelling>.<type> d, [a].
#    define PTX_LD(name, spelling, addr_type, addr_code, d_type, d_code)                                               \
        PTX_FN d_type name(addr_type a) {                                                                              \
            d_type d;                                                                                                  \
            asm volatile("ld." spelling " %0, [%1];" : "=" d_code(d) : addr_code(a) : "memory");                       \
            return d;                                                                                                  \
        }
#    define PTX_LD_BYTE(name, spelling, addr_type, addr_code)                                                          \
        PTX_FN uint8_t name(addr_type a) {                                                                             \
            uint32_t d;                                                                                                \
            asm volatile("ld." spelling " %0, [%1];" : "=r"(d) : addr_code(a) : "memory");                             \
            return (uint8_t)d;                                                                                         \
        }
#    define PTX_LD_V2(name, spelling, addr_type, addr_code)                                                            \
        PTX_FN u32x2 name(addr_type a) {                                                                               \
            u32x2 d;                                                                                                   \
            asm volatile("ld." spelling " {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : addr_code(a) : "memory");          \
            return d;                                                                                                  \
        }
#    define PTX_LD_V4(name, spelling, addr_type, addr_code)                                                            \
        PTX_FN u32x4 name(addr_type a) {                                                                               \
            u32x4 d;                                                                                                   \
            asm volatile("ld." spelling " {%0, %1, %2, %3}, [%4];"                                                     \
                         : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)                                                  \
                         : addr_code(a)                                                                                \
                         : "memory");                                                                                  \
            return d;                                                                                                  \
        }
// name(a, b): st.<spelling>.<type> [a], b.
#    define PTX_ST(name, spelling, addr_type, addr_code, b_type, b_code)                                               \
        PTX_FN void name(addr_type a, b_type b) {                                                                      \
            asm volatile("st." spelling " [%0], %1;" ::addr_code(a), b_code(b) : "memory");                            \
        }
#    define PTX_ST_BYTE(name, spelling, addr_type, addr_code)                                                          \
        PTX_FN void name(addr_type a, uint8_t b) {                                                                     \
            asm volatile("st." spelling " [%0], %1;" ::addr_code(a), "r"((uint32_t)b) : "memory");                     \
        }
#    define PTX_ST_V2(name, spelling, addr_type, addr_code)                                                            \
        PTX_FN void name(addr_type a, u32x2 b) {                                                                       \
            asm volatile("st." spelling " [%0], {%1, %2};" ::addr_code(a), "r"(b.x), "r"(b.y) : "memory");             \
        }
#    define PTX_ST_V4(name, spelling, addr_type, addr_code)                                                            \
        PTX_FN void name(addr_type a, u32x4 b) {                                                                       \
            asm volatile("st." spelling " [%0], {%1, %2, %3, %4};" ::addr_code(a), "r"(b.x), "r"(b.y), "r"(b.z),       \
                         "r"(b.w)                                                                                      \
                         : "memory");                                                                                  \
        }

// 9.7.9.20 cvta: the 32-bit address of a variable in shared memory.
PTX_FN uint32_t cvta_to_shared(const void *a) {
    return (uint32_t)__cvta_generic_to_shared(a);
}

// Shared memory of this CTA. What is narrower than a register comes as one, so that nothing narrows it again.
PTX_LD(ld_shared_u8, "shared.u8", uint32_t, "r", uint32_t, "r")
PTX_LD(ld_shared_u16, "shared.u16", uint32_t, "r", uint32_t, "r")
PTX_LD(ld_shared_u32, "shared.u32", uint32_t, "r", uint32_t, "r")
PTX_LD(ld_shared_u64, "shared.u64", uint32_t, "r", uint64_t, "l")
PTX_LD(ld_shared_f32, "shared.f32", uint32_t, "r", float, "f")
PTX_LD_V2(ld_shared_v2_u32, "shared.v2.u32", uint32_t, "r")
PTX_LD_V4(ld_shared_v4_u32, "shared.v4.u32", uint32_t, "r")
PTX_ST_BYTE(st_shared_u8, "shared.u8", uint32_t, "r")
PTX_ST(st_shared_u16, "shared.u16", uint32_t, "r", uint16_t, "h")
PTX_ST(st_shared_u32, "shared.u32", uint32_t, "r", uint32_t, "r")
PTX_ST(st_shared_u64, "shared.u64", uint32_t, "r", uint64_t, "l")
PTX_ST(st_shared_f32, "shared.f32", uint32_t, "r", float, "f")
PTX_ST_V2(st_shared_v2_u32, "shared.v2.u32", uint32_t, "r")
PTX_ST_V4(st_shared_v4_u32, "shared.v4.u32", uint32_t, "r")
PTX_FN float4 ld_shared_v4_f32(uint32_t a) {
    float4 d;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
                 : "r"(a)
                 : "memory");
    return d;
}
PTX_FN void st_shared_v4_f32(uint32_t a, float b0, float b1, float b2, float b3) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(b0), "f"(b1), "f"(b2), "f"(b3) : "memory");
}
// 9.7.15.5.15 ldmatrix: four 8x8 matrices of 16-bit values.
PTX_FN u32x4 ldmatrix_m8n8_x4_b16(uint32_t p) {
    u32x4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(p)
                 : "memory");
    return r;
}
// Shared memory of any CTA of the cluster (an address from mapa_shared_cluster).
PTX_LD(ld_shared_cluster_u32, "shared::cluster.u32", uint32_t, "r", uint32_t, "r")
PTX_ST(st_shared_cluster_u32, "shared::cluster.u32", uint32_t, "r", uint32_t, "r")
PTX_ST_V4(st_shared_cluster_v4_u32, "shared::cluster.v4.u32", uint32_t, "r")
// Global memory that this launch may write.

// 9.7.9.12 st.async: sixteen bytes to a CTA of the cluster, and as many to the transactions of an mbarrier there.
PTX_FN void st_async_shared_cluster_v4_u32(uint32_t a, u32x4 b, uint32_t mbar) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(a),
        "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(mbar)
        : "memory");
}

PTX_LD_BYTE(ld_global_u8, "global.u8", const void *, "l")
PTX_LD(ld_global_u16, "global.u16", const void *, "l", uint16_t, "h")
PTX_LD(ld_global_u32, "global.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_global_u64, "global.u64", const void *, "l", uint64_t, "l")
PTX_LD(ld_global_f32, "global.f32", const void *, "l", float, "f")
PTX_LD_V2(ld_global_v2_u32, "global.v2.u32", const void *, "l")
PTX_LD_V4(ld_global_v4_u32, "global.v4.u32", const void *, "l")
PTX_ST_BYTE(st_global_u8, "global.u8", void *, "l")
PTX_ST(st_global_u16, "global.u16", void *, "l", uint16_t, "h")
PTX_ST(st_global_u32, "global.u32", void *, "l", uint32_t, "r")
PTX_ST(st_global_u64, "global.u64", void *, "l", uint64_t, "l")
PTX_ST(st_global_f32, "global.f32", void *, "l", float, "f")
PTX_ST_V2(st_global_v2_u32, "global.v2.u32", void *, "l")
PTX_ST_V4(st_global_v4_u32, "global.v4.u32", void *, "l")
// Global memory that nobody writes during the launch.
PTX_LD_BYTE(ld_global_nc_u8, "global.nc.u8", const void *, "l")
PTX_LD(ld_global_nc_u16, "global.nc.u16", const void *, "l", uint16_t, "h")
PTX_LD(ld_global_nc_u32, "global.nc.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_global_nc_u64, "global.nc.u64", const void *, "l", uint64_t, "l")
PTX_LD(ld_global_nc_f32, "global.nc.f32", const void *, "l", float, "f")
PTX_LD_V4(ld_global_nc_v4_u32, "global.nc.v4.u32", const void *, "l")
// Counters and flags: relaxed, acquire and release at device (gpu) and system (sys) scope.
PTX_LD(ld_relaxed_gpu_u32, "relaxed.gpu.global.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_relaxed_sys_u32, "relaxed.sys.global.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_acquire_gpu_u32, "acquire.gpu.global.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_acquire_gpu_u64, "acquire.gpu.global.u64", const void *, "l", uint64_t, "l")
PTX_LD(ld_acquire_sys_u32, "acquire.sys.global.u32", const void *, "l", uint32_t, "r")
PTX_LD(ld_acquire_sys_u64, "acquire.sys.global.u64", const void *, "l", uint64_t, "l")
PTX_ST(st_relaxed_gpu_u32, "relaxed.gpu.global.u32", void *, "l", uint32_t, "r")
PTX_ST(st_relaxed_sys_u32, "relaxed.sys.global.u32", void *, "l", uint32_t, "r")
PTX_ST(st_release_gpu_u32, "release.gpu.global.u32", void *, "l", uint32_t, "r")
PTX_ST(st_release_gpu_u64, "release.gpu.global.u64", void *, "l", uint64_t, "l")
PTX_ST(st_release_sys_u32, "release.sys.global.u32", void *, "l", uint32_t, "r")
PTX_ST(st_release_sys_u64, "release.sys.global.u64", void *, "l", uint64_t, "l")
#    undef PTX_LD
#    undef PTX_LD_BYTE
#    undef PTX_LD_V2
#    undef PTX_LD_V4
#    undef PTX_ST
#    undef PTX_ST_BYTE
#    undef PTX_ST_V2
#    undef PTX_ST_V4

// ---- Atomics (9.7.13 red, atom). --------------------------------------------------------------------------

#    define PTX_RED(name, spelling, type, code)                                                                        \
        PTX_FN void name(void *a, type b) {                                                                            \
            asm volatile("red." spelling " [%0], %1;" ::"l"(a), code(b) : "memory");                                   \
        }
PTX_RED(red_relaxed_gpu_add_u32, "relaxed.gpu.global.add.u32", uint32_t, "r")
PTX_RED(red_release_gpu_add_u32, "release.gpu.global.add.u32", uint32_t, "r")
PTX_RED(red_release_gpu_add_u64, "release.gpu.global.add.u64", uint64_t, "l")
PTX_RED(red_release_sys_add_u32, "release.sys.global.add.u32", uint32_t, "r")
PTX_RED(red_release_sys_add_u64, "release.sys.global.add.u64", uint64_t, "l")
PTX_RED(red_release_gpu_or_b32, "release.gpu.global.or.b32", uint32_t, "r")
#    undef PTX_RED

// All return the old value.
#    define PTX_ATOM(name, spelling, addr_type, addr_code, type, code)                                                 \
        PTX_FN type name(addr_type a, type b) {                                                                        \
            type d;                                                                                                    \
            asm volatile("atom." spelling " %0, [%1], %2;" : "=" code(d) : addr_code(a), code(b) : "memory");          \
            return d;                                                                                                  \
        }
PTX_ATOM(atom_shared_add_u32, "relaxed.cta.shared::cta.add.u32", uint32_t, "r", uint32_t, "r")
PTX_ATOM(atom_relaxed_gpu_add_u32, "relaxed.gpu.global.add.u32", void *, "l", uint32_t, "r")
PTX_ATOM(atom_relaxed_gpu_add_u64, "relaxed.gpu.global.add.u64", void *, "l", uint64_t, "l")
PTX_ATOM(atom_acq_rel_gpu_add_u32, "acq_rel.gpu.global.add.u32", void *, "l", uint32_t, "r")
PTX_ATOM(atom_acq_rel_gpu_add_u64, "acq_rel.gpu.global.add.u64", void *, "l", uint64_t, "l")
PTX_ATOM(atom_acq_rel_sys_add_u32, "acq_rel.sys.global.add.u32", void *, "l", uint32_t, "r")
PTX_ATOM(atom_acq_rel_sys_add_u64, "acq_rel.sys.global.add.u64", void *, "l", uint64_t, "l")
PTX_ATOM(atom_relaxed_gpu_exch_b32, "relaxed.gpu.global.exch.b32", void *, "l", uint32_t, "r")
#    undef PTX_ATOM

// d = *a; if (d == b) *a = c.
PTX_FN uint32_t atom_acq_rel_gpu_cas_b32(void *a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(d) : "l"(a), "r"(b), "r"(c) : "memory");
    return d;
}

// ---- Bulk copies (9.7.9.25.4). Sizes and addresses are multiples of 16 bytes. ------------------------------

PTX_FN void cp_async_bulk_shared_cluster_global(uint32_t dstMem, const void *srcMem, uint32_t size, uint32_t mbar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dstMem),
        "l"(srcMem), "r"(size), "r"(mbar)
        : "memory");
}
// To the same offset, with a signal to the same offset, in each CTA of ctaMask.
PTX_FN void cp_async_bulk_shared_cluster_global_multicast(uint32_t dstMem, const void *srcMem, uint32_t size,
                                                          uint32_t mbar, uint16_t ctaMask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dstMem),
                 "l"(srcMem), "r"(size), "r"(mbar), "h"(ctaMask)
                 : "memory");
}
PTX_FN void cp_async_bulk_shared_cluster_shared_cta(uint32_t dstMem, uint32_t srcMem, uint32_t size, uint32_t mbar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dstMem),
        "r"(srcMem), "r"(size), "r"(mbar)
        : "memory");
}
PTX_FN void cp_async_bulk_global_shared_cta(void *dstMem, uint32_t srcMem, uint32_t size) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dstMem), "r"(srcMem), "r"(size)
                 : "memory");
}
PTX_FN void cp_async_bulk_prefetch_L2_global(const void *srcMem, uint32_t size) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(srcMem), "r"(size) : "memory");
}
PTX_FN void cp_async_bulk_commit_group(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// At most N of this thread's latest groups are still running afterwards.
template <int N> PTX_FN void cp_async_bulk_wait_group(void) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// The same, but only for their reads of shared memory: the source may be reused, the result is not there yet.
template <int N> PTX_FN void cp_async_bulk_wait_group_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// ---- Tensor copies (9.7.9.27). Coordinate 0 is the innermost; boxes past the edges read as zero. ------------

PTX_FN void prefetch_tensormap(const void *a) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(a) : "memory");
}

// Loads: <dim>d(dstMem, tensorMap, coordinates, mbar, cache_policy). The .cta_group::2 form may signal an mbarrier
// of the other CTA of the pair; the multicast forms write to, and signal, the same offsets in each CTA of ctaMask.
#    define PTX_TENSOR_LOAD(suffix, qualifier)                                                                         \
        PTX_FN void cp_async_bulk_tensor_2d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,    \
                                                    uint32_t mbar, uint64_t cache_policy) {                            \
            asm volatile("cp.async.bulk.tensor.2d" qualifier ".shared::cluster.global"                                 \
                         ".mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dstMem), \
                         "l"(tensorMap), "r"(mbar), "r"(c0), "r"(c1), "l"(cache_policy)                                \
                         : "memory");                                                                                  \
        }                                                                                                              \
        PTX_FN void cp_async_bulk_tensor_3d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,    \
                                                    int32_t c2, uint32_t mbar, uint64_t cache_policy) {                \
            asm volatile(                                                                                              \
                "cp.async.bulk.tensor.3d" qualifier ".shared::cluster.global"                                          \
                ".mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dstMem),      \
                "l"(tensorMap), "r"(mbar), "r"(c0), "r"(c1), "r"(c2), "l"(cache_policy)                                \
                : "memory");                                                                                           \
        }                                                                                                              \
        PTX_FN void cp_async_bulk_tensor_2d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0,      \
                                                              int32_t c1, uint32_t mbar, uint16_t ctaMask,             \
                                                              uint64_t cache_policy) {                                 \
            asm volatile("cp.async.bulk.tensor.2d" qualifier ".shared::cluster.global"                                 \
                         ".mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"                             \
                         " [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(dstMem),                                         \
                         "l"(tensorMap), "r"(mbar), "h"(ctaMask), "r"(c0), "r"(c1), "l"(cache_policy)                  \
                         : "memory");                                                                                  \
        }                                                                                                              \
        PTX_FN void cp_async_bulk_tensor_3d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0,      \
                                                              int32_t c1, int32_t c2, uint32_t mbar, uint16_t ctaMask, \
                                                              uint64_t cache_policy) {                                 \
            asm volatile("cp.async.bulk.tensor.3d" qualifier ".shared::cluster.global"                                 \
                         ".mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"                             \
                         " [%0], [%1, {%4, %5, %6}], [%2], %3, %7;" ::"r"(dstMem),                                     \
                         "l"(tensorMap), "r"(mbar), "h"(ctaMask), "r"(c0), "r"(c1), "r"(c2), "l"(cache_policy)         \
                         : "memory");                                                                                  \
        }
PTX_TENSOR_LOAD(, "")
PTX_TENSOR_LOAD(_cta_group_2, ".cta_group::2")
#    undef PTX_TENSOR_LOAD

// Without a cache policy.
PTX_FN void cp_async_bulk_tensor_2d_no_hint(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,
                                            uint32_t mbar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(dstMem),
                 "l"(tensorMap), "r"(c0), "r"(c1), "r"(mbar)
                 : "memory");
}

// Cache policies as createpolicy encodes them (the constants that CUTLASS uses).
constexpr uint64_t cache_evict_normal = 0x1000000000000000ull;
constexpr uint64_t cache_evict_first = 0x12F0000000000000ull;
constexpr uint64_t cache_evict_last = 0x14F0000000000000ull;

// Four rows y0..y3 of a two-dimensional tensor land one after the other. sm_100 and later.
PTX_FN void cp_async_bulk_tensor_2d_gather4(uint32_t dstMem, const void *tensorMap, int32_t x, int32_t y0, int32_t y1,
                                            int32_t y2, int32_t y3, uint32_t mbar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dstMem),
                 "l"(tensorMap), "r"(mbar), "r"(x), "r"(y0), "r"(y1), "r"(y2), "r"(y3)
                 : "memory");
}

// Stores: what lies past the edges is not written. Follow with cp_async_bulk_commit_group and a wait.
PTX_FN void cp_async_bulk_tensor_2d_store(const void *tensorMap, int32_t c0, int32_t c1, uint32_t srcMem) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(tensorMap),
                 "r"(srcMem), "r"(c0), "r"(c1)
                 : "memory");
}
PTX_FN void cp_async_bulk_tensor_3d_store(const void *tensorMap, int32_t c0, int32_t c1, int32_t c2, uint32_t srcMem) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(tensorMap),
                 "r"(srcMem), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

// ---- Tensor memory (9.7.16). cta_group is 1, or 2 for a pair; one value per kernel. --------------------------

// Writes the address of nCols (32, 64, 128, 256 or 512) fresh columns to shared memory at dst. One whole warp (of each
// CTA of the pair when cta_group is 2).
template <int cta_group> PTX_FN void tcgen05_alloc(uint32_t dst, uint32_t nCols) {
    static_assert(cta_group == 1 || cta_group == 2, "a CTA group is one CTA or a pair");
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst), "r"(nCols)
                     : "memory");
    else
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst), "r"(nCols)
                     : "memory");
}
template <int cta_group> PTX_FN void tcgen05_dealloc(uint32_t taddr, uint32_t nCols) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(taddr), "r"(nCols) : "memory");
    else
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(taddr), "r"(nCols) : "memory");
}
template <int cta_group> PTX_FN void tcgen05_relinquish_alloc_permit(void) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    else
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}

// D = A * B + (enable_input_d ? D : 0) on E2M1 with one UE4M3 scale per 16 elements of K; one thread issues it for
// the CTA or the pair. block16 is the spelling that sm_100f accepts (scale_vec::4X is the same machine code).
template <int cta_group>
PTX_FN void tcgen05_mma_mxf4nvf4_block16(uint32_t d_tmem, uint64_t a_desc, uint64_t b_desc, uint32_t idesc,
                                         uint32_t scale_A_tmem, uint32_t scale_B_tmem, uint32_t enable_input_d) {
    if constexpr (cta_group == 1)
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(
                d_tmem),
            "l"(a_desc), "l"(b_desc), "r"(idesc), "r"(scale_A_tmem), "r"(scale_B_tmem), "r"(enable_input_d)
            : "memory");
    else
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(
                d_tmem),
            "l"(a_desc), "l"(b_desc), "r"(idesc), "r"(scale_A_tmem), "r"(scale_B_tmem), "r"(enable_input_d)
            : "memory");
}

// 32 rows of 16 bytes of shared memory to 4 columns, the same in all four 32-lane quadrants: scale factors.
template <int cta_group> PTX_FN void tcgen05_cp_32x128b_warpx4(uint32_t taddr, uint64_t s_desc) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(taddr), "l"(s_desc) : "memory");
    else
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(taddr), "l"(s_desc) : "memory");
}
// The general 128-lane copy, 16 bytes a row: no replication. Not for scale factors.
template <int cta_group> PTX_FN void tcgen05_cp_128x128b(uint32_t taddr, uint64_t s_desc) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(taddr), "l"(s_desc) : "memory");
    else
        asm volatile("tcgen05.cp.cta_group::2.128x128b [%0], %1;" ::"r"(taddr), "l"(s_desc) : "memory");
}

// One arrival on mbar when everything this thread issued before (mma, cp) has completed. Implies
// fence::before_thread_sync.
template <int cta_group> PTX_FN void tcgen05_commit(uint32_t mbar) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbar)
                     : "memory");
    else
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbar)
                     : "memory");
}
template <int cta_group> PTX_FN void tcgen05_commit_multicast(uint32_t mbar, uint16_t ctaMask) {
    if constexpr (cta_group == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], "
                     "%1;" ::"r"(mbar),
                     "h"(ctaMask)
                     : "memory");
    else
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], "
                     "%1;" ::"r"(mbar),
                     "h"(ctaMask)
                     : "memory");
}

PTX_FN void tcgen05_fence_before_thread_sync(void) {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
PTX_FN void tcgen05_fence_after_thread_sync(void) {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
PTX_FN void tcgen05_wait_ld(void) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
PTX_FN void tcgen05_wait_st(void) {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// tcgen05.ld/st.32x32b.x<num>: register i of lane t is lane t of the warp's quadrant, column taddr + i. The lane part
// of taddr must name the quadrant, 32 * (warp % 4) << 16. What ld returns is there only after tcgen05_wait_ld.
template <int num> PTX_FN void tcgen05_ld_32x32b(uint32_t (&r)[num], uint32_t taddr);
template <int num> PTX_FN void tcgen05_st_32x32b(uint32_t taddr, const uint32_t (&r)[num]);

#    define PTX_R1(c, b) c(r[b])
#    define PTX_R2(c, b) PTX_R1(c, b), PTX_R1(c, b + 1)
#    define PTX_R4(c, b) PTX_R2(c, b), PTX_R2(c, b + 2)
#    define PTX_R8(c, b) PTX_R4(c, b), PTX_R4(c, b + 4)
#    define PTX_R16(c, b) PTX_R8(c, b), PTX_R8(c, b + 8)
#    define PTX_R32(c, b) PTX_R16(c, b), PTX_R16(c, b + 16)
#    define PTX_R64(c, b) PTX_R32(c, b), PTX_R32(c, b + 32)
#    define PTX_TMEM(num, list, taddr_operand)                                                                         \
        template <> __device__ __forceinline__ void tcgen05_ld_32x32b<num>(uint32_t(&r)[num], uint32_t taddr) {        \
            asm volatile("tcgen05.ld.sync.aligned.32x32b.x" #num ".b32 {" list "}, [%" #num "];"                       \
                         : PTX_R##num("=r", 0)                                                                         \
                         : "r"(taddr)                                                                                  \
                         : "memory");                                                                                  \
        }                                                                                                              \
        template <> __device__ __forceinline__ void tcgen05_st_32x32b<num>(uint32_t taddr, const uint32_t(&r)[num]) {  \
            asm volatile("tcgen05.st.sync.aligned.32x32b.x" #num ".b32 [%" #num "], {" list "};" ::PTX_R##num("r", 0), \
                         "r"(taddr)                                                                                    \
                         : "memory");                                                                                  \
        }
#    define PTX_L4 "%0, %1, %2, %3"
#    define PTX_L8 PTX_L4 ", %4, %5, %6, %7"
#    define PTX_L16 PTX_L8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#    define PTX_L32 PTX_L16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#    define PTX_L64                                                                                                    \
        PTX_L32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "         \
                "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
PTX_TMEM(1, "%0", "%1")
PTX_TMEM(2, "%0, %1", "%2")
PTX_TMEM(4, PTX_L4, "%4")
PTX_TMEM(8, PTX_L8, "%8")
PTX_TMEM(16, PTX_L16, "%16")
PTX_TMEM(32, PTX_L32, "%32")
PTX_TMEM(64, PTX_L64, "%64")
#    undef PTX_TMEM

// ---- Arithmetic whose rounding matters (9.7.3, 9.7.9.21). -----------------------------------------------------

// Two fp32 to two E2M1 codes in one byte: a in the high nibble, b in the low one. NaN becomes +6.
PTX_FN uint8_t cvt_rn_satfinite_e2m1x2_f32(float a, float b) {
    uint32_t d;
    asm("{\n.reg .b8 t;\ncvt.rn.satfinite.e2m1x2.f32 t, %1, %2;\ncvt.u32.u8 %0, t;\n}" : "=r"(d) : "f"(a), "f"(b));
    return (uint8_t)d;
}
// Two fp32 to two E4M3 bytes: a in the high byte, b in the low one. NaN stays NaN (0x7F).
PTX_FN uint16_t cvt_rn_satfinite_e4m3x2_f32(float a, float b) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(a), "f"(b));
    return d;
}
// Two E4M3 bytes to two fp16 (exact).
PTX_FN uint32_t cvt_rn_f16x2_e4m3x2(uint16_t a) {
    uint32_t d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(a));
    return d;
}
// One fp16 to fp32 (exact).
PTX_FN float cvt_f32_f16(uint16_t a) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a));
    return d;
}
// Two fp32 to two BF16: a in the high half, b in the low one.
PTX_FN uint32_t cvt_rn_bf16x2_f32(float a, float b) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(a), "f"(b));
    return d;
}
PTX_FN float add_rn_f32(float a, float b) {
    float d;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
PTX_FN float mul_rn_f32(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
PTX_FN float fma_rn_f32(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
PTX_FN float div_rn_f32(float a, float b) {
    float d;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
// 9.7.3.11 min and max that let NaN through.
PTX_FN float min_NaN_f32(float a, float b) {
    float d;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
PTX_FN float max_NaN_f32(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
// 9.7.4.3: two BF16 products, rounded to nearest even, subnormals kept.
PTX_FN uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// 9.7.9.7 prmt: bytes of {b, a} chosen by the nibbles of c.
PTX_FN uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// 9.7.9.2 mov.b32: a word unpacked to halves, and one of them packed twice. In front of mul_rn_bf16x2 it costs nothing.
PTX_FN uint32_t mov_b32_low_twice(uint32_t a) {
    uint32_t d;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(a));
    return d;
}
PTX_FN uint32_t mov_b32_high_twice(uint32_t a) {
    uint32_t d;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(a));
    return d;
}
// 9.7.15.5.8 mma.m16n8k16: d += a * b, BF16 operands, fp32 accumulators; the whole warp.
PTX_FN void mma_m16n8k16_f32_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Approximate: the last bits differ between the hardware and the model.
PTX_FN float ex2_approx_ftz_f32(float a) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
PTX_FN float lg2_approx_ftz_f32(float a) {
    float d;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
PTX_FN float rcp_approx_ftz_f32(float a) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
// mov.b32: the bits of a float and back.
PTX_FN uint32_t mov_b32_f32(float a) {
    return __float_as_uint(a);
}
PTX_FN float mov_f32_b32(uint32_t a) {
    return __uint_as_float(a);
}

#    undef PTX_FN
} // namespace ptx

#endif
#endif
