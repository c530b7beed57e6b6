/* The measurement of bench, for other commands that want one. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"

/* What `megamoe bench` does with these options: a table on stdout unless they ask for JSON, and the report of --json,
 * which the caller releases. CLI_GOOD, or CLI_BAD_INPUT after the message. */
int cli_bench_run(const cli_options *options, json_t **report);

#endif
