/* The state of the modeled machine: threads, warps, CTAs, clusters, barriers, memories with their shadows, and the
 * queue of asynchronous operations. Each .cpp file beside this one implements one group of instructions on it.
 *
 * Everything is single-threaded. Code that runs for an instruction runs on the fiber of the thread that issued it
 * (`current` is set); asynchronous operations run on the scheduler's stack (`current` is null). */
#ifndef SM100_MODEL_MACHINE_H
#define SM100_MODEL_MACHINE_H

#include <stdint.h>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
#include "clock.h"
#include "fiber.h"
#include "sm100_model.h"

namespace model {

struct Cta;
struct Cluster;
struct Warp;
struct Thread;
struct Launch;

// ---- Shadow memory: for each byte, who wrote it last and who has read it since. ----

enum class Proxy : uint8_t { none, generic, async };
enum class Access : uint8_t { read, write, atomic_read, atomic_write };
enum class Content : uint8_t { nothing, accumulator, scales, stored }; // of tensor memory

struct ReadNode {
    Epoch epoch;
    ReadNode *next;
};
struct Cell {
    Epoch write;
    uint32_t writer_thread = 0; // its id, and how many instructions it had executed: to ask whether it fenced since
    uint32_t writer_op = 0;     // for tensor memory: the shape of the mma that wrote
    Proxy proxy = Proxy::none;
    bool atomic = false;
    Content content = Content::nothing;
    ReadNode *reads = nullptr;
};
// Sixteen bytes share one cell until somebody accesses a part of them.
struct Granule {
    Cell cell;
    Cell *split;
    uint8_t barriers; // bit 0, 1: a live mbarrier in the lower, upper eight bytes
};
struct Shadow {
    Granule *granules = nullptr;
    size_t count = 0;
    void open(size_t bytes);
    void close();
};

// Who accesses, as the checks need to know it.
struct Actor {
    const Clock *clock; // what it knows
    Epoch epoch;        // the stamp it leaves
    Proxy proxy;
    uint32_t thread;          // of the (issuing) thread
    const Clock *proxy_fence; // what it knew at its last fence.proxy.async; may be null
};

struct Region { // registered global memory
    char *base;
    size_t bytes;
    std::string name;
    bool read_only;
    Shadow shadow;
};
// The synchronizing side of a global word that is used with acquire and release.
struct SyncWord {
    Clock sys;
    std::map<const Launch *, Clock> gpu;
};

// ---- Agents, for messages. ----

struct Agent {
    enum Kind { nobody, warp, tensor_ld, mbarrier, tensor_pipe, bulk_read, bulk_write } kind;
    const Cta *cta;
    uint32_t index; // warp, mbarrier address or thread
};

// ---- Barriers. ----

struct Mbarrier {
    Cta *cta;
    uint32_t offset; // in the CTA's shared memory
    std::string name;
    bool live = true;
    uint32_t expected = 0;
    int64_t pending = 0, tx = 0;
    uint32_t phases = 0; // completed so far; its low bit is the parity of the phase in progress
    uint32_t agent = 0;
    Clock next, done; // of the phase in progress, and of the last completed one
    Epoch init;
    uint32_t init_thread = 0, init_op = 0;
    std::vector<Thread *> waiters;
};
struct NamedBarrier {
    uint32_t expected = 0, arrived = 0;
    Clock clock;
    std::vector<Thread *> waiters;
};

// ---- Asynchronous operations. ----

struct AsyncOp {
    const char *name;
    uint32_t thread = 0;              // issuer
    std::vector<const Cta *> touches; // must not end before this does
    virtual bool eligible() const { return true; }
    virtual bool run() = 0; // does some or all of the work; true when finished
    virtual ~AsyncOp() = default;
};
struct TensorPipe { // the tcgen05 queue of a thread: what it issued, in order
    uint32_t agent = 0, issued = 0;
    std::deque<AsyncOp *> ops;
};

// ---- Threads. ----

struct Wait {
    enum Kind { nothing, mbarrier, bar, cluster, lanes, poll, sleep, bulk, tmem_alloc, tmem_dealloc } kind = nothing;
    const void *object = nullptr;
    uint64_t a = 0, b = 0;
};
struct Thread {
    Fiber fiber;
    Cta *cta = nullptr;
    Warp *warp = nullptr;
    uint32_t tid = 0, lane = 0, id = 0;
    bool done = false;
    const char *at = "its start"; // the instruction it is executing
    Wait wait;
    uint32_t op = 0, since_switch = 0;
    uint32_t fenced_shared = 0, fenced_global = 0; // op of the last fence.proxy.async
    bool cluster_arrived = false;
    uint64_t cluster_phase = 0;
    uint32_t bulk_groups = 0; // committed
    bool bulk_open = false;   // operations issued since the last commit_group
    uint32_t bulk_read_agent = 0, bulk_write_agent = 0;
    const void *poll_address = nullptr;
    uint64_t poll_value = 0;
    void *collective_pointer = nullptr; // in: where a warp-wide instruction puts its registers
    uint64_t collective_in = 0, collective_in2 = 0, collective_out = 0;
    TensorPipe pipe;
};
// A warp-wide instruction that some lanes have reached.
struct Collective {
    const char *what = nullptr; // null: free
    uint32_t mask = 0, arrived = 0;
};
struct PendingLoad { // tcgen05.ld delivers at tcgen05.wait::ld
    uint32_t *to;
    uint32_t value;
};
struct Warp {
    Cta *cta;
    uint32_t index;
    Thread *threads[32];
    uint32_t ready = 0, done = 0; // lanes
    int list_position = -1;       // in Machine::ready_warps
    uint32_t agent = 0, time = 1;
    Clock clock;        // what ordinary accesses may rely on
    Clock tensor_clock; // the same as of the last tcgen05.fence::after_thread_sync
    Clock acquired;     // by relaxed loads; a fence.acq_rel makes it count
    Clock released;     // at the last fence.acq_rel; relaxed stores publish it
    Clock proxy_fence;  // at the last fence.proxy.async
    Clock init_fence;   // at the last fence.mbarrier_init
    bool has_released = false;
    uint32_t ld_agent = 0, ld_issued = 0, ld_waited = 0; // tcgen05.ld
    uint32_t st_agent = 0, st_issued = 0, st_waited = 0; // tcgen05.st
    uint32_t tensor_lane = 32;                           // the one lane that issues mma and cp
    std::vector<PendingLoad> pending_loads;
    Collective collectives[8]; // quads may shuffle each by itself
    uint32_t maxnreg = 0;
};

// ---- CTAs. ----

constexpr uint32_t shared_start = 0x400; // as on the hardware: the first 1024 bytes belong to the system
constexpr uint32_t tmem_lanes = 128, tmem_columns = 512;

struct TmemAllocation {
    uint32_t column, count;
};
struct Cta {
    Launch *launch;
    Cluster *cluster;
    uint32_t index, rank; // in the grid, in the cluster
    size_t stacks;        // number of its first fiber stack
    uint32_t dynamic_start, shared_bytes;
    std::vector<uint8_t> shared; // indexed by offset, including shared_start
    Shadow shadow;
    std::vector<std::unique_ptr<Mbarrier>> mbarriers;
    std::vector<int32_t> mbarrier_at; // offset / 8 -> index or -1
    NamedBarrier bars[16];
    std::vector<uint32_t> tmem;   // [lane][column]
    std::vector<Cell> tmem_cells; // [quadrant][column]
    std::vector<TmemAllocation> allocations;
    uint32_t allocated_last = 0xffffffffu;
    bool relinquished = false;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Thread>> threads;
    uint32_t alive = 0;
    bool ended = false;
};
struct PairRequest { // tcgen05.alloc/dealloc with cta_group::2: waits for the other CTA of the pair
    const char *what = nullptr;
    Cta *cta = nullptr;
    uint32_t argument = 0, columns = 0;
    bool *done = nullptr; // on the stack of the CTA that came first
};
struct Cluster {
    std::vector<Cta *> ctas;
    uint32_t arrived = 0;
    uint64_t phase = 0;
    Clock next, done;
    std::vector<Thread *> waiters;
    PairRequest requests[8]; // one per pair
};
struct SharedVariable { // a CUDA __shared__ variable: the same place in every CTA of a launch
    const void *key;
    uint32_t offset;
};
struct Launch {
    struct sm100_model_launch spec;
    uint32_t index = 0;
    std::vector<SharedVariable> variables;
    uint32_t variables_end = shared_start;
    std::vector<size_t> free_stacks; // of CTAs that have ended
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Cluster>> clusters;
    uint32_t ctas_started = 0, ctas_ended = 0;
    int cta_group = 0; // the one value that this kernel uses
};

struct Machine {
    struct sm100_model_options options;
    struct sm100_model_report *report;
    std::vector<std::unique_ptr<Launch>> launches;
    std::vector<Thread *> threads; // by id
    std::vector<Agent> agents;
    std::vector<Warp *> ready_warps;
    std::vector<std::unique_ptr<AsyncOp>> async;
    std::vector<Thread *> pollers, sleepers;
    std::unordered_map<const void *, SyncWord> sync_words;
    Fiber scheduler;
    Thread *current = nullptr;
    void *stacks = nullptr;
    size_t stack_count = 0, stacks_used = 0; // a CTA takes over the stacks of one that has ended
    uint64_t random_state = 1;
    uint32_t eagerness = 0, preemption = 0; // chances out of 65536, per seed
    uint32_t elected_lane_seed = 0;
    uint64_t time_ns = 1000000;
    uint64_t progress = 0; // grows whenever something changes that another thread could see
    bool stopped = false;
    ReadNode *free_reads = nullptr;
    std::vector<std::unique_ptr<ReadNode[]>> read_blocks;
    std::vector<std::unique_ptr<Cell[]>> split_cells;
    std::vector<Cell *> free_splits;
};
extern Machine *machine;

// ---- machine.cpp ----

// Stops the run with a sentence about the current thread (or, from an asynchronous operation, about `op`).
[[noreturn]] void trap(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void trap_for(const Thread *thread, const char *what, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
Thread &enter(const char *instruction);               // every wrapper starts here; may let others run
Thread &enter_synchronizing(const char *instruction); // the same, with a chance of preemption
void block(Wait wait);                                // suspends the current thread until wake()
void wake(Thread *thread);
void wake_all(std::vector<Thread *> &threads);
void yield();
uint32_t random_below(uint32_t n);
uint32_t agent_new(Agent::Kind kind, const Cta *cta, uint32_t index);
std::string agent_text(Epoch epoch);
std::string thread_text(const Thread &thread);
void async_start(std::unique_ptr<AsyncOp> op);

// ---- sync.cpp ----

// Gathers all lanes of mask at the same instruction. The last to arrive gets true and acts for all; afterwards it calls
// collective_release. The others return false once that has happened.
bool collective_gather(const char *what, uint32_t mask);
void collective_release(uint32_t mask);
void release_to(Clock &clock, Warp &warp); // publishes what the warp did so far
void acquire_from(const Clock &clock, Warp &warp);
void tensor_publish(Warp &warp);
Mbarrier &mbarrier_at(Cta &cta, uint32_t offset, const char *use);
Mbarrier *mbarrier_find(Cta &cta, uint32_t offset);
void mbarrier_complete_tx(Mbarrier &bar, uint32_t bytes, uint32_t phase, const char *what);
void mbarrier_arrive_on(Mbarrier &bar, uint32_t count);
// That an engine (TMA, tcgen05.commit) may signal this mbarrier, as far as the thread can know.
void mbarrier_check_async_use(const Mbarrier &bar, const Thread &thread);
std::string mbarrier_text(const Mbarrier &bar);

// ---- memory.cpp ----

Cta &cta_of_address(Cta &own, uint32_t address, const char *use);
uint32_t shared_address(const Cta &cta, uint32_t offset);
void shared_check_range(const Cta &cta, uint32_t offset, uint32_t bytes, const char *use);
// Checks an access of the current thread and tells where the bytes are. remote: another CTA's are allowed.
uint8_t *shared_generic(const char *instruction, uint32_t address, uint32_t bytes, bool remote, Access access);
void shared_access(Cta &cta, uint32_t offset, uint32_t bytes, const Actor &actor, Access access);
Region &region_of(const void *address, size_t bytes, const char *use);
void global_access(Region &region, const void *address, size_t bytes, const Actor &actor, Access access);
void global_changed(const void *address, size_t bytes); // wakes threads that poll there
Actor actor_generic(Thread &thread);
Actor actor_async(Thread &thread, Epoch epoch);
void cell_check_read(Cell &cell, const Actor &actor, const std::string &place);
void cell_record_read(Cell &cell, Epoch epoch, const Clock &clock);
void cell_reads_drop(Cell &cell);
void regions_open();
void regions_close();

// ---- tcgen05.cpp, tma.cpp: hooks at the end of a CTA ----

void tmem_check_at_exit(Cta &cta);

} // namespace model

#endif
