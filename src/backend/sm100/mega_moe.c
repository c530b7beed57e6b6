/* The layer: scratch, prepared arguments, and the five launches. */
#include <stdlib.h>

#include "backend/sm100/mega_moe.h"
#include "backend/sm100/record.h"
#include "error.h"

/* Device memory of this layer's own; the first failure stays in *status. */
static void *take(const struct mm_mega_moe *moe, uint64_t bytes, const char *name, megamoe_status *status) {
    if (*status != MEGAMOE_OK) return NULL;
    void *memory = moe->machine->alloc(moe->machine->context, bytes, name);
    if (memory)
        *status = mm_sm100_clear(moe->machine, memory, bytes);
    else
        *status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no device memory for the %s of a layer", name);
    return memory;
}

/* The same of the memory that the device's layers share. */
static void *share(const struct mm_mega_moe *moe, struct sm100_scratch *scratch, enum sm100_buffer which,
                   uint64_t bytes, megamoe_status *status) {
    void *memory = NULL;
    if (*status == MEGAMOE_OK) *status = mm_sm100_scratch_take(moe->machine, scratch, which, bytes, &memory);
    return memory;
}

/* Of the scales of all rows that a batch can have, with `columns` values each. */
static uint64_t scale_bytes(const struct mm_mega_moe *moe, uint32_t columns) {
    uint32_t stripes = sm100_stripes_max(moe->shape.max_tokens * moe->shape.slots, moe->weights.up.groups);
    return sm100_scale_bytes(stripes * SM100_STRIPE_ROWS, columns);
}

static megamoe_status scratch_open(struct mm_mega_moe *moe, struct sm100_scratch *shared) {
    const struct mm_mega_moe_shape *s = &moe->shape;
    struct mm_mega_moe_scratch *c = &moe->scratch;
    uint64_t rows = (uint64_t)s->max_tokens * s->slots, groups = moe->weights.up.groups;
    megamoe_status status = MEGAMOE_OK;
    c->local_index = take(moe, s->expert_count * sizeof(int32_t), "local index", &status);
    c->counts = take(moe, sizeof *c->counts, "counters", &status);
    c->expert_tokens = take(moe, s->expert_count * sizeof(uint64_t), "tokens per expert", &status);
    c->record = take(moe, sizeof *c->record, "record", &status);
    c->ends = share(moe, shared, SM100_ENDS, groups * sizeof(int32_t), &status);
    c->pair_row = share(moe, shared, SM100_PAIR_ROW, rows * sizeof(int32_t), &status);
    c->row_pair = share(moe, shared, SM100_ROW_PAIR, rows * sizeof(uint32_t), &status);
    c->row_scale_row = share(moe, shared, SM100_ROW_SCALE_ROW, rows * sizeof(uint32_t), &status);
    c->row_weights = share(moe, shared, SM100_ROW_WEIGHTS, rows * sizeof(float), &status);
    c->row_globals = share(moe, shared, SM100_ROW_GLOBALS, rows * sizeof(float), &status);
    c->x_codes = share(moe, shared, SM100_X_CODES, rows * sm100_code_row_bytes(s->hidden), &status);
    c->x_scales = share(moe, shared, SM100_X_SCALES, scale_bytes(moe, s->hidden), &status);
    c->h_codes = share(moe, shared, SM100_H_CODES, rows * sm100_code_row_bytes(s->intermediate), &status);
    c->h_scales = share(moe, shared, SM100_H_SCALES, scale_bytes(moe, s->intermediate), &status);
    c->partials = share(moe, shared, SM100_PARTIALS, rows * s->hidden * sizeof(uint16_t), &status);
    return status;
}

static void scratch_close(struct mm_mega_moe *moe) {
    const struct mm_mega_moe_scratch *c = &moe->scratch;
    void *const memory[] = {c->local_index, c->counts, c->expert_tokens, c->record};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) moe->machine->release(moe->machine->context, memory[i]);
}

static void fill_common(const struct mm_mega_moe *moe, struct sm100_gemm_args *args) {
    args->record = moe->scratch.record;
    args->timeout_ns = moe->shape.timeout_ns;
    args->saturated_blocks = &moe->scratch.counts->saturated_blocks;
    args->nonfinite_blocks = &moe->scratch.counts->nonfinite_blocks;
}

static megamoe_status prepare_l1(struct mm_mega_moe *moe, enum sm100_tile_name tile) {
    const struct mm_mega_moe_scratch *c = &moe->scratch;
    uint32_t rows = moe->shape.max_tokens * moe->shape.slots;
    struct sm100_tokens tokens = {c->x_codes, c->x_scales, rows, sm100_stripes_max(rows, moe->weights.up.groups),
                                  moe->shape.hidden};
    const struct sm100_weights *gate = moe->weights.gate.codes ? &moe->weights.gate : &moe->weights.up;
    const struct sm100_weights *both[2] = {gate, &moe->weights.up};
    struct sm100_gemm_args *args = &moe->arguments[tile];
    MM_TRY(mm_sm100_gemm_prepare(moe->machine, tile, both, &tokens, c->ends, args));
    fill_common(moe, args);
    args->row_globals = c->row_globals;
    args->row_weights = moe->shape.routing_weight_before ? c->row_weights : NULL;
    args->h_codes = c->h_codes;
    args->h_scales = c->h_scales;
    args->h_globals = moe->weights.h_globals;
    args->h_row_bytes = sm100_code_row_bytes(moe->shape.intermediate);
    args->swiglu = moe->shape.swiglu;
    return MEGAMOE_OK;
}

static megamoe_status prepare_l2(struct mm_mega_moe *moe, enum sm100_tile_name tile) {
    const struct mm_mega_moe_scratch *c = &moe->scratch;
    uint32_t rows = moe->shape.max_tokens * moe->shape.slots;
    struct sm100_tokens tokens = {c->h_codes, c->h_scales, rows, sm100_stripes_max(rows, moe->weights.up.groups),
                                  moe->shape.intermediate};
    const struct sm100_weights *down[2] = {&moe->weights.down, NULL};
    struct sm100_gemm_args *args = &moe->arguments[tile];
    MM_TRY(mm_sm100_gemm_prepare(moe->machine, tile, down, &tokens, c->ends, args));
    fill_common(moe, args);
    args->group_globals = moe->weights.h_globals;
    args->output_rows = c->row_pair;
    return MEGAMOE_OK;
}

static megamoe_status prepare(struct mm_mega_moe *moe, const int32_t *local_index, struct sm100_scratch *shared) {
    const struct sm100_machine *machine = moe->machine;
    MM_TRY(scratch_open(moe, shared));
    MM_TRY(machine->copy_in(machine->context, moe->scratch.local_index, local_index,
                            moe->shape.expert_count * sizeof *local_index));
    MM_TRY(prepare_l1(moe, SM100_L1_SMALL));
    MM_TRY(prepare_l1(moe, SM100_L1_LARGE));
    MM_TRY(prepare_l2(moe, SM100_L2_SMALL));
    MM_TRY(prepare_l2(moe, SM100_L2_LARGE));
    return prepare_l2(moe, SM100_L2_WIDE);
}

megamoe_status mm_mega_moe_open(const struct sm100_machine *machine, const struct mm_mega_moe_shape *shape,
                                const struct mm_mega_moe_weights *weights, const int32_t *local_index,
                                struct sm100_scratch *scratch, struct mm_mega_moe **moe) {
    struct mm_mega_moe *m;
    if ((uint64_t)shape->max_tokens * shape->slots > INT32_MAX)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%u tokens with %u slots are more rows than 2^31 - 1",
                       shape->max_tokens, shape->slots);
    m = aligned_alloc(64, (sizeof *m + 63) / 64 * 64); /* tensor maps want it */
    if (!m) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for a layer");
    memset(m, 0, sizeof *m);
    m->machine = machine;
    m->shape = *shape;
    m->weights = *weights;
    megamoe_status status = prepare(m, local_index, scratch);
    if (status == MEGAMOE_OK) {
        *moe = m;
        return status;
    }
    scratch_close(m); /* the weights stay the caller's */
    free(m);
    return status;
}

void mm_mega_moe_close(struct mm_mega_moe *moe) {
    if (!moe) return;
    mm_mega_moe_weights_free(moe->machine, &moe->weights);
    scratch_close(moe);
    free(moe);
}

static megamoe_status launch(const struct mm_mega_moe *moe, enum sm100_kernel kernel, uint32_t grid, uint32_t block,
                             uint32_t shared_bytes, const void *args, size_t args_bytes, void *stream) {
    struct sm100_launch l = {kernel, grid, 1, block, shared_bytes, args, args_bytes};
    return grid ? moe->machine->launch(moe->machine->context, &l, stream) : MEGAMOE_OK;
}

static uint32_t sm_count(const struct mm_mega_moe *moe) {
    return moe->shape.sm_budget ? moe->shape.sm_budget : moe->machine->multiprocessors;
}

/* As many CTAs as there is work for, and no more than fill the multiprocessors. */
static uint32_t grid_of(const struct mm_mega_moe *moe, uint32_t work) {
    uint32_t most = sm_count(moe) * 8;
    return work < most ? work : most;
}

static megamoe_status launch_plan(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    struct mm_mega_moe_scratch *c = &moe->scratch;
    uint32_t groups = moe->weights.up.groups;
    struct sm100_plan_args args = {0};
    args.ids = batch->expert_ids;
    args.local_index = c->local_index;
    args.pair_count = batch->token_count * moe->shape.slots;
    args.expert_count = moe->shape.expert_count;
    args.group_count = groups;
    args.ends = c->ends;
    args.pair_row = c->pair_row;
    args.row_pair = c->row_pair;
    args.row_scale_row = c->row_scale_row;
    if (moe->shape.routing_weight_before) {
        args.pair_weights = batch->expert_weights;
        args.row_weights = c->row_weights;
    }
    args.skipped_slots = &c->counts->skipped_slots;
    args.bad_slots = &c->counts->bad_slots;
    args.expert_tokens = c->expert_tokens;
    return launch(moe, SM100_KERNEL_PLAN, groups, SM100_PLAN_THREADS, sm100_plan_shared_bytes(groups), &args,
                  sizeof args, stream);
}

static megamoe_status launch_stage(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    struct mm_mega_moe_scratch *c = &moe->scratch;
    struct sm100_stage_args args = {0};
    args.hidden = batch->hidden;
    args.hidden_f32 = batch->hidden_f32;
    args.token_count = batch->token_count;
    args.columns = moe->shape.hidden;
    args.slots = moe->shape.slots;
    args.global = moe->shape.input_global;
    args.pair_row = c->pair_row;
    args.row_scale_row = c->row_scale_row;
    args.codes = c->x_codes;
    args.row_bytes = sm100_code_row_bytes(moe->shape.hidden);
    args.scales = c->x_scales;
    args.row_globals = c->row_globals;
    args.token_codes = batch->token_codes;
    args.token_scales = batch->token_scales;
    args.token_globals = batch->token_globals;
    args.saturated_blocks = &c->counts->saturated_blocks;
    args.nonfinite_blocks = &c->counts->nonfinite_blocks;
    uint32_t grid = grid_of(moe, (batch->token_count + SM100_STAGE_TOKENS - 1) / SM100_STAGE_TOKENS);
    return launch(moe, SM100_KERNEL_STAGE, grid, SM100_STAGE_THREADS, 0, &args, sizeof args, stream);
}

megamoe_status mm_stage_activation(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    MM_TRY(launch_plan(moe, batch, stream));
    return launch_stage(moe, batch, stream);
}

/* By the rows that an expert has on average over all ranks, which every rank knows alike; or always the large ones. */
static enum sm100_tile_name choose(const struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, bool l1) {
    uint32_t rows = moe->shape.batch_invariant ? UINT32_MAX : batch->token_count * moe->shape.slots;
    return mm_sm100_gemm_choose(l1, rows, moe->shape.expert_count, sm_count(moe));
}

megamoe_status mm_nvfp4_mega_moe_l1(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    enum sm100_tile_name tile = choose(moe, batch, true);
    struct sm100_gemm_args *args = &moe->arguments[tile];
    args->l1 = batch->l1;
    return mm_sm100_gemm_launch(moe->machine, tile, args, batch->token_count * moe->shape.slots, moe->shape.sm_budget,
                                stream);
}

megamoe_status mm_nvfp4_mega_moe_l2(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *partials,
                                    bool partials_f32, void *stream) {
    enum sm100_tile_name tile = choose(moe, batch, false);
    struct sm100_gemm_args *args = &moe->arguments[tile];
    args->output = partials;
    args->output_f32 = partials_f32;
    return mm_sm100_gemm_launch(moe->machine, tile, args, batch->token_count * moe->shape.slots, moe->shape.sm_budget,
                                stream);
}

megamoe_status mm_mega_moe_combine(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    struct sm100_combine_args args = {0};
    args.partials = moe->scratch.partials;
    args.pair_row = moe->scratch.pair_row;
    args.pair_weights = moe->shape.routing_weight_before ? NULL : batch->expert_weights;
    args.shared = batch->shared;
    args.output = batch->output;
    args.token_count = batch->token_count;
    args.slots = moe->shape.slots;
    args.columns = moe->shape.hidden;
    uint32_t grid = grid_of(moe, batch->token_count);
    return launch(moe, SM100_KERNEL_COMBINE, grid, SM100_COMBINE_THREADS, 0, &args, sizeof args, stream);
}

megamoe_status mm_nvfp4_mega_moe_full(struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch, void *stream) {
    if (batch->token_count > moe->shape.max_tokens)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "a batch of %u tokens, where the device was opened for %u",
                       batch->token_count, moe->shape.max_tokens);
    MM_TRY(mm_stage_activation(moe, batch, stream));
    MM_TRY(mm_nvfp4_mega_moe_l1(moe, batch, stream));
    MM_TRY(mm_nvfp4_mega_moe_l2(moe, batch, moe->scratch.partials, false, stream));
    return mm_mega_moe_combine(moe, batch, stream);
}

megamoe_status mm_mega_moe_check(struct mm_mega_moe *moe) {
    struct sm100_record record;
    char sentence[256];
    MM_TRY(moe->machine->copy_out(moe->machine->context, &record, moe->scratch.record, sizeof record));
    mm_sm100_record_describe(&record, sentence, sizeof sentence);
    if (!sentence[0]) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_DEVICE_ERROR, "%s", sentence);
}
