/* The router on the host: from logits to experts and their weights. docs/numerics.md, "Router". */
#ifndef MM_ROUTER_H
#define MM_ROUTER_H

#include "weights.h"

typedef struct mm_router_counts {
    uint64_t unrouted_tokens;
} mm_router_counts;

/*
 * Chooses K experts for one token: ids in descending order of score, ties to the lower id, and their final
 * weights. logits: [E], fp32, not changed. token_id is read by hash-routed layers only. A token with a NaN
 * logit, with nothing but -infinity, with a non-finite weight sum or with a token id outside the table gets
 * ids -1, weights 0, and counts.
 */
void mm_router_choose(const megamoe_shape *shape, const mm_router *router, const float *logits, int32_t token_id,
                      int32_t *ids, float *weights, mm_router_counts *counts);

#endif
