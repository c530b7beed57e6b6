/* An open checkpoint: files, config, layers and anomalies together; the public functions, and reading one
 * layer. */
#include "checkpoint/checkpoint.h"

#include "checkpoint/anomalies.h"
#include "checkpoint/examine.h"
#include "checkpoint/layers.h"
#include "checkpoint/quantization.h"
#include "checkpoint/report.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/scan.h"
#include "checkpoint/source.h"
#include "error.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct megamoe_checkpoint {
    mm_tensors tensors;
    mm_config config;
    mm_quantization declared;
    mm_layers layers;
    megamoe_layer_info *infos; /* [layers.count] */
    mm_anomalies *anomalies;   /* has its own lock: loads of a const checkpoint add repairs */
    bool strict, repair, skip_scan;
};

/* ---- open and close --------------------------------------------------------------------------------------
 */

static bool has_experts(const mm_tensors *tensors) {
    mm_tensor_name name;
    for (uint32_t i = 0; i < tensors->count; i++) {
        mm_tensor_name_parse(tensors->tensors[i].name, &name);
        if (name.place == MM_PLACE_EXPERT || name.place == MM_PLACE_STACK) return true;
    }
    return false;
}

/* Where config.json is: in the directory, or beside the file. The result is freed by the caller. */
static char *config_directory(const char *path, bool is_directory) {
    const char *slash = strrchr(path, '/');
    if (is_directory) return strdup(path);
    return slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
}

static megamoe_status config_open(const char *path, megamoe_checkpoint *checkpoint) {
    struct stat facts;
    bool is_directory = stat(path, &facts) == 0 && S_ISDIR(facts.st_mode);
    char *directory;
    megamoe_status status;
    /* a file of plain tensors has nothing to do with a config.json that happens to lie beside it */
    if (!is_directory && !has_experts(&checkpoint->tensors)) return MEGAMOE_OK;
    directory = config_directory(path, is_directory);
    if (!directory) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", path);
    status = mm_config_read(directory, &checkpoint->config);
    if (status == MEGAMOE_OK)
        status = mm_quantization_read(directory, &checkpoint->config, checkpoint->anomalies, &checkpoint->declared);
    free(directory);
    return status;
}

static megamoe_status contradictions_refuse(const megamoe_checkpoint *checkpoint, uint32_t count) {
    megamoe_anomaly anomaly = {0};
    if (!count) return MEGAMOE_OK;
    for (uint32_t i = 0; mm_anomalies_get(checkpoint->anomalies, i, &anomaly); i++)
        if (anomaly.layer >= 0 && strcmp(anomaly.kind, "config-contradiction") == 0) break;
    return mm_fail(MEGAMOE_CORRUPT_FILE, "config and tensors contradict each other (strict), first of %u: %s", count,
                   anomaly.detail);
}

static megamoe_status parts_open(const char *path, megamoe_checkpoint *checkpoint) {
    uint32_t contradictions = 0;
    MM_TRY(mm_tensors_open(path, checkpoint->repair, checkpoint->anomalies, &checkpoint->tensors));
    MM_TRY(config_open(path, checkpoint));
    MM_TRY(
        mm_layers_build(&checkpoint->tensors, checkpoint->config.layers, checkpoint->anomalies, &checkpoint->layers));
    checkpoint->infos = calloc(checkpoint->layers.count + 1, sizeof *checkpoint->infos);
    if (!checkpoint->infos) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u layers", checkpoint->layers.count);
    for (uint32_t i = 0; i < checkpoint->layers.count; i++)
        MM_TRY(mm_layer_examine(&checkpoint->tensors, &checkpoint->config, &checkpoint->declared,
                                &checkpoint->layers.layers[i], checkpoint->anomalies, &checkpoint->infos[i],
                                &contradictions));
    return checkpoint->strict ? contradictions_refuse(checkpoint, contradictions) : MEGAMOE_OK;
}

megamoe_status megamoe_checkpoint_open(const char *path, const megamoe_checkpoint_options *options,
                                       megamoe_checkpoint **checkpoint) {
    megamoe_checkpoint *opened;
    megamoe_status status;
    if (!path || !checkpoint) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "checkpoint_open: path or checkpoint is NULL");
    if (options && options->struct_size != sizeof *options)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "checkpoint_open: options.struct_size is %zu, this library knows %zu",
                       options->struct_size, sizeof *options);
    opened = calloc(1, sizeof *opened);
    if (opened) opened->anomalies = mm_anomalies_create();
    if (!opened || !opened->anomalies) {
        free(opened);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", path);
    }
    opened->strict = options && options->strict;
    opened->repair = options && options->repair_nan_scales;
    opened->skip_scan = options && options->skip_scan;
    status = parts_open(path, opened);
    if (status != MEGAMOE_OK) {
        megamoe_checkpoint_close(opened);
        return status;
    }
    *checkpoint = opened;
    return MEGAMOE_OK;
}

void megamoe_checkpoint_close(megamoe_checkpoint *checkpoint) {
    if (!checkpoint) return;
    free(checkpoint->infos);
    mm_layers_free(&checkpoint->layers);
    mm_quantization_free(&checkpoint->declared);
    mm_config_free(&checkpoint->config);
    mm_tensors_close(&checkpoint->tensors);
    mm_anomalies_free(checkpoint->anomalies);
    free(checkpoint);
}

/* ---- what is in it ---------------------------------------------------------------------------------------
 */

uint32_t megamoe_checkpoint_layer_count(const megamoe_checkpoint *checkpoint) {
    return checkpoint->layers.count;
}

const char *megamoe_checkpoint_model_type(const megamoe_checkpoint *checkpoint) {
    return checkpoint->config.model_type;
}

static megamoe_status struct_size_check(const char *function, size_t given, size_t known) {
    if (given == known) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s: struct_size is %zu, this library knows %zu", function, given, known);
}

megamoe_status megamoe_checkpoint_layer(const megamoe_checkpoint *checkpoint, uint32_t position,
                                        megamoe_layer_info *info) {
    MM_TRY(struct_size_check("checkpoint_layer", info->struct_size, sizeof *info));
    if (position >= checkpoint->layers.count)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "checkpoint_layer: position %u of %u MoE layers", position,
                       checkpoint->layers.count);
    *info = checkpoint->infos[position];
    return MEGAMOE_OK;
}

/* "0 to 60, 62" */
static void layers_text(const mm_layers *layers, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t first = 0, end; first < layers->count && used < size; first = end) {
        uint32_t from = layers->layers[first].layer, to;
        for (end = first + 1; end < layers->count && layers->layers[end].layer == from + (end - first);) end++;
        to = from + (end - first) - 1;
        used +=
            (size_t)snprintf(text + used, size - used, from == to ? "%s%u" : "%s%u to %u", first ? ", " : "", from, to);
    }
}

static megamoe_status layer_find(const megamoe_checkpoint *checkpoint, uint32_t layer, const mm_layer_tensors **found) {
    char text[256];
    *found = mm_layers_find(&checkpoint->layers, layer);
    if (*found) return MEGAMOE_OK;
    if (!checkpoint->layers.count)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has no MoE layers", checkpoint->tensors.shards[0].path);
    layers_text(&checkpoint->layers, text, sizeof text);
    return mm_fail(MEGAMOE_INVALID_ARGUMENT, "there is no MoE layer %u; the MoE layers are %s", layer, text);
}

static mm_reading reading_begin(const megamoe_checkpoint *checkpoint, uint32_t layer) {
    return (mm_reading){.tensors = &checkpoint->tensors, .config = &checkpoint->config, .layer = layer, .expert = -1};
}

megamoe_status megamoe_checkpoint_shape(const megamoe_checkpoint *checkpoint, uint32_t layer, megamoe_shape *shape) {
    const mm_layer_tensors *tensors;
    mm_reading reading = reading_begin(checkpoint, layer);
    mm_layer_plan plan;
    MM_TRY(layer_find(checkpoint, layer, &tensors));
    MM_TRY(mm_layer_plan_make(&reading, tensors, &plan));
    *shape = plan.shape;
    return MEGAMOE_OK;
}

uint32_t megamoe_checkpoint_anomaly_count(const megamoe_checkpoint *checkpoint) {
    return mm_anomalies_count(checkpoint->anomalies);
}

megamoe_status megamoe_checkpoint_anomaly(const megamoe_checkpoint *checkpoint, uint32_t index,
                                          megamoe_anomaly *anomaly) {
    MM_TRY(struct_size_check("checkpoint_anomaly", anomaly->struct_size, sizeof *anomaly));
    if (mm_anomalies_get(checkpoint->anomalies, index, anomaly)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_INVALID_ARGUMENT, "checkpoint_anomaly: index %u of %u", index,
                   mm_anomalies_count(checkpoint->anomalies));
}

megamoe_status megamoe_checkpoint_tensor(const megamoe_checkpoint *checkpoint, const char *name,
                                         megamoe_tensor *tensor) {
    const mm_tensor *found = mm_tensors_find(&checkpoint->tensors, name);
    megamoe_tensor result = {0};
    if (!found) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "there is no tensor %s", name);
    if (!mm_tensor_dtype(found) || found->rank > 4)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "tensor %s is %s with %u dimensions, which megamoe_tensor cannot hold", name,
                       mm_tensor_dtype_name(found), found->rank);
    MM_TRY(mm_checkpoint_unchanged(checkpoint, &found->shard, 1));
    result.data = (void *)(uintptr_t)found->data;
    result.dtype = mm_tensor_dtype(found);
    result.rank = found->rank;
    memcpy(result.extent, found->extent, sizeof result.extent);
    *tensor = result;
    return MEGAMOE_OK;
}

const char *megamoe_checkpoint_tensor_name(const megamoe_checkpoint *checkpoint, uint64_t index) {
    return index < checkpoint->tensors.count ? checkpoint->tensors.tensors[index].name : NULL;
}

megamoe_status mm_checkpoint_unchanged(const megamoe_checkpoint *checkpoint, const uint32_t *shards, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const mm_shard *shard = &checkpoint->tensors.shards[shards[i]];
        struct stat facts;
        if (fstat(shard->file, &facts) != 0) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", shard->path, strerror(errno));
        if ((uint64_t)facts.st_size < shard->bytes)
            return mm_fail(MEGAMOE_IO_ERROR,
                           "%s was %" PRIu64
                           " bytes long when it was opened and is %lld now; open the checkpoint again",
                           shard->path, shard->bytes, (long long)facts.st_size);
    }
    return MEGAMOE_OK;
}

/* ---- one layer -------------------------------------------------------------------------------------------
 */

static megamoe_status all_unchanged(const megamoe_checkpoint *checkpoint) {
    for (uint32_t i = 0; i < checkpoint->tensors.shard_count; i++) MM_TRY(mm_checkpoint_unchanged(checkpoint, &i, 1));
    return MEGAMOE_OK;
}

/* Repairs write to memory that other threads may be scanning for the same layer, so they take turns. */
static pthread_mutex_t repair_lock = PTHREAD_MUTEX_INITIALIZER;

static megamoe_status expert_scan(const megamoe_checkpoint *checkpoint, mm_reading *reading,
                                  const mm_layer_tensors *tensors, mm_place place, const mm_expert *weights,
                                  uint32_t expert, bool report) {
    megamoe_status status;
    if (checkpoint->repair) pthread_mutex_lock(&repair_lock);
    status =
        mm_expert_scan(reading, tensors, place, expert, weights, checkpoint->repair, report, checkpoint->anomalies);
    if (checkpoint->repair) pthread_mutex_unlock(&repair_lock);
    return status;
}

static void owned_free(void **owned, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) free(owned[i]);
    free(owned);
}

/*
 * One expert (or the shared one) with its scales as a load would have them, converted and turned. What cannot
 * be read at all is among the anomalies since the checkpoint was opened; only what conversion finds is new.
 */
static megamoe_status expert_examine(const megamoe_checkpoint *checkpoint, mm_reading *reading,
                                     const mm_layer_tensors *tensors, const mm_layer_plan *plan, mm_place place,
                                     uint32_t number) {
    bool routed = place == MM_PLACE_EXPERT, present = true;
    mm_expert expert;
    megamoe_status status = MEGAMOE_OK;
    for (mm_copies copies = MM_COPY_NOTHING; copies <= MM_COPY_SCALES; copies++) {
        reading->copies = copies;
        status = routed ? mm_expert_read(reading, tensors, plan, number, &expert)
                        : mm_shared_read(reading, tensors, plan, &expert, &present);
        if (copies == MM_COPY_NOTHING && (status != MEGAMOE_OK || !present)) return MEGAMOE_OK;
    }
    status = status == MEGAMOE_OK ? expert_scan(checkpoint, reading, tensors, place, &expert, number, true)
                                  : mm_failure_note(reading, status, checkpoint->anomalies);
    owned_free(reading->owned, reading->owned_count);
    reading->owned = NULL;
    reading->owned_count = 0;
    return status;
}

megamoe_status megamoe_checkpoint_scan(megamoe_checkpoint *checkpoint, uint32_t layer) {
    const mm_layer_tensors *tensors;
    mm_reading reading = reading_begin(checkpoint, layer);
    mm_layer_plan plan;
    MM_TRY(layer_find(checkpoint, layer, &tensors));
    MM_TRY(all_unchanged(checkpoint));
    MM_TRY(mm_layer_plan_make(&reading, tensors, &plan));
    for (uint32_t e = plan.expert_first; e < plan.expert_end; e++)
        MM_TRY(expert_examine(checkpoint, &reading, tensors, &plan, MM_PLACE_EXPERT, e));
    return expert_examine(checkpoint, &reading, tensors, &plan, MM_PLACE_SHARED, 0);
}

/* Input scales of all experts in the files: every rank stages with the same global scale. */
static megamoe_status input_scales_read(mm_reading *reading, const mm_layer_tensors *tensors, const mm_layer_plan *plan,
                                        mm_layer_source *source) {
    uint32_t count = source->present_count;
    if (plan->format != MM_NVFP4) return MEGAMOE_OK;
    source->input_scales = malloc(count * sizeof *source->input_scales);
    source->intermediate_scales = malloc(count * sizeof *source->intermediate_scales);
    if (!source->input_scales || !source->intermediate_scales)
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the scales of %u experts", count);
    for (uint32_t i = 0; i < count; i++) {
        mm_expert expert;
        bool readable = mm_expert_read(reading, tensors, plan, source->present_first + i, &expert) == MEGAMOE_OK;
        source->input_scales[i] = readable ? expert.input_global : NAN;
        source->intermediate_scales[i] = readable ? expert.intermediate_global : NAN;
    }
    return MEGAMOE_OK;
}

static megamoe_status range_check(const mm_reading *reading, const mm_layer_plan *plan, uint32_t first,
                                  uint32_t *count) {
    if (*count == 0) *count = plan->expert_end - first;
    if (first >= plan->expert_first && first < plan->expert_end && *count <= plan->expert_end - first)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_INVALID_ARGUMENT, "layer %u: experts %u to %u were asked for, the files hold %u to %u",
                   reading->layer, first, first + *count - 1, plan->expert_first, plan->expert_end - 1);
}

/* What a load reads of one expert: its scales, unless nobody looks at them, and what it copies. */
static uint64_t bytes_read(const mm_reading *reading, const mm_expert *expert, bool scans, uint64_t copied_before) {
    uint64_t bytes = reading->copied_bytes - copied_before;
    if (bytes || !scans) return bytes; /* a copy holds the scales too */
    return (expert->gate.codes ? mm_scale_bytes(&expert->gate) : 0) + mm_scale_bytes(&expert->up) +
           mm_scale_bytes(&expert->down);
}

/* Reads and scans expert by expert, so that each one's pages are touched once and progress follows the reading. */
static megamoe_status routed_read(const megamoe_checkpoint *checkpoint, mm_reading *reading,
                                  const mm_layer_tensors *tensors, const mm_layer_plan *plan, mm_reporting *reporting,
                                  mm_layer_source *source) {
    bool scans = !checkpoint->skip_scan || checkpoint->repair;
    for (uint32_t i = 0; i < source->expert_count; i++) {
        uint32_t expert = source->expert_first + i;
        uint64_t copied_before = reading->copied_bytes, bytes;
        double began = mm_report_now();
        const mm_tensor *scale = mm_scale_tensor(tensors, MM_PLACE_EXPERT, expert, MM_UP);
        MM_TRY(mm_expert_read(reading, tensors, plan, expert, &source->experts[i]));
        if (scans)
            MM_TRY(expert_scan(checkpoint, reading, tensors, MM_PLACE_EXPERT, &source->experts[i], expert, false));
        bytes = bytes_read(reading, &source->experts[i], scans, copied_before);
        reporting->total_bytes = bytes * source->expert_count;
        if (!scale) scale = reading->transposed; /* a copy of a stack that has no scales */
        if (bytes && scale) MM_TRY(mm_report_step(reporting, scale->shard, bytes, began));
    }
    return MEGAMOE_OK;
}

static megamoe_status experts_read(const megamoe_checkpoint *checkpoint, mm_reading *reading,
                                   const mm_layer_tensors *tensors, const mm_layer_plan *plan,
                                   const mm_load_report *report, mm_layer_source *source) {
    mm_reporting reporting = {.to = report};
    megamoe_status status;
    bool shared;
    source->experts = calloc(source->expert_count, sizeof *source->experts);
    source->shared = calloc(1, sizeof *source->shared);
    reporting.rates = calloc(checkpoint->tensors.shard_count, sizeof *reporting.rates);
    if (!source->experts || !source->shared || !reporting.rates) {
        free(reporting.rates);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u experts", source->expert_count);
    }
    status = routed_read(checkpoint, reading, tensors, plan, &reporting, source);
    if (status == MEGAMOE_OK) mm_report_end(&reporting, &checkpoint->tensors);
    free(reporting.rates);
    if (status != MEGAMOE_OK) return status;
    MM_TRY(mm_shared_read(reading, tensors, plan, source->shared, &shared));
    if (!shared) {
        free(source->shared);
        source->shared = NULL;
        return MEGAMOE_OK;
    }
    if (checkpoint->skip_scan && !checkpoint->repair) return MEGAMOE_OK;
    return expert_scan(checkpoint, reading, tensors, MM_PLACE_SHARED, source->shared, 0, false);
}

static megamoe_status source_fill(const megamoe_checkpoint *checkpoint, mm_reading *reading,
                                  const mm_layer_tensors *tensors, uint32_t expert_first, uint32_t expert_count,
                                  const mm_load_report *report, mm_layer_source *source) {
    mm_layer_plan plan;
    MM_TRY(mm_layer_plan_make(reading, tensors, &plan));
    source->shape = plan.shape;
    if (expert_count == 0 && expert_first == 0) expert_first = plan.expert_first;
    MM_TRY(range_check(reading, &plan, expert_first, &expert_count));
    source->expert_first = expert_first;
    source->expert_count = expert_count;
    source->present_first = plan.expert_first;
    source->present_count = plan.expert_end - plan.expert_first;
    MM_TRY(input_scales_read(reading, tensors, &plan, source));
    reading->copies = MM_COPY_ALL;
    reading->shard_used = calloc(checkpoint->tensors.shard_count, sizeof *reading->shard_used);
    source->shards = malloc(checkpoint->tensors.shard_count * sizeof *source->shards);
    if (!reading->shard_used || !source->shards)
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u shards", checkpoint->tensors.shard_count);
    MM_TRY(experts_read(checkpoint, reading, tensors, &plan, report, source));
    MM_TRY(mm_router_read(reading, tensors, &plan, &source->router));
    source->declares_nvfp4_activations =
        plan.format == MM_NVFP4 &&
        (checkpoint->declared.nvfp4_activations || mm_layer_has_expert_part(tensors, MM_PART_INPUT) ||
         mm_layer_has_expert_part(tensors, MM_PART_INVERSE_INPUT));
    for (uint32_t i = 0; i < checkpoint->tensors.shard_count; i++)
        if (reading->shard_used[i]) source->shards[source->shard_count++] = i;
    return MEGAMOE_OK;
}

megamoe_status mm_checkpoint_read_layer(const megamoe_checkpoint *checkpoint, uint32_t layer, uint32_t expert_first,
                                        uint32_t expert_count, const mm_load_report *report, mm_layer_source *source) {
    const mm_layer_tensors *tensors;
    mm_reading reading = reading_begin(checkpoint, layer);
    mm_layer_source filled = {0};
    megamoe_status status;
    MM_TRY(layer_find(checkpoint, layer, &tensors));
    MM_TRY(all_unchanged(checkpoint));
    status = source_fill(checkpoint, &reading, tensors, expert_first, expert_count, report, &filled);
    free(reading.shard_used);
    filled.owned = reading.owned;
    filled.owned_count = reading.owned_count;
    filled.copied_bytes = reading.copied_bytes;
    filled.strict = checkpoint->strict;
    if (status == MEGAMOE_OK)
        *source = filled;
    else
        mm_layer_source_free(&filled);
    return status;
}

void mm_layer_source_free(mm_layer_source *source) {
    owned_free(source->owned, source->owned_count);
    free(source->experts);
    free(source->input_scales);
    free(source->intermediate_scales);
    free(source->shared);
    free(source->shards);
    *source = (mm_layer_source){0};
}
