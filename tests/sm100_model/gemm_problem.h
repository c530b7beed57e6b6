/* Operands, launch and check for gemm_kernel.cu, shared by the tests that run it. The reference is a loop over decoded
 * values; it shares no table and no layout code with the model. */
#ifndef GEMM_PROBLEM_H
#define GEMM_PROBLEM_H

#include "sm100_model.h"
#include "gemm_kernel.h"
#include "test.h"
#include <math.h>
#include <string.h>
#include <vector>

struct GemmProblem {
    uint32_t cta_group, clusters, tiles, n, k_tiles, m, k;
    uint8_t *a, *b, *sfa, *sfb;
    float *d;
    std::vector<float> expected, magnitude; // magnitude: the sum of absolute products, for the error bound
    struct gemm_args args;
    struct sm100_model_report report;
};

static inline float gemm_e2m1(uint32_t code) {
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}
static inline float gemm_e4m3(uint32_t code) {
    return code >> 3 ? ldexpf((float)(8 + (code & 7)), (int)(code >> 3) - 10) : ldexpf((float)code, -9);
}
static inline size_t gemm_scale_offset(uint32_t row, uint32_t group, uint32_t k) {
    return ((size_t)(row / 128) * (k / 64) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

static inline void gemm_decode(const uint8_t *codes, const uint8_t *scales, uint32_t rows, uint32_t k,
                               std::vector<float> &to) {
    to.resize((size_t)rows * k);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < k; i++)
            to[(size_t)r * k + i] = gemm_e2m1(codes[(size_t)r * k / 2 + i / 2] >> 4 * (i % 2) & 15) *
                                    gemm_e4m3(scales[gemm_scale_offset(r, i / 16, k)]);
}

static inline void gemm_map(struct sm100_tensor_map *map, enum sm100_model_data_type type, void *p, uint64_t columns,
                            uint64_t rows, uint64_t pitch, uint32_t box0, uint32_t box1,
                            enum sm100_model_swizzle swizzle) {
    const uint64_t dims[] = {columns, rows}, strides[] = {pitch};
    const uint32_t box[] = {box0, box1};
    if (sm100_model_tensor_map_encode(map, type, 2, p, dims, strides, box, swizzle)) {
        printf("%s\n", sm100_model_error());
        exit(2);
    }
}

// integer: scales are small powers of two, so that every partial sum is exact in fp32 in any order.
static inline void gemm_open(GemmProblem &p, uint32_t cta_group, uint32_t clusters, uint32_t tiles, uint32_t n,
                             uint32_t k_tiles, bool integer, uint64_t seed) {
    p.cta_group = cta_group, p.clusters = clusters, p.tiles = tiles, p.n = n, p.k_tiles = k_tiles;
    p.m = clusters * tiles * 128 * cta_group, p.k = 256 * k_tiles;
    const uint32_t n_padded = (n + 127) / 128 * 128;
    const size_t sfa_bytes = (size_t)p.m * p.k / 16, sfb_bytes = (size_t)n_padded * p.k / 16;
    p.a = (uint8_t *)sm100_model_memory_alloc((size_t)p.m * p.k / 2, "a", SM100_MODEL_READ_ONLY);
    p.b = (uint8_t *)sm100_model_memory_alloc((size_t)n * p.k / 2, "b", SM100_MODEL_READ_ONLY);
    p.sfa = (uint8_t *)sm100_model_memory_alloc(sfa_bytes, "sfa", SM100_MODEL_READ_ONLY);
    p.sfb = (uint8_t *)sm100_model_memory_alloc(sfb_bytes, "sfb", SM100_MODEL_READ_ONLY);
    p.d = (float *)sm100_model_memory_alloc((size_t)p.m * n * 4, "d", SM100_MODEL_READ_WRITE);
    Random random = {seed * 77 + 5};
    for (size_t i = 0; i < (size_t)p.m * p.k / 2; i++) p.a[i] = (uint8_t)random.next();
    for (size_t i = 0; i < (size_t)n * p.k / 2; i++) p.b[i] = (uint8_t)random.next();
    for (size_t i = 0; i < sfa_bytes; i++)
        p.sfa[i] = (uint8_t)(integer ? 0x30 + 8 * random.below(3) : 0x20 + random.below(0x30));
    for (size_t i = 0; i < sfb_bytes; i++)
        p.sfb[i] = (uint8_t)(integer ? 0x30 + 8 * random.below(3) : 0x20 + random.below(0x30));
    gemm_map(&p.args.map_a, SM100_MODEL_U8, p.a, p.k / 2, p.m, p.k / 2, 128, 128, SM100_MODEL_SWIZZLE_128B);
    gemm_map(&p.args.map_b, SM100_MODEL_U8, p.b, p.k / 2, n, p.k / 2, 128, n / cta_group, SM100_MODEL_SWIZZLE_128B);
    gemm_map(&p.args.map_sfa, SM100_MODEL_U8, p.sfa, 256, sfa_bytes / 256, 256, 256, 8, SM100_MODEL_SWIZZLE_NONE);
    gemm_map(&p.args.map_sfb, SM100_MODEL_U8, p.sfb, 256, sfb_bytes / 256, 256, 256, 8, SM100_MODEL_SWIZZLE_NONE);
    gemm_map(&p.args.map_d, SM100_MODEL_F32, p.d, n, p.m, n * 4, 32, 128, SM100_MODEL_SWIZZLE_128B);
    p.args.n = n, p.args.k_tiles = k_tiles, p.args.tiles = tiles, p.args.fault = FAULT_NONE;
}

static inline void gemm_reference(GemmProblem &p) {
    std::vector<float> a, b;
    gemm_decode(p.a, p.sfa, p.m, p.k, a);
    gemm_decode(p.b, p.sfb, p.n, p.k, b);
    p.expected.resize((size_t)p.m * p.n);
    p.magnitude.resize((size_t)p.m * p.n);
    for (uint32_t m = 0; m < p.m; m++)
        for (uint32_t n = 0; n < p.n; n++) {
            double sum[4] = {}, size = 0;
            for (uint32_t i = 0; i < p.k; i++)
                sum[i % 4] += (double)a[(size_t)m * p.k + i] * (double)b[(size_t)n * p.k + i];
            for (uint32_t i = 0; i < p.k; i += 16)
                size += fabs((double)a[(size_t)m * p.k + i] * (double)b[(size_t)n * p.k + i]);
            p.expected[(size_t)m * p.n + n] = (float)(sum[0] + sum[1] + sum[2] + sum[3]);
            p.magnitude[(size_t)m * p.n + n] = (float)(16 * size);
        }
}

static inline void gemm_close(GemmProblem &p) {
    for (void *m : {(void *)p.a, (void *)p.b, (void *)p.sfa, (void *)p.sfb, (void *)p.d}) sm100_model_memory_free(m);
}

// Empty if the run ended well and D is right.
static inline std::string gemm_run(GemmProblem &p, uint64_t seed, bool exact, int hardware_order = 0) {
    memset(p.d, 0xAA, (size_t)p.m * p.n * 4);
    const struct sm100_model_launch launch = {"gemm",
                                              p.cta_group == 1 ? SM100_MODEL_THUNK(gemm_kernel_1, struct gemm_args)
                                                               : SM100_MODEL_THUNK(gemm_kernel_2, struct gemm_args),
                                              &p.args,
                                              p.clusters * p.cta_group,
                                              p.cta_group,
                                              256,
                                              189000};
    struct sm100_model_options options = {};
    options.struct_size = sizeof options;
    options.seed = seed;
    options.hardware_order = hardware_order;
    options.steps_max = 20000000;
    if (sm100_model_run(&launch, 1, &options, &p.report)) return p.report.message;
    for (size_t i = 0; i < (size_t)p.m * p.n; i++) {
        const double bound = exact ? 0 : (double)p.magnitude[i] * p.k * ldexp(1, -24);
        if (!(fabs((double)p.d[i] - (double)p.expected[i]) <= bound)) {
            char text[128];
            snprintf(text, sizeof text, "D differs: row %zu column %zu is %g and should be %g", i / p.n, i % p.n,
                     (double)p.d[i], (double)p.expected[i]);
            return text;
        }
    }
    return "";
}

#endif
