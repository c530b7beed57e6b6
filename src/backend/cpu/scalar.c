/* The scalar level: the definition of every kernel, and the fallback. Written to be read. */
#include "backend/cpu/kernels.h"

#include "numerics/e8m0.h"
#include "numerics/swiglu.h"

static void load(const void *hidden, megamoe_dtype dtype, uint32_t count, float *values) {
    for (uint32_t i = 0; i < count; i++)
        values[i] = dtype == MEGAMOE_F32 ? mm_bf16_round(((const float *)hidden)[i])
                                         : mm_bf16_to_f32(((const uint16_t *)hidden)[i]);
}

static float amax(const float *values, uint32_t count) {
    float largest = 0.0f;
    for (uint32_t i = 0; i < count; i++) {
        float a = fabsf(values[i]);
        if (a > largest && a < INFINITY) largest = a;
    }
    return largest;
}

static void store(const float *values, uint32_t count, void *operand) {
    for (uint32_t i = 0; i < count; i++) ((float *)operand)[i] = mm_bf16_round(values[i]);
}

static void quantize(float *values, uint32_t count, float g, uint8_t *codes, uint8_t *scales,
                     mm_quantize_counts *counts) {
    for (uint32_t b = 0; b < count / MM_NVFP4_BLOCK; b++) {
        float *block = values + b * MM_NVFP4_BLOCK;
        mm_nvfp4_block_report report = mm_nvfp4_block_quantize(block, g, codes + b * 8, scales + b);
        counts->saturated_blocks += report.saturated;
        counts->nonfinite_blocks += report.nonfinite;
        for (uint32_t i = 0; i < MM_NVFP4_BLOCK; i++)
            block[i] = mm_e2m1_to_f32(mm_e2m1_unpack(codes + b * 8, i)) * mm_e4m3_to_f32(scales[b]);
    }
}

/* The scale of FP8 block (n, k), F32 or E8M0. */
static float fp8_scale(const mm_matrix *m, uint32_t n, uint32_t k) {
    const uint8_t *row = m->scales + n / m->block_rows * m->scale_row_bytes;
    float scale;
    if (m->scale_dtype == MEGAMOE_E8M0) return mm_e8m0_to_f32(row[k / m->block_columns]);
    memcpy(&scale, row + k / m->block_columns * sizeof scale, sizeof scale);
    return scale;
}

/* Columns of one row that are dequantized at a time, into the panel. */
enum { SPAN = 4096 };

static void dequantize_fp4(const mm_gemm *g, uint32_t n, uint32_t begin, uint32_t count, float *values) {
    const mm_matrix *m = g->matrix;
    const uint8_t *codes = m->codes + n * m->row_bytes, *scales = m->scales + n * m->scale_row_bytes;
    uint32_t group = m->format == MM_MXFP4 ? 32 : 16;
    for (uint32_t k = begin; k < begin + count; k++)
        values[k - begin] = mm_e2m1_to_f32(mm_e2m1_unpack(codes, k)) * g->table->scales[scales[k / group]];
}

/* Row n as fp32 values code * scale, without the global scale. */
static void dequantize_row(const mm_gemm *g, uint32_t n, uint32_t begin, uint32_t count, float *values) {
    const mm_matrix *m = g->matrix;
    const uint8_t *codes = m->codes + n * m->row_bytes;
    if (m->format == MM_NVFP4 || m->format == MM_MXFP4) dequantize_fp4(g, n, begin, count, values);
    for (uint32_t k = begin; k < begin + count && m->format == MM_BF16; k++) {
        uint16_t bits;
        memcpy(&bits, codes + 2 * (size_t)k, sizeof bits);
        values[k - begin] = mm_bf16_to_f32(bits);
    }
    for (uint32_t k = begin; k < begin + count && m->format == MM_FP8; k++)
        values[k - begin] = mm_e4m3_to_f32(codes[k]) * fp8_scale(m, n, k);
}

/* Adds columns begin .. begin + count, in order of k, to the sums of row i of the call. */
static void multiply_row(const mm_gemm *g, uint32_t i, uint32_t begin, uint32_t count, const float *weights) {
    for (uint32_t r = 0; r < g->count; r++) {
        const float *a =
            (const float *)(g->operands + g->operand_pitch * (g->operand_index ? g->operand_index[r] : r)) + begin;
        float *sum = &g->sums[r * g->sums_pitch + i];
        if (begin == 0) *sum = 0.0f;
        for (uint32_t k = 0; k < count; k++) *sum += a[k] * weights[k];
    }
}

static void gemm(const mm_gemm *g) {
    uint32_t columns = g->matrix->columns;
    for (uint32_t i = 0; i < g->row_count; i++)
        for (uint32_t k = 0; k < columns; k += SPAN) {
            uint32_t count = columns - k < SPAN ? columns - k : SPAN;
            dequantize_row(g, g->row_first + i, k, count, g->panel);
            multiply_row(g, i, k, count, g->panel);
        }
}

static void gemm_f32(const void *weights, uint32_t columns, const mm_gemm *g) {
    for (uint32_t i = 0; i < g->row_count; i++)
        for (uint32_t k = 0; k < columns; k += SPAN) {
            uint32_t count = columns - k < SPAN ? columns - k : SPAN;
            size_t at = (g->row_first + i) * (size_t)columns + k; /* copied: a file's tensors need not be aligned */
            memcpy(g->panel, (const uint8_t *)weights + at * sizeof(float), count * sizeof(float));
            multiply_row(g, i, k, count, g->panel);
        }
}

static void activate(const mm_swiglu *f, const float *gate, const float *up, float weight, uint32_t count, float *h) {
    for (uint32_t i = 0; i < count; i++) h[i] = mm_swiglu_apply(f, gate ? gate[i] : 0.0f, up[i]) * weight;
}

static void combine(const mm_combine *c) {
    for (uint32_t n = 0; n < c->columns; n++) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < c->count; k++) sum += c->weights ? c->weights[k] * c->rows[k][n] : c->rows[k][n];
        if (c->shared) sum += c->shared[n];
        c->output[n] = mm_bf16_from_f32(sum);
    }
}

void mm_kernels_scalar(mm_kernels *kernels) {
    *kernels = (mm_kernels){.isa = "scalar",
                            .group_rows = 1024,
                            .load = load,
                            .amax = amax,
                            .store = store,
                            .quantize = quantize,
                            .gemm = gemm,
                            .gemm_f32 = gemm_f32,
                            .activate = activate,
                            .combine = combine};
}
