/* Whole JSON files, bounded in size. */
#include "checkpoint/json_file.h"

#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define JSON_BYTES_MAX (256 << 20)

static void python_words_remove(char *text, size_t length) {
    bool in_string = false;
    for (size_t i = 0; i < length; i++) {
        if (in_string && text[i] == '\\') {
            i++;
        } else if (text[i] == '"') {
            in_string = !in_string;
        } else if (!in_string && (text[i] == 'I' || text[i] == 'N')) {
            size_t word = text[i] == 'I' ? 8 : 3;
            if (length - i < word || memcmp(text + i, text[i] == 'I' ? "Infinity" : "NaN", word) != 0) continue;
            if (i > 0 && text[i - 1] == '-') text[i - 1] = ' ';
            memset(text + i, ' ', word);
            memset(text + i, '"', 2);
            i += word - 1;
        }
    }
}

static megamoe_status text_read(const char *path, int file, char **text, size_t *length) {
    struct stat facts;
    size_t have = 0;
    char *buffer;
    if (fstat(file, &facts) != 0) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", path, strerror(errno));
    if (!S_ISREG(facts.st_mode)) return mm_fail(MEGAMOE_IO_ERROR, "%s is not a regular file", path);
    if (facts.st_size > JSON_BYTES_MAX)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has %lld bytes, more than the %d that a JSON file may have", path,
                       (long long)facts.st_size, JSON_BYTES_MAX);
    buffer = malloc((size_t)facts.st_size + 1);
    if (!buffer) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read %s", path);
    while (have < (size_t)facts.st_size) {
        ssize_t got = read(file, buffer + have, (size_t)facts.st_size - have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            free(buffer);
            return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", path, got < 0 ? strerror(errno) : "it became shorter");
        }
        have += (size_t)got;
    }
    *text = buffer;
    *length = have;
    return MEGAMOE_OK;
}

megamoe_status mm_json_file_read(const char *path, json_t **root) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    char *text = NULL;
    size_t length = 0;
    json_error_t error;
    json_t *json;
    megamoe_status status;
    *root = NULL;
    if (file < 0) {
        if (errno == ENOENT) return MEGAMOE_OK;
        return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", path, strerror(errno));
    }
    status = text_read(path, file, &text, &length);
    close(file);
    if (status != MEGAMOE_OK) return status;
    python_words_remove(text, length);
    json = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    free(text);
    if (!json) return mm_fail(MEGAMOE_CORRUPT_FILE, "%s, line %d: %s", path, error.line, error.text);
    if (!json_is_object(json)) {
        json_decref(json);
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s does not hold a JSON object", path);
    }
    *root = json;
    return MEGAMOE_OK;
}
