// TMA: tensor maps, tensor copies and bulk copies (PTX ISA 9.7.9.25 and 5.5; cuTensorMapEncodeTiled).
//
// A copy is checked against the shadows when it is issued, and moves its bytes when the scheduler lets it: a load in
// pieces, each of which reports its bytes to the mbarrier; a store first reads shared memory, later writes global.
#include "machine.h"
#include "sm100_model_ptx.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace model {

static char error_text[256];

// ---- Tensor maps. ----

struct TensorMap {
    uint32_t type, rank, swizzle, element_bits;
    uint64_t address, dims[5], strides[5]; // strides[0] is unused; strides[i] belongs to dimension i
    uint32_t box[5];
    uint32_t row_bytes() const { return box[0] * element_bits / 8; }
    // A row narrower than the swizzle still takes the swizzle's whole span of shared memory, the rest of which stays
    // untouched (learned from the H200); without a swizzle rows are packed.
    uint32_t pitch() const { return swizzle ? 16u << swizzle : row_bytes(); }
    uint32_t rows() const { return box[1] * box[2] * box[3] * box[4]; }
    uint32_t box_bytes() const { return row_bytes() * rows(); }
};

static const uint64_t map_magic = 0x544D415053000000ull;

static uint64_t map_sum(const struct sm100_tensor_map *map) {
    uint64_t sum = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 15; i++) sum = (sum ^ map->opaque[i]) * 0x100000001B3u;
    return sum;
}

static void map_store(struct sm100_tensor_map *map, const TensorMap &m) {
    memset(map, 0, sizeof *map);
    map->opaque[0] = map_magic | m.type << 16 | m.rank << 8 | m.swizzle;
    map->opaque[1] = m.address;
    for (uint32_t i = 0; i < 5; i++) {
        map->opaque[2 + i / 2] |= (m.dims[i] - 1) << 32 * (i % 2);
        if (i) map->opaque[4 + i] = m.strides[i];
        map->opaque[9 + i / 4] |= static_cast<uint64_t>(m.box[i]) << 16 * (i % 4);
    }
    map->opaque[15] = map_sum(map);
}

static uint32_t type_bits(uint32_t type) {
    static const uint32_t bits[] = {8, 16, 32, 32, 16, 4, 64};
    return bits[type];
}

static TensorMap map_read(const void *address) {
    if (reinterpret_cast<uintptr_t>(address) % 64) trap("the tensor map at %p is not 64-byte aligned", address);
    const char *p = static_cast<const char *>(address), *stacks = static_cast<const char *>(machine->stacks);
    if (p >= stacks && p < static_cast<const char *>(fiber_stack(machine->stacks, machine->stack_count)))
        trap("the tensor map is a local copy: pass the address of the kernel's argument");
    const struct sm100_tensor_map *map = static_cast<const struct sm100_tensor_map *>(address);
    if ((map->opaque[0] & 0xFFFFFFFFFF000000u) != map_magic || map->opaque[15] != map_sum(map))
        trap("the tensor map at %p has not been encoded", address);
    TensorMap m;
    m.type = map->opaque[0] >> 16 & 255;
    m.rank = map->opaque[0] >> 8 & 255;
    m.swizzle = map->opaque[0] & 255;
    m.element_bits = type_bits(m.type);
    m.address = map->opaque[1];
    for (uint32_t i = 0; i < 5; i++) {
        m.dims[i] = (map->opaque[2 + i / 2] >> 32 * (i % 2) & 0xFFFFFFFF) + 1;
        m.strides[i] = i ? map->opaque[4 + i] : 0;
        m.box[i] = map->opaque[9 + i / 4] >> 16 * (i % 4) & 0xFFFF;
    }
    return m;
}

static int refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return -1;
}

static uint32_t swizzle_span(uint32_t swizzle) {
    return swizzle ? 16u << swizzle : 0;
}

static int map_check(const TensorMap &m) {
    if (m.address % 16) return refuse("the global address is not a multiple of 16");
    for (uint32_t i = 0; i < m.rank; i++) {
        if (m.dims[i] == 0 || m.dims[i] > uint64_t{1} << 32) return refuse("dimension %u is 0 or over 2^32", i);
        if (m.box[i] == 0 || m.box[i] > 256) return refuse("box dimension %u is %u: 1 to 256", i, m.box[i]);
        if (i && m.strides[i] % 16) return refuse("stride %u is not a multiple of 16 bytes", i - 1);
        if (i && m.strides[i] >= uint64_t{1} << 40) return refuse("stride %u is 2^40 bytes or more", i - 1);
    }
    if (m.type == SM100_MODEL_U4_ALIGN8B && m.dims[0] % 2) return refuse("an odd number of 4-bit elements in a row");
    if (m.box[0] * m.element_bits % 128) return refuse("a row of the box is not a multiple of 16 bytes");
    const uint32_t span = swizzle_span(m.swizzle);
    if (span && m.row_bytes() > span)
        return refuse("a row of the box has %u bytes, more than the %u of the swizzle", m.row_bytes(), span);
    // The H200's driver accepts 233472 and refuses 261120.
    if (uint64_t{m.row_bytes()} * m.box[1] * m.box[2] * m.box[3] * m.box[4] > 233472)
        return refuse("the box is larger than the shared memory of an SM");
    return 0;
}

// ---- Where a box goes. ----

// Swizzles exchange 16-byte units within 128 bytes, by the address bits above.
static uint32_t swizzle_address(uint32_t offset, uint32_t swizzle) {
    static const uint32_t masks[] = {0, 1, 3, 7};
    return offset ^ ((offset >> 7) & masks[swizzle]) << 4;
}

struct Box {
    TensorMap map;
    int64_t at[5];    // coordinates
    int64_t rows4[4]; // gather4: the rows, instead of at[1] + i
    bool gather;
    uint32_t rows() const { return gather ? 4 : map.rows(); }
    uint32_t bytes() const { return rows() * map.row_bytes(); }
};

// The bytes [first, last) of row `row` of the box that lie inside the tensor, and where they are. False if none do.
static bool box_row(const Box &box, uint32_t row, uint32_t *first, uint32_t *last, char **address) {
    const TensorMap &m = box.map;
    uint64_t base = m.address;
    uint32_t rest = row;
    for (uint32_t i = 1; i < m.rank; i++) {
        const int64_t c = box.gather ? box.rows4[row] : box.at[i] + rest % m.box[i];
        rest /= m.box[i];
        if (c < 0 || c >= static_cast<int64_t>(m.dims[i])) return false;
        base += static_cast<uint64_t>(c) * m.strides[i];
    }
    int64_t from = box.at[0], to = box.at[0] + m.box[0];
    if (from < 0) from = 0;
    if (to > static_cast<int64_t>(m.dims[0])) to = static_cast<int64_t>(m.dims[0]);
    if (from >= to) return false;
    *first = static_cast<uint32_t>((from - box.at[0]) * m.element_bits / 8);
    *last = static_cast<uint32_t>((to - box.at[0]) * m.element_bits / 8);
    *address = reinterpret_cast<char *>(base + static_cast<uint64_t>(from) * m.element_bits / 8);
    return true;
}

// Where a store cuts a row off: the H200 does so at the end of 16 bytes, not at the last element, and writes into the
// padding of the pitch. (A load fills zeros from the last element on.)
static uint32_t stored_end(const Box &box, uint32_t last) {
    return std::min((last + 15) / 16 * 16, box.map.row_bytes());
}

static Box box_at(const void *map, uint32_t rank, int64_t c0, int64_t c1, int64_t c2) {
    Box box = {};
    box.map = map_read(map);
    if (box.map.rank != rank) trap("a %u-dimensional copy with a tensor map of rank %u", rank, box.map.rank);
    box.at[0] = c0;
    box.at[1] = c1;
    box.at[2] = c2;
    // Any other start is an illegal instruction on the H200, inside the tensor or not.
    if (c0 * box.map.element_bits % 128)
        trap("the box starts %lld bits into the row; it must start at a multiple of 16 bytes",
             static_cast<long long>(c0) * box.map.element_bits);
    return box;
}

static void box_check_alignment(const Box &box, uint32_t offset) {
    if (offset % 128) trap("the shared address 0x%x of a tensor copy is not a multiple of 128", offset);
    const uint32_t span = swizzle_span(box.map.swizzle);
    if (span && offset % (8 * span))
        trap("the shared address 0x%x is not a multiple of %u, where the %u-byte swizzle pattern begins", offset,
             8 * span, span);
}

static void box_check_global(const Box &box, const Actor &actor, Access access) {
    for (uint32_t row = 0; row < box.rows(); row++) {
        uint32_t first, last;
        char *address;
        if (!box_row(box, row, &first, &last, &address)) continue;
        if (access == Access::write) last = stored_end(box, last);
        Region &region = region_of(address, last - first, access == Access::read ? "reads" : "writes");
        global_access(region, address, last - first, actor, access);
    }
}

// The shared memory that a box takes: one range, or sixteen bytes at a time where rows leave gaps.
static void box_shared_access(Cta &cta, uint32_t offset, const Box &box, const Actor &actor, Access access) {
    const uint32_t bytes = box.map.row_bytes(), pitch = box.map.pitch();
    if (bytes == pitch) return shared_access(cta, offset, box.bytes(), actor, access);
    for (uint32_t row = 0; row < box.rows(); row++)
        for (uint32_t b = 0; b < bytes; b += 16)
            shared_access(cta, swizzle_address(offset + row * pitch + b, box.map.swizzle), 16, actor, access);
}

// ---- Loads: global to shared. ----

struct Load : AsyncOp {
    Cta *cta = nullptr; // of the destination
    Mbarrier *bar = nullptr;
    uint32_t phase = 0, offset = 0, row = 0;
    bool tensor = false;
    Box box = {};
    const uint8_t *source = nullptr; // bulk: global memory
    Cta *source_cta = nullptr;       // bulk from shared memory: of this CTA, at source_offset
    uint32_t source_offset = 0, size = 0;
    uint8_t value[16] = {}; // st.async: what it stores

    void land_row() const {
        uint32_t first = 0, last = 0;
        char *address = nullptr;
        const uint32_t bytes = box.map.row_bytes();
        std::vector<uint8_t> data(bytes, 0);
        if (box_row(box, row, &first, &last, &address)) memcpy(data.data() + first, address, last - first);
        for (uint32_t b = 0; b < bytes; b += 16)
            memcpy(cta->shared.data() + swizzle_address(offset + row * box.map.pitch() + b, box.map.swizzle),
                   data.data() + b, 16);
    }
    bool run() override {
        if (!tensor) {
            const uint8_t *from = source_cta ? source_cta->shared.data() + source_offset : source;
            memcpy(cta->shared.data() + offset, from, size);
            mbarrier_complete_tx(*bar, size, phase, name);
            return true;
        }
        const uint32_t left = box.rows() - row;
        const uint32_t count = left > 8 && random_below(4) == 0 ? 1 + random_below(left - 1) : left;
        for (uint32_t i = 0; i < count; i++, row++) land_row();
        mbarrier_complete_tx(*bar, count * box.map.row_bytes(), phase, name);
        return row == box.rows();
    }
};

enum class Signal { same_cta, pair };

// The CTA whose mbarrier hears of bytes that land in `to`, when the instruction names an mbarrier in `bar_cta`.
static Cta &signal_cta(Cta &to, Cta &bar_cta, bool multicast, Signal signal) {
    if (signal == Signal::pair) {
        if (!multicast && to.rank / 2 != bar_cta.rank / 2)
            trap("the mbarrier is in CTA rank %u, the data goes to rank %u: cta_group::2 allows the pair only",
                 bar_cta.rank, to.rank);
        return *to.cluster->ctas[(to.rank & ~1u) | (bar_cta.rank & 1u)];
    }
    if (!multicast && &to != &bar_cta)
        trap(
            "the mbarrier is in CTA rank %u and the data goes to rank %u: without cta_group::2 they must be in one CTA",
            bar_cta.rank, to.rank);
    return to;
}

static std::unique_ptr<Load> load_to(const char *name, Cta &to, uint32_t offset, Cta &signaled, uint32_t bar_offset,
                                     uint32_t bytes, const Box *box) {
    Thread &thread = *machine->current;
    if (to.ended) trap("the destination CTA %u has ended", to.index);
    auto load = std::make_unique<Load>();
    load->name = name;
    load->thread = thread.id;
    load->cta = &to;
    load->offset = offset;
    load->bar = &mbarrier_at(signaled, bar_offset, "a copy reports to");
    load->phase = load->bar->phases;
    load->size = bytes;
    load->touches = {&to, &signaled};
    mbarrier_check_async_use(*load->bar, thread);
    const Actor actor = actor_async(thread, {load->bar->agent, load->phase + 1});
    if (box)
        box_shared_access(to, offset, *box, actor, Access::write);
    else
        shared_access(to, offset, bytes, actor, Access::write);
    return load;
}

// The ranks of the cluster that a copy goes to.
static std::vector<Cta *> destinations(Cta &own, uint32_t address, int32_t mask) {
    Cluster &cluster = *own.cluster;
    std::vector<Cta *> to;
    if (mask < 0) {
        to.push_back(&cta_of_address(own, address, "a copy"));
        return to;
    }
    if (mask == 0 || mask >> cluster.ctas.size())
        trap("the CTA mask 0x%x does not fit a cluster of %zu", static_cast<unsigned>(mask), cluster.ctas.size());
    for (uint32_t r = 0; r < cluster.ctas.size(); r++)
        if (mask >> r & 1) to.push_back(cluster.ctas[r]);
    return to;
}

static void tensor_load(const char *name, uint32_t dst, const Box &box, uint32_t mbar, int32_t mask, Signal signal) {
    Thread &thread = *machine->current;
    Cta &bar_cta = cta_of_address(*thread.cta, mbar, "a copy");
    const uint32_t offset = dst & 0xFFFFFF;
    box_check_alignment(box, offset);
    if (signal == Signal::pair && thread.cta->cluster->ctas.size() % 2)
        trap("cta_group::2 needs clusters of whole pairs");
    bool checked = false;
    for (Cta *to : destinations(*thread.cta, dst, mask)) {
        Cta &signaled = signal_cta(*to, bar_cta, mask >= 0, signal);
        auto load = load_to(name, *to, offset, signaled, mbar & 0xFFFFFF, box.bytes(), &box);
        if (!checked) box_check_global(box, actor_async(thread, {load->bar->agent, load->phase + 1}), Access::read);
        checked = true;
        load->tensor = true;
        load->box = box;
        async_start(std::move(load));
    }
}

static void bulk_check(uint32_t shared, uint32_t size, const void *global) {
    if (size == 0 || size % 16) trap("a bulk copy of %u bytes: a positive multiple of 16", size);
    if (shared % 16) trap("the shared address 0x%x is not a multiple of 16", shared);
    if (reinterpret_cast<uintptr_t>(global) % 16) trap("the global address %p is not a multiple of 16", global);
}

static void bulk_load(const char *name, uint32_t dst, const void *src, uint32_t size, uint32_t mbar, int32_t mask) {
    Thread &thread = *machine->current;
    bulk_check(dst, size, src);
    Cta &bar_cta = cta_of_address(*thread.cta, mbar, "a copy");
    Region &region = region_of(src, size, "reads");
    bool checked = false;
    for (Cta *to : destinations(*thread.cta, dst, mask)) {
        Cta &signaled = signal_cta(*to, bar_cta, mask >= 0, Signal::same_cta);
        auto load = load_to(name, *to, dst & 0xFFFFFF, signaled, mbar & 0xFFFFFF, size, nullptr);
        if (!checked)
            global_access(region, src, size, actor_async(thread, {load->bar->agent, load->phase + 1}), Access::read);
        checked = true;
        load->source = static_cast<const uint8_t *>(src);
        async_start(std::move(load));
    }
}

// ---- Stores: shared to global, in bulk groups. ----

struct Store : AsyncOp {
    Cta *cta = nullptr;
    uint32_t offset = 0, group = 0;
    bool was_read = false, tensor = false;
    Box box = {};
    char *target = nullptr;
    std::vector<uint8_t> data;

    void read_shared() {
        const uint8_t *shared = cta->shared.data();
        if (!tensor) {
            memcpy(data.data(), shared + offset, data.size());
            return;
        }
        const uint32_t bytes = box.map.row_bytes(), pitch = box.map.pitch();
        for (uint32_t row = 0; row < box.rows(); row++)
            for (uint32_t b = 0; b < bytes; b += 16)
                memcpy(data.data() + row * bytes + b,
                       shared + swizzle_address(offset + row * pitch + b, box.map.swizzle), 16);
    }
    void write_global() const {
        if (!tensor) {
            memcpy(target, data.data(), data.size());
            return global_changed(target, data.size());
        }
        const uint32_t bytes = box.map.row_bytes();
        for (uint32_t row = 0; row < box.rows(); row++) {
            uint32_t first, last;
            char *address;
            if (!box_row(box, row, &first, &last, &address)) continue;
            last = stored_end(box, last);
            memcpy(address, data.data() + row * bytes + first, last - first);
            global_changed(address, last - first);
        }
    }
    bool run() override {
        Thread *owner = machine->threads[thread];
        if (!was_read) {
            read_shared();
            was_read = true;
            touches.clear();
        } else {
            write_global();
            group = 0; // done, for wait_group
        }
        if (owner->wait.kind == Wait::bulk) wake(owner);
        return group == 0;
    }
};

static std::unique_ptr<Store> store_from(const char *name, uint32_t src, uint32_t bytes, const Box *box) {
    Thread &thread = *machine->current;
    if (&cta_of_address(*thread.cta, src, name) != thread.cta)
        trap("the source must be in the CTA's own shared memory");
    if (!thread.bulk_read_agent) {
        thread.bulk_read_agent = agent_new(Agent::bulk_read, thread.cta, thread.tid);
        thread.bulk_write_agent = agent_new(Agent::bulk_write, thread.cta, thread.tid);
    }
    auto store = std::make_unique<Store>();
    store->name = name;
    store->thread = thread.id;
    store->cta = thread.cta;
    store->offset = src & 0xFFFFFF;
    store->group = thread.bulk_groups + 1;
    store->touches = {thread.cta};
    store->data.resize(bytes);
    thread.bulk_open = true;
    const Actor actor = actor_async(thread, {thread.bulk_read_agent, store->group});
    if (box)
        box_shared_access(*thread.cta, store->offset, *box, actor, Access::read);
    else
        shared_access(*thread.cta, store->offset, bytes, actor, Access::read);
    return store;
}

static void tensor_store(const char *name, const Box &box, uint32_t src) {
    Thread &thread = *machine->current;
    box_check_alignment(box, src & 0xFFFFFF);
    for (uint32_t i = 0; i < box.map.rank; i++)
        if (box.at[i] < 0)
            trap("a store that starts at coordinate %lld of dimension %u: the H200 stops at negative ones",
                 static_cast<long long>(box.at[i]), i);
    auto store = store_from(name, src, box.bytes(), &box);
    box_check_global(box, actor_async(thread, {thread.bulk_write_agent, store->group}), Access::write);
    store->tensor = true;
    store->box = box;
    async_start(std::move(store));
}

static bool bulk_pending(const Thread &thread, uint32_t last_group, bool read_only) {
    for (const auto &op : machine->async) {
        if (op->thread != thread.id) continue;
        const Store *store = dynamic_cast<const Store *>(op.get());
        if (store && store->group && store->group <= last_group && !(read_only && store->was_read)) return true;
    }
    return false;
}

void bulk_wait_group(uint32_t n, bool read_only) {
    Thread &thread = enter(read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group");
    if (thread.bulk_groups <= n) return;
    const uint32_t last = thread.bulk_groups - n;
    while (bulk_pending(thread, last, read_only)) {
        Wait wait;
        wait.kind = Wait::bulk;
        block(wait);
    }
    thread.warp->clock.raise(thread.bulk_read_agent, last);
    if (!read_only) thread.warp->clock.raise(thread.bulk_write_agent, last);
}

} // namespace model

using namespace model;

// ---- The host's side. ----

const char *sm100_model_error(void) {
    return error_text;
}

int sm100_model_tensor_map_encode(struct sm100_tensor_map *map, enum sm100_model_data_type type, uint32_t rank,
                                  void *global_address, const uint64_t *global_dims, const uint64_t *global_strides,
                                  const uint32_t *box_dims, enum sm100_model_swizzle swizzle) {
    if (reinterpret_cast<uintptr_t>(map) % 64) return refuse("the tensor map is not 64-byte aligned");
    if (rank == 0 || rank > 5) return refuse("rank %u: 1 to 5", rank);
    TensorMap m = {};
    m.type = type;
    m.rank = rank;
    m.swizzle = swizzle;
    m.element_bits = type_bits(type);
    m.address = reinterpret_cast<uintptr_t>(global_address);
    for (uint32_t i = 0; i < 5; i++) {
        m.dims[i] = i < rank ? global_dims[i] : 1;
        m.box[i] = i < rank ? box_dims[i] : 1;
        m.strides[i] = i && i < rank ? global_strides[i - 1] : 0;
    }
    if (map_check(m)) return -1;
    map_store(map, m);
    return 0;
}

// ---- The wrappers. ----

namespace ptx {

void prefetch_tensormap(const void *a) {
    enter("prefetch.tensormap");
    map_read(a);
}

#define TENSOR_LOAD(suffix, text, signal)                                                                              \
    void cp_async_bulk_tensor_2d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,               \
                                         uint32_t mbar, uint64_t) {                                                    \
        const char *name = "cp.async.bulk.tensor.2d" text;                                                             \
        enter_synchronizing(name);                                                                                     \
        tensor_load(name, dstMem, box_at(tensorMap, 2, c0, c1, 0), mbar, -1, signal);                                  \
    }                                                                                                                  \
    void cp_async_bulk_tensor_3d##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1, int32_t c2,   \
                                         uint32_t mbar, uint64_t) {                                                    \
        const char *name = "cp.async.bulk.tensor.3d" text;                                                             \
        enter_synchronizing(name);                                                                                     \
        tensor_load(name, dstMem, box_at(tensorMap, 3, c0, c1, c2), mbar, -1, signal);                                 \
    }                                                                                                                  \
    void cp_async_bulk_tensor_2d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,     \
                                                   uint32_t mbar, uint16_t ctaMask, uint64_t) {                        \
        const char *name = "cp.async.bulk.tensor.2d.multicast" text;                                                   \
        enter_synchronizing(name);                                                                                     \
        tensor_load(name, dstMem, box_at(tensorMap, 2, c0, c1, 0), mbar, ctaMask, signal);                             \
    }                                                                                                                  \
    void cp_async_bulk_tensor_3d_multicast##suffix(uint32_t dstMem, const void *tensorMap, int32_t c0, int32_t c1,     \
                                                   int32_t c2, uint32_t mbar, uint16_t ctaMask, uint64_t) {            \
        const char *name = "cp.async.bulk.tensor.3d.multicast" text;                                                   \
        enter_synchronizing(name);                                                                                     \
        tensor_load(name, dstMem, box_at(tensorMap, 3, c0, c1, c2), mbar, ctaMask, signal);                            \
    }
TENSOR_LOAD(, "", Signal::same_cta)
TENSOR_LOAD(_cta_group_2, ".cta_group::2", Signal::pair)

void cp_async_bulk_tensor_2d_gather4(uint32_t dstMem, const void *tensorMap, int32_t x, int32_t y0, int32_t y1,
                                     int32_t y2, int32_t y3, uint32_t mbar) {
    const char *name = "cp.async.bulk.tensor.2d.gather4";
    enter_synchronizing(name);
    Box box = box_at(tensorMap, 2, x, y0, 0);
    if (box.map.box[1] != 1) model::trap("gather4 with a box of %u rows: 1", box.map.box[1]);
    if (&cta_of_address(*machine->current->cta, dstMem, name) != machine->current->cta)
        model::trap("the destination of this form of gather4 must be in the CTA itself");
    box.gather = true;
    const int32_t y[] = {y0, y1, y2, y3};
    for (int i = 0; i < 4; i++) box.rows4[i] = y[i];
    tensor_load(name, dstMem, box, mbar, -1, Signal::same_cta);
}

void cp_async_bulk_tensor_2d_store(const void *tensorMap, int32_t c0, int32_t c1, uint32_t srcMem) {
    const char *name = "cp.async.bulk.tensor.2d store";
    enter_synchronizing(name);
    tensor_store(name, box_at(tensorMap, 2, c0, c1, 0), srcMem);
}
void cp_async_bulk_tensor_3d_store(const void *tensorMap, int32_t c0, int32_t c1, int32_t c2, uint32_t srcMem) {
    const char *name = "cp.async.bulk.tensor.3d store";
    enter_synchronizing(name);
    tensor_store(name, box_at(tensorMap, 3, c0, c1, c2), srcMem);
}

void cp_async_bulk_shared_cluster_global(uint32_t dstMem, const void *srcMem, uint32_t size, uint32_t mbar) {
    enter_synchronizing("cp.async.bulk");
    bulk_load("cp.async.bulk", dstMem, srcMem, size, mbar, -1);
}
void cp_async_bulk_shared_cluster_global_multicast(uint32_t dstMem, const void *srcMem, uint32_t size, uint32_t mbar,
                                                   uint16_t ctaMask) {
    enter_synchronizing("cp.async.bulk.multicast");
    bulk_load("cp.async.bulk.multicast", dstMem, srcMem, size, mbar, ctaMask);
}
void cp_async_bulk_shared_cluster_shared_cta(uint32_t dstMem, uint32_t srcMem, uint32_t size, uint32_t mbar) {
    const char *name = "cp.async.bulk.shared::cluster.shared::cta";
    Thread &thread = enter_synchronizing(name);
    bulk_check(dstMem | srcMem, size, nullptr);
    Cta &to = cta_of_address(*thread.cta, dstMem, name), &bar_cta = cta_of_address(*thread.cta, mbar, name);
    if (&cta_of_address(*thread.cta, srcMem, name) != thread.cta) model::trap("the source must be in the CTA itself");
    if (&to != &bar_cta) model::trap("the mbarrier must be in the CTA that the data goes to");
    auto load = load_to(name, to, dstMem & 0xFFFFFF, bar_cta, mbar & 0xFFFFFF, size, nullptr);
    shared_access(*thread.cta, srcMem & 0xFFFFFF, size, actor_async(thread, {load->bar->agent, load->phase + 1}),
                  Access::read);
    load->source_cta = thread.cta;
    load->source_offset = srcMem & 0xFFFFFF;
    load->touches.push_back(thread.cta);
    async_start(std::move(load));
}
// Its complete-tx releases at cluster scope: who waits for it knows all that the storing warp knew.
void st_async_shared_cluster_v4_u32(uint32_t a, u32x4 b, uint32_t mbar) {
    const char *name = "st.async.shared::cluster.v4";
    Thread &thread = enter_synchronizing(name);
    bulk_check(a, sizeof b, nullptr);
    Cta &to = cta_of_address(*thread.cta, a, name), &bar_cta = cta_of_address(*thread.cta, mbar, name);
    if (&to != &bar_cta) model::trap("the mbarrier must be in the CTA that the data goes to");
    auto load = load_to(name, to, a & 0xFFFFFF, bar_cta, mbar & 0xFFFFFF, sizeof b, nullptr);
    memcpy(load->value, &b, sizeof b);
    load->source = load->value;
    release_to(load->bar->next, *thread.warp);
    async_start(std::move(load));
}
void cp_async_bulk_global_shared_cta(void *dstMem, uint32_t srcMem, uint32_t size) {
    Thread &thread = enter_synchronizing("cp.async.bulk store");
    bulk_check(srcMem, size, dstMem);
    auto store = store_from("cp.async.bulk store", srcMem, size, nullptr);
    Region &region = region_of(dstMem, size, "writes");
    global_access(region, dstMem, size, actor_async(thread, {thread.bulk_write_agent, store->group}), Access::write);
    store->target = static_cast<char *>(dstMem);
    async_start(std::move(store));
}
void cp_async_bulk_prefetch_L2_global(const void *srcMem, uint32_t size) {
    enter("cp.async.bulk.prefetch.L2");
    bulk_check(0, size, srcMem);
    region_of(srcMem, size, "prefetches");
}
void cp_async_bulk_commit_group(void) {
    Thread &thread = enter("cp.async.bulk.commit_group");
    thread.bulk_groups++;
    thread.bulk_open = false;
}

} // namespace ptx
