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
    MM_CUDA_GROUP = 128,        /* K is permuted within groups of this many values; staged rows are padded to it */
    MM_CUDA_DECODE_ROWS = 16,   /* experts with at most this many rows go to the decode kernels */
    MM_CUDA_DECODE_LIGHT = 8,   /* and those with at most this many need one 8-wide MMA per weight fragment, not two */
    MM_CUDA_MID_ROWS = 64,      /* widest token tile of the mid-range tile kernels */
    MM_CUDA_WIDE_ROWS = 152,    /* and of the wide ones: 2 x m64 x n152 accumulators fill a warpgroup's registers */
    MM_CUDA_ROUTE_PARTS = 8,    /* parts of K, whose sums are added to a logit, */
    MM_CUDA_ROUTE_ROWS = 16384, /* and parts times tokens: there are parts where there are few tokens */
    MM_CUDA_PLANES = 3,         /* BF16 terms that add up to an fp32 router weight exactly */
};

/*
 * A decode instance of `quarters` (see decode.cu): how many CTAs share K, and, of one CTA's share, the pitch of a row
 * in a slot of 32 rows. Pitches shift banks: they are 16-byte steps off the multiples of 64, at which eight rows would
 * meet.
 */
#define MM_CUDA_DECODE_CTAS(quarters) ((quarters) > 7 ? 2 : 1)
#define MM_CUDA_DECODE_CODE_PITCH(share) ((share)*256u + 32u)
#define MM_CUDA_DECODE_SCALE_BYTES(mx, share) ((share) * ((mx) ? 16u : 32u))
#define MM_CUDA_DECODE_SCALE_PITCH(mx, share)                                                                          \
    (MM_CUDA_DECODE_SCALE_BYTES(mx, share) + (MM_CUDA_DECODE_SCALE_BYTES(mx, share) % 64u == 0 ? 16u : 0u))
#define MM_CUDA_DECODE_SLOT_BYTES(mx, share)                                                                           \
    (32u * (MM_CUDA_DECODE_CODE_PITCH(share) + MM_CUDA_DECODE_SCALE_PITCH(mx, share)))

/* Token tiles of the tile kernels of sm90, ascending; the last are MM_CUDA_MID_ROWS and MM_CUDA_WIDE_ROWS. */
#define MM_CUDA_MID_WIDTHS 24, 32, 40, 48, 64
#define MM_CUDA_WIDE_WIDTHS 80, 96, 112, 128, 136, 152
enum { MM_CUDA_WIDTHS_MAX = 6 };

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
    uint32_t expert_count;
    uint16_t *staged;           /* [rows, pitch] or NULL */
    float *globals;             /* [rows] or NULL */
    uint8_t *codes, *scales;    /* [rows, columns / 2], [rows, columns / 16], or NULL */
    mm_cuda_counters *counters; /* or NULL */
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
    uint32_t quantized; /* h is written as fp32 [rows, y_pitch], to be staged; else staged BF16 */
    uint32_t plain_f32; /* L2 kernels: y is fp32 rather than BF16 */
    void *y;
    mm_swiglu swiglu;
    /* decode: see decode.cu */
    uint32_t slot_count, weight_light, weight_heavy, scale_row_bytes;
    uint32_t next_weight_heavy,
        next_items; /* L1: items of L2 per multiprocessor to fetch into the cache at the end; 0: none */
    uint32_t slot_bytes, code_pitch; /* dense: see dense.cuh */
} mm_cuda_gemm_args;

/* One GEMM of the shared expert over few tokens, see dense.cuh. Of `gemm`: experts, maps (gate, up, down), row_count,
 * k, n, x in natural order, pitches, gated, biased, y, swiglu, slots. */
typedef struct mm_cuda_dense_args {
    mm_cuda_gemm_args gemm;
    uint32_t x_f32; /* x is fp32, to be rounded to BF16 */
    uint32_t chunks, chunk_units, eights_per_cta;
    uint32_t zero; /* 0, which the compiler does not know */
} mm_cuda_dense_args;

/* A whole FP8 expert to BF16: gate, up [intermediate, hidden] and down [hidden, intermediate], one after the other. */
typedef struct mm_cuda_widen_args {
    const mm_cuda_expert *expert;
    uint32_t hidden, intermediate;
    uint16_t *bf16;
} mm_cuda_widen_args;

/* How the tile kernels of sm90 copy a stage of token rows: one box per width, all of the stage's K in one copy. */
typedef struct mm_cuda_token_maps {
    CUtensorMap width[MM_CUDA_WIDTHS_MAX];
} mm_cuda_token_maps;

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
    uint32_t split_count; /* slices of K that mm_route_logits adds in order */
    uint32_t part_count;  /* sums over parts of K that are added to a logit, in order */
    uint32_t token_warps; /* of mm_route_choose: 1, 2, 4 or 8 */
    float *logits;        /* [part_count, T, E] */
    int32_t *expert_ids;
    float *weights;
    mm_cuda_counters *counters;
} mm_cuda_route_args;

#endif
