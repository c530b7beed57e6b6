// CTAs 0..writers-1 each write eight rows with ordinary stores and raise a counter; the last CTA waits for all of them
// and fetches the rows by TMA. With between_ranks set, the writers are in another launch. This is the hand-over from
// one GEMM to the next inside a persistent kernel, reduced to its synchronization.
#include "../../src/backend/sm100/device.h"
#include "handover_kernel.h"

SM100_DEVICE void write_rows(const struct handover_args &args, uint32_t cta) {
    const uint32_t t = ptx::tid_x(), rows = args.fault == HANDOVER_BOUNDS && cta + 1 == args.writers ? 9 : 8;
    for (uint32_t i = t; i < rows * 32; i += 64) ptx::st_global_u32(args.rows + cta * 1024 + 4 * i, cta * 1000 + i);
    if (args.fault != HANDOVER_NO_FENCE) ptx::fence_proxy_async_global();
    if (args.fault != HANDOVER_EARLY) ptx::bar_sync(0, 64);
    if (t != 0 || args.fault == HANDOVER_NEVER || args.fault == HANDOVER_TIMEOUT) return;
    if (args.fault == HANDOVER_RELAXED)
        ptx::red_relaxed_gpu_add_u32(args.counter, 1);
    else if (args.between_ranks && args.fault != HANDOVER_SCOPE)
        ptx::red_release_sys_add_u32(args.counter, 1);
    else
        ptx::red_release_gpu_add_u32(args.counter, 1);
}

SM100_DEVICE uint32_t wait_for_rows(const struct handover_args &args) {
    const uint32_t wanted = args.fault == HANDOVER_COUNT ? args.writers - 1 : args.writers;
    if (args.fault == HANDOVER_NO_WAIT) return 1;
    const uint64_t start = ptx::globaltimer();
    uint32_t found;
    while ((found = args.between_ranks ? ptx::ld_acquire_sys_u32(args.counter)
                                       : ptx::ld_acquire_gpu_u32(args.counter)) < wanted)
        if (args.fault == HANDOVER_TIMEOUT && ptx::globaltimer() - start > 1000000000ull) {
            ptx::st_global_u32(args.record, 0x7E000000u | found << 8 | wanted);
            return 0;
        }
    return 1;
}

SM100_DEVICE void read_rows(const struct handover_args &args) {
    const uint32_t base = shared_base(), bar = base + 16384, t = ptx::tid_x();
    if (t == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init_release_cluster();
        if (wait_for_rows(args)) {
            ptx::mbarrier_arrive_expect_tx(bar, args.writers * 1024);
            for (uint32_t w = 0; w < args.writers; w++)
                ptx::cp_async_bulk_tensor_2d(base + w * 1024, &args.map, 0, (int32_t)(8 * w), bar,
                                             ptx::cache_evict_first);
        } else {
            ptx::mbarrier_arrive(bar);
        }
    }
    ptx::bar_sync(0, 64);
    while (!ptx::mbarrier_try_wait_parity(bar, 0)) {
    }
    if (args.fault == HANDOVER_TIMEOUT) return;
    for (uint32_t i = t; i < args.writers * 256; i += 64)
        ptx::st_global_u32(args.out + i, ptx::ld_shared_u32(base + 4 * i));
}

SM100_KERNEL(64) void handover_kernel(SM100_ARGS(struct handover_args, args)) {
    const uint32_t cta = ptx::ctaid_x();
    if (args.between_ranks ? args.rank == 0 : cta < args.writers)
        write_rows(args, cta);
    else
        read_rows(args);
}
