/* Reads the vector files of tests/golden: lines of fields separated by spaces; # begins a comment line. */
#ifndef TESTS_NUMERICS_GOLDEN_H
#define TESTS_NUMERICS_GOLDEN_H

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct golden {
    FILE *file;
    const char *path;
    unsigned line_number, vectors; /* vectors read so far: a test asserts that there were some */
    char line[512];
    char *cursor; /* the next field */
} golden;

/* Tests run in the root of the source tree. */
static inline void golden_open(golden *g, const char *path) {
    memset(g, 0, sizeof *g);
    g->path = path;
    g->file = fopen(path, "r");
    if (!g->file) fail_msg("cannot open %s; run the tests from the root of the source tree", path);
}

/* Steps to the next vector; at the end closes the file, asserts that it held `expected` vectors, returns
 * false. */
static inline bool golden_next(golden *g, unsigned expected) {
    while (fgets(g->line, sizeof g->line, g->file)) {
        g->line_number++;
        if (!strchr(g->line, '\n')) fail_msg("%s:%u: the line is too long", g->path, g->line_number);
        if (g->line[0] == '#') continue;
        g->cursor = g->line;
        g->vectors++;
        return true;
    }
    fclose(g->file);
    if (g->vectors < expected) fail_msg("%s holds %u vectors, not %u", g->path, g->vectors, expected);
    return false;
}

static inline const char *golden_word(golden *g) {
    char *word = g->cursor + strspn(g->cursor, " ");
    size_t length = strcspn(word, " \n");
    if (length == 0) fail_msg("%s:%u: a field is missing", g->path, g->line_number);
    g->cursor = word + length;
    if (*g->cursor) *g->cursor++ = '\0';
    return word;
}

static inline uint32_t golden_hex(golden *g) {
    return (uint32_t)strtoul(golden_word(g), NULL, 16);
}

static inline double golden_real(golden *g) {
    return strtod(golden_word(g), NULL);
}

#endif
