/*
 * megamoe selftest: one command for the first person with a GPU that nobody here had. Layers of many shapes, batches
 * and routings on one backend, each judged as check judges; the failing tuples; a benchmark if the backend is a GPU's;
 * and all of it in one file to send back.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "selftest_cases.h"
#include "shards.h"

enum { TOKENS_MAX = 32, FAILURES_SHOWN = 10 };

typedef struct tally { /* one row of the table: a shape in a format */
    unsigned cases, failed;
    unsigned long long near;
    double cosine; /* the smallest of a whole layer */
} tally;

typedef struct sweep {
    const cli_options *options;
    const char *path;       /* of the report */
    cli_selftest_shape own; /* --shape, where it is given */
    cli_examination e;
    uint32_t tokens[TOKENS_MAX], wide_tokens[TOKENS_MAX];
    unsigned tokens_count, wide_count;
    json_t *cases, *benches, *error;
    cli_table *table;
    char *failures[FAILURES_SHOWN];
    tally all;
    unsigned done, planned; /* shapes in formats */
    bool complete;
    cli_progress progress;
} sweep;

/* ---- one case ---- */

static void remember_failure(sweep *s, const char *shape, const char *format, cli_selftest_routing routing,
                             const cli_verdict *v) {
    char *where = cli_verdict_where(v);
    if (s->all.failed < FAILURES_SHOWN)
        s->failures[s->all.failed] =
            cli_format("%s, shape %s, %s, %u tokens, %s routing, stage %s: %s.", megamoe_device_backend(s->e.device),
                       shape, format, s->e.token_count, cli_selftest_routing_name(routing), v->stage, where);
    free(where);
}

static void record_case(sweep *s, const char *shape, const char *format, cli_selftest_routing routing, tally *row) {
    const cli_verdict *failed = cli_first_failure(&s->e), *whole = &s->e.verdicts[s->e.verdict_count - 1];
    unsigned long long near = 0;
    for (unsigned i = 0; i < s->e.verdict_count; i++) near += s->e.verdicts[i].near_boundary;
    json_t *one = json_pack("{s:s,s:s,s:i,s:s,s:I,s:o,s:b}", "shape", shape, "format", format, "tokens",
                            (int)s->e.token_count, "routing", cli_selftest_routing_name(routing), "near_boundary",
                            (json_int_t)near, "cosine", cli_json_number(cli_cosine(whole)), "pass", s->e.pass);
    if (failed) {
        json_t *stages = json_array();
        for (unsigned i = 0; i < s->e.verdict_count; i++)
            json_array_append_new(stages, cli_verdict_json(&s->e.verdicts[i]));
        json_object_set_new(one, "first_stage", json_string(failed->stage));
        json_object_set_new(one, "stages", stages);
        remember_failure(s, shape, format, routing, failed);
    }
    json_array_append_new(s->cases, one);
    row->cases++;
    row->failed += failed != NULL;
    row->near += near;
    if (cli_cosine(whole) < row->cosine) row->cosine = cli_cosine(whole);
    s->all.cases++;
    s->all.failed += failed != NULL;
}

/* What ends the sweep: after a kernel that failed, a GPU may answer nothing any more. */
static void record_error(sweep *s, megamoe_status status, const char *during) {
    s->error = json_pack("{s:s,s:s,s:s}", "status", megamoe_status_name(status), "message", megamoe_error_message(),
                         "during", during);
}

static void judge_case(sweep *s, const char *shape, const char *format, uint32_t tokens, cli_selftest_routing routing,
                       tally *row) {
    s->e.token_count = tokens;
    cli_make_input(&s->e, &s->e.facts.shape, 0);
    cli_open_stages(&s->e);
    cli_selftest_route(&s->e, routing);
    megamoe_status status = cli_judge_layer(&s->e);
    if (status == MEGAMOE_OK) {
        record_case(s, shape, format, routing, row);
    } else {
        char *during = cli_format("shape %s, %s, %u tokens, %s routing", shape, format, tokens,
                                  cli_selftest_routing_name(routing));
        record_error(s, status, during);
        free(during);
    }
    cli_forget_stages(&s->e);
}

/* ---- the report ---- */

static bool passed(const sweep *s) {
    return s->complete && s->all.cases > 0 && s->all.failed == 0;
}

static json_t *report_json(const sweep *s) {
    const cli_examination *e = &s->e;
    return json_pack("{s:s,s:s?,s:s?,s:s?,s:s,s:i,s:b,s:O?,s:O,s:O,s:b,s:b}", "version", megamoe_version(), "backend",
                     e->device ? megamoe_device_backend(e->device) : NULL, "isa",
                     e->device ? megamoe_device_isa(e->device) : NULL, "device",
                     e->device ? megamoe_device_describe(e->device) : NULL, "activations",
                     s->options->activations == MEGAMOE_ACTIVATIONS_BF16 ? "bf16" : "nvfp4", "seed",
                     (int)s->options->seed, "quick", s->options->quick, "error", s->error, "cases", s->cases, "benches",
                     s->benches, "complete", s->complete, "pass", passed(s));
}

/* Written anew after each layer, because the run that ends nobody knows how is the one whose report is wanted most. */
static int write_report(const sweep *s) {
    json_t *report = report_json(s);
    char *text = json_dumps(report, JSON_INDENT(1) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
    int result = text ? cli_write_file(s->path, text) : cli_fail("there is no memory for the report.");
    free(text);
    json_decref(report);
    return result;
}

/* ---- the sweep ---- */

static void judge_layer(sweep *s, const cli_selftest_shape *shape, const char *format) {
    const uint32_t *tokens = shape->wide ? s->wide_tokens : s->tokens;
    unsigned count = shape->wide ? s->wide_count : s->tokens_count;
    bool few = shape->wide || s->options->quick;
    tally row = {.cosine = 1};
    megamoe_status status = cli_open_examined(&s->e);
    if (status != MEGAMOE_OK) record_error(s, status, shape->name);
    for (unsigned i = 0; i < count; i++)
        for (cli_selftest_routing r = 0; r < CLI_SELFTEST_COUNT && !s->error; r++)
            if (!few || r == CLI_SELFTEST_RAGGED || r == CLI_SELFTEST_HOT)
                judge_case(s, shape->name, format, tokens[i], r, &row);
    cli_forget_layer(&s->e);
    cli_table_add(s->table, "%s\t%s\t%u\t%u\t%llu\t%.7f\t%s", shape->name, format, row.cases, row.failed, row.near,
                  row.cosine,
                  row.failed ? "FAIL"
                  : s->error ? "stopped"
                             : "ok");
}

/* One shape as NVFP4, and as MXFP4 where blocks of 32 fit. */
static int judge_shape(sweep *s, const cli_selftest_shape *shape) {
    int result = CLI_GOOD;
    for (int mxfp4 = 0; mxfp4 <= shape->mxfp4 && result == CLI_GOOD && !s->error; mxfp4++) {
        cli_shape parsed;
        cli_weights weights;
        if (cli_shape_parse(shape->text, &parsed) != CLI_GOOD) return CLI_BAD_INPUT;
        cli_range experts = {0, parsed.shape.expert_count};
        if (mxfp4) parsed.shape.group_size = 32;
        result = cli_weights_make(&parsed, &experts, &weights);
        weights.desc.router_weight = (megamoe_tensor){0}; /* routing is given */
        s->e.weights = &weights;
        if (result == CLI_GOOD) judge_layer(s, shape, mxfp4 ? "mxfp4" : "nvfp4");
        cli_weights_free(&weights);
        if (result == CLI_GOOD) result = write_report(s);
        cli_progress_update(&s->progress, ++s->done, s->planned);
    }
    return result;
}

static int judge_all(sweep *s) {
    unsigned count;
    const cli_selftest_shape *shapes = cli_selftest_shapes(&count);
    int result = CLI_GOOD;
    if (s->own.name) {
        shapes = &s->own;
        count = 1;
    }
    for (unsigned i = 0; i < count; i++)
        if (shapes[i].quick || !s->options->quick) s->planned += shapes[i].mxfp4 + 1u;
    cli_progress_start(&s->progress, "testing");
    for (unsigned i = 0; i < count && result == CLI_GOOD && !s->error; i++)
        if (shapes[i].quick || !s->options->quick) result = judge_shape(s, &shapes[i]);
    cli_progress_end(&s->progress);
    return result;
}

/* ---- setting up ---- */

static int read_arguments(sweep *s) {
    static const char all[] = "1,2,7,8,9,31,33,64,100,129,500", quick[] = "1,9,33,129", wide[] = "1,8,64,129";
    const char *own = s->options->tokens;
    cli_shape parsed;
    s->path = s->options->report ? s->options->report : "megamoe-selftest.json";
    s->tokens_count = cli_parse_list(own ? own : s->options->quick ? quick : all, "tokens", s->tokens, TOKENS_MAX);
    if (!s->tokens_count) return CLI_BAD_INPUT;
    s->wide_count = cli_parse_list(own ? own : wide, "tokens", s->wide_tokens, TOKENS_MAX);
    if (!s->options->shape) return CLI_GOOD;
    if (cli_shape_parse(s->options->shape, &parsed) != CLI_GOOD) return CLI_BAD_INPUT;
    s->own = (cli_selftest_shape){.name = s->options->shape,
                                  .text = s->options->shape,
                                  .mxfp4 = parsed.shape.hidden % 32 == 0 && parsed.shape.intermediate % 32 == 0,
                                  .quick = true};
    return CLI_GOOD;
}

/* sm100 by its name where there is one, because a GPU's best path would fall back from it, and pass. */
static megamoe_backend wanted_backend(const cli_options *options) {
    megamoe_backend asked = (megamoe_backend)options->backend;
    bool best = asked == MEGAMOE_BACKEND_AUTO || asked == MEGAMOE_CUDA;
    return best && megamoe_device_probe(MEGAMOE_SM100, 0) == MEGAMOE_OK ? MEGAMOE_SM100 : asked;
}

/* A backend that is not there is bad input; one that is, and does not open, has failed, and that is the report. */
static int open_devices(sweep *s, megamoe_backend backend) {
    uint32_t most = 1;
    for (unsigned i = 0; i < s->tokens_count; i++) most = s->tokens[i] > most ? s->tokens[i] : most;
    for (unsigned i = 0; i < s->wide_count; i++) most = s->wide_tokens[i] > most ? s->wide_tokens[i] : most;
    megamoe_status status = megamoe_device_probe(backend, 0);
    if (status == MEGAMOE_OK) status = cli_open_device(s->options, MEGAMOE_REFERENCE, most, &s->e.oracle);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    status = cli_open_device(s->options, backend, most, &s->e.device);
    if (status != MEGAMOE_OK) record_error(s, status, "opening the device");
    return CLI_GOOD;
}

static int measure(sweep *s, megamoe_backend backend) {
    static const char *const shapes[] = {"v4-flash", "v4-pro"};
    bool gpu = !s->options->quick && megamoe_device_threads(s->e.device) == 0 && backend != MEGAMOE_SM100_ON_MODEL;
    cli_options options = *s->options;
    int result = CLI_GOOD;
    options.backend = backend;
    options.tokens = "1,8,64,512,2048";
    for (unsigned i = 0; gpu && i < sizeof shapes / sizeof *shapes && result == CLI_GOOD; i++) {
        json_t *report = NULL;
        options.shape = shapes[i];
        if (!options.json) putchar('\n');
        result = cli_bench_run(&options, &report);
        if (report) json_array_append_new(s->benches, report);
    }
    return result;
}

/* ---- showing ---- */

static void print_cases(sweep *s) {
    printf("%s against the definition\n\n", megamoe_device_describe(s->e.device));
    cli_table_print(s->table, 0);
    s->table = NULL;
    for (unsigned i = 0; i < FAILURES_SHOWN && s->failures[i]; i++) {
        printf("\nFAIL  ");
        cli_print_wrapped(s->failures[i], 6);
    }
    if (s->all.failed > FAILURES_SHOWN) printf("\n%u more in the report.\n", s->all.failed - FAILURES_SHOWN);
}

static void print_error(const sweep *s) {
    char *sentence = cli_format("%s: %s.", json_string_value(json_object_get(s->error, "during")),
                                json_string_value(json_object_get(s->error, "message")));
    printf("\nFAIL  ");
    cli_print_wrapped(sentence, 6);
    free(sentence);
}

static int show(sweep *s) {
    if (s->options->json) return cli_print_json(report_json(s));
    if (s->error) print_error(s);
    printf("\n%u cases, %u failed. The file to send back is ", s->all.cases, s->all.failed);
    cli_print_plain(stdout, s->path, strlen(s->path));
    printf(".\n");
    return cli_flush();
}

static void close_all(sweep *s) {
    for (unsigned i = 0; i < FAILURES_SHOWN; i++) free(s->failures[i]);
    cli_table_free(s->table);
    json_decref(s->cases);
    json_decref(s->benches);
    json_decref(s->error);
    megamoe_device_close(s->e.device);
    megamoe_device_close(s->e.oracle);
    cli_batch_free(&s->e.input);
    free(s->e.hidden);
}

static int run(const cli_options *given) {
    cli_options options = *given;
    sweep s = {.options = &options, .e = {.options = &options}, .cases = json_array(), .benches = json_array()};
    megamoe_backend backend = wanted_backend(&options);
    if (options.activations == MEGAMOE_ACTIVATIONS_AUTO) options.activations = MEGAMOE_ACTIVATIONS_NVFP4;
    s.table = cli_table_new("<shape|<format|>cases|>failed|>near|>cosine|<result");
    int result = read_arguments(&s);
    if (result == CLI_GOOD) result = open_devices(&s, backend);
    if (result == CLI_GOOD) result = write_report(&s);
    if (result == CLI_GOOD && !s.error) {
        result = judge_all(&s);
        if (result == CLI_GOOD && !options.json) print_cases(&s);
        if (result == CLI_GOOD && !s.error) result = measure(&s, backend);
        s.complete = result == CLI_GOOD && !s.error;
        if (result == CLI_GOOD) result = write_report(&s);
    }
    if (result == CLI_GOOD) result = show(&s);
    if (result == CLI_GOOD && !passed(&s)) result = CLI_CHECK_FAILED;
    close_all(&s);
    return result;
}

const cli_command cli_selftest = {
    .name = "selftest",
    .words = "",
    .summary = "sweep shapes, batches and routings on one backend, and write a report",
    .details =
        "Layers of random weights, NVFP4 and MXFP4, are run on a backend (the best GPU's if there is one) and every stage "
        "is judged as check does. Names each failing shape, batch, routing, stage and value; then times the layer, if the "
        "backend is a GPU's. On a Blackwell GPU this is the first thing to run. Exit status 1: a case failed.",
    .examples = "  megamoe selftest\n  megamoe selftest --backend cuda-portable --report portable.json\n"
                "  megamoe selftest --quick --shape H=512,I=256,E=8,K=2 --tokens 1,64\n",
    .options = "backend quick shape tokens seed report activations threads batch-invariant",
    .run = run,
};
