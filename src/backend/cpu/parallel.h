/*
 * Threads of the CPU backend; the only file that knows OpenMP. Work is cut into units; every thread owns a
 * contiguous range of them (so that it streams contiguous weights) and takes units from other ranges when its
 * own is done, so a slow or missing thread delays nothing. Results never depend on who ran a unit.
 */
#ifndef MM_CPU_PARALLEL_H
#define MM_CPU_PARALLEL_H

#include <stdint.h>

#define MM_THREADS_MAX 1024u

/* Cores this process may use: its affinity mask, and the cgroup's quota where one is set (rounded up). At
 * least 1. */
uint32_t mm_parallel_cores(void);

/* requested, else MEGAMOE_THREADS, else mm_parallel_cores(); 1 .. MM_THREADS_MAX. */
uint32_t mm_parallel_threads(uint32_t requested);

/*
 * body(context, unit, thread) once for each unit below `units`; thread < threads. Returns when all are done.
 * In a process forked after its parent had used threads, the OpenMP pool is gone, so everything runs on the
 * caller.
 */
void mm_parallel_for(uint32_t threads, uint32_t units, void (*body)(void *context, uint32_t unit, uint32_t thread),
                     void *context);

#endif
