/*
 * Writing one safetensors file. Wider elements come first, so that behind a header of a multiple of 8 bytes
 * every tensor is aligned for its type; readers then need no copies.
 */
#include "megamoe/megamoe.h"

#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct item {
    const megamoe_named_tensor *source;
    const char *dtype;
    uint64_t bytes, width;
    uint32_t position; /* as the caller gave it */
} item;

/* FP4 codes are written as the bytes that published files hold: U8, two values each. */
static bool dtype_look_up(megamoe_dtype dtype, const char **name, uint64_t *width) {
    static const struct {
        const char *name;
        uint64_t width;
    } dtypes[] = {
        [MEGAMOE_BF16] = {"BF16", 2},    [MEGAMOE_F32] = {"F32", 4},      [MEGAMOE_E2M1X2] = {"U8", 1},
        [MEGAMOE_E4M3] = {"F8_E4M3", 1}, [MEGAMOE_E8M0] = {"F8_E8M0", 1}, [MEGAMOE_I32] = {"I32", 4},
        [MEGAMOE_I64] = {"I64", 8},      [MEGAMOE_U8] = {"U8", 1},        [MEGAMOE_I8] = {"I8", 1},
        [MEGAMOE_F16] = {"F16", 2},
    };
    if (dtype < MEGAMOE_BF16 || (size_t)dtype >= sizeof dtypes / sizeof dtypes[0]) return false;
    *name = dtypes[dtype].name;
    *width = dtypes[dtype].width;
    return true;
}

/* The extent as it is written: two FP4 values make one byte. */
static int64_t written_extent(const megamoe_tensor *tensor, uint32_t i) {
    bool halved = tensor->dtype == MEGAMOE_E2M1X2 && i + 1 == tensor->rank;
    return halved ? tensor->extent[i] / 2 : tensor->extent[i];
}

static megamoe_status item_check(const megamoe_named_tensor *named, item *out) {
    const megamoe_tensor *tensor = &named->tensor;
    int64_t stride = 1;
    bool has_strides = false;
    if (!named->name || strcmp(named->name, "__metadata__") == 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: a tensor has no name, or is called __metadata__");
    if (!dtype_look_up(tensor->dtype, &out->dtype, &out->width))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: tensor %s has dtype %d", named->name,
                       (int)tensor->dtype);
    if (tensor->rank > 4 ||
        (tensor->dtype == MEGAMOE_E2M1X2 && (!tensor->rank || tensor->extent[tensor->rank - 1] % 2)))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: tensor %s has rank %u, or an odd number of FP4 values",
                       named->name, tensor->rank);
    out->bytes = out->width;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        has_strides |= tensor->stride[i] != 0;
        if (tensor->extent[i] < 0 ||
            __builtin_mul_overflow(out->bytes, (uint64_t)written_extent(tensor, i), &out->bytes) ||
            out->bytes > INT64_MAX)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: extent %u of tensor %s is %" PRId64, i,
                           named->name, tensor->extent[i]);
    }
    for (uint32_t i = tensor->rank; has_strides && i-- > 0; stride *= written_extent(tensor, i))
        if (tensor->stride[i] != stride && tensor->extent[i] > 1)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: tensor %s is not contiguous", named->name);
    if (out->bytes && !tensor->data)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: tensor %s has no data", named->name);
    out->source = named;
    return MEGAMOE_OK;
}

static int by_width(const void *left, const void *right) {
    const item *a = left, *b = right;
    if (a->width != b->width) return a->width > b->width ? -1 : 1;
    return (a->position > b->position) - (a->position < b->position);
}

/* {"__metadata__":{"format":"pt"},...}: transformers refuses to load files without that entry. */
static megamoe_status header_make(const item *items, uint32_t count, char **text) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t begin = 0;
    megamoe_status status = MEGAMOE_OK;
    if (!header) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a header of %u tensors", count);
    for (uint32_t i = 0; i < count && status == MEGAMOE_OK; i++) {
        const megamoe_tensor *tensor = &items[i].source->tensor;
        const char *name = items[i].source->name;
        json_t *shape = json_array();
        for (uint32_t d = 0; d < tensor->rank; d++)
            json_array_append_new(shape, json_integer(written_extent(tensor, d)));
        if (json_object_get(header, name)) {
            status = mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: two tensors are called %s", name);
            json_decref(shape);
        } else if (json_object_set_new(header, name,
                                       json_pack("{s:s,s:o,s:[I,I]}", "dtype", items[i].dtype, "shape", shape,
                                                 "data_offsets", (json_int_t)begin,
                                                 (json_int_t)(begin + items[i].bytes))) != 0) {
            status = mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: the name '%.64s' is not UTF-8", name);
        }
        begin += items[i].bytes;
    }
    *text = status == MEGAMOE_OK ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (status == MEGAMOE_OK && !*text)
        status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a header of %u tensors", count);
    return status;
}

/* Names the file that was asked for: the temporary beside it is nobody's business. */
static megamoe_status write_fail(const char *path, int error) {
    return mm_fail(MEGAMOE_IO_ERROR, "%s cannot be written: %s", path, strerror(error));
}

static megamoe_status bytes_write(int file, const char *path, const void *data, uint64_t bytes) {
    const char *at = data;
    while (bytes) {
        ssize_t put = write(file, at, bytes < (1u << 30) ? (size_t)bytes : 1u << 30);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return write_fail(path, put < 0 ? errno : ENOSPC);
        at += put;
        bytes -= (uint64_t)put;
    }
    return MEGAMOE_OK;
}

static megamoe_status file_write(int file, const char *path, const char *header, const item *items, uint32_t count) {
    uint64_t text_bytes = strlen(header), header_bytes = (text_bytes + 7) & ~7ull;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(header_bytes >> 8 * i);
    MM_TRY(bytes_write(file, path, length, sizeof length));
    MM_TRY(bytes_write(file, path, header, text_bytes));
    MM_TRY(bytes_write(file, path, "        ", header_bytes - text_bytes));
    for (uint32_t i = 0; i < count; i++) MM_TRY(bytes_write(file, path, items[i].source->tensor.data, items[i].bytes));
    if (fsync(file) != 0) return write_fail(path, errno);
    return MEGAMOE_OK;
}

/* The rename itself must reach the disk too. File systems that cannot sync a directory are left to
 * themselves. */
static void directory_sync(const char *path) {
    const char *slash = strrchr(path, '/');
    char directory[PATH_MAX];
    int file;
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    file = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return;
    fsync(file);
    close(file);
}

static megamoe_status replace(const char *path, const char *header, const item *items, uint32_t count) {
    static atomic_uint serial;
    char temporary[PATH_MAX];
    int used =
        snprintf(temporary, sizeof temporary, "%s.%ld-%u.part", path, (long)getpid(), atomic_fetch_add(&serial, 1));
    struct stat facts;
    int file;
    megamoe_status status;
    if (stat(path, &facts) == 0 && !S_ISREG(facts.st_mode))
        return mm_fail(MEGAMOE_IO_ERROR, "%s is not a regular file; the rename would replace it", path);
    if (used < 0 || (size_t)used >= sizeof temporary)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: the path is too long: %.64s...", path);
    file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return write_fail(path, errno);
    status = file_write(file, path, header, items, count);
    if (close(file) != 0 && status == MEGAMOE_OK) status = write_fail(path, errno);
    if (status == MEGAMOE_OK && rename(temporary, path) != 0) status = write_fail(path, errno);
    if (status != MEGAMOE_OK) {
        unlink(temporary);
        return status;
    }
    directory_sync(path);
    return MEGAMOE_OK;
}

megamoe_status megamoe_tensors_write(const char *path, const megamoe_named_tensor *tensors, uint32_t count) {
    item *items;
    char *header = NULL;
    megamoe_status status = MEGAMOE_OK;
    if (!path || (count && !tensors))
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "tensors_write: path or tensors is NULL");
    items = calloc(count + 1ull, sizeof *items);
    if (!items) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to write %u tensors", count);
    for (uint32_t i = 0; i < count && status == MEGAMOE_OK; i++) {
        items[i].position = i;
        status = item_check(&tensors[i], &items[i]);
    }
    if (status == MEGAMOE_OK) {
        qsort(items, count, sizeof *items, by_width);
        status = header_make(items, count, &header);
    }
    if (status == MEGAMOE_OK) status = replace(path, header, items, count);
    free(header);
    free(items);
    return status;
}
