/* A status, and one sentence of detail per thread. The only way to fail in this library. */
#ifndef MM_ERROR_H
#define MM_ERROR_H

#include "megamoe/megamoe.h"

/* Sets the thread's sentence and returns status. Sentences name the thing, the place and the two values that
 * disagree. */
megamoe_status mm_fail(megamoe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts `context` and ": " before the sentence of a failure, and returns status as it is. */
megamoe_status mm_fail_in(megamoe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Returns from the enclosing function if the call failed. */
#define MM_TRY(call)                                                                                                   \
    do {                                                                                                               \
        megamoe_status mm_try_status = (call);                                                                         \
        if (mm_try_status != MEGAMOE_OK) return mm_try_status;                                                         \
    } while (0)

#endif
