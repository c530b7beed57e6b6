/* See cores.h. */
#define _GNU_SOURCE
#include "backend/cpu/cores.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Cores allowed by a cgroup v2 cpu.max ("max 100000" or "quota period"), rounded up; UINT32_MAX: unlimited.
 */
static uint32_t quota_cores(const char *path) {
    unsigned long long quota, period;
    uint32_t cores = UINT32_MAX;
    FILE *file = fopen(path, "re");
    if (!file) return cores;
    if (fscanf(file, "%llu %llu", &quota, &period) == 2 && period > 0 && quota / period < UINT32_MAX - 1)
        cores = (uint32_t)((quota + period - 1) / period);
    fclose(file);
    return cores;
}

/* A quota may be set on this process's group or on any group above it. */
static uint32_t cgroup_cores(void) {
    char line[512], path[640], *group = NULL;
    uint32_t cores = quota_cores("/sys/fs/cgroup/cpu.max");
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && !group && fgets(line, sizeof line, file))
        if (strncmp(line, "0::/", 4) == 0) group = line + 3;
    if (file) fclose(file);
    if (!group) return cores;
    group[strcspn(group, "\n")] = '\0';
    for (char *end = group + strlen(group); end > group; end = strrchr(group, '/')) {
        uint32_t here;
        *end = '\0';
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        here = quota_cores(path);
        if (here < cores) cores = here;
    }
    return cores;
}

uint32_t mm_cores_usable(void) {
    uint32_t cores = 1, quota = cgroup_cores();
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) cores = (uint32_t)CPU_COUNT(&mask);
    if (quota < cores) cores = quota;
    return cores > 0 ? cores : 1;
}

uint32_t mm_threads_wanted(uint32_t requested) {
    const char *text = getenv("MEGAMOE_THREADS");
    if (requested == 0 && text) requested = (uint32_t)strtoul(text, NULL, 10);
    if (requested == 0) requested = mm_cores_usable();
    return requested < MM_THREADS_MAX ? requested : MM_THREADS_MAX;
}
