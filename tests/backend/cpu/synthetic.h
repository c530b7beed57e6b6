/* Layers made up in memory for tests of a backend: every element differs, rows are padded, the padding is
 * poisoned. */
#ifndef TEST_SYNTHETIC_H
#define TEST_SYNTHETIC_H

#include "backend/backend.h"

typedef struct synthetic_spec {
    uint32_t hidden, intermediate, experts, slots;           /* E and K */
    mm_format format, shared_format;                         /* shared_format 0: no shared expert */
    megamoe_dtype fp8_scale_dtype, bias_dtype, router_dtype; /* 0: E8M0, no bias, no router */
    megamoe_activations activations;
    megamoe_global input_mode, intermediate_mode;
    bool relu2, weight_before, whole_numbers;
    float alpha, beta, limit; /* alpha 0: 1; limit 0: none */
    uint32_t skip_expert;     /* 1 + the expert that is not loaded; 0: all are */
    uint64_t seed;
} synthetic_spec;

typedef struct synthetic {
    mm_layer_weights weights;
    void **blocks; /* everything that was allocated */
    size_t block_count;
    uint64_t random;
} synthetic;

void synthetic_make(const synthetic_spec *spec, synthetic *made);
void synthetic_free(synthetic *made);

/* A matrix of random codes and scales with padded rows; whole: code * scale are small whole numbers. */
mm_matrix synthetic_matrix(synthetic *made, mm_format format, megamoe_dtype fp8_scale_dtype, uint32_t rows,
                           uint32_t columns, bool whole);
void *synthetic_block(synthetic *made, size_t bytes); /* filled with 0xAA, freed by synthetic_free */

uint32_t synthetic_random(synthetic *made); /* 32 random bits */
float synthetic_normal(synthetic *made);    /* about N(0, 1) */
void synthetic_tokens(synthetic *made, uint32_t tokens, uint32_t columns, bool whole, uint16_t *hidden);

#endif
