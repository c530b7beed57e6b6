/* One layer under examination: what is judged, the oracle, and the verdicts so far. */
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "cli.h"
#include "compare.h"

enum { CLI_VERDICTS_MAX = 8 };

typedef struct cli_examination {
    const cli_options *options;
    const megamoe_checkpoint *checkpoint;
    megamoe_device *device; /* the backend that is judged, or NULL: a file is */
    megamoe_device *oracle; /* the reference backend */
    uint32_t layer, token_count;
    cli_batch input; /* from --input, or made here */
    void *hidden;    /* owned if made here */

    megamoe_layer *subject, *reference;
    megamoe_layer_facts facts;
    megamoe_batch batch; /* with the experts of every token decided */
    megamoe_stages got, want;
    uint32_t written; /* fields of `got` */
    cli_verdict verdicts[CLI_VERDICTS_MAX];
    unsigned verdict_count;
    cli_verdict unquantized; /* nvfp4: distance to the layer with bf16 activations */
    uint64_t private_bytes;  /* the most seen, beyond mapped files */
    bool pass;
} cli_examination;

/* Makes hidden states with outliers, token ids and token count for a layer of this shape. */
void cli_make_input(cli_examination *e, const megamoe_shape *shape, uint32_t vocabulary);
/* Sends every token to min(K, loaded) distinct loaded experts. */
void cli_make_routing(cli_examination *e);
/* The stages in somebody else's file as if a backend had written them; CLI_GOOD or CLI_BAD_INPUT. */
int cli_read_against(const char *path, const megamoe_layer_facts *facts, uint32_t token_count, megamoe_stages *stages,
                     uint32_t *written);
bool cli_file_has(const char *path, const char *tensor);

/* A layer of one expert, to ask its router: the choice needs no experts, and may name any. */
megamoe_status cli_load_router(const cli_examination *e, megamoe_device *device, megamoe_layer **router);

/* Judges every stage of e->got; CLI_GOOD whatever the verdicts, or CLI_BAD_INPUT. */
int cli_judge_layer(cli_examination *e);

#endif
