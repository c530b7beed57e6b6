/*
 * A whole layer on the functional model: weights, the five launches, and what every value of the result must be. All
 * sums are of integers that fit 24 bits and the activation is relu2, so that each step is one IEEE operation or exact,
 * and equality is asked of every output, whatever the schedule and the order of additions.
 */
#ifndef TESTS_SM100_LAYER_PROBLEM_H
#define TESTS_SM100_LAYER_PROBLEM_H

#include "backend/sm100/mega_moe.h"
#include "model_machine.h"

enum { LAYER_EXPERTS_MAX = 40, LAYER_TOKENS_MAX = 400, LAYER_SLOTS_MAX = 4 };

struct layer_problem_options {
    uint32_t hidden, intermediate, experts, slots;
    uint32_t first, step; /* experts loaded here: first, first + step, ...; step 0: all */
    uint32_t multiprocessors, sm_budget;
    bool gated;   /* SwiGLU: no exact values to expect, but the same bits every time */
    bool inexact; /* weights and tokens of any value: the order of additions shows in the bits */
    bool weight_before, token_global, hidden_f32;
    bool batch_invariant;
    struct sm100_scratch *scratch; /* to share with other layers; NULL: the layer's own */
    bool biased;                   /* gate and up in BF16, down in F32, all with gaps between the values */
};

struct layer_problem {
    struct layer_problem_options options;
    mm_expert experts[LAYER_EXPERTS_MAX], loaded[LAYER_EXPERTS_MAX];
    struct model_state state;
    struct sm100_machine machine;
    struct sm100_scratch scratch;
    struct mm_mega_moe *moe;
};

/* Host memory; row t belongs to token t. */
struct layer_batch {
    uint32_t token_count;
    uint16_t *hidden; /* BF16 [token_count, hidden] */
    int32_t ids[LAYER_TOKENS_MAX * LAYER_SLOTS_MAX];
    float weights[LAYER_TOKENS_MAX * LAYER_SLOTS_MAX];
    float *shared; /* [token_count, hidden], or NULL */
};

/* Rows of pairs that have no expert here are zero. */
struct layer_result {
    uint16_t *output;                 /* BF16 [token_count, hidden] */
    uint16_t *partials;               /* BF16 [token_count, slots, hidden] */
    struct mm_mega_moe_counts counts; /* of this run alone */
    uint64_t expert_tokens[LAYER_EXPERTS_MAX];
    float *l1, *l2; /* before any rounding to less than fp32: [token_count, slots, 2 * intermediate and hidden] */
};

void layer_open(struct layer_problem *p, const struct layer_problem_options *options);
void layer_close(struct layer_problem *p);
/* Tokens with values of their own, each to `slots` experts of its own. */
void layer_batch_open(const struct layer_problem *p, struct layer_batch *b, uint32_t token_count, uint32_t salt);
void layer_batch_close(struct layer_batch *b);
void layer_result_close(struct layer_result *r);
/* The five launches, with the seeds from `seed` on, and L2 once more in fp32; fails the test if one does not end well.
 */
void layer_run(struct layer_problem *p, const struct layer_batch *b, uint64_t seed, struct layer_result *r);
/* Fails the test at the first partial row, output or counter that is not the definition's (relu2 and exact sums
 * only). */
void layer_expect(const struct layer_problem *p, const struct layer_batch *b, const struct layer_result *r);

#endif
