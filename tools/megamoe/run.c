/* megamoe run: one layer on hidden states from a file. Nothing is written unless everything went well. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct job {
    cli_session session;
    cli_batch input;
    megamoe_layer_facts facts;
    megamoe_stages stages; /* all of them if they are dumped, else ids, weights and output */
    uint32_t written;
    bool all_stages;
    megamoe_counters counters;
    double seconds;
} job;

static int open_job(const cli_options *options, job *j) {
    megamoe_shape shape;
    megamoe_status status = cli_open_checkpoint(options, options->words[0], &j->session.checkpoint);
    if (status == MEGAMOE_OK) status = megamoe_checkpoint_shape(j->session.checkpoint, options->layer, &shape);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    if (cli_batch_read(options->input, "", &shape, &j->input) != CLI_GOOD) return CLI_BAD_INPUT;
    j->input.batch.allow_bad_routing = options->lax_routing;

    status =
        cli_open_device(options, (megamoe_backend)options->backend, j->input.batch.token_count, &j->session.device);
    if (status == MEGAMOE_OK)
        status = cli_load_layer(options, j->session.device, j->session.checkpoint, options->layer,
                                (megamoe_activations)options->activations, &j->session.layer);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    j->facts.struct_size = sizeof j->facts;
    megamoe_layer_describe(j->session.layer, &j->facts);
    return CLI_GOOD;
}

/* The production path. The counters are read before the router is asked again for what it chose. */
static megamoe_status run_plain(job *j) {
    megamoe_batch batch = j->input.batch;
    size_t slots = (size_t)batch.token_count * j->facts.shape.experts_per_token;
    double started = cli_seconds();
    batch.output = j->stages.output;
    megamoe_status status = megamoe_layer_run(j->session.layer, &batch, NULL);
    j->seconds = cli_seconds() - started;
    if (status == MEGAMOE_OK) status = megamoe_layer_counters(j->session.layer, &j->counters, NULL);
    if (status != MEGAMOE_OK) return status;
    if (!batch.expert_ids)
        return megamoe_layer_route(j->session.layer, &batch, j->stages.expert_ids, j->stages.expert_weights, NULL);
    memcpy(j->stages.expert_ids, batch.expert_ids, slots * sizeof(int32_t));
    memcpy(j->stages.expert_weights, batch.expert_weights, slots * sizeof(float));
    return MEGAMOE_OK;
}

static megamoe_status run_with_stages(job *j) {
    megamoe_batch batch = j->input.batch;
    double started = cli_seconds();
    batch.output = j->stages.output;
    megamoe_status status = megamoe_layer_run_stages(j->session.layer, &batch, NULL, &j->stages, &j->written);
    j->seconds = cli_seconds() - started;
    return status == MEGAMOE_OK ? megamoe_layer_counters(j->session.layer, &j->counters, NULL) : status;
}

static int run_layer(job *j) {
    j->counters.struct_size = sizeof j->counters;
    cli_stages_allocate(&j->stages, &j->facts, j->input.batch.token_count, false);
    megamoe_status status = j->all_stages ? run_with_stages(j) : run_plain(j);
    return status == MEGAMOE_OK ? CLI_GOOD : cli_fail_status(status);
}

static megamoe_named_tensor named(const char *name, void *data, megamoe_dtype dtype, uint32_t rank, int64_t a,
                                  int64_t b, int64_t c, int64_t d) {
    return (megamoe_named_tensor){name, {.data = data, .dtype = dtype, .rank = rank, .extent = {a, b, c, d}}};
}

static megamoe_status write_output(const job *j, const char *path) {
    int64_t tokens = j->input.batch.token_count, k = j->facts.shape.experts_per_token;
    const megamoe_named_tensor tensors[] = {
        named("output", j->stages.output, MEGAMOE_BF16, 2, tokens, j->facts.shape.hidden, 0, 0),
        named("expert_ids", j->stages.expert_ids, MEGAMOE_I32, 2, tokens, k, 0, 0),
        named("expert_weights", j->stages.expert_weights, MEGAMOE_F32, 2, tokens, k, 0, 0),
    };
    return megamoe_tensors_write(path, tensors, sizeof tensors / sizeof tensors[0]);
}

/* Writes the fields that this backend has, under the names of megamoe_stages. */
static megamoe_status write_stages(const job *j, const char *path) {
    const megamoe_shape *shape = &j->facts.shape;
    const megamoe_stages *s = &j->stages;
    int64_t t = j->input.batch.token_count, k = shape->experts_per_token, h = shape->hidden, i = shape->intermediate;
    const megamoe_named_tensor fields[] = {
        /* in the order of the bits of `written` */
        named("expert_ids", s->expert_ids, MEGAMOE_I32, 2, t, k, 0, 0),
        named("expert_weights", s->expert_weights, MEGAMOE_F32, 2, t, k, 0, 0),
        named("x_codes", s->x_codes, MEGAMOE_U8, 2, t, h / 2, 0, 0),
        named("x_scales", s->x_scales, MEGAMOE_E4M3, 2, t, h / 16, 0, 0),
        named("x_globals", s->x_globals, MEGAMOE_F32, 1, t, 0, 0, 0),
        named("l1", s->l1, MEGAMOE_F32, 4, t, k, 2, i),
        named("h", s->h, MEGAMOE_BF16, 3, t, k, i, 0),
        named("h_codes", s->h_codes, MEGAMOE_U8, 3, t, k, i / 2, 0),
        named("h_scales", s->h_scales, MEGAMOE_E4M3, 3, t, k, i / 16, 0),
        named("h_globals", s->h_globals, MEGAMOE_F32, 2, t, k, 0, 0),
        named("l2", s->l2, MEGAMOE_F32, 3, t, k, h, 0),
        named("shared", s->shared, MEGAMOE_F32, 2, t, h, 0, 0),
        named("output", s->output, MEGAMOE_BF16, 2, t, h, 0, 0),
        named("logits", s->logits, MEGAMOE_F32, 2, t, shape->expert_count, 0, 0),
    };
    megamoe_named_tensor present[sizeof fields / sizeof fields[0]];
    uint32_t count = 0;
    for (unsigned bit = 0; bit < sizeof fields / sizeof fields[0]; bit++)
        if (fields[bit].tensor.data && (j->written >> bit & 1)) present[count++] = fields[bit];
    return megamoe_tensors_write(path, present, count);
}

static int report(const cli_options *options, const job *j) {
    const megamoe_counters counters = j->counters;
    uint64_t host_bytes = 0, device_bytes = 0;
    char memory[48];
    megamoe_device_memory(j->session.device, &host_bytes, &device_bytes);
    if (options->json)
        return cli_print_json(json_pack("{s:f,s:I,s:I,s:{s:I,s:I,s:I,s:I,s:I}}", "seconds", j->seconds, "host_bytes",
                                        (json_int_t)host_bytes, "device_bytes", (json_int_t)device_bytes, "counters",
                                        "unrouted_tokens", (json_int_t)counters.unrouted_tokens, "skipped_slots",
                                        (json_int_t)counters.skipped_slots, "bad_slots", (json_int_t)counters.bad_slots,
                                        "saturated_blocks", (json_int_t)counters.saturated_blocks, "nonfinite_blocks",
                                        (json_int_t)counters.nonfinite_blocks));
    printf("layer %u on %s, %s activations: %u tokens in %.3f ms\nmemory beyond mapped files: %s\n", options->layer,
           megamoe_device_describe(j->session.device),
           j->facts.activations == MEGAMOE_ACTIVATIONS_NVFP4 ? "nvfp4" : "bf16", j->input.batch.token_count,
           1e3 * j->seconds, cli_memory_text(j->session.device, memory));
    const struct {
        uint64_t count;
        const char *what;
    } notes[] = {{counters.unrouted_tokens, "tokens without experts, because a router logit is not a number"},
                 {counters.skipped_slots, "skipped slots (id -1, or an expert that is not loaded)"},
                 {counters.bad_slots, "slots with an id that no expert has"},
                 {counters.saturated_blocks, "nvfp4 blocks clipped at the largest scale"},
                 {counters.nonfinite_blocks, "nvfp4 blocks with a NaN or an infinity"}};
    for (unsigned i = 0; i < sizeof notes / sizeof notes[0]; i++)
        if (notes[i].count) printf("  %s: %llu\n", notes[i].what, (unsigned long long)notes[i].count);
    return cli_flush();
}

static int run(const cli_options *options) {
    job j = {.all_stages = options->dump_stages != NULL};
    if (!options->layer_given || !options->input || !options->output)
        return cli_fail("run needs --%s; 'megamoe run --help' shows an example.", !options->layer_given ? "layer"
                                                                                  : !options->input     ? "input"
                                                                                                        : "output");
    int result = open_job(options, &j);
    if (result == CLI_GOOD) result = run_layer(&j);
    if (result == CLI_GOOD) {
        megamoe_status status = options->dump_stages ? write_stages(&j, options->dump_stages) : MEGAMOE_OK;
        if (status == MEGAMOE_OK) status = write_output(&j, options->output); /* last, as the sign that all is there */
        if (status != MEGAMOE_OK) result = cli_fail_status(status);
    }
    if (result == CLI_GOOD) result = report(options, &j);
    cli_stages_free(&j.stages);
    cli_session_close(&j.session);
    cli_batch_free(&j.input);
    return result;
}

const cli_command cli_run = {
    .name = "run",
    .words = "CKPT",
    .summary = "run one layer of a checkpoint on hidden states from a file",
    .details =
        "CKPT is a directory of safetensors shards or one .safetensors file. Without expert_ids in the input the "
        "layer's own router chooses. The output is BF16 and appears only when the run is complete.",
    .examples = "  megamoe run model/ --layer 3 --input x.safetensors --output y.safetensors\n",
    .options =
        "layer input output dump-stages backend activations input-global intermediate-global routing-weight shared-unclamped experts ranks threads batch-invariant strict no-strict-routing repair-nan-scales no-scan",
    .words_min = 1,
    .words_max = 1,
    .run = run,
};
