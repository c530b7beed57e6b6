/* What selftest sweeps: shapes, batches, and routings that are even, ragged, hot or leave experts empty. */
#ifndef CLI_SELFTEST_CASES_H
#define CLI_SELFTEST_CASES_H

#include "check.h"

typedef enum cli_selftest_routing {
    CLI_SELFTEST_EVEN,   /* each token's experts at random */
    CLI_SELFTEST_RAGGED, /* the n-th expert gets n times the rows of the first: every width of a tile */
    CLI_SELFTEST_HOT,    /* one expert is in every token's choice */
    CLI_SELFTEST_EMPTY,  /* every other expert is in none, and every fifth token has none */
    CLI_SELFTEST_COUNT
} cli_selftest_routing;

const char *cli_selftest_routing_name(cli_selftest_routing routing);
/* The experts of every token of the examination, distinct within a token; slots that find none are -1. */
void cli_selftest_route(cli_examination *e, cli_selftest_routing routing);

typedef struct cli_selftest_shape {
    const char *name, *text; /* for tables; for cli_shape_parse */
    bool mxfp4;              /* its sizes are multiples of 32 */
    bool wide;               /* a model's own sizes: few batches, because the definition is slow */
    bool quick;              /* is in the quick sweep, too */
} cli_selftest_shape;

/* The shapes of the full sweep; *count of them. */
const cli_selftest_shape *cli_selftest_shapes(unsigned *count);

#endif
