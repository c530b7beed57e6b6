/* The caller's tensors as weight matrices; used by layer.c and by the single stages of megamoe.c. */
#ifndef MM_LAYER_TENSORS_H
#define MM_LAYER_TENSORS_H

#include "layer.h"

typedef struct mm_projections {
    const megamoe_projection *gate, *up, *down;
    const char *names[3];
} mm_projections;

/* Cuts expert e out of stacked tensors; expert_count 0: the tensors have no leading dimension. */
megamoe_status mm_expert_from_tensors(const mm_memory *memory, const mm_projections *projections,
                                      const megamoe_shape *shape, uint32_t expert_count, uint32_t e, mm_expert *expert);

/* bias and token_experts are copies in host memory that the caller frees. */
megamoe_status mm_router_from_tensors(const mm_memory *memory, const megamoe_layer_desc *desc, mm_router *router,
                                      float **bias, int32_t **token_experts);

/* One matrix [rows, columns] of a stack of expert_count, for a grouped GEMM. */
megamoe_status mm_matrix_from_projection(const mm_memory *memory, const megamoe_projection *projection,
                                         const char *name, uint32_t expert_count, uint32_t e, mm_matrix *matrix);

megamoe_status mm_tensor_check(const megamoe_tensor *tensor, const char *name, uint32_t rank);
uint64_t mm_tensor_pitch(const megamoe_tensor *tensor, uint32_t dimension);

#endif
