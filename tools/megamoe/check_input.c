/* The tokens that check makes itself, and the stages that somebody else made. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "formats.h"
#include "random.h"

/*
 * Gaussian values; one channel in 64 is twelve times as large, tokens differ in size, and one token is all
 * zeros. Hidden states of real models look like this, and uniform data would hide what outliers show.
 */
static uint16_t *make_hidden(uint64_t key, uint32_t token_count, uint32_t hidden) {
    uint16_t *values = cli_allocate((size_t)token_count * hidden, sizeof *values);
    for (uint32_t t = 0; t < token_count; t++) {
        double size = t == 5 ? 0 : 0.5 + 1.5 * random_unit(random_at(key + 1, t));
        for (uint32_t k = 0; k < hidden; k++) {
            double channel = random_at(key + 2, k) % 64 == 0 ? 12 : 1;
            size_t at = (size_t)t * hidden + k;
            values[at] = bf16_nearest(size * channel * random_gauss(random_at(key, at)));
        }
    }
    return values;
}

void cli_make_input(cli_examination *e, const megamoe_shape *shape, uint32_t vocabulary) {
    uint64_t key = random_key(e->options->seed, "check");
    free(e->hidden);
    free(e->input.token_ids);
    e->hidden = make_hidden(key, e->token_count, shape->hidden);
    e->input.token_ids = cli_allocate(e->token_count, sizeof(int32_t));
    for (uint32_t t = 0; t < e->token_count; t++)
        e->input.token_ids[t] = (int32_t)random_below(random_at(key + 3, t), vocabulary ? vocabulary : 1);
    e->input.batch = (megamoe_batch){.struct_size = sizeof e->input.batch,
                                     .token_count = e->token_count,
                                     .hidden = e->hidden,
                                     .hidden_dtype = MEGAMOE_BF16,
                                     .token_ids = e->input.token_ids};
}

/* The slots rotate with the token, so that where fewer than K experts are loaded every slot is empty at
 * times. */
void cli_make_routing(cli_examination *e) {
    const megamoe_layer_facts *facts = &e->facts;
    uint32_t k_count = facts->shape.experts_per_token, loaded = facts->expert_count;
    uint32_t used = k_count < loaded ? k_count : loaded;
    uint64_t key = random_key(e->options->seed, "check routing");
    size_t slots = (size_t)e->token_count * k_count;
    free(e->input.expert_ids);
    free(e->input.expert_weights);
    e->input.expert_ids = cli_allocate(slots, sizeof(int32_t));
    e->input.expert_weights = cli_allocate(slots, sizeof(float));
    for (uint32_t t = 0; t < e->token_count; t++) {
        int32_t *ids = e->input.expert_ids + (size_t)t * k_count;
        float *weights = e->input.expert_weights + (size_t)t * k_count;
        for (uint32_t k = 0; k < k_count; k++) ids[k] = -1;
        for (uint32_t n = 0, draw = 0; n < used; draw++) {
            uint64_t bits = random_at(key, (uint64_t)t << 20 | draw);
            int32_t id = (int32_t)(facts->expert_first + random_below(bits, loaded));
            bool taken = false;
            for (uint32_t k = 0; k < k_count; k++) taken = taken || ids[k] == id;
            if (taken) continue;
            uint32_t slot = (t + n++) % k_count;
            ids[slot] = id;
            weights[slot] = (float)((0.1 + random_unit(random_mix(bits))) / used * (double)facts->shape.routed_scale);
        }
    }
    e->batch.expert_ids = e->input.expert_ids;
    e->batch.expert_weights = e->input.expert_weights;
}

/* ---- somebody else's stages ---- */

typedef struct wanted {
    const char *name;
    uint32_t bit;
    megamoe_dtype dtype; /* of the field; F32 and BF16 are converted into each other, I64 into I32 */
    void *field;         /* allocated, or NULL where the layer has no such stage */
    uint32_t rank;
    int64_t extent[4];
} wanted;

static void convert(const megamoe_tensor *from, megamoe_dtype to, uint64_t count, void *out) {
    for (uint64_t i = 0; i < count; i++) {
        const char *at = from->data;
        float value;
        int64_t wide;
        if (from->dtype == MEGAMOE_I64) {
            memcpy(&wide, at + i * 8, sizeof wide);
            ((int32_t *)out)[i] = wide >= INT32_MIN && wide <= INT32_MAX ? (int32_t)wide : -2;
        } else if (from->dtype == to) {
            size_t size = to == MEGAMOE_BF16 ? 2 : to == MEGAMOE_F32 || to == MEGAMOE_I32 ? 4 : 1;
            memcpy(out, at, count * size);
            return;
        } else if (from->dtype == MEGAMOE_BF16) {
            uint16_t bits;
            memcpy(&bits, at + i * 2, sizeof bits);
            ((float *)out)[i] = bf16_value(bits);
        } else {
            memcpy(&value, at + i * 4, sizeof value);
            ((uint16_t *)out)[i] = bf16_nearest((double)value);
        }
    }
}

static bool convertible(megamoe_dtype from, megamoe_dtype to) {
    if (from == to || (from == MEGAMOE_I64 && to == MEGAMOE_I32)) return true;
    if (to == MEGAMOE_E4M3 || to == MEGAMOE_U8) return from == MEGAMOE_E4M3 || from == MEGAMOE_U8 || from == MEGAMOE_I8;
    return (from == MEGAMOE_F32 && to == MEGAMOE_BF16) || (from == MEGAMOE_BF16 && to == MEGAMOE_F32);
}

static int read_field(const char *path, const megamoe_checkpoint *file, const wanted *w, uint32_t *written) {
    megamoe_tensor tensor;
    uint64_t count = 1;
    if (!w->field || megamoe_checkpoint_tensor(file, w->name, &tensor) != MEGAMOE_OK) return CLI_GOOD;
    bool fits = tensor.rank == w->rank;
    for (uint32_t axis = 0; axis < w->rank; axis++) {
        fits = fits && tensor.extent[axis] == w->extent[axis];
        count *= (uint64_t)w->extent[axis];
    }
    if (!fits) return cli_wrong_shape(path, w->name, &tensor, w->rank, w->extent);
    if (!convertible(tensor.dtype, w->dtype))
        return cli_fail("%s: tensor '%s' has a dtype that cannot be this stage.", path, w->name);
    if (tensor.dtype == MEGAMOE_U8 || tensor.dtype == MEGAMOE_I8 || tensor.dtype == MEGAMOE_E4M3)
        tensor.dtype = w->dtype;
    if (count) convert(&tensor, w->dtype, count, w->field);
    *written |= w->bit;
    return CLI_GOOD;
}

int cli_read_against(const char *path, const megamoe_layer_facts *facts, uint32_t token_count, megamoe_stages *s,
                     uint32_t *written) {
    const megamoe_shape *shape = &facts->shape;
    int64_t t = token_count, k = shape->experts_per_token, h = shape->hidden, i = shape->intermediate;
    const wanted fields[] = {
        {"expert_ids", CLI_HAS_IDS, MEGAMOE_I32, s->expert_ids, 2, {t, k}},
        {"expert_weights", CLI_HAS_WEIGHTS, MEGAMOE_F32, s->expert_weights, 2, {t, k}},
        {"x_codes", CLI_HAS_X_CODES, MEGAMOE_U8, s->x_codes, 2, {t, h / 2}},
        {"x_scales", CLI_HAS_X_SCALES, MEGAMOE_E4M3, s->x_scales, 2, {t, h / 16}},
        {"x_globals", CLI_HAS_X_GLOBALS, MEGAMOE_F32, s->x_globals, 1, {t}},
        {"l1", CLI_HAS_L1, MEGAMOE_F32, s->l1, 4, {t, k, 2, i}},
        {"h", CLI_HAS_H, MEGAMOE_BF16, s->h, 3, {t, k, i}},
        {"h_codes", CLI_HAS_H_CODES, MEGAMOE_U8, s->h_codes, 3, {t, k, i / 2}},
        {"h_scales", CLI_HAS_H_SCALES, MEGAMOE_E4M3, s->h_scales, 3, {t, k, i / 16}},
        {"h_globals", CLI_HAS_H_GLOBALS, MEGAMOE_F32, s->h_globals, 2, {t, k}},
        {"l2", CLI_HAS_L2, MEGAMOE_F32, s->l2, 3, {t, k, h}},
        {"shared", CLI_HAS_SHARED, MEGAMOE_F32, s->shared, 2, {t, h}},
        {"output", CLI_HAS_OUTPUT, MEGAMOE_BF16, s->output, 2, {t, h}},
        {"logits", CLI_HAS_LOGITS, MEGAMOE_F32, s->logits, 2, {t, shape->expert_count}},
    };
    megamoe_checkpoint *file;
    megamoe_status status = megamoe_checkpoint_open(path, NULL, &file);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    int result = CLI_GOOD;
    *written = 0;
    for (unsigned f = 0; f < sizeof fields / sizeof fields[0] && result == CLI_GOOD; f++)
        result = read_field(path, file, &fields[f], written);
    megamoe_checkpoint_close(file);
    if (result == CLI_GOOD && !*written)
        return cli_fail(
            "%s holds no stage of this layer; its tensors should be named expert_ids, expert_weights, x_codes, "
            "x_scales, l1, h, l2 or output.",
            path);
    return result;
}

bool cli_file_has(const char *path, const char *tensor) {
    megamoe_checkpoint *file;
    megamoe_tensor found;
    if (megamoe_checkpoint_open(path, NULL, &file) != MEGAMOE_OK) return false;
    bool has = megamoe_checkpoint_tensor(file, tensor, &found) == MEGAMOE_OK;
    megamoe_checkpoint_close(file);
    return has;
}
