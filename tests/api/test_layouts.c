/*
 * Weights in the layouts that engines hold them in: gate and up as halves of one tensor, rows interleaved,
 * slices of the intermediate size. Only pitches differ, so results must be the same bits as from plain
 * arrays.
 */
#include "api.h"

#define H 64u
#define T 5u
#define K 2u

static void routing(int32_t *ids, float *weights, uint32_t experts) {
    for (int32_t i = 0; i < (int32_t)(T * K); i++) {
        ids[i] = (i * 2 + i / 2) % (int32_t)experts;
        weights[i] = 0.25f + 0.0625f * (float)i;
    }
}

static uint16_t *output_of(megamoe_device *device, const api_layer *l, megamoe_activations activations,
                           const uint16_t *hidden) {
    megamoe_layer_options options = api_options(activations);
    megamoe_layer *layer = api_create(device, l, &options);
    int32_t ids[T * K];
    float weights[T * K];
    uint16_t *output;
    routing(ids, weights, l->desc.shape.expert_count);
    output = api_run(layer, &l->desc.shape, T, hidden, ids, weights);
    megamoe_layer_close(layer);
    return output;
}

/* Row n of gate goes to row n * step of the stack, row n of up `up_first` rows below gate's first. */
static api_layer stacked(const api_layer *plain, uint32_t step, uint32_t up_first) {
    api_layer l = *plain;
    const megamoe_shape *s = &plain->desc.shape;
    megamoe_projection *projections[2] = {&l.desc.gate, &l.desc.up};
    size_t rows = 2 * (size_t)s->intermediate, row = H / 2, scale_row = H / 16;
    uint8_t *codes = api_alloc(s->expert_count * rows * row);
    uint8_t *scales = api_alloc(s->expert_count * rows * scale_row);
    for (unsigned p = 0; p < 2; p++) {
        size_t first = p * up_first;
        megamoe_projection *q = projections[p];
        for (size_t e = 0; e < s->expert_count; e++)
            for (size_t n = 0; n < s->intermediate; n++) {
                size_t from = e * s->intermediate + n, to = e * rows + first + n * step;
                memcpy(codes + to * row, plain->codes[p] + from * row, row);
                memcpy(scales + to * scale_row, plain->scales[p] + from * scale_row, scale_row);
            }
        q->codes.data = codes + first * row;
        q->scales.data = scales + first * scale_row;
        memcpy(q->codes.stride, (int64_t[4]){(int64_t)(rows * row), (int64_t)(step * row), 1}, 4 * 8);
        memcpy(q->scales.stride, (int64_t[4]){(int64_t)(rows * scale_row), (int64_t)(step * scale_row), 1}, 4 * 8);
    }
    return l;
}

static void halves_of_one_tensor(void **state) {
    const uint32_t intermediate = 80;
    api_layer plain = api_layer_random(api_shape(H, intermediate, 3, K), 11);
    api_layer halves = stacked(&plain, 1, intermediate), interleaved = stacked(&plain, 2, 1);
    megamoe_device *device = api_device(T);
    uint16_t *hidden = api_hidden_integers(T, H);
    for (megamoe_activations a = MEGAMOE_ACTIVATIONS_BF16; a <= MEGAMOE_ACTIVATIONS_NVFP4; a++) {
        uint16_t *expected = output_of(device, &plain, a, hidden);
        assert_memory_equal(output_of(device, &halves, a, hidden), expected, T * H * 2);
        assert_memory_equal(output_of(device, &interleaved, a, hidden), expected, T * H * 2);
    }
    megamoe_device_close(device);
    (void)state;
}

/* Bytes in U8 and I8 tensors, as torch has them, are the same codes. */
static void packed_bytes(void **state) {
    api_layer plain = api_layer_random(api_shape(H, 80, 3, K), 12), packed = plain;
    megamoe_device *device = api_device(T);
    uint16_t *hidden = api_hidden_integers(T, H);
    const megamoe_dtype dtypes[] = {MEGAMOE_U8, MEGAMOE_I8};
    for (unsigned i = 0; i < 2; i++) {
        megamoe_tensor *codes[3] = {&packed.desc.gate.codes, &packed.desc.up.codes, &packed.desc.down.codes};
        packed = plain;
        for (unsigned p = 0; p < 3; p++) {
            codes[p]->dtype = dtypes[i];
            codes[p]->extent[2] /= 2;
        }
        assert_memory_equal(output_of(device, &packed, MEGAMOE_ACTIVATIONS_BF16, hidden),
                            output_of(device, &plain, MEGAMOE_ACTIVATIONS_BF16, hidden), T * H * 2);
    }
    megamoe_device_close(device);
    (void)state;
}

/* Rows `first` .. `first + count` of gate and up, and the same columns of down: one rank of a tensor-parallel
 * engine. */
static api_layer slice(const api_layer *whole, uint32_t first, uint32_t count) {
    api_layer l = *whole;
    uint32_t i = whole->desc.shape.intermediate;
    megamoe_projection *p[2] = {&l.desc.gate, &l.desc.up};
    l.desc.shape.intermediate = count;
    for (unsigned j = 0; j < 2; j++) {
        p[j]->codes.data = whole->codes[j] + (size_t)first * H / 2;
        p[j]->scales.data = whole->scales[j] + (size_t)first * H / 16;
        p[j]->codes.extent[1] = p[j]->scales.extent[1] = count;
        memcpy(p[j]->codes.stride, (int64_t[4]){(int64_t)i * H / 2, H / 2, 1}, 4 * 8);
        memcpy(p[j]->scales.stride, (int64_t[4]){(int64_t)i * H / 16, H / 16, 1}, 4 * 8);
    }
    l.desc.down.codes.data = whole->codes[2] + first / 2;
    l.desc.down.scales.data = whole->scales[2] + first / 16;
    l.desc.down.codes.extent[2] = count;
    l.desc.down.scales.extent[2] = count / 16;
    memcpy(l.desc.down.codes.stride, (int64_t[4]){(int64_t)H * i / 2, i / 2, 1}, 4 * 8);
    memcpy(l.desc.down.scales.stride, (int64_t[4]){(int64_t)H * i / 16, i / 16, 1}, 4 * 8);
    return l;
}

/* l1 [T, K, 2, I] and l2 [T, K, H] of a layer. */
static void stages_of(megamoe_device *device, const api_layer *l, const uint16_t *hidden, float *l1, float *l2) {
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer *layer = api_create(device, l, &options);
    int32_t ids[T * K];
    float weights[T * K];
    uint16_t output[T * H];
    megamoe_stages stages = {.struct_size = sizeof stages, .l1 = l1, .l2 = l2};
    const megamoe_batch batch = {.struct_size = sizeof batch,
                                 .token_count = T,
                                 .hidden = hidden,
                                 .output = output,
                                 .expert_ids = ids,
                                 .expert_weights = weights};
    routing(ids, weights, l->desc.shape.expert_count);
    assert_ok(megamoe_layer_run_stages(layer, &batch, NULL, &stages, NULL));
    megamoe_layer_close(layer);
}

/* Whole groups of 16 to each rank, the first ranks one more where they do not come out even. */
static void check_slices(uint32_t intermediate, uint32_t ranks, bool gated) {
    megamoe_shape shape = api_shape(H, intermediate, 2, K);
    api_layer whole;
    megamoe_device *device = api_device(T);
    uint16_t *hidden = api_hidden_integers(T, H);
    size_t groups = intermediate / 16, first = 0, pairs = T * K;
    float *l1 = api_alloc(pairs * 2 * intermediate * 4), *l2 = api_alloc(pairs * H * 4);
    float *part_l1 = api_alloc(pairs * 2 * intermediate * 4), *part_l2 = api_alloc(pairs * H * 4);
    double sums[T * K * H] = {0};
    shape.not_gated = !gated;
    whole = api_layer_integers(shape, intermediate);
    stages_of(device, &whole, hidden, l1, l2);
    for (size_t r = 0; r < ranks; r++) {
        size_t count = 16 * (groups / ranks + (r < groups % ranks));
        api_layer part = slice(&whole, (uint32_t)first, (uint32_t)count);
        stages_of(device, &part, hidden, part_l1, part_l2);
        for (size_t i = 0; i < pairs; i++)
            for (size_t half = gated ? 0 : 1; half < 2; half++)
                assert_memory_equal(part_l1 + (i * 2 + half) * count, l1 + (i * 2 + half) * intermediate + first,
                                    count * 4);
        for (size_t i = 0; i < pairs * H; i++) sums[i] += (double)part_l2[i];
        first += count;
    }
    assert_int_equal(first, intermediate);
    for (size_t i = 0; i < pairs * H; i++) {
        /* relu2 of integers is exact; SiLU leaves the freedom of the order of an fp32 sum */
        double allowed = gated ? 1e-5 * (fabs((double)l2[i]) + 16 * sqrt(intermediate)) : 0;
        assert_true(fabs(sums[i] - (double)l2[i]) <= allowed);
    }
    megamoe_device_close(device);
}

static void slices_of_the_intermediate_size(void **state) {
    static const uint32_t cases[][2] = {{1856, 8}, {640, 8},  {640, 4},  {704, 2},
                                        {2880, 4}, {2688, 4}, {1536, 8}, {3072, 8}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_slices(cases[i][0], cases[i][1], true);
        check_slices(cases[i][0], cases[i][1], false);
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_of_one_tensor),
        cmocka_unit_test(packed_bytes),
        cmocka_unit_test(slices_of_the_intermediate_size),
    };
    return API_RUN(tests);
}
