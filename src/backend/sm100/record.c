/* The record of a wait that never ended, as a sentence. */
#include <stdio.h>

#include "backend/sm100/record.h"
#include "backend/sm100/tiles.h"

static const char *const kernel_names[SM100_TILE_COUNT] = {"L1 (small tiles)", "L1 (large tiles)", "L2 (small tiles)",
                                                           "L2 (large tiles)", "L2 (wide tiles)"};
static const char *const barrier_names[SM100_BARRIER_COUNT] = {"the bytes of stage", "the instructions that read stage",
                                                               "the multiplication into accumulator",
                                                               "the epilogue's reading of accumulator"};

void mm_sm100_record_describe(const struct sm100_record *record, char *sentence, size_t bytes) {
    if (bytes) sentence[0] = '\0';
    if (!record->claimed) return;
    if (record->kernel >= SM100_TILE_COUNT || record->barrier >= SM100_BARRIER_COUNT) {
        snprintf(sentence, bytes, "a kernel gave up waiting and its record is damaged (kernel %u, barrier %u)",
                 record->kernel, record->barrier);
        return;
    }
    snprintf(
        sentence, bytes,
        "kernel %s: thread %u of CTA %u gave up waiting for %s %u (phase %u) at expert %u, weight tile %u, token row %u",
        kernel_names[record->kernel], record->thread, record->cta, barrier_names[record->barrier], record->index,
        record->parity, record->group, record->m_tile, record->row);
}
