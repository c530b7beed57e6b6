/* One safetensors file: 8 bytes of header length, a JSON header, then the data of its tensors without gaps.
 */
#include "checkpoint/safetensors.h"

#include "checkpoint/json_scan.h"
#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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

/* ---- the header ------------------------------------------------------------------------------------------
 */

/* Names are copied once, into blocks, because headers come in pieces. */
struct mm_name_block {
    struct mm_name_block *next;
    size_t used, size;
    char text[];
};
#define NAME_BLOCK_BYTES 65536

static const char *name_keep(mm_shard *shard, const char *name) {
    size_t length = strlen(name) + 1; /* at most MM_SCAN_STRING_MAX */
    struct mm_name_block *block = shard->names;
    if (!block || block->size - block->used < length) {
        block = malloc(sizeof *block + NAME_BLOCK_BYTES);
        if (!block) return NULL;
        *block = (struct mm_name_block){.next = shard->names, .size = NAME_BLOCK_BYTES};
        shard->names = block;
    }
    block->used += length;
    return memcpy(block->text + block->used - length, name, length);
}

/* One entry of the header, before it is checked. */
typedef struct entry {
    bool has_dtype, has_shape, has_offsets;
    char dtype[MM_SCAN_STRING_MAX];
    uint32_t rank;
    int64_t extent[4];
    uint64_t elements;
    bool too_many; /* the product of the shape does not fit */
    int64_t begin, end;
} entry;

static bool shape_scan(mm_json_scan *scan, entry *e) {
    bool first = true;
    int64_t extent;
    if (!mm_scan_open(scan, '[')) return false;
    e->elements = 1;
    while (mm_scan_next_item(scan, &first)) {
        if (!mm_scan_count(scan, &extent)) return false;
        if (e->rank == 32) return mm_scan_fail(scan, "more than 32 dimensions");
        if (e->rank < 4) e->extent[e->rank] = extent;
        e->rank++;
        e->too_many |= __builtin_mul_overflow(e->elements, (uint64_t)extent, &e->elements);
    }
    return scan->problem == NULL;
}

static bool offsets_scan(mm_json_scan *scan, entry *e) {
    bool first = true;
    return mm_scan_open(scan, '[') && mm_scan_next_item(scan, &first) && mm_scan_count(scan, &e->begin) &&
           mm_scan_next_item(scan, &first) && mm_scan_count(scan, &e->end) && !mm_scan_next_item(scan, &first);
}

/* {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, each once; other keys are for other readers.
 */
static bool entry_scan(mm_json_scan *scan, char *key, entry *e) {
    bool first = true, *seen;
    e->has_dtype = e->has_shape = e->has_offsets = e->too_many = false;
    e->rank = 0;
    if (!mm_scan_open(scan, '{')) return false;
    while (mm_scan_next_key(scan, &first, key)) {
        seen = strcmp(key, "dtype") == 0          ? &e->has_dtype
               : strcmp(key, "shape") == 0        ? &e->has_shape
               : strcmp(key, "data_offsets") == 0 ? &e->has_offsets
                                                  : NULL;
        if (seen && *seen) return mm_scan_fail(scan, "a duplicate key");
        if (seen) *seen = true;
        if (!(seen == &e->has_dtype     ? mm_scan_string(scan, e->dtype)
              : seen == &e->has_shape   ? shape_scan(scan, e)
              : seen == &e->has_offsets ? offsets_scan(scan, e)
                                        : mm_scan_skip(scan)))
            return mm_scan_fail(scan, "expected data_offsets of two whole numbers");
    }
    return scan->problem == NULL;
}

static megamoe_status bad_tensor(const mm_shard *shard, const char *name, const char *what) {
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s %s", shard->path, name, what);
}

static megamoe_status kind_find(const mm_shard *shard, const entry *e, mm_tensor *tensor) {
    for (size_t i = 0; i < KIND_COUNT; i++)
        if (strcmp(e->dtype, kinds[i].name) == 0) {
            tensor->kind = (uint8_t)i;
            return MEGAMOE_OK;
        }
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s has the unknown dtype '%.32s'", shard->path, tensor->name,
                   e->dtype);
}

/* The entry as a tensor; data points at the first byte after the header, and nothing is read there. */
static megamoe_status entry_check(const mm_shard *shard, const entry *e, const uint8_t *data, uint64_t data_bytes,
                                  mm_tensor *tensor) {
    uint64_t bits;
    char shape[128];
    if (!e->has_dtype || !e->has_shape || !e->has_offsets)
        return bad_tensor(shard, tensor->name,
                          !e->has_dtype   ? "has no dtype"
                          : !e->has_shape ? "has no shape"
                                          : "has no data_offsets");
    MM_TRY(kind_find(shard, e, tensor));
    if (e->begin > e->end || (uint64_t)e->end > data_bytes)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s: tensor %s has data_offsets [%" PRId64 ", %" PRId64 "], but the file holds %" PRIu64
                       " bytes of data",
                       shard->path, tensor->name, e->begin, e->end, data_bytes);
    if (e->too_many || __builtin_mul_overflow(e->elements, (uint64_t)kinds[tensor->kind].bits, &bits))
        return bad_tensor(shard, tensor->name, "has a shape whose size does not fit 64 bits");
    tensor->rank = (uint8_t)e->rank;
    memcpy(tensor->extent, e->extent, sizeof(int64_t) * (e->rank < 4 ? e->rank : 4));
    tensor->data = data + e->begin;
    tensor->bytes = (uint64_t)(e->end - e->begin);
    if (bits % 8 == 0 && bits / 8 == tensor->bytes) return MEGAMOE_OK;
    mm_tensor_shape_text(tensor, shape, sizeof shape);
    return mm_fail(MEGAMOE_CORRUPT_FILE,
                   "%s: tensor %s is %s %s, which takes %" PRIu64 " bytes, but its data_offsets give %" PRIu64,
                   shard->path, tensor->name, mm_tensor_dtype_name(tensor), shape, bits / 8, tensor->bytes);
}

static megamoe_status tensor_append(mm_shard *shard, const char *name, uint32_t number, mm_tensors *tensors,
                                    mm_tensor **out) {
    mm_tensor *tensor;
    if (tensors->count == tensors->capacity) {
        uint64_t capacity = tensors->capacity ? 2ull * tensors->capacity : 256;
        mm_tensor *grown = capacity > UINT32_MAX ? NULL : realloc(tensors->tensors, capacity * sizeof *grown);
        if (!grown) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the tensors of %s", shard->path);
        tensors->tensors = grown;
        tensors->capacity = (uint32_t)capacity;
    }
    tensor = &tensors->tensors[tensors->count];
    *tensor = (mm_tensor){.name = name_keep(shard, name), .shard = number};
    if (!tensor->name) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the names of %s", shard->path);
    *out = tensor;
    return MEGAMOE_OK;
}

/* Everything between the header's braces. `name` and `e` are room for one entry. */
static megamoe_status header_scan(mm_json_scan *scan, mm_shard *shard, uint64_t header_bytes, uint32_t number, entry *e,
                                  char *name, mm_tensors *tensors) {
    const uint8_t *data = shard->base + 8 + header_bytes;
    uint64_t data_bytes = shard->bytes - 8 - header_bytes;
    bool first = true, has_metadata = false;
    mm_scan_open(scan, '{');
    while (mm_scan_next_key(scan, &first, name)) {
        mm_tensor *tensor = NULL;
        if (strcmp(name, "__metadata__") == 0) {
            if (has_metadata || !mm_scan_skip(scan)) mm_scan_fail(scan, "a second __metadata__");
            has_metadata = true;
            continue;
        }
        MM_TRY(tensor_append(shard, name, number, tensors, &tensor));
        if (!entry_scan(scan, name, e))
            return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: byte %" PRIu64 ": tensor %s: %s", shard->path, scan->offset,
                           tensor->name, scan->problem);
        MM_TRY(entry_check(shard, e, data, data_bytes, tensor));
        tensors->count++;
    }
    if (mm_scan_end(scan)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: byte %" PRIu64 " of the header: %s", shard->path, scan->offset,
                   scan->problem);
}

static megamoe_status header_read(mm_shard *shard, uint64_t header_bytes, uint32_t number, mm_tensors *tensors) {
    struct {
        mm_json_scan scan;
        entry e;
        char name[MM_SCAN_STRING_MAX];
    } *room = malloc(sizeof *room);
    megamoe_status status;
    if (!room) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read the header of %s", shard->path);
    mm_scan_begin(&room->scan, shard->file, 8, 8 + header_bytes);
    status = header_scan(&room->scan, shard, header_bytes, number, &room->e, room->name, tensors);
    free(room);
    return status;
}

/* ---- the data --------------------------------------------------------------------------------------------
 */

static int by_place(const void *left, const void *right) {
    const mm_tensor *a = *(const mm_tensor *const *)left, *b = *(const mm_tensor *const *)right;
    if (a->data != b->data) return a->data < b->data ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes); /* empty tensors first */
}

/* The tensors must tile the data: overlaps would let one tensor show as another, holes and tails hide damage.
 */
static megamoe_status tiling_check(const mm_shard *shard, const mm_tensors *tensors, uint32_t first,
                                   const uint8_t *data, uint64_t data_bytes) {
    uint32_t count = tensors->count - first;
    const mm_tensor **order = malloc((count + 1ull) * sizeof *order);
    uint64_t end = 0;
    megamoe_status status = MEGAMOE_OK;
    if (!order) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to check %s", shard->path);
    for (uint32_t i = 0; i < count; i++) order[i] = &tensors->tensors[first + i];
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
                             "%s: bytes %" PRIu64 " to %" PRIu64 " of the data, before tensor %s, belong to no tensor",
                             shard->path, end, begin, order[i]->name);
        end = begin + order[i]->bytes;
    }
    free(order);
    if (status == MEGAMOE_OK && end != data_bytes)
        status = mm_fail(MEGAMOE_CORRUPT_FILE,
                         "%s: the tensors end at byte %" PRIu64 " of the data, but the file goes on to byte %" PRIu64,
                         shard->path, end, data_bytes);
    return status;
}

/* ---- the file --------------------------------------------------------------------------------------------
 */

static megamoe_status header_length(const mm_shard *shard, uint64_t *length) {
    uint8_t start[9] = {0};
    ssize_t got = pread(shard->file, start, sizeof start, 0);
    if (got < 0) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", shard->path, strerror(errno));
    if (got < 9)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has %" PRIu64 " bytes, too few for a safetensors header", shard->path,
                       shard->bytes);
    *length = 0;
    for (int i = 7; i >= 0; i--) *length = *length << 8 | start[i];
    if (*length > shard->bytes - 8)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s declares a header of %" PRIu64 " bytes, but the file has only %" PRIu64
                       "; is it a safetensors file?",
                       shard->path, *length, shard->bytes);
    if (*length > MM_HEADER_BYTES_MAX)
        return mm_fail(MEGAMOE_CORRUPT_FILE,
                       "%s declares a header of %" PRIu64 " bytes in a file of %" PRIu64
                       "; headers above %u bytes are refused",
                       shard->path, *length, shard->bytes, MM_HEADER_BYTES_MAX);
    if (*length < 2 || start[8] != '{')
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: the header of %" PRIu64 " bytes does not begin with '{'", shard->path,
                       *length);
    return MEGAMOE_OK;
}

static megamoe_status shard_map(mm_shard *shard, bool writable) {
    struct stat facts;
    shard->file = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused below, not waited for */
    if (shard->file < 0 || fstat(shard->file, &facts) != 0)
        return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", shard->path, strerror(errno));
    if (!S_ISREG(facts.st_mode)) return mm_fail(MEGAMOE_IO_ERROR, "%s is not a regular file", shard->path);
    shard->bytes = (uint64_t)facts.st_size;
    if (shard->bytes == 0) return MEGAMOE_OK; /* refused with its header, and cannot be mapped */
    shard->base = mmap(NULL, shard->bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_PRIVATE | MAP_NORESERVE,
                       shard->file, 0);
    if (shard->base != MAP_FAILED) return MEGAMOE_OK;
    shard->base = NULL;
    return mm_fail(MEGAMOE_IO_ERROR, "%s: cannot map %" PRIu64 " bytes: %s", shard->path, shard->bytes,
                   strerror(errno));
}

megamoe_status mm_shard_open(const char *path, bool writable, uint32_t number, mm_tensors *tensors) {
    mm_shard *shard = &tensors->shards[number];
    uint32_t first = tensors->count;
    uint64_t header_bytes = 0, data_bytes;
    shard->path = strdup(path);
    if (!shard->path) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", path);
    MM_TRY(shard_map(shard, writable));
    MM_TRY(header_length(shard, &header_bytes));
    MM_TRY(header_read(shard, header_bytes, number, tensors));
    data_bytes = shard->bytes - 8 - header_bytes;
    return tiling_check(shard, tensors, first, shard->base + 8 + header_bytes, data_bytes);
}

void mm_tensors_close(mm_tensors *tensors) {
    for (uint32_t i = 0; i < tensors->shard_count; i++) {
        mm_shard *shard = &tensors->shards[i];
        if (shard->base) munmap(shard->base, shard->bytes);
        if (shard->file >= 0) close(shard->file);
        free(shard->path);
        for (struct mm_name_block *block = shard->names, *next; block; block = next) {
            next = block->next;
            free(block);
        }
    }
    free(tensors->shards);
    free(tensors->tensors);
    *tensors = (mm_tensors){0};
}
