/* Messages, JSON, memory, time, and the progress bar: how the command talks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

static bool json_errors;

void cli_json_errors(bool on) {
    json_errors = on;
}

void cli_print_plain(FILE *stream, const char *text, size_t length) {
    for (size_t i = 0; i < length && text[i]; i++) {
        unsigned char c = (unsigned char)text[i], next = (unsigned char)text[i + 1];
        bool wide = c == 0xC2 && next >= 0x80 && next < 0xA0; /* U+0080 to U+009F, controls too */
        putc(c < 0x20 || c == 0x7F || wide ? '?' : c, stream);
        i += wide;
    }
}

/* The library's sentences end without a period, because programs put them into their own. */
static int report(const char *status, const char *words) {
    char sentence[1100];
    size_t length = strlen(words);
    snprintf(sentence, sizeof sentence, "%s%s", words, length && strchr(".?", words[length - 1]) ? "" : ".");
    fputs("megamoe: ", stderr);
    cli_print_plain(stderr, sentence, strlen(sentence));
    putc('\n', stderr);
    if (json_errors) cli_print_json(json_pack("{s:{s:s,s:s}}", "error", "status", status, "message", sentence));
    return CLI_BAD_INPUT;
}

int cli_fail(const char *format, ...) {
    char sentence[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return report(megamoe_status_name(MEGAMOE_INVALID_ARGUMENT), sentence);
}

int cli_fail_status(megamoe_status status) {
    return report(megamoe_status_name(status), megamoe_error_message());
}

int cli_print_json(json_t *object) {
    if (!object) return cli_fail("the result cannot be written as JSON: a name in it is not valid UTF-8.");
    json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
    putchar('\n');
    json_decref(object);
    return cli_flush();
}

int cli_flush(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return CLI_GOOD;
    fprintf(stderr, "megamoe: standard output cannot be written.\n");
    return CLI_BAD_INPUT;
}

json_t *cli_json_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

void *cli_allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) {
        report(megamoe_status_name(MEGAMOE_OUT_OF_MEMORY),
               "there is not enough memory for this; try fewer tokens or experts.");
        exit(CLI_BAD_INPUT);
    }
    return memory;
}

char *cli_format(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = cli_allocate((size_t)length + 1, 1);
    va_start(arguments, format);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    return text;
}

const char *cli_bytes_text(double bytes, char text[16]) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    unsigned unit = 0;
    while (bytes >= 999.5 && unit < 4) {
        bytes /= 1000;
        unit++;
    }
    snprintf(text, 16, bytes < 99.95 && unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

const char *cli_color(const char *code) {
    static char escapes[4][12];
    static unsigned next;
    const char *unwanted = getenv("NO_COLOR");
    if (!isatty(STDOUT_FILENO) || (unwanted && *unwanted)) return "";
    char *escape = escapes[next++ % 4];
    snprintf(escape, sizeof escapes[0], "\033[%sm", code);
    return escape;
}

unsigned cli_terminal_width(void) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40) return size.ws_col;
    return 80;
}

double cli_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void cli_progress_start(cli_progress *progress, const char *label) {
    *progress = (cli_progress){.label = label, .started = cli_seconds()};
}

void cli_progress_update(cli_progress *progress, uint64_t done, uint64_t total) {
    double now = cli_seconds();
    if (!isatty(STDERR_FILENO) || total == 0 || now - progress->started < 1.0 || now - progress->drawn < 0.1) return;
    unsigned filled = (unsigned)((double)done * 30 / (double)total);
    char rate[16] = "";
    if (progress->bytes) cli_bytes_text((double)done / (now - progress->started), rate);
    fprintf(stderr, "\r%s [%.*s%*s] %3u %%  %s%s\033[K", progress->label, (int)filled, "##############################",
            (int)(30 - filled), "", (unsigned)((double)done * 100 / (double)total), rate, *rate ? "/s" : "");
    progress->drawn = now;
    progress->visible = true;
}

void cli_progress_end(cli_progress *progress) {
    if (progress->visible) fprintf(stderr, "\r\033[K");
}
