/* Decisions made once, when a layer is loaded, so that no backend repeats them. */
#include "layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "layer_tensors.h"

/* ---- the shape ---- */

static megamoe_status check_numbers(const megamoe_shape *s) {
    if (!(s->swiglu_limit >= 0.0f) || isinf(s->swiglu_limit))
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "swiglu_limit is %g; it must be 0 (no clamp) or a positive number",
                       (double)s->swiglu_limit);
    if (!isfinite(s->swiglu_alpha) || !isfinite(s->swiglu_beta))
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "swiglu alpha %g and beta %g must be finite", (double)s->swiglu_alpha,
                       (double)s->swiglu_beta);
    if (!isfinite(s->routed_scale) || s->routed_scale < 0.0f)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "the routed scaling factor is %g; it must be a positive number",
                       (double)s->routed_scale);
    return MEGAMOE_OK;
}

static megamoe_status check_groups(const megamoe_shape *s) {
    if (s->group_count <= 1) return MEGAMOE_OK;
    if (s->score != MEGAMOE_SIGMOID)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "group-limited routing (%u groups) is defined for sigmoid scores only", s->group_count);
    if (s->expert_count % s->group_count != 0 || s->groups_per_token == 0 || s->groups_per_token > s->group_count)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "%u experts in %u groups with %u groups per token do not fit together", s->expert_count,
                       s->group_count, s->groups_per_token);
    if (s->experts_per_token > s->expert_count / s->group_count * s->groups_per_token)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "%u experts per token do not fit in %u groups of %u experts",
                       s->experts_per_token, s->groups_per_token, s->expert_count / s->group_count);
    return MEGAMOE_OK;
}

megamoe_status mm_shape_complete(megamoe_shape *s) {
    if (s->hidden == 0 || s->hidden % 16 != 0 || s->intermediate == 0 || s->intermediate % 16 != 0)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "hidden size %u and intermediate size %u must be positive multiples of 16", s->hidden,
                       s->intermediate);
    if (s->expert_count == 0 || s->expert_count > MM_EXPERTS_MAX)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "%u experts; a layer can have 1 to %u", s->expert_count,
                       MM_EXPERTS_MAX);
    if (s->experts_per_token == 0 || s->experts_per_token > MM_EXPERTS_PER_TOKEN_MAX ||
        s->experts_per_token > s->expert_count)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "%u experts per token of %u experts; it can be 1 to %u",
                       s->experts_per_token, s->expert_count,
                       s->expert_count < MM_EXPERTS_PER_TOKEN_MAX ? s->expert_count : MM_EXPERTS_PER_TOKEN_MAX);
    if (s->score == 0) s->score = MEGAMOE_SQRTSOFTPLUS;
    if (s->score < MEGAMOE_SQRTSOFTPLUS || s->score > MEGAMOE_TOPK_SOFTMAX)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "there is no router score %d", (int)s->score);
    if (s->group_size == 0) s->group_size = 16;
    if (s->routed_scale == 0.0f) s->routed_scale = 1.0f;
    if (s->swiglu_alpha == 0.0f) s->swiglu_alpha = 1.0f;
    MM_TRY(check_numbers(s));
    return check_groups(s);
}

/* ---- global scales of nvfp4 activations ---- */

/* How many of the present experts have a usable scale, and the first ones that have none, as words. */
static uint32_t count_usable(const float *scales, uint32_t first, uint32_t count, char *missing, size_t room) {
    uint32_t usable = 0, listed = 0;
    size_t used = 0;
    missing[0] = '\0';
    for (uint32_t i = 0; i < count; i++) {
        if (scales && !isnan(scales[i])) {
            usable++;
        } else if (listed < 10 && used < room) {
            used += (size_t)snprintf(missing + used, room - used, "%s%u", listed ? ", " : "", first + i);
            listed++;
        }
    }
    if (count - usable > listed && used < room) snprintf(missing + used, room - used, ", ...");
    return usable;
}

/*
 * AUTO is static if every expert has a usable scale and `fallback` if none has; when only some have, guessing
 * for the others would give garbage on some prompts only, so that is refused.
 */
static megamoe_status decide_global(const char *what, const char *option, const char *alternatives, const float *scales,
                                    uint32_t first, uint32_t count, megamoe_global fallback, megamoe_global *mode) {
    char missing[128];
    uint32_t usable;
    if (*mode != MEGAMOE_GLOBAL_AUTO && *mode != MEGAMOE_GLOBAL_STATIC) return MEGAMOE_OK;
    usable = count_usable(scales, first, count, missing, sizeof missing);
    if (usable == count) {
        *mode = MEGAMOE_GLOBAL_STATIC;
        return MEGAMOE_OK;
    }
    if (usable == 0 && *mode == MEGAMOE_GLOBAL_AUTO) {
        *mode = fallback;
        return MEGAMOE_OK;
    }
    return mm_fail(MEGAMOE_CORRUPT_FILE,
                   "nvfp4 activations need a finite, positive %s input_scale of every expert, and %u of %u have none: "
                   "experts %s; use %s %s, or --activations bf16",
                   what, count - usable, count, missing, option, alternatives);
}

/* The maximum over the experts of the layer, and over a shared expert that is staged with them. */
static float largest_scale(const float *scales, uint32_t count, const mm_expert *shared) {
    float largest = shared && !isnan(shared->input_global) ? shared->input_global : 0.0f;
    for (uint32_t i = 0; i < count; i++) largest = fmaxf(largest, scales[i]);
    return largest;
}

typedef struct scales {
    const float *input, *intermediate; /* [count], or NULL */
    uint32_t first, count;
} scales;

/* True if this expert's down projection reads quantized activations in nvfp4 mode. */
static bool is_four_bit(const mm_expert *e) {
    return e->down.format == MM_NVFP4 || e->down.format == MM_MXFP4;
}

static megamoe_status decide_activations(const mm_backend *backend, const megamoe_layer_options *options, bool declared,
                                         const scales *s, mm_layer_weights *w) {
    w->activations = options->activations;
    if (w->activations == MEGAMOE_ACTIVATIONS_AUTO)
        w->activations = backend->native_nvfp4 && declared ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16;
    w->input_mode = options->input_global;
    w->intermediate_mode = options->intermediate_global;
    w->input_global = 1.0f;
    if (w->activations == MEGAMOE_ACTIVATIONS_BF16) return MEGAMOE_OK;
    if (w->intermediate_mode == MEGAMOE_GLOBAL_TOKEN)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "the intermediate global scale can be static or unit, not token");
    MM_TRY(decide_global("gate and up", "--input-global", "token or unit", s->input, s->first, s->count,
                         MEGAMOE_GLOBAL_TOKEN, &w->input_mode));
    MM_TRY(decide_global("down", "--intermediate-global", "unit", s->intermediate, s->first, s->count,
                         MEGAMOE_GLOBAL_UNIT, &w->intermediate_mode));
    if (w->shared && is_four_bit(w->shared) && w->intermediate_mode == MEGAMOE_GLOBAL_STATIC &&
        isnan(w->shared->intermediate_global))
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "the shared expert has no usable down input_scale while the routed experts "
                       "have; use --intermediate-global unit, or --activations bf16");
    if (w->input_mode == MEGAMOE_GLOBAL_STATIC) w->input_global = largest_scale(s->input, s->count, w->shared);
    return MEGAMOE_OK;
}

/* ---- what both origins share ---- */

static mm_swiglu swiglu_of(const megamoe_shape *shape, bool clamped) {
    return (mm_swiglu){.alpha = shape->swiglu_alpha,
                       .beta = shape->swiglu_beta,
                       .limit = clamped && shape->swiglu_limit > 0.0f ? shape->swiglu_limit : INFINITY,
                       .relu2 = shape->not_gated};
}

static megamoe_status finish(const mm_backend *backend, const megamoe_layer_options *options, uint32_t expert_first,
                             bool declared, const scales *s, mm_layer_parts *parts) {
    mm_layer_weights *w = &parts->weights;
    w->swiglu = swiglu_of(&w->shape, true);
    w->shared_swiglu = swiglu_of(&w->shape, !options->shared_unclamped);
    w->routing_weight_before = options->routing_weight_before;
    MM_TRY(decide_activations(backend, options, declared, s, w));
    parts->local_index = malloc(w->shape.expert_count * sizeof *parts->local_index);
    if (!parts->local_index) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", w->shape.expert_count);
    for (uint32_t e = 0; e < w->shape.expert_count; e++)
        parts->local_index[e] = e - expert_first < w->expert_count ? (int32_t)(e - expert_first) : -1;
    w->local_index = parts->local_index;
    return MEGAMOE_OK;
}

void mm_layer_parts_free(mm_layer_parts *parts) {
    mm_layer_source_free(&parts->source);
    free(parts->experts);
    free(parts->router_bias);
    free(parts->token_experts);
    free(parts->local_index);
    memset(parts, 0, sizeof *parts);
}

megamoe_status mm_layer_from_checkpoint(const mm_backend *backend, const megamoe_checkpoint *checkpoint, uint32_t layer,
                                        const megamoe_layer_options *options, const megamoe_device_options *device,
                                        mm_layer_parts *parts) {
    const mm_load_report report = {options->progress, options->progress_context, device->log, device->log_context};
    mm_layer_source *source = &parts->source;
    mm_layer_weights *w = &parts->weights;
    MM_TRY(mm_checkpoint_read_layer(checkpoint, layer, options->expert_first, options->expert_count, &report, source));
    w->shape = source->shape;
    MM_TRY(mm_shape_complete(&w->shape));
    w->experts = source->experts;
    w->expert_count = source->expert_count;
    w->shared = source->shared;
    w->router = source->router;
    w->strict = source->strict;
    scales s = {source->input_scales, source->intermediate_scales, source->present_first, source->present_count};
    return finish(backend, options, source->expert_first, source->declares_nvfp4_activations, &s, parts);
}

/* The stacked experts [expert_count, ...] of the caller, cut into matrices, with their activations' scales
 * beside. */
static megamoe_status cut_experts(const mm_memory *memory, const megamoe_layer_desc *desc, mm_layer_parts *parts,
                                  float *input, float *intermediate) {
    const mm_projections routed = {&desc->gate, &desc->up, &desc->down, {"gate", "up", "down"}};
    const mm_projections shared = {
        &desc->shared_gate, &desc->shared_up, &desc->shared_down, {"shared_gate", "shared_up", "shared_down"}};
    mm_layer_weights *w = &parts->weights;
    for (uint32_t e = 0; e < w->expert_count; e++) {
        MM_TRY(mm_expert_from_tensors(memory, &routed, &w->shape, w->expert_count, e, &parts->experts[e]));
        input[e] = parts->experts[e].input_global;
        intermediate[e] = parts->experts[e].intermediate_global;
    }
    w->experts = parts->experts;
    if (!desc->shared_up.codes.data) return MEGAMOE_OK;
    MM_TRY(mm_expert_from_tensors(memory, &shared, &w->shape, 0, 0, &parts->shared));
    w->shared = &parts->shared;
    return MEGAMOE_OK;
}

megamoe_status mm_layer_from_tensors(const mm_memory *memory, const megamoe_layer_desc *desc,
                                     const megamoe_layer_options *options, mm_layer_parts *parts) {
    mm_layer_weights *w = &parts->weights;
    float *input, *intermediate;
    megamoe_status status;
    w->shape = desc->shape;
    MM_TRY(mm_shape_complete(&w->shape));
    if (desc->up.codes.rank != 3 || desc->up.codes.extent[0] <= 0 || desc->up.codes.extent[0] > w->shape.expert_count)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "up codes must be [experts, N, K] with 1 to %u experts",
                       w->shape.expert_count);
    w->expert_count = (uint32_t)desc->up.codes.extent[0];
    if (options->expert_first > w->shape.expert_count - w->expert_count)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "experts %u to %u of a layer of %u", options->expert_first,
                       options->expert_first + w->expert_count - 1, w->shape.expert_count);
    if (options->expert_count != 0 && options->expert_count != w->expert_count)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "expert_count is %u, but the tensors hold %u experts",
                       options->expert_count, w->expert_count);
    parts->experts = calloc(w->expert_count, sizeof *parts->experts);
    input = malloc(2 * (size_t)w->expert_count * sizeof *input);
    if (!parts->experts || !input) {
        free(input);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", w->expert_count);
    }
    intermediate = input + w->expert_count;
    status = cut_experts(memory, desc, parts, input, intermediate);
    if (status == MEGAMOE_OK)
        status = mm_router_from_tensors(memory, desc, &w->router, &parts->router_bias, &parts->token_experts);
    if (status == MEGAMOE_OK) {
        scales s = {input, intermediate, options->expert_first, w->expert_count};
        status = finish(memory->backend, options, options->expert_first, true, &s, parts);
    }
    free(input);
    return status;
}
