/*
 * The host's side of the grouped GEMM: from operands in device memory to the arguments of a kernel and its
 * launch.
 */
#ifndef MM_SM100_GEMM_H
#define MM_SM100_GEMM_H

#include "backend/sm100/arguments.h"
#include "backend/sm100/machine.h"
#include "backend/sm100/tiles.h"

/* One projection of all experts (groups), in device memory, as operands.h writes it. */
struct sm100_weights {
    uint8_t *codes;  /* [groups, rows, sm100_code_row_bytes(columns)], unless lent */
    uint8_t *scales; /* [groups, sm100_scale_bytes(rows, columns)] */
    float *globals;  /* [groups] */
    float *biases;   /* [groups, rows], or NULL */
    uint32_t groups, rows, columns;
    bool lent; /* the codes are the caller's, at these pitches, multiples of SM100_CODE_ALIGNMENT */
    uint64_t lent_row_bytes, lent_group_bytes;
};

/* Token rows sorted by group, in device memory. */
struct sm100_tokens {
    uint8_t *codes;  /* [rows_max, sm100_code_row_bytes(columns)] */
    uint8_t *scales; /* stripes_max stripes */
    uint32_t rows_max, stripes_max, columns;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Fills the maps, pointers and sizes of both operands; what becomes of the result is the caller's to fill in.
 * weights[1] is up where the tile multiplies two matrices, else ignored. */
megamoe_status mm_sm100_gemm_prepare(const struct sm100_machine *machine, enum sm100_tile_name tile,
                                     const struct sm100_weights *const weights[2], const struct sm100_tokens *tokens,
                                     const int32_t *ends, struct sm100_gemm_args *args);

/* The instance for `rows` token rows over `groups` experts on a machine whose budget is sm_count
 * multiprocessors. All instances add along K in the same order, so the choice is one of speed alone. */
enum sm100_tile_name mm_sm100_gemm_choose(bool gated, uint32_t rows, uint32_t groups, uint32_t sm_count);

/* `rows`: at most so many token rows will be found behind args->ends. */
megamoe_status mm_sm100_gemm_launch(const struct sm100_machine *machine, enum sm100_tile_name tile,
                                    const struct sm100_gemm_args *args, uint32_t rows, uint32_t sm_count, void *stream);

#ifdef __cplusplus
}
#endif

#endif
