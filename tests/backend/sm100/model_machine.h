/* The functional model behind the table that the backend launches through. */
#ifndef TESTS_SM100_MODEL_MACHINE_H
#define TESTS_SM100_MODEL_MACHINE_H

#include "backend/sm100/machine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the next launches run with, and what happened in them. */
struct model_state {
    uint64_t seed; /* of the next launch; it grows by one with each */
    int time_runs; /* bounded waits expire */
    uint64_t mma_count, async_ops, launches;
    uint32_t grid[SM100_KERNEL_COUNT]; /* CTAs of the latest launch of each kernel */
};

/* A machine of `multiprocessors`; state must outlive it. */
struct sm100_machine model_machine(struct model_state *state, uint32_t multiprocessors);

/* How many schedules (distinct seeds) this process has run of a kernel to its end; SM100_KERNEL_COUNT: of all. */
uint32_t model_schedule_count(enum sm100_kernel kernel);

#ifdef __cplusplus
}
#endif

#endif
