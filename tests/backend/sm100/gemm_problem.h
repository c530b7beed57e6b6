/* One grouped GEMM on the model: operands, the run, and the comparison with a plain loop in double. */
#ifndef TESTS_SM100_GEMM_PROBLEM_H
#define TESTS_SM100_GEMM_PROBLEM_H

#include <string>
#include <vector>

#include "backend/sm100/gemm.h"
#include "backend/sm100/operands.h"
#include "model_machine.h"

/* Values a matrix of NVFP4 stands for, apart from its global scale. */
struct nvfp4_matrix {
    uint32_t rows, columns;
    std::vector<uint8_t> codes, scales; /* row-major, as in a checkpoint */
    double value(uint32_t row, uint32_t column) const;
};

/* What else a kernel can do, and what may lie around its operands. */
struct gemm_options {
    bool bf16; /* output rows in BF16, at permuted places, weighted, biased, with a global per group */
    bool relu2;
    uint8_t padding = 0x7F; /* scales of rows that pad a stripe */
    int nan_row = -1;       /* this token row has a NaN scale */
};

class gemm_problem {
  public:
    gemm_problem(enum sm100_tile_name tile, const std::vector<uint32_t> &rows, uint32_t m_rows, uint32_t k, bool exact,
                 uint64_t seed, const struct gemm_options &options = {});
    ~gemm_problem();
    /* Runs on a machine of `sms` and compares; an empty string, or what is wrong. */
    std::string run(uint32_t sms, uint64_t seed);

    enum sm100_tile_name tile;
    std::vector<uint32_t> rows;
    uint32_t m_rows, k, row_count = 0;
    bool exact;
    struct gemm_options options;
    struct sm100_gemm_args args = {};
    struct model_state state = {};
    struct sm100_machine machine;
    std::vector<float> l1, output; /* what the kernel wrote */
    const void *tokens_address() const { return device_tokens.codes; }

  private:
    void make_weights(uint32_t i);
    void make_tokens();
    void add_extras();
    void add_h();
    double expected(uint32_t matrix, uint32_t group, uint32_t row, uint32_t m, double sum) const;
    std::string compare(uint32_t matrix, const float *got, uint32_t stride);
    std::string compare_row(uint32_t matrix, uint32_t group, uint32_t row, uint32_t m, const double *w, const double *x,
                            float value) const;
    double activated(uint32_t row, uint32_t m) const;
    std::string compare_nan(uint32_t row, uint32_t block, uint32_t scale) const;
    std::string compare_padding();
    std::string compare_h();
    void *upload(const void *data, size_t bytes, const char *name);

    uint64_t random_state;
    uint32_t random();
    std::vector<nvfp4_matrix> weights[2]; /* per group */
    nvfp4_matrix tokens;
    std::vector<float> globals[2], biases[2], row_globals, h_globals, row_weights, group_globals;
    std::vector<uint32_t> output_rows;
    std::vector<int32_t> ends;
    struct sm100_weights device_weights[2] = {};
    struct sm100_tokens device_tokens = {};
    std::vector<void *> memory;
};

#endif
