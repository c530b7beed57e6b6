/* The stages that engines call one by one, on every level of this machine, through the backend's table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/synthetic.h"
#include "numerics/e8m0.h"
#include "numerics/nvfp4.h"

static const char *const levels[] = {"scalar", "avx2", "avx512", "amx"};

static mm_backend_state *device_open(const char *level) {
    megamoe_device_options options = {.struct_size = sizeof options, .threads = 3, .max_tokens = 1};
    mm_backend_state *state = NULL;
    setenv("MEGAMOE_ISA", level, 1);
    assert_int_equal(mm_backend_cpu.open(&options, &state), MEGAMOE_OK);
    unsetenv("MEGAMOE_ISA");
    return state;
}

static megamoe_tensor matrix_of(void *data, megamoe_dtype dtype, int64_t rows, int64_t columns) {
    return (megamoe_tensor){.data = data, .dtype = dtype, .rank = 2, .extent = {rows, columns}};
}

/* F32 values are quantized as they are, BF16 ones too; per token, or under one global scale. */
static void quantize_follows_the_definition(void **unused) {
    enum { ROWS = 5, COLUMNS = 208 };
    synthetic made = {.random = 1};
    float *values = synthetic_block(&made, ROWS * COLUMNS * 4), given = 0.013f, globals[ROWS];
    uint8_t codes[ROWS * COLUMNS / 2], scales[ROWS * COLUMNS / 16];
    (void)unused;
    for (int i = 0; i < ROWS * COLUMNS; i++) values[i] = i / COLUMNS == 3 ? 0.0f : synthetic_normal(&made);
    for (size_t l = 0; l < 4; l++)
        for (int per_token = 0; per_token < 2; per_token++) {
            mm_backend_state *state = device_open(levels[l]);
            megamoe_tensor v = matrix_of(values, MEGAMOE_F32, ROWS, COLUMNS);
            megamoe_tensor c = matrix_of(codes, MEGAMOE_E2M1X2, ROWS, COLUMNS);
            megamoe_tensor s = matrix_of(scales, MEGAMOE_E4M3, ROWS, COLUMNS / 16);
            megamoe_tensor g = {.data = globals, .dtype = MEGAMOE_F32, .rank = 1, .extent = {ROWS}};
            memset(codes, 0xAA, sizeof codes);
            memset(scales, 0xAA, sizeof scales);
            assert_int_equal(mm_backend_cpu.quantize(state, &v, per_token ? NULL : &given, &c, &s, &g, NULL),
                             MEGAMOE_OK);
            for (int r = 0; r < ROWS; r++) {
                float amax = 0.0f;
                for (int k = 0; k < COLUMNS; k++) amax = fmaxf(amax, fabsf(values[r * COLUMNS + k]));
                float expected = !per_token ? given : amax > 0.0f ? amax / 2688.0f : 1.0f;
                assert_true(globals[r] == expected);
                for (int k = 0; k < COLUMNS; k += 16) {
                    uint8_t block[8], scale;
                    mm_nvfp4_block_quantize(values + r * COLUMNS + k, expected, block, &scale);
                    assert_memory_equal(codes + (r * COLUMNS + k) / 2, block, 8);
                    assert_int_equal(scales[(r * COLUMNS + k) / 16], scale);
                }
            }
            mm_backend_cpu.close(state);
        }
    synthetic_free(&made);
}

static void dequantize_follows_the_definition(void **unused) {
    enum { ROWS = 3, COLUMNS = 96 };
    synthetic made = {.random = 2};
    uint8_t codes[ROWS * COLUMNS / 2], scales[ROWS * COLUMNS / 16];
    float values[ROWS * COLUMNS], globals[ROWS] = {0.25f, 3.0f, 0.001f};
    (void)unused;
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)synthetic_random(&made);
    for (int mxfp4 = 0; mxfp4 < 2; mxfp4++) {
        int group = mxfp4 ? 32 : 16;
        for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(100 + synthetic_random(&made) % 20);
        megamoe_tensor c = matrix_of(codes, MEGAMOE_E2M1X2, ROWS, COLUMNS);
        megamoe_tensor s = matrix_of(scales, mxfp4 ? MEGAMOE_E8M0 : MEGAMOE_E4M3, ROWS, COLUMNS / group);
        megamoe_tensor v = matrix_of(values, MEGAMOE_F32, ROWS, COLUMNS);
        megamoe_tensor g = {.data = globals, .dtype = MEGAMOE_F32, .rank = 1, .extent = {ROWS}};
        mm_backend_state *state = device_open("avx2");
        assert_int_equal(mm_backend_cpu.dequantize(state, &c, &s, &g, &v, NULL), MEGAMOE_OK);
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            unsigned byte = scales[i / group];
            float scale = mxfp4 ? mm_e8m0_to_f32(byte) : mm_e4m3_to_f32(byte);
            assert_true(values[i] == mm_e2m1_to_f32(codes[i / 2] >> (i % 2 * 4) & 15u) * scale * globals[i / COLUMNS]);
        }
        mm_backend_cpu.close(state);
    }
}

/* Ragged groups, some empty, one longer than a block of the kernels; whole numbers, so every bit is known. */
static void grouped_gemm_is_exact_on_whole_numbers(void **unused) {
    enum { GROUPS = 6, N = 40, K = 160, ROWS = 61 };
    static const int32_t offsets[GROUPS] = {1, 1, 4, 21, 21, ROWS};
    synthetic made = {.random = 3};
    mm_matrix matrices[GROUPS];
    uint16_t *rows = synthetic_block(&made, ROWS * K * 2);
    float *output = synthetic_block(&made, ROWS * N * 4);
    (void)unused;
    for (int g = 0; g < GROUPS; g++) {
        matrices[g] = synthetic_matrix(&made, MM_NVFP4, 0, N, K, true);
        matrices[g].global = g % 2 ? 0.5f : 4.0f;
    }
    synthetic_tokens(&made, ROWS, K, true, rows);
    for (size_t l = 0; l < 4; l++) {
        megamoe_tensor r = matrix_of(rows, MEGAMOE_BF16, ROWS, K), o = matrix_of(output, MEGAMOE_F32, ROWS, N);
        mm_backend_state *state = device_open(levels[l]);
        memset(output, 0xFF, ROWS * N * 4);
        assert_int_equal(mm_backend_cpu.grouped_gemm(state, &r, NULL, matrices, offsets, GROUPS, &o, NULL), MEGAMOE_OK);
        for (int row = 0; row < ROWS; row++) {
            int group = 0;
            while (row >= offsets[group]) group++;
            const mm_matrix *m = &matrices[group];
            for (int n = 0; n < N; n++) {
                double sum = 0.0;
                for (int k = 0; k < K; k++)
                    sum += (double)mm_bf16_to_f32(rows[row * K + k]) *
                           (double)mm_e2m1_to_f32(m->codes[(size_t)n * m->row_bytes + (size_t)k / 2] >> (k % 2 * 4) &
                                                  15u) *
                           (double)mm_e4m3_to_f32(m->scales[(size_t)n * m->scale_row_bytes + (size_t)k / 16]);
                if ((double)output[row * N + n] != sum * (double)m->global)
                    fail_msg("%s: row %d, column %d: %g instead of %g", levels[l], row, n, (double)output[row * N + n],
                             sum * (double)m->global);
            }
        }
        mm_backend_cpu.close(state);
    }
    synthetic_free(&made);
}

static void unknown_levels_are_refused(void **unused) {
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
    mm_backend_state *state = NULL;
    (void)unused;
    setenv("MEGAMOE_ISA", "sse9", 1);
    assert_int_equal(mm_backend_cpu.open(&options, &state), MEGAMOE_INVALID_ARGUMENT);
    assert_null(state);
    assert_non_null(strstr(megamoe_error_message(), "sse9"));
    unsetenv("MEGAMOE_ISA");
}

static void threads_come_from_the_environment(void **unused) {
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
    mm_backend_state *state = NULL;
    mm_device_facts facts;
    (void)unused;
    setenv("MEGAMOE_THREADS", "5", 1);
    assert_int_equal(mm_backend_cpu.open(&options, &state), MEGAMOE_OK);
    mm_backend_cpu.describe(state, &facts);
    assert_int_equal(facts.threads, 5);
    mm_backend_cpu.close(state);
    unsetenv("MEGAMOE_THREADS");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantize_follows_the_definition),        cmocka_unit_test(dequantize_follows_the_definition),
        cmocka_unit_test(grouped_gemm_is_exact_on_whole_numbers), cmocka_unit_test(unknown_levels_are_refused),
        cmocka_unit_test(threads_come_from_the_environment),
    };
    return cmocka_run_group_tests_name("cpu_single", tests, NULL, NULL);
}
