/* See shards.h. Files are written under a directory of a temporary name, which is removed if anything fails.
 */
#include "shards.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t tensor_bytes(const cli_planned *tensor) {
    return tensor->rows * tensor->row_bytes;
}

static void remove_directory(const char *path) {
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char *file = cli_format("%s/%s", path, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) unlink(file);
        free(file);
    }
    if (directory) closedir(directory);
    rmdir(path);
}

int cli_output_begin(const char *path, cli_output_directory *directory) {
    *directory = (cli_output_directory){0};
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') length--;
    struct stat info;
    if (lstat(path, &info) == 0) return cli_fail("%s exists already; remove it or choose another name.", path);
    directory->path = cli_format("%.*s", (int)length, path);
    directory->temporary = cli_format("%.*s.partial-%ld", (int)length, path, (long)getpid());
    if (mkdir(directory->temporary, 0777) == 0) return CLI_GOOD;
    int result = cli_fail("%s cannot be created: %s.", directory->path, strerror(errno));
    free(directory->path);
    free(directory->temporary);
    *directory = (cli_output_directory){0};
    return result;
}

static int write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    if (!file) return cli_fail("%s cannot be created: %s.", path, strerror(errno));
    bool good = fputs(text, file) >= 0;
    good = fclose(file) == 0 && good;
    return good ? CLI_GOOD : cli_fail("%s cannot be written: %s.", path, strerror(errno));
}

int cli_output_text(const cli_output_directory *directory, const char *name, const char *text) {
    char *path = cli_format("%s/%s", directory->temporary, name);
    int result = write_text(path, text);
    free(path);
    return result;
}

int cli_output_commit(cli_output_directory *directory) {
    if (rename(directory->temporary, directory->path) != 0)
        return cli_fail("%s cannot be renamed to %s: %s.", directory->temporary, directory->path, strerror(errno));
    free(directory->temporary);
    directory->temporary = NULL;
    return CLI_GOOD;
}

void cli_output_discard(cli_output_directory *directory) {
    if (directory->temporary) remove_directory(directory->temporary);
    free(directory->temporary);
    free(directory->path);
    *directory = (cli_output_directory){0};
}

int cli_write_file(const char *path, const char *text) {
    char *temporary = cli_format("%s.partial-%ld", path, (long)getpid());
    int result = write_text(temporary, text);
    if (result == CLI_GOOD && rename(temporary, path) != 0)
        result = cli_fail("%s cannot be renamed to %s: %s.", temporary, path, strerror(errno));
    if (result != CLI_GOOD) unlink(temporary);
    free(temporary);
    return result;
}

/* The header of one shard as safetensors has it: 8 bytes of length, JSON padded with spaces to 8. */
static int write_header(FILE *file, const cli_planned *tensors, size_t first, size_t end) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t offset = 0;
    for (size_t i = first; i < end; i++) {
        const cli_planned *tensor = &tensors[i];
        json_t *shape = json_array();
        for (unsigned axis = 0; axis < tensor->rank; axis++)
            json_array_append_new(shape, json_integer((json_int_t)tensor->extent[axis]));
        uint64_t next = offset + tensor_bytes(tensor);
        json_object_set_new(header, tensor->name,
                            json_pack("{s:s,s:o,s:[I,I]}", "dtype", tensor->dtype, "shape", shape, "data_offsets",
                                      (json_int_t)offset, (json_int_t)next));
        offset = next;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (!text) return -1;
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    uint8_t prefix[8];
    for (unsigned i = 0; i < 8; i++) prefix[i] = (uint8_t)(padded >> 8 * i);
    int result =
        fwrite(prefix, 8, 1, file) == 1 && fprintf(file, "%s%*s", text, (int)(padded - length), "") >= 0 ? 0 : -1;
    free(text);
    return result;
}

typedef struct writing {
    const cli_planned *tensors;
    cli_row_source source;
    void *context;
    uint64_t done, total;
    cli_progress progress;
} writing;

enum { CHUNK_BYTES = 1 << 20 };

static uint64_t chunk_rows(const cli_planned *tensor) {
    return tensor->row_bytes && tensor->row_bytes < CHUNK_BYTES ? CHUNK_BYTES / tensor->row_bytes : 1;
}

static bool write_tensor(writing *state, FILE *file, const cli_planned *tensor, bool *stopped) {
    uint64_t rows = chunk_rows(tensor);
    uint8_t *chunk = cli_allocate(rows, tensor->row_bytes);
    bool good = true;
    for (uint64_t row = 0; good && tensor->row_bytes && row < tensor->rows; row += rows) {
        if (rows > tensor->rows - row) rows = tensor->rows - row;
        *stopped = !state->source(state->context, tensor, row, rows, chunk);
        good = !*stopped && fwrite(chunk, (size_t)tensor->row_bytes, (size_t)rows, file) == rows;
        state->done += rows * tensor->row_bytes;
        cli_progress_update(&state->progress, state->done, state->total);
    }
    free(chunk);
    return good;
}

static int write_shard(writing *state, const char *path, size_t first, size_t end) {
    bool stopped = false;
    FILE *file = fopen(path, "wb");
    bool good = file && write_header(file, state->tensors, first, end) == 0;
    for (size_t i = first; good && i < end; i++) good = write_tensor(state, file, &state->tensors[i], &stopped);
    if (file && fclose(file) != 0) good = false;
    if (good || stopped) return good ? CLI_GOOD : CLI_BAD_INPUT;
    return cli_fail("%s cannot be written: %s.", path, strerror(errno));
}

static int element_size(const char *dtype) {
    if (strcmp(dtype, "I64") == 0) return 8;
    if (strcmp(dtype, "F32") == 0) return 4;
    return strcmp(dtype, "BF16") == 0 ? 2 : 1;
}

/* Within a shard as the safetensors library orders them: wide elements first, then by name. */
static int compare_planned(const void *a, const void *b) {
    const cli_planned *x = a, *y = b;
    int sizes = element_size(y->dtype) - element_size(x->dtype);
    return sizes ? sizes : strcmp(x->name, y->name);
}

static uint32_t assign_shards(cli_planned *tensors, size_t count, uint64_t shard_bytes) {
    uint32_t shard = 0;
    uint64_t filled = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = tensor_bytes(&tensors[i]);
        if (filled && filled + bytes > shard_bytes) {
            shard++;
            filled = 0;
        }
        filled += bytes;
        tensors[i].shard = shard;
    }
    return shard + 1;
}

static char *shard_name(uint32_t shard, uint32_t shard_count) {
    return cli_format("model-%05u-of-%05u.safetensors", shard + 1, shard_count);
}

static int write_index(const cli_output_directory *directory, const cli_planned *tensors, size_t count,
                       uint32_t shard_count, uint64_t total) {
    json_t *map = json_object();
    for (size_t i = 0; i < count; i++) {
        char *name = shard_name(tensors[i].shard, shard_count);
        json_object_set_new(map, tensors[i].name, json_string(name));
        free(name);
    }
    json_t *index = json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = json_dumps(index, JSON_INDENT(2) | JSON_SORT_KEYS);
    int result = text ? cli_output_text(directory, "model.safetensors.index.json", text)
                      : cli_fail("the index cannot be written as JSON.");
    json_decref(index);
    free(text);
    return result;
}

int cli_write_shards(const cli_output_directory *directory, cli_planned *tensors, size_t count, uint64_t shard_bytes,
                     cli_row_source source, void *context) {
    writing state = {.tensors = tensors, .source = source, .context = context};
    uint32_t shard_count = assign_shards(tensors, count, shard_bytes);
    for (size_t i = 0; i < count; i++) state.total += tensor_bytes(&tensors[i]);
    int result = CLI_GOOD;
    cli_progress_start(&state.progress, "writing");
    state.progress.bytes = true;
    for (size_t first = 0, end = 0; first < count && result == CLI_GOOD; first = end) {
        uint32_t shard = tensors[first].shard;
        while (end < count && tensors[end].shard == shard) end++;
        qsort(&tensors[first], end - first, sizeof tensors[0], compare_planned);
        char *name = shard_name(shard, shard_count), *path = cli_format("%s/%s", directory->temporary, name);
        result = write_shard(&state, path, first, end);
        free(name);
        free(path);
    }
    cli_progress_end(&state.progress);
    return result == CLI_GOOD ? write_index(directory, tensors, count, shard_count, state.total) : result;
}
