/*
 * A batch on the GPU: route, plan, stage, L1, (quantize), L2, combine; the shared expert beside them or behind L2
 * (shared.c). Everything is enqueued on the caller's stream, or on a branch of it; nothing waits, allocates or looks at
 * the data, so a run can be captured into a graph and replayed with other data and other routing.
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
    DECODE_ONLY_ROWS = 8, /* or so many rows per expert of the model, were they spread evenly */
    MID_ONLY_TOKENS = 1024,
    DECODE_THREADS = 640,
    DECODE_WEIGHT_LIGHT = 10, /* cost of a light item to a heavy one of a cluster, and of one CTA; best at 512 tokens */
    DECODE_WEIGHT_HEAVY = 12,
    DECODE_WEIGHT_HEAVY_CLUSTER = 11,
    MID_THREADS = 640,
    WIDE_THREADS = 384,
    MID_SHARED = 3 * (MM_CUDA_MID_ROWS * 512 + 256 * (128 + 16)) + 1024,
    WIDE_SHARED = 4 * (MM_CUDA_WIDE_ROWS * 256 + 256 * (64 + 8)) + 1024,
    TILE_SHARED = 2 * (128 + 64) * 256,
    STAGE_THREADS_MAX = 448,
    COMBINE_THREADS = 64,
    COMBINE_COLUMNS = COMBINE_THREADS * 8,
    COMBINE_BLOCKS_PER_SM = 16, /* so many fit at once */
    ROUTE_FEW_TOKENS = 8,       /* one MMA tile of tokens, and 16 experts per block; then 32 and 32 */
    ROUTE_DIRECT_TOKENS = 128,  /* beyond it tiles, if they can */
    ROUTE_THREADS = 256,
    ROUTE_TILE_THREADS = 288,
    ROUTE_WIDE_THREADS = 384,
    ROUTE_TILE_TOKENS = 128, /* of tiles on mma.sync and on wgmma */
    ROUTE_TILE_K = 64,
    ROUTE_TILE_SHARED = 3 * 2 * 128 * 128 + 1024,
    ROUTE_TILES = 128, /* as many tiles as K is cut into parts for, whatever the GPU: a part is a rounding */
    CHOOSE_WARPS = 8,
    CHOOSE_SHARED = 65536,
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

static uint32_t tiles_of(uint32_t size, uint32_t tile) {
    return (size + tile - 1) / tile;
}

static bool aligned16(const void *p) {
    return (uintptr_t)p % 16 == 0;
}

/* Few tokens or fp32: operands go straight to registers. Few tokens: a block for each slice of K. */
static megamoe_status route_direct(run *r, mm_cuda_route_args *args) {
    const bool few = r->token_count <= ROUTE_FEW_TOKENS;
    const uint32_t size = few ? 1 : 2, tokens = few ? 8 : 32;
    mm_launch how = {.grid = {tiles_of(args->expert_total, 16 * size), tiles_of(r->token_count, tokens)},
                     .threads = ROUTE_THREADS,
                     .shared_bytes = ROUTE_THREADS / 32 * size * tokens / 8 * 512};
    void *arguments[] = {args};
    if (how.grid[0] * how.grid[1] < ROUTE_TILES && r->token_count * args->split_count <= MM_CUDA_ROUTE_ROWS)
        args->part_count = args->split_count;
    how.grid[2] = args->part_count;
    if (args->weight_f32 || args->hidden_f32)
        return launch(r, few ? MM_ROUTE_LOGITS_F32_FEW : MM_ROUTE_LOGITS_F32, how, arguments);
    return launch(r, few ? MM_ROUTE_LOGITS_FEW : MM_ROUTE_LOGITS, how, arguments);
}

/* The width of wgmma tiles that wastes least on E experts, and the kernel that has it. */
static uint32_t route_width(uint32_t experts, mm_kernel *kernel) {
    static const uint32_t widths[] = {256, 192, 128};
    uint32_t best = 0;
    for (uint32_t i = 1; i < 3; i++)
        if (tiles_of(experts, widths[i]) * widths[i] < tiles_of(experts, widths[best]) * widths[best]) best = i;
    *kernel = best == 0 ? MM_ROUTE_WIDE_256 : best == 1 ? MM_ROUTE_WIDE_192 : MM_ROUTE_WIDE_128;
    return widths[best];
}

/* Many tokens, BF16: tiles, and parts of K where there would be too few of them. */
static megamoe_status route_tiles(run *r, mm_cuda_route_args *args) {
    const mm_driver *driver = r->state->driver;
    mm_kernel kernel = MM_ROUTE_TILE;
    const uint32_t width = r->state->native ? route_width(args->expert_total, &kernel) : ROUTE_TILE_TOKENS;
    const uint32_t experts = tiles_of(args->expert_total, width), tokens = tiles_of(r->token_count, ROUTE_TILE_TOKENS),
                   steps = tiles_of(args->columns, ROUTE_TILE_K);
    const uint32_t parts = smaller(smaller(ROUTE_TILES / (experts * tokens), steps / 4), MM_CUDA_ROUTE_PARTS);
    CUtensorMap weights, hidden;
    void *arguments[] = {&weights, &hidden, args};
    mm_launch how = {.grid = {experts, tokens, 1}, .threads = ROUTE_TILE_THREADS, .shared_bytes = ROUTE_TILE_SHARED};
    if (parts > 1) args->part_count = parts;
    how.grid[2] = args->part_count;
    if (r->state->native) {
        how = (mm_launch){.grid = {smaller(experts * tokens * args->part_count, r->state->sm_count)},
                          .threads = ROUTE_WIDE_THREADS,
                          .shared_bytes = 4 * (ROUTE_TILE_TOKENS + width) * ROUTE_TILE_K * 2 + 1024};
    }
    MM_TRY(mm_cuda_operand_map(driver, args->weight, args->expert_total, args->columns, width, &weights));
    MM_TRY(mm_cuda_operand_map(driver, args->hidden, r->token_count, args->columns, ROUTE_TILE_TOKENS, &hidden));
    return launch(r, kernel, how, arguments);
}

/* Warps of a token: as many as there is room for; a block where the tokens of one would not fit its memory. */
static uint32_t choose_warps(uint32_t token_count, uint32_t token_bytes) {
    if (CHOOSE_WARPS * token_bytes > CHOOSE_SHARED) return CHOOSE_WARPS;
    return token_count <= 512 ? 8 : token_count <= 1024 ? 4 : token_count <= 4096 ? 2 : 1;
}

static megamoe_status route_choice(run *r, mm_cuda_route_args *args) {
    const uint32_t token_bytes = 4 * (32 + 2 * args->expert_total + args->group_count);
    void *arguments[] = {args};
    args->token_warps = choose_warps(r->token_count, token_bytes);
    const uint32_t tokens = CHOOSE_WARPS / args->token_warps;
    mm_launch how = {
        .grid = {tiles_of(r->token_count, tokens)}, .threads = CHOOSE_WARPS * 32, .shared_bytes = tokens * token_bytes};
    return launch(r, MM_ROUTE_CHOOSE, how, arguments);
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
                               .split_count = smaller(tiles_of(shape->hidden, 1024), 8),
                               .part_count = 1,
                               .logits = r->s.logits,
                               .expert_ids = ids,
                               .weights = weights,
                               .counters = r->layer->counters};
    if (!router->weight)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "the layer has no router: the batch needs expert_ids and expert_weights");
    if (shape->hash_routed && !batch->token_ids)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "a hash-routed layer needs token_ids");
    const bool tiles = r->token_count > ROUTE_DIRECT_TOKENS && !r->state->batch_invariant && !args.weight_f32 &&
                       !args.hidden_f32 && shape->hidden % 8 == 0 && aligned16(args.weight) && aligned16(args.hidden);
    MM_TRY(tiles ? route_tiles(r, &args) : route_direct(r, &args));
    return route_choice(r, &args);
}

/* ---- plan and staging ----------------------------------------------------------------------------------- */

/*
 * Which list takes how many rows. What decides is an expert's row count, and the batch's token count where a list is
 * not worth its launches: up to 64 tokens, and up to 8 rows per expert on average, everything is decode's (an expert of
 * more than 16 rows is cut into entries), up to 1024 nothing is WIDE's.
 */
static bool uses_decode(const run *r) {
    return r->layer->decode[0].kernel != MM_KERNEL_COUNT;
}
static bool uses_native(const run *r) {
    return r->layer->mid[0] != MM_KERNEL_COUNT;
}
static bool uses_tiles(const run *r) {
    return !uses_decode(r) ||
           (r->token_count > DECODE_ONLY_TOKENS && r->pair_count > DECODE_ONLY_ROWS * r->weights->shape.expert_count);
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

mm_cuda_stage_args mm_cuda_hidden_args(const mm_backend_layer *layer, const megamoe_batch *batch, bool quantize) {
    const megamoe_shape *shape = &layer->weights->shape;
    return (mm_cuda_stage_args){.source = batch->hidden,
                                .source_f32 = batch->hidden_dtype == MEGAMOE_F32,
                                .round_bf16 = 1,
                                .slots_per_token = shape->experts_per_token,
                                .columns = shape->hidden,
                                .pitch = layer->h_pitch,
                                .quantize = quantize,
                                .global_mode = layer->weights->input_mode,
                                .global = quantize ? layer->weights->input_global : 1.0f};
}

/* Only a token's own global scale differs from row to row. */
static bool row_globals(const run *r) {
    return r->nvfp4 && r->weights->input_mode == MEGAMOE_GLOBAL_TOKEN;
}

static mm_cuda_stage_args rows_args(const run *r, const megamoe_batch *batch) {
    mm_cuda_stage_args args = mm_cuda_hidden_args(r->layer, batch, r->nvfp4);
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

/* Staged rows as [K / 64] [row] [64]: a box of `width` rows and `halves` runs of 64 values lies as wgmma reads it. */
static megamoe_status tokens_map(const run *r, const mm_cuda_gemm_args *args, uint32_t width, uint32_t halves,
                                 CUtensorMap *map) {
    const mm_driver *driver = r->state->driver;
    cuuint64_t extent[3] = {64, r->pair_count, args->x_pitch / 64}, pitches[2] = {args->x_pitch * 2ull, 128};
    cuuint32_t sizes[3] = {64, width, halves}, step[3] = {1, 1, 1};
    return mm_driver_status(
        driver,
        driver->tensor_map_encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)(uintptr_t)args->x, extent, pitches,
                                  sizes, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "describing staged rows");
}

static megamoe_status run_decode(run *r, int l2, mm_cuda_gemm_args args) {
    const mm_decode_form *form = &r->layer->decode[l2];
    void *arguments[] = {&args};
    mm_launch how = {.grid = {r->state->sm_count / form->cta_count * form->cta_count},
                     .threads = DECODE_THREADS,
                     .shared_bytes = form->shared_bytes,
                     .cluster = form->cta_count};
    args.maps = r->layer->decode_maps, args.list = MM_CUDA_LIST_DECODE,
    args.entries = r->s.entries[MM_CUDA_LIST_DECODE];
    args.slot_count = form->slot_count;
    args.weight_light = DECODE_WEIGHT_LIGHT;
    args.weight_heavy = form->cta_count == 2 ? DECODE_WEIGHT_HEAVY_CLUSTER : DECODE_WEIGHT_HEAVY;
    args.next_items = l2 || !r->layer->down_contiguous ? 0 : r->layer->decode[1].slot_count,
    args.next_weight_heavy = DECODE_WEIGHT_HEAVY;
    return launch(r, form->kernel, how, arguments);
}

static megamoe_status run_native(run *r, int l2, int list, mm_cuda_gemm_args args) {
    static const uint32_t mid_widths[] = {MM_CUDA_MID_WIDTHS}, wide_widths[] = {MM_CUDA_WIDE_WIDTHS};
    const bool wide = list == MM_CUDA_LIST_WIDE;
    const uint32_t *widths = wide ? wide_widths : mid_widths;
    const size_t count = wide ? sizeof wide_widths / 4 : sizeof mid_widths / 4;
    mm_cuda_token_maps maps;
    void *arguments[] = {&maps, &args};
    mm_launch how = {.grid = {r->state->sm_count},
                     .threads = wide ? WIDE_THREADS : MID_THREADS,
                     .shared_bytes = wide ? WIDE_SHARED : MID_SHARED};
    args.maps = wide ? r->layer->wide_maps : r->layer->mid_maps, args.list = (uint32_t)list,
    args.entries = r->s.entries[list];
    for (size_t i = 0; i < count; i++) MM_TRY(tokens_map(r, &args, widths[i], wide ? 2 : 4, &maps.width[i]));
    return launch(r, wide ? r->layer->wide[l2] : r->layer->mid[l2], how, arguments);
}

mm_launch mm_cuda_tile_launch(const mm_backend_state *state) {
    return (mm_launch){.grid = {state->sm_count * 2}, .threads = 256, .shared_bytes = TILE_SHARED};
}

static megamoe_status run_tile(run *r, mm_kernel kernel, mm_cuda_gemm_args args) {
    void *arguments[] = {&args};
    return launch(r, kernel, mm_cuda_tile_launch(r->state), arguments);
}

/* L1 or L2 over every list that can have entries. */
static megamoe_status run_gemm(run *r, int l2, const mm_cuda_gemm_args *args) {
    if (uses_wide(r)) MM_TRY(run_native(r, l2, MM_CUDA_LIST_WIDE, *args));
    if (uses_tiles(r)) {
        mm_cuda_gemm_args tile = *args;
        tile.list = MM_CUDA_LIST_MID, tile.entries = r->s.entries[MM_CUDA_LIST_MID];
        if (uses_native(r))
            MM_TRY(run_native(r, l2, MM_CUDA_LIST_MID, *args));
        else
            MM_TRY(run_tile(r, r->layer->tile[l2], tile));
    }
    return uses_decode(r) ? run_decode(r, l2, *args) : MEGAMOE_OK;
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
                            .y = r->nvfp4 ? (void *)r->s.h32 : (void *)r->s.h,
                            .y_pitch = r->nvfp4 ? shape->intermediate : r->layer->i_pitch,
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
    MM_TRY(run_gemm(r, 0, &l1));
    if (r->nvfp4) {
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
                                   .staged = r->s.h,
                                   .counters = r->layer->counters};
        MM_TRY(stage(r, &args));
    }
    return run_gemm(r, 1, &l2);
}

/* ---- combine -------------------------------------------------------------------------------------------- */

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

megamoe_status mm_cuda_run_batch(mm_backend_layer *layer, const megamoe_batch *batch, CUstream stream) {
    const int32_t *ids = batch->expert_ids;
    const float *weights = batch->expert_weights;
    run r;
    if (batch->token_count == 0) return MEGAMOE_OK;
    run_begin(&r, layer, batch->token_count, stream);
    if (layer->weights->shared) MM_TRY(mm_cuda_shared_begin(layer, batch, stream, &r.started));
    if (!ids) {
        MM_TRY(run_router(&r, batch, r.s.expert_ids, r.s.weights));
        ids = r.s.expert_ids, weights = r.s.weights;
    }
    MM_TRY(run_rows(&r, batch, ids));
    if (layer->weights->expert_count > 0) MM_TRY(run_experts(&r, weights));
    if (layer->weights->shared) MM_TRY(mm_cuda_shared_end(layer, batch, stream, &r.started));
    return run_combine(&r, batch, weights);
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
