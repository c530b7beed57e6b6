/*
 * Tensors in safetensors files, and nothing about models: opening, checking and mapping one file or a
 * directory of shards, finding a tensor by its name, and writing a file.
 *
 * Everything is checked from headers and file sizes before the first byte of data is read: the header's
 * length before it sizes anything, every offset in 64 bits, that the tensors tile the data exactly (no
 * overlap, no hole, nothing after the last), and that index and shards name the same tensors.
 */
#ifndef MM_CHECKPOINT_SAFETENSORS_H
#define MM_CHECKPOINT_SAFETENSORS_H

#include "checkpoint/anomalies.h"
#include "megamoe/megamoe.h"

/* Longest header that is read, as in the reference implementation of the format. */
#define MM_HEADER_BYTES_MAX 100000000u

typedef struct mm_tensor {
    const char *name;
    const uint8_t *data; /* in the mapping; no alignment is promised */
    uint64_t bytes;
    int64_t extent[4]; /* outermost first; of tensors with more dimensions, the first four */
    uint32_t shard;
    uint8_t rank;
    uint8_t kind; /* of element; read it through the functions below */
} mm_tensor;

megamoe_dtype mm_tensor_dtype(const mm_tensor *tensor);    /* 0: a type that nothing here computes with */
const char *mm_tensor_dtype_name(const mm_tensor *tensor); /* as the file spells it */
void mm_tensor_shape_text(const mm_tensor *tensor, char *text, size_t size); /* "[64, 32]" */

struct mm_name_block; /* private to safetensors.c */

typedef struct mm_shard {
    char *path;
    int file; /* stays open, so that a file that shrinks is noticed before its pages are read */
    uint8_t *base;
    uint64_t bytes;
    struct mm_name_block *names; /* where the names of its tensors are kept */
} mm_shard;

typedef struct mm_tensors {
    mm_shard *shards;
    uint32_t shard_count;
    mm_tensor *tensors; /* in order of name */
    uint32_t count, capacity;
} mm_tensors;

/*
 * A directory or one file. Stray files become anomalies. writable: pages may be changed in memory (never in
 * the file), which is how NaN scales are repaired.
 */
megamoe_status mm_tensors_open(const char *path, bool writable, mm_anomalies *anomalies, mm_tensors *tensors);
void mm_tensors_close(mm_tensors *tensors);
const mm_tensor *mm_tensors_find(const mm_tensors *tensors, const char *name); /* NULL: no such tensor */

/* One file: checks and maps it, and appends its tensors in the order of the header. `shard` is its number. */
megamoe_status mm_shard_open(const char *path, bool writable, uint32_t shard, mm_tensors *tensors);

#endif
