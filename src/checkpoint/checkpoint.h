/*
 * From an open checkpoint to the weights of one layer. The rest of the library sees checkpoints only through
 * this header (and the public one); safetensors.*, naming.*, config.* and anomalies.* are its parts.
 */
#ifndef MM_CHECKPOINT_H
#define MM_CHECKPOINT_H

#include "megamoe/megamoe.h"
#include "weights.h"

/*
 * One layer's tensors, borrowed from the mapping; the arrays and the aligned copies are owned. BF16 and F32
 * data is aligned for its type; FP4 and FP8 codes and one-byte scales begin anywhere.
 */
typedef struct mm_layer_source {
    megamoe_shape shape;                   /* from the tensors, completed and checked by config.json */
    uint32_t expert_first, expert_count;   /* the range in `experts` */
    mm_expert *experts;                    /* [expert_count] */
    uint32_t present_first, present_count; /* the experts whose tensors are in the files */
    float *input_scales;                   /* [present_count] each one's input_global; NaN: missing or unusable */
    float *intermediate_scales;            /* [present_count] likewise; both NULL when the format has none */
    mm_expert *shared;                     /* or NULL */
    mm_router router;
    bool declares_nvfp4_activations; /* the checkpoint says W4A4 (input scales or config) */
    uint32_t *shards;                /* the shards it reads from */
    uint32_t shard_count;
    void **owned; /* copies behind router.bias, router.token_experts, and what the file misaligns */
    uint32_t owned_count;
    uint64_t copied_bytes; /* weights that are copies, because their stacks are transposed; else 0 */
    bool strict;           /* the checkpoint was opened so */
} mm_layer_source;

/* Who hears how a load goes; NULL fields are not called. Bytes are those that a load reads: scales and copies. */
typedef struct mm_load_report {
    bool (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes); /* false cancels */
    void *progress_context;
    megamoe_log log;
    void *log_context;
} mm_load_report;

/*
 * Finds, checks and (unless skip_scan) scans the tensors of experts first..first+count-1 of model layer
 * `layer`; count 0: all that the file has. report may be NULL. Errors name file, tensor, layer, expert and index.
 */
megamoe_status mm_checkpoint_read_layer(const megamoe_checkpoint *checkpoint, uint32_t layer, uint32_t expert_first,
                                        uint32_t expert_count, const mm_load_report *report, mm_layer_source *source);
void mm_layer_source_free(mm_layer_source *source);

/* IO_ERROR if one of these shards is no longer as long as when mapped: reading it would be a SIGBUS. */
megamoe_status mm_checkpoint_unchanged(const megamoe_checkpoint *checkpoint, const uint32_t *shards, uint32_t count);

#endif
