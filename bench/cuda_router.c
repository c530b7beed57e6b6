/*
 * Times the GPU router: logits, choice, and both, as CUDA graphs of several calls on different hidden states, after a
 * pause. Random weights and states. cuda_router [backend] [shape] [tokens,tokens,...] [bf16|f32: the gate's
 * weights] CSV on stdout: backend,shape,weights,tokens,logits_us,choose_us,both_us,both_min
 */
#include <unistd.h>

#include "backend/cuda/made_layer.h"
#include "cuda_graph.h"

enum { CALLS = 8, RUNS = 15, WARM = 3 };

/* Which of the launches are made: the driver's table is replaced by one that leaves out the others. */
typedef enum launches { BOTH, LOGITS, CHOICE } launches;
static launches wanted;
static CUfunction choice;
static __typeof__(cuLaunchKernelEx) *launch_all;
static CUresult launch_some(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
    if (wanted != BOTH && (f == choice) != (wanted == CHOICE)) return CUDA_SUCCESS;
    return launch_all(config, f, parameters, extra);
}

typedef struct work {
    mm_backend_state *state;
    mm_backend_layer *layer;
    megamoe_batch batch[CALLS];
    CUdeviceptr ids, weights;
} work;

/* Median of RUNS replays of `calls` calls, microseconds per call. */
static double measure(work *w, int calls, launches made, double *least) {
    const mm_driver *d = w->state->driver;
    CUgraph graph;
    CUgraphExec exec;
    CUevent a, b;
    float ms[RUNS];
    wanted = made;
    check(begin_capture(w->state->stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    for (int r = 0; r < calls; r++)
        if (mm_cuda_route(w->layer, &w->batch[r], (int32_t *)w->ids, (float *)w->weights, w->state->stream))
            fprintf(stderr, "route: %s\n", megamoe_error_message()), exit(1);
    check(end_capture(w->state->stream, &graph), "capture");
    check(instantiate(&exec, graph, 0), "instantiate");
    d->event_create(&a, 0), d->event_create(&b, 0);
    usleep(200000);
    for (int i = 0; i < WARM + RUNS; i++) {
        d->event_record(a, w->state->stream);
        check(graph_launch(exec, w->state->stream), "replay");
        d->event_record(b, w->state->stream);
        check(d->event_wait(b), "replay");
        d->event_elapsed(&ms[i < WARM ? 0 : i - WARM], a, b);
    }
    qsort(ms, RUNS, sizeof *ms, ascending);
    *least = ms[0] * 1e3 / calls;
    return ms[RUNS / 2] * 1e3 / calls;
}

static void run_tokens(const mm_backend *backend, const made_layer *made, const char *shape, bool f32,
                       uint32_t tokens) {
    work w;
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = tokens};
    const size_t values = (size_t)tokens * made->weights.shape.hidden;
    const int calls = tokens <= 2048 ? 8 : tokens <= 8192 ? 4 : 1;
    uint64_t seed = tokens;
    if (backend->open(&options, &w.state) || mm_cuda_enter(w.state) ||
        backend->layer_create(w.state, &made->weights, false, NULL, &w.layer))
        fprintf(stderr, "open: %s\n", megamoe_error_message()), exit(1);
    mm_driver some = *w.state->driver;
    launch_all = some.launch, some.launch = launch_some, w.state->driver = &some;
    uint16_t *hidden = malloc(values * 2);
    for (size_t i = 0; i < values; i++) hidden[i] = mm_bf16_from_f32(made_uniform(&seed) * 2.0f - 1.0f);
    for (int r = 0; r < calls; r++)
        w.batch[r] = (megamoe_batch){.struct_size = sizeof w.batch[r],
                                     .token_count = tokens,
                                     .hidden = to_gpu(w.state, hidden, values * 2),
                                     .hidden_dtype = MEGAMOE_BF16};
    w.ids = (CUdeviceptr)to_gpu(w.state, NULL, tokens * 64ull),
    w.weights = (CUdeviceptr)to_gpu(w.state, NULL, tokens * 64ull);
    double least, none;
    choice = w.state->kernels.function[MM_ROUTE_CHOOSE];
    const double both = measure(&w, calls, BOTH, &least), logits = measure(&w, calls, LOGITS, &none),
                 choose = measure(&w, calls, CHOICE, &none);
    printf("%s,%s,%s,%u,%.2f,%.2f,%.2f,%.2f\n", backend->name, shape, f32 ? "f32" : "bf16", tokens, logits, choose,
           both, least);
    fflush(stdout);
    for (int r = 0; r < calls; r++) w.state->driver->memory_free((CUdeviceptr)w.batch[r].hidden);
    w.state->driver->memory_free(w.ids), w.state->driver->memory_free(w.weights);
    backend->layer_close(w.layer);
    mm_cuda_leave(w.state);
    backend->close(w.state);
    free(hidden);
}

int main(int argc, char **argv) {
    const mm_backend *backend =
        argc > 1 && !strcmp(argv[1], "cuda-portable") ? &mm_backend_cuda_portable : &mm_backend_sm90;
    const bool flash = argc > 2 && !strcmp(argv[2], "v4-flash"), f32 = argc > 4 && !strcmp(argv[4], "f32");
    char standard[] = "1,8,64,512,2048,8192,65536", *list = argc > 3 ? argv[3] : standard;
    const made_form form = {.hidden = flash ? 4096 : 7168,
                            .intermediate = 16,
                            .expert_count = flash ? 256 : 384,
                            .loaded = 1,
                            .slots = 6,
                            .format = MM_NVFP4,
                            .activations = MEGAMOE_ACTIVATIONS_BF16,
                            .input_mode = MEGAMOE_GLOBAL_UNIT,
                            .intermediate_mode = MEGAMOE_GLOBAL_UNIT,
                            .alpha = 1.0f};
    made_layer made = {0};
    if (backend->probe(0) != MEGAMOE_OK) {
        printf("skipped: %s\n", megamoe_error_message());
        return 77;
    }
    find_graphs();
    made_layer_open(&made, &form, 99);
    const size_t count = (size_t)form.hidden * form.expert_count;
    float *weight = malloc(count * 4), *bias = malloc(form.expert_count * 4);
    for (size_t i = 0; i < count; i++) weight[i] = made_normal(&made.seed) * 0.01f;
    for (uint32_t i = 0; i < form.expert_count; i++) bias[i] = made_normal(&made.seed) * 0.01f;
    if (!f32)
        for (size_t i = 0; i < count; i++) ((uint16_t *)weight)[i] = mm_bf16_from_f32(weight[i]);
    made.weights.router = (mm_router){.weight = weight, .weight_dtype = f32 ? MEGAMOE_F32 : MEGAMOE_BF16, .bias = bias};
    mm_backend_state *kept; /* so that a context is made once */
    const megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
    if (backend->open(&options, &kept)) return 1;
    for (char *at = strtok(list, ","); at; at = strtok(NULL, ","))
        run_tokens(backend, &made, flash ? "v4-flash" : "v4-pro", f32, (uint32_t)atoi(at));
    return 0;
}
