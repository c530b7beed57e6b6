/* megamoe inspect: what is in a checkpoint, what it costs, and what is wrong with it. */
#include "inspect.h"

#include <stdlib.h>
#include <string.h>

const char *cli_score_name(megamoe_score score) {
    switch (score) {
    case MEGAMOE_SQRTSOFTPLUS: return "sqrtsoftplus";
    case MEGAMOE_SIGMOID: return "sigmoid";
    case MEGAMOE_SOFTMAX_TOPK: return "softmax-topk";
    case MEGAMOE_TOPK_SOFTMAX: return "topk-softmax";
    }
    return "unknown";
}

char *cli_router_text(const megamoe_layer_info *info) {
    const megamoe_shape *shape = &info->shape;
    char groups[48] = "";
    if (!info->router_present) return cli_format("none: the caller routes");
    if (shape->group_count > 1)
        snprintf(groups, sizeof groups, ", %u of %u groups", shape->groups_per_token, shape->group_count);
    return cli_format("%s%s%s x%g", shape->hash_routed ? "hash, " : "", cli_score_name(shape->score), groups,
                      (double)(shape->routed_scale > 0 ? shape->routed_scale : 1.0f));
}

uint64_t cli_layer_bytes(const megamoe_layer_info *info) {
    return (uint64_t)info->experts_present * info->expert_bytes + info->other_bytes;
}

uint64_t cli_rank_bytes(const cli_inspection *inspection, uint32_t ranks) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < inspection->layer_count; i++) {
        const megamoe_layer_info *info = &inspection->layers[i];
        uint64_t experts = (info->shape.expert_count + ranks - 1) / ranks;
        bytes += experts * info->expert_bytes + info->other_bytes;
    }
    return bytes;
}

static bool alike(const megamoe_layer_info *a, const megamoe_layer_info *b) {
    const char *x = a->shared_format ? a->shared_format : "", *y = b->shared_format ? b->shared_format : "";
    return a->shape.hidden == b->shape.hidden && a->shape.intermediate == b->shape.intermediate &&
           a->shape.expert_count == b->shape.expert_count && a->shape.experts_per_token == b->shape.experts_per_token &&
           a->shape.score == b->shape.score && a->shape.hash_routed == b->shape.hash_routed &&
           a->shape.swiglu_limit == b->shape.swiglu_limit && a->shape.routed_scale == b->shape.routed_scale &&
           a->router_present == b->router_present && a->expert_first == b->expert_first &&
           a->experts_present == b->experts_present && strcmp(a->format, b->format) == 0 &&
           strcmp(a->naming, b->naming) == 0 && strcmp(x, y) == 0;
}

static void find_ranges(cli_inspection *inspection) {
    inspection->ranges = cli_allocate(inspection->layer_count, sizeof *inspection->ranges);
    for (uint32_t i = 0; i < inspection->layer_count; i++) {
        const megamoe_layer_info *info = &inspection->layers[i];
        cli_layer_range *last = inspection->range_count ? &inspection->ranges[inspection->range_count - 1] : NULL;
        inspection->bytes += cli_layer_bytes(info);
        if (last && info->layer == last->last + 1 && alike(&last->info, info)) {
            last->last = info->layer;
            last->count++;
            last->info.global_pairs_differing += info->global_pairs_differing;
            if (info->global_ratio_max > last->info.global_ratio_max)
                last->info.global_ratio_max = info->global_ratio_max;
        } else {
            inspection->ranges[inspection->range_count++] = (cli_layer_range){info->layer, info->layer, 1, *info};
        }
    }
}

static megamoe_status read_layers(const cli_options *options, cli_inspection *inspection) {
    uint32_t count = megamoe_checkpoint_layer_count(inspection->checkpoint);
    inspection->layers = cli_allocate(count, sizeof *inspection->layers);
    if (options->layer_given) { /* the library's sentence lists the layers there are */
        megamoe_shape shape;
        megamoe_status status = megamoe_checkpoint_shape(inspection->checkpoint, options->layer, &shape);
        if (status != MEGAMOE_OK) return status;
    }
    for (uint32_t i = 0; i < count; i++) {
        megamoe_layer_info *info = &inspection->layers[inspection->layer_count];
        info->struct_size = sizeof *info;
        megamoe_status status = megamoe_checkpoint_layer(inspection->checkpoint, i, info);
        if (status != MEGAMOE_OK) return status;
        if (!options->layer_given || info->layer == options->layer) inspection->layer_count++;
    }
    find_ranges(inspection);
    return MEGAMOE_OK;
}

static megamoe_status scan_layers(megamoe_checkpoint *checkpoint, const cli_inspection *inspection) {
    cli_progress progress;
    megamoe_status status = MEGAMOE_OK;
    cli_progress_start(&progress, "scanning");
    for (uint32_t i = 0; i < inspection->layer_count && status == MEGAMOE_OK; i++) {
        status = megamoe_checkpoint_scan(checkpoint, inspection->layers[i].layer);
        /* a layer that cannot be read is an anomaly already, and no reason to keep the others from being shown */
        if (status == MEGAMOE_CORRUPT_FILE || status == MEGAMOE_UNSUPPORTED_MODEL) status = MEGAMOE_OK;
        cli_progress_update(&progress, i + 1, inspection->layer_count);
    }
    cli_progress_end(&progress);
    return status;
}

/* ---- the terminal ---- */

static void print_layers(const cli_inspection *inspection) {
    cli_table *table = cli_table_new("<layers|>experts|>top|>hidden|>inter|<format|<shared|>bytes|<router");
    for (uint32_t i = 0; i < inspection->range_count; i++) {
        const cli_layer_range *range = &inspection->ranges[i];
        const megamoe_layer_info *info = &range->info;
        char layers[32], experts[48], bytes[16];
        char *router = cli_router_text(info);
        snprintf(layers, sizeof layers, range->count > 1 ? "%u-%u" : "%u", range->first, range->last);
        snprintf(experts, sizeof experts, info->experts_present == info->shape.expert_count ? "%u" : "%u of %u",
                 info->experts_present, info->shape.expert_count);
        cli_table_add(table, "%s\t%s\t%u\t%u\t%u\t%s\t%s\t%s\t%s", layers, experts, info->shape.experts_per_token,
                      info->shape.hidden, info->shape.intermediate, info->format,
                      info->shared_format ? info->shared_format : "-",
                      cli_bytes_text((double)cli_layer_bytes(info), bytes), router);
        free(router);
    }
    cli_table_print(table, 0);
}

static void print_note(const cli_layer_range *range) {
    const megamoe_layer_info *info = &range->info;
    char bytes[16], layers[48], clamp[48] = "swiglu not clamped", experts[64] = "", globals[96] = "";
    snprintf(layers, sizeof layers, range->count > 1 ? "Layers %u-%u" : "Layer %u", range->first, range->last);
    if (info->shape.not_gated)
        snprintf(clamp, sizeof clamp, "relu2, no gate");
    else if (info->shape.swiglu_limit > 0)
        snprintf(clamp, sizeof clamp, "swiglu clamped at %g", (double)info->shape.swiglu_limit);
    if (info->experts_present != info->shape.expert_count)
        snprintf(experts, sizeof experts, "; experts %u to %u are in the file", info->expert_first,
                 info->expert_first + info->experts_present - 1);
    if (info->global_pairs_differing)
        snprintf(globals, sizeof globals, "; %u gate/up pairs have different global scales, up to %.3gx",
                 info->global_pairs_differing, (double)info->global_ratio_max);
    char *note = cli_format("%s: %s names under %s; one expert %s; %s%s%s.", layers, info->naming, info->prefix,
                            cli_bytes_text((double)info->expert_bytes, bytes), clamp, experts, globals);
    cli_print_wrapped(note, 0);
    free(note);
}

static void print_ranks(const cli_inspection *inspection) {
    cli_table *table = cli_table_new("<ranks|>1|>2|>4|>8|>16|>32|>64");
    char bytes[7][16];
    for (unsigned i = 0; i < 7; i++) cli_bytes_text((double)cli_rank_bytes(inspection, 1u << i), bytes[i]);
    cli_table_add(table, "each holds\t%s\t%s\t%s\t%s\t%s\t%s\t%s", bytes[0], bytes[1], bytes[2], bytes[3], bytes[4],
                  bytes[5], bytes[6]);
    printf("\nMemory for these layers when their experts are spread over ranks:\n");
    cli_table_print(table, 0);
}

bool cli_concerns(const cli_inspection *inspection, const megamoe_anomaly *anomaly) {
    if (anomaly->layer < 0) return true;
    for (uint32_t i = 0; i < inspection->layer_count; i++)
        if (inspection->layers[i].layer == (uint32_t)anomaly->layer) return true;
    return false;
}

enum { SHOWN_OF_A_KIND = 3 };

static void print_indented(const char *label, const char *text) {
    char *line = cli_format("%s%s", label, text);
    printf("  ");
    cli_print_wrapped(line, 2);
    free(line);
}

/* A few of every kind, its remedy once, and how many more there are. */
static void print_kind(const cli_inspection *inspection, uint32_t first, bool errors) {
    megamoe_anomaly head = {.struct_size = sizeof head}, other = {.struct_size = sizeof other};
    uint32_t count = megamoe_checkpoint_anomaly_count(inspection->checkpoint), same = 0;
    if (megamoe_checkpoint_anomaly(inspection->checkpoint, first, &head) != MEGAMOE_OK ||
        !cli_concerns(inspection, &head))
        return;
    for (uint32_t i = 0; i < first; i++)
        if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &other) == MEGAMOE_OK &&
            cli_concerns(inspection, &other) && strcmp(head.kind, other.kind) == 0)
            return; /* shown with the first of its kind */
    if (head.is_error != errors) return;
    printf("%s%s%s: %s\n", head.is_error ? cli_color("31;1") : cli_color("33;1"), head.is_error ? "Error" : "Warning",
           cli_color("0"), head.kind);
    for (uint32_t i = first; i < count; i++) {
        if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &other) != MEGAMOE_OK ||
            !cli_concerns(inspection, &other) || strcmp(head.kind, other.kind) != 0)
            continue;
        if (++same <= SHOWN_OF_A_KIND) print_indented("", other.detail);
    }
    if (same > SHOWN_OF_A_KIND) printf("  %u more of this kind; --json lists all\n", same - SHOWN_OF_A_KIND);
    if (head.remedy) print_indented("Remedy: ", head.remedy);
}

static int print_report(const cli_inspection *inspection, bool scanned) {
    char bytes[16];
    const char *type = megamoe_checkpoint_model_type(inspection->checkpoint);
    uint32_t anomalies = megamoe_checkpoint_anomaly_count(inspection->checkpoint);
    char *title = cli_format("%s: %s, %u MoE layer%s, %s", inspection->path, *type ? type : "no model type",
                             inspection->layer_count, inspection->layer_count == 1 ? "" : "s",
                             cli_bytes_text((double)inspection->bytes, bytes));
    cli_print_plain(stdout, title, strlen(title));
    printf("\n\n");
    free(title);
    if (inspection->layer_count) {
        print_layers(inspection);
        putchar('\n');
        for (uint32_t i = 0; i < inspection->range_count; i++) print_note(&inspection->ranges[i]);
        print_ranks(inspection);
    }
    putchar('\n');
    for (unsigned warnings = 0; warnings < 2; warnings++) /* errors first */
        for (uint32_t i = 0; i < anomalies; i++) print_kind(inspection, i, !warnings);
    if (!anomalies)
        printf("No anomalies%s.\n",
               scanned ? "; every scale byte was read" : " in headers and scalars; --scan reads the scale bytes too");
    return cli_flush();
}

/* ---- JSON ---- */

static json_t *layer_json(const megamoe_layer_info *info) {
    const megamoe_shape *shape = &info->shape;
    json_t *router = info->router_present
                         ? json_pack("{s:s,s:b,s:i,s:f}", "score", cli_score_name(shape->score), "hash",
                                     shape->hash_routed, "top_k", (int)shape->experts_per_token, "scale",
                                     (double)(shape->routed_scale > 0 ? shape->routed_scale : 1.0f))
                         : json_null();
    json_t *shared = info->shared_format ? json_pack("{s:s}", "format", info->shared_format) : json_null();
    return json_pack("{s:i,s:i,s:i,s:i,s:s,s:s,s:s,s:o,s:o,s:I,s:I,s:i,s:i,s:f,s:i,s:f,s:i}", "layer", (int)info->layer,
                     "experts", (int)shape->expert_count, "hidden", (int)shape->hidden, "intermediate",
                     (int)shape->intermediate, "format", info->format, "naming", info->naming, "prefix", info->prefix,
                     "router", router, "shared_expert", shared, "bytes", (json_int_t)cli_layer_bytes(info),
                     "expert_bytes", (json_int_t)info->expert_bytes, "expert_first", (int)info->expert_first,
                     "experts_present", (int)info->experts_present, "swiglu_limit", (double)shape->swiglu_limit,
                     "global_pairs_differing", (int)info->global_pairs_differing, "global_ratio_max",
                     (double)info->global_ratio_max, "input_scales_valid", (int)info->input_scales_valid);
}

static json_t *anomalies_json(const cli_inspection *inspection) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < megamoe_checkpoint_anomaly_count(inspection->checkpoint); i++) {
        megamoe_anomaly a = {.struct_size = sizeof a};
        if (megamoe_checkpoint_anomaly(inspection->checkpoint, i, &a) != MEGAMOE_OK || !cli_concerns(inspection, &a))
            continue;
        json_t *item = json_pack("{s:s,s:s,s:s?,s:s,s:s?}", "severity", a.is_error ? "error" : "warning", "kind",
                                 a.kind, "tensor", a.tensor, "detail", a.detail, "remedy", a.remedy);
        json_object_set_new(item, "layer", a.layer >= 0 ? json_integer(a.layer) : json_null());
        json_object_set_new(item, "expert", a.expert >= 0 ? json_integer(a.expert) : json_null());
        json_array_append_new(list, item);
    }
    return list;
}

static int print_json(const cli_inspection *inspection) {
    json_t *layers = json_array(), *ranks = json_array();
    for (uint32_t i = 0; i < inspection->layer_count; i++)
        json_array_append_new(layers, layer_json(&inspection->layers[i]));
    for (uint32_t n = 1; n <= 64; n *= 2)
        json_array_append_new(
            ranks, json_pack("{s:i,s:I}", "ranks", (int)n, "bytes", (json_int_t)cli_rank_bytes(inspection, n)));
    return cli_print_json(json_pack(
        "{s:s,s:o,s:I,s:o,s:o}", "model_type", megamoe_checkpoint_model_type(inspection->checkpoint), "layers", layers,
        "bytes", (json_int_t)inspection->bytes, "memory_per_rank", ranks, "anomalies", anomalies_json(inspection)));
}

static int run(const cli_options *options) {
    megamoe_checkpoint *checkpoint = NULL;
    cli_inspection inspection = {.path = options->words[0]};
    int result = CLI_GOOD;
    megamoe_status status = cli_open_checkpoint(options, options->words[0], &checkpoint);
    inspection.checkpoint = checkpoint;
    if (status == MEGAMOE_OK) status = read_layers(options, &inspection);
    if (status == MEGAMOE_OK && options->scan) status = scan_layers(checkpoint, &inspection);
    if (status != MEGAMOE_OK) result = cli_fail_status(status);
    if (result == CLI_GOOD && options->html) result = cli_inspect_html(&inspection, options->html, options->scan);
    if (result == CLI_GOOD) result = options->json ? print_json(&inspection) : print_report(&inspection, options->scan);
    free(inspection.layers);
    free(inspection.ranges);
    megamoe_checkpoint_close(checkpoint);
    return result;
}

const cli_command cli_inspect = {
    .name = "inspect",
    .words = "CKPT",
    .summary = "what is in a checkpoint: layers, formats, router, sizes, and anomalies",
    .details = "Reads headers and scalars only, so that it is fast on any size; --scan reads every scale byte too. "
               "Formats are those of the tensors, whatever config.json says.",
    .examples = "  megamoe inspect model/\n  megamoe inspect model/ --layer 3 --scan --html report.html\n",
    .options = "layer html scan strict repair-nan-scales",
    .words_min = 1,
    .words_max = 1,
    .run = run,
};
