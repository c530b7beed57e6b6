/*
 * Prints as JSON what the library found in a checkpoint, for tests that wrote the file with other code.
 * Matrices are given as the bytes of their codes and scales (hexadecimal, row after row), so that a test
 * compares all of them.
 *
 *     dump [--strict] [--repair] [--no-scan] PATH                     layers and anomalies
 *     dump ... PATH LAYER [FIRST COUNT]                               and one layer's weights
 *     dump --scan ... PATH LAYER                                      layers and anomalies after a scan of
 * LAYER dump --tensor NAME PATH                                         one tensor
 */
#include "checkpoint/checkpoint.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *hex(const uint8_t *bytes, uint64_t pitch, uint64_t row_bytes, uint64_t rows) {
    char *text = malloc(2 * row_bytes * rows + 1), *at = text;
    json_t *json;
    *at = '\0';
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < row_bytes; i++) at += sprintf(at, "%02x", bytes[row * pitch + i]);
    json = json_string(text);
    free(text);
    return json;
}

static json_t *number(float value) {
    return isfinite(value) ? json_real((double)value) : json_null();
}

static json_t *matrix_json(const mm_matrix *m) {
    uint64_t code_bytes = m->format == MM_BF16 ? 2ull * m->columns : m->format == MM_FP8 ? m->columns : m->columns / 2;
    uint64_t scale_rows = m->rows, scale_bytes = m->columns / (m->format == MM_MXFP4 ? 32 : 16);
    json_t *json;
    if (!m->codes) return json_null();
    if (m->format == MM_FP8) {
        scale_rows = (m->rows + m->block_rows - 1) / m->block_rows;
        scale_bytes = (m->columns + m->block_columns - 1) / m->block_columns;
        scale_bytes *= m->scale_dtype == MEGAMOE_F32 ? 4 : 1;
    }
    json = json_pack("{s:s,s:i,s:i,s:i,s:i,s:o,s:i,s:o}", "format", mm_format_name(m->format), "rows", (int)m->rows,
                     "columns", (int)m->columns, "block_rows", (int)m->block_rows, "block_columns",
                     (int)m->block_columns, "global", number(m->global), "scale_dtype", (int)m->scale_dtype, "codes",
                     hex(m->codes, m->row_bytes, code_bytes, m->rows));
    if (m->scales) json_object_set_new(json, "scales", hex(m->scales, m->scale_row_bytes, scale_bytes, scale_rows));
    if (m->bias)
        json_object_set_new(json, "bias", hex(m->bias, m->bias_stride, m->bias_dtype == MEGAMOE_F32 ? 4 : 2, m->rows));
    return json;
}

static json_t *expert_json(const mm_expert *expert) {
    if (!expert) return json_null();
    return json_pack("{s:o,s:o,s:o,s:o,s:o}", "gate", matrix_json(&expert->gate), "up", matrix_json(&expert->up),
                     "down", matrix_json(&expert->down), "input", number(expert->input_global), "intermediate",
                     number(expert->intermediate_global));
}

static json_t *floats(const float *values, uint32_t count) {
    json_t *list = json_array();
    if (!values) return json_decref(list), json_null();
    for (uint32_t i = 0; i < count; i++) json_array_append_new(list, number(values[i]));
    return list;
}

static json_t *router_json(const mm_layer_source *source) {
    const mm_router *router = &source->router;
    const megamoe_shape *shape = &source->shape;
    uint64_t row_bytes = (uint64_t)shape->hidden * (router->weight_dtype == MEGAMOE_F32 ? 4 : 2);
    json_t *table = json_array();
    for (uint64_t i = 0; router->token_experts && i < (uint64_t)router->vocabulary * shape->experts_per_token; i++)
        json_array_append_new(table, json_integer(router->token_experts[i]));
    return json_pack("{s:o,s:o,s:o,s:i}", "weight",
                     router->weight ? hex(router->weight, row_bytes, row_bytes, shape->expert_count) : json_null(),
                     "bias", floats(router->bias, router->bias ? shape->expert_count : 0), "table", table, "vocabulary",
                     (int)router->vocabulary);
}

static json_t *shape_json(const megamoe_shape *s) {
    return json_pack("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:b,s:b,s:b,s:o,s:o,s:o,s:o}", "hidden", (int)s->hidden,
                     "intermediate", (int)s->intermediate, "experts", (int)s->expert_count, "top_k",
                     (int)s->experts_per_token, "group_size", (int)s->group_size, "score", (int)s->score, "groups",
                     (int)s->group_count, "groups_per_token", (int)s->groups_per_token, "hash", (int)s->hash_routed,
                     "normalize", (int)s->normalize_weights, "not_gated", (int)s->not_gated, "scale",
                     number(s->routed_scale), "alpha", number(s->swiglu_alpha), "beta", number(s->swiglu_beta), "limit",
                     number(s->swiglu_limit));
}

static json_t *layers_json(const megamoe_checkpoint *checkpoint) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < megamoe_checkpoint_layer_count(checkpoint); i++) {
        megamoe_layer_info info = {.struct_size = sizeof info};
        if (megamoe_checkpoint_layer(checkpoint, i, &info) != MEGAMOE_OK) continue;
        json_array_append_new(
            list,
            json_pack("{s:i,s:o,s:s,s:s,s:s?,s:s,s:b,s:i,s:i,s:I,s:I,s:i,s:o,s:i}", "layer", (int)info.layer, "shape",
                      shape_json(&info.shape), "format", info.format, "naming", info.naming, "shared_format",
                      info.shared_format, "prefix", info.prefix, "router", (int)info.router_present, "expert_first",
                      (int)info.expert_first, "experts_present", (int)info.experts_present, "expert_bytes",
                      (json_int_t)info.expert_bytes, "other_bytes", (json_int_t)info.other_bytes, "pairs_differing",
                      (int)info.global_pairs_differing, "ratio_max", number(info.global_ratio_max),
                      "input_scales_valid", (int)info.input_scales_valid));
    }
    return list;
}

static json_t *anomalies_json(const megamoe_checkpoint *checkpoint) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < megamoe_checkpoint_anomaly_count(checkpoint); i++) {
        megamoe_anomaly anomaly = {.struct_size = sizeof anomaly};
        if (megamoe_checkpoint_anomaly(checkpoint, i, &anomaly) != MEGAMOE_OK) continue;
        json_array_append_new(list,
                              json_pack("{s:b,s:s,s:s?,s:i,s:i,s:s,s:s?}", "is_error", (int)anomaly.is_error, "kind",
                                        anomaly.kind, "tensor", anomaly.tensor, "layer", anomaly.layer, "expert",
                                        anomaly.expert, "detail", anomaly.detail, "remedy", anomaly.remedy));
    }
    return list;
}

static json_t *source_json(const mm_layer_source *source) {
    json_t *experts = json_array();
    for (uint32_t i = 0; i < source->expert_count; i++)
        json_array_append_new(experts, expert_json(&source->experts[i]));
    return json_pack("{s:o,s:i,s:o,s:o,s:o,s:o,s:o,s:b,s:i}", "shape", shape_json(&source->shape), "first",
                     (int)source->expert_first, "experts", experts, "shared", expert_json(source->shared), "router",
                     router_json(source), "input_scales", floats(source->input_scales, source->present_count),
                     "intermediate_scales", floats(source->intermediate_scales, source->present_count), "w4a4",
                     (int)source->declares_nvfp4_activations, "shards", (int)source->shard_count);
}

static int print(json_t *json) {
    json_dumpf(json, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(json);
    return 0;
}

static json_t *failure(megamoe_status status) {
    return json_pack("{s:{s:s,s:s}}", "error", "status", megamoe_status_name(status), "message",
                     megamoe_error_message());
}

static int tensor_print(const megamoe_checkpoint *checkpoint, const char *name) {
    megamoe_tensor tensor;
    megamoe_status status = megamoe_checkpoint_tensor(checkpoint, name, &tensor);
    json_t *shape = json_array();
    for (uint32_t i = 0; status == MEGAMOE_OK && i < tensor.rank; i++)
        json_array_append_new(shape, json_integer(tensor.extent[i]));
    return print(status == MEGAMOE_OK ? json_pack("{s:i,s:o}", "dtype", (int)tensor.dtype, "shape", shape)
                                      : failure(status));
}

int main(int argc, char **argv) {
    megamoe_checkpoint_options options = {.struct_size = sizeof options};
    megamoe_checkpoint *checkpoint;
    mm_layer_source source;
    const char *tensor = NULL;
    bool scan = false;
    json_t *json;
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        options.strict |= strcmp(argv[i], "--strict") == 0;
        options.repair_nan_scales |= strcmp(argv[i], "--repair") == 0;
        options.skip_scan |= strcmp(argv[i], "--no-scan") == 0;
        scan |= strcmp(argv[i], "--scan") == 0;
        if (strcmp(argv[i], "--tensor") == 0) tensor = argv[++i];
    }
    if (i == argc) return 2;
    megamoe_status status = megamoe_checkpoint_open(argv[i], &options, &checkpoint);
    if (status != MEGAMOE_OK) return print(failure(status));
    if (tensor) {
        tensor_print(checkpoint, tensor);
        megamoe_checkpoint_close(checkpoint);
        return 0;
    }
    uint32_t layer = i + 1 < argc ? (uint32_t)atoi(argv[i + 1]) : 0;
    if (scan) status = megamoe_checkpoint_scan(checkpoint, layer);
    if (!scan && i + 1 < argc)
        status = mm_checkpoint_read_layer(checkpoint, layer, i + 2 < argc ? (uint32_t)atoi(argv[i + 2]) : 0,
                                          i + 3 < argc ? (uint32_t)atoi(argv[i + 3]) : 0, NULL, &source);
    json = status == MEGAMOE_OK ? json_object() : failure(status);
    json_object_set_new(json, "model_type", json_string(megamoe_checkpoint_model_type(checkpoint)));
    json_object_set_new(json, "layers", layers_json(checkpoint));
    json_object_set_new(json, "anomalies", anomalies_json(checkpoint));
    if (!scan && i + 1 < argc && status == MEGAMOE_OK) {
        json_object_set_new(json, "source", source_json(&source));
        mm_layer_source_free(&source);
    }
    megamoe_checkpoint_close(checkpoint);
    return print(json);
}
