/* The gated activations between L1 and L2, in fp32. docs/numerics.md, "The layer". */
#ifndef MM_NUMERICS_SWIGLU_H
#define MM_NUMERICS_SWIGLU_H

#include "numerics/host_device.h"

typedef struct mm_swiglu {
    float alpha, beta; /* 1, 0: SiLU (DeepSeek, Qwen, GLM); 1.702, 1: gpt-oss */
    float limit;       /* infinity: no clamp */
    int relu2;         /* h = max(up, 0)^2; neither the gate nor the limit is read */
} mm_swiglu;

/* The exponential is taken of -|x| only: exp(-x) would overflow below -88.7 and take the result with it. */
MM_HD float mm_sigmoid(float x) {
    float e = expf(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* The clamp is asymmetric (gate only from above), comes before the activation, and lets NaN through. */
MM_HD float mm_swiglu_apply(const mm_swiglu *f, float gate, float up) {
    if (f->relu2) {
        float r = up > 0.0f || up != up ? up : 0.0f;
        return r * r;
    }
    if (gate > f->limit) gate = f->limit;
    if (up > f->limit) up = f->limit;
    if (up < -f->limit) up = -f->limit;
    return gate * mm_sigmoid(f->alpha * gate) * (up + f->beta);
}

#endif
