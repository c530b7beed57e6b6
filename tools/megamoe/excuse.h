/*
 * Where a stage ends in a rounding, a backend's fp32 value and the oracle's may fall on different sides of a
 * boundary. These functions repeat the stage in double from the backend's own input and say whether its
 * result is one that a value within the derived bound rounds to. They are asked only about elements that
 * differ.
 */
#ifndef CLI_EXCUSE_H
#define CLI_EXCUSE_H

#include "cli.h"

typedef struct cli_excuse_context {
    const megamoe_layer_facts *facts;
    const megamoe_stages *stages; /* the backend's own */
    const int32_t *expert_ids;
    const float *expert_weights;
    const float *l1;           /* the backend's own, or, where its kernels fuse L1 with the activation, the oracle's */
    const float *l1_magnitude; /* then: what bounds how far the backend's may be from it; else NULL */
} cli_excuse_context;

bool cli_excuse_h(const void *context, uint64_t index);       /* an element of h */
bool cli_excuse_h_scale(const void *context, uint64_t index); /* a byte of h_scales */
bool cli_excuse_h_code(const void *context, uint64_t index);  /* a byte of h_codes: two elements */
bool cli_excuse_output(const void *context, uint64_t index);  /* an element of output */

#endif
