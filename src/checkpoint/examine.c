/* What each layer is and what is odd about it, from headers and scalars. */
#include "checkpoint/examine.h"

#include "error.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ERRORS_SHOWN 10 /* of a layer's experts: the same damage in 384 of them is one story */

typedef struct examination {
    mm_reading reading;
    const mm_layer_tensors *layer;
    const mm_quantization *declared;
    mm_anomalies *anomalies;
    megamoe_layer_info *info;
    mm_layer_plan plan;
    uint32_t contradictions;
} examination;

megamoe_status mm_failure_note(const mm_reading *reading, megamoe_status status, mm_anomalies *anomalies) {
    mm_anomaly_place place = {.is_error = true,
                              .kind = reading->kind,
                              .tensor = reading->refused,
                              .layer = (int32_t)reading->layer,
                              .expert = reading->expert};
    char sentence[1024];
    if (status == MEGAMOE_OUT_OF_MEMORY || !place.kind) return status;
    snprintf(sentence, sizeof sentence, "%s", megamoe_error_message());
    return mm_anomalies_add(anomalies, &place, "%s", sentence);
}

static megamoe_status failure_note(examination *x, megamoe_status status) {
    return mm_failure_note(&x->reading, status, x->anomalies);
}

/* The only weights that are not used where they are mapped: that costs memory, so it is said before a load. */
static megamoe_status transposed_note(examination *x) {
    const mm_tensor *stack = x->reading.transposed;
    mm_anomaly_place place = {.kind = "transposed-stack",
                              .tensor = stack ? stack->name : NULL,
                              .layer = (int32_t)x->layer->layer,
                              .expert = -1,
                              .remedy = "Plan this memory for each rank, or publish the stacks as [experts, out, in], "
                                        "which are used in place."};
    char shape[128];
    if (!stack) return MEGAMOE_OK;
    mm_tensor_shape_text(stack, shape, sizeof shape);
    return mm_anomalies_add(x->anomalies, &place,
                            "tensor %s is %s, stacked as [experts, in, out]: its rows are copied when the layer is "
                            "loaded, %.2f MB of memory for each expert, %.2f MB for all %u of layer %u",
                            stack->name, shape, (double)x->info->expert_bytes / 1e6,
                            (double)x->info->expert_bytes * x->info->experts_present / 1e6, x->info->experts_present,
                            x->layer->layer);
}

static megamoe_status contradiction_note(examination *x, const char *key, uint32_t declared, uint32_t found) {
    mm_anomaly_place place = {.kind = "config-contradiction",
                              .layer = (int32_t)x->layer->layer,
                              .expert = -1,
                              .remedy = "The tensors are believed; correct config.json."};
    if (!declared || declared == found) return MEGAMOE_OK;
    x->contradictions++;
    return mm_anomalies_add(x->anomalies, &place, "config.json declares %s %u, the tensors of %s have %u", key,
                            declared, x->layer->prefix, found);
}

static megamoe_status sizes_compare(examination *x) {
    const mm_config *config = x->reading.config;
    const megamoe_shape *shape = &x->plan.shape;
    MM_TRY(contradiction_note(x, "hidden_size", config->hidden, shape->hidden));
    MM_TRY(contradiction_note(x, "moe_intermediate_size", config->intermediate, shape->intermediate));
    if (x->layer->mtp) return MEGAMOE_OK; /* draft blocks may be narrower than the model */
    MM_TRY(contradiction_note(x, "an expert count of", config->experts, shape->expert_count));
    MM_TRY(contradiction_note(x, "num_experts_per_tok", config->experts_per_token, shape->experts_per_token));
    if (shape->hash_routed && config->hash_layers && x->layer->layer >= config->hash_layers) {
        mm_anomaly_place place = {.kind = "config-contradiction",
                                  .layer = (int32_t)x->layer->layer,
                                  .expert = -1,
                                  .remedy = "The layer routes by its table; correct config.json."};
        x->contradictions++;
        return mm_anomalies_add(x->anomalies, &place,
                                "config.json declares num_hash_layers %u, but %s has a token table",
                                config->hash_layers, x->layer->prefix);
    }
    return MEGAMOE_OK;
}

static megamoe_status formats_compare(examination *x) {
    mm_anomaly_place place = {.kind = "config-contradiction",
                              .layer = (int32_t)x->layer->layer,
                              .expert = -1,
                              .remedy = "The tensors are believed; correct the config file."};
    char module[512];
    mm_tensor_name name;
    mm_format expected;
    if (!x->declared->experts) return MEGAMOE_OK;
    mm_tensor_name_parse(x->layer->references[0].tensor->name, &name);
    snprintf(module, sizeof module, "%s.experts.%s", x->layer->prefix,
             x->layer->stacked   ? "down_proj"
             : x->layer->w_names ? "0.w2"
                                 : "0.down_proj");
    expected = mm_quantization_format(x->declared, module, name.stem_length);
    if (expected == x->plan.format || (!expected && x->plan.format != x->declared->experts)) return MEGAMOE_OK;
    x->contradictions++;
    if (!expected)
        return mm_anomalies_add(x->anomalies, &place, "%s leaves %s out of quantization, but its tensors are %s",
                                x->declared->file, module, mm_format_name(x->plan.format));
    return mm_anomalies_add(x->anomalies, &place, "%s declares %s for %s, but its tensors are %s", x->declared->file,
                            mm_format_name(expected), module, mm_format_name(x->plan.format));
}

static void globals_compare(megamoe_layer_info *info, const mm_expert *expert) {
    float gate = expert->gate.global, up = expert->up.global;
    float ratio = gate > up ? gate / up : up / gate;
    if (!expert->gate.codes || expert->gate.format != MM_NVFP4) return;
    if (gate != up) info->global_pairs_differing++;
    if (ratio > info->global_ratio_max) info->global_ratio_max = ratio;
}

static megamoe_status input_scales_note(examination *x, const mm_names *unusable) {
    mm_anomaly_place place = {.kind = "missing-input-scale",
                              .layer = (int32_t)x->layer->layer,
                              .expert = -1,
                              .remedy =
                                  "bf16 activations do not need it; for nvfp4 use --input-global token or unit and "
                                  "--intermediate-global unit."};
    if (x->plan.format != MM_NVFP4 || !unusable->count) return MEGAMOE_OK;
    if (!mm_layer_has_expert_part(x->layer, MM_PART_INPUT) &&
        !mm_layer_has_expert_part(x->layer, MM_PART_INVERSE_INPUT))
        return MEGAMOE_OK; /* a file without calibrated activations: nothing is missing */
    return mm_anomalies_add(
        x->anomalies, &place,
        "%u of %u experts of %s have no usable input_scale (missing, zero, denormal, negative or not "
        "finite): %s",
        unusable->count, x->plan.expert_end - x->plan.expert_first, x->layer->prefix, unusable->text);
}

static megamoe_status experts_examine(examination *x) {
    uint32_t errors = 0;
    mm_names unusable = {0};
    for (uint32_t e = x->plan.expert_first; e < x->plan.expert_end; e++) {
        mm_expert expert;
        megamoe_status status = mm_expert_read(&x->reading, x->layer, &x->plan, e, &expert);
        if (status != MEGAMOE_OK) {
            if (errors++ < ERRORS_SHOWN) MM_TRY(failure_note(x, status));
            continue;
        }
        if (!x->info->expert_bytes)
            x->info->expert_bytes = (expert.gate.codes ? mm_matrix_bytes(&expert.gate) : 0) +
                                    mm_matrix_bytes(&expert.up) + mm_matrix_bytes(&expert.down);
        globals_compare(x->info, &expert);
        if (isnan(expert.input_global) || isnan(expert.intermediate_global))
            mm_names_add_number(&unusable, e);
        else
            x->info->input_scales_valid++;
    }
    x->reading.expert = -1;
    if (errors > ERRORS_SHOWN) {
        mm_anomaly_place place = {
            .is_error = true, .kind = "more-errors", .layer = (int32_t)x->layer->layer, .expert = -1};
        MM_TRY(mm_anomalies_add(x->anomalies, &place, "%u of %u experts of %s cannot be read; the first %d are listed",
                                errors, x->plan.expert_end - x->plan.expert_first, x->layer->prefix, ERRORS_SHOWN));
    }
    if (x->info->global_pairs_differing) {
        mm_anomaly_place place = {.kind = "global-scales-differ",
                                  .layer = (int32_t)x->layer->layer,
                                  .expert = -1,
                                  .remedy =
                                      "Nothing needs to be done here: gate and up keep their own; engines that fuse "
                                      "them may not."};
        MM_TRY(mm_anomalies_add(x->anomalies, &place,
                                "gate and up of %u experts of %s have different global scales, by up to %.4g",
                                x->info->global_pairs_differing, x->layer->prefix, (double)x->info->global_ratio_max));
    }
    return input_scales_note(x, &unusable);
}

static megamoe_status router_examine(examination *x) {
    mm_anomaly_place place = {.kind = "unknown-router",
                              .layer = (int32_t)x->layer->layer,
                              .expert = -1,
                              .remedy = "Route in the caller: pass expert_ids and expert_weights."};
    mm_parts parts;
    mm_router router;
    megamoe_status status = mm_router_read(&x->reading, x->layer, &x->plan, &router);
    if (status != MEGAMOE_OK) return failure_note(x, status);
    mm_layer_parts(x->layer, MM_PLACE_ROUTER, 0, 0, &parts);
    for (uint32_t i = 0; i < MM_ROUTER_PART_COUNT; i++)
        if (parts.part[i]) x->info->other_bytes += parts.part[i]->bytes;
    x->info->router_present = x->plan.router_present;
    if (!parts.part[MM_ROUTER_WEIGHT] || x->plan.router_present) return MEGAMOE_OK;
    return mm_anomalies_add(x->anomalies, &place, "%s has a router, but how it scores is unknown: %s", x->layer->prefix,
                            x->reading.config->router_doubt);
}

static megamoe_status shared_examine(examination *x) {
    mm_expert shared;
    bool present;
    megamoe_status status = mm_shared_read(&x->reading, x->layer, &x->plan, &shared, &present);
    if (status != MEGAMOE_OK) return failure_note(x, status);
    if (!present) return MEGAMOE_OK;
    x->info->shared_format = mm_format_name(shared.up.format);
    x->info->other_bytes += (shared.gate.codes ? mm_matrix_bytes(&shared.gate) : 0) + mm_matrix_bytes(&shared.up) +
                            mm_matrix_bytes(&shared.down);
    return MEGAMOE_OK;
}

static const char *naming_name(const mm_layer_tensors *layer) {
    if (layer->stacked) return "fused";
    if (mm_layer_has_expert_part(layer, MM_PART_PACKED)) return "compressed-tensors";
    if (mm_layer_has_expert_part(layer, MM_PART_NATIVE_SCALE)) return "deepseek-native";
    return "modelopt";
}

megamoe_status mm_layer_examine(const mm_tensors *tensors, const mm_config *config, const mm_quantization *declared,
                                const mm_layer_tensors *layer, mm_anomalies *anomalies, megamoe_layer_info *info,
                                uint32_t *contradictions) {
    examination x = {.reading = {.tensors = tensors, .config = config, .layer = layer->layer, .expert = -1},
                     .layer = layer,
                     .declared = declared,
                     .anomalies = anomalies,
                     .info = info};
    megamoe_status status;
    *info = (megamoe_layer_info){.struct_size = sizeof *info,
                                 .layer = layer->layer,
                                 .format = "unknown",
                                 .naming = naming_name(layer),
                                 .prefix = layer->prefix};
    status = mm_layer_plan_make(&x.reading, layer, &x.plan);
    info->shape = x.plan.shape;
    info->expert_first = x.plan.expert_first;
    info->experts_present = x.plan.expert_end - x.plan.expert_first;
    if (x.plan.format) info->format = mm_format_name(x.plan.format);
    if (status != MEGAMOE_OK) return failure_note(&x, status);
    MM_TRY(sizes_compare(&x));
    MM_TRY(formats_compare(&x));
    MM_TRY(experts_examine(&x));
    MM_TRY(transposed_note(&x));
    MM_TRY(router_examine(&x));
    status = shared_examine(&x);
    *contradictions += x.contradictions;
    return status;
}
