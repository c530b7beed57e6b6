/*
 * Weights as they lie in memory: what the checkpoint reader (or the caller's tensors) hands to a backend.
 * Plain data, borrowed; nothing here is copied from the file but scalars. On a GPU the pointers may be device
 * pointers.
 */
#ifndef MM_WEIGHTS_H
#define MM_WEIGHTS_H

#include "megamoe/megamoe.h"
#include "numerics/swiglu.h"

#define MM_EXPERTS_MAX 4096u /* of a layer */
#define MM_EXPERTS_PER_TOKEN_MAX 32u

typedef enum mm_format {
    MM_NVFP4 = 1, /* E2M1 codes, an E4M3 scale per 16 along K, a global scale */
    MM_MXFP4,     /* E2M1 codes, an E8M0 scale per 32 along K */
    MM_BF16,
    MM_FP8 /* E4M3 values, one scale (F32 or E8M0) per block of block_rows x block_columns */
} mm_format;

/* One weight matrix [rows = N, columns = K]. W[n][k] = value(codes, n, k) * scale(n, k) * global. */
typedef struct mm_matrix {
    const uint8_t *codes;  /* row n begins at codes + n * row_bytes; NULL: this matrix is absent */
    const uint8_t *scales; /* NVFP4, MXFP4: row n at scales + n * scale_row_bytes; FP8: block row n / block_rows */
    const void *bias;      /* [rows], or NULL; added after the global scale */
    uint64_t row_bytes, scale_row_bytes, bias_stride; /* bytes; interleaved gate/up rows have doubled pitches */
    uint32_t rows, columns;
    mm_format format;
    megamoe_dtype scale_dtype;          /* E4M3, E8M0 or F32 */
    megamoe_dtype bias_dtype;           /* BF16 or F32 */
    uint32_t block_rows, block_columns; /* FP8 */
    float global;                       /* 1 where the format has none */
} mm_matrix;

typedef struct mm_expert {
    mm_matrix gate, up, down;  /* gate [I, H], up [I, H], down [H, I]; gate absent when the layer is not gated */
    float input_global;        /* the larger of gate's and up's input_scale; NaN: missing or unusable */
    float intermediate_global; /* down's input_scale; NaN: missing or unusable */
} mm_expert;

typedef struct mm_router {
    const void *weight;           /* [E, H], or NULL: the caller routes */
    megamoe_dtype weight_dtype;   /* BF16 or F32 */
    const float *bias;            /* [E] or NULL; host memory aligned for float (copied if the file is not) */
    const int32_t *token_experts; /* [vocabulary, K] for hash-routed layers, else NULL; every entry is below E */
    uint32_t vocabulary;
} mm_router;

/* A layer with everything decided: what a backend's layer_create receives. */
typedef struct mm_layer_weights {
    megamoe_shape shape; /* defaults filled in: group_size, routed_scale, swiglu_alpha are never 0 */
    mm_swiglu swiglu, shared_swiglu;
    megamoe_activations activations;  /* BF16 or NVFP4 */
    megamoe_global input_mode;        /* nvfp4: STATIC, TOKEN or UNIT */
    megamoe_global intermediate_mode; /* nvfp4: STATIC or UNIT */
    float input_global;               /* STATIC: maximum over gate and up of ALL experts of the layer; UNIT: 1 */
    bool routing_weight_before;
    bool strict;              /* a backend that would have to change a weight's value refuses the layer */
    const mm_expert *experts; /* [expert_count] loaded on this rank */
    uint32_t expert_count;
    const int32_t *local_index; /* [E]: index into experts, or -1 */
    const mm_expert *shared;    /* or NULL; its weight is exactly 1 */
    mm_router router;
} mm_layer_weights;

const char *mm_format_name(mm_format format); /* "nvfp4", "mxfp4", "bf16", "fp8" */
uint64_t mm_scale_bytes(const mm_matrix *matrix);
uint64_t mm_matrix_bytes(const mm_matrix *matrix); /* codes and scales */

#endif
