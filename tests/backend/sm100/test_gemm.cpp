// The GEMM kernels on the functional model: every instance, every N, ragged and empty experts, awkward sizes,
// the tile shapes of the models it is for, many schedules. Integer-valued operands, whose sums are exact in
// any order, must give the exact result; random ones must stay within the bound of their fp32 additions.
//
//     test_sm100_gemm          the default: half a minute
//     test_sm100_gemm --long   every token count of every instance, 20 schedules of each ragged case, all of
//                              K and features of the real shapes: three minutes
#include <stdio.h>
#include <string.h>
#include <set>

#include "backend/sm100/record.h"
#include "gemm_problem.h"

static int failures, cases;
static bool longer;
static uint64_t seed = 1;

static std::string name_of(enum sm100_tile_name tile, const std::vector<uint32_t> &rows, uint32_t m_rows, uint32_t k) {
    std::string name =
        "tile " + std::to_string(tile) + " m " + std::to_string(m_rows) + " k " + std::to_string(k) + " rows";
    for (uint32_t r : rows) name += " " + std::to_string(r);
    return name + " seed " + std::to_string(seed);
}

static void report(const std::string &name, const std::string &problem) {
    cases++;
    failures += !problem.empty();
    if (!problem.empty()) printf("FAIL %s: %s\n", name.c_str(), problem.c_str());
    fflush(stdout);
}

// One run on data and a schedule of its own; integer-valued every second time.
static void run_case(int tile, const std::vector<uint32_t> &rows, uint32_t m_rows, uint32_t k, uint32_t sms,
                     const struct gemm_options &options = {}) {
    const enum sm100_tile_name name = (enum sm100_tile_name)tile;
    gemm_problem p(name, rows, m_rows, k, seed % 2 == 0, seed, options);
    report(name_of(name, rows, m_rows, k), p.run(sms, seed));
    seed++;
}

// Steps of 7 meet every multiple of 8 (16 for a pair of CTAs) up to the largest tile, and every remainder.
static void every_n(void) {
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++) {
        const uint32_t step = 8 * sm100_tiles[tile].cta_group, n_max = sm100_tiles[tile].n_max;
        std::set<uint32_t> met;
        for (uint32_t n = 1; n <= n_max; n += longer ? 1 : 7) {
            run_case(tile, {n}, 144, 320, 2);
            met.insert((n + step - 1) / step * step);
        }
        report("every N of tile " + std::to_string(tile), met.size() == n_max / step ? "" : "some N was not run");
    }
}

static void ragged_groups(void) {
    const std::vector<std::vector<uint32_t>> cases_of_rows = {
        {0, 5, 0, 130, 64, 1}, {0, 0, 0, 300}, {1, 1, 1, 1, 1, 1, 1, 1}, {97, 0, 193, 33}, {257}, {0, 0, 0}};
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++)
        for (const std::vector<uint32_t> &rows : cases_of_rows)
            for (int round = 0; round < (longer ? 20 : 3); round++) run_case(tile, rows, 272, 576, 2 + 2 * (round % 3));
}

static void awkward_sizes(void) {
    const uint32_t columns[] = {16, 48, 256, 720}, published[] = {64, 80, 96, 160, 2880},
                   features[] = {16, 80, 128, 144, 224};
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++) {
        for (uint32_t k : columns) run_case(tile, {33, 5}, 80, k, 2);
        for (uint32_t k : published) run_case(tile, {1, 5, 31, 32, 33, 127, 128, 129}, 80, k, 4);
        for (uint32_t m_rows : features) run_case(tile, {7, 31}, m_rows, 192, 4);
    }
}

// V4-Pro and V4-Flash: all of K, few experts, some features.
static void real_shapes(void) {
    const struct { uint32_t k, m_rows; } l1[] = {{7168, 3072}, {4096, 2048}}, l2[] = {{3072, 7168}, {2048, 4096}};
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++)
        for (int model = 0; model < 2; model++) {
            const bool gated = sm100_tiles[tile].matrices == 2;
            const uint32_t k = gated ? l1[model].k : l2[model].k;
            const uint32_t m_rows = longer ? (gated ? l1[model].m_rows : l2[model].m_rows) : 128;
            run_case(tile, {40, 0, 3}, m_rows, k, 4);
        }
}

static void extras(void) {
    struct gemm_options layer = {}, relu2 = {}, nan = {}, clean = {};
    layer.bf16 = true;
    relu2.relu2 = true;
    nan.nan_row = 9;
    clean.padding = 0;
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++)
        for (int round = 0; round < 2; round++) {
            run_case(tile, {20, 0, 75}, 144, 320, 2, layer);
            run_case(tile, {20, 0, 75}, 144, 320, 2, nan);
            run_case(tile, {20, 0, 75}, 144, 320, 2, clean);
            if (sm100_tiles[tile].matrices == 2) run_case(tile, {20, 0, 75}, 144, 320, 2, relu2);
        }
}

// Who may wait for what: the load warp, the multiply warp, the eight warps of the epilogue.
static bool waits_for_its_own(const struct sm100_record &r) {
    const uint32_t warp = r.thread / 32;
    switch (r.barrier) {
    case SM100_STAGE_FULL:
    case SM100_ACCUMULATOR_EMPTY: return warp == 1;
    case SM100_STAGE_EMPTY: return warp <= 1;
    case SM100_ACCUMULATOR_FULL: return warp >= 4 && warp < 12;
    default: return false;
    }
}

// A transfer that brings too few bytes: the kernel still ends, and the record says who waited for what and
// where. The model then finds, at the end of a CTA, that the bytes do not balance; without the bound it would
// report a deadlock.
static void bounded_waits(void) {
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++) {
        gemm_problem p((enum sm100_tile_name)tile, {20}, 144, 320, true, 5);
        const uint64_t dims[] = {160, 20}, strides[] = {160};
        const uint32_t box[] = {128, sm100_tiles[tile].token_box / 2};
        const struct sm100_map map = {p.tokens_address(), 1,   2, {dims[0], dims[1]}, {strides[0]},
                                      {box[0], box[1]},   true};
        std::string problem;
        char sentence[256];
        if (p.machine.map(p.machine.context, &map, &p.args.tokens)) problem = megamoe_error_message();
        p.state.time_runs = 1;
        p.state.seed = seed++;
        p.args.timeout_ns = 1000000;
        if (mm_sm100_gemm_launch(&p.machine, p.tile, &p.args, 20, 2, NULL) == MEGAMOE_OK) problem = "nobody noticed";
        mm_sm100_record_describe(p.args.record, sentence, sizeof sentence);
        if (!strstr(megamoe_error_message(), "do not balance")) problem = megamoe_error_message();
        if (!strstr(sentence, "gave up waiting for")) problem = "nothing in the record";
        const struct sm100_record &r = *p.args.record;
        if (r.kernel != (uint32_t)tile || !waits_for_its_own(r) || r.group || r.row) problem = sentence;
        report("bounded waits, tile " + std::to_string(tile), problem);
    }
}

int main(int argc, char **argv) {
    longer = argc > 1 && strcmp(argv[1], "--long") == 0;
    every_n();
    ragged_groups();
    awkward_sizes();
    real_shapes();
    extras();
    bounded_waits();
    const uint32_t schedules = model_schedule_count(SM100_KERNEL_COUNT);
    if (schedules < 200) report("schedules", "fewer than 200 were run");
    printf("test_gemm: %d cases, %d failed, %u schedules:", cases, failures, schedules);
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++)
        printf(" tile %d %u", tile, model_schedule_count((enum sm100_kernel)tile));
    printf("\n");
    return failures != 0;
}
