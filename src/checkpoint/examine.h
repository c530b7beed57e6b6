/*
 * The look at every layer when a checkpoint is opened: headers and scalars only. It fills megamoe_layer_info
 * and the anomalies, with the same code that a load runs, so that what is called an error there is what a
 * load refuses.
 */
#ifndef MM_CHECKPOINT_EXAMINE_H
#define MM_CHECKPOINT_EXAMINE_H

#include "checkpoint/quantization.h"
#include "checkpoint/source.h"

/* info's strings are constants or belong to `layer`. contradictions counts the anomalies of that kind. */
megamoe_status mm_layer_examine(const mm_tensors *tensors, const mm_config *config, const mm_quantization *declared,
                                const mm_layer_tensors *layer, mm_anomalies *anomalies, megamoe_layer_info *info,
                                uint32_t *contradictions);

/* The failure that has just been set becomes an anomaly; running out of memory stays a failure. */
megamoe_status mm_failure_note(const mm_reading *reading, megamoe_status status, mm_anomalies *anomalies);

#endif
