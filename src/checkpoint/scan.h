/* Looking at every scale of a layer for what no quantizer should have written, and repairing what may be
 * repaired. */
#ifndef MM_CHECKPOINT_SCAN_H
#define MM_CHECKPOINT_SCAN_H

#include "checkpoint/source.h"

/* What one weight's scales hold. */
typedef struct mm_scan_finding {
    uint64_t nan_count, negative_count; /* negative: below zero; 0x80, minus zero, is plain zero */
    uint64_t repaired_count;            /* bytes 0x7F that are 0x7E in memory now */
    uint32_t row, column;               /* of the first that is bad, in the matrix */
    const uint8_t *first;
} mm_scan_finding;

/* repair: the mapping is writable, and NVFP4 scale bytes 0x7F become 0x7E. */
void mm_matrix_scan(const mm_matrix *matrix, bool repair, mm_scan_finding *finding);

/* The place of a byte in its tensor, such as "[3, 2]", or "[7, 3, 2]" in a stack. */
void mm_tensor_index_text(const mm_tensor *tensor, const uint8_t *byte, char *text, size_t size);

/*
 * Scans one expert (routed or shared). Repairs become anomalies. What is bad is refused; if `report` is set,
 * it becomes an anomaly instead, and the other projections are scanned too.
 */
megamoe_status mm_expert_scan(mm_reading *reading, const mm_layer_tensors *layer, mm_place place, uint32_t expert,
                              const mm_expert *weights, bool repair, bool report, mm_anomalies *anomalies);

#endif
