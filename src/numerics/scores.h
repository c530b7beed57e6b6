/* Router logits to scores, in fp32. docs/numerics.md, "Router". */
#ifndef MM_NUMERICS_SCORES_H
#define MM_NUMERICS_SCORES_H

#include "numerics/sigmoid.h"

/* sqrt(softplus(z)), in the form that neither overflows nor cancels. */
MM_HD float mm_score_sqrtsoftplus(float z) {
    return sqrtf((z > 0.0f ? z : 0.0f) + log1pf(expf(-fabsf(z))));
}

MM_HD float mm_score_sigmoid(float z) {
    return mm_sigmoid(z);
}

#endif
