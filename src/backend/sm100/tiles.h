/*
 * The tile instances of the grouped GEMM, as data with a reason beside each row. The kernels are templates
 * over a row of this table; the host picks a row by the number of tokens and sizes the launch from it.
 *
 * Weights are the M operand: 128 of their rows per CTA (the block-scaled instructions have no smaller M).
 * Tokens are the N operand, in any multiple of 8 (16 for a pair) up to n_max, chosen per expert while the
 * kernel runs. One stage of the pipeline is 256 values of K: 128 bytes of every row, one swizzle atom, four
 * instructions.
 */
#ifndef MM_SM100_TILES_H
#define MM_SM100_TILES_H

#include "backend/sm100/descriptors.h"
#include "backend/sm100/scheduler.h"

#define SM100_M 128u             /* weight rows per CTA */
#define SM100_STAGE_BYTES_K 128u /* of a row: 256 codes */
#define SM100_STAGE_STEPS 4u     /* instructions along K in a stage */
#define SM100_THREADS 384u       /* warps: load, multiply, tensor memory, one idle, eight of the epilogue */
#define SM100_SHARED_BYTES_MAX 232448u
#define SM100_TENSOR_COLUMNS 512u

struct sm100_tile {
    uint32_t cta_group;     /* 1, or 2: a pair of CTAs shares the token operand */
    uint32_t matrices;      /* weight matrices multiplied with the same tokens: 2 for gate and up */
    uint32_t n_max;         /* tokens of the largest tile */
    uint32_t n_step;        /* see scheduler.h; keeps a tile within token_stripes stripes of scales */
    uint32_t token_box;     /* token rows per TMA instruction: fewer bytes for small tiles, fewer instructions for
                               large */
    uint32_t token_stripes; /* stripes of 128 token scales that a tile may touch */
    uint32_t accumulators;  /* 2: the epilogue of one tile runs under the multiplication of the next */
    uint32_t stages;        /* of shared memory */
    uint32_t scale_slots;   /* of tensor memory, each with the scales of one stage; at most `stages` */
};

enum sm100_tile_name {
    SM100_L1_SMALL,
    SM100_L1_LARGE,
    SM100_L2_SMALL,
    SM100_L2_LARGE,
    SM100_L2_WIDE,
    SM100_TILE_COUNT
};

#ifdef __cplusplus
#    define SM100_TABLE static constexpr
#else
#    define SM100_TABLE static const
#endif

SM100_TABLE struct sm100_tile sm100_tiles[SM100_TILE_COUNT] = {
    /* Decode, gate and up. Bound by the weights' way from memory: 4 stages keep 144 KiB per SM under way,
     * almost three times what 8 TB/s and a microsecond of latency ask for. 64 tokens cover a batch of 512 on
     * V4-Pro over 8 ranks. */
    {1, 2, 64, 32, 8, 1, 2, 4, 4},
    /* Prefill, gate and up. Two accumulators of 2 x 96 columns leave 128 for scales; N = 128 would leave
     * none, and one accumulator would leave the tensor cores idle during SwiGLU. The pair halves the tokens
     * each SM reads. */
    {2, 2, 96, 32, 16, 2, 2, 4, 2},
    /* Decode, down: as the first, with one matrix and so more, smaller stages. */
    {1, 1, 64, 32, 8, 1, 2, 7, 7},
    /* Prefill, down: 2 x 192 columns and two slots of scales; reads 75 bytes of shared memory a clock of 128.
     */
    {2, 1, 192, 32, 16, 2, 2, 6, 2},
    /* Every N up to 256 on one CTA, for plain GEMMs without pairs (an odd SM budget); one accumulator fits.
     */
    {1, 1, 256, 128, 32, 2, 1, 4, 4},
};

SM100_PURE uint32_t sm100_token_rows_per_cta(struct sm100_tile t) {
    return sm100_round_up(t.n_max / t.cta_group, t.token_box);
}

/* Shared memory: `stages` of [weights of each matrix][tokens][weight scales of each matrix][token scales],
 * then the barriers. Everything that TMA swizzles begins at a multiple of 1024. */
#define SM100_WEIGHT_STAGE_BYTES (SM100_M * SM100_STAGE_BYTES_K)
#define SM100_SCALE_STAGE_BYTES (SM100_STAGE_STEPS * SM100_BLOCK_BYTES) /* of a stripe */
#define SM100_BARRIER_BYTES 256u

SM100_PURE uint32_t sm100_token_stage_offset(struct sm100_tile t) {
    return t.matrices * SM100_WEIGHT_STAGE_BYTES;
}
SM100_PURE uint32_t sm100_weight_scale_stage_offset(struct sm100_tile t) {
    return sm100_token_stage_offset(t) + sm100_token_rows_per_cta(t) * SM100_STAGE_BYTES_K;
}
SM100_PURE uint32_t sm100_token_scale_stage_offset(struct sm100_tile t) {
    return sm100_weight_scale_stage_offset(t) + t.matrices * SM100_SCALE_STAGE_BYTES;
}
SM100_PURE uint32_t sm100_stage_bytes(struct sm100_tile t) {
    return sm100_token_scale_stage_offset(t) + t.token_stripes * SM100_SCALE_STAGE_BYTES;
}
SM100_PURE uint32_t sm100_shared_bytes(struct sm100_tile t) {
    return t.stages * sm100_stage_bytes(t) + SM100_BARRIER_BYTES;
}

/* Tensor memory: accumulators (n_max columns per matrix), then scale_slots of [weight scales of each
 * matrix][token scales], each with the four steps of a stage side by side. */
SM100_PURE uint32_t sm100_accumulator_columns(struct sm100_tile t) {
    return t.matrices * t.n_max;
}
SM100_PURE uint32_t sm100_scale_slot_columns(struct sm100_tile t) {
    return (t.matrices + t.token_stripes) * SM100_SCALE_COLUMNS * SM100_STAGE_STEPS;
}
SM100_PURE uint32_t sm100_tensor_columns(struct sm100_tile t) {
    return t.accumulators * sm100_accumulator_columns(t) + t.scale_slots * sm100_scale_slot_columns(t);
}

/* Allocations are powers of two. */
SM100_PURE uint32_t sm100_tensor_columns_allocated(struct sm100_tile t) {
    uint32_t columns = 32;
    while (columns < sm100_tensor_columns(t)) columns *= 2;
    return columns;
}

/* How the scheduler cuts a grouped GEMM with `m_rows` output features into tiles of this shape. */
MM_HD struct sm100_schedule sm100_tile_schedule(struct sm100_tile t, const int32_t *ends, uint32_t group_count,
                                                uint32_t m_rows) {
    struct sm100_schedule schedule = {ends, group_count, 0, t.n_max, t.n_step, 8 * t.cta_group};
    schedule.m_tiles = (m_rows + SM100_M * t.cta_group - 1) / (SM100_M * t.cta_group);
    return schedule;
}

#endif
