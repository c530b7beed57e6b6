/* A few tiles per GEMM instance, and the portable kernels, against integer arithmetic on the host. */
#include <stdlib.h>

#include "backend/sm100/gemm.h"
#include "backend/sm100/operands.h"
#include "backend/sm100/record.h"
#include "backend/sm100/self_check.h"
#include "error.h"
#include "numerics/nvfp4.h"

/* Two experts with 3 and 40 tokens; features and K that fill neither a tile nor a stage. */
enum { GROUPS = 2, ROWS = 43, FEATURES = 144, K = 320, MATRICES = 2 };
static const int32_t ends[GROUPS] = {3, ROWS};

/* Codes as twice their value, scales as powers of two of 1/2 .. 2, so that sums are integers of 1/16. */
struct operand {
    uint32_t rows;
    int8_t *twice;   /* [rows, K] */
    uint8_t *codes;  /* [rows, K / 2] */
    uint8_t *scales; /* [rows, K / 16] E4M3 */
};

/* One instance under test: host data, device memory, results. */
struct trial {
    const struct sm100_machine *machine;
    const struct sm100_portable *portable; /* or NULL */
    enum sm100_tile_name tile;
    uint32_t random;
    struct operand weights[MATRICES][GROUPS], tokens;
    struct sm100_weights device_weights[MATRICES];
    struct sm100_tokens device_tokens;
    struct sm100_gemm_args args;
    float *results; /* [ROWS, matrices, FEATURES], host */
    void *memory[24];
    uint32_t memory_count;
};

static const float weight_globals[MATRICES][GROUPS] = {{0.25f, 2.0f}, {1.0f, 0.5f}};
static const float h_globals[GROUPS] = {4.0f, 0.5f};

static uint32_t next_random(struct trial *t) {
    t->random = t->random * 1664525u + 1013904223u;
    return t->random >> 16;
}

static bool operand_open(struct trial *t, struct operand *o, uint32_t rows) {
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    o->rows = rows;
    o->twice = malloc(rows * K);
    o->codes = malloc(rows * K / 2);
    o->scales = malloc(rows * K / 16);
    if (!o->twice || !o->codes || !o->scales) return false;
    for (uint32_t i = 0; i < rows * K / 2; i++) {
        o->codes[i] = (uint8_t)next_random(t);
        o->twice[2 * i] = twice[o->codes[i] & 15];
        o->twice[2 * i + 1] = twice[o->codes[i] >> 4];
    }
    for (uint32_t i = 0; i < rows * K / 16; i++) o->scales[i] = (uint8_t)(0x30 + 8 * (next_random(t) % 3));
    return true;
}

static void operand_close(struct operand *o) {
    free(o->twice);
    free(o->codes);
    free(o->scales);
}

/* Device memory with a copy of `data`, or with 0x7F (a NaN, as a scale) if there is none. */
static void *place(struct trial *t, const void *data, size_t bytes, megamoe_status *status) {
    const struct sm100_machine *m = t->machine;
    void *memory = m->alloc(m->context, bytes, "self-check"), *fill = NULL;
    t->memory[t->memory_count++] = memory;
    if (!data) data = fill = malloc(bytes);
    if (fill) memset(fill, 0x7F, bytes);
    if (!memory || !data) *status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a self-check of %zu bytes", bytes);
    if (*status == MEGAMOE_OK) *status = m->copy_in(m->context, memory, data, bytes);
    free(fill);
    return memory;
}

static mm_matrix as_matrix(const struct operand *o, float global) {
    return (mm_matrix){.codes = o->codes,
                       .scales = o->scales,
                       .row_bytes = K / 2,
                       .scale_row_bytes = K / 16,
                       .rows = o->rows,
                       .columns = K,
                       .format = MM_NVFP4,
                       .global = global};
}

/* Operands one after another, each with its scales at a stripe of its own. */
static megamoe_status upload(struct trial *t, const struct operand *const *parts, const float *globals, uint32_t count,
                             uint8_t **codes, uint8_t **scales) {
    size_t row_bytes = sm100_code_row_bytes(K), code_bytes = 0, scale_bytes = 0, code_at = 0, scale_at = 0;
    for (uint32_t i = 0; i < count; i++) {
        code_bytes += parts[i]->rows * row_bytes;
        scale_bytes += sm100_scale_bytes(parts[i]->rows, K);
    }
    uint8_t *host_codes = malloc(code_bytes), *host_scales = malloc(scale_bytes);
    megamoe_status status = host_codes && host_scales ? MEGAMOE_OK : MEGAMOE_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < count && status == MEGAMOE_OK; i++) {
        mm_matrix matrix = as_matrix(parts[i], globals[i]);
        struct sm100_loss loss;
        float global;
        status = mm_sm100_matrix_write(&matrix, host_codes + code_at, host_scales + scale_at, &global, &loss);
        code_at += parts[i]->rows * row_bytes;
        scale_at += sm100_scale_bytes(parts[i]->rows, K);
    }
    if (status == MEGAMOE_OK) *codes = place(t, host_codes, code_bytes, &status);
    if (status == MEGAMOE_OK) *scales = place(t, host_scales, scale_bytes, &status);
    free(host_codes);
    free(host_scales);
    return status;
}

static megamoe_status make_operands(struct trial *t) {
    const float ones[GROUPS] = {1.0f, 1.0f};
    struct operand token_parts[GROUPS];
    const struct operand *parts[GROUPS];
    bool made = operand_open(t, &t->tokens, ROWS);
    for (uint32_t i = 0; i < sm100_tiles[t->tile].matrices && made; i++)
        for (uint32_t g = 0; g < GROUPS && made; g++) made = operand_open(t, &t->weights[i][g], FEATURES);
    if (!made) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for a self-check");
    for (uint32_t i = 0; i < sm100_tiles[t->tile].matrices; i++) {
        struct sm100_weights *w = &t->device_weights[i];
        megamoe_status status = MEGAMOE_OK;
        for (uint32_t g = 0; g < GROUPS; g++) parts[g] = &t->weights[i][g];
        MM_TRY(upload(t, parts, weight_globals[i], GROUPS, &w->codes, &w->scales));
        w->globals = place(t, weight_globals[i], sizeof weight_globals[i], &status);
        if (status != MEGAMOE_OK) return status;
        w->groups = GROUPS;
        w->rows = FEATURES;
        w->columns = K;
    }
    for (uint32_t g = 0; g < GROUPS; g++) {
        uint32_t first = g ? (uint32_t)ends[g - 1] : 0;
        token_parts[g] = (struct operand){(uint32_t)ends[g] - first, t->tokens.twice + first * K,
                                          t->tokens.codes + first * K / 2, t->tokens.scales + first * K / 16};
        parts[g] = &token_parts[g];
    }
    MM_TRY(upload(t, parts, ones, GROUPS, &t->device_tokens.codes, &t->device_tokens.scales));
    t->device_tokens.rows_max = ROWS;
    t->device_tokens.stripes_max = GROUPS;
    t->device_tokens.columns = K;
    return MEGAMOE_OK;
}

static megamoe_status launch(struct trial *t) {
    const struct sm100_weights *both[MATRICES] = {&t->device_weights[0], &t->device_weights[1]};
    const struct sm100_record none = {0};
    const uint64_t zero = 0;
    megamoe_status status = MEGAMOE_OK;
    const int32_t *device_ends = place(t, ends, sizeof ends, &status);
    if (status != MEGAMOE_OK) return status;
    MM_TRY(mm_sm100_gemm_prepare(t->machine, t->tile, both, &t->device_tokens, device_ends, &t->args));
    t->args.record = place(t, &none, sizeof none, &status);
    t->args.saturated_blocks = place(t, &zero, sizeof zero, &status);
    t->args.nonfinite_blocks = place(t, &zero, sizeof zero, &status);
    t->args.output = place(t, NULL, ROWS * FEATURES * sizeof(float), &status);
    t->args.l1 = place(t, NULL, ROWS * MATRICES * FEATURES * sizeof(float), &status);
    t->args.h_codes = place(t, NULL, ROWS * FEATURES / 2, &status);
    t->args.h_scales = place(t, NULL, sm100_scale_bytes(GROUPS * SM100_STRIPE_ROWS, FEATURES), &status);
    t->args.h_globals = place(t, h_globals, sizeof h_globals, &status);
    t->args.h_row_bytes = FEATURES / 2;
    t->args.output_f32 = 1;
    t->args.swiglu = (mm_swiglu){1.0f, 0.0f, INFINITY, 1}; /* relu2: nothing in it is approximate */
    t->args.timeout_ns = 100000000;
    if (status == MEGAMOE_OK) status = mm_sm100_gemm_launch(t->machine, t->tile, &t->args, ROWS, 0, NULL);
    return status;
}

/* The exact sum of one feature of one token: 1/16 is its unit. */
static float exact(const struct trial *t, uint32_t matrix, uint32_t group, uint32_t row, uint32_t feature) {
    const struct operand *w = &t->weights[matrix][group], *x = &t->tokens;
    int64_t sum = 0;
    for (uint32_t k = 0; k < K; k += 16) {
        int32_t block = 0;
        for (uint32_t i = k; i < k + 16; i++) block += w->twice[feature * K + i] * x->twice[row * K + i];
        /* 0x30 is 1/2: the exponents add up to 0 .. 4 above 1/4, and twice times twice is 4. */
        uint32_t exponent = (w->scales[feature * K / 16 + k / 16] + x->scales[row * K / 16 + k / 16] - 0x60u) / 8;
        sum += (int64_t)block * (1 << exponent);
    }
    return (float)sum / 16.0f * weight_globals[matrix][group];
}

static megamoe_status differs(const struct trial *t, const char *what, uint32_t row, uint32_t feature, double got,
                              double want) {
    return mm_fail(
        MEGAMOE_DEVICE_ERROR,
        "the self-check of GEMM instance %u of sm100 failed: %s of token row %u, feature %u is %g and not %g",
        (unsigned)t->tile, what, row, feature, got, want);
}

static megamoe_status compare_sums(struct trial *t) {
    uint32_t matrices = sm100_tiles[t->tile].matrices;
    size_t bytes = ROWS * matrices * FEATURES * sizeof(float);
    const void *source = matrices == 2 ? (const void *)t->args.l1 : t->args.output;
    MM_TRY(t->machine->copy_out(t->machine->context, t->results, source, bytes));
    for (uint32_t g = 0, row = 0; g < GROUPS; g++)
        for (; row < (uint32_t)ends[g]; row++)
            for (uint32_t i = 0; i < matrices * FEATURES; i++) {
                float got = t->results[row * matrices * FEATURES + i];
                float want = exact(t, i / FEATURES, g, row, i % FEATURES);
                if (got != want) return differs(t, i < FEATURES ? "the product" : "up", row, i % FEATURES, got, want);
            }
    return MEGAMOE_OK;
}

/* h = max(up, 0)^2, quantized: every step of it is an IEEE operation, so the host gets the same bits. */
static megamoe_status compare_h(struct trial *t) {
    uint8_t codes[ROWS * FEATURES / 2], scales[GROUPS * SM100_STRIPE_ROWS * ((FEATURES + 63) / 64) * 4];
    if (sm100_tiles[t->tile].matrices == 1) return MEGAMOE_OK;
    MM_TRY(t->machine->copy_out(t->machine->context, codes, t->args.h_codes, sizeof codes));
    MM_TRY(t->machine->copy_out(t->machine->context, scales, t->args.h_scales, sizeof scales));
    for (uint32_t g = 0, row = 0; g < GROUPS; g++)
        for (uint32_t in_group = 0; row < (uint32_t)ends[g]; row++, in_group++)
            for (uint32_t block = 0; block < FEATURES / 16; block++) {
                float h[16];
                uint8_t want[8], scale,
                    got = scales[sm100_scale_offset(g * SM100_STRIPE_ROWS + in_group, block,
                                                    sm100_blocks_along_k(FEATURES))];
                for (uint32_t i = 0; i < 16; i++) {
                    float up = t->results[(row * 2 + 1) * FEATURES + block * 16 + i];
                    h[i] = up > 0.0f ? up * up : 0.0f;
                }
                mm_nvfp4_block_quantize(h, h_globals[g], want, &scale);
                if (got != scale) return differs(t, "the scale byte of h", row, block * 16, got, scale);
                for (uint32_t i = 0; i < 8; i++)
                    if (codes[row * FEATURES / 2 + block * 8 + i] != want[i])
                        return differs(t, "the code byte of h", row, block * 16 + 2 * i,
                                       codes[row * FEATURES / 2 + block * 8 + i], want[i]);
            }
    return MEGAMOE_OK;
}

/* One matrix of the trial by the portable kernels. */
static megamoe_status compare_portable(struct trial *t, uint32_t i) {
    mm_matrix groups[GROUPS];
    for (uint32_t g = 0; g < GROUPS; g++) groups[g] = as_matrix(&t->weights[i][g], weight_globals[i][g]);
    const struct sm100_product product = {groups, GROUPS, ROWS, FEATURES, K, t->tokens.codes, t->tokens.scales, ends};
    megamoe_status status = t->portable->multiply(t->portable->context, &product, t->results);
    if (status != MEGAMOE_OK) return mm_fail_in(MEGAMOE_UNSUPPORTED_DEVICE, "the self-check of the portable kernels");
    for (uint32_t g = 0, row = 0; g < GROUPS; g++)
        for (; row < (uint32_t)ends[g]; row++)
            for (uint32_t n = 0; n < FEATURES; n++) {
                const float got = t->results[row * FEATURES + n], want = exact(t, i, g, row, n);
                if (got != want)
                    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                                   "the self-check of the portable kernels failed: the product of token row %u, "
                                   "feature %u is %g and not %g: use --backend cpu",
                                   row, n, (double)got, (double)want);
            }
    return MEGAMOE_OK;
}

static megamoe_status check_record(const struct trial *t) {
    struct sm100_record record;
    char sentence[256];
    MM_TRY(t->machine->copy_out(t->machine->context, &record, t->args.record, sizeof record));
    mm_sm100_record_describe(&record, sentence, sizeof sentence);
    if (!sentence[0]) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_DEVICE_ERROR, "the self-check of sm100 timed out: %s", sentence);
}

static megamoe_status run_trial(struct trial *t) {
    t->results = malloc(ROWS * MATRICES * FEATURES * sizeof *t->results);
    if (!t->results) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for a self-check");
    MM_TRY(make_operands(t));
    MM_TRY(launch(t));
    MM_TRY(check_record(t));
    MM_TRY(compare_sums(t));
    MM_TRY(compare_h(t));
    for (uint32_t i = 0; t->portable && i < sm100_tiles[t->tile].matrices; i++) MM_TRY(compare_portable(t, i));
    return MEGAMOE_OK;
}

static void trial_close(struct trial *t) {
    for (uint32_t i = 0; i < t->memory_count; i++) t->machine->release(t->machine->context, t->memory[i]);
    for (uint32_t i = 0; i < MATRICES * GROUPS; i++) operand_close(&t->weights[i / GROUPS][i % GROUPS]);
    operand_close(&t->tokens);
    free(t->results);
    free(t);
}

megamoe_status mm_sm100_self_check(const struct sm100_machine *machine, const struct sm100_portable *portable) {
    megamoe_status status = MEGAMOE_OK;
    for (uint32_t tile = 0; tile < SM100_TILE_COUNT && status == MEGAMOE_OK; tile++) {
        if (machine->multiprocessors < sm100_tiles[tile].cta_group) continue;
        struct trial *t = aligned_alloc(64, (sizeof *t + 63) / 64 * 64); /* tensor maps want it */
        if (!t) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for a self-check");
        memset(t, 0, sizeof *t);
        t->machine = machine;
        t->portable = portable;
        t->tile = (enum sm100_tile_name)tile;
        t->random = tile + 1;
        status = run_trial(t);
        trial_close(t);
    }
    return status;
}
