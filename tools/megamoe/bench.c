/*
 * megamoe bench: how fast a layer runs, and which part of this machine's limits that is. Every run draws
 * other experts, so that weights come from memory as they do in a model, and not from a cache that the last
 * run filled.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_weights.h"
#include "formats.h"
#include "random.h"
#include "shards.h"

enum { TOKENS_MAX = 32, RUNS_MIN = 5, RUNS_MAX = 1000, ROUTINGS_MAX = 8 };

typedef struct sample { /* one run */
    double expert_seconds, layer_seconds;
    uint32_t pairs, experts_hit;
} sample;

typedef struct result { /* one batch size */
    uint32_t tokens, runs;
    sample median; /* the run in the middle by expert_seconds; on a GPU, the mean of its routings */
    double fastest, p90, layer_median;
    double loaded, layer_loaded; /* on a GPU: after unbroken work; elsewhere NAN */
    double weight_gb_s, tflop_s, of_bandwidth, of_matrix;
} result;

typedef struct measurement {
    const cli_options *options;
    cli_session session;
    cli_weights weights;
    megamoe_layer_facts facts;
    megamoe_limits limits;
    const char *shape_name;
    uint32_t tokens[TOKENS_MAX], tokens_max; /* the largest of them */
    unsigned tokens_count;
    result results[TOKENS_MAX];
    int32_t *expert_ids, *no_experts; /* the latter all -1 */
    float *expert_weights;
    uint16_t *hidden, *output;
} measurement;

/* Fills the routing of one run; counts the pairs of loaded experts and the distinct experts among them. */
static void draw_routing(measurement *m, uint32_t tokens, uint64_t key, sample *s) {
    const megamoe_layer_facts *f = &m->facts;
    uint32_t k_count = f->shape.experts_per_token, e_count = f->shape.expert_count;
    bool local = m->options->routing == CLI_ROUTING_LOCAL;
    uint32_t choices = local ? f->expert_count : e_count, used = k_count < choices ? k_count : choices;
    bool *hit = cli_allocate(e_count, sizeof *hit);
    s->pairs = s->experts_hit = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        int32_t *ids = m->expert_ids + (size_t)t * k_count, drawn[32];
        for (uint32_t n = 0, draw = 0; n < used; draw++) {
            drawn[n] = (int32_t)(random_below(random_at(key, (uint64_t)t << 20 | draw), choices) +
                                 (local ? f->expert_first : 0));
            uint32_t seen = 0;
            while (drawn[seen] != drawn[n]) seen++;
            n += seen == n;
        }
        for (uint32_t k = 0; k < k_count; k++) {
            bool loaded = k < used && (uint32_t)drawn[k] - f->expert_first < f->expert_count;
            ids[k] = loaded ? drawn[k] : -1;
            m->expert_weights[(size_t)t * k_count + k] = loaded ? 1.0f / (float)k_count : 0.0f;
            s->pairs += loaded;
            s->experts_hit += loaded && !hit[drawn[k]];
            if (loaded) hit[drawn[k]] = true;
        }
    }
    free(hit);
}

static megamoe_status expert_seconds(measurement *m, double *seconds) {
    megamoe_counters counters = {.struct_size = sizeof counters};
    megamoe_status status = megamoe_layer_counters(m->session.layer, &counters, NULL);
    *seconds = counters.expert_seconds;
    return status;
}

static megamoe_status time_layer(measurement *m, uint32_t tokens, const int32_t *expert_ids, double *seconds,
                                 double *experts) {
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = m->hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = m->output,
                           .expert_ids = expert_ids,
                           .expert_weights = m->expert_weights};
    double before = 0, after = 0;
    megamoe_status status = expert_seconds(m, &before);
    double started = cli_seconds();
    if (status == MEGAMOE_OK) status = megamoe_layer_run(m->session.layer, &batch, NULL);
    if (status == MEGAMOE_OK) status = expert_seconds(m, &after); /* waits for a GPU */
    *seconds = cli_seconds() - started;
    *experts = after - before;
    return status;
}

/*
 * Runs every loaded expert once, so that the first batch size does not pay for mapping a checkpoint's pages, which a
 * serving process pays once in its life.
 */
static megamoe_status touch_experts(measurement *m) {
    uint32_t k_count = m->facts.shape.experts_per_token, loaded = m->facts.expert_count;
    megamoe_status status = MEGAMOE_OK;
    double unused;
    for (uint32_t e = 0; e < loaded && status == MEGAMOE_OK; e += k_count) {
        for (uint32_t k = 0; k < k_count; k++) {
            m->expert_ids[k] = e + k < loaded ? (int32_t)(m->facts.expert_first + e + k) : -1;
            m->expert_weights[k] = 1.0f / (float)k_count;
        }
        status = time_layer(m, 1, m->expert_ids, &unused, &unused);
    }
    return status;
}

/*
 * The layer with drawn experts, and the router beside it: that is everything. A backend that does not time its experts
 * apart runs once more without any, which leaves the shared expert, staging and combine to subtract.
 */
static megamoe_status time_run(measurement *m, uint32_t tokens, sample *s) {
    double without = 0, unused, started;
    megamoe_status status = time_layer(m, tokens, m->expert_ids, &s->layer_seconds, &s->expert_seconds);
    if (status == MEGAMOE_OK && s->expert_seconds <= 0) {
        status = time_layer(m, tokens, m->no_experts, &without, &unused);
        s->expert_seconds =
            fmax(s->layer_seconds - without, 0.05 * s->layer_seconds); /* noise must not go below zero */
    }
    if (status != MEGAMOE_OK || !m->facts.routes || m->facts.shape.hash_routed) return status;
    megamoe_batch batch = {
        .struct_size = sizeof batch, .token_count = tokens, .hidden = m->hidden, .hidden_dtype = MEGAMOE_BF16};
    started = cli_seconds();
    status = megamoe_layer_route(m->session.layer, &batch, m->expert_ids, m->expert_weights, NULL);
    s->layer_seconds += cli_seconds() - started;
    return status;
}

static int by_expert_seconds(const void *a, const void *b) {
    double x = ((const sample *)a)->expert_seconds, y = ((const sample *)b)->expert_seconds;
    return (x > y) - (x < y);
}

static int by_layer_seconds(const void *a, const void *b) {
    double x = ((const sample *)a)->layer_seconds, y = ((const sample *)b)->layer_seconds;
    return (x > y) - (x < y);
}

/* What the median's time and counts amount to. */
static void rate(const measurement *m, result *r, double pairs, double experts_hit) {
    const megamoe_shape *shape = &m->facts.shape;
    double seconds = r->median.expert_seconds, matrices = shape->not_gated ? 2 : 3;
    double flop = 2 * matrices * (double)shape->hidden * (double)shape->intermediate * pairs;
    r->weight_gb_s = 1e-9 * experts_hit * (double)m->facts.expert_bytes / seconds;
    r->tflop_s = 1e-12 * flop / seconds;
    r->of_bandwidth = m->limits.read_gb_s > 0 ? r->weight_gb_s / m->limits.read_gb_s : NAN;
    r->of_matrix = m->limits.matrix_tflop_s > 0 ? r->tflop_s / m->limits.matrix_tflop_s : NAN;
}

static void summarize(const measurement *m, sample *samples, result *r) {
    qsort(samples, r->runs, sizeof *samples, by_layer_seconds);
    r->layer_median = samples[r->runs / 2].layer_seconds;
    qsort(samples, r->runs, sizeof *samples, by_expert_seconds);
    r->median = samples[r->runs / 2];
    r->fastest = samples[0].expert_seconds;
    r->p90 = samples[r->runs * 9 / 10].expert_seconds;
    rate(m, r, r->median.pairs, r->median.experts_hit);
}

/* A few routings in turns, more of them the smaller they are, by the GPU's clock. */
static megamoe_status time_on_gpu(measurement *m, uint32_t tokens, result *r) {
    uint32_t count = tokens <= 512 ? ROUTINGS_MAX : tokens <= 2048 ? 4 : tokens <= 8192 ? 2 : 1;
    size_t slots = (size_t)tokens * m->facts.shape.experts_per_token;
    uint64_t key = random_key(m->options->seed, "bench");
    megamoe_batch batches[ROUTINGS_MAX];
    megamoe_times times = {.struct_size = sizeof times};
    int32_t *ids = cli_allocate(count * slots, sizeof *ids);
    float *weights = cli_allocate(count * slots, sizeof *weights);
    double pairs = 0, hit = 0;
    for (uint32_t i = 0; i < count; i++) {
        sample s = {0};
        while (s.pairs == 0) draw_routing(m, tokens, key++, &s);
        pairs += (double)s.pairs / count, hit += (double)s.experts_hit / count;
        memcpy(ids + i * slots, m->expert_ids, slots * sizeof *ids);
        memcpy(weights + i * slots, m->expert_weights, slots * sizeof *weights);
        batches[i] = (megamoe_batch){.struct_size = sizeof *batches,
                                     .token_count = tokens,
                                     .hidden = m->hidden,
                                     .hidden_dtype = MEGAMOE_BF16,
                                     .output = m->output,
                                     .expert_ids = ids + i * slots,
                                     .expert_weights = weights + i * slots};
    }
    megamoe_status status = megamoe_layer_time(m->session.layer, batches, count, &times);
    *r = (result){.tokens = tokens,
                  .runs = times.runs,
                  .median = {times.experts.median, times.layer.median, (uint32_t)lround(pairs), (uint32_t)lround(hit)},
                  .fastest = times.experts.least,
                  .p90 = times.experts.p90,
                  .layer_median = times.layer.median,
                  .loaded = times.experts_loaded.median,
                  .layer_loaded = times.layer_loaded.median};
    rate(m, r, pairs, hit);
    free(ids);
    free(weights);
    return status;
}

static megamoe_status time_on_host(measurement *m, uint32_t tokens, result *r) {
    uint64_t key = random_key(m->options->seed, "bench");
    sample samples[RUNS_MAX];
    double started = cli_seconds();
    megamoe_status status = MEGAMOE_OK;
    uint32_t wanted = m->options->runs < RUNS_MAX ? m->options->runs : RUNS_MAX;
    *r = (result){.tokens = tokens, .loaded = NAN, .layer_loaded = NAN};
    for (int64_t n = -1; status == MEGAMOE_OK; n++) { /* the first run only warms up */
        sample s = {0};
        while (s.pairs == 0) draw_routing(m, tokens, key++, &s);
        if (n == 0) started = cli_seconds();
        status = time_run(m, tokens, &s);
        if (n >= 0) samples[r->runs++] = s;
        if (wanted ? r->runs == wanted : r->runs == RUNS_MAX || (r->runs >= RUNS_MIN && cli_seconds() - started > 1))
            break;
    }
    if (status == MEGAMOE_OK) summarize(m, samples, r);
    return status;
}

/* A GPU by its own clock if the backend reads it; --runs asks for the host's. */
static megamoe_status time_batch(measurement *m, uint32_t tokens, result *r) {
    if (!m->options->runs && megamoe_device_threads(m->session.device) == 0) {
        megamoe_status status = time_on_gpu(m, tokens, r);
        if (status != MEGAMOE_UNSUPPORTED_DEVICE) return status;
    }
    return time_on_host(m, tokens, r);
}

/* ---- setting up ---- */

static int load_checkpoint(measurement *m) {
    const cli_options *options = m->options;
    uint32_t layer = options->layer;
    megamoe_status status = cli_open_checkpoint(options, options->words[0], &m->session.checkpoint);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    if (!options->layer_given) {
        megamoe_layer_info info = {.struct_size = sizeof info};
        status = megamoe_checkpoint_layer(m->session.checkpoint, 0, &info);
        if (status != MEGAMOE_OK) return cli_fail_status(status);
        layer = info.layer;
    }
    status = cli_load_layer(options, m->session.device, m->session.checkpoint, layer,
                            (megamoe_activations)options->activations, &m->session.layer);
    m->shape_name = options->words[0];
    return status == MEGAMOE_OK ? CLI_GOOD : cli_fail_status(status);
}

/* Where --experts says nothing: all of a small shape, one rank of eight of a large one. */
static int make_weights(measurement *m) {
    cli_shape shape;
    cli_range experts = m->options->experts;
    if (cli_shape_parse(m->options->shape, &shape) != CLI_GOOD) return CLI_BAD_INPUT;
    uint32_t count = shape.shape.expert_count;
    bool large = (double)count * (double)shape.shape.hidden * (double)shape.shape.intermediate > 2e9;
    if (!experts.end) experts.end = large ? (count + 7) / 8 : count;
    if (experts.end > count)
        return cli_fail("%s has experts 0 to %u, and --experts asks for %u to %u.", shape.name, count - 1,
                        experts.first, experts.end - 1);
    if (cli_weights_make(&shape, &experts, &m->weights) != CLI_GOOD) return CLI_BAD_INPUT;
    megamoe_layer_options create = cli_layer_options(m->options);
    create.expert_first = experts.first;
    create.expert_count = experts.end - experts.first;
    megamoe_status status = megamoe_layer_create(m->session.device, &m->weights.desc, &create, &m->session.layer);
    m->shape_name = shape.name;
    return status == MEGAMOE_OK ? CLI_GOOD : cli_fail_status(status);
}

static int set_up(measurement *m) {
    uint32_t most = 0;
    m->tokens_count =
        cli_parse_list(m->options->tokens ? m->options->tokens : "1,8,64,512", "tokens", m->tokens, TOKENS_MAX);
    if (!m->tokens_count) return CLI_BAD_INPUT;
    for (unsigned i = 0; i < m->tokens_count; i++) most = m->tokens[i] > most ? m->tokens[i] : most;
    if (most > 1 << 20) return cli_fail("--tokens %u is more than the %d that bench runs.", most, 1 << 20);
    megamoe_status status = cli_open_device(m->options, (megamoe_backend)m->options->backend, most, &m->session.device);
    if (status != MEGAMOE_OK) return cli_fail_status(status);
    m->tokens_max = most;
    if ((m->options->words[0] ? load_checkpoint(m) : make_weights(m)) != CLI_GOOD) return CLI_BAD_INPUT;
    m->facts.struct_size = sizeof m->facts;
    megamoe_layer_describe(m->session.layer, &m->facts);

    size_t slots = (size_t)most * m->facts.shape.experts_per_token, values = (size_t)most * m->facts.shape.hidden;
    m->expert_ids = cli_allocate(slots, sizeof *m->expert_ids);
    m->no_experts = cli_allocate(slots, sizeof *m->no_experts);
    memset(m->no_experts, 0xFF, slots * sizeof *m->no_experts);
    m->expert_weights = cli_allocate(slots, sizeof *m->expert_weights);
    m->hidden = cli_allocate(values, sizeof *m->hidden);
    m->output = cli_allocate(values, sizeof *m->output);
    uint64_t key = random_key(m->options->seed, "bench hidden");
    for (size_t i = 0; i < values; i++) m->hidden[i] = bf16_nearest(random_gauss(random_at(key, i)));
    m->limits.struct_size = sizeof m->limits;
    if (megamoe_device_measure(m->session.device, &m->limits) != MEGAMOE_OK) /* fractions are null then */
        m->limits = (megamoe_limits){.struct_size = sizeof m->limits};
    return CLI_GOOD;
}

/* ---- showing ---- */

static const char *activations_of(const measurement *m) {
    return m->facts.activations == MEGAMOE_ACTIVATIONS_NVFP4 ? "nvfp4" : "bf16";
}
static const char *routing_of(const measurement *m) {
    return m->options->routing == CLI_ROUTING_LOCAL ? "local" : "ep";
}

static json_t *result_json(const measurement *m, const result *r) {
    return json_pack("{s:i,s:i,s:i,s:s,s:f,s:f,s:f,s:i,s:f,s:f,s:o,s:o,s:f,s:o,s:o}", "tokens", (int)r->tokens, "pairs",
                     (int)r->median.pairs, "experts_hit", (int)r->median.experts_hit, "activations", activations_of(m),
                     "seconds_median", r->median.expert_seconds, "seconds_min", r->fastest, "seconds_p90", r->p90,
                     "runs", (int)r->runs, "weight_gb_s", r->weight_gb_s, "tflop_s", r->tflop_s,
                     "fraction_of_bandwidth", cli_json_number(r->of_bandwidth), "fraction_of_matrix_rate",
                     cli_json_number(r->of_matrix), "layer_seconds_median", r->layer_median, "loaded_seconds_median",
                     cli_json_number(r->loaded), "loaded_layer_seconds_median", cli_json_number(r->layer_loaded));
}

static json_t *report_json(const measurement *m) {
    const megamoe_shape *shape = &m->facts.shape;
    json_t *results = json_array();
    for (unsigned i = 0; i < m->tokens_count; i++) json_array_append_new(results, result_json(m, &m->results[i]));
    json_t *about =
        json_pack("{s:s,s:i,s:i,s:i,s:i,s:i,s:i}", "name", m->shape_name, "hidden", (int)shape->hidden, "intermediate",
                  (int)shape->intermediate, "experts", (int)shape->expert_count, "top_k", (int)shape->experts_per_token,
                  "expert_first", (int)m->facts.expert_first, "experts_loaded", (int)m->facts.expert_count);
    uint64_t host_bytes = 0, device_bytes = 0;
    megamoe_device_memory(m->session.device, &host_bytes, &device_bytes);
    json_t *limits =
        json_pack("{s:o,s:o}", "read_gb_s", m->limits.read_gb_s > 0 ? json_real(m->limits.read_gb_s) : json_null(),
                  "matrix_tflop_s", m->limits.matrix_tflop_s > 0 ? json_real(m->limits.matrix_tflop_s) : json_null());
    return json_pack("{s:s,s:s,s:s,s:i,s:I,s:I,s:o,s:o,s:s,s:o}", "backend", megamoe_device_backend(m->session.device),
                     "isa", megamoe_device_isa(m->session.device), "device", megamoe_device_describe(m->session.device),
                     "threads", (int)megamoe_device_threads(m->session.device), "host_bytes", (json_int_t)host_bytes,
                     "device_bytes", (json_int_t)device_bytes, "shape", about, "limits", limits, "routing",
                     routing_of(m), "results", results);
}

static int print_table(const measurement *m) {
    const megamoe_shape *shape = &m->facts.shape;
    char bytes[16], memory[48];
    printf("%s: H %u, I %u, experts %u to %u of %u, %u per token, %s each, %s activations, %s routing\n%s",
           m->shape_name, shape->hidden, shape->intermediate, m->facts.expert_first,
           m->facts.expert_first + m->facts.expert_count - 1, shape->expert_count, shape->experts_per_token,
           cli_bytes_text((double)m->facts.expert_bytes, bytes), activations_of(m), routing_of(m),
           megamoe_device_describe(m->session.device));
    if (m->limits.read_gb_s > 0) printf("; this machine reads %.1f GB/s", m->limits.read_gb_s);
    if (m->limits.matrix_tflop_s > 0) printf(" and multiplies %.3g TFLOP/s", m->limits.matrix_tflop_s);
    printf("\nmemory beyond the weights: %s, planned for %u tokens\n\n", cli_memory_text(m->session.device, memory),
           m->tokens_max);
    bool gpu = !isnan(m->results[0].loaded);
    cli_table *table = cli_table_new(
        gpu ? ">tokens|>pairs|>experts|>median us|>min us|>layer us|>GB/s|>of read|>TFLOP/s|>of rate|>loaded "
              "us|>loaded layer us"
            : ">tokens|>pairs|>experts|>median us|>min us|>layer us|>GB/s|>of read|>TFLOP/s|>of rate");
    for (unsigned i = 0; i < m->tokens_count; i++) {
        const result *r = &m->results[i];
        char bandwidth[16] = "-", matrix[16] = "-";
        if (!isnan(r->of_bandwidth)) snprintf(bandwidth, sizeof bandwidth, "%.0f %%", 100 * r->of_bandwidth);
        if (!isnan(r->of_matrix)) snprintf(matrix, sizeof matrix, "%.0f %%", 100 * r->of_matrix);
        char loaded[48] = "";
        if (gpu) snprintf(loaded, sizeof loaded, "\t%.1f\t%.1f", 1e6 * r->loaded, 1e6 * r->layer_loaded);
        cli_table_add(table, "%u\t%u\t%u\t%.*f\t%.*f\t%.*f\t%.2f\t%s\t%.3g\t%s%s", r->tokens, r->median.pairs,
                      r->median.experts_hit, gpu, 1e6 * r->median.expert_seconds, gpu, 1e6 * r->fastest, gpu,
                      1e6 * r->layer_median, r->weight_gb_s, bandwidth, r->tflop_s, matrix, loaded);
    }
    cli_table_print(table, 0);
    return cli_flush();
}

/* RFC 4180: names and command lines may hold commas and quotes. */
static void write_escaped(FILE *csv, const char *text) {
    for (; *text; text++) {
        if (*text == '"') putc('"', csv);
        putc(*text, csv);
    }
}

static void write_quoted(FILE *csv, const char *text) {
    putc('"', csv);
    write_escaped(csv, text);
    putc('"', csv);
}

/* What makes a time a measurement, the same in every line: where, by what, beside how much other work. */
static void write_circumstances(const measurement *m, FILE *csv) {
    char machine[256] = "unknown";
    double load = NAN;
    cli_proc_line("/proc/cpuinfo", "model name", machine, sizeof machine);
    getloadavg(&load, 1);
    fprintf(csv, ",%.2f,%s,", load, megamoe_version());
    write_quoted(csv, machine);
    putc(',', csv);
    write_quoted(csv, megamoe_device_describe(m->session.device));
    fputs(",\"megamoe", csv);
    for (char **argument = m->options->arguments; *argument; argument++) {
        putc(' ', csv);
        write_escaped(csv, *argument);
    }
    fputs("\"\n", csv);
}

static int write_csv(const measurement *m, const char *path) {
    char *text = NULL;
    size_t length = 0;
    FILE *csv = open_memstream(&text, &length);
    if (!csv) return cli_fail("there is no memory for %s.", path);
    fputs(
        "backend,isa,threads,shape,routing,activations,tokens,pairs,experts_hit,runs,seconds_median,seconds_min,"
        "seconds_p90,layer_seconds_median,weight_gb_s,tflop_s,read_gb_s,matrix_tflop_s,fraction_of_bandwidth,"
        "fraction_of_matrix_rate,loaded_seconds_median,loaded_layer_seconds_median,load,version,machine,device,command\n",
        csv);
    for (unsigned i = 0; i < m->tokens_count; i++) {
        const result *r = &m->results[i];
        fprintf(csv, "%s,%s,%u,", megamoe_device_backend(m->session.device), megamoe_device_isa(m->session.device),
                megamoe_device_threads(m->session.device));
        write_quoted(csv, m->shape_name);
        fprintf(csv, ",%s,%s,%u,%u,%u,%u,%.9g,%.9g,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,%.4g,%.4g,%.9g,%.9g", routing_of(m),
                activations_of(m), r->tokens, r->median.pairs, r->median.experts_hit, r->runs, r->median.expert_seconds,
                r->fastest, r->p90, r->layer_median, r->weight_gb_s, r->tflop_s, m->limits.read_gb_s,
                m->limits.matrix_tflop_s, r->of_bandwidth, r->of_matrix, r->loaded, r->layer_loaded);
        write_circumstances(m, csv);
    }
    fclose(csv);
    int written = cli_write_file(path, text);
    free(text);
    return written;
}

int cli_bench_run(const cli_options *options, json_t **report) {
    measurement m = {.options = options};
    cli_progress progress;
    int outcome = set_up(&m);
    cli_progress_start(&progress, "measuring");
    megamoe_status touched = outcome == CLI_GOOD ? touch_experts(&m) : MEGAMOE_OK;
    if (touched != MEGAMOE_OK) outcome = cli_fail_status(touched);
    for (unsigned i = 0; i < m.tokens_count && outcome == CLI_GOOD; i++) {
        megamoe_status status = time_batch(&m, m.tokens[i], &m.results[i]);
        if (status != MEGAMOE_OK) outcome = cli_fail_status(status);
        cli_progress_update(&progress, i + 1, m.tokens_count);
    }
    cli_progress_end(&progress);
    if (outcome == CLI_GOOD && options->csv) outcome = write_csv(&m, options->csv);
    if (outcome == CLI_GOOD && !options->json) outcome = print_table(&m);
    if (outcome == CLI_GOOD) *report = report_json(&m);
    free(m.expert_ids);
    free(m.no_experts);
    free(m.expert_weights);
    free(m.hidden);
    free(m.output);
    cli_session_close(&m.session);
    cli_weights_free(&m.weights);
    return outcome;
}

static int run(const cli_options *options) {
    json_t *report = NULL;
    if (!options->words[0] == !options->shape)
        return cli_fail("bench takes either a checkpoint or --shape; 'megamoe bench --help' shows examples.");
    int outcome = cli_bench_run(options, &report);
    if (outcome == CLI_GOOD && options->json) return cli_print_json(report);
    json_decref(report);
    return outcome;
}

const cli_command cli_bench = {
    .name = "bench",
    .words = "[CKPT]",
    .summary = "time a layer, against limits measured in the same run",
    .details =
        "Median over runs that each draw other experts. us and GB/s cover L1, activation and L2; layer us everything. "
        "GB/s counts the codes and scales of the distinct experts that were hit. Without --experts a large shape "
        "gets an eighth of its experts, as one rank of eight has.",
    .examples =
        "  megamoe bench --shape v4-flash --tokens 1,8,64\n  megamoe bench model/ --layer 3 --routing local --json\n",
    .options =
        "shape layer tokens routing runs csv seed backend activations input-global intermediate-global routing-weight "
        "shared-unclamped experts ranks threads batch-invariant strict repair-nan-scales no-scan",
    .words_max = 1,
    .run = run,
};
