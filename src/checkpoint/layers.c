/* Sorting tensors into layers. One array of keys for the whole checkpoint: its size is linear in the file's.
 */
#include "checkpoint/layers.h"

#include "error.h"

#include <stdlib.h>
#include <string.h>

static uint64_t key_make(uint32_t layer, mm_place place, uint32_t expert, mm_projection projection, uint32_t part) {
    return (uint64_t)layer << 40 | (uint64_t)place << 36 | (uint64_t)expert << 16 | (uint64_t)projection << 8 | part;
}

static uint32_t key_layer(uint64_t key) {
    return (uint32_t)(key >> 40);
}
static mm_place key_place(uint64_t key) {
    return (mm_place)(key >> 36 & 15u);
}
static uint32_t key_expert(uint64_t key) {
    return (uint32_t)(key >> 16 & 0xFFFFu);
}

static int by_key(const void *left, const void *right) {
    uint64_t a = ((const mm_reference *)left)->key, b = ((const mm_reference *)right)->key;
    return (a > b) - (a < b);
}

/* MTP blocks are numbered after the last layer; without num_hidden_layers, after the highest that a name
 * holds. */
static uint32_t mtp_first(const mm_tensor_name *names, uint32_t count, uint32_t layer_count) {
    uint32_t end = layer_count;
    for (uint32_t i = 0; i < count && !layer_count; i++)
        if (names[i].numbered && !names[i].mtp && names[i].layer + 1 > end) end = names[i].layer + 1;
    return end;
}

static megamoe_status unknown_note(const mm_names *unknown, mm_anomalies *anomalies) {
    mm_anomaly_place place = {.kind = "unknown-tensor",
                              .layer = -1,
                              .expert = -1,
                              .remedy = "Check the spelling; these tensors are not used."};
    if (!unknown->count) return MEGAMOE_OK;
    return mm_anomalies_add(anomalies, &place, "%u tensors inside MoE layers have names that mean nothing here: %s",
                            unknown->count, unknown->text);
}

/* One layer's run of references: what its names look like and which experts they number. */
static megamoe_status layer_describe(mm_layer_tensors *layer) {
    uint32_t last = UINT32_MAX;
    mm_tensor_name name = {0};
    for (uint32_t i = 0; i < layer->count; i++) {
        uint32_t expert = key_expert(layer->references[i].key);
        mm_place place = key_place(layer->references[i].key);
        if (place == MM_PLACE_STACK) layer->stacked = true;
        if (place == MM_PLACE_EXPERT || (place == MM_PLACE_STACK && !name.place))
            mm_tensor_name_parse(layer->references[i].tensor->name, &name);
        if (place != MM_PLACE_EXPERT || expert == last) continue;
        if (last == UINT32_MAX) layer->expert_first = expert;
        layer->expert_end = expert + 1;
        layer->expert_total++;
        last = expert;
    }
    layer->w_names = name.w_names;
    layer->mtp = name.mtp;
    layer->prefix = strndup(layer->references[0].tensor->name, name.prefix_length);
    return layer->prefix ? MEGAMOE_OK : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the name of a layer");
}

/* Cuts the sorted references into layers; a router without experts makes no MoE layer. */
static megamoe_status layers_cut(mm_layers *layers, uint32_t count) {
    uint32_t runs = 0;
    for (uint32_t i = 0; i < count; i++)
        runs += i == 0 || key_layer(layers->references[i].key) != key_layer(layers->references[i - 1].key);
    layers->layers = calloc(runs + 1, sizeof *layers->layers);
    if (!layers->layers) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u layers", runs);
    for (uint32_t begin = 0, end; begin < count; begin = end) {
        mm_layer_tensors *layer = &layers->layers[layers->count];
        bool has_experts = false;
        for (end = begin;
             end < count && key_layer(layers->references[end].key) == key_layer(layers->references[begin].key); end++) {
            mm_place place = key_place(layers->references[end].key);
            has_experts |= place == MM_PLACE_EXPERT || place == MM_PLACE_STACK;
        }
        if (!has_experts) continue;
        layer->layer = key_layer(layers->references[begin].key);
        layer->references = layers->references + begin;
        layer->count = end - begin;
        layers->count++;
        MM_TRY(layer_describe(layer));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_layers_build(const mm_tensors *tensors, uint32_t layer_count, mm_anomalies *anomalies,
                               mm_layers *layers) {
    mm_tensor_name *names;
    uint32_t count = 0, first_mtp;
    mm_names unknown = {0};
    megamoe_status status;
    if (layer_count > UINT16_MAX)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "config.json: num_hidden_layers is %u, above %u", layer_count, UINT16_MAX);
    names = malloc((tensors->count + 1) * sizeof *names);
    *layers = (mm_layers){.references = malloc((tensors->count + 1) * sizeof *layers->references)};
    if (!names || !layers->references) {
        free(names);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to sort %u tensors into layers", tensors->count);
    }
    for (uint32_t i = 0; i < tensors->count; i++) mm_tensor_name_parse(tensors->tensors[i].name, &names[i]);
    first_mtp = mtp_first(names, tensors->count, layer_count);
    for (uint32_t i = 0; i < tensors->count; i++) {
        const mm_tensor_name *name = &names[i];
        if (name->place == MM_PLACE_UNKNOWN) mm_names_add(&unknown, tensors->tensors[i].name);
        if (name->place < MM_PLACE_EXPERT) continue;
        layers->references[count++] = (mm_reference){key_make(name->layer + (name->mtp ? first_mtp : 0), name->place,
                                                              name->expert, name->projection, name->part),
                                                     &tensors->tensors[i]};
    }
    free(names);
    qsort(layers->references, count, sizeof *layers->references, by_key);
    status = layers_cut(layers, count);
    if (status == MEGAMOE_OK) status = unknown_note(&unknown, anomalies);
    if (status != MEGAMOE_OK) mm_layers_free(layers);
    return status;
}

void mm_layers_free(mm_layers *layers) {
    for (uint32_t i = 0; i < layers->count; i++) free(layers->layers[i].prefix);
    free(layers->layers);
    free(layers->references);
    *layers = (mm_layers){0};
}

const mm_layer_tensors *mm_layers_find(const mm_layers *layers, uint32_t layer) {
    for (uint32_t i = 0; i < layers->count; i++)
        if (layers->layers[i].layer == layer) return &layers->layers[i];
    return NULL;
}

void mm_layer_parts(const mm_layer_tensors *layer, mm_place place, uint32_t expert, mm_projection projection,
                    mm_parts *parts) {
    uint64_t first = key_make(layer->layer, place, expert, projection, 0);
    uint32_t low = 0, high = layer->count;
    memset(parts, 0, sizeof *parts);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (layer->references[middle].key < first)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < layer->count && layer->references[low].key - first < 256; low++) {
        const mm_tensor **part = &parts->part[layer->references[low].key & 0xFFu];
        if (*part)
            parts->rival = layer->references[low].tensor;
        else
            *part = layer->references[low].tensor;
        parts->any = true;
    }
}

bool mm_layer_has_expert_part(const mm_layer_tensors *layer, mm_part part) {
    for (uint32_t i = 0; i < layer->count; i++) {
        uint64_t key = layer->references[i].key;
        if (key_place(key) <= MM_PLACE_STACK && (key & 0xFFu) == (uint64_t)part) return true;
    }
    return false;
}
