/*
 * A rank of V4-Pro at its real size, run again and again: the same bits every time. Small layers cannot show a race
 * that needs a full ring, many items and two experts in one CTA's run. Exit status 77, with the reason, where there is
 * no GPU.
 */
#include "backend/cuda/made_layer.h"
#include "backend/cuda/state.h"
#include "error.h"

enum { SKIPPED = 77, RUNS = 12 };

static int failures;

static void *to_gpu(mm_backend_state *state, const void *host, size_t bytes) {
    CUdeviceptr p = 0;
    state->driver->memory_allocate(&p, bytes);
    if (host) state->driver->copy_to_device(p, host, bytes, state->stream);
    state->driver->stream_wait(state->stream);
    return (void *)(uintptr_t)p;
}

static void repeat(mm_backend_state *state, mm_backend_layer *layer, made_layer *made, uint32_t tokens) {
    const megamoe_shape *shape = &made->weights.shape;
    const size_t pairs = (size_t)tokens * shape->experts_per_token, values = (size_t)tokens * shape->hidden;
    int32_t *ids = malloc(pairs * 4);
    float *weights = malloc(pairs * 4);
    uint16_t *hidden = malloc(values * 2), *first = malloc(pairs * shape->hidden * 2),
             *again = malloc(pairs * shape->hidden * 2);
    mm_scratch s;
    made_routing(made, tokens, 0.0f, ids, weights);
    made_hidden(made, tokens, hidden);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = to_gpu(state, hidden, values * 2),
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = to_gpu(state, NULL, values * 2),
                           .expert_ids = to_gpu(state, ids, pairs * 4),
                           .expert_weights = to_gpu(state, weights, pairs * 4)};
    mm_cuda_scratch(layer, &s);
    size_t wrong = 0, runs = 0;
    for (int i = 0; i < RUNS; i++) {
        state->driver->fill((CUdeviceptr)(uintptr_t)s.p, 0xAA, pairs * shape->hidden * 2, state->stream);
        if (mm_cuda_run_batch(layer, &batch, state->stream) != MEGAMOE_OK) printf("FAIL %s\n", megamoe_error_message());
        state->driver->copy_to_host(i ? again : first, (CUdeviceptr)(uintptr_t)s.p, pairs * shape->hidden * 2,
                                    state->stream);
        state->driver->stream_wait(state->stream);
        size_t differ = 0, shown = 0;
        for (size_t n = 0; i && n < pairs * shape->hidden; n++) {
            if (first[n] == again[n]) continue;
            if (differ++ == 0 || (getenv("VERBOSE") && shown < 40 && i < 3))
                printf("  run %d row %zu column %zu: %g then %g\n", i, n / shape->hidden, n % shape->hidden,
                       (double)mm_bf16_to_f32(first[n]), (double)mm_bf16_to_f32(again[n])),
                    shown++;
        }
        wrong += differ, runs += differ > 0;
    }
    if (wrong) failures++;
    printf("%s %u tokens: %zu of %d runs differ from the first, in %zu values\n", wrong ? "FAIL" : "ok  ", tokens, runs,
           RUNS - 1, wrong);
    free(ids), free(weights), free(hidden), free(first), free(again);
}

int main(int argc, char **argv) {
    const mm_backend *backend = &mm_backend_sm90;
    made_layer made = {0};
    made_form form = {7168, 3072, 48, 48, 6, MM_NVFP4, 0, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1.0f};
    if (getenv("SHARED")) form.shared_format = MM_FP8;
    if (backend->probe(0) != MEGAMOE_OK) {
        printf("skipped %s: %s\n", backend->name, megamoe_error_message());
        return SKIPPED;
    }
    made_pool_fill(&made, 0x30, 0x28);
    made_layer_open(&made, &form, 99);
    mm_backend_state *state;
    mm_backend_layer *layer;
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 4096};
    if (backend->open(&options, &state) != MEGAMOE_OK ||
        backend->layer_create(state, &made.weights, false, NULL, &layer) != MEGAMOE_OK)
        return printf("FAIL %s\n", megamoe_error_message()), 1;
    mm_cuda_enter(state);
    for (int i = 1; i < argc; i++) repeat(state, layer, &made, (uint32_t)atoi(argv[i]));
    mm_cuda_leave(state);
    return failures ? 1 : 0;
}
