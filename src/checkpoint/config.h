/*
 * What config.json says of the MoE layers: sizes, the router, the activation, the order of fused rows. The
 * tensors decide; this completes what they cannot say (K, the score function, the scale) and is checked
 * against the rest.
 */
#ifndef MM_CHECKPOINT_CONFIG_H
#define MM_CHECKPOINT_CONFIG_H

#include "megamoe/megamoe.h"

#include <jansson.h>

typedef enum mm_gate_up { /* rows of a fused gate_up_proj */
                          MM_GATE_UP_UNKNOWN = 0,
                          MM_GATE_UP_HALVES,     /* all gate rows, then all up rows */
                          MM_GATE_UP_INTERLEAVED /* gate, up, gate, up, ... */
} mm_gate_up;

typedef enum mm_orientation { /* of stacks [E, ., .] that their scales and sizes leave open */
                              MM_ORIENTATION_UNKNOWN = 0,
                              MM_ORIENTATION_ROWS,      /* [E, out, in] */
                              MM_ORIENTATION_TRANSPOSED /* [E, in, out] */
} mm_orientation;

typedef struct mm_config {
    json_t *root, *text; /* config.json and its language model part (the same object in most models); or NULL */
    char model_type[64];
    /* 0: not given */
    uint32_t hidden, intermediate, experts, experts_per_token, layers, hash_layers, groups, groups_per_token;
    megamoe_score score;    /* 0: neither a scoring key nor a known model_type says */
    char router_doubt[128]; /* why score is 0 */
    bool normalize;
    float routed_scale, swiglu_alpha, swiglu_beta, swiglu_limit;
    bool relu2;
    char activation_doubt[96]; /* not empty: an activation that no backend has */
    mm_gate_up gate_up;
    mm_orientation stacks;
    bool has_experts_range; /* megamoe_experts: the file holds only these experts */
    uint32_t experts_first, experts_end;
} mm_config;

/* `directory` holds config.json, or not: then everything is "not given". */
megamoe_status mm_config_read(const char *directory, mm_config *config);
void mm_config_free(mm_config *config);

/* The model types whose fused rows or router are known, for sentences: "deepseek_v4, deepseek_v3, ...". */
void mm_config_model_types(char *text, size_t size);

#endif
