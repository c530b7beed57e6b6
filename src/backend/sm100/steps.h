/* The steps of the routed experts behind the public calls, and what they read, for every backend that runs these
 * kernels. */
#ifndef MM_SM100_STEPS_H
#define MM_SM100_STEPS_H

#include "backend/backend.h"
#include "backend/sm100/mega_moe.h"

/* partials: of L2, in device memory. */
megamoe_status mm_sm100_step(struct mm_mega_moe *moe, mm_step step, const struct mm_mega_moe_batch *batch,
                             const megamoe_tensor *partials, void *stream);

/* Fills in everything but struct_size. */
void mm_sm100_weights_describe(const struct mm_mega_moe_weights *weights, megamoe_mega_moe_weights *out);

#endif
