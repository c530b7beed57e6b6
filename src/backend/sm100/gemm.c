/* The host's side of the grouped GEMM: tensor maps, the choice of an instance, the launch. */
#include "backend/sm100/gemm.h"
#include "error.h"

/* Rows of codes, one after another. */
static struct sm100_map code_rows(const uint8_t *codes, uint32_t columns, uint32_t rows, uint32_t box_rows) {
    return (struct sm100_map){.base = codes,
                              .element_bytes = 1,
                              .rank = 2,
                              .dims = {columns / 2, rows},
                              .strides = {sm100_code_row_bytes(columns)},
                              .box = {SM100_STAGE_BYTES_K, box_rows, 1},
                              .swizzled = true};
}

static megamoe_status map_weights(const struct sm100_machine *machine, const struct sm100_weights *w,
                                  struct sm100_tensor_map *encoded) {
    struct sm100_map map = code_rows(w->codes, w->columns, w->rows, SM100_M);
    map.rank = 3;
    map.dims[2] = w->groups;
    if (w->lent) map.strides[0] = w->lent_row_bytes;
    map.strides[1] = w->lent ? w->lent_group_bytes : w->rows * map.strides[0];
    return machine->map(machine->context, &map, encoded);
}

/* Blocks of 512 bytes, four at a time. Not plain bulk copies, because those cannot signal the other CTA of a
 * pair. */
static megamoe_status map_scales(const struct sm100_machine *machine, const uint8_t *scales, uint64_t blocks,
                                 struct sm100_tensor_map *encoded) {
    struct sm100_map map = {
        scales, 2, 2, {SM100_BLOCK_BYTES / 2, blocks}, {SM100_BLOCK_BYTES}, {SM100_BLOCK_BYTES / 2, SM100_STAGE_STEPS},
        false};
    return machine->map(machine->context, &map, encoded);
}

megamoe_status mm_sm100_gemm_prepare(const struct sm100_machine *machine, enum sm100_tile_name tile,
                                     const struct sm100_weights *const weights[2], const struct sm100_tokens *tokens,
                                     const int32_t *ends, struct sm100_gemm_args *args) {
    const struct sm100_tile *t = &sm100_tiles[tile];
    uint32_t blocks = sm100_blocks_along_k(tokens->columns);
    for (uint32_t i = 0; i < t->matrices; i++) {
        const struct sm100_weights *w = weights[i];
        uint64_t weight_blocks = (uint64_t)w->groups * sm100_stripes(w->rows) * blocks;
        MM_TRY(map_weights(machine, w, &args->weights[i]));
        MM_TRY(map_scales(machine, w->scales, weight_blocks, &args->weight_scales[i]));
        args->weight_globals[i] = w->globals;
        args->biases[i] = w->biases;
    }
    struct sm100_map rows = code_rows(tokens->codes, tokens->columns, tokens->rows_max, t->token_box);
    MM_TRY(machine->map(machine->context, &rows, &args->tokens));
    MM_TRY(map_scales(machine, tokens->scales, (uint64_t)tokens->stripes_max * blocks, &args->token_scales));
    args->ends = ends;
    args->group_count = weights[0]->groups;
    args->m_rows = weights[0]->rows;
    args->k = weights[0]->columns;
    return MEGAMOE_OK;
}

/* Small tiles as long as an average expert fits into one: then the weights are read once, and that is the
 * bound. */
enum sm100_tile_name mm_sm100_gemm_choose(bool gated, uint32_t rows, uint32_t groups, uint32_t sm_count) {
    bool small = rows / groups < sm100_tiles[SM100_L1_SMALL].n_max || sm_count < 2;
    if (gated) return small ? SM100_L1_SMALL : SM100_L1_LARGE;
    return small ? SM100_L2_SMALL : SM100_L2_LARGE;
}

megamoe_status mm_sm100_gemm_launch(const struct sm100_machine *machine, enum sm100_tile_name tile,
                                    const struct sm100_gemm_args *args, uint32_t rows, uint32_t sm_count,
                                    void *stream) {
    const struct sm100_tile t = sm100_tiles[tile];
    /* At most one tile per n_max rows and one per group more; a worker without a tile is a waste, not an
     * error. */
    uint64_t token_tiles = rows / t.n_step + (rows < args->group_count ? rows : args->group_count);
    uint64_t tiles = token_tiles * sm100_tile_schedule(t, NULL, 0, args->m_rows).m_tiles;
    uint32_t workers = (sm_count ? sm_count : machine->multiprocessors) / t.cta_group;
    if (tiles < workers) workers = (uint32_t)tiles;
    if (workers == 0) return MEGAMOE_OK;
    struct sm100_launch launch = {(enum sm100_kernel)tile,
                                  workers * t.cta_group,
                                  t.cta_group,
                                  SM100_THREADS,
                                  sm100_shared_bytes(t),
                                  args,
                                  sizeof *args};
    return machine->launch(machine->context, &launch, stream);
}
