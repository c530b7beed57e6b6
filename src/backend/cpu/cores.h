/* How many threads the CPU backend uses. */
#ifndef MM_CPU_CORES_H
#define MM_CPU_CORES_H

#include <stdint.h>

#define MM_THREADS_MAX 1024u

/* Cores this process may use: its affinity mask, and the cgroup's quota where one is set (rounded up). At
 * least 1. */
uint32_t mm_cores_usable(void);

/* requested, else MEGAMOE_THREADS, else mm_cores_usable(); 1 .. MM_THREADS_MAX. */
uint32_t mm_threads_wanted(uint32_t requested);

#endif
