// Tensor memory and the tensor core (PTX ISA 9.7.16): allocation, mma, cp, commit, ld, st, fences.
//
// Each thread that issues mma and cp has a queue. Only these orders are promised inside it: mma after mma on the same
// accumulator, mma after the cp that wrote its scales, commit after everything. All else must be waited for, and is
// checked with the clocks when the instruction is issued; the work itself is done whenever the scheduler picks it.
#include "machine.h"
#include "numbers.h"
#include "sm100_model_ptx.h"
#include <string.h>

namespace model {

struct Columns {
    uint32_t first, count;
    bool overlaps(const Columns &o) const { return first < o.first + o.count && o.first < first + count; }
};

static Cell &cell_at(Cta &cta, uint32_t quadrant, uint32_t column) {
    return cta.tmem_cells[quadrant * tmem_columns + column];
}

// The CTAs that an instruction with this cta_group acts on: the issuing one, or the pair, even rank first.
static std::vector<Cta *> group_ctas(Cta &own, int cta_group) {
    Launch &launch = *own.launch;
    if (launch.cta_group && launch.cta_group != cta_group)
        trap("cta_group::%d in a kernel that uses cta_group::%d: one kernel must use one value", cta_group,
             launch.cta_group);
    launch.cta_group = cta_group;
    if (cta_group == 1) return {&own};
    if (own.cluster->ctas.size() % 2) trap("cta_group::2 in a cluster of %zu CTAs", own.cluster->ctas.size());
    std::vector<Cta *> pair = {own.cluster->ctas[own.rank & ~1u], own.cluster->ctas[own.rank | 1u]};
    for (const Cta *cta : pair)
        if (cta->ended) trap("CTA %u of the pair has ended", cta->index);
    return pair;
}

static void check_columns(const Cta &cta, Columns c, const char *what) {
    for (const TmemAllocation &a : cta.allocations)
        if (c.first >= a.column && c.first + c.count <= a.column + a.count) return;
    trap("%s: tensor memory columns %u..%u of CTA %u are not allocated", what, c.first, c.first + c.count - 1,
         cta.index);
}

// ---- Allocation. ----

static bool columns_free(const Cta &cta, Columns c) {
    for (const TmemAllocation &a : cta.allocations)
        if (c.overlaps({a.column, a.count})) return false;
    return true;
}

// Any free place of the right alignment: a kernel may not count on column 0.
static bool find_columns(const std::vector<Cta *> &ctas, uint32_t count, uint32_t *column) {
    uint32_t places[16], n = 0;
    for (uint32_t c = 0; c + count <= tmem_columns; c += count) {
        bool all = true;
        for (const Cta *cta : ctas) all = all && columns_free(*cta, {c, count});
        if (all) places[n++] = c;
    }
    if (!n) return false;
    *column = places[random_below(n)];
    return true;
}

static void take_columns(Cta &cta, uint32_t column, uint32_t count) {
    cta.allocations.push_back({column, count});
    cta.allocated_last = count;
    for (uint32_t q = 0; q < 4; q++)
        for (uint32_t c = column; c < column + count; c++) {
            cell_reads_drop(cell_at(cta, q, c));
            cell_at(cta, q, c) = Cell();
        }
    for (uint32_t lane = 0; lane < tmem_lanes; lane++)
        for (uint32_t c = column; c < column + count; c++) cta.tmem[lane * tmem_columns + c] = 0x7FA5A5A5u;
}

static void check_count(const char *what, uint32_t count) {
    if (count < 32 || count > 512 || (count & (count - 1)))
        trap("%s of %u columns: 32, 64, 128, 256 or 512", what, count);
}

// Both CTAs of a pair must come. The first one waits; the second one does the work for both and wakes it.
static bool pair_meet(const char *what, const std::vector<Cta *> &ctas, Cta &own, uint32_t argument, uint32_t columns,
                      Wait::Kind kind, bool **done) {
    PairRequest &request = own.cluster->requests[own.rank / 2];
    if (ctas.size() == 1) return true;
    if (!request.what) {
        bool finished = false;
        request = {what, &own, argument, columns, &finished};
        while (!finished) {
            Wait wait;
            wait.kind = kind;
            wait.a = columns;
            wait.b = 1;
            block(wait);
        }
        return false;
    }
    if (request.cta == &own) trap("a second warp of this CTA, while the pair waits for the other CTA");
    if (strcmp(request.what, what) || request.columns != columns || request.argument != argument)
        trap(
            "this CTA asks for %s of %u columns, the other CTA of the pair for %s of %u columns (or with another address)",
            what, columns, request.what, request.columns);
    request.what = nullptr;
    *done = request.done;
    return true;
}

static void wake_waiting(const std::vector<Cta *> &ctas, Wait::Kind kind) {
    for (const Cta *cta : ctas)
        for (const auto &thread : cta->threads)
            if (thread->wait.kind == kind) wake(thread.get());
}

static void alloc_for_warp(int cta_group, Cta &own, uint32_t dst, uint32_t count) {
    const std::vector<Cta *> ctas = group_ctas(own, cta_group);
    check_count("an allocation", count);
    if (own.relinquished) trap("this CTA has relinquished the permit to allocate");
    if (count > own.allocated_last)
        trap("%u columns after an allocation of %u: later allocations must not be larger", count, own.allocated_last);
    if (dst % 4) trap("the destination 0x%x is not a multiple of 4", dst);
    bool *done = nullptr;
    if (pair_meet("tcgen05.alloc", ctas, own, dst & 0xFFFFFF, count, Wait::tmem_alloc, &done)) {
        uint32_t column = 0;
        while (!find_columns(ctas, count, &column)) {
            Wait wait;
            wait.kind = Wait::tmem_alloc;
            wait.a = count;
            block(wait);
        }
        for (Cta *cta : ctas) take_columns(*cta, column, count);
        if (done) *done = true;
        wake_waiting(ctas, Wait::tmem_alloc);
    }
    const uint32_t column = own.allocations.back().column;
    shared_access(own, dst & 0xFFFFFF, 4, actor_generic(*machine->current), Access::write);
    memcpy(own.shared.data() + (dst & 0xFFFFFF), &column, 4);
}

void tcgen05_alloc(int cta_group, uint32_t dst, uint32_t nCols) {
    Thread &thread = enter("tcgen05.alloc");
    if (!collective_gather("tcgen05.alloc", ~0u)) return;
    alloc_for_warp(cta_group, *thread.cta, dst, nCols);
    collective_release(~0u);
}

static void check_idle(Cta &cta, const TmemAllocation &a, const Clock &clock) {
    for (uint32_t q = 0; q < 4; q++)
        for (uint32_t c = a.column; c < a.column + a.count; c++) {
            const Cell &cell = cell_at(cta, q, c);
            Epoch busy = clock.covers(cell.write) ? Epoch() : cell.write;
            for (const ReadNode *node = cell.reads; node; node = node->next)
                if (!clock.covers(node->epoch)) busy = node->epoch;
            if (busy.agent)
                trap("column %u of CTA %u is freed while %s may still use it", c, cta.index, agent_text(busy).c_str());
        }
}

static void dealloc_for_warp(int cta_group, Cta &own, uint32_t taddr, uint32_t count) {
    const std::vector<Cta *> ctas = group_ctas(own, cta_group);
    check_count("a deallocation", count);
    size_t index = own.allocations.size();
    for (size_t i = 0; i < own.allocations.size(); i++)
        if (own.allocations[i].column == taddr && own.allocations[i].count == count) index = i;
    if (index == own.allocations.size()) trap("0x%08x with %u columns is not what tcgen05.alloc gave", taddr, count);
    check_idle(own, own.allocations[index], machine->current->warp->clock);
    bool *done = nullptr;
    if (!pair_meet("tcgen05.dealloc", ctas, own, taddr, count, Wait::tmem_dealloc, &done)) return;
    if (done) *done = true;
    for (Cta *cta : ctas)
        for (size_t i = 0; i < cta->allocations.size(); i++)
            if (cta->allocations[i].column == taddr) {
                cta->allocations.erase(cta->allocations.begin() + static_cast<std::ptrdiff_t>(i));
                break;
            }
    wake_waiting(ctas, Wait::tmem_dealloc);
    wake_waiting(ctas, Wait::tmem_alloc);
}

void tcgen05_dealloc(int cta_group, uint32_t taddr, uint32_t nCols) {
    Thread &thread = enter("tcgen05.dealloc");
    if (!collective_gather("tcgen05.dealloc", ~0u)) return;
    dealloc_for_warp(cta_group, *thread.cta, taddr, nCols);
    collective_release(~0u);
}

void tcgen05_relinquish(int cta_group) {
    Thread &thread = enter("tcgen05.relinquish_alloc_permit");
    if (!collective_gather("tcgen05.relinquish_alloc_permit", ~0u)) return;
    group_ctas(*thread.cta, cta_group);
    thread.cta->relinquished = true;
    collective_release(~0u);
}

void tmem_check_at_exit(Cta &cta) {
    if (!cta.allocations.empty())
        trap_for(cta.threads[0].get(), "end of the CTA",
                 "%u columns of tensor memory at column %u were never deallocated "
                 "(the next kernel on this SM would hang)",
                 cta.allocations[0].count, cta.allocations[0].column);
}

// ---- The queue. ----

struct TensorOp : AsyncOp {
    enum Kind { mma, cp, commit } kind;
    std::vector<Cta *> ctas;
    TensorPipe *pipe = nullptr;
    uint32_t index = 0;
    Columns d = {0, 0}, sfa = {0, 0}, sfb = {0, 0}; // cp: d is the destination

    bool must_follow(const TensorOp &earlier) const {
        if (kind == commit) return earlier.kind != commit;
        if (earlier.kind == commit) return false;
        if (kind == mma && earlier.kind == mma) return d.overlaps(earlier.d);
        if (kind == mma) return sfa.overlaps(earlier.d) || sfb.overlaps(earlier.d);
        // Reached in hardware order only; otherwise the clocks have refused the cp.
        if (earlier.kind == mma) return d.overlaps(earlier.sfa) || d.overlaps(earlier.sfb);
        return d.overlaps(earlier.d);
    }
    bool eligible() const override {
        for (const AsyncOp *op : pipe->ops) {
            if (op == this) return true;
            if (must_follow(*static_cast<const TensorOp *>(op))) return false;
        }
        return true;
    }
    virtual void work() = 0;
    bool run() override {
        work();
        for (size_t i = 0; i < pipe->ops.size(); i++)
            if (pipe->ops[i] == this) {
                pipe->ops.erase(pipe->ops.begin() + static_cast<std::ptrdiff_t>(i));
                break;
            }
        return true;
    }
};

static void check_issuer(const Thread &thread) {
    Warp &warp = *thread.warp;
    if (warp.tensor_lane != 32 && warp.tensor_lane != thread.lane)
        trap("lane %u issues tcgen05 work after lane %u of the same warp has: one elected thread must issue it all",
             thread.lane, warp.tensor_lane);
    warp.tensor_lane = thread.lane;
}

static void queue(std::unique_ptr<TensorOp> op, Thread &thread) {
    op->thread = thread.id;
    for (Cta *cta : op->ctas) op->touches.push_back(cta);
    thread.pipe.ops.push_back(op.get());
    async_start(std::move(op));
}

static Epoch next_epoch(Thread &thread) {
    if (!thread.pipe.agent) thread.pipe.agent = agent_new(Agent::tensor_pipe, thread.cta, thread.tid);
    return {thread.pipe.agent, thread.pipe.issued + 1};
}

// ---- Checks of tensor memory accesses. ----

[[noreturn]] static void not_ordered(const Warp &warp, const char *doing, const Cta &cta, uint32_t column, Epoch other,
                                     const char *other_doing) {
    const Agent::Kind kind = machine->agents[other.agent].kind;
    if (warp.clock.covers(other))
        trap("%s column %u of CTA %u after %s %s it, without a tcgen05.fence::after_thread_sync since the wait", doing,
             column, cta.index, agent_text(other).c_str(), other_doing);
    const char *advice = kind == Agent::tensor_pipe
                             ? "wait for a tcgen05.commit after it"
                             : "tcgen05.wait, fence::before_thread_sync and a barrier must come between";
    trap("%s column %u of CTA %u while %s may still %s it: %s", doing, column, cta.index, agent_text(other).c_str(),
         !strcmp(other_doing, "read") ? "read" : "write", advice);
}

// What one instruction does to a range of columns, in all four quadrants of a CTA.
struct Touch {
    const char *doing;
    Content content;
    uint32_t shape;
    Epoch epoch;
};

static bool promised(const Cell &cell, Epoch other, const Thread &thread, const Touch &touch, bool is_read) {
    if (other.agent != thread.pipe.agent) return false;
    if (machine->options.hardware_order && touch.content == Content::scales) return true;
    return !is_read && touch.content == Content::accumulator && cell.content == Content::accumulator &&
           cell.writer_op == touch.shape;
}

static void check_write(Cta &cta, Columns columns, Thread &thread, const Touch &touch) {
    const Warp &warp = *thread.warp;
    for (uint32_t q = 0; q < 4; q++)
        for (uint32_t c = columns.first; c < columns.first + columns.count; c++) {
            Cell &cell = cell_at(cta, q, c);
            if (!warp.tensor_clock.covers(cell.write) && !promised(cell, cell.write, thread, touch, false))
                not_ordered(warp, touch.doing, cta, c, cell.write, "wrote");
            for (const ReadNode *node = cell.reads; node; node = node->next)
                if (!warp.tensor_clock.covers(node->epoch) && !promised(cell, node->epoch, thread, touch, true))
                    not_ordered(warp, touch.doing, cta, c, node->epoch, "read");
            cell_reads_drop(cell);
            cell.write = touch.epoch;
            cell.writer_thread = thread.id;
            cell.writer_op = touch.shape;
            cell.content = touch.content;
        }
}

static void check_scales(Cta &cta, Columns columns, Thread &thread, Epoch epoch, const char *which) {
    const Warp &warp = *thread.warp;
    check_columns(cta, columns, which);
    for (uint32_t q = 0; q < 4; q++)
        for (uint32_t c = columns.first; c < columns.first + columns.count; c++) {
            Cell &cell = cell_at(cta, q, c);
            if (cell.content == Content::nothing)
                trap("%s: column %u of CTA %u holds no scale factors, nobody wrote it", which, c, cta.index);
            if (cell.content == Content::accumulator)
                trap("%s: column %u of CTA %u holds an accumulator, not scale factors", which, c, cta.index);
            const bool own_cp = cell.content == Content::scales && cell.write.agent == thread.pipe.agent;
            if (!own_cp && !warp.tensor_clock.covers(cell.write))
                not_ordered(warp, "reads scale factors in", cta, c, cell.write, "wrote");
            cell_record_read(cell, epoch, warp.tensor_clock);
        }
}

// ---- Shared-memory descriptors. ----

struct Operand {
    uint32_t start, leading, stride, pitch, swizzle_mask;
    // The offset of 16-byte unit `unit` of a row.
    uint32_t offset(uint32_t row, uint32_t unit) const {
        const uint32_t group = start + row / 8 * stride;
        if (!swizzle_mask) return group + row % 8 * 16 + unit * leading;
        const uint32_t logical = group + row % 8 * pitch + unit * 16;
        return logical ^ ((logical >> 7) & swizzle_mask) << 4;
    }
};

static Operand operand_read(uint64_t desc, const char *which, bool scales) {
    Operand o = {};
    o.start = static_cast<uint32_t>(desc & 0x3FFF) << 4;
    o.leading = static_cast<uint32_t>(desc >> 16 & 0x3FFF) << 4;
    o.stride = static_cast<uint32_t>(desc >> 32 & 0x3FFF) << 4;
    const uint32_t high = static_cast<uint32_t>(desc >> 32);
    const uint32_t version = high >> 14 & 7, base = high >> 17 & 7, mode = high >> 20 & 1, swizzle = high >> 29;
    if (version != 1)
        trap("%s: bits 46-48 of the descriptor are %u and must be 1 (a Hopper descriptor?)", which, version);
    if (desc >> 14 & 3 || desc >> 30 & 3 || desc >> 53 & 0xFF)
        trap("%s: reserved bits of the descriptor are not zero", which);
    if (base)
        trap("%s: a base offset of %u; the model knows patterns that start at their natural boundary", which, base);
    if (mode) trap("%s: the absolute leading-offset mode exists for K = 96 on sm_103a only", which);
    if (swizzle == 1 || swizzle == 3 || swizzle == 5 || swizzle == 7)
        trap("%s: swizzle mode %u is %s", which, swizzle,
             swizzle == 1 ? "not modeled (128B with 32B atoms)" : "reserved");
    if (scales && swizzle) trap("%s: scale factors are copied without swizzle, not with mode %u", which, swizzle);
    o.pitch = swizzle == 2 ? 128 : swizzle == 4 ? 64 : swizzle == 6 ? 32 : 16;
    o.swizzle_mask = o.pitch / 16 - 1;
    if (swizzle && (o.start & (8 * o.pitch - 1)) >= o.pitch)
        trap("%s: start address 0x%x is not in the first row of the %u-byte swizzle pattern", which, o.start, o.pitch);
    if (swizzle && o.stride < 8 * o.pitch)
        trap("%s: a stride of %u bytes between groups of eight rows of %u bytes", which, o.stride, o.pitch);
    if (swizzle && (o.start & (o.pitch - 1)) + 32 > o.pitch)
        trap("%s: the 32 bytes at 0x%x leave the row of %u bytes", which, o.start, o.pitch);
    return o;
}

static void check_operand(Cta &cta, const Operand &o, uint32_t rows, uint32_t units, Thread &thread, Epoch epoch) {
    const Actor actor = actor_async(thread, epoch);
    // Rows past the end of a partial tile may be garbage; the first row never is.
    shared_check_range(cta, o.offset(0, 0), 16, "reads");
    const Granule &first = cta.shadow.granules[o.offset(0, 0) / 16];
    if (!first.split && first.cell.write.agent == 0)
        trap("reads shared memory 0x%x of CTA %u, where nothing has been written yet: wait for the load first",
             o.offset(0, 0), cta.index);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t unit = 0; unit < units; unit++) shared_access(cta, o.offset(row, unit), 16, actor, Access::read);
}

// ---- mma. ----

struct Shape {
    uint32_t m, n;
    float sign;
};

static Shape idesc_read(uint32_t idesc, int cta_group) {
    if (idesc & 4) trap("instruction descriptor: sparse mma is not modeled");
    if (idesc & 0x0000104B) trap("instruction descriptor 0x%08x: reserved bits 0, 1, 3, 6 and 12 must be zero", idesc);
    if (idesc >> 4 & 3 || idesc >> 29 & 3) trap("instruction descriptor: scale-factor ids must be 0 for block16");
    if ((idesc >> 7 & 7) != 1 || (idesc >> 10 & 3) != 1)
        trap("instruction descriptor: types %u and %u; E2M1 is 1 in kind::mxf4nvf4", idesc >> 7 & 7, idesc >> 10 & 3);
    if (idesc & 0x00018000) trap("instruction descriptor: 4-bit operands cannot be transposed");
    if (idesc & 0x00800000) trap("instruction descriptor: UE8M0 scales with block16 are not modeled");
    if (idesc >> 31) trap("instruction descriptor: K = 96 exists on sm_103a only");
    const Shape shape = {(idesc >> 24 & 31) << 4, (idesc >> 17 & 63) << 3,
                         ((idesc >> 13 ^ idesc >> 14) & 1) ? -1.0f : 1.0f};
    if (shape.m != (cta_group == 1 ? 128u : 256u))
        trap("instruction descriptor: M = %u with cta_group::%d; block-scaled mma has M = %s", shape.m, cta_group,
             cta_group == 1 ? "128" : "128 (not modeled: how its scales are fed is undocumented) or 256");
    const uint32_t step = cta_group == 1 ? 8 : 16;
    if (shape.n == 0 || shape.n > 256 || shape.n % step)
        trap("instruction descriptor: N = %u with cta_group::%d: a multiple of %u up to 256", shape.n, cta_group, step);
    return shape;
}

struct Mma : TensorOp {
    Shape shape = {0, 0, 1.0f};
    Operand a = {}, b = {};
    bool accumulate = false;

    void unpack(const Cta &cta, const Operand &o, uint32_t rows, float *to, uint32_t row_step, uint32_t k_step) const;
    void scales(const Cta &cta, Columns columns, uint32_t rows, float *to, const char *which) const;
    void work() override;
};

void Mma::unpack(const Cta &cta, const Operand &o, uint32_t rows, float *to, uint32_t row_step, uint32_t k_step) const {
    float table[16];
    for (uint32_t i = 0; i < 16; i++) table[i] = e2m1_decode(i);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t k = 0; k < 64; k += 2) {
            const uint8_t byte = cta.shared[o.offset(row, k / 32) + k / 2 % 16];
            to[row * row_step + k * k_step] = table[byte & 15];
            to[row * row_step + (k + 1) * k_step] = table[byte >> 4];
        }
}

// [group][row]; all four quadrants must hold the same.
void Mma::scales(const Cta &cta, Columns columns, uint32_t rows, float *to, const char *which) const {
    const Thread *issuer = machine->threads[thread];
    for (uint32_t row = 0; row < rows; row++) {
        const uint32_t column = columns.first + row / 32;
        const uint32_t word = cta.tmem[row % 32 * tmem_columns + column];
        for (uint32_t q = 1; q < 4; q++)
            if (cta.tmem[(row % 32 + 32 * q) * tmem_columns + column] != word)
                trap_for(issuer, name,
                         "%s of row %u differ between lane quadrants 0 and %u of column %u, CTA %u: they must be "
                         "copied to all four (warpx4)",
                         which, row, q, column, cta.index);
        for (uint32_t g = 0; g < 4; g++) {
            const uint32_t byte = word >> 8 * g & 255;
            if (byte & 0x80)
                trap_for(issuer, name, "%s of row %u, group %u: the byte 0x%02x has a sign, which UE4M3 does not",
                         which, row, g, byte);
            to[g * rows + row] = e4m3_decode(byte);
        }
    }
}

// Every product and every scaled sum of 16 is exact in fp32; only the order of the last additions is open.
static void accumulate_row(float *d, const float *terms, uint32_t n, uint32_t order) {
    const float *t0 = terms, *t1 = terms + 256, *t2 = terms + 512, *t3 = terms + 768;
    for (uint32_t i = 0; i < n; i++) {
        if (order == 0)
            d[i] = (((d[i] + t0[i]) + t1[i]) + t2[i]) + t3[i];
        else if (order == 1)
            d[i] = d[i] + ((t0[i] + t1[i]) + (t2[i] + t3[i]));
        else
            d[i] = (((d[i] + t3[i]) + t2[i]) + t1[i]) + t0[i];
    }
}

static void multiply_row(float *terms, const float *a, const float *b, const float *sfa, const float *sfb, uint32_t n,
                         uint32_t rows_a, uint32_t row, float sign) {
    for (uint32_t g = 0; g < 4; g++) {
        float sum[256] = {};
        for (uint32_t k = 0; k < 16; k++) {
            const float x = a[16 * g + k];
            const float *y = b + (16 * g + k) * 256;
            for (uint32_t i = 0; i < n; i++) sum[i] += x * y[i];
        }
        const float scale = sign * sfa[g * rows_a + row];
        for (uint32_t i = 0; i < n; i++) terms[256 * g + i] = sum[i] * (scale * sfb[g * n + i]);
    }
}

void Mma::work() {
    static float av[128 * 64], bv[64 * 256], sa[4 * 128], sb[4 * 256], terms[4 * 256], d_row[256];
    const uint32_t parts = static_cast<uint32_t>(ctas.size()), n = shape.n;
    const uint32_t order = machine->elected_lane_seed % 3;
    machine->report->mma_count++;
    for (uint32_t p = 0; p < parts; p++) unpack(*ctas[p], b, n / parts, bv + p * (n / parts), 1, 256);
    for (Cta *cta : ctas) {
        unpack(*cta, a, 128, av, 64, 1);
        scales(*cta, sfa, 128, sa, "scale factors of A");
        scales(*cta, sfb, n, sb, "scale factors of B");
        for (uint32_t m = 0; m < 128; m++) {
            uint32_t *d_words = cta->tmem.data() + m * tmem_columns + d.first;
            if (accumulate)
                memcpy(d_row, d_words, 4 * n);
            else
                memset(d_row, 0, 4 * n);
            multiply_row(terms, av + 64 * m, bv, sa, sb, n, 128, m, shape.sign);
            accumulate_row(d_row, terms, n, order);
            memcpy(d_words, d_row, 4 * n);
        }
    }
}

static Columns columns_at(uint32_t taddr, uint32_t count, const char *what) {
    if (taddr >> 16) trap("%s: the lane part of 0x%08x must be zero", what, taddr);
    if ((taddr & 0xFFFF) + count > tmem_columns)
        trap("%s: columns %u..%u leave tensor memory", what, taddr & 0xFFFF, (taddr & 0xFFFF) + count - 1);
    return {taddr & 0xFFFF, count};
}

static void check_accumulator(const Mma &mma, Cta &cta, Thread &thread, Epoch epoch) {
    check_columns(cta, mma.d, "the accumulator");
    const uint32_t shape_id = mma.d.first << 16 | mma.shape.n;
    if (mma.accumulate)
        for (uint32_t c = mma.d.first; c < mma.d.first + mma.d.count; c++) {
            const Content content = cell_at(cta, 0, c).content;
            if (content != Content::accumulator && content != Content::stored)
                trap("enable-input-d is set, but column %u of CTA %u holds %s", c, cta.index,
                     content == Content::scales ? "scale factors" : "nothing yet");
        }
    check_write(cta, mma.d, thread, {"accumulates in", Content::accumulator, shape_id, epoch});
}

void tcgen05_mma(int cta_group, uint32_t d_tmem, uint64_t a_desc, uint64_t b_desc, uint32_t idesc,
                 uint32_t scale_A_tmem, uint32_t scale_B_tmem, uint32_t enable_input_d) {
    Thread &thread = enter_synchronizing("tcgen05.mma");
    check_issuer(thread);
    auto mma = std::make_unique<Mma>();
    mma->name = "tcgen05.mma";
    mma->kind = TensorOp::mma;
    mma->ctas = group_ctas(*thread.cta, cta_group);
    mma->pipe = &thread.pipe;
    mma->shape = idesc_read(idesc, cta_group);
    mma->a = operand_read(a_desc, "operand A", false);
    mma->b = operand_read(b_desc, "operand B", false);
    mma->accumulate = enable_input_d != 0;
    mma->d = columns_at(d_tmem, mma->shape.n, "the accumulator");
    mma->sfa = columns_at(scale_A_tmem, 4, "scale factors of A");
    mma->sfb = columns_at(scale_B_tmem, (mma->shape.n + 31) / 32, "scale factors of B");
    if (mma->d.overlaps(mma->sfa) || mma->d.overlaps(mma->sfb)) trap("the accumulator overlaps its scale factors");
    const Epoch epoch = next_epoch(thread);
    const uint32_t parts = static_cast<uint32_t>(mma->ctas.size());
    for (Cta *cta : mma->ctas) {
        check_operand(*cta, mma->a, 128, 2, thread, epoch);
        check_operand(*cta, mma->b, mma->shape.n / parts, 2, thread, epoch);
        check_scales(*cta, mma->sfa, thread, epoch, "scale factors of A");
        check_scales(*cta, mma->sfb, thread, epoch, "scale factors of B");
        check_accumulator(*mma, *cta, thread, epoch);
    }
    thread.pipe.issued++;
    mma->index = thread.pipe.issued;
    queue(std::move(mma), thread);
}

// ---- cp. ----

struct Cp : TensorOp {
    Operand source = {};
    bool warpx4 = true;
    void work() override {
        const uint32_t rows = warpx4 ? 32 : 128;
        for (Cta *cta : ctas)
            for (uint32_t row = 0; row < rows; row++) {
                const uint8_t *from = cta->shared.data() + source.offset(row, 0);
                for (uint32_t lane = row; lane < (warpx4 ? 128 : row + 1); lane += 32)
                    memcpy(cta->tmem.data() + lane * tmem_columns + d.first, from, 16);
            }
    }
};

void tcgen05_cp(int cta_group, bool warpx4, uint32_t taddr, uint64_t s_desc) {
    const char *name = warpx4 ? "tcgen05.cp.32x128b.warpx4" : "tcgen05.cp.128x128b";
    Thread &thread = enter_synchronizing(name);
    check_issuer(thread);
    auto cp = std::make_unique<Cp>();
    cp->name = name;
    cp->kind = TensorOp::cp;
    cp->ctas = group_ctas(*thread.cta, cta_group);
    cp->pipe = &thread.pipe;
    cp->source = operand_read(s_desc, "the source", true);
    cp->warpx4 = warpx4;
    cp->d = columns_at(taddr, 4, "the destination");
    const Epoch epoch = next_epoch(thread);
    for (Cta *cta : cp->ctas) {
        check_columns(*cta, cp->d, "the destination");
        check_operand(*cta, cp->source, warpx4 ? 32 : 128, 1, thread, epoch);
        check_write(*cta, cp->d, thread, {"copies to", Content::scales, 0, epoch});
    }
    thread.pipe.issued++;
    cp->index = thread.pipe.issued;
    queue(std::move(cp), thread);
}

// ---- commit. ----

struct Commit : TensorOp {
    std::vector<Mbarrier *> bars;
    Clock clock; // what the thread knew when it committed
    void work() override {
        for (Mbarrier *bar : bars) {
            if (!bar->live || bar->cta->ended)
                trap_for(machine->threads[thread], name, "%s is gone", mbarrier_text(*bar).c_str());
            bar->next.join(clock);
            bar->next.raise(pipe->agent, index);
            mbarrier_arrive_on(*bar, 1);
        }
    }
};

void tensor_publish(Warp &warp) {
    if (warp.ld_agent) warp.clock.raise(warp.ld_agent, warp.ld_waited);
    if (warp.st_agent) warp.clock.raise(warp.st_agent, warp.st_waited);
}

void tcgen05_commit(int cta_group, uint32_t mbar, int32_t ctaMask) {
    Thread &thread = enter_synchronizing("tcgen05.commit");
    group_ctas(*thread.cta, cta_group);
    Cta &named = cta_of_address(*thread.cta, mbar, "tcgen05.commit");
    auto commit = std::make_unique<Commit>();
    commit->name = "tcgen05.commit";
    commit->kind = TensorOp::commit;
    commit->pipe = &thread.pipe;
    commit->index = next_epoch(thread).time - 1;
    const auto &ctas = thread.cta->cluster->ctas;
    if (ctaMask >= 0 && (ctaMask == 0 || ctaMask >> ctas.size()))
        trap("the CTA mask 0x%x does not fit a cluster of %zu", static_cast<unsigned>(ctaMask), ctas.size());
    for (Cta *cta : ctas) {
        if (ctaMask < 0 ? cta != &named : !(ctaMask >> cta->rank & 1)) continue;
        commit->bars.push_back(&mbarrier_at(*cta, mbar & 0xFFFFFF, "arrive"));
        mbarrier_check_async_use(*commit->bars.back(), thread);
        commit->ctas.push_back(cta);
    }
    tensor_publish(*thread.warp);
    release_to(commit->clock, *thread.warp);
    queue(std::move(commit), thread);
}

// ---- Fences, ld, st. ----

static uint32_t quadrant_check(const Warp &warp, uint32_t taddr, uint32_t num, const char *what) {
    const uint32_t lane = taddr >> 16, column = taddr & 0xFFFF;
    for (const Thread *thread : warp.threads)
        if (thread->collective_in != taddr)
            trap("the tensor memory address must be the same in all lanes; lane %u has 0x%08x, another 0x%08x",
                 thread->lane, static_cast<unsigned>(thread->collective_in), taddr);
    if (lane != 32 * (warp.index % 4))
        trap("lane %u in the address, but warp %u may access lanes %u..%u only", lane, warp.index,
             32 * (warp.index % 4), 32 * (warp.index % 4) + 31);
    if (column + num > tmem_columns) trap("columns %u..%u leave tensor memory", column, column + num - 1);
    check_columns(*warp.cta, {column, num}, what);
    return column;
}

static void ld_for_warp(Warp &warp, uint32_t taddr, uint32_t num) {
    const uint32_t column = quadrant_check(warp, taddr, num, "the source"), q = warp.index % 4;
    if (!warp.ld_agent) warp.ld_agent = agent_new(Agent::tensor_ld, warp.cta, warp.index);
    const Epoch epoch = {warp.ld_agent, ++warp.ld_issued};
    for (uint32_t c = column; c < column + num; c++) {
        Cell &cell = cell_at(*warp.cta, q, c);
        // Columns that nobody wrote read as NaN: a load may be wider than N, as long as the excess is not used.
        if (!warp.tensor_clock.covers(cell.write)) not_ordered(warp, "reads", *warp.cta, c, cell.write, "wrote");
        cell_record_read(cell, epoch, warp.tensor_clock);
    }
    for (Thread *thread : warp.threads) {
        uint32_t *r = static_cast<uint32_t *>(thread->collective_pointer);
        const uint32_t *from = warp.cta->tmem.data() + (32 * q + thread->lane) * tmem_columns + column;
        for (uint32_t i = 0; i < num; i++) {
            warp.pending_loads.push_back({r + i, from[i]});
            r[i] = 0x7FBADBADu; // until tcgen05.wait::ld
        }
    }
}

void tcgen05_ld(uint32_t *r, uint32_t num, uint32_t taddr) {
    Thread &thread = enter("tcgen05.ld");
    thread.collective_pointer = r;
    thread.collective_in = taddr;
    if (!collective_gather("tcgen05.ld", ~0u)) return;
    ld_for_warp(*thread.warp, taddr, num);
    collective_release(~0u);
}

static void st_for_warp(Warp &warp, uint32_t taddr, uint32_t num) {
    const uint32_t column = quadrant_check(warp, taddr, num, "the destination"), q = warp.index % 4;
    if (!warp.st_agent) warp.st_agent = agent_new(Agent::tensor_ld, warp.cta, warp.index);
    const Epoch epoch = {warp.st_agent, ++warp.st_issued};
    for (uint32_t c = column; c < column + num; c++) {
        Cell &cell = cell_at(*warp.cta, q, c);
        const bool own = cell.write.agent == warp.st_agent;
        if (!own && !warp.tensor_clock.covers(cell.write))
            not_ordered(warp, "stores to", *warp.cta, c, cell.write, "wrote");
        for (const ReadNode *node = cell.reads; node; node = node->next)
            if (!warp.tensor_clock.covers(node->epoch))
                not_ordered(warp, "stores to", *warp.cta, c, node->epoch, "read");
        cell_reads_drop(cell);
        cell.write = epoch;
        cell.content = Content::stored;
    }
    for (const Thread *thread : warp.threads)
        memcpy(warp.cta->tmem.data() + (32 * q + thread->lane) * tmem_columns + column, thread->collective_pointer,
               4 * num);
}

void tcgen05_st(uint32_t taddr, const uint32_t *r, uint32_t num) {
    Thread &thread = enter("tcgen05.st");
    thread.collective_pointer = const_cast<uint32_t *>(r);
    thread.collective_in = taddr;
    if (!collective_gather("tcgen05.st", ~0u)) return;
    st_for_warp(*thread.warp, taddr, num);
    collective_release(~0u);
}

void setmaxnreg(uint32_t imm_reg_count, int increase) {
    Thread &thread = enter(increase ? "setmaxnreg.inc" : "setmaxnreg.dec");
    if (imm_reg_count < 24 || imm_reg_count > 256 || imm_reg_count % 8)
        trap("%u registers: 24 to 256 in steps of 8", imm_reg_count);
    if (!collective_gather("setmaxnreg", ~0u)) return;
    thread.warp->maxnreg = imm_reg_count;
    collective_release(~0u);
}

} // namespace model

using namespace model;

namespace ptx {

void tcgen05_fence_before_thread_sync(void) {
    tensor_publish(*enter("tcgen05.fence::before_thread_sync").warp);
}

void tcgen05_fence_after_thread_sync(void) {
    Warp &warp = *enter("tcgen05.fence::after_thread_sync").warp;
    warp.tensor_clock.join(warp.clock);
}

void tcgen05_wait_ld(void) {
    Warp &warp = *enter("tcgen05.wait::ld").warp;
    if (!collective_gather("tcgen05.wait::ld", ~0u)) return;
    for (const PendingLoad &load : warp.pending_loads) *load.to = load.value;
    warp.pending_loads.clear();
    warp.ld_waited = warp.ld_issued;
    if (warp.ld_agent) warp.tensor_clock.raise(warp.ld_agent, warp.ld_waited);
    collective_release(~0u);
}

void tcgen05_wait_st(void) {
    Warp &warp = *enter("tcgen05.wait::st").warp;
    if (!collective_gather("tcgen05.wait::st", ~0u)) return;
    warp.st_waited = warp.st_issued;
    if (warp.st_agent) warp.tensor_clock.raise(warp.st_agent, warp.st_waited);
    collective_release(~0u);
}

} // namespace ptx
