/* What the files of the CPU backend share: the device, its scratch memory, and a layer. */
#ifndef MM_CPU_CPU_H
#define MM_CPU_CPU_H

#include <time.h>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/pool.h"
#include "routing/plan.h"

/* A batch is worked on in chunks of this many tokens, which bounds the scratch memory of large batches. */
#define MM_CHUNK_TOKENS 1024u

/* The largest of every dimension over the layers of a device; scratch is sized from it. */
typedef struct mm_cpu_extent {
    uint32_t tokens, hidden, intermediate, expert_count, loaded_count, experts_per_token;
} mm_cpu_extent;

/* Counters that threads add to, a cache line each. */
typedef struct mm_cpu_tally {
    _Alignas(64) mm_quantize_counts blocks;
    uint64_t unrouted_tokens;
    double routed_seconds, shared_seconds; /* in units of L1 and L2; counted where there is a shared expert */
} mm_cpu_tally;

/* Some rows of a chunk that go to one expert: a loaded one, or the shared expert. */
typedef struct mm_cpu_group {
    const mm_expert *expert;
    const mm_swiglu *swiglu;
    uint32_t row_first, row_count;
    uint32_t deciding_rows;            /* rows of this expert in the whole batch */
    uint32_t l1_unit_end, l2_unit_end; /* units of all groups up to and including this one */
    bool shared, x_nvfp4, h_nvfp4;
    unsigned x_packed, h_packed; /* bytes per value of the packed operands of L1, of L2; 0: not packed */
    size_t packed_offset;        /* where they begin, in bytes */
    uint32_t pack_unit_end;
    float h_global; /* nvfp4: of the intermediate; else 1 */
} mm_cpu_group;

/* One allocation; C tokens of a chunk, R = C * (K + 1) rows: the plan's, then the shared expert's. */
typedef struct mm_cpu_scratch {
    void *memory;
    size_t bytes;
    size_t x_pitch, h_pitch; /* bytes of an operand row */
    size_t l2_pitch;         /* floats */
    uint8_t *x, *x_nvfp4;    /* [C] operands: BF16 values, and code * scale */
    float *x_globals;        /* [C] */
    float *logits;           /* [C, E] */
    int32_t *ids;            /* [T, K] of the whole batch */
    float *weights;          /* [T, K] */
    uint32_t *expert_rows;   /* [loaded] rows of each expert in the whole batch */
    uint32_t *row_token;     /* [R] token within the chunk */
    int32_t *pair_row;       /* [C, K], or -1 */
    mm_cpu_group *groups;    /* [loaded + 1 + R / group_rows] */
    uint8_t *h;              /* [R] operands */
    uint8_t *packed;         /* operands of L1, later of L2, in packed blocks; NULL if the level packs nothing */
    float *l2;               /* [R, H] */
    uint8_t *thread_memory;  /* [threads] of thread_bytes */
    size_t thread_bytes;
    mm_plan plan;
    size_t plan_bytes;
} mm_cpu_scratch;

/* One thread's scratch. */
typedef struct mm_cpu_thread {
    void *panel;             /* MM_PANEL_BYTES */
    float *values;           /* [max(H, I)] */
    uint8_t *codes, *scales; /* of `values` */
    float *sums;             /* [group_rows, 2, MM_ROWS_MAX] */
} mm_cpu_thread;

struct mm_backend_state {
    mm_kernels kernels;
    mm_pool *pool;
    mm_scale_table e4m3, e8m0;
    uint32_t threads, max_tokens;
    bool batch_invariant;
    mm_cpu_extent extent;
    mm_cpu_scratch scratch;
    mm_cpu_tally *tallies; /* [threads] */
};

struct mm_backend_layer {
    mm_backend_state *state;
    const mm_layer_weights *weights;
    megamoe_counters counters;
    uint64_t *tokens_per_expert; /* [E] */
};

/* Makes the scratch large enough for `extent` and what came before; on failure it is as it was. */
megamoe_status mm_cpu_scratch_grow(mm_backend_state *state, const mm_cpu_extent *extent);
void mm_cpu_scratch_free(mm_cpu_scratch *scratch);
mm_cpu_thread mm_cpu_scratch_thread(const mm_backend_state *state, uint32_t thread);

megamoe_status mm_cpu_run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream);
megamoe_status mm_cpu_route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                            float *expert_weights, void *stream);

/* Takes about a second. matrix_tflop_s is 0 if the level has no tile loop. */
megamoe_status mm_cpu_measure(mm_backend_state *state, megamoe_limits *limits);

megamoe_status mm_cpu_quantize(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                               megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream);
megamoe_status mm_cpu_dequantize(mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                 const megamoe_tensor *globals, megamoe_tensor *values, void *stream);
megamoe_status mm_cpu_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                   const megamoe_tensor *row_scales, const mm_matrix *matrices, const int32_t *offsets,
                                   uint32_t group_count, megamoe_tensor *output, void *stream);

/* Whether activations of this matrix are quantized: FP4 weights follow the mode, BF16 and FP8 ones take BF16.
 */
static inline bool mm_cpu_takes_nvfp4(const mm_layer_weights *weights, const mm_matrix *matrix) {
    return weights->activations == MEGAMOE_ACTIVATIONS_NVFP4 &&
           (matrix->format == MM_NVFP4 || matrix->format == MM_MXFP4);
}

static inline const mm_scale_table *mm_cpu_table(const mm_backend_state *state, const mm_matrix *matrix) {
    return matrix->format == MM_MXFP4 ? &state->e8m0 : &state->e4m3;
}

/* Bytes of an operand row of `columns` values. */
static inline size_t mm_cpu_operand_bytes(const mm_kernels *kernels, uint32_t columns) {
    return (padded_columns(columns) * (kernels->operands_bf16 ? 2 : 4) + 63) / 64 * 64;
}

/* Zeroes what follows the values of an operand row. */
static inline void mm_cpu_operand_pad(const mm_kernels *kernels, uint32_t columns, uint8_t *operand) {
    size_t used = (size_t)columns * (kernels->operands_bf16 ? 2 : 4);
    memset(operand + used, 0, mm_cpu_operand_bytes(kernels, columns) - used);
}

/* Values to an operand row, with its padding zeroed. */
static inline void mm_cpu_operand_store(const mm_kernels *kernels, const float *values, uint32_t columns,
                                        uint8_t *operand) {
    kernels->store(values, columns, operand);
    mm_cpu_operand_pad(kernels, columns, operand);
}

static inline double mm_cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
