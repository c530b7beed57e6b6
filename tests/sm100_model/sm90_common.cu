// One program for two machines: what Hopper has in common with Blackwell, run on an H200 and on the model.
//
// Every case prints a line with a digest of all bytes it produced, and the first of them. CI compares the lines of the
// model, over several schedules, with those recorded on the GPU (recorded/h200_sm90_common.txt). Nothing here depends
// on timing, on addresses or on which lane elect.sync picks.
//   GPU:   nvcc -std=c++17 -O1 -fmad=false -I../../src -arch=sm_90a -o sm90_common sm90_common.cu
//   model: built by CMakeLists.txt; sm90_common [--seed N] [--compare FILE]
#include "../../src/backend/sm100/device.h"
#include "ptx_wgmma.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

struct common_args {
    struct sm100_tensor_map map, map2;
    const uint8_t *in;
    uint8_t *out;
    uint32_t u[8];
    int32_t c[4];
};

// ---- Device code. ----

enum { bar_area = 65536, shared_total = 65536 + 1024 }; // data below, mbarriers above

SM100_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
    }
}

// Every byte gets a known value first, so that untouched bytes can be compared too.
SM100_DEVICE void shared_fill(uint32_t addr, uint32_t bytes, uint32_t word) {
    for (uint32_t i = 4 * ptx::tid_x(); i < bytes; i += 4 * ptx::ntid_x()) ptx::st_shared_u32(addr + i, word);
    ptx::fence_proxy_async_shared_cta();
}

SM100_DEVICE void shared_to_global(uint8_t *to, uint32_t addr, uint32_t bytes) {
    for (uint32_t i = 4 * ptx::tid_x(); i < bytes; i += 4 * ptx::ntid_x())
        ptx::st_global_u32(to + i, ptx::ld_shared_u32(addr + i));
}

SM100_DEVICE void barriers_open(uint32_t bar, uint32_t count, uint32_t expected) {
    if (ptx::tid_x() == 0) {
        for (uint32_t i = 0; i < count; i++) ptx::mbarrier_init(bar + 8 * i, expected);
        ptx::fence_mbarrier_init_release_cluster();
    }
}

// u: rank, bytes of the box, bytes to dump, offset of the box. c: coordinates.
SM100_KERNEL(128) void tensor_load_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area, dst = base + args.u[3];
    shared_fill(base, args.u[2], 0xEEEEEEEEu);
    barriers_open(bar, 1, 1);
    ptx::bar_sync(0, 128);
    if (ptx::tid_x() == 0) {
        ptx::prefetch_tensormap(&args.map);
        ptx::mbarrier_arrive_expect_tx(bar, args.u[1]);
        if (args.u[0] == 2)
            ptx::cp_async_bulk_tensor_2d(dst, &args.map, args.c[0], args.c[1], bar, ptx::cache_evict_normal);
        else
            ptx::cp_async_bulk_tensor_3d(dst, &args.map, args.c[0], args.c[1], args.c[2], bar, ptx::cache_evict_first);
    }
    wait_for(bar, 0);
    shared_to_global(args.out, base, args.u[2]);
}

// The box comes from in, as it lies in shared memory.
SM100_KERNEL(128) void tensor_store_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base();
    for (uint32_t i = 4 * ptx::tid_x(); i < args.u[1]; i += 512)
        ptx::st_shared_u32(base + i, ptx::ld_global_nc_u32(args.in + i));
    ptx::fence_proxy_async_shared_cta();
    ptx::bar_sync(0, 128);
    if (ptx::tid_x() == 0) {
        if (args.u[0] == 2)
            ptx::cp_async_bulk_tensor_2d_store(&args.map, args.c[0], args.c[1], base);
        else
            ptx::cp_async_bulk_tensor_3d_store(&args.map, args.c[0], args.c[1], args.c[2], base);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group<0>();
    }
}

// u: mask, issuing rank, bytes, kind (0 tensor 2d, 1 bulk, 2 tensor 3d).
SM100_KERNEL(32) void multicast_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area, rank = ptx::cluster_ctarank(), bytes = args.u[2];
    shared_fill(base, bytes + 256, 0xDDDDDDDDu);
    barriers_open(bar, 1, 1);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    const bool receives = args.u[0] >> rank & 1;
    if (ptx::tid_x() == 0) {
        const uint16_t mask = (uint16_t)args.u[0];
        if (receives) ptx::mbarrier_arrive_expect_tx(bar, bytes);
        if (rank == args.u[1]) {
            if (args.u[3] == 0)
                ptx::cp_async_bulk_tensor_2d_multicast(base, &args.map, args.c[0], args.c[1], bar, mask,
                                                       ptx::cache_evict_normal);
            else if (args.u[3] == 1)
                ptx::cp_async_bulk_shared_cluster_global_multicast(base, args.in, bytes, bar, mask);
            else
                ptx::cp_async_bulk_tensor_3d_multicast(base, &args.map, args.c[0], args.c[1], args.c[2], bar, mask,
                                                       ptx::cache_evict_normal);
        }
    }
    ptx::bar_warp_sync(0xffffffffu);
    if (receives) wait_for(bar, 0);
    shared_to_global(args.out + rank * (bytes + 256), base, bytes + 256);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

SM100_DEVICE void note(const struct common_args &args, uint32_t &count, uint32_t value) {
    ptx::st_global_u32(args.out + 4 * count++, value);
}
SM100_DEVICE void note_parities(const struct common_args &args, uint32_t &count, uint32_t bar) {
    note(args, count, ptx::mbarrier_test_wait_parity(bar, 0) << 1 | ptx::mbarrier_test_wait_parity(bar, 1));
}

// One thread walks an mbarrier through arrivals and transaction counts and writes down both parities after each step.
SM100_KERNEL(32) void mbarrier_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area;
    if (ptx::tid_x() != 0) return;
    uint32_t n = 0;
    ptx::mbarrier_init(bar, 3);
    ptx::fence_mbarrier_init_release_cluster();
    note_parities(args, n, bar);
    ptx::mbarrier_arrive(bar);
    note_parities(args, n, bar);
    ptx::mbarrier_arrive_expect_tx(bar, 96);
    ptx::mbarrier_arrive(bar); // no arrivals left, 96 bytes missing
    note_parities(args, n, bar);
    ptx::cp_async_bulk_shared_cluster_global(base, args.in, 32, bar);
    ptx::nanosleep(20000);
    note_parities(args, n, bar);
    ptx::cp_async_bulk_shared_cluster_global(base + 32, args.in + 32, 64, bar);
    wait_for(bar, 0);
    note_parities(args, n, bar);
    ptx::cp_async_bulk_shared_cluster_global(base + 128, args.in + 128, 48, bar); // bytes before they are expected
    ptx::nanosleep(20000);
    note_parities(args, n, bar);
    ptx::mbarrier_arrive_count(bar, 2);
    ptx::mbarrier_expect_tx(bar, 16);
    note_parities(args, n, bar);
    ptx::mbarrier_arrive_expect_tx(bar, 32);
    wait_for(bar, 1);
    note_parities(args, n, bar);
    ptx::mbarrier_arrive_count(bar, 3); // a phase without bytes
    note_parities(args, n, bar);
    wait_for(bar, 0);
    ptx::mbarrier_inval(bar);
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init_release_cluster();
    note_parities(args, n, bar);
    for (uint32_t i = 0; i < 5; i++) {
        ptx::mbarrier_arrive(bar);
        note_parities(args, n, bar);
        wait_for(bar, i & 1);
    }
    note(args, n, ptx::ld_shared_u32(base + 4));
    note(args, n, ptx::ld_shared_u32(base + 64));
    note(args, n, ptx::ld_shared_u32(base + 172));
}

// Addresses in a cluster, remote arrivals, stores to and loads from the neighbors.
SM100_KERNEL(32) void cluster_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area;
    const uint32_t rank = ptx::cluster_ctarank(), size = ptx::cluster_nctarank();
    uint8_t *out = args.out + 256 * ptx::ctaid_x();
    shared_fill(base, 256, 0x01010101u * rank);
    barriers_open(bar, 1, size);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    if (ptx::tid_x() == 0) {
        for (uint32_t r = 0; r < size; r++) {
            ptx::st_shared_cluster_u32(ptx::mapa_shared_cluster(base + 16 + 4 * rank, r), 0x5A000000u + 256 * rank + r);
            ptx::mbarrier_arrive_release_cluster(ptx::mapa_shared_cluster(bar, r));
        }
        while (!ptx::mbarrier_try_wait_parity_acquire_cluster(bar, 0)) {
        }
        for (uint32_t r = 0; r < size; r++) {
            ptx::st_global_u32(out + 4 * r, ptx::ld_shared_u32(base + 16 + 4 * r));
            ptx::st_global_u32(out + 64 + 4 * r, ptx::ld_shared_cluster_u32(ptx::mapa_shared_cluster(base + 128, r)));
        }
        // How shared::cluster addresses are made: the model (and CUTLASS) rely on the rank in bits 24 and up.
        const uint32_t peer = ptx::mapa_shared_cluster(base, rank ^ 1);
        ptx::st_global_u32(out + 128, (base >> 24) ^ rank);
        ptx::st_global_u32(out + 132, (peer >> 24) ^ rank);
        ptx::st_global_u32(out + 136, (peer ^ base) & 0xFFFFFF);
        ptx::st_global_u32(out + 140, base & 1023);
        ptx::st_global_u32(out + 144, base & 0xFFFFFF);
        ptx::st_global_u32(out + 148, rank);
        ptx::st_global_u32(out + 152, ptx::clusterid_x());
        ptx::st_global_u32(out + 156, ptx::nclusterid_x());
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

// Bulk copies in a ring of CTAs: global to shared, shared to the next CTA, shared to global. u: bytes.
SM100_KERNEL(32) void bulk_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area, bytes = args.u[0];
    const uint32_t rank = ptx::cluster_ctarank(), next = (rank + 1) % ptx::cluster_nctarank();
    barriers_open(bar, 2, 1);
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    if (ptx::tid_x() == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, bytes);
        ptx::mbarrier_arrive_expect_tx(bar + 8, bytes);
        ptx::cp_async_bulk_prefetch_L2_global(args.in + rank * bytes, bytes);
        ptx::cp_async_bulk_shared_cluster_global(base, args.in + rank * bytes, bytes, bar);
        wait_for(bar, 0);
        ptx::cp_async_bulk_shared_cluster_shared_cta(ptx::mapa_shared_cluster(base + 16384, next), base, bytes,
                                                     ptx::mapa_shared_cluster(bar + 8, next));
        wait_for(bar + 8, 0);
        ptx::cp_async_bulk_global_shared_cta(args.out + rank * bytes, base + 16384, bytes / 2);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_global_shared_cta(args.out + rank * bytes + bytes / 2, base + 16384 + bytes / 2, bytes / 2);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<1>();
        ptx::cp_async_bulk_wait_group<0>();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

// Two groups of 64 threads hand a buffer back and forth with bar.sync and bar.arrive.
SM100_KERNEL(128) void named_barrier_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), t = ptx::tid_x();
    for (uint32_t round = 0; round < 6; round++) {
        if (t < 64) {
            if (round) ptx::bar_sync(2, 128);
            ptx::st_shared_u32(base + 4 * t, t * 1000 + round);
            ptx::bar_arrive(1, 128);
        } else {
            ptx::bar_sync(1, 128);
            ptx::st_global_u32(args.out + 256 * round + 4 * (t - 64), ptx::ld_shared_u32(base + 4 * (127 - t)));
            if (round < 5) ptx::bar_arrive(2, 128);
        }
    }
}

SM100_KERNEL(32) void warp_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t t = ptx::tid_x(), all = 0xffffffffu, v = t * 2654435761u;
    uint32_t r[12];
    r[0] = ptx::shfl_sync_idx(v, (t * 7) & 31, all);
    r[1] = ptx::shfl_sync_bfly(v, 5, all);
    r[2] = ptx::shfl_sync_up(v, 3, all);
    r[3] = ptx::shfl_sync_down(v, 30, all);
    r[4] = ptx::vote_sync_ballot(v >> 31, all);
    r[5] = ptx::redux_sync_add(v, all);
    r[6] = ptx::redux_sync_min(v, all);
    r[7] = ptx::redux_sync_max(v, all);
    r[8] = ptx::redux_sync_or(v & 0xF0F0, all);
    r[9] = ptx::redux_sync_add(ptx::elect_sync(all), all); // one lane is elected
    const uint32_t mask = t < 16 ? 0x0000ffffu : 0xffff0000u;
    r[10] = ptx::redux_sync_add(t, mask);
    r[11] = ptx::shfl_sync_idx(v, t ^ 1, mask);
    for (uint32_t i = 0; i < 12; i++) ptx::st_global_u32(args.out + 4 * (12 * t + i), r[i]);
}

// Conversions and fp32 arithmetic, 16 bytes of results for each pair of input words.
SM100_KERNEL(128) void arithmetic_kernel(SM100_ARGS(struct common_args, args)) {
    for (uint32_t i = ptx::ctaid_x() * 128 + ptx::tid_x(); i < args.u[0]; i += ptx::nctaid_x() * 128) {
        const float a = ptx::ld_global_nc_f32(args.in + 8 * i), b = ptx::ld_global_nc_f32(args.in + 8 * i + 4);
        uint8_t *out = args.out + 32 * i;
        const uint16_t e4m3 = ptx::cvt_rn_satfinite_e4m3x2_f32(a, b);
        const uint32_t f16x2 = ptx::cvt_rn_f16x2_e4m3x2((uint16_t)i);
        ptx::st_global_u16(out, e4m3);
        ptx::st_global_u16(out + 2, (uint16_t)i);
        ptx::st_global_u32(out + 4, f16x2);
        ptx::st_global_u32(out + 8, ptx::cvt_rn_bf16x2_f32(a, b));
        // NaN payloads differ between processors: only finite operands go through arithmetic.
        const uint32_t fa = ptx::mov_b32_f32(a) & 0xBFFFFFFFu, fb = (ptx::mov_b32_f32(b) & 0xBFFFFFFFu) | 0x00800000u;
        const float x = ptx::mov_f32_b32(fa), y = ptx::mov_f32_b32(fb);
        ptx::st_global_f32(out + 12, ptx::add_rn_f32(x, y));
        ptx::st_global_f32(out + 16, ptx::mul_rn_f32(x, y));
        ptx::st_global_f32(out + 20, ptx::fma_rn_f32(x, y, x));
        ptx::st_global_f32(out + 24, ptx::div_rn_f32(x, y));
        const uint16_t h = (uint16_t)f16x2;
        ptx::st_global_f32(out + 28, (h & 0x7C00) == 0x7C00 ? 0.0f : ptx::cvt_f32_f16(h));
    }
}

// Each CTA writes a block and counts itself in; the last one sums all blocks. u: nothing. out: counter, sum, blocks.
SM100_KERNEL(64) void counter_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), t = ptx::tid_x(), cta = ptx::ctaid_x(), ctas = ptx::nctaid_x();
    uint8_t *blocks = args.out + 64;
    ptx::st_global_u32(blocks + 4 * (64 * cta + t), 17 * cta + t * t);
    ptx::bar_sync(0, 64);
    if (t == 0) ptx::st_shared_u32(base, ptx::atom_acq_rel_gpu_add_u32(args.out, 1));
    ptx::bar_sync(0, 64);
    if (ptx::ld_shared_u32(base) != ctas - 1) return;
    uint32_t sum = 0;
    for (uint32_t i = t; i < 64 * ctas; i += 64) sum += ptx::ld_global_u32(blocks + 4 * i);
    ptx::red_release_gpu_add_u32(args.out + 4, sum);
    ptx::red_relaxed_gpu_add_u32(args.out + 8, 1);
    ptx::atom_relaxed_gpu_add_u64(args.out + 16, 0x100000001ull);
    ptx::red_release_gpu_or_b32(args.out + 24, 1u << (t % 32));
}

// CTA 1 hands values to CTA 0 through a flag; CTA 0 answers. Acquire, release, fences.
SM100_KERNEL(32) void flag_kernel(SM100_ARGS(struct common_args, args)) {
    uint8_t *flag = args.out, *answer = args.out + 16, *data = args.out + 64;
    if (ptx::tid_x() != 0) return;
    if (ptx::ctaid_x() == 1) {
        for (uint32_t i = 0; i < 8; i++) ptx::st_global_u32(data + 4 * i, 100 + i);
        ptx::st_release_gpu_u32(flag, 1);
        while (ptx::ld_relaxed_gpu_u32(answer) != 2) {
        }
        ptx::fence_acq_rel_gpu();
        ptx::st_global_u32(data + 64, ptx::ld_global_u32(data + 32) + 1);
    } else {
        while (ptx::ld_acquire_gpu_u32(flag) != 1) {
        }
        uint32_t sum = 0;
        for (uint32_t i = 0; i < 8; i++) sum += ptx::ld_global_u32(data + 4 * i);
        ptx::st_global_u32(data + 32, sum);
        ptx::fence_acq_rel_gpu();
        ptx::st_relaxed_gpu_u32(answer, 2);
    }
}

// A producer warp and a consumer warp over a ring of three stages. u: tiles, bytes of a tile, rows of a tile.
SM100_KERNEL(64) void pipeline_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), full = base + bar_area, empty = full + 32, stages = 3, bytes = args.u[1];
    if (ptx::tid_x() == 0) {
        for (uint32_t s = 0; s < stages; s++) {
            ptx::mbarrier_init(full + 8 * s, 1);
            ptx::mbarrier_init(empty + 8 * s, 32);
        }
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::bar_sync(0, 64);
    if (ptx::tid_x() < 32) {
        if (ptx::elect_sync(0xffffffffu))
            for (uint32_t i = 0; i < args.u[0]; i++) {
                const uint32_t s = i % stages, phase = i / stages & 1;
                wait_for(empty + 8 * s, phase ^ 1);
                ptx::mbarrier_arrive_expect_tx(full + 8 * s, bytes);
                ptx::cp_async_bulk_tensor_2d(base + s * 16384, &args.map, 0, (int32_t)(i * args.u[2]), full + 8 * s,
                                             ptx::cache_evict_first);
            }
    } else {
        uint32_t hash = 0;
        for (uint32_t i = 0; i < args.u[0]; i++) {
            const uint32_t s = i % stages, phase = i / stages & 1, lane = ptx::laneid();
            wait_for(full + 8 * s, phase);
            for (uint32_t b = 4 * lane; b < bytes; b += 128)
                hash = hash * 31 + ptx::ld_shared_u32(base + s * 16384 + b);
            ptx::mbarrier_arrive(empty + 8 * s);
        }
        ptx::st_global_u32(args.out + 4 * ptx::laneid(), hash);
    }
}

// Hopper's descriptor: version 0, two bits of swizzle at 62 (1: 128 bytes, 2: 64, 3: 32).
SM100_DEVICE uint64_t hopper_desc(uint32_t addr, uint32_t leading, uint32_t stride, uint32_t swizzle) {
    return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)swizzle << 62;
}

// D[64][64] = A * B^T in E4M3 over K = 32 * steps elements. u: swizzle mode as above, bytes of a row, steps, first row
// of B (a multiple of 8: a tile that starts inside the loaded one). A and B are loaded by TMA with that swizzle;
// without one, in slices of 16 bytes.
SM100_KERNEL(128) void wgmma_kernel(SM100_ARGS(struct common_args, args)) {
    const uint32_t base = shared_base(), bar = base + bar_area, a = base, b = base + 16384;
    const uint32_t swizzle = args.u[0], pitch = args.u[1], steps = args.u[2], rows_b = 128;
    barriers_open(bar, 1, 1);
    ptx::bar_sync(0, 128);
    if (ptx::tid_x() == 0) {
        const uint32_t slices = swizzle ? 1 : pitch / 16, slice = swizzle ? pitch : 16;
        ptx::mbarrier_arrive_expect_tx(bar, (64 + rows_b) * pitch);
        for (uint32_t i = 0; i < slices; i++) {
            ptx::cp_async_bulk_tensor_2d(a + i * 64 * slice, &args.map, (int32_t)(16 * i), 0, bar,
                                         ptx::cache_evict_normal);
            ptx::cp_async_bulk_tensor_2d(b + i * rows_b * slice, &args.map2, (int32_t)(16 * i), 0, bar,
                                         ptx::cache_evict_normal);
        }
    }
    wait_for(bar, 0);
    float d[32];
    for (uint32_t i = 0; i < 32; i++) d[i] = 0;
    ptx::wgmma_fence();
    for (uint32_t k = 0; k < steps; k++) {
        const uint32_t stride = swizzle ? 8 * pitch : 128, first_b = args.u[3];
        const uint32_t a_k = a + (swizzle ? 32 * k : 2 * k * 64 * 16);
        const uint32_t b_k = b + first_b / 8 * stride + (swizzle ? 32 * k : 2 * k * rows_b * 16);
        ptx::wgmma_m64n64k32_f32_e4m3_e4m3(d, hopper_desc(a_k, 64 * 16, stride, swizzle),
                                           hopper_desc(b_k, rows_b * 16, stride, swizzle), k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group_0();
    const uint32_t t = ptx::tid_x(), row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    SM100_UNROLL
    for (uint32_t i = 0; i < 32; i++)
        ptx::st_global_f32(args.out + 4 * ((row + 8 * (i / 2 % 2)) * 64 + column + i / 4 * 8 + i % 2), d[i]);
}

#include "sm90_common_host.h"
