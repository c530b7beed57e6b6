/* The input of a layer from a safetensors file, checked against the layer's shape before anything runs. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void put_extents(char text[96], uint32_t rank, const int64_t *extent) {
    text[0] = 0;
    for (uint32_t i = 0; i < rank; i++)
        snprintf(text + strlen(text), 96 - strlen(text), "%s%lld", i ? ", " : "", (long long)extent[i]);
}

int cli_wrong_shape(const char *path, const char *name, const megamoe_tensor *tensor, uint32_t rank,
                    const int64_t *wanted) {
    char has[96], needs[96];
    put_extents(has, tensor->rank, tensor->extent);
    put_extents(needs, rank, wanted);
    return cli_fail("%s: tensor '%s' has shape [%s], but this layer and these tokens need [%s].", path, name, has,
                    needs);
}

static bool has_shape(const megamoe_tensor *tensor, int64_t rows, int64_t columns) {
    return tensor->rank == 2 && tensor->extent[0] == rows && tensor->extent[1] == columns;
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

/* A tensor of the file under the batch's prefix. */
static megamoe_status find(const cli_batch *batch, const char *name, megamoe_tensor *tensor) {
    char *full = cli_format("%s%s", batch->prefix, name);
    megamoe_status status = megamoe_checkpoint_tensor(batch->file, full, tensor);
    free(full);
    return status;
}

/* Names what is there instead: most often the states are under another name, or the file is another one. */
static int no_hidden(const char *path, const cli_batch *batch) {
    char list[256] = "no tensors";
    size_t used = 0;
    const char *name;
    for (uint32_t i = 0; (name = megamoe_checkpoint_tensor_name(batch->file, i)) && used < sizeof list; i++) {
        if (i == 5) {
            snprintf(list + used, sizeof list - used, ", ...");
            break;
        }
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%.60s", i ? ", " : "", name);
    }
    return cli_fail("%s has no tensor '%shidden'; it has %s.", path, batch->prefix, list);
}

static int read_hidden(const char *path, const megamoe_shape *shape, cli_batch *batch) {
    megamoe_tensor hidden;
    if (find(batch, "hidden", &hidden) != MEGAMOE_OK) return no_hidden(path, batch);
    const int64_t tokens = hidden.rank == 2 ? hidden.extent[0] : 1;
    if (!has_shape(&hidden, tokens, shape->hidden))
        return cli_wrong_shape(path, "hidden", &hidden, 2, (int64_t[]){tokens, shape->hidden});
    if (hidden.dtype != MEGAMOE_BF16 && hidden.dtype != MEGAMOE_F32)
        return cli_fail("%s: tensor 'hidden' must be BF16 or F32.", path);
    if (tokens > 1 << 24)
        return cli_fail("%s: tensor 'hidden' has %lld tokens, more than the %d of one batch.", path, (long long)tokens,
                        1 << 24);
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
    bool have_ids = find(batch, "expert_ids", &ids) == MEGAMOE_OK;
    bool have_weights = find(batch, "expert_weights", &weights) == MEGAMOE_OK;
    if (!have_ids && !have_weights) return CLI_GOOD;
    if (!have_ids || !have_weights)
        return cli_fail("%s: expert_ids and expert_weights belong together, and only %s is there.", path,
                        have_ids ? "expert_ids" : "expert_weights");

    const int64_t wanted[] = {tokens, shape->experts_per_token};
    if (!has_shape(&ids, wanted[0], wanted[1])) return cli_wrong_shape(path, "expert_ids", &ids, 2, wanted);
    if (!has_shape(&weights, wanted[0], wanted[1])) return cli_wrong_shape(path, "expert_weights", &weights, 2, wanted);
    if (weights.dtype != MEGAMOE_F32) return cli_fail("%s: tensor 'expert_weights' must be F32.", path);
    if (copy_ids(path, "expert_ids", &ids, count, &batch->expert_ids) != CLI_GOOD) return CLI_BAD_INPUT;
    batch->expert_weights = cli_allocate(count, sizeof(float));
    if (count) memcpy(batch->expert_weights, weights.data, count * sizeof(float));
    batch->batch.expert_ids = batch->expert_ids;
    batch->batch.expert_weights = batch->expert_weights;
    return CLI_GOOD;
}

static int read_token_ids(const char *path, cli_batch *batch) {
    megamoe_tensor ids;
    int64_t tokens = batch->batch.token_count;
    if (find(batch, "token_ids", &ids) != MEGAMOE_OK) return CLI_GOOD;
    if (ids.rank != 1 || ids.extent[0] != tokens) return cli_wrong_shape(path, "token_ids", &ids, 1, &tokens);
    int result = copy_ids(path, "token_ids", &ids, (size_t)tokens, &batch->token_ids);
    batch->batch.token_ids = batch->token_ids;
    return result;
}

int cli_batch_read(const char *path, const char *prefix, const megamoe_shape *shape, cli_batch *batch) {
    *batch = (cli_batch){.prefix = prefix};
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
