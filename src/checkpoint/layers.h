/*
 * The MoE layers of a checkpoint as lists of tensors: every tensor name is parsed once, when the checkpoint
 * is opened, and from then on a tensor is found by layer, expert, projection and part.
 */
#ifndef MM_CHECKPOINT_LAYERS_H
#define MM_CHECKPOINT_LAYERS_H

#include "checkpoint/naming.h"
#include "checkpoint/safetensors.h"

typedef struct mm_reference {
    uint64_t key; /* layer, place, expert, projection, part: sorted, so that a layer and an expert are runs */
    const mm_tensor *tensor;
} mm_reference;

typedef struct mm_layer_tensors {
    uint32_t layer; /* in the model; MTP blocks follow the last layer */
    char *prefix;   /* "model.layers.3.mlp" */
    bool w_names, stacked, mtp;
    uint32_t expert_first, expert_end, expert_total; /* of the names; all 0 in a stacked layer */
    mm_reference *references;
    uint32_t count;
} mm_layer_tensors;

typedef struct mm_layers {
    mm_layer_tensors *layers; /* in order of number */
    uint32_t count;
    mm_reference *references;
} mm_layers;

/* layer_count: num_hidden_layers, or 0 if not given. Names inside experts that mean nothing to us become an
 * anomaly. */
megamoe_status mm_layers_build(const mm_tensors *tensors, uint32_t layer_count, mm_anomalies *anomalies,
                               mm_layers *layers);
void mm_layers_free(mm_layers *layers);
const mm_layer_tensors *mm_layers_find(const mm_layers *layers, uint32_t layer);

/* The parts of one matrix; a part that is absent is NULL. */
typedef struct mm_parts {
    const mm_tensor *part[MM_PART_COUNT];
    const mm_tensor *rival; /* a second tensor for the same part, or NULL */
    bool any;
} mm_parts;
void mm_layer_parts(const mm_layer_tensors *layer, mm_place place, uint32_t expert, mm_projection projection,
                    mm_parts *parts);

/* Does any expert of the layer (or its stack) have this part? */
bool mm_layer_has_expert_part(const mm_layer_tensors *layer, mm_part part);

#endif
