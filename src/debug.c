/* Runs with all stages captured, so it allocates and waits for the device: a tool for bisection, not for
 * serving. */
#include "debug.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "error.h"
#include "numerics/bf16.h"

typedef struct summary {
    double square_sum, largest;
    uint64_t count, nonfinite;
} summary;

static void add(summary *s, double value) {
    s->count++;
    if (!isfinite(value)) {
        s->nonfinite++;
        return;
    }
    s->square_sum += value * value;
    s->largest = fmax(s->largest, fabs(value));
}

static void report(const megamoe_device_options *options, const char *stage, const float *floats,
                   const uint16_t *halves, size_t count) {
    summary s = {0};
    char line[160];
    for (size_t i = 0; i < count; i++) add(&s, floats ? (double)floats[i] : (double)mm_bf16_to_f32(halves[i]));
    snprintf(line, sizeof line, "  %-8s rms %.6g  max %.6g  nonfinite %llu of %llu", stage,
             sqrt(s.square_sum / (double)(s.count > s.nonfinite ? s.count - s.nonfinite : 1)), s.largest,
             (unsigned long long)s.nonfinite, (unsigned long long)s.count);
    options->log(options->log_context, 0, line);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

megamoe_status mm_debug_run(const mm_backend *backend, mm_backend_layer *layer, const mm_layer_weights *weights,
                            const megamoe_batch *batch, const megamoe_device_options *options) {
    size_t tokens = batch->token_count, hidden = weights->shape.hidden, inner = weights->shape.intermediate;
    size_t pairs = tokens * weights->shape.experts_per_token;
    megamoe_stages stages = {.struct_size = sizeof stages};
    uint32_t written = 0;
    char line[160];
    stages.l1 = malloc((pairs * 2 * inner + 1) * sizeof(float));
    stages.h = malloc((pairs * inner + 1) * sizeof(uint16_t));
    stages.l2 = malloc((pairs * hidden + 1) * sizeof(float));
    stages.output = malloc((tokens * hidden + 1) * sizeof(uint16_t));
    double start = seconds_now();
    megamoe_status status = !stages.l1 || !stages.h || !stages.l2 || !stages.output
                                ? mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the stages of %zu tokens", tokens)
                                : backend->run(layer, batch, NULL, &stages, &written, NULL);
    if (status == MEGAMOE_OK) {
        snprintf(line, sizeof line, "%s ran %zu tokens in %.3f ms, with every stage written out", backend->name, tokens,
                 1e3 * (seconds_now() - start));
        options->log(options->log_context, 0, line);
        if (written & MM_STAGE_L1) report(options, "l1", stages.l1, NULL, pairs * 2 * inner);
        if (written & MM_STAGE_H) report(options, "h", NULL, stages.h, pairs * inner);
        if (written & MM_STAGE_L2) report(options, "l2", stages.l2, NULL, pairs * hidden);
        if (written & MM_STAGE_OUTPUT) report(options, "output", NULL, stages.output, tokens * hidden);
    }
    free(stages.l1);
    free(stages.h);
    free(stages.l2);
    free(stages.output);
    return status;
}
