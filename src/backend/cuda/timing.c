/*
 * How long batches take on a GPU by its own clock, which neither launches nor copies of the host's memory blur: the two
 * expert GEMMs alone, and the whole layer with its router. Cool is a card after a pause; loaded, one after 300 ms of
 * unbroken work, when its power limit has lowered the clock. Batches alternate, so that weights come from memory.
 */
#include <stdlib.h>
#include <time.h>

#include "backend/cuda/visit.h"
#include "error.h"

enum { BATCHES_MAX = 16, RUNS = 15, WARM_RUNS = 3, PAUSE_MS = 700, LOAD_MS = 300, LOAD_RUNS = 10000 };

typedef struct timing {
    mm_backend_layer *layer;
    megamoe_batch batches[BATCHES_MAX]; /* in device memory, each with scratch of its own that keeps its plan */
    CUdeviceptr scratch[BATCHES_MAX];
    uint32_t count;
    mm_visit visit; /* of the callers' batches; its memory holds what they need besides */
    CUevent begin, end;
} timing;

static megamoe_status bring_batch(timing *t, const megamoe_batch *host, uint32_t i) {
    const megamoe_shape *shape = &t->layer->weights->shape;
    const size_t values = (size_t)host->token_count * shape->hidden,
                 pairs = (size_t)host->token_count * shape->experts_per_token;
    mm_backend_state *state = t->layer->state;
    megamoe_batch *batch = &t->batches[i];
    const void *ids, *weights;
    void *scratch;
    *batch = *host;
    MM_TRY(
        mm_visit_read(&t->visit, host->hidden, values * (host->hidden_dtype == MEGAMOE_F32 ? 4 : 2), &batch->hidden));
    MM_TRY(mm_visit_read(&t->visit, host->expert_ids, pairs * 4, &ids));
    MM_TRY(mm_visit_read(&t->visit, host->expert_weights, pairs * 4, &weights));
    MM_TRY(mm_block_create(state, values * 2, "a batch to time", &t->visit.blocks, &batch->output));
    MM_TRY(mm_block_create(state, state->scratch.bytes, "a batch to time", &t->visit.blocks, &scratch));
    batch->expert_ids = ids, batch->expert_weights = weights;
    t->scratch[i] = (CUdeviceptr)(uintptr_t)scratch;
    return MEGAMOE_OK;
}

/* Every batch once. whole: the router as well, whose choice nobody reads. */
static megamoe_status enqueue(const timing *t, bool whole) {
    mm_backend_layer *layer = t->layer;
    mm_backend_state *state = layer->state;
    const bool routes = layer->weights->router.weight && !layer->weights->shape.hash_routed;
    const CUdeviceptr own = state->scratch_blocks->base;
    megamoe_status status = MEGAMOE_OK;
    for (uint32_t i = 0; i < t->count && status == MEGAMOE_OK; i++) {
        mm_scratch s;
        state->scratch_blocks->base = t->scratch[i];
        mm_cuda_scratch(layer, &s);
        if (!whole)
            status = mm_cuda_run_experts(layer, t->batches[i].token_count, t->batches[i].expert_weights, state->stream,
                                         i == 0);
        if (whole && routes) status = mm_cuda_route(layer, &t->batches[i], s.expert_ids, s.weights, state->stream);
        if (whole && status == MEGAMOE_OK) status = mm_cuda_run_batch(layer, &t->batches[i], state->stream);
    }
    state->scratch_blocks->base = own;
    return status;
}

static megamoe_status timed(const timing *t, bool whole, double *seconds) {
    const mm_driver *driver = t->layer->state->driver;
    const CUstream stream = t->layer->state->stream;
    float ms = 0.0f;
    MM_TRY(mm_driver_status(driver, driver->event_record(t->begin, stream), "timing"));
    MM_TRY(enqueue(t, whole));
    MM_TRY(mm_driver_status(driver, driver->event_record(t->end, stream), "timing"));
    MM_TRY(mm_driver_status(driver, driver->event_wait(t->end), "timing"));
    MM_TRY(mm_driver_status(driver, driver->event_elapsed(&ms, t->begin, t->end), "timing"));
    *seconds = ms * 1e-3;
    return MEGAMOE_OK;
}

static int ascending(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static megamoe_status measure(const timing *t, bool whole, bool loaded, megamoe_time *time) {
    const struct timespec pause = {.tv_nsec = PAUSE_MS * 1000000l};
    double runs[RUNS], once = 0, work = loaded ? LOAD_MS * 1e-3 : 0;
    nanosleep(&pause, NULL);
    for (int i = 0; i < WARM_RUNS || (work > 0 && i < LOAD_RUNS); i++, work -= once) MM_TRY(timed(t, whole, &once));
    for (int i = 0; i < RUNS; i++) MM_TRY(timed(t, whole, &runs[i]));
    qsort(runs, RUNS, sizeof *runs, ascending);
    time->median = runs[RUNS / 2] / t->count;
    time->least = runs[0] / t->count;
    time->p90 = runs[RUNS * 9 / 10] / t->count;
    return MEGAMOE_OK;
}

static megamoe_status time_entered(timing *t, const megamoe_batch *batches, megamoe_times *times) {
    const mm_driver *driver = t->layer->state->driver;
    for (uint32_t i = 0; i < t->count; i++) MM_TRY(bring_batch(t, &batches[i], i));
    MM_TRY(mm_driver_status(driver, driver->event_create(&t->begin, CU_EVENT_DEFAULT), "creating an event"));
    MM_TRY(mm_driver_status(driver, driver->event_create(&t->end, CU_EVENT_DEFAULT), "creating an event"));
    MM_TRY(enqueue(t, true)); /* leaves every batch's plan and staged rows */
    times->runs = RUNS;
    MM_TRY(measure(t, false, false, &times->experts));
    MM_TRY(measure(t, true, false, &times->layer));
    MM_TRY(measure(t, false, true, &times->experts_loaded));
    return measure(t, true, true, &times->layer_loaded);
}

megamoe_status mm_cuda_time(mm_backend_layer *layer, const megamoe_batch *batches, uint32_t count,
                            megamoe_times *times) {
    mm_backend_state *state = layer->state;
    timing t = {.layer = layer, .count = count, .visit = {.state = state, .stream = state->stream}};
    if (count > BATCHES_MAX)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%u batches to time; at most %d", count, BATCHES_MAX);
    MM_TRY(mm_cuda_enter(state));
    megamoe_status status = mm_visit_end(&t.visit, time_entered(&t, batches, times));
    if (t.begin) state->driver->event_destroy(t.begin);
    if (t.end) state->driver->event_destroy(t.end);
    mm_cuda_leave(state);
    return status;
}
