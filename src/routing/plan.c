/* A counting sort: count, sum, place. */
#include "routing/plan.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

megamoe_status mm_plan_create(uint32_t pair_count, uint32_t loaded_count, mm_plan *plan) {
    mm_plan made = {0};
    made.offsets = calloc((size_t)loaded_count + 1, sizeof *made.offsets);
    made.row_pair = calloc(pair_count ? pair_count : 1, sizeof *made.row_pair);
    if (!made.offsets || !made.row_pair) {
        mm_plan_free(&made);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a routing plan of %u rows", pair_count);
    }
    *plan = made;
    return MEGAMOE_OK;
}

void mm_plan_free(mm_plan *plan) {
    free(plan->offsets);
    free(plan->row_pair);
    memset(plan, 0, sizeof *plan);
}

void mm_plan_build(mm_plan *plan, const int32_t *ids, uint32_t pair_count, const int32_t *local_index,
                   uint32_t expert_count, uint32_t loaded_count, mm_plan_counts *counts) {
    uint32_t *ends = plan->offsets + 1; /* first the counts, then where each expert's next row goes, at last its end */
    uint32_t begin = 0;
    memset(plan->offsets, 0, ((size_t)loaded_count + 1) * sizeof *plan->offsets);
    for (uint32_t p = 0; p < pair_count; p++) {
        bool known = ids[p] >= 0 && (uint32_t)ids[p] < expert_count;
        int32_t local = known ? local_index[ids[p]] : -1;
        if (known && counts->tokens_per_expert) counts->tokens_per_expert[ids[p]]++;
        if (local >= 0)
            ends[local]++;
        else if (known || ids[p] == -1)
            counts->skipped_slots++;
        else
            counts->bad_slots++;
    }
    for (uint32_t i = 0; i < loaded_count; i++) {
        uint32_t rows = ends[i];
        ends[i] = begin;
        begin += rows;
    }
    plan->row_count = begin;
    for (uint32_t p = 0; p < pair_count; p++) {
        bool known = ids[p] >= 0 && (uint32_t)ids[p] < expert_count;
        int32_t local = known ? local_index[ids[p]] : -1;
        if (local >= 0) plan->row_pair[ends[local]++] = p;
    }
}
