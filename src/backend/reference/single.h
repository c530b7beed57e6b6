/* The single stages of the reference backend, as backend.h declares them. */
#ifndef MM_REFERENCE_SINGLE_H
#define MM_REFERENCE_SINGLE_H

#include "backend/backend.h"
#include "backend/reference/formats.h"

struct mm_backend_state {
    mm_reference_tables tables;
};

megamoe_status mm_reference_quantize_rows(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                                          megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals,
                                          void *stream);
megamoe_status mm_reference_dequantize_rows(mm_backend_state *state, const megamoe_tensor *codes,
                                            const megamoe_tensor *scales, const megamoe_tensor *globals,
                                            megamoe_tensor *values, void *stream);
megamoe_status mm_reference_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                         const megamoe_tensor *row_scales, const mm_matrix *matrices,
                                         const int32_t *offsets, uint32_t group_count, megamoe_tensor *output,
                                         void *stream);

#endif
