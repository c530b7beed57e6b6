/* The wrappers of src/backend/cuda/ptx.cuh as the model provides them: the same names and signatures, functions
 * instead of instructions. Comments are in ptx.cuh. */
#ifndef SM100_MODEL_PTX_H
#define SM100_MODEL_PTX_H

#include <stdint.h>
#include <math.h>
#include <string.h>

/* CUDA's own vectors, which nvcc knows without being told. */
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

uint32_t shared_base(void);
void shared_name(uint32_t addr, const char *format, uint32_t number);

/* The wrappers whose template argument is a number hand it on. */
namespace model {
void setmaxnreg(uint32_t imm_reg_count, int increase);
void bulk_wait_group(uint32_t n, bool read_only);
void tcgen05_alloc(int cta_group, uint32_t dst, uint32_t nCols);
void tcgen05_dealloc(int cta_group, uint32_t taddr, uint32_t nCols);
void tcgen05_relinquish(int cta_group);
void tcgen05_mma(int cta_group, uint32_t d_tmem, uint64_t a_desc, uint64_t b_desc, uint32_t idesc,
                 uint32_t scale_A_tmem, uint32_t scale_B_tmem, uint32_t enable_input_d);
void tcgen05_cp(int cta_group, bool warpx4, uint32_t taddr, uint64_t s_desc);
void tcgen05_commit(int cta_group, uint32_t mbar, int32_t ctaMask); /* -1: no multicast */
void tcgen05_ld(uint32_t *r, uint32_t num, uint32_t taddr);
void tcgen05_st(uint32_t taddr, const uint32_t *r, uint32_t num);
} // namespace model

namespace ptx {

using u32x2 = uint2;
using u32x4 = uint4;
constexpr uint64_t cache_evict_normal = 0x1000000000000000ull;
constexpr uint64_t cache_evict_first = 0x12F0000000000000ull;
constexpr uint64_t cache_evict_last = 0x14F0000000000000ull;

uint32_t tid_x(void);
uint32_t ntid_x(void);
uint32_t ctaid_x(void);
uint32_t nctaid_x(void);
uint32_t laneid(void);
uint32_t smid(void);
uint32_t clusterid_x(void);
uint32_t nclusterid_x(void);
uint32_t cluster_ctarank(void);
uint32_t cluster_nctarank(void);
uint64_t globaltimer(void);

uint32_t elect_sync(uint32_t membermask);
void bar_sync(uint32_t a, uint32_t b);
void bar_arrive(uint32_t a, uint32_t b);
void bar_warp_sync(uint32_t membermask);
uint32_t shfl_sync_idx(uint32_t a, uint32_t b, uint32_t membermask);
uint32_t shfl_sync_bfly(uint32_t a, uint32_t b, uint32_t membermask);
uint32_t shfl_sync_down(uint32_t a, uint32_t b, uint32_t membermask);
uint32_t shfl_sync_up(uint32_t a, uint32_t b, uint32_t membermask);
uint32_t vote_sync_ballot(uint32_t a, uint32_t membermask);
uint32_t redux_sync_add(uint32_t src, uint32_t membermask);
uint32_t redux_sync_min(uint32_t src, uint32_t membermask);
uint32_t redux_sync_max(uint32_t src, uint32_t membermask);
uint32_t redux_sync_or(uint32_t src, uint32_t membermask);
template <int imm_reg_count> inline void setmaxnreg_inc(void) {
    model::setmaxnreg(imm_reg_count, 1);
}
template <int imm_reg_count> inline void setmaxnreg_dec(void) {
    model::setmaxnreg(imm_reg_count, 0);
}
void griddepcontrol_wait(void);
void griddepcontrol_launch_dependents(void);
void nanosleep(uint32_t t);
void trap(void);

void barrier_cluster_arrive(void);
void barrier_cluster_arrive_relaxed(void);
void barrier_cluster_wait(void);
uint32_t mapa_shared_cluster(uint32_t a, uint32_t b);

void fence_acq_rel_cta(void);
void fence_acq_rel_cluster(void);
void fence_acq_rel_gpu(void);
void fence_acq_rel_sys(void);
void fence_proxy_async(void);
void fence_proxy_async_shared_cta(void);
void fence_proxy_async_global(void);
void fence_mbarrier_init_release_cluster(void);

void mbarrier_init(uint32_t addr, uint32_t count);
void mbarrier_inval(uint32_t addr);
void mbarrier_arrive(uint32_t addr);
void mbarrier_arrive_count(uint32_t addr, uint32_t count);
void mbarrier_expect_tx(uint32_t addr, uint32_t tx_count);
void mbarrier_arrive_expect_tx(uint32_t addr, uint32_t tx_count);
void mbarrier_arrive_release_cluster(uint32_t addr);
void mbarrier_arrive_expect_tx_release_cluster(uint32_t addr, uint32_t tx_count);
uint32_t mbarrier_try_wait_parity(uint32_t addr, uint32_t phaseParity);
uint32_t mbarrier_try_wait_parity_acquire_cluster(uint32_t addr, uint32_t phaseParity);
inline void mbarrier_wait_parity(uint32_t addr, uint32_t phaseParity) {
    while (!mbarrier_try_wait_parity(addr, phaseParity)) {
    }
}
uint32_t mbarrier_test_wait_parity(uint32_t addr, uint32_t phaseParity);

uint32_t cvta_to_shared(const void *a);

#define SM100_MODEL_LD_ST(suffix, type)                                                                                \
    type ld_shared_##suffix(uint32_t a);                                                                               \
    void st_shared_##suffix(uint32_t a, type b);                                                                       \
    type ld_global_##suffix(const void *a);                                                                            \
    void st_global_##suffix(void *a, type b);                                                                          \
    type ld_global_nc_##suffix(const void *a);
SM100_MODEL_LD_ST(u8, uint8_t)
SM100_MODEL_LD_ST(u16, uint16_t)
SM100_MODEL_LD_ST(u32, uint32_t)
SM100_MODEL_LD_ST(u64, uint64_t)
SM100_MODEL_LD_ST(f32, float)
SM100_MODEL_LD_ST(v2_u32, u32x2)
SM100_MODEL_LD_ST(v4_u32, u32x4)
#undef SM100_MODEL_LD_ST
float4 ld_shared_v4_f32(uint32_t a);
void st_shared_v4_f32(uint32_t a, float b0, float b1, float b2, float b3);
u32x4 ldmatrix_m8n8_x4_b16(uint32_t p);
uint32_t ld_shared_cluster_u32(uint32_t a);
void st_shared_cluster_u32(uint32_t a, uint32_t b);
void st_shared_cluster_v4_u32(uint32_t a, u32x4 b);
void st_async_shared_cluster_v4_u32(uint32_t a, u32x4 b, uint32_t mbar);

uint32_t ld_relaxed_gpu_u32(const void *a);
uint32_t ld_relaxed_sys_u32(const void *a);
uint32_t ld_acquire_gpu_u32(const void *a);
uint64_t ld_acquire_gpu_u64(const void *a);
uint32_t ld_acquire_sys_u32(const void *a);
uint64_t ld_acquire_sys_u64(const void *a);
void st_relaxed_gpu_u32(void *a, uint32_t b);
void st_relaxed_sys_u32(void *a, uint32_t b);
void st_release_gpu_u32(void *a, uint32_t b);
void st_release_gpu_u64(void *a, uint64_t b);
void st_release_sys_u32(void *a, uint32_t b);
void st_release_sys_u64(void *a, uint64_t b);
void red_relaxed_gpu_add_u32(void *a, uint32_t b);
void red_release_gpu_add_u32(void *a, uint32_t b);
void red_release_gpu_add_u64(void *a, uint64_t b);
void red_release_sys_add_u32(void *a, uint32_t b);
void red_release_sys_add_u64(void *a, uint64_t b);
void red_release_gpu_or_b32(void *a, uint32_t b);
uint32_t atom_shared_add_u32(uint32_t a, uint32_t b);
uint32_t atom_relaxed_gpu_add_u32(void *a, uint32_t b);
uint64_t atom_relaxed_gpu_add_u64(void *a, uint64_t b);
uint32_t atom_acq_rel_gpu_add_u32(void *a, uint32_t b);
uint64_t atom_acq_rel_gpu_add_u64(void *a, uint64_t b);
uint32_t atom_acq_rel_sys_add_u32(void *a, uint32_t b);
uint64_t atom_acq_rel_sys_add_u64(void *a, uint64_t b);
uint32_t atom_relaxed_gpu_exch_b32(void *a, uint32_t b);
uint32_t atom_acq_rel_gpu_cas_b32(void *a, uint32_t b, uint32_t c);

void cp_async_bulk_shared_cluster_global(uint32_t dstMem, const void *srcMem, uint32_t size, uint32_t mbar);
void cp_async_bulk_shared_cluster_global_multicast(uint32_t dstMem, const void *srcMem, uint32_t size, uint32_t mbar,
                                                   uint16_t ctaMask);
void cp_async_bulk_shared_cluster_shared_cta(uint32_t dstMem, uint32_t srcMem, uint32_t size, uint32_t mbar);
void cp_async_bulk_global_shared_cta(void *dstMem, uint32_t srcMem, uint32_t size);
void cp_async_bulk_prefetch_L2_global(const void *srcMem, uint32_t size);
void cp_async_bulk_commit_group(void);
template <int N> inline void cp_async_bulk_wait_group(void) {
    model::bulk_wait_group(N, false);
}
template <int N> inline void cp_async_bulk_wait_group_read(void) {
    model::bulk_wait_group(N, true);
}

void prefetch_tensormap(const void *a);
#define SM100_MODEL_TENSOR_LOAD(suffix)                                                                                \
    void cp_async_bulk_tensor_2d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,               \
                                         uint32_t mbar, uint64_t cache_policy);                                        \
    void cp_async_bulk_tensor_3d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1, int32_t c2,   \
                                         uint32_t mbar, uint64_t cache_policy);                                        \
    void cp_async_bulk_tensor_2d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,     \
                                                   uint32_t mbar, uint16_t ctaMask, uint64_t cache_policy);            \
    void cp_async_bulk_tensor_3d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,     \
                                                   int32_t c2, uint32_t mbar, uint16_t ctaMask,                        \
                                                   uint64_t cache_policy);
SM100_MODEL_TENSOR_LOAD()
SM100_MODEL_TENSOR_LOAD(_cta_group_2)
#undef SM100_MODEL_TENSOR_LOAD
inline void cp_async_bulk_tensor_2d_no_hint(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,
                                            uint32_t mbar) {
    cp_async_bulk_tensor_2d(dstMem, tensorMap, c0, c1, mbar, cache_evict_normal);
}
void cp_async_bulk_tensor_2d_gather4(uint32_t dstMem, const void *tensorMap, int32_t x, int32_t y0, int32_t y1,
                                     int32_t y2, int32_t y3, uint32_t mbar);
void cp_async_bulk_tensor_2d_store(const void *tensorMap, int32_t c0, int32_t c1, uint32_t srcMem);
void cp_async_bulk_tensor_3d_store(const void *tensorMap, int32_t c0, int32_t c1, int32_t c2, uint32_t srcMem);

template <int cta_group> inline void tcgen05_alloc(uint32_t dst, uint32_t nCols) {
    model::tcgen05_alloc(cta_group, dst, nCols);
}
template <int cta_group> inline void tcgen05_dealloc(uint32_t taddr, uint32_t nCols) {
    model::tcgen05_dealloc(cta_group, taddr, nCols);
}
template <int cta_group> inline void tcgen05_relinquish_alloc_permit(void) {
    model::tcgen05_relinquish(cta_group);
}
template <int cta_group>
inline void tcgen05_mma_mxf4nvf4_block16(uint32_t d_tmem, uint64_t a_desc, uint64_t b_desc, uint32_t idesc,
                                         uint32_t scale_A_tmem, uint32_t scale_B_tmem, uint32_t enable_input_d) {
    model::tcgen05_mma(cta_group, d_tmem, a_desc, b_desc, idesc, scale_A_tmem, scale_B_tmem, enable_input_d);
}
template <int cta_group> inline void tcgen05_cp_32x128b_warpx4(uint32_t taddr, uint64_t s_desc) {
    model::tcgen05_cp(cta_group, true, taddr, s_desc);
}
template <int cta_group> inline void tcgen05_cp_128x128b(uint32_t taddr, uint64_t s_desc) {
    model::tcgen05_cp(cta_group, false, taddr, s_desc);
}
template <int cta_group> inline void tcgen05_commit(uint32_t mbar) {
    model::tcgen05_commit(cta_group, mbar, -1);
}
template <int cta_group> inline void tcgen05_commit_multicast(uint32_t mbar, uint16_t ctaMask) {
    model::tcgen05_commit(cta_group, mbar, ctaMask);
}
void tcgen05_fence_before_thread_sync(void);
void tcgen05_fence_after_thread_sync(void);
void tcgen05_wait_ld(void);
void tcgen05_wait_st(void);
template <int num> inline void tcgen05_ld_32x32b(uint32_t (&r)[num], uint32_t taddr) {
    model::tcgen05_ld(r, num, taddr);
}
template <int num> inline void tcgen05_st_32x32b(uint32_t taddr, const uint32_t (&r)[num]) {
    model::tcgen05_st(taddr, r, num);
}

uint8_t cvt_rn_satfinite_e2m1x2_f32(float a, float b);
uint16_t cvt_rn_satfinite_e4m3x2_f32(float a, float b);
uint32_t cvt_rn_f16x2_e4m3x2(uint16_t a);
float cvt_f32_f16(uint16_t a);
uint32_t cvt_rn_bf16x2_f32(float a, float b);
float min_NaN_f32(float a, float b);
float max_NaN_f32(float a, float b);
uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b);
uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c);
inline uint32_t mov_b32_low_twice(uint32_t a) {
    return (a & 0xFFFF) * 0x10001;
}
inline uint32_t mov_b32_high_twice(uint32_t a) {
    return (a >> 16) * 0x10001;
}
void mma_m16n8k16_f32_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
float ex2_approx_ftz_f32(float a);
float lg2_approx_ftz_f32(float a);
float rcp_approx_ftz_f32(float a);
inline float add_rn_f32(float a, float b) {
    return a + b;
}
inline float mul_rn_f32(float a, float b) {
    return a * b;
}
inline float fma_rn_f32(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float div_rn_f32(float a, float b) {
    return a / b;
}
inline uint32_t mov_b32_f32(float a) {
    uint32_t d;
    memcpy(&d, &a, sizeof d);
    return d;
}
inline float mov_f32_b32(uint32_t a) {
    float d;
    memcpy(&d, &a, sizeof d);
    return d;
}

} // namespace ptx

#endif
