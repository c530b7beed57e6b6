/* A checkpoint, a device and a layer, as the options ask for them. */
#include <stdlib.h>

#include "cli.h"

static void log_to_stderr(void *context, int level, const char *message) {
    (void)context;
    (void)level;
    fprintf(stderr, "megamoe: %s\n", message);
}

static bool draw_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    cli_progress_update(context, done_bytes, total_bytes);
    return true;
}

megamoe_status cli_open_checkpoint(const cli_options *options, const char *path, megamoe_checkpoint **checkpoint) {
    megamoe_checkpoint_options open = {.struct_size = sizeof open,
                                       .strict = options->strict,
                                       .repair_nan_scales = options->repair_nan_scales,
                                       .skip_scan = options->no_scan};
    return megamoe_checkpoint_open(path, &open, checkpoint);
}

megamoe_status cli_open_device(const cli_options *options, megamoe_backend backend, uint32_t max_tokens,
                               megamoe_device **device) {
    megamoe_device_options open = {.struct_size = sizeof open,
                                   .backend = backend,
                                   .threads = options->threads,
                                   .max_tokens = max_tokens ? max_tokens : 1,
                                   .batch_invariant = options->batch_invariant,
                                   .group = {.struct_size = sizeof open.group},
                                   .log = log_to_stderr};
    return megamoe_device_open(&open, device);
}

megamoe_layer_options cli_layer_options(const cli_options *options) {
    return (megamoe_layer_options){.struct_size = sizeof(megamoe_layer_options),
                                   .activations = (megamoe_activations)options->activations,
                                   .input_global = (megamoe_global)options->input_global,
                                   .intermediate_global = (megamoe_global)options->intermediate_global,
                                   .routing_weight_before = options->routing_weight,
                                   .shared_unclamped = options->shared_unclamped,
                                   .expert_first = options->experts.first,
                                   .expert_count = options->experts.end - options->experts.first};
}

megamoe_status cli_load_layer(const cli_options *options, megamoe_device *device, const megamoe_checkpoint *checkpoint,
                              uint32_t layer, megamoe_activations kind, megamoe_layer **out) {
    cli_progress progress;
    megamoe_layer_options load = cli_layer_options(options);
    load.activations = kind;
    load.progress = draw_progress;
    load.progress_context = &progress;
    cli_progress_start(&progress, "loading");
    progress.bytes = true;
    megamoe_status status = megamoe_layer_load(device, checkpoint, layer, &load, out);
    cli_progress_end(&progress);
    return status;
}

const char *cli_memory_text(const megamoe_device *device, char text[48]) {
    uint64_t host_bytes = 0, device_bytes = 0;
    char host[16], gpu[16];
    megamoe_device_memory(device, &host_bytes, &device_bytes);
    cli_bytes_text((double)host_bytes, host);
    snprintf(text, 48, device_bytes ? "%s, and %s of the GPU's" : "%s", host,
             cli_bytes_text((double)device_bytes, gpu));
    return text;
}

void cli_session_close(cli_session *session) {
    megamoe_layer_close(session->layer);
    megamoe_device_close(session->device);
    megamoe_checkpoint_close(session->checkpoint);
}
