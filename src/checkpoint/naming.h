/*
 * What a tensor's name says: which layer, which expert, which projection, and which part of its weight. One
 * table of conventions, matched component by component, so that layer 1 never takes a tensor of layer 10.
 */
#ifndef MM_CHECKPOINT_NAMING_H
#define MM_CHECKPOINT_NAMING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mm_place {
    MM_PLACE_NONE = 0, /* not part of an MoE layer */
    MM_PLACE_UNKNOWN,  /* in an expert's or router's name, but not a part we know: reported, never ignored
                          silently */
    MM_PLACE_EXPERT,   /* one expert's */
    MM_PLACE_STACK,    /* all experts of the layer in one tensor */
    MM_PLACE_SHARED,
    MM_PLACE_ROUTER
} mm_place;

typedef enum mm_projection { MM_GATE, MM_UP, MM_DOWN, MM_GATE_UP, MM_PROJECTION_COUNT } mm_projection;

typedef enum mm_part {
    MM_PART_WEIGHT,         /* .weight, or the bare name of a stack */
    MM_PART_PACKED,         /* .weight_packed: compressed-tensors */
    MM_PART_BLOCKS,         /* _blocks: gpt-oss */
    MM_PART_SCALE,          /* .weight_scale */
    MM_PART_NATIVE_SCALE,   /* .scale: DeepSeek-V4 */
    MM_PART_BLOCK_SCALE,    /* .weight_scale_inv: FP8, despite its name a multiplier */
    MM_PART_BLOCKS_SCALE,   /* _scales: gpt-oss */
    MM_PART_GLOBAL,         /* .weight_scale_2 */
    MM_PART_INVERSE_GLOBAL, /* .weight_global_scale: the weight is divided by it */
    MM_PART_INPUT,          /* .input_scale */
    MM_PART_INVERSE_INPUT,  /* .input_global_scale: one over the input_scale */
    MM_PART_BIAS,
    MM_PART_COUNT
} mm_part;

/* Parts of the place MM_PLACE_ROUTER, in the field `part`. */
typedef enum mm_router_part {
    MM_ROUTER_WEIGHT,
    MM_ROUTER_BIAS,
    MM_ROUTER_TABLE,       /* tid2eid */
    MM_ROUTER_SHARED_GATE, /* a sigmoid on the shared expert, which no backend applies */
    MM_ROUTER_PART_COUNT
} mm_router_part;

typedef struct mm_tensor_name {
    mm_place place;
    bool mtp;     /* layer counts multi-token-prediction blocks, not layers */
    bool w_names; /* w1, w2, w3 rather than gate_proj, down_proj, up_proj */
    uint32_t layer, expert;
    mm_projection projection;
    uint32_t part;        /* mm_part, or mm_router_part */
    bool numbered;        /* the name has a layer's number, whether or not it is part of an MoE layer */
    size_t stem_length;   /* of what stands before "layers." or "mtp." */
    size_t prefix_length; /* of the MoE block's name, such as "model.layers.3.mlp" */
} mm_tensor_name;

void mm_tensor_name_parse(const char *name, mm_tensor_name *parsed);

#endif
