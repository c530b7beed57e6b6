/*
 * Offsets past 32 bits, without the memory that goes with them: the same few pages stand behind a huge batch, and
 * a huge stack of experts is holes but for its last one. What is there must equal a small layer of the same values.
 */
#define _GNU_SOURCE
#include "api.h"

#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define SANITIZED 1
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#        define SANITIZED 1
#    endif
#endif

/* ---- rows ---- */

enum { WINDOW = 1 << 21 }; /* bytes of memory behind each window of a batch */

/* `bytes` (whole windows) of address space: all windows but the last are the same memory. */
static uint8_t *windows(size_t bytes) {
    int same = memfd_create("megamoe_test_window", 0);
    assert_true(same >= 0);
    assert_int_equal(ftruncate(same, WINDOW), 0);
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(memory != MAP_FAILED);
    for (size_t at = 0; at + WINDOW < bytes; at += WINDOW)
        assert_true(mmap(memory + at, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, same, 0) == memory + at);
    close(same);
    return memory;
}

/*
 * More than 2^32 values of hidden states: 32-bit products of token and H would come out near the start. Only the
 * last tokens have experts, so that the others cost nothing but their way through the batch.
 */
static void last_rows_of_a_huge_batch(void **state) {
    enum { H = 65536 - 16, I = 16, K = 2, LAST = 4, TOKENS = 65536 + 64 };
    const size_t bytes = ((size_t)TOKENS * H * 2 + WINDOW - 1) / WINDOW * WINDOW;
    (void)state;
#ifdef SANITIZED
    skip();
#endif
    api_layer l = api_layer_random(api_shape(H, I, 2, K), 3);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_device *device = api_device(TOKENS);
    megamoe_layer *layer = api_create(device, &l, &options);
    uint8_t *hidden = windows(bytes), *output = windows(bytes);
    int32_t *ids = malloc((size_t)TOKENS * K * sizeof *ids);
    float *weights = malloc((size_t)TOKENS * K * sizeof *weights);
    const size_t tail = (size_t)(TOKENS - LAST) * H * 2;
    uint32_t seed = 7;
    assert_true((uint64_t)(TOKENS - LAST) * H > UINT32_MAX && bytes - tail <= WINDOW);
    for (size_t i = 0; i < (size_t)TOKENS * K; i++) ids[i] = -1, weights[i] = 0.5f;
    for (size_t i = 0; i < LAST * K; i++) ids[(size_t)(TOKENS - LAST) * K + i] = (int32_t)(i % 2);
    for (size_t i = 0; i < (size_t)LAST * H; i++) {
        uint16_t value = (uint16_t)((api_random(&seed) & 0x807F) | 0x3E00);
        memcpy(hidden + tail + 2 * i, &value, sizeof value);
    }
    uint16_t *expected = api_run(layer, &l.desc.shape, LAST, (const uint16_t *)(const void *)(hidden + tail),
                                 ids + (size_t)(TOKENS - LAST) * K, weights);
    assert_true(api_from_bf16(expected[5]) != 0.0f);
    assert_ok(megamoe_layer_run(layer,
                                &(megamoe_batch){.struct_size = sizeof(megamoe_batch),
                                                 .token_count = TOKENS,
                                                 .hidden = hidden,
                                                 .output = output,
                                                 .expert_ids = ids,
                                                 .expert_weights = weights},
                                NULL));
    assert_memory_equal(output + tail, expected, (size_t)LAST * H * 2);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    munmap(hidden, bytes);
    munmap(output, bytes);
    free(ids);
    free(weights);
}

/* ---- experts ---- */

static void *holes(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* Gate and up stacked in one tensor of 5.65 GB, down in one of 2.83 GB. */
static void last_expert_of_a_huge_stack(void **state) {
    enum { E = 385, H = 7168, I = 2048 };
    const size_t codes[2] = {(size_t)2 * I * H / 2, (size_t)H * I / 2}; /* of one expert */
    const size_t scales[2] = {(size_t)2 * I * H / 16, (size_t)H * I / 16};
    uint8_t *code[2], *scale[2];
    float *globals = malloc(E * sizeof *globals);
    uint32_t seed = 11;
    assert_true(codes[0] * E > UINT32_MAX);
    for (unsigned p = 0; p < 2; p++) {
        code[p] = holes(E * codes[p]);
        scale[p] = holes(E * scales[p]);
        for (size_t i = 0; i < codes[p]; i++) code[p][(E - 1) * codes[p] + i] = (uint8_t)api_random(&seed);
        for (size_t i = 0; i < scales[p]; i++)
            scale[p][(E - 1) * scales[p] + i] = (uint8_t)(0x21 + api_random(&seed) % 0x1F);
    }
    for (unsigned e = 0; e < E; e++) globals[e] = 0.001f * (1.0f + 0.01f * (float)e);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_device *device = api_device(1);
    uint16_t *hidden = api_hidden_integers(1, H), *outputs[2];
    for (uint32_t one = 0; one < 2; one++) { /* the whole stack, then a layer of its last expert alone */
        uint32_t count = one ? 1 : E, first = one ? E - 1 : 0;
        api_layer l = {.desc = {.struct_size = sizeof l.desc, .shape = api_shape(H, I, count, 1)}};
        megamoe_projection *projections[3] = {&l.desc.gate, &l.desc.up, &l.desc.down};
        for (unsigned p = 0; p < 3; p++) {
            int64_t n = p < 2 ? I : H, k = p < 2 ? H : I, rows = p < 2 ? 2 * I : H;
            size_t at = p == 1 ? (size_t)I * H : 0; /* up begins half an expert further */
            megamoe_projection *q = projections[p];
            q->codes = api_tensor(code[p / 2] + first * codes[p / 2] + at / 2, MEGAMOE_E2M1X2, 3, count, n, k);
            q->scales = api_tensor(scale[p / 2] + first * scales[p / 2] + at / 16, MEGAMOE_E4M3, 3, count, n, k / 16);
            q->global = api_tensor(globals + first, MEGAMOE_F32, 1, count, 0, 0);
            memcpy(q->codes.stride, (int64_t[4]){rows * k / 2, k / 2, 1}, sizeof q->codes.stride);
            memcpy(q->scales.stride, (int64_t[4]){rows * k / 16, k / 16, 1}, sizeof q->scales.stride);
        }
        megamoe_layer *layer = api_create(device, &l, &options);
        outputs[one] = api_run(layer, &l.desc.shape, 1, hidden, &(int32_t){one ? 0 : E - 1}, &(float){1.0f});
        megamoe_layer_close(layer);
    }
    assert_memory_equal(outputs[0], outputs[1], H * sizeof **outputs);
    assert_true(api_from_bf16(outputs[0][H - 1]) != 0.0f);
    for (unsigned p = 0; p < 2; p++) {
        munmap(code[p], E * codes[p]);
        munmap(scale[p], E * scales[p]);
    }
    free(globals);
    megamoe_device_close(device);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(last_rows_of_a_huge_batch),
        cmocka_unit_test(last_expert_of_a_huge_stack),
    };
    api_backend = MEGAMOE_CPU; /* at its best level: offsets are made outside the kernels */
    return cmocka_run_group_tests_name("large", tests, NULL, NULL);
}
