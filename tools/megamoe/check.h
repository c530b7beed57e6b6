/* One layer under examination: what is judged, the oracle, and the verdicts so far. */
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "bench_weights.h"
#include "cli.h"
#include "compare.h"

enum { CLI_VERDICTS_MAX = 8 };

typedef struct cli_examination {
    const cli_options *options;
    const megamoe_checkpoint *checkpoint;
    const cli_weights *weights; /* selftest: the layer is made of these, and there is no checkpoint */
    megamoe_device *device;     /* the backend that is judged, or NULL: a file is */
    megamoe_device *oracle;     /* the reference backend */
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

/* One layer of what is examined: of the checkpoint, or of the weights. */
megamoe_status cli_examined_layer(const cli_examination *e, megamoe_device *device, megamoe_activations activations,
                                  megamoe_layer **out);
/* The subject and the reference, and what was decided about them. */
megamoe_status cli_open_examined(cli_examination *e);
/* Memory for the stages of a batch of token_count. */
void cli_open_stages(cli_examination *e);
/* Ready for the next batch, or for the next layer: devices, checkpoint and input stay. */
void cli_forget_stages(cli_examination *e);
void cli_forget_layer(cli_examination *e);
const cli_verdict *cli_first_failure(const cli_examination *e); /* or NULL */

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

/* Runs the layer and judges every stage of e->got; OK whatever the verdicts. */
megamoe_status cli_judge_layer(cli_examination *e);

#endif
