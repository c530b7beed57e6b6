/*
 * Sizes that are multiples of no tile, every number of rows at which a kernel may be exchanged for another, and
 * memory that remembers: what an earlier batch left behind, padding, and what lies past the end of a buffer must
 * not reach a result. Integer layers are exact, so a single term too many shows.
 */
#include "api.h"

#include <sys/mman.h>
#include <unistd.h>

#define TOKENS_MAX 1026u

/* Memory whose last byte is followed by a page that cannot be touched; filled with `poison`. */
static void *guarded(size_t bytes, int poison) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    uint8_t *memory = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory + whole, page, PROT_NONE), 0);
    memset(memory, poison, whole);
    return memory + whole - bytes;
}

static void release(void *memory, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    assert_int_equal(munmap((uint8_t *)memory + bytes - whole, whole + page), 0);
}

static void *guarded_copy(const void *from, size_t bytes) {
    return memcpy(guarded(bytes, 0x7F), from, bytes);
}

/* The layer's weights, each array with a guard page behind it. */
static api_layer guard_weights(const api_layer *plain) {
    api_layer l = *plain;
    megamoe_projection *projections[3] = {&l.desc.gate, &l.desc.up, &l.desc.down};
    size_t values = (size_t)l.desc.shape.expert_count * l.desc.shape.hidden * l.desc.shape.intermediate;
    for (unsigned p = 0; p < 3; p++) {
        projections[p]->codes.data = l.codes[p] = guarded_copy(plain->codes[p], values / 2);
        projections[p]->scales.data = l.scales[p] = guarded_copy(plain->scales[p], values / 16);
    }
    return l;
}

static void release_weights(const api_layer *l) {
    size_t values = (size_t)l->desc.shape.expert_count * l->desc.shape.hidden * l->desc.shape.intermediate;
    for (unsigned p = 0; p < 3; p++) {
        release(l->codes[p], values / 2);
        release(l->scales[p], values / 16);
    }
}

/* A batch of `tokens` rows that all hold `value`, so that scratch is full of what comes of it. */
static void dirty(megamoe_layer *layer, uint32_t tokens, uint16_t value, const int32_t *ids, const float *weights) {
    megamoe_layer_facts facts = {.struct_size = sizeof facts};
    megamoe_layer_describe(layer, &facts);
    size_t bytes = (size_t)tokens * facts.shape.hidden * sizeof(uint16_t);
    uint16_t *hidden = malloc(bytes), *output = malloc(bytes);
    for (size_t i = 0; i < bytes / 2; i++) hidden[i] = value;
    assert_ok(megamoe_layer_run(layer,
                                &(megamoe_batch){.struct_size = sizeof(megamoe_batch),
                                                 .token_count = tokens,
                                                 .hidden = hidden,
                                                 .output = output,
                                                 .expert_ids = ids,
                                                 .expert_weights = weights},
                                NULL));
    free(hidden);
    free(output);
}

/* A layer a little larger in every direction whose weights are all NaN, on the same device: its rows are longer, so
 * that they leave NaN in the padding of the smaller layer's rows. */
static megamoe_layer *wider_layer_of_nan(megamoe_device *device, megamoe_shape shape) {
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    shape.hidden += 48;
    shape.intermediate += 48;
    api_layer l = api_layer_integers(shape, 1);
    for (unsigned p = 0; p < 3; p++)
        memset(l.scales[p], 0x7F, (size_t)shape.expert_count * shape.hidden * shape.intermediate / 16);
    return api_create(device, &l, &options);
}

/* Runs the first `tokens` rows from and into guarded memory that was full of `poison`. */
static void expect_rows(megamoe_layer *layer, const api_layer *l, uint32_t tokens, int poison, const uint16_t *hidden,
                        const int32_t *ids, const float *weights, const uint16_t *expected) {
    const megamoe_shape *s = &l->desc.shape;
    size_t bytes = (size_t)tokens * s->hidden * 2, pairs = (size_t)tokens * s->experts_per_token;
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = tokens,
                           .hidden = guarded_copy(hidden, bytes),
                           .output = guarded(bytes, poison),
                           .expert_ids = guarded_copy(ids, pairs * sizeof *ids),
                           .expert_weights = guarded_copy(weights, pairs * sizeof *weights)};
    assert_ok(megamoe_layer_run(layer, &batch, NULL));
    if (memcmp(batch.output, expected, bytes) != 0)
        fail_msg("hidden %u, %u experts, %u slots, %u tokens: not what integers give", s->hidden, s->expert_count,
                 s->experts_per_token, tokens);
    release((void *)(uintptr_t)batch.hidden, bytes);
    release(batch.output, bytes);
    release((void *)(uintptr_t)batch.expert_ids, pairs * sizeof *ids);
    release((void *)(uintptr_t)batch.expert_weights, pairs * sizeof *weights);
}

typedef struct sweep {
    uint32_t hidden, intermediate, experts, slots;
    const uint32_t *tokens; /* ends with 0; the first is the largest */
} sweep;

/* One integer layer at all numbers of tokens, each after a batch of NaN through itself or a wider layer. */
static void run_sweep(const sweep *c) {
    megamoe_shape shape = api_shape(c->hidden, c->intermediate, c->experts, c->slots);
    uint32_t most = c->tokens[0], pairs = most * c->slots;
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    int32_t *ids = malloc(pairs * sizeof *ids);
    float *weights = malloc(pairs * sizeof *weights);
    uint16_t *hidden = api_hidden_integers(most, c->hidden), *expected;
    shape.not_gated = true;
    api_layer plain = api_layer_integers(shape, c->hidden + c->slots), l = guard_weights(&plain);
    for (uint32_t i = 0; i < pairs; i++) {
        ids[i] = (int32_t)((i / c->slots * 7 + i % c->slots) % c->experts);
        weights[i] = (float)(1 + i % 3);
    }
    expected = malloc((size_t)most * c->hidden * sizeof *expected);
    for (size_t t = 0; t < most; t++)
        api_expected_integers(&l, hidden + t * c->hidden, ids + t * c->slots, weights + t * c->slots,
                              expected + t * c->hidden);
    megamoe_device *device = api_device(most);
    megamoe_layer *layer = api_create(device, &l, &options), *wide = wider_layer_of_nan(device, shape);
    for (unsigned i = 0; c->tokens[i]; i++) {
        dirty(i % 3 ? wide : layer, most < 140 ? most : 140, 0x7FC0, ids, weights);
        expect_rows(layer, &l, c->tokens[i], i % 2 ? 0x7F : 0xAA, hidden, ids, weights, expected);
    }
    megamoe_layer_close(wide);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    release_weights(&l);
    free(ids);
    free(weights);
    free(expected);
}

static void padding_adds_nothing(void **state) {
    static const uint32_t sizes[] = {64, 80, 96, 160, 2880};
    static const uint32_t tokens[] = {129, 1, 5, 31, 32, 33, 127, 128, 0};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) run_sweep(&(sweep){sizes[i], 48, 3, 2, tokens});
    (void)state;
}

/* One expert takes all rows, so that every number of rows up to 40 meets the kernel made for it. */
static void every_number_of_rows(void **state) {
    uint32_t tokens[64] = {TOKENS_MAX, 1025, 1024, 1023, 512, 384, 129, 128, 127, 65, 64, 63, 49, 48, 47}, n = 15;
    for (uint32_t rows = 1; rows <= 40; rows++) tokens[n++] = rows;
    run_sweep(&(sweep){80, 48, 1, 1, tokens});
    (void)state;
}

static void several_slots(void **state) {
    static const uint32_t tokens[] = {129, 1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 0};
    static const uint32_t slots_and_experts[][2] = {{2, 8}, {6, 48}, {8, 48}, {10, 10}};
    for (unsigned i = 0; i < 4; i++)
        run_sweep(&(sweep){64, 32, slots_and_experts[i][1], slots_and_experts[i][0], tokens});
    (void)state;
}

/* ---- rows of other batches ---- */

/* Rows of a batch that came before, full of anything, change no bit of the eight that follow. */
static void earlier_rows_leave_nothing_behind(void **state) {
    enum { CAPACITY = 64, REAL = 8, H = 96, I = 80, E = 8, K = 2 };
    static const uint16_t fills[] = {0x7FC0, 0x7F80, 0x714A /* 1e30 */, 0};
    int32_t ids[CAPACITY * K];
    float weights[CAPACITY * K];
    uint32_t seed = 3;
    api_layer l = api_layer_random(api_shape(H, I, E, K), 9);
    uint16_t *hidden = api_alloc(REAL * H * sizeof *hidden);
    for (int i = 0; i < CAPACITY * K; i++) ids[i] = (i / K + i % K * 3) % E, weights[i] = 0.3f + 0.01f * (float)i;
    for (int i = 0; i < REAL * H; i++)
        hidden[i] = (uint16_t)((api_random(&seed) & 0x807F) | (0x3E00 + (api_random(&seed) % 3 << 7)));
    for (megamoe_activations a = MEGAMOE_ACTIVATIONS_BF16; a <= MEGAMOE_ACTIVATIONS_NVFP4; a++) {
        megamoe_layer_options options = api_options(a);
        megamoe_device *device = api_device(CAPACITY);
        megamoe_layer *layer = api_create(device, &l, &options);
        uint16_t *expected = api_run(layer, &l.desc.shape, REAL, hidden, ids, weights);
        for (unsigned f = 0; f < sizeof fills / sizeof *fills; f++) {
            dirty(layer, CAPACITY, fills[f], ids, weights);
            assert_memory_equal(api_run(layer, &l.desc.shape, REAL, hidden, ids, weights), expected,
                                REAL * H * sizeof *expected);
        }
        megamoe_layer_close(layer);
        megamoe_device_close(device);
    }
    (void)state;
}

/* ---- the kernel that runs ---- */

enum { LONG = 1100, H = 160, I = 112, E = 24, K = 2 };

typedef struct scene {
    api_layer weights;
    megamoe_device *device;
    megamoe_layer *layer;
    uint16_t *hidden;
    int32_t ids[LONG * K];
    float route_weights[LONG * K];
} scene;

static void scene_make(scene *s, megamoe_activations activations, bool batch_invariant) {
    megamoe_layer_options options = api_options(activations);
    const megamoe_device_options open = {.struct_size = sizeof open,
                                         .backend = api_backend,
                                         .threads = 2,
                                         .max_tokens = LONG,
                                         .batch_invariant = batch_invariant};
    uint32_t seed = 5;
    s->weights = api_layer_random(api_shape(H, I, E, K), 19);
    assert_ok(megamoe_device_open(&open, &s->device));
    s->layer = api_create(s->device, &s->weights, &options);
    s->hidden = api_alloc((size_t)LONG * H * sizeof *s->hidden);
    for (int i = 0; i < LONG * H; i++)
        s->hidden[i] = (uint16_t)((api_random(&seed) & 0x807F) | (0x3E00 + (api_random(&seed) % 4 << 7)));
    for (int32_t i = 0; i < LONG * K; i++) {
        s->ids[i] = (i * 5 + i / K) % E;
        s->route_weights[i] = 0.2f + 0.001f * (float)i;
    }
}

static void scene_close(scene *s) {
    megamoe_layer_close(s->layer);
    megamoe_device_close(s->device);
}

/* Results of L2 [count, K, H] in fp32, where the order of a sum shows; BF16 would hide most of it. */
static float *l2_of(scene *s, const uint16_t *hidden, const int32_t *ids, const float *weights, uint32_t count) {
    float *l2 = api_alloc((size_t)count * K * H * sizeof *l2);
    uint16_t *output = api_alloc((size_t)count * H * sizeof *output);
    megamoe_stages stages = {.struct_size = sizeof stages, .l2 = l2};
    const megamoe_batch batch = {.struct_size = sizeof batch,
                                 .token_count = count,
                                 .hidden = hidden,
                                 .output = output,
                                 .expert_ids = ids,
                                 .expert_weights = weights};
    assert_ok(megamoe_layer_run_stages(s->layer, &batch, NULL, &stages, NULL));
    return l2;
}

/* batch_invariant: eight tokens alone and anywhere inside larger batches are the same bits. */
static void invariant_tokens_ignore_their_batch(void **state) {
    static const uint32_t sizes[] = {16, 64, 257, LONG};
    for (megamoe_activations a = MEGAMOE_ACTIVATIONS_BF16; a <= MEGAMOE_ACTIVATIONS_NVFP4; a++) {
        scene s;
        scene_make(&s, a, true);
        for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            float *all = l2_of(&s, s.hidden, s.ids, s.route_weights, sizes[i]);
            const uint32_t places[] = {0, 3, sizes[i] - 8};
            for (unsigned p = 0; p < 3; p++) {
                size_t at = places[p];
                float *alone = l2_of(&s, s.hidden + at * H, s.ids + at * K, s.route_weights + at * K, 8);
                assert_memory_equal(alone, all + at * K * H, 8 * K * H * sizeof *all);
            }
        }
        scene_close(&s);
    }
    (void)state;
}

/*
 * Without the flag the rows of an expert in the whole batch decide, wherever the batch is cut: turned around, the
 * tokens fall into other chunks with other numbers of rows, and are the same bits.
 */
static void place_in_a_long_batch_does_not_matter(void **state) {
    for (megamoe_activations a = MEGAMOE_ACTIVATIONS_BF16; a <= MEGAMOE_ACTIVATIONS_NVFP4; a++) {
        scene s;
        scene_make(&s, a, false);
        uint16_t *hidden = api_alloc((size_t)LONG * H * sizeof *hidden);
        int32_t ids[LONG * K];
        float weights[LONG * K];
        for (size_t t = 0; t < LONG; t++) {
            size_t from = LONG - 1 - t;
            memcpy(hidden + t * H, s.hidden + from * H, H * sizeof *hidden);
            memcpy(ids + t * K, s.ids + from * K, K * sizeof *ids);
            memcpy(weights + t * K, s.route_weights + from * K, K * sizeof *weights);
        }
        float *ahead = l2_of(&s, s.hidden, s.ids, s.route_weights, LONG);
        float *turned = l2_of(&s, hidden, ids, weights, LONG);
        for (size_t t = 0; t < LONG; t++)
            assert_memory_equal(turned + t * K * H, ahead + (LONG - 1 - t) * K * H, K * H * sizeof *ahead);
        scene_close(&s);
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(padding_adds_nothing),
        cmocka_unit_test(every_number_of_rows),
        cmocka_unit_test(several_slots),
        cmocka_unit_test(earlier_rows_leave_nothing_behind),
        cmocka_unit_test(invariant_tokens_ignore_their_batch),
        cmocka_unit_test(place_in_a_long_batch_does_not_matter),
    };
    return API_RUN(tests);
}
