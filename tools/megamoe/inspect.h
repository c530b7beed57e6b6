/* What inspect found, for its two ways of showing it: the terminal and a page. */
#ifndef CLI_INSPECT_H
#define CLI_INSPECT_H

#include "cli.h"

typedef struct cli_layer_range { /* consecutive layers that are alike */
    uint32_t first, last, count;
    megamoe_layer_info info;
} cli_layer_range;

typedef struct cli_inspection {
    const char *path;
    const megamoe_checkpoint *checkpoint;
    megamoe_layer_info *layers;
    uint32_t layer_count;
    cli_layer_range *ranges;
    uint32_t range_count;
    uint64_t bytes; /* of all layers shown */
} cli_inspection;

const char *cli_score_name(megamoe_score score);
char *cli_router_text(const megamoe_layer_info *info); /* the caller frees */
uint64_t cli_layer_bytes(const megamoe_layer_info *info);
/* Bytes of the fullest of `ranks` ranks: its experts of every layer, and router and shared experts in full.
 */
uint64_t cli_rank_bytes(const cli_inspection *inspection, uint32_t ranks);
/* Is it about the layers shown, or about none? */
bool cli_concerns(const cli_inspection *inspection, const megamoe_anomaly *anomaly);
int cli_inspect_html(const cli_inspection *inspection, const char *path, bool scanned);

#endif
