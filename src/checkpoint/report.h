/*
 * What a load says while it reads: how far it is, and which shard is slow. A checkpoint is usually spread over
 * disks and caches that differ, so one rate would say nothing about where the time goes.
 */
#ifndef MM_CHECKPOINT_REPORT_H
#define MM_CHECKPOINT_REPORT_H

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"

/* Bytes of one shard that were read, and how long that took. */
typedef struct mm_shard_rate {
    uint64_t bytes;
    double seconds;
} mm_shard_rate;

typedef struct mm_reporting {
    const mm_load_report *to; /* or NULL: nobody listens */
    mm_shard_rate *rates;     /* [shard_count] */
    uint64_t done_bytes, total_bytes;
} mm_reporting;

double mm_report_now(void); /* monotonic seconds */
/* `bytes` of shard were read since `began`. CANCELLED if the listener does not want the rest. */
megamoe_status mm_report_step(mm_reporting *reporting, uint32_t shard, uint64_t bytes, double began);
/* Tells the log which shard is slow, if one is. */
void mm_report_end(const mm_reporting *reporting, const mm_tensors *tensors);

/*
 * The slowest shard, if it cost at least half a second and was read at less than a quarter of the others' rate
 * (both in bytes per second).
 */
bool mm_rates_slowest(const mm_shard_rate *rates, uint32_t count, uint32_t *shard, double *rate, double *others);

#endif
