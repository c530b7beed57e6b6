/*
 * What the tests of the public interface share: layers in the caller's memory, a device of the backend under
 * test, one run. Only megamoe.h is used, as an engine would. Buffers are poisoned before they are filled or
 * handed out.
 */
#ifndef TESTS_API_H
#define TESTS_API_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "megamoe/megamoe.h"

#include <cmocka.h>

/*
 * Every test runs on each backend of host memory, and on the CPU at each level (MEGAMOE_ISA) that this machine
 * has; this is the backend at hand.
 */
extern megamoe_backend api_backend;

/* Runs a group on each of them; says which are skipped and why. The number of failures. */
int api_run_everywhere(const char *name, const struct CMUnitTest *tests, size_t count);
#define API_RUN(tests) api_run_everywhere(__FILE__, tests, sizeof(tests) / sizeof *(tests))

#define assert_ok(call)                                                                                                \
    do {                                                                                                               \
        megamoe_status status_ = (call);                                                                               \
        if (status_ != MEGAMOE_OK)                                                                                     \
            fail_msg("%s: %s: %s", #call, megamoe_status_name(status_), megamoe_error_message());                      \
    } while (0)

/* Memory that lives until api_free_all, filled with 0xAA. */
void *api_alloc(size_t bytes);
void api_free_all(void);

uint32_t api_random(uint32_t *seed);
float api_from_bf16(uint16_t bits);
uint16_t api_to_bf16(float value); /* of a value that is exact in BF16; asserts that it is */

megamoe_tensor api_tensor(void *data, megamoe_dtype dtype, uint32_t rank, int64_t e0, int64_t e1, int64_t e2);

/* A layer of NVFP4 experts in plain arrays, ready to be changed before it is created. */
typedef struct api_layer {
    uint8_t *codes[3], *scales[3]; /* gate, up, down: [E, N, K/2] and [E, N, K/16] */
    float *globals[3], *inputs[3]; /* [E] */
    megamoe_layer_desc desc;       /* describes the arrays above; no router */
} api_layer;

megamoe_shape api_shape(uint32_t hidden, uint32_t intermediate, uint32_t experts, uint32_t slots);
/* Codes, scales and global scales all different, scales within a few powers of two of 1. */
api_layer api_layer_random(megamoe_shape shape, uint32_t seed);
/* The common fixture of the public bug reports: gate 0.75 and up 1.5 for a token of one 6; down is the
 * identity. */
api_layer api_layer_fx(void);

/*
 * Integers for which every order of summation gives the same fp32 result: W in {0, 1, 2, 4} and negatives, x
 * with four values of 1 or -1, so that |up| <= 16 and its square is exact in BF16.
 */
api_layer api_layer_integers(megamoe_shape shape, uint32_t seed);
uint16_t *api_hidden_integers(uint32_t tokens, uint32_t hidden);
/* What one token of such a layer with relu2 must give, worked out in 64-bit integers; ids may hold -1. */
void api_expected_integers(const api_layer *layer, const uint16_t *hidden, const int32_t *ids, const float *weights,
                           uint16_t *output);

megamoe_device *api_device(uint32_t max_tokens);
megamoe_layer *api_create(megamoe_device *device, const api_layer *layer, const megamoe_layer_options *options);
megamoe_layer_options api_options(megamoe_activations activations);

/* Runs `tokens` rows through a layer with given experts and weights; returns BF16 [tokens, H]. */
uint16_t *api_run(megamoe_layer *layer, const megamoe_shape *shape, uint32_t tokens, const uint16_t *hidden,
                  const int32_t *ids, const float *weights);

#endif
