/*
 * From the tensors of one weight to an mm_matrix: which format they are, whether their types and shapes
 * agree, and where row n begins. Works on one expert's own tensors and on its slice of a stack of all
 * experts.
 */
#ifndef MM_CHECKPOINT_MATRIX_H
#define MM_CHECKPOINT_MATRIX_H

#include "checkpoint/config.h"
#include "checkpoint/layers.h"
#include "weights.h"

/* What may be copied: views that only look need nothing, a scan needs scales as they will be used. */
typedef enum mm_copies { MM_COPY_NOTHING, MM_COPY_SCALES, MM_COPY_ALL } mm_copies;

/* One layer being read: what sentences need, and what was refused and why. */
typedef struct mm_reading {
    const mm_tensors *tensors;
    const mm_config *config;
    uint32_t layer;
    int32_t expert;      /* -1: not about one */
    const char *kind;    /* of the last refusal, for the anomaly it becomes */
    const char *refused; /* the tensor of it, or NULL */
    bool *shard_used;    /* [shard_count], or NULL */
    void **owned;        /* copies, for the source */
    uint32_t owned_count;
    mm_copies copies;            /* of what the file misaligns or stores transposed */
    const mm_tensor *transposed; /* the last stack that was found to lie transposed, or NULL */
    uint64_t copied_bytes;       /* of transposed stacks */
} mm_reading;

/* Fails with "FILE: layer N, expert E: tensor NAME " and the rest; tensor may be NULL. */
megamoe_status mm_reading_refuse(mm_reading *reading, megamoe_status status, const char *kind, const mm_tensor *tensor,
                                 const char *format, ...) __attribute__((format(printf, 5, 6)));
void mm_reading_use(mm_reading *reading, const mm_tensor *tensor); /* notes its shard */
void *mm_reading_own(mm_reading *reading, size_t bytes); /* memory that lives as long as the source; NULL: none left */

typedef enum mm_half { MM_WHOLE, MM_FIRST_HALF, MM_SECOND_HALF } mm_half;

/* Which part of the tensors is meant: all of them, or one expert's rows of a stack, or half of those. */
typedef struct mm_slice {
    bool stacked, interleaved;
    bool transposed;          /* [experts, in, out]; found from the tensors */
    uint32_t expert, experts; /* index in the stack and its size */
    mm_half half;
    uint32_t hidden; /* H if something else than the stack says it, else 0 */
    bool is_down;    /* K is I rather than H */
} mm_slice;

megamoe_status mm_matrix_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice, mm_matrix *matrix);

/*
 * input_scale as a multiplier; NaN if it is missing, not one F32 value, zero, denormal, negative, infinite or
 * NaN, or if its two spellings disagree. Never a failure, because only static nvfp4 activations need it.
 */
float mm_input_scale_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice);

#endif
