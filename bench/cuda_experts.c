/*
 * Times the GPU backends: the two expert GEMMs alone (L1 + activation + L2) and the whole layer, as CUDA graphs of
 * several routings, in the state the card is in after a pause (cool) and after 300 ms of unbroken work (loaded). One
 * rank of V4-Pro (48 of 384 experts, top 6) or V4-Flash; random weights, random routing, fixed seed. cuda_experts
 * [backend] [shape] [tokens,tokens,...] [bf16|nvfp4] CSV on stdout:
 * backend,shape,activations,tokens,rows,experts_hit,state,experts_us,experts_min,layer_us,gb_s,fraction,tflop_s
 */
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include "backend/cuda/made_layer.h"
#include "backend/cuda/state.h"
#include "error.h"

enum { ROUTINGS = 8, RUNS = 15, WARM = 3 };

static CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
static CUresult (*end_capture)(CUstream, CUgraph *);
static CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
static CUresult (*graph_launch)(CUgraphExec, CUstream);

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, megamoe_error_message());
    exit(1);
}

static void check(CUresult r, const char *what) {
    if (r != CUDA_SUCCESS) {
        fprintf(stderr, "%s: CUresult %d\n", what, (int)r);
        exit(1);
    }
}

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

static void *to_gpu(const work *w, const void *host, size_t bytes) {
    CUdeviceptr p;
    check(w->state->driver->memory_allocate(&p, bytes + 256), "memory");
    if (host) check(w->state->driver->copy_to_device(p, host, bytes, w->state->stream), "copy");
    check(w->state->driver->stream_wait(w->state->stream), "copy");
    return (void *)(uintptr_t)p;
}

/* Routings of at least one local pair each, with their own scratch, so that each keeps its plan and its staged rows. */
static void prepare(work *w) {
    const megamoe_shape *shape = &w->made->weights.shape;
    const size_t pairs = (size_t)w->tokens * shape->experts_per_token;
    int32_t *ids = malloc(pairs * 4);
    float *weights = malloc(pairs * 4);
    uint16_t *hidden = malloc((size_t)w->tokens * shape->hidden * 2);
    for (size_t i = 0; i < (size_t)w->tokens * shape->hidden; i++)
        hidden[i] = mm_bf16_from_f32(made_uniform(&w->made->seed) * 2.0f - 1.0f);
    w->rows = w->hit = 0;
    for (uint32_t r = 0; r < w->routings; r++) {
        uint32_t rows = 0, hit = 0;
        uint8_t seen[4096];
        do {
            rows = hit = 0;
            memset(seen, 0, sizeof seen);
            made_routing(w->made, w->tokens, 0.0f, ids, weights);
            for (size_t i = 0; i < pairs; i++) {
                int32_t local = w->made->local_index[ids[i]];
                rows += local >= 0;
                if (local >= 0 && !seen[local]) seen[local] = 1, hit++;
            }
        } while (rows == 0);
        w->rows += rows, w->hit += hit;
        w->batch[r] = (megamoe_batch){.struct_size = sizeof(megamoe_batch),
                                      .token_count = w->tokens,
                                      .hidden = to_gpu(w, hidden, (size_t)w->tokens * shape->hidden * 2),
                                      .hidden_dtype = MEGAMOE_BF16,
                                      .output = to_gpu(w, NULL, (size_t)w->tokens * shape->hidden * 2),
                                      .expert_ids = to_gpu(w, ids, pairs * 4),
                                      .expert_weights = to_gpu(w, weights, pairs * 4)};
        if (r == 0)
            w->scratch[r] = w->own_scratch;
        else
            w->scratch[r] = (CUdeviceptr)(uintptr_t)to_gpu(w, NULL, w->state->scratch.bytes);
        check(w->state->driver->fill(w->scratch[r], 0, w->state->scratch.bytes, w->state->stream), "fill");
        w->state->scratch_blocks->base = w->scratch[r];
        if (mm_cuda_run_batch(w->layer, &w->batch[r], w->state->stream) != MEGAMOE_OK) die("run");
    }
    check(w->state->driver->stream_wait(w->state->stream), "run");
    w->rows /= w->routings, w->hit /= w->routings;
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

static CUgraphExec capture(work *w, bool experts_only) {
    CUgraph graph;
    CUgraphExec exec;
    check(begin_capture(w->state->stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    for (uint32_t r = 0; r < w->routings; r++) {
        w->state->scratch_blocks->base = w->scratch[r];
        megamoe_status s = experts_only ? mm_cuda_run_experts(w->layer, w->tokens, w->batch[r].expert_weights,
                                                              w->state->stream, r == 0)
                                        : mm_cuda_run_batch(w->layer, &w->batch[r], w->state->stream);
        if (s != MEGAMOE_OK) die("capture");
    }
    w->state->scratch_blocks->base = w->own_scratch;
    check(end_capture(w->state->stream, &graph), "capture");
    check(instantiate(&exec, graph, 0), "instantiate");
    return exec;
}

static int ascending(const void *a, const void *b) {
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
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
    bool nvfp4;
    made_form form;
    made_layer made;
    megamoe_limits limits;
    bool measured;
} request;

static void report(const request *q, const work *w, const char *state, double experts, double least, double layer) {
    const double weights = 3.0 * q->form.hidden * q->form.intermediate;
    printf("%s,%s,%s,%u,%.1f,%.1f,%s,%.1f,%.1f,%.1f,%.0f,%.3f,%.1f\n", q->backend->name, q->shape,
           q->nvfp4 ? "nvfp4" : "bf16", w->tokens, w->rows, w->hit, state, experts, least, layer,
           w->hit * weights * 0.5625 / experts * 1e-3, w->hit * weights * 0.5625 / experts * 1e-3 / q->limits.read_gb_s,
           w->rows * 2.0 * weights / experts * 1e-6);
    fflush(stdout);
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

static void run_tokens(request *q, uint32_t tokens) {
    work w = {.made = &q->made, .tokens = tokens};
    w.routings = tokens <= 512 ? 8 : tokens <= 2048 ? 4 : tokens <= 8192 ? 2 : 1;
    open_work(q, &w);
    prepare(&w);
    if (getenv("ONCE")) exit(0); /* under a profiler: every kernel has run */
    CUgraphExec experts = capture(&w, true), whole = capture(&w, false);
    for (int loaded = 0; loaded < 2; loaded++) {
        double e, e_min, l, l_min;
        measure(&w, experts, loaded ? 300 : 0, &e, &e_min);
        measure(&w, whole, loaded ? 300 : 0, &l, &l_min);
        report(q, &w, loaded ? "loaded" : "cool", e, e_min, l);
    }
    release(&w);
    mm_cuda_leave(w.state);
    q->backend->layer_close(w.layer);
    q->backend->close(w.state);
}

static void find_graphs(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&begin_capture = dlsym(cuda, "cuStreamBeginCapture_v2");
    *(void **)&end_capture = dlsym(cuda, "cuStreamEndCapture");
    *(void **)&instantiate = dlsym(cuda, "cuGraphInstantiateWithFlags");
    *(void **)&graph_launch = dlsym(cuda, "cuGraphLaunch");
}

/* Random bytes that the experts' matrices share; the upper half serves as scales too, all of them valid. */
static void fill_pool(made_layer *made) {
    uint64_t seed = 7;
    made->pool_bytes = 64 << 20;
    made->pool = malloc(made->pool_bytes);
    for (size_t i = 0; i < made->pool_bytes; i++)
        made->pool[i] =
            (uint8_t)(i < made->pool_bytes / 2 ? made_random(&seed) >> 7 : 0x48 + made_random(&seed) % 0x37);
}

int main(int argc, char **argv) {
    const bool flash = argc > 2 && !strcmp(argv[2], "v4-flash");
    char standard[] = "1,8,64,512,2048,8192", *list = argc > 3 ? argv[3] : standard;
    request q = {.backend =
                     argc > 1 && !strcmp(argv[1], "cuda-portable") ? &mm_backend_cuda_portable : &mm_backend_sm90,
                 .shape = flash ? "v4-flash" : "v4-pro",
                 .nvfp4 = argc > 4 && !strcmp(argv[4], "nvfp4"),
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
    fill_pool(&q.made);
    made_layer_open(&q.made, &q.form, 99);
    for (char *at = strtok(list, ","); at; at = strtok(NULL, ",")) run_tokens(&q, (uint32_t)atoi(at));
    return 0;
}
