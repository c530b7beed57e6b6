/*
 * The threads of one CPU device: its caller and helpers that sleep unless there is work. Work is cut into units;
 * every thread owns a contiguous range of them (so that it streams contiguous weights) and takes units from other
 * ranges when its own is done. The caller takes part and needs no helper: it waits only for units that a helper has
 * begun, so a helper that gets no core delays nothing. Results never depend on who ran a unit.
 */
#ifndef MM_CPU_POOL_H
#define MM_CPU_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/megamoe.h"

typedef struct mm_pool mm_pool;

/* threads: 1 .. MM_THREADS_MAX, the caller included. The helpers start here and end in close. */
megamoe_status mm_pool_open(uint32_t threads, mm_pool **pool);
void mm_pool_close(mm_pool *pool); /* NULL is accepted */

/*
 * body(context, unit, thread) once for each unit below `units`; thread < threads, and 0 is the caller. Returns when
 * all are done. `bytes` is about how many bytes all units together read and write: helpers are asked only for work that
 * is worth it. One caller at a time. In a process forked after open, the first call starts helpers anew.
 */
void mm_pool_run(mm_pool *pool, uint32_t units, size_t bytes,
                 void (*body)(void *context, uint32_t unit, uint32_t thread), void *context);

#endif
