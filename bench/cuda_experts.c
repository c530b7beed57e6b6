/*
 * Times the GPU backends: the two expert GEMMs alone (L1 + activation + L2) and the whole layer, as CUDA graphs of
 * several routings, in the state the card is in after a pause (cool) and after 300 ms of unbroken work (loaded). One
 * rank of V4-Pro (48 of 384 experts, top 6) or V4-Flash; random weights, random routing, fixed seed. cuda_experts
 * [backend] [shape] [tokens,tokens,...] [bf16|nvfp4] [routed] CSV on stdout:
 * backend,shape,activations,tokens,rows,experts_hit,state,experts_us,experts_min,layer_us,gb_s,fraction,tflop_s
 * To be interleaved with another program on the same routings: tokens "-" reads counts from stdin, one a line, and
 * answers each with the experts' cool line; DRAWS names a folder of files TOKENS.i32, expert ids
 * [routing][token][slot].
 * routed: a router of random BF16 weights chooses, its choice is what the others are given too, and a last column
 * routed_us is the whole layer with it.
 */
#include <time.h>
#include <unistd.h>

#include "backend/cuda/made_layer.h"
#include "cuda_graph.h"

enum { ROUTINGS = 8, RUNS = 15, WARM = 3 };

typedef struct work {
    mm_backend_state *state;
    mm_backend_layer *layer;
    made_layer *made;
    uint32_t tokens, routings;
    megamoe_batch batch[ROUTINGS];
    CUdeviceptr scratch[ROUTINGS];
    CUdeviceptr own_scratch;
    double rows, hit;
} work;

static FILE *open_draws(const work *w) {
    const char *folder = getenv("DRAWS");
    char path[4096];
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/%u.i32", folder, w->tokens);
    FILE *draws = fopen(path, "rb");
    if (!draws) perror(path), exit(1);
    return draws;
}

static void count_local(const work *w, const int32_t *ids, uint32_t *rows, uint32_t *hit) {
    uint8_t seen[4096] = {0};
    *rows = *hit = 0;
    for (size_t i = 0; i < (size_t)w->tokens * w->made->weights.shape.experts_per_token; i++) {
        const int32_t local = ids[i] < 0 ? -1 : w->made->local_index[ids[i]];
        *rows += local >= 0;
        if (local >= 0 && !seen[local]) seen[local] = 1, ++*hit;
    }
}

static void fill_hidden(work *w, uint16_t *hidden) {
    for (size_t i = 0; i < (size_t)w->tokens * w->made->weights.shape.hidden; i++)
        hidden[i] = mm_bf16_from_f32(made_uniform(&w->made->seed) * 2.0f - 1.0f);
}

/* The router's choice for these states, on the device and on the host. */
static void route(work *w, const uint16_t *hidden, megamoe_batch *batch, int32_t *ids) {
    const megamoe_shape *shape = &w->made->weights.shape;
    const size_t pairs = (size_t)w->tokens * shape->experts_per_token;
    const mm_driver *d = w->state->driver;
    const megamoe_batch own = {
        .struct_size = sizeof own, .token_count = w->tokens, .hidden = batch->hidden, .hidden_dtype = MEGAMOE_BF16};
    check(
        d->copy_to_device((CUdeviceptr)batch->hidden, hidden, (size_t)w->tokens * shape->hidden * 2, w->state->stream),
        "copy");
    if (mm_cuda_route(w->layer, &own, (int32_t *)(uintptr_t)batch->expert_ids,
                      (float *)(uintptr_t)batch->expert_weights, w->state->stream) != MEGAMOE_OK)
        die("route");
    check(d->copy_to_host(ids, (CUdeviceptr)batch->expert_ids, pairs * 4, w->state->stream), "copy");
    check(d->stream_wait(w->state->stream), "route");
}

/* Routings of at least one local pair each, with their own scratch, so that each keeps its plan and its staged rows. */
static void prepare(work *w) {
    const megamoe_shape *shape = &w->made->weights.shape;
    const size_t pairs = (size_t)w->tokens * shape->experts_per_token;
    int32_t *ids = malloc(pairs * 4);
    float *weights = malloc(pairs * 4);
    uint16_t *hidden = malloc((size_t)w->tokens * shape->hidden * 2);
    FILE *draws = open_draws(w);
    fill_hidden(w, hidden);
    w->rows = w->hit = 0;
    for (uint32_t r = 0; r < w->routings; r++) {
        uint32_t rows, hit;
        do {
            made_routing(w->made, w->tokens, 0.0f, ids, weights);
            if (draws && fread(ids, 4, pairs, draws) != pairs) fprintf(stderr, "too few draws\n"), exit(1);
            count_local(w, ids, &rows, &hit);
        } while (rows == 0);
        w->batch[r] = (megamoe_batch){.struct_size = sizeof(megamoe_batch),
                                      .token_count = w->tokens,
                                      .hidden = to_gpu(w->state, hidden, (size_t)w->tokens * shape->hidden * 2),
                                      .hidden_dtype = MEGAMOE_BF16,
                                      .output = to_gpu(w->state, NULL, (size_t)w->tokens * shape->hidden * 2),
                                      .expert_ids = to_gpu(w->state, ids, pairs * 4),
                                      .expert_weights = to_gpu(w->state, weights, pairs * 4)};
        if (r == 0)
            w->scratch[r] = w->own_scratch;
        else
            w->scratch[r] = (CUdeviceptr)(uintptr_t)to_gpu(w->state, NULL, w->state->scratch.bytes);
        check(w->state->driver->fill(w->scratch[r], 0, w->state->scratch.bytes, w->state->stream), "fill");
        w->state->scratch_blocks->base = w->scratch[r];
        if (w->made->weights.router.weight) do {
                fill_hidden(w, hidden);
                route(w, hidden, &w->batch[r], ids);
                count_local(w, ids, &rows, &hit);
            } while (rows == 0);
        w->rows += rows, w->hit += hit;
        if (mm_cuda_run_batch(w->layer, &w->batch[r], w->state->stream) != MEGAMOE_OK) die("run");
    }
    check(w->state->driver->stream_wait(w->state->stream), "run");
    w->rows /= w->routings, w->hit /= w->routings;
    if (draws) fclose(draws);
    free(ids), free(weights), free(hidden);
}

static void release(work *w) {
    for (uint32_t r = 0; r < w->routings; r++) {
        const void *all[] = {w->batch[r].hidden, w->batch[r].output, w->batch[r].expert_ids,
                             w->batch[r].expert_weights};
        for (int i = 0; i < 4; i++) w->state->driver->memory_free((CUdeviceptr)(uintptr_t)all[i]);
        if (r) w->state->driver->memory_free(w->scratch[r]);
    }
    w->state->scratch_blocks->base = w->own_scratch;
}

typedef enum extent { EXPERTS, LAYER, ROUTED_LAYER } extent;

static CUgraphExec capture(work *w, extent extent_of) {
    CUgraph graph;
    CUgraphExec exec;
    check(begin_capture(w->state->stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    for (uint32_t r = 0; r < w->routings; r++) {
        w->state->scratch_blocks->base = w->scratch[r];
        megamoe_batch batch = w->batch[r];
        if (extent_of == ROUTED_LAYER) batch.expert_ids = NULL, batch.expert_weights = NULL;
        megamoe_status s = extent_of == EXPERTS ? mm_cuda_run_experts(w->layer, w->tokens, batch.expert_weights,
                                                                      w->state->stream, r == 0)
                                                : mm_cuda_run_batch(w->layer, &batch, w->state->stream);
        if (s != MEGAMOE_OK) die("capture");
    }
    w->state->scratch_blocks->base = w->own_scratch;
    check(end_capture(w->state->stream, &graph), "capture");
    check(instantiate(&exec, graph, 0), "instantiate");
    return exec;
}

/* Median and minimum of RUNS replays, microseconds per routing. */
static void measure(work *w, CUgraphExec exec, double warm_ms, double *median, double *least) {
    const mm_driver *d = w->state->driver;
    CUevent a, b;
    float ms[RUNS], once = 0;
    d->event_create(&a, 0), d->event_create(&b, 0);
    usleep(700000);
    for (int i = 0; i < WARM || warm_ms > 0; i++) {
        d->event_record(a, w->state->stream);
        check(graph_launch(exec, w->state->stream), "replay");
        d->event_record(b, w->state->stream);
        if (i < WARM)
            check(d->event_wait(b), "replay"), d->event_elapsed(&once, a, b);
        else if ((warm_ms -= once) < 0)
            break;
    }
    for (int i = 0; i < RUNS; i++) {
        d->event_record(a, w->state->stream);
        check(graph_launch(exec, w->state->stream), "replay");
        d->event_record(b, w->state->stream);
        check(d->event_wait(b), "replay");
        d->event_elapsed(&ms[i], a, b);
    }
    qsort(ms, RUNS, sizeof *ms, ascending);
    *median = ms[RUNS / 2] * 1e3 / w->routings, *least = ms[0] * 1e3 / w->routings;
    d->event_destroy(a), d->event_destroy(b);
}

/* What the command line asked for. */
typedef struct request {
    const mm_backend *backend;
    const char *shape;
    bool nvfp4, routed;
    made_form form;
    made_layer made;
    megamoe_limits limits;
    bool measured;
} request;

static void report(const request *q, const work *w, const char *state, double experts, double least, double layer) {
    const double weights = 3.0 * q->form.hidden * q->form.intermediate;
    printf("%s,%s,%s,%u,%.1f,%.1f,%s,%.1f,%.1f,%.1f,%.0f,%.3f,%.1f", q->backend->name, q->shape,
           q->nvfp4 ? "nvfp4" : "bf16", w->tokens, w->rows, w->hit, state, experts, least, layer,
           w->hit * weights * 0.5625 / experts * 1e-3, w->hit * weights * 0.5625 / experts * 1e-3 / q->limits.read_gb_s,
           w->rows * 2.0 * weights / experts * 1e-6);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Opens the device and the layer for one token count; the first time also measures limits and the rate of loading. */
static void open_work(request *q, work *w) {
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = w->tokens};
    if (q->backend->open(&options, &w->state) != MEGAMOE_OK) die("open");
    if (!q->measured) {
        if (q->backend->measure(w->state, &q->limits) != MEGAMOE_OK) die("measure");
        printf("# copy %.0f GB/s, bf16 gemm %.0f TFLOP/s\n", q->limits.read_gb_s, q->limits.matrix_tflop_s);
    }
    const double begin = seconds_now();
    if (q->backend->layer_create(w->state, &q->made.weights, false, NULL, &w->layer) != MEGAMOE_OK) die("layer");
    if (!q->measured)
        printf("# load %.2f GB/s\n",
               q->form.loaded * 3e-9 * q->form.hidden * q->form.intermediate * 0.5625 / (seconds_now() - begin));
    q->measured = true;
    if (mm_cuda_enter(w->state) != MEGAMOE_OK) die("enter");
    w->own_scratch = w->state->scratch_blocks->base;
}

static work start(request *q, uint32_t tokens) {
    work w = {.made = &q->made, .tokens = tokens};
    w.routings = tokens <= 512 ? 8 : tokens <= 2048 ? 4 : tokens <= 8192 ? 2 : 1;
    open_work(q, &w);
    prepare(&w);
    return w;
}

static void finish(const request *q, work *w) {
    release(w);
    mm_cuda_leave(w->state);
    q->backend->layer_close(w->layer);
    q->backend->close(w->state);
}

static void run_tokens(request *q, uint32_t tokens) {
    work w = start(q, tokens);
    if (getenv("ONCE")) exit(0); /* under a profiler: every kernel has run */
    CUgraphExec experts = capture(&w, EXPERTS), whole = capture(&w, LAYER),
                routed = q->routed ? capture(&w, ROUTED_LAYER) : NULL;
    for (int loaded = 0; loaded < 2; loaded++) {
        double e, e_min, l, l_min, with_router, with_router_min;
        measure(&w, experts, loaded ? 300 : 0, &e, &e_min);
        measure(&w, whole, loaded ? 300 : 0, &l, &l_min);
        if (routed) measure(&w, routed, loaded ? 300 : 0, &with_router, &with_router_min);
        report(q, &w, loaded ? "loaded" : "cool", e, e_min, l);
        if (routed) printf(",%.1f", with_router);
        putchar('\n');
        fflush(stdout);
    }
    finish(q, &w);
}

/* A count that repeats is measured again as it stands, so that another program's turn lies between two of ours. */
static void serve(request *q) {
    char line[64];
    work w = {.tokens = 0};
    CUgraphExec experts = NULL;
    while (fgets(line, sizeof line, stdin)) {
        const uint32_t tokens = (uint32_t)atoi(line);
        double median, least;
        if (tokens != w.tokens) {
            if (w.tokens) finish(q, &w);
            w = start(q, tokens);
            experts = capture(&w, EXPERTS);
        }
        measure(&w, experts, 0, &median, &least);
        report(q, &w, "cool", median, least, NAN);
        putchar('\n');
        fflush(stdout);
    }
    if (w.tokens) finish(q, &w);
}

static void made_router(made_layer *made) {
    const size_t count = (size_t)made->weights.shape.hidden * made->weights.shape.expert_count;
    uint16_t *weight = malloc(count * sizeof *weight);
    for (size_t i = 0; i < count; i++) weight[i] = mm_bf16_from_f32(made_normal(&made->seed) * 0.01f);
    made->weights.router = (mm_router){.weight = weight, .weight_dtype = MEGAMOE_BF16};
}

int main(int argc, char **argv) {
    const bool flash = argc > 2 && !strcmp(argv[2], "v4-flash");
    char standard[] = "1,8,64,512,2048,8192", *list = argc > 3 ? argv[3] : standard;
    request q = {.backend =
                     argc > 1 && !strcmp(argv[1], "cuda-portable") ? &mm_backend_cuda_portable : &mm_backend_sm90,
                 .shape = flash ? "v4-flash" : "v4-pro",
                 .nvfp4 = argc > 4 && !strcmp(argv[4], "nvfp4"),
                 .routed = argc > 5 && !strcmp(argv[5], "routed"),
                 .limits = {.struct_size = sizeof(megamoe_limits)}};
    q.form = (made_form){.hidden = flash ? 4096 : 7168, .intermediate = flash ? 2048 : 3072};
    q.form.expert_count = flash ? 256 : 384, q.form.loaded = flash ? 32 : 48, q.form.slots = 6;
    q.form.format = MM_NVFP4, q.form.alpha = 1.0f, q.form.limit = 10.0f;
    q.form.activations = q.nvfp4 ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16;
    q.form.input_mode = q.form.intermediate_mode = MEGAMOE_GLOBAL_STATIC;
    if (q.backend->probe(0) != MEGAMOE_OK) {
        printf("skipped: %s\n", megamoe_error_message());
        return 77;
    }
    find_graphs();
    made_pool_fill(&q.made, 0x48, 0x37);
    made_layer_open(&q.made, &q.form, 99);
    if (q.routed) made_router(&q.made);
    if (!strcmp(list, "-"))
        serve(&q);
    else
        for (char *at = strtok(list, ","); at; at = strtok(NULL, ",")) run_tokens(&q, (uint32_t)atoi(at));
    return 0;
}
