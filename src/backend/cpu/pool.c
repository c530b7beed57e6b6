/*
 * See pool.h. All that threads agree on is one word: how many helpers are inside a job, whether more may enter, and the
 * job's number. A helper that has not entered is never waited for; one that enters finds the job whole until it leaves.
 * docs/decisions/0011-threads.md tells why this is not OpenMP.
 */
#define _GNU_SOURCE
#include "backend/cpu/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "error.h"

/* A thread more for each of these: about 10 us of one core, as long as a helper takes to wake up. */
#define BYTES_PER_THREAD ((size_t)256 * 1024)
/* Looks at the word before sleeping, 10 to 40 us: longer than the pause between two regions of a run, too short for
 * another program to miss the core. */
#define LOOKS_BEFORE_SLEEP 1000

/* The word. */
#define HELPERS_INSIDE 0x7FFu /* how many */
#define JOB_OPEN 0x800u       /* helpers may enter */
#define CALLER_SLEEPS 0x1000u /* the last helper to leave wakes it */
#define POOL_CLOSES 0x2000u   /* helpers return */
#define JOB_NUMBER                                                                                                     \
    0xFFFFC000u /* tells a helper whether it has been in this job; may wrap around: it then sits one out */
#define JOB_NUMBER_STEP 0x4000u

/* Who waits for the word to change. */
enum { WAITS_FOR_JOB = 1, WAITS_FOR_HELPERS = 2 };

/* One thread's share of the units. */
typedef struct range {
    _Alignas(64) atomic_uint next;
    uint32_t end;
} range;

typedef struct helper {
    mm_pool *pool;
    uint32_t thread;
    pthread_t handle;
} helper;

struct mm_pool {
    _Alignas(64) atomic_uint word;
    _Alignas(64) atomic_uint sleepers;
    /* The job: written while no helper is inside. */
    _Alignas(64) uint32_t range_count;
    void (*body)(void *context, uint32_t unit, uint32_t thread);
    void *context;
    /* Known to the caller alone. */
    uint32_t threads, helper_count; /* helpers that run */
    unsigned long forks;            /* when they were started */
    range *ranges;                  /* [threads] */
    helper *helpers;                /* [threads - 1] */
};

/* ---- forks: a child has the memory of its parent's helpers and none of them ---- */

static atomic_ulong forks;

static void count_fork(void) {
    atomic_fetch_add(&forks, 1);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, count_fork);
}

/* ---- waiting ---- */

static void word_wait(atomic_uint *word, unsigned seen, unsigned waiter) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, seen, NULL, NULL, waiter);
}

static void word_wake(atomic_uint *word, int count, unsigned waiter) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, count, NULL, NULL, waiter);
}

static void look_again(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* ---- work ---- */

/* The thread's own range, then what the others have left. */
static void job_work(mm_pool *pool, uint32_t thread) {
    for (uint32_t i = 0; i < pool->range_count; i++) {
        range *r = &pool->ranges[(thread + i) % pool->range_count];
        uint32_t unit;
        while (atomic_load_explicit(&r->next, memory_order_relaxed) < r->end &&
               (unit = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->end)
            pool->body(pool->context, unit, thread);
    }
}

/* Whether a helper that was in job `last` has something to do. */
static bool is_news(unsigned word, unsigned last) {
    return word & POOL_CLOSES || (word & JOB_OPEN && (word & JOB_NUMBER) != last);
}

static unsigned wait_for_news(mm_pool *pool, unsigned last) {
    unsigned word = atomic_load(&pool->word);
    for (unsigned look = 0; look < LOOKS_BEFORE_SLEEP && !is_news(word, last); look++) {
        look_again();
        word = atomic_load_explicit(&pool->word, memory_order_relaxed);
    }
    while (!is_news(word, last)) {
        atomic_fetch_add(&pool->sleepers, 1); /* before the kernel compares the word: see job_open */
        word_wait(&pool->word, word, WAITS_FOR_JOB);
        atomic_fetch_sub(&pool->sleepers, 1);
        word = atomic_load(&pool->word);
    }
    return word;
}

static void *helper_run(void *argument) {
    const helper *self = argument;
    mm_pool *pool = self->pool;
    unsigned last = 0, word;
    while (!((word = wait_for_news(pool, last)) & POOL_CLOSES)) {
        if (!atomic_compare_exchange_strong(&pool->word, &word, word + 1)) continue;
        last = word & JOB_NUMBER;
        job_work(pool, self->thread);
        word = atomic_fetch_sub(&pool->word, 1) - 1;
        if (word & CALLER_SLEEPS && (word & HELPERS_INSIDE) == 0) word_wake(&pool->word, 1, WAITS_FOR_HELPERS);
    }
    return NULL;
}

/* Either a helper sees the word, or it is among the sleepers: both sides write before they read. */
static void job_open(mm_pool *pool, uint32_t helpers_wanted) {
    unsigned number = (atomic_load_explicit(&pool->word, memory_order_relaxed) & JOB_NUMBER) + JOB_NUMBER_STEP;
    atomic_store(&pool->word, number | JOB_OPEN);
    if (atomic_load(&pool->sleepers) > 0) word_wake(&pool->word, (int)helpers_wanted, WAITS_FOR_JOB);
}

/* Lets no helper in any more and waits for those inside. */
static void job_close(mm_pool *pool) {
    unsigned word = atomic_fetch_and(&pool->word, ~JOB_OPEN);
    for (unsigned look = 0; look < LOOKS_BEFORE_SLEEP && word & HELPERS_INSIDE; look++) {
        look_again();
        word = atomic_load(&pool->word);
    }
    if ((word & HELPERS_INSIDE) == 0) return;
    word = atomic_fetch_or(&pool->word, CALLER_SLEEPS) | CALLER_SLEEPS;
    while (word & HELPERS_INSIDE) {
        word_wait(&pool->word, word, WAITS_FOR_HELPERS);
        word = atomic_load(&pool->word);
    }
}

/* ---- the pool ---- */

/* Signals are for the program's own threads. Returns pthread_create's error; helpers before it run. */
static int start_helpers(mm_pool *pool) {
    sigset_t all, before;
    int error = 0;
    atomic_init(&pool->word, 0);
    atomic_init(&pool->sleepers, 0);
    pool->helper_count = 0;
    pool->forks = atomic_load(&forks);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->helper_count + 1 < pool->threads) {
        helper *h = &pool->helpers[pool->helper_count];
        *h = (helper){.pool = pool, .thread = pool->helper_count + 1};
        error = pthread_create(&h->handle, NULL, helper_run, h);
        if (error) break;
        pool->helper_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void mm_pool_close(mm_pool *pool) {
    if (!pool) return;
    if (pool->forks == atomic_load(&forks)) {
        atomic_fetch_or(&pool->word, POOL_CLOSES);
        word_wake(&pool->word, INT_MAX, WAITS_FOR_JOB);
        for (uint32_t i = 0; i < pool->helper_count; i++) pthread_join(pool->helpers[i].handle, NULL);
    }
    free(pool->ranges);
    free(pool->helpers);
    free(pool);
}

megamoe_status mm_pool_open(uint32_t threads, mm_pool **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    mm_pool *pool = aligned_alloc(64, sizeof *pool);
    int error;
    pthread_once(&once, watch_forks);
    if (!pool) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u threads", threads);
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    pool->forks = atomic_load(&forks);
    pool->ranges = aligned_alloc(64, threads * sizeof *pool->ranges);
    pool->helpers = calloc(threads, sizeof *pool->helpers);
    if (!pool->ranges || !pool->helpers) {
        mm_pool_close(pool);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u threads", threads);
    }
    error = start_helpers(pool);
    if (error) {
        uint32_t started = pool->helper_count + 1;
        mm_pool_close(pool);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "only %u of %u threads could be started: %s", started, threads,
                       strerror(error));
    }
    *out = pool;
    return MEGAMOE_OK;
}

void mm_pool_run(mm_pool *pool, uint32_t units, size_t bytes,
                 void (*body)(void *context, uint32_t unit, uint32_t thread), void *context) {
    size_t worth = bytes / BYTES_PER_THREAD;
    uint32_t count = pool->threads < units ? pool->threads : units;
    if (count > worth) count = (uint32_t)worth;
    if (count <= 1) {
        for (uint32_t unit = 0; unit < units; unit++) body(context, unit, 0);
        return;
    }
    if (pool->forks != atomic_load(&forks)) start_helpers(pool); /* with fewer the caller has more to do */
    for (uint32_t t = 0; t < count; t++) {
        atomic_init(&pool->ranges[t].next, (uint32_t)((uint64_t)units * t / count));
        pool->ranges[t].end = (uint32_t)((uint64_t)units * (t + 1) / count);
    }
    pool->range_count = count;
    pool->body = body;
    pool->context = context;
    job_open(pool, count - 1);
    job_work(pool, 0);
    job_close(pool);
}
