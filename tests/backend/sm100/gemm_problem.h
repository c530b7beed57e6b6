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

class gemm_problem {
  public:
    gemm_problem(enum sm100_tile_name tile, const std::vector<uint32_t> &rows, uint32_t m_rows, uint32_t k, bool exact,
                 uint64_t seed);
    ~gemm_problem();
    /* Runs on a machine of `sms` and compares; an empty string, or what is wrong. */
    std::string run(uint32_t sms, uint64_t seed);

    enum sm100_tile_name tile;
    std::vector<uint32_t> rows;
    uint32_t m_rows, k, row_count = 0;
    bool exact;
    struct sm100_gemm_args args = {};
    struct model_state state = {};
    struct sm100_machine machine;
    std::vector<float> l1, output; /* what the kernel wrote */

  private:
    void make_weights(uint32_t i);
    void make_tokens();
    std::string compare(uint32_t matrix, const float *got, uint32_t stride);
    std::string compare_h();
    void *upload(const void *data, size_t bytes, const char *name);

    uint64_t random_state;
    uint32_t random();
    std::vector<nvfp4_matrix> weights[2]; /* per group */
    nvfp4_matrix tokens;
    std::vector<float> globals[2], row_globals, h_globals;
    std::vector<int32_t> ends;
    struct sm100_weights device_weights[2] = {};
    struct sm100_tokens device_tokens = {};
    std::vector<void *> memory;
};

#endif
