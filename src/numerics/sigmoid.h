/* The logistic function in fp32, shared by the router's scores and the gated activations. */
#ifndef MM_NUMERICS_SIGMOID_H
#define MM_NUMERICS_SIGMOID_H

#include "numerics/host_device.h"

/*
 * The exponential is taken of -|x| only, so it never overflows: exp(-x) would be infinite below -88.7, and
 * experts with smaller logits would all tie at a score of 0 although fp32 can still tell them apart.
 */
MM_HD float mm_sigmoid(float x) {
    float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

#endif
