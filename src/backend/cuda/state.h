/*
 * What the GPU backends keep: a device with its kernels and scratch, and a layer with its weights and the kernels
 * chosen for it. cuda-portable and sm90 are one backend; `native` says whether the wgmma kernels may be used.
 */
#ifndef MM_CUDA_STATE_H
#define MM_CUDA_STATE_H

#include "backend/backend.h"
#include "backend/cuda/args.h"
#include "backend/cuda/choose.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"

/* A block of device memory; blocks are chained and live until the handle that owns them is closed. */
typedef struct mm_block {
    struct mm_block *next;
    CUdeviceptr base;
    uint64_t bytes;
} mm_block;

/* Addresses within the device's scratch, sized for max_tokens and the largest layer so far. */
typedef struct mm_scratch {
    uint16_t *hidden, *output; /* only for batches in host memory */
    int32_t *token_ids, *given_ids;
    float *given_weights;
    int32_t *expert_ids, *row_pair, *pair_row, *offsets;
    float *weights, *logits, *row_global, *h32, *shared_out, *shared_h32;
    uint32_t *block_counts;
    mm_cuda_plan *plan;
    mm_cuda_entry *entries[MM_CUDA_LIST_COUNT];
    uint16_t *x, *h, *p;                        /* staged rows, staged intermediate, results of L2 */
    uint16_t *token_x, *shared_h, *shared_bf16; /* shared_bf16: FP8 weights as BF16 */
    uint64_t bytes;
} mm_scratch;

struct mm_backend_state {
    const mm_driver *driver;
    mm_gpu gpu;
    const char *image;
    bool native, batch_invariant;
    uint32_t max_tokens, sm_count; /* multiprocessors to use */
    CUdevice device;
    CUcontext context;
    CUstream stream; /* for loading, measuring and host-memory batches */
    CUstream side;   /* for the shared expert beside the routed ones, between these two events */
    CUevent forked, joined;
    mm_kernels kernels;
    mm_block *scratch_blocks; /* grown ones are kept: captured graphs may use them */
    mm_scratch scratch;
    mm_block *single_blocks; /* of grouped_gemm */
    uint64_t device_bytes, host_bytes;
};

/* How one of the decode GEMMs of a layer is launched. */
typedef struct mm_decode_form {
    mm_kernel kernel;                                    /* MM_KERNEL_COUNT: the layer has none */
    uint32_t cta_count, share, slot_count, shared_bytes; /* CTAs that split K, and the quarters of each: see args.h */
} mm_decode_form;

/* How one of the shared expert's GEMMs goes over few tokens, see dense.cuh. */
typedef struct mm_dense_form {
    uint32_t chunks; /* of K; 0: the layer takes tiles instead */
    uint32_t units, chunk_units, pitch, slot_bytes, eights, ctas;
} mm_dense_form;

struct mm_backend_layer {
    mm_backend_state *state;
    const mm_layer_weights *weights;
    mm_block *blocks;
    mm_cuda_expert *experts, *shared;                /* device; shared: one, or NULL */
    CUtensorMap *decode_maps, *mid_maps, *wide_maps; /* device, per expert: 6, 3, 3 */
    int32_t *local_index;
    void *router_weight;
    float *router_bias;
    int32_t *token_experts;
    mm_cuda_counters *counters;
    unsigned long long *expert_tokens;
    mm_decode_form decode[2];          /* L1, L2 */
    mm_kernel tile[2], shared_tile[2]; /* portable */
    mm_dense_form dense[2];            /* the shared expert's L1, L2 */
    CUtensorMap *dense_maps;           /* device: gate, up, down */
    bool dense_native; /* it may take sm90's wgmma kernels, which read its tensor maps' addresses here: */
    mm_cuda_expert shared_host;
    mm_kernel mid[2], wide[2]; /* wgmma, or MM_KERNEL_COUNT */
    uint32_t scale_row_bytes[2];
    bool down_contiguous; /* rows of down follow each other: L1's kernel may fetch L2's first ones in one go */
    uint32_t h_pitch, i_pitch, shared_pitch; /* staged pitches of H, I and the shared expert's I */
};

typedef struct mm_launch {
    uint32_t grid[3], threads, shared_bytes, cluster; /* CTAs of a cluster; 0: 1 */
    bool after_start; /* programmatic dependent launch: may begin before the launch before it has ended */
} mm_launch;

megamoe_status mm_cuda_launch(const mm_backend_state *state, CUstream stream, mm_kernel kernel, const mm_launch *how,
                              void **arguments);
/* Everything below runs between enter and leave: the device's context is current. */
megamoe_status mm_cuda_enter(const mm_backend_state *state);
void mm_cuda_leave(const mm_backend_state *state);

/* Device memory, zeroed; counted in the state. */
megamoe_status mm_block_create(mm_backend_state *state, uint64_t bytes, const char *what, mm_block **chain,
                               void **base);
void mm_blocks_free(mm_backend_state *state, mm_block **chain);

/* device.c: BF16 [rows, columns] in boxes of box_rows x 64, swizzled by 128 bytes */
megamoe_status mm_cuda_operand_map(const mm_driver *driver, const void *base, uint64_t rows, uint64_t columns,
                                   uint32_t box_rows, CUtensorMap *map);
/* load.c */
megamoe_status mm_cuda_weights_load(mm_backend_layer *layer, bool on_device, const megamoe_layer_options *options,
                                    mm_cuda_expert *experts /* [expert_count + 1]: host copies, the shared one last */);
/* Of weights that the caller holds: whether they can be used where they lie, or have to be brought to the device. */
bool mm_cuda_weights_on_device(const mm_backend_state *state, const mm_layer_weights *weights);
mm_cuda_matrix mm_cuda_matrix_borrow(const mm_matrix *matrix);
/* From a matrix's first code (scale) to its last. */
uint64_t mm_cuda_code_bytes(const mm_matrix *matrix);
uint64_t mm_cuda_scale_bytes(const mm_matrix *matrix);
/* layer.c */
/* A tensor map of rows, in boxes of box_rows x box_bytes. */
typedef struct mm_map_form {
    CUtensorMapDataType type;
    uint32_t value_bytes, box_bytes, box_rows;
} mm_map_form;
megamoe_status mm_cuda_rows_map(const mm_driver *driver, const uint8_t *base, uint64_t row_bytes, uint64_t pitch,
                                uint32_t rows, const mm_map_form *form, CUtensorMap *map);
megamoe_status mm_cuda_copy_in(mm_backend_state *state, void *device, const void *host, size_t bytes);
mm_kernel mm_cuda_portable_tile(bool l1, uint32_t format);
megamoe_status mm_cuda_layer_create(mm_backend_state *state, const mm_layer_weights *weights, bool weights_on_device,
                                    const megamoe_layer_options *options, mm_backend_layer **layer);
void mm_cuda_layer_close(mm_backend_layer *layer);
/* The parts of the device's scratch as this layer uses them. */
void mm_cuda_scratch(const mm_backend_layer *layer, mm_scratch *scratch);
/* run.c */
megamoe_status mm_cuda_route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                             float *expert_weights, void *stream);
megamoe_status mm_cuda_run_batch(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream);
/* The two expert GEMMs (and nvfp4's quantization between) alone, on the plan and staged rows of the last run. For
 * measuring. */
megamoe_status mm_cuda_run_experts(mm_backend_layer *layer, uint32_t token_count, const float *weights, CUstream stream,
                                   bool first_launch);
megamoe_status mm_cuda_stage_launch(const mm_backend_state *state, const mm_cuda_stage_args *args, uint32_t rows_max,
                                    bool after_start, CUstream stream);
mm_cuda_stage_args mm_cuda_hidden_args(const mm_backend_layer *layer, const megamoe_batch *batch, bool quantize);
mm_launch mm_cuda_tile_launch(const mm_backend_state *state);
/* shared.c */
megamoe_status mm_cuda_shared_create(mm_backend_layer *layer, const mm_cuda_expert *shared);
/* Around the routed experts' launches. started: whether a launch of this run came before on `stream`. */
megamoe_status mm_cuda_shared_begin(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream,
                                    bool *started);
megamoe_status mm_cuda_shared_end(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream, bool *started);
/* The shared expert alone. For measuring. */
megamoe_status mm_cuda_run_shared(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream,
                                  bool first_launch);
/* single.c */
megamoe_status mm_cuda_quantize(mm_backend_state *state, const megamoe_tensor *values, const float *global,
                                megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals, void *stream);
megamoe_status mm_cuda_dequantize(mm_backend_state *state, const megamoe_tensor *codes, const megamoe_tensor *scales,
                                  const megamoe_tensor *globals, megamoe_tensor *values, void *stream);
megamoe_status mm_cuda_grouped_gemm(mm_backend_state *state, const megamoe_tensor *rows,
                                    const megamoe_tensor *row_scales, const mm_matrix *matrices, const int32_t *offsets,
                                    uint32_t group_count, megamoe_tensor *output, void *stream);
/* timing.c */
megamoe_status mm_cuda_time(mm_backend_layer *layer, const megamoe_batch *batches, uint32_t count,
                            megamoe_times *times);
/* stages.c */
/* Plain host memory, of which the driver knows nothing. Pinned and managed memory count as the device's. */
bool mm_cuda_is_host(const mm_backend_state *state, const void *p);
megamoe_status mm_cuda_run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                           const megamoe_stages *stages, uint32_t *written, void *stream);

/* BF16 and FP8 weights take bf16 activations whatever the layer's mode. */
static inline bool mm_cuda_quantizes(const mm_layer_weights *w, const mm_expert *e) {
    return w->activations == MEGAMOE_ACTIVATIONS_NVFP4 && (e->up.format == MM_NVFP4 || e->up.format == MM_MXFP4);
}

static inline uint32_t mm_round_up(uint32_t value, uint32_t to) {
    return (value + to - 1) / to * to;
}

#endif
