/* The calling thread's sentence, and the names of the statuses. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char sentence[1024];

megamoe_status mm_fail(megamoe_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return status;
}

megamoe_status mm_fail_in(megamoe_status status, const char *format, ...) {
    char detail[sizeof sentence];
    va_list arguments;
    int used;
    memcpy(detail, sentence, sizeof detail);
    va_start(arguments, format);
    used = vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (used >= 0 && (size_t)used < sizeof sentence)
        snprintf(sentence + used, sizeof sentence - (size_t)used, ": %.*s", (int)sizeof detail - used - 3, detail);
    return status;
}

const char *megamoe_error_message(void) {
    return sentence;
}

const char *megamoe_status_name(megamoe_status status) {
    switch (status) {
    case MEGAMOE_OK: return "MEGAMOE_OK";
    case MEGAMOE_INVALID_ARGUMENT: return "MEGAMOE_INVALID_ARGUMENT";
    case MEGAMOE_OUT_OF_MEMORY: return "MEGAMOE_OUT_OF_MEMORY";
    case MEGAMOE_IO_ERROR: return "MEGAMOE_IO_ERROR";
    case MEGAMOE_CORRUPT_FILE: return "MEGAMOE_CORRUPT_FILE";
    case MEGAMOE_UNSUPPORTED_MODEL: return "MEGAMOE_UNSUPPORTED_MODEL";
    case MEGAMOE_UNSUPPORTED_DEVICE: return "MEGAMOE_UNSUPPORTED_DEVICE";
    case MEGAMOE_DEVICE_ERROR: return "MEGAMOE_DEVICE_ERROR";
    case MEGAMOE_GROUP_ERROR: return "MEGAMOE_GROUP_ERROR";
    case MEGAMOE_CANCELLED: return "MEGAMOE_CANCELLED";
    }
    return "unknown status";
}
