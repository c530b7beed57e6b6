/*
 * Router logits to scores. docs/numerics.md, "Router". Computed in double and rounded once, so that every
 * backend has the same fp32 score for the same logit and near ties are broken alike everywhere.
 */
#ifndef MM_NUMERICS_SCORES_H
#define MM_NUMERICS_SCORES_H

#include "numerics/host_device.h"

/* sqrt(softplus(z)), in the form that neither overflows nor cancels. */
MM_HD float mm_score_sqrtsoftplus(float z) {
    double x = (double)z;
    return (float)sqrt((x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x))));
}

MM_HD float mm_score_sigmoid(float z) {
    return (float)(1.0 / (1.0 + exp(-(double)z)));
}

/* exp(z - largest), the numerator of a softmax. */
MM_HD float mm_score_exp(float z, float largest) {
    return (float)exp((double)z - (double)largest);
}

#endif
