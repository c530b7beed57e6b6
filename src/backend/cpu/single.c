/* The stages that engines call one by one: quantize, dequantize, grouped GEMM. They may allocate; a layer's
 * run may not. */
#include <stdlib.h>

#include "backend/cpu/cpu.h"
#include "error.h"

static size_t element_bytes(megamoe_dtype dtype) {
    return dtype == MEGAMOE_F32 ? 4 : 2;
}

static size_t elements_of(const megamoe_tensor *rows) {
    return (size_t)rows->extent[0] * (size_t)rows->extent[1];
}

/* ---- quantize ---- */

typedef struct quantize_job {
    mm_backend_state *state;
    const megamoe_tensor *values;
    const float *global;
    const megamoe_tensor *codes, *scales, *globals;
    float *rows; /* [threads, columns] */
} quantize_job;

static void quantize_row(void *context, uint32_t unit, uint32_t thread) {
    const quantize_job *job = context;
    const mm_kernels *kernels = &job->state->kernels;
    size_t columns = (size_t)job->values->extent[1], row = unit;
    const uint8_t *source = (const uint8_t *)job->values->data + row * columns * element_bytes(job->values->dtype);
    float *values = job->rows + thread * columns, g;
    if (job->values->dtype == MEGAMOE_F32)
        memcpy(values, source, columns * sizeof *values);
    else
        kernels->load(source, MEGAMOE_BF16, (uint32_t)columns, values);
    g = job->global ? *job->global : mm_nvfp4_global_from_amax(kernels->amax(values, (uint32_t)columns));
    kernels->quantize(values, (uint32_t)columns, g, (uint8_t *)job->codes->data + row * (columns / 2),
                      (uint8_t *)job->scales->data + row * (columns / 16), &job->state->tallies[thread].blocks);
    ((float *)job->globals->data)[row] = g;
}

megamoe_status mm_cpu_quantize(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                               megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream) {
    quantize_job job = {state, values, global, codes, scales, globals, NULL};
    (void)stream;
    job.rows = malloc(state->threads * (size_t)values->extent[1] * sizeof *job.rows + 1);
    if (!job.rows)
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to quantize rows of %lld", (long long)values->extent[1]);
    mm_pool_run(state->pool, (uint32_t)values->extent[0], elements_of(values) * 8, quantize_row, &job);
    for (uint32_t t = 0; t < state->threads; t++) state->tallies[t] = (mm_cpu_tally){0}; /* no layer to count for */
    free(job.rows);
    return MEGAMOE_OK;
}

/* ---- dequantize ---- */

typedef struct dequantize_job {
    mm_backend_state *state;
    const megamoe_tensor *codes, *scales, *globals, *values;
} dequantize_job;

static void dequantize_row(void *context, uint32_t unit, uint32_t thread) {
    const dequantize_job *job = context;
    bool e8m0 = job->scales->dtype == MEGAMOE_E8M0;
    const float *table = e8m0 ? job->state->e8m0.scales : job->state->e4m3.scales;
    size_t columns = (size_t)job->codes->extent[1], row = unit, group = e8m0 ? 32 : 16;
    const uint8_t *codes = (const uint8_t *)job->codes->data + row * (columns / 2);
    const uint8_t *scales = (const uint8_t *)job->scales->data + row * (columns / group);
    const float *globals = job->globals ? job->globals->data : NULL;
    float g = globals ? globals[job->globals->extent[0] == 1 ? 0 : row] : 1.0f;
    (void)thread;
    for (size_t k = 0; k < columns; k++) {
        float value = mm_e2m1_to_f32(mm_e2m1_unpack(codes, k)) * table[scales[k / group]] * g;
        if (job->values->dtype == MEGAMOE_F32)
            ((float *)job->values->data)[row * columns + k] = value;
        else
            ((uint16_t *)job->values->data)[row * columns + k] = mm_bf16_from_f32(value);
    }
}

megamoe_status mm_cpu_dequantize(mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                 const megamoe_tensor *globals, megamoe_tensor *values, void *stream) {
    dequantize_job job = {state, codes, scales, globals, values};
    (void)stream;
    mm_pool_run(state->pool, (uint32_t)codes->extent[0], elements_of(codes) * 8, dequantize_row, &job);
    return MEGAMOE_OK;
}

/* ---- grouped GEMM ---- */

typedef struct grouped_job {
    mm_backend_state *state;
    const megamoe_tensor *rows, *row_scales, *output;
    const mm_matrix *matrices;
    const int32_t *offsets;
    uint32_t row_blocks; /* of MM_ROWS_MAX matrix rows */
    size_t operand_pitch, thread_bytes;
    uint8_t *operands, *threads, *packed;
    size_t *packed_offsets; /* [group_count] in packed; SIZE_MAX: the group's operands are not packed */
} grouped_job;

static uint32_t group_begin(const grouped_job *job, uint32_t group) {
    return group ? (uint32_t)job->offsets[group - 1] : 0;
}

static bool is_nvfp4(const grouped_job *job) {
    return job->rows->dtype != MEGAMOE_BF16;
}

/* Rows that choose the kernel of a group. */
static uint32_t deciding_rows(const grouped_job *job, uint32_t group) {
    return job->state->batch_invariant ? UINT32_MAX : (uint32_t)job->offsets[group] - group_begin(job, group);
}

/* Fills packed_offsets and returns the bytes they need in all. */
static size_t plan_packing(const grouped_job *job, uint32_t group_count) {
    size_t bytes = 0;
    for (uint32_t group = 0; group < group_count; group++) {
        const mm_matrix *m = &job->matrices[group];
        const mm_kernels *kernels = &job->state->kernels;
        uint32_t count = (uint32_t)job->offsets[group] - group_begin(job, group);
        unsigned per_value = kernels->packs && count ? kernels->packs(m, deciding_rows(job, group), is_nvfp4(job)) : 0;
        job->packed_offsets[group] = per_value ? bytes : SIZE_MAX;
        bytes += (count + MM_PACK_ROWS - 1) / MM_PACK_ROWS * packed_block_bytes(m->columns, per_value);
    }
    return bytes;
}

static void pack_group(void *context, uint32_t unit, uint32_t thread) {
    const grouped_job *job = context;
    const mm_matrix *m = &job->matrices[unit];
    mm_gemm gemm = {.matrix = m,
                    .deciding_rows = deciding_rows(job, unit),
                    .nvfp4 = is_nvfp4(job),
                    .operands = job->operands + group_begin(job, unit) * job->operand_pitch,
                    .operand_pitch = job->operand_pitch,
                    .count = (uint32_t)job->offsets[unit] - group_begin(job, unit)};
    (void)thread;
    if (job->packed_offsets[unit] == SIZE_MAX) return;
    size_t block_bytes = packed_block_bytes(m->columns, job->state->kernels.packs(m, gemm.deciding_rows, gemm.nvfp4));
    for (uint32_t r = 0; r < gemm.count; r += MM_PACK_ROWS)
        job->state->kernels.pack(&gemm, m->columns, r,
                                 job->packed + job->packed_offsets[unit] + r / MM_PACK_ROWS * block_bytes);
}

static void store_row(void *context, uint32_t unit, uint32_t thread) {
    const grouped_job *job = context;
    const mm_kernels *kernels = &job->state->kernels;
    size_t columns = (size_t)job->rows->extent[1], row = unit;
    float *values = (float *)(job->threads + thread * job->thread_bytes);
    if (job->rows->dtype == MEGAMOE_BF16) {
        kernels->load((const uint16_t *)job->rows->data + row * columns, MEGAMOE_BF16, (uint32_t)columns, values);
    } else {
        const uint8_t *codes = (const uint8_t *)job->rows->data + row * (columns / 2);
        const uint8_t *scales = (const uint8_t *)job->row_scales->data + row * (columns / 16);
        for (size_t k = 0; k < columns; k++)
            values[k] = mm_e2m1_to_f32(mm_e2m1_unpack(codes, k)) * job->state->e4m3.scales[scales[k / 16]];
    }
    mm_cpu_operand_store(kernels, values, (uint32_t)columns, job->operands + row * job->operand_pitch);
}

/* Rows n .. of one group's matrix against rows first .. of the group, at most group_rows. */
static void multiply_block(const grouped_job *job, uint32_t group, uint32_t n, uint32_t first, uint32_t count,
                           uint32_t thread) {
    const mm_matrix *m = &job->matrices[group];
    const mm_kernels *kernels = &job->state->kernels;
    size_t row = (size_t)group_begin(job, group) + first;
    float *sums = (float *)(job->threads + thread * job->thread_bytes);
    mm_gemm gemm = {.matrix = m,
                    .table = mm_cpu_table(job->state, m),
                    .row_first = n,
                    .row_count = m->rows - n < MM_ROWS_MAX ? m->rows - n : MM_ROWS_MAX,
                    .operands = job->operands + row * job->operand_pitch,
                    .operand_pitch = job->operand_pitch,
                    .count = count,
                    .sums = sums,
                    .sums_pitch = MM_ROWS_MAX,
                    .panel = sums + (size_t)kernels->group_rows * MM_ROWS_MAX,
                    .deciding_rows = deciding_rows(job, group),
                    .nvfp4 = is_nvfp4(job)};
    if (job->packed_offsets[group] != SIZE_MAX)
        gemm.packed =
            job->packed + job->packed_offsets[group] +
            first / MM_PACK_ROWS * packed_block_bytes(m->columns, kernels->packs(m, gemm.deciding_rows, gemm.nvfp4));
    kernels->gemm(&gemm);
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t i = 0; i < gemm.row_count; i++) {
            size_t at = (row + r) * m->rows + n + i;
            float value = sums[r * MM_ROWS_MAX + i] * m->global;
            if (job->output->dtype == MEGAMOE_F32)
                ((float *)job->output->data)[at] = value;
            else
                ((uint16_t *)job->output->data)[at] = mm_bf16_from_f32(value);
        }
}

static void multiply_unit(void *context, uint32_t unit, uint32_t thread) {
    const grouped_job *job = context;
    uint32_t group = unit / job->row_blocks, n = unit % job->row_blocks * MM_ROWS_MAX;
    uint32_t count = (uint32_t)job->offsets[group] - group_begin(job, group), most = job->state->kernels.group_rows;
    for (uint32_t r = 0; r < count; r += most)
        multiply_block(job, group, n, r, count - r < most ? count - r : most, thread);
}

megamoe_status mm_cpu_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                   const megamoe_tensor *row_scales, const mm_matrix *matrices, const int32_t *offsets,
                                   uint32_t group_count, megamoe_tensor *output, void *stream) {
    uint32_t count = (uint32_t)rows->extent[0], columns = (uint32_t)rows->extent[1];
    grouped_job job = {.state = state,
                       .rows = rows,
                       .row_scales = row_scales,
                       .output = output,
                       .matrices = matrices,
                       .offsets = offsets,
                       .row_blocks = (matrices[0].rows + MM_ROWS_MAX - 1) / MM_ROWS_MAX,
                       .operand_pitch = mm_cpu_operand_bytes(&state->kernels, columns)};
    size_t sums_bytes = (size_t)state->kernels.group_rows * MM_ROWS_MAX * sizeof(float), operand_bytes, packed_bytes;
    size_t matrix_bytes = group_count * (size_t)matrices[0].rows * matrices[0].row_bytes;
    (void)stream;
    job.packed_offsets = malloc(group_count * sizeof *job.packed_offsets);
    if (!job.packed_offsets) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u groups", group_count);
    job.thread_bytes = sums_bytes + MM_PANEL_BYTES + (size_t)columns * sizeof(float);
    job.thread_bytes = (job.thread_bytes + 63) / 64 * 64;
    operand_bytes = (count ? count : 1) * job.operand_pitch;
    packed_bytes = plan_packing(&job, group_count);
    job.operands = aligned_alloc(64, operand_bytes + packed_bytes + state->threads * job.thread_bytes);
    if (!job.operands) {
        free(job.packed_offsets);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u operand rows", count);
    }
    job.packed = job.operands + operand_bytes;
    job.threads = job.packed + packed_bytes;
    mm_pool_run(state->pool, count, operand_bytes, store_row, &job);
    mm_pool_run(state->pool, group_count, packed_bytes, pack_group, &job);
    mm_pool_run(state->pool, group_count * job.row_blocks, matrix_bytes + operand_bytes * job.row_blocks, multiply_unit,
                &job);
    free(job.packed_offsets);
    free(job.operands);
    return MEGAMOE_OK;
}
