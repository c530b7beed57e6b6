/* Geometry from the models' published config.json files. */
#include "shapes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const cli_shape shapes[] = {
    {.name = "v4-pro",
     .model_type = "deepseek_v4",
     .architecture = "DeepseekV4ForCausalLM",
     .naming = CLI_NATIVE,
     .shape = {.hidden = 7168,
               .intermediate = 3072,
               .expert_count = 384,
               .experts_per_token = 6,
               .score = MEGAMOE_SQRTSOFTPLUS,
               .normalize_weights = true,
               .routed_scale = 2.5f,
               .swiglu_limit = 10.0f},
     .layer_count = 61,
     .hash_layers = 3,
     .vocabulary = 129280,
     .shared_block = 128,
     .shared = true,
     .router_bias = true},
    {.name = "v4-flash",
     .model_type = "deepseek_v4",
     .architecture = "DeepseekV4ForCausalLM",
     .naming = CLI_NATIVE,
     .shape = {.hidden = 4096,
               .intermediate = 2048,
               .expert_count = 256,
               .experts_per_token = 6,
               .score = MEGAMOE_SQRTSOFTPLUS,
               .normalize_weights = true,
               .routed_scale = 1.5f,
               .swiglu_limit = 10.0f},
     .layer_count = 43,
     .hash_layers = 3,
     .vocabulary = 129280,
     .shared_block = 128,
     .shared = true,
     .router_bias = true},
    {.name = "v4.1-flash",
     .model_type = "deepseek_v4",
     .architecture = "DeepseekV4ForCausalLM",
     .naming = CLI_NATIVE,
     .shape = {.hidden = 5120,
               .intermediate = 2304,
               .expert_count = 384,
               .experts_per_token = 6,
               .score = MEGAMOE_SQRTSOFTPLUS,
               .normalize_weights = true,
               .routed_scale = 1.5f,
               .swiglu_limit = 10.0f},
     .layer_count = 40,
     .vocabulary = 129280,
     .shared_block = 32,
     .shared = true,
     .router_bias = true},
    {.name = "qwen3-30b-a3b",
     .model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .naming = CLI_HF,
     .shape = {.hidden = 2048,
               .intermediate = 768,
               .expert_count = 128,
               .experts_per_token = 8,
               .score = MEGAMOE_SOFTMAX_TOPK,
               .normalize_weights = true,
               .routed_scale = 1.0f},
     .layer_count = 48,
     .vocabulary = 151936},
    {.name = "r1",
     .model_type = "deepseek_v3",
     .architecture = "DeepseekV3ForCausalLM",
     .naming = CLI_HF,
     .shape = {.hidden = 7168,
               .intermediate = 2048,
               .expert_count = 256,
               .experts_per_token = 8,
               .score = MEGAMOE_SIGMOID,
               .group_count = 8,
               .groups_per_token = 4,
               .normalize_weights = true,
               .routed_scale = 2.5f},
     .first_layer = 3,
     .layer_count = 58,
     .vocabulary = 129280,
     .shared = true,
     .router_bias = true},
    {.name = "kimi-k2",
     .model_type = "kimi_k2",
     .architecture = "DeepseekV3ForCausalLM",
     .naming = CLI_HF,
     .shape = {.hidden = 7168,
               .intermediate = 2048,
               .expert_count = 384,
               .experts_per_token = 8,
               .score = MEGAMOE_SIGMOID,
               .group_count = 1,
               .groups_per_token = 1,
               .normalize_weights = true,
               .routed_scale = 2.827f},
     .first_layer = 1,
     .layer_count = 60,
     .vocabulary = 163840,
     .shared = true,
     .router_bias = true},
    {.name = "minimax-m2",
     .model_type = "minimax_m2",
     .architecture = "MiniMaxM2ForCausalLM",
     .naming = CLI_BLOCK_SPARSE,
     .shape = {.hidden = 3072,
               .intermediate = 1536,
               .expert_count = 256,
               .experts_per_token = 8,
               .score = MEGAMOE_SIGMOID,
               .normalize_weights = true,
               .routed_scale = 1.0f},
     .layer_count = 62,
     .vocabulary = 200064,
     .router_bias = true},
    /* Its MoE layers take turns with attention and Mamba: layer 1 is the first, and the only one made here. */
    {.name = "nemotron-3-nano",
     .model_type = "nemotron_h",
     .architecture = "NemotronHForCausalLM",
     .naming = CLI_MIXER,
     .shape = {.hidden = 2688,
               .intermediate = 1856,
               .expert_count = 128,
               .experts_per_token = 6,
               .score = MEGAMOE_SIGMOID,
               .group_count = 1,
               .groups_per_token = 1,
               .normalize_weights = true,
               .not_gated = true,
               .routed_scale = 2.5f},
     .first_layer = 1,
     .layer_count = 1,
     .vocabulary = 131072,
     .shared_intermediate = 3712,
     .shared = true,
     .router_bias = true},
    {.name = "gpt-oss-120b",
     .model_type = "gpt_oss",
     .architecture = "GptOssForCausalLM",
     .naming = CLI_GPT_OSS,
     .shape = {.hidden = 2880,
               .intermediate = 2880,
               .expert_count = 128,
               .experts_per_token = 4,
               .group_size = 32,
               .score = MEGAMOE_TOPK_SOFTMAX,
               .normalize_weights = true,
               .routed_scale = 1.0f,
               .swiglu_alpha = 1.702f,
               .swiglu_beta = 1.0f,
               .swiglu_limit = 7.0f},
     .layer_count = 36,
     .vocabulary = 201088,
     .router_bias = true},
    /* Small, and friendly to nobody: sizes that are no power of two, FP8 blocks that do not divide them. */
    {.name = "tiny",
     .model_type = "deepseek_v4",
     .architecture = "DeepseekV4ForCausalLM",
     .naming = CLI_NATIVE,
     .shape = {.hidden = 160,
               .intermediate = 96,
               .expert_count = 12,
               .experts_per_token = 3,
               .score = MEGAMOE_SQRTSOFTPLUS,
               .normalize_weights = true,
               .routed_scale = 2.5f,
               .swiglu_limit = 10.0f},
     .layer_count = 4,
     .hash_layers = 3,
     .vocabulary = 512,
     .shared_block = 128,
     .shared = true,
     .router_bias = true},
};
enum { SHAPE_COUNT = sizeof shapes / sizeof shapes[0] };

static bool read_value(const char *text, double lowest, double highest, double *value) {
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    return *text && !*end && !errno && *value >= lowest && *value <= highest;
}

/* One "H=64" of a custom shape. */
static int set_value(const char *word, cli_shape *shape) {
    double value, lowest = 1, highest = 1 << 16;
    const char *equals = strchr(word, '=');
    size_t length = (size_t)(equals - word);
    uint32_t *const fields[] = {&shape->shape.hidden,       &shape->shape.intermediate,
                                &shape->shape.expert_count, &shape->shape.experts_per_token,
                                &shape->hash_layers,        &shape->layer_count};
    static const char *const names[] = {"H", "I", "E", "K", "hash", "layers", "shared", "limit", "scale", NULL};
    unsigned which = 0;
    while (names[which] && (strlen(names[which]) != length || strncmp(names[which], word, length) != 0)) which++;
    if (!names[which])
        return cli_fail(
            "a custom shape has no '%.*s'; it has H, I, E, K, and may have like, shared, hash, layers, limit, scale.",
            (int)length, word);
    if (which == 3) highest = 32;
    if (which >= 6) lowest = 0;
    if (!read_value(equals + 1, lowest, highest, &value) || (which < 7 && value != (uint32_t)value))
        return cli_fail("a custom shape cannot have %s.", word);
    if (which < 6)
        *fields[which] = (uint32_t)value;
    else if (which == 6)
        shape->shared = value > 0;
    else if (which == 7)
        shape->shape.swiglu_limit = (float)value;
    else
        shape->shape.routed_scale = (float)value;
    return CLI_GOOD;
}

static const cli_shape *shape_named(const char *name, size_t length) {
    for (unsigned i = 0; i < SHAPE_COUNT; i++)
        if (strlen(shapes[i].name) == length && strncmp(shapes[i].name, name, length) == 0) return &shapes[i];
    return NULL;
}

/* "like=SHAPE": that model's names, router and config, with sizes of one's own and one layer. */
static int apply_like(const char *text, cli_shape *shape) {
    const char *like = strncmp(text, "like=", 5) == 0 ? text : strstr(text, ",like=");
    if (!like) return CLI_GOOD;
    like = strchr(like, '=') + 1;
    size_t length = strcspn(like, ",");
    const cli_shape *named = shape_named(like, length);
    if (!named) return cli_fail("a custom shape cannot be like '%.*s': there is no such shape.", (int)length, like);
    *shape = *named;
    shape->name = "custom";
    shape->layer_count = 1;
    shape->hash_layers = 0;
    shape->vocabulary = 1024;
    shape->shared_intermediate = 0;
    shape->shape.hidden = shape->shape.intermediate = 0;
    shape->shape.expert_count = shape->shape.experts_per_token = 0;
    return CLI_GOOD;
}

static int parse_custom(const char *text, cli_shape *shape) {
    *shape = (cli_shape){.name = "custom",
                         .model_type = "deepseek_v4",
                         .architecture = "DeepseekV4ForCausalLM",
                         .naming = CLI_NATIVE,
                         .layer_count = 1,
                         .vocabulary = 1024,
                         .shared_block = 128,
                         .router_bias = true,
                         .shape = {.score = MEGAMOE_SQRTSOFTPLUS, .normalize_weights = true, .routed_scale = 1.0f}};
    if (apply_like(text, shape) != CLI_GOOD) return CLI_BAD_INPUT;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, ",");
        if (strncmp(at, "like=", 5) == 0) {
            at += length + (at[length] == ',');
            continue;
        }
        char *word = cli_format("%.*s", (int)length, at);
        int result = strchr(word, '=')
                         ? set_value(word, shape)
                         : cli_fail("a custom shape is H=..,I=..,E=..,K=.., and '%s' is not such a part.", word);
        free(word);
        if (result != CLI_GOOD) return result;
        at += length + (at[length] == ',');
    }
    const megamoe_shape *s = &shape->shape;
    if (!s->hidden || !s->intermediate || !s->expert_count || !s->experts_per_token)
        return cli_fail("the custom shape '%s' lacks %s.", text,
                        !s->hidden         ? "H"
                        : !s->intermediate ? "I"
                        : !s->expert_count ? "E"
                                           : "K");
    if (s->hidden % 16 || s->intermediate % 16)
        return cli_fail("%s=%u is not a multiple of 16.", s->hidden % 16 ? "H" : "I",
                        s->hidden % 16 ? s->hidden : s->intermediate);
    if (s->experts_per_token > s->expert_count)
        return cli_fail("K=%u is more than E=%u.", s->experts_per_token, s->expert_count);
    if (s->group_count > 1 && (s->expert_count % s->group_count ||
                               s->expert_count / s->group_count * s->groups_per_token < s->experts_per_token))
        return cli_fail("E=%u and K=%u do not fit the %u groups of experts, %u per token, of that shape.",
                        s->expert_count, s->experts_per_token, s->group_count, s->groups_per_token);
    return CLI_GOOD;
}

int cli_shape_parse(const char *text, cli_shape *shape) {
    const char *names[SHAPE_COUNT + 1] = {NULL};
    const cli_shape *named = shape_named(text, strlen(text));
    if (named) {
        *shape = *named;
        return CLI_GOOD;
    }
    for (unsigned i = 0; i < SHAPE_COUNT; i++) names[i] = shapes[i].name;
    if (strchr(text, '=')) return parse_custom(text, shape);
    const char *nearest = cli_nearest(text, names);
    if (nearest) return cli_fail("there is no shape '%s'; did you mean '%s'?", text, nearest);
    return cli_fail("there is no shape '%s'; there are v4-pro, v4-flash, v4.1-flash, qwen3-30b-a3b, r1, kimi-k2, "
                    "minimax-m2, nemotron-3-nano, gpt-oss-120b, tiny, or H=..,I=..,E=..,K=...",
                    text);
}
