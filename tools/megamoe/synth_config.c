/* config.json and hf_quant_config.json as the producers of each layout write them. */
#include <string.h>

#include "synth.h"

/* What NVIDIA's V4 files say: the method stays "fp8", and the experts' NVFP4 stands beside it. */
static json_t *native_modelopt(const cli_shape *shape, uint32_t layer_first, uint32_t layer_end) {
    json_t *layers = json_object();
    for (uint32_t layer = layer_first; layer < layer_end; layer++) {
        char name[48];
        snprintf(name, sizeof name, "layers.%u.ffn.experts", layer);
        json_object_set_new(layers, name, json_pack("{s:s,s:i}", "quant_algo", "NVFP4", "group_size", 16));
    }
    int block = (int)shape->shared_block;
    return json_pack("{s:s,s:s,s:s,s:s,s:[i,i],s:s,s:s,s:n,s:i,s:{s:{s:o,s:o,s:[s]}},s:o,s:[s,s,s,s],s:{s:s,s:s}}",
                     "quant_method", "fp8", "activation_scheme", "dynamic", "fmt", "e4m3", "scale_fmt", "ue8m0",
                     "weight_block_size", block, block, "moe_quant_algo", "NVFP4", "quant_algo", "MIXED_PRECISION",
                     "kv_cache_quant_algo", "group_size", 16, "config_groups", "group_0", "weights",
                     json_pack("{s:i,s:s,s:i,s:b}", "num_bits", 4, "type", "float", "group_size", 16, "dynamic", 0),
                     "input_activations",
                     json_pack("{s:i,s:s,s:i,s:b}", "num_bits", 4, "type", "float", "group_size", 16, "dynamic", 0),
                     "targets", "Linear", "quantized_layers", layers, "ignore", "*.attn.*", "*.ffn.shared_experts.*",
                     "head", "mtp.*", "producer", "name", "modelopt", "version", "dsv4-nvfp4-experts");
}

/* DeepSeek's own files: FP8 blocks, of which FP4 experts are an exception that expert_dtype declares. */
static json_t *fp8_blocks(const cli_shape *shape, bool powers_of_two) {
    int block = shape->shared_block ? (int)shape->shared_block : 128;
    json_t *section = json_pack("{s:s,s:s,s:s,s:[i,i]}", "quant_method", "fp8", "activation_scheme", "dynamic", "fmt",
                                "e4m3", "weight_block_size", block, block);
    if (powers_of_two) json_object_set_new(section, "scale_fmt", json_string("ue8m0"));
    return section;
}

static json_t *modelopt(void) {
    return json_pack("{s:s,s:s,s:{s:{s:o,s:o,s:[s]}},s:[s,s,s],s:{s:s,s:s}}", "quant_method", "modelopt", "quant_algo",
                     "NVFP4", "config_groups", "group_0", "weights",
                     json_pack("{s:i,s:s,s:i,s:b}", "num_bits", 4, "type", "float", "group_size", 16, "dynamic", 0),
                     "input_activations",
                     json_pack("{s:i,s:s,s:i,s:b}", "num_bits", 4, "type", "float", "group_size", 16, "dynamic", 0),
                     "targets", "Linear", "ignore", "lm_head", "*self_attn*", "*mlp.gate", "producer", "name",
                     "modelopt", "version", "0.39.0");
}

static json_t *compressed_tensors(const cli_shape *shape) {
    const char *fp4 = "tensor_group";
    json_t *weights = json_pack("{s:i,s:s,s:s,s:i,s:b,s:b,s:s}", "num_bits", 4, "type", "float", "strategy", fp4,
                                "group_size", 16, "symmetric", 1, "dynamic", 0, "observer", "minmax");
    json_t *inputs = json_pack("{s:i,s:s,s:s,s:i,s:b,s:s,s:s}", "num_bits", 4, "type", "float", "strategy", fp4,
                               "group_size", 16, "symmetric", 1, "dynamic", "local", "observer", "minmax");
    json_t *ignore = json_pack("[s,s,s]", "lm_head", "re:.*self_attn.*", "re:.*mlp.gate$");
    if (shape->naming == CLI_NATIVE) {
        json_array_append_new(ignore, json_string("re:.*ffn.gate$"));
        json_array_append_new(ignore, json_string("re:.*shared_experts.*"));
    }
    return json_pack("{s:s,s:s,s:s,s:{s:{s:o,s:o,s:n,s:s,s:[s]}},s:o,s:n,s:s}", "quant_method", "compressed-tensors",
                     "format", "nvfp4-pack-quantized", "quantization_status", "compressed", "config_groups", "group_0",
                     "weights", weights, "input_activations", inputs, "output_activations", "format",
                     "nvfp4-pack-quantized", "targets", "Linear", "ignore", ignore, "kv_cache_scheme", "version",
                     "0.12.2");
}

json_t *cli_quantization_config(const cli_shape *shape, unsigned format, uint32_t layer_first, uint32_t layer_end) {
    if (format == CLI_FORMAT_BF16) return NULL;
    if (format == CLI_FORMAT_FP8 || format == CLI_FORMAT_FP8_E8M0)
        return fp8_blocks(shape, format == CLI_FORMAT_FP8_E8M0);
    if (format == CLI_FORMAT_COMPRESSED_TENSORS) return compressed_tensors(shape);
    if (shape->naming == CLI_GPT_OSS)
        return json_pack("{s:s,s:[s,s,s,s]}", "quant_method", "mxfp4", "modules_to_not_convert",
                         "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head");
    if (shape->naming != CLI_NATIVE) return modelopt();
    return format == CLI_FORMAT_MXFP4 ? fp8_blocks(shape, true) : native_modelopt(shape, layer_first, layer_end);
}

unsigned cli_mtp_format(const cli_shape *shape, unsigned format) {
    switch (format) {
    case CLI_FORMAT_MODELOPT:
    case CLI_FORMAT_COMPRESSED_TENSORS:
    case CLI_FORMAT_FUSED:
    case CLI_FORMAT_TRANSPOSED: return shape->naming == CLI_NATIVE ? CLI_FORMAT_MXFP4 : CLI_FORMAT_BF16;
    default: return format;
    }
}

/* The block after the last layer, which quantizers leave alone and, where its layer has a number, say so. */
static void add_mtp(json_t *config, const cli_shape *shape, unsigned format, uint32_t layer_end) {
    json_t *ignore = json_object_get(json_object_get(config, "quantization_config"), "ignore");
    json_object_set_new(config, "num_nextn_predict_layers", json_integer(1));
    if (!ignore || cli_mtp_format(shape, format) == format) return;
    if (format == CLI_FORMAT_COMPRESSED_TENSORS)
        json_array_append_new(ignore, shape->naming == CLI_NATIVE ? json_string("re:.*mtp.*")
                                                                  : json_sprintf("re:.*layers[.]%u[.].*", layer_end));
    else if (shape->naming != CLI_NATIVE)
        json_array_append_new(ignore, json_sprintf("model.layers.%u*", layer_end));
}

static void add_deepseek_keys(json_t *config, const cli_shape *shape) {
    const megamoe_shape *s = &shape->shape;
    bool v4 = shape->naming == CLI_NATIVE;
    json_object_update_new(config,
                           json_pack("{s:i,s:i,s:i,s:i,s:s,s:s,s:b,s:f}", "moe_intermediate_size", (int)s->intermediate,
                                     "n_routed_experts", (int)s->expert_count, "num_experts_per_tok",
                                     (int)s->experts_per_token, "n_shared_experts", shape->shared ? 1 : 0,
                                     "scoring_func", v4 ? "sqrtsoftplus" : "sigmoid", "topk_method", "noaux_tc",
                                     "norm_topk_prob", 1, "routed_scaling_factor", (double)s->routed_scale));
    if (!v4) {
        json_object_update_new(config,
                               json_pack("{s:i,s:i,s:i}", "n_group", (int)s->group_count, "topk_group",
                                         (int)s->groups_per_token, "first_k_dense_replace", (int)shape->first_layer));
        return;
    }
    if (s->swiglu_limit > 0) json_object_set_new(config, "swiglu_limit", json_real((double)s->swiglu_limit));
    if (shape->hash_layers) json_object_set_new(config, "num_hash_layers", json_integer(shape->hash_layers));
}

static void add_minimax_keys(json_t *config, const megamoe_shape *s) {
    json_object_update_new(config, json_pack("{s:i,s:i,s:i,s:s,s:b,s:s}", "intermediate_size", (int)s->intermediate,
                                             "num_local_experts", (int)s->expert_count, "num_experts_per_tok",
                                             (int)s->experts_per_token, "scoring_func", "sigmoid", "use_routing_bias",
                                             1, "hidden_act", "silu"));
}

static void add_nemotron_keys(json_t *config, const cli_shape *shape) {
    const megamoe_shape *s = &shape->shape;
    int shared = (int)(shape->shared_intermediate ? shape->shared_intermediate : s->intermediate);
    json_object_update_new(
        config, json_pack("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:b,s:f,s:s}", "moe_intermediate_size", (int)s->intermediate,
                          "moe_shared_expert_intermediate_size", shared, "n_routed_experts", (int)s->expert_count,
                          "n_shared_experts", shape->shared ? 1 : 0, "num_experts_per_tok", (int)s->experts_per_token,
                          "n_group", 1, "topk_group", 1, "norm_topk_prob", 1, "routed_scaling_factor",
                          (double)s->routed_scale, "mlp_hidden_act", "relu2"));
}

json_t *cli_synth_config(const cli_shape *shape, unsigned format, const cli_options *options, uint32_t layer_first,
                         uint32_t layer_end) {
    const megamoe_shape *s = &shape->shape;
    json_t *config = json_pack("{s:[s],s:s,s:i,s:i,s:i,s:s}", "architectures", shape->architecture, "model_type",
                               shape->model_type, "hidden_size", (int)s->hidden, "num_hidden_layers", (int)layer_end,
                               "vocab_size", (int)shape->vocabulary, "torch_dtype", "bfloat16");
    if (shape->naming == CLI_GPT_OSS)
        json_object_update_new(config, json_pack("{s:i,s:i,s:i,s:f,s:s}", "intermediate_size", (int)s->intermediate,
                                                 "num_local_experts", (int)s->expert_count, "num_experts_per_tok",
                                                 (int)s->experts_per_token, "swiglu_limit", (double)s->swiglu_limit,
                                                 "hidden_act", "silu"));
    else if (strcmp(shape->model_type, "qwen3_moe") == 0)
        json_object_update_new(config, json_pack("{s:i,s:i,s:i,s:b,s:s}", "moe_intermediate_size", (int)s->intermediate,
                                                 "num_experts", (int)s->expert_count, "num_experts_per_tok",
                                                 (int)s->experts_per_token, "norm_topk_prob", 1, "hidden_act", "silu"));
    else if (shape->naming == CLI_BLOCK_SPARSE)
        add_minimax_keys(config, s);
    else if (shape->naming == CLI_MIXER)
        add_nemotron_keys(config, shape);
    else
        add_deepseek_keys(config, shape);
    bool fp8 = format == CLI_FORMAT_FP8 || format == CLI_FORMAT_FP8_E8M0;
    if ((format == CLI_FORMAT_MXFP4 || fp8) && shape->naming == CLI_NATIVE)
        json_object_set_new(config, "expert_dtype", json_string(fp8 ? "fp8" : "fp4"));
    json_t *quantization = cli_quantization_config(shape, format, layer_first, layer_end);
    if (quantization) json_object_set_new(config, "quantization_config", quantization);
    if (options->mtp) add_mtp(config, shape, format, layer_end);
    if (options->experts.end)
        json_object_set_new(config, "megamoe_experts",
                            json_pack("[i,i]", (int)options->experts.first, (int)options->experts.end));
    return config;
}

json_t *cli_synth_quant_config(const cli_shape *shape, unsigned format, const cli_options *options,
                               uint32_t layer_first, uint32_t layer_end) {
    if (format != CLI_FORMAT_MODELOPT && format != CLI_FORMAT_FUSED && format != CLI_FORMAT_TRANSPOSED) return NULL;
    json_t *quantization = json_pack("{s:s,s:n,s:i,s:[s,s,s]}", "quant_algo", "NVFP4", "kv_cache_quant_algo",
                                     "group_size", 16, "exclude_modules", "lm_head", "*self_attn*", "*mlp.gate");
    if (shape->naming == CLI_NATIVE) {
        json_t *full = native_modelopt(shape, layer_first, layer_end);
        json_object_set_new(quantization, "quant_algo", json_string("MIXED_PRECISION"));
        json_object_set(quantization, "quantized_layers", json_object_get(full, "quantized_layers"));
        json_object_set(quantization, "exclude_modules", json_object_get(full, "ignore"));
        json_decref(full);
    }
    if (options->mtp && shape->naming != CLI_NATIVE)
        json_array_append_new(json_object_get(quantization, "exclude_modules"),
                              json_sprintf("model.layers.%u*", layer_end));
    return json_pack("{s:{s:s,s:s},s:o}", "producer", "name", "modelopt", "version",
                     shape->naming == CLI_NATIVE ? "dsv4-nvfp4-experts" : "0.39.0", "quantization", quantization);
}
