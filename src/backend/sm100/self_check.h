/*
 * Trust at run time: no kernel here has been run on the hardware by the people who wrote it, so none is used
 * before it has multiplied. Every instance computes a few tiles of integer-valued data, whose results have
 * the same bits in any order of addition, and is compared with integers summed on the host. The portable kernels of
 * the same GPU compute the same products and are compared too: they take over where sm100's are not trusted, so they
 * must be right as well, and the sentence says which of the two was wrong. Takes some ten milliseconds.
 */
#ifndef MM_SM100_SELF_CHECK_H
#define MM_SM100_SELF_CHECK_H

#include "backend/sm100/machine.h"
#include "weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of tokens times the weights of their group, as checkpoints store both; everything is in host memory. */
struct sm100_product {
    const mm_matrix *groups; /* NVFP4, [features, columns] */
    uint32_t group_count, rows, features, columns;
    const uint8_t *codes, *scales; /* of the rows; their global scale is 1 */
    const int32_t *ends;           /* of each group's rows */
};

/* The portable kernels of the same GPU. */
struct sm100_portable {
    void *context;
    megamoe_status (*multiply)(void *context, const struct sm100_product *product, float *results);
};

/* OK if every instance gave every bit; DEVICE_ERROR and what differed, timed out or could not be launched
 * first; UNSUPPORTED_DEVICE if it was the portable kernels that did. portable NULL: there are none here. Waits for the
 * machine. The caller remembers the answer, once per process and device. */
megamoe_status mm_sm100_self_check(const struct sm100_machine *machine, const struct sm100_portable *portable);

#ifdef __cplusplus
}
#endif

#endif
