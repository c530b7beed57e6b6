/*
 * The stages that engines call one by one: quantize, dequantize, grouped GEMM, on the caller's stream.
 * grouped_gemm keeps a table of the groups' matrices and the staged rows in memory of the device, which grows (and then
 * waits) when a call is larger than every one before.
 */
#include "backend/cuda/visit.h"

#include <stdlib.h>

#include "error.h"

enum { GRID_PER_SM = 8, SINGLE_THREADS = 256, PLAN_THREADS = 1024, TILE_SHARED = 2 * (128 + 64) * 256 };

static uint64_t values_bytes(const megamoe_tensor *t) {
    return (uint64_t)t->extent[0] * (uint64_t)t->extent[1] * (t->dtype == MEGAMOE_F32 ? 4 : 2);
}

/* [rows, columns / group] bytes, one per group. */
static uint64_t group_bytes(const megamoe_tensor *t, uint32_t group) {
    return (uint64_t)t->extent[0] * (uint64_t)t->extent[1] / group;
}

static uint32_t row_grid(const mm_backend_state *state, uint32_t rows) {
    uint32_t most = state->sm_count * GRID_PER_SM;
    return rows < most ? rows : most;
}

static megamoe_status quantize_entered(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                                       megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals,
                                       CUstream stream) {
    mm_cuda_stage_args args = {.source = values->data,
                               .source_f32 = values->dtype == MEGAMOE_F32,
                               .row_count = (uint32_t)values->extent[0],
                               .slots_per_token = 1,
                               .columns = (uint32_t)values->extent[1],
                               .pitch = mm_round_up((uint32_t)values->extent[1], MM_CUDA_GROUP),
                               .quantize = 1,
                               .global_mode = global ? MEGAMOE_GLOBAL_STATIC : MEGAMOE_GLOBAL_TOKEN,
                               .global = global ? *global : 1.0f,
                               .codes = codes->data,
                               .scales = scales->data,
                               .globals = globals->data};
    return mm_cuda_stage_launch(state, &args, args.row_count, false, stream);
}

megamoe_status mm_cuda_quantize(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                                megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream) {
    megamoe_tensor v = *values, c = *codes, s = *scales, g = *globals;
    mm_visit visit = {.state = state, .stream = stream};
    const void *source = NULL;
    if (values->extent[0] == 0) return MEGAMOE_OK;
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = mm_visit_read(&visit, values->data, values_bytes(values), &source);
    if (status == MEGAMOE_OK) status = mm_visit_write(&visit, codes->data, group_bytes(values, 2), &c.data);
    if (status == MEGAMOE_OK) status = mm_visit_write(&visit, scales->data, group_bytes(values, 16), &s.data);
    if (status == MEGAMOE_OK)
        status = mm_visit_write(&visit, globals->data, (uint64_t)values->extent[0] * sizeof(float), &g.data);
    v.data = (void *)(uintptr_t)source;
    if (status == MEGAMOE_OK) status = quantize_entered(state, &v, global, &c, &s, &g, stream);
    status = mm_visit_end(&visit, status);
    mm_cuda_leave(state);
    return status;
}

/* What is read where: device addresses. */
typedef struct quantized {
    const void *codes, *scales, *globals;
} quantized;

static megamoe_status dequantize_entered(mm_backend_state *state, const megamoe_tensor *codes, uint32_t e8m0,
                                         const quantized *q, uint32_t global_stride, uint32_t f32, void *values,
                                         CUstream stream) {
    const void *from = q->codes, *scale = q->scales, *globals = q->globals;
    uint32_t rows = (uint32_t)codes->extent[0], columns = (uint32_t)codes->extent[1];
    void *arguments[] = {&from, &scale, &globals, &global_stride, &e8m0, &rows, &columns, &f32, &values};
    mm_launch how = {.grid = {row_grid(state, rows)}, .threads = SINGLE_THREADS};
    return rows ? mm_cuda_launch(state, stream, MM_DEQUANTIZE, &how, arguments) : MEGAMOE_OK;
}

megamoe_status mm_cuda_dequantize(mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                  const megamoe_tensor *globals, megamoe_tensor *values, void *stream) {
    const bool per_row = globals && globals->data && globals->extent[0] == codes->extent[0];
    const bool e8m0 = scales->dtype == MEGAMOE_E8M0;
    mm_visit visit = {.state = state, .stream = stream};
    quantized q = {0};
    void *target = NULL;
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = mm_visit_read(&visit, codes->data, group_bytes(codes, 2), &q.codes);
    if (status == MEGAMOE_OK)
        status = mm_visit_read(&visit, scales->data, group_bytes(codes, e8m0 ? 32 : 16), &q.scales);
    if (status == MEGAMOE_OK && globals)
        status = mm_visit_read(&visit, globals->data, (uint64_t)globals->extent[0] * sizeof(float), &q.globals);
    if (status == MEGAMOE_OK) status = mm_visit_write(&visit, values->data, values_bytes(values), &target);
    if (status == MEGAMOE_OK)
        status = dequantize_entered(state, codes, e8m0, &q, per_row, values->dtype == MEGAMOE_F32, target, stream);
    status = mm_visit_end(&visit, status);
    mm_cuda_leave(state);
    return status;
}

/* ---- grouped GEMM --------------------------------------------------------------------------------------- */

/* Parts of the device's memory for one call. */
typedef struct grouped {
    mm_cuda_expert *experts;
    mm_cuda_plan *plan;
    mm_cuda_entry *entries;
    uint16_t *plain, *staged; /* rows as BF16; in staged order */
} grouped;

static void *part(char **at, uint64_t bytes) {
    void *p = *at;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

static megamoe_status grouped_memory(mm_backend_state *state, uint32_t groups, uint64_t rows, uint32_t columns,
                                     bool fp4, grouped *g) {
    const uint64_t pitch = mm_round_up(columns, MM_CUDA_GROUP);
    const uint64_t need = groups * (sizeof *g->experts + sizeof *g->entries) + rows / 64 * sizeof *g->entries +
                          rows * (pitch + (fp4 ? columns : 0)) * 2 + 4096;
    if (!state->single_blocks || state->single_blocks->bytes < need) {
        void *base;
        MM_TRY(mm_driver_status(state->driver, state->driver->context_wait(), "waiting for the GPU"));
        mm_blocks_free(state, &state->single_blocks);
        MM_TRY(mm_block_create(state, need, "a grouped GEMM", &state->single_blocks, &base));
    }
    char *at = (char *)(uintptr_t)state->single_blocks->base;
    g->experts = part(&at, groups * sizeof *g->experts);
    g->plan = part(&at, sizeof *g->plan);
    g->entries = part(&at, (groups + rows / 64 + 1) * sizeof *g->entries);
    g->staged = part(&at, rows * pitch * 2);
    g->plain = (uint16_t *)at;
    return MEGAMOE_OK;
}

/* The groups' matrices as the down projections of as many experts. */
static megamoe_status grouped_table(mm_backend_state *state, const mm_matrix *matrices, uint32_t count,
                                    mm_cuda_expert *device, CUstream stream) {
    mm_cuda_expert *table = calloc(count, sizeof *table);
    if (!table) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u groups", count);
    for (uint32_t i = 0; i < count; i++) {
        table[i].down = mm_cuda_matrix_borrow(&matrices[i]);
        table[i].h_global = 1.0f;
    }
    CUresult result =
        state->driver->copy_to_device((CUdeviceptr)(uintptr_t)device, table, count * sizeof *table, stream);
    free(table); /* pageable memory: the driver has taken a copy */
    return mm_driver_status(state->driver, result, "copying a table of groups to the GPU");
}

static megamoe_status grouped_entered(mm_backend_state *state, const megamoe_tensor *rows, const quantized *operand,
                                      const mm_matrix *matrices, const int32_t *offsets, uint32_t group_count,
                                      const megamoe_tensor *output, CUstream stream) {
    const uint32_t row_count = (uint32_t)rows->extent[0], columns = matrices[0].columns;
    const bool fp4 = rows->dtype == MEGAMOE_E2M1X2;
    grouped g;
    MM_TRY(grouped_memory(state, group_count, row_count, columns, fp4, &g));
    MM_TRY(grouped_table(state, matrices, group_count, g.experts, stream));
    if (fp4) MM_TRY(dequantize_entered(state, rows, 0, operand, 0, 0, g.plain, stream)); /* exact in BF16 */
    mm_cuda_stage_args stage = {.source = fp4 ? g.plain : operand->codes,
                                .row_count = row_count,
                                .slots_per_token = 1,
                                .columns = columns,
                                .pitch = mm_round_up(columns, MM_CUDA_GROUP),
                                .global = 1.0f,
                                .staged = g.staged};
    MM_TRY(mm_cuda_stage_launch(state, &stage, row_count, false, stream));
    void *plan_arguments[] = {&offsets, &group_count, (void *)(uintptr_t)&row_count, &g.plan, &g.entries};
    mm_launch plan = {.grid = {1}, .threads = PLAN_THREADS};
    MM_TRY(mm_cuda_launch(state, stream, MM_PLAN_GROUPS, &plan, plan_arguments));
    mm_cuda_gemm_args args = {.experts = g.experts,
                              .plan = g.plan,
                              .entries = g.entries,
                              .list = MM_CUDA_LIST_MID,
                              .k = columns,
                              .n = matrices[0].rows,
                              .x = g.staged,
                              .x_pitch = stage.pitch,
                              .y = output->data,
                              .y_pitch = matrices[0].rows,
                              .plain_f32 = output->dtype == MEGAMOE_F32,
                              .biased = matrices[0].bias != NULL};
    void *arguments[] = {&args};
    mm_launch how = {.grid = {state->sm_count * 2}, .threads = SINGLE_THREADS, .shared_bytes = TILE_SHARED};
    return mm_cuda_launch(state, stream, mm_cuda_portable_tile(false, matrices[0].format), &how, arguments);
}

/* Weights of the host become copies, in the visit's memory. */
static megamoe_status grouped_weights(mm_visit *visit, const mm_matrix *matrices, uint32_t count, mm_matrix *reached) {
    for (uint32_t i = 0; i < count; i++) {
        const void *codes = NULL, *scales = NULL, *bias = NULL;
        const mm_matrix *m = &matrices[i];
        MM_TRY(mm_visit_read(visit, m->codes, mm_cuda_code_bytes(m), &codes));
        MM_TRY(mm_visit_read(visit, m->scales, mm_cuda_scale_bytes(m), &scales));
        MM_TRY(mm_visit_read(visit, m->bias, m->rows * m->bias_stride, &bias));
        reached[i] = *m;
        reached[i].codes = codes, reached[i].scales = scales, reached[i].bias = bias;
    }
    return MEGAMOE_OK;
}

static megamoe_status grouped_visit(mm_visit *visit, const megamoe_tensor *rows, const megamoe_tensor *row_scales,
                                    const mm_matrix *matrices, const int32_t *offsets, uint32_t group_count,
                                    const megamoe_tensor *output) {
    const bool fp4 = rows->dtype == MEGAMOE_E2M1X2;
    quantized operand = {0};
    megamoe_tensor y = *output;
    const void *ends = NULL;
    mm_matrix *reached = malloc(group_count * sizeof *reached);
    if (!reached) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u groups", group_count);
    megamoe_status status =
        mm_visit_read(visit, rows->data, fp4 ? group_bytes(rows, 2) : values_bytes(rows), &operand.codes);
    if (status == MEGAMOE_OK && fp4)
        status = mm_visit_read(visit, row_scales->data, group_bytes(rows, 16), &operand.scales);
    if (status == MEGAMOE_OK) status = mm_visit_read(visit, offsets, group_count * sizeof *offsets, &ends);
    if (status == MEGAMOE_OK) status = grouped_weights(visit, matrices, group_count, reached);
    if (status == MEGAMOE_OK) status = mm_visit_write(visit, output->data, values_bytes(output), &y.data);
    if (status == MEGAMOE_OK)
        status = grouped_entered(visit->state, rows, &operand, reached, ends, group_count, &y, visit->stream);
    free(reached);
    return status;
}

megamoe_status mm_cuda_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                    const megamoe_tensor *row_scales, const mm_matrix *matrices, const int32_t *offsets,
                                    uint32_t group_count, megamoe_tensor *output, void *stream) {
    mm_visit visit = {.state = state, .stream = stream};
    if (rows->extent[0] == 0) return MEGAMOE_OK;
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = grouped_visit(&visit, rows, row_scales, matrices, offsets, group_count, output);
    status = mm_visit_end(&visit, status);
    mm_cuda_leave(state);
    return status;
}
