/*
 * What megamoe.h promises whatever the numbers: arguments are checked, a failure says why and leaves results
 * as they were, sizes at the edges work, and one bad token does not touch another.
 */
#include "api.h"

#define H 96u
#define I 80u
#define E 5u
#define K 3u
#define T 7u

typedef struct fixture {
    api_layer weights;
    megamoe_device *device;
    megamoe_layer *layer;
    uint16_t *hidden, *output;
    int32_t ids[T * K];
    float route_weights[T * K];
    megamoe_batch batch;
} fixture;

static int set_up_with(void **state, megamoe_activations activations) {
    megamoe_layer_options options = api_options(activations);
    fixture *f = api_alloc(sizeof *f);
    uint32_t seed = 77;
    memset(f, 0, sizeof *f);
    f->weights = api_layer_random(api_shape(H, I, E, K), 5);
    f->device = api_device(T);
    f->layer = api_create(f->device, &f->weights, &options);
    f->hidden = api_alloc(T * H * sizeof *f->hidden);
    f->output = api_alloc(T * H * sizeof *f->output);
    for (size_t i = 0; i < T * H; i++)
        f->hidden[i] = (uint16_t)((api_random(&seed) & 0x807F) | (0x3E00 + ((i * 7) % 3 << 7)));
    for (int32_t i = 0; i < (int32_t)(T * K); i++) {
        f->ids[i] = (i + i / (int32_t)K) % (int32_t)E;
        f->route_weights[i] = 0.11f * (float)(1 + i % 4);
    }
    f->batch = (megamoe_batch){.struct_size = sizeof f->batch,
                               .token_count = T,
                               .hidden = f->hidden,
                               .output = f->output,
                               .expert_ids = f->ids,
                               .expert_weights = f->route_weights};
    *state = f;
    return 0;
}

static int set_up(void **state) {
    return set_up_with(state, MEGAMOE_ACTIVATIONS_BF16);
}

static int set_up_nvfp4(void **state) {
    return set_up_with(state, MEGAMOE_ACTIVATIONS_NVFP4);
}

static int tear_down(void **state) {
    fixture *f = *state;
    megamoe_layer_close(f->layer);
    megamoe_device_close(f->device);
    return 0;
}

/* The call must fail with `status` and a sentence that contains `words`. */
static void expect_failure(megamoe_status got, megamoe_status status, const char *words) {
    if (got != status || !strstr(megamoe_error_message(), words))
        fail_msg("%s \"%s\", expected %s with \"%s\"", megamoe_status_name(got), megamoe_error_message(),
                 megamoe_status_name(status), words);
}

static void names_and_version(void **state) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", MEGAMOE_VERSION_MAJOR, MEGAMOE_VERSION_MINOR, MEGAMOE_VERSION_PATCH);
    assert_string_equal(megamoe_version(), version);
    assert_string_equal(megamoe_status_name(MEGAMOE_OK), "MEGAMOE_OK");
    assert_string_equal(megamoe_status_name(MEGAMOE_CORRUPT_FILE), "MEGAMOE_CORRUPT_FILE");
    assert_string_equal(megamoe_status_name(MEGAMOE_CANCELLED), "MEGAMOE_CANCELLED");
    (void)state;
}

static void close_accepts_null(void **state) {
    megamoe_layer_close(NULL);
    megamoe_device_close(NULL);
    megamoe_checkpoint_close(NULL);
    (void)state;
}

static void opening_checks_its_arguments(void **state) {
    megamoe_device_options options = {.struct_size = sizeof options, .backend = api_backend, .max_tokens = 1};
    megamoe_device *const untouched = (megamoe_device *)&options;
    megamoe_device *device = untouched;
    const megamoe_status bad = MEGAMOE_INVALID_ARGUMENT;
    expect_failure(megamoe_device_open(NULL, &device), bad, "NULL");
    expect_failure(megamoe_device_open(&options, NULL), bad, "NULL");
    options.struct_size--;
    expect_failure(megamoe_device_open(&options, &device), bad, "struct_size");
    options.struct_size = 0;
    expect_failure(megamoe_device_open(&options, &device), bad, "struct_size");
    options.struct_size = sizeof options;
    options.max_tokens = 0;
    expect_failure(megamoe_device_open(&options, &device), bad, "max_tokens");
    options.max_tokens = 1;
    options.backend = (megamoe_backend)99;
    expect_failure(megamoe_device_open(&options, &device), bad, "99");
    assert_ptr_equal(device, untouched);
    (void)state;
}

static void layers_check_their_arguments(void **state) {
    fixture *f = *state;
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer_desc desc = f->weights.desc;
    megamoe_layer *layer = f->layer;
    const megamoe_status bad = MEGAMOE_INVALID_ARGUMENT;
    expect_failure(megamoe_layer_create(NULL, &desc, &options, &layer), bad, "device");
    expect_failure(megamoe_layer_create(f->device, NULL, &options, &layer), bad, "desc");
    expect_failure(megamoe_layer_create(f->device, &desc, &options, NULL), bad, "NULL");
    expect_failure(megamoe_layer_load(f->device, NULL, 0, &options, &layer), bad, "checkpoint");
    desc.struct_size += 8;
    expect_failure(megamoe_layer_create(f->device, &desc, &options, &layer), bad, "struct_size");
    desc = f->weights.desc;
    options.struct_size = 3;
    expect_failure(megamoe_layer_create(f->device, &desc, &options, &layer), bad, "struct_size");
    options = api_options((megamoe_activations)7);
    expect_failure(megamoe_layer_create(f->device, &desc, &options, &layer), bad, "activations 7");
    assert_ptr_equal(layer, f->layer);
}

/* Each is a mistake in the caller's tensors that must be found before anything is computed. */
static void layers_check_their_tensors(void **state) {
    fixture *f = *state;
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    const megamoe_layer_desc good = f->weights.desc;
    megamoe_layer_desc desc;
    megamoe_layer *layer = f->layer;
#define REFUSED(change, words)                                                                                         \
    do {                                                                                                               \
        desc = good;                                                                                                   \
        change;                                                                                                        \
        megamoe_status status_ = megamoe_layer_create(f->device, &desc, &options, &layer);                             \
        assert_true(status_ == MEGAMOE_INVALID_ARGUMENT || status_ == MEGAMOE_UNSUPPORTED_MODEL);                      \
        expect_failure(status_, status_, words);                                                                       \
    } while (0)
    REFUSED(desc.up.codes.data = NULL, "up");
    REFUSED(desc.gate.codes.data = NULL, "gate");
    REFUSED(desc.down.codes.extent[1] = H - 16, "down");
    REFUSED(desc.gate.scales.extent[2] = H / 16 - 1, "gate");
    REFUSED(desc.gate.scales.data = NULL, "gate");
    REFUSED(desc.down.codes.dtype = MEGAMOE_F32, "down");
    REFUSED(desc.up.scales.dtype = MEGAMOE_F32, "up");
    REFUSED(desc.up.global.data = NULL, "up");
    REFUSED(desc.up.global.extent[0] = E - 1, "global");
    REFUSED(desc.up.global.dtype = MEGAMOE_BF16, "global");
    REFUSED(desc.shape.hidden = H + 8, "16");
    REFUSED(desc.shape.experts_per_token = E + 1, "experts per token");
    REFUSED(desc.shape.experts_per_token = 0, "experts per token");
    REFUSED(desc.shape.swiglu_limit = -1.0f, "swiglu_limit");
    REFUSED(desc.shape.swiglu_limit = NAN, "swiglu_limit");
    REFUSED(desc.shape.swiglu_limit = INFINITY, "swiglu_limit");
    REFUSED(f->weights.globals[1][3] = NAN, "expert 3");
#undef REFUSED
    assert_ptr_equal(layer, f->layer);
}

static void runs_check_their_arguments(void **state) {
    fixture *f = *state;
    const megamoe_status bad = MEGAMOE_INVALID_ARGUMENT;
    megamoe_batch batch = f->batch;
    expect_failure(megamoe_layer_run(NULL, &batch, NULL), bad, "layer");
    expect_failure(megamoe_layer_run(f->layer, NULL, NULL), bad, "batch");
    batch.struct_size = 1;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "struct_size");
    batch = f->batch;
    batch.token_count = T + 1;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "max_tokens 7");
    batch = f->batch;
    batch.hidden = NULL;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "hidden");
    batch = f->batch;
    batch.output = NULL;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "output");
    batch = f->batch;
    batch.output = f->hidden;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "overlap");
    batch = f->batch;
    batch.expert_weights = NULL;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "expert_weights");
    batch = f->batch;
    batch.expert_ids = NULL;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "router");
    batch = f->batch;
    batch.hidden_dtype = MEGAMOE_F16;
    expect_failure(megamoe_layer_run(f->layer, &batch, NULL), bad, "dtype");
    for (size_t i = 0; i < T * H; i++) assert_int_equal(f->output[i], 0xAAAA); /* nothing was written */
}

/* Bad ids are refused by name before any work, or skipped and counted when the caller asks for that. */
/* Only a GPU has a clock of its own; what is wrong with the arguments is said before that is. */
static void times_check_their_arguments(void **state) {
    fixture *f = *state;
    megamoe_times times = {.struct_size = sizeof times};
    assert_int_equal(megamoe_layer_time(NULL, &f->batch, 1, &times), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_layer_time(f->layer, NULL, 1, &times), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_layer_time(f->layer, &f->batch, 1, NULL), MEGAMOE_INVALID_ARGUMENT);
    times.struct_size = 1;
    assert_int_equal(megamoe_layer_time(f->layer, &f->batch, 1, &times), MEGAMOE_INVALID_ARGUMENT);
    times.struct_size = sizeof times;
    assert_int_equal(megamoe_layer_time(f->layer, &f->batch, 1, &times), MEGAMOE_UNSUPPORTED_DEVICE);
}

static void bad_ids(void **state) {
    fixture *f = *state;
    static const int32_t bad[] = {E, 1000004, INT32_MIN, -2};
    uint16_t *expected;
    megamoe_counters counters = {.struct_size = sizeof counters};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        char words[64];
        f->ids[4] = bad[i]; /* token 1, slot 1 */
        snprintf(words, sizeof words, "token 1, slot 1 has expert id %d", (int)bad[i]);
        expect_failure(megamoe_layer_run(f->layer, &f->batch, NULL), MEGAMOE_INVALID_ARGUMENT, words);
    }
    assert_int_equal(f->output[0], 0xAAAA);
    f->ids[4] = -1;
    expected = api_run(f->layer, &f->weights.desc.shape, T, f->hidden, f->ids, f->route_weights);
    f->ids[4] = 1000004;
    f->batch.allow_bad_routing = true;
    assert_ok(megamoe_layer_run(f->layer, &f->batch, NULL));
    assert_memory_equal(f->output, expected, T * H * 2);
    assert_ok(megamoe_layer_counters(f->layer, &counters, NULL));
    assert_int_equal(counters.bad_slots, 1);
    assert_int_equal(counters.skipped_slots, 1);
    assert_int_equal(counters.tokens, 2 * T);
}

static void skipped_slots(void **state) {
    fixture *f = *state;
    uint16_t *all, *some;
    uint64_t per_expert[E];
    megamoe_counters counters = {.struct_size = sizeof counters};
    all = api_run(f->layer, &f->weights.desc.shape, T, f->hidden, f->ids, f->route_weights);
    for (unsigned k = 0; k < K; k++) f->ids[2 * K + k] = -1; /* token 2: nothing at all */
    some = api_run(f->layer, &f->weights.desc.shape, T, f->hidden, f->ids, f->route_weights);
    for (size_t t = 0; t < T; t++)
        for (size_t n = 0; n < H; n++) assert_int_equal(some[t * H + n], t == 2 ? 0 : all[t * H + n]); /* +0, not -0 */
    assert_ok(megamoe_layer_counters(f->layer, &counters, per_expert));
    assert_int_equal(counters.skipped_slots, K);
    assert_int_equal(per_expert[0] + per_expert[1] + per_expert[2] + per_expert[3] + per_expert[4], 2 * T * K - K);
}

static void empty_batch(void **state) {
    fixture *f = *state;
    const megamoe_batch empty = {.struct_size = sizeof empty, .expert_ids = f->ids, .expert_weights = f->route_weights};
    assert_ok(megamoe_layer_run(f->layer, &empty, NULL));
    assert_ok(megamoe_layer_run(f->layer, &f->batch, NULL));
}

/* A token's bits depend on nothing but itself: alone, elsewhere in the batch, a second time. */
static void position_does_not_matter(void **state) {
    fixture *f = *state;
    const megamoe_shape *shape = &f->weights.desc.shape;
    uint16_t *all = api_run(f->layer, shape, T, f->hidden, f->ids, f->route_weights);
    uint16_t *again = api_run(f->layer, shape, T, f->hidden, f->ids, f->route_weights), *turned;
    uint16_t hidden[T * H];
    int32_t ids[T * K];
    float weights[T * K];
    assert_memory_equal(all, again, T * H * 2);
    for (size_t t = 0; t < T; t++) {
        size_t from = T - 1 - t;
        memcpy(hidden + t * H, f->hidden + from * H, H * 2);
        memcpy(ids + t * K, f->ids + from * K, K * sizeof *ids);
        memcpy(weights + t * K, f->route_weights + from * K, K * sizeof *weights);
    }
    turned = api_run(f->layer, shape, T, hidden, ids, weights);
    for (size_t t = 0; t < T; t++) assert_memory_equal(turned + t * H, all + (T - 1 - t) * H, H * 2);
}

/* A NaN or an infinity spoils its own token and no other; in nvfp4 mode its block is counted. */
static void nonfinite_tokens_stay_alone(void **state) {
    fixture *f = *state;
    const megamoe_shape *shape = &f->weights.desc.shape;
    static const uint16_t specials[] = {0x7FC0, 0x7F80, 0xFF80};
    uint16_t *clean = api_run(f->layer, shape, T, f->hidden, f->ids, f->route_weights);
    for (unsigned i = 0; i < 3; i++) {
        uint16_t kept = f->hidden[3 * H + 17], *output;
        f->hidden[3 * H + 17] = specials[i];
        output = api_run(f->layer, shape, T, f->hidden, f->ids, f->route_weights);
        f->hidden[3 * H + 17] = kept;
        for (size_t t = 0; t < T; t++)
            if (t != 3) assert_memory_equal(output + t * H, clean + t * H, H * 2);
        for (size_t n = 0; n < H; n++) assert_false(isfinite(api_from_bf16(output[3 * H + n])));
    }
}

static void nonfinite_blocks_are_counted(void **state) {
    fixture *f = *state;
    megamoe_counters counters = {.struct_size = sizeof counters};
    f->hidden[3 * H + 17] = 0x7FC0;
    assert_ok(megamoe_layer_run(f->layer, &f->batch, NULL));
    assert_ok(megamoe_layer_counters(f->layer, &counters, NULL));
    assert_true(counters.nonfinite_blocks >= 1);
    for (size_t n = 0; n < H; n++) assert_true(isnan(api_from_bf16(f->output[3 * H + n])));
}

/* F32 hidden states are rounded to BF16 when they are read, ties to even. */
static void f32_hidden_states(void **state) {
    fixture *f = *state;
    float *wide = api_alloc(T * H * sizeof *wide);
    uint16_t *expected = api_run(f->layer, &f->weights.desc.shape, T, f->hidden, f->ids, f->route_weights);
    for (size_t i = 0; i < T * H; i++) {
        uint32_t bits = (uint32_t)f->hidden[i] << 16;
        if (i % 3 == 1) bits += 0x7FFF;                        /* just below the tie above */
        if (i % 3 == 2) bits += f->hidden[i] % 2 ? 0 : 0x8000; /* the tie, above an even one */
        memcpy(&wide[i], &bits, sizeof bits);
    }
    f->batch.hidden = wide;
    f->batch.hidden_dtype = MEGAMOE_F32;
    assert_ok(megamoe_layer_run(f->layer, &f->batch, NULL));
    assert_memory_equal(f->output, expected, T * H * 2);
}

static void layer_facts_are_decided(void **state) {
    fixture *f = *state;
    megamoe_layer_facts facts = {.struct_size = sizeof facts};
    megamoe_layer_describe(f->layer, &facts);
    assert_int_equal(facts.activations, MEGAMOE_ACTIVATIONS_NVFP4);
    assert_int_equal(facts.input_global, MEGAMOE_GLOBAL_STATIC);
    assert_int_equal(facts.intermediate_global, MEGAMOE_GLOBAL_STATIC);
    assert_int_equal(facts.expert_count, E);
    assert_int_equal(facts.expert_bytes, 3 * (H * I / 2 + H * I / 16));
    assert_false(facts.routes || facts.has_shared_expert || facts.routing_weight_before);
    assert_true(facts.shape.swiglu_alpha == 1.0f && facts.shape.routed_scale == 1.0f);
    assert_int_equal(facts.shape.group_size, 16);
}

/* An input_scale that is missing for one expert: refused when it would be used, by the expert's id, and only
 * then. */
static void missing_input_scale(void **state) {
    fixture *f = *state;
    static const float unusable[] = {0.0f, 1e-40f, NAN, INFINITY, -1.0f};
    megamoe_layer_options nvfp4 = api_options(MEGAMOE_ACTIVATIONS_NVFP4);
    megamoe_layer_options bf16 = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer *layer = NULL;
    for (unsigned i = 0; i < sizeof unusable / sizeof *unusable; i++) {
        f->weights.inputs[0][1] = unusable[i];
        nvfp4.input_global = MEGAMOE_GLOBAL_AUTO;
        expect_failure(megamoe_layer_create(f->device, &f->weights.desc, &nvfp4, &layer), MEGAMOE_CORRUPT_FILE,
                       "experts 1;");
        assert_null(layer);
        nvfp4.input_global = MEGAMOE_GLOBAL_TOKEN;
        megamoe_layer_close(api_create(f->device, &f->weights, &nvfp4));
        megamoe_layer_close(api_create(f->device, &f->weights, &bf16));
    }
}

#define WITH_LAYER(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
#define WITH_NVFP4(test) cmocka_unit_test_setup_teardown(test, set_up_nvfp4, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_version),
        cmocka_unit_test(close_accepts_null),
        cmocka_unit_test(opening_checks_its_arguments),
        WITH_LAYER(layers_check_their_arguments),
        WITH_LAYER(layers_check_their_tensors),
        WITH_LAYER(runs_check_their_arguments),
        WITH_LAYER(times_check_their_arguments),
        WITH_LAYER(bad_ids),
        WITH_LAYER(skipped_slots),
        WITH_LAYER(empty_batch),
        WITH_LAYER(position_does_not_matter),
        WITH_NVFP4(position_does_not_matter),
        WITH_LAYER(nonfinite_tokens_stay_alone),
        WITH_NVFP4(nonfinite_tokens_stay_alone),
        WITH_NVFP4(nonfinite_blocks_are_counted),
        WITH_LAYER(f32_hidden_states),
        WITH_NVFP4(layer_facts_are_decided),
        WITH_NVFP4(missing_input_scale),
    };
    return API_RUN(tests);
}
