/*
 * The threads of the CPU backend. Units here wait for each other, so that a test hangs if a helper does not come when
 * it is asked, or if the caller waits for one that has begun nothing; no test looks at a clock.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/cpu/pool.h"

#define MUCH ((size_t)1 << 40) /* bytes that are worth every thread */

enum { UNITS_MAX = 300 };

typedef struct job {
    mm_pool *pool;
    uint32_t threads, units;
    atomic_uint done, helped;
    bool meets; /* the caller's first unit waits until a helper has begun one, and that one until all others are done */
    bool slow;  /* a helper that was asked would have time to come */
    bool signals_reach_helpers, alien;
    uint32_t times[UNITS_MAX]; /* each unit was done; no atomics: every unit belongs to one thread */
} job;

static void job_clear(job *j, uint32_t units) {
    j->units = units;
    atomic_store(&j->done, 0);
    atomic_store(&j->helped, 0);
    memset(j->times, 0, sizeof j->times);
}

static void unit(void *context, uint32_t number, uint32_t thread) {
    job *j = context;
    sigset_t blocked;
    j->times[number]++;
    if (thread >= j->threads) j->alien = true;
    if (thread > 0) {
        pthread_sigmask(SIG_SETMASK, NULL, &blocked);
        if (!sigismember(&blocked, SIGINT)) j->signals_reach_helpers = true;
        bool first = atomic_fetch_add(&j->helped, 1) == 0;
        while (j->meets && first && atomic_load(&j->done) + 1 < j->units) usleep(100);
    } else {
        while (j->meets && atomic_load(&j->helped) == 0) usleep(100);
    }
    if (j->slow) usleep(1000);
    atomic_fetch_add(&j->done, 1);
}

static bool job_is_right(const job *j) {
    for (uint32_t i = 0; i < UNITS_MAX; i++)
        if (j->times[i] != (i < j->units)) return false;
    return !j->alien && !j->signals_reach_helpers && atomic_load(&j->done) == j->units;
}

static mm_pool *pool_of(uint32_t threads) {
    mm_pool *pool = NULL;
    assert_int_equal(mm_pool_open(threads, &pool), MEGAMOE_OK);
    return pool;
}

static void every_unit_once(void **state) {
    static const uint32_t threads[] = {1, 2, 3, 8, 33}, units[] = {0, 1, 2, 7, 64, 300};
    (void)state;
    for (unsigned t = 0; t < 5; t++) {
        job j = {.pool = pool_of(threads[t]), .threads = threads[t]};
        for (unsigned round = 0; round < 600; round++) {
            job_clear(&j, units[round % 6]);
            mm_pool_run(j.pool, j.units, MUCH, unit, &j);
            assert_true(job_is_right(&j));
        }
        mm_pool_close(j.pool);
    }
    mm_pool_close(NULL);
}

/* The helper stands in its unit while the caller does all others, those of the helper's range too. */
static void a_standing_helper_delays_its_unit_only(void **state) {
    job j = {.pool = pool_of(2), .threads = 2, .meets = true};
    (void)state;
    for (unsigned round = 0; round < 20; round++) {
        if (round % 2) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); /* the helper has fallen asleep */
        job_clear(&j, 50);
        mm_pool_run(j.pool, j.units, MUCH, unit, &j);
        assert_true(job_is_right(&j));
        assert_true(atomic_load(&j.helped) >= 1);
    }
    mm_pool_close(j.pool);
}

static void little_work_stays_with_the_caller(void **state) {
    job j = {.pool = pool_of(4), .threads = 4, .slow = true};
    (void)state;
    for (unsigned round = 0; round < 5; round++) {
        job_clear(&j, 20);
        mm_pool_run(j.pool, j.units, 100000, unit, &j);
        assert_true(job_is_right(&j));
        assert_int_equal(atomic_load(&j.helped), 0);
    }
    mm_pool_close(j.pool);
}

static void *run_often(void *argument) { /* no cmocka here: it belongs to the main thread */
    job *j = argument;
    for (unsigned round = 0; round < 2000; round++) {
        job_clear(j, 40 + round % 30);
        mm_pool_run(j->pool, j->units, MUCH, unit, j);
        if (!job_is_right(j)) return j;
    }
    return NULL;
}

static void two_pools_in_two_threads(void **state) {
    static job jobs[2];
    pthread_t threads[2];
    void *wrong;
    (void)state;
    for (unsigned i = 0; i < 2; i++) jobs[i] = (job){.pool = pool_of(3), .threads = 3};
    for (unsigned i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, run_often, &jobs[i]), 0);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
        mm_pool_close(jobs[i].pool);
    }
}

static int child_status(job *j, bool run) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        alarm(300);
        if (run) {
            j->meets = true; /* needs a helper of the child's own */
            job_clear(j, 50);
            mm_pool_run(j->pool, j->units, MUCH, unit, j);
            if (!job_is_right(j)) _exit(2);
        }
        mm_pool_close(j->pool);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void a_child_has_its_own_helpers(void **state) {
    static job idle, busy;
    pthread_t thread;
    void *wrong;
    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip(); /* it cannot start threads in a child */
#endif
    idle = (job){.pool = pool_of(3), .threads = 3};
    busy = (job){.pool = pool_of(3), .threads = 3};
    job_clear(&idle, 50);
    mm_pool_run(idle.pool, idle.units, MUCH, unit, &idle);
    assert_int_equal(child_status(&idle, true), 0);
    assert_int_equal(child_status(&idle, false), 0);
    assert_int_equal(pthread_create(&thread, NULL, run_often, &busy), 0);
    for (unsigned i = 0; i < 10; i++) assert_int_equal(child_status(&busy, true), 0); /* forked in the middle of jobs */
    assert_int_equal(pthread_join(thread, &wrong), 0);
    assert_null(wrong);
    job_clear(&idle, 50);
    mm_pool_run(idle.pool, idle.units, MUCH, unit, &idle); /* the parent's helpers are still there */
    assert_true(job_is_right(&idle));
    mm_pool_close(idle.pool);
    mm_pool_close(busy.pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_unit_once),
        cmocka_unit_test(a_standing_helper_delays_its_unit_only),
        cmocka_unit_test(little_work_stays_with_the_caller),
        cmocka_unit_test(two_pools_in_two_threads),
        cmocka_unit_test(a_child_has_its_own_helpers),
    };
    return cmocka_run_group_tests_name("cpu_pool", tests, NULL, NULL);
}
