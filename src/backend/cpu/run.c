/*
 * A batch through the layer: route, then chunk by chunk stage -> plan -> L1 with activation -> L2 -> combine,
 * one parallel region each. Nothing is allocated, and no number depends on which thread computed it or where
 * in the batch a token stands.
 */
#include "backend/cpu/cpu.h"
#include "error.h"
#include "routing/router.h"

/* Work units of about this many weight bytes: long enough to stream, short enough to share out evenly. */
#define UNIT_BYTES 65536u

/* One run and the chunk of tokens at hand. */
typedef struct chunk {
    mm_backend_layer *layer;
    mm_backend_state *state;
    const mm_kernels *kernels;
    mm_cpu_scratch *scratch;
    const mm_layer_weights *weights;
    const megamoe_batch *batch;
    const megamoe_stages *stages; /* fields may be NULL */
    uint32_t first, count;        /* tokens of the batch */
    bool quantizes;               /* stage for the experts too, not for the router alone */
    uint32_t group_count;
    size_t pack_bytes, l1_bytes, l2_bytes; /* read and written by all units of a list */
} chunk;

/* ---- stage: hidden states to operands ---- */

static float input_global(const chunk *c, const float *values) {
    const mm_layer_weights *w = c->weights;
    if (w->input_mode == MEGAMOE_GLOBAL_TOKEN)
        return mm_nvfp4_global_from_amax(c->kernels->amax(values, w->shape.hidden));
    return w->input_mode == MEGAMOE_GLOBAL_STATIC ? w->input_global : 1.0f;
}

static void stage_token(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    mm_cpu_scratch *s = c->scratch;
    mm_cpu_thread own = mm_cpu_scratch_thread(c->state, thread);
    uint32_t hidden = c->weights->shape.hidden;
    size_t token = (size_t)c->first + unit;
    size_t element = c->batch->hidden_dtype == MEGAMOE_F32 ? 4 : 2;
    c->kernels->load((const uint8_t *)c->batch->hidden + token * hidden * element, c->batch->hidden_dtype, hidden,
                     own.values);
    mm_cpu_operand_store(c->kernels, own.values, hidden, s->x + unit * s->x_pitch);
    s->x_globals[unit] = 1.0f;
    if (!c->quantizes || c->weights->activations != MEGAMOE_ACTIVATIONS_NVFP4) return;

    float g = input_global(c, own.values);
    c->kernels->quantize(own.values, hidden, g, own.codes, own.scales, &c->state->tallies[thread].blocks);
    mm_cpu_operand_store(c->kernels, own.values, hidden, s->x_nvfp4 + unit * s->x_pitch);
    s->x_globals[unit] = g;
    if (c->stages->x_codes) memcpy(c->stages->x_codes + token * (hidden / 2), own.codes, hidden / 2);
    if (c->stages->x_scales) memcpy(c->stages->x_scales + token * (hidden / 16), own.scales, hidden / 16);
    if (c->stages->x_globals) c->stages->x_globals[token] = g;
}

/* ---- route ---- */

/* A block of experts against all tokens of the chunk. The kernel never depends on how many there are. */
static void logits_block(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    mm_cpu_scratch *s = c->scratch;
    const mm_router *router = &c->weights->router;
    uint32_t experts = c->weights->shape.expert_count, hidden = c->weights->shape.hidden;
    uint32_t first = unit * MM_ROWS_MAX;
    mm_matrix matrix = {.codes = router->weight,
                        .row_bytes = 2 * (uint64_t)hidden,
                        .rows = experts,
                        .columns = hidden,
                        .format = MM_BF16};
    mm_gemm gemm = {.matrix = &matrix,
                    .row_first = first,
                    .row_count = experts - first < MM_ROWS_MAX ? experts - first : MM_ROWS_MAX,
                    .operands = s->x,
                    .operand_pitch = s->x_pitch,
                    .count = c->count,
                    .sums = s->logits + first,
                    .sums_pitch = experts,
                    .panel = mm_cpu_scratch_thread(c->state, thread).panel,
                    .deciding_rows = 1};
    if (router->weight_dtype == MEGAMOE_F32)
        c->kernels->gemm_f32(router->weight, hidden, &gemm);
    else
        c->kernels->gemm(&gemm);
}

static void choose_token(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    mm_cpu_scratch *s = c->scratch;
    const megamoe_shape *shape = &c->weights->shape;
    const float *logits = s->logits + (size_t)unit * shape->expert_count;
    size_t token = (size_t)c->first + unit, at = token * shape->experts_per_token;
    mm_router_counts counts = {0};
    mm_router_choose(shape, &c->weights->router, logits, c->batch->token_ids ? c->batch->token_ids[token] : -1,
                     s->ids + at, s->weights + at, &counts);
    c->state->tallies[thread].unrouted_tokens += counts.unrouted_tokens;
    if (c->stages->logits)
        memcpy(c->stages->logits + token * shape->expert_count, logits, shape->expert_count * sizeof *logits);
}

static uint32_t blocks_of(uint32_t rows) {
    return (rows + MM_ROWS_MAX - 1) / MM_ROWS_MAX;
}

static void stage_chunk(chunk *c, uint32_t first, bool quantizes) {
    uint32_t left = c->batch->token_count - first;
    c->first = first;
    c->quantizes = quantizes;
    c->count = left < MM_CHUNK_TOKENS ? left : MM_CHUNK_TOKENS;
    mm_pool_run(c->state->pool, c->count, 4 * c->count * c->scratch->x_pitch, stage_token, c);
}

static void route_chunk(chunk *c) {
    size_t experts = c->weights->shape.expert_count, hidden = c->weights->shape.hidden;
    uint32_t blocks = blocks_of(c->weights->shape.expert_count);
    mm_pool_run(c->state->pool, blocks, 2 * experts * hidden + blocks * c->count * c->scratch->x_pitch, logits_block,
                c);
    mm_pool_run(c->state->pool, c->count, c->count * experts * 16, choose_token, c);
}

/* Leaves ids and weights of the whole batch in scratch, and the last chunk staged. */
static void route_batch(chunk *c, bool quantizes) {
    size_t pairs = (size_t)c->batch->token_count * c->weights->shape.experts_per_token;
    if (c->batch->expert_ids) {
        memcpy(c->scratch->ids, c->batch->expert_ids, pairs * sizeof *c->scratch->ids);
        memcpy(c->scratch->weights, c->batch->expert_weights, pairs * sizeof *c->scratch->weights);
        return;
    }
    for (uint32_t first = 0; first < c->batch->token_count; first += MM_CHUNK_TOKENS) {
        stage_chunk(c, first, quantizes);
        route_chunk(c);
    }
}

/* ---- plan: groups of rows and units of work ---- */

static uint32_t blocks_per_unit(const mm_matrix *matrix) {
    uint64_t blocks = UNIT_BYTES / (MM_ROWS_MAX * (uint64_t)matrix->row_bytes + 1);
    return blocks > 0 ? (uint32_t)blocks : 1;
}

static uint32_t units_of(const mm_matrix *matrix) {
    uint32_t per_unit = blocks_per_unit(matrix);
    return (blocks_of(matrix->rows) + per_unit - 1) / per_unit;
}

static uint32_t pack_blocks(uint32_t rows) {
    return (rows + MM_PACK_ROWS - 1) / MM_PACK_ROWS;
}

/* Room for the packed operands of L1 or of L2, whichever is larger. */
static size_t packed_bytes(const mm_cpu_group *g) {
    size_t x = packed_block_bytes(g->expert->up.columns, g->x_packed);
    size_t h = packed_block_bytes(g->expert->down.columns, g->h_packed);
    return pack_blocks(g->row_count) * (x > h ? x : h);
}

/* Operands come from memory once and from a cache for every other block of matrix rows. */
static void count_bytes(chunk *c, const mm_cpu_group *g) {
    const mm_matrix *up = &g->expert->up, *down = &g->expert->down;
    size_t rows = g->row_count;
    c->pack_bytes += rows * padded_columns(up->columns) * 2 * g->x_packed;
    c->pack_bytes += rows * padded_columns(down->columns) * 2 * g->h_packed;
    c->l1_bytes += 2 * (up->rows * (size_t)up->row_bytes + blocks_of(up->rows) * rows * c->scratch->x_pitch);
    c->l2_bytes += down->rows * (size_t)down->row_bytes + blocks_of(down->rows) * rows * c->scratch->h_pitch;
}

static void add_group(chunk *c, mm_cpu_group group) {
    mm_cpu_group *last = c->group_count ? &c->scratch->groups[c->group_count - 1] : NULL;
    const mm_layer_weights *w = c->weights;
    group.x_nvfp4 = mm_cpu_takes_nvfp4(w, &group.expert->up);
    group.h_nvfp4 = mm_cpu_takes_nvfp4(w, &group.expert->down);
    group.h_global =
        group.h_nvfp4 && w->intermediate_mode == MEGAMOE_GLOBAL_STATIC ? group.expert->intermediate_global : 1.0f;
    if (c->state->batch_invariant) group.deciding_rows = UINT32_MAX;
    if (c->kernels->packs) {
        group.x_packed = c->kernels->packs(&group.expert->up, group.deciding_rows, group.x_nvfp4);
        group.h_packed = c->kernels->packs(&group.expert->down, group.deciding_rows, group.h_nvfp4);
    }
    group.packed_offset = last ? last->packed_offset + packed_bytes(last) : 0;
    group.pack_unit_end = (last ? last->pack_unit_end : 0) + pack_blocks(group.row_count);
    group.l1_unit_end = (last ? last->l1_unit_end : 0) + units_of(&group.expert->up);
    group.l2_unit_end = (last ? last->l2_unit_end : 0) + units_of(&group.expert->down);
    count_bytes(c, &group);
    c->scratch->groups[c->group_count++] = group;
}

/* The rows of an expert in as few groups as the level allows, of about the same size: a group of few rows takes almost
 * as long as one of many. */
static void add_groups(chunk *c, uint32_t rows, mm_cpu_group group) {
    uint32_t groups = (rows + c->kernels->group_rows - 1) / c->kernels->group_rows;
    for (; rows > 0; rows -= group.row_count, group.row_first += group.row_count, groups--) {
        group.row_count = groups > 1 ? pack_blocks((rows + groups - 1) / groups) * MM_PACK_ROWS : rows;
        add_group(c, group);
    }
}

static void plan_chunk(chunk *c) {
    mm_cpu_scratch *s = c->scratch;
    const mm_layer_weights *w = c->weights;
    uint32_t slots = w->shape.experts_per_token, pairs = c->count * slots;
    mm_plan_counts counts = {.tokens_per_expert = c->layer->tokens_per_expert};
    mm_plan_build(&s->plan, s->ids + (size_t)c->first * slots, pairs, w->local_index, w->shape.expert_count,
                  w->expert_count, &counts);
    c->layer->counters.skipped_slots += counts.skipped_slots;
    c->layer->counters.bad_slots += counts.bad_slots;
    for (uint32_t p = 0; p < pairs; p++) s->pair_row[p] = -1;
    for (uint32_t r = 0; r < s->plan.row_count; r++) {
        s->pair_row[s->plan.row_pair[r]] = (int32_t)r;
        s->row_token[r] = s->plan.row_pair[r] / slots;
    }
    c->group_count = 0;
    c->pack_bytes = c->l1_bytes = c->l2_bytes = 0;
    for (uint32_t e = 0; e < w->expert_count; e++) {
        uint32_t first = s->plan.offsets[e];
        add_groups(c, s->plan.offsets[e + 1] - first,
                   (mm_cpu_group){.expert = &w->experts[e],
                                  .swiglu = &w->swiglu,
                                  .row_first = first,
                                  .deciding_rows = s->expert_rows[e]});
    }
    if (!w->shared) return;
    for (uint32_t t = 0; t < c->count; t++) s->row_token[pairs + t] = t;
    add_groups(c, c->count,
               (mm_cpu_group){.expert = w->shared,
                              .swiglu = &w->shared_swiglu,
                              .row_first = pairs,
                              .deciding_rows = c->batch->token_count,
                              .shared = true});
}

/* Rows of each expert in the whole batch, which may be longer than a chunk. */
static void count_rows(const chunk *c) {
    const mm_layer_weights *w = c->weights;
    size_t pairs = (size_t)c->batch->token_count * w->shape.experts_per_token;
    memset(c->scratch->expert_rows, 0, w->expert_count * sizeof *c->scratch->expert_rows);
    for (size_t p = 0; p < pairs; p++) {
        int32_t id = c->scratch->ids[p];
        int32_t local = id >= 0 && (uint32_t)id < w->shape.expert_count ? w->local_index[id] : -1;
        if (local >= 0) c->scratch->expert_rows[local]++;
    }
}

/* ---- L1, activation, L2 ---- */

/* Three lists of units run over the groups: of L1, of L2, and of packing operands for either. */
typedef enum unit_list { UNITS_L1, UNITS_L2, UNITS_PACK } unit_list;

static uint32_t unit_end(const mm_cpu_group *g, unit_list list) {
    return list == UNITS_L1 ? g->l1_unit_end : list == UNITS_L2 ? g->l2_unit_end : g->pack_unit_end;
}

/* The group of a unit; *unit becomes its number within the group. */
static const mm_cpu_group *find_group(const chunk *c, uint32_t *unit, unit_list list) {
    const mm_cpu_group *groups = c->scratch->groups;
    uint32_t low = 0, high = c->group_count - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (*unit < unit_end(&groups[middle], list))
            high = middle;
        else
            low = middle + 1;
    }
    if (low > 0) *unit -= unit_end(&groups[low - 1], list);
    return &groups[low];
}

/* Where the packed operands of rows first .. of a group lie, first a multiple of MM_PACK_ROWS; NULL: not
 * packed. */
static uint8_t *packed_at(const chunk *c, const mm_cpu_group *g, uint32_t first, bool h) {
    uint32_t columns = h ? g->expert->down.columns : g->expert->up.columns;
    size_t block_bytes = packed_block_bytes(columns, h ? g->h_packed : g->x_packed);
    return block_bytes ? c->scratch->packed + g->packed_offset + first / MM_PACK_ROWS * block_bytes : NULL;
}

/* A block of operands of L1 (h: of L2) that its GEMM wants packed. */
static void pack_unit(const chunk *c, uint32_t unit, bool h) {
    mm_cpu_scratch *s = c->scratch;
    const mm_cpu_group *g = find_group(c, &unit, UNITS_PACK);
    uint32_t columns = h ? g->expert->down.columns : g->expert->up.columns, first = unit * MM_PACK_ROWS;
    mm_gemm gemm = {.matrix = h ? &g->expert->down : &g->expert->up,
                    .deciding_rows = g->deciding_rows,
                    .nvfp4 = h ? g->h_nvfp4 : g->x_nvfp4,
                    .operands = h            ? s->h + g->row_first * s->h_pitch
                                : g->x_nvfp4 ? s->x_nvfp4
                                             : s->x,
                    .operand_pitch = h ? s->h_pitch : s->x_pitch,
                    .operand_index = h ? NULL : s->row_token + g->row_first,
                    .count = g->row_count};
    uint8_t *packed = packed_at(c, g, first, h);
    if (packed) c->kernels->pack(&gemm, columns, first, packed);
}

static void pack_x(void *context, uint32_t unit, uint32_t thread) {
    (void)thread;
    pack_unit(context, unit, false);
}

static void pack_h(void *context, uint32_t unit, uint32_t thread) {
    (void)thread;
    pack_unit(context, unit, true);
}

static float bias_at(const mm_matrix *m, uint32_t n) {
    const uint8_t *at = (const uint8_t *)m->bias + n * m->bias_stride;
    uint16_t half;
    float value;
    if (m->bias_dtype == MEGAMOE_BF16) {
        memcpy(&half, at, sizeof half);
        return mm_bf16_to_f32(half);
    }
    memcpy(&value, at, sizeof value);
    return value;
}

/* Sums to physical values: times both global scales, plus the bias. */
static void finish_sums(const mm_matrix *m, uint32_t n, uint32_t count, float input, float *sums) {
    float scale = input * m->global;
    for (uint32_t i = 0; i < count; i++) sums[i] = sums[i] * scale;
    for (uint32_t i = 0; i < count && m->bias; i++) sums[i] += bias_at(m, n + i);
}

/* gate and up of one row, columns n .. n + count, to h in operand form. */
static void activate_row(const chunk *c, const mm_cpu_group *g, mm_cpu_thread *own, uint32_t thread, uint32_t row,
                         uint32_t n, uint32_t count, float *gate, float *up) {
    mm_cpu_scratch *s = c->scratch;
    const megamoe_stages *out = c->stages;
    uint32_t slots = c->weights->shape.experts_per_token, columns = c->weights->shape.intermediate;
    size_t pair = g->shared ? 0 : (size_t)c->first * slots + s->plan.row_pair[row];
    float input = g->x_nvfp4 ? s->x_globals[s->row_token[row]] : 1.0f;
    float weight = c->weights->routing_weight_before && !g->shared ? s->weights[pair] : 1.0f;
    float h[MM_ROWS_MAX];
    uint8_t *operand = s->h + row * s->h_pitch;

    if (gate) finish_sums(&g->expert->gate, n, count, input, gate);
    finish_sums(&g->expert->up, n, count, input, up);
    c->kernels->activate(g->swiglu, gate, up, weight, count, h);
    if (g->h_nvfp4)
        c->kernels->quantize(h, count, g->h_global, own->codes, own->scales, &c->state->tallies[thread].blocks);
    c->kernels->store(h, count, operand + n * (c->kernels->operands_bf16 ? 2u : 4u));
    if (n + count == g->expert->down.columns) mm_cpu_operand_pad(c->kernels, n + count, operand);
    if (g->shared) return;

    if (out->l1 && gate) memcpy(out->l1 + pair * 2 * columns + n, gate, count * sizeof *gate);
    if (out->l1) memcpy(out->l1 + (pair * 2 + 1) * columns + n, up, count * sizeof *up);
    if (out->h && !g->h_nvfp4)
        for (uint32_t i = 0; i < count; i++) out->h[pair * columns + n + i] = mm_bf16_from_f32(h[i]);
    if (out->h_codes && g->h_nvfp4) memcpy(out->h_codes + (pair * columns + n) / 2, own->codes, count / 2);
    if (out->h_scales && g->h_nvfp4) memcpy(out->h_scales + (pair * columns + n) / 16, own->scales, count / 16);
    if (out->h_globals && g->h_nvfp4) out->h_globals[pair] = g->h_global;
}

/* Rows n .. of gate and up against the rows of the group, gathered by token. */
static void l1_block(const chunk *c, const mm_cpu_group *g, mm_cpu_thread *own, uint32_t thread, uint32_t n) {
    mm_cpu_scratch *s = c->scratch;
    const mm_expert *e = g->expert;
    bool gated = !g->swiglu->relu2;
    mm_gemm gemm = {.matrix = &e->up,
                    .table = mm_cpu_table(c->state, &e->up),
                    .row_first = n,
                    .row_count = e->up.rows - n < MM_ROWS_MAX ? e->up.rows - n : MM_ROWS_MAX,
                    .operands = g->x_nvfp4 ? s->x_nvfp4 : s->x,
                    .operand_pitch = s->x_pitch,
                    .operand_index = s->row_token + g->row_first,
                    .packed = packed_at(c, g, 0, false),
                    .count = g->row_count,
                    .sums = own->sums + MM_ROWS_MAX,
                    .sums_pitch = 2 * (size_t)MM_ROWS_MAX,
                    .panel = own->panel,
                    .deciding_rows = g->deciding_rows,
                    .nvfp4 = g->x_nvfp4};
    c->kernels->gemm(&gemm);
    if (gated) {
        gemm.matrix = &e->gate;
        gemm.table = mm_cpu_table(c->state, &e->gate);
        gemm.sums = own->sums;
        c->kernels->gemm(&gemm);
    }
    for (uint32_t r = 0; r < g->row_count; r++) {
        float *gate = own->sums + (size_t)r * 2 * MM_ROWS_MAX;
        activate_row(c, g, own, thread, g->row_first + r, n, gemm.row_count, gated ? gate : NULL, gate + MM_ROWS_MAX);
    }
}

/* L1 and L2 run the shared expert beside the routed ones, so only the threads know how long either took. Without a
 * shared expert nobody asks. */
static double unit_begin(const chunk *c) {
    return c->weights->shared ? mm_cpu_seconds() : 0.0;
}

static void unit_finish(const chunk *c, const mm_cpu_group *g, uint32_t thread, double began) {
    mm_cpu_tally *tally = &c->state->tallies[thread];
    if (!c->weights->shared) return;
    *(g->shared ? &tally->shared_seconds : &tally->routed_seconds) += mm_cpu_seconds() - began;
}

static void l1_unit(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    mm_cpu_thread own = mm_cpu_scratch_thread(c->state, thread);
    const mm_cpu_group *g = find_group(c, &unit, UNITS_L1);
    double began = unit_begin(c);
    uint32_t rows = MM_ROWS_MAX * blocks_per_unit(&g->expert->up);
    for (uint32_t n = unit * rows; n < (unit + 1) * rows && n < g->expert->up.rows; n += MM_ROWS_MAX)
        l1_block(c, g, &own, thread, n);
    unit_finish(c, g, thread, began);
}

/* Rows n .. of down against the rows of the group, to physical values in scratch. */
static void l2_block(const chunk *c, const mm_cpu_group *g, uint32_t thread, uint32_t n) {
    mm_cpu_scratch *s = c->scratch;
    const mm_matrix *m = &g->expert->down;
    float *sums = s->l2 + g->row_first * s->l2_pitch + n;
    uint32_t slots = c->weights->shape.experts_per_token;
    mm_gemm gemm = {.matrix = m,
                    .table = mm_cpu_table(c->state, m),
                    .row_first = n,
                    .row_count = m->rows - n < MM_ROWS_MAX ? m->rows - n : MM_ROWS_MAX,
                    .operands = s->h + g->row_first * s->h_pitch,
                    .operand_pitch = s->h_pitch,
                    .packed = packed_at(c, g, 0, true),
                    .count = g->row_count,
                    .sums = sums,
                    .sums_pitch = s->l2_pitch,
                    .panel = mm_cpu_scratch_thread(c->state, thread).panel,
                    .deciding_rows = g->deciding_rows,
                    .nvfp4 = g->h_nvfp4};
    c->kernels->gemm(&gemm);
    for (uint32_t r = 0; r < g->row_count; r++) {
        float *row = sums + r * s->l2_pitch;
        finish_sums(m, n, gemm.row_count, g->h_global, row);
        if (g->shared || !c->stages->l2) continue;
        size_t pair = (size_t)c->first * slots + s->plan.row_pair[g->row_first + r];
        memcpy(c->stages->l2 + pair * m->rows + n, row, gemm.row_count * sizeof *row);
    }
}

static void l2_unit(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    const mm_cpu_group *g = find_group(c, &unit, UNITS_L2);
    double began = unit_begin(c);
    uint32_t rows = MM_ROWS_MAX * blocks_per_unit(&g->expert->down);
    for (uint32_t n = unit * rows; n < (unit + 1) * rows && n < g->expert->down.rows; n += MM_ROWS_MAX)
        l2_block(c, g, thread, n);
    unit_finish(c, g, thread, began);
}

/* ---- combine ---- */

static void combine_token(void *context, uint32_t unit, uint32_t thread) {
    const chunk *c = context;
    mm_cpu_scratch *s = c->scratch;
    const mm_layer_weights *w = c->weights;
    uint32_t slots = w->shape.experts_per_token, hidden = w->shape.hidden;
    size_t token = (size_t)c->first + unit;
    const float *rows[MM_EXPERTS_PER_TOKEN_MAX];
    float weights[MM_EXPERTS_PER_TOKEN_MAX];
    mm_combine combine = {.columns = hidden,
                          .rows = rows,
                          .weights = w->routing_weight_before ? NULL : weights,
                          .output = (uint16_t *)c->batch->output + token * hidden};
    (void)thread;
    for (uint32_t k = 0; k < slots; k++) {
        int32_t row = s->pair_row[unit * slots + k];
        if (row < 0) continue;
        rows[combine.count] = s->l2 + (size_t)row * s->l2_pitch;
        weights[combine.count++] = s->weights[token * slots + k];
    }
    if (w->shared) combine.shared = s->l2 + ((size_t)c->count * slots + unit) * s->l2_pitch;
    c->kernels->combine(&combine);
    if (c->stages->shared && w->shared)
        memcpy(c->stages->shared + token * hidden, combine.shared, hidden * sizeof *combine.shared);
    if (c->stages->output) memcpy(c->stages->output + token * hidden, combine.output, hidden * sizeof(uint16_t));
}

/* Of the time threads spent in L1 and L2, what went to routed experts. Forgets it. */
static double take_routed_share(const chunk *c) {
    double routed = 0.0, shared = 0.0;
    if (!c->weights->shared) return 1.0;
    for (uint32_t t = 0; t < c->state->threads; t++) {
        mm_cpu_tally *tally = &c->state->tallies[t];
        routed += tally->routed_seconds;
        shared += tally->shared_seconds;
        tally->routed_seconds = tally->shared_seconds = 0.0;
    }
    return routed > 0.0 ? routed / (routed + shared) : 0.0;
}

static void run_experts(chunk *c) {
    const mm_cpu_group *last = &c->scratch->groups[c->group_count - 1];
    mm_pool *pool = c->state->pool;
    double began = mm_cpu_seconds();
    if (c->kernels->pack) mm_pool_run(pool, last->pack_unit_end, c->pack_bytes, pack_x, c);
    mm_pool_run(pool, last->l1_unit_end, c->l1_bytes, l1_unit, c);
    if (c->kernels->pack) mm_pool_run(pool, last->pack_unit_end, c->pack_bytes, pack_h, c);
    mm_pool_run(pool, last->l2_unit_end, c->l2_bytes, l2_unit, c);
    c->layer->counters.expert_seconds += (mm_cpu_seconds() - began) * take_routed_share(c);
}

static void run_chunk(chunk *c) {
    size_t rows = (size_t)c->count * (c->weights->shape.experts_per_token + 1);
    plan_chunk(c);
    if (c->group_count > 0) run_experts(c);
    mm_pool_run(c->state->pool, c->count, rows * c->scratch->l2_pitch * sizeof(float), combine_token, c);
}

/* ---- the batch ---- */

static void collect_counters(chunk *c) {
    megamoe_counters *counters = &c->layer->counters;
    for (uint32_t t = 0; t < c->state->threads; t++) {
        mm_cpu_tally *tally = &c->state->tallies[t];
        counters->saturated_blocks += tally->blocks.saturated_blocks;
        counters->nonfinite_blocks += tally->blocks.nonfinite_blocks;
        counters->unrouted_tokens += tally->unrouted_tokens;
        *tally = (mm_cpu_tally){0};
    }
}

/* Rows of skipped slots are zero, so the stages that are filled row by row start as zeros. */
static void clear_stages(const chunk *c) {
    const megamoe_stages *s = c->stages;
    size_t hidden = c->weights->shape.hidden, columns = c->weights->shape.intermediate;
    size_t pairs = (size_t)c->batch->token_count * c->weights->shape.experts_per_token;
    if (s->l1) memset(s->l1, 0, pairs * 2 * columns * sizeof *s->l1);
    if (s->h) memset(s->h, 0, pairs * columns * sizeof *s->h);
    if (s->h_codes) memset(s->h_codes, 0, pairs * columns / 2);
    if (s->h_scales) memset(s->h_scales, 0, pairs * columns / 16);
    if (s->h_globals) memset(s->h_globals, 0, pairs * sizeof *s->h_globals);
    if (s->l2) memset(s->l2, 0, pairs * hidden * sizeof *s->l2);
}

static uint32_t stages_of(const chunk *c) {
    const mm_layer_weights *w = c->weights;
    bool h_nvfp4 = w->expert_count > 0 && mm_cpu_takes_nvfp4(w, &w->experts[0].down);
    uint32_t written = MM_STAGE_IDS | MM_STAGE_WEIGHTS | MM_STAGE_L1 | MM_STAGE_L2 | MM_STAGE_OUTPUT;
    if (!c->batch->expert_ids) written |= MM_STAGE_LOGITS;
    if (w->activations == MEGAMOE_ACTIVATIONS_NVFP4)
        written |= MM_STAGE_X_CODES | MM_STAGE_X_SCALES | MM_STAGE_X_GLOBALS;
    written |= h_nvfp4 ? MM_STAGE_H_CODES | MM_STAGE_H_SCALES | MM_STAGE_H_GLOBALS : MM_STAGE_H;
    if (w->shared) written |= MM_STAGE_SHARED;
    return written;
}

static const megamoe_stages no_stages;

static chunk begin(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *stages) {
    mm_backend_state *state = layer->state;
    return (chunk){.layer = layer,
                   .state = state,
                   .kernels = &state->kernels,
                   .scratch = &state->scratch,
                   .weights = layer->weights,
                   .batch = batch,
                   .stages = stages ? stages : &no_stages};
}

megamoe_status mm_cpu_run(mm_backend_layer *layer, const megamoe_batch *batch, const megamoe_stages *given,
                          const megamoe_stages *stages, uint32_t *written, void *stream) {
    chunk c = begin(layer, batch, stages);
    size_t pairs = (size_t)batch->token_count * layer->weights->shape.experts_per_token;
    bool staged = !batch->expert_ids && batch->token_count <= MM_CHUNK_TOKENS; /* by the router's pass */
    (void)stream;
    if (given)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "given stages are read by the reference backend only, not by cpu");
    clear_stages(&c);
    route_batch(&c, staged);
    count_rows(&c);
    for (uint32_t first = 0; first < batch->token_count; first += MM_CHUNK_TOKENS) {
        if (!staged) stage_chunk(&c, first, true);
        run_chunk(&c);
    }
    layer->counters.tokens += batch->token_count;
    collect_counters(&c);
    if (c.stages->expert_ids) memcpy(c.stages->expert_ids, c.scratch->ids, pairs * sizeof(int32_t));
    if (c.stages->expert_weights) memcpy(c.stages->expert_weights, c.scratch->weights, pairs * sizeof(float));
    if (written) *written = stages_of(&c);
    return MEGAMOE_OK;
}

megamoe_status mm_cpu_route(mm_backend_layer *layer, const megamoe_batch *batch, int32_t *expert_ids,
                            float *expert_weights, void *stream) {
    chunk c = begin(layer, batch, NULL);
    size_t pairs = (size_t)batch->token_count * layer->weights->shape.experts_per_token;
    (void)stream;
    route_batch(&c, false);
    collect_counters(&c);
    memcpy(expert_ids, c.scratch->ids, pairs * sizeof *expert_ids);
    memcpy(expert_weights, c.scratch->weights, pairs * sizeof *expert_weights);
    return MEGAMOE_OK;
}
