/*
 * What must be exact on the GPU, bit by bit:
 *     every product of an E2M1 code and an E4M3 scale, through L1 and through L2 of every kernel (light and heavy
 * decode, MID and WIDE tiles, portable tiles): one-hot activations bring single weights to the output, and the expected
 * value comes from a table written here, not from the library; h of nvfp4 layers, which decode quantizes in passing
 * and tiles by a launch of its own: the bits of numerics/nvfp4.h, and its counts; a run in another order, and a
 * captured graph replayed with other data: the same bits per token. Exit status 77, with the reason, where there is no
 * GPU.
 */
#include <dlfcn.h>

#include "backend/cuda/made_layer.h"
#include "backend/cuda/state.h"
#include "error.h"
#include "numerics/nvfp4.h"

enum { SKIPPED = 77, H = 512, I = 512 };

static int failures;

/* E2M1 and E4M3 by their definitions. */
static float weight_value(unsigned code, unsigned scale) {
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    unsigned exponent = scale >> 3 & 15, mantissa = scale & 7; /* 0x80 is minus zero */
    float s = exponent ? ldexpf(1.0f + (float)mantissa / 8.0f, (int)exponent - 7) : ldexpf((float)mantissa, -9);
    return (code & 8 ? -1.0f : 1.0f) * magnitudes[code & 7] * s;
}

static float matrix_value(const mm_matrix *m, uint32_t n, uint32_t k) {
    unsigned code = m->codes[n * m->row_bytes + k / 2] >> (k % 2 * 4) & 15;
    return weight_value(code, m->scales[n * m->scale_row_bytes + k / 16]);
}

static void matrix_fill(mm_matrix *m, uint8_t code, uint8_t scale) {
    memset((void *)(uintptr_t)m->codes, code * 17, m->rows * m->row_bytes);
    memset((void *)(uintptr_t)m->scales, scale, m->rows * m->scale_row_bytes);
    m->global = 1.0f;
}

static void matrix_set(mm_matrix *m, uint32_t n, uint32_t k, unsigned code) {
    uint8_t *at = (uint8_t *)(uintptr_t)m->codes + n * m->row_bytes + k / 2;
    *at = (uint8_t)(k % 2 ? (*at & 15) | code << 4 : (*at & 240) | code);
}

/* All codes and all valid scales, 0x80 (minus zero) included, at random. */
static void matrix_randomize(made_layer *l, mm_matrix *m) {
    uint8_t *codes = (uint8_t *)(uintptr_t)m->codes, *scales = (uint8_t *)(uintptr_t)m->scales;
    for (size_t i = 0; i < m->rows * m->row_bytes; i++) codes[i] = (uint8_t)made_random(&l->seed);
    for (size_t i = 0; i < m->rows * m->scale_row_bytes; i++) {
        unsigned s = made_random(&l->seed) % 128;
        scales[i] = (uint8_t)(s == 127 ? 0x80 : s);
    }
    m->global = 1.0f;
}

static const made_form form = {H, I, 2, 1, 1, MM_NVFP4, 0, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1000.0f};

typedef struct device_layer {
    const mm_backend *backend;
    mm_backend_state *state;
    mm_backend_layer *layer;
} device_layer;

static void open_layer(device_layer *d, const mm_backend *backend, const made_layer *l, uint32_t tokens) {
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = tokens};
    d->backend = backend;
    if (backend->open(&options, &d->state) != MEGAMOE_OK ||
        backend->layer_create(d->state, &l->weights, false, NULL, &d->layer) != MEGAMOE_OK) {
        printf("FAIL %s: %s\n", backend->name, megamoe_error_message());
        exit(1);
    }
}

static void close_layer(device_layer *d) {
    d->backend->layer_close(d->layer);
    d->backend->close(d->state);
}

static void run_stages(device_layer *d, const megamoe_batch *batch, megamoe_stages *stages) {
    uint32_t written;
    if (d->backend->run(d->layer, batch, NULL, stages, &written, NULL) != MEGAMOE_OK) {
        failures++;
        printf("FAIL %s: %s\n", d->backend->name, megamoe_error_message());
    }
}

/*
 * Token t has x_0 = 1 and x_k = 1 at k = 1 + t mod 511. Gates are 1 (sigmoid(1000) is 1), so h_n = W_up[n][k]: L1's
 * products. With up rows that pick one feature, h is one-hot and the result is a column of down: L2's products.
 */
static void test_products(const mm_backend *backend, uint32_t tokens, bool l2) {
    made_layer l = {0};
    device_layer d;
    made_layer_open(&l, &form, 77 + tokens);
    mm_expert *e = l.experts;
    matrix_fill(&e->gate, 0, 0x38), matrix_fill(&e->up, 0, 0x38);
    matrix_randomize(&l, &e->down);
    if (!l2) matrix_randomize(&l, &e->up);
    for (uint32_t n = 0; n < I; n++) {
        matrix_set(&e->gate, n, 0, 2);
        matrix_set(&e->up, n, 0, 0);
        if (l2) matrix_set(&e->up, n, 1 + (n + 7) % (H - 1), 2); /* feature n answers to k = 1 + (n + 7) mod 511 */
    }
    int32_t *ids = malloc(tokens * 4);
    float *weights = malloc(tokens * 4), *out = malloc((size_t)tokens * H * 4);
    uint16_t *x = calloc((size_t)tokens * H, 2), *y = malloc((size_t)tokens * H * 2),
             *h = malloc((size_t)tokens * I * 2);
    for (uint32_t t = 0; t < tokens; t++)
        ids[t] = 1, weights[t] = 1.0f, x[t * H] = 0x3F80, x[t * H + 1 + t % (H - 1)] = 0x3F80;
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = x,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = y,
                           .expert_ids = ids,
                           .expert_weights = weights};
    megamoe_stages stages = {.struct_size = sizeof stages, .h = h, .l2 = out};
    open_layer(&d, backend, &l, tokens);
    run_stages(&d, &batch, &stages);
    size_t wrong = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        const uint32_t k = 1 + t % (H - 1), feature = (k - 1 + (H - 1) - 7 % (H - 1)) % (H - 1);
        for (uint32_t n = 0; n < (l2 ? H : I); n++) {
            float got = l2 ? out[(size_t)t * H + n] : mm_bf16_to_f32(h[(size_t)t * I + n]);
            float want = l2 ? matrix_value(&e->down, n, feature) : matrix_value(&e->up, n, k);
            if (l2 && feature == 0) want += matrix_value(&e->down, n, I - 1); /* 511 and 0 share a k */
            if (l2 && feature == 0) want = mm_bf16_round(want);
            wrong += got != want;
        }
    }
    if (wrong)
        failures++, printf("FAIL %s: %zu of %u products through %s are not exact at %u tokens\n", backend->name, wrong,
                           tokens * (l2 ? H : I), l2 ? "L2" : "L1", tokens);
    close_layer(&d);
    free(ids), free(weights), free(out), free(x), free(y), free(h);
    made_layer_close(&l);
}

/* ---- quantization of h --------------------------------------------------------------------------------- */

/* Rows of h on the device, and before they were quantized. */
typedef struct h_rows {
    uint32_t count, pitch, columns;
    uint16_t *staged;
    float *before;
    int32_t *offsets;
} h_rows;

static h_rows h_rows_read(device_layer *d, uint32_t loaded, uint32_t columns) {
    h_rows r = {.pitch = (columns + 127) / 128 * 128, .columns = columns};
    mm_scratch s;
    const mm_driver *driver = d->state->driver;
    mm_cuda_enter(d->state);
    mm_cuda_scratch(d->layer, &s);
    r.offsets = malloc((loaded + 1) * 4);
    driver->copy_to_host(r.offsets, (CUdeviceptr)(uintptr_t)s.offsets, (loaded + 1) * 4, d->state->stream);
    driver->stream_wait(d->state->stream);
    r.count = (uint32_t)r.offsets[loaded];
    r.staged = malloc((size_t)r.count * r.pitch * 2), r.before = malloc((size_t)r.count * columns * 4);
    driver->copy_to_host(r.staged, (CUdeviceptr)(uintptr_t)s.h, (size_t)r.count * r.pitch * 2, d->state->stream);
    driver->copy_to_host(r.before, (CUdeviceptr)(uintptr_t)s.h32, (size_t)r.count * columns * 4, d->state->stream);
    driver->stream_wait(d->state->stream);
    mm_cuda_leave(d->state);
    return r;
}

/* Blocks of a row whose staged values are not those of numerics/nvfp4.h; counts what must be counted. */
static size_t h_row_judge(const h_rows *r, uint32_t row, float global, uint64_t *saturated, uint64_t *nonfinite) {
    size_t wrong = 0;
    for (uint32_t k = 0; k < r->columns; k += 16) {
        uint8_t codes[8], scale;
        const mm_nvfp4_block_report report =
            mm_nvfp4_block_quantize(r->before + (size_t)row * r->columns + k, global, codes, &scale);
        *saturated += report.saturated, *nonfinite += report.nonfinite;
        for (uint32_t i = k; i < k + 16; i++) {
            /* 32 t + 8 w + j stands at 32 w + 16 (j / 2 % 2) + 8 (j % 2) + 2 t + j / 4 */
            const uint32_t t = i / 32 % 4, w = i / 8 % 4, j = i % 8;
            const uint32_t at = i / 128 * 128 + 32 * w + 16 * (j / 2 % 2) + 8 * (j % 2) + 2 * t + j / 4;
            const float got = mm_bf16_to_f32(r->staged[(size_t)row * r->pitch + at]);
            const float want = mm_e2m1_to_f32(mm_e2m1_unpack(codes, i - k)) * mm_e4m3_to_f32(scale);
            wrong += report.nonfinite ? !isnan(got) : got != want;
        }
    }
    return wrong;
}

/* One expert's global scale is so small that its blocks saturate; a token of many is infinite. */
static void test_quantized(const mm_backend *backend, uint32_t hidden, uint32_t tokens, float hot) {
    const made_form f = {hidden,
                         272,
                         4,
                         3,
                         2,
                         MM_NVFP4,
                         0,
                         .activations = MEGAMOE_ACTIVATIONS_NVFP4,
                         .input_mode = MEGAMOE_GLOBAL_STATIC,
                         .intermediate_mode = MEGAMOE_GLOBAL_STATIC,
                         .alpha = 1.0f,
                         .limit = 10.0f};
    made_layer l = {0};
    device_layer d;
    made_layer_open(&l, &f, 31 + tokens);
    l.experts[1].intermediate_global = 0x1p-20f;
    const size_t pairs = (size_t)tokens * f.slots;
    int32_t *ids = malloc(pairs * 4);
    float *weights = malloc(pairs * 4);
    uint16_t *x = malloc((size_t)tokens * hidden * 2), *y = malloc((size_t)tokens * hidden * 2);
    uint8_t *codes = malloc(pairs * f.intermediate / 2);
    made_routing(&l, tokens, hot, ids, weights);
    made_hidden(&l, tokens, x);
    if (tokens > 1) x[(tokens / 2) * hidden + 5] = 0x7F80;
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = x,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = y,
                           .expert_ids = ids,
                           .expert_weights = weights};
    megamoe_stages stages = {.struct_size = sizeof stages, .h_codes = codes};
    megamoe_counters counters = {.struct_size = sizeof counters};
    open_layer(&d, backend, &l, tokens);
    run_stages(&d, &batch, &stages);
    h_rows rows = h_rows_read(&d, f.loaded, f.intermediate);
    uint64_t saturated = 0, nonfinite = 0;
    size_t wrong = 0;
    for (uint32_t e = 0, row = 0; e < f.loaded; e++)
        for (; row < (uint32_t)rows.offsets[e + 1]; row++)
            wrong += h_row_judge(&rows, row, l.experts[e].intermediate_global, &saturated, &nonfinite);
    bool infinite = false; /* the token is here: one block of x counts too */
    for (uint32_t k = 0; k < f.slots; k++) infinite |= tokens > 1 && l.local_index[ids[tokens / 2 * f.slots + k]] >= 0;
    if (backend->counters(d.layer, &counters, NULL) != MEGAMOE_OK || wrong || counters.saturated_blocks != saturated ||
        counters.nonfinite_blocks != nonfinite + infinite || !saturated)
        failures++, printf("FAIL %s: h of %u tokens, K %u: %zu values are wrong; %llu blocks saturated, %llu wanted; "
                           "%llu not finite, %llu wanted\n",
                           backend->name, tokens, hidden, wrong, (unsigned long long)counters.saturated_blocks,
                           (unsigned long long)saturated, (unsigned long long)counters.nonfinite_blocks,
                           (unsigned long long)nonfinite + infinite);
    close_layer(&d);
    free(rows.staged), free(rows.before), free(rows.offsets);
    free(ids), free(weights), free(x), free(y), free(codes);
    made_layer_close(&l);
}

/* ---- order, and graphs ---------------------------------------------------------------------------------- */

static void *upload(mm_backend_state *state, const void *host, size_t bytes) {
    CUdeviceptr p = 0;
    state->driver->memory_allocate(&p, bytes);
    if (host) state->driver->copy_to_device(p, host, bytes, state->stream);
    state->driver->stream_wait(state->stream);
    return (void *)(uintptr_t)p;
}

/* A batch in reverse order gives every token the same bits; so does a graph captured with one batch and replayed with
 * the other. */
static void test_order_and_graph(const mm_backend *backend, uint32_t tokens, megamoe_activations activations) {
    const made_form f = {1024,
                         512,
                         16,
                         11,
                         4,
                         MM_NVFP4,
                         MM_FP8,
                         .activations = activations,
                         .input_mode = MEGAMOE_GLOBAL_TOKEN,
                         .intermediate_mode = MEGAMOE_GLOBAL_UNIT,
                         .alpha = 1.0f,
                         .limit = 10.0f};
    CUresult (*begin)(CUstream, CUstreamCaptureMode), (*end)(CUstream, CUgraph *);
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long), (*launch)(CUgraphExec, CUstream);
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&begin = dlsym(cuda, "cuStreamBeginCapture_v2"), *(void **)&end = dlsym(cuda, "cuStreamEndCapture");
    *(void **)&instantiate = dlsym(cuda, "cuGraphInstantiateWithFlags"),
           *(void **)&launch = dlsym(cuda, "cuGraphLaunch");
    made_layer l = {0};
    device_layer d;
    made_layer_open(&l, &f, 5);
    const uint32_t k = f.slots, h = f.hidden;
    int32_t *ids = malloc(tokens * k * 4), *ids2 = malloc(tokens * k * 4);
    float *weights = malloc(tokens * k * 4), *weights2 = malloc(tokens * k * 4);
    uint16_t *x = malloc(tokens * h * 2), *x2 = malloc(tokens * h * 2), *y = malloc(tokens * h * 2),
             *y2 = malloc(tokens * h * 2);
    made_routing(&l, tokens, 0.3f, ids, weights);
    made_hidden(&l, tokens, x);
    for (uint32_t t = 0; t < tokens; t++) {
        const uint32_t r = tokens - 1 - t;
        memcpy(ids2 + r * k, ids + t * k, k * 4), memcpy(weights2 + r * k, weights + t * k, k * 4),
            memcpy(x2 + r * h, x + t * h, h * 2);
    }
    open_layer(&d, backend, &l, tokens);
    mm_cuda_enter(d.state);
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = upload(d.state, x, tokens * h * 2),
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = upload(d.state, NULL, tokens * h * 2),
                           .expert_ids = upload(d.state, ids, tokens * k * 4),
                           .expert_weights = upload(d.state, weights, tokens * k * 4)};
    CUstream stream = d.state->stream;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    bool good = d.backend->run(d.layer, &batch, NULL, NULL, NULL, stream) == MEGAMOE_OK;
    d.state->driver->copy_to_host(y, (CUdeviceptr)(uintptr_t)batch.output, tokens * h * 2, stream);
    d.state->driver->stream_wait(stream);
    good &= begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS;
    good &= d.backend->run(d.layer, &batch, NULL, NULL, NULL, stream) == MEGAMOE_OK;
    good &= end(stream, &graph) == CUDA_SUCCESS && instantiate(&exec, graph, 0) == CUDA_SUCCESS;
    d.state->driver->copy_to_device((CUdeviceptr)(uintptr_t)batch.hidden, x2, tokens * h * 2, stream);
    d.state->driver->copy_to_device((CUdeviceptr)(uintptr_t)batch.expert_ids, ids2, tokens * k * 4, stream);
    d.state->driver->copy_to_device((CUdeviceptr)(uintptr_t)batch.expert_weights, weights2, tokens * k * 4, stream);
    d.state->driver->fill((CUdeviceptr)(uintptr_t)batch.output, 0x7F, tokens * h * 2, stream);
    good &= launch(exec, stream) == CUDA_SUCCESS && launch(exec, stream) == CUDA_SUCCESS;
    d.state->driver->copy_to_host(y2, (CUdeviceptr)(uintptr_t)batch.output, tokens * h * 2, stream);
    good &= d.state->driver->stream_wait(stream) == CUDA_SUCCESS;
    size_t wrong = 0;
    for (uint32_t t = 0; good && t < tokens; t++) wrong += memcmp(y + t * h, y2 + (tokens - 1 - t) * h, h * 2) != 0;
    if (!good || wrong)
        failures++, printf("FAIL %s: a replayed graph in reverse order: %s, %zu of %u tokens differ\n", backend->name,
                           good ? "ran" : megamoe_error_message(), wrong, tokens);
    mm_cuda_leave(d.state);
    close_layer(&d);
    free(ids), free(ids2), free(weights), free(weights2), free(x), free(x2), free(y), free(y2);
    made_layer_close(&l);
}

/* "model": what the functional model has time for, and no graphs, which its driver lacks. */
int main(int argc, char **argv) {
    const bool model = argc > 1 && strcmp(argv[1], "model") == 0;
    const mm_backend *const backends[] = {&mm_backend_sm90, &mm_backend_cuda_portable};
    static const uint32_t counts[] = {1, 8, 9, 16, 40, 100, 300, 1100};
    int ran = 0;
    for (size_t b = 0; b < 2; b++) {
        if (backends[b]->probe(0) != MEGAMOE_OK) {
            printf("skipped %s: %s\n", backends[b]->name, megamoe_error_message());
            continue;
        }
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++, ran++) {
            if (model && (counts[i] > 100 || counts[i] == 8 || counts[i] == 16)) continue;
            test_products(backends[b], counts[i], false);
            test_products(backends[b], counts[i], true);
        }
        test_quantized(backends[b], 512, 1, 1.0f), test_quantized(backends[b], 512, 40, 0.0f);
        test_quantized(backends[b], 4096, 12, 0.5f), test_quantized(backends[b], 512, 90, 0.9f);
        ran++;
        for (uint32_t tokens = 3; !model && tokens <= 243; tokens *= 9, ran++) {
            test_order_and_graph(backends[b], tokens, MEGAMOE_ACTIVATIONS_BF16);
            test_order_and_graph(backends[b], tokens, MEGAMOE_ACTIVATIONS_NVFP4);
        }
    }
    if (!ran) return SKIPPED;
    printf("%d groups, %d failures\n", ran, failures);
    return failures ? 1 : 0;
}
