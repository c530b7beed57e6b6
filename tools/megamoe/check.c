/* megamoe check: is a layer computed as docs/numerics.md defines it? Opens everything, and shows the
 * verdicts. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

/* ---- one layer ---- */

static uint32_t vocabulary_of(const cli_examination *e) {
    for (uint32_t i = 0; i < megamoe_checkpoint_layer_count(e->checkpoint); i++) {
        megamoe_layer_info info = {.struct_size = sizeof info};
        megamoe_tensor table;
        if (megamoe_checkpoint_layer(e->checkpoint, i, &info) != MEGAMOE_OK || info.layer != e->layer) continue;
        char *name = cli_format("%s.gate.tid2eid", info.prefix);
        bool found = megamoe_checkpoint_tensor(e->checkpoint, name, &table) == MEGAMOE_OK;
        free(name);
        return found ? (uint32_t)table.extent[0] : 0;
    }
    return 0;
}

megamoe_status cli_examined_layer(const cli_examination *e, megamoe_device *device, megamoe_activations activations,
                                  megamoe_layer **out) {
    megamoe_layer_options create = cli_layer_options(e->options);
    if (!e->weights) return cli_load_layer(e->options, device, e->checkpoint, e->layer, activations, out);
    create.activations = activations;
    return megamoe_layer_create(device, &e->weights->desc, &create, out);
}

megamoe_status cli_open_examined(cli_examination *e) {
    megamoe_activations activations = (megamoe_activations)e->options->activations;
    const char *against = e->options->against;
    megamoe_status status = MEGAMOE_OK;
    e->facts.struct_size = sizeof e->facts;
    if (against && activations == MEGAMOE_ACTIVATIONS_AUTO && cli_file_has(against, "x_codes"))
        activations = MEGAMOE_ACTIVATIONS_NVFP4;
    if (e->device) {
        status = cli_examined_layer(e, e->device, activations, &e->subject);
        if (status != MEGAMOE_OK) return status;
        megamoe_layer_describe(e->subject, &e->facts);
        activations = e->facts.activations; /* AUTO may mean something else to the oracle */
    }
    status = cli_examined_layer(e, e->oracle, activations, &e->reference);
    if (status == MEGAMOE_OK && !e->device) megamoe_layer_describe(e->reference, &e->facts);
    return status;
}

/* What the backend's router says, before the experts of the examination are decided. */
static megamoe_status run_router(cli_examination *e) {
    megamoe_batch batch = e->input.batch;
    bool routable = e->facts.routes && (!e->facts.shape.hash_routed || batch.token_ids);
    megamoe_stages stages = {.struct_size = sizeof stages,
                             .expert_ids = e->got.expert_ids,
                             .expert_weights = e->got.expert_weights,
                             .logits = e->got.logits};
    if (!routable) return MEGAMOE_OK;
    batch.expert_ids = NULL;
    batch.expert_weights = NULL;
    batch.output = e->got.output;
    megamoe_layer *router = NULL;
    megamoe_status status = cli_load_router(e, e->device, &router);
    if (status == MEGAMOE_OK) status = megamoe_layer_run_stages(router, &batch, NULL, &stages, &e->written);
    megamoe_layer_close(router);
    return status;
}

static int decide_routing(cli_examination *e) {
    bool all_loaded = e->facts.expert_count == e->facts.shape.expert_count;
    bool routed = (e->written & CLI_HAS_IDS) && (e->written & CLI_HAS_WEIGHTS);
    e->batch = e->input.batch;
    if (e->batch.expert_ids) return CLI_GOOD;
    if (!e->device && routed) { /* the file says who went where */
        e->batch.expert_ids = e->got.expert_ids;
        e->batch.expert_weights = e->got.expert_weights;
    } else if (!e->device) {
        if (!e->facts.routes)
            return cli_fail("%s has no expert_ids and expert_weights, and this layer has no router.",
                            e->options->against);
        e->batch.expert_ids = e->input.expert_ids =
            cli_allocate((size_t)e->token_count * e->facts.shape.experts_per_token, sizeof(int32_t));
        e->batch.expert_weights = e->input.expert_weights =
            cli_allocate((size_t)e->token_count * e->facts.shape.experts_per_token, sizeof(float));
        megamoe_status status =
            megamoe_layer_route(e->reference, &e->input.batch, e->input.expert_ids, e->input.expert_weights, NULL);
        if (status != MEGAMOE_OK) return cli_fail_status(status);
    } else if (e->options->input && all_loaded && routed) {
        size_t slots = (size_t)e->token_count * e->facts.shape.experts_per_token;
        e->input.expert_ids = cli_allocate(slots, sizeof(int32_t));
        e->input.expert_weights = cli_allocate(slots, sizeof(float));
        memcpy(e->input.expert_ids, e->got.expert_ids, slots * sizeof(int32_t));
        memcpy(e->input.expert_weights, e->got.expert_weights, slots * sizeof(float));
        e->batch.expert_ids = e->input.expert_ids;
        e->batch.expert_weights = e->input.expert_weights;
    } else {
        cli_make_routing(e);
    }
    return CLI_GOOD;
}

void cli_open_stages(cli_examination *e) {
    cli_stages_allocate(&e->got, &e->facts, e->token_count, false);
    cli_stages_allocate(&e->want, &e->facts, e->token_count, true);
}

static int examine(cli_examination *e) {
    megamoe_shape shape;
    megamoe_status status = megamoe_checkpoint_shape(e->checkpoint, e->layer, &shape);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    if (!e->options->input) cli_make_input(e, &shape, vocabulary_of(e));
    status = cli_open_examined(e);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    cli_open_stages(e);
    if (e->device) {
        status = run_router(e);
        if (status != MEGAMOE_OK) return cli_fail_status(status);
    } else if (cli_read_against(e->options->against, &e->facts, e->token_count, &e->got, &e->written) != CLI_GOOD) {
        return CLI_BAD_INPUT;
    }
    if (decide_routing(e) != CLI_GOOD) return CLI_BAD_INPUT;
    status = cli_judge_layer(e);
    return status == MEGAMOE_OK ? CLI_GOOD : cli_fail_status(status);
}

void cli_forget_stages(cli_examination *e) {
    cli_stages_free(&e->got);
    cli_stages_free(&e->want);
    e->written = e->verdict_count = 0;
    e->unquantized = (cli_verdict){0};
}

void cli_forget_layer(cli_examination *e) {
    megamoe_layer_close(e->subject);
    megamoe_layer_close(e->reference);
    e->subject = e->reference = NULL;
    cli_forget_stages(e);
    if (e->input.batch.expert_ids == NULL) { /* those of the layer, not of the input file */
        free(e->input.expert_ids);
        free(e->input.expert_weights);
        e->input.expert_ids = NULL;
        e->input.expert_weights = NULL;
    }
}

/* ---- showing ---- */

static const char *backend_of(const cli_examination *e) {
    return e->device ? megamoe_device_backend(e->device) : "file";
}
static const char *isa_of(const cli_examination *e) {
    return e->device ? megamoe_device_isa(e->device) : "none";
}
static const char *activations_of(const cli_examination *e) {
    return e->facts.activations == MEGAMOE_ACTIVATIONS_NVFP4 ? "nvfp4" : "bf16";
}

const cli_verdict *cli_first_failure(const cli_examination *e) {
    for (unsigned i = 0; i < e->verdict_count; i++)
        if (!e->verdicts[i].pass) return &e->verdicts[i];
    return NULL;
}

static json_t *layer_json(const cli_examination *e) {
    json_t *stages = json_array(), *unquantized = json_null();
    for (unsigned i = 0; i < e->verdict_count; i++) json_array_append_new(stages, cli_verdict_json(&e->verdicts[i]));
    if (e->unquantized.stage)
        unquantized = json_pack("{s:o,s:o}", "cosine", cli_json_number(cli_cosine(&e->unquantized)), "norm_ratio",
                                cli_json_number(cli_norm_ratio(&e->unquantized)));
    return json_pack("{s:i,s:s,s:s,s:s,s:i,s:o,s:o,s:I,s:b}", "layer", (int)e->layer, "backend", backend_of(e), "isa",
                     isa_of(e), "activations", activations_of(e), "tokens", (int)e->token_count, "stages", stages,
                     "reference_unquantized", unquantized, "private_bytes", (json_int_t)e->private_bytes, "pass",
                     e->pass);
}

static void print_first_failure(const cli_examination *e) {
    const cli_verdict *v = cli_first_failure(e);
    if (!v) return;
    char *where = cli_verdict_where(v);
    char *sentence = cli_format("Layer %u: the first stage that differs is %s. %s.", e->layer, v->stage, where);
    cli_print_wrapped(sentence, 0);
    free(sentence);
    free(where);
}

static void print_layer(const cli_examination *e) {
    char memory[16];
    cli_table *table = cli_table_new("<stage|<rule|>elements|>wrong|>near|>cosine|>norm ratio|>error|<result");
    for (unsigned i = 0; i < e->verdict_count; i++) {
        const cli_verdict *v = &e->verdicts[i];
        bool judged = v->elements > 0;
        char cosine[24] = "-", ratio[24] = "-", error[24] = "-";
        if (judged) {
            snprintf(cosine, sizeof cosine, "%.7f", cli_cosine(v));
            snprintf(ratio, sizeof ratio, "%.6f", cli_norm_ratio(v));
            snprintf(error, sizeof error, "%.1e", v->max_rel_error);
        }
        cli_table_add(table, "%s\t%s\t%llu\t%llu\t%llu\t%s\t%s\t%s\t%s", v->stage, v->compared,
                      (unsigned long long)v->elements, (unsigned long long)v->mismatches,
                      (unsigned long long)v->near_boundary, cosine, ratio, error,
                      !v->pass ? "FAIL"
                      : judged ? "ok"
                               : "-");
    }
    printf("layer %u, %u tokens, %s activations\n%s against the definition\n\n", e->layer, e->token_count,
           activations_of(e), e->device ? megamoe_device_describe(e->device) : e->options->against);
    cli_table_print(table, 0);
    putchar('\n');
    if (e->unquantized.stage)
        printf("To the layer with bf16 activations: cosine %.5f, norm ratio %.5f.\n", cli_cosine(&e->unquantized),
               cli_norm_ratio(&e->unquantized));
    printf("Memory beyond mapped files: %s.\n", cli_bytes_text((double)e->private_bytes, memory));
}

static void add_layer_row(cli_table *table, const cli_examination *e) {
    const cli_verdict *whole = e->verdict_count ? &e->verdicts[e->verdict_count - 1] : NULL,
                      *failed = cli_first_failure(e);
    unsigned long long near = 0;
    for (unsigned i = 0; i < e->verdict_count; i++) near += e->verdicts[i].near_boundary;
    cli_table_add(table, "%u\t%s\t%u\t%llu\t%.7f\t%.6f\t%s", e->layer, activations_of(e), e->verdict_count, near,
                  whole ? cli_cosine(whole) : 0.0, whole ? cli_norm_ratio(whole) : 0.0, failed ? failed->stage : "ok");
}

/* ---- the command ---- */

static int open_all(const cli_options *options, cli_session *session, cli_examination *e) {
    megamoe_shape shape;
    uint32_t tokens = 64;
    if (options->tokens && cli_parse_list(options->tokens, "tokens", &tokens, 1) == 0) return CLI_BAD_INPUT;
    megamoe_status status = cli_open_checkpoint(options, options->words[0], &session->checkpoint);
    if (status == MEGAMOE_OK && options->layer_given)
        status = megamoe_checkpoint_shape(session->checkpoint, options->layer, &shape);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    if (megamoe_checkpoint_layer_count(session->checkpoint) == 0)
        return cli_fail("%s has no MoE layer to check; 'megamoe inspect' shows what it has.", options->words[0]);
    e->checkpoint = session->checkpoint;
    e->token_count = tokens;
    if (options->input) {
        if (cli_batch_read(options->input, "", &shape, &e->input) != CLI_GOOD) return CLI_BAD_INPUT;
        e->token_count = e->input.batch.token_count;
    }
    status = cli_open_device(options, MEGAMOE_REFERENCE, e->token_count, &e->oracle);
    if (status == MEGAMOE_OK && !options->against)
        status = cli_open_device(options, (megamoe_backend)options->backend, e->token_count, &session->device);
    e->device = session->device;
    return status == MEGAMOE_OK ? CLI_GOOD : cli_fail_status(status);
}

static int check_one(cli_examination *e) {
    e->layer = e->options->layer;
    if (examine(e) != CLI_GOOD) return CLI_BAD_INPUT;
    int written = CLI_GOOD;
    if (e->options->json) {
        written = cli_print_json(layer_json(e));
    } else {
        print_layer(e);
        print_first_failure(e);
        written = cli_flush();
    }
    return written != CLI_GOOD ? written : e->pass ? CLI_GOOD : CLI_CHECK_FAILED;
}

static int check_all(cli_examination *e) {
    uint32_t count = megamoe_checkpoint_layer_count(e->checkpoint);
    json_t *layers = json_array();
    cli_table *table = cli_table_new("<layer|<activations|>stages|>near|>cosine|>norm ratio|<first stage that differs");
    cli_progress progress;
    bool pass = true;
    int result = CLI_GOOD;
    cli_progress_start(&progress, "checking layers");
    for (uint32_t i = 0; i < count && result == CLI_GOOD; i++) {
        megamoe_layer_info info = {.struct_size = sizeof info};
        megamoe_status status = megamoe_checkpoint_layer(e->checkpoint, i, &info);
        e->layer = info.layer;
        result = status == MEGAMOE_OK ? examine(e) : cli_fail_status(status);
        if (result != CLI_GOOD) break;
        pass = pass && e->pass;
        json_array_append_new(layers, layer_json(e));
        add_layer_row(table, e);
        cli_progress_end(&progress);
        if (!e->options->json) print_first_failure(e);
        cli_progress_update(&progress, i + 1, count);
        cli_forget_layer(e);
    }
    cli_progress_end(&progress);
    json_t *report = json_pack("{s:o,s:b}", "layers", layers, "pass", pass);
    if (result == CLI_GOOD && e->options->json) {
        result = cli_print_json(report);
        report = NULL;
    } else if (result == CLI_GOOD) {
        char memory[16];
        printf("%u layers, %u tokens each, %s against the definition\n\n", count, e->token_count,
               megamoe_device_describe(e->device));
        cli_table_print(table, 0);
        printf("\nMemory beyond mapped files: %s.\n", cli_bytes_text((double)e->private_bytes, memory));
        table = NULL;
        result = cli_flush();
    }
    json_decref(report);
    cli_table_free(table);
    return result != CLI_GOOD ? result : pass ? CLI_GOOD : CLI_CHECK_FAILED;
}

static int run(const cli_options *options) {
    cli_session session = {0};
    cli_examination e = {.options = options};
    if (options->against && (!options->layer_given || !options->input))
        return cli_fail(
            "--against needs --layer and --input: the layer, and the hidden states that the file's stages are of.");
    if (options->input && !options->layer_given)
        return cli_fail("--input needs --layer: hidden states belong to one layer.");
    int result = open_all(options, &session, &e);
    if (result == CLI_GOOD) result = options->layer_given ? check_one(&e) : check_all(&e);
    cli_forget_layer(&e);
    megamoe_device_close(e.oracle);
    cli_session_close(&session);
    cli_batch_free(&e.input);
    free(e.hidden);
    return result;
}

const cli_command cli_check = {
    .name = "check",
    .words = "CKPT",
    .summary = "show that every stage of a layer is what the definition says",
    .details =
        "Runs the layer on a backend and compares each stage with the definition (docs/numerics.md), giving the "
        "definition the backend's own output of the stage before. `exact` stages must be equal; `close` ones lie within a "
        "derived bound; `near` counts values whose rounding may go either way. The tokens are Gaussian with outliers "
        "unless --input gives others. Exit status 1: a stage differs; the first one is named.",
    .examples = "  megamoe check model/\n  megamoe check model/ --layer 3 --activations nvfp4 --tokens 64\n"
                "  megamoe check model/ --layer 3 --input x.safetensors --against y.safetensors\n",
    .options = "layer tokens input against seed backend activations input-global intermediate-global routing-weight "
               "shared-unclamped experts ranks threads batch-invariant strict repair-nan-scales no-scan",
    .words_min = 1,
    .words_max = 1,
    .run = run,
};
