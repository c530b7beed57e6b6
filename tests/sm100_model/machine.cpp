// The scheduler: which fiber runs next, when asynchronous work happens, and what is said when nothing can.
//
// A seed fixes all choices. One seed in four is fully lazy (asynchronous operations complete only when no thread can
// run), one is eager, the others lie between; another part of the seed sets how often threads are preempted.
#include "machine.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>

namespace model {

Machine *machine;

struct Stop {}; // thrown on the scheduler's stack when an asynchronous operation traps

// ---- Messages. ----

static void report_set(enum sm100_model_status status, const std::string &text) {
    if (machine->report->status != SM100_MODEL_OK) return;
    machine->report->status = status;
    snprintf(machine->report->message, sizeof machine->report->message, "%s", text.c_str());
}

static std::string format_text(const char *format, va_list arguments) {
    char text[2048];
    vsnprintf(text, sizeof text, format, arguments);
    return text;
}

std::string thread_text(const Thread &thread) {
    char text[128];
    const Cta &cta = *thread.cta;
    const char *launch = machine->launches.size() > 1 ? cta.launch->spec.name : "";
    snprintf(text, sizeof text, "%s%sCTA %u warp %u lane %u", launch, *launch ? " " : "", cta.index, thread.tid / 32,
             thread.lane);
    return text;
}

std::string agent_text(Epoch epoch) {
    const Agent &agent = machine->agents[epoch.agent];
    char text[160];
    switch (agent.kind) {
    case Agent::warp: snprintf(text, sizeof text, "warp %u of CTA %u", agent.index, agent.cta->index); break;
    case Agent::tensor_ld:
        snprintf(text, sizeof text, "tcgen05.ld/st of warp %u of CTA %u", agent.index, agent.cta->index);
        break;
    case Agent::mbarrier: {
        const Mbarrier *bar = mbarrier_find(*const_cast<Cta *>(agent.cta), agent.index);
        snprintf(text, sizeof text, "a copy that completes phase %u of %s", epoch.time - 1,
                 bar ? mbarrier_text(*bar).c_str() : "an mbarrier");
        break;
    }
    case Agent::tensor_pipe:
        snprintf(text, sizeof text, "tcgen05 operation %u of thread %u of CTA %u", epoch.time, agent.index,
                 agent.cta->index);
        break;
    case Agent::bulk_read:
    case Agent::bulk_write:
        snprintf(text, sizeof text, "bulk group %u of thread %u of CTA %u", epoch.time - 1, agent.index,
                 agent.cta->index);
        break;
    default: snprintf(text, sizeof text, "nobody");
    }
    return text;
}

static void leave(void) {
    machine->stopped = true;
    if (!machine->current) throw Stop{};
    Thread *thread = machine->current;
    machine->current = nullptr;
    fiber_switch(thread->fiber, machine->scheduler);
    abort(); // a stopped fiber never runs again
}

void trap(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = format_text(format, arguments);
    va_end(arguments);
    if (machine->current) text = thread_text(*machine->current) + ", " + machine->current->at + ": " + text;
    report_set(SM100_MODEL_TRAP, text);
    text = std::string(); // the fiber is abandoned: leave nothing to free
    leave();
    abort();
}

void trap_for(const Thread *thread, const char *what, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = format_text(format, arguments);
    va_end(arguments);
    report_set(SM100_MODEL_TRAP, (thread ? thread_text(*thread) + ", " : std::string()) + what + ": " + text);
    text = std::string();
    leave();
    abort();
}

uint32_t agent_new(Agent::Kind kind, const Cta *cta, uint32_t index) {
    machine->agents.push_back({kind, cta, index});
    return static_cast<uint32_t>(machine->agents.size() - 1);
}

// ---- Threads. ----

uint32_t random_below(uint32_t n) {
    uint64_t &x = machine->random_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return static_cast<uint32_t>(((x >> 16) & 0xffffffffu) * n >> 32);
}

static void make_ready(Thread *thread) {
    Warp *warp = thread->warp;
    if (warp->list_position < 0) {
        warp->list_position = static_cast<int>(machine->ready_warps.size());
        machine->ready_warps.push_back(warp);
    }
    warp->ready |= 1u << thread->lane;
}

static void make_unready(Thread *thread) {
    Warp *warp = thread->warp;
    warp->ready &= ~(1u << thread->lane);
    if (warp->ready) return;
    Warp *last = machine->ready_warps.back();
    machine->ready_warps[static_cast<size_t>(warp->list_position)] = last;
    last->list_position = warp->list_position;
    machine->ready_warps.pop_back();
    warp->list_position = -1;
}

static void switch_away(void) {
    Thread *thread = machine->current;
    thread->since_switch = 0;
    machine->current = nullptr;
    fiber_switch(thread->fiber, machine->scheduler);
}

void yield(void) {
    switch_away();
}

void block(Wait wait) {
    Thread *thread = machine->current;
    thread->wait = wait;
    make_unready(thread);
    if (wait.kind == Wait::poll) machine->pollers.push_back(thread);
    if (wait.kind == Wait::sleep) machine->sleepers.push_back(thread);
    switch_away();
}

void wake(Thread *thread) {
    if (thread->wait.kind == Wait::nothing) return;
    thread->wait = Wait();
    make_ready(thread);
}

void wake_all(std::vector<Thread *> &threads) {
    for (Thread *thread : threads) wake(thread);
    threads.clear();
}

Thread &enter(const char *instruction) {
    Thread *thread = machine->current;
    if (!thread) {
        fprintf(stderr, "sm100_model: %s was called outside a kernel\n", instruction);
        abort();
    }
    thread->at = instruction;
    thread->op++;
    machine->time_ns++;
    // A loop that never waits would keep the machine to itself.
    if (++thread->since_switch > 20000) yield();
    return *thread;
}

Thread &enter_synchronizing(const char *instruction) {
    Thread &thread = enter(instruction);
    if (machine->preemption && random_below(65536) < machine->preemption) yield();
    return thread;
}

static void thread_main(void *argument) {
    Thread *thread = static_cast<Thread *>(argument);
    const struct sm100_model_launch &spec = thread->cta->launch->spec;
    spec.kernel(spec.args);
    thread->done = true;
    thread->warp->done |= 1u << thread->lane;
    thread->at = "its end";
    thread->op++;
    make_unready(thread);
    switch_away();
    abort();
}

// ---- CTAs. ----

static std::unique_ptr<Cta> cta_new(Launch &launch, Cluster &cluster, uint32_t index) {
    auto cta = std::make_unique<Cta>();
    cta->launch = &launch;
    cta->cluster = &cluster;
    cta->index = index;
    cta->rank = static_cast<uint32_t>(cluster.ctas.size());
    cta->dynamic_start = shared_start + (machine->options.static_shared_bytes + 1023) / 1024 * 1024;
    cta->shared_bytes = cta->dynamic_start + launch.spec.dynamic_shared_bytes;
    return cta;
}

// What nobody has written looks like NaN scales and NaN accumulators.
static void cta_start(Cta &cta) {
    Launch &launch = *cta.launch;
    cta.shared.assign(cta.shared_bytes + 128, 0x7F);
    cta.shadow.open(cta.shared_bytes);
    cta.mbarrier_at.assign(cta.shared_bytes / 8 + 1, -1);
    cta.tmem.assign(tmem_lanes * tmem_columns, 0x7FA5A5A5u);
    cta.tmem_cells.assign(4 * tmem_columns, Cell());
    cta.alive = launch.spec.block;
    if (launch.free_stacks.empty()) {
        cta.stacks = machine->stacks_used;
        machine->stacks_used += launch.spec.block;
    } else {
        cta.stacks = launch.free_stacks.back();
        launch.free_stacks.pop_back();
    }
    for (uint32_t w = 0; w < launch.spec.block / 32; w++) {
        cta.warps.push_back(std::make_unique<Warp>());
        Warp &warp = *cta.warps.back();
        warp.cta = &cta;
        warp.index = w;
        warp.agent = agent_new(Agent::warp, &cta, w);
        warp.clock.raise(warp.agent, warp.time);
        for (uint32_t lane = 0; lane < 32; lane++) {
            cta.threads.push_back(std::make_unique<Thread>());
            Thread &thread = *cta.threads.back();
            thread.cta = &cta;
            thread.warp = &warp;
            thread.lane = lane;
            thread.tid = 32 * w + lane;
            thread.id = static_cast<uint32_t>(machine->threads.size());
            machine->threads.push_back(&thread);
            warp.threads[lane] = &thread;
            fiber_prepare(thread.fiber, fiber_stack(machine->stacks, cta.stacks + thread.tid), fiber_stack_bytes,
                          thread_main, &thread);
            make_ready(&thread);
        }
    }
}

static void cta_end(Cta &cta) {
    const Thread *thread = cta.threads[0].get();
    for (const auto &op : machine->async)
        for (const Cta *touched : op->touches)
            if (touched == &cta)
                trap_for(thread, "end of the CTA",
                         "CTA %u has ended, but %s of %s still accesses its memory: wait for it first", cta.index,
                         op->name, thread_text(*machine->threads[op->thread]).c_str());
    for (const auto &bar : cta.mbarriers)
        if (bar->live && bar->tx != 0)
            trap_for(thread, "end of the CTA",
                     "%s ends with a transaction count of %lld bytes: expect_tx and the "
                     "copies do not balance",
                     mbarrier_text(*bar).c_str(), static_cast<long long>(bar->tx));
    tmem_check_at_exit(cta);
    cta.ended = true;
    cta.launch->ctas_ended++;
    cta.launch->free_stacks.push_back(cta.stacks);
    cta.shadow.close();
    std::vector<uint8_t>().swap(cta.shared);
    machine->progress++;
    if (cta.cluster->ctas.size() > 1) return; // the pair may still use its tensor memory
    std::vector<uint32_t>().swap(cta.tmem);
    std::vector<Cell>().swap(cta.tmem_cells);
}

static uint32_t resident_max(const Launch &launch) {
    const uint32_t grid = launch.spec.grid, wanted = machine->options.resident_ctas;
    return wanted ? std::min(std::max(wanted, launch.spec.cluster), grid) : grid;
}

// Starts whole clusters while the limit of resident CTAs allows it.
static void launch_fill(Launch &launch) {
    const uint32_t cluster_size = launch.spec.cluster, limit = resident_max(launch);
    while (launch.ctas_started < launch.spec.grid && launch.ctas_started - launch.ctas_ended + cluster_size <= limit) {
        launch.clusters.push_back(std::make_unique<Cluster>());
        Cluster &cluster = *launch.clusters.back();
        for (uint32_t r = 0; r < cluster_size; r++) {
            launch.ctas.push_back(cta_new(launch, cluster, launch.ctas_started++));
            cluster.ctas.push_back(launch.ctas.back().get());
        }
        for (Cta *cta : cluster.ctas) cta_start(*cta);
    }
}

// ---- Asynchronous operations. ----

void async_start(std::unique_ptr<AsyncOp> op) {
    machine->async.push_back(std::move(op));
    machine->progress++;
}

static bool async_step(void) {
    auto &async = machine->async;
    if (async.empty()) return false;
    const size_t n = async.size(), first = random_below(static_cast<uint32_t>(n));
    for (size_t i = 0; i < n; i++) {
        const size_t k = (first + i) % n;
        if (!async[k]->eligible()) continue;
        machine->progress++;
        if (async[k]->run()) {
            machine->report->async_ops++;
            async[k] = std::move(async.back());
            async.pop_back();
        }
        return true;
    }
    return false;
}

// ---- When nothing can run. ----

static std::string wait_text(const Thread &thread) {
    char text[512];
    const Wait &wait = thread.wait;
    switch (wait.kind) {
    case Wait::mbarrier: {
        const Mbarrier *bar = static_cast<const Mbarrier *>(wait.object);
        snprintf(text, sizeof text,
                 "waits for parity %u of %s: phase %u is in progress, %lld of %u arrivals and %lld bytes are missing",
                 static_cast<unsigned>(wait.a), mbarrier_text(*bar).c_str(), bar->phases,
                 static_cast<long long>(bar->pending), bar->expected, static_cast<long long>(bar->tx));
        break;
    }
    case Wait::bar: {
        const NamedBarrier &bar = thread.cta->bars[wait.a];
        snprintf(text, sizeof text, "waits at bar.sync %u: %u of %u threads have arrived",
                 static_cast<unsigned>(wait.a), bar.arrived, bar.expected);
        break;
    }
    case Wait::cluster:
        snprintf(text, sizeof text, "waits at barrier.cluster: %u threads have arrived", thread.cta->cluster->arrived);
        break;
    case Wait::lanes:
        snprintf(text, sizeof text, "waits at %s for lanes %08x of its warp (here: %08x)", thread.at,
                 static_cast<unsigned>(wait.a), static_cast<const Collective *>(wait.object)->arrived);
        break;
    case Wait::poll: {
        const Region &region = region_of(wait.object, 4, thread.at);
        snprintf(text, sizeof text, "polls '%s' + %zu, which stays %llu", region.name.c_str(),
                 static_cast<size_t>(static_cast<const char *>(wait.object) - region.base),
                 static_cast<unsigned long long>(wait.a));
        break;
    }
    case Wait::sleep: snprintf(text, sizeof text, "sleeps in a loop"); break;
    case Wait::bulk: snprintf(text, sizeof text, "waits for its bulk groups"); break;
    case Wait::tmem_alloc:
        snprintf(text, sizeof text, "waits in tcgen05.alloc for %u columns%s", static_cast<unsigned>(wait.a),
                 wait.b ? " or for the other CTA of the pair" : "");
        break;
    case Wait::tmem_dealloc:
        snprintf(text, sizeof text, "waits in tcgen05.dealloc for the other CTA of the pair");
        break;
    default: snprintf(text, sizeof text, "is ready");
    }
    return text;
}

// One line per group of lanes of a warp that wait for the same thing.
static void deadlock_report(const char *what) {
    std::string text = what;
    for (const auto &launch : machine->launches)
        for (const auto &cta : launch->ctas)
            for (const auto &warp : cta->warps) {
                std::map<std::string, uint32_t> groups;
                for (const Thread *thread : warp->threads)
                    if (!thread->done) groups[wait_text(*thread)] |= 1u << thread->lane;
                for (const auto &group : groups) {
                    char line[640];
                    snprintf(line, sizeof line, "\n  %s%sCTA %u warp %u lanes %08x %s",
                             machine->launches.size() > 1 ? launch->spec.name : "",
                             machine->launches.size() > 1 ? " " : "", cta->index, warp->index, group.second,
                             group.first.c_str());
                    text += line;
                }
            }
    report_set(SM100_MODEL_DEADLOCK, text);
}

// Lets polls, sleeps and bounded waits look again. Returns false once that has proved useless.
static bool wake_idle(uint64_t &last_progress, uint32_t &rounds) {
    rounds = machine->progress == last_progress ? rounds + 1 : 0;
    last_progress = machine->progress;
    const bool time_runs = machine->options.time_runs != 0;
    if (rounds > (time_runs ? 200u : 8u)) return false;
    if (time_runs) machine->time_ns += uint64_t{1000} << std::min(rounds, 40u);
    const bool any = !machine->pollers.empty() || !machine->sleepers.empty();
    wake_all(machine->pollers);
    wake_all(machine->sleepers);
    if (!time_runs) return any;
    for (const auto &launch : machine->launches)
        for (const auto &cta : launch->ctas)
            for (const auto &bar : cta->mbarriers) wake_all(bar->waiters);
    return !machine->ready_warps.empty();
}

// ---- The loop. ----

static void run_warp(Warp &warp) {
    uint32_t lanes = warp.ready;
    while (lanes && !machine->stopped) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
        lanes &= lanes - 1;
        if (!((warp.ready >> lane) & 1)) continue;
        Thread *thread = warp.threads[lane];
        machine->current = thread;
        machine->report->steps++;
        machine->time_ns += 10;
        fiber_switch(machine->scheduler, thread->fiber);
        machine->current = nullptr;
        if (machine->stopped || !thread->done) continue;
        if (--thread->cta->alive == 0) {
            cta_end(*thread->cta);
            launch_fill(*thread->cta->launch);
        }
    }
}

static bool all_ended(void) {
    for (const auto &launch : machine->launches)
        if (launch->ctas_ended < launch->spec.grid) return false;
    return true;
}

static void run_loop(void) {
    uint64_t last_progress = ~uint64_t{0};
    uint32_t rounds = 0;
    const uint64_t steps_max = machine->options.steps_max ? machine->options.steps_max : 2000000000u;
    while (!machine->stopped && !all_ended()) {
        if (machine->eagerness && random_below(65536) < machine->eagerness) async_step();
        if (machine->ready_warps.empty()) {
            if (!machine->sleepers.empty() && random_below(2))
                wake_all(machine->sleepers);
            else if (!async_step() && !wake_idle(last_progress, rounds))
                return deadlock_report("deadlock: no thread can run and no asynchronous operation is left.");
            continue;
        }
        run_warp(*machine->ready_warps[random_below(static_cast<uint32_t>(machine->ready_warps.size()))]);
        if (machine->report->steps > steps_max) {
            deadlock_report("the run does not end: it has reached the limit of steps.");
            return;
        }
    }
    while (!machine->stopped && async_step()) {
    }
    if (!machine->stopped && !machine->async.empty())
        trap_for(nullptr, "end of the run", "%s never completes", machine->async[0]->name);
}

static bool usage_check(const struct sm100_model_launch &spec) {
    char text[256] = "";
    if (!spec.kernel)
        snprintf(text, sizeof text, "the launch has no kernel");
    else if (spec.block == 0 || spec.block > 1024 || spec.block % 32)
        snprintf(text, sizeof text, "a block of %u threads: the model wants whole warps, at most 1024 threads",
                 spec.block);
    else if (spec.grid == 0 || spec.grid % spec.cluster)
        snprintf(text, sizeof text, "a grid of %u CTAs is not a multiple of the cluster of %u", spec.grid,
                 spec.cluster);
    else if (spec.cluster > 16)
        snprintf(text, sizeof text, "a cluster of %u CTAs: at most 16", spec.cluster);
    else if (spec.dynamic_shared_bytes > 232448)
        snprintf(text, sizeof text, "%u bytes of dynamic shared memory: at most 232448", spec.dynamic_shared_bytes);
    if (*text) report_set(SM100_MODEL_USAGE, text);
    return !*text;
}

// One seed is fully lazy, one eager, and so on; the rest of the seed is the random numbers themselves.
static void seed_apply(uint64_t seed) {
    static const uint32_t eagerness[] = {0, 65536, 256, 8192, 32768};
    static const uint32_t preemption[] = {0, 2048, 16384};
    machine->eagerness = eagerness[seed % 5];
    machine->preemption = preemption[(seed / 5) % 3];
    machine->random_state = (seed + 1) * 0x9E3779B97F4A7C15u;
    machine->elected_lane_seed = static_cast<uint32_t>(machine->random_state >> 40);
    for (int i = 0; i < 8; i++) random_below(2);
}

} // namespace model

using namespace model;

static void machine_open(Machine &state, const struct sm100_model_launch *launches, uint32_t count,
                         const struct sm100_model_options *options, struct sm100_model_report *report) {
    memset(report, 0, sizeof *report);
    memset(&state.options, 0, sizeof state.options);
    if (options) memcpy(&state.options, options, std::min(options->struct_size, sizeof state.options));
    state.report = report;
    state.agents.push_back({Agent::nobody, nullptr, 0});
    seed_apply(state.options.seed);
    for (uint32_t i = 0; i < count; i++) {
        state.launches.push_back(std::make_unique<Launch>());
        Launch &launch = *state.launches.back();
        launch.spec = launches[i];
        if (!launch.spec.cluster) launch.spec.cluster = 1;
        if (!launch.spec.name) launch.spec.name = "kernel";
        launch.index = i;
        state.stack_count += size_t{resident_max(launch)} * launch.spec.block;
    }
}

enum sm100_model_status sm100_model_run(const struct sm100_model_launch *launches, uint32_t launch_count,
                                        const struct sm100_model_options *options, struct sm100_model_report *report) {
    auto state = std::make_unique<Machine>();
    machine = state.get();
    machine_open(*state, launches, launch_count, options, report);
    for (const auto &launch : state->launches)
        if (!usage_check(launch->spec)) return report->status;
    state->stacks = fiber_stacks_open(state->stack_count);
    regions_open();
    try {
        for (const auto &launch : state->launches) launch_fill(*launch);
        run_loop();
    } catch (const Stop &) {
    }
    regions_close();
    for (const auto &launch : state->launches)
        for (const auto &cta : launch->ctas) cta->shadow.close();
    fiber_stacks_close(state->stacks, state->stack_count);
    machine = nullptr;
    return report->status;
}
