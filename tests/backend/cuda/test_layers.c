/*
 * GPU layers against the reference backend, stage by stage: each stage's oracle is given the GPU's own output of the
 * stage before. Sizes that no tile divides, every format, both activations, one token to hundreds, a hot expert. Where
 * the reference would take too long (many rows of real sizes), sm90 is compared with cuda-portable, which shares no
 * GEMM with it. Exit status 77, with the reason, where there is no GPU.
 */
#include "backend/cuda/made_layer.h"

#include "error.h"

enum { SKIPPED = 77 };

static int failures;

typedef struct dump {
    megamoe_stages stages;
    uint16_t *output;
    uint32_t written;
} dump;

static size_t pairs_of(const made_layer *l, uint32_t tokens) {
    return (size_t)tokens * l->weights.shape.experts_per_token;
}

/* Every stage's memory, poisoned. */
static void dump_open(dump *d, const made_layer *l, uint32_t tokens) {
    const size_t h = l->weights.shape.hidden, i = l->weights.shape.intermediate, p = pairs_of(l, tokens);
    megamoe_stages *s = &d->stages;
    memset(s, 0, sizeof *s);
    s->struct_size = sizeof *s;
    s->expert_ids = malloc(p * 4), s->expert_weights = malloc(p * 4);
    s->x_codes = malloc(tokens * h / 2), s->x_scales = malloc(tokens * h / 16), s->x_globals = malloc(tokens * 4);
    s->h = malloc(p * i * 2), s->h_codes = malloc(p * i / 2), s->h_scales = malloc(p * i / 16),
    s->h_globals = malloc(p * 4);
    s->l2 = malloc(p * h * 4), s->shared = malloc(tokens * h * 4), s->output = malloc(tokens * h * 2);
    memset(s->h, 0x7F, p * i * 2), memset(s->l2, 0x7F, p * h * 4), memset(s->output, 0x7F, tokens * h * 2);
    memset(s->shared, 0x7F, tokens * h * 4), memset(s->h_codes, 0xAA, p * i / 2), memset(s->h_scales, 0xAA, p * i / 16);
    d->output = malloc(tokens * h * 2);
    memset(d->output, 0x7F, tokens * h * 2);
    d->written = 0;
}

static void dump_close(dump *d) {
    megamoe_stages *s = &d->stages;
    free(s->expert_ids), free(s->expert_weights), free(s->x_codes), free(s->x_scales), free(s->x_globals), free(s->h);
    free(s->h_codes), free(s->h_scales), free(s->h_globals), free(s->l2), free(s->shared), free(s->output),
        free(d->output);
}

typedef struct measure {
    double cosine, ratio, worst; /* worst: largest |a - b| / rms(b) */
} measure;

static measure compare(const float *a, const float *b, size_t n) {
    double ab = 0, aa = 0, bb = 0, worst = 0;
    for (size_t i = 0; i < n; i++) ab += (double)a[i] * b[i], aa += (double)a[i] * a[i], bb += (double)b[i] * b[i];
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)a[i] - b[i]) <= worst)) worst = fabs((double)a[i] - b[i]);
    double rms = sqrt(bb / (double)(n ? n : 1));
    return (measure){aa == 0 && bb == 0 ? 1.0 : ab / sqrt(aa * bb), aa == 0 && bb == 0 ? 1.0 : sqrt(aa / bb),
                     rms > 0 ? worst / rms : worst};
}

static float *widen(const uint16_t *values, size_t n) {
    float *out = malloc((n + 1) * sizeof *out);
    for (size_t i = 0; i < n; i++) out[i] = mm_bf16_to_f32(values[i]);
    return out;
}

static void judge(const char *name, const char *stage, measure m, double rounding) {
    const double cosine = 1.0 - rounding * rounding, ratio = 1e-3;
    bool good = m.cosine >= cosine && fabs(m.ratio - 1.0) <= ratio && m.worst < 1.0;
    if (!good) failures++;
    if (!good || getenv("VERBOSE"))
        printf("%s %-44s %-7s cosine 1-%.2e norm ratio 1%+.1e worst %.3g rms\n", good ? "ok  " : "FAIL", name, stage,
               1.0 - m.cosine, m.ratio - 1.0, m.worst);
}

static void equal(const char *name, const char *stage, const void *a, const void *b, size_t bytes, double allowed) {
    size_t different = 0;
    for (size_t i = 0; i < bytes; i++) different += ((const uint8_t *)a)[i] != ((const uint8_t *)b)[i];
    if ((double)different > allowed * (double)bytes) {
        failures++;
        printf("FAIL %-44s %-7s %zu of %zu bytes differ\n", name, stage, different, bytes);
    }
}

/* Judges every stage in `gpu` by the reference run on the stages before it. */
static void judge_stages(const char *name, const made_layer *l, uint32_t tokens, const dump *gpu, const dump *ref) {
    const size_t h = l->weights.shape.hidden, i = l->weights.shape.intermediate, p = pairs_of(l, tokens);
    const bool nvfp4 = gpu->written & MM_STAGE_H_CODES;
    if (nvfp4) {
        equal(name, "x codes", gpu->stages.x_codes, ref->stages.x_codes, tokens * h / 2, 0);
        equal(name, "x scale", gpu->stages.x_scales, ref->stages.x_scales, tokens * h / 16, 0);
        equal(name, "x glob.", gpu->stages.x_globals, ref->stages.x_globals, tokens * 4, 0);
        equal(name, "h codes", gpu->stages.h_codes, ref->stages.h_codes, p * i / 2,
              2e-3); /* near a rounding boundary */
        equal(name, "h scale", gpu->stages.h_scales, ref->stages.h_scales, p * i / 16, 2e-3);
    } else {
        float *a = widen(gpu->stages.h, p * i), *b = widen(ref->stages.h, p * i);
        judge(name, "h", compare(a, b, p * i), 2e-3);
        free(a), free(b);
    }
    judge(name, "l2", compare(gpu->stages.l2, ref->stages.l2, p * h), 3e-3); /* stored as BF16 */
    if (l->weights.shared) judge(name, "shared", compare(gpu->stages.shared, ref->stages.shared, tokens * h), 3e-3);
    float *a = widen(gpu->output, tokens * h), *b = widen(ref->output, tokens * h);
    judge(name, "output", compare(a, b, tokens * h), 2.5e-3);
    free(a), free(b);
}

static megamoe_status run_on(const mm_backend *backend, const made_layer *l, const megamoe_batch *batch, bool invariant,
                             const megamoe_stages *given, dump *d) {
    megamoe_device_options options = {.struct_size = sizeof options,
                                      .backend = backend->id,
                                      .max_tokens = batch->token_count,
                                      .threads = 1,
                                      .batch_invariant = invariant};
    megamoe_batch own = *batch;
    mm_backend_state *state;
    mm_backend_layer *layer;
    own.output = d->output;
    MM_TRY(backend->open(&options, &state));
    megamoe_status status = backend->layer_create(state, &l->weights, false, NULL, &layer);
    if (status == MEGAMOE_OK) {
        for (int i = 0; status == MEGAMOE_OK && i < (given ? 1 : 2);
             i++) /* twice: a run must not depend on what one left behind */
            status = backend->run(layer, &own, given, &d->stages, &d->written, NULL);
        backend->layer_close(layer);
    }
    backend->close(state);
    return status;
}

typedef struct layer_case {
    const char *name;
    made_form form;
    uint32_t tokens;
    float hot;
    bool invariant;
} layer_case;

static void run_case(const mm_backend *backend, const mm_backend *judge_backend, const layer_case *c) {
    if (getenv("CASE") && !strstr(c->name, getenv("CASE"))) return;
    made_layer l = {0};
    dump gpu, ref;
    char name[96];
    made_layer_open(&l, &c->form, 12345 + c->tokens);
    const size_t p = pairs_of(&l, c->tokens);
    int32_t *ids = malloc(p * 4);
    float *weights = malloc(p * 4);
    uint16_t *hidden = malloc((size_t)c->tokens * c->form.hidden * 2);
    made_routing(&l, c->tokens, c->hot, ids, weights);
    made_hidden(&l, c->tokens, hidden);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = c->tokens,
                           .hidden = hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .expert_ids = ids,
                           .expert_weights = weights,
                           .allow_bad_routing = true};
    dump_open(&gpu, &l, c->tokens), dump_open(&ref, &l, c->tokens);
    snprintf(name, sizeof name, "%s %s T=%u", backend->name, c->name, c->tokens);
    if (getenv("VERBOSE")) printf("%s\n", name);
    megamoe_status status = run_on(backend, &l, &batch, c->invariant, NULL, &gpu);
    if (status == MEGAMOE_OK) {
        megamoe_stages given = gpu.stages;
        given.output = NULL, given.l1 = NULL;
        if (c->form.activations != MEGAMOE_ACTIVATIONS_NVFP4 || !(gpu.written & MM_STAGE_H_CODES))
            given.x_codes = given.x_scales = NULL, given.x_globals = NULL, given.h_codes = given.h_scales = NULL,
            given.h_globals = NULL;
        else
            given.h = NULL;
        if (!l.weights.shared) given.shared = NULL;
        status = run_on(judge_backend, &l, &batch, false, judge_backend->id == MEGAMOE_REFERENCE ? &given : NULL, &ref);
    }
    if (status != MEGAMOE_OK) {
        failures++;
        printf("FAIL %s: %s\n", name, megamoe_error_message());
    } else
        judge_stages(name, &l, c->tokens, &gpu, &ref);
    fflush(stdout);
    dump_close(&gpu), dump_close(&ref);
    free(ids), free(weights), free(hidden);
    made_layer_close(&l);
}

#define BF16 .activations = MEGAMOE_ACTIVATIONS_BF16
#define NVFP4(x, h)                                                                                                    \
    .activations = MEGAMOE_ACTIVATIONS_NVFP4, .input_mode = MEGAMOE_GLOBAL_##x, .intermediate_mode = MEGAMOE_GLOBAL_##h
#define SILU .alpha = 1.0f, .limit = 10.0f

static const layer_case small_cases[] = {
    {"512x512", {512, 512, 8, 5, 2, MM_NVFP4, 0, BF16, SILU}, 1, 0, 0},
    {"512x512", {512, 512, 8, 5, 2, MM_NVFP4, 0, BF16, SILU}, 24, 0, 0},
    {"512x512 hot", {512, 512, 8, 5, 2, MM_NVFP4, 0, BF16, SILU}, 130, 1, 0},
    {"512x512 shared fp8", {512, 512, 8, 5, 2, MM_NVFP4, MM_FP8, BF16, SILU}, 70, 0.5f, 0},
    {"512x512 shared bf16", {512, 512, 8, 5, 2, MM_NVFP4, MM_BF16, BF16, SILU}, 9, 0.5f, 0},
    {"512x512 nvfp4 static shared nvfp4",
     {512, 512, 8, 5, 2, MM_NVFP4, MM_NVFP4, NVFP4(STATIC, STATIC), SILU},
     40,
     0.5f,
     0},
    {"512x512 nvfp4 token", {512, 512, 8, 5, 2, MM_NVFP4, 0, NVFP4(TOKEN, UNIT), SILU}, 12, 0, 0},
    {"512x512 nvfp4 unit", {512, 512, 8, 5, 2, MM_NVFP4, 0, NVFP4(UNIT, UNIT), SILU}, 70, 1, 0},
    {"512x512 invariant", {512, 512, 8, 5, 2, MM_NVFP4, 0, BF16, SILU}, 24, 0, 1},
    {"512x512 weight before", {512, 512, 8, 5, 2, MM_NVFP4, 0, BF16, SILU, .weight_before = true}, 24, 0, 0},
    {"208x112 odd sizes", {208, 112, 7, 7, 3, MM_NVFP4, 0, BF16, SILU}, 33, 0, 0},
    {"336x208 odd nvfp4", {336, 208, 7, 4, 3, MM_NVFP4, 0, NVFP4(STATIC, STATIC), SILU}, 33, 0, 0},
    {"576x320 K tail", {576, 320, 6, 6, 3, MM_NVFP4, 0, BF16, SILU}, 50, 1, 0},
    {"1024x768 mxfp4", {1024, 512, 6, 4, 3, MM_MXFP4, 0, BF16, SILU}, 14, 0, 0},
    {"1024x768 mxfp4", {1024, 512, 6, 4, 3, MM_MXFP4, 0, BF16, SILU}, 200, 1, 0},
    {"2880x2880 gpt-oss",
     {2880, 2880, 4, 2, 2, MM_MXFP4, 0, BF16, .bias = true, .alpha = 1.702f, .beta = 1.0f, .limit = 7.0f},
     10,
     0,
     0},
    {"256x256 relu2", {256, 256, 6, 6, 2, MM_NVFP4, 0, BF16, .alpha = 1.0f, .not_gated = true}, 30, 0, 0},
    {"256x256 bf16 experts", {256, 256, 6, 6, 2, MM_BF16, 0, BF16, SILU}, 30, 0, 0},
    {"384x384 fp8 experts", {384, 384, 6, 6, 2, MM_FP8, 0, BF16, SILU}, 30, 0, 0},
    {"384x256 fp8 experts", {384, 256, 6, 6, 2, MM_FP8, 0, BF16, SILU}, 30, 0, 0},
};

/* Every portable kernel in small, so that the functional model can run them too: each decode instance by its K, light
 * and heavy, every format of the tiles, both ways to plan. */
static const layer_case model_cases[] = {
    {"7168x256 light", {7168, 256, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 8, 0.5f, 0},
    {"7168x256 heavy", {7168, 256, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 22, 0.3f, 0},
    {"5120x256", {5120, 256, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 12, 0.4f, 0},
    {"4096x256", {4096, 256, 3, 2, 1, MM_NVFP4, 0, NVFP4(STATIC, STATIC), SILU}, 9, 0.4f, 0},
    {"3840x256 uneven halves", {3840, 256, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 19, 0.4f, 0},
    {"6144x512 mxfp4 one entry", {6144, 512, 1, 1, 1, MM_MXFP4, 0, BF16, SILU}, 13, 0.0f, 0},
    {"3072x256", {3072, 256, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 5, 0.4f, 0},
    {"256x3072", {256, 3072, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 20, 0.4f, 0},
    {"256x2304", {256, 2304, 3, 2, 1, MM_NVFP4, 0, NVFP4(TOKEN, UNIT), SILU}, 12, 0.4f, 0},
    {"256x2048", {256, 2048, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 3, 0.4f, 0},
    {"256x1536", {256, 1536, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 12, 0.4f, 0},
    {"7168x512 mxfp4", {7168, 512, 3, 1, 1, MM_MXFP4, 0, BF16, SILU}, 9, 0.6f, 0},
    {"4096x512 mxfp4", {4096, 512, 3, 1, 1, MM_MXFP4, 0, BF16, SILU}, 20, 0.6f, 0},
    {"512x3072 mxfp4", {512, 3072, 3, 1, 1, MM_MXFP4, 0, BF16, SILU}, 5, 0.6f, 0},
    {"512x2048 mxfp4", {512, 2048, 3, 1, 1, MM_MXFP4, 0, BF16, SILU}, 20, 0.6f, 0},
    {"256x256 decode and tiles", {256, 256, 8, 5, 2, MM_NVFP4, MM_NVFP4, NVFP4(UNIT, UNIT), SILU}, 70, 1, 0},
    {"256x256 invariant", {256, 256, 8, 5, 2, MM_NVFP4, 0, BF16, SILU}, 9, 0, 1},
    {"256x256 weight before", {256, 256, 8, 5, 2, MM_NVFP4, 0, BF16, SILU, .weight_before = true}, 9, 0, 0},
    {"208x112 odd sizes", {208, 112, 7, 7, 3, MM_NVFP4, MM_FP8, BF16, SILU}, 33, 0, 0},
    {"176x80 odd nvfp4", {176, 80, 7, 4, 3, MM_NVFP4, MM_BF16, NVFP4(STATIC, STATIC), SILU}, 33, 0, 0},
    {"320x192 mxfp4",
     {320, 192, 4, 2, 2, MM_MXFP4, 0, BF16, .bias = true, .alpha = 1.702f, .beta = 1.0f, .limit = 7.0f},
     10,
     0,
     0},
    {"128x96 relu2", {128, 96, 6, 6, 2, MM_NVFP4, 0, BF16, .alpha = 1.0f, .not_gated = true}, 30, 0, 0},
    {"128x128 bf16 experts", {128, 128, 6, 6, 2, MM_BF16, 0, BF16, SILU}, 30, 0, 0},
    {"128x128 fp8 experts", {128, 128, 6, 6, 2, MM_FP8, 0, BF16, SILU}, 30, 0, 0},
    {"256x128 fp8 experts", {256, 128, 6, 6, 2, MM_FP8, 0, BF16, SILU}, 30, 0, 0},
    {"256x384 shared fp8", {256, 384, 4, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 1, 0, 0},
    {"2304x128 shared fp8 chunks", {2304, 128, 4, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 8, 0, 0},
    {"384x2176 shared fp8 chunks", {384, 2176, 4, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 13, 0, 0},
    {"1920x256 shared fp8 f32 scales", {1920, 256, 4, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 30, 0, 0},
    {"2176x240 shared bf16 chunks", {2176, 240, 4, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 7, 0, 0},
    {"272x1136 shared bf16", {272, 1136, 4, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 16, 0, 0},
    {"1040x144 shared bf16", {1040, 144, 4, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 57, 0, 0},
    {"64x64 large plan", {64, 64, 64, 48, 6, MM_NVFP4, 0, BF16, SILU}, 700, 0.1f, 0},
};

static const layer_case real_cases[] = {
    {"V4-Pro light", {7168, 3072, 4, 2, 1, MM_NVFP4, 0, BF16, SILU}, 8, 0.5f, 0},
    {"V4-Pro heavy", {7168, 3072, 3, 2, 1, MM_NVFP4, 0, BF16, SILU}, 22, 0.3f, 0},
    {"V4-Flash", {4096, 2048, 4, 3, 1, MM_NVFP4, 0, BF16, SILU}, 28, 0.4f, 0},
    {"V4.1-Flash", {5120, 2304, 4, 3, 1, MM_NVFP4, 0, BF16, SILU}, 28, 0.4f, 0},
    {"R1", {7168, 2048, 4, 2, 1, MM_MXFP4, 0, BF16, SILU}, 20, 0.4f, 0},
    {"Qwen3", {4096, 1536, 4, 2, 1, MM_NVFP4, 0, NVFP4(STATIC, STATIC), SILU}, 24, 0.4f, 0},
    {"6144x2560", {6144, 2560, 4, 2, 1, MM_NVFP4, 0, BF16, SILU}, 20, 0.4f, 0},
    {"2048x768", {2048, 768, 4, 3, 2, MM_NVFP4, 0, BF16, SILU}, 22, 0.4f, 0},
};

/* Many rows: the two GPU backends against each other. */
static const layer_case many_cases[] = {
    {"V4-Pro rows of every width", {7168, 3072, 12, 9, 3, MM_NVFP4, 0, BF16, SILU}, 200, 0.0f, 0},
    {"V4-Pro hot", {7168, 3072, 12, 9, 3, MM_NVFP4, 0, BF16, SILU}, 700, 0.8f, 0},
    {"V4.1-Flash", {5120, 2304, 12, 9, 3, MM_NVFP4, 0, NVFP4(STATIC, STATIC), SILU}, 300, 0.3f, 0},
    {"gpt-oss",
     {2880, 2880, 8, 8, 4, MM_MXFP4, 0, BF16, .bias = true, .alpha = 1.702f, .beta = 1.0f, .limit = 7.0f},
     300,
     0.3f,
     0},
    {"R1 mxfp4", {7168, 2048, 12, 9, 3, MM_MXFP4, 0, BF16, SILU}, 500, 0.5f, 0},
    {"shared fp8", {2048, 1536, 8, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 300, 0.3f, 0},
    {"shared fp8", {2048, 1536, 8, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 100, 0.3f, 0},
    {"shared fp8", {1104, 432, 8, 1, 1, MM_NVFP4, MM_FP8, BF16, SILU}, 127, 0.3f, 0},
    {"shared bf16", {1104, 432, 8, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 90, 0.3f, 0},
    {"shared bf16", {1040, 336, 8, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 129, 0.3f, 0},
    {"shared bf16", {1536, 2048, 8, 1, 1, MM_NVFP4, MM_BF16, BF16, SILU}, 1500, 0.3f, 0},
    {"large plan", {512, 512, 64, 48, 6, MM_NVFP4, 0, BF16, SILU}, 3000, 0.1f, 0},
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

int main(int argc, char **argv) {
    const mm_backend *const backends[] = {&mm_backend_sm90, &mm_backend_cuda_portable};
    const char *only = argc > 1 ? argv[1] : ""; /* "model": those cases alone; "nosmall" and so on: all but those */
    const bool model = strcmp(only, "model") == 0;
    int ran = 0;
    for (size_t b = 0; b < COUNT(backends); b++) {
        if (backends[b]->probe(0) != MEGAMOE_OK) {
            printf("skipped %s: %s\n", backends[b]->name, megamoe_error_message());
            continue;
        }
        for (size_t i = 0; i < COUNT(model_cases); i++, ran++)
            run_case(backends[b], &mm_backend_reference, &model_cases[i]);
        if (model) continue;
        for (size_t i = 0; !strstr(only, "nosmall") && i < COUNT(small_cases); i++, ran++)
            run_case(backends[b], &mm_backend_reference, &small_cases[i]);
        for (size_t i = 0; !strstr(only, "noreal") && i < COUNT(real_cases); i++, ran++)
            run_case(backends[b], &mm_backend_reference, &real_cases[i]);
        for (size_t i = 0; b == 0 && !strstr(only, "nomany") && i < COUNT(many_cases); i++, ran++)
            run_case(backends[b], &mm_backend_cuda_portable, &many_cases[i]);
    }
    if (!ran) return SKIPPED;
    printf("%d layers, %d failures\n", ran, failures);
    return failures ? 1 : 0;
}
