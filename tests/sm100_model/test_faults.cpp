// Broken kernels: every fault of gemm_kernel.h (and of handover_kernel.h) is planted in an otherwise correct kernel and
// must be caught, in every schedule tried, by the sentence that names it - or, where the mistake only makes the numbers
// wrong, by the comparison with the reference.
#include "gemm_problem.h"
#include "handover_kernel.h"

struct Fault {
    enum gemm_fault fault;
    const char *name;
    uint32_t cta_group, n;
    const char *sentences[4]; // any of them
};

#define FAULT(fault, cta_group, n, ...)                                                                                \
    {                                                                                                                  \
        fault, #fault, cta_group, n, {                                                                                 \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

static const Fault faults[] = {
    FAULT(FAULT_NO_INIT_FENCE, 1, 256, "without a fence.mbarrier_init"),
    FAULT(FAULT_NO_INIT_BARRIER, 1, 256, "before a barrier has made its initialization visible",
          "where none has been initialized", "which nobody has written"),
    FAULT(FAULT_NO_FULL_WAIT, 1, 256, "wait for that phase first", "wait for the load first"),
    FAULT(FAULT_FULL_PARITY, 1, 256, "wait for that phase first", "wait for the load first"),
    FAULT(FAULT_NO_EMPTY_WAIT, 1, 256, "wait for a tcgen05.commit", "in one phase than"),
    FAULT(FAULT_EMPTY_PARITY, 1, 256, "deadlock"),
    FAULT(FAULT_EXPECT_MORE, 1, 256, "and 16 bytes are missing"),
    FAULT(FAULT_EXPECT_LESS, 1, 256, "expect_tx is too small", "expect_tx is missing or too small"),
    FAULT(FAULT_NO_EXPECT, 1, 256, "expect_tx is missing or too small", "expect_tx is too small",
          "wait for that phase first", "wait for the load first"),
    FAULT(FAULT_SCALES_SWAPPED, 1, 256, "D differs"),
    FAULT(FAULT_NO_WARPX4, 1, 128, "must be copied to all four (warpx4)"),
    FAULT(FAULT_SCALE_STRIDE, 1, 128, "D differs"),
    FAULT(FAULT_SCALES_SINGLE, 1, 256, "may still read it: wait for a tcgen05.commit",
          "may still write it: wait for a tcgen05.commit"),
    FAULT(FAULT_SCALE_ROWS_MISSING, 1, 256, "holds no scale factors"),
    FAULT(FAULT_NO_DEALLOC, 1, 256, "never deallocated"),
    FAULT(FAULT_DEALLOC_EARLY, 1, 256, "is freed while", "are not allocated", "never completes", "still accesses"),
    FAULT(FAULT_ALLOC_COUNT, 1, 256, "32, 64, 128, 256 or 512"),
    FAULT(FAULT_COLUMN_OFFSET, 1, 256, "D differs"),
    FAULT(FAULT_QUADRANT, 1, 256, "may access lanes"),
    FAULT(FAULT_QUADRANT_MISSING, 1, 256, "may access lanes"),
    FAULT(FAULT_NO_WAIT_LD, 1, 128, "D differs", "may still read it"),
    FAULT(FAULT_NO_FENCE_AFTER, 1, 256, "without a tcgen05.fence::after_thread_sync"),
    FAULT(FAULT_NO_FENCE_BEFORE, 1, 256, "tcgen05.wait, fence::before_thread_sync and a barrier must come between"),
    FAULT(FAULT_NO_TEMPTY_WAIT, 1, 256, "may still read it", "without a tcgen05.fence::after_thread_sync",
          "may still write it"),
    FAULT(FAULT_NO_PROXY_FENCE, 1, 256, "no fence.proxy.async since"),
    FAULT(FAULT_PROXY_FENCE_ONE_LANE, 1, 256, "no fence.proxy.async since"),
    FAULT(FAULT_NO_STORE_BARRIER, 1, 256, "nothing orders the two", "which nobody has written",
          "no fence.proxy.async since", "wait for the bulk group first"),
    FAULT(FAULT_NO_STORE_WAIT, 1, 256, "wait for the bulk group first"),
    FAULT(FAULT_NO_STORE_COMMIT, 1, 256, "wait for the bulk group first"),
    FAULT(FAULT_TEMPTY_COUNT, 1, 256, "gets more arrivals in one phase", "may still read it"),
    FAULT(FAULT_ARRIVE_TWICE, 1, 256, "of mbarrier 'tempty[0]'", "may still read it", "may still write it"),
    FAULT(FAULT_NO_COMMIT_FULL, 1, 256, "waits for parity 0 of mbarrier 'tfull[0]'"),
    FAULT(FAULT_NO_COMMIT_EMPTY, 1, 256, "of mbarrier 'empty["),
    FAULT(FAULT_IDESC_TYPE, 1, 256, "E2M1 is 1"),
    FAULT(FAULT_IDESC_M, 1, 256, "M = 64"),
    FAULT(FAULT_IDESC_N, 1, 256, "N = 0"),
    FAULT(FAULT_DESC_VERSION, 1, 256, "a Hopper descriptor?"),
    FAULT(FAULT_DESC_STRIDE, 1, 256, "between groups of eight rows"),
    FAULT(FAULT_DESC_SWIZZLE, 1, 256, "leave the row of 64 bytes", "the first row of the 64-byte swizzle"),
    FAULT(FAULT_STAGE_ALIGNMENT, 1, 256, "where the 128-byte swizzle pattern begins"),
    FAULT(FAULT_STAGE_OVERLAP, 1, 256, "wait for that phase first", "wait for a tcgen05.commit"),
    FAULT(FAULT_K_STEP, 1, 256, "D differs", "is not in the first row"),
    FAULT(FAULT_ACCUMULATE_FIRST, 1, 256, "holds nothing yet"),
    FAULT(FAULT_ACCUMULATE_NEVER, 1, 256, "D differs"),
    FAULT(FAULT_NO_ELECT, 1, 256, "one elected thread must issue it all"),
    FAULT(FAULT_MIXED_GROUP, 1, 256, "one kernel must use one value"),
    FAULT(FAULT_DIVERGED, 1, 256, "have diverged", "deadlock"),
    FAULT(FAULT_NO_DRAIN, 1, 32, "still accesses its memory"),
    FAULT(FAULT_NO_MULTICAST, 2, 256, "CTA 1 warp 0"),
    FAULT(FAULT_PEER_BARRIER, 2, 256, "deadlock", "in one phase"),
    FAULT(FAULT_EXPECT_ONE_CTA, 2, 256, "expect_tx is too small", "expect_tx is missing or too small"),
    FAULT(FAULT_LOCAL_ARRIVE, 2, 256, "of mbarrier 'tempty[0]'", "gets more arrivals"),
    FAULT(FAULT_NO_CLUSTER_BARRIER, 2, 256, "still accesses its memory", "never deallocated", "has ended"),
    FAULT(FAULT_BOTH_ISSUE, 2, 256, "of mbarrier 'full[0]' (shared 0x2e400 of CTA 1)", "wait for that phase first"),
};

static void plant(const Fault &f) {
    GemmProblem p = {};
    gemm_open(p, f.cta_group, 1, 3, f.n, 4, true, 11);
    gemm_reference(p);
    p.args.fault = f.fault;
    std::string problem, example;
    // Only a commit that comes late shows that nobody waits for it.
    const bool by_luck = f.fault == FAULT_NO_DRAIN;
    uint32_t caught = 0;
    for (uint64_t seed = 0; seed < 12 && problem.empty(); seed++) {
        const std::string found = gemm_run(p, seed, true);
        bool named = false;
        for (const char *sentence : f.sentences)
            named = named || (sentence && found.find(sentence) != std::string::npos);
        caught += !found.empty();
        if (found.empty() && by_luck) continue;
        if (found.empty())
            problem = "not caught with seed " + std::to_string(seed);
        else if (!named)
            problem = "caught with another sentence (seed " + std::to_string(seed) + "): " + found;
        if (example.empty()) example = found.substr(0, 330);
    }
    if (problem.empty() && caught == 0) problem = "not caught with any seed";
    test_case(std::string(f.name) + ", caught with " + std::to_string(caught) + " of 12 seeds", problem);
    printf("     %s\n", example.c_str());
    gemm_close(p);
}

// What the scale columns shared by all stages do: refused as undocumented, right when that order is granted.
static void hardware_order(void) {
    GemmProblem p = {};
    gemm_open(p, 1, 1, 3, 256, 4, true, 11);
    gemm_reference(p);
    p.args.fault = FAULT_SCALES_SINGLE;
    std::string problem;
    for (uint64_t seed = 0; seed < 12 && problem.empty(); seed++) problem = gemm_run(p, seed, true, 1);
    test_case("single scale columns in hardware order", problem);
    gemm_close(p);
}

int main(void) {
    for (const Fault &f : faults) plant(f);
    hardware_order();
    handover_cases();
    return test_summary("test_faults");
}
