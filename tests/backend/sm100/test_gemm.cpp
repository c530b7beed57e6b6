// The GEMM kernels on the functional model. Integer-valued operands, whose sums are exact in any order, must give the
// exact result; random ones must stay within the bound of K fp32 additions. The reference here is a plain loop in
// double over its own tables.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

#include "gemm_problem.h"

static int failures, cases;

static void report(const std::string &name, const std::string &problem) {
    cases++;
    failures += !problem.empty();
    if (!problem.empty()) printf("FAIL %s: %s\n", name.c_str(), problem.c_str());
}

// What one run is about: an instance, its experts' tokens, and sizes.
static void run_case(enum sm100_tile_name tile, const std::vector<uint32_t> &rows, uint32_t m_rows, uint32_t k,
                     bool exact, uint32_t sms, uint64_t seed) {
    std::string name = "tile " + std::to_string(tile) + (exact ? " integer" : " random") + " m " +
                       std::to_string(m_rows) + " k " + std::to_string(k) + " sms " + std::to_string(sms) + " seed " +
                       std::to_string(seed) + " rows";
    for (uint32_t r : rows) name += " " + std::to_string(r);
    gemm_problem p(tile, rows, m_rows, k, exact, seed);
    report(name, p.run(sms, seed));
}

int main(int argc, char **argv) {
    const bool longer = argc > 1 && strcmp(argv[1], "--long") == 0;
    uint64_t seed = 1;
    // Every N of every instance, one or two tiles of K, two or three of M.
    for (int tile = 0; tile < SM100_TILE_COUNT; tile++) {
        const uint32_t n_max = sm100_tiles[tile].n_max;
        for (uint32_t n = 1; n <= n_max; n += longer ? 1 : 7)
            run_case((enum sm100_tile_name)tile, {n}, 144, 320, n % 2 == 0, 2, seed++);
    }
    printf("test_gemm: %d cases, %d failed\n", cases, failures);
    return failures != 0;
}
