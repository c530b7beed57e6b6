/* Synthetic weights of a named shape in memory, for bench without a checkpoint and for selftest. */
#ifndef CLI_BENCH_WEIGHTS_H
#define CLI_BENCH_WEIGHTS_H

#include "shapes.h"

typedef struct cli_weights {
    megamoe_layer_desc desc;
    void *owned[24];
    unsigned owned_count;
} cli_weights;

/* Experts first..end-1 of the shape; CLI_GOOD, or CLI_BAD_INPUT if this machine lacks the memory. */
int cli_weights_make(const cli_shape *shape, const cli_range *experts, cli_weights *weights);
void cli_weights_free(cli_weights *weights);

#endif
