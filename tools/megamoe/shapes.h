/* The models that --shape names: their geometry, and how their published files are spelled. */
#ifndef CLI_SHAPES_H
#define CLI_SHAPES_H

#include "cli.h"

typedef enum cli_naming {
    CLI_NATIVE,       /* DeepSeek-V4: layers.N.ffn.experts.E.w1 */
    CLI_HF,           /* model.layers.N.mlp.experts.E.gate_proj */
    CLI_BLOCK_SPARSE, /* MiniMax, Mixtral: model.layers.N.block_sparse_moe.experts.E.w1 */
    CLI_MIXER,        /* Nemotron-H: backbone.layers.N.mixer.experts.E.up_proj, without gate_proj */
    CLI_GPT_OSS       /* model.layers.N.mlp.experts.gate_up_proj_blocks, all experts in one tensor */
} cli_naming;

typedef struct cli_shape {
    const char *name, *model_type, *architecture;
    megamoe_shape shape;
    cli_naming naming;
    uint32_t first_layer, layer_count; /* the MoE layers; those before first_layer are dense */
    uint32_t hash_layers, vocabulary;  /* the first hash_layers layers choose experts by token id */
    uint32_t shared_block;             /* the shared expert's FP8 block in native files */
    uint32_t shared_intermediate;      /* of the shared expert, or 0: like the routed ones */
    bool shared, router_bias;
} cli_shape;

/* A name or "H=..,I=..,E=..,K=.."; CLI_GOOD, or CLI_BAD_INPUT after the message. */
int cli_shape_parse(const char *text, cli_shape *shape);

#endif
