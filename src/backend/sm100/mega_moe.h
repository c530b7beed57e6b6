/*
 * The layer in the steps that engines know by name, as C calls over a machine (machine.h). Five launches, all
 * on the caller's stream, nothing read back, nothing allocated after mm_mega_moe_open: a CUDA graph can hold
 * them.
 *
 *     transform weights (at load, on the host)
 *     stage activation (plan + stage) -> L1 (gate, up, SwiGLU, NVFP4) -> L2 (down) -> combine
 *
 * Definitions: docs/numerics.md, nvfp4 activations. G: experts loaded here; E: experts of the model; K:
 * slots.
 */
#ifndef MM_SM100_MEGA_MOE_H
#define MM_SM100_MEGA_MOE_H

#include "backend/sm100/gemm.h"
#include "backend/sm100/scratch.h"
#include "weights.h"

/* Device memory, owned by whoever called the transform. gate is up itself where the layer is not gated. */
struct mm_mega_moe_weights {
    struct sm100_weights gate, up, down;
    float *h_globals; /* [G] of the quantized intermediate: each expert's own, or 1 */
};

/* MXFP4 only: values that NVFP4 could not hold. */
struct mm_mega_moe_loss {
    uint64_t values;
    uint32_t expert;    /* of the model, the first with such values */
    const char *matrix; /* its first with such values: "gate", "up" or "down" */
};

/* What is fixed for the life of a layer. */
struct mm_mega_moe_shape {
    uint32_t hidden, intermediate, expert_count, slots, max_tokens;
    mm_swiglu swiglu;
    bool routing_weight_before;
    bool batch_invariant; /* the same GEMM instances at every size */
    float input_global;   /* of every token; 0: each token's own amax / 2688 */
    uint32_t sm_budget;   /* multiprocessors to use; 0: all */
    uint64_t timeout_ns;  /* of one wait inside a kernel */
};

/* One run. Device pointers; those below the line are for the check and may be NULL. */
struct mm_mega_moe_batch {
    const void *hidden;          /* [token_count, hidden] BF16, or F32 */
    const int32_t *expert_ids;   /* [token_count, K] */
    const float *expert_weights; /* [token_count, K] */
    const float *shared;         /* F32 [token_count, hidden], added at the end; NULL: none */
    uint16_t *output;            /* BF16 [token_count, hidden] */
    uint32_t token_count;
    bool hidden_f32;
    /* ---- */
    uint8_t *token_codes, *token_scales; /* [token_count, hidden / 2 and / 16] */
    float *token_globals;                /* [token_count] */
    float *l1;                           /* [rows, 2, intermediate] */
};

struct mm_mega_moe_counts {
    uint64_t skipped_slots, bad_slots, saturated_blocks, nonfinite_blocks;
};

/* Device memory; rows are sorted by expert. Read by the check. */
struct mm_mega_moe_scratch {
    /* The layer's own. */
    int32_t *local_index;
    struct mm_mega_moe_counts *counts;
    uint64_t *expert_tokens; /* [E] */
    struct sm100_record *record;
    /* Shared with the device's other layers. */
    int32_t *ends, *pair_row;
    uint32_t *row_pair, *row_scale_row;
    float *row_weights, *row_globals;
    uint8_t *x_codes, *x_scales, *h_codes, *h_scales;
    uint16_t *partials; /* BF16 [tokens * K, hidden] */
};

struct mm_mega_moe {
    const struct sm100_machine *machine;
    struct mm_mega_moe_shape shape;
    struct mm_mega_moe_weights weights;
    struct mm_mega_moe_scratch scratch;
    struct sm100_gemm_args arguments[SM100_TILE_COUNT]; /* of every instance, maps encoded */
};

#ifdef __cplusplus
extern "C" {
#endif

/*
 * transform_nvfp4_weights_for_mega_moe: the layer's experts, in host memory or (on_device) in device memory, to the
 * operands of the kernels in device memory: codes, scales in MMA layout, and the fp32 globals (the "alphas") of
 * gate, up and down, not folded into anything. NVFP4 codes that lie in device memory at 16-byte pitches are used
 * there; everything else is copied. Transient host memory: one matrix. A loss is for the caller to report; if the
 * layer is strict, it is UNSUPPORTED_MODEL. On failure nothing stays allocated.
 */
megamoe_status mm_transform_nvfp4_weights_for_mega_moe(const struct sm100_machine *machine,
                                                       const mm_layer_weights *layer, bool on_device,
                                                       struct mm_mega_moe_weights *weights,
                                                       struct mm_mega_moe_loss *loss);
void mm_mega_moe_weights_free(const struct sm100_machine *machine, struct mm_mega_moe_weights *weights);

/*
 * local_index: host [E], the loaded expert of each or -1. scratch: the device's, which outlives the layer. Takes the
 * weights over on success.
 */
megamoe_status mm_mega_moe_open(const struct sm100_machine *machine, const struct mm_mega_moe_shape *shape,
                                const struct mm_mega_moe_weights *weights, const int32_t *local_index,
                                struct sm100_scratch *scratch, struct mm_mega_moe **moe);
void mm_mega_moe_close(struct mm_mega_moe *moe);

/* stage_activation: the plan of the batch, then each token quantized once and written to each of its rows. */
megamoe_status mm_stage_activation(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream);
/* nvfp4_mega_moe_l1: gate and up, clamp, SwiGLU, NVFP4: from the staged rows to h in scratch. */
megamoe_status mm_nvfp4_mega_moe_l1(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream);
/* nvfp4_mega_moe_l2: down, one row per (token, slot): BF16 to `partials`, or F32 if partials_f32. */
megamoe_status mm_nvfp4_mega_moe_l2(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *partials,
                                    bool partials_f32, void *stream);
/* The partials of each token in the order of its slots. */
megamoe_status mm_mega_moe_combine(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream);
/* nvfp4_mega_moe_full: the four above. */
megamoe_status mm_nvfp4_mega_moe_full(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream);

/* Waits for the machine; DEVICE_ERROR with the decoded record if a kernel gave up waiting. */
megamoe_status mm_mega_moe_check(struct mm_mega_moe *moe);

#ifdef __cplusplus
}
#endif

#endif
