/*
 * The plan of a batch: its (token, slot) pairs sorted by loaded expert. Shared by every backend on the host.
 * The sort is stable, so an expert's rows stand in the order of the batch.
 */
#ifndef MM_PLAN_H
#define MM_PLAN_H

#include <stdint.h>

#include "megamoe/megamoe.h"

typedef struct mm_plan {
    uint32_t row_count;
    uint32_t *offsets;  /* [loaded experts + 1]: expert i has rows offsets[i] .. offsets[i + 1] */
    uint32_t *row_pair; /* [row]: token * K + slot */
} mm_plan;

typedef struct mm_plan_counts {
    uint64_t skipped_slots;      /* id -1, or an expert that is not loaded */
    uint64_t bad_slots;          /* ids below -1 or not below E */
    uint64_t *tokens_per_expert; /* [E], or NULL */
} mm_plan_counts;

/* Room for pair_count pairs over loaded_count experts. */
megamoe_status mm_plan_create(uint32_t pair_count, uint32_t loaded_count, mm_plan *plan);
void mm_plan_free(mm_plan *plan);

/* ids: [pair_count]. local_index: [expert_count], the loaded expert of each id or -1. Adds to counts. */
void mm_plan_build(mm_plan *plan, const int32_t *ids, uint32_t pair_count, const int32_t *local_index,
                   uint32_t expert_count, uint32_t loaded_count, mm_plan_counts *counts);

#endif
