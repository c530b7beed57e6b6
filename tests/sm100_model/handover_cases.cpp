// Runs handover_kernel.cu, right and broken, inside one launch and between two simulated ranks.
#include "sm100_model.h"
#include "handover_kernel.h"
#include "test.h"
#include <string.h>

struct Handover {
    uint8_t *rows;
    uint32_t *counter, *out, *record;
};
static const uint32_t writers = 6;

static std::string handover_run(Handover &h, uint32_t fault, uint32_t between_ranks, uint64_t seed) {
    struct handover_args args = {};
    const uint64_t dims[] = {128, writers * 8}, strides[] = {128};
    const uint32_t box[] = {128, 8};
    sm100_model_tensor_map_encode(&args.map, SM100_MODEL_U8, 2, h.rows, dims, strides, box, SM100_MODEL_SWIZZLE_NONE);
    memset(h.rows, 0xAA, writers * 1024);
    memset(h.counter, 0, 16);
    memset(h.record, 0, 16);
    args.rows = h.rows, args.counter = h.counter, args.out = h.out, args.record = h.record;
    args.writers = writers, args.fault = fault, args.between_ranks = between_ranks;
    struct handover_args reader = args;
    reader.rank = 1;
    const auto kernel = SM100_MODEL_THUNK(handover_kernel, struct handover_args);
    const struct sm100_model_launch launches[] = {
        {"rank 0", kernel, &args, between_ranks ? writers : writers + 1, 1, 64, 20000},
        {"rank 1", kernel, &reader, 1, 1, 64, 20000}};
    struct sm100_model_options options = {};
    options.struct_size = sizeof options;
    options.seed = seed;
    options.time_runs = fault == HANDOVER_TIMEOUT;
    struct sm100_model_report report;
    if (sm100_model_run(launches, between_ranks ? 2 : 1, &options, &report)) return report.message;
    if (fault == HANDOVER_TIMEOUT) return *h.record ? "timeout recorded" : "no record";
    for (uint32_t i = 0; i < writers * 256; i++)
        if (h.out[i] != i / 256 * 1000 + i % 256) return "word " + std::to_string(i) + " differs";
    return "";
}

static void handover_case(const char *name, uint32_t fault, uint32_t between_ranks, const char *sentence) {
    Handover h;
    h.rows = (uint8_t *)sm100_model_memory_alloc(writers * 1024, "rows", SM100_MODEL_READ_WRITE);
    h.counter = (uint32_t *)sm100_model_memory_alloc(16, "counter", SM100_MODEL_READ_WRITE);
    h.out = (uint32_t *)sm100_model_memory_alloc(writers * 1024, "out", SM100_MODEL_READ_WRITE);
    h.record = (uint32_t *)sm100_model_memory_alloc(16, "record", SM100_MODEL_READ_WRITE);
    std::string problem, example;
    // Waiting for one arrival too few is wrong only where the last one really comes late.
    const bool by_luck = fault == HANDOVER_COUNT;
    uint32_t caught = 0;
    for (uint64_t seed = 0; seed < 15 && problem.empty(); seed++) {
        const std::string found = handover_run(h, fault, between_ranks, seed);
        if (example.empty()) example = found.substr(0, 330);
        caught += !found.empty();
        if (by_luck && found.empty()) continue;
        if (sentence ? found.find(sentence) == std::string::npos : !found.empty())
            problem = "seed " + std::to_string(seed) + ": " + (found.empty() ? "not caught" : found);
    }
    if (by_luck && problem.empty() && caught == 0) problem = "not caught with any seed";
    test_case(std::string("hand-over ") + name + (between_ranks ? ", two ranks" : ""), problem);
    if (!example.empty()) printf("     %s\n", example.c_str());
    for (void *m : {(void *)h.rows, (void *)h.counter, (void *)h.out, (void *)h.record}) sm100_model_memory_free(m);
}

void handover_cases(void) {
    for (uint32_t between = 0; between < 2; between++) {
        handover_case("as it should be", HANDOVER_NONE, between, nullptr);
        handover_case("without release", HANDOVER_RELAXED, between, "nothing orders the two");
        handover_case("before the barrier", HANDOVER_EARLY, between, "nothing orders the two");
        handover_case("without a proxy fence", HANDOVER_NO_FENCE, between, "no fence.proxy.async since");
        handover_case("one arrival too early", HANDOVER_COUNT, between, "nothing orders the two");
        handover_case("without waiting", HANDOVER_NO_WAIT, between, "");
        handover_case("that nobody signals", HANDOVER_NEVER, between, "polls 'counter' + 0, which stays 0");
        handover_case("with a bounded wait", HANDOVER_TIMEOUT, between, "timeout recorded");
        handover_case("one row too long", HANDOVER_BOUNDS, between, "after the end of 'rows'");
    }
    handover_case("at gpu scope", HANDOVER_SCOPE, 1, "nothing orders the two");
}
