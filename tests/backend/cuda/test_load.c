/*
 * Weights on their way to a GPU, on a fake driver: what is copied arrives byte for byte, whatever its pitch and however
 * many chunks and threads it takes; loading can be cancelled; and weights that the caller holds in device memory, in
 * the layouts of engines, are used where they lie.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "backend/cuda/faulty_driver.h"
#include "backend/cuda/made_layer.h"
#include "backend/cuda/state.h"

static mm_driver *table;

static void begin(void) {
    faults = (faulty_driver){.held = faults.held, .result = CUDA_ERROR_LAUNCH_FAILED};
}

/* ---- copies --------------------------------------------------------------------------------------------- */

static mm_backend_state *device_open(uint32_t max_tokens) {
    megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_SM90, .max_tokens = max_tokens};
    mm_backend_state *state = NULL;
    begin();
    assert_int_equal(mm_backend_sm90.open(&options, &state), MEGAMOE_OK);
    return state;
}

/* Rows on the device, which is memory of this process, follow each other; in the source they lie at a pitch. */
static void expect_rows(const uint8_t *device, const uint8_t *source, size_t rows, size_t row_bytes, size_t pitch) {
    assert_int_equal((uintptr_t)device % 256, 0);
    for (size_t i = 0; i < rows; i++) assert_memory_equal(device + i * row_bytes, source + i * pitch, row_bytes);
}

static void expect_matrix(const mm_cuda_matrix *found, const mm_matrix *m) {
    const size_t scale_row = m->columns / 16;
    assert_true(found->format == m->format && found->global == m->global);
    assert_int_equal(found->row_bytes, m->columns / 2);
    assert_int_equal(found->scale_row_bytes, scale_row);
    expect_rows(found->codes, m->codes, m->rows, m->columns / 2, m->row_bytes);
    expect_rows(found->scales, m->scales, m->rows, scale_row, m->scale_row_bytes);
}

static void expect_experts(const mm_backend_layer *layer, const made_layer *l) {
    for (uint32_t e = 0; e < l->weights.expert_count; e++) {
        expect_matrix(&layer->experts[e].gate, &l->experts[e].gate);
        expect_matrix(&layer->experts[e].up, &l->experts[e].up);
        expect_matrix(&layer->experts[e].down, &l->experts[e].down);
    }
}

typedef struct progress {
    uint64_t last, total, stop_after;
} progress;

static bool advance(void *context, uint64_t done, uint64_t total) {
    progress *p = context;
    assert_true(done > p->last && done <= total && (p->total == 0 || total == p->total));
    p->last = done, p->total = total;
    return done < p->stop_after;
}

/* 142 MB: more than the three chunks of 32 MB, and matrices of more than the 4 MB that four threads share. */
static made_layer *large_layer(void) {
    static const made_form form = {4096,         2048, 10, 10, 2, MM_NVFP4, 0, .activations = MEGAMOE_ACTIVATIONS_NVFP4,
                                   .alpha = 1.0f};
    static made_layer l;
    if (l.pool) return &l;
    l.pool_bytes = 24 << 20;
    l.pool = malloc(l.pool_bytes);
    uint64_t seed = 3;
    for (size_t i = 0; i < l.pool_bytes; i += 4) {
        uint32_t word = made_random(&seed);
        memcpy(l.pool + i, &word, 4);
    }
    made_layer_open(&l, &form, 5);
    return &l;
}

/*
 * A stream as late as it may be: copies happen when somebody waits for an event behind them, or for all. A chunk that
 * is filled again too early then arrives with the wrong bytes.
 */
enum { LATE_COPIES = 64, LATE_EVENTS = 16 };
static struct late_copy {
    CUdeviceptr to;
    const void *from;
    size_t bytes;
} late[LATE_COPIES];
static uint32_t late_count, late_done, event_count;
static uint32_t event_place[LATE_EVENTS]; /* copies in front of an event, which is an element of this array */

static void copy_until(uint32_t end) {
    for (; late_done < end; late_done++)
        memcpy((void *)(uintptr_t)late[late_done].to, late[late_done].from, late[late_done].bytes);
}
static CUresult late_copy_to_device(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    (void)stream;
    if (late_count == LATE_COPIES) return CUDA_ERROR_INVALID_VALUE;
    late[late_count++] = (struct late_copy){to, from, bytes};
    return CUDA_SUCCESS;
}
static CUresult late_event_create(CUevent *event, unsigned flags) {
    (void)flags;
    if (event_count == LATE_EVENTS) return CUDA_ERROR_INVALID_VALUE;
    *event = (CUevent)(void *)&event_place[event_count++];
    return CUDA_SUCCESS;
}
static CUresult late_event_destroy(CUevent event) {
    (void)event;
    return CUDA_SUCCESS;
}
static CUresult late_event_record(CUevent event, CUstream stream) {
    (void)stream;
    *(uint32_t *)(void *)event = late_count;
    return CUDA_SUCCESS;
}
static CUresult late_event_wait(CUevent event) {
    copy_until(*(uint32_t *)(void *)event);
    return CUDA_SUCCESS;
}
static CUresult late_stream_wait(CUstream stream) {
    (void)stream;
    copy_until(late_count);
    return CUDA_SUCCESS;
}

static void many_chunks_arrive(void **unused) {
    made_layer *l = large_layer();
    mm_backend_state *state = device_open(1);
    const mm_driver whole = *table;
    table->copy_to_device = late_copy_to_device, table->stream_wait = late_stream_wait;
    table->event_create = late_event_create, table->event_destroy = late_event_destroy;
    table->event_record = late_event_record, table->event_wait = late_event_wait;
    progress p = {.stop_after = UINT64_MAX};
    megamoe_layer_options how = {.struct_size = sizeof how, .progress = advance, .progress_context = &p};
    mm_backend_layer *layer = NULL;
    (void)unused;
    assert_int_equal(mm_backend_sm90.layer_create(state, &l->weights, false, &how, &layer), MEGAMOE_OK);
    assert_true(p.last == p.total && p.total > 4 * (32u << 20));
    expect_experts(layer, l);
    *table = whole;
    mm_backend_sm90.layer_close(layer);
    mm_backend_sm90.close(state);
}

/* gate and up as alternating rows of one tensor: rows that are copied one by one. */
static void pitched_rows_arrive(void **unused) {
    static const made_form form = {272,          112, 3, 3, 2, MM_NVFP4, 0, .activations = MEGAMOE_ACTIVATIONS_NVFP4,
                                   .alpha = 1.0f};
    made_layer plain = {0};
    mm_backend_layer *layer = NULL;
    mm_backend_state *state = device_open(1);
    (void)unused;
    made_layer_open(&plain, &form, 6);
    made_layer woven = plain;
    mm_expert experts[3];
    woven.experts = experts;
    woven.weights.experts = experts;
    uint8_t *codes = malloc(3 * 2 * 112 * 136), *scales = malloc(3 * 2 * 112 * 17);
    for (uint32_t e = 0; e < 3; e++) {
        experts[e] = plain.experts[e];
        for (int up = 0; up < 2; up++) {
            mm_matrix *m = up ? &experts[e].up : &experts[e].gate;
            uint8_t *to = codes + (e * 224 + up) * 136, *to_scales = scales + (e * 224 + up) * 17;
            for (uint32_t n = 0; n < 112; n++) {
                memcpy(to + n * 272, m->codes + n * m->row_bytes, 136);
                memcpy(to_scales + n * 34, m->scales + n * m->scale_row_bytes, 17);
            }
            m->codes = to, m->scales = to_scales, m->row_bytes = 272, m->scale_row_bytes = 34;
        }
    }
    megamoe_layer_options how = {.struct_size = sizeof how};
    assert_int_equal(mm_backend_sm90.layer_create(state, &woven.weights, false, &how, &layer), MEGAMOE_OK);
    expect_experts(layer, &plain);
    mm_backend_sm90.layer_close(layer);
    mm_backend_sm90.close(state);
    free(codes), free(scales);
    made_layer_close(&plain);
}

/* Cancelled by the caller, or refused by the driver, at every chunk in turn: nothing stays, and the next load succeeds.
 */
static void loading_stops_at_any_chunk(void **unused) {
    made_layer *l = large_layer();
    mm_backend_state *state = device_open(1);
    const int64_t held = faults.held;
    mm_device_facts facts;
    (void)unused;
    for (uint32_t n = 1; n <= 8; n++) {
        const bool cancel = n > 4;
        progress p = {.stop_after = cancel ? (n - 4ull) * (32u << 20) : UINT64_MAX};
        megamoe_layer_options how = {.struct_size = sizeof how, .progress = advance, .progress_context = &p};
        mm_backend_layer *layer = NULL;
        faults.only = "copy_to_device", faults.calls = 0, faults.fail_at = cancel ? 0 : n;
        megamoe_status status = mm_backend_sm90.layer_create(state, &l->weights, false, &how, &layer);
        assert_int_equal(status, cancel ? MEGAMOE_CANCELLED : MEGAMOE_DEVICE_ERROR);
        if (!strstr(megamoe_error_message(), cancel ? "cancelled after" : "copying weights to the GPU"))
            fail_msg("%s", megamoe_error_message());
        assert_null(layer);
        assert_int_equal(faults.held, held);
        mm_backend_sm90.describe(state, &facts);
        assert_int_equal(facts.device_bytes, 0);
    }
    mm_backend_sm90.close(state);
}

/* ---- borrowed ------------------------------------------------------------------------------------------- */

enum { E = 5, H = 256, I = 128 };

/* The table of experts that the kernels will read, as it was sent to the device. */
static mm_cuda_expert sent[E];
static uint32_t sent_count;
static CUresult (*real_copy)(CUdeviceptr, const void *, size_t, CUstream);

static CUresult copy_and_keep(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    if (bytes == sizeof sent) memcpy(sent, from, bytes), sent_count++;
    return real_copy(to, from, bytes, stream);
}

/* Stacked tensors in device memory; gate and up in one of [E, 2 I, .] (halves, or rows in turns), or apart. */
typedef enum layout { APART, HALVES, IN_TURNS } layout;

typedef struct stacks {
    CUdeviceptr memory;
    megamoe_layer_desc desc;
    uint8_t *codes[3], *scales[3]; /* of expert 0: gate, up, down */
    size_t expert_bytes[3], row_bytes[3], scale_expert_bytes[3], scale_row_bytes[3];
} stacks;

static void projection(stacks *s, int which, megamoe_projection *p, uint8_t **at, size_t row_step, size_t expert_rows,
                       size_t first) {
    const size_t rows = which == 2 ? H : I, columns = which == 2 ? I : H;
    s->row_bytes[which] = row_step * columns / 2, s->expert_bytes[which] = expert_rows * columns / 2;
    s->scale_row_bytes[which] = row_step * columns / 16, s->scale_expert_bytes[which] = expert_rows * columns / 16;
    s->codes[which] = at[0] + first * columns / 2, s->scales[which] = at[1] + first * columns / 16;
    p->codes = (megamoe_tensor){.data = s->codes[which],
                                .dtype = MEGAMOE_U8,
                                .rank = 3,
                                .extent = {E, (int64_t)rows, (int64_t)columns / 2},
                                .stride = {(int64_t)s->expert_bytes[which], (int64_t)s->row_bytes[which], 1}};
    p->scales =
        (megamoe_tensor){.data = s->scales[which],
                         .dtype = MEGAMOE_E4M3,
                         .rank = 3,
                         .extent = {E, (int64_t)rows, (int64_t)columns / 16},
                         .stride = {(int64_t)s->scale_expert_bytes[which], (int64_t)s->scale_row_bytes[which], 1}};
    p->global = (megamoe_tensor){.data = at[2] + which * E * 4, .dtype = MEGAMOE_F32, .rank = 1, .extent = {E}};
    p->input_global = p->global;
}

static stacks stacks_open(layout how) {
    const size_t codes = E * I * H / 2, scales = E * I * H / 16, third = codes + scales;
    stacks s = {0};
    assert_int_equal(table->memory_allocate(&s.memory, 3 * third + 4096), CUDA_SUCCESS);
    uint8_t *base = (uint8_t *)(uintptr_t)s.memory;
    memset(base, 0x38, 3 * third); /* scales of 1; nobody multiplies here */
    float *globals = (float *)(void *)(base + 3 * third);
    for (int i = 0; i < 3 * E; i++) globals[i] = 0.25f + (float)i;
    uint8_t *w13[3] = {base, base + 2 * codes, (uint8_t *)globals};
    uint8_t *w3[3] = {base + codes, base + 2 * codes + scales, (uint8_t *)globals};
    uint8_t *w2[3] = {base + 2 * third, base + 2 * third + codes, (uint8_t *)globals};
    const bool one = how != APART;
    const size_t step = how == IN_TURNS ? 2 : 1;
    projection(&s, 0, &s.desc.gate, w13, step, one ? 2 * I : I, 0);
    projection(&s, 1, &s.desc.up, one ? w13 : w3, step, one ? 2 * I : I, how == HALVES ? I : how == IN_TURNS ? 1 : 0);
    projection(&s, 2, &s.desc.down, w2, 1, H, 0);
    s.desc.struct_size = sizeof s.desc;
    s.desc.shape = (megamoe_shape){.hidden = H,
                                   .intermediate = I,
                                   .expert_count = E,
                                   .experts_per_token = 2,
                                   .group_size = 16,
                                   .score = MEGAMOE_SQRTSOFTPLUS,
                                   .routed_scale = 1.0f,
                                   .swiglu_alpha = 1.0f};
    return s;
}

static void expect_borrowed(const stacks *s, int which, uint32_t e, const mm_cuda_matrix *m) {
    assert_ptr_equal(m->codes, s->codes[which] + e * s->expert_bytes[which]);
    assert_ptr_equal(m->scales, s->scales[which] + e * s->scale_expert_bytes[which]);
    assert_int_equal(m->row_bytes, s->row_bytes[which]);
    assert_int_equal(m->scale_row_bytes, s->scale_row_bytes[which]);
    assert_true(m->global == 0.25f + (float)(which * E) + (float)e);
}

/* The first layer sizes the device's scratch; the second's own needs are tables, far smaller than its weights. */
static void borrowed_layer(megamoe_device *device, const stacks *s) {
    for (int second = 0; second < 2; second++) {
        megamoe_layer *layer = NULL;
        const uint64_t allocated = faults.allocated_bytes, copied = faults.copied_bytes;
        sent_count = 0;
        if (megamoe_layer_create(device, &s->desc, NULL, &layer) != MEGAMOE_OK) fail_msg("%s", megamoe_error_message());
        assert_int_equal(sent_count, 1);
        for (uint32_t e = 0; e < E; e++) {
            expect_borrowed(s, 0, e, &sent[e].gate);
            expect_borrowed(s, 1, e, &sent[e].up);
            expect_borrowed(s, 2, e, &sent[e].down);
        }
        const uint64_t tables = sizeof sent + E * 12 * sizeof(CUtensorMap) + 1024;
        assert_true(faults.copied_bytes - copied <= tables);
        if (second) assert_true(faults.allocated_bytes - allocated <= tables + sizeof sent[0]);
        megamoe_layer_close(layer);
    }
}

static void device_tensors_are_borrowed(void **unused) {
    (void)unused;
    begin();
    real_copy = table->copy_to_device;
    table->copy_to_device = copy_and_keep;
    const int64_t held = faults.held;
    for (layout how = APART; how <= IN_TURNS; how++) {
        megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_SM90, .max_tokens = 4};
        megamoe_device *device;
        stacks s = stacks_open(how);
        assert_int_equal(megamoe_device_open(&options, &device), MEGAMOE_OK);
        borrowed_layer(device, &s);
        megamoe_device_close(device);
        table->memory_free(s.memory);
    }
    assert_int_equal(faults.held, held);
    table->copy_to_device = real_copy;
}

/* ---- MEGA_MOE_STATIC ------------------------------------------------------------------------------------ */

/* Zeros in the order of the caller's stream, no launch and no wait, and not a byte beyond the batch. */
static void zero_output(void **unused) {
    enum { TOKENS = 3, BYTES = TOKENS * H * 2 };
    megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_SM90, .max_tokens = TOKENS};
    megamoe_device *device;
    megamoe_layer *layer;
    char stream;
    uint16_t host_hidden[TOKENS * H] = {0}, host_output[TOKENS * H];
    CUdeviceptr memory;
    (void)unused;
    begin();
    stacks s = stacks_open(HALVES);
    assert_int_equal(table->memory_allocate(&memory, 4 * BYTES), CUDA_SUCCESS);
    uint8_t *hidden = (uint8_t *)(uintptr_t)memory, *output = hidden + 2 * BYTES;
    memset(hidden, 0xAA, 4 * BYTES);
    setenv("MEGA_MOE_STATIC", "1", 1);
    assert_int_equal(megamoe_device_open(&options, &device), MEGAMOE_OK);
    unsetenv("MEGA_MOE_STATIC");
    assert_int_equal(megamoe_layer_create(device, &s.desc, NULL, &layer), MEGAMOE_OK);
    const int32_t ids[TOKENS * 2] = {0, 1, 2, 3, 4, 0};
    const float weights[TOKENS * 2] = {1, 1, 1, 1, 1, 1};
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = TOKENS,
                           .hidden = hidden,
                           .output = output,
                           .expert_ids = ids,
                           .expert_weights = weights};
    const uint64_t launches = faults.launches;
    faults.fill_stream = NULL, faults.only = "stream_wait", faults.fail_at = 1, faults.calls = 0;
    assert_int_equal(megamoe_layer_run(layer, &batch, &stream), MEGAMOE_OK);
    assert_ptr_equal(faults.fill_stream, &stream);
    for (size_t i = 0; i < 4 * BYTES; i++) assert_int_equal(hidden[i], i >= 2 * BYTES && i < 3 * BYTES ? 0 : 0xAA);
    memset(host_output, 0x7F, sizeof host_output);
    batch.hidden = host_hidden, batch.output = host_output;
    assert_int_equal(megamoe_layer_run(layer, &batch, NULL), MEGAMOE_OK);
    assert_memory_equal(host_output, host_hidden, sizeof host_output);
    batch.token_count = 0;
    assert_int_equal(megamoe_layer_run(layer, &batch, &stream), MEGAMOE_OK);
    assert_int_equal(faults.launches, launches);
    begin();
    faults.only = "fill", faults.fail_at = 1;
    batch.token_count = TOKENS, batch.hidden = hidden, batch.output = output;
    assert_int_equal(megamoe_layer_run(layer, &batch, &stream), MEGAMOE_DEVICE_ERROR);
    begin();
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    table->memory_free(memory);
    table->memory_free(s.memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_chunks_arrive),
        cmocka_unit_test(pitched_rows_arrive),
        cmocka_unit_test(loading_stops_at_any_chunk),
        cmocka_unit_test(device_tensors_are_borrowed),
        cmocka_unit_test(zero_output),
    };
    table = faulty_driver_install();
    if (!table) return fprintf(stderr, "no fake driver: %s\n", megamoe_error_message()), 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    made_layer_close(large_layer());
    free(large_layer()->pool);
    return failed;
}
