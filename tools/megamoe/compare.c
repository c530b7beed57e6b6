/* The rules are derived in docs/numerics.md, "Bounds"; the numbers here are those of that section. */
#include "compare.h"

#include <math.h>
#include <stdlib.h>

#include "formats.h"

double cli_sum_units(uint64_t k) {
    double any_order = (double)k, likely = 12.0 * sqrt((double)k);
    return (any_order < likely ? any_order : likely) + 8.0;
}

void cli_mismatch(cli_verdict *v, cli_field field, uint64_t index, double got, double want) {
    if (v->mismatches++ > 0) return;
    v->field = field;
    v->index = index;
    v->got = got;
    v->want = want;
}

/* Adds a pair to the sums; false if exactly one of them is not a number, which no rule allows. */
static bool add_pair(cli_verdict *v, double got, double want) {
    if (!isfinite(got) || !isfinite(want)) return (isnan(got) && isnan(want)) || got == want;
    v->dot += got * want;
    v->got_squares += got * got;
    v->want_squares += want * want;
    return true;
}

static void add_relative(cli_verdict *v, double got, double want, double scale) {
    double error = scale > 0 ? fabs(got - want) / scale : got == want ? 0 : INFINITY;
    if (isfinite(got) && isfinite(want) && error > v->max_rel_error) v->max_rel_error = error;
}

void cli_judge_bytes(cli_verdict *v, cli_field field, const uint8_t *got, const uint8_t *want, uint64_t count,
                     cli_excuse excuse, const void *context) {
    v->elements += count;
    for (uint64_t i = 0; i < count; i++) {
        v->dot += got[i] * want[i];
        v->got_squares += got[i] * got[i];
        v->want_squares += want[i] * want[i];
        if (got[i] == want[i]) continue;
        if (excuse && excuse(context, i))
            v->near_boundary++;
        else
            cli_mismatch(v, field, i, got[i], want[i]);
    }
}

void cli_judge_bf16(cli_verdict *v, cli_field field, const uint16_t *got, const uint16_t *want, uint64_t count,
                    cli_excuse excuse, const void *context) {
    double largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        double value = fabs((double)bf16_value(want[i]));
        if (isfinite(value) && value > largest) largest = value;
    }
    v->elements += count;
    for (uint64_t i = 0; i < count; i++) {
        double g = (double)bf16_value(got[i]), w = (double)bf16_value(want[i]);
        bool comparable = add_pair(v, g, w);
        add_relative(v, g, w, largest);
        if (g == w || (isnan(g) && isnan(w))) continue;
        if (comparable && excuse && excuse(context, i))
            v->near_boundary++;
        else if (!comparable || excuse || v->cosine_min == 0)
            cli_mismatch(v, field, i, g, w);
    }
}

/* Backends may keep a stage as BF16 (they document it): then every value is one. */
static bool is_bf16(const float *values, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (bits & 0xFFFF) return false;
    }
    return true;
}

static double to_bf16(double value) {
    return (double)bf16_value(bf16_nearest(value));
}

/* A sum that was stored as BF16 is compared as one: the rounding of the oracle's sum, or of one within its bound. */
static bool judge_rounded(cli_verdict *v, double got, double want, double bound, double *changes) {
    double rounded = to_bf16(want), change = rounded * (got - rounded);
    if (!add_pair(v, got, rounded)) return false;
    if (got == rounded || !isfinite(got) || !isfinite(want)) return true;
    if (!(to_bf16(want - bound) <= got && got <= to_bf16(want + bound))) return false;
    v->near_boundary++;
    *changes += change * change;
    return true;
}

void cli_judge_floats(cli_verdict *v, cli_field field, const float *got, const float *want, const float *magnitude,
                      double units, uint64_t count) {
    bool rounded = magnitude && is_bf16(got, count) && !is_bf16(want, count);
    double largest = 0, changes = 0;
    for (uint64_t i = 0; i < count && !magnitude; i++)
        if (isfinite(want[i]) && fabs((double)want[i]) > largest) largest = fabs((double)want[i]);
    v->elements += count;
    for (uint64_t i = 0; i < count; i++) {
        double g = (double)got[i], w = (double)want[i], scale = magnitude ? (double)magnitude[i] : largest;
        double bound = units * 0x1p-24 * scale + 0x1p-126;
        bool good = rounded ? judge_rounded(v, g, w, bound, &changes) : add_pair(v, g, w);
        add_relative(v, g, w, scale);
        if (good && magnitude && !rounded && isfinite(g) && isfinite(w)) good = fabs(g - w) <= bound;
        if (!good) cli_mismatch(v, field, i, g, w);
    }
    /* The signs of those changes are as good as random. */
    if (v->norm_tolerance > 0 && v->want_squares > 0) v->norm_tolerance += 12 * sqrt(changes) / v->want_squares;
}

double cli_cosine(const cli_verdict *v) {
    double norms = sqrt(v->got_squares) * sqrt(v->want_squares);
    if (norms > 0) return v->dot / norms;
    return v->got_squares == v->want_squares ? 1 : 0; /* nothing, and nothing wanted */
}

double cli_norm_ratio(const cli_verdict *v) {
    if (v->want_squares > 0) return sqrt(v->got_squares / v->want_squares);
    return v->got_squares == 0 ? 1 : INFINITY;
}

void cli_verdict_finish(cli_verdict *v) {
    v->pass = v->mismatches == 0;
    if (v->cosine_min > 0 && !(cli_cosine(v) >= v->cosine_min)) v->pass = false;
    if (v->norm_tolerance > 0 && !(fabs(cli_norm_ratio(v) - 1) <= v->norm_tolerance)) v->pass = false;
}

json_t *cli_verdict_json(const cli_verdict *v) {
    json_t *object = json_pack("{s:s,s:s,s:I,s:I,s:I,s:o,s:o,s:o,s:b}", "stage", v->stage, "compared", v->compared,
                               "elements", (json_int_t)v->elements, "mismatches", (json_int_t)v->mismatches,
                               "near_boundary", (json_int_t)v->near_boundary, "cosine", cli_json_number(cli_cosine(v)),
                               "norm_ratio", cli_json_number(cli_norm_ratio(v)), "max_rel_error",
                               cli_json_number(v->max_rel_error), "pass", v->pass);
    if (v->mismatches) {
        char *where = cli_verdict_where(v);
        json_object_set_new(object, "first_mismatch", json_string(where));
        free(where);
    }
    return object;
}

char *cli_verdict_where(const cli_verdict *v) {
    if (v->mismatches == 0)
        return cli_format("%s: as a whole, cosine %.9f and norm ratio %.6f", v->stage, cli_cosine(v),
                          cli_norm_ratio(v));
    uint64_t row = v->index / v->field.width, index = v->index % v->field.width;
    unsigned long long token = row / v->field.slots, slot = row % v->field.slots;
    if (v->field.slots == 1)
        return cli_format("%s: token %llu, index %llu is %.9g, and the definition gives %.9g", v->field.name, token,
                          (unsigned long long)index, v->got, v->want);
    return cli_format("%s: token %llu, slot %llu, index %llu is %.9g, and the definition gives %.9g", v->field.name,
                      token, slot, (unsigned long long)index, v->got, v->want);
}
