/* See excuse.h. Each function is one interval of docs/numerics.md, "Bounds". */
#include "excuse.h"

#include <math.h>

#include "compare.h"
#include "formats.h"

typedef struct interval {
    double low, high;
} interval;

/* An element of L1: exactly the backend's own, or within the bound of sums around the oracle's. */
static interval projected(const cli_excuse_context *c, uint64_t at) {
    double value = (double)c->l1[at], error = 0;
    if (c->l1_magnitude)
        error = cli_sum_units(c->facts->shape.hidden) * 0x1p-24 * (double)c->l1_magnitude[at] + 0x1p-126;
    return (interval){value - error, value + error};
}

static double clamped(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
}

static double silu(double gate, double alpha) {
    return gate / (1 + exp(-alpha * gate));
}

/* silu falls down to its minimum at alpha gate = -1.2784645 and rises from there. */
static interval silu_between(interval gate, double alpha) {
    double a = silu(gate.low, alpha), b = silu(gate.high, alpha), lowest = -1.2784645427610738 / alpha;
    if (gate.low < lowest && lowest < gate.high) return (interval){silu(lowest, alpha), fmax(a, b)};
    return (interval){fmin(a, b), fmax(a, b)};
}

static interval times(interval a, interval b) {
    double p[4] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
    return (interval){fmin(fmin(p[0], p[1]), fmin(p[2], p[3])), fmax(fmax(p[0], p[1]), fmax(p[2], p[3]))};
}

/*
 * h of element `index` of [T, K, I], with its error: fp32 operations and expf cost at most 16 units, and
 * rounding alpha * G costs the exponential another |alpha G| units (docs/numerics.md, "Bounds").
 */
static interval activated(const cli_excuse_context *c, uint64_t index) {
    const megamoe_shape *shape = &c->facts->shape;
    uint64_t pair = index / shape->intermediate, column = index % shape->intermediate;
    uint64_t at = pair * 2 * shape->intermediate + column;
    interval gate = projected(c, at), up = projected(c, at + shape->intermediate), h;
    double limit = shape->swiglu_limit > 0 ? (double)shape->swiglu_limit : INFINITY, units = 16;
    double alpha = shape->swiglu_alpha > 0 ? (double)shape->swiglu_alpha : 1, beta = (double)shape->swiglu_beta;
    if (shape->not_gated) {
        up = (interval){fmax(up.low, 0), fmax(up.high, 0)};
        h = (interval){up.low * up.low, up.high * up.high};
    } else {
        gate = (interval){clamped(gate.low, -INFINITY, limit), clamped(gate.high, -INFINITY, limit)};
        up = (interval){clamped(up.low, -limit, limit) + beta, clamped(up.high, -limit, limit) + beta};
        h = times(silu_between(gate, alpha), up);
        units += alpha * fmax(fabs(gate.low), fabs(gate.high));
    }
    double weight = c->facts->routing_weight_before ? (double)c->expert_weights[pair] : 1;
    h = times(h, (interval){weight, weight});
    double error = units * 0x1p-24 * fmax(fabs(h.low), fabs(h.high)) + 0x1p-126;
    return (interval){h.low - error, h.high + error};
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
