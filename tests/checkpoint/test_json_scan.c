/* The pull reader against a table of texts that RFC 8259 allows and forbids, also across the edges of its
 * buffer. */
#include "checkpoint/json_scan.h"

#include "scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

typedef struct text_case {
    const char *text;
    const char *problem; /* a part of it; NULL: valid */
} text_case;

static const text_case texts[] = {
    {"{}", NULL},
    {" [ ] \n\t\r", NULL},
    {"\"\"", NULL},
    {"0", NULL},
    {"-0", NULL},
    {"-1.5e+10", NULL},
    {"1E5", NULL},
    {"[true,false,null]", NULL},
    {"{\"a\":{\"b\":[1,{\"c\":\"d\"}]},\"e\":-2.25}", NULL},
    {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83D\\uDE00\"", NULL},
    {"\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"", NULL},
    {"", "value"},
    {"{", "too early"},
    {"[", "too early"},
    {"[1", "too early"},
    {"{\"a\"", "colon"},
    {"{\"a\":", "value"},
    {"{\"a\":1,}", "string"},
    {"[1,]", "value"},
    {"[1 2]", "comma"},
    {"{1:2}", "string"},
    {"{} {}", "more follows"},
    {"[]]", "more follows"},
    {"[}", "value"},
    {"tru", "word"},
    {"truth", "word"},
    {"nil", "word"},
    {"Infinity", "value"},
    {"NaN", "value"},
    {"+1", "value"},
    {"01", "leading zero"},
    {"-", "digit"},
    {"-x", "digit"},
    {"1.", "digit"},
    {"1.e5", "digit"},
    {".5", "value"},
    {"1e", "digit"},
    {"1e+", "digit"},
    {"0x10", "more follows"},
    {"'a'", "value"},
    {"\"a", "inside a string"},
    {"\"a\n\"", "control character"},
    {"\"\\x\"", "escape"},
    {"\"\\", "escape"},
    {"\"\\u12\"", "hexadecimal"},
    {"\"\\u12g4\"", "hexadecimal"},
    {"\"\\u0000\"", "NUL"},
    {"\"\\ud800\"", "surrogate"},
    {"\"\\ud800\\u0041\"", "surrogate"},
    {"\"\\udc00\"", "surrogate"},
    {"\"\x80\"", "UTF-8"},
    {"\"\xc0\x80\"", "UTF-8"},
    {"\"\xc3\"", "UTF-8"},
    {"\"\xe0\x80\x80\"", "UTF-8"},
    {"\"\xed\xa0\x80\"", "UTF-8"},
    {"\"\xf0\x80\x80\x80\"", "UTF-8"},
    {"\"\xf4\x90\x80\x80\"", "UTF-8"},
    {"\"\xf5\x80\x80\x80\"", "UTF-8"},
    {"\"\xff\"", "UTF-8"},
};

/* Reads `count` bytes of text after `padding` spaces, so that every byte can lie at the buffer's edge. */
static void scan_text(const char *text, size_t count, size_t padding, mm_json_scan *scan) {
    char *bytes = malloc(padding + count);
    int file;
    memset(bytes, ' ', padding);
    memcpy(bytes + padding, text, count);
    file = open(scratch_write("text", bytes, padding + count), O_RDONLY);
    free(bytes);
    mm_scan_begin(scan, file, 0, padding + count);
    mm_scan_skip(scan);
    mm_scan_end(scan);
    close(file);
}

static void test_grammar(void **state) {
    mm_json_scan scan;
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        size_t length = strlen(texts[i].text);
        for (size_t before = 0; before <= length; before++) {
            size_t padding = before ? sizeof scan.buffer - before : 0;
            scan_text(texts[i].text, length, padding, &scan);
            if (!texts[i].problem && scan.problem) fail_msg("%s: %s", texts[i].text, scan.problem);
            if (texts[i].problem && (!scan.problem || !strstr(scan.problem, texts[i].problem)))
                fail_msg("%s: '%s', expected '%s'", texts[i].text, scan.problem ? scan.problem : "accepted",
                         texts[i].problem);
        }
    }
}

static void test_every_prefix_of_a_valid_text_fails(void **state) {
    static const char text[] = "{\"a\":[1,-2.5e3,\"\\u00e9\\ud83d\\ude00\xc3\xa9\",{\"b\":true}],\"c\":null}";
    mm_json_scan scan;
    (void)state;
    for (size_t length = 0; length < sizeof text - 1; length++) {
        scan_text(text, length, 0, &scan);
        assert_non_null(scan.problem);
    }
    scan_text(text, sizeof text - 1, 0, &scan);
    assert_null(scan.problem);
}

static void test_nul_byte_is_not_the_end(void **state) {
    mm_json_scan scan;
    (void)state;
    scan_text("{}\0", 3, 0, &scan);
    assert_non_null(scan.problem);
    scan_text("\"a\0b\"", 5, 0, &scan);
    assert_non_null(scan.problem);
}

static void test_depth(void **state) {
    char text[2 * MM_SCAN_DEPTH_MAX + 2];
    mm_json_scan scan;
    (void)state;
    for (size_t depth = MM_SCAN_DEPTH_MAX; depth <= MM_SCAN_DEPTH_MAX + 1; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        scan_text(text, 2 * depth, 0, &scan);
        assert_int_equal(scan.problem != NULL, depth > MM_SCAN_DEPTH_MAX);
    }
}

static void test_strings(void **state) {
    static const char text[] = "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00E9\\uD83D\\uDE00\\u0800\xc3\xa9\"";
    char value[MM_SCAN_STRING_MAX], *longest = malloc(5000);
    mm_json_scan scan;
    int file = open(scratch_write("text", text, sizeof text - 1), O_RDONLY);
    (void)state;
    mm_scan_begin(&scan, file, 0, sizeof text - 1);
    assert_true(mm_scan_string(&scan, value));
    assert_string_equal(value, "\"\\/\b\f\n\r\t\xc3\xa9\xf0\x9f\x98\x80\xe0\xa0\x80\xc3\xa9");
    close(file);
    memset(longest, 'x', 5000);
    longest[0] = '"';
    for (size_t length = 4080; length < 4100; length++) {
        longest[1 + length] = '"';
        scan_text(longest, length + 2, 0, &scan);
        assert_int_equal(scan.problem != NULL, length > 4090);
        longest[1 + length] = 'x';
    }
    free(longest);
}

static void test_counts(void **state) {
    static const struct {
        const char *text;
        int64_t value; /* -1: refused */
    } counts[] = {
        {"0", 0},
        {" 17 ", 17},
        {"9223372036854775807", INT64_MAX},
        {"9223372036854775808", -1},
        {"18446744073709551615", -1},
        {"18446744073709551617", -1},
        {"99999999999999999999999999", -1},
        {"-1", -1},
        {"-0", -1},
        {"1.0", -1},
        {"1e3", -1},
        {"007", -1},
        {"", -1},
        {"\"1\"", -1},
        {"null", -1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        size_t length = strlen(counts[i].text);
        int file = open(scratch_write("text", counts[i].text, length), O_RDONLY);
        int64_t value = -7;
        mm_json_scan scan;
        mm_scan_begin(&scan, file, 0, length);
        if (mm_scan_count(&scan, &value) != (counts[i].value >= 0)) fail_msg("%s", counts[i].text);
        assert_int_equal(value, counts[i].value >= 0 ? counts[i].value : -7);
        close(file);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grammar),
        cmocka_unit_test(test_every_prefix_of_a_valid_text_fails),
        cmocka_unit_test(test_nul_byte_is_not_the_end),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_counts),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
