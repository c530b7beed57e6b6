/*
 * megamoe.h - NVFP4 Mixture-of-Experts layers on CPUs and NVIDIA GPUs.
 *
 *     checkpoint + device --layer_load--> layer --layer_run--> output
 *     caller's tensors + device --layer_create--> layer
 *
 * Handles: checkpoint, device, layer. Plain data: shape, tensor, batch, group, stages.
 *
 * Errors. A function that can fail returns megamoe_status and gives its result through its last pointer,
 * which is untouched on failure. megamoe_error_message() then holds one sentence that names the file, tensor,
 * layer, expert and the two values that disagree. The library never prints, exits or installs handlers.
 *
 * Options. Each options struct starts with struct_size (set it to sizeof); zero in any other field means the
 * default. A struct_size the library does not know is refused. *_close functions accept NULL.
 *
 * Threads. Different handles may be used from different threads. A device owns all scratch memory, sized from
 * max_tokens and the largest layer loaded and shared by its layers, so one device and its layers run one
 * thing at a time (one thread, one stream): open a second device for concurrency. A checkpoint is read-only
 * after open and may be shared by any number of devices and threads. A CPU device has helper threads from open
 * to close, which sleep between calls; a forked child starts its own when it first needs them. Close devices before
 * you unload the library.
 *
 * The definition of every number computed here is docs/numerics.md.
 */
#ifndef MEGAMOE_H
#define MEGAMOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#    define MEGAMOE_API __attribute__((visibility("default")))
#else
#    define MEGAMOE_API
#endif

#define MEGAMOE_VERSION_MAJOR 0
#define MEGAMOE_VERSION_MINOR 1
#define MEGAMOE_VERSION_PATCH 0

typedef enum megamoe_status {
    MEGAMOE_OK = 0,
    MEGAMOE_INVALID_ARGUMENT = 1, /* the caller's mistake; nothing was changed */
    MEGAMOE_OUT_OF_MEMORY = 2,
    MEGAMOE_IO_ERROR = 3,
    MEGAMOE_CORRUPT_FILE = 4,       /* bounds, syntax, NaN scales, sizes that disagree */
    MEGAMOE_UNSUPPORTED_MODEL = 5,  /* a valid file, but no layer we can run */
    MEGAMOE_UNSUPPORTED_DEVICE = 6, /* not built in, or absent */
    MEGAMOE_DEVICE_ERROR = 7,
    MEGAMOE_GROUP_ERROR = 8, /* a rank is missing, late, or called with other parameters */
    MEGAMOE_CANCELLED = 9    /* a progress callback returned false */
} megamoe_status;

MEGAMOE_API const char *megamoe_version(void);                      /* "0.1.0" */
MEGAMOE_API const char *megamoe_status_name(megamoe_status status); /* "MEGAMOE_CORRUPT_FILE" */
MEGAMOE_API const char *megamoe_error_message(void);                /* of the calling thread's last failure */

/* ---- plain data ------------------------------------------------------------------------------------- */

typedef enum megamoe_dtype {
    MEGAMOE_BF16 = 1,
    MEGAMOE_F32,
    MEGAMOE_E2M1X2, /* two values per byte, even index in the low nibble; extents count values */
    MEGAMOE_E4M3,   /* e4m3fn */
    MEGAMOE_E8M0,   /* byte b is 2^(b-127); 255 is NaN */
    MEGAMOE_I32,
    MEGAMOE_I64,
    MEGAMOE_U8,
    MEGAMOE_I8,
    MEGAMOE_F16
} megamoe_dtype;

/* Borrowed memory; row-major unless strides are given; host or device memory as the call says. */
typedef struct megamoe_tensor {
    void *data;
    megamoe_dtype dtype;
    uint32_t rank;     /* 0..4 */
    int64_t extent[4]; /* outermost first */
    int64_t stride[4]; /* in elements (in bytes for E2M1X2); all zero: contiguous */
} megamoe_tensor;

/* How router logits become a choice and weights; docs/numerics.md, "Router". */
typedef enum megamoe_score {
    MEGAMOE_SQRTSOFTPLUS = 1, /* DeepSeek-V4, hash layers included */
    MEGAMOE_SIGMOID,          /* DeepSeek-V3/R1, Kimi, GLM; optionally group-limited */
    MEGAMOE_SOFTMAX_TOPK,     /* softmax, then top-K: Qwen */
    MEGAMOE_TOPK_SOFTMAX      /* top-K, then softmax over the K: Mixtral, gpt-oss */
} megamoe_score;

typedef struct megamoe_shape {
    uint32_t hidden, intermediate; /* H and I, multiples of 16 */
    uint32_t expert_count;         /* E of the model, not of the rank */
    uint32_t experts_per_token;    /* K, 1..32 */
    uint32_t group_size;           /* values per weight scale: 16 (NVFP4) or 32 (MXFP4); 0: 16 */
    megamoe_score score;
    uint32_t group_count, groups_per_token; /* group-limited routing, or 0 */
    bool hash_routed;                       /* experts by token id (tid2eid), weights by the router */
    bool normalize_weights;                 /* weights divided by their sum over the K */
    bool not_gated;                         /* relu2 of up alone; there is no gate projection */
    float routed_scale;                     /* multiplies the weights, once; 0: 1 */
    float swiglu_alpha, swiglu_beta;        /* h = G sigmoid(alpha G) (U + beta); alpha 0: 1 */
    float swiglu_limit;                     /* clamp before the activation; 0: none */
} megamoe_shape;

typedef enum megamoe_activations {
    MEGAMOE_ACTIVATIONS_AUTO = 0,
    MEGAMOE_ACTIVATIONS_BF16, /* W4A16: activations used as they come */
    MEGAMOE_ACTIVATIONS_NVFP4 /* W4A4: activations quantized per token in blocks of 16 */
} megamoe_activations;

/* Where the global scale of nvfp4 activations comes from. */
typedef enum megamoe_global {
    MEGAMOE_GLOBAL_AUTO = 0,
    MEGAMOE_GLOBAL_STATIC, /* the checkpoint's input_scale */
    MEGAMOE_GLOBAL_TOKEN,  /* amax of the token / 2688 */
    MEGAMOE_GLOBAL_UNIT    /* 1 */
} megamoe_global;

/* ---- checkpoint: safetensors as published, mapped read-only ----------------------------------------- */

typedef struct megamoe_checkpoint megamoe_checkpoint;

typedef struct megamoe_checkpoint_options {
    size_t struct_size;
    bool strict;            /* contradictions between config.json and the tensors are errors, not anomalies; so are
                               MXFP4 values that sm100 would have to round to NVFP4, when the layer is loaded */
    bool repair_nan_scales; /* weight scale byte 0x7F is read as 0x7E (448), counted in the anomalies */
    bool skip_scan;         /* do not look for NaN scale bytes when a layer is loaded */
} megamoe_checkpoint_options;

/*
 * Opens a directory of safetensors shards (with or without an index) or one .safetensors file, checks every
 * header, offset and name, and maps the files. Reads no tensor data but scalars. options may be NULL.
 * A file without MoE layers opens too: its tensors can be read by name.
 */
MEGAMOE_API megamoe_status megamoe_checkpoint_open(const char *path, const megamoe_checkpoint_options *options,
                                                   megamoe_checkpoint **checkpoint);
/* After the layers loaded from it. */
MEGAMOE_API void megamoe_checkpoint_close(megamoe_checkpoint *checkpoint);

/* MoE layers are numbered as in the model (layer N of the tensor names); MTP blocks follow the last layer. */
MEGAMOE_API uint32_t megamoe_checkpoint_layer_count(const megamoe_checkpoint *checkpoint);

/* What the tensors say of the i-th MoE layer. Strings live as long as the checkpoint. */
typedef struct megamoe_layer_info {
    size_t struct_size;
    uint32_t layer; /* its number in the model */
    megamoe_shape shape;
    const char *format;                     /* of the routed experts: "nvfp4", "mxfp4", "bf16", "fp8" */
    const char *naming;                     /* "modelopt", "compressed-tensors", "deepseek-native", "fused" */
    const char *shared_format;              /* of the shared expert, or NULL if there is none */
    const char *prefix;                     /* of its tensor names, such as "model.layers.3.mlp" */
    bool router_present;                    /* the file can route; otherwise the caller must */
    uint32_t expert_first, experts_present; /* the range of experts whose tensors are in the file */
    uint64_t expert_bytes, other_bytes;     /* one routed expert; router and shared expert together */
    /* nvfp4 only: gate/up pairs whose global scales differ, and the largest ratio between two of a pair */
    uint32_t global_pairs_differing;
    float global_ratio_max;
    uint32_t input_scales_valid; /* experts whose input_scale is usable for all projections */
} megamoe_layer_info;
MEGAMOE_API megamoe_status megamoe_checkpoint_layer(const megamoe_checkpoint *checkpoint, uint32_t position,
                                                    megamoe_layer_info *info);
/* The shape of model layer `layer`. INVALID_ARGUMENT names the layers there are. */
MEGAMOE_API megamoe_status megamoe_checkpoint_shape(const megamoe_checkpoint *checkpoint, uint32_t layer,
                                                    megamoe_shape *shape);
MEGAMOE_API const char *megamoe_checkpoint_model_type(const megamoe_checkpoint *checkpoint); /* or "" */

typedef struct megamoe_anomaly {
    size_t struct_size;
    bool is_error;         /* a load of this layer would be refused */
    const char *kind;      /* "nan-scale", "missing-input-scale", "config-contradiction", ... */
    const char *tensor;    /* or NULL */
    int32_t layer, expert; /* -1: not about one */
    const char *detail;    /* one sentence */
    const char *remedy;    /* what to do about it, or NULL */
} megamoe_anomaly;
MEGAMOE_API uint32_t megamoe_checkpoint_anomaly_count(const megamoe_checkpoint *checkpoint);
MEGAMOE_API megamoe_status megamoe_checkpoint_anomaly(const megamoe_checkpoint *checkpoint, uint32_t index,
                                                      megamoe_anomaly *anomaly);
/* Reads every scale byte of one layer and appends what it finds to the anomalies. */
MEGAMOE_API megamoe_status megamoe_checkpoint_scan(megamoe_checkpoint *checkpoint, uint32_t layer);

/* Any tensor by its name, borrowed from the mapping until the checkpoint is closed. */
MEGAMOE_API megamoe_status megamoe_checkpoint_tensor(const megamoe_checkpoint *checkpoint, const char *name,
                                                     megamoe_tensor *tensor);
/* The index-th tensor in order of name, or NULL past the end. */
MEGAMOE_API const char *megamoe_checkpoint_tensor_name(const megamoe_checkpoint *checkpoint, uint64_t index);

typedef struct megamoe_named_tensor {
    const char *name;
    megamoe_tensor tensor; /* host memory, contiguous */
} megamoe_named_tensor;
/* Writes one .safetensors file under another name beside it and renames it: readers see all or nothing. */
MEGAMOE_API megamoe_status megamoe_tensors_write(const char *path, const megamoe_named_tensor *tensors, uint32_t count);

/* ---- device ----------------------------------------------------------------------------------------- */

typedef enum megamoe_backend {
    MEGAMOE_BACKEND_AUTO = 0, /* the best GPU path this machine can run, else cpu */
    MEGAMOE_REFERENCE,        /* the definition, in double precision: slow */
    MEGAMOE_CPU,
    MEGAMOE_CUDA, /* the best GPU path, never cpu */
    MEGAMOE_CUDA_PORTABLE,
    MEGAMOE_SM90,
    MEGAMOE_SM100,
    MEGAMOE_SM100_ON_MODEL /* sm100's kernels on a model of the GPU: very slow, for tests, never installed */
} megamoe_backend;

typedef enum megamoe_transport {
    MEGAMOE_SOLO = 0,
    MEGAMOE_LOCAL,
    MEGAMOE_MPI,
    MEGAMOE_NCCL,
    MEGAMOE_POINTERS
} megamoe_transport;

typedef struct megamoe_group { /* expert parallelism; all zero: one rank owns every expert */
    size_t struct_size;
    megamoe_transport transport;
    uint32_t rank, rank_count;
    void *communicator; /* borrowed: MPI_Comm *, ncclComm_t, or peer base pointers */
    double timeout_seconds;
    const uint32_t *placement; /* [slot_count] logical expert of each slot, ranks in order; NULL: linear */
    uint32_t slot_count;
} megamoe_group;

typedef void (*megamoe_log)(void *context, int level, const char *message);

typedef struct megamoe_device_options {
    size_t struct_size;
    megamoe_backend backend;
    uint32_t ordinal;     /* of the GPU */
    uint32_t threads;     /* cpu and reference; 0: MEGAMOE_THREADS, else the cores this process may use */
    uint32_t max_tokens;  /* required: the largest batch that will be run */
    uint32_t sm_budget;   /* multiprocessors to use; 0: all */
    bool batch_invariant; /* one kernel at every size: no token depends on the rest of the batch */
    megamoe_group group;
    megamoe_log log;
    void *log_context;
} megamoe_device_options;

typedef struct megamoe_device megamoe_device;

/* OK if the backend can run here; otherwise UNSUPPORTED_DEVICE and a sentence that says what is missing. */
MEGAMOE_API megamoe_status megamoe_device_probe(megamoe_backend backend, uint32_t ordinal);
MEGAMOE_API megamoe_status megamoe_device_open(const megamoe_device_options *options, megamoe_device **device);
MEGAMOE_API const char *megamoe_device_describe(const megamoe_device *device); /* "cpu (avx512, 2 threads)" */
MEGAMOE_API const char *megamoe_device_backend(const megamoe_device *device);  /* "cpu", "sm90", ... */
MEGAMOE_API const char *megamoe_device_isa(const megamoe_device *device);      /* "avx2", ..., "sm_90a" */
MEGAMOE_API uint32_t megamoe_device_threads(const megamoe_device *device);     /* in use; 0 on a GPU */
MEGAMOE_API void megamoe_device_close(megamoe_device *device);                 /* after its layers */

/* The machine's limits, measured now (a second or so) with the device's own threads or GPU. */
typedef struct megamoe_limits {
    size_t struct_size;
    double read_gb_s;      /* streaming read (cpu) or copy (gpu) of memory much larger than the caches */
    double matrix_tflop_s; /* the backend's own GEMM loop without dequantizing; 0: it has none */
} megamoe_limits;
MEGAMOE_API megamoe_status megamoe_device_measure(megamoe_device *device, megamoe_limits *limits);

/*
 * Host memory the device holds now, in bytes, beyond mapped checkpoints: scratch, and its layers' copies of
 * transposed stacks (docs/formats.md, "Stacks"); and device memory.
 */
MEGAMOE_API void megamoe_device_memory(const megamoe_device *device, uint64_t *host_bytes, uint64_t *device_bytes);

/* ---- layer ------------------------------------------------------------------------------------------ */

typedef struct megamoe_layer_options {
    size_t struct_size;
    megamoe_activations activations;
    megamoe_global input_global, intermediate_global; /* nvfp4 activations only */
    bool routing_weight_before;                       /* weight h instead of the result of L2 */
    bool shared_unclamped;                            /* no swiglu_limit on the shared expert (the first V4 release) */
    uint32_t expert_first, expert_count;              /* to load; count 0: all this rank owns and the file has */
    /* Bytes read from the checkpoint; then, on a GPU, from 0 again, bytes brought there. false cancels. */
    bool (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_context;
} megamoe_layer_options;

typedef struct megamoe_layer megamoe_layer;

/*
 * Loads model layer `layer`. The CPU backends use the weights where they are mapped: the checkpoint must stay
 * open as long as the layer. options may be NULL.
 */
MEGAMOE_API megamoe_status megamoe_layer_load(megamoe_device *device, const megamoe_checkpoint *checkpoint,
                                              uint32_t layer, const megamoe_layer_options *options,
                                              megamoe_layer **out);

/* One projection of all experts of the rank, stacked. Borrowed from its caller, or from a layer. */
typedef struct megamoe_projection {
    megamoe_tensor codes;        /* E2M1X2 (or U8/I8: bytes, two values each) [E, N, K]; BF16 or E4M3: [E, N, K] */
    megamoe_tensor scales;       /* E4M3 [E, N, K/16]; E8M0 [E, N, K/32]; block scales of FP8: E8M0 or F32 */
    megamoe_tensor global;       /* F32 [E] or [1]: W = code * scale * global; absent: 1 (never for NVFP4) */
    megamoe_tensor input_global; /* F32 [E] or [1], optional */
    megamoe_tensor bias;         /* BF16 or F32 [E, N], optional */
} megamoe_projection;

/*
 * Weights the caller already holds, all in one memory. Host memory for the cpu backends, which use it where it is.
 * For a GPU device memory, used where it is until the layer is closed (sm100 makes its own copy of scales, and of
 * codes that are MXFP4 or do not lie at multiples of 16 bytes), or host memory, which is copied.
 */
typedef struct megamoe_layer_desc {
    size_t struct_size;
    megamoe_shape shape;
    megamoe_projection gate, up, down; /* gate and up may be halves of one stacked tensor, by stride */
    megamoe_projection shared_gate, shared_up, shared_down; /* optional; extent without E */
    megamoe_tensor router_weight;                           /* BF16 or F32 [E, H]; optional: the caller may route */
    megamoe_tensor router_bias;                             /* F32 [E], optional */
    megamoe_tensor token_experts;                           /* I32 or I64 [vocabulary, K], hash-routed layers */
} megamoe_layer_desc;
MEGAMOE_API megamoe_status megamoe_layer_create(megamoe_device *device, const megamoe_layer_desc *desc,
                                                const megamoe_layer_options *options, megamoe_layer **out);

typedef struct megamoe_batch {
    size_t struct_size;
    uint32_t token_count;        /* 0 is allowed */
    const void *hidden;          /* [token_count, H], host (cpu) or device (cuda) memory */
    megamoe_dtype hidden_dtype;  /* BF16, or F32 which is rounded to BF16 when read; 0: BF16 */
    void *output;                /* BF16 [token_count, H]; must not overlap hidden */
    const int32_t *token_ids;    /* [token_count], hash-routed layers that route themselves */
    const int32_t *expert_ids;   /* [token_count, K], final; -1 skips the slot; NULL: the router decides */
    const float *expert_weights; /* [token_count, K], final: neither normalized nor scaled */
    bool allow_bad_routing;      /* cpu: skip and count bad ids instead of refusing the batch */
} megamoe_batch;

/* The router alone: writes [token_count, K] ids and weights; hidden and token_ids are read from the batch. */
MEGAMOE_API megamoe_status megamoe_layer_route(megamoe_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                                               float *expert_weights, void *stream);

/* The whole layer. Allocates nothing; on a GPU it enqueues on `stream` and waits for nothing. */
MEGAMOE_API megamoe_status megamoe_layer_run(megamoe_layer *layer, const megamoe_batch *batch, void *stream);

/*
 * Every stage of a run, in host memory, for tests and bisection. T tokens, K slots, per slot in the token's
 * own order; rows of skipped slots are zero. Fields left NULL are not written.
 */
typedef struct megamoe_stages {
    size_t struct_size;
    int32_t *expert_ids;   /* [T, K] */
    float *expert_weights; /* [T, K] */
    uint8_t *x_codes;      /* [T, H/2]   nvfp4 activations only */
    uint8_t *x_scales;     /* [T, H/16]  nvfp4 */
    float *x_globals;      /* [T]        nvfp4 */
    float *l1;             /* [T, K, 2, I] gate, then up: physical values before the clamp */
    uint16_t *h;           /* [T, K, I]  bf16 activations: the BF16 input of L2 */
    uint8_t *h_codes;      /* [T, K, I/2]  nvfp4 */
    uint8_t *h_scales;     /* [T, K, I/16] nvfp4 */
    float *h_globals;      /* [T, K]       nvfp4 */
    float *l2;             /* [T, K, H] results of L2, physical values, before the routing weight */
    float *shared;         /* [T, H] the shared expert */
    uint16_t *output;      /* [T, H] BF16 */
    float *logits;         /* [T, E] of the router; with given logits the choice is exact on every backend */
    /* Reference only: sum over k of |a_k W_nk|, physical, the unit of the bounds in docs/numerics.md. */
    float *l1_magnitude;     /* [T, K, 2, I] */
    float *l2_magnitude;     /* [T, K, H] */
    float *logits_magnitude; /* [T, E] */
} megamoe_stages;

/*
 * Runs the layer and writes its stages. `given` (reference backend only, else NULL): a stage whose input is a
 * non-NULL field of `given` reads that instead of the stage before, so that stages can be judged one by one.
 * Stages that the backend fuses away are left as they are and not set in *written (a bit per field, in order
 * from expert_ids = bit 0). May allocate. Waits for the device.
 */
MEGAMOE_API megamoe_status megamoe_layer_run_stages(megamoe_layer *layer, const megamoe_batch *batch,
                                                    const megamoe_stages *given, const megamoe_stages *stages,
                                                    uint32_t *written);

typedef struct megamoe_layer_facts { /* what was decided when the layer was made */
    size_t struct_size;
    megamoe_shape shape;
    megamoe_activations activations;                  /* never AUTO */
    megamoe_global input_global, intermediate_global; /* never AUTO when activations are nvfp4 */
    uint32_t expert_first, expert_count;              /* loaded */
    bool routes, has_shared_expert;
    bool routing_weight_before;
    uint64_t expert_bytes; /* codes and scales of one routed expert */
} megamoe_layer_facts;
MEGAMOE_API void megamoe_layer_describe(const megamoe_layer *layer, megamoe_layer_facts *facts);

typedef struct megamoe_counters { /* since the layer was made */
    size_t struct_size;
    uint64_t tokens;
    uint64_t unrouted_tokens;  /* NaN logits, a non-finite weight sum, or a token id outside the hash table */
    uint64_t skipped_slots;    /* id -1 from the caller, or an expert that is not loaded on any rank */
    uint64_t bad_slots;        /* ids below -1 or not below E */
    uint64_t saturated_blocks; /* nvfp4 blocks whose scale was clipped at 448 */
    uint64_t nonfinite_blocks; /* nvfp4 blocks with a NaN or an infinity */
    double expert_seconds;     /* in L1, activation and L2 of routed experts; 0: not known */
} megamoe_counters;
/* Waits for the device. tokens_per_expert: [E] or NULL. */
MEGAMOE_API megamoe_status megamoe_layer_counters(megamoe_layer *layer, megamoe_counters *counters,
                                                  uint64_t *tokens_per_expert);
MEGAMOE_API void megamoe_layer_close(megamoe_layer *layer);

typedef struct megamoe_time { /* seconds a batch */
    double median, least, p90;
} megamoe_time;
typedef struct megamoe_times {
    size_t struct_size;
    uint32_t runs;
    megamoe_time experts, layer; /* L1, activation and L2; everything, the router included. After a pause */
    megamoe_time experts_loaded, layer_loaded; /* the same after 300 ms of unbroken work: a card at its power limit */
} megamoe_times;
/*
 * How long batches take on a GPU by its own clock, run in turns. Batches: at most 16, of one size, in host memory, with
 * expert_ids and expert_weights; outputs are not written. UNSUPPORTED_DEVICE: a backend that a host's clock times well.
 */
MEGAMOE_API megamoe_status megamoe_layer_time(megamoe_layer *layer, const megamoe_batch *batches, uint32_t batch_count,
                                              megamoe_times *times);

/* ---- the routed experts in the steps that engines know by name; backend sm100 ------------------------- */

/*
 * What the Blackwell kernels read of a layer's experts, in device memory, borrowed until the layer is closed. Per
 * projection: codes E2M1X2 [G, N, K], the caller's own where they could stay; scales E4M3 [G, ceil(N / 128),
 * ceil(K / 64), 512] in MMA layout: blocks of 128 rows x 4 groups, row r, group g of a block in byte
 * 16 * (r % 32) + 4 * (r / 32) + g, padded with zeros; global F32 [G], the alphas, folded into nothing. gate.codes.data
 * is NULL in a layer without gates.
 */
typedef struct megamoe_mega_moe_weights {
    size_t struct_size;
    megamoe_projection gate, up, down;
} megamoe_mega_moe_weights;

/*
 * megamoe_layer_create for these steps: rearranges the scales, and refuses (UNSUPPORTED_DEVICE) what
 * megamoe_layer_create would run on other kernels. weights may be NULL. The steps also take a layer that
 * megamoe_layer_load or megamoe_layer_create made, if its experts run on these kernels.
 */
MEGAMOE_API megamoe_status megamoe_transform_nvfp4_weights_for_mega_moe(megamoe_device *device,
                                                                        const megamoe_layer_desc *desc,
                                                                        const megamoe_layer_options *options,
                                                                        megamoe_mega_moe_weights *weights,
                                                                        megamoe_layer **layer);

/*
 * stage, l1, l2 of one batch follow each other on one stream, with the same batch: its hidden states (BF16 or F32),
 * expert_ids and expert_weights in device memory. The results of stage and l1 stay in the layer's scratch. Nothing
 * is allocated, read back or waited for, so a CUDA graph can hold any of the calls; whatever its kernels find wrong
 * is said by megamoe_layer_counters. No call routes, and none computes a shared expert: megamoe_layer_run does.
 */
/* Plans the batch and quantizes each token once, into a row for each of its slots. */
MEGAMOE_API megamoe_status megamoe_stage_activation(megamoe_layer *layer, const megamoe_batch *batch, void *stream);
/* Gate and up, clamp, SwiGLU, and NVFP4 again. */
MEGAMOE_API megamoe_status megamoe_nvfp4_mega_moe_l1(megamoe_layer *layer, const megamoe_batch *batch, void *stream);
/*
 * Down. partials: BF16 or F32 [token_count * K, H], a row per (token, slot), before the routing weight; rows of slots
 * without a loaded expert are left as they are.
 */
MEGAMOE_API megamoe_status megamoe_nvfp4_mega_moe_l2(megamoe_layer *layer, const megamoe_batch *batch,
                                                     const megamoe_tensor *partials, void *stream);
/* All three, and the sum over each token's slots to batch->output. */
MEGAMOE_API megamoe_status megamoe_nvfp4_mega_moe_full(megamoe_layer *layer, const megamoe_batch *batch, void *stream);

/* ---- single stages, for engines that want a part; same definitions as the layer --------------------- */

/*
 * Tensors are in the memory of the device. A GPU also takes plain host memory here and in megamoe_layer_route and
 * megamoe_layer_run: it is copied, and the call waits, which no captured graph may.
 */

/*
 * values: BF16 or F32 [R, K]. codes: E2M1X2 [R, K]; scales: E4M3 [R, K/16]; globals: F32 [R], written.
 * global: one host value for all rows, or NULL: per token (amax / 2688).
 */
MEGAMOE_API megamoe_status megamoe_quantize(megamoe_device *device, const megamoe_tensor *values, const float *global,
                                            megamoe_tensor *codes, megamoe_tensor *scales, megamoe_tensor *globals,
                                            void *stream);
/*
 * The inverse: values F32 or BF16 [R, K]; scales E4M3 [R, K/16] or E8M0 [R, K/32]; globals F32 [R], [1] or
 * NULL.
 */
MEGAMOE_API megamoe_status megamoe_dequantize(megamoe_device *device, const megamoe_tensor *codes,
                                              const megamoe_tensor *scales, const megamoe_tensor *globals,
                                              megamoe_tensor *values, void *stream);
/*
 * Rows sorted by group times each group's matrix: output[r][n] = sum_k rows[r][k] W_g[n][k], fp32 sums.
 * rows: BF16 [R, K], or E2M1X2 with row_scales E4M3 [R, K/16] (the caller applies the rows' global scales).
 * offsets: int32 [group_count], cumulative ends, as torch's scaled grouped matmul has them; empty groups are
 * allowed. output: F32 or BF16 [R, N]. The weights' global scales are applied.
 */
MEGAMOE_API megamoe_status megamoe_grouped_gemm(megamoe_device *device, const megamoe_tensor *rows,
                                                const megamoe_tensor *row_scales, const megamoe_projection *weights,
                                                const int32_t *offsets, uint32_t group_count, megamoe_tensor *output,
                                                void *stream);

#ifdef __cplusplus
}
#endif
#endif
