/*
 * The table a backend fills. A backend receives arguments that megamoe.c has checked and weights that layer.c
 * has decided upon; it owns its device state and its layer state. docs/adding-a-backend.md walks through one.
 */
#ifndef MM_BACKEND_H
#define MM_BACKEND_H

#include "megamoe/megamoe.h"
#include "weights.h"

typedef struct mm_backend_state mm_backend_state; /* a backend's device; each backend defines its own */
typedef struct mm_backend_layer mm_backend_layer; /* a backend's layer; each backend defines its own */

typedef struct mm_device_facts {
    char description[128];             /* "cpu (avx512, 2 threads)" */
    const char *isa;                   /* "scalar", "avx2", "avx512", "amx", "sm_90a", ... */
    uint32_t threads;                  /* 0 on a GPU */
    uint64_t host_bytes, device_bytes; /* held now */
} mm_device_facts;

/* The routed experts of a layer, step by step, as engines know them (docs/decisions/0050). */
typedef enum mm_step { MM_STEP_STAGE, MM_STEP_L1, MM_STEP_L2, MM_STEP_FULL } mm_step;

typedef struct mm_backend {
    const char *name; /* as --backend spells it */
    megamoe_backend id;
    bool host_memory;  /* batches and weights are host memory: routing is checked before any work */
    bool native_nvfp4; /* activations AUTO means nvfp4 if the checkpoint declares W4A4; elsewhere bf16 */

    /* Can it run here? The failure is a sentence that says what is missing and what to do. */
    megamoe_status (*probe)(uint32_t ordinal);
    megamoe_status (*open)(const megamoe_device_options *options, mm_backend_state **state);
    void (*close)(mm_backend_state *state);
    void (*describe)(const mm_backend_state *state, mm_device_facts *facts);
    megamoe_status (*measure)(mm_backend_state *state, megamoe_limits *limits); /* or NULL */

    /* Reads `bytes` of the caller's memory (device memory on a GPU) into host memory; NULL: plain memcpy. */
    megamoe_status (*read)(mm_backend_state *state, void *host, const void *source, size_t bytes);
    /* Zeros the caller's memory, in the order of the stream and without waiting for it; NULL: plain memset. */
    megamoe_status (*zero)(mm_backend_state *state, void *target, size_t bytes, void *stream);

    /*
     * Keeps what it needs of `weights`: the struct and its arrays of experts and indices live as long as the
     * layer (megamoe.c owns them). weights_on_device: codes, scales, biases and the router's weight may be device
     * pointers. Sizes all scratch for max_tokens. progress may be NULL.
     */
    megamoe_status (*layer_create)(mm_backend_state *state, const mm_layer_weights *weights, bool weights_on_device,
                                   const megamoe_layer_options *options, mm_backend_layer **layer);
    void (*layer_close)(mm_backend_layer *layer);

    /* batch->hidden_dtype is never 0. Writes ids (-1 for an unrouted token) and weights, [T, K]. */
    megamoe_status (*route)(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                            float *expert_weights, void *stream);
    /* given, stages, written: as megamoe_layer_run_stages, or all NULL for a plain run. */
    megamoe_status (*run)(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream);
    megamoe_status (*counters)(mm_backend_layer *layer, megamoe_counters *counters, uint64_t *tokens_per_expert);
    /* megamoe_layer_time: batches are checked and alike in size, and there is one. NULL: not by a clock of its own. */
    megamoe_status (*time)(mm_backend_layer *layer, const megamoe_batch *batches, uint32_t count, megamoe_times *times);

    /* One step, with the batch's routing; partials: where L2 leaves its rows, NULL in other steps. And what the steps
     * read. Both NULL: this backend has no such kernels; a layer that does not run on them is UNSUPPORTED_DEVICE. */
    megamoe_status (*step)(mm_backend_layer *layer, mm_step step, const megamoe_batch *batch,
                           const megamoe_tensor *partials, void *stream);
    megamoe_status (*step_weights)(const mm_backend_layer *layer, megamoe_mega_moe_weights *weights);

    /* Single stages; shapes and dtypes are checked, tensors are contiguous. NULL: this backend has none. */
    megamoe_status (*quantize)(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                               megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream);
    megamoe_status (*dequantize)(mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                 const megamoe_tensor *globals, megamoe_tensor *values, void *stream);
    megamoe_status (*grouped_gemm)(mm_backend_state *state, const megamoe_tensor *rows,
                                   const megamoe_tensor *row_scales, const mm_matrix *matrices /* [group_count] */,
                                   const int32_t *offsets, uint32_t group_count, megamoe_tensor *output, void *stream);
} mm_backend;

/* Bits of `written` in megamoe_layer_run_stages, in the order of the fields of megamoe_stages. */
enum {
    MM_STAGE_IDS = 1 << 0,
    MM_STAGE_WEIGHTS = 1 << 1,
    MM_STAGE_X_CODES = 1 << 2,
    MM_STAGE_X_SCALES = 1 << 3,
    MM_STAGE_X_GLOBALS = 1 << 4,
    MM_STAGE_L1 = 1 << 5,
    MM_STAGE_H = 1 << 6,
    MM_STAGE_H_CODES = 1 << 7,
    MM_STAGE_H_SCALES = 1 << 8,
    MM_STAGE_H_GLOBALS = 1 << 9,
    MM_STAGE_L2 = 1 << 10,
    MM_STAGE_SHARED = 1 << 11,
    MM_STAGE_OUTPUT = 1 << 12,
    MM_STAGE_LOGITS = 1 << 13,
    MM_STAGE_L1_MAGNITUDE = 1 << 14,
    MM_STAGE_L2_MAGNITUDE = 1 << 15,
    MM_STAGE_LOGITS_MAGNITUDE = 1 << 16
};

/* The backend for `id`, after its own probe. AUTO: MEGAMOE_BACKEND, else the best that can run here. */
megamoe_status mm_backend_find(megamoe_backend id, uint32_t ordinal, const mm_backend **backend);

extern const mm_backend mm_backend_reference;
extern const mm_backend mm_backend_cpu;
#ifdef MEGAMOE_HAVE_CUDA
extern const mm_backend mm_backend_cuda_portable;
extern const mm_backend mm_backend_sm90;
extern const mm_backend mm_backend_sm100;
#endif

#endif
