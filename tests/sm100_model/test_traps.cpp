// Small misuses, each with the sentence it must produce; and right uses that look unusual and must pass.
#include "sm100_model.h"
#include "trap_kernel.h"
#include "test.h"
#include <string.h>

struct TrapCase {
    enum trap_case kind;
    const char *name;
    uint32_t cluster;
    const char *sentence; // null: must pass
};
#define CASE(kind, cluster, sentence)                                                                                  \
    { kind, #kind, cluster, sentence }

static const TrapCase cases[] = {
    CASE(TRAP_ALLOC_GROWS, 1, "later allocations must not be larger"),
    CASE(TRAP_ALLOC_AFTER_RELINQUISH, 1, "has relinquished the permit"),
    CASE(TRAP_DEALLOC_OTHER_COUNT, 1, "is not what tcgen05.alloc gave"),
    CASE(TRAP_ALLOC_TOO_MUCH, 1, "waits in tcgen05.alloc for 32 columns"),
    CASE(TRAP_ALLOC_HALF_WARP, 1, "waits at tcgen05.alloc for lanes ffffffff"),
    CASE(TRAP_LD_NOT_UNIFORM, 1, "must be the same in all lanes"),
    CASE(TRAP_LD_NOT_ALLOCATED, 1, "are not allocated"),
    CASE(TRAP_ST_WITHOUT_WAIT, 1, "may still write it"),
    CASE(TRAP_GROUP_2_ALONE, 1, "cta_group::2 in a cluster of 1"),
    CASE(TRAP_PAIR_ALLOC_DIFFERS, 2, "the other CTA of the pair for tcgen05.alloc of"),
    CASE(TRAP_INIT_TWICE, 1, "is initialized a second time"),
    CASE(TRAP_NOT_INITIALIZED, 1, "where none has been initialized"),
    CASE(TRAP_BARRIER_OVERWRITTEN, 1, "where a live mbarrier is"),
    CASE(TRAP_PARITY, 1, "a phase parity of 2"),
    CASE(TRAP_TX_LEFT, 1, "expect_tx and the copies do not balance"),
    CASE(TRAP_BAR_COUNT, 1, "but others came for"),
    CASE(TRAP_TMA_ALIGNMENT, 1, "where the 128-byte swizzle pattern begins"),
    CASE(TRAP_TMA_START, 1, "must start at a multiple of 16 bytes"),
    CASE(TRAP_TMA_STORE_NEGATIVE, 1, "a store that starts at coordinate -1"),
    CASE(TRAP_TMA_MAP_COPIED, 1, "the tensor map is a local copy"),
    CASE(TRAP_TMA_RANK, 1, "a 3-dimensional copy with a tensor map of rank 2"),
    CASE(TRAP_TMA_IN_FLIGHT, 1, "still accesses its memory"),
    CASE(TRAP_MULTICAST_MASK, 2, "does not fit a cluster of 2"),
    CASE(TRAP_BULK_SIZE, 1, "a positive multiple of 16"),
    CASE(TRAP_BULK_NO_FENCE, 1, "no fence.proxy.async since"),
    CASE(TRAP_NC_OF_WRITTEN, 1, "which this launch has written"),
    CASE(TRAP_READ_ONLY, 1, "registered as read-only"),
    CASE(TRAP_GLOBAL_BOUNDS, 1, "after the end of 'memory'"),
    CASE(TRAP_GLOBAL_ALIGNMENT, 1, "is not a multiple of 4"),
    CASE(TRAP_SHARED_BOUNDS, 1, "of dynamic shared memory"),
    CASE(TRAP_SHARED_UNWRITTEN, 1, "which nobody has written"),
    CASE(TRAP_SHARED_RACE, 1, "0x"),
    CASE(TRAP_REMOTE_FORM, 2, "use the shared::cluster form"),
    CASE(TRAP_MAPA_RANK, 2, "CTA rank 2 in a cluster of 2"),
    CASE(TRAP_ENDED_CTA, 2, "which has ended"),
    CASE(TRAP_CLUSTER_WAIT, 1, "has not arrived"),
    CASE(TRAP_SHFL_OUTSIDE, 1, "which is not in the mask"),
    CASE(TRAP_DIVERGED, 1, "have diverged"),
    CASE(TRAP_EXITED_LANE, 1, "lane"),
    CASE(TRAP_REGISTERS, 1, "24 to 256 in steps of 8"),
    CASE(TRAP_TRAP, 1, "the kernel executed trap"),
    CASE(TRAP_ENDLESS, 1, "does not end"),
    CASE(TRAP_SLEEPING_LOOP, 1, "deadlock"),
    CASE(TRAP_SCALE_SIGN, 1, "has a sign, which UE4M3 does not"),
    CASE(TRAP_RESERVED_BITS, 1, "reserved bits of the descriptor are not zero"),
    CASE(RIGHT_ST_LD, 1, nullptr),
    CASE(RIGHT_GATHER4, 1, nullptr),
    CASE(RIGHT_SUB_WORDS, 1, nullptr),
    CASE(RIGHT_SPLIT_BARRIERS, 2, nullptr),
    CASE(RIGHT_SLEEPING_LOOP, 1, nullptr),
};

struct Memories {
    uint8_t *memory, *read_only;
    uint32_t *flag;
};

static std::string run(const Memories &m, const TrapCase &c, uint64_t seed) {
    struct trap_args args = {};
    const uint64_t dims[] = {128, 64}, strides[] = {128};
    const uint32_t box[] = {128, 8}, box_row[] = {128, 1};
    sm100_model_tensor_map_encode(&args.map, SM100_MODEL_U8, 2, m.memory, dims, strides, box, SM100_MODEL_SWIZZLE_128B);
    sm100_model_tensor_map_encode(&args.map_row, SM100_MODEL_U8, 2, m.read_only, dims, strides, box_row,
                                  SM100_MODEL_SWIZZLE_NONE);
    args.memory = m.memory, args.read_only = m.read_only, args.flag = m.flag, args.kind = c.kind;
    *m.flag = 0;
    for (uint32_t i = 0; i < 8192; i++) m.read_only[i] = (uint8_t)(i / 128 + 3 * i);
    const struct sm100_model_launch launch = {
        "trap", SM100_MODEL_THUNK(trap_kernel, struct trap_args), &args, c.cluster, c.cluster, 64, 8448};
    struct sm100_model_options options = {};
    options.struct_size = sizeof options;
    options.seed = seed;
    options.steps_max = c.kind == TRAP_ENDLESS ? 300 : 200000;
    struct sm100_model_report report;
    return sm100_model_run(&launch, 1, &options, &report) ? report.message : "";
}

static std::string check_result(const Memories &m, const TrapCase &c) {
    for (uint32_t t = 0; t < 64; t++) {
        uint32_t word;
        memcpy(&word, m.memory + (c.kind == RIGHT_SUB_WORDS ? 256 : 0) + 4 * t, 4);
        if (c.kind == RIGHT_ST_LD && word != 3 * t + 1) return "thread " + std::to_string(t);
        if (c.kind == RIGHT_SUB_WORDS && word != 0) return "word " + std::to_string(t);
        if (c.kind == RIGHT_SPLIT_BARRIERS && word != 63 - t + 4) return "thread " + std::to_string(t);
    }
    static const uint32_t rows[] = {5, 63, 64, 2};
    if (c.kind == RIGHT_GATHER4)
        for (uint32_t i = 0; i < 512; i++) {
            const uint32_t row = rows[i / 128];
            if (m.memory[4096 + i] != (row < 64 ? m.read_only[128 * row + i % 128] : 0))
                return "byte " + std::to_string(i);
        }
    return "";
}

int main(void) {
    Memories m;
    m.memory = (uint8_t *)sm100_model_memory_alloc(8192, "memory", SM100_MODEL_READ_WRITE);
    m.read_only = (uint8_t *)sm100_model_memory_alloc(8192, "read-only", SM100_MODEL_READ_ONLY);
    m.flag = (uint32_t *)sm100_model_memory_alloc(16, "flag", SM100_MODEL_READ_WRITE);
    for (const TrapCase &c : cases) {
        std::string problem;
        for (uint64_t seed = 0; seed < 15 && problem.empty(); seed++) {
            const std::string found = run(m, c, seed);
            if (c.sentence ? found.find(c.sentence) == std::string::npos : !found.empty())
                problem = "seed " + std::to_string(seed) + ": " + (found.empty() ? "not caught" : found);
            else if (!c.sentence)
                problem = check_result(m, c);
        }
        test_case(c.name, problem);
    }
    for (void *p : {(void *)m.memory, (void *)m.read_only, (void *)m.flag}) sm100_model_memory_free(p);
    return test_summary("test_traps");
}
