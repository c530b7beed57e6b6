/*
 * Input scales for quantize: each layer runs once on sample hidden states with the weights it has, and the largest
 * values that every expert met give its scales. Nothing is guessed but what an expert without tokens would meet.
 */
#include "calibrate.h"

#include <math.h>
#include <stdlib.h>

#include "formats.h"

enum { NVFP4_LARGEST = 2688 }; /* 448 * 6: a scale of amax / 2688 puts amax at the end of the range */

/* Sample states of this layer: "layers.N.hidden" and its companions if they are there, else "hidden". */
static int read_samples(const char *path, const megamoe_layer_info *info, cli_batch *batch) {
    megamoe_checkpoint *file = NULL;
    megamoe_tensor tensor;
    megamoe_status status = megamoe_checkpoint_open(path, NULL, &file);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    char *prefix = cli_format("layers.%u.", info->layer), *name = cli_format("%shidden", prefix);
    bool own = megamoe_checkpoint_tensor(file, name, &tensor) == MEGAMOE_OK;
    megamoe_checkpoint_close(file);
    int result = cli_batch_read(path, own ? prefix : "", &info->shape, batch);
    free(prefix);
    free(name);
    return result;
}

/* The largest magnitude of a row; infinite if the row has a NaN or an infinity. */
static float row_amax(const void *values, megamoe_dtype dtype, size_t first, size_t count) {
    float amax = 0;
    for (size_t i = first; i < first + count; i++) {
        float value = dtype == MEGAMOE_F32 ? ((const float *)values)[i] : bf16_value(((const uint16_t *)values)[i]);
        if (!isfinite(value)) return INFINITY;
        amax = fmaxf(amax, fabsf(value));
    }
    return amax;
}

static void collect(const cli_batch *samples, const megamoe_stages *stages, const megamoe_shape *shape, float *input,
                    float *intermediate) {
    uint32_t top = shape->experts_per_token;
    for (size_t t = 0; t < samples->batch.token_count; t++) {
        float x = row_amax(samples->batch.hidden, samples->batch.hidden_dtype, t * shape->hidden, shape->hidden);
        for (size_t slot = t * top; slot < (t + 1) * top; slot++) {
            int32_t expert = stages->expert_ids[slot];
            if (expert < 0) continue;
            float h = row_amax(stages->h, MEGAMOE_BF16, slot * shape->intermediate, shape->intermediate);
            input[expert] = fmaxf(input[expert], x);
            intermediate[expert] = fmaxf(intermediate[expert], h);
        }
    }
}

/* amax / 2688; experts that met nothing take the layer's largest, since too large a scale is harmless. */
static int finish(const megamoe_layer_info *info, float *scales, uint32_t *unmet) {
    float largest = 0;
    *unmet = 0;
    for (uint32_t e = 0; e < info->shape.expert_count; e++) largest = fmaxf(largest, scales[e]);
    if (!(largest > 0) || !isfinite(largest))
        return cli_fail("layer %u cannot be calibrated: the largest value is %g.", info->layer, (double)largest);
    for (uint32_t e = 0; e < info->shape.expert_count; e++) {
        *unmet += scales[e] == 0;
        scales[e] = (scales[e] > 0 ? scales[e] : largest) / NVFP4_LARGEST;
    }
    return CLI_GOOD;
}

static megamoe_status run_layer(cli_session *session, const megamoe_layer_info *info, const megamoe_batch *batch,
                                megamoe_stages *stages) {
    megamoe_device_options open = {
        .struct_size = sizeof open, .backend = MEGAMOE_CPU, .max_tokens = batch->token_count};
    megamoe_layer_options load = {.struct_size = sizeof load, .activations = MEGAMOE_ACTIVATIONS_BF16};
    megamoe_layer_facts facts = {.struct_size = sizeof facts};
    megamoe_batch samples = *batch;
    uint32_t written = 0;
    open.group.struct_size = sizeof open.group;
    megamoe_status status = megamoe_device_open(&open, &session->device);
    if (status == MEGAMOE_OK)
        status = megamoe_layer_load(session->device, session->checkpoint, info->layer, &load, &session->layer);
    if (status != MEGAMOE_OK) return status;
    megamoe_layer_describe(session->layer, &facts);
    cli_stages_allocate(stages, &facts, batch->token_count, false);
    samples.output = stages->output;
    return megamoe_layer_run_stages(session->layer, &samples, NULL, stages, &written);
}

int cli_calibrate(const char *path, megamoe_checkpoint *checkpoint, const megamoe_layer_info *info, float *input,
                  float *intermediate, uint32_t *unmet) {
    cli_session session = {.checkpoint = checkpoint};
    cli_batch samples;
    megamoe_stages stages = {.struct_size = sizeof stages};
    if (read_samples(path, info, &samples) != CLI_GOOD) return CLI_BAD_INPUT;
    int result = CLI_GOOD;
    if (!samples.batch.token_count)
        result = cli_fail("%s has no tokens to calibrate layer %u with.", path, info->layer);
    if (result == CLI_GOOD) {
        megamoe_status status = run_layer(&session, info, &samples.batch, &stages);
        if (status != MEGAMOE_OK) result = cli_fail_status(status);
    }
    if (result == CLI_GOOD) {
        collect(&samples, &stages, &info->shape, input, intermediate);
        result = finish(info, intermediate, unmet);
    }
    if (result == CLI_GOOD) result = finish(info, input, unmet);
    cli_stages_free(&stages);
    cli_batch_free(&samples);
    session.checkpoint = NULL; /* the caller's */
    cli_session_close(&session);
    return result;
}
