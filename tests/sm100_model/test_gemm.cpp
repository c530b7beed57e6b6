// A correct persistent GEMM runs correctly on the model: one CTA and pairs, every kind of N, full-K tiles of V4-Pro and
// V4-Flash, many schedules; exact on integer data, within the bound on random data.
#include "gemm_problem.h"
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run(uint32_t cta_group, uint32_t clusters, uint32_t tiles, uint32_t n, uint32_t k_tiles, bool integer,
                uint32_t seeds) {
    GemmProblem p = {};
    gemm_open(p, cta_group, clusters, tiles, n, k_tiles, integer, n + k_tiles);
    gemm_reference(p);
    std::string problem;
    const double start = seconds();
    for (uint32_t seed = 0; seed < seeds && problem.empty(); seed++) {
        problem = gemm_run(p, seed, integer);
        if (!problem.empty()) problem = "seed " + std::to_string(seed) + ": " + problem;
    }
    char name[160];
    snprintf(name, sizeof name, "gemm cta_group %u, %u clusters, %u tiles, N %u, K %u, %s, %u seeds (%.2f s)",
             cta_group, clusters, tiles, n, 256 * k_tiles, integer ? "integer" : "random", seeds, seconds() - start);
    test_case(name, problem);
    gemm_close(p);
}

int main(void) {
    for (uint32_t n = 8; n <= 256; n += 8) run(1, 1, 1, n, 1, true, 3);
    for (uint32_t n = 16; n <= 256; n += 16) run(2, 1, 1, n, 1, true, 3);
    for (uint32_t cta_group = 1; cta_group <= 2; cta_group++) {
        run(cta_group, 1, 2, 256, 5, true, 30);
        run(cta_group, 2, 3, 96, 4, true, 30);
        run(cta_group, 1, 3, 128, 2, false, 15);
    }
    run(1, 1, 1, 256, 28, true, 1); // K = 7168, V4-Pro L1
    run(2, 1, 1, 256, 28, false, 2);
    run(2, 1, 1, 256, 12, true, 2); // K = 3072, V4-Pro L2
    run(2, 1, 1, 192, 16, true, 2); // K = 4096, V4-Flash L1
    return test_summary("test_gemm");
}
