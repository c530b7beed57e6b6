/*
 * A layer loaded from a checkpoint and one made of the same bytes in the caller's memory are the same layer,
 * bit for bit: routed by the layer itself, with a router bias and a shared expert, in both activation modes.
 */
#include "api.h"

#include <sys/stat.h>
#include <unistd.h>

#define H 96u
#define I 80u
#define E 6u
#define K 3u
#define T 11u
#define TENSORS_MAX 128u

static const char config[] =
    "{\"model_type\": \"deepseek_v4\", \"hidden_size\": 96, \"moe_intermediate_size\": 80,"
    " \"n_routed_experts\": 6, \"num_experts_per_tok\": 3, \"num_hidden_layers\": 2, \"num_hash_layers\": 0,"
    " \"scoring_func\": \"sqrtsoftplus\", \"norm_topk_prob\": true, \"routed_scaling_factor\": 2.5,"
    " \"swiglu_limit\": 10.0, \"n_shared_experts\": 1}";

typedef struct model {
    api_layer layer;
    uint16_t *router, *shared[3]; /* BF16 [E, H]; gate, up [I, H], down [H, I] */
    float *bias;
    char directory[256], file[320], config_path[320];
} model;

static const char *const letters[3] = {"w1", "w3", "w2"}; /* gate, up, down */

static uint16_t *bf16_random(size_t count, uint32_t *seed) {
    uint16_t *values = api_alloc(count * sizeof *values);
    for (size_t i = 0; i < count; i++) /* magnitudes from 1/32 to 1/4, either sign */
        values[i] = (uint16_t)((api_random(seed) & 0x807F) | (0x3D00 + (api_random(seed) % 3 << 7)));
    return values;
}

static model make_model(void) {
    model m;
    uint32_t seed = 41;
    megamoe_projection *shared[3] = {&m.layer.desc.shared_gate, &m.layer.desc.shared_up, &m.layer.desc.shared_down};
    megamoe_shape shape = api_shape(H, I, E, K);
    shape.routed_scale = 2.5f;
    shape.swiglu_limit = 10.0f;
    m.layer = api_layer_random(shape, 40);
    m.router = bf16_random(E * H, &seed);
    m.bias = api_alloc(E * sizeof *m.bias);
    for (unsigned e = 0; e < E; e++) m.bias[e] = 6.9f + 0.0101f * (float)(e * 5 % E);
    for (unsigned p = 0; p < 3; p++) {
        m.shared[p] = bf16_random(H * I, &seed);
        shared[p]->codes = api_tensor(m.shared[p], MEGAMOE_BF16, 2, p < 2 ? I : H, p < 2 ? H : I, 0);
    }
    m.layer.desc.router_weight = api_tensor(m.router, MEGAMOE_BF16, 2, E, H, 0);
    m.layer.desc.router_bias = api_tensor(m.bias, MEGAMOE_F32, 1, E, 0, 0);
    return m;
}

/* Adds one tensor under "layers.1.ffn." and the given end of its name. */
static void add(megamoe_named_tensor *list, uint32_t *count, const char *end, megamoe_tensor tensor) {
    char *name = api_alloc(96);
    snprintf(name, 96, "layers.1.ffn.%s", end);
    assert_true(*count < TENSORS_MAX);
    list[(*count)++] = (megamoe_named_tensor){name, tensor};
}

static void write_model(model *m) {
    megamoe_named_tensor list[TENSORS_MAX];
    uint32_t count = 0;
    char end[64];
    FILE *file;
    const char *temporary = getenv("TMPDIR");
    snprintf(m->directory, sizeof m->directory, "%s/megamoe_test_load_XXXXXX", temporary ? temporary : "/tmp");
    assert_non_null(mkdtemp(m->directory));
    snprintf(m->file, sizeof m->file, "%s/model.safetensors", m->directory);
    snprintf(m->config_path, sizeof m->config_path, "%s/config.json", m->directory);
    for (unsigned e = 0; e < E; e++)
        for (unsigned p = 0; p < 3; p++) {
            int64_t n = p < 2 ? I : H, k = p < 2 ? H : I;
            const char *w = letters[p];
            snprintf(end, sizeof end, "experts.%u.%s.weight", e, w);
            add(list, &count, end, api_tensor(m->layer.codes[p] + e * H * I / 2, MEGAMOE_U8, 2, n, k / 2, 0));
            snprintf(end, sizeof end, "experts.%u.%s.weight_scale", e, w);
            add(list, &count, end, api_tensor(m->layer.scales[p] + e * H * I / 16, MEGAMOE_E4M3, 2, n, k / 16, 0));
            snprintf(end, sizeof end, "experts.%u.%s.weight_scale_2", e, w);
            add(list, &count, end, api_tensor(&m->layer.globals[p][e], MEGAMOE_F32, 0, 0, 0, 0));
            snprintf(end, sizeof end, "experts.%u.%s.input_scale", e, w);
            add(list, &count, end, api_tensor(&m->layer.inputs[p][e], MEGAMOE_F32, 0, 0, 0, 0));
        }
    for (unsigned p = 0; p < 3; p++) {
        snprintf(end, sizeof end, "shared_experts.%s.weight", letters[p]);
        add(list, &count, end, api_tensor(m->shared[p], MEGAMOE_BF16, 2, p < 2 ? I : H, p < 2 ? H : I, 0));
    }
    add(list, &count, "gate.weight", api_tensor(m->router, MEGAMOE_BF16, 2, E, H, 0));
    add(list, &count, "gate.bias", api_tensor(m->bias, MEGAMOE_F32, 1, E, 0, 0));
    assert_ok(megamoe_tensors_write(m->file, list, count));
    file = fopen(m->config_path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(config, 1, sizeof config - 1, file), sizeof config - 1);
    assert_int_equal(fclose(file), 0);
}

static void remove_model(const model *m) {
    unlink(m->file);
    unlink(m->config_path);
    rmdir(m->directory);
}

static uint16_t *run_routed(megamoe_layer *layer, const uint16_t *hidden, int32_t *ids, float *weights) {
    megamoe_shape shape = api_shape(H, I, E, K);
    const megamoe_batch batch = {.struct_size = sizeof batch, .token_count = T, .hidden = hidden};
    assert_ok(megamoe_layer_route(layer, &batch, ids, weights, NULL));
    return api_run(layer, &shape, T, hidden, NULL, NULL);
}

static void loaded_equals_created(void **state) {
    model m = make_model();
    megamoe_checkpoint *checkpoint = NULL;
    megamoe_device *device = api_device(T);
    uint32_t seed = 6;
    uint16_t *hidden = bf16_random(T * H, &seed);
    write_model(&m);
    assert_ok(megamoe_checkpoint_open(m.directory, NULL, &checkpoint));
    for (megamoe_activations a = MEGAMOE_ACTIVATIONS_BF16; a <= MEGAMOE_ACTIVATIONS_NVFP4; a++) {
        megamoe_layer_options options = api_options(a);
        megamoe_layer *loaded = NULL, *created = api_create(device, &m.layer, &options);
        int32_t ids[2][T * K];
        float weights[2][T * K];
        uint16_t *expected, *output, *given;
        assert_ok(megamoe_layer_load(device, checkpoint, 1, &options, &loaded));
        expected = run_routed(created, hidden, ids[0], weights[0]);
        output = run_routed(loaded, hidden, ids[1], weights[1]);
        assert_memory_equal(ids[1], ids[0], sizeof ids[0]);
        assert_memory_equal(weights[1], weights[0], sizeof weights[0]);
        assert_memory_equal(output, expected, T * H * 2);
        /* and the layer that routes itself equals one that is told the same experts */
        given = api_run(loaded, &m.layer.desc.shape, T, hidden, ids[0], weights[0]);
        assert_memory_equal(given, expected, T * H * 2);
        megamoe_layer_close(loaded);
        megamoe_layer_close(created);
    }
    megamoe_checkpoint_close(checkpoint);
    megamoe_device_close(device);
    remove_model(&m);
    (void)state;
}

/* Weights sum to the routed scale: the shared expert and the bias have no part in them. */
static void weights_sum_to_the_scale(void **state) {
    model m = make_model();
    megamoe_device *device = api_device(T);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer *layer = api_create(device, &m.layer, &options);
    uint32_t seed = 8;
    uint16_t *hidden = bf16_random(T * H, &seed);
    int32_t ids[T * K];
    float weights[T * K];
    const megamoe_batch batch = {.struct_size = sizeof batch, .token_count = T, .hidden = hidden};
    assert_ok(megamoe_layer_route(layer, &batch, ids, weights, NULL));
    for (unsigned t = 0; t < T; t++) {
        double sum = 0;
        for (unsigned k = 0; k < K; k++) {
            sum += (double)weights[t * K + k];
            assert_in_range(ids[t * K + k], 0, E - 1);
            for (unsigned j = 0; j < k; j++) assert_int_not_equal(ids[t * K + j], ids[t * K + k]);
        }
        assert_true(fabs(sum - 2.5) < 1e-5);
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    (void)state;
}

/* Rows of -1 leave the shared expert alone: weight exactly 1, added exactly once. */
static void shared_expert_is_added_once(void **state) {
    model m = make_model();
    megamoe_device *device = api_device(T);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer *layer = api_create(device, &m.layer, &options);
    uint32_t seed = 8;
    uint16_t *hidden = bf16_random(T * H, &seed), *output;
    int32_t ids[T * K];
    float weights[T * K];
    for (unsigned i = 0; i < T * K; i++) ids[i] = -1, weights[i] = 3.0f;
    output = api_run(layer, &m.layer.desc.shape, T, hidden, ids, weights);
    for (unsigned t = 0; t < T; t++) {
        double h[I];
        for (unsigned n = 0; n < I; n++) {
            double gate = 0, up = 0;
            for (unsigned k = 0; k < H; k++) {
                double x = (double)api_from_bf16(hidden[t * H + k]);
                gate += x * (double)api_from_bf16(m.shared[0][n * H + k]);
                up += x * (double)api_from_bf16(m.shared[1][n * H + k]);
            }
            h[n] = gate / (1 + exp(-gate)) * up; /* far from the clamp */
        }
        for (unsigned n = 0; n < H; n++) {
            double y = 0, magnitude = 0;
            for (unsigned i = 0; i < I; i++) {
                double p = h[i] * (double)api_from_bf16(m.shared[2][n * I + i]);
                y += p;
                magnitude += fabs(p);
            }
            /* h and y are rounded to BF16: half of 2^-8 of each term, and of the sum */
            assert_true(fabs((double)api_from_bf16(output[t * H + n]) - y) <= (magnitude + fabs(y)) / 256);
        }
    }
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    (void)state;
}

/* A shard that shrinks under a loaded layer: its pages would kill the process; a status says so instead. */
static void shard_that_shrinks_under_a_layer(void **state) {
    model m = make_model();
    megamoe_checkpoint *checkpoint = NULL;
    megamoe_device *device = api_device(T);
    megamoe_layer_options options = api_options(MEGAMOE_ACTIVATIONS_BF16);
    megamoe_layer *layer = NULL;
    uint32_t seed = 6, written = 77;
    uint16_t *hidden = bf16_random(T * H, &seed), *output = api_alloc(T * H * sizeof *output);
    int32_t ids[T * K];
    float weights[T * K];
    megamoe_batch batch = {.struct_size = sizeof batch, .token_count = T, .hidden = hidden, .output = output};
    megamoe_stages stages = {.struct_size = sizeof stages, .output = output};
    write_model(&m);
    assert_ok(megamoe_checkpoint_open(m.directory, NULL, &checkpoint));
    assert_ok(megamoe_layer_load(device, checkpoint, 1, &options, &layer));
    assert_int_equal(truncate(m.file, 4096), 0);
    assert_int_equal(megamoe_layer_run(layer, &batch, NULL), MEGAMOE_IO_ERROR);
    assert_non_null(strstr(megamoe_error_message(), m.file));
    assert_non_null(strstr(megamoe_error_message(), "4096"));
    assert_int_equal(megamoe_layer_route(layer, &batch, ids, weights, NULL), MEGAMOE_IO_ERROR);
    assert_int_equal(megamoe_layer_run_stages(layer, &batch, NULL, &stages, &written), MEGAMOE_IO_ERROR);
    assert_int_equal(written, 77);
    for (size_t i = 0; i < T * H; i++) assert_int_equal(output[i], 0xAAAA);
    megamoe_layer_close(layer);
    megamoe_checkpoint_close(checkpoint);
    megamoe_device_close(device);
    remove_model(&m);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loaded_equals_created),
        cmocka_unit_test(weights_sum_to_the_scale),
        cmocka_unit_test(shared_expert_is_added_once),
        cmocka_unit_test(shard_that_shrinks_under_a_layer),
    };
    return API_RUN(tests);
}
