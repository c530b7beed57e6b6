/*
 * The host side of the GPU backends when the driver refuses: every call that can fail is made to fail, one after the
 * other, while a device is opened, a layer loaded, run and read, and single stages are called. Each time there is a
 * status and a sentence, everything taken is given back, and the device serves the next caller. On a fake driver; needs
 * no GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "backend/backend.h"
#include "backend/cuda/faulty_driver.h"
#include "backend/cuda/made_layer.h"

enum { TOKENS = 70, FIXTURE_TOKENS = 6, SM120_SHARED = 101376 };

static mm_driver *table;
static bool
    closing; /* the scenario came to its end: what fails now cannot be reported, but must leave nothing behind */

/* A fresh count: the n-th counted call fails. */
static void fail_at(const char *only, uint32_t n) {
    faults.only = only, faults.fail_at = n, faults.calls = 0, faults.failed = NULL;
}

/* ---- scenarios ---- */

static megamoe_device_options options_of(megamoe_backend backend, uint32_t max_tokens) {
    return (megamoe_device_options){
        .struct_size = sizeof(megamoe_device_options), .backend = backend, .max_tokens = max_tokens};
}

/* A checkpoint's layer through the public functions, from host memory: routed by its router, run, with stages. */
static megamoe_status run_fixture(megamoe_layer *layer, const megamoe_shape *shape) {
    const size_t values = (size_t)FIXTURE_TOKENS * shape->hidden, slots = FIXTURE_TOKENS * shape->experts_per_token;
    uint16_t *hidden = calloc(values, 2), *output = calloc(values, 2);
    uint8_t *codes = calloc(slots * shape->intermediate / 2 + values, 1);
    megamoe_batch batch = {
        .struct_size = sizeof batch, .token_count = FIXTURE_TOKENS, .hidden = hidden, .output = output};
    megamoe_stages stages = {.struct_size = sizeof stages, .x_codes = codes, .h_codes = codes + values / 2};
    megamoe_counters counters = {.struct_size = sizeof counters};
    uint32_t written;
    megamoe_status status = megamoe_layer_run(layer, &batch, NULL);
    if (status == MEGAMOE_OK) status = megamoe_layer_run_stages(layer, &batch, NULL, &stages, &written);
    if (status == MEGAMOE_OK) status = megamoe_layer_counters(layer, &counters, NULL);
    free(hidden), free(output), free(codes);
    return status;
}

static megamoe_status fixture(megamoe_backend backend) {
    megamoe_device_options options = options_of(backend, FIXTURE_TOKENS);
    megamoe_layer_options how = {.struct_size = sizeof how, .activations = MEGAMOE_ACTIVATIONS_NVFP4};
    megamoe_checkpoint *checkpoint;
    megamoe_device *device = NULL;
    megamoe_layer *layer = NULL;
    megamoe_shape shape;
    assert_int_equal(megamoe_checkpoint_open("tests/fixtures/qwen3-modelopt", NULL, &checkpoint), MEGAMOE_OK);
    assert_int_equal(megamoe_checkpoint_shape(checkpoint, 0, &shape), MEGAMOE_OK);
    megamoe_status status = megamoe_device_open(&options, &device);
    if (status == MEGAMOE_OK) status = megamoe_layer_load(device, checkpoint, 0, &how, &layer);
    if (status == MEGAMOE_OK) status = run_fixture(layer, &shape);
    closing = !faults.failed;
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

/* Single stages, on memory of the caller's that is there before the driver begins to refuse. */
static char *tensors;

static megamoe_status single_stages(megamoe_backend backend) {
    enum { ROWS = 3, COLUMNS = 64 };
    megamoe_device_options options = options_of(backend, ROWS);
    megamoe_device *device = NULL;
    megamoe_tensor values = {.data = tensors, .dtype = MEGAMOE_BF16, .rank = 2, .extent = {ROWS, COLUMNS}};
    megamoe_tensor codes = {.data = tensors + 1024, .dtype = MEGAMOE_E2M1X2, .rank = 2, .extent = {ROWS, COLUMNS}};
    megamoe_tensor scales = {.data = tensors + 2048, .dtype = MEGAMOE_E4M3, .rank = 2, .extent = {ROWS, COLUMNS / 16}};
    megamoe_tensor globals = {.data = tensors + 2560, .dtype = MEGAMOE_F32, .rank = 1, .extent = {ROWS}};
    megamoe_tensor product = {.data = tensors + 3072, .dtype = MEGAMOE_F32, .rank = 2, .extent = {ROWS, 16}};
    megamoe_projection weights = {
        .codes = {.data = tensors + 4096, .dtype = MEGAMOE_BF16, .rank = 3, .extent = {1, 16, COLUMNS}}};
    const int32_t *offsets = (const int32_t *)(const void *)(tensors + 3584);
    megamoe_status status = megamoe_device_open(&options, &device);
    if (status == MEGAMOE_OK) status = megamoe_quantize(device, &values, NULL, &codes, &scales, &globals, NULL);
    if (status == MEGAMOE_OK) status = megamoe_dequantize(device, &codes, &scales, &globals, &values, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_grouped_gemm(device, &codes, &scales, &weights, offsets, 1, &product, NULL);
    closing = !faults.failed;
    megamoe_device_close(device);
    return status;
}

/* What a device that stays open is asked for, behind the backend's own table: a layer of made weights, and a batch. */
static made_layer layer_made;
static mm_backend_state *open_state;
static uint32_t made_tokens;

static const mm_backend *table_of(megamoe_backend backend) {
    return backend == MEGAMOE_SM90 ? &mm_backend_sm90 : &mm_backend_cuda_portable;
}

static megamoe_status made(megamoe_backend id) {
    const mm_backend *backend = table_of(id);
    const made_layer *l = &layer_made;
    const size_t values = (size_t)made_tokens * l->weights.shape.hidden,
                 slots = (size_t)made_tokens * l->weights.shape.experts_per_token;
    uint16_t *hidden = calloc(values, 2), *output = calloc(values, 2);
    int32_t *ids = calloc(slots, 4);
    float *weights = calloc(slots, 4);
    megamoe_layer_options how = {.struct_size = sizeof how};
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = made_tokens,
                           .hidden = hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .output = output,
                           .expert_ids = ids,
                           .expert_weights = weights};
    mm_backend_layer *layer = NULL;
    megamoe_status status = backend->layer_create(open_state, &l->weights, false, &how, &layer);
    if (status == MEGAMOE_OK) {
        status = backend->run(layer, &batch, NULL, NULL, NULL, NULL);
        closing = !faults.failed;
        backend->layer_close(layer);
    }
    free(hidden), free(output), free(ids), free(weights);
    return status;
}

/* Two batches by the GPU's clock; every event of the fake driver is a millisecond after the one before. */
static megamoe_status timed(megamoe_backend id) {
    const mm_backend *backend = table_of(id);
    static uint16_t hidden[2 * 4096], output[2 * 4096];
    static const int32_t ids[8] = {0};
    static const float weights[8] = {0};
    megamoe_times times = {.struct_size = sizeof times};
    megamoe_batch batches[2];
    mm_backend_layer *layer = NULL;
    assert_true(layer_made.weights.shape.hidden <= 4096 && layer_made.weights.shape.experts_per_token <= 4);
    for (int i = 0; i < 2; i++)
        batches[i] = (megamoe_batch){.struct_size = sizeof *batches,
                                     .token_count = 2,
                                     .hidden = hidden,
                                     .hidden_dtype = MEGAMOE_BF16,
                                     .output = output,
                                     .expert_ids = ids,
                                     .expert_weights = weights};
    megamoe_status status = backend->layer_create(open_state, &layer_made.weights, false, NULL, &layer);
    if (status != MEGAMOE_OK) return status;
    status = backend->time(layer, batches, 2, &times);
    if (status == MEGAMOE_OK) {
        assert_int_equal(times.runs, 15);
        assert_true(times.experts.least > 0 && times.experts.least <= times.experts.median);
        assert_true(times.layer_loaded.median <= times.layer_loaded.p90);
    }
    backend->layer_close(layer);
    return status;
}

/* ---- every call in turn -------------------------------------------------------------------------------- */

/* A status and one sentence, in which the driver's own words are. */
static void expect_sentence(megamoe_status status, uint32_t n) {
    const char *words = megamoe_error_message();
    /* Of a pointer that the driver does not know nothing is wrong: it is memory of the host. */
    if (status == MEGAMOE_OK && strcmp(faults.failed, "pointer_attributes") == 0) return;
    if (status == MEGAMOE_OK) fail_msg("call %u, %s, failed and nobody noticed", n, faults.failed);
    if (!strstr(words, "the fake driver refused") || strlen(words) > 300 || strchr(words, '\n'))
        fail_msg("call %u, %s: %s says \"%s\"", n, faults.failed, megamoe_status_name(status), words);
    if (strcmp(faults.failed, "memory_allocate") == 0) {
        if (faults.result == CUDA_ERROR_OUT_OF_MEMORY) assert_int_equal(status, MEGAMOE_OUT_OF_MEMORY);
        assert_non_null(strstr(words, " MB of GPU memory: "));
    }
}

/* Runs a scenario with its call 1, 2, ... failing until a run gets through; what was there before is there after. */
static void sweep(const char *only, megamoe_status (*scenario)(megamoe_backend), megamoe_backend backend) {
    const bool allocations = only && strstr(only, "allocate");
    uint32_t n = 0;
    faults.result = allocations ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_LAUNCH_FAILED;
    fail_at(NULL, 0);
    if (scenario(backend) != MEGAMOE_OK) fail_msg("%s", megamoe_error_message());
    do {
        const int64_t held = faults.held;
        closing = false;
        fail_at(only, ++n);
        megamoe_status status = scenario(backend);
        const char *failed = faults.failed ? faults.failed : "nothing";
        if (faults.failed && !closing) expect_sentence(status, n);
        if (!faults.failed || closing) assert_int_equal(status, MEGAMOE_OK);
        if (faults.held != held) fail_msg("call %u, %s, leaves %d objects", n, failed, (int)(faults.held - held));
    } while (faults.failed);
    fail_at(NULL, 0);
    if (n < 2) fail_msg("no call of %s", only ? only : "anything");
}

static const megamoe_backend backends[] = {MEGAMOE_CUDA_PORTABLE, MEGAMOE_SM90};

static void sweep_all(megamoe_status (*scenario)(megamoe_backend), bool ever_after) {
    static const char *const kinds[] = {NULL, "memory_allocate", "host_allocate", "launch", "copy_to_device"};
    faults.ever_after = ever_after;
    for (int i = 0; i < 2; i++)
        for (size_t k = 0; k < (scenario == fixture && !ever_after ? 5 : 1); k++)
            sweep(kinds[k], scenario, backends[i]);
    faults.ever_after = false;
}

static void layers_of_a_checkpoint(void **state) {
    (void)state;
    sweep_all(fixture, false);
}
static void layers_after_a_crash(void **state) {
    (void)state;
    sweep_all(fixture, true);
}

static void single_stages_refused(void **state) {
    CUdeviceptr memory = 0;
    (void)state;
    fail_at(NULL, 0);
    assert_int_equal(table->memory_allocate(&memory, 8192), CUDA_SUCCESS);
    tensors = (char *)(uintptr_t)memory;
    memset(tensors, 0, 8192);
    sweep_all(single_stages, false);
    sweep_all(single_stages, true);
    table->memory_free(memory);
}

/* The device stays open while its layers fail, and serves the next one: the sweep ends with a run that gets through. */
static void a_device_outlives_its_layers(void **state) {
    static const made_form forms[] = {
        {256, 128, 6, 4, 2, MM_NVFP4, MM_FP8, .activations = MEGAMOE_ACTIVATIONS_NVFP4, .alpha = 1.0f},
        {512, 256, 6, 6, 2, MM_MXFP4, MM_NVFP4, .bias = true, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1.7f},
        {256, 128, 6, 6, 2, MM_BF16, .not_gated = true, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1.0f},
    };
    (void)state;
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
        for (int i = 0; i < 2; i++) {
            const mm_backend *backend = table_of(backends[i]);
            megamoe_device_options options = options_of(backends[i], TOKENS);
            const int64_t held = faults.held;
            mm_device_facts facts;
            made_layer_open(&layer_made, &forms[f], 7 + f);
            made_tokens = TOKENS;
            fail_at(NULL, 0);
            assert_int_equal(backend->open(&options, &open_state), MEGAMOE_OK);
            sweep(NULL, made, backends[i]);
            sweep("memory_allocate", made, backends[i]);
            if (f == 0 && i == 0) sweep("memory_allocate", timed, backends[i]); /* it pauses for seconds */
            backend->describe(open_state, &facts);
            assert_int_equal(facts.host_bytes, 0);
            backend->close(open_state);
            made_layer_close(&layer_made);
            assert_int_equal(faults.held, held);
        }
}

static mm_driver whole; /* the table before a test replaced more of it */

/* The gigabytes that limits are measured in are not there, and nobody looks at them. */
static CUresult allocate_little(CUdeviceptr *memory, size_t bytes) {
    (void)bytes;
    return whole.memory_allocate(memory, 256);
}
static CUresult fill_nothing(CUdeviceptr memory, unsigned char byte, size_t bytes, CUstream stream) {
    (void)memory, (void)byte, (void)bytes, (void)stream;
    return CUDA_SUCCESS;
}

static megamoe_status measured(megamoe_backend backend) {
    megamoe_device_options options = options_of(backend, 1);
    megamoe_limits limits = {.struct_size = sizeof limits};
    megamoe_device *device = NULL;
    megamoe_status status = megamoe_device_open(&options, &device);
    if (status == MEGAMOE_OK) status = megamoe_device_measure(device, &limits);
    closing = !faults.failed;
    megamoe_device_close(device);
    return status;
}

static void measuring_refused(void **state) {
    (void)state;
    whole = *table;
    table->memory_allocate = allocate_little;
    table->fill = fill_nothing;
    sweep(NULL, measured, MEGAMOE_CUDA_PORTABLE);
    sweep("memory_allocate", measured, MEGAMOE_CUDA_PORTABLE);
    *table = whole;
}

/* ---- what a GPU has less of ----------------------------------------------------------------------------- */

static CUresult attribute_of_sm120(int *value, CUdevice_attribute which, CUdevice device) {
    CUresult result = whole.device_attribute(value, which, device);
    if (which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) *value = SM120_SHARED;
    return result;
}

/* No launch asks for more shared memory than a block of sm_120 has, beside the 1 KB that kernels declare. */
static void launches_fit_sm120(void **state) {
    static const struct {
        uint32_t tokens;
        made_form form;
    } rows[] = {
        {70, {256, 128, 6, 4, 2, MM_NVFP4, MM_FP8, .activations = MEGAMOE_ACTIVATIONS_NVFP4, .alpha = 1.0f}},
        {2, {7168, 3072, 4, 2, 2, MM_NVFP4, 0, .activations = MEGAMOE_ACTIVATIONS_NVFP4, .alpha = 1.0f}},
        {2000, {16, 16, 1500, 1500, 2, MM_BF16, 0, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1.0f}},
        {65536, {16, 16, 700, 700, 8, MM_BF16, 0, .activations = MEGAMOE_ACTIVATIONS_BF16, .alpha = 1.0f}},
    };
    (void)state;
    whole = *table;
    table->device_attribute = attribute_of_sm120;
    fail_at(NULL, 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        megamoe_device_options options = options_of(MEGAMOE_CUDA_PORTABLE, rows[i].tokens);
        made_layer_open(&layer_made, &rows[i].form, 11 + i);
        made_tokens = rows[i].tokens;
        faults.shared_bytes_max = 0;
        assert_int_equal(mm_backend_cuda_portable.open(&options, &open_state), MEGAMOE_OK);
        if (made(MEGAMOE_CUDA_PORTABLE) != MEGAMOE_OK) fail_msg("%s", megamoe_error_message());
        if (faults.shared_bytes_max == 0 || faults.shared_bytes_max > SM120_SHARED - 1024)
            fail_msg("row %zu: a launch asks for %u bytes", i, (unsigned)faults.shared_bytes_max);
        mm_backend_cuda_portable.close(open_state);
        made_layer_close(&layer_made);
    }
    *table = whole;
}

/* ---- what users read ------------------------------------------------------------------------------------ */

static void expect_open(megamoe_backend backend, megamoe_status expected, const char *const *words) {
    megamoe_device_options options = options_of(backend, 1);
    megamoe_device *device = NULL;
    const int64_t held = faults.held;
    assert_int_equal(megamoe_device_open(&options, &device), expected);
    assert_null(device);
    assert_int_equal(faults.held, held);
    for (; *words; words++)
        if (!strstr(megamoe_error_message(), *words)) fail_msg("\"%s\" is not in: %s", *words, megamoe_error_message());
}

static CUresult version_of_550(int *version) {
    return *version = 12040, CUDA_SUCCESS;
}
static CUresult init_without_gpu(unsigned flags) {
    (void)flags;
    return CUDA_ERROR_NO_DEVICE;
}
static CUresult count_none(int *count) {
    return *count = 0, CUDA_SUCCESS;
}
static CUresult function_missing(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)(uintptr_t)module;
    return strcmp(name, "mm_combine") == 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

static void drivers_that_cannot(void **state) {
    (void)state;
    whole = *table;
    fail_at(NULL, 0);
    for (int i = 0; i < 2; i++) {
        table->driver_version = version_of_550;
        expect_open(backends[i], MEGAMOE_UNSUPPORTED_DEVICE,
                    (const char *const[]){"supports CUDA 12.4", "driver 580 or later", NULL});
        *table = whole;
        table->init = init_without_gpu;
        expect_open(backends[i], MEGAMOE_UNSUPPORTED_DEVICE, (const char *const[]){"no GPU", "--backend cpu", NULL});
        *table = whole;
        table->device_count = count_none;
        expect_open(backends[i], MEGAMOE_UNSUPPORTED_DEVICE, (const char *const[]){"no GPU 0", "has 0", NULL});
        *table = whole;
        table->module_function = function_missing;
        expect_open(backends[i], MEGAMOE_DEVICE_ERROR, (const char *const[]){"mm_combine", "refused", NULL});
        *table = whole;
    }
}

/* The kernel that could not be launched, and how much memory of which kind was wanted for what. */
static void sentences_name_what_failed(void **state) {
    static const struct {
        const char *only;
        uint32_t n;
        CUresult result;
        const char *words;
    } rows[] = {{"launch", 1, CUDA_ERROR_LAUNCH_FAILED, "launching a kernel: mm_route_logits"},
                {"memory_allocate", 1, CUDA_ERROR_OUT_OF_MEMORY, "MB of GPU memory: weights: "},
                {"host_allocate", 2, CUDA_ERROR_OUT_OF_MEMORY, "33.6 MB of pinned host memory"},
                {"copy_to_device", 1, CUDA_ERROR_LAUNCH_FAILED, "copying weights to the GPU: "}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        faults.result = rows[i].result;
        fail_at(rows[i].only, rows[i].n);
        megamoe_status status = fixture(MEGAMOE_SM90);
        assert_int_equal(status,
                         rows[i].result == CUDA_ERROR_OUT_OF_MEMORY ? MEGAMOE_OUT_OF_MEMORY : MEGAMOE_DEVICE_ERROR);
        if (!strstr(megamoe_error_message(), rows[i].words))
            fail_msg("\"%s\" is not in: %s", rows[i].words, megamoe_error_message());
    }
    fail_at(NULL, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_of_a_checkpoint), cmocka_unit_test(layers_after_a_crash),
        cmocka_unit_test(single_stages_refused),  cmocka_unit_test(a_device_outlives_its_layers),
        cmocka_unit_test(measuring_refused),      cmocka_unit_test(launches_fit_sm120),
        cmocka_unit_test(drivers_that_cannot),    cmocka_unit_test(sentences_name_what_failed),
    };
    table = faulty_driver_install();
    if (!table) return fprintf(stderr, "no fake driver: %s\n", megamoe_error_message()), 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
