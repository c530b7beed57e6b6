/*
 * The kernels of the CPU backend: one table, filled level by level (scalar < avx2 < avx512 < amx), each level
 * replacing what it does better. tests/kernels runs every entry at every level against scalar.
 *
 * Activations reach a GEMM as operands: rows of values exact in BF16 (bf16 activations as they are, nvfp4
 * ones as code * scale without the global scale), stored as fp32 or BF16 as the level likes. Weights are read
 * where they lie and become the exact BF16 or fp32 values code * scale, so products lose nothing and only
 * fp32 sums round.
 */
#ifndef MM_CPU_KERNELS_H
#define MM_CPU_KERNELS_H

#include <stdbool.h>

#include "numerics/nvfp4.h"
#include "weights.h"

#define MM_OPERAND_PAD 256u /* operand rows are zero-padded to a multiple of this many values */
#define MM_ROWS_MAX 32u     /* matrix rows of one GEMM call; a call's first row is a multiple of this */
#define MM_PACK_ROWS 16u    /* operand rows of one packed block */

/* What a scale byte means, ready to use: the scale itself, and its products with the 16 codes. */
typedef struct mm_scale_table {
    _Alignas(64) uint16_t products_bf16[256][16]; /* exact except E8M0 beyond BF16's range */
    _Alignas(64) uint8_t bf16_low[256];           /* the scales as BF16, byte by byte; E4M3 ones are also what FP8 */
    _Alignas(64) uint8_t bf16_high[256];          /* weights mean */
    _Alignas(64) float scales[256];
} mm_scale_table;

typedef struct mm_gemm {
    const mm_matrix *matrix;
    const mm_scale_table *table;   /* E4M3 for NVFP4 and FP8, E8M0 for MXFP4 */
    uint32_t row_first, row_count; /* of the matrix; row_count <= MM_ROWS_MAX */
    const uint8_t *operands;       /* row r at operands + operand_pitch * (operand_index ? operand_index[r] : r) */
    size_t operand_pitch;          /* bytes, a multiple of 64 */
    const uint32_t *operand_index;
    const uint8_t *packed; /* the same operands packed, or NULL; a block of MM_PACK_ROWS after the other */
    uint32_t count;        /* operand rows, at least 1 */
    float *sums;           /* sums[r * sums_pitch + n] = operand row r . W row (row_first + n), without globals */
    size_t sums_pitch;
    void *panel;            /* scratch of this thread, MM_PANEL_BYTES, aligned to 64 */
    uint32_t deciding_rows; /* rows that choose the kernel where kernels differ in bits; UINT32_MAX: invariant */
    bool nvfp4;             /* operands are code * scale of NVFP4 */
} mm_gemm;

static inline size_t padded_columns(uint32_t columns) {
    return ((size_t)columns + MM_OPERAND_PAD - 1) / MM_OPERAND_PAD * MM_OPERAND_PAD;
}

/* Bytes of a packed block of operands, `per_value` as mm_kernels.packs says; its last 64 are the level's own. */
static inline size_t packed_block_bytes(uint32_t columns, unsigned per_value) {
    return per_value ? MM_PACK_ROWS * padded_columns(columns) * per_value + 64 : 0;
}

typedef struct mm_quantize_counts {
    uint64_t saturated_blocks, nonfinite_blocks;
} mm_quantize_counts;

typedef struct mm_combine {
    uint32_t columns, count;
    const float *const *rows; /* [count] results of L2 in slot order */
    const float *weights;     /* [count], or NULL: all 1 */
    const float *shared;      /* or NULL */
    uint16_t *output;         /* BF16 [columns] */
} mm_combine;

typedef struct mm_kernels {
    const char *isa;
    bool operands_bf16; /* operands are BF16, else fp32 */
    /* Operand rows of one GEMM call at most, a multiple of MM_PACK_ROWS; more of an expert dequantize its weights anew.
     */
    uint32_t group_rows;

    /* values[i] = hidden i as fp32; F32 input is rounded to BF16. count is a multiple of 16 everywhere. */
    void (*load)(const void *hidden, megamoe_dtype dtype, uint32_t count, float *values);
    /* The largest finite magnitude, 0 if there is none. */
    float (*amax)(const float *values, uint32_t count);
    /* Values to operand form, rounded to BF16. */
    void (*store)(const float *values, uint32_t count, void *operand);
    /* NVFP4 under g: codes [count / 2], scales [count / 16], and code * scale as fp32 in `values` itself. */
    void (*quantize)(float *values, uint32_t count, float g, uint8_t *codes, uint8_t *scales,
                     mm_quantize_counts *counts);
    void (*gemm)(const mm_gemm *gemm);
    /*
     * A level whose GEMM wants operands in another order where `deciding_rows` and `nvfp4` decide: `packs` gives the
     * bytes per value of that order, 4 (for at most MM_PACK_ROWS rows), 2, or 0 for operands as they are.
     * `pack` brings rows first .. of one block there. Both NULL: never.
     */
    unsigned (*packs)(const mm_matrix *matrix, uint32_t deciding_rows, bool nvfp4);
    void (*pack)(const mm_gemm *gemm, uint32_t columns, uint32_t first, uint8_t *packed);
    /* The same for the F32 weights [.., columns] of a router, which need not be aligned; gemm->matrix is not
     * read. */
    void (*gemm_f32)(const void *weights, uint32_t columns, const mm_gemm *gemm);
    /* h[i] = activation(gate[i], up[i]) * weight; gate may be NULL (relu2). */
    void (*activate)(const mm_swiglu *f, const float *gate, const float *up, float weight, uint32_t count, float *h);
    void (*combine)(const mm_combine *combine);
    /* The tile loop of `gemm` over a panel that is there already: what the arithmetic gives without
     * dequantizing. */
    void (*tiles)(const mm_gemm *gemm, uint32_t columns);
} mm_kernels;

#define MM_LEVELS_MAX 5

/* Every level this machine runs, scalar first, none above MEGAMOE_ISA; a level with two forms (avx512) comes
 * twice. Returns how many; the last is the best. */
uint32_t mm_kernels_levels(mm_kernels levels[MM_LEVELS_MAX]);

void mm_scale_table_e4m3(mm_scale_table *table);
void mm_scale_table_e8m0(mm_scale_table *table);

#define MM_PANEL_BYTES                                                                                                 \
    ((size_t)512 * 1024) /* scratch of a GEMM: weights of a segment and sums of a block                                \
                          */

/* Level by level: each fills what it does better. */
void mm_kernels_scalar(mm_kernels *kernels);
void mm_kernels_avx2(mm_kernels *kernels);
void mm_kernels_avx2_rows(mm_kernels *kernels);
void mm_kernels_avx512(mm_kernels *kernels);
void mm_kernels_avx512_bf16(mm_kernels *kernels);
void mm_kernels_amx(mm_kernels *kernels);

#endif
