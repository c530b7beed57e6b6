/*
 * Times the shared expert on a GPU: alone, as a CUDA graph of several layers in turn, whose weights together exceed the
 * L2 cache; and what it adds to a layer whose routed experts are those of one rank of V4-Pro or V4-Flash. After a pause
 * of 0.7 s each (cool). Random weights and routing, fixed seed.
 *     cuda_shared [backend] [shape] [fp8|bf16|nvfp4] [tokens,tokens,...] [alone|layer]
 * CSV on stdout:
 * backend,shape,format,tokens,shared_us,shared_min,gb_s,fraction_of_copy,tflop_s,layer_us,layer_without_us
 */
#include <unistd.h>

#include "backend/cuda/made_layer.h"
#include "cuda_graph.h"

enum { LAYERS = 4, ROUNDS = 4, RUNS = 15, WARM = 3 };

typedef struct work {
    mm_backend_state *state;
    made_layer made;
    made_form form;
    mm_layer_weights alone;           /* the shared expert without any routed ones */
    mm_backend_layer *layers[LAYERS]; /* of `alone` */
    mm_backend_layer *with, *without; /* the whole layer, and it without its shared expert */
    mm_layer_weights routed;
    megamoe_batch batch;
} work;

static void prepare(work *w, uint32_t tokens) {
    const size_t values = (size_t)tokens * w->form.hidden, pairs = (size_t)tokens * w->form.slots;
    uint16_t *hidden = malloc(values * 2);
    int32_t *ids = malloc(pairs * 4);
    float *weights = malloc(pairs * 4);
    made_routing(&w->made, tokens, 0.0f, ids, weights);
    for (size_t i = 0; i < values; i++) hidden[i] = mm_bf16_from_f32(made_uniform(&w->made.seed) * 2.0f - 1.0f);
    w->batch = (megamoe_batch){.struct_size = sizeof(megamoe_batch),
                               .token_count = tokens,
                               .hidden = to_gpu(w->state, hidden, values * 2),
                               .hidden_dtype = MEGAMOE_BF16,
                               .output = to_gpu(w->state, hidden, values * 2),
                               .expert_ids = to_gpu(w->state, ids, pairs * 4),
                               .expert_weights = to_gpu(w->state, weights, pairs * 4)};
    free(hidden), free(ids), free(weights);
}

static void release(work *w) {
    const void *all[] = {w->batch.hidden, w->batch.output, w->batch.expert_ids, w->batch.expert_weights};
    for (int i = 0; i < 4; i++) w->state->driver->memory_free((CUdeviceptr)(uintptr_t)all[i]);
}

/* layer NULL: the shared expert alone, layer after layer; else that layer, again and again. */
static CUgraphExec capture(work *w, mm_backend_layer *layer) {
    CUgraph graph;
    CUgraphExec exec;
    check(begin_capture(w->state->stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    for (int i = 0; i < LAYERS * ROUNDS; i++) {
        megamoe_status s = layer ? mm_cuda_run_batch(layer, &w->batch, w->state->stream)
                                 : mm_cuda_run_shared(w->layers[i % LAYERS], &w->batch, w->state->stream, i == 0);
        if (s != MEGAMOE_OK) die("capture");
    }
    check(end_capture(w->state->stream, &graph), "capture");
    check(instantiate(&exec, graph, 0), "instantiate");
    return exec;
}

/* Median and minimum of RUNS replays, microseconds per layer. */
static void measure(work *w, mm_backend_layer *layer, double *median, double *least) {
    const mm_driver *d = w->state->driver;
    CUgraphExec exec = capture(w, layer);
    CUevent a, b;
    float ms[RUNS];
    d->event_create(&a, 0), d->event_create(&b, 0);
    usleep(700000);
    for (int i = -WARM; i < RUNS; i++) {
        d->event_record(a, w->state->stream);
        check(graph_launch(exec, w->state->stream), "replay");
        d->event_record(b, w->state->stream);
        check(d->event_wait(b), "replay");
        d->event_elapsed(&ms[i < 0 ? 0 : i], a, b);
    }
    qsort(ms, RUNS, sizeof *ms, ascending);
    *median = ms[RUNS / 2] * 1e3 / (LAYERS * ROUNDS), *least = ms[0] * 1e3 / (LAYERS * ROUNDS);
    d->event_destroy(a), d->event_destroy(b);
}

static void open_work(work *w, const mm_backend *backend, uint32_t max_tokens, bool layer) {
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = max_tokens};
    if (backend->open(&options, &w->state) != MEGAMOE_OK) die("open");
    w->routed = w->alone = w->made.weights;
    w->routed.shared = NULL, w->alone.expert_count = 0;
    for (int i = 0; i < LAYERS; i++)
        if (backend->layer_create(w->state, &w->alone, false, NULL, &w->layers[i]) != MEGAMOE_OK) die("layer");
    if (layer && backend->layer_create(w->state, &w->made.weights, false, NULL, &w->with) != MEGAMOE_OK) die("layer");
    if (layer && backend->layer_create(w->state, &w->routed, false, NULL, &w->without) != MEGAMOE_OK) die("layer");
    if (mm_cuda_enter(w->state) != MEGAMOE_OK) die("enter");
}

static void run_tokens(work *w, const char *names, uint32_t tokens, double copy_gb_s, double weight_bytes) {
    double shared, least, with = 0, without = 0, unused;
    const double weights = 3.0 * w->form.hidden * w->form.intermediate;
    prepare(w, tokens);
    measure(w, NULL, &shared, &least);
    if (w->with) measure(w, w->with, &with, &unused), measure(w, w->without, &without, &unused);
    printf("%s,%u,%.1f,%.1f,%.0f,%.3f,%.1f,%.1f,%.1f\n", names, tokens, shared, least,
           weights * weight_bytes / shared * 1e-3, weights * weight_bytes / shared * 1e-3 / copy_gb_s,
           tokens * 2.0 * weights / shared * 1e-6, with, without);
    fflush(stdout);
    release(w);
}

int main(int argc, char **argv) {
    const bool portable = argc > 1 && !strcmp(argv[1], "cuda-portable"),
               flash = argc > 2 && !strcmp(argv[2], "v4-flash");
    const char *format = argc > 3 ? argv[3] : "fp8";
    char standard[] = "1,8,16,32,64,512,2048,8192", *list = argc > 4 ? argv[4] : standard;
    const mm_backend *backend = portable ? &mm_backend_cuda_portable : &mm_backend_sm90;
    const bool bf16 = !strcmp(format, "bf16"), nvfp4 = !strcmp(format, "nvfp4");
    work w = {.form = {.hidden = flash ? 4096 : 7168, .intermediate = flash ? 2048 : 3072}};
    megamoe_limits limits = {.struct_size = sizeof limits};
    uint32_t tokens[32], count = 0, most = 0;
    char names[64];
    w.form.expert_count = flash ? 256 : 384, w.form.loaded = flash ? 32 : 48, w.form.slots = 6;
    w.form.format = MM_NVFP4, w.form.alpha = 1.0f, w.form.limit = 10.0f;
    w.form.activations = MEGAMOE_ACTIVATIONS_BF16;
    w.form.shared_format = bf16 ? MM_BF16 : nvfp4 ? MM_NVFP4 : MM_FP8;
    if (backend->probe(0) != MEGAMOE_OK) {
        printf("skipped: %s\n", megamoe_error_message());
        return 77;
    }
    for (char *at = strtok(list, ","); at && count < 32; at = strtok(NULL, ",")) {
        tokens[count] = (uint32_t)atoi(at);
        if (tokens[count++] > most) most = tokens[count - 1];
    }
    find_graphs();
    made_pool_fill(&w.made, 0x48, 0x37);
    made_layer_open(&w.made, &w.form, 99);
    open_work(&w, backend, most, argc > 5 && !strcmp(argv[5], "layer"));
    mm_cuda_leave(w.state);
    if (backend->measure(w.state, &limits) != MEGAMOE_OK) die("measure");
    if (mm_cuda_enter(w.state) != MEGAMOE_OK) die("enter");
    printf("# copy %.0f GB/s, bf16 gemm %.0f TFLOP/s\n", limits.read_gb_s, limits.matrix_tflop_s);
    snprintf(names, sizeof names, "%s,%s,%s", backend->name, flash ? "v4-flash" : "v4-pro", format);
    for (uint32_t i = 0; i < count; i++)
        run_tokens(&w, names, tokens[i], limits.read_gb_s, bf16 ? 2.0 : nvfp4 ? 0.5625 : 1.0);
    return 0;
}
