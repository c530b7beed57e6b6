/*
 * The command's own small library: options, messages, tables, progress, files. The command sees libmegamoe
 * only through megamoe.h, so that everything it does can be done by any other program.
 */
#ifndef CLI_H
#define CLI_H

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>

#include "megamoe/megamoe.h"

enum { CLI_GOOD = 0, CLI_CHECK_FAILED = 1, CLI_BAD_INPUT = 2 }; /* exit statuses */

/* ---- options (options.c) --------------------------------------------------------------------------------
 */

typedef struct cli_range { /* A:B, A included, B not; all zero: not given */
    uint32_t first, end;
} cli_range;

/* Everything that can be typed. Strings are borrowed from argv; zero means not given. */
typedef struct cli_options {
    const char *words[2]; /* CKPT, OUT, ... */
    char **arguments;     /* the command line without the program, for records; NULL ends it */
    bool json, help;
    unsigned backend, activations, input_global, intermediate_global, routing_weight; /* the library's enums */
    bool strict, lax_routing, repair_nan_scales, no_scan, batch_invariant, shared_unclamped;
    uint32_t threads, ranks;
    cli_range experts, layers;
    bool layer_given;
    uint32_t layer;
    const char *input, *output, *dump_stages, *against, *html, *csv, *calibration, *report;
    const char *shape, *tokens, *shard_size;
    unsigned routing, format, scale;
    bool scan, separate, mtp, quick;
    uint32_t runs, seed;
} cli_options;

enum { CLI_ROUTING_EP, CLI_ROUTING_LOCAL };
enum {
    CLI_FORMAT_DEFAULT,
    CLI_FORMAT_MODELOPT,
    CLI_FORMAT_COMPRESSED_TENSORS,
    CLI_FORMAT_MXFP4,
    CLI_FORMAT_FUSED,      /* ModelOpt's stacks [E, out, in] */
    CLI_FORMAT_TRANSPOSED, /* the same as Llama-4 has them, [E, in, out] */
    CLI_FORMAT_BF16,
    CLI_FORMAT_FP8,     /* blocks with F32 scales */
    CLI_FORMAT_FP8_E8M0 /* blocks with power-of-two scales */
};
enum { CLI_SCALE_MAX, CLI_SCALE_4OVER6, CLI_SCALE_SEARCH };

typedef struct cli_command {
    const char *name, *words, *summary;
    const char *details;  /* what --help says below the usage line */
    const char *examples; /* command lines, one a line */
    const char *options;  /* names of the options it takes, separated by spaces */
    unsigned words_min, words_max;
    int (*run)(const cli_options *options);
} cli_command;

extern const cli_command cli_inspect, cli_run, cli_check, cli_bench, cli_synth, cli_quantize, cli_doctor, cli_selftest;

/* Parses what follows the command's name. 0, or CLI_BAD_INPUT after the message. */
int cli_parse(const cli_command *command, int count, char **arguments, cli_options *options);
void cli_print_help(const cli_command *command);
/* The same for programs: what make_docs.py turns into the man page and the completion. */
json_t *cli_help_json(const cli_command *command);
const char *cli_format_name(unsigned format); /* as --format spells it */
/* The candidate nearest to `word` in a NULL-terminated list, or NULL if none is near. */
const char *cli_nearest(const char *word, const char *const *candidates);
/* Reads "1,8,64" into at most `capacity` positive numbers; 0 after the message if it is not such a list. */
unsigned cli_parse_list(const char *text, const char *option, uint32_t *numbers, unsigned capacity);

/* CLI_BAD_INPUT after the message if a file to be written is one that is read (files.c). */
int cli_check_files(const cli_options *options);

/* The value after "name : " in a file of such lines, as /proc has them (machine.c). */
bool cli_proc_line(const char *path, const char *name, char *value, size_t room);

/* ---- messages and memory (output.c) ---------------------------------------------------------------------
 */

void cli_json_errors(bool on);                                               /* errors go to stdout as JSON, too */
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2))); /* bad usage; CLI_BAD_INPUT */
int cli_fail_status(megamoe_status status);                                  /* the library's sentence; CLI_BAD_INPUT */
int cli_print_json(json_t *object); /* prints and releases; CLI_GOOD if all was written */
int cli_flush(void);                /* CLI_GOOD if stdout took everything */
/* Names come from files that strangers made: what would steer a terminal is printed as '?'. */
void cli_print_plain(FILE *stream, const char *text, size_t length);
json_t *cli_json_number(double value);         /* null where JSON has no number */
void *cli_allocate(size_t count, size_t size); /* zeroed; ends the command if there is no memory */
char *cli_format(const char *format, ...) __attribute__((format(printf, 1, 2))); /* the caller frees */
const char *cli_bytes_text(double bytes, char text[16]);                         /* "14.27 GB" */
const char *cli_color(const char *code); /* the escape for it if stdout is a terminal that wants colors, or "" */
unsigned cli_terminal_width(void);       /* of stdout; 80 if it is none */
double cli_seconds(void);                /* monotonic */

typedef struct cli_progress {
    const char *label;
    bool bytes; /* what is counted are bytes: their rate is shown too */
    double started, drawn;
    bool visible;
} cli_progress;
/* A bar on stderr, only if that is a terminal and only once the work has taken a second. */
void cli_progress_start(cli_progress *progress, const char *label);
void cli_progress_update(cli_progress *progress, uint64_t done, uint64_t total);
void cli_progress_end(cli_progress *progress);

/* ---- tables (table.c) -----------------------------------------------------------------------------------
 */

typedef struct cli_table cli_table;
/* columns: "<layers|>experts|..."; '<' left, '>' right. The last left column takes what the terminal leaves.
 */
cli_table *cli_table_new(const char *columns);
void cli_table_add(cli_table *table, const char *format, ...) __attribute__((format(printf, 2, 3))); /* cells: tab */
void cli_table_print(cli_table *table, unsigned indent);                                             /* and frees */
void cli_table_free(cli_table *table);
/* A paragraph whose first word goes where the line stands, at column `indent`; further lines begin there. */
void cli_print_wrapped(const char *text, unsigned indent);

/* ---- a checkpoint, a device and a layer from the options (session.c) -------------------------------------
 */

typedef struct cli_session {
    megamoe_checkpoint *checkpoint;
    megamoe_device *device;
    megamoe_layer *layer;
} cli_session;
megamoe_status cli_open_checkpoint(const cli_options *options, const char *path, megamoe_checkpoint **checkpoint);
megamoe_status cli_open_device(const cli_options *options, megamoe_backend backend, uint32_t max_tokens,
                               megamoe_device **device);
megamoe_layer_options cli_layer_options(const cli_options *options);
megamoe_status cli_load_layer(const cli_options *options, megamoe_device *device, const megamoe_checkpoint *checkpoint,
                              uint32_t layer, megamoe_activations activations, megamoe_layer **out);
/* What the device has planned beyond mapped files and the caller's memory: "214 MB", on a GPU with the GPU's own. */
const char *cli_memory_text(const megamoe_device *device, char text[48]);
void cli_session_close(cli_session *session);

/* ---- a batch read from a file (batch.c) -------------------------------------------------------------------
 */

typedef struct cli_batch {
    megamoe_checkpoint *file; /* the input, while the batch borrows from it */
    const char *prefix;       /* of its tensors' names */
    megamoe_batch batch;
    int32_t *token_ids, *expert_ids; /* owned copies */
    float *expert_weights;
} cli_batch;
/* Tensors PREFIXhidden, token_ids, expert_ids and expert_weights of `path`, checked against the shape. 0 or
 * CLI_BAD_INPUT. */
int cli_batch_read(const char *path, const char *prefix, const megamoe_shape *shape, cli_batch *batch);
void cli_batch_free(cli_batch *batch);
/* Says which shape the tensor has and which it needs; CLI_BAD_INPUT. */
int cli_wrong_shape(const char *path, const char *name, const megamoe_tensor *tensor, uint32_t rank,
                    const int64_t *wanted);

/* ---- stages (stages.c) ------------------------------------------------------------------------------------
 */

enum { /* bits of `written`: the fields of megamoe_stages in their order */
       CLI_HAS_IDS = 1 << 0,
       CLI_HAS_WEIGHTS = 1 << 1,
       CLI_HAS_X_CODES = 1 << 2,
       CLI_HAS_X_SCALES = 1 << 3,
       CLI_HAS_X_GLOBALS = 1 << 4,
       CLI_HAS_L1 = 1 << 5,
       CLI_HAS_H = 1 << 6,
       CLI_HAS_H_CODES = 1 << 7,
       CLI_HAS_H_SCALES = 1 << 8,
       CLI_HAS_H_GLOBALS = 1 << 9,
       CLI_HAS_L2 = 1 << 10,
       CLI_HAS_SHARED = 1 << 11,
       CLI_HAS_OUTPUT = 1 << 12,
       CLI_HAS_LOGITS = 1 << 13
};

/* Allocates every field that a layer of these facts has (magnitudes and logits only if asked). */
void cli_stages_allocate(megamoe_stages *stages, const megamoe_layer_facts *facts, uint32_t token_count, bool oracle);
void cli_stages_free(megamoe_stages *stages);

#endif
