/* Stages of a run, from rows sorted by expert to the order of the batch. */
#include "backend/sm100/stages.h"

#include <stdlib.h>

#include "error.h"
#include "numerics/bf16.h"

/* Host copies of what says where a row belongs. */
struct reading {
    const struct mm_mega_moe *moe;
    size_t tokens, pairs;
    int32_t *pair_row, *ends;
    uint32_t *row_scale_row;
};

static megamoe_status from_device(const struct mm_mega_moe *moe, const void *source, size_t bytes, void **copy) {
    *copy = malloc(bytes + 1);
    if (!*copy) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a stage of %zu bytes", bytes);
    return bytes ? moe->machine->copy_out(moe->machine->context, *copy, source, bytes) : MEGAMOE_OK;
}

megamoe_status mm_sm100_stages_open(const struct mm_mega_moe *moe, struct mm_mega_moe_batch *batch) {
    const struct sm100_machine *m = moe->machine;
    const struct mm_mega_moe_shape *s = &moe->shape;
    size_t tokens = batch->token_count, rows = tokens * s->slots;
    batch->token_codes = m->alloc(m->context, tokens * s->hidden / 2 + 16, "token codes for the check");
    batch->token_scales = m->alloc(m->context, tokens * s->hidden / 16 + 16, "token scales for the check");
    batch->token_globals = m->alloc(m->context, tokens * sizeof(float) + 16, "token globals for the check");
    batch->l1 = m->alloc(m->context, rows * 2 * s->intermediate * sizeof(float) + 16, "l1 for the check");
    if (batch->token_codes && batch->token_scales && batch->token_globals && batch->l1) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no device memory for the stages of %zu tokens", tokens);
}

void mm_sm100_stages_close(const struct mm_mega_moe *moe, struct mm_mega_moe_batch *batch) {
    const struct sm100_machine *m = moe->machine;
    m->release(m->context, batch->token_codes);
    m->release(m->context, batch->token_scales);
    m->release(m->context, batch->token_globals);
    m->release(m->context, batch->l1);
}

static megamoe_status copy_if(const struct reading *r, void *target, const void *source, size_t bytes, uint32_t bit,
                              uint32_t *written) {
    if (!target) return MEGAMOE_OK;
    *written |= bit;
    return bytes ? r->moe->machine->copy_out(r->moe->machine->context, target, source, bytes) : MEGAMOE_OK;
}

/* One row of a stage to its pair; rows of skipped slots are zero. */
static megamoe_status scatter(const struct reading *r, void *target, const void *rows, size_t row_bytes, size_t pitch) {
    void *copy;
    megamoe_status status = from_device(r->moe, rows, r->pairs * pitch, &copy);
    for (size_t pair = 0; pair < r->pairs && status == MEGAMOE_OK; pair++) {
        uint8_t *to = (uint8_t *)target + pair * row_bytes;
        if (r->pair_row[pair] < 0)
            memset(to, 0, row_bytes);
        else
            memcpy(to, (const uint8_t *)copy + (size_t)r->pair_row[pair] * pitch, row_bytes);
    }
    free(copy);
    return status;
}

/* Scales are not in rows but in blocks. */
static megamoe_status scatter_h_scales(const struct reading *r, uint8_t *target) {
    uint32_t columns = r->moe->shape.intermediate, groups = columns / 16, blocks = sm100_blocks_along_k(columns);
    uint32_t rows = r->moe->shape.max_tokens * r->moe->shape.slots;
    size_t bytes = sm100_scale_bytes(sm100_stripes_max(rows, r->moe->weights.up.groups) * SM100_STRIPE_ROWS, columns);
    void *copy;
    megamoe_status status = from_device(r->moe, r->moe->scratch.h_scales, bytes, &copy);
    for (size_t i = 0; i < r->pairs * groups && status == MEGAMOE_OK; i++) {
        int32_t row = r->pair_row[i / groups];
        target[i] =
            row < 0
                ? 0
                : ((const uint8_t *)copy)[sm100_scale_offset(r->row_scale_row[row], (uint32_t)(i % groups), blocks)];
    }
    free(copy);
    return status;
}

/* The expert of a row is the first whose rows end behind it. */
static megamoe_status scatter_h_globals(const struct reading *r, float *target) {
    void *copy;
    MM_TRY(from_device(r->moe, r->moe->weights.h_globals, r->moe->weights.up.groups * sizeof(float), &copy));
    for (size_t pair = 0; pair < r->pairs; pair++) {
        uint32_t group = 0;
        while (r->pair_row[pair] >= 0 && r->pair_row[pair] >= r->ends[group]) group++;
        target[pair] = r->pair_row[pair] < 0 ? 0.0f : ((const float *)copy)[group];
    }
    free(copy);
    return MEGAMOE_OK;
}

/* BF16, and at its pair's place already. */
static megamoe_status read_l2(const struct reading *r, float *target) {
    size_t hidden = r->moe->shape.hidden, values = r->pairs * hidden;
    void *copy;
    megamoe_status status = from_device(r->moe, r->moe->scratch.partials, values * sizeof(uint16_t), &copy);
    for (size_t i = 0; i < values && status == MEGAMOE_OK; i++)
        target[i] = r->pair_row[i / hidden] < 0 ? 0.0f : mm_bf16_to_f32(((const uint16_t *)copy)[i]);
    free(copy);
    return status;
}

static megamoe_status read_rows(const struct reading *r, const struct mm_mega_moe_batch *batch, const megamoe_stages *s,
                                uint32_t *written) {
    size_t i = r->moe->shape.intermediate;
    if (s->l1) MM_TRY(scatter(r, s->l1, batch->l1, 2 * i * sizeof(float), 2 * i * sizeof(float)));
    if (s->h_codes) MM_TRY(scatter(r, s->h_codes, r->moe->scratch.h_codes, i / 2, sm100_code_row_bytes((uint32_t)i)));
    if (s->h_scales) MM_TRY(scatter_h_scales(r, s->h_scales));
    if (s->h_globals) MM_TRY(scatter_h_globals(r, s->h_globals));
    if (s->l2) MM_TRY(read_l2(r, s->l2));
    *written |= (s->l1 ? MM_STAGE_L1 : 0) | (s->h_codes ? MM_STAGE_H_CODES : 0) |
                (s->h_scales ? MM_STAGE_H_SCALES : 0) | (s->h_globals ? MM_STAGE_H_GLOBALS : 0) |
                (s->l2 ? MM_STAGE_L2 : 0);
    return MEGAMOE_OK;
}

static megamoe_status read_all(struct reading *r, const struct mm_mega_moe_batch *batch, const megamoe_stages *s,
                               uint32_t *written) {
    const struct mm_mega_moe_scratch *c = &r->moe->scratch;
    size_t values = r->tokens * r->moe->shape.hidden;
    MM_TRY(from_device(r->moe, c->pair_row, r->pairs * sizeof(int32_t), (void **)&r->pair_row));
    MM_TRY(from_device(r->moe, c->row_scale_row, r->pairs * sizeof(uint32_t), (void **)&r->row_scale_row));
    MM_TRY(from_device(r->moe, c->ends, r->moe->weights.up.groups * sizeof(int32_t), (void **)&r->ends));
    MM_TRY(copy_if(r, s->x_codes, batch->token_codes, values / 2, MM_STAGE_X_CODES, written));
    MM_TRY(copy_if(r, s->x_scales, batch->token_scales, values / 16, MM_STAGE_X_SCALES, written));
    MM_TRY(copy_if(r, s->x_globals, batch->token_globals, r->tokens * sizeof(float), MM_STAGE_X_GLOBALS, written));
    MM_TRY(copy_if(r, s->output, batch->output, values * sizeof(uint16_t), MM_STAGE_OUTPUT, written));
    return read_rows(r, batch, s, written);
}

megamoe_status mm_sm100_stages_read(const struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch,
                                    const megamoe_stages *stages, uint32_t *written) {
    struct reading r = {.moe = moe, .tokens = batch->token_count};
    r.pairs = r.tokens * moe->shape.slots;
    megamoe_status status = read_all(&r, batch, stages, written);
    free(r.pair_row);
    free(r.row_scale_row);
    free(r.ends);
    return status;
}
