/*
 * A layer with everything decided: from a checkpoint or from the caller's tensors to mm_layer_weights. What a
 * shape may be, which activations and which global scales are used, is decided here and nowhere else.
 */
#ifndef MM_LAYER_H
#define MM_LAYER_H

#include "backend/backend.h"
#include "checkpoint/checkpoint.h"

/* Owns the arrays that mm_layer_weights points to. */
typedef struct mm_layer_parts {
    mm_layer_source source; /* empty for a layer made of the caller's tensors */
    mm_expert *experts;     /* of the caller's tensors */
    mm_expert shared;
    float *router_bias; /* the caller's, brought to host memory for the host backends */
    int32_t *token_experts;
    int32_t *local_index;
    mm_layer_weights weights;
} mm_layer_parts;

/* Where the caller's tensors are, and how to read scalars from there. */
typedef struct mm_memory {
    const mm_backend *backend;
    mm_backend_state *state;
} mm_memory;

megamoe_status mm_layer_from_checkpoint(const mm_backend *backend, const megamoe_checkpoint *checkpoint, uint32_t layer,
                                        const megamoe_layer_options *options, const megamoe_device_options *device,
                                        mm_layer_parts *parts);
megamoe_status mm_layer_from_tensors(const mm_memory *memory, const megamoe_layer_desc *desc,
                                     const megamoe_layer_options *options, mm_layer_parts *parts);
void mm_layer_parts_free(mm_layer_parts *parts);

/* What sizes and options a layer may have; completes zeros to their defaults. */
megamoe_status mm_shape_complete(megamoe_shape *shape);

#endif
