/* Reading one layer: the tensors of experts, shared expert and router become an mm_layer_source, or a
 * sentence. */
#ifndef MM_CHECKPOINT_SOURCE_H
#define MM_CHECKPOINT_SOURCE_H

#include "checkpoint/checkpoint.h"
#include "checkpoint/matrix.h"

/* Sizes of a layer and how its experts are stored: found once, then demanded of every expert. */
typedef struct mm_layer_plan {
    megamoe_shape shape;
    uint32_t expert_first, expert_end; /* in the files */
    mm_format format;                  /* of the routed experts */
    bool router_present;               /* gate weight there, and a score function known */
} mm_layer_plan;

/* Fails if the layer as a whole cannot be read; single experts may still fail. */
megamoe_status mm_layer_plan_make(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan);

megamoe_status mm_expert_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              uint32_t expert, mm_expert *out);
/* *present false: the layer has none. */
megamoe_status mm_shared_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              mm_expert *out, bool *present);
/* With reading->copies, also copies the bias and the token table and checks every entry of it. */
megamoe_status mm_router_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              mm_router *out);

/* The tensor that holds the scales of a projection, for sentences about their bytes. */
const mm_tensor *mm_scale_tensor(const mm_layer_tensors *layer, mm_place place, uint32_t expert,
                                 mm_projection projection);

#endif
