/* Text in columns. Tables are as narrow as their cells, and the last left-aligned column wraps at the
 * terminal's width.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { TEXT_COLUMNS_MAX = 100, COLUMNS_MAX = 12 }; /* longer lines are hard to read */

struct cli_table {
    unsigned columns, rows;
    char align[COLUMNS_MAX];
    unsigned width[COLUMNS_MAX];
    char **cells; /* [rows][columns]; row 0 is the heading */
};

/* Columns on the screen: UTF-8 continuation bytes take none. */
static unsigned text_width(const char *text) {
    unsigned width = 0;
    for (; *text; text++) width += ((unsigned char)*text & 0xC0) != 0x80;
    return width;
}

static void add_row(cli_table *table, const char *text, char separator) {
    table->cells = realloc(table->cells, sizeof(char *) * (table->rows + 1) * table->columns);
    if (!table->cells) abort(); /* a few hundred bytes */
    for (unsigned column = 0; column < table->columns; column++) {
        const char *end = strchr(text, separator);
        size_t length = end ? (size_t)(end - text) : strlen(text);
        char *cell = cli_format("%.*s", (int)length, text);
        table->cells[(size_t)table->rows * table->columns + column] = cell;
        if (text_width(cell) > table->width[column]) table->width[column] = text_width(cell);
        text += length + (end != NULL);
    }
    table->rows++;
}

cli_table *cli_table_new(const char *columns) {
    cli_table *table = cli_allocate(1, sizeof *table);
    char heading[256];
    size_t length = 0;
    for (const char *c = columns; *c && length + 1 < sizeof heading; c++) {
        bool start = c == columns || c[-1] == '|';
        if (start)
            table->align[table->columns++] = *c;
        else
            heading[length++] = *c;
    }
    heading[length] = 0;
    add_row(table, heading, '|');
    return table;
}

void cli_table_add(cli_table *table, const char *format, ...) {
    char row[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(row, sizeof row, format, arguments);
    va_end(arguments);
    add_row(table, row, '\t');
}

/* The length of the piece of `text` that fits `width`, cut at a space where there is one. */
static size_t fitting(const char *text, unsigned width) {
    size_t length = strlen(text), cut = width;
    if (text_width(text) <= width) return length;
    while (cut > 0 && text[cut] != ' ') cut--;
    return cut ? cut : width;
}

static void print_row(const cli_table *table, unsigned row, unsigned indent) {
    const char *last = table->cells[(size_t)row * table->columns + table->columns - 1];
    unsigned before = indent, final = table->columns - 1;
    printf("%*s", (int)indent, "");
    for (unsigned column = 0; column < final; column++) {
        const char *cell = table->cells[(size_t)row * table->columns + column];
        int padding = (int)(table->width[column] - text_width(cell));
        if (table->align[column] == '>') printf("%*s", padding, "");
        cli_print_plain(stdout, cell, strlen(cell));
        printf("%*s", 2 + (table->align[column] == '>' ? 0 : padding), "");
        before += table->width[column] + 2;
    }
    if (table->align[final] == '>') {
        printf("%*s%s\n", (int)(table->width[final] - text_width(last)), "", last);
        return;
    }
    unsigned width = cli_terminal_width(), room = width > before + 20 ? width - before : 20;
    for (size_t piece = fitting(last, room);; piece = fitting(last, room)) {
        cli_print_plain(stdout, last, piece);
        putchar('\n');
        last += piece + (last[piece] == ' ');
        if (!*last) break;
        printf("%*s", (int)before, "");
    }
}

void cli_table_print(cli_table *table, unsigned indent) {
    for (unsigned row = 0; row < table->rows; row++) print_row(table, row, indent);
    cli_table_free(table);
}

void cli_table_free(cli_table *table) {
    if (!table) return;
    for (size_t i = 0; i < (size_t)table->rows * table->columns; i++) free(table->cells[i]);
    free(table->cells);
    free(table);
}

void cli_print_wrapped(const char *text, unsigned indent) {
    unsigned width = cli_terminal_width() - 1;
    bool fresh = true;
    if (width > TEXT_COLUMNS_MAX) width = TEXT_COLUMNS_MAX;
    for (unsigned column = indent; *text;) {
        unsigned word = (unsigned)strcspn(text, " ");
        if (!fresh && column + 1 + word > width) {
            printf("\n%*s", (int)indent, "");
            column = indent;
            fresh = true;
        }
        if (!fresh) putchar(' ');
        cli_print_plain(stdout, text, word);
        column += word + !fresh;
        fresh = false;
        text += word + (text[word] == ' ');
    }
    putchar('\n');
}
