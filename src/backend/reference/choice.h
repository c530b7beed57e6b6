/* The router's choice once more, for the oracle alone. */
#ifndef MM_REFERENCE_CHOICE_H
#define MM_REFERENCE_CHOICE_H

#include "weights.h"

/* As mm_router_choose; false: the token is unrouted (ids -1, weights 0). */
bool mm_reference_choose(const megamoe_shape *shape, const mm_router *router, const float *logits, int32_t token_id,
                         int32_t *ids, float *weights);

#endif
