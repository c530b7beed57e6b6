/*
 * Trust at run time: no kernel here has been run on the hardware by the people who wrote it, so none is used
 * before it has multiplied. Every instance computes a few tiles of integer-valued data, whose results have
 * the same bits in any order of addition, and is compared with integers summed on the host. Takes some ten
 * milliseconds.
 */
#ifndef MM_SM100_SELF_CHECK_H
#define MM_SM100_SELF_CHECK_H

#include "backend/sm100/machine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* OK if every instance gave every bit; DEVICE_ERROR and what differed, timed out or could not be launched
 * first. Waits for the machine. The caller remembers the answer, once per process and device. */
megamoe_status mm_sm100_self_check(const struct sm100_machine *machine);

#ifdef __cplusplus
}
#endif

#endif
