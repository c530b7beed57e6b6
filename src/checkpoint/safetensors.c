/* One safetensors file: 8 bytes of header length, a JSON header, then the data of its tensors without gaps.
 */
#include "checkpoint/safetensors.h"

#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Every element type the format knows; the ones we do not compute with are still sized and checked. */
static const struct {
    const char *name;
    uint8_t bits;
    megamoe_dtype dtype;
} kinds[] = {
    {"BOOL", 8, 0},
    {"U8", 8, MEGAMOE_U8},
    {"I8", 8, MEGAMOE_I8},
    {"I16", 16, 0},
    {"U16", 16, 0},
    {"I32", 32, MEGAMOE_I32},
    {"U32", 32, 0},
    {"I64", 64, MEGAMOE_I64},
    {"U64", 64, 0},
    {"F64", 64, 0},
    {"F32", 32, MEGAMOE_F32},
    {"F16", 16, MEGAMOE_F16},
    {"C64", 64, 0},
    {"BF16", 16, MEGAMOE_BF16},
    {"F8_E4M3", 8, MEGAMOE_E4M3},
    {"F8_E5M2", 8, 0},
    {"F8_E8M0", 8, MEGAMOE_E8M0},
    {"F4", 4, MEGAMOE_E2M1X2},
    {"F6_E2M3", 6, 0},
    {"F6_E3M2", 6, 0},
};
#define KIND_COUNT (sizeof kinds / sizeof kinds[0])

megamoe_dtype mm_tensor_dtype(const mm_tensor *tensor) {
    return kinds[tensor->kind].dtype;
}

const char *mm_tensor_dtype_name(const mm_tensor *tensor) {
    return kinds[tensor->kind].name;
}

void mm_tensor_shape_text(const mm_tensor *tensor, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "[");
    uint32_t shown = tensor->rank < 4 ? tensor->rank : 4;
    for (uint32_t i = 0; i < shown && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRId64, i ? ", " : "", tensor->extent[i]);
    if (used < size) snprintf(text + used, size - used, tensor->rank > 4 ? ", ...]" : "]");
}

static megamoe_status bad_tensor(const char *path, const char *name, const char *what) {
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s %s", path, name, what);
}

/* Reads shape, checks the product in 64 bits, and gives the size in bits. */
static megamoe_status shape_read(const char *path, const json_t *shape, mm_tensor *tensor, uint64_t *bits) {
    size_t rank = json_array_size(shape);
    if (!json_is_array(shape)) return bad_tensor(path, tensor->name, "has no shape");
    if (rank > 32) return bad_tensor(path, tensor->name, "has more than 32 dimensions");
    tensor->rank = (uint8_t)rank;
    *bits = kinds[tensor->kind].bits;
    for (size_t i = 0; i < rank; i++) {
        const json_t *extent = json_array_get(shape, i);
        json_int_t value = json_integer_value(extent);
        if (!json_is_integer(extent) || value < 0)
            return bad_tensor(path, tensor->name, "has an extent that is not a whole number");
        if (i < 4) tensor->extent[i] = value;
        if (__builtin_mul_overflow(*bits, (uint64_t)value, bits))
            return bad_tensor(path, tensor->name, "has a shape whose product does not fit 64 bits");
    }
    return MEGAMOE_OK;
}

static megamoe_status kind_read(const char *path, const json_t *dtype, mm_tensor *tensor) {
    const char *name = json_string_value(dtype);
    if (!name) return bad_tensor(path, tensor->name, "has no dtype");
    for (size_t i = 0; i < KIND_COUNT; i++)
        if (strcmp(name, kinds[i].name) == 0) {
            tensor->kind = (uint8_t)i;
            return MEGAMOE_OK;
        }
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s has the unknown dtype '%.32s'", path, tensor->name,
                   name);
}

/* data points at the first byte after the header; nothing is read there. */
static megamoe_status tensor_read(const mm_shard *shard, const json_t *entry, const uint8_t *data,
                                  uint64_t data_bytes, mm_tensor *tensor) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *begin_json = json_array_get(offsets, 0), *end_json = json_array_get(offsets, 1);
    json_int_t begin = json_integer_value(begin_json), end = json_integer_value(end_json);
    uint64_t bits = 0;
    char shape[128];
    if (!json_is_object(entry)) return bad_tensor(shard->path, tensor->name, "is not described by an object");
    MM_TRY(kind_read(shard->path, json_object_get(entry, "dtype"), tensor));
    MM_TRY(shape_read(shard->path, json_object_get(entry, "shape"), tensor, &bits));
    if (json_array_size(offsets) != 2 || !json_is_integer(begin_json) || !json_is_integer(end_json))
        return bad_tensor(shard->path, tensor->name, "has no data_offsets of two whole numbers");
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s: tensor %s has data_offsets [%" JSON_INTEGER_FORMAT ", %" JSON_INTEGER_FORMAT
                       "], but the file holds %" PRIu64 " bytes of data",
                       shard->path, tensor->name, begin, end, data_bytes);
    tensor->bytes = (uint64_t)(end - begin);
    tensor->data = data + begin;
    if (bits % 8 != 0 || bits / 8 != tensor->bytes) {
        mm_tensor_shape_text(tensor, shape, sizeof shape);
        return mm_fail(
            MEGAMOE_CORRUPT_FILE,
            "%s: tensor %s is %s %s, which takes %" PRIu64 " bytes, but its data_offsets give %" PRIu64,
            shard->path, tensor->name, mm_tensor_dtype_name(tensor), shape, bits / 8, tensor->bytes);
    }
    return MEGAMOE_OK;
}

static int by_place(const void *left, const void *right) {
    const mm_tensor *a = *(const mm_tensor *const *)left, *b = *(const mm_tensor *const *)right;
    if (a->data != b->data) return a->data < b->data ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes); /* empty tensors first */
}

/* The tensors must tile the data: overlaps would let one tensor show as another, holes and tails hide damage.
 */
static megamoe_status tiling_check(const mm_shard *shard, const mm_tensor *tensors, uint32_t count,
                                   const uint8_t *data, uint64_t data_bytes) {
    const mm_tensor **order = malloc((count + 1) * sizeof *order);
    uint64_t end = 0;
    megamoe_status status = MEGAMOE_OK;
    if (!order) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to check %s", shard->path);
    for (uint32_t i = 0; i < count; i++) order[i] = &tensors[i];
    qsort(order, count, sizeof *order, by_place);
    for (uint32_t i = 0; i < count && status == MEGAMOE_OK; i++) {
        uint64_t begin = (uint64_t)(order[i]->data - data);
        if (begin < end)
            status = mm_fail(MEGAMOE_CORRUPT_FILE,
                             "%s: tensor %s begins at byte %" PRIu64
                             " of the data, inside tensor %s, which ends at %" PRIu64,
                             shard->path, order[i]->name, begin, order[i - 1]->name, end);
        else if (begin > end)
            status = mm_fail(MEGAMOE_CORRUPT_FILE,
                             "%s: bytes %" PRIu64 " to %" PRIu64
                             " of the data, before tensor %s, belong to no tensor",
                             shard->path, end, begin, order[i]->name);
        end = begin + order[i]->bytes;
    }
    free(order);
    if (status == MEGAMOE_OK && end != data_bytes)
        status = mm_fail(MEGAMOE_CORRUPT_FILE,
                         "%s: the tensors end at byte %" PRIu64
                         " of the data, but the file goes on to byte %" PRIu64,
                         shard->path, end, data_bytes);
    return status;
}

/* Appends the header's tensors, with names in one allocation of the shard. */
static megamoe_status tensors_read(mm_shard *shard, const json_t *header, uint64_t header_bytes,
                                   uint32_t number, mm_tensors *tensors) {
    const uint8_t *data = shard->base + 8 + header_bytes;
    uint64_t data_bytes = shard->bytes - 8 - header_bytes;
    uint32_t first = tensors->count;
    size_t count = json_object_size(header), name_bytes = 0;
    const char *key;
    char *name;
    json_t *entry;
    json_object_foreach((json_t *)header, key, entry) name_bytes += strlen(key) + 1;
    if (tensors->count + count > tensors->capacity) {
        size_t capacity = 2 * (tensors->count + count);
        mm_tensor *grown = capacity > UINT32_MAX ? NULL : realloc(tensors->tensors, capacity * sizeof *grown);
        if (!grown)
            return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the %zu tensors of %s", count, shard->path);
        tensors->tensors = grown;
        tensors->capacity = (uint32_t)capacity;
    }
    shard->names = name = malloc(name_bytes + 1);
    if (!name) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the names of %s", shard->path);
    json_object_foreach((json_t *)header, key, entry) {
        mm_tensor *tensor = &tensors->tensors[tensors->count];
        if (strcmp(key, "__metadata__") == 0) continue;
        memset(tensor, 0, sizeof *tensor);
        tensor->shard = number;
        tensor->name = name;
        name = stpcpy(name, key) + 1;
        MM_TRY(tensor_read(shard, entry, data, data_bytes, tensor));
        tensors->count++;
    }
    return tiling_check(shard, tensors->tensors + first, tensors->count - first, data, data_bytes);
}

typedef struct header_stream {
    int file;
    uint64_t position, end;
} header_stream;

/* The header is read in pieces, so that its length sizes no allocation and a shrinking file cannot fault. */
static size_t header_piece(void *buffer, size_t size, void *context) {
    header_stream *stream = context;
    uint64_t left = stream->end - stream->position;
    ssize_t got = pread(stream->file, buffer, left < size ? (size_t)left : size, (off_t)stream->position);
    if (got < 0) return (size_t)-1;
    stream->position += (uint64_t)got;
    return (size_t)got;
}

static megamoe_status header_length(const mm_shard *shard, uint64_t *length) {
    uint8_t start[9] = {0};
    ssize_t got = pread(shard->file, start, sizeof start, 0);
    if (got < 0) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", shard->path, strerror(errno));
    if (got < 9)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has %" PRIu64 " bytes, too few for a safetensors header",
                       shard->path, shard->bytes);
    *length = 0;
    for (int i = 7; i >= 0; i--) *length = *length << 8 | start[i];
    if (*length > shard->bytes - 8)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s declares a header of %" PRIu64 " bytes, but the file has only %" PRIu64,
                       shard->path, *length, shard->bytes);
    if (*length > MM_HEADER_BYTES_MAX)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s declares a header of %" PRIu64 " bytes in a file of %" PRIu64
                       "; headers above %u bytes are refused",
                       shard->path, *length, shard->bytes, MM_HEADER_BYTES_MAX);
    if (*length < 2 || start[8] != '{')
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: the header of %" PRIu64 " bytes does not begin with '{'",
                       shard->path, *length);
    return MEGAMOE_OK;
}

static megamoe_status shard_map(mm_shard *shard, bool writable) {
    struct stat facts;
    shard->file =
        open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused below, not waited for */
    if (shard->file < 0 || fstat(shard->file, &facts) != 0)
        return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", shard->path, strerror(errno));
    if (!S_ISREG(facts.st_mode)) return mm_fail(MEGAMOE_IO_ERROR, "%s is not a regular file", shard->path);
    shard->bytes = (uint64_t)facts.st_size;
    if (shard->bytes == 0) return MEGAMOE_OK; /* refused with its header, and cannot be mapped */
    shard->base = mmap(NULL, shard->bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                       MAP_PRIVATE | MAP_NORESERVE, shard->file, 0);
    if (shard->base != MAP_FAILED) return MEGAMOE_OK;
    shard->base = NULL;
    return mm_fail(MEGAMOE_IO_ERROR, "%s: cannot map %" PRIu64 " bytes: %s", shard->path, shard->bytes,
                   strerror(errno));
}

megamoe_status mm_shard_open(const char *path, bool writable, uint32_t number, mm_tensors *tensors) {
    mm_shard *shard = &tensors->shards[number];
    header_stream stream = {.position = 8};
    uint64_t length = 0;
    json_error_t error;
    json_t *header;
    megamoe_status status;
    shard->path = strdup(path);
    if (!shard->path) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", path);
    MM_TRY(shard_map(shard, writable));
    MM_TRY(header_length(shard, &length));
    stream.file = shard->file;
    stream.end = 8 + length;
    header = json_load_callback(header_piece, &stream, JSON_REJECT_DUPLICATES, &error);
    if (!header)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: byte %d of the header: %s", path, error.position,
                       error.text);
    status = json_is_object(header)
                 ? tensors_read(shard, header, length, number, tensors)
                 : mm_fail(MEGAMOE_CORRUPT_FILE, "%s: the header is not a JSON object", path);
    json_decref(header);
    return status;
}

void mm_tensors_close(mm_tensors *tensors) {
    for (uint32_t i = 0; i < tensors->shard_count; i++) {
        mm_shard *shard = &tensors->shards[i];
        if (shard->base) munmap(shard->base, shard->bytes);
        if (shard->file >= 0) close(shard->file);
        free(shard->path);
        free(shard->names);
    }
    free(tensors->shards);
    free(tensors->tensors);
    *tensors = (mm_tensors){0};
}
