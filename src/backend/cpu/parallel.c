/* See parallel.h. */
#define _GNU_SOURCE
#include "backend/cpu/parallel.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool forked; /* this process is a child: the parent's pool of threads does not exist here */

static void note_fork(void) {
    forked = true;
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, note_fork);
}

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

uint32_t mm_parallel_cores(void) {
    uint32_t cores = 1, quota = cgroup_cores();
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) cores = (uint32_t)CPU_COUNT(&mask);
    if (quota < cores) cores = quota;
    return cores > 0 ? cores : 1;
}

uint32_t mm_parallel_threads(uint32_t requested) {
    const char *text = getenv("MEGAMOE_THREADS");
    if (requested == 0 && text) requested = (uint32_t)strtoul(text, NULL, 10);
    if (requested == 0) requested = mm_parallel_cores();
    return requested < MM_THREADS_MAX ? requested : MM_THREADS_MAX;
}

/* One thread's share of the units, on a cache line of its own. */
typedef struct range {
    _Alignas(64) atomic_uint next;
    uint32_t end;
} range;

/*
 * libgomp orders its threads in ways that ThreadSanitizer does not see. These say so: what was done before a team
 * starts is seen by its threads, and what they did is seen behind its end. Races between the threads themselves stay
 * visible.
 */
#ifdef __SANITIZE_THREAD__
#    include <sanitizer/tsan_interface.h>
#    define ORDER_BEFORE(place) __tsan_release(place)
#    define ORDER_AFTER(place) __tsan_acquire(place)
#    define UNWATCHED __attribute__((no_sanitize("thread")))
#else
#    define ORDER_BEFORE(place) ((void)(place))
#    define ORDER_AFTER(place) ((void)(place))
#    define UNWATCHED
#endif

typedef struct team {
    range *ranges;
    uint32_t threads;
    void (*body)(void *context, uint32_t unit, uint32_t thread);
    void *context;
} team;

/* Thread t's own range, then what the others have left. */
static void team_work(team *all, uint32_t t) {
    ORDER_AFTER(all);
    for (uint32_t i = 0; i < all->threads; i++) {
        range *r = &all->ranges[(t + i) % all->threads];
        uint32_t unit;
        while ((unit = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->end)
            all->body(all->context, unit, t);
    }
    ORDER_BEFORE(all);
}

/*
 * The runtime may grant fewer threads; ranges of the missing ones are taken by those that came. No loop construct:
 * LLVM's runtime allocates memory for each.
 */
static UNWATCHED void team_run(team *all) {
    uint32_t threads = all->threads;
#pragma omp parallel num_threads(threads)
    team_work(all, (uint32_t)omp_get_thread_num());
}

void mm_parallel_for(uint32_t threads, uint32_t units, void (*body)(void *context, uint32_t unit, uint32_t thread),
                     void *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (threads > units) threads = units;
    if (threads <= 1 || forked) {
        for (uint32_t unit = 0; unit < units; unit++) body(context, unit, 0);
        return;
    }
    range ranges[threads];
    team all = {ranges, threads, body, context};
    for (uint32_t t = 0; t < threads; t++) {
        atomic_init(&ranges[t].next, (uint32_t)((uint64_t)units * t / threads));
        ranges[t].end = (uint32_t)((uint64_t)units * (t + 1) / threads);
    }
    ORDER_BEFORE(&all);
    team_run(&all);
    ORDER_AFTER(&all);
}
