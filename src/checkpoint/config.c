/* config.json of the Hugging Face kind, in the spellings of the models in the table below. */
#include "checkpoint/config.h"

#include "checkpoint/json_file.h"
#include "error.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * What the modeling code of a model type does and its config.json does not say. `normalize` is what a missing
 * norm_topk_prob means. Model types that are not here work if config.json has a scoring key.
 */
typedef struct model {
    const char *type;
    megamoe_score score; /* 0: a router that no backend has */
    bool normalize, relu2;
    float alpha, beta;
    mm_gate_up gate_up;
    mm_orientation stacks; /* 0: no published file of this type has stacks */
} model;

static const model models[] = {
    {"deepseek_v4", MEGAMOE_SQRTSOFTPLUS, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"deepseek_v3", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"deepseek_v32", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"deepseek_v2", MEGAMOE_SOFTMAX_TOPK, false, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"kimi_k2", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"kimi_k25", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"glm4_moe", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"glm4v_moe", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"glm4_moe_lite", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"glm_moe_dsa", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"minimax_m2", MEGAMOE_SIGMOID, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"nemotron_h", MEGAMOE_SIGMOID, true, true, 1, 0, MM_GATE_UP_UNKNOWN, 0},
    {"qwen2_moe", MEGAMOE_SOFTMAX_TOPK, false, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"qwen3_moe", MEGAMOE_SOFTMAX_TOPK, false, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"qwen3_next", MEGAMOE_SOFTMAX_TOPK, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"qwen3_vl_moe", MEGAMOE_SOFTMAX_TOPK, true, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_TRANSPOSED},
    {"qwen3_vl_moe_text", MEGAMOE_SOFTMAX_TOPK, true, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_TRANSPOSED},
    {"qwen3_5_moe", MEGAMOE_SOFTMAX_TOPK, true, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_ROWS},
    {"qwen3_5_moe_text", MEGAMOE_SOFTMAX_TOPK, true, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_ROWS},
    {"olmoe", MEGAMOE_SOFTMAX_TOPK, false, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"mixtral", MEGAMOE_TOPK_SOFTMAX, true, false, 1, 0, MM_GATE_UP_HALVES, 0},
    {"gpt_oss", MEGAMOE_TOPK_SOFTMAX, true, false, 1.702f, 1, MM_GATE_UP_INTERLEAVED, MM_ORIENTATION_TRANSPOSED},
    {"llama4", 0, false, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_TRANSPOSED},
    {"llama4_text", 0, false, false, 1, 0, MM_GATE_UP_HALVES, MM_ORIENTATION_TRANSPOSED},
};
#define MODEL_COUNT (sizeof models / sizeof models[0])

static const model *model_find(const char *type) {
    for (size_t i = 0; i < MODEL_COUNT; i++)
        if (strcmp(models[i].type, type) == 0) return &models[i];
    return NULL;
}

void mm_config_model_types(char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < MODEL_COUNT && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", models[i].type);
}

/* A key of the language model part, else of the whole; null counts as absent. */
static const json_t *value_get(const mm_config *config, const char *key) {
    const json_t *value = json_object_get(config->text, key);
    if (!value || json_is_null(value)) value = json_object_get(config->root, key);
    return json_is_null(value) ? NULL : value;
}

static megamoe_status wrong_type(const char *path, const char *key, const char *expected) {
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: %s is not %s", path, key, expected);
}

static megamoe_status number_read(const mm_config *config, const char *path, const char *key, float *number) {
    const json_t *value = value_get(config, key);
    if (!value) return MEGAMOE_OK;
    if (!json_is_number(value) || !isfinite((float)json_number_value(value)) || json_number_value(value) < 0)
        return wrong_type(path, key, "a finite number that is not negative");
    *number = (float)json_number_value(value);
    return MEGAMOE_OK;
}

static megamoe_status bool_read(const mm_config *config, const char *path, const char *key, bool *flag) {
    const json_t *value = value_get(config, key);
    if (!value) return MEGAMOE_OK;
    if (!json_is_boolean(value)) return wrong_type(path, key, "true or false");
    *flag = json_is_true(value);
    return MEGAMOE_OK;
}

static megamoe_status counts_read(const char *path, const model *known, mm_config *config) {
    static const struct {
        size_t offset;
        const char *keys[4]; /* the first that is present counts */
    } counts[] = {
        {offsetof(mm_config, hidden), {"hidden_size"}},
        {offsetof(mm_config, intermediate), {"moe_intermediate_size"}},
        {offsetof(mm_config, experts), {"n_routed_experts", "num_experts", "num_local_experts"}},
        {offsetof(mm_config, experts_per_token), {"num_experts_per_tok", "num_experts_per_token", "experts_per_token"}},
        {offsetof(mm_config, layers), {"num_hidden_layers"}},
        {offsetof(mm_config, hash_layers), {"num_hash_layers"}},
        {offsetof(mm_config, groups), {"n_group"}},
        {offsetof(mm_config, groups_per_token), {"topk_group"}},
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (size_t k = 0; k < 4 && counts[i].keys[k]; k++) {
            const json_t *value = value_get(config, counts[i].keys[k]);
            json_int_t number = json_integer_value(value);
            if (!value) continue;
            if (!json_is_integer(value) || number < 0 || number > INT32_MAX)
                return wrong_type(path, counts[i].keys[k], "a count");
            *(uint32_t *)(void *)((char *)config + counts[i].offset) = (uint32_t)number;
            break;
        }
    /* elsewhere intermediate_size is that of the dense layers */
    if (!config->intermediate && known && known->score == MEGAMOE_TOPK_SOFTMAX)
        config->intermediate = (uint32_t)json_integer_value(value_get(config, "intermediate_size"));
    return MEGAMOE_OK;
}

static megamoe_status range_read(const char *path, mm_config *config) {
    const json_t *range = value_get(config, "megamoe_experts");
    json_int_t first = json_integer_value(json_array_get(range, 0)), end = json_integer_value(json_array_get(range, 1));
    if (!range) return MEGAMOE_OK;
    if (json_array_size(range) != 2 || !json_is_integer(json_array_get(range, 0)) ||
        !json_is_integer(json_array_get(range, 1)) || first < 0 || end <= first || end > UINT16_MAX + 1)
        return wrong_type(path, "megamoe_experts", "[first, end] with first below end");
    config->has_experts_range = true;
    config->experts_first = (uint32_t)first;
    config->experts_end = (uint32_t)end;
    return MEGAMOE_OK;
}

/* An explicit scoring key wins over what the model type is known to do. */
static void score_decide(mm_config *config, const model *known) {
    static const char *const keys[] = {"scoring_func", "score_function", "score_func", "moe_router_score_function"};
    static const struct {
        const char *name;
        megamoe_score score;
    } scores[] = {
        {"sqrtsoftplus", MEGAMOE_SQRTSOFTPLUS}, {"sigmoid", MEGAMOE_SIGMOID}, {"softmax", MEGAMOE_SOFTMAX_TOPK}};
    const char *key = NULL, *name = NULL;
    const json_t *method = value_get(config, "topk_method");
    for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !name; i++)
        name = json_string_value(value_get(config, key = keys[i]));
    config->score = known ? known->score : 0;
    if (name) {
        config->score = 0;
        for (size_t i = 0; i < sizeof scores / sizeof scores[0]; i++)
            if (strcmp(name, scores[i].name) == 0) config->score = scores[i].score;
    }
    if (!config->score && name)
        snprintf(config->router_doubt, sizeof config->router_doubt, "%s is '%.32s'", key, name);
    else if (!config->score && known)
        snprintf(config->router_doubt, sizeof config->router_doubt, "no backend has the router of model_type %s",
                 known->type);
    else if (!config->score)
        snprintf(config->router_doubt, sizeof config->router_doubt,
                 "model_type '%.32s' is not known and there is no scoring_func", config->model_type);
    if (config->score == MEGAMOE_SOFTMAX_TOPK && config->groups > 1 && json_is_string(method) &&
        strcmp(json_string_value(method), "greedy") != 0) {
        config->score = 0;
        snprintf(config->router_doubt, sizeof config->router_doubt, "topk_method is '%.32s' with softmax scores",
                 json_string_value(method));
    }
}

static void activation_decide(mm_config *config, const model *known) {
    static const char *const keys[] = {"mlp_hidden_act", "hidden_act", "hidden_activation"};
    const char *key = NULL, *name = NULL;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0] && !name; i++)
        name = json_string_value(value_get(config, key = keys[i]));
    config->relu2 = known && known->relu2;
    config->swiglu_alpha = known ? known->alpha : 1.0f;
    config->swiglu_beta = known ? known->beta : 0.0f;
    if (!name || strcmp(name, "silu") == 0 || strcmp(name, "swish") == 0) return;
    if (strcmp(name, "relu2") == 0) {
        config->relu2 = true;
    } else if (strcmp(name, "swigluoai") == 0) {
        config->swiglu_alpha = 1.702f;
        config->swiglu_beta = 1.0f;
    } else {
        snprintf(config->activation_doubt, sizeof config->activation_doubt, "%s is '%.32s'", key, name);
    }
}

static megamoe_status fields_read(const char *path, mm_config *config) {
    static const char *const parts[] = {"text_config", "llm_config", "language_config"};
    const json_t *type;
    const model *known;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (json_is_object(json_object_get(config->root, parts[i])))
            config->text = json_object_get(config->root, parts[i]);
    type = json_object_get(config->root, "model_type");
    known = json_is_string(type) ? model_find(json_string_value(type)) : NULL;
    if (!known && json_is_string(json_object_get(config->text, "model_type"))) {
        type = json_object_get(config->text, "model_type");
        known = model_find(json_string_value(type));
    }
    if (json_is_string(type)) snprintf(config->model_type, sizeof config->model_type, "%s", json_string_value(type));
    MM_TRY(counts_read(path, known, config));
    MM_TRY(range_read(path, config));
    score_decide(config, known);
    activation_decide(config, known);
    config->normalize = known ? known->normalize : true;
    config->gate_up = known ? known->gate_up : MM_GATE_UP_UNKNOWN;
    config->stacks = known ? known->stacks : MM_ORIENTATION_UNKNOWN;
    MM_TRY(bool_read(config, path, "norm_topk_prob", &config->normalize));
    MM_TRY(number_read(config, path, "routed_scaling_factor", &config->routed_scale));
    MM_TRY(number_read(config, path, "swiglu_alpha", &config->swiglu_alpha));
    return number_read(config, path, "swiglu_limit", &config->swiglu_limit);
}

megamoe_status mm_config_read(const char *directory, mm_config *config) {
    char *path = malloc(strlen(directory) + sizeof "/config.json");
    megamoe_status status;
    *config = (mm_config){.normalize = true, .routed_scale = 1.0f, .swiglu_alpha = 1.0f};
    snprintf(config->router_doubt, sizeof config->router_doubt, "there is no config.json");
    if (!path) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read config.json");
    sprintf(path, "%s/config.json", directory);
    status = mm_json_file_read(path, &config->root);
    config->text = config->root;
    if (status == MEGAMOE_OK && config->root) status = fields_read(path, config);
    free(path);
    if (status != MEGAMOE_OK) mm_config_free(config);
    return status;
}

void mm_config_free(mm_config *config) {
    json_decref(config->root);
    config->root = config->text = NULL;
}
