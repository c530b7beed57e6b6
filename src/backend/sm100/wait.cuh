// Waits that end. A wait on an mbarrier that takes longer than the limit writes down who waited for what,
// once, and makes every later wait of the thread fail at once, so that a kernel whose transfers went wrong
// still returns.
#ifndef MM_SM100_WAIT_CUH
#define MM_SM100_WAIT_CUH

#include "backend/sm100/device.h"
#include "backend/sm100/arguments.h"
#include "backend/sm100/record.h"
#include "backend/sm100/scheduler.h"

struct sm100_watch {
    struct sm100_record *record;
    uint64_t timeout_ns;
    uint32_t kernel, failed;
    struct sm100_work work; // what the thread is at, for the record
};

SM100_DEVICE void watch_give_up(struct sm100_watch &watch, uint32_t barrier, uint32_t index, uint32_t parity) {
    watch.failed = 1;
    struct sm100_record *r = watch.record;
    if (ptx::atom_acq_rel_gpu_cas_b32(&r->claimed, 0, 1) != 0) return;
    ptx::st_global_u32(&r->kernel, watch.kernel);
    ptx::st_global_u32(&r->barrier, barrier);
    ptx::st_global_u32(&r->index, index);
    ptx::st_global_u32(&r->parity, parity);
    ptx::st_global_u32(&r->cta, ptx::ctaid_x());
    ptx::st_global_u32(&r->thread, ptx::tid_x());
    ptx::st_global_u32(&r->group, watch.work.group);
    ptx::st_global_u32(&r->m_tile, watch.work.m_tile);
    ptx::st_global_u32(&r->row, watch.work.row);
}

// 1 when the phase with this parity of the index-th barrier at `barriers` has completed, 0 when it never
// will.
SM100_DEVICE uint32_t watch_wait(struct sm100_watch &watch, uint32_t barriers, enum sm100_barrier barrier,
                                 uint32_t index, uint32_t parity) {
    const uint32_t address = barriers + 8 * index;
    if (watch.failed) return 0;
    if (ptx::mbarrier_try_wait_parity(address, parity)) return 1;
    const uint64_t start = ptx::globaltimer();
    while (!ptx::mbarrier_try_wait_parity(address, parity)) {
        if (ptx::globaltimer() - start < watch.timeout_ns) continue;
        watch_give_up(watch, barrier, index, parity);
        return 0;
    }
    return 1;
}

#endif
