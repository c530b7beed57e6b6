// Synchronization: warp-wide instructions, CTA and cluster barriers, mbarriers, fences (PTX ISA 9.7.13).
#include "machine.h"
#include "sm100_model_ptx.h"
#include <stdio.h>
#include <string.h>

namespace model {

// ---- Clocks. ----

void release_to(Clock &clock, Warp &warp) {
    clock.join(warp.clock);
    warp.time++;
    warp.clock.raise(warp.agent, warp.time);
    machine->progress++;
}

void acquire_from(const Clock &clock, Warp &warp) {
    warp.clock.join(clock);
}

// ---- Warp-wide instructions. ----

static Collective &collective_of(Warp &warp, const char *what, uint32_t mask) {
    Collective *free_slot = nullptr;
    for (Collective &c : warp.collectives) {
        if (!c.what) {
            if (!free_slot) free_slot = &c;
            continue;
        }
        if (c.mask == mask && (c.what == what || !strcmp(c.what, what))) return c;
        if (c.mask & mask) trap("lanes of one warp have diverged: others (%08x) are at %s", c.arrived, c.what);
    }
    if (!free_slot) trap("more than eight groups of lanes at once");
    free_slot->what = what;
    free_slot->mask = mask;
    free_slot->arrived = 0;
    return *free_slot;
}

bool collective_gather(const char *what, uint32_t mask) {
    Thread &thread = *machine->current;
    Warp &warp = *thread.warp;
    if (!((mask >> thread.lane) & 1)) trap("the mask %08x does not contain this lane", mask);
    Collective &c = collective_of(warp, what, mask);
    c.arrived |= 1u << thread.lane;
    if (mask & warp.done)
        trap("the mask %08x contains lane %d, which has exited", mask, __builtin_ctz(mask & warp.done));
    if (c.arrived == mask) return true;
    Wait wait;
    wait.kind = Wait::lanes;
    wait.object = &c;
    wait.a = mask;
    wait.b = c.arrived;
    block(wait);
    return false;
}

void collective_release(uint32_t mask) {
    Warp &warp = *machine->current->warp;
    for (Collective &c : warp.collectives)
        if (c.what && c.mask == mask) c.what = nullptr;
    for (uint32_t lane = 0; lane < 32; lane++)
        if ((mask >> lane) & 1) wake(warp.threads[lane]);
    machine->progress++;
}

// Every lane leaves its inputs in its thread; the last one computes all results.
template <typename Compute>
static uint32_t warp_compute(const char *what, uint32_t a, uint32_t b, uint32_t mask, Compute compute) {
    Thread &thread = enter(what);
    thread.collective_in = a;
    thread.collective_in2 = b;
    if (collective_gather(what, mask)) {
        compute(*thread.warp);
        collective_release(mask);
    }
    return static_cast<uint32_t>(thread.collective_out);
}

template <typename Source> // source lane of a lane with operand b; outside 0..31 means its own
static uint32_t shuffle(const char *what, uint32_t a, uint32_t b, uint32_t mask, Source source) {
    return warp_compute(what, a, b, mask, [&](Warp &warp) {
        for (uint32_t lane = 0; lane < 32; lane++) {
            if (!((mask >> lane) & 1)) continue;
            Thread &to = *warp.threads[lane];
            const int from = source(static_cast<int>(lane), static_cast<uint32_t>(to.collective_in2));
            const uint32_t j = from < 0 || from > 31 ? lane : static_cast<uint32_t>(from);
            if (!((mask >> j) & 1)) trap("lane %u reads lane %u, which is not in the mask %08x", lane, j, mask);
            to.collective_out = warp.threads[j]->collective_in;
        }
    });
}

template <typename Combine>
static uint32_t reduce(const char *what, uint32_t a, uint32_t mask, uint32_t start, Combine combine) {
    return warp_compute(what, a, 0, mask, [&](Warp &warp) {
        uint32_t result = start;
        for (uint32_t lane = 0; lane < 32; lane++)
            if ((mask >> lane) & 1)
                result = combine(result, static_cast<uint32_t>(warp.threads[lane]->collective_in), lane);
        for (uint32_t lane = 0; lane < 32; lane++)
            if ((mask >> lane) & 1) warp.threads[lane]->collective_out = result;
    });
}

// ---- Named barriers. ----

static void bar_arrive_on(NamedBarrier &bar, uint32_t number, uint32_t count) {
    Thread &thread = *machine->current;
    if (number > 15) trap("barrier %u: there are 16", number);
    if (count == 0 || count % 32) trap("%u threads: the count must be a positive multiple of 32", count);
    if (bar.arrived && bar.expected != count)
        trap("barrier %u for %u threads, but others came for %u", number, count, bar.expected);
    bar.expected = count;
    bar.arrived++;
    release_to(bar.clock, *thread.warp);
}

static void bar_finish(NamedBarrier &bar) {
    for (Thread *thread : bar.waiters) acquire_from(bar.clock, *thread->warp);
    acquire_from(bar.clock, *machine->current->warp);
    bar.arrived = 0;
    bar.clock.clear();
    wake_all(bar.waiters);
}

// ---- mbarriers. ----

std::string mbarrier_text(const Mbarrier &bar) {
    char text[160];
    if (!bar.name.empty())
        snprintf(text, sizeof text, "mbarrier '%s' (shared 0x%x of CTA %u)", bar.name.c_str(), bar.offset,
                 bar.cta->index);
    else
        snprintf(text, sizeof text, "mbarrier 0x%x of CTA %u", bar.offset, bar.cta->index);
    return text;
}

Mbarrier *mbarrier_find(Cta &cta, uint32_t offset) {
    if (offset % 8 || offset / 8 >= cta.mbarrier_at.size()) return nullptr;
    const int32_t index = cta.mbarrier_at[offset / 8];
    return index < 0 ? nullptr : cta.mbarriers[static_cast<size_t>(index)].get();
}

Mbarrier &mbarrier_at(Cta &cta, uint32_t offset, const char *use) {
    Mbarrier *bar = mbarrier_find(cta, offset);
    if (!bar || !bar->live)
        trap("%s of an mbarrier at shared 0x%x of CTA %u, where none has been initialized", use, offset, cta.index);
    if (cta.ended) trap("%s of %s, whose CTA has ended", use, mbarrier_text(*bar).c_str());
    if (!machine->current->warp->clock.covers(bar->init))
        trap("%s of %s before a barrier has made its initialization visible", use, mbarrier_text(*bar).c_str());
    if (machine->current->cta != &cta && machine->threads[bar->init_thread]->fenced_shared < bar->init_op)
        trap("%s of %s from another CTA, but no fence.mbarrier_init followed its initialization", use,
             mbarrier_text(*bar).c_str());
    return *bar;
}

void mbarrier_check_async_use(const Mbarrier &bar, const Thread &thread) {
    if (machine->threads[bar.init_thread]->fenced_shared < bar.init_op)
        trap("%s was initialized without a fence.mbarrier_init (or fence.proxy.async) after it, so an asynchronous "
             "operation may not see it",
             mbarrier_text(bar).c_str());
    (void)thread;
}

static void phase_finish_if_due(Mbarrier &bar, const char *what) {
    if (bar.pending == 0 && bar.tx < 0)
        trap_for(machine->current, what,
                 "%s has no arrivals left and %lld bytes more than expected: expect_tx is too "
                 "small, so the phase can never complete",
                 mbarrier_text(bar).c_str(), static_cast<long long>(-bar.tx));
    if (bar.pending != 0 || bar.tx != 0) return;
    bar.phases++;
    bar.pending = bar.expected;
    bar.done.times.swap(bar.next.times);
    bar.done.raise(bar.agent, bar.phases);
    bar.next = bar.done; // later phases are after this one
    machine->progress++;
    wake_all(bar.waiters);
}

static void expect_more(Mbarrier &bar, uint32_t bytes) {
    bar.tx += bytes;
    if (bar.tx >= 1 << 20)
        trap("%s: a transaction count of %lld is over 2^20 - 1", mbarrier_text(bar).c_str(),
             static_cast<long long>(bar.tx));
}

void mbarrier_arrive_on(Mbarrier &bar, uint32_t count) {
    bar.pending -= count;
    if (bar.pending < 0)
        trap_for(machine->current, machine->current ? machine->current->at : "tcgen05.commit",
                 "%s gets more arrivals in one phase than the %u it was initialized for", mbarrier_text(bar).c_str(),
                 bar.expected);
    phase_finish_if_due(bar, machine->current ? machine->current->at : "tcgen05.commit");
}

void mbarrier_complete_tx(Mbarrier &bar, uint32_t bytes, uint32_t phase, const char *what) {
    if (!bar.live || bar.cta->ended) trap_for(nullptr, what, "%s is gone", mbarrier_text(bar).c_str());
    if (bar.phases != phase)
        trap_for(nullptr, what,
                 "bytes land on %s in phase %u, but the copy was issued in phase %u: that phase completed "
                 "without waiting for it (expect_tx is missing or too small)",
                 mbarrier_text(bar).c_str(), bar.phases, phase);
    bar.tx -= bytes;
    phase_finish_if_due(bar, what);
}

static Mbarrier &mbarrier_of(uint32_t address, const char *use) {
    Cta &cta = cta_of_address(*machine->current->cta, address, use);
    if (address % 8) trap("the mbarrier address 0x%x is not a multiple of 8", address);
    return mbarrier_at(cta, address & 0xFFFFFF, use);
}

static void own_cta_only(uint32_t address, const char *use) {
    if (&cta_of_address(*machine->current->cta, address, use) != machine->current->cta)
        trap("0x%x lies in another CTA; this form of %s takes only the CTA's own mbarriers", address, use);
}

static void arrive(const char *instruction, uint32_t address, uint32_t count, bool remote, int64_t expect) {
    Thread &thread = enter_synchronizing(instruction);
    if (!remote) own_cta_only(address, instruction);
    Mbarrier &bar = mbarrier_of(address, "arrive");
    if (count == 0) trap("an arrive of count 0");
    if (expect >= 0) expect_more(bar, static_cast<uint32_t>(expect));
    release_to(bar.next, *thread.warp);
    mbarrier_arrive_on(bar, count);
}

static uint32_t wait_parity(const char *instruction, uint32_t address, uint32_t parity, bool suspend) {
    Thread &thread = suspend ? enter(instruction) : enter_synchronizing(instruction);
    own_cta_only(address, instruction);
    if (parity > 1) trap("a phase parity of %u", parity);
    Mbarrier &bar = mbarrier_of(address, "wait");
    if ((bar.phases & 1) == parity) {
        if (!suspend) {
            yield();
        } else {
            bar.waiters.push_back(&thread);
            Wait wait;
            wait.kind = Wait::mbarrier;
            wait.object = &bar;
            wait.a = parity;
            block(wait);
        }
        // The manual lets try_wait give up early.
        if ((bar.phases & 1) == parity || random_below(16) == 0) return 0;
    }
    acquire_from(bar.done, *thread.warp);
    return 1;
}

} // namespace model

using namespace model;

// ---- The wrappers. ----

namespace ptx {

uint32_t elect_sync(uint32_t membermask) {
    Thread &thread = *machine->current;
    // The same lane for the same mask during a launch, but not always the lowest.
    uint32_t lanes[32], n = 0;
    for (uint32_t lane = 0; lane < 32; lane++)
        if ((membermask >> lane) & 1) lanes[n++] = lane;
    const uint32_t leader = n ? lanes[machine->elected_lane_seed % n] : 32;
    warp_compute("elect.sync", 0, 0, membermask, [](Warp &) {});
    return thread.lane == leader;
}

void bar_sync(uint32_t a, uint32_t b) {
    Thread &thread = enter("bar.sync");
    NamedBarrier &bar = thread.cta->bars[a & 15];
    bar_arrive_on(bar, a, b);
    if (bar.arrived >= b) return bar_finish(bar);
    bar.waiters.push_back(&thread);
    Wait wait;
    wait.kind = Wait::bar;
    wait.a = a;
    block(wait);
}

void bar_arrive(uint32_t a, uint32_t b) {
    Thread &thread = enter_synchronizing("bar.arrive");
    NamedBarrier &bar = thread.cta->bars[a & 15];
    bar_arrive_on(bar, a, b);
    if (bar.arrived < b) return;
    for (Thread *waiter : bar.waiters) acquire_from(bar.clock, *waiter->warp);
    bar.arrived = 0;
    bar.clock.clear();
    wake_all(bar.waiters);
}

void bar_warp_sync(uint32_t membermask) {
    warp_compute("bar.warp.sync", 0, 0, membermask, [](Warp &) {});
}

uint32_t shfl_sync_idx(uint32_t a, uint32_t b, uint32_t membermask) {
    return shuffle("shfl.sync.idx", a, b, membermask, [](int, uint32_t j) { return static_cast<int>(j & 31); });
}
uint32_t shfl_sync_bfly(uint32_t a, uint32_t b, uint32_t membermask) {
    return shuffle("shfl.sync.bfly", a, b, membermask,
                   [](int lane, uint32_t j) { return lane ^ static_cast<int>(j & 31); });
}
uint32_t shfl_sync_down(uint32_t a, uint32_t b, uint32_t membermask) {
    return shuffle("shfl.sync.down", a, b, membermask,
                   [](int lane, uint32_t j) { return lane + static_cast<int>(j & 31); });
}
uint32_t shfl_sync_up(uint32_t a, uint32_t b, uint32_t membermask) {
    return shuffle("shfl.sync.up", a, b, membermask,
                   [](int lane, uint32_t j) { return lane - static_cast<int>(j & 31); });
}
uint32_t vote_sync_ballot(uint32_t a, uint32_t membermask) {
    return reduce("vote.sync.ballot", a != 0, membermask, 0,
                  [](uint32_t r, uint32_t v, uint32_t lane) { return r | v << lane; });
}
uint32_t redux_sync_add(uint32_t src, uint32_t membermask) {
    return reduce("redux.sync.add", src, membermask, 0, [](uint32_t r, uint32_t v, uint32_t) { return r + v; });
}
uint32_t redux_sync_min(uint32_t src, uint32_t membermask) {
    return reduce("redux.sync.min", src, membermask, ~0u,
                  [](uint32_t r, uint32_t v, uint32_t) { return r < v ? r : v; });
}
uint32_t redux_sync_max(uint32_t src, uint32_t membermask) {
    return reduce("redux.sync.max", src, membermask, 0, [](uint32_t r, uint32_t v, uint32_t) { return r > v ? r : v; });
}
uint32_t redux_sync_or(uint32_t src, uint32_t membermask) {
    return reduce("redux.sync.or", src, membermask, 0, [](uint32_t r, uint32_t v, uint32_t) { return r | v; });
}

void griddepcontrol_wait(void) {
    enter("griddepcontrol.wait");
}
void griddepcontrol_launch_dependents(void) {
    enter("griddepcontrol.launch_dependents");
}

void nanosleep(uint32_t t) {
    enter("nanosleep");
    machine->time_ns += t;
    Wait wait;
    wait.kind = Wait::sleep;
    block(wait);
}
void trap(void) {
    enter("trap");
    model::trap("the kernel executed trap");
}

// ---- Clusters. ----

static void cluster_arrive(const char *instruction, bool relaxed) {
    Thread &thread = enter(instruction);
    Cluster &cluster = *thread.cta->cluster;
    if (thread.cluster_arrived) model::trap("this thread has arrived and must wait before it arrives again");
    thread.cluster_arrived = true;
    thread.cluster_phase = cluster.phase;
    if (relaxed)
        cluster.next.join(thread.warp->init_fence);
    else
        release_to(cluster.next, *thread.warp);
    size_t expected = 0;
    for (const Cta *cta : cluster.ctas) expected += cta->launch->spec.block;
    if (++cluster.arrived < expected) return;
    cluster.arrived = 0;
    cluster.phase++;
    cluster.done = cluster.next;
    machine->progress++;
    wake_all(cluster.waiters);
}

void barrier_cluster_arrive(void) {
    cluster_arrive("barrier.cluster.arrive", false);
}
void barrier_cluster_arrive_relaxed(void) {
    cluster_arrive("barrier.cluster.arrive.relaxed", true);
}
void barrier_cluster_wait(void) {
    Thread &thread = enter("barrier.cluster.wait");
    Cluster &cluster = *thread.cta->cluster;
    if (!thread.cluster_arrived) model::trap("this thread has not arrived");
    while (cluster.phase == thread.cluster_phase) {
        cluster.waiters.push_back(&thread);
        Wait wait;
        wait.kind = Wait::cluster;
        block(wait);
    }
    thread.cluster_arrived = false;
    acquire_from(cluster.done, *thread.warp);
}

uint32_t mapa_shared_cluster(uint32_t a, uint32_t b) {
    Thread &thread = enter("mapa");
    if (b >= thread.cta->cluster->ctas.size())
        model::trap("CTA rank %u in a cluster of %zu", b, thread.cta->cluster->ctas.size());
    return (a & 0xFFFFFF) | b << 24;
}

// ---- Fences. ----

static void fence_acq_rel(const char *instruction) {
    Thread &thread = enter(instruction);
    Warp &warp = *thread.warp;
    acquire_from(warp.acquired, warp);
    warp.released.clear();
    release_to(warp.released, warp);
    warp.has_released = true;
}
void fence_acq_rel_cta(void) {
    enter("fence.acq_rel.cta");
}
void fence_acq_rel_cluster(void) {
    enter("fence.acq_rel.cluster");
}
void fence_acq_rel_gpu(void) {
    fence_acq_rel("fence.acq_rel.gpu");
}
void fence_acq_rel_sys(void) {
    fence_acq_rel("fence.acq_rel.sys");
}

static void fence_proxy(const char *instruction, bool shared, bool global) {
    Thread &thread = enter(instruction);
    if (shared) thread.fenced_shared = thread.op;
    if (global) thread.fenced_global = thread.op;
    if (global) thread.warp->proxy_fence = thread.warp->clock;
}
void fence_proxy_async(void) {
    fence_proxy("fence.proxy.async", true, true);
}
void fence_proxy_async_shared_cta(void) {
    fence_proxy("fence.proxy.async.shared::cta", true, false);
}
void fence_proxy_async_global(void) {
    fence_proxy("fence.proxy.async.global", false, true);
}
void fence_mbarrier_init_release_cluster(void) {
    Thread &thread = enter("fence.mbarrier_init");
    for (const auto &bar : thread.cta->mbarriers)
        if (bar->init_thread == thread.id && bar->live) bar->init_op = 0;
    thread.warp->init_fence = thread.warp->clock;
}

// ---- mbarriers. ----

void mbarrier_init(uint32_t addr, uint32_t count) {
    Thread &thread = enter("mbarrier.init");
    Cta &cta = *thread.cta;
    own_cta_only(addr, "mbarrier.init");
    const uint32_t offset = addr & 0xFFFFFF;
    if (offset % 8) model::trap("the address 0x%x is not a multiple of 8", addr);
    if (count == 0 || count >= 1u << 20) model::trap("a count of %u: 1 to 2^20 - 1", count);
    if (const Mbarrier *old = mbarrier_find(cta, offset))
        if (old->live) model::trap("%s is initialized a second time", mbarrier_text(*old).c_str());
    shared_access(cta, offset, 8, actor_generic(thread), Access::write);
    const int32_t old_index = cta.mbarrier_at[offset / 8];
    cta.mbarrier_at[offset / 8] = static_cast<int32_t>(cta.mbarriers.size());
    cta.mbarriers.push_back(std::make_unique<Mbarrier>());
    Mbarrier &bar = *cta.mbarriers.back();
    if (old_index >= 0) bar.name = cta.mbarriers[static_cast<size_t>(old_index)]->name;
    bar.cta = &cta;
    bar.offset = offset;
    bar.expected = count;
    bar.pending = count;
    bar.agent = agent_new(Agent::mbarrier, &cta, offset);
    bar.init = {thread.warp->agent, thread.warp->time};
    bar.init_thread = thread.id;
    bar.init_op = thread.op;
    cta.shadow.granules[offset / 16].barriers |= static_cast<uint8_t>(1u << (offset / 8 % 2));
}

void mbarrier_inval(uint32_t addr) {
    Thread &thread = enter("mbarrier.inval");
    own_cta_only(addr, "mbarrier.inval");
    Mbarrier &bar = mbarrier_of(addr, "inval");
    if (!bar.waiters.empty()) model::trap("threads still wait for %s", mbarrier_text(bar).c_str());
    if (bar.tx) model::trap("%s still misses %lld bytes", mbarrier_text(bar).c_str(), static_cast<long long>(bar.tx));
    bar.live = false;
    thread.cta->shadow.granules[bar.offset / 16].barriers &= static_cast<uint8_t>(~(1u << (bar.offset / 8 % 2)));
}

void mbarrier_arrive(uint32_t addr) {
    arrive("mbarrier.arrive", addr, 1, false, -1);
}
void mbarrier_arrive_count(uint32_t addr, uint32_t count) {
    arrive("mbarrier.arrive", addr, count, false, -1);
}
void mbarrier_arrive_expect_tx(uint32_t addr, uint32_t tx_count) {
    arrive("mbarrier.arrive.expect_tx", addr, 1, false, tx_count);
}
void mbarrier_arrive_release_cluster(uint32_t addr) {
    arrive("mbarrier.arrive.release.cluster", addr, 1, true, -1);
}
void mbarrier_arrive_expect_tx_release_cluster(uint32_t addr, uint32_t tx_count) {
    arrive("mbarrier.arrive.expect_tx.release.cluster", addr, 1, true, tx_count);
}
void mbarrier_expect_tx(uint32_t addr, uint32_t tx_count) {
    enter_synchronizing("mbarrier.expect_tx");
    own_cta_only(addr, "mbarrier.expect_tx");
    Mbarrier &bar = mbarrier_of(addr, "expect_tx");
    expect_more(bar, tx_count);
    machine->progress++;
}
uint32_t mbarrier_try_wait_parity(uint32_t addr, uint32_t phaseParity) {
    return wait_parity("mbarrier.try_wait.parity", addr, phaseParity, true);
}
uint32_t mbarrier_try_wait_parity_acquire_cluster(uint32_t addr, uint32_t phaseParity) {
    return wait_parity("mbarrier.try_wait.parity.acquire.cluster", addr, phaseParity, true);
}
uint32_t mbarrier_test_wait_parity(uint32_t addr, uint32_t phaseParity) {
    return wait_parity("mbarrier.test_wait.parity", addr, phaseParity, false);
}

} // namespace ptx
