/*
 * The GPU router against the host's: logits of every size class against sums in double, within the bound of
 * docs/numerics.md; the choice against routing/router.c on the GPU's own logits, ids equal and weights within 2^-20.
 * Equal rows at both ends of a batch have equal bits. Exit status 77, with the reason, where there is no GPU.
 */
#include "backend/cuda/made_layer.h"
#include "backend/cuda/state.h"
#include "routing/router.h"

#include "error.h"

enum { SKIPPED = 77, VOCABULARY = 1000, COMPARED = 48, COLUMN = 101 };

static int failures;

typedef struct router_case {
    const char *name;
    uint32_t experts, hidden, slots;
    megamoe_score score;
    uint32_t groups, groups_per_token, different; /* different: expert e has the weights of e modulo this; 0: its own */
    bool bias, hash, weight_f32, hidden_f32, not_normalized, invariant;
} router_case;

typedef struct router_work {
    const router_case *c;
    const mm_backend *backend;
    made_layer made;
    mm_backend_state *state;
    mm_backend_layer *layer;
    float *weights, *hidden; /* as fp32: the values that the GPU is given in either type */
    uint32_t tokens;
} router_work;

static void fail(const router_work *w, const char *what, uint32_t token, uint32_t at, double got, double want) {
    if (failures++ < 20)
        printf("FAIL %s, %s, %u tokens: %s of token %u, %u: %.9g, not %.9g\n", w->backend->name, w->c->name, w->tokens,
               what, token, at, got, want);
}

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    printf("%s: CUresult %d\n", what, (int)result);
    exit(1);
}

static void *to_gpu(const router_work *w, const void *host, size_t bytes) {
    CUdeviceptr p;
    check(w->state->driver->memory_allocate(&p, bytes + 256), "memory");
    check(w->state->driver->fill(p, 0x7F, bytes, w->state->stream), "fill");
    if (host) check(w->state->driver->copy_to_device(p, host, bytes, w->state->stream), "copy");
    check(w->state->driver->stream_wait(w->state->stream), "copy");
    return (void *)(uintptr_t)p;
}

static void from_gpu(const router_work *w, void *host, const void *device, size_t bytes) {
    check(w->state->driver->copy_to_host(host, (CUdeviceptr)(uintptr_t)device, bytes, w->state->stream), "copy");
    check(w->state->driver->stream_wait(w->state->stream), "copy");
}

/* Values of which `f32` says whether they have more bits than a BF16. */
static float *values(uint64_t *seed, size_t count, float spread, bool f32) {
    float *v = malloc((count + 1) * sizeof *v);
    for (size_t i = 0; i < count; i++) {
        v[i] = made_normal(seed) * spread;
        if (!f32) v[i] = mm_bf16_to_f32(mm_bf16_from_f32(v[i]));
    }
    return v;
}

static void *packed(const float *v, size_t count, bool f32) {
    uint16_t *p = malloc((count + 1) * (f32 ? 4 : 2));
    if (f32) return memcpy(p, v, count * 4);
    for (size_t i = 0; i < count; i++) p[i] = mm_bf16_from_f32(v[i]);
    return p;
}

/* The layer has one small expert: only its router is used. */
static void layer_make(router_work *w) {
    const router_case *c = w->c;
    const made_form form = {.hidden = c->hidden,
                            .intermediate = 16,
                            .expert_count = c->experts,
                            .loaded = 1,
                            .slots = c->slots,
                            .format = MM_NVFP4,
                            .activations = MEGAMOE_ACTIVATIONS_BF16,
                            .input_mode = MEGAMOE_GLOBAL_UNIT,
                            .intermediate_mode = MEGAMOE_GLOBAL_UNIT,
                            .alpha = 1.0f};
    made_layer_open(&w->made, &form, 31 + c->experts);
    mm_layer_weights *l = &w->made.weights;
    l->shape.score = c->score ? c->score : MEGAMOE_SQRTSOFTPLUS, l->shape.normalize_weights = !c->not_normalized,
    l->shape.routed_scale = 2.5f;
    l->shape.group_count = c->groups, l->shape.groups_per_token = c->groups_per_token;
    l->shape.hash_routed = c->hash;
    const size_t count = (size_t)c->experts * c->hidden;
    w->weights = values(&w->made.seed, count, 1.0f / sqrtf((float)c->hidden), c->weight_f32);
    for (uint32_t e = c->different; c->different && e < c->experts; e++)
        memcpy(w->weights + (size_t)e * c->hidden, w->weights + (size_t)(e % c->different) * c->hidden, c->hidden * 4);
    l->router.weight = packed(w->weights, count, c->weight_f32);
    l->router.weight_dtype = c->weight_f32 ? MEGAMOE_F32 : MEGAMOE_BF16;
    if (c->bias) l->router.bias = values(&w->made.seed, c->experts, 0.02f, true);
    if (!c->hash) return;
    int32_t *table = malloc(VOCABULARY * c->slots * sizeof *table);
    float *unused = malloc(VOCABULARY * c->slots * sizeof *unused);
    made_routing(&w->made, VOCABULARY, 0.0f, table, unused);
    free(unused);
    l->router.token_experts = table, l->router.vocabulary = VOCABULARY;
}

static void layer_free(router_work *w) {
    mm_router *r = &w->made.weights.router;
    free((void *)(uintptr_t)r->weight), free((void *)(uintptr_t)r->bias), free((void *)(uintptr_t)r->token_experts);
    free(w->weights);
    made_layer_close(&w->made);
}

static void judge_logits(const router_work *w, const float *logits) {
    const uint32_t e_count = w->c->experts, h = w->c->hidden;
    const double terms = 12.0 * sqrt(h) < h ? 12.0 * sqrt(h) : h;
    const uint32_t step = w->tokens > COMPARED ? w->tokens / COMPARED : 1;
    for (uint32_t t = 0; t < w->tokens; t += step)
        for (uint32_t e = 0; e < e_count; e++) {
            double sum = 0, magnitude = 0;
            for (uint32_t k = 0; k < h; k++) {
                const double x = mm_bf16_to_f32(mm_bf16_from_f32(w->hidden[(size_t)t * h + k])),
                             product = x * (double)w->weights[(size_t)e * h + k];
                sum += product, magnitude += fabs(product);
            }
            const double got = logits[(size_t)t * e_count + e];
            if (sum != sum ? got == got : !(fabs(got - sum) <= (terms + 8) * 0x1p-24 * magnitude))
                fail(w, "logit", t, e, got, sum);
        }
    for (uint32_t e = 0; w->tokens > 2 && e < e_count; e++) /* token 1 is 1 in one column, so nothing is rounded */
        if (logits[e_count + e] != w->weights[(size_t)e * h + COLUMN])
            fail(w, "logit of a column", 1, e, logits[e_count + e], w->weights[(size_t)e * h + COLUMN]);
    const float *last = logits + (size_t)(w->tokens - 1) * e_count;
    for (uint32_t e = 0; e < e_count; e++)
        if (memcmp(&last[e], &logits[e], 4)) fail(w, "logit of an equal row", w->tokens - 1, e, last[e], logits[e]);
}

static void judge_choice(const router_work *w, const float *logits, const int32_t *token_ids, const int32_t *ids,
                         const float *weights) {
    const mm_layer_weights *l = &w->made.weights;
    const uint32_t k_count = w->c->slots;
    mm_router_counts counts = {0};
    for (uint32_t t = 0; t < w->tokens; t++) {
        int32_t want_ids[64];
        float want[64];
        mm_router_choose(&l->shape, &l->router, logits + (size_t)t * w->c->experts, token_ids ? token_ids[t] : 0,
                         want_ids, want, &counts);
        for (uint32_t k = 0; k < k_count; k++) {
            const float got = weights[(size_t)t * k_count + k];
            if (ids[(size_t)t * k_count + k] != want_ids[k])
                fail(w, "id", t, k, ids[(size_t)t * k_count + k], want_ids[k]);
            if (!(fabsf(got - want[k]) <= 0x1p-20f * fabsf(want[k]))) fail(w, "weight", t, k, got, want[k]);
        }
    }
    mm_cuda_counters counters;
    from_gpu(w, &counters, w->layer->counters, sizeof counters);
    if (counters.unrouted_tokens != counts.unrouted_tokens)
        fail(w, "unrouted", 0, 0, (double)counters.unrouted_tokens, (double)counts.unrouted_tokens);
}

/* One token in seven that can be neither looked up nor scored. */
static void spoil(const router_work *w, int32_t *token_ids) {
    for (uint32_t t = 5; t + 1 < w->tokens; t += 7) {
        if (w->c->hash && t % 2)
            token_ids[t] = t % 3 ? -1 : VOCABULARY;
        else
            w->hidden[(size_t)t * w->c->hidden + t % w->c->hidden] = NAN;
    }
}

static void run_tokens(router_work *w, uint32_t tokens) {
    const size_t h = w->c->hidden, pairs = (size_t)tokens * w->c->slots, count = tokens * h;
    megamoe_device_options options = {
        .struct_size = sizeof options, .max_tokens = tokens, .batch_invariant = w->c->invariant};
    int32_t *ids = malloc(pairs * 4), *token_ids = malloc(tokens * 4ull);
    float *weights = malloc(pairs * 4), *logits = malloc((size_t)tokens * w->c->experts * 4);
    mm_scratch scratch;
    w->tokens = tokens;
    w->hidden = values(&w->made.seed, count, 1.0f, w->c->hidden_f32);
    memcpy(w->hidden + (tokens - 1) * h, w->hidden, h * 4);
    for (size_t k = 0; tokens > 2 && k < h; k++) w->hidden[h + k] = k == COLUMN;
    for (uint32_t t = 0; t < tokens; t++) token_ids[t] = (int32_t)(made_random(&w->made.seed) % VOCABULARY);
    spoil(w, token_ids);
    void *hidden = packed(w->hidden, count, w->c->hidden_f32);
    if (w->backend->open(&options, &w->state) != MEGAMOE_OK ||
        w->backend->layer_create(w->state, &w->made.weights, false, NULL, &w->layer) != MEGAMOE_OK ||
        mm_cuda_enter(w->state) != MEGAMOE_OK)
        printf("open: %s\n", megamoe_error_message()), exit(1);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = to_gpu(w, hidden, count * (w->c->hidden_f32 ? 4 : 2)),
                           .hidden_dtype = w->c->hidden_f32 ? MEGAMOE_F32 : MEGAMOE_BF16,
                           .token_ids = to_gpu(w, token_ids, tokens * 4ull)};
    int32_t *gpu_ids = to_gpu(w, NULL, pairs * 4);
    float *gpu_weights = to_gpu(w, NULL, pairs * 4);
    mm_cuda_scratch(w->layer, &scratch);
    check(w->state->driver->fill((CUdeviceptr)(uintptr_t)scratch.logits, 0xFF, (size_t)tokens * w->c->experts * 4,
                                 w->state->stream),
          "fill");
    if (mm_cuda_route(w->layer, &batch, gpu_ids, gpu_weights, w->state->stream) != MEGAMOE_OK)
        printf("route: %s\n", megamoe_error_message()), exit(1);
    from_gpu(w, ids, gpu_ids, pairs * 4), from_gpu(w, weights, gpu_weights, pairs * 4);
    from_gpu(w, logits, scratch.logits, (size_t)tokens * w->c->experts * 4);
    judge_logits(w, logits);
    judge_choice(w, logits, w->c->hash ? token_ids : NULL, ids, weights);
    const void *all[] = {batch.hidden, batch.token_ids, gpu_ids, gpu_weights};
    for (int i = 0; i < 4; i++) w->state->driver->memory_free((CUdeviceptr)(uintptr_t)all[i]);
    mm_cuda_leave(w->state);
    w->backend->layer_close(w->layer);
    w->backend->close(w->state);
    free(ids), free(token_ids), free(weights), free(logits), free(hidden), free(w->hidden);
}

static const router_case cases[] = {
    {.name = "v4-pro", .experts = 384, .hidden = 7168, .slots = 6, .bias = true},
    {.name = "v4-pro hash", .experts = 384, .hidden = 7168, .slots = 6, .hash = true},
    {.name = "v4-pro f32", .experts = 384, .hidden = 7168, .slots = 6, .bias = true, .weight_f32 = true},
    {.name = "v4-flash", .experts = 256, .hidden = 4096, .slots = 6, .bias = true, .hidden_f32 = true},
    {.name = "r1",
     .experts = 256,
     .hidden = 7168,
     .slots = 8,
     .score = MEGAMOE_SIGMOID,
     .groups = 8,
     .groups_per_token = 4,
     .bias = true},
    {.name = "qwen3", .experts = 128, .hidden = 2048, .slots = 8, .score = MEGAMOE_SOFTMAX_TOPK},
    {.name = "gpt-oss", .experts = 32, .hidden = 2880, .slots = 4, .score = MEGAMOE_TOPK_SOFTMAX, .bias = true},
    {.name = "odd",
     .experts = 37,
     .hidden = 208,
     .slots = 5,
     .score = MEGAMOE_SIGMOID,
     .weight_f32 = true,
     .bias = true},
    {.name = "twins", .experts = 256, .hidden = 512, .slots = 6, .different = 128},
    {.name = "clones", .experts = 384, .hidden = 512, .slots = 9, .score = MEGAMOE_SIGMOID, .different = 7},
    {.name = "invariant", .experts = 384, .hidden = 1024, .slots = 6, .bias = true, .invariant = true},
};

static void run_backend(const mm_backend *backend, const uint32_t *counts, const char *cases_with) {
    mm_backend_state *kept; /* so that a context is made once */
    const megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
    if (backend->open(&options, &kept) != MEGAMOE_OK) printf("open: %s\n", megamoe_error_message()), exit(1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        router_work w = {.c = &cases[i], .backend = backend};
        const int before = failures;
        if (!strstr(cases[i].name, cases_with)) continue;
        layer_make(&w);
        for (uint32_t t = 0; counts[t]; t++) run_tokens(&w, counts[t]);
        layer_free(&w);
        printf("%s %s %s\n", failures == before ? "ok  " : "FAIL", backend->name, cases[i].name);
        fflush(stdout);
    }
    backend->close(kept);
}

/* test_cuda_router [model]: what the functional model can run, in a time that a test may take.
 * test_cuda_router tokens,tokens,... [cases whose name has this] */
int main(int argc, char **argv) {
    const bool model = argc > 1 && !strcmp(argv[1], "model");
    char standard[] = "1,8,33,128,129,300,2051", few[] = "1,7,33,129",
         *list = model      ? few
                 : argc > 1 ? argv[1]
                            : standard;
    uint32_t counts[32] = {0}, n = 0;
    if (mm_backend_cuda_portable.probe(0) != MEGAMOE_OK) {
        printf("skipped: %s\n", megamoe_error_message());
        return SKIPPED;
    }
    for (char *at = strtok(list, ","); at && n < 31; at = strtok(NULL, ",")) counts[n++] = (uint32_t)atoi(at);
    run_backend(&mm_backend_cuda_portable, counts, argc > 2 ? argv[2] : "");
    if (!model && mm_backend_sm90.probe(0) == MEGAMOE_OK)
        run_backend(&mm_backend_sm90, counts, argc > 2 ? argv[2] : "");
    return failures != 0;
}
