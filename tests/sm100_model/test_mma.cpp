// The tensor core and its data paths, on example_kernel.cu: exact results on integer data, correct ones on random data,
// over many schedules. The reference is a plain loop over decoded values in double.
#include "sm100_model.h"
#include "example_kernel.h"
#include "test.h"
#include <math.h>
#include <string.h>
#include <vector>

static const double e2m1_values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

static double e4m3_value(uint8_t code) {
    const int e = code >> 3, m = code & 7;
    return e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
}

struct Problem {
    uint8_t *a, *b, *sfa, *sfb;
    float *d;
    struct example_args args;
};

static const uint32_t k_bytes = 128;

// The scale of row r, group g in the 128x4 layout of four 512-byte blocks.
static uint32_t scale_offset(uint32_t r, uint32_t g) {
    return g / 4 * 512 + r % 32 * 16 + r / 32 * 4 + g % 4;
}

static void problem_open(Problem &p) {
    p.a = (uint8_t *)sm100_model_memory_alloc(128 * k_bytes, "a", SM100_MODEL_READ_ONLY);
    p.b = (uint8_t *)sm100_model_memory_alloc(128 * k_bytes, "b", SM100_MODEL_READ_ONLY);
    p.sfa = (uint8_t *)sm100_model_memory_alloc(2048, "sfa", SM100_MODEL_READ_ONLY);
    p.sfb = (uint8_t *)sm100_model_memory_alloc(2048, "sfb", SM100_MODEL_READ_ONLY);
    p.d = (float *)sm100_model_memory_alloc(128 * 128 * 4, "d", SM100_MODEL_READ_WRITE);
    const uint64_t dims[] = {k_bytes, 128}, strides[] = {k_bytes};
    const uint32_t box[] = {128, 128};
    p.args.sfa = p.sfa;
    p.args.sfb = p.sfb;
    p.args.d = p.d;
    if (sm100_model_tensor_map_encode(&p.args.map_a, SM100_MODEL_U8, 2, p.a, dims, strides, box,
                                      SM100_MODEL_SWIZZLE_128B) ||
        sm100_model_tensor_map_encode(&p.args.map_b, SM100_MODEL_U8, 2, p.b, dims, strides, box,
                                      SM100_MODEL_SWIZZLE_128B))
        printf("%s\n", sm100_model_error());
}

static void problem_close(Problem &p) {
    for (void *m : {(void *)p.a, (void *)p.b, (void *)p.sfa, (void *)p.sfb, (void *)p.d}) sm100_model_memory_free(m);
}

// integer: scales are powers of two near one, so that all partial sums fit 24 bits in any order.
static void problem_fill(Problem &p, uint64_t seed, bool integer) {
    Random random = {seed};
    for (uint32_t i = 0; i < 128 * k_bytes; i++) {
        p.a[i] = (uint8_t)random.next();
        p.b[i] = (uint8_t)random.next();
    }
    for (uint32_t i = 0; i < 2048; i++) {
        p.sfa[i] = (uint8_t)(integer ? 0x30 + 8 * random.below(4) : 1 + random.below(0x7E));
        p.sfb[i] = (uint8_t)(integer ? 0x30 + 8 * random.below(4) : 1 + random.below(0x7E));
    }
    memset(p.d, 0xAA, 128 * 128 * 4);
}

static std::string problem_check(const Problem &p, bool exact) {
    for (uint32_t m = 0; m < 128; m++)
        for (uint32_t n = 0; n < 128; n++) {
            double sum = 0, size = 0;
            for (uint32_t k = 0; k < 256; k++) {
                const uint32_t shift = 4 * (k % 2);
                const double x =
                    e2m1_values[p.a[m * k_bytes + k / 2] >> shift & 15] * e4m3_value(p.sfa[scale_offset(m, k / 16)]);
                const double y =
                    e2m1_values[p.b[n * k_bytes + k / 2] >> shift & 15] * e4m3_value(p.sfb[scale_offset(n, k / 16)]);
                sum += x * y;
                size += fabs(x * y);
            }
            const double error = fabs((double)p.d[m * 128 + n] - sum);
            if (!(error <= (exact ? 0 : size * 20 * ldexp(1, -24)))) {
                char text[128];
                snprintf(text, sizeof text, "row %u column %u is %g and should be %g", m, n, (double)p.d[m * 128 + n],
                         sum);
                return text;
            }
        }
    return "";
}

static std::string run(Problem &p, uint64_t seed) {
    struct sm100_model_launch launch = {
        "example", SM100_MODEL_THUNK(example_kernel, struct example_args), &p.args, 1, 1, 128, 37000};
    struct sm100_model_options options = {};
    options.struct_size = sizeof options;
    options.seed = seed;
    struct sm100_model_report report;
    return sm100_model_run(&launch, 1, &options, &report) ? report.message : "";
}

int main(void) {
    Problem p;
    problem_open(p);
    for (uint64_t seed = 0; seed < 60; seed++) {
        const bool integer = seed % 2 == 0;
        problem_fill(p, seed, integer);
        std::string problem = run(p, seed);
        if (problem.empty()) problem = problem_check(p, integer);
        test_case("example kernel, " + std::string(integer ? "integer" : "random") + " data, seed " +
                      std::to_string(seed),
                  problem);
    }
    problem_close(p);
    return test_summary("test_mma");
}
