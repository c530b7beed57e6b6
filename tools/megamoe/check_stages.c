/*
 * Every stage of one layer against the oracle, which is given the subject's own output of the stage before:
 * so a difference is charged to the stage that made it. docs/numerics.md, "What a comparison must show" and
 * "Bounds".
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "excuse.h"
#include "formats.h"

static bool has(const cli_examination *e, uint32_t bits) {
    return (e->written & bits) == bits;
}

static cli_verdict *begin(cli_examination *e, const char *stage, const char *compared) {
    cli_verdict *v = &e->verdicts[e->verdict_count++];
    *v = (cli_verdict){.stage = stage, .compared = compared};
    return v;
}

/* A field that the subject did not write: nothing to judge, and nothing to hold against it. */
static void fused(cli_examination *e, const char *stage) {
    cli_verdict_finish(begin(e, stage, "fused"));
}

/* What a process holds beyond mapped files. */
static void note_memory(cli_examination *e) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long long kilobytes;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %llu", &kilobytes) == 1 && 1024 * kilobytes > e->private_bytes)
            e->private_bytes = 1024 * kilobytes;
    if (file) fclose(file);
}

/* ---- route ---- */

/* Weights follow from the logits by a few roundings; where those are not the subject's own, by their error,
 * too. */
static double weight_tolerance(const cli_examination *e, const megamoe_stages *want, uint32_t token) {
    const megamoe_shape *shape = &e->facts.shape;
    double largest = 0;
    if (has(e, CLI_HAS_LOGITS)) return 0x1p-20;
    for (uint32_t i = 0; i < shape->expert_count; i++)
        largest = fmax(largest, (double)want->logits_magnitude[(size_t)token * shape->expert_count + i]);
    return 0x1p-20 + 4 * cli_sum_units(shape->hidden) * 0x1p-24 * largest;
}

/* A backend's slots stand in the defined order; another engine may have ordered its slots as it liked. */
static uint32_t find_slot(const cli_examination *e, uint32_t token, uint32_t slot, int32_t id) {
    uint32_t k_count = e->facts.shape.experts_per_token;
    const int32_t *ids = e->got.expert_ids + (size_t)token * k_count;
    if (e->device) return slot;
    for (uint32_t k = 0; k < k_count; k++)
        if (ids[k] == id) return k;
    return slot;
}

static void judge_choice(cli_examination *e, cli_verdict *v, const megamoe_stages *want) {
    uint32_t k_count = e->facts.shape.experts_per_token;
    for (uint32_t t = 0; t < e->token_count; t++) {
        double tolerance = weight_tolerance(e, want, t);
        for (uint32_t k = 0; k < k_count; k++) {
            size_t at = (size_t)t * k_count + k;
            size_t own = (size_t)t * k_count + find_slot(e, t, k, want->expert_ids[at]);
            if (e->got.expert_ids[own] != want->expert_ids[at]) {
                cli_mismatch(v, (cli_field){"expert_ids", k_count, 1}, at, e->got.expert_ids[own],
                             want->expert_ids[at]);
                continue;
            }
            if (!has(e, CLI_HAS_WEIGHTS)) continue;
            double got = (double)e->got.expert_weights[own], wanted = (double)want->expert_weights[at];
            v->dot += got * wanted;
            v->got_squares += got * got;
            v->want_squares += wanted * wanted;
            double error = wanted != 0 ? fabs(got - wanted) / fabs(wanted) : got == 0 ? 0 : INFINITY;
            v->max_rel_error = fmax(v->max_rel_error, error);
            if (!(error <= tolerance)) cli_mismatch(v, (cli_field){"expert_weights", k_count, 1}, at, got, wanted);
        }
    }
    v->elements += (uint64_t)e->token_count * k_count;
}

megamoe_status cli_load_router(const cli_examination *e, megamoe_device *device, megamoe_layer **router) {
    megamoe_layer_options load = cli_layer_options(e->options);
    load.activations = e->facts.activations; /* a backend may have only those */
    load.expert_first = e->facts.expert_first;
    load.expert_count = 1;
    return megamoe_layer_load(device, e->checkpoint, e->layer, &load, router);
}

static void judge_logits(cli_examination *e, cli_verdict *v, const megamoe_stages *want) {
    cli_verdict logits = {.stage = "route"};
    cli_field field = {"logits", 1, e->facts.shape.expert_count};
    if (!has(e, CLI_HAS_LOGITS)) return;
    cli_judge_floats(&logits, field, e->got.logits, want->logits, want->logits_magnitude,
                     cli_sum_units(e->facts.shape.hidden), (uint64_t)e->token_count * field.width);
    v->elements += logits.elements;
    if (logits.mismatches && !v->mismatches) cli_mismatch(v, field, logits.index, logits.got, logits.want);
}

/* Logits are a GEMM and close; the choice from given logits is exact, near ties included. */
static megamoe_status judge_route(cli_examination *e) {
    megamoe_layer *router = NULL;
    megamoe_batch batch = e->input.batch;
    megamoe_stages want;
    cli_stages_allocate(&want, &e->facts, e->token_count, true);
    megamoe_stages own = {.struct_size = sizeof own, .logits = want.logits, .logits_magnitude = want.logits_magnitude};
    megamoe_stages chosen = {
        .struct_size = sizeof chosen, .expert_ids = want.expert_ids, .expert_weights = want.expert_weights};
    megamoe_stages given = {.struct_size = sizeof given,
                            .logits = has(e, CLI_HAS_LOGITS) ? e->got.logits : want.logits};
    megamoe_stages skipped = {.struct_size = sizeof skipped};
    batch.expert_ids = NULL;
    batch.expert_weights = NULL;
    batch.output = want.output;
    given.shared = skipped.shared = want.shared; /* spares a shared expert whose result nobody reads */

    megamoe_status status = cli_load_router(e, e->oracle, &router);
    if (status == MEGAMOE_OK) status = megamoe_layer_run_stages(router, &batch, &skipped, &own, NULL);
    if (status == MEGAMOE_OK) status = megamoe_layer_run_stages(router, &batch, &given, &chosen, NULL);
    if (status == MEGAMOE_OK) {
        cli_verdict *v = begin(e, "route", has(e, CLI_HAS_LOGITS) ? "exact" : "close");
        judge_choice(e, v, &want);
        judge_logits(e, v, &want);
        cli_verdict_finish(v);
        note_memory(e);
    }
    megamoe_layer_close(router);
    cli_stages_free(&want);
    return status;
}

/* ---- the stages after routing ---- */

static void judge_stage(cli_examination *e) {
    uint64_t tokens = e->token_count, hidden = e->facts.shape.hidden;
    bool quantized = e->facts.activations == MEGAMOE_ACTIVATIONS_NVFP4;
    if (quantized && !has(e, CLI_HAS_X_CODES | CLI_HAS_X_SCALES)) {
        fused(e, "stage");
        return;
    }
    cli_verdict *v = begin(e, "stage", "exact");
    if (quantized) {
        cli_judge_bytes(v, (cli_field){"x_codes", 1, hidden / 2}, e->got.x_codes, e->want.x_codes, tokens * hidden / 2,
                        NULL, NULL);
        cli_judge_bytes(v, (cli_field){"x_scales", 1, hidden / 16}, e->got.x_scales, e->want.x_scales,
                        tokens * hidden / 16, NULL, NULL);
        if (has(e, CLI_HAS_X_GLOBALS))
            cli_judge_bytes(v, (cli_field){"x_globals", 1, sizeof(float)}, (const uint8_t *)e->got.x_globals,
                            (const uint8_t *)e->want.x_globals, tokens * sizeof(float), NULL, NULL);
    }
    cli_verdict_finish(v);
}

/* The gate half of a layer without gates is nobody's. */
static void clear_gates(const cli_examination *e, float *l1) {
    size_t pairs = (size_t)e->token_count * e->facts.shape.experts_per_token, inner = e->facts.shape.intermediate;
    for (size_t pair = 0; pair < pairs && e->facts.shape.not_gated; pair++)
        memset(l1 + pair * 2 * inner, 0, inner * sizeof *l1);
}

static void judge_gemm(cli_examination *e, const char *stage, uint32_t bit, const float *got, const float *want,
                       const float *magnitude, uint64_t width, uint64_t summed) {
    uint64_t pairs = (uint64_t)e->token_count * e->facts.shape.experts_per_token;
    if (!has(e, bit)) {
        fused(e, stage);
        return;
    }
    cli_verdict *v = begin(e, stage, "close");
    v->norm_tolerance = 1e-4;
    cli_judge_floats(v, (cli_field){stage, e->facts.shape.experts_per_token, width}, got, want, magnitude,
                     cli_sum_units(summed), pairs * width);
    cli_verdict_finish(v);
}

static void judge_activation(cli_examination *e, const cli_excuse_context *context) {
    uint32_t k_count = e->facts.shape.experts_per_token;
    uint64_t inner = e->facts.shape.intermediate, count = (uint64_t)e->token_count * k_count * inner;
    if (has(e, CLI_HAS_H_CODES | CLI_HAS_H_SCALES)) {
        cli_verdict *v = begin(e, "activation", "close");
        if (!has(e, CLI_HAS_H_GLOBALS)) /* the oracle's: the excuses need a global scale */
            memcpy(e->got.h_globals, e->want.h_globals, count / inner * sizeof(float));
        cli_judge_bytes(v, (cli_field){"h_globals", k_count, sizeof(float)}, (const uint8_t *)e->got.h_globals,
                        (const uint8_t *)e->want.h_globals, count / inner * sizeof(float), NULL, NULL);
        cli_judge_bytes(v, (cli_field){"h_scales", k_count, inner / 16}, e->got.h_scales, e->want.h_scales, count / 16,
                        cli_excuse_h_scale, context);
        cli_judge_bytes(v, (cli_field){"h_codes", k_count, inner / 2}, e->got.h_codes, e->want.h_codes, count / 2,
                        cli_excuse_h_code, context);
        cli_verdict_finish(v);
    } else if (has(e, CLI_HAS_H)) {
        cli_verdict *v = begin(e, "activation", "close");
        cli_judge_bf16(v, (cli_field){"h", k_count, inner}, e->got.h, e->want.h, count, cli_excuse_h, context);
        cli_verdict_finish(v);
    } else {
        fused(e, "activation");
    }
}

static void ask_of_layer(const cli_examination *e, cli_verdict *v) {
    v->cosine_min = e->facts.activations == MEGAMOE_ACTIVATIONS_NVFP4 ? 0.9999 : 0.99999;
    v->norm_tolerance = 1e-3;
}

/* A layer of its own, of which only the end is seen: judged as layers are. */
static void judge_shared(cli_examination *e) {
    uint64_t hidden = e->facts.shape.hidden;
    if (!e->facts.has_shared_expert) return;
    if (!has(e, CLI_HAS_SHARED)) {
        fused(e, "shared");
        return;
    }
    cli_verdict *v = begin(e, "shared", "close");
    ask_of_layer(e, v);
    cli_judge_floats(v, (cli_field){"shared", 1, hidden}, e->got.shared, e->want.shared, NULL, 0,
                     e->token_count * hidden);
    cli_verdict_finish(v);
}

static void judge_combine(cli_examination *e, const cli_excuse_context *context) {
    uint32_t needed = CLI_HAS_L2 | CLI_HAS_OUTPUT | (e->facts.has_shared_expert ? CLI_HAS_SHARED : 0);
    uint64_t hidden = e->facts.shape.hidden;
    if (!has(e, needed)) {
        fused(e, "combine");
        return;
    }
    cli_verdict *v = begin(e, "combine", "close");
    cli_judge_bf16(v, (cli_field){"output", 1, hidden}, e->got.output, e->want.output, e->token_count * hidden,
                   cli_excuse_output, context);
    cli_verdict_finish(v);
}

/*
 * The oracle's own stages all the way. Where the inputs were staged alike, its L1 and its shared expert are
 * those it has computed already.
 */
static megamoe_status run_oracle_alone(const cli_examination *e, const megamoe_batch *batch) {
    megamoe_stages none = {.struct_size = sizeof none}, own = none;
    bool staged_alike = false;
    for (unsigned i = 0; i < e->verdict_count; i++)
        if (strcmp(e->verdicts[i].stage, "stage") == 0)
            staged_alike = e->verdicts[i].pass && strcmp(e->verdicts[i].compared, "exact") == 0;
    if (!staged_alike) return megamoe_layer_run(e->reference, batch, NULL);
    own.l1 = e->want.l1;
    own.shared = e->want.shared;
    return megamoe_layer_run_stages(e->reference, batch, &own, &none, NULL);
}

static void judge_output(const cli_examination *e, const uint16_t *output, cli_verdict *v) {
    uint64_t hidden = e->facts.shape.hidden;
    cli_judge_bf16(v, (cli_field){"output", 1, hidden}, output, e->want.output, e->token_count * hidden, NULL, NULL);
}

/* nvfp4, for orientation: how far the layer is from one with bf16 activations. That says something of a model, and
 * nothing of made weights. */
static megamoe_status measure_quantization(cli_examination *e, const uint16_t *output) {
    megamoe_batch batch = e->batch;
    megamoe_layer *plain = NULL;
    if (e->facts.activations != MEGAMOE_ACTIVATIONS_NVFP4 || e->weights) return MEGAMOE_OK;
    batch.output = e->want.output;
    megamoe_status status = cli_examined_layer(e, e->oracle, MEGAMOE_ACTIVATIONS_BF16, &plain);
    if (status == MEGAMOE_OK) status = megamoe_layer_run(plain, &batch, NULL);
    if (status == MEGAMOE_OK) {
        e->unquantized = (cli_verdict){.stage = "unquantized"};
        judge_output(e, output, &e->unquantized);
    }
    megamoe_layer_close(plain);
    return status;
}

/* End to end, and for a backend by the path that serves: its kernels may fuse what the stages above showed apart. */
static megamoe_status judge_whole(cli_examination *e) {
    megamoe_batch batch = e->batch, served = e->batch;
    if (!has(e, CLI_HAS_OUTPUT)) {
        fused(e, "layer");
        return MEGAMOE_OK;
    }
    uint16_t *output = cli_allocate((size_t)e->token_count * e->facts.shape.hidden, sizeof *output);
    memcpy(output, e->got.output, (size_t)e->token_count * e->facts.shape.hidden * sizeof *output);
    served.output = output;
    batch.output = e->want.output;
    megamoe_status status = e->device ? megamoe_layer_run(e->subject, &served, NULL) : MEGAMOE_OK;
    if (status == MEGAMOE_OK) status = run_oracle_alone(e, &batch);
    if (status == MEGAMOE_OK) {
        cli_verdict *v = begin(e, "layer", "close");
        ask_of_layer(e, v);
        judge_output(e, output, v);
        cli_verdict_finish(v);
        status = measure_quantization(e, output);
    }
    free(output);
    return status;
}

/* The fields of `got` that the oracle reads in place of its own. */
static megamoe_stages given_by(const cli_examination *e) {
    megamoe_stages given = {.struct_size = sizeof given};
    if (has(e, CLI_HAS_X_CODES | CLI_HAS_X_SCALES)) {
        given.x_codes = e->got.x_codes;
        given.x_scales = e->got.x_scales;
    }
    if (has(e, CLI_HAS_X_GLOBALS)) given.x_globals = e->got.x_globals;
    if (has(e, CLI_HAS_L1)) given.l1 = e->got.l1;
    if (has(e, CLI_HAS_H)) given.h = e->got.h;
    if (has(e, CLI_HAS_H_CODES | CLI_HAS_H_SCALES)) {
        given.h_codes = e->got.h_codes;
        given.h_scales = e->got.h_scales;
    }
    if (has(e, CLI_HAS_L2)) given.l2 = e->got.l2;
    if (has(e, CLI_HAS_SHARED)) given.shared = e->got.shared;
    return given;
}

megamoe_status cli_judge_layer(cli_examination *e) {
    const megamoe_shape *shape = &e->facts.shape;
    megamoe_batch batch = e->batch;
    megamoe_status status = MEGAMOE_OK;
    bool routable = e->facts.routes && has(e, CLI_HAS_IDS) && (!shape->hash_routed || e->input.batch.token_ids);
    if (routable) status = judge_route(e);

    megamoe_stages given = given_by(e);
    cli_excuse_context context = {.facts = &e->facts,
                                  .stages = &e->got,
                                  .expert_ids = e->batch.expert_ids,
                                  .expert_weights = e->batch.expert_weights};
    batch.output = e->want.output;
    if (status == MEGAMOE_OK && e->device) { /* now with the experts decided */
        megamoe_batch subject = e->batch;
        subject.output = e->got.output;
        status = megamoe_layer_run_stages(e->subject, &subject, NULL, &e->got, &e->written);
        given = given_by(e);
    }
    if (status == MEGAMOE_OK) status = megamoe_layer_run_stages(e->reference, &batch, &given, &e->want, NULL);
    if (status != MEGAMOE_OK) return status;
    note_memory(e);
    clear_gates(e, e->got.l1);
    clear_gates(e, e->want.l1);
    context.l1 = has(e, CLI_HAS_L1) ? e->got.l1 : e->want.l1;
    context.l1_magnitude = has(e, CLI_HAS_L1) ? NULL : e->want.l1_magnitude;

    judge_stage(e);
    judge_gemm(e, "l1", CLI_HAS_L1, e->got.l1, e->want.l1, e->want.l1_magnitude, 2 * (uint64_t)shape->intermediate,
               shape->hidden);
    judge_activation(e, &context);
    judge_gemm(e, "l2", CLI_HAS_L2, e->got.l2, e->want.l2, e->want.l2_magnitude, shape->hidden, shape->intermediate);
    judge_shared(e);
    judge_combine(e, &context);
    status = judge_whole(e);
    note_memory(e);
    e->pass = true;
    for (unsigned i = 0; i < e->verdict_count; i++) e->pass = e->pass && e->verdicts[i].pass;
    return status;
}
