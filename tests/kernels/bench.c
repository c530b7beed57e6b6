/* A layer of random bytes, run and timed through the backend table. */
#define _GNU_SOURCE
#include "kernels/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "backend/cpu/cpu.h"
#include "megamoe/megamoe.h"
#include "numerics/bf16.h"

enum { HIDDEN = 7168, INTERMEDIATE = 3072, SLOTS = 6, ROUNDS_MAX = 101, SIZES_MAX = 32 };

typedef struct setup {
    uint32_t experts, rounds, threads, size_count;
    uint32_t level; /* counted from 1 as mm_kernels_levels has them; 0: the best */
    megamoe_activations activations;
    bool shared;
    uint32_t sizes[SIZES_MAX];
} setup;

static uint64_t random_state = 1;

static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

/* With one thread the processor time of this process: other processes then cost only what they take of the
 * caches. */
static clockid_t bench_clock = CLOCK_MONOTONIC;

static double seconds(void) {
    struct timespec now;
    clock_gettime(bench_clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- a layer of random bytes ---- */

static uint8_t *fill(uint8_t **next, size_t bytes, uint32_t base, uint32_t span) {
    uint8_t *at = *next;
    for (size_t i = 0; i < bytes; i += 2) {
        uint32_t r = random_bits();
        at[i] = (uint8_t)(base + (r & 0xFF) % span);
        if (i + 1 < bytes) at[i + 1] = (uint8_t)(base + (r >> 8 & 0xFF) % span);
    }
    *next += (bytes + 63) / 64 * 64;
    return at;
}

static mm_matrix matrix(uint8_t **next, uint32_t rows, uint32_t columns) {
    mm_matrix m = {.rows = rows,
                   .columns = columns,
                   .format = MM_NVFP4,
                   .scale_dtype = MEGAMOE_E4M3,
                   .row_bytes = columns / 2,
                   .scale_row_bytes = columns / 16,
                   .global = 0.0004f};
    m.codes = fill(next, rows * m.row_bytes, 0, 256);
    m.scales = fill(next, rows * m.scale_row_bytes, 0x40, 32);
    return m;
}

static mm_expert expert(uint8_t **next) {
    return (mm_expert){.gate = matrix(next, INTERMEDIATE, HIDDEN),
                       .up = matrix(next, INTERMEDIATE, HIDDEN),
                       .down = matrix(next, HIDDEN, INTERMEDIATE),
                       .input_global = 0.002f,
                       .intermediate_global = 0.002f};
}

static size_t expert_bytes(void) {
    return (size_t)3 * HIDDEN * INTERMEDIATE * 9 / 16;
}

static void make_weights(const setup *s, mm_layer_weights *w) {
    size_t bytes = (s->experts + 1) * (expert_bytes() + 4096);
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mm_expert *experts = calloc(s->experts + 1, sizeof *experts);
    int32_t *local = calloc(s->experts, sizeof *local);
    if (memory == MAP_FAILED || !experts || !local) exit(2);
    for (uint32_t e = 0; e <= s->experts; e++) experts[e] = expert(&memory);
    for (uint32_t e = 0; e < s->experts; e++) local[e] = (int32_t)e;
    *w = (mm_layer_weights){.shape = {.hidden = HIDDEN,
                                      .intermediate = INTERMEDIATE,
                                      .expert_count = s->experts,
                                      .experts_per_token = SLOTS,
                                      .group_size = 16,
                                      .routed_scale = 1.0f,
                                      .swiglu_alpha = 1.0f,
                                      .swiglu_limit = 10.0f},
                            .swiglu = {1.0f, 0.0f, 10.0f, 0},
                            .shared_swiglu = {1.0f, 0.0f, 10.0f, 0},
                            .activations = s->activations,
                            .input_mode = MEGAMOE_GLOBAL_TOKEN,
                            .intermediate_mode = MEGAMOE_GLOBAL_STATIC,
                            .input_global = 1.0f,
                            .experts = experts,
                            .expert_count = s->experts,
                            .local_index = local,
                            .shared = s->shared ? &experts[s->experts] : NULL};
}

/* Reads the codes of one expert, as plainly as possible: the limit that the kernels are held to. */
static double read_expert(const mm_expert *e) {
    static _Thread_local volatile uint64_t sink __attribute__((unused));
    const mm_matrix *matrices[3] = {&e->gate, &e->up, &e->down};
    uint64_t sum = 0;
    double start = seconds();
    for (int i = 0; i < 3; i++) {
        size_t quarter = matrices[i]->rows * matrices[i]->row_bytes / 4;
        for (size_t at = 0; at < quarter; at += 64)
            for (int q = 0; q < 4; q++) {
                uint64_t line[8];
                memcpy(line, matrices[i]->codes + (size_t)q * quarter + at, sizeof line);
                __builtin_prefetch(matrices[i]->codes + (size_t)q * quarter + at + 2304);
                sum += line[0] ^ line[1] ^ line[2] ^ line[3] ^ line[4] ^ line[5] ^ line[6] ^ line[7];
            }
    }
    sink = sum;
    return (double)3 * HIDDEN * INTERMEDIATE / 2 / (seconds() - start) * 1e-9;
}

/* Six distinct experts for each token; returns how many experts are hit. */
static uint32_t route(const setup *s, uint32_t tokens, int32_t *ids, float *weights) {
    uint8_t *hit = calloc(s->experts, 1);
    uint32_t count = 0;
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t k = 0; k < SLOTS; k++) {
            bool taken = true;
            while (taken) {
                ids[t * SLOTS + k] = (int32_t)(random_bits() % s->experts);
                taken = false;
                for (uint32_t i = 0; i < k; i++) taken |= ids[t * SLOTS + i] == ids[t * SLOTS + k];
            }
            weights[t * SLOTS + k] = 0.2f;
            count += !hit[ids[t * SLOTS + k]];
            hit[ids[t * SLOTS + k]] = 1;
        }
    free(hit);
    return count;
}

static void print_row(const setup *s, const megamoe_limits *limits, uint32_t tokens, double *times, double hit) {
    double median, spread, gb_s, tflop_s;
    qsort(times, s->rounds, sizeof *times, compare);
    median = times[s->rounds / 2];
    spread = (times[s->rounds * 3 / 4] - times[s->rounds / 4]) / median;
    gb_s = (hit + s->shared) * (double)expert_bytes() / median * 1e-9;
    tflop_s = 2.0 * tokens * (SLOTS + s->shared) * 3.0 * HIDDEN * INTERMEDIATE / median * 1e-12;
    printf("%6u tokens %9.3f ms (best %.3f, spread %2.0f %%) %6.2f GB/s = %3.0f %% of read, %6.3f TFLOP/s", tokens,
           median * 1e3, times[0] * 1e3, spread * 100.0, gb_s, gb_s / limits->read_gb_s * 100.0, tflop_s);
    if (limits->matrix_tflop_s > 0.0) printf(" = %3.0f %% of tiles", tflop_s / limits->matrix_tflop_s * 100.0);
    printf("\n");
}

static void run_all(const setup *s, const mm_expert *experts, mm_backend_state *state, mm_backend_layer *layer,
                    uint32_t max_tokens) {
    static double times[SIZES_MAX][ROUNDS_MAX], reads[ROUNDS_MAX];
    double hits[SIZES_MAX] = {0};
    megamoe_limits limits = {.struct_size = sizeof limits};
    uint16_t *hidden = malloc((size_t)max_tokens * HIDDEN * 2), *output = malloc((size_t)max_tokens * HIDDEN * 2);
    int32_t *ids = malloc((size_t)max_tokens * SLOTS * sizeof *ids);
    float *weights = malloc((size_t)max_tokens * SLOTS * sizeof *weights);
    for (size_t i = 0; i < (size_t)max_tokens * HIDDEN; i++)
        hidden[i] = mm_bf16_from_f32((float)(int)(random_bits() % 2001) * 0.001f - 1.0f);
    for (uint32_t round = 0; round < s->rounds; round++) {
        reads[round] = read_expert(&experts[random_bits() % s->experts]);
        for (uint32_t i = 0; i < s->size_count; i++) {
            hits[i] += route(s, s->sizes[i], ids, weights);
            megamoe_batch batch = {.struct_size = sizeof batch,
                                   .token_count = s->sizes[i],
                                   .hidden = hidden,
                                   .hidden_dtype = MEGAMOE_BF16,
                                   .output = output,
                                   .expert_ids = ids,
                                   .expert_weights = weights};
            double start = seconds();
            if (mm_backend_cpu.run(layer, &batch, NULL, NULL, NULL, NULL) != MEGAMOE_OK) exit(2);
            times[i][round] = seconds() - start;
        }
    }
    if (mm_backend_cpu.measure(state, &limits) != MEGAMOE_OK) exit(2);
    printf("measure: read %.1f GB/s, tiles %.3f TFLOP/s", limits.read_gb_s, limits.matrix_tflop_s);
    if (s->threads == 1) {
        qsort(reads, s->rounds, sizeof *reads, compare);
        limits.read_gb_s = reads[s->rounds / 2];
        printf("; between the runs, in processor time: read %.1f GB/s", limits.read_gb_s);
    }
    printf("\n");
    for (uint32_t i = 0; i < s->size_count; i++) print_row(s, &limits, s->sizes[i], times[i], hits[i] / s->rounds);
    free(hidden);
    free(output);
    free(ids);
    free(weights);
}

int bench_layer(int argument_count, char **arguments) {
    setup s = {.experts = 48, .rounds = 7, .activations = MEGAMOE_ACTIVATIONS_BF16};
    uint32_t max_tokens = 1;
    mm_layer_weights weights;
    mm_backend_state *state;
    mm_backend_layer *layer;
    mm_device_facts facts;
    mm_kernels levels[MM_LEVELS_MAX];
    for (int i = 0; i < argument_count; i++) {
        const char *a = arguments[i], *value = strchr(a, '=') ? strchr(a, '=') + 1 : a;
        uint32_t number = (uint32_t)strtoul(value, NULL, 10);
        if (strncmp(a, "experts=", 8) == 0)
            s.experts = number;
        else if (strncmp(a, "rounds=", 7) == 0)
            s.rounds = number < ROUNDS_MAX ? number : ROUNDS_MAX;
        else if (strncmp(a, "threads=", 8) == 0)
            s.threads = number;
        else if (strncmp(a, "level=", 6) == 0)
            s.level = number;
        else if (strncmp(a, "shared=", 7) == 0)
            s.shared = number;
        else if (strcmp(a, "mode=nvfp4") == 0)
            s.activations = MEGAMOE_ACTIVATIONS_NVFP4;
        else if (strcmp(a, "mode=bf16") == 0)
            s.activations = MEGAMOE_ACTIVATIONS_BF16;
        else if (s.size_count < SIZES_MAX)
            s.sizes[s.size_count++] = number;
        if (value == a && number > max_tokens) max_tokens = number;
    }
    if (s.threads == 1) bench_clock = CLOCK_PROCESS_CPUTIME_ID;
    make_weights(&s, &weights);
    megamoe_device_options options = {.struct_size = sizeof options, .threads = s.threads, .max_tokens = max_tokens};
    megamoe_layer_options layer_options = {.struct_size = sizeof layer_options};
    if (mm_backend_cpu.open(&options, &state) != MEGAMOE_OK) return 2;
    if (s.level > 0 && s.level <= mm_kernels_levels(levels)) state->kernels = levels[s.level - 1];
    if (mm_backend_cpu.layer_create(state, &weights, false, &layer_options, &layer) != MEGAMOE_OK) return 2;
    mm_backend_cpu.describe(state, &facts);
    printf("%s, %s activations, %u experts, scratch %.1f MB\n", facts.description,
           s.activations == MEGAMOE_ACTIVATIONS_NVFP4 ? "nvfp4" : "bf16", s.experts, (double)facts.host_bytes * 1e-6);
    run_all(&s, weights.experts, state, layer, max_tokens);
    mm_backend_cpu.layer_close(layer);
    mm_backend_cpu.close(state);
    return 0;
}
