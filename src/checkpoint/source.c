/*
 * One layer from its tensors. The plan comes first: sizes from the router and the first expert, completed by
 * config.json; then every expert must agree with it.
 */
#include "checkpoint/source.h"

#include "error.h"
#include "numerics/bf16.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *const hf_names[] = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"};
static const char *const w_names[] = {"w1", "w3", "w2", "w13"};

static const mm_tensor *router_part(const mm_layer_tensors *layer, mm_router_part part) {
    mm_parts parts;
    mm_layer_parts(layer, MM_PLACE_ROUTER, 0, 0, &parts);
    return parts.part[part];
}

/* Finds the tensors of one routed projection: the expert's own, or its slice of a stack. parts->any false:
 * none. */
static void expert_parts(const mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                         uint32_t expert, mm_projection projection, mm_parts *parts, mm_slice *slice) {
    *slice = (mm_slice){.hidden = plan->shape.hidden, .is_down = projection == MM_DOWN};
    if (!layer->stacked) {
        mm_layer_parts(layer, MM_PLACE_EXPERT, expert, projection, parts);
        return;
    }
    slice->stacked = true;
    slice->expert = expert - plan->expert_first;
    slice->experts = plan->expert_end - plan->expert_first;
    mm_layer_parts(layer, MM_PLACE_STACK, 0, projection, parts);
    if (parts->any || projection == MM_DOWN) return;
    mm_layer_parts(layer, MM_PLACE_STACK, 0, MM_GATE_UP, parts);
    slice->half = projection == MM_GATE ? MM_FIRST_HALF : MM_SECOND_HALF;
    slice->interleaved = reading->config->gate_up == MM_GATE_UP_INTERLEAVED;
}

const mm_tensor *mm_scale_tensor(const mm_layer_tensors *layer, mm_place place, uint32_t expert,
                                 mm_projection projection) {
    static const mm_part spellings[] = {MM_PART_SCALE, MM_PART_NATIVE_SCALE, MM_PART_BLOCK_SCALE, MM_PART_BLOCKS_SCALE};
    mm_parts parts;
    if (place == MM_PLACE_EXPERT && layer->stacked) {
        mm_layer_parts(layer, MM_PLACE_STACK, 0, projection, &parts);
        if (!parts.any) mm_layer_parts(layer, MM_PLACE_STACK, 0, MM_GATE_UP, &parts);
    } else {
        mm_layer_parts(layer, place, expert, projection, &parts);
    }
    for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++)
        if (parts.part[spellings[i]]) return parts.part[spellings[i]];
    return NULL;
}

/* Reads one routed projection; rows and columns 0 mean that they are not known yet. */
static megamoe_status projection_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                                      uint32_t expert, mm_projection projection, mm_matrix *matrix,
                                      float *input_scale) {
    mm_parts parts;
    mm_slice slice;
    expert_parts(reading, layer, plan, expert, projection, &parts, &slice);
    if (!parts.any)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-weight", NULL, "%s.experts.%u has no %s",
                                 layer->prefix, expert, layer->w_names ? w_names[projection] : hf_names[projection]);
    if (slice.half != MM_WHOLE && reading->config->gate_up == MM_GATE_UP_UNKNOWN) {
        char types[512];
        mm_config_model_types(types, sizeof types);
        return mm_reading_refuse(
            reading, MEGAMOE_UNSUPPORTED_MODEL, "unknown-row-order", NULL,
            "%s.experts.gate_up_proj holds gate and up rows in one tensor, and model_type '%s' does "
            "not say whether as halves or interleaved; known types: %s",
            layer->prefix, reading->config->model_type, types);
    }
    MM_TRY(mm_matrix_read(reading, &parts, &slice, matrix));
    *input_scale = mm_input_scale_read(reading, &parts, &slice);
    return MEGAMOE_OK;
}

static megamoe_status extent_check(mm_reading *reading, const mm_layer_tensors *layer, const char *projection,
                                   const mm_matrix *matrix, uint32_t rows, uint32_t columns) {
    if (matrix->rows == rows && matrix->columns == columns) return MEGAMOE_OK;
    return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", NULL,
                             "%s of %s is [%u, %u] (output x input), expected [%u, %u]", projection, layer->prefix,
                             matrix->rows, matrix->columns, rows, columns);
}

static float larger_or_nan(float a, float b) {
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

megamoe_status mm_expert_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              uint32_t expert, mm_expert *out) {
    const megamoe_shape *shape = &plan->shape;
    const char *const *names = layer->w_names ? w_names : hf_names;
    float gate_input = NAN, up_input = NAN;
    *out = (mm_expert){.input_global = NAN, .intermediate_global = NAN};
    reading->expert = (int32_t)expert;
    if (!shape->not_gated) {
        MM_TRY(projection_read(reading, layer, plan, expert, MM_GATE, &out->gate, &gate_input));
        MM_TRY(extent_check(reading, layer, names[MM_GATE], &out->gate, shape->intermediate, shape->hidden));
    }
    MM_TRY(projection_read(reading, layer, plan, expert, MM_UP, &out->up, &up_input));
    MM_TRY(extent_check(reading, layer, names[MM_UP], &out->up, shape->intermediate, shape->hidden));
    MM_TRY(projection_read(reading, layer, plan, expert, MM_DOWN, &out->down, &out->intermediate_global));
    MM_TRY(extent_check(reading, layer, names[MM_DOWN], &out->down, shape->hidden, shape->intermediate));
    out->input_global = shape->not_gated ? up_input : larger_or_nan(gate_input, up_input);
    if (out->up.format != plan->format || out->down.format != plan->format ||
        (!shape->not_gated && out->gate.format != plan->format))
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "mixed-format", NULL,
                                 "gate, up and down are %s, %s and %s, but the layer began as %s",
                                 shape->not_gated ? "absent" : mm_format_name(out->gate.format),
                                 mm_format_name(out->up.format), mm_format_name(out->down.format),
                                 mm_format_name(plan->format));
    reading->expert = -1;
    return MEGAMOE_OK;
}

megamoe_status mm_shared_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              mm_expert *out, bool *present) {
    static const mm_projection projections[] = {MM_GATE, MM_UP, MM_DOWN};
    const mm_tensor *sigmoid = router_part(layer, MM_ROUTER_SHARED_GATE);
    mm_matrix *const matrices[] = {&out->gate, &out->up, &out->down};
    float inputs[3] = {NAN, NAN, NAN};
    mm_parts parts[3];
    mm_slice slice = {.half = MM_WHOLE};
    *out = (mm_expert){.input_global = NAN, .intermediate_global = NAN};
    *present = false;
    for (size_t i = 0; i < 3; i++) {
        mm_layer_parts(layer, MM_PLACE_SHARED, 0, projections[i], &parts[i]);
        *present |= parts[i].any;
    }
    if (!*present) return MEGAMOE_OK;
    if (sigmoid)
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "gated-shared-expert", sigmoid,
                                 "gates the shared expert; only a shared expert of weight 1 is supported");
    for (size_t i = plan->shape.not_gated ? 1 : 0; i < 3; i++) {
        if (!parts[i].any)
            return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-weight", NULL,
                                     "the shared expert of %s has no %s", layer->prefix, hf_names[projections[i]]);
        MM_TRY(mm_matrix_read(reading, &parts[i], &slice, matrices[i]));
        inputs[i] = mm_input_scale_read(reading, &parts[i], &slice);
    }
    out->input_global = plan->shape.not_gated ? inputs[1] : larger_or_nan(inputs[0], inputs[1]);
    out->intermediate_global = inputs[2];
    if (out->gate.codes)
        MM_TRY(extent_check(reading, layer, "the shared gate", &out->gate, out->up.rows, plan->shape.hidden));
    MM_TRY(extent_check(reading, layer, "the shared up", &out->up, out->up.rows, plan->shape.hidden));
    return extent_check(reading, layer, "the shared down", &out->down, plan->shape.hidden, out->up.rows);
}

/* ---- router ----------------------------------------------------------------------------------------------
 */

static megamoe_status router_weight_read(mm_reading *reading, const mm_tensor *tensor, const mm_layer_plan *plan,
                                         mm_router *out) {
    size_t alignment;
    out->weight_dtype = mm_tensor_dtype(tensor);
    if (out->weight_dtype != MEGAMOE_BF16 && out->weight_dtype != MEGAMOE_F32)
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "router", tensor, "is %s, expected BF16 or F32",
                                 mm_tensor_dtype_name(tensor));
    if (tensor->rank != 2 || tensor->extent[0] != plan->shape.expert_count || tensor->extent[1] != plan->shape.hidden)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", tensor,
                                 "is [%" PRId64 ", %" PRId64 "], expected [%u, %u] (experts x hidden)",
                                 tensor->extent[0], tensor->extent[1], plan->shape.expert_count, plan->shape.hidden);
    mm_reading_use(reading, tensor);
    alignment = out->weight_dtype == MEGAMOE_F32 ? 4 : 2;
    out->weight = tensor->data;
    if (!reading->copies || (uintptr_t)tensor->data % alignment == 0) return MEGAMOE_OK;
    out->weight = mm_reading_own(reading, tensor->bytes);
    if (!out->weight) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to align tensor %s", tensor->name);
    memcpy((void *)out->weight, tensor->data, tensor->bytes);
    return MEGAMOE_OK;
}

/* Always as F32: BF16 widens exactly, and F32 is never rounded, which would make different biases equal. */
static megamoe_status router_bias_read(mm_reading *reading, const mm_tensor *tensor, const mm_layer_plan *plan,
                                       mm_router *out) {
    megamoe_dtype dtype = mm_tensor_dtype(tensor);
    uint32_t count = plan->shape.expert_count;
    float *bias;
    if ((dtype != MEGAMOE_F32 && dtype != MEGAMOE_BF16) || tensor->rank != 1 || tensor->extent[0] != count) {
        char shape[128];
        mm_tensor_shape_text(tensor, shape, sizeof shape);
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", tensor, "is %s %s, expected F32 [%u]",
                                 mm_tensor_dtype_name(tensor), shape, count);
    }
    mm_reading_use(reading, tensor);
    if (!reading->copies) return MEGAMOE_OK;
    out->bias = bias = mm_reading_own(reading, count * sizeof *bias);
    if (!bias) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the bias of %u experts", count);
    for (uint32_t i = 0; i < count; i++) {
        uint16_t half;
        if (dtype == MEGAMOE_F32) {
            memcpy(&bias[i], tensor->data + i * sizeof *bias, sizeof *bias);
        } else {
            memcpy(&half, tensor->data + i * sizeof half, sizeof half);
            bias[i] = mm_bf16_to_f32(half);
        }
        if (!isfinite(bias[i]))
            return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "router", tensor, "is %g at [%u]", (double)bias[i],
                                     i);
    }
    return MEGAMOE_OK;
}

/* Entries are array indices later, so every one is checked here, once. */
static megamoe_status token_table_read(mm_reading *reading, const mm_tensor *tensor, const mm_layer_plan *plan,
                                       mm_router *out) {
    megamoe_dtype dtype = mm_tensor_dtype(tensor);
    size_t width = dtype == MEGAMOE_I64 ? 8 : 4, count = tensor->bytes / width;
    uint32_t columns = plan->shape.experts_per_token;
    int32_t *table;
    if ((dtype != MEGAMOE_I64 && dtype != MEGAMOE_I32) || tensor->rank != 2 || tensor->extent[1] != columns ||
        tensor->extent[0] > INT32_MAX) {
        char shape[128];
        mm_tensor_shape_text(tensor, shape, sizeof shape);
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", tensor,
                                 "is %s %s, expected I64 [vocabulary, %u]", mm_tensor_dtype_name(tensor), shape,
                                 columns);
    }
    mm_reading_use(reading, tensor);
    out->vocabulary = (uint32_t)tensor->extent[0];
    if (!reading->copies) return MEGAMOE_OK;
    out->token_experts = table = mm_reading_own(reading, count * sizeof *table);
    if (!table) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the token table of %u tokens", out->vocabulary);
    for (size_t i = 0; i < count; i++) {
        int64_t expert = 0;
        int32_t narrow;
        if (dtype == MEGAMOE_I64) {
            memcpy(&expert, tensor->data + i * width, width);
        } else {
            memcpy(&narrow, tensor->data + i * width, width);
            expert = narrow;
        }
        if (expert < 0 || expert >= plan->shape.expert_count)
            return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "token-table", tensor,
                                     "names expert %" PRId64 " at [%zu, %zu], but there are %u", expert, i / columns,
                                     i % columns, plan->shape.expert_count);
        table[i] = (int32_t)expert;
    }
    return MEGAMOE_OK;
}

megamoe_status mm_router_read(mm_reading *reading, const mm_layer_tensors *layer, const mm_layer_plan *plan,
                              mm_router *out) {
    mm_parts parts;
    mm_layer_parts(layer, MM_PLACE_ROUTER, 0, 0, &parts);
    *out = (mm_router){0};
    if (parts.rival)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "two-spellings", parts.rival,
                                 "is a second tensor for the same part of the router");
    if (parts.part[MM_ROUTER_WEIGHT]) MM_TRY(router_weight_read(reading, parts.part[MM_ROUTER_WEIGHT], plan, out));
    if (parts.part[MM_ROUTER_BIAS]) MM_TRY(router_bias_read(reading, parts.part[MM_ROUTER_BIAS], plan, out));
    if (plan->shape.hash_routed) MM_TRY(token_table_read(reading, parts.part[MM_ROUTER_TABLE], plan, out));
    /* weights whose score function nobody knows would be a guess: the caller routes */
    if (!plan->router_present) *out = (mm_router){0};
    return MEGAMOE_OK;
}

/* ---- plan ------------------------------------------------------------------------------------------------
 */

/* Which experts the files hold, and that none of them is missing or too many. */
static megamoe_status experts_plan(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan) {
    const mm_config *config = reading->config;
    const mm_tensor *gate = router_part(layer, MM_ROUTER_WEIGHT);
    const mm_tensor *stack = layer->stacked ? layer->references[0].tensor : NULL;
    uint32_t first = 0, end, count;
    if (layer->stacked && layer->expert_total)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "two-spellings", stack,
                                 "numbers an expert, but the layer also has stacks of all experts");
    count = gate && gate->rank == 2 && gate->extent[0] <= UINT16_MAX ? (uint32_t)gate->extent[0] : config->experts;
    end = layer->stacked ? (uint32_t)(stack->rank ? stack->extent[0] : 0) : layer->expert_end;
    if (!count) count = config->has_experts_range ? config->experts_end : end;
    if (config->has_experts_range && !layer->mtp) {
        first = config->experts_first;
        if (layer->stacked) end += first;
        if (config->experts_end > count || end != config->experts_end ||
            (!layer->stacked && layer->expert_first != first))
            return mm_reading_refuse(
                reading, MEGAMOE_CORRUPT_FILE, "expert-count", NULL,
                "%s holds experts %u to %u, but config.json declares megamoe_experts [%u, %u] of %u", layer->prefix,
                layer->stacked ? first : layer->expert_first, end, first, config->experts_end, count);
    }
    if (!layer->stacked && layer->expert_total != end - first) {
        mm_names missing = {0};
        mm_parts parts[3];
        for (uint32_t e = first; e < end; e++) {
            mm_layer_parts(layer, MM_PLACE_EXPERT, e, MM_GATE, &parts[0]);
            mm_layer_parts(layer, MM_PLACE_EXPERT, e, MM_UP, &parts[1]);
            mm_layer_parts(layer, MM_PLACE_EXPERT, e, MM_DOWN, &parts[2]);
            if (!parts[0].any && !parts[1].any && !parts[2].any) mm_names_add_number(&missing, e);
        }
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "expert-count", NULL, "%s lacks %u of %u experts: %s",
                                 layer->prefix, missing.count, end - first, missing.text);
    }
    if (end - first == 0 || (!config->has_experts_range && end != count) || end > count)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "expert-count", stack,
                                 "%s%s %u experts in the files, but %s %u", stack ? "" : layer->prefix,
                                 stack ? "stacks" : " has", end - first,
                                 gate ? "the router's rows are" : "config.json declares", count);
    plan->expert_first = first;
    plan->expert_end = end;
    plan->shape.expert_count = count;
    return MEGAMOE_OK;
}

/* H, I, the format and whether there is a gate projection, from the first expert. */
static megamoe_status sizes_plan(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan) {
    const mm_tensor *gate = router_part(layer, MM_ROUTER_WEIGHT);
    mm_matrix up;
    mm_parts parts;
    mm_slice slice;
    float ignored;
    plan->shape.hidden =
        gate && gate->rank == 2 && gate->extent[1] <= INT32_MAX ? (uint32_t)gate->extent[1] : reading->config->hidden;
    expert_parts(reading, layer, plan, plan->expert_first, MM_GATE, &parts, &slice);
    plan->shape.not_gated = !parts.any;
    reading->expert = (int32_t)plan->expert_first;
    MM_TRY(projection_read(reading, layer, plan, plan->expert_first, MM_UP, &up, &ignored));
    if (!gate) plan->shape.hidden = up.columns;
    plan->shape.intermediate = up.rows;
    plan->shape.group_size = up.format == MM_MXFP4 ? 32 : 16;
    plan->format = up.format;
    if (plan->shape.hidden % 16 || plan->shape.intermediate % 16)
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "shape", NULL,
                                 "hidden size %u and intermediate size %u of %s must be multiples of 16",
                                 plan->shape.hidden, plan->shape.intermediate, layer->prefix);
    reading->expert = -1;
    return MEGAMOE_OK;
}

static megamoe_status activation_plan(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan) {
    const mm_config *config = reading->config;
    megamoe_shape *shape = &plan->shape;
    shape->swiglu_alpha = config->swiglu_alpha;
    shape->swiglu_beta = config->swiglu_beta;
    shape->swiglu_limit = config->swiglu_limit;
    if (config->activation_doubt[0])
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "activation", NULL,
                                 "config.json: %s; silu, swigluoai and relu2 are supported", config->activation_doubt);
    if (shape->not_gated && !config->relu2)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-weight", NULL,
                                 "%s.experts.%u has no %s, and config.json does not declare relu2, which needs none",
                                 layer->prefix, plan->expert_first, layer->w_names ? "w1" : "gate_proj");
    if (!shape->not_gated && config->relu2)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "activation", NULL,
                                 "config.json declares relu2, which has no gate projection, but %s has one",
                                 layer->prefix);
    return MEGAMOE_OK;
}

static megamoe_status groups_plan(mm_reading *reading, megamoe_shape *shape) {
    uint32_t groups = reading->config->groups, chosen = reading->config->groups_per_token;
    if (groups <= 1 || shape->hash_routed || shape->score != MEGAMOE_SIGMOID) return MEGAMOE_OK;
    if (shape->expert_count % groups || !chosen || chosen > groups ||
        chosen * (shape->expert_count / groups) < shape->experts_per_token)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "router", NULL,
                                 "config.json: n_group %u and topk_group %u do not fit %u experts, %u per token",
                                 groups, chosen, shape->expert_count, shape->experts_per_token);
    shape->group_count = groups;
    shape->groups_per_token = chosen;
    return MEGAMOE_OK;
}

static megamoe_status routing_plan(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan) {
    const mm_config *config = reading->config;
    const mm_tensor *gate = router_part(layer, MM_ROUTER_WEIGHT), *table = router_part(layer, MM_ROUTER_TABLE);
    megamoe_shape *shape = &plan->shape;
    shape->score = config->score;
    shape->normalize_weights = config->normalize;
    shape->routed_scale = config->routed_scale != 0.0f ? config->routed_scale : 1.0f;
    shape->hash_routed = table != NULL;
    shape->experts_per_token = config->experts_per_token;
    if (table && table->rank == 2 && table->extent[1] <= 32) shape->experts_per_token = (uint32_t)table->extent[1];
    plan->router_present = gate && config->score != 0;
    if (gate && !table && !layer->mtp && layer->layer < config->hash_layers)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "token-table", NULL,
                                 "%s has no gate.tid2eid, but config.json declares num_hash_layers %u", layer->prefix,
                                 config->hash_layers);
    if (!shape->experts_per_token)
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "router", NULL,
                                 "nothing says how many experts a token has: config.json has no num_experts_per_tok");
    if (shape->experts_per_token > shape->expert_count || shape->experts_per_token > 32)
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "router", NULL,
                                 "%u experts per token of %u; at most 32, and no more than there are",
                                 shape->experts_per_token, shape->expert_count);
    return groups_plan(reading, shape);
}

megamoe_status mm_layer_plan_make(mm_reading *reading, const mm_layer_tensors *layer, mm_layer_plan *plan) {
    *plan = (mm_layer_plan){0};
    reading->expert = -1;
    MM_TRY(experts_plan(reading, layer, plan));
    MM_TRY(sizes_plan(reading, layer, plan));
    MM_TRY(activation_plan(reading, layer, plan));
    return routing_plan(reading, layer, plan);
}
