/*
 * What host code and kernels agree upon: the weights as kernels see them, the plan a batch is run by, and one struct
 * of arguments per kernel. Compiled as C11 and by nvcc; every pointer is a device pointer.
 */
#ifndef MM_CUDA_ARGS_H
#define MM_CUDA_ARGS_H

#include "numerics/swiglu.h"
#include "weights.h"

#include <cuda.h>

enum {
    MM_CUDA_GROUP = 128,      /* K is permuted within groups of this many values; staged rows are padded to it */
    MM_CUDA_DECODE_ROWS = 16, /* experts with at most this many rows go to the decode kernels */
    MM_CUDA_DECODE_LIGHT = 8, /* and those with at most this many need one 8-wide MMA per weight fragment, not two */
    MM_CUDA_MID_ROWS = 64,    /* widest token tile of the mid-range tile kernels */
    MM_CUDA_WIDE_ROWS = 160,  /* and of the wide ones: 2 x m64 x n160 accumulators fill a warpgroup's registers */
    MM_CUDA_PLANES = 3,       /* BF16 terms that add up to an fp32 router weight exactly */
};

/* mm_matrix with device pointers. */
typedef struct mm_cuda_matrix {
    const uint8_t *codes, *scales;
    const void *bias;
    uint64_t row_bytes, scale_row_bytes, bias_stride;
    uint32_t format, scale_f32, bias_f32;
    uint32_t block_rows, block_columns;
    float global;
} mm_cuda_matrix;

typedef struct mm_cuda_expert {
    mm_cuda_matrix gate, up, down;
    float h_global; /* nvfp4: global scale of this expert's intermediate; 1 otherwise */
} mm_cuda_expert;

/* A run of sorted rows of one expert that one kernel works on against all of the expert's weight rows. */
typedef struct mm_cuda_entry {
    int32_t row, count, expert, unused;
} mm_cuda_entry;

enum { MM_CUDA_LIST_DECODE, MM_CUDA_LIST_MID, MM_CUDA_LIST_WIDE, MM_CUDA_LIST_COUNT };

typedef struct mm_cuda_counters { /* in the order of megamoe_counters */
    unsigned long long tokens, unrouted_tokens, skipped_slots, bad_slots, saturated_blocks, nonfinite_blocks;
} mm_cuda_counters;

/* The head of the plan: how many entries each list has; the lists follow in their own arrays. */
typedef struct mm_cuda_plan {
    int32_t count[MM_CUDA_LIST_COUNT];
    int32_t heavy; /* decode entries with more than MM_CUDA_DECODE_LIGHT rows; they come first */
    int32_t rows;  /* sorted rows in all */
} mm_cuda_plan;

typedef struct mm_cuda_plan_args {
    const int32_t *expert_ids;  /* [T, K] */
    const int32_t *local_index; /* [E] */
    uint32_t token_count, slots_per_token, expert_total, expert_count;
    uint32_t decode_rows, mid_rows; /* experts with at most so many rows go to DECODE, MID; the others to WIDE */
    uint32_t entry_rows[MM_CUDA_LIST_COUNT]; /* entries are split at these many rows */
    uint32_t block_count;   /* of the counting and placing kernels; pairs are dealt out in equal runs */
    uint32_t warp_count;    /* of a block that count: as many as shared memory has counters for */
    uint32_t *block_counts; /* [block_count, expert_count] */
    int32_t *offsets;       /* [expert_count + 1] */
    int32_t *row_pair;      /* [rows] pair = token * K + slot of a sorted row */
    int32_t *pair_row;      /* [T, K] the inverse; -1: the slot adds nothing here */
    mm_cuda_plan *plan;
    mm_cuda_entry *entries[MM_CUDA_LIST_COUNT];
    mm_cuda_counters *counters;
    unsigned long long *expert_tokens; /* [E] */
} mm_cuda_plan_args;

/* Rows to the K-permuted BF16 that the GEMMs read; nvfp4: quantized first, so that value * scale is what is written. */
typedef struct mm_cuda_stage_args {
    const void *source;              /* [., columns] BF16 or F32 */
    uint32_t source_f32, round_bf16; /* F32 hidden states are rounded to BF16 first; F32 intermediates are not */
    const mm_cuda_plan *plan;        /* rows in plan->rows; NULL: row_count */
    const int32_t *row_pair;         /* row r is source row row_pair[r] / slots_per_token; NULL: r */
    const int32_t *pair_row;         /* with row_pair: blocks are counted at a token's first row only */
    uint32_t row_count, slots_per_token, columns, pitch; /* pitch of `staged`, in values */
    uint32_t quantize, global_mode;                      /* nvfp4; MEGAMOE_GLOBAL_* */
    float global;                                        /* STATIC and UNIT, when expert_rows is NULL */
    const mm_cuda_expert *experts; /* with offsets: the global scale is the row's expert's h_global */
    const int32_t *offsets;
    uint32_t expert_count, skip_rows; /* with offsets: experts with at most so many rows are left out */
    uint16_t *staged;                 /* [rows, pitch] or NULL */
    float *globals;                   /* [rows] or NULL */
    uint8_t *codes, *scales;          /* [rows, columns / 2], [rows, columns / 16], or NULL */
    mm_cuda_counters *counters;       /* or NULL */
} mm_cuda_stage_args;

/* One expert GEMM over every entry of a list: L1 with its activation, or L2, or a plain product. */
typedef struct mm_cuda_gemm_args {
    const mm_cuda_expert *experts;
    const CUtensorMap *maps; /* per expert, see maps.h; NULL where the kernel uses none */
    const mm_cuda_plan *plan;
    const mm_cuda_entry *entries;
    uint32_t list;      /* which count of the plan */
    uint32_t row_count; /* plan NULL: rows 0 .. row_count - 1, all of experts[0] */
    uint32_t k, n;      /* n: I for L1, H for L2 */
    const uint16_t *x;  /* [rows, x_pitch] staged */
    uint32_t x_pitch, y_pitch;
    const float *row_global; /* [rows] g_a, or NULL: x_global */
    float x_global;
    const float *weights; /* [T, K] routing weights applied here, through row_pair, or NULL */
    const int32_t *row_pair;
    uint32_t gated, biased;
    uint32_t quantized;         /* tiles: h is written as fp32 [rows, y_pitch], to be staged; decode: quantized here */
    float *h32;                 /* decode, quantized: h before that as well, [rows, n]; or NULL */
    mm_cuda_counters *counters; /* decode, quantized: of saturated blocks */
    uint32_t plain_f32;         /* L2 kernels: y is fp32 rather than BF16 */
    void *y;
    mm_swiglu swiglu;
    /* decode: see decode.cu */
    float *scratch;
    uint32_t slot_count, slot_bytes, code_pitch, scale_pitch, scale_row_bytes, weight_light, weight_heavy;
    uint32_t next_weight_heavy,
        next_items; /* L1: items of L2 per multiprocessor to fetch into the cache at the end; 0: none */
} mm_cuda_gemm_args;

typedef struct mm_cuda_combine_args {
    const uint16_t *p; /* [rows, columns] BF16 results of L2 */
    const int32_t *pair_row;
    const float *weights; /* [T, K]; NULL: 1 (already applied) */
    const float *shared;  /* [T, columns] or NULL */
    uint32_t token_count, slots_per_token, columns;
    uint32_t early; /* plan and weights are complete when this begins, and may be read before L2 has ended */
    uint16_t *output;
} mm_cuda_combine_args;

typedef struct mm_cuda_route_args {
    const void *hidden;
    uint32_t hidden_f32, token_count, columns, expert_total;
    const void *weight; /* [E, H] BF16 or F32 */
    uint32_t weight_f32;
    const float *bias; /* [E] or NULL */
    const int32_t *token_ids, *token_experts;
    uint32_t vocabulary;
    uint32_t slots_per_token, score, group_count, groups_per_token, normalize;
    float scale;
    uint32_t split_count; /* K slices of the logits, added in order */
    float *logits;        /* [split_count, T, E] */
    int32_t *expert_ids;
    float *weights;
    mm_cuda_counters *counters;
} mm_cuda_route_args;

#endif
