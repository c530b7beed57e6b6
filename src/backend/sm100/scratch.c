/* See scratch.h. */
#include "backend/sm100/scratch.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

static const char *const names[SM100_BUFFER_COUNT] = {"ends",        "pair rows",   "row pairs",   "scale rows",
                                                      "row weights", "row globals", "token codes", "token scales",
                                                      "h codes",     "h scales",    "partials"};

megamoe_status mm_sm100_clear(const struct sm100_machine *machine, void *memory, size_t bytes) {
    void *zeros = calloc(1, bytes);
    if (!zeros) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for %zu zeros", bytes);
    megamoe_status status = machine->copy_in(machine->context, memory, zeros, bytes);
    free(zeros);
    return status;
}

/* Room to remember one outgrown buffer more. */
static bool grow_list(struct sm100_scratch *scratch) {
    void **list = realloc(scratch->outgrown, (scratch->outgrown_count + 1) * sizeof *list);
    if (list) scratch->outgrown = list;
    return list;
}

megamoe_status mm_sm100_scratch_take(const struct sm100_machine *machine, struct sm100_scratch *scratch,
                                     enum sm100_buffer which, uint64_t bytes, void **memory) {
    const uint64_t had = scratch->buffers[which].bytes;
    if (bytes == 0) bytes = 16;
    if (bytes > had) {
        void *larger = grow_list(scratch) ? machine->alloc(machine->context, bytes, names[which]) : NULL;
        if (!larger)
            return mm_fail(MEGAMOE_OUT_OF_MEMORY, "%.1f MB of device memory for max_tokens: %s", (double)bytes * 1e-6,
                           names[which]);
        /* Rows that pad a tile take whatever scales stand there: harmless, NaN included, as long as they are scales,
         * of which none has its highest bit set. Nothing but scales is ever written: zeros to begin with are enough. */
        megamoe_status status = MEGAMOE_OK;
        if (which == SM100_X_SCALES || which == SM100_H_SCALES) status = mm_sm100_clear(machine, larger, bytes);
        if (status != MEGAMOE_OK) {
            machine->release(machine->context, larger);
            return status;
        }
        if (had) scratch->outgrown[scratch->outgrown_count++] = scratch->buffers[which].memory;
        scratch->buffers[which].memory = larger;
        scratch->buffers[which].bytes = bytes;
    }
    *memory = scratch->buffers[which].memory;
    return MEGAMOE_OK;
}

void mm_sm100_scratch_free(const struct sm100_machine *machine, struct sm100_scratch *scratch) {
    for (int i = 0; i < SM100_BUFFER_COUNT; i++) /* an empty scratch needs no machine */
        if (scratch->buffers[i].memory) machine->release(machine->context, scratch->buffers[i].memory);
    for (uint32_t i = 0; i < scratch->outgrown_count; i++) machine->release(machine->context, scratch->outgrown[i]);
    free(scratch->outgrown);
    memset(scratch, 0, sizeof *scratch);
}
