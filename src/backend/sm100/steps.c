/* The public steps: which launches each is, and the operands as tensors. */
#include "backend/sm100/steps.h"

megamoe_status mm_sm100_step(struct mm_mega_moe *moe, mm_step step, const struct mm_mega_moe_batch *batch,
                             const megamoe_tensor *partials, void *stream) {
    switch (step) {
    case MM_STEP_STAGE: return mm_stage_activation(moe, batch, stream);
    case MM_STEP_L1: return mm_nvfp4_mega_moe_l1(moe, batch, stream);
    case MM_STEP_L2: return mm_nvfp4_mega_moe_l2(moe, batch, partials->data, partials->dtype == MEGAMOE_F32, stream);
    case MM_STEP_FULL: break;
    }
    return mm_nvfp4_mega_moe_full(moe, batch, stream);
}

static megamoe_projection projection_of(const struct sm100_weights *w) {
    int64_t groups = w->groups, rows = w->rows, columns = w->columns;
    int64_t row_bytes = w->lent ? (int64_t)w->lent_row_bytes : sm100_code_row_bytes(w->columns);
    int64_t group_bytes = w->lent ? (int64_t)w->lent_group_bytes : rows * row_bytes;
    if (!w->codes) return (megamoe_projection){0};
    return (megamoe_projection){
        .codes = {w->codes, MEGAMOE_E2M1X2, 3, {groups, rows, columns}, {group_bytes, row_bytes, 1}},
        .scales = {w->scales,
                   MEGAMOE_E4M3,
                   4,
                   {groups, sm100_stripes(w->rows), sm100_blocks_along_k(w->columns), SM100_BLOCK_BYTES},
                   {0}},
        .global = {w->globals, MEGAMOE_F32, 1, {groups}, {0}},
        .bias = {w->biases, MEGAMOE_F32, 2, {groups, rows}, {0}},
    };
}

void mm_sm100_weights_describe(const struct mm_mega_moe_weights *weights, megamoe_mega_moe_weights *out) {
    out->gate = projection_of(&weights->gate);
    out->up = projection_of(&weights->up);
    out->down = projection_of(&weights->down);
}
