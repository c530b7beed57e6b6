/* Devices in different threads do not know of each other; each thread has its own error sentence. */
#include "api.h"

#include <pthread.h>

#define T 9u
#define ROUNDS 20

typedef struct worker {
    megamoe_device *device;
    megamoe_layer *layer;
    const uint16_t *hidden, *expected;
    const int32_t *ids;
    const float *weights;
    uint32_t hidden_size, wrong;
    char sentence[16];
} worker;

/* No cmocka here: it belongs to the main thread. */
static void *run_often(void *argument) {
    worker *w = argument;
    uint16_t output[T * 96];
    megamoe_batch batch = {.struct_size = sizeof batch,
                           .token_count = T,
                           .hidden = w->hidden,
                           .output = output,
                           .expert_ids = w->ids,
                           .expert_weights = w->weights};
    for (int i = 0; i < ROUNDS; i++) {
        megamoe_batch bad = batch;
        bad.token_count = T + 1 + w->hidden_size; /* a different sentence in each thread */
        memset(output, 0x7F, sizeof output);
        if (megamoe_layer_run(w->layer, &batch, NULL) != MEGAMOE_OK ||
            memcmp(output, w->expected, T * w->hidden_size * 2) != 0)
            w->wrong++;
        if (megamoe_layer_run(w->layer, &bad, NULL) != MEGAMOE_INVALID_ARGUMENT ||
            !strstr(megamoe_error_message(), w->sentence))
            w->wrong++;
    }
    return NULL;
}

static void two_devices_in_two_threads(void **state) {
    worker workers[2];
    pthread_t threads[2];
    static const uint32_t sizes[2] = {64, 96};
    for (unsigned i = 0; i < 2; i++) {
        worker *w = &workers[i];
        api_layer l = api_layer_random(api_shape(sizes[i], 80, 4, 2), 31 + i);
        megamoe_layer_options options = api_options(i ? MEGAMOE_ACTIVATIONS_NVFP4 : MEGAMOE_ACTIVATIONS_BF16);
        int32_t *ids = api_alloc(T * 2 * sizeof *ids);
        float *weights = api_alloc(T * 2 * sizeof *weights);
        for (int32_t j = 0; j < (int32_t)T * 2; j++) {
            ids[j] = (j + j / 2) % 4;
            weights[j] = 0.3f + 0.01f * (float)j;
        }
        *w = (worker){.device = api_device(T), .hidden_size = sizes[i], .ids = ids, .weights = weights};
        snprintf(w->sentence, sizeof w->sentence, "%u tokens", T + 1 + sizes[i]);
        w->hidden = api_hidden_integers(T, sizes[i]);
        w->layer = api_create(w->device, &l, &options);
        w->expected = api_run(w->layer, &l.desc.shape, T, w->hidden, ids, weights);
    }
    for (unsigned i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, run_often, &workers[i]), 0);
    for (unsigned i = 0; i < 2; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(workers[i].wrong, 0);
        megamoe_layer_close(workers[i].layer);
        megamoe_device_close(workers[i].device);
    }
    (void)state;
}

/* One device, two layers of different sizes: its scratch fits the larger one, whichever was made first. */
static void two_layers_on_one_device(void **state) {
    for (unsigned order = 0; order < 2; order++) {
        megamoe_device *device = api_device(T);
        megamoe_layer *layers[2];
        megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
        api_layer plain[2];
        uint16_t *first[2];
        const int32_t ids[T] = {0, 1, 1, 0, 1, 0, 0, 1, 0};
        const float weights[T] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
        for (unsigned i = 0; i < 2; i++) {
            uint32_t size = (i == order) ? 32 : 224;
            plain[i] = api_layer_random(api_shape(size, size + 16, 2, 1), 5 + i);
            layers[i] = api_create(device, &plain[i], &options);
        }
        for (unsigned round = 0; round < 4; round++) {
            unsigned i = round % 2;
            const megamoe_shape *shape = &plain[i].desc.shape;
            uint16_t *hidden = api_hidden_integers(T, shape->hidden);
            uint16_t *output = api_run(layers[i], shape, T, hidden, ids, weights);
            if (round < 2)
                first[i] = output;
            else
                assert_memory_equal(output, first[i], T * shape->hidden * 2);
        }
        for (unsigned i = 0; i < 2; i++) megamoe_layer_close(layers[i]);
        megamoe_device_close(device);
    }
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_devices_in_two_threads),
        cmocka_unit_test(two_layers_on_one_device),
    };
    return API_RUN(tests);
}
