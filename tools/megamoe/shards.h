/*
 * Writes a directory of safetensors shards with an index, tensor by tensor: memory stays small whatever the
 * size. The directory appears under its name only when it is complete.
 */
#ifndef CLI_SHARDS_H
#define CLI_SHARDS_H

#include "cli.h"

typedef struct cli_planned {
    char *name;        /* owned by the plan */
    const char *dtype; /* as safetensors spells it */
    uint32_t rank;
    uint64_t extent[4];
    uint64_t rows, row_bytes; /* rows * row_bytes bytes; made a few rows at a time */
    size_t tag;               /* the caller's: tensors are reordered within their shard */
    uint32_t shard;
} cli_planned;

/* Fills rows first..first+count-1 of a tensor; false stops the writing after the source's own message. */
typedef bool (*cli_row_source)(void *context, const cli_planned *tensor, uint64_t first, uint64_t count,
                               uint8_t *bytes);

typedef struct cli_output_directory {
    char *path, *temporary;
} cli_output_directory;
int cli_output_begin(const char *path, cli_output_directory *directory);
int cli_output_text(const cli_output_directory *directory, const char *name, const char *text);
int cli_output_commit(cli_output_directory *directory);
void cli_output_discard(cli_output_directory *directory); /* after commit: only frees */

/* Sorts tensors into shards of at most shard_bytes (one tensor at least) in their order, and writes them. */
int cli_write_shards(const cli_output_directory *directory, cli_planned *tensors, size_t count, uint64_t shard_bytes,
                     cli_row_source source, void *context);

/* Writes a text file under a temporary name and renames it. */
int cli_write_file(const char *path, const char *text);

#endif
