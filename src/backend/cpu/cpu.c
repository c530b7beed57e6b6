/* The CPU backend as a table: the device and the layer. run.c works on a batch, single.c on single stages. */
#include "backend/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend/cpu/cores.h"
#include "error.h"

static megamoe_status probe(uint32_t ordinal) {
    (void)ordinal;
    return MEGAMOE_OK;
}

/* MEGAMOE_ISA caps the level; a name that is none of them would silently cap nothing. */
static megamoe_status check_isa(void) {
    const char *cap = getenv("MEGAMOE_ISA");
    static const char *const names[] = {"scalar", "avx2", "avx512", "amx"};
    for (size_t i = 0; cap && i < sizeof names / sizeof *names; i++)
        if (strcmp(cap, names[i]) == 0) return MEGAMOE_OK;
    return cap ? mm_fail(MEGAMOE_INVALID_ARGUMENT, "MEGAMOE_ISA is '%s'; it can be scalar, avx2, avx512 or amx", cap)
               : MEGAMOE_OK;
}

/* Likewise, text that is no number would silently mean all cores. */
static megamoe_status check_threads(void) {
    const char *text = getenv("MEGAMOE_THREADS");
    if (!text || (*text && strspn(text, "0123456789") == strlen(text))) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_INVALID_ARGUMENT, "MEGAMOE_THREADS is '%s'; it must be a whole number", text);
}

static void close_device(mm_backend_state *state) {
    if (!state) return;
    mm_pool_close(state->pool);
    mm_cpu_scratch_free(&state->scratch);
    free(state->tallies);
    free(state);
}

static megamoe_status open_device(const megamoe_device_options *options, mm_backend_state **out) {
    mm_kernels levels[MM_LEVELS_MAX];
    uint32_t count = mm_kernels_levels(levels);
    mm_backend_state *state;
    megamoe_status status;
    MM_TRY(check_isa());
    MM_TRY(check_threads());
    state = aligned_alloc(64, sizeof *state);
    if (!state) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a CPU device");
    memset(state, 0, sizeof *state);
    state->kernels = levels[count - 1];
    mm_scale_table_e4m3(&state->e4m3);
    mm_scale_table_e8m0(&state->e8m0);
    state->threads = mm_threads_wanted(options->threads);
    state->max_tokens = options->max_tokens;
    state->batch_invariant = options->batch_invariant;
    status = mm_pool_open(state->threads, &state->pool);
    if (status == MEGAMOE_OK) {
        state->tallies = aligned_alloc(64, state->threads * sizeof *state->tallies);
        if (!state->tallies) status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u threads", state->threads);
    }
    if (status != MEGAMOE_OK) {
        close_device(state);
        return status;
    }
    memset(state->tallies, 0, state->threads * sizeof *state->tallies);
    *out = state;
    return MEGAMOE_OK;
}

static void describe(const mm_backend_state *state, mm_device_facts *facts) {
    *facts = (mm_device_facts){
        .isa = state->kernels.isa,
        .threads = state->threads,
        .host_bytes =
            sizeof *state + state->threads * sizeof *state->tallies + state->scratch.bytes + state->scratch.plan_bytes,
    };
    snprintf(facts->description, sizeof facts->description, "cpu (%s, %u thread%s)", state->kernels.isa, state->threads,
             state->threads == 1 ? "" : "s");
}

static void layer_close(mm_backend_layer *layer) {
    if (!layer) return;
    free(layer->tokens_per_expert);
    free(layer);
}

/* Vectors of FP8 weights must not straddle two scales. */
static megamoe_status check_blocks(const mm_expert *e, uint32_t number) {
    const mm_matrix *matrices[] = {&e->gate, &e->up, &e->down};
    for (size_t i = 0; i < 3; i++) {
        const mm_matrix *m = matrices[i];
        if (m->codes && m->format == MM_FP8 && m->block_columns % 32 != 0 && m->block_columns < m->columns)
            return mm_fail(
                MEGAMOE_UNSUPPORTED_MODEL,
                "FP8 weights of expert %u have a scale per %u columns; the cpu backend needs a multiple of 32", number,
                m->block_columns);
    }
    return MEGAMOE_OK;
}

static megamoe_status layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool weights_on_device,
                                   const megamoe_layer_options *options, mm_backend_layer **out) {
    const megamoe_shape *shape = &weights->shape;
    mm_cpu_extent extent = {.tokens = state->max_tokens,
                            .hidden = shape->hidden,
                            .intermediate = shape->intermediate,
                            .expert_count = shape->expert_count,
                            .loaded_count = weights->expert_count,
                            .experts_per_token = shape->experts_per_token};
    mm_backend_layer *layer;
    (void)weights_on_device, (void)options;
    if (weights->shared && weights->shared->up.rows > extent.intermediate)
        extent.intermediate = weights->shared->up.rows;
    for (uint32_t e = 0; e < weights->expert_count; e++) MM_TRY(check_blocks(&weights->experts[e], e));
    if (weights->shared) MM_TRY(check_blocks(weights->shared, weights->expert_count));
    MM_TRY(mm_cpu_scratch_grow(state, &extent));
    layer = calloc(1, sizeof *layer);
    if (!layer) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a layer");
    layer->state = state;
    layer->weights = weights;
    layer->tokens_per_expert = calloc(shape->expert_count, sizeof *layer->tokens_per_expert);
    if (!layer->tokens_per_expert) {
        layer_close(layer);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the counters of %u experts", shape->expert_count);
    }
    *out = layer;
    return MEGAMOE_OK;
}

static megamoe_status counters(mm_backend_layer *layer, megamoe_counters *counts, uint64_t *tokens_per_expert) {
    size_t size = counts->struct_size;
    *counts = layer->counters;
    counts->struct_size = size;
    if (tokens_per_expert)
        memcpy(tokens_per_expert, layer->tokens_per_expert,
               layer->weights->shape.expert_count * sizeof *tokens_per_expert);
    return MEGAMOE_OK;
}

const mm_backend mm_backend_cpu = {
    .name = "cpu",
    .id = MEGAMOE_CPU,
    .host_memory = true,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .measure = mm_cpu_measure,
    .layer_create = layer_create,
    .layer_close = layer_close,
    .route = mm_cpu_route,
    .run = mm_cpu_run,
    .counters = counters,
    .quantize = mm_cpu_quantize,
    .dequantize = mm_cpu_dequantize,
    .grouped_gemm = mm_cpu_grouped_gemm,
};
