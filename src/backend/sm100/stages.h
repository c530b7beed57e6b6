/* What the kernels of a run left behind, brought to host memory in the order of the batch. For the check. */
#ifndef MM_SM100_STAGES_H
#define MM_SM100_STAGES_H

#include "backend/backend.h"
#include "backend/sm100/mega_moe.h"

/* Device memory for the stages that a plain run does not keep; into `batch`, which then asks the kernels for
 * them. */
megamoe_status mm_sm100_stages_open(const struct mm_mega_moe *moe, struct mm_mega_moe_batch *batch);
void mm_sm100_stages_close(const struct mm_mega_moe *moe, struct mm_mega_moe_batch *batch);

/* After mm_nvfp4_mega_moe_full of `batch`: x_*, l1, h_*, l2 and output, where they are wanted; adds to
 * *written. */
megamoe_status mm_sm100_stages_read(const struct mm_mega_moe *moe, const struct mm_mega_moe_batch *batch,
                                    const megamoe_stages *stages, uint32_t *written);

#endif
