/* See excuse.h. Each function is one interval of docs/numerics.md, "Bounds". */
#include "excuse.h"

#include <math.h>

#include "formats.h"

typedef struct interval {
    double low, high;
} interval;

/*
 * h of element `index` of [T, K, I], with its error: fp32 operations and expf cost at most 16 units, and
 * rounding alpha * G costs the exponential another |alpha G| units (docs/numerics.md, "Bounds").
 */
static interval activated(const cli_excuse_context *c, uint64_t index) {
    const megamoe_shape *shape = &c->facts->shape;
    uint64_t pair = index / shape->intermediate, column = index % shape->intermediate;
    const float *l1 = c->stages->l1 + pair * 2 * shape->intermediate;
    double gate = (double)l1[column], up = (double)l1[shape->intermediate + column], value, units = 16;
    double limit = shape->swiglu_limit > 0 ? (double)shape->swiglu_limit : INFINITY;
    double alpha = shape->swiglu_alpha > 0 ? (double)shape->swiglu_alpha : 1;
    if (shape->not_gated) {
        value = up > 0 ? up * up : 0;
    } else {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        value = gate / (1 + exp(-alpha * gate)) * (up + (double)shape->swiglu_beta);
        units += fabs(alpha * gate);
    }
    if (c->facts->routing_weight_before) value *= (double)c->expert_weights[pair];
    double error = units * 0x1p-24 * fabs(value) + 0x1p-126;
    return (interval){value - error, value + error};
}

bool cli_excuse_h(const void *context, uint64_t index) {
    const cli_excuse_context *c = context;
    interval h = activated(c, index);
    double got = (double)bf16_value(c->stages->h[index]);
    return (double)bf16_value(bf16_nearest(h.low)) <= got && got <= (double)bf16_value(bf16_nearest(h.high));
}

static interval magnitude(interval v) {
    if (v.low >= 0) return v;
    if (v.high <= 0) return (interval){-v.high, -v.low};
    return (interval){0, fmax(-v.low, v.high)};
}

enum { BLOCK = 16 };

bool cli_excuse_h_scale(const void *context, uint64_t index) {
    const cli_excuse_context *c = context;
    uint64_t pair = index * BLOCK / c->facts->shape.intermediate;
    interval amax = {0, 0};
    for (unsigned i = 0; i < BLOCK; i++) {
        interval h = magnitude(activated(c, index * BLOCK + i));
        amax.low = fmax(amax.low, h.low);
        amax.high = fmax(amax.high, h.high);
    }
    double unit = 6 * (double)c->stages->h_globals[pair], slack = 4 * 0x1p-24; /* two divisions, rounded */
    unsigned low = e4m3_nearest(fmax(amax.low / unit * (1 - slack), 0x1p-9));
    unsigned high = e4m3_nearest(fmax(amax.high / unit * (1 + slack), 0x1p-9));
    return low <= c->stages->h_scales[index] && c->stages->h_scales[index] <= high;
}

/* One E2M1 code under the backend's own scale; a value that may be either sign of zero may have either sign.
 */
static bool code_excused(const cli_excuse_context *c, uint64_t index, unsigned code) {
    uint64_t pair = index / c->facts->shape.intermediate;
    double step = e4m3_value(c->stages->h_scales[index / BLOCK]) * (double)c->stages->h_globals[pair];
    double slack = 4 * 0x1p-24; /* the product and the quotient, rounded */
    interval h = activated(c, index), m = magnitude(h);
    unsigned low = e2m1_nearest(m.low / step * (1 - slack)), high = e2m1_nearest(m.high / step * (1 + slack));
    bool negative = code & 8;
    if ((negative && h.low > 0) || (!negative && h.high < 0)) return false;
    return low <= (code & 7) && (code & 7) <= high;
}

bool cli_excuse_h_code(const void *context, uint64_t index) {
    const cli_excuse_context *c = context;
    unsigned byte = c->stages->h_codes[index];
    return code_excused(c, 2 * index, byte & 15) && code_excused(c, 2 * index + 1, byte >> 4);
}

bool cli_excuse_output(const void *context, uint64_t index) {
    const cli_excuse_context *c = context;
    uint32_t k_count = c->facts->shape.experts_per_token;
    uint64_t hidden = c->facts->shape.hidden, token = index / hidden, column = index % hidden;
    double sum = 0, size = 0;
    for (uint32_t k = 0; k < k_count; k++) {
        uint64_t pair = token * k_count + k;
        double weight = c->facts->routing_weight_before ? 1 : (double)c->expert_weights[pair];
        if (c->expert_ids[pair] < 0) continue;
        sum += weight * (double)c->stages->l2[pair * hidden + column];
        size += fabs(weight * (double)c->stages->l2[pair * hidden + column]);
    }
    if (c->facts->has_shared_expert) {
        sum += (double)c->stages->shared[index];
        size += fabs((double)c->stages->shared[index]);
    }
    double error = (k_count + 2) * 0x1p-24 * size + 0x1p-126, got = (double)bf16_value(c->stages->output[index]);
    return (double)bf16_value(bf16_nearest(sum - error)) <= got && got <= (double)bf16_value(bf16_nearest(sum + error));
}
