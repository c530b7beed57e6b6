/*
 * A JSON reader that pulls values out of a file one by one and keeps nothing: for safetensors headers and
 * indexes, which hold hundreds of thousands of entries and may come from anywhere. The first problem ends the
 * scan: every function then fails, and `problem` and `offset` say what and where. Config files are read with
 * jansson instead.
 */
#ifndef MM_CHECKPOINT_JSON_SCAN_H
#define MM_CHECKPOINT_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MM_SCAN_STRING_MAX 4096 /* longest string, with its terminator */
#define MM_SCAN_DEPTH_MAX 64    /* deepest nesting of a value that is skipped */

typedef struct mm_json_scan {
    int file;
    uint64_t position, end;           /* of the bytes in the file that have not been read */
    uint32_t at, have;                /* in buffer */
    const char *problem;              /* NULL: none yet */
    uint64_t offset;                  /* of the problem, in the file */
    char skipped[MM_SCAN_STRING_MAX]; /* strings inside values that are skipped */
    uint8_t buffer[16384];
} mm_json_scan;

/* Bytes begin..end of the file hold one value and nothing else but white space. */
void mm_scan_begin(mm_json_scan *scan, int file, uint64_t begin, uint64_t end);
bool mm_scan_end(mm_json_scan *scan);                       /* nothing is left, and there was no problem */
bool mm_scan_fail(mm_json_scan *scan, const char *problem); /* false; the first problem stays */

char mm_scan_peek(mm_json_scan *scan); /* the next byte that is not white space; 0: none */

/*
 * Walks an object or array: open it, then call next until it is false, each time reading one value.
 *     bool first = true;
 *     if (mm_scan_open(scan, '{')) while (mm_scan_next_key(scan, &first, key)) ...value...
 */
bool mm_scan_open(mm_json_scan *scan, char bracket);
bool mm_scan_next_key(mm_json_scan *scan, bool *first, char *key /* [MM_SCAN_STRING_MAX] */);
bool mm_scan_next_item(mm_json_scan *scan, bool *first);

/* UTF-8 without NUL, escapes decoded, terminated. */
bool mm_scan_string(mm_json_scan *scan, char *text /* [MM_SCAN_STRING_MAX] */);
/* A whole number from 0 to 2^63 - 1, without sign, fraction or exponent. */
bool mm_scan_count(mm_json_scan *scan, int64_t *count);
bool mm_scan_skip(mm_json_scan *scan); /* any value */

#endif
