/*
 * Files through the public functions: writing all or nothing, shards that shrink while they are mapped,
 * offsets above 4 GiB, what bad headers cost, and results that stay as they were on failure.
 */
#include "checkpoint/checkpoint.h"
#include "checkpoint/report.h"

#include "scratch.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include <cmocka.h>

/* ---- every allocation is counted: the linker sends them here (CMakeLists.txt) ---- */

static atomic_size_t allocated; /* threads allocate too */
static size_t allocated_limit = SIZE_MAX;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);

static bool refused(size_t size) {
    allocated += size;
    return allocated > allocated_limit;
}

void *__wrap_malloc(size_t size) {
    return refused(size) ? NULL : __real_malloc(size);
}
void *__wrap_calloc(size_t count, size_t size) {
    return refused(count * size) ? NULL : __real_calloc(count, size);
}
void *__wrap_realloc(void *memory, size_t size) {
    return refused(size) ? NULL : __real_realloc(memory, size);
}

/* ---- writing ---- */

static const float f32[6] = {1.5f, -2.25f, 3.0f, 0.0f, -0.0f, 1e-40f};
static const uint8_t bytes[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};

static megamoe_named_tensor named(const char *name, megamoe_dtype dtype, const void *data, uint32_t rank, int64_t a,
                                  int64_t b) {
    return (megamoe_named_tensor){
        .name = name, .tensor = {.data = (void *)(uintptr_t)data, .dtype = dtype, .rank = rank, .extent = {a, b}}};
}

static uint32_t files_in_folder(void) {
    DIR *folder = opendir(scratch_folder);
    uint32_t count = 0;
    while (readdir(folder)) count++;
    closedir(folder);
    return count - 2;
}

static void test_write_and_read(void **state) {
    const megamoe_named_tensor tensors[] = {
        named("codes", MEGAMOE_E2M1X2, bytes, 2, 3, 8),
        named("x.f32", MEGAMOE_F32, f32, 2, 2, 3),
        named("scales", MEGAMOE_E4M3, bytes, 1, 7, 0),
        named("scalar", MEGAMOE_F32, f32 + 1, 0, 0, 0),
        named("na\xc3\xafve \"x\"", MEGAMOE_BF16, f32, 1, 3, 0),
        named("empty", MEGAMOE_I64, NULL, 2, 0, 5),
        named("i64", MEGAMOE_I64, bytes, 1, 1, 0),
    };
    const char *path = scratch_path("w.safetensors");
    megamoe_checkpoint *file = NULL;
    megamoe_tensor tensor;
    (void)state;
    for (int again = 0; again < 2; again++) assert_int_equal(megamoe_tensors_write(path, tensors, 7), MEGAMOE_OK);
    assert_int_equal(files_in_folder(), 1);
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &file), MEGAMOE_OK);
    assert_int_equal(megamoe_checkpoint_layer_count(file), 0);
    assert_int_equal(megamoe_checkpoint_tensor(file, "codes", &tensor), MEGAMOE_OK);
    assert_int_equal(tensor.dtype, MEGAMOE_U8);
    assert_int_equal(tensor.extent[0] * 10 + tensor.extent[1], 34);
    assert_memory_equal(tensor.data, bytes, 12);
    assert_int_equal(megamoe_checkpoint_tensor(file, "scalar", &tensor), MEGAMOE_OK);
    assert_int_equal(tensor.rank, 0);
    assert_memory_equal(tensor.data, f32 + 1, 4);
    assert_int_equal((uintptr_t)tensor.data % 4, 0);
    assert_int_equal(megamoe_checkpoint_tensor(file, "i64", &tensor), MEGAMOE_OK);
    assert_int_equal((uintptr_t)tensor.data % 8, 0);
    assert_int_equal(megamoe_checkpoint_tensor(file, "x.f32", &tensor), MEGAMOE_OK);
    assert_memory_equal(tensor.data, f32, sizeof f32);
    assert_string_equal(megamoe_checkpoint_tensor_name(file, 0), "codes");
    assert_string_equal(megamoe_checkpoint_tensor_name(file, 3), "na\xc3\xafve \"x\"");
    assert_string_equal(megamoe_checkpoint_tensor_name(file, 6), "x.f32");
    assert_null(megamoe_checkpoint_tensor_name(file, 7));
    memset(&tensor, 0x7F, sizeof tensor);
    assert_int_equal(megamoe_checkpoint_tensor(file, "absent", &tensor), MEGAMOE_INVALID_ARGUMENT);
    assert_non_null(strstr(megamoe_error_message(), "absent"));
    assert_int_equal(tensor.rank, 0x7F7F7F7F);
    megamoe_checkpoint_close(file);
}

static void test_bad_writes_leave_the_old_file(void **state) {
    const megamoe_named_tensor good = named("a", MEGAMOE_F32, f32, 1, 6, 0);
    megamoe_named_tensor strided = named("s", MEGAMOE_F32, f32, 2, 2, 2);
    const char *path = scratch_path("w.safetensors");
    (void)state;
    strided.tensor.stride[0] = 3;
    strided.tensor.stride[1] = 1;
    const megamoe_named_tensor bad[][2] = {
        {good, good},
        {good, named(NULL, MEGAMOE_F32, f32, 1, 1, 0)},
        {good, named("__metadata__", MEGAMOE_F32, f32, 1, 1, 0)},
        {good, named("b", 0, f32, 1, 1, 0)},
        {good, named("b", MEGAMOE_F16 + 1, f32, 1, 1, 0)},
        {good, named("b", MEGAMOE_F32, f32, 5, 1, 1)},
        {good, named("b", MEGAMOE_F32, f32, 1, -1, 0)},
        {good, named("b", MEGAMOE_F32, f32, 2, INT64_MAX, 8)},
        {good, named("b", MEGAMOE_F32, NULL, 1, 1, 0)},
        {good, named("b", MEGAMOE_E2M1X2, bytes, 1, 3, 0)},
        {good, named("b", MEGAMOE_E2M1X2, bytes, 0, 0, 0)},
        {good, named("\xff", MEGAMOE_F32, f32, 1, 1, 0)},
        {good, strided},
    };
    assert_int_equal(megamoe_tensors_write(path, &good, 1), MEGAMOE_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (megamoe_tensors_write(path, bad[i], 2) != MEGAMOE_INVALID_ARGUMENT) fail_msg("row %zu", i);
        assert_int_equal(files_in_folder(), 1);
    }
    assert_int_equal(megamoe_tensors_write("/nowhere/x.safetensors", &good, 1), MEGAMOE_IO_ERROR);
    assert_non_null(strstr(megamoe_error_message(), "/nowhere/x.safetensors"));
    assert_int_equal(megamoe_tensors_write(NULL, &good, 1), MEGAMOE_INVALID_ARGUMENT);
    strided.tensor.stride[0] = 2;
    assert_int_equal(megamoe_tensors_write(path, &strided, 1), MEGAMOE_OK);
}

/* As on a full disk: the old file stays, and nothing of the new one does. */
static void test_write_that_runs_out_of_room(void **state) {
    const megamoe_named_tensor small = named("a", MEGAMOE_F32, f32, 1, 6, 0);
    const megamoe_named_tensor large = named("b", MEGAMOE_U8, __real_calloc(1, 1 << 20), 1, 1 << 20, 0);
    const struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY}, tight = {1 << 16, RLIM_INFINITY};
    const char *path = scratch_path("w.safetensors");
    megamoe_checkpoint *file = NULL;
    megamoe_status status;
    (void)state;
    assert_int_equal(megamoe_tensors_write(path, &small, 1), MEGAMOE_OK);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    status = megamoe_tensors_write(path, &large, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    assert_int_equal(status, MEGAMOE_IO_ERROR);
    assert_int_equal(files_in_folder(), 1);
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &file), MEGAMOE_OK);
    assert_string_equal(megamoe_checkpoint_tensor_name(file, 0), "a");
    megamoe_checkpoint_close(file);
    free(large.tensor.data);
}

/* A rename would put a file in the place of a pipe or a device. */
static void test_write_does_not_replace_what_is_no_file(void **state) {
    const megamoe_named_tensor good = named("a", MEGAMOE_F32, f32, 1, 6, 0);
    const char *path = scratch_path("pipe");
    (void)state;
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(megamoe_tensors_write(path, &good, 1), MEGAMOE_IO_ERROR);
    assert_non_null(strstr(megamoe_error_message(), "regular"));
    assert_int_equal(megamoe_tensors_write(scratch_folder, &good, 1), MEGAMOE_IO_ERROR);
    assert_int_equal(files_in_folder(), 1);
}

/* ---- one layer, made with the library's own writer ---- */

enum { E = 3, H = 32, I = 16, EXPERT_TENSORS = 9 };

static uint8_t codes[I * H / 2], scales[I * H / 16];
static uint16_t gate[E * H];
static uint8_t scale_override; /* not 0: the value of one scale of every projection */

static void layer_write(const char *path) {
    static const char *const projections[] = {"w1", "w2", "w3"};
    static char text[E][3][3][64];
    megamoe_named_tensor tensors[E * EXPERT_TENSORS + 1];
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 7);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(i % 0x7E + 1);
    if (scale_override) scales[5] = scale_override;
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++) {
            int64_t n = p == 1 ? H : I, k = p == 1 ? I : H;
            static const char *const parts[] = {"weight", "weight_scale", "weight_scale_2"};
            for (int i = 0; i < 3; i++)
                snprintf(text[e][p][i], 64, "layers.0.ffn.experts.%d.%s.%s", e, projections[p], parts[i]);
            tensors[count++] = named(text[e][p][0], MEGAMOE_E2M1X2, codes, 2, n, k);
            tensors[count++] = named(text[e][p][1], MEGAMOE_E4M3, scales, 2, n, k / 16);
            tensors[count++] = named(text[e][p][2], MEGAMOE_F32, f32, 0, 0, 0);
        }
    tensors[count++] = named("layers.0.ffn.gate.weight", MEGAMOE_BF16, gate, 2, E, H);
    assert_int_equal(megamoe_tensors_write(path, tensors, count), MEGAMOE_OK);
    static const char config[] = "{\"model_type\":\"deepseek_v4\",\"num_experts_per_tok\":2}";
    scratch_write("config.json", config, sizeof config - 1);
}

static void test_open_arguments(void **state) {
    megamoe_checkpoint_options options = {.struct_size = sizeof options + 8};
    megamoe_layer_info info = {.struct_size = 3};
    megamoe_anomaly anomaly = {.struct_size = sizeof anomaly};
    megamoe_checkpoint *untouched = (megamoe_checkpoint *)&options, *checkpoint = untouched;
    megamoe_shape shape;
    char path[512];
    (void)state;
    layer_write(scratch_path("m.safetensors"));
    strcpy(path, scratch_path("m.safetensors"));
    assert_int_equal(megamoe_checkpoint_open(NULL, NULL, &checkpoint), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_checkpoint_open(path, NULL, NULL), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_checkpoint_open(path, &options, &checkpoint), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_checkpoint_open("/nowhere", NULL, &checkpoint), MEGAMOE_IO_ERROR);
    assert_ptr_equal(checkpoint, untouched);
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &checkpoint), MEGAMOE_OK);
    assert_int_equal(megamoe_checkpoint_layer_count(checkpoint), 1);
    assert_string_equal(megamoe_checkpoint_model_type(checkpoint), "deepseek_v4");
    assert_int_equal(megamoe_checkpoint_layer(checkpoint, 0, &info), MEGAMOE_INVALID_ARGUMENT);
    info.struct_size = sizeof info;
    assert_int_equal(megamoe_checkpoint_layer(checkpoint, 1, &info), MEGAMOE_INVALID_ARGUMENT);
    assert_int_equal(megamoe_checkpoint_layer(checkpoint, 0, &info), MEGAMOE_OK);
    assert_int_equal(info.expert_bytes, 3 * H * I * 9 / 16);
    assert_int_equal(info.other_bytes, 2 * E * H);
    assert_int_equal(megamoe_checkpoint_shape(checkpoint, 5, &shape), MEGAMOE_INVALID_ARGUMENT);
    assert_non_null(strstr(megamoe_error_message(), "MoE layers are 0"));
    assert_int_equal(megamoe_checkpoint_shape(checkpoint, 0, &shape), MEGAMOE_OK);
    assert_int_equal(shape.hidden, H);
    assert_int_equal(megamoe_checkpoint_anomaly_count(checkpoint), 0);
    assert_int_equal(megamoe_checkpoint_anomaly(checkpoint, 0, &anomaly), MEGAMOE_INVALID_ARGUMENT);
    megamoe_checkpoint_close(checkpoint);
    megamoe_checkpoint_close(NULL);
}

static void test_file_that_shrinks_while_open(void **state) {
    megamoe_checkpoint *checkpoint;
    mm_layer_source source;
    megamoe_tensor tensor;
    char path[512];
    (void)state;
    layer_write(scratch_path("m.safetensors"));
    strcpy(path, scratch_path("m.safetensors"));
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &checkpoint), MEGAMOE_OK);
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, NULL, &source), MEGAMOE_OK);
    assert_int_equal(source.shard_count, 1);
    assert_int_equal(mm_checkpoint_unchanged(checkpoint, source.shards, source.shard_count), MEGAMOE_OK);
    assert_int_equal(truncate(path, 100), 0);
    assert_int_equal(mm_checkpoint_unchanged(checkpoint, source.shards, source.shard_count), MEGAMOE_IO_ERROR);
    assert_non_null(strstr(megamoe_error_message(), path));
    assert_non_null(strstr(megamoe_error_message(), "100"));
    mm_layer_source_free(&source);
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, NULL, &source), MEGAMOE_IO_ERROR);
    assert_int_equal(megamoe_checkpoint_scan(checkpoint, 0), MEGAMOE_IO_ERROR);
    assert_int_equal(megamoe_checkpoint_tensor(checkpoint, "layers.0.ffn.gate.weight", &tensor), MEGAMOE_IO_ERROR);
    megamoe_checkpoint_close(checkpoint);
}

typedef struct heard {
    uint64_t done, total, calls, cancel_after;
} heard;

static bool hear(void *context, uint64_t done, uint64_t total) {
    heard *h = context;
    assert_true(done > h->done && done <= total);
    *h = (heard){done, total, h->calls + 1, h->cancel_after};
    return h->calls != h->cancel_after;
}

/* A load reports every scale byte it reads, expert by expert, and stops when it is told to. */
static void test_progress(void **state) {
    megamoe_checkpoint_options unscanned = {.struct_size = sizeof unscanned, .skip_scan = true};
    megamoe_checkpoint *checkpoint;
    mm_layer_source source;
    heard h = {0};
    mm_load_report report = {.progress = hear, .progress_context = &h};
    char path[512];
    (void)state;
    layer_write(scratch_path("m.safetensors"));
    strcpy(path, scratch_path("m.safetensors"));
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &checkpoint), MEGAMOE_OK);
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, &report, &source), MEGAMOE_OK);
    mm_layer_source_free(&source);
    assert_int_equal(h.calls, E);
    assert_int_equal(h.done, E * 3 * H * I / 16);
    assert_int_equal(h.total, h.done);
    h = (heard){.cancel_after = 2};
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, &report, &source), MEGAMOE_CANCELLED);
    assert_int_equal(h.calls, 2);
    megamoe_checkpoint_close(checkpoint);
    assert_int_equal(megamoe_checkpoint_open(path, &unscanned, &checkpoint), MEGAMOE_OK);
    h = (heard){0};
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, &report, &source), MEGAMOE_OK);
    mm_layer_source_free(&source);
    assert_int_equal(h.calls, 0); /* nothing was read */
    megamoe_checkpoint_close(checkpoint);
}

static void test_slow_shard(void **state) {
    uint32_t shard = 9;
    double rate, others;
    mm_shard_rate one_slow[] = {{4000, 1}, {0, 0}, {500, 1}, {4000, 1}};
    mm_shard_rate all_alike[] = {{4000, 1}, {3000, 1}};
    mm_shard_rate slow_but_short[] = {{4000, 1}, {10, 0.1}};
    mm_shard_rate alone[] = {{0, 0}, {10, 10}};
    (void)state;
    assert_true(mm_rates_slowest(one_slow, 4, &shard, &rate, &others));
    assert_int_equal(shard, 2);
    assert_true(rate == 500 && others == 4000);
    assert_false(mm_rates_slowest(all_alike, 2, &shard, &rate, &others));
    assert_false(mm_rates_slowest(slow_but_short, 2, &shard, &rate, &others));
    assert_false(mm_rates_slowest(alone, 2, &shard, &rate, &others));
}

static void *layer_read(void *context) {
    mm_layer_source source;
    megamoe_status status = mm_checkpoint_read_layer(context, 0, 0, 0, NULL, &source);
    if (status != MEGAMOE_OK) return (void *)"refused";
    for (int e = 0; e < E; e++)
        if (memchr(source.experts[e].down.scales, 0x7F, H * I / 16)) return (void *)"not repaired";
    mm_layer_source_free(&source);
    return NULL;
}

/* Threads that load one layer at once repair each byte once, and count it once. */
static void test_threads_repair_once(void **state) {
    megamoe_checkpoint_options options = {.struct_size = sizeof options, .repair_nan_scales = true};
    megamoe_anomaly anomaly = {.struct_size = sizeof anomaly};
    megamoe_checkpoint *checkpoint;
    pthread_t threads[4];
    char path[512];
    (void)state;
    scale_override = 0x7F;
    layer_write(scratch_path("m.safetensors"));
    scale_override = 0;
    strcpy(path, scratch_path("m.safetensors"));
    assert_int_equal(megamoe_checkpoint_open(path, &options, &checkpoint), MEGAMOE_OK);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, layer_read, checkpoint), 0);
    for (int i = 0; i < 4; i++) {
        void *problem;
        pthread_join(threads[i], &problem);
        if (problem) fail_msg("%s", (const char *)problem);
    }
    assert_int_equal(megamoe_checkpoint_anomaly_count(checkpoint), 3 * E);
    for (uint32_t i = 0; i < 3 * E; i++) {
        assert_int_equal(megamoe_checkpoint_anomaly(checkpoint, i, &anomaly), MEGAMOE_OK);
        assert_string_equal(anomaly.kind, "repaired-scale");
        assert_non_null(strstr(anomaly.detail, "1 NaN scale bytes"));
    }
    megamoe_checkpoint_close(checkpoint);
}

/* Every allocation of open and read fails once: an error, no leak (the sanitizers see it), no crash. */
static void test_out_of_memory(void **state) {
    megamoe_checkpoint *checkpoint;
    mm_layer_source source;
    char path[512];
    size_t need;
    (void)state;
    layer_write(scratch_path("m.safetensors"));
    strcpy(path, scratch_path("m.safetensors"));
    allocated = 0;
    assert_int_equal(megamoe_checkpoint_open(path, NULL, &checkpoint), MEGAMOE_OK);
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, 0, 0, NULL, &source), MEGAMOE_OK);
    need = allocated;
    mm_layer_source_free(&source);
    megamoe_checkpoint_close(checkpoint);
    for (size_t limit = 0; limit < need; limit += limit < 2000 ? 8 : 509) {
        megamoe_status status;
        allocated = 0;
        allocated_limit = limit;
        status = megamoe_checkpoint_open(path, NULL, &checkpoint);
        if (status == MEGAMOE_OK) {
            status = mm_checkpoint_read_layer(checkpoint, 0, 0, 0, NULL, &source);
            megamoe_checkpoint_close(checkpoint);
        }
        allocated_limit = SIZE_MAX;
        if (status != MEGAMOE_OUT_OF_MEMORY) fail_msg("limit %zu of %zu: status %d", limit, need, (int)status);
    }
}

/* ---- headers ---- */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_bad_headers_are_cheap(void **state) {
    static const uint64_t lengths[] = {UINT64_MAX, 1ull << 63, 100000001, 100000000, 99999999, 4096, 9, 1, 0};
    static const char *const starts[] = {"", "{", "{\"a\":", "[[[[[[[[",
                                         "{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616]"};
    megamoe_checkpoint *checkpoint;
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        for (size_t s = 0; s < sizeof starts / sizeof starts[0]; s++) {
            char start[128] = {0};
            const char *path;
            double begin;
            for (int b = 0; b < 8; b++) start[b] = (char)(lengths[i] >> 8 * b);
            strcpy(start + 8, starts[s]);
            path = scratch_write("bad.safetensors", start, 8 + strlen(starts[s]));
            assert_int_equal(truncate(path, 150000000), 0);
            allocated = 0;
            begin = seconds_now();
            assert_int_equal(megamoe_checkpoint_open(path, NULL, &checkpoint), MEGAMOE_CORRUPT_FILE);
            assert_true(seconds_now() - begin < 0.1); /* of the processor: reading 100 MB takes more */
            assert_true(allocated < 1 << 20);
            assert_non_null(strstr(megamoe_error_message(), "bad.safetensors"));
        }
}

/* ---- offsets above 4 GiB: 385 experts in one stack, in holes ---- */

static void test_stack_above_4_gib(void **state) {
    enum { COUNT = 385, INNER = 2048, OUTER = 7168 };
    const uint64_t up_row = OUTER / 2, up_rows = 2ull * COUNT * INNER, down_bytes = (uint64_t)COUNT * OUTER * INNER / 2;
    const uint64_t up_bytes = up_rows * up_row, up_scales = up_rows * (OUTER / 16);
    const uint64_t down_scales = (uint64_t)COUNT * OUTER * (INNER / 16);
    static char header[4096];
    megamoe_checkpoint_options options = {.struct_size = sizeof options, .skip_scan = true};
    megamoe_checkpoint *checkpoint;
    mm_layer_source source;
    const char *path;
    uint64_t at = 4, length, base;
    float one = 1.0f;
    int file;
    (void)state;
#define ENTRY(name, dtype, shape, size)                                                                                \
    at += (uint64_t)sprintf(header + strlen(header),                                                                   \
                            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",                   \
                            strlen(header) > 9 ? "," : "", "model.layers.0.mlp.experts." name, dtype, shape,           \
                            (unsigned long long)at, (unsigned long long)(at + (size))) *                               \
              0 +                                                                                                      \
          (size)
    header[0] = '\0';
    strcat(header, "        {");
    at = 0;
    ENTRY("gate_up_proj_weight_scale_2", "F32", "[1]", 4);
    ENTRY("down_proj_weight_scale_2", "F32", "[1]", 4);
    ENTRY("gate_up_proj_weight_scale", "F8_E4M3", "[385,4096,448]", up_scales);
    ENTRY("down_proj_weight_scale", "F8_E4M3", "[385,7168,128]", down_scales);
    ENTRY("gate_up_proj", "U8", "[385,4096,3584]", up_bytes);
    ENTRY("down_proj", "U8", "[385,7168,1024]", down_bytes);
#undef ENTRY
    strcat(header, "}");
    length = strlen(header) - 8;
    for (int b = 0; b < 8; b++) header[b] = (char)(length >> 8 * b);
    path = scratch_write("big.safetensors", header, 8 + length);
    base = 8 + length + 8 + up_scales + down_scales;
    file = open(path, O_WRONLY);
    if (ftruncate(file, (off_t)(8 + length + at)) != 0) skip(); /* this file system has no room for holes */
    assert_int_equal(pwrite(file, &one, 4, (off_t)(8 + length)), 4);
    assert_int_equal(pwrite(file, &one, 4, (off_t)(12 + length)), 4);
    assert_int_equal(pwrite(file, "G", 1, (off_t)(base + (up_rows - INNER) * up_row - 1)), 1);
    assert_int_equal(pwrite(file, "U", 1, (off_t)(base + up_bytes - 1)), 1);
    assert_int_equal(pwrite(file, "D", 1, (off_t)(base + up_bytes + down_bytes - 1)), 1);
    close(file);
    static const char config[] = "{\"model_type\":\"qwen3_moe\",\"num_experts_per_tok\":8}";
    scratch_write("config.json", config, sizeof config - 1);
    assert_int_equal(megamoe_checkpoint_open(scratch_path("big.safetensors"), &options, &checkpoint), MEGAMOE_OK);
    assert_int_equal(mm_checkpoint_read_layer(checkpoint, 0, COUNT - 1, 1, NULL, &source), MEGAMOE_OK);
    const mm_expert *last = source.experts;
    assert_int_equal(last->gate.codes[(INNER - 1) * last->gate.row_bytes + up_row - 1], 'G');
    assert_int_equal(last->up.codes[(INNER - 1) * last->up.row_bytes + up_row - 1], 'U');
    assert_int_equal(last->down.codes[(OUTER - 1) * last->down.row_bytes + INNER / 2 - 1], 'D');
    mm_layer_source_free(&source);
    megamoe_checkpoint_close(checkpoint);
}

int main(void) {
#define TEST(function) cmocka_unit_test_setup_teardown(function, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_write_and_read),
        TEST(test_bad_writes_leave_the_old_file),
        TEST(test_write_that_runs_out_of_room),
        TEST(test_write_does_not_replace_what_is_no_file),
        TEST(test_open_arguments),
        TEST(test_file_that_shrinks_while_open),
        TEST(test_progress),
        TEST(test_slow_shard),
        TEST(test_threads_repair_once),
        TEST(test_out_of_memory),
        TEST(test_bad_headers_are_cheap),
        TEST(test_stack_above_4_gib),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
