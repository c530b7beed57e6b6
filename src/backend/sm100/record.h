/*
 * The record of a wait that never ended, decoded: which kernel, which thread, which barrier, at which tile. A
 * kernel writes it instead of hanging or trapping; the host reads it after the stream is done.
 */
#ifndef MM_SM100_RECORD_H
#define MM_SM100_RECORD_H

#include <stddef.h>
#include "backend/sm100/arguments.h"

enum sm100_barrier {
    SM100_STAGE_FULL,        /* a stage's bytes have landed */
    SM100_STAGE_EMPTY,       /* the instructions that read a stage are done */
    SM100_ACCUMULATOR_FULL,  /* a tile is multiplied */
    SM100_ACCUMULATOR_EMPTY, /* the epilogue has read it */
    SM100_BARRIER_COUNT
};

#ifdef __cplusplus
extern "C" {
#endif
/* One sentence about a host copy of the record; an empty string if nothing is in it. */
void mm_sm100_record_describe(const struct sm100_record *record, char *sentence, size_t bytes);
#ifdef __cplusplus
}
#endif

#endif
