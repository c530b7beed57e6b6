/*
 * An engine's tensors, used where they lie: stacks in device memory (gate and up apart, as halves of one tensor, or row
 * by row in turns) give the bits that the same bytes in host memory give, and cost the device no second copy. Exit
 * status 77, with the reason, where there is no GPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver.h"
#include "backend/cuda/state.h"
#include "megamoe/megamoe.h"
#include "numerics/bf16.h"

enum { SKIPPED = 77, E = 6, H = 512, I = 256, K = 2, TOKENS_MAX = 70 };
enum { CODES = E * I * H / 2, SCALES = E * I * H / 16, GLOBALS = 3 * E * 4, BYTES = 3 * (CODES + SCALES) + GLOBALS };

static int failures;
static uint64_t seed = 3;

static uint32_t random_bits(void) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33);
}

/* All codes; scales near 1, each its own; globals that keep sums near 1. */
static void fill(uint8_t *memory) {
    for (size_t i = 0; i < 3 * CODES; i++) memory[i] = (uint8_t)random_bits();
    for (size_t i = 3 * CODES; i < 3 * (CODES + SCALES); i++) memory[i] = (uint8_t)(0x30 + random_bits() % 16);
    for (size_t i = 0; i < 3 * E; i++) {
        const float global = 0.02f + 0.003f * (float)i;
        memcpy(memory + 3 * (CODES + SCALES) + i * 4, &global, 4);
    }
}

typedef enum layout { APART, HALVES, IN_TURNS } layout;
static const char *const layout_names[] = {"apart", "halves of one tensor", "rows in turns"};

/* Rows step `step`, experts `expert_rows` rows apart, beginning with row `first` of the stack at `codes`, `scales`. */
static megamoe_projection projection(const uint8_t *base, int which, size_t stack, size_t step, size_t expert_rows,
                                     size_t first) {
    const size_t rows = which == 2 ? H : I, columns = which == 2 ? I : H;
    const uint8_t *codes = base + stack * CODES + first * columns / 2;
    const uint8_t *scales = base + 3 * CODES + stack * SCALES + first * columns / 16;
    return (megamoe_projection){
        .codes = {.data = (void *)(uintptr_t)codes,
                  .dtype = MEGAMOE_U8,
                  .rank = 3,
                  .extent = {E, (int64_t)rows, (int64_t)columns / 2},
                  .stride = {(int64_t)(expert_rows * columns / 2), (int64_t)(step * columns / 2), 1}},
        .scales = {.data = (void *)(uintptr_t)scales,
                   .dtype = MEGAMOE_E4M3,
                   .rank = 3,
                   .extent = {E, (int64_t)rows, (int64_t)columns / 16},
                   .stride = {(int64_t)(expert_rows * columns / 16), (int64_t)(step * columns / 16), 1}},
        .global = {.data = (void *)(uintptr_t)(base + 3 * (CODES + SCALES) + (size_t)which * E * 4),
                   .dtype = MEGAMOE_F32,
                   .rank = 1,
                   .extent = {E}}};
}

static megamoe_layer_desc describe(const uint8_t *base, layout how) {
    const size_t step = how == IN_TURNS ? 2 : 1, expert_rows = how == APART ? I : 2 * I;
    megamoe_layer_desc desc = {.struct_size = sizeof desc,
                               .shape = {.hidden = H,
                                         .intermediate = I,
                                         .expert_count = E,
                                         .experts_per_token = K,
                                         .group_size = 16,
                                         .score = MEGAMOE_SQRTSOFTPLUS,
                                         .routed_scale = 1.0f,
                                         .swiglu_alpha = 1.0f}};
    desc.gate = projection(base, 0, 0, step, expert_rows, 0);
    desc.up = projection(base, 1, how == APART, step, expert_rows, how == HALVES ? I : how == IN_TURNS);
    desc.down = projection(base, 2, 2, 1, H, 0);
    return desc;
}

static uint64_t device_bytes(const megamoe_device *device) {
    uint64_t host, bytes;
    megamoe_device_memory(device, &host, &bytes);
    return bytes;
}

/* Output of the layer at `base`, in its own device; *grown: device memory of a second such layer. */
static bool run(megamoe_backend backend, const uint8_t *base, layout how, uint32_t tokens, const megamoe_batch *batch,
                uint64_t *grown) {
    megamoe_device_options options = {.struct_size = sizeof options, .backend = backend, .max_tokens = tokens};
    const megamoe_layer_desc desc = describe(base, how);
    megamoe_device *device = NULL;
    megamoe_layer *layer = NULL, *second = NULL;
    bool good = megamoe_device_open(&options, &device) == MEGAMOE_OK &&
                megamoe_layer_create(device, &desc, NULL, &layer) == MEGAMOE_OK &&
                megamoe_layer_run(layer, batch, NULL) == MEGAMOE_OK;
    if (good) {
        *grown = device_bytes(device);
        good = megamoe_layer_create(device, &desc, NULL, &second) == MEGAMOE_OK;
        *grown = device_bytes(device) - *grown;
    }
    if (!good) printf("FAIL %s: %s\n", layout_names[how], megamoe_error_message());
    megamoe_layer_close(second);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    return good;
}

static void compare(megamoe_backend backend, const char *name, const uint8_t *host, const uint8_t *device, layout how,
                    uint32_t tokens) {
    static uint16_t hidden[TOKENS_MAX * H], outputs[2][TOKENS_MAX * H];
    static int32_t ids[TOKENS_MAX * K];
    static float weights[TOKENS_MAX * K];
    uint64_t grown[2];
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = hidden,
                           .hidden_dtype = MEGAMOE_BF16,
                           .expert_ids = ids,
                           .expert_weights = weights};
    for (size_t i = 0; i < tokens * H; i++) hidden[i] = mm_bf16_from_f32((float)(int32_t)(random_bits() % 201) * 0.01f);
    for (size_t i = 0; i < tokens; i++) {
        ids[i * K] = (int32_t)(random_bits() % E), ids[i * K + 1] = (ids[i * K] + 1) % E;
        weights[i * K] = 0.7f, weights[i * K + 1] = 0.4f;
    }
    memset(outputs, 0x7F, sizeof outputs);
    for (int i = 0; i < 2; i++) {
        batch.output = outputs[i];
        if (!run(backend, i ? device : host, how, tokens, &batch, &grown[i])) {
            failures++;
            return;
        }
    }
    size_t nonzero = 0;
    for (size_t i = 0; i < tokens * H; i++) nonzero += (outputs[0][i] & 0x7FFF) != 0;
    if (memcmp(outputs[0], outputs[1], tokens * H * 2) != 0 || nonzero < tokens * H / 2)
        failures++, printf("FAIL %s, %s, %u tokens: device and host tensors give different bits\n", name,
                           layout_names[how], tokens);
    if (grown[0] < 3 * (CODES + SCALES) || grown[1] > (CODES + SCALES) / 4)
        failures++, printf("FAIL %s, %s: a layer of host tensors takes %llu bytes, of device tensors %llu\n", name,
                           layout_names[how], (unsigned long long)grown[0], (unsigned long long)grown[1]);
}

/* The bytes of `host` in device memory of the context that every device of this process shares. */
static CUdeviceptr upload(mm_backend_state *state, const uint8_t *host) {
    CUdeviceptr p = 0;
    if (mm_cuda_enter(state) != MEGAMOE_OK || state->driver->memory_allocate(&p, BYTES) != CUDA_SUCCESS ||
        state->driver->copy_to_device(p, host, BYTES, state->stream) != CUDA_SUCCESS ||
        state->driver->stream_wait(state->stream) != CUDA_SUCCESS) {
        printf("FAIL: no device memory\n");
        exit(1);
    }
    mm_cuda_leave(state);
    return p;
}

int main(int argc, char **argv) {
    const bool model = argc > 1 && strcmp(argv[1], "model") == 0; /* what the functional model has time for */
    static const struct {
        const mm_backend *backend;
        megamoe_backend number;
    } backends[] = {{&mm_backend_sm90, MEGAMOE_SM90}, {&mm_backend_cuda_portable, MEGAMOE_CUDA_PORTABLE}};
    static const uint32_t counts[] = {1, 9, TOKENS_MAX};
    uint8_t *host = malloc(BYTES);
    int ran = 0;
    fill(host);
    for (size_t b = 0; b < 2; b++) {
        megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
        mm_backend_state *state;
        if (backends[b].backend->probe(0) != MEGAMOE_OK) {
            printf("skipped %s: %s\n", backends[b].backend->name, megamoe_error_message());
            continue;
        }
        if (backends[b].backend->open(&options, &state) != MEGAMOE_OK) return printf("FAIL: open\n"), 1;
        const CUdeviceptr device = upload(state, host);
        for (layout how = APART; how <= IN_TURNS; how++)
            for (size_t i = 0; i < (model ? 1 : sizeof counts / sizeof *counts); i++, ran++)
                compare(backends[b].number, backends[b].backend->name, host, (const uint8_t *)(uintptr_t)device, how,
                        counts[i]);
        mm_cuda_enter(state);
        state->driver->memory_free(device);
        mm_cuda_leave(state);
        backends[b].backend->close(state);
    }
    free(host);
    if (!ran) return SKIPPED;
    printf("%d layers, %d failures\n", ran, failures);
    return failures ? 1 : 0;
}
