/* Weights as synth makes them, stacked by projection as megamoe_layer_create takes them. */
#include "bench_weights.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "formats.h"
#include "random.h"
#include "synth.h"

static void *own(cli_weights *w, uint64_t count, uint64_t size) {
    return w->owned[w->owned_count++] = cli_allocate(count, size);
}

static uint64_t expert_bytes(const megamoe_shape *s) {
    uint64_t values = 3 * (uint64_t)s->hidden * s->intermediate;
    return values / 2 + values / (s->group_size == 32 ? 32 : 16);
}

/* Asked before anything is allocated: Linux would grant the memory and end some process later. */
static int check_memory(const megamoe_shape *s, uint32_t experts) {
    double needed = (double)experts * (double)expert_bytes(s);
    double available = (double)sysconf(_SC_AVPHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    char kilobytes[64], a[16], b[16];
    if (cli_proc_line("/proc/meminfo", "MemAvailable", kilobytes, sizeof kilobytes))
        available = 1024.0 * strtod(kilobytes, NULL);
    if (needed < 0.8 * available) return CLI_GOOD;
    return cli_fail("%u experts take %s, and this machine has %s available; choose fewer with --experts A:B.", experts,
                    cli_bytes_text(needed, a), cli_bytes_text(available, b));
}

static void make_projection(cli_weights *w, const cli_blocks *blocks, const char *name, uint32_t experts, uint64_t rows,
                            uint64_t columns, unsigned group, megamoe_projection *p) {
    int64_t e = experts, n = (int64_t)rows, k = (int64_t)columns;
    uint64_t all = experts * rows, key = random_key(0, name);
    double spread = 1.2 / sqrt((double)columns);
    uint8_t *codes = own(w, all * columns / 2, 1), *scales = own(w, all * columns / group, 1);
    cli_fill_codes(blocks, key, group, 0, all, columns / 2, codes);
    cli_fill_scales(blocks, key + 1, group, spread, 0, all, columns / group, scales);
    p->codes = (megamoe_tensor){.data = codes, .dtype = MEGAMOE_E2M1X2, .rank = 3, .extent = {e, n, k}};
    p->scales = (megamoe_tensor){
        .data = scales, .dtype = group == 32 ? MEGAMOE_E8M0 : MEGAMOE_E4M3, .rank = 3, .extent = {e, n, k / group}};
    if (group == 32) return;
    float *global = own(w, experts, sizeof *global), *input = own(w, experts, sizeof *input);
    for (uint32_t i = 0; i < experts; i++) {
        /* no two alike: one that is taken for another must show */
        global[i] = cli_weight_global(spread) * (float)(0.75 + 0.5 * random_unit(random_at(key + 2, i)));
        input[i] = 60.0f / 2688.0f * (float)(0.9 + 0.2 * random_unit(random_at(key + 3, i)));
    }
    p->global = (megamoe_tensor){.data = global, .dtype = MEGAMOE_F32, .rank = 1, .extent = {e}};
    p->input_global = (megamoe_tensor){.data = input, .dtype = MEGAMOE_F32, .rank = 1, .extent = {e}};
}

static megamoe_tensor make_bf16(cli_weights *w, const char *name, double spread, uint64_t rows, uint64_t columns) {
    uint16_t *values = own(w, rows * columns, sizeof *values);
    uint64_t key = random_key(0, name);
    for (uint64_t i = 0; i < rows * columns; i++) values[i] = bf16_nearest(spread * random_gauss(random_at(key, i)));
    return (megamoe_tensor){
        .data = values, .dtype = MEGAMOE_BF16, .rank = 2, .extent = {(int64_t)rows, (int64_t)columns}};
}

/* FP8 with one power-of-two scale per block, as V4 files have it. */
static void make_shared(cli_weights *w, const char *name, uint64_t rows, uint64_t columns, uint64_t block,
                        megamoe_projection *p) {
    uint64_t block_rows = (rows + block - 1) / block, block_columns = (columns + block - 1) / block,
             key = random_key(0, name);
    uint8_t *codes = own(w, rows * columns, 1), *scales = own(w, block_rows * block_columns, 1), pool[256];
    int exponent;
    for (unsigned i = 0; i < 256; i++) pool[i] = (uint8_t)e4m3_nearest(64.0 * random_gauss(random_at(key, i)));
    for (uint64_t i = 0; i < rows * columns; i++) codes[i] = pool[random_at(key + 1, i) & 255];
    frexp(1.0 / (64.0 * sqrt((double)columns)), &exponent);
    memset(scales, 127 + exponent, block_rows * block_columns);
    p->codes =
        (megamoe_tensor){.data = codes, .dtype = MEGAMOE_E4M3, .rank = 2, .extent = {(int64_t)rows, (int64_t)columns}};
    p->scales = (megamoe_tensor){
        .data = scales, .dtype = MEGAMOE_E8M0, .rank = 2, .extent = {(int64_t)block_rows, (int64_t)block_columns}};
}

int cli_weights_make(const cli_shape *shape, const cli_range *experts, cli_weights *w) {
    const megamoe_shape *s = &shape->shape;
    unsigned group = s->group_size == 32 ? 32 : 16;
    uint32_t count = experts->end - experts->first;
    uint64_t h = s->hidden, i = s->intermediate;
    *w = (cli_weights){.desc = {.struct_size = sizeof w->desc, .shape = *s}};
    if (check_memory(s, count) != CLI_GOOD) return CLI_BAD_INPUT;
    cli_blocks *blocks = cli_blocks_new();
    cli_progress progress;
    cli_progress_start(&progress, "making weights");
    make_projection(w, blocks, "gate", count, i, h, group, &w->desc.gate);
    cli_progress_update(&progress, 1, 3);
    make_projection(w, blocks, "up", count, i, h, group, &w->desc.up);
    cli_progress_update(&progress, 2, 3);
    make_projection(w, blocks, "down", count, h, i, group, &w->desc.down);
    cli_progress_end(&progress);
    cli_blocks_free(blocks);
    w->desc.router_weight = make_bf16(w, "router", 1 / sqrt((double)h), s->expert_count, h);
    if (shape->shared) {
        uint64_t block = shape->shared_block ? shape->shared_block : 128;
        make_shared(w, "shared gate", i, h, block, &w->desc.shared_gate);
        make_shared(w, "shared up", i, h, block, &w->desc.shared_up);
        make_shared(w, "shared down", h, i, block, &w->desc.shared_down);
    }
    return CLI_GOOD;
}

void cli_weights_free(cli_weights *w) {
    for (unsigned i = 0; i < w->owned_count; i++) free(w->owned[i]);
    w->owned_count = 0;
}
