/*
 * A batch on the GPU: route, plan, stage, L1, (quantize), L2, shared expert, combine. Everything is enqueued on the
 * caller's stream; nothing waits, allocates or looks at the data, so a run can be captured into a graph and replayed
 * with other data and other routing.
 *
 * Launches after the first are programmatic: each kernel begins early and waits (griddepcontrol.wait) before it touches
 * what another one wrote. The decode kernels read the plan before that wait, to fetch weights, and combine reads it
 * too: that is safe because what is launched before them lets them begin only when the plan is in memory. Staging and
 * tile kernels began when it was complete; start.cu, in small batches, says so itself once it has written the plan, and
 * decode kernels let the next one begin only after their own wait.
 */
#include "backend/cuda/visit.h"

#include <string.h>

#include "error.h"

enum {
    START_PAIRS = 512, /* start.cu: a block sorts so many pairs of so many experts, in passing */
    START_EXPERTS = 256,
    START_OTHER_BLOCKS = 2,
    START_THREADS = 256,
    PLAN_SMALL_PAIRS = 4096, /* one block sorts so many pairs faster than three launches do */
    PLAN_BLOCKS = 64,
    PLAN_THREADS = 1024,
    PLAN_COUNTER_BYTES = 131072, /* shared memory for counters, hence the warps that count; sm_120 has less */
    PLAN_STATIC_BYTES = 1024,    /* what the kernels declare, and the system reserves */
    DECODE_ONLY_TOKENS = 64,
    MID_ONLY_TOKENS = 1024,
    DECODE_THREADS = 640,
    DECODE_WEIGHT_LIGHT = 10, /* cost of a light item to a heavy one of two passes and of one; measured at 512 tokens */
    DECODE_WEIGHT_HEAVY = 13,
    DECODE_WEIGHT_HEAVY_ONE_PASS = 11,
    NATIVE_THREADS = 384,
    MID_SHARED = 3 * (64 * 512 + 256 * 128) + 1024,
    WIDE_SHARED = 4 * (160 * 256 + 256 * 64) + 1024,
    TILE_SHARED = 2 * (128 + 64) * 256,
    STAGE_THREADS_MAX = 448,
    COMBINE_THREADS = 64,
    COMBINE_COLUMNS = COMBINE_THREADS * 8,
    COMBINE_BLOCKS_PER_SM = 16, /* so many fit at once */
    ROUTE_TOKENS = 32,
    ROUTE_THREADS = 256,
    CHOOSE_WARPS = 4,
};

/* One run's decisions. */
typedef struct run {
    mm_backend_layer *layer;
    const mm_backend_state *state;
    const mm_layer_weights *weights;
    mm_scratch s;
    CUstream stream;
    uint32_t token_count, pair_count, rows_max; /* rows_max: the most sorted rows there can be */
    bool nvfp4, started;                        /* started: a launch of this run came before */
    bool stages;                                /* h is wanted as fp32, for stages.c */
} run;

static megamoe_status launch(run *r, mm_kernel kernel, mm_launch how, void **arguments) {
    how.after_start = r->started;
    r->started = true;
    return mm_cuda_launch(r->state, r->stream, kernel, &how, arguments);
}

static uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static void run_begin(run *r, mm_backend_layer *layer, uint32_t token_count, CUstream stream) {
    memset(r, 0, sizeof *r);
    r->layer = layer, r->state = layer->state, r->weights = layer->weights, r->stream = stream;
    r->token_count = token_count;
    r->pair_count = r->rows_max = token_count * layer->weights->shape.experts_per_token;
    r->nvfp4 = layer->weights->expert_count > 0 && mm_cuda_quantizes(layer->weights, layer->weights->experts);
    mm_cuda_scratch(layer, &r->s);
}

/* ---- router --------------------------------------------------------------------------------------------- */

/* Few tokens: K is split over blocks too, so that every multiprocessor reads a part of the gate's weights. */
static uint32_t route_splits(const run *r) {
    return r->state->batch_invariant || r->token_count > 64 ? 1 : 5;
}

static megamoe_status run_router(run *r, const megamoe_batch *batch, int32_t *ids, float *weights) {
    const megamoe_shape *shape = &r->weights->shape;
    const mm_router *router = &r->weights->router;
    mm_cuda_route_args args = {.hidden = batch->hidden,
                               .hidden_f32 = batch->hidden_dtype == MEGAMOE_F32,
                               .token_count = r->token_count,
                               .columns = shape->hidden,
                               .expert_total = shape->expert_count,
                               .weight = r->layer->router_weight,
                               .weight_f32 = router->weight_dtype == MEGAMOE_F32,
                               .bias = r->layer->router_bias,
                               .token_ids = batch->token_ids,
                               .token_experts = shape->hash_routed ? r->layer->token_experts : NULL,
                               .vocabulary = router->vocabulary,
                               .slots_per_token = shape->experts_per_token,
                               .score = shape->score,
                               .group_count = shape->group_count > 1 ? shape->group_count : 1,
                               .groups_per_token = shape->groups_per_token,
                               .normalize = shape->normalize_weights,
                               .scale = shape->routed_scale,
                               .split_count = route_splits(r),
                               .logits = r->s.logits,
                               .expert_ids = ids,
                               .weights = weights,
                               .counters = r->layer->counters};
    void *arguments[] = {&args};
    mm_launch logits = {
        .grid = {(shape->expert_count + 15) / 16, (r->token_count + ROUTE_TOKENS - 1) / ROUTE_TOKENS, args.split_count},
        .threads = ROUTE_THREADS};
    mm_launch choose = {.grid = {(r->token_count + CHOOSE_WARPS - 1) / CHOOSE_WARPS},
                        .threads = CHOOSE_WARPS * 32,
                        .shared_bytes = CHOOSE_WARPS * 8 * (shape->expert_count + args.group_count)};
    if (!router->weight)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "the layer has no router: the batch needs expert_ids and expert_weights");
    if (shape->hash_routed && !batch->token_ids)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "a hash-routed layer needs token_ids");
    MM_TRY(launch(r, MM_ROUTE_LOGITS, logits, arguments));
    return launch(r, MM_ROUTE_CHOOSE, choose, arguments);
}

/* ---- plan and staging ----------------------------------------------------------------------------------- */

/*
 * Which list takes how many rows. What decides is an expert's row count, and the batch's token count where a list is
 * not worth its launches: up to 64 tokens everything is decode's (an expert of more than 16 rows is cut into entries),
 * up to 1024 nothing is WIDE's.
 */
static bool uses_decode(const run *r) {
    return r->layer->decode[0].kernel != MM_KERNEL_COUNT;
}
static bool uses_native(const run *r) {
    return r->layer->mid[0] != MM_KERNEL_COUNT;
}
static bool uses_tiles(const run *r) {
    return !uses_decode(r) || r->token_count > DECODE_ONLY_TOKENS;
}
static bool uses_wide(const run *r) {
    return uses_native(r) && r->token_count > MID_ONLY_TOKENS;
}

static void plan_limits(const run *r, mm_cuda_plan_args *args) {
    args->decode_rows = !uses_decode(r) ? 0 : uses_tiles(r) ? MM_CUDA_DECODE_ROWS : UINT32_MAX;
    args->mid_rows = uses_wide(r) ? MM_CUDA_MID_ROWS : UINT32_MAX;
    args->entry_rows[MM_CUDA_LIST_DECODE] = MM_CUDA_DECODE_ROWS;
    args->entry_rows[MM_CUDA_LIST_MID] = MM_CUDA_MID_ROWS;
    args->entry_rows[MM_CUDA_LIST_WIDE] = MM_CUDA_WIDE_ROWS;
}

/* Warps of a block that count: one per 64 pairs, as far as shared memory has counters for them beside what else the
 * block keeps there. */
static uint32_t plan_warps(const run *r, uint32_t blocks, uint32_t experts, uint32_t other_bytes) {
    const uint32_t wanted = r->pair_count / 64 / blocks + 1;
    const uint32_t all = (uint32_t)r->state->gpu.shared_bytes - PLAN_STATIC_BYTES;
    const uint32_t left = all > other_bytes ? all - other_bytes : 0;
    const uint32_t room = smaller(PLAN_COUNTER_BYTES, left) / 4 / experts;
    if (room == 0) return 1; /* more than there is: the launch is refused */
    return smaller(smaller(wanted, PLAN_THREADS / 32), room);
}

static mm_cuda_plan_args plan_args(const run *r, const int32_t *ids) {
    const megamoe_shape *shape = &r->weights->shape;
    mm_cuda_plan_args args = {.expert_ids = ids,
                              .local_index = r->layer->local_index,
                              .token_count = r->token_count,
                              .slots_per_token = shape->experts_per_token,
                              .expert_total = shape->expert_count,
                              .expert_count = r->weights->expert_count,
                              .block_counts = r->s.block_counts,
                              .offsets = r->s.offsets,
                              .row_pair = r->s.row_pair,
                              .pair_row = r->s.pair_row,
                              .plan = r->s.plan,
                              .counters = r->layer->counters,
                              .expert_tokens = r->layer->expert_tokens};
    memcpy(args.entries, r->s.entries, sizeof args.entries);
    plan_limits(r, &args);
    return args;
}

static megamoe_status run_plan(run *r, const int32_t *ids) {
    const uint32_t experts = r->weights->expert_count, e = experts > 0 ? experts : 1;
    const bool small = r->pair_count <= PLAN_SMALL_PAIRS;
    const uint32_t other_bytes = 4 * (experts + r->weights->shape.expert_count) + (small ? 2 * r->pair_count : 0);
    mm_cuda_plan_args args = plan_args(r, ids);
    args.block_count = small ? 1 : PLAN_BLOCKS;
    args.warp_count = plan_warps(r, args.block_count, e, other_bytes);
    void *arguments[] = {&args};
    mm_launch how = {.grid = {args.block_count}, .threads = PLAN_THREADS};
    how.shared_bytes = 4 * args.warp_count * experts + other_bytes;
    if (small) {
        how.grid[0] = 2; /* the second only counts */
        return launch(r, MM_PLAN_WHOLE, how, arguments);
    }
    MM_TRY(launch(r, MM_PLAN_COUNT, how, arguments));
    mm_launch scan = {.grid = {1}, .threads = PLAN_THREADS, .shared_bytes = 4 * e};
    MM_TRY(launch(r, MM_PLAN_SCAN, scan, arguments));
    return launch(r, MM_PLAN_PLACE, how, arguments);
}

megamoe_status mm_cuda_stage_launch(const mm_backend_state *state, const mm_cuda_stage_args *args, uint32_t rows_max,
                                    bool after_start, CUstream stream) {
    void *arguments[] = {(void *)(uintptr_t)args};
    /* A row in one go, if it is not too long: 16 values per thread. */
    const uint32_t threads = smaller(mm_round_up(args->pitch / 16, 32), STAGE_THREADS_MAX);
    mm_launch how = {.grid = {smaller(rows_max, state->sm_count * 8)}, .threads = threads, .after_start = after_start};
    const bool plain = !args->quantize && !args->source_f32 && args->staged && !args->globals;
    return mm_cuda_launch(state, stream, plain ? MM_STAGE_BF16 : MM_STAGE, &how, arguments);
}

static megamoe_status stage(run *r, const mm_cuda_stage_args *args) {
    bool after = r->started;
    r->started = true;
    return mm_cuda_stage_launch(r->state, args, r->rows_max, after, r->stream);
}

static mm_cuda_stage_args hidden_args(const run *r, const megamoe_batch *batch) {
    const megamoe_shape *shape = &r->weights->shape;
    return (mm_cuda_stage_args){.source = batch->hidden,
                                .source_f32 = batch->hidden_dtype == MEGAMOE_F32,
                                .round_bf16 = 1,
                                .slots_per_token = shape->experts_per_token,
                                .columns = shape->hidden,
                                .pitch = r->layer->h_pitch,
                                .quantize = r->nvfp4,
                                .global_mode = r->weights->input_mode,
                                .global = r->nvfp4 ? r->weights->input_global : 1.0f};
}

/* Only a token's own global scale differs from row to row. */
static bool row_globals(const run *r) {
    return r->nvfp4 && r->weights->input_mode == MEGAMOE_GLOBAL_TOKEN;
}

static mm_cuda_stage_args rows_args(const run *r, const megamoe_batch *batch) {
    mm_cuda_stage_args args = hidden_args(r, batch);
    args.plan = r->s.plan, args.row_pair = r->s.row_pair, args.pair_row = r->s.pair_row;
    args.staged = r->s.x;
    if (row_globals(r)) args.globals = r->s.row_global;
    if (r->nvfp4) args.counters = r->layer->counters;
    return args;
}

/* Plan and sorted, staged rows: in one launch where the batch is small, which is where launches count. */
static megamoe_status run_rows(run *r, const megamoe_batch *batch, const int32_t *ids) {
    const uint32_t experts = r->weights->expert_count, words = (r->pair_count + 31) / 32;
    const uint32_t round = START_THREADS / 8 * MM_CUDA_GROUP, parts = (r->layer->h_pitch + round - 1) / round;
    mm_cuda_plan_args plan = plan_args(r, ids);
    mm_cuda_stage_args rows = rows_args(r, batch);
    void *arguments[] = {&plan, &rows};
    mm_launch how = {.grid = {START_OTHER_BLOCKS + r->token_count * parts}, .threads = START_THREADS};
    how.shared_bytes =
        4 * (experts * words > r->weights->shape.expert_count ? experts * words : r->weights->shape.expert_count);
    if (r->token_count <= DECODE_ONLY_TOKENS && r->pair_count <= START_PAIRS && experts <= START_EXPERTS && experts)
        return launch(r, MM_START, how, arguments);
    MM_TRY(run_plan(r, ids));
    return experts ? stage(r, &rows) : MEGAMOE_OK;
}

/* ---- expert GEMMs --------------------------------------------------------------------------------------- */

megamoe_status mm_tokens_map(const mm_driver *driver, const uint16_t *rows, uint64_t row_count, uint32_t pitch,
                             uint32_t box, CUtensorMap *map) {
    cuuint64_t extent[2] = {pitch, row_count}, pitches[1] = {pitch * 2ull};
    cuuint32_t sizes[2] = {64, box}, step[2] = {1, 1};
    return mm_driver_status(driver,
                            driver->tensor_map_encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)(uintptr_t)rows,
                                                      extent, pitches, sizes, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                            "describing staged rows");
}

static megamoe_status run_decode(run *r, int l2, mm_cuda_gemm_args args) {
    const mm_decode_form *form = &r->layer->decode[l2];
    void *arguments[] = {&args};
    if (!uses_decode(r)) return MEGAMOE_OK;
    mm_launch how = {.grid = {r->state->sm_count}, .threads = DECODE_THREADS, .shared_bytes = form->shared_bytes};
    args.maps = r->layer->decode_maps, args.list = MM_CUDA_LIST_DECODE,
    args.entries = r->s.entries[MM_CUDA_LIST_DECODE];
    args.scratch = r->s.partials;
    args.slot_count = form->slot_count, args.slot_bytes = form->slot_bytes;
    args.code_pitch = form->code_pitch, args.scale_pitch = form->scale_pitch;
    args.weight_light = DECODE_WEIGHT_LIGHT;
    args.weight_heavy = form->passes == 2 ? DECODE_WEIGHT_HEAVY : DECODE_WEIGHT_HEAVY_ONE_PASS;
    args.next_items = l2 || !r->layer->down_contiguous ? 0 : r->layer->decode[1].slot_count,
    args.next_weight_heavy = DECODE_WEIGHT_HEAVY_ONE_PASS;
    return launch(r, form->kernel, how, arguments);
}

static megamoe_status run_native(run *r, int l2, int list, mm_cuda_gemm_args args) {
    const bool wide = list == MM_CUDA_LIST_WIDE;
    CUtensorMap rows64, rows8;
    void *arguments[] = {&rows64, &rows8, &args};
    mm_launch how = {
        .grid = {r->state->sm_count}, .threads = NATIVE_THREADS, .shared_bytes = wide ? WIDE_SHARED : MID_SHARED};
    args.maps = wide ? r->layer->wide_maps : r->layer->mid_maps, args.list = (uint32_t)list,
    args.entries = r->s.entries[list];
    MM_TRY(mm_tokens_map(r->state->driver, args.x, r->pair_count, args.x_pitch, 64, &rows64));
    MM_TRY(mm_tokens_map(r->state->driver, args.x, r->pair_count, args.x_pitch, 8, &rows8));
    return launch(r, wide ? r->layer->wide[l2] : r->layer->mid[l2], how, arguments);
}

static megamoe_status run_tile(run *r, mm_kernel kernel, mm_cuda_gemm_args args) {
    void *arguments[] = {&args};
    mm_launch how = {.grid = {r->state->sm_count * 2}, .threads = 256, .shared_bytes = TILE_SHARED};
    return launch(r, kernel, how, arguments);
}

/* L1 or L2 over every list of the tile kernels that can have entries. */
static megamoe_status run_tiles(run *r, int l2, const mm_cuda_gemm_args *args) {
    if (uses_wide(r)) MM_TRY(run_native(r, l2, MM_CUDA_LIST_WIDE, *args));
    if (uses_tiles(r)) {
        mm_cuda_gemm_args tile = *args;
        tile.list = MM_CUDA_LIST_MID, tile.entries = r->s.entries[MM_CUDA_LIST_MID];
        if (uses_native(r))
            MM_TRY(run_native(r, l2, MM_CUDA_LIST_MID, *args));
        else
            MM_TRY(run_tile(r, r->layer->tile[l2], tile));
    }
    return MEGAMOE_OK;
}

static megamoe_status run_experts(run *r, const float *weights) {
    const mm_layer_weights *w = r->weights;
    const megamoe_shape *shape = &w->shape;
    mm_cuda_gemm_args l1 = {.experts = r->layer->experts,
                            .plan = r->s.plan,
                            .k = shape->hidden,
                            .n = shape->intermediate,
                            .x = r->s.x,
                            .x_pitch = r->layer->h_pitch,
                            .x_global = r->nvfp4 ? w->input_global : 1.0f,
                            .row_global = row_globals(r) ? r->s.row_global : NULL,
                            .weights = w->routing_weight_before ? weights : NULL,
                            .row_pair = r->s.row_pair,
                            .gated = !shape->not_gated,
                            .biased = w->experts[0].up.bias != NULL,
                            .quantized = r->nvfp4,
                            .h32 = r->stages ? r->s.h32 : NULL,
                            .counters = r->layer->counters,
                            .y = r->s.h,
                            .y_pitch = r->layer->i_pitch,
                            .swiglu = w->swiglu,
                            .scale_row_bytes = r->layer->scale_row_bytes[0]};
    mm_cuda_gemm_args l2 = {.experts = r->layer->experts,
                            .plan = r->s.plan,
                            .k = shape->intermediate,
                            .n = shape->hidden,
                            .x = r->s.h,
                            .x_pitch = r->layer->i_pitch,
                            .y = r->s.p,
                            .y_pitch = shape->hidden,
                            .biased = w->experts[0].down.bias != NULL,
                            .scale_row_bytes = r->layer->scale_row_bytes[1]};
    mm_cuda_gemm_args l1_tiles = l1; /* they leave the quantization to a launch of its own */
    if (r->nvfp4) l1_tiles.y = r->s.h32, l1_tiles.y_pitch = shape->intermediate;
    MM_TRY(run_tiles(r, 0, &l1_tiles));
    if (r->nvfp4 && uses_tiles(r)) {
        mm_cuda_stage_args args = {.source = r->s.h32,
                                   .source_f32 = 1,
                                   .plan = r->s.plan,
                                   .slots_per_token = 1,
                                   .columns = shape->intermediate,
                                   .pitch = r->layer->i_pitch,
                                   .quantize = 1,
                                   .global_mode = w->intermediate_mode,
                                   .global = 1.0f,
                                   .experts = r->layer->experts,
                                   .offsets = r->s.offsets,
                                   .expert_count = w->expert_count,
                                   .skip_rows = uses_decode(r) ? MM_CUDA_DECODE_ROWS : 0,
                                   .staged = r->s.h,
                                   .counters = r->layer->counters};
        MM_TRY(stage(r, &args));
    }
    MM_TRY(run_decode(r, 0, l1));
    MM_TRY(run_tiles(r, 1, &l2));
    return run_decode(r, 1, l2);
}

/* ---- shared expert and combine -------------------------------------------------------------------------- */

/* Every token, in order, through the portable tile kernels. BF16 and FP8 weights always take bf16 activations. */
static megamoe_status run_shared(run *r, const megamoe_batch *batch) {
    const mm_layer_weights *w = r->weights;
    const uint32_t i = w->shared->up.rows;
    const bool quantize = mm_cuda_quantizes(w, w->shared);
    mm_cuda_stage_args x = hidden_args(r, batch);
    x.row_count = r->token_count, x.quantize = quantize, x.staged = r->s.token_x;
    x.globals = r->s.row_global; /* the routed experts are done with theirs */
    x.global = quantize ? w->input_global : 1.0f;
    MM_TRY(stage(r, &x));
    mm_cuda_gemm_args l1 = {.experts = r->layer->shared,
                            .row_count = r->token_count,
                            .k = w->shape.hidden,
                            .n = i,
                            .x = r->s.token_x,
                            .x_pitch = r->layer->h_pitch,
                            .x_global = 1.0f,
                            .row_global = quantize ? r->s.row_global : NULL,
                            .gated = w->shared->gate.codes != NULL,
                            .biased = w->shared->up.bias != NULL,
                            .quantized = quantize,
                            .y = quantize ? (void *)r->s.shared_h32 : (void *)r->s.shared_h,
                            .y_pitch = quantize ? i : r->layer->shared_pitch,
                            .swiglu = w->shared_swiglu};
    MM_TRY(run_tile(r, r->layer->shared_tile[0], l1));
    if (quantize) {
        mm_cuda_stage_args h = {.source = r->s.shared_h32,
                                .source_f32 = 1,
                                .row_count = r->token_count,
                                .slots_per_token = 1,
                                .columns = i,
                                .pitch = r->layer->shared_pitch,
                                .quantize = 1,
                                .global_mode = w->intermediate_mode,
                                .experts = r->layer->shared,
                                .expert_count = 1,
                                .global = 1.0f,
                                .staged = r->s.shared_h,
                                .counters = r->layer->counters};
        MM_TRY(stage(r, &h));
    }
    mm_cuda_gemm_args l2 = {.experts = r->layer->shared,
                            .row_count = r->token_count,
                            .k = i,
                            .n = w->shape.hidden,
                            .x = r->s.shared_h,
                            .x_pitch = r->layer->shared_pitch,
                            .y = r->s.shared_out,
                            .y_pitch = w->shape.hidden,
                            .plain_f32 = 1,
                            .biased = w->shared->down.bias != NULL};
    return run_tile(r, r->layer->shared_tile[1], l2);
}

static megamoe_status run_combine(run *r, const megamoe_batch *batch, const float *weights) {
    const uint32_t columns = r->weights->shape.hidden;
    const uint32_t blocks = (columns + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS;
    const uint32_t resident = r->state->sm_count * COMBINE_BLOCKS_PER_SM;
    mm_cuda_combine_args args = {
        .p = r->s.p,
        .pair_row = r->s.pair_row,
        .weights = r->weights->routing_weight_before ? NULL : weights,
        .shared = r->weights->shared ? r->s.shared_out : NULL,
        .token_count = r->token_count,
        .slots_per_token = r->weights->shape.experts_per_token,
        .columns = columns,
        .early = uses_decode(r), /* whose kernels let the next begin only when the plan is complete */
        .output = batch->output};
    void *arguments[] = {&args};
    mm_launch how = {.grid = {blocks, smaller(r->token_count, resident / blocks + 1)}, .threads = COMBINE_THREADS};
    return launch(r, MM_COMBINE, how, arguments);
}

/* ---- entry points --------------------------------------------------------------------------------------- */

static megamoe_status run_batch(run *r, const megamoe_batch *batch) {
    const int32_t *ids = batch->expert_ids;
    const float *weights = batch->expert_weights;
    if (!ids) {
        MM_TRY(run_router(r, batch, r->s.expert_ids, r->s.weights));
        ids = r->s.expert_ids, weights = r->s.weights;
    }
    MM_TRY(run_rows(r, batch, ids));
    if (r->weights->expert_count > 0) MM_TRY(run_experts(r, weights));
    if (r->weights->shared) MM_TRY(run_shared(r, batch));
    return run_combine(r, batch, weights);
}

megamoe_status mm_cuda_run_batch(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream) {
    run r;
    if (batch->token_count == 0) return MEGAMOE_OK;
    run_begin(&r, layer, batch->token_count, stream);
    return run_batch(&r, batch);
}

megamoe_status mm_cuda_run_stages(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream) {
    run r;
    if (batch->token_count == 0) return MEGAMOE_OK;
    run_begin(&r, layer, batch->token_count, stream);
    r.stages = true;
    return run_batch(&r, batch);
}

megamoe_status mm_cuda_run_experts(mm_backend_layer *layer, uint32_t token_count, const float *weights, CUstream stream,
                                   bool first_launch) {
    run r;
    run_begin(&r, layer, token_count, stream);
    r.started = !first_launch;
    return run_experts(&r, weights);
}

static megamoe_status route_entered(mm_visit *visit, run *r, const megamoe_batch *batch, int32_t *expert_ids,
                                    float *expert_weights) {
    const uint64_t tokens = batch->token_count, slots = tokens * r->weights->shape.experts_per_token;
    const uint64_t hidden_bytes = tokens * r->weights->shape.hidden * (batch->hidden_dtype == MEGAMOE_F32 ? 4 : 2);
    megamoe_batch reached = *batch;
    const void *token_ids = NULL;
    void *ids = NULL, *weights = NULL;
    MM_TRY(mm_visit_read(visit, batch->hidden, hidden_bytes, &reached.hidden));
    MM_TRY(mm_visit_read(visit, batch->token_ids, tokens * sizeof(int32_t), &token_ids));
    MM_TRY(mm_visit_write(visit, expert_ids, slots * sizeof(int32_t), &ids));
    MM_TRY(mm_visit_write(visit, expert_weights, slots * sizeof(float), &weights));
    reached.token_ids = token_ids;
    return run_router(r, &reached, ids, weights);
}

megamoe_status mm_cuda_route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                             float *expert_weights, void *stream) {
    run r;
    if (batch->token_count == 0) return MEGAMOE_OK;
    run_begin(&r, layer, batch->token_count, stream);
    MM_TRY(mm_cuda_enter(layer->state));
    mm_visit visit = {.state = layer->state, .stream = stream};
    megamoe_status status = mm_visit_end(&visit, route_entered(&visit, &r, batch, expert_ids, expert_weights));
    mm_cuda_leave(layer->state);
    return status;
}
