/*
 * The argument structs of the kernels in this folder: plain data, shared by the kernels and the host that
 * launches them. Device pointers unless a comment says otherwise. R is the number of token rows (sorted by
 * expert), G the number of experts (groups).
 */
#ifndef MM_SM100_ARGUMENTS_H
#define MM_SM100_ARGUMENTS_H

#include "backend/sm100/tensor_map.h"
#include "numerics/swiglu.h"

/* What a wait that never ended leaves behind; one per layer, zero while all is well. See record.h. */
struct sm100_record {
    uint32_t claimed; /* by the first thread that gave up */
    uint32_t kernel, barrier, index, parity;
    uint32_t cta, thread, group, m_tile, row;
};

struct sm100_gemm_args {
    struct sm100_tensor_map weights[2];       /* u8 [G, rows, columns / 2]: gate and up, or down and nothing */
    struct sm100_tensor_map weight_scales[2]; /* u16 [blocks, 256] */
    struct sm100_tensor_map tokens;           /* u8 [R, columns / 2] */
    struct sm100_tensor_map token_scales;     /* u16 [blocks, 256] */
    const int32_t *ends;                      /* [G] cumulative ends of the groups' rows */
    uint32_t group_count;
    uint32_t m_rows, k;             /* output features and values along K of one group */
    const float *weight_globals[2]; /* [G] */
    const float *row_globals;       /* [R] of the tokens; NULL: 1 */
    const float *group_globals;     /* [G] of the tokens, where they have one per expert; NULL: 1 */
    const float *row_weights;       /* [R] routing weights that multiply the result; NULL: 1 */
    const float *biases[2];         /* F32 [G, m_rows], added after the global scales; NULL: none */

    /* L1: h = SwiGLU, quantized, as the tokens of L2. */
    uint8_t *h_codes;       /* [R, h_row_bytes] */
    uint8_t *h_scales;      /* MMA layout */
    const float *h_globals; /* [G] */
    float *l1;              /* [R, 2, m_rows] gate and up before the clamp, for the check; NULL: not written */
    uint32_t h_row_bytes;
    mm_swiglu swiglu;
    uint64_t *saturated_blocks, *nonfinite_blocks; /* counters */

    /* L2 and the plain GEMM: one row of m_rows values per token row. */
    void *output;                /* BF16, or F32 if output_f32 */
    const uint32_t *output_rows; /* [R] where each row goes; NULL: row r to r */
    uint32_t output_f32;

    struct sm100_record *record;
    uint64_t timeout_ns; /* of one wait */
};

#define SM100_PLAN_THREADS 256u
#define SM100_STAGE_THREADS 128u
#define SM100_STAGE_TOKENS (SM100_STAGE_THREADS / 32) /* per CTA: one warp each */
#define SM100_COMBINE_THREADS 256u

/* A sum per warp and a count per expert. */
MM_HD uint32_t sm100_plan_shared_bytes(uint32_t groups) {
    return 4 * (SM100_PLAN_THREADS / 32 + groups);
}

/* Which token-slot pair goes to which row: rows sorted by expert, in the order of the batch. One CTA per
 * expert. */
struct sm100_plan_args {
    const int32_t *ids;         /* [pair_count] expert of each (token, slot), -1: none */
    const int32_t *local_index; /* [expert_count] group of an expert, -1: not loaded here */
    uint32_t pair_count, expert_count, group_count;
    int32_t *ends;                                       /* [group_count] */
    int32_t *pair_row;                                   /* [pair_count], -1: the pair has no row here */
    uint32_t *row_pair;                                  /* [R] */
    uint32_t *row_scale_row;                             /* [R] the row in the padded numbering of the scales */
    const float *pair_weights;                           /* [pair_count], or NULL */
    float *row_weights;                                  /* [R], or NULL */
    uint64_t *skipped_slots, *bad_slots, *expert_tokens; /* counters; expert_tokens [expert_count] */
};

/* Tokens quantized once and written to each of their rows. One warp at a token. */
struct sm100_stage_args {
    const void *hidden; /* [token_count, columns] BF16, or F32 rounded to BF16 on reading */
    uint32_t hidden_f32, token_count, columns, slots;
    float global;            /* of every token, or 0: the token's own amax / 2688 */
    const int32_t *pair_row; /* [token_count, slots] */
    const uint32_t *row_scale_row;
    uint8_t *codes; /* [R, row_bytes] */
    uint32_t row_bytes;
    uint8_t *scales;                     /* MMA layout */
    float *row_globals;                  /* [R] */
    uint8_t *token_codes, *token_scales; /* [token_count, columns / 2 and / 16] for the check; NULL: not written */
    float *token_globals;                /* [token_count], with token_codes */
    uint64_t *saturated_blocks, *nonfinite_blocks;
};

/* y = bf16(sum over the slots, in order, of weight x partial, + shared). One CTA at a token. */
struct sm100_combine_args {
    const uint16_t *partials;  /* BF16 [token_count * slots, columns] */
    const int32_t *pair_row;   /* [token_count, slots]: -1 where there is no partial */
    const float *pair_weights; /* [token_count, slots]; NULL: 1 (they are in the partials) */
    const float *shared;       /* F32 [token_count, columns], or NULL */
    uint16_t *output;          /* BF16 [token_count, columns] */
    uint32_t token_count, slots, columns;
};

#endif
