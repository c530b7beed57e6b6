/* The grammar of RFC 8259, one byte at a time over a buffer. */
#include "checkpoint/json_scan.h"

#include <string.h>
#include <unistd.h>

void mm_scan_begin(mm_json_scan *scan, int file, uint64_t begin, uint64_t end) {
    scan->file = file;
    scan->position = begin;
    scan->end = end;
    scan->at = scan->have = 0;
    scan->problem = NULL;
    scan->offset = begin;
}

bool mm_scan_fail(mm_json_scan *scan, const char *problem) {
    if (scan->problem) return false;
    scan->problem = problem;
    scan->offset = scan->position - (scan->have - scan->at);
    scan->at = scan->have = 0;
    scan->end = scan->position;
    return false;
}

/* Reads on when the buffer is used up. False: the end, or a problem. */
static bool refill(mm_json_scan *scan) {
    uint64_t left = scan->end - scan->position;
    size_t size = left < sizeof scan->buffer ? (size_t)left : sizeof scan->buffer;
    ssize_t got = size ? pread(scan->file, scan->buffer, size, (off_t)scan->position) : 0;
    if (got <= 0) return size ? mm_scan_fail(scan, "the file cannot be read") : false;
    scan->position += (uint64_t)got;
    scan->at = 0;
    scan->have = (uint32_t)got;
    return true;
}

static inline bool available(mm_json_scan *scan) {
    return scan->at < scan->have || refill(scan);
}

/* The next byte, consumed; 0: none is left. No byte 0 is valid anywhere in JSON. */
static inline uint8_t take(mm_json_scan *scan) {
    return available(scan) ? scan->buffer[scan->at++] : 0;
}

char mm_scan_peek(mm_json_scan *scan) {
    while (available(scan)) {
        char c = (char)scan->buffer[scan->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
        scan->at++;
    }
    return 0;
}

bool mm_scan_end(mm_json_scan *scan) {
    if (mm_scan_peek(scan) || (available(scan) && !scan->problem))
        return mm_scan_fail(scan, "more follows after the value");
    return scan->problem == NULL;
}

bool mm_scan_open(mm_json_scan *scan, char bracket) {
    if (mm_scan_peek(scan) != bracket)
        return mm_scan_fail(scan, bracket == '{' ? "expected an object" : "expected an array");
    scan->at++;
    return true;
}

/* Steps over the comma before every value but the first. False: the closing bracket, which is consumed, or a
 * problem. */
static bool next_value(mm_json_scan *scan, bool *first, char closing) {
    char c = mm_scan_peek(scan);
    if (c == closing) {
        scan->at++;
        return false;
    }
    if (*first) {
        *first = false;
        return c ? true : mm_scan_fail(scan, "it ends too early");
    }
    if (c != ',') return mm_scan_fail(scan, c ? "expected a comma" : "it ends too early");
    scan->at++;
    return true;
}

bool mm_scan_next_item(mm_json_scan *scan, bool *first) {
    return next_value(scan, first, ']');
}

bool mm_scan_next_key(mm_json_scan *scan, bool *first, char *key) {
    if (!next_value(scan, first, '}') || !mm_scan_string(scan, key)) return false;
    if (mm_scan_peek(scan) != ':') return mm_scan_fail(scan, "expected a colon");
    scan->at++;
    return true;
}

/* ---- strings ---------------------------------------------------------------------------------------------
 */

static bool hex4(mm_json_scan *scan, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++) {
        uint8_t c = take(scan);
        if (c >= '0' && c <= '9')
            *value = *value << 4 | (uint32_t)(c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            *value = *value << 4 | (uint32_t)((c | 0x20) - 'a' + 10);
        else
            return mm_scan_fail(scan, "expected four hexadecimal digits");
    }
    return true;
}

/* Writes a code point as UTF-8 and returns its length. */
static size_t utf8_write(uint32_t point, char *text) {
    static const uint8_t leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t length = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    if (length == 1) {
        *text = (char)point;
        return 1;
    }
    for (size_t i = length; i-- > 1; point >>= 6) text[i] = (char)(0x80 | (point & 0x3F));
    *text = (char)(leads[length] | point);
    return length;
}

/* What follows a backslash, as UTF-8. Returns its length; 0: a problem. */
static size_t escape_read(mm_json_scan *scan, char *text) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    uint8_t c = take(scan);
    const char *simple = c ? strchr(from, c) : NULL;
    uint32_t point, low;
    if (simple) {
        *text = to[simple - from];
        return 1;
    }
    if (c != 'u') return mm_scan_fail(scan, "an unknown escape");
    if (!hex4(scan, &point)) return 0;
    if (point >= 0xD800 && point < 0xDC00) {
        if (take(scan) != '\\' || take(scan) != 'u' || !hex4(scan, &low) || low < 0xDC00 || low > 0xDFFF)
            return mm_scan_fail(scan, "half a surrogate pair");
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    } else if (point >= 0xDC00 && point < 0xE000) {
        return mm_scan_fail(scan, "half a surrogate pair");
    }
    if (point == 0) return mm_scan_fail(scan, "a NUL in a string");
    return utf8_write(point, text);
}

/* The rest of a multi-byte character. Overlong forms, surrogates and values past U+10FFFF are refused. */
static size_t utf8_read(mm_json_scan *scan, uint8_t lead, char *text) {
    size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    uint32_t point = lead & (0xFFu >> (length + 1));
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (lead < 0xC2 || lead > 0xF4) return mm_scan_fail(scan, "a string that is not UTF-8");
    text[0] = (char)lead;
    for (size_t i = 1; i < length; i++) {
        uint8_t c = take(scan);
        if ((c & 0xC0) != 0x80) return mm_scan_fail(scan, "a string that is not UTF-8");
        text[i] = (char)c;
        point = point << 6 | (c & 0x3Fu);
    }
    if (point < least[length] || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
        return mm_scan_fail(scan, "a string that is not UTF-8");
    return length;
}

bool mm_scan_string(mm_json_scan *scan, char *text) {
    size_t used = 0;
    if (mm_scan_peek(scan) != '"') return mm_scan_fail(scan, "expected a string");
    scan->at++;
    while (used + 5 < MM_SCAN_STRING_MAX) {
        uint8_t c = take(scan);
        size_t length = 1;
        if (c == '"') {
            text[used] = '\0';
            return true;
        }
        if (c < 0x20) return mm_scan_fail(scan, c ? "a control character in a string" : "it ends inside a string");
        if (c == '\\')
            length = escape_read(scan, text + used);
        else if (c >= 0x80)
            length = utf8_read(scan, c, text + used);
        else
            text[used] = (char)c;
        if (!length) return false;
        used += length;
    }
    return mm_scan_fail(scan, "a string of more than 4090 bytes");
}

/* ---- numbers and the rest --------------------------------------------------------------------------------
 */

static bool digit_next(mm_json_scan *scan) {
    return available(scan) && scan->buffer[scan->at] >= '0' && scan->buffer[scan->at] <= '9';
}

bool mm_scan_count(mm_json_scan *scan, int64_t *count) {
    int64_t value = 0;
    mm_scan_peek(scan);
    if (!digit_next(scan)) return mm_scan_fail(scan, "expected a whole number");
    if (scan->buffer[scan->at] == '0') {
        scan->at++;
        if (digit_next(scan)) return mm_scan_fail(scan, "a number with a leading zero");
    }
    while (digit_next(scan)) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, scan->buffer[scan->at] - '0', &value))
            return mm_scan_fail(scan, "a number that does not fit 63 bits");
        scan->at++;
    }
    if (available(scan) && strchr(".eE", scan->buffer[scan->at])) return mm_scan_fail(scan, "expected a whole number");
    *count = value;
    return true;
}

static bool digits_skip(mm_json_scan *scan) {
    if (!digit_next(scan)) return mm_scan_fail(scan, "expected a digit");
    while (digit_next(scan)) scan->at++;
    return true;
}

static bool number_skip(mm_json_scan *scan) {
    if (scan->buffer[scan->at] == '-') scan->at++;
    if (available(scan) && scan->buffer[scan->at] == '0') {
        scan->at++;
        if (digit_next(scan)) return mm_scan_fail(scan, "a number with a leading zero");
    } else if (!digits_skip(scan)) {
        return false;
    }
    if (available(scan) && scan->buffer[scan->at] == '.') {
        scan->at++;
        if (!digits_skip(scan)) return false;
    }
    if (!available(scan) || (scan->buffer[scan->at] | 0x20) != 'e') return true;
    scan->at++;
    if (available(scan) && (scan->buffer[scan->at] == '+' || scan->buffer[scan->at] == '-')) scan->at++;
    return digits_skip(scan);
}

static bool word_skip(mm_json_scan *scan) {
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < 3; i++) {
        if (!available(scan) || scan->buffer[scan->at] != (uint8_t)words[i][0]) continue;
        for (const char *c = words[i]; *c; c++)
            if (take(scan) != (uint8_t)*c) return mm_scan_fail(scan, "an unknown word");
        return true;
    }
    return mm_scan_fail(scan, "expected a value");
}

static bool value_skip(mm_json_scan *scan, unsigned depth) {
    char c = mm_scan_peek(scan);
    bool first = true;
    if (depth > MM_SCAN_DEPTH_MAX) return mm_scan_fail(scan, "nested too deeply");
    if (c == '"') return mm_scan_string(scan, scan->skipped);
    if (c == '-' || (c >= '0' && c <= '9')) return number_skip(scan);
    if (c != '{' && c != '[') return word_skip(scan);
    mm_scan_open(scan, c);
    while (c == '{' ? mm_scan_next_key(scan, &first, scan->skipped) : mm_scan_next_item(scan, &first))
        if (!value_skip(scan, depth + 1)) return false;
    return scan->problem == NULL;
}

bool mm_scan_skip(mm_json_scan *scan) {
    return value_skip(scan, 1);
}
