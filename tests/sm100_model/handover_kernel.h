/* Rows handed from CTA to CTA, or from rank to rank, through global memory: arguments and faults of handover_kernel.cu.
 */
#ifndef HANDOVER_KERNEL_H
#define HANDOVER_KERNEL_H
#include "../../src/backend/sm100/tensor_map.h"

enum handover_fault {
    HANDOVER_NONE,
    HANDOVER_RELAXED,  /* the counter is raised without release */
    HANDOVER_EARLY,    /* before the other threads have written */
    HANDOVER_NO_FENCE, /* ordinary stores, TMA loads, no proxy fence */
    HANDOVER_COUNT,    /* the reader waits for one arrival fewer */
    HANDOVER_NO_WAIT,
    HANDOVER_NEVER,  /* a counter that nobody raises */
    HANDOVER_SCOPE,  /* gpu scope between ranks */
    HANDOVER_BOUNDS, /* one row too many */
    HANDOVER_TIMEOUT /* nobody raises it, but the wait is bounded by globaltimer */
};

struct handover_args {
    struct sm100_tensor_map map; /* rows of 128 bytes */
    uint8_t *rows;
    uint32_t *counter, *out, *record;
    uint32_t writers, rank, fault, between_ranks;
};
#ifdef MEGAMOE_SM100_MODEL
extern "C" void handover_kernel(const struct handover_args &args);
void handover_cases(void);
#endif
#endif
