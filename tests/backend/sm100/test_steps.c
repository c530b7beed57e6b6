/*
 * The routed experts in steps (docs/decisions/0050), as an engine calls them: with weights, batch and partial rows in
 * device memory, on the fake driver (sm100), or in host memory (sm100-model). What must hold is equality, bit for bit:
 * of the steps with the whole, of both with megamoe_layer_run, of weights wherever they lie, of a replay with a run.
 */
#include <dlfcn.h>

#include "api/api.h"
#include "fake_capture.h"

enum { TOKENS_MAX = 150 };

/* ---- memory of the device ------------------------------------------------------------------------------- */

static void *driver; /* the fake one; NULL: the backend takes host memory */

static void *driver_function(const char *name) {
    void *found = dlsym(driver, name);
    if (!found) fail_msg("the driver has no %s", name);
    return found;
}

/* Memory of the fake GPU is the model's, and so can be read and written here, too. */
static void *device_memory(size_t bytes) {
    int (*allocate)(unsigned long long *, size_t);
    unsigned long long memory = 0;
    if (!driver) return api_alloc(bytes);
    *(void **)&allocate = driver_function("cuMemAlloc_v2");
    assert_int_equal(allocate(&memory, bytes), 0);
    return (void *)(uintptr_t)memory;
}

static void *to_device(const void *data, size_t bytes) {
    void *copy = device_memory(bytes);
    memcpy(copy, data, bytes);
    return copy;
}

/* ---- layers --------------------------------------------------------------------------------------------- */

static void move(megamoe_tensor *tensor, size_t bytes) {
    tensor->data = to_device(tensor->data, bytes);
}

/* The same layer with everything in device memory. */
static megamoe_layer_desc on_device(const megamoe_layer_desc *desc) {
    megamoe_layer_desc moved = *desc;
    megamoe_projection *const projections[3] = {&moved.gate, &moved.up, &moved.down};
    size_t experts = desc->shape.expert_count, values = experts * desc->shape.hidden * desc->shape.intermediate;
    for (int p = 0; p < 3; p++) {
        move(&projections[p]->codes, values / 2);
        move(&projections[p]->scales, values / desc->shape.group_size);
        if (projections[p]->global.data) move(&projections[p]->global, experts * sizeof(float));
        if (projections[p]->input_global.data) move(&projections[p]->input_global, experts * sizeof(float));
    }
    return moved;
}

static megamoe_shape shape_of(uint32_t hidden, uint32_t intermediate, uint32_t experts, uint32_t slots) {
    megamoe_shape shape = api_shape(hidden, intermediate, experts, slots);
    shape.group_size = 16;
    shape.swiglu_limit = 7.0f;
    return shape;
}

/* MXFP4 over the same codes: E8M0 scales within twelve octaves, and no globals. */
static void make_mxfp4(api_layer *l) {
    megamoe_projection *const projections[3] = {&l->desc.gate, &l->desc.up, &l->desc.down};
    size_t values = (size_t)l->desc.shape.expert_count * l->desc.shape.hidden * l->desc.shape.intermediate;
    uint32_t seed = 77;
    l->desc.shape.group_size = 32;
    for (int p = 0; p < 3; p++) {
        for (size_t i = 0; i < values / 32; i++) l->scales[p][i] = (uint8_t)(115 + api_random(&seed) % 12);
        projections[p]->scales.dtype = MEGAMOE_E8M0;
        projections[p]->scales.extent[2] /= 2;
        projections[p]->global = projections[p]->input_global = (megamoe_tensor){0};
    }
}

/* ---- batches -------------------------------------------------------------------------------------------- */

struct batch {
    megamoe_batch batch;
    uint16_t *hidden, *output;
    int32_t *ids;
    float *weights;
    size_t pairs, values;
};

/* Experts unevenly: the first gets half of all slots, the last none; some slots are skipped. */
static void fill_batch(struct batch *b, const megamoe_shape *s, uint32_t seed) {
    for (size_t i = 0; i < b->values; i++) { /* from -4 to 4, in steps of 1/16 */
        float value = (float)((int)(api_random(&seed) % 129) - 64) / 16.0f;
        b->hidden[i] = api_to_bf16(value);
    }
    for (size_t i = 0; i < b->pairs; i++) {
        uint32_t k = (uint32_t)(i % s->experts_per_token), busy = s->expert_count > 1 ? s->expert_count - 1 : 1;
        b->ids[i] = (int32_t)(k == 0 ? 0 : 1 + (api_random(&seed) % busy + k) % busy);
        if (i > 0 && (b->ids[i] + 1 >= (int32_t)s->expert_count || api_random(&seed) % 7 == 0)) b->ids[i] = -1;
        b->weights[i] = 0.05f + (float)(api_random(&seed) % 64) / 100.0f;
    }
    memset(b->output, 0xAA, b->values * sizeof *b->output);
}

static struct batch make_batch(const megamoe_shape *s, uint32_t tokens, uint32_t seed) {
    struct batch b = {.pairs = (size_t)tokens * s->experts_per_token, .values = (size_t)tokens * s->hidden};
    b.hidden = device_memory(b.values * sizeof *b.hidden);
    b.output = device_memory(b.values * sizeof *b.output);
    b.ids = device_memory(b.pairs * sizeof *b.ids);
    b.weights = device_memory(b.pairs * sizeof *b.weights);
    fill_batch(&b, s, seed);
    b.batch = (megamoe_batch){.struct_size = sizeof b.batch,
                              .token_count = tokens,
                              .hidden = b.hidden,
                              .output = b.output,
                              .expert_ids = b.ids,
                              .expert_weights = b.weights};
    return b;
}

/* What the batch's output is after a call, which is made on a poisoned one. */
typedef megamoe_status call(megamoe_layer *, const megamoe_batch *, void *);

static uint16_t *output_of(call *function, megamoe_layer *layer, const struct batch *b) {
    uint16_t *copy = api_alloc(b->values * sizeof *copy);
    memset(b->output, 0xAA, b->values * sizeof *b->output);
    assert_ok(function(layer, &b->batch, NULL));
    memcpy(copy, b->output, b->values * sizeof *copy);
    return copy;
}

static void assert_same(const struct batch *b, const uint16_t *got, const uint16_t *want) {
    for (size_t i = 0; i < b->values; i++)
        if (got[i] != want[i]) fail_msg("value %zu is %04x, not %04x", i, got[i], want[i]);
}

/* ---- tests ---------------------------------------------------------------------------------------------- */

static uint16_t nearest_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* numerics.md, combine: the slots in order, in fp32, one rounding. */
static uint16_t combined(const struct batch *b, const megamoe_shape *s, const uint16_t *rows, size_t value) {
    size_t token = value / s->hidden, column = value % s->hidden;
    float sum = 0.0f;
    for (size_t k = 0; k < s->experts_per_token; k++) {
        size_t pair = token * s->experts_per_token + k;
        if (b->ids[pair] >= 0) sum += b->weights[pair] * api_from_bf16(rows[pair * s->hidden + column]);
    }
    return nearest_bf16(sum);
}

static void check_steps(megamoe_layer *layer, const megamoe_shape *s, uint32_t tokens) {
    struct batch b = make_batch(s, tokens, 3 + tokens);
    size_t count = b.pairs * s->hidden;
    uint16_t *rows = device_memory(count * sizeof *rows);
    float *exact = device_memory(count * sizeof *exact);
    megamoe_tensor bf16 = api_tensor(rows, MEGAMOE_BF16, 2, (int64_t)b.pairs, s->hidden, 0);
    megamoe_tensor f32 = api_tensor(exact, MEGAMOE_F32, 2, (int64_t)b.pairs, s->hidden, 0);
    memset(rows, 0xAA, count * sizeof *rows);
    memset(exact, 0xAA, count * sizeof *exact);
    assert_ok(megamoe_stage_activation(layer, &b.batch, NULL));
    assert_ok(megamoe_nvfp4_mega_moe_l1(layer, &b.batch, NULL));
    assert_ok(megamoe_nvfp4_mega_moe_l2(layer, &b.batch, &bf16, NULL));
    assert_ok(megamoe_nvfp4_mega_moe_l2(layer, &b.batch, &f32, NULL));
    for (size_t i = 0; i < b.values; i++) assert_int_equal(b.output[i], 0xAAAA); /* nobody has combined yet */
    const uint16_t *full = output_of(megamoe_nvfp4_mega_moe_full, layer, &b);
    assert_same(&b, output_of(megamoe_layer_run, layer, &b), full);
    bool nonzero = false;
    for (size_t i = 0; i < b.values; i++) {
        if (combined(&b, s, rows, i) != full[i]) fail_msg("token value %zu: the steps differ from the whole", i);
        nonzero = nonzero || (full[i] & 0x7FFF);
    }
    for (size_t i = 0; i < count; i++) { /* rows of skipped slots stay as they were */
        bool skipped = b.ids[i / s->hidden] < 0;
        assert_int_equal(rows[i], skipped ? 0xAAAA : nearest_bf16(exact[i]));
    }
    assert_true(nonzero);
}

static void steps_make_the_layer(void **state) {
    static const uint32_t sizes[][4] = {{96, 80, 3, 2}, {256, 128, 5, 3}, {144, 64, 4, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        megamoe_shape s = shape_of(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3]);
        api_layer l = api_layer_random(s, 5 + (uint32_t)i);
        megamoe_layer_desc desc = on_device(&l.desc);
        megamoe_device *device = api_device(TOKENS_MAX);
        megamoe_layer *layer = NULL;
        assert_ok(megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, NULL, NULL, &layer));
        check_steps(layer, &s, 1);
        check_steps(layer, &s, 9);
        check_steps(layer, &s, TOKENS_MAX); /* of an expert: more than a small tile holds */
        struct batch none = make_batch(&s, 0, 1);
        assert_ok(megamoe_nvfp4_mega_moe_full(layer, &none.batch, NULL));
        megamoe_layer_close(layer);
        megamoe_device_close(device);
    }
}

/* Byte 16 (r % 32) + 4 (r / 32) + g of the block of row r and group g, as the header says. */
static void check_scales(const megamoe_projection *got, const megamoe_projection *given, const char *name) {
    int64_t rows = given->scales.extent[1], groups = given->scales.extent[2], blocks = (groups + 3) / 4;
    int64_t stripes = (rows + 127) / 128;
    const uint8_t *mma = got->scales.data, *plain = given->scales.data;
    assert_int_equal(got->scales.extent[1], stripes);
    assert_int_equal(got->scales.extent[2], blocks);
    for (int64_t e = 0; e < given->scales.extent[0]; e++)
        for (int64_t r = 0; r < stripes * 128; r++)
            for (int64_t g = 0; g < blocks * 4; g++) {
                int64_t block = (e * stripes + r / 128) * blocks + g / 4;
                int64_t at = block * 512 + 16 * (r % 32) + 4 * (r % 128 / 32) + g % 4;
                uint8_t want = r < rows && g < groups ? plain[(e * rows + r) * groups + g] : 0;
                if (mma[at] != want) fail_msg("%s: expert %d, row %d, group %d", name, (int)e, (int)r, (int)g);
            }
}

static void check_operands(const megamoe_projection *got, const megamoe_projection *given, const char *name,
                           bool lent) {
    const float *alphas = got->global.data, *globals = given->global.data;
    if ((got->codes.data == given->codes.data) != lent) fail_msg("%s: codes were %s", name, lent ? "copied" : "lent");
    for (int64_t e = 0; e < given->codes.extent[0]; e++) assert_true(alphas[e] == globals[e]);
    for (int64_t r = 0; r < given->codes.extent[0] * given->codes.extent[1]; r++) {
        const uint8_t *row = (const uint8_t *)got->codes.data + r * got->codes.stride[1];
        size_t bytes = (size_t)given->codes.extent[2] / 2;
        assert_memory_equal(row, (const uint8_t *)given->codes.data + (size_t)r * bytes, bytes);
    }
    check_scales(got, given, name);
}

/* Codes stay where they are if tensor copies can read them there; scales are rearranged and alphas are unfolded. */
static void transform_says_what_it_made(void **state) {
    (void)state;
    for (int odd = 0; odd < 2; odd++) {
        megamoe_shape s = odd ? shape_of(48, 80, 3, 2) : shape_of(160, 96, 3, 2); /* rows of 24 bytes, or of 80 */
        api_layer l = api_layer_random(s, 9);
        megamoe_layer_desc desc = on_device(&l.desc);
        megamoe_device *device = api_device(8);
        megamoe_layer *layer = NULL;
        megamoe_mega_moe_weights w = {.struct_size = sizeof w};
        assert_ok(megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, NULL, &w, &layer));
        check_operands(&w.gate, &desc.gate, "gate", driver && !odd);
        check_operands(&w.up, &desc.up, "up", driver && !odd);
        check_operands(&w.down, &desc.down, "down", driver && !odd);
        check_steps(layer, &s, 7);
        megamoe_layer_close(layer);
        megamoe_device_close(device);
    }
}

/* One stack [E, 2I, K], gate above up, as engines hold it. */
static void stack_gate_and_up(megamoe_layer_desc *desc, const api_layer *l) {
    const megamoe_shape *s = &desc->shape;
    size_t codes = (size_t)s->intermediate * s->hidden / 2, scales = codes / 8;
    uint8_t *all = device_memory(2 * s->expert_count * codes),
            *all_scales = device_memory(2 * s->expert_count * scales);
    for (uint32_t e = 0; e < 2 * s->expert_count; e++) {
        memcpy(all + e * codes, l->codes[e % 2] + e / 2 * codes, codes);
        memcpy(all_scales + e * scales, l->scales[e % 2] + e / 2 * scales, scales);
    }
    desc->gate.codes.data = all, desc->gate.scales.data = all_scales;
    desc->up.codes.data = all + codes, desc->up.scales.data = all_scales + scales;
    megamoe_tensor *const tensors[4] = {&desc->gate.codes, &desc->up.codes, &desc->gate.scales, &desc->up.scales};
    for (int i = 0; i < 4; i++) {
        tensors[i]->stride[0] = 2 * (int64_t)(i < 2 ? codes : scales);
        tensors[i]->stride[1] = i < 2 ? s->hidden / 2 : s->hidden / 16;
        tensors[i]->stride[2] = 1;
    }
}

/* Wherever the weights lie, the layer is the same: host memory, device memory, one stack; NVFP4 and MXFP4. */
static void weights_may_lie_anywhere(void **state) {
    (void)state;
    for (int mxfp4 = 0; mxfp4 < 2; mxfp4++) {
        megamoe_shape s = shape_of(192, 160, 4, 2);
        api_layer l = api_layer_random(s, 21);
        if (mxfp4) make_mxfp4(&l);
        megamoe_layer_desc descs[3] = {l.desc, on_device(&l.desc), on_device(&l.desc)};
        if (!mxfp4) stack_gate_and_up(&descs[2], &l);
        struct batch b = make_batch(&s, 33, 4);
        const uint16_t *outputs[3];
        megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
        for (int i = 0; i < 3; i++) {
            megamoe_device *device = api_device(33);
            megamoe_layer *layer = NULL;
            assert_ok(megamoe_layer_create(device, &descs[i], &options, &layer));
            outputs[i] = output_of(megamoe_layer_run, layer, &b);
            assert_same(&b, output_of(megamoe_nvfp4_mega_moe_full, layer, &b), outputs[i]); /* on these kernels */
            megamoe_layer_close(layer);
            megamoe_device_close(device);
        }
        assert_same(&b, outputs[1], outputs[0]);
        assert_same(&b, outputs[2], outputs[0]);
    }
}

static void assert_refused(megamoe_status got, megamoe_status want, const char *words) {
    assert_int_equal(got, want);
    if (!strstr(megamoe_error_message(), words)) fail_msg("%s", megamoe_error_message());
}

static void wrong_calls_are_refused(void **state) {
    (void)state;
    megamoe_shape s = shape_of(96, 64, 3, 2);
    api_layer l = api_layer_random(s, 2);
    megamoe_layer_desc desc = on_device(&l.desc);
    megamoe_device *device = api_device(4);
    megamoe_layer *layer = NULL, *other = (megamoe_layer *)&l;
    megamoe_mega_moe_weights old = {.struct_size = 8};
    megamoe_layer_options bf16 = api_options(MEGAMOE_ACTIVATIONS_BF16);
    assert_refused(megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, NULL, &old, &other),
                   MEGAMOE_INVALID_ARGUMENT, "struct_size");
    megamoe_status plain = megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, &bf16, NULL, &other);
    assert_refused(plain, driver ? MEGAMOE_UNSUPPORTED_DEVICE : MEGAMOE_UNSUPPORTED_MODEL, "nvfp4 activations");
    assert_ptr_equal(other, &l);
    assert_ok(megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, NULL, NULL, &layer));
    struct batch b = make_batch(&s, 4, 1), many = make_batch(&s, 5, 1);
    megamoe_batch unrouted = b.batch, host = b.batch;
    megamoe_tensor few = api_tensor(b.output, MEGAMOE_BF16, 2, 3, s.hidden, 0);
    unrouted.expert_ids = NULL;
    assert_refused(megamoe_stage_activation(layer, &unrouted, NULL), MEGAMOE_INVALID_ARGUMENT, "does not route");
    assert_refused(megamoe_nvfp4_mega_moe_l1(layer, &many.batch, NULL), MEGAMOE_INVALID_ARGUMENT, "max_tokens 4");
    assert_refused(megamoe_nvfp4_mega_moe_l2(layer, &b.batch, &few, NULL), MEGAMOE_INVALID_ARGUMENT, "[8, 96]");
    assert_refused(megamoe_nvfp4_mega_moe_l2(layer, &b.batch, NULL, NULL), MEGAMOE_INVALID_ARGUMENT, "partials");
    host.hidden = l.codes[0];
    if (driver)
        assert_refused(megamoe_nvfp4_mega_moe_full(layer, &host, NULL), MEGAMOE_INVALID_ARGUMENT, "device memory");
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

/* ---- in a graph ----------------------------------------------------------------------------------------- */

static megamoe_layer *graph_layer;
static megamoe_tensor graph_partials;

static megamoe_status three_steps(megamoe_layer *layer, const megamoe_batch *batch, void *stream) {
    megamoe_status status = megamoe_stage_activation(layer, batch, stream);
    if (status == MEGAMOE_OK) status = megamoe_nvfp4_mega_moe_l1(layer, batch, stream);
    if (status == MEGAMOE_OK) status = megamoe_nvfp4_mega_moe_l2(layer, batch, &graph_partials, stream);
    return status;
}

/* A call is captured once, waits for nothing while it is, and then follows what stands in its memory. */
static void check_graph(call *function, struct batch *b, const megamoe_shape *s, unsigned launches_expected) {
    void (*begin)(void *);
    const char *(*end)(unsigned *);
    int (*replay)(void);
    static char stream;
    unsigned launches = 0;
    size_t row_bytes = b->pairs * s->hidden * sizeof(uint16_t);
    *(void **)&begin = driver_function("fake_capture_begin");
    *(void **)&end = driver_function("fake_capture_end");
    *(void **)&replay = driver_function("fake_replay");
    memset(b->output, 0xAA, b->values * sizeof *b->output);
    begin(&stream);
    megamoe_status status = function(graph_layer, &b->batch, &stream);
    const char *call_refused = end(&launches);
    if (call_refused) fail_msg("the call cannot be captured: %s", call_refused);
    assert_ok(status);
    assert_int_equal(launches, launches_expected);
    for (size_t i = 0; i < b->values; i++) assert_int_equal(b->output[i], 0xAAAA); /* kept, not run */
    for (uint32_t seed = 50; seed < 53; seed++) {
        void *replayed = api_alloc(row_bytes);
        uint16_t *output = api_alloc(b->values * sizeof *output);
        fill_batch(b, s, seed);
        memset(graph_partials.data, 0xAA, row_bytes);
        assert_true(replay());
        memcpy(replayed, graph_partials.data, row_bytes);
        memcpy(output, b->output, b->values * sizeof *output);
        memset(graph_partials.data, 0xAA, row_bytes);
        memset(b->output, 0xAA, b->values * sizeof *b->output);
        assert_ok(function(graph_layer, &b->batch, NULL));
        assert_same(b, output, b->output);
        assert_memory_equal(replayed, graph_partials.data, row_bytes);
    }
}

static void graphs_hold_every_call(void **state) {
    (void)state;
    megamoe_shape s = shape_of(96, 80, 5, 2);
    api_layer l = api_layer_random(s, 31);
    megamoe_layer_desc desc = on_device(&l.desc);
    megamoe_device *device = api_device(40);
    assert_ok(megamoe_transform_nvfp4_weights_for_mega_moe(device, &desc, NULL, NULL, &graph_layer));
    struct batch b = make_batch(&s, 40, 6);
    void *rows = device_memory(b.pairs * s.hidden * sizeof(uint16_t));
    graph_partials = api_tensor(rows, MEGAMOE_BF16, 2, (int64_t)b.pairs, s.hidden, 0);
    check_graph(megamoe_nvfp4_mega_moe_full, &b, &s, 5);
    check_graph(three_steps, &b, &s, 4);
    check_graph(megamoe_layer_run, &b, &s, 5);
    megamoe_layer_close(graph_layer);
    megamoe_device_close(device);
}

/* The capture sees what it is there to see: a batch in host memory is copied and waited for. */
static void host_batches_cannot_be_captured(void **state) {
    void (*begin)(void *);
    const char *(*end)(unsigned *);
    static char stream;
    unsigned launches;
    (void)state;
    megamoe_shape s = shape_of(96, 80, 5, 2);
    api_layer l = api_layer_random(s, 31);
    megamoe_device *device = api_device(4);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
    megamoe_layer *layer = api_create(device, &l, &options);
    struct batch b = make_batch(&s, 4, 6);
    b.batch.hidden = api_alloc(b.values * sizeof *b.hidden);
    b.batch.output = api_alloc(b.values * sizeof *b.output);
    *(void **)&begin = driver_function("fake_capture_begin");
    *(void **)&end = driver_function("fake_capture_end");
    begin(&stream);
    assert_int_equal(megamoe_layer_run(layer, &b.batch, &stream), MEGAMOE_DEVICE_ERROR);
    assert_string_equal(end(&launches), "cuMemcpyHtoDAsync");
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

/* A backend without these kernels says so, and what to do instead. */
static void other_backends_have_no_steps(void **state) {
    (void)state;
    megamoe_shape s = shape_of(64, 64, 2, 1);
    api_layer l = api_layer_random(s, 3);
    const megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_CPU, .max_tokens = 4};
    megamoe_device *device = NULL;
    megamoe_layer *layer = NULL, *made = NULL;
    struct batch b = make_batch(&s, 4, 2);
    assert_ok(megamoe_device_open(&options, &device));
    assert_refused(megamoe_transform_nvfp4_weights_for_mega_moe(device, &l.desc, NULL, NULL, &made),
                   MEGAMOE_UNSUPPORTED_DEVICE, "the cpu backend has no mega-MoE kernels");
    assert_null(made);
    assert_ok(megamoe_layer_create(device, &l.desc, NULL, &layer));
    assert_refused(megamoe_nvfp4_mega_moe_full(layer, &b.batch, NULL), MEGAMOE_UNSUPPORTED_DEVICE, "sm100");
    megamoe_layer_close(layer);
    megamoe_device_close(device);
}

static int forget(void **state) {
    (void)state;
    api_free_all(); /* the fake GPU's memory goes with the process */
    return 0;
}

#define TEST(function) cmocka_unit_test_teardown(function, forget)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {TEST(steps_make_the_layer), TEST(transform_says_what_it_made),
                                       TEST(weights_may_lie_anywhere), TEST(wrong_calls_are_refused),
                                       TEST(other_backends_have_no_steps)};
    const struct CMUnitTest graphs[] = {TEST(graphs_hold_every_call), TEST(host_batches_cannot_be_captured)};
    bool model = argc > 1 && strcmp(argv[1], "sm100-model") == 0;
    api_backend = model ? MEGAMOE_SM100_ON_MODEL : MEGAMOE_SM100;
    if (model) return cmocka_run_group_tests(tests, NULL, NULL);
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return printf("no fake driver: %s\n", dlerror()), 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + cmocka_run_group_tests(graphs, NULL, NULL);
}
