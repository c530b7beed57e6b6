/* Rates of shards while a layer is loaded. */
#include "checkpoint/report.h"

#include "error.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

double mm_report_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

megamoe_status mm_report_step(mm_reporting *reporting, uint32_t shard, uint64_t bytes, double began) {
    const mm_load_report *to = reporting->to;
    reporting->rates[shard].bytes += bytes;
    reporting->rates[shard].seconds += mm_report_now() - began;
    reporting->done_bytes += bytes;
    if (!to || !to->progress || !reporting->total_bytes) return MEGAMOE_OK;
    if (to->progress(to->progress_context, reporting->done_bytes, reporting->total_bytes)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_CANCELLED, "loading was cancelled after %" PRIu64 " of %" PRIu64 " bytes",
                   reporting->done_bytes, reporting->total_bytes);
}

bool mm_rates_slowest(const mm_shard_rate *rates, uint32_t count, uint32_t *shard, double *rate, double *others) {
    mm_shard_rate rest = {0};
    uint32_t slowest = count;
    for (uint32_t i = 0; i < count; i++) {
        if (!rates[i].bytes || rates[i].seconds <= 0) continue;
        rest.bytes += rates[i].bytes;
        rest.seconds += rates[i].seconds;
        if (slowest == count ||
            (double)rates[i].bytes * rates[slowest].seconds < (double)rates[slowest].bytes * rates[i].seconds)
            slowest = i;
    }
    if (slowest == count || rates[slowest].seconds < 0.5) return false;
    rest.bytes -= rates[slowest].bytes;
    rest.seconds -= rates[slowest].seconds;
    if (!rest.bytes || rest.seconds <= 0) return false;
    *shard = slowest;
    *rate = (double)rates[slowest].bytes / rates[slowest].seconds;
    *others = (double)rest.bytes / rest.seconds;
    return *rate < *others / 4;
}

void mm_report_end(const mm_reporting *reporting, const mm_tensors *tensors) {
    const mm_load_report *to = reporting->to;
    uint32_t shard;
    double rate, others;
    char message[768];
    if (!to || !to->log || !mm_rates_slowest(reporting->rates, tensors->shard_count, &shard, &rate, &others)) return;
    snprintf(message, sizeof message, "%s is slow: it was read at %.3g MB/s, the other shards at %.3g MB/s",
             tensors->shards[shard].path, rate / 1e6, others / 1e6);
    to->log(to->log_context, 1, message);
}
