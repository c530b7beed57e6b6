/*
 * The device memory that the layers of a device share, because one of them runs at a time: what a batch leaves from
 * one launch to the next. Each buffer is as large as the largest layer so far wants it. One that became too small is
 * kept until the device closes, since layers and captured graphs hold its address.
 */
#ifndef MM_SM100_SCRATCH_H
#define MM_SM100_SCRATCH_H

#include "backend/sm100/machine.h"

enum sm100_buffer {
    SM100_ENDS,
    SM100_PAIR_ROW,
    SM100_ROW_PAIR,
    SM100_ROW_SCALE_ROW,
    SM100_ROW_WEIGHTS,
    SM100_ROW_GLOBALS,
    SM100_X_CODES,
    SM100_X_SCALES,
    SM100_H_CODES,
    SM100_H_SCALES,
    SM100_PARTIALS,
    SM100_BUFFER_COUNT
};

/* All zero: empty. */
struct sm100_scratch {
    struct {
        void *memory;
        uint64_t bytes;
    } buffers[SM100_BUFFER_COUNT];
    void **outgrown;
    uint32_t outgrown_count;
};

#ifdef __cplusplus
extern "C" {
#endif

/* At least `bytes` of this buffer. Buffers of scales hold scales, or zeros, at all times. OUT_OF_MEMORY names it. */
megamoe_status mm_sm100_scratch_take(const struct sm100_machine *machine, struct sm100_scratch *scratch,
                                     enum sm100_buffer which, uint64_t bytes, void **memory);
/* After the layers. */
void mm_sm100_scratch_free(const struct sm100_machine *machine, struct sm100_scratch *scratch);
/* Zeros to device memory; waits. */
megamoe_status mm_sm100_clear(const struct sm100_machine *machine, void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
