/*
 * Weights as the kernels read them, written by plain host code when a layer is loaded: codes row by row as in
 * the checkpoint, scales in the layout of the tensor cores, the global scale beside them and never folded in.
 */
#ifndef MM_SM100_OPERANDS_H
#define MM_SM100_OPERANDS_H

#include "backend/sm100/layout.h"
#include "weights.h"

/* What bringing MXFP4 to NVFP4 cost: nothing, if the exponents in use span at most 17 octaves. */
struct sm100_loss {
    uint64_t values;  /* whose value changed */
    uint32_t octaves; /* spanned by the exponents of blocks that are not zero */
};

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Writes one expert's matrix: codes [rows, sm100_code_row_bytes(columns)], scales [sm100_scale_bytes(rows,
 * columns)], both with their padding, and the global scale. NVFP4 is moved as it is; codes NULL: they are used where
 * they lie, and not written. MXFP4 becomes two E4M3
 * scales per 32 and a power of two; where its exponents span too much, the smallest values are rounded to the
 * nearest that there is, and `loss` says how many changed. Fails, naming formats and sizes, if the matrix is
 * neither or the columns are not a multiple of its block.
 */
megamoe_status mm_sm100_matrix_write(const mm_matrix *matrix, uint8_t *codes, uint8_t *scales, float *global,
                                     struct sm100_loss *loss);

#ifdef __cplusplus
}
#endif

#endif
