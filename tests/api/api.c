/* See api.h. */
#include "api.h"

megamoe_backend api_backend;

static void *allocated[4096];
static size_t allocated_count;

void *api_alloc(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    assert_non_null(memory);
    assert_true(allocated_count < sizeof allocated / sizeof *allocated);
    allocated[allocated_count++] = memory;
    return memset(memory, 0xAA, bytes);
}

void api_free_all(void) {
    while (allocated_count > 0) free(allocated[--allocated_count]);
}

uint32_t api_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

float api_from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t api_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    assert_int_equal(bits & 0xFFFF, 0);
    return (uint16_t)(bits >> 16);
}

megamoe_tensor api_tensor(void *data, megamoe_dtype dtype, uint32_t rank, int64_t e0, int64_t e1, int64_t e2) {
    return (megamoe_tensor){.data = data, .dtype = dtype, .rank = rank, .extent = {e0, e1, e2}};
}

megamoe_shape api_shape(uint32_t hidden, uint32_t intermediate, uint32_t experts, uint32_t slots) {
    return (megamoe_shape){.hidden = hidden,
                           .intermediate = intermediate,
                           .expert_count = experts,
                           .experts_per_token = slots,
                           .score = MEGAMOE_SQRTSOFTPLUS,
                           .normalize_weights = true};
}

static api_layer layer_arrays(megamoe_shape shape) {
    api_layer l = {.desc = {.struct_size = sizeof(megamoe_layer_desc), .shape = shape}};
    megamoe_projection *projections[3] = {&l.desc.gate, &l.desc.up, &l.desc.down};
    int64_t e = shape.expert_count;
    for (unsigned p = 0; p < 3; p++) {
        int64_t n = p < 2 ? shape.intermediate : shape.hidden, k = p < 2 ? shape.hidden : shape.intermediate;
        l.codes[p] = api_alloc((size_t)(e * n * k / 2));
        l.scales[p] = api_alloc((size_t)(e * n * k / 16));
        l.globals[p] = api_alloc((size_t)e * sizeof(float));
        l.inputs[p] = api_alloc((size_t)e * sizeof(float));
        *projections[p] = (megamoe_projection){.codes = api_tensor(l.codes[p], MEGAMOE_E2M1X2, 3, e, n, k),
                                               .scales = api_tensor(l.scales[p], MEGAMOE_E4M3, 3, e, n, k / 16),
                                               .global = api_tensor(l.globals[p], MEGAMOE_F32, 1, e, 0, 0),
                                               .input_global = api_tensor(l.inputs[p], MEGAMOE_F32, 1, e, 0, 0)};
    }
    return l;
}

api_layer api_layer_random(megamoe_shape shape, uint32_t seed) {
    api_layer l = layer_arrays(shape);
    size_t values = (size_t)shape.expert_count * shape.hidden * shape.intermediate;
    for (unsigned p = 0; p < 3; p++) {
        for (size_t i = 0; i < values / 2; i++) l.codes[p][i] = (uint8_t)api_random(&seed);
        for (size_t i = 0; i < values / 16; i++) l.scales[p][i] = (uint8_t)(0x21 + api_random(&seed) % 0x1F);
        for (uint32_t e = 0; e < shape.expert_count; e++) {
            l.globals[p][e] = 0.0137f * (1.0f + 0.37f * (float)e + 0.11f * (float)p);
            l.inputs[p][e] = 0.0031f * (1.0f + 0.13f * (float)e + 0.07f * (float)p);
        }
    }
    return l;
}

api_layer api_layer_integers(megamoe_shape shape, uint32_t seed) {
    static const uint8_t nibbles[5] = {0x0, 0x2, 0x4, 0xA, 0xC}; /* 0, 1, 2, -1, -2 */
    api_layer l = layer_arrays(shape);
    size_t values = (size_t)shape.expert_count * shape.hidden * shape.intermediate;
    for (unsigned p = 0; p < 3; p++) {
        for (size_t i = 0; i < values / 2; i++)
            l.codes[p][i] = (uint8_t)(nibbles[api_random(&seed) % 5] | nibbles[api_random(&seed) % 5] << 4);
        for (size_t i = 0; i < values / 16; i++) l.scales[p][i] = api_random(&seed) % 2 ? 0x38 : 0x40;
        for (uint32_t e = 0; e < shape.expert_count; e++) l.globals[p][e] = l.inputs[p][e] = 1.0f;
    }
    return l;
}

uint16_t *api_hidden_integers(uint32_t tokens, uint32_t hidden) {
    uint16_t *x = api_alloc((size_t)tokens * hidden * sizeof *x);
    memset(x, 0, (size_t)tokens * hidden * sizeof *x);
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t j = 0; j < 4; j++)
            x[(size_t)t * hidden + (t * 5 + j * (hidden / 4) + j) % hidden] =
                api_to_bf16((t + j) % 3 == 0 ? -1.0f : 1.0f);
    return x;
}

/* Twice the value of an E2M1 code, from the definition: sign, exponent with bias 1, one mantissa bit. */
static int64_t twice(unsigned code) {
    int64_t exponent = code >> 1 & 3, mantissa = code & 1;
    int64_t magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
    return code & 8 ? -magnitude : magnitude;
}

/* W[row][k] of projection p, rows counted through the experts; scales are 1 (0x38, or E8M0 127) or 2. */
static int64_t integer_weight(const api_layer *l, unsigned p, size_t row, size_t k, size_t columns) {
    uint32_t group = l->desc.shape.group_size == 32 ? 32 : 16;
    unsigned byte = l->codes[p][(row * columns + k) / 2], scale = l->scales[p][(row * columns + k) / group];
    int64_t value = twice(k % 2 == 0 ? byte & 15u : byte >> 4) / 2;
    return scale == 0x38 || scale == 127 ? value : 2 * value;
}

/* Nearest BF16, ties to even, of an integer below 2^24. */
static uint16_t bf16_of_integer(int64_t value) {
    uint64_t magnitude = (uint64_t)(value < 0 ? -value : value), unit = 1;
    while (magnitude / unit >= 256) unit *= 2;
    uint64_t whole = magnitude / unit, rest = magnitude % unit;
    if (2 * rest > unit || (2 * rest == unit && whole % 2 == 1)) whole++;
    float rounded = (float)(whole * unit);
    return api_to_bf16(value < 0 ? -rounded : rounded);
}

void api_expected_integers(const api_layer *l, const uint16_t *hidden, const int32_t *ids, const float *weights,
                           uint16_t *output) {
    const megamoe_shape *s = &l->desc.shape;
    size_t columns = s->hidden, inner = s->intermediate;
    int64_t *sums = calloc(columns, sizeof *sums), *h = malloc(inner * sizeof *h);
    for (size_t k = 0; k < s->experts_per_token; k++) {
        if (ids[k] < 0) continue;
        for (size_t n = 0; n < inner; n++) {
            int64_t up = 0;
            for (size_t c = 0; c < columns; c++)
                if (hidden[c])
                    up += integer_weight(l, 1, (size_t)ids[k] * inner + n, c, columns) *
                          (int64_t)api_from_bf16(hidden[c]);
            h[n] = up > 0 ? up * up : 0;
        }
        for (size_t n = 0; n < columns; n++)
            for (size_t c = 0; c < inner; c++)
                sums[n] += (int64_t)weights[k] * integer_weight(l, 2, (size_t)ids[k] * columns + n, c, inner) * h[c];
    }
    for (size_t n = 0; n < columns; n++) output[n] = bf16_of_integer(sums[n]);
    free(sums);
    free(h);
}

api_layer api_layer_fx(void) {
    api_layer l = layer_arrays(api_shape(64, 64, 2, 1));
    memset(l.codes[0], 0x22, 2 * 64 * 32);
    memset(l.codes[1], 0x44, 2 * 64 * 32);
    memset(l.codes[2], 0, 2 * 64 * 32);
    for (size_t row = 0; row < 128; row++) l.codes[2][row * 32 + row % 64 / 2] = row % 2 == 0 ? 0x02 : 0x20;
    for (unsigned p = 0; p < 3; p++) {
        memset(l.scales[p], 0x38, 2 * 64 * 4);
        for (unsigned e = 0; e < 2; e++) {
            l.globals[p][e] = p < 2 ? 0.125f : 1.0f;
            l.inputs[p][e] = 1.0f;
        }
    }
    return l;
}

megamoe_device *api_device(uint32_t max_tokens) {
    const megamoe_device_options options = {
        .struct_size = sizeof options, .backend = api_backend, .threads = 2, .max_tokens = max_tokens};
    megamoe_device *device = NULL;
    assert_ok(megamoe_device_open(&options, &device));
    return device;
}

megamoe_layer_options api_options(megamoe_activations activations) {
    return (megamoe_layer_options){.struct_size = sizeof(megamoe_layer_options), .activations = activations};
}

megamoe_layer *api_create(megamoe_device *device, const api_layer *l, const megamoe_layer_options *options) {
    megamoe_layer *layer = NULL;
    assert_ok(megamoe_layer_create(device, &l->desc, options, &layer));
    return layer;
}

uint16_t *api_run(megamoe_layer *layer, const megamoe_shape *shape, uint32_t tokens, const uint16_t *hidden,
                  const int32_t *ids, const float *weights) {
    uint16_t *output = api_alloc((size_t)tokens * shape->hidden * sizeof *output);
    const megamoe_batch batch = {.struct_size = sizeof batch,
                                 .token_count = tokens,
                                 .hidden = hidden,
                                 .output = output,
                                 .expert_ids = ids,
                                 .expert_weights = weights};
    assert_ok(megamoe_layer_run(layer, &batch, NULL));
    return output;
}

/* The level must be the one asked for: a cap above what the machine has gives a lower one. */
static bool level_is_here(const char *isa) {
    if (api_backend != MEGAMOE_CPU) return true;
    megamoe_device *device = api_device(1);
    bool here = strcmp(megamoe_device_isa(device), isa) == 0;
    megamoe_device_close(device);
    return here;
}

/* API_BACKEND=cuda-portable: that backend alone. Its memory is the host's too where the GPU is the functional model. */
static int run_on_gpu(const char *name, const struct CMUnitTest *tests, size_t count) {
    char group[256];
    api_backend = MEGAMOE_CUDA_PORTABLE;
    if (megamoe_device_probe(api_backend, 0) != MEGAMOE_OK) {
        printf("skipped %s on cuda-portable: %s\n", name, megamoe_error_message());
        return 77;
    }
    snprintf(group, sizeof group, "%s on cuda-portable", name);
    int failures = _cmocka_run_group_tests(group, tests, count, NULL, NULL);
    api_free_all();
    return failures;
}

int api_run_everywhere(const char *name, const struct CMUnitTest *tests, size_t count) {
    static const struct {
        megamoe_backend id;
        const char *name, *isa;
    } places[] = {{MEGAMOE_REFERENCE, "reference", ""},
                  {MEGAMOE_CPU, "cpu", "scalar"},
                  {MEGAMOE_CPU, "cpu", "avx2"},
                  {MEGAMOE_CPU, "cpu", "avx512"},
                  {MEGAMOE_CPU, "cpu", "amx"}};
    const char *only = getenv("API_BACKEND");
    int failures = 0;
    if (only && strcmp(only, "cuda-portable") == 0) return run_on_gpu(name, tests, count);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char group[256];
        api_backend = places[i].id;
        if (*places[i].isa) assert_int_equal(setenv("MEGAMOE_ISA", places[i].isa, 1), 0);
        if (megamoe_device_probe(api_backend, 0) != MEGAMOE_OK) {
            printf("skipped %s on %s: %s\n", name, places[i].name, megamoe_error_message());
            continue;
        }
        if (!level_is_here(places[i].isa)) {
            printf("skipped %s on cpu: this processor has no %s\n", name, places[i].isa);
            continue;
        }
        snprintf(group, sizeof group, "%s on %s %s", name, places[i].name, places[i].isa);
        failures += _cmocka_run_group_tests(group, tests, count, NULL, NULL);
        api_free_all();
    }
    return failures;
}
