// Shared and global memory: bounds, and a shadow that finds accesses which nothing orders.
//
// Two accesses to a byte, one of them a write, must be ordered by synchronization that the model has seen; whether the
// bytes happen to be right in this schedule does not matter. Between an ordinary write and an asynchronous access there
// must also be a fence.proxy.async: by the writing thread, or for global memory also by the issuing thread after it has
// synchronized with the writer.
#include "machine.h"
#include "sm100_model_ptx.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace model {

static std::map<char *, std::unique_ptr<Region>> regions;
static std::map<void *, bool> owned;

// ---- Cells. ----

static ReadNode *read_node_new(void) {
    if (!machine->free_reads) {
        const size_t n = 4096;
        machine->read_blocks.push_back(std::make_unique<ReadNode[]>(n));
        ReadNode *nodes = machine->read_blocks.back().get();
        for (size_t i = 0; i < n; i++) nodes[i].next = i + 1 < n ? &nodes[i + 1] : nullptr;
        machine->free_reads = nodes;
    }
    ReadNode *node = machine->free_reads;
    machine->free_reads = node->next;
    return node;
}

void cell_reads_drop(Cell &cell) {
    while (cell.reads) {
        ReadNode *node = cell.reads;
        cell.reads = node->next;
        node->next = machine->free_reads;
        machine->free_reads = node;
    }
}

void cell_record_read(Cell &cell, Epoch epoch, const Clock &clock) {
    // A read that this reader knows about needs no record of its own any more.
    for (ReadNode *node = cell.reads; node; node = node->next)
        if (node->epoch.agent == epoch.agent || clock.covers(node->epoch)) {
            node->epoch = epoch;
            return;
        }
    ReadNode *node = read_node_new();
    node->epoch = epoch;
    node->next = cell.reads;
    cell.reads = node;
}

static bool fenced(const Cell &cell, const Actor &actor, bool global) {
    const Thread &writer = *machine->threads[cell.writer_thread];
    if ((global ? writer.fenced_global : writer.fenced_shared) >= cell.writer_op) return true;
    return global && actor.proxy_fence && cell.write.agent && actor.proxy_fence->covers(cell.write);
}

struct Place { // what a message says; the text is made only when needed
    const Cta *cta;
    const Region *region;
    size_t offset;
};
static std::string place_text(const Place &place) {
    char text[160];
    if (place.cta)
        snprintf(text, sizeof text, "shared memory 0x%zx of CTA %u", place.offset, place.cta->index);
    else
        snprintf(text, sizeof text, "'%s' + %zu", place.region->name.c_str(), place.offset);
    return text;
}

[[noreturn]] static void unordered(const Place &place, const char *doing, const char *done, Epoch other) {
    const Agent::Kind kind = machine->agents[other.agent].kind;
    const char *advice = kind == Agent::mbarrier      ? "wait for that phase first"
                         : kind == Agent::tensor_pipe ? "wait for a tcgen05.commit after it first"
                         : kind == Agent::bulk_read || kind == Agent::bulk_write ? "wait for the bulk group first"
                                                                                 : "nothing orders the two";
    trap("%s %s, which %s %s: %s", doing, place_text(place).c_str(), agent_text(other).c_str(), done, advice);
}

static void cell_access(Cell &cell, const Actor &actor, Access access, const Place &place) {
    const bool reading = access == Access::read || access == Access::atomic_read;
    const bool atomic = access == Access::atomic_read || access == Access::atomic_write;
    const char *doing = reading ? "reads" : "writes";
    if (!(atomic && cell.atomic) && !actor.clock->covers(cell.write)) unordered(place, doing, "writes", cell.write);
    if (actor.proxy == Proxy::async && cell.proxy == Proxy::generic && !fenced(cell, actor, place.region != nullptr))
        trap("an asynchronous access %s %s, which %s wrote with ordinary stores and no fence.proxy.async since", doing,
             place_text(place).c_str(), thread_text(*machine->threads[cell.writer_thread]).c_str());
    if (reading) {
        if (place.cta && actor.proxy == Proxy::generic && cell.write.agent == 0)
            trap("reads %s, which nobody has written", place_text(place).c_str());
        if (!atomic) cell_record_read(cell, actor.epoch, *actor.clock);
        return;
    }
    for (const ReadNode *node = cell.reads; node; node = node->next)
        if (!actor.clock->covers(node->epoch)) unordered(place, doing, "reads", node->epoch);
    cell_reads_drop(cell);
    cell.write = actor.epoch;
    cell.proxy = actor.proxy;
    cell.atomic = atomic;
    cell.writer_thread = actor.thread;
    cell.writer_op = machine->threads[actor.thread]->op;
}

// ---- Shadows. ----

void Shadow::open(size_t bytes) {
    count = bytes / 16 + 1;
    void *memory = mmap(nullptr, count * sizeof(Granule), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("sm100_model: cannot map shadow memory");
        exit(2);
    }
    granules = static_cast<Granule *>(memory);
}

void Shadow::close() {
    if (granules) munmap(granules, count * sizeof(Granule));
    granules = nullptr;
}

static void granule_split(Granule &granule) {
    if (machine->free_splits.empty()) {
        const size_t n = 64;
        machine->split_cells.push_back(std::make_unique<Cell[]>(16 * n));
        for (size_t i = 0; i < n; i++) machine->free_splits.push_back(machine->split_cells.back().get() + 16 * i);
    }
    granule.split = machine->free_splits.back();
    machine->free_splits.pop_back();
    for (int i = 0; i < 16; i++) {
        Cell &cell = granule.split[i];
        cell = granule.cell;
        cell.reads = nullptr;
        for (const ReadNode *node = granule.cell.reads; node; node = node->next) {
            ReadNode *copy = read_node_new();
            copy->epoch = node->epoch;
            copy->next = cell.reads;
            cell.reads = copy;
        }
    }
    cell_reads_drop(granule.cell);
}

static void granule_merge(Granule &granule) { // after a write of all sixteen bytes they are alike
    granule.cell = granule.split[0];
    machine->free_splits.push_back(granule.split);
    granule.split = nullptr;
}

static void shadow_access(Shadow &shadow, Place place, size_t bytes, const Actor &actor, Access access) {
    const size_t end = place.offset + bytes;
    while (place.offset < end) {
        Granule &granule = shadow.granules[place.offset / 16];
        const size_t first = place.offset % 16,
                     last = end - place.offset + first < 16 ? end - place.offset + first : 16;
        if (granule.barriers && ((granule.barriers & 1 && first < 8) || (granule.barriers & 2 && last > 8)))
            trap("accesses %s, where a live mbarrier is", place_text(place).c_str());
        const bool whole = first == 0 && last == 16;
        if (whole && !granule.split) {
            cell_access(granule.cell, actor, access, place);
        } else {
            if (!granule.split) granule_split(granule);
            for (size_t i = first; i < last; i++) {
                Place byte = place;
                byte.offset += i - first;
                cell_access(granule.split[i], actor, access, byte);
            }
            if (whole && (access == Access::write || access == Access::atomic_write)) granule_merge(granule);
        }
        place.offset += last - first;
    }
}

Actor actor_generic(Thread &thread) {
    Warp &warp = *thread.warp;
    return {&warp.clock, {warp.agent, warp.time}, Proxy::generic, thread.id, nullptr};
}

Actor actor_async(Thread &thread, Epoch epoch) {
    Warp &warp = *thread.warp;
    return {&warp.clock, epoch, Proxy::async, thread.id, &warp.proxy_fence};
}

// ---- Shared memory. ----

Cta &cta_of_address(Cta &own, uint32_t address, const char *use) {
    const uint32_t rank = address >> 24;
    if (rank >= own.cluster->ctas.size())
        trap("%s at shared address 0x%x: the cluster has no CTA of rank %u", use, address, rank);
    return *own.cluster->ctas[rank];
}

uint32_t shared_address(const Cta &cta, uint32_t offset) {
    return cta.rank << 24 | offset;
}

void shared_check_range(const Cta &cta, uint32_t offset, uint32_t bytes, const char *use) {
    if (cta.ended) trap("%s shared memory of CTA %u, which has ended", use, cta.index);
    if (offset < shared_start || uint64_t{offset} + bytes > cta.shared_bytes)
        trap("%s %u bytes at shared 0x%x, outside the %u bytes of dynamic shared memory at 0x%x", use, bytes, offset,
             cta.shared_bytes - cta.dynamic_start, cta.dynamic_start);
}

void shared_access(Cta &cta, uint32_t offset, uint32_t bytes, const Actor &actor, Access access) {
    shared_check_range(cta, offset, bytes, access == Access::read ? "reads" : "writes");
    shadow_access(cta.shadow, {&cta, nullptr, offset}, bytes, actor, access);
}

uint8_t *shared_generic(const char *instruction, uint32_t address, uint32_t bytes, bool remote, Access access) {
    Thread &thread = enter(instruction);
    Cta &cta = cta_of_address(*thread.cta, address, instruction);
    if (!remote && &cta != thread.cta)
        trap("the address 0x%x lies in another CTA: use the shared::cluster form", address);
    const uint32_t offset = address & 0xFFFFFF;
    if (offset % bytes) trap("the address 0x%x is not a multiple of %u", address, bytes);
    shared_access(cta, offset, bytes, actor_generic(thread), access);
    return cta.shared.data() + offset;
}

// ---- Global memory. ----

Region &region_of(const void *address, size_t bytes, const char *use) {
    char *p = static_cast<char *>(const_cast<void *>(address));
    auto next = regions.upper_bound(p);
    if (next != regions.begin()) {
        Region &region = *std::prev(next)->second;
        const size_t offset = static_cast<size_t>(p - region.base);
        if (offset < region.bytes) {
            if (offset + bytes > region.bytes)
                trap("%s %zu bytes at '%s' + %zu, past its end at %zu", use, bytes, region.name.c_str(), offset,
                     region.bytes);
            return region;
        }
        trap("%s global address %p, which is not registered: %zu bytes after the end of '%s'", use, address,
             offset - region.bytes, region.name.c_str());
    }
    trap("%s global address %p, which is not registered", use, address);
}

void global_access(Region &region, const void *address, size_t bytes, const Actor &actor, Access access) {
    if (region.read_only) {
        if (access == Access::write || access == Access::atomic_write)
            trap("writes '%s', which is registered as read-only", region.name.c_str());
        return;
    }
    const size_t offset = static_cast<size_t>(static_cast<const char *>(address) - region.base);
    shadow_access(region.shadow, {nullptr, &region, offset}, bytes, actor, access);
}

void global_changed(const void *address, size_t bytes) {
    machine->progress++;
    auto &pollers = machine->pollers;
    for (size_t i = 0; i < pollers.size();) {
        const char *p = static_cast<const char *>(pollers[i]->wait.object);
        if (p + 8 <= static_cast<const char *>(address) || p >= static_cast<const char *>(address) + bytes) {
            i++;
            continue;
        }
        wake(pollers[i]);
        pollers[i] = pollers.back();
        pollers.pop_back();
    }
}

static void global_generic(const char *instruction, const void *address, size_t bytes, Access access) {
    Thread &thread = enter(instruction);
    if (reinterpret_cast<uintptr_t>(address) % bytes) trap("the address %p is not a multiple of %zu", address, bytes);
    Region &region = region_of(address, bytes, access == Access::read ? "reads" : "writes");
    global_access(region, address, bytes, actor_generic(thread), access);
}

static void global_nc(const char *instruction, const void *address, size_t bytes) {
    Thread &thread = enter(instruction);
    if (reinterpret_cast<uintptr_t>(address) % bytes) trap("the address %p is not a multiple of %zu", address, bytes);
    Region &region = region_of(address, bytes, "reads");
    if (region.read_only) return;
    const size_t offset = static_cast<size_t>(static_cast<const char *>(address) - region.base);
    const Granule &granule = region.shadow.granules[offset / 16];
    const Cell &cell = granule.split ? granule.split[offset % 16] : granule.cell;
    if (cell.write.agent)
        trap("ld.global.nc of '%s' + %zu, which this launch has written", region.name.c_str(), offset);
    global_access(region, address, bytes, actor_generic(thread), Access::read);
}

void regions_open() {
    for (auto &entry : regions)
        if (!entry.second->read_only) entry.second->shadow.open(entry.second->bytes);
}

void regions_close() {
    for (auto &entry : regions) entry.second->shadow.close();
}

// ---- Acquire, release, atomics. ----

enum class Scope { gpu, sys };

static void word_acquire(const void *address, Scope scope, bool acquire) {
    Warp &warp = *machine->current->warp;
    auto found = machine->sync_words.find(address);
    if (found == machine->sync_words.end()) return;
    Clock &to = acquire ? warp.clock : warp.acquired;
    auto own = found->second.gpu.find(warp.cta->launch);
    if (own != found->second.gpu.end()) to.join(own->second);
    if (scope == Scope::sys) to.join(found->second.sys);
}

static void word_release(const void *address, Scope scope, bool release, bool replaces) {
    Warp &warp = *machine->current->warp;
    SyncWord &word = machine->sync_words[address];
    if (replaces) { // a plain store ends the release sequence of earlier ones; an atomic continues it
        word.gpu.clear();
        word.sys.clear();
    }
    Clock &own = word.gpu[warp.cta->launch];
    if (release) {
        if (scope == Scope::sys) word.sys.join(warp.clock);
        release_to(own, warp);
    } else if (warp.has_released) {
        own.join(warp.released);
        if (scope == Scope::sys) word.sys.join(warp.released);
    }
}

template <typename T> static T read_value(const void *address) {
    T value;
    memcpy(&value, address, sizeof value);
    return value;
}

template <typename T> static T atomic_load(const char *instruction, const void *address, Scope scope, bool acquire) {
    Thread &thread = enter_synchronizing(instruction);
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
        trap("the address %p is not a multiple of %zu", address, sizeof(T));
    Region &region = region_of(address, sizeof(T), "reads");
    // A thread that sees the same value again waits for it to change, so that loops need no time.
    if (thread.poll_address == address && thread.poll_value == read_value<T>(address)) {
        Wait wait;
        wait.kind = Wait::poll;
        wait.object = address;
        wait.a = thread.poll_value;
        block(wait);
    }
    global_access(region, address, sizeof(T), actor_generic(thread), Access::atomic_read);
    word_acquire(address, scope, acquire);
    thread.poll_address = address;
    thread.poll_value = read_value<T>(address);
    return read_value<T>(address);
}

template <typename T>
static void atomic_store(const char *instruction, void *address, T value, Scope scope, bool release) {
    Thread &thread = enter_synchronizing(instruction);
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
        trap("the address %p is not a multiple of %zu", address, sizeof(T));
    global_access(region_of(address, sizeof(T), "writes"), address, sizeof(T), actor_generic(thread),
                  Access::atomic_write);
    word_release(address, scope, release, true);
    memcpy(address, &value, sizeof value);
    global_changed(address, sizeof value);
}

template <typename T, typename Change>
static T atomic_change(const char *instruction, void *address, Scope scope, bool acquire, bool release, Change change) {
    Thread &thread = enter_synchronizing(instruction);
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
        trap("the address %p is not a multiple of %zu", address, sizeof(T));
    global_access(region_of(address, sizeof(T), "writes"), address, sizeof(T), actor_generic(thread),
                  Access::atomic_write);
    word_acquire(address, scope, acquire);
    word_release(address, scope, release, false);
    const T old = read_value<T>(address);
    const T value = change(old);
    memcpy(address, &value, sizeof value);
    global_changed(address, sizeof value);
    return old;
}

} // namespace model

using namespace model;

// ---- Registration (sm100_model.h). ----

void sm100_model_memory_register(void *base, size_t bytes, const char *name, enum sm100_model_memory_kind kind) {
    if (reinterpret_cast<uintptr_t>(base) % 16) {
        fprintf(stderr, "sm100_model: '%s' is registered at %p, not a multiple of 16\n", name, base);
        abort();
    }
    auto region = std::make_unique<Region>();
    region->base = static_cast<char *>(base);
    region->bytes = bytes;
    region->name = name;
    region->read_only = kind == SM100_MODEL_READ_ONLY;
    regions[region->base] = std::move(region);
}
void sm100_model_memory_unregister(void *base) {
    regions.erase(static_cast<char *>(base));
}

void *sm100_model_memory_alloc(size_t bytes, const char *name, enum sm100_model_memory_kind kind) {
    const size_t rounded = (bytes + 255) / 256 * 256;
    void *base = aligned_alloc(256, rounded ? rounded : 256);
    if (!base) {
        fprintf(stderr, "sm100_model: no memory for '%s'\n", name);
        exit(2);
    }
    memset(base, 0xAA, rounded);
    sm100_model_memory_register(base, bytes, name, kind);
    owned[base] = true;
    return base;
}
void sm100_model_memory_free(void *base) {
    if (!base) return;
    sm100_model_memory_unregister(base);
    owned.erase(base);
    free(base);
}

// ---- The wrappers. ----

uint32_t shared_base(void) {
    const Thread &thread = enter("shared_base");
    return shared_address(*thread.cta, thread.cta->dynamic_start);
}

void shared_name(uint32_t addr, const char *format, uint32_t number) {
    Thread &thread = enter("shared_name");
    Mbarrier *bar = mbarrier_find(*thread.cta, addr & 0xFFFFFF);
    if (!bar) return;
    // snprintf with a format from outside: the kernels pass literals with at most one %u.
    char text[64];
    const char *at = strstr(format, "%u");
    if (at)
        snprintf(text, sizeof text, "%.*s%u%s", static_cast<int>(at - format), format, number, at + 2);
    else
        snprintf(text, sizeof text, "%s", format);
    bar->name = text;
}

namespace ptx {

#define SHARED_LD(name, instruction, type, remote)                                                                     \
    type name(uint32_t a) {                                                                                            \
        type d;                                                                                                        \
        memcpy(&d, shared_generic(instruction, a, sizeof(type), remote, Access::read), sizeof d);                      \
        return d;                                                                                                      \
    }
#define SHARED_ST(name, instruction, type, remote)                                                                     \
    void name(uint32_t a, type b) {                                                                                    \
        memcpy(shared_generic(instruction, a, sizeof(type), remote, Access::write), &b, sizeof b);                     \
    }
#define GLOBAL_LD(name, instruction, type, check)                                                                      \
    type name(const void *a) {                                                                                         \
        check;                                                                                                         \
        return read_value<type>(a);                                                                                    \
    }
#define GLOBAL_ST(name, instruction, type)                                                                             \
    void name(void *a, type b) {                                                                                       \
        global_generic(instruction, a, sizeof(type), Access::write);                                                   \
        memcpy(a, &b, sizeof b);                                                                                       \
        global_changed(a, sizeof b);                                                                                   \
    }
#define GLOBAL(suffix, text, type)                                                                                     \
    GLOBAL_LD(ld_global_##suffix, "ld.global." text, type,                                                             \
              global_generic("ld.global." text, a, sizeof(type), Access::read))                                        \
    GLOBAL_LD(ld_global_nc_##suffix, "ld.global.nc." text, type, global_nc("ld.global.nc." text, a, sizeof(type)))     \
    GLOBAL_ST(st_global_##suffix, "st.global." text, type)
#define SHARED(suffix, text, type)                                                                                     \
    SHARED_LD(ld_shared_##suffix, "ld.shared." text, type, false)                                                      \
    SHARED_ST(st_shared_##suffix, "st.shared." text, type, false)
#define BOTH(suffix, text, type)                                                                                       \
    SHARED(suffix, text, type)                                                                                         \
    GLOBAL(suffix, text, type)
BOTH(u8, "u8", uint8_t)
BOTH(u16, "u16", uint16_t)
BOTH(u32, "u32", uint32_t)
BOTH(u64, "u64", uint64_t)
BOTH(f32, "f32", float)
BOTH(v2_u32, "v2.u32", u32x2)
BOTH(v4_u32, "v4.u32", u32x4)
SHARED_LD(ld_shared_cluster_u32, "ld.shared::cluster.u32", uint32_t, true)
SHARED_ST(st_shared_cluster_u32, "st.shared::cluster.u32", uint32_t, true)
SHARED_ST(st_shared_cluster_v4_u32, "st.shared::cluster.v4.u32", u32x4, true)

#define ATOMIC_LD(name, text, type, scope, acquire)                                                                    \
    type name(const void *a) {                                                                                         \
        return atomic_load<type>(text, a, Scope::scope, acquire);                                                      \
    }
ATOMIC_LD(ld_relaxed_gpu_u32, "ld.relaxed.gpu", uint32_t, gpu, false)
ATOMIC_LD(ld_relaxed_sys_u32, "ld.relaxed.sys", uint32_t, sys, false)
ATOMIC_LD(ld_acquire_gpu_u32, "ld.acquire.gpu", uint32_t, gpu, true)
ATOMIC_LD(ld_acquire_gpu_u64, "ld.acquire.gpu", uint64_t, gpu, true)
ATOMIC_LD(ld_acquire_sys_u32, "ld.acquire.sys", uint32_t, sys, true)
ATOMIC_LD(ld_acquire_sys_u64, "ld.acquire.sys", uint64_t, sys, true)

#define ATOMIC_ST(name, text, type, scope, release)                                                                    \
    void name(void *a, type b) {                                                                                       \
        atomic_store<type>(text, a, b, Scope::scope, release);                                                         \
    }
ATOMIC_ST(st_relaxed_gpu_u32, "st.relaxed.gpu", uint32_t, gpu, false)
ATOMIC_ST(st_relaxed_sys_u32, "st.relaxed.sys", uint32_t, sys, false)
ATOMIC_ST(st_release_gpu_u32, "st.release.gpu", uint32_t, gpu, true)
ATOMIC_ST(st_release_gpu_u64, "st.release.gpu", uint64_t, gpu, true)
ATOMIC_ST(st_release_sys_u32, "st.release.sys", uint32_t, sys, true)
ATOMIC_ST(st_release_sys_u64, "st.release.sys", uint64_t, sys, true)

#define RED(name, text, type, scope, release, expression)                                                              \
    void name(void *a, type b) {                                                                                       \
        atomic_change<type>(text, a, Scope::scope, false, release,                                                     \
                            [b](type old) { return static_cast<type>(expression); });                                  \
    }
RED(red_relaxed_gpu_add_u32, "red.relaxed.gpu.add", uint32_t, gpu, false, old + b)
RED(red_release_gpu_add_u32, "red.release.gpu.add", uint32_t, gpu, true, old + b)
RED(red_release_gpu_add_u64, "red.release.gpu.add", uint64_t, gpu, true, old + b)
RED(red_release_sys_add_u32, "red.release.sys.add", uint32_t, sys, true, old + b)
RED(red_release_sys_add_u64, "red.release.sys.add", uint64_t, sys, true, old + b)
RED(red_release_gpu_or_b32, "red.release.gpu.or", uint32_t, gpu, true, old | b)

#define ATOM(name, text, type, scope, ordered, expression)                                                             \
    type name(void *a, type b) {                                                                                       \
        return atomic_change<type>(text, a, Scope::scope, ordered, ordered,                                            \
                                   [b](type old) { return static_cast<type>((void)old, expression); });                \
    }
ATOM(atom_relaxed_gpu_add_u32, "atom.relaxed.gpu.add", uint32_t, gpu, false, old + b)
ATOM(atom_relaxed_gpu_add_u64, "atom.relaxed.gpu.add", uint64_t, gpu, false, old + b)
ATOM(atom_acq_rel_gpu_add_u32, "atom.acq_rel.gpu.add", uint32_t, gpu, true, old + b)
ATOM(atom_acq_rel_gpu_add_u64, "atom.acq_rel.gpu.add", uint64_t, gpu, true, old + b)
ATOM(atom_acq_rel_sys_add_u32, "atom.acq_rel.sys.add", uint32_t, sys, true, old + b)
ATOM(atom_acq_rel_sys_add_u64, "atom.acq_rel.sys.add", uint64_t, sys, true, old + b)
ATOM(atom_relaxed_gpu_exch_b32, "atom.relaxed.gpu.exch", uint32_t, gpu, false, b)

uint32_t atom_acq_rel_gpu_cas_b32(void *a, uint32_t b, uint32_t c) {
    return atomic_change<uint32_t>("atom.acq_rel.gpu.cas", a, Scope::gpu, true, true,
                                   [b, c](uint32_t old) { return old == b ? c : old; });
}

uint32_t atom_shared_add_u32(uint32_t a, uint32_t b) {
    Thread &thread = enter_synchronizing("atom.shared.add");
    if (a % 4) model::trap("the address 0x%x is not a multiple of 4", a);
    Cta &cta = cta_of_address(*thread.cta, a, "atom.shared.add");
    const uint32_t offset = a & 0xFFFFFF;
    shared_access(cta, offset, 4, actor_generic(thread), Access::atomic_write);
    const uint32_t old = read_value<uint32_t>(cta.shared.data() + offset);
    const uint32_t value = old + b;
    memcpy(cta.shared.data() + offset, &value, 4);
    machine->progress++;
    return old;
}

} // namespace ptx
