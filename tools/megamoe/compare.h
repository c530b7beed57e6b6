/*
 * Judging a stage. Two arrays are compared element by element under the rule of their stage, and as wholes by
 * cosine AND norm ratio, since each alone is blind: a cosine to a constant factor, a norm to a permutation.
 */
#ifndef CLI_COMPARE_H
#define CLI_COMPARE_H

#include "cli.h"

/* A field of megamoe_stages: [token, slot, index], or [token, index] with one slot. */
typedef struct cli_field {
    const char *name;
    uint32_t slots;
    uint64_t width;
} cli_field;

typedef struct cli_verdict {
    const char *stage, *compared; /* "exact", "close", "fused" */
    uint64_t elements, mismatches;
    uint64_t near_boundary; /* elements that differ by the rounding of a value within the bound of a boundary */
    double dot, got_squares, want_squares, max_rel_error;
    double cosine_min, norm_tolerance; /* 0: not asked of this stage */
    bool pass;
    cli_field field; /* the first mismatch: where, and by how much */
    uint64_t index;
    double got, want;
} cli_verdict;

/* May a rounded element differ from the oracle's, because the value before rounding lay near a boundary? */
typedef bool (*cli_excuse)(const void *context, uint64_t index);

void cli_judge_bytes(cli_verdict *v, cli_field field, const uint8_t *got, const uint8_t *want, uint64_t count,
                     cli_excuse excuse, const void *context);
void cli_judge_bf16(cli_verdict *v, cli_field field, const uint16_t *got, const uint16_t *want, uint64_t count,
                    cli_excuse excuse, const void *context);
/* |got - want| <= units * 2^-24 * magnitude; magnitude NULL: the element rule is only that NaNs agree. */
void cli_judge_floats(cli_verdict *v, cli_field field, const float *got, const float *want, const float *magnitude,
                      double units, uint64_t count);
void cli_mismatch(cli_verdict *v, cli_field field, uint64_t index, double got, double want);
double cli_cosine(const cli_verdict *v);
double cli_norm_ratio(const cli_verdict *v);
void cli_verdict_finish(cli_verdict *v);
json_t *cli_verdict_json(const cli_verdict *v);
/* "token 3, slot 1, index 17: 0.25, and the definition gives 0.5" */
char *cli_verdict_where(const cli_verdict *v);

/* The allowed error of an fp32 sum of k products, in units of 2^-24 of the sum of their magnitudes. */
double cli_sum_units(uint64_t k);

#endif
