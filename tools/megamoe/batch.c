/* The input of a layer from a safetensors file, checked against the layer's shape before anything runs. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static int wrong_shape(const char *path, const char *name, const megamoe_tensor *tensor, const char *wanted) {
    char extents[96] = "";
    for (unsigned i = 0; i < tensor->rank; i++)
        snprintf(extents + strlen(extents), sizeof extents - strlen(extents), "%s%lld", i ? ", " : "",
                 (long long)tensor->extent[i]);
    return cli_fail("%s: tensor '%s' has shape [%s], but this layer needs %s.", path, name, extents, wanted);
}

/* Copies I32 or I64 values as int32; a value that does not fit becomes -2, which no expert or token has. */
static int copy_ids(const char *path, const char *name, const megamoe_tensor *tensor, size_t count, int32_t **ids) {
    if (tensor->dtype != MEGAMOE_I32 && tensor->dtype != MEGAMOE_I64)
        return cli_fail("%s: tensor '%s' must be I32 or I64.", path, name);
    *ids = cli_allocate(count, sizeof **ids);
    if (tensor->dtype == MEGAMOE_I32) {
        if (count) memcpy(*ids, tensor->data, count * sizeof **ids);
        return CLI_GOOD;
    }
    for (size_t i = 0; i < count; i++) {
        int64_t value;
        memcpy(&value, (const char *)tensor->data + i * sizeof value, sizeof value);
        (*ids)[i] = value >= INT32_MIN && value <= INT32_MAX ? (int32_t)value : -2;
    }
    return CLI_GOOD;
}

static int read_hidden(const char *path, const megamoe_shape *shape, cli_batch *batch) {
    megamoe_tensor hidden;
    megamoe_status status = megamoe_checkpoint_tensor(batch->file, "hidden", &hidden);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    char *wanted = cli_format("[tokens, %u]", shape->hidden);
    int result = CLI_GOOD;
    if (hidden.rank != 2 || hidden.extent[1] != shape->hidden)
        result = wrong_shape(path, "hidden", &hidden, wanted);
    else if (hidden.dtype != MEGAMOE_BF16 && hidden.dtype != MEGAMOE_F32)
        result = cli_fail("%s: tensor 'hidden' must be BF16 or F32.", path);
    else if (hidden.extent[0] > 1 << 24)
        result = cli_fail("%s: tensor 'hidden' has %lld tokens, more than the %d of one batch.", path,
                          (long long)hidden.extent[0], 1 << 24);
    free(wanted);
    if (result != CLI_GOOD) return result;
    batch->batch = (megamoe_batch){.struct_size = sizeof batch->batch,
                                   .token_count = (uint32_t)hidden.extent[0],
                                   .hidden = hidden.data,
                                   .hidden_dtype = hidden.dtype};
    return CLI_GOOD;
}

static int read_routing(const char *path, const megamoe_shape *shape, cli_batch *batch) {
    megamoe_tensor ids, weights;
    int64_t tokens = batch->batch.token_count;
    size_t count = (size_t)tokens * shape->experts_per_token;
    bool have_ids = megamoe_checkpoint_tensor(batch->file, "expert_ids", &ids) == MEGAMOE_OK;
    bool have_weights = megamoe_checkpoint_tensor(batch->file, "expert_weights", &weights) == MEGAMOE_OK;
    if (!have_ids && !have_weights) return CLI_GOOD;
    if (!have_ids || !have_weights)
        return cli_fail("%s: expert_ids and expert_weights belong together, and only %s is there.", path,
                        have_ids ? "expert_ids" : "expert_weights");

    char *wanted = cli_format("[%lld, %u]", (long long)tokens, shape->experts_per_token);
    int result = CLI_GOOD;
    if (ids.rank != 2 || ids.extent[0] != tokens || ids.extent[1] != shape->experts_per_token)
        result = wrong_shape(path, "expert_ids", &ids, wanted);
    else if (weights.rank != 2 || weights.extent[0] != tokens || weights.extent[1] != shape->experts_per_token)
        result = wrong_shape(path, "expert_weights", &weights, wanted);
    else if (weights.dtype != MEGAMOE_F32)
        result = cli_fail("%s: tensor 'expert_weights' must be F32.", path);
    else
        result = copy_ids(path, "expert_ids", &ids, count, &batch->expert_ids);
    free(wanted);
    if (result != CLI_GOOD) return result;
    batch->expert_weights = cli_allocate(count, sizeof(float));
    if (count) memcpy(batch->expert_weights, weights.data, count * sizeof(float));
    batch->batch.expert_ids = batch->expert_ids;
    batch->batch.expert_weights = batch->expert_weights;
    return CLI_GOOD;
}

static int read_token_ids(const char *path, cli_batch *batch) {
    megamoe_tensor ids;
    int64_t tokens = batch->batch.token_count;
    if (megamoe_checkpoint_tensor(batch->file, "token_ids", &ids) != MEGAMOE_OK) return CLI_GOOD;
    char *wanted = cli_format("[%lld]", (long long)tokens);
    int result = ids.rank != 1 || ids.extent[0] != tokens
                     ? wrong_shape(path, "token_ids", &ids, wanted)
                     : copy_ids(path, "token_ids", &ids, (size_t)tokens, &batch->token_ids);
    free(wanted);
    batch->batch.token_ids = batch->token_ids;
    return result;
}

int cli_batch_read(const char *path, const megamoe_shape *shape, cli_batch *batch) {
    *batch = (cli_batch){0};
    megamoe_status status = megamoe_checkpoint_open(path, NULL, &batch->file);
    int result = status == MEGAMOE_OK ? read_hidden(path, shape, batch) : cli_fail_status(status);
    if (result == CLI_GOOD) result = read_routing(path, shape, batch);
    if (result == CLI_GOOD) result = read_token_ids(path, batch);
    if (result != CLI_GOOD) cli_batch_free(batch);
    return result;
}

void cli_batch_free(cli_batch *batch) {
    free(batch->token_ids);
    free(batch->expert_ids);
    free(batch->expert_weights);
    megamoe_checkpoint_close(batch->file);
    *batch = (cli_batch){0};
}
