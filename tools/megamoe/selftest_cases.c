/* The shapes of the sweep, and its routings. */
#include "selftest_cases.h"

#include <stdlib.h>
#include <string.h>

#include "random.h"

static const cli_selftest_shape shapes[] = {
    {"small", "H=256,I=128,E=8,K=2,limit=7", true, false, true},
    {"awkward", "H=96,I=80,E=3,K=2", false, false, true}, /* no size is a multiple of a tile's or of a stage's */
    {"uneven", "H=480,I=336,E=3,K=2,limit=10", false, false, false},
    {"many experts", "H=512,I=256,E=24,K=4", true, false, false},
    {"middle", "H=2048,I=768,E=8,K=4", true, false, false},
    {"v4-flash", "H=4096,I=2048,E=4,K=2,like=v4-flash,shared=1", true, true, false},
    {"v4-pro", "H=7168,I=3072,E=4,K=2,like=v4-pro,shared=1", true, true, false},
};

const cli_selftest_shape *cli_selftest_shapes(unsigned *count) {
    *count = sizeof shapes / sizeof *shapes;
    return shapes;
}

const char *cli_selftest_routing_name(cli_selftest_routing routing) {
    static const char *const names[CLI_SELFTEST_COUNT] = {"even", "ragged", "hot", "empty"};
    return names[routing];
}

/* Rows that an expert still may get: its share of the batch, where shares matter. */
static void fill_shares(const cli_examination *e, int64_t *shares) {
    int64_t loaded = e->facts.expert_count, rows = (int64_t)e->token_count * e->facts.shape.experts_per_token;
    for (int64_t i = 0; i < loaded; i++) shares[i] = (2 * rows * (i + 1) + loaded) / (loaded * (loaded + 1));
}

static int64_t largest_share(int64_t *shares, uint32_t loaded, const bool *taken) {
    int64_t best = -1;
    for (uint32_t i = 0; i < loaded; i++)
        if (!taken[i] && shares[i] > 0 && (best < 0 || shares[i] > shares[best])) best = i;
    if (best >= 0) shares[best]--;
    return best;
}

static int64_t random_expert(uint64_t *bits, uint32_t loaded, uint32_t step, const bool *taken) {
    uint32_t choices = (loaded + step - 1) / step, left = 0;
    for (uint32_t i = 0; i < choices; i++) left += !taken[i * step];
    if (left == 0) return -1;
    *bits = random_mix(*bits);
    uint32_t skip = random_below(*bits, left), i = 0;
    while (taken[i * step] || skip-- > 0) i++;
    return i * step;
}

/* The next expert of a token, counted from the first loaded one; -1: none is left. */
static int64_t next_expert(cli_selftest_routing routing, uint32_t n, uint32_t loaded, uint64_t *bits, int64_t *shares,
                           const bool *taken) {
    switch (routing) {
    case CLI_SELFTEST_RAGGED: return largest_share(shares, loaded, taken);
    case CLI_SELFTEST_HOT: return n == 0 ? loaded / 2 : random_expert(bits, loaded, 1, taken);
    case CLI_SELFTEST_EMPTY: return random_expert(bits, loaded, 2, taken);
    case CLI_SELFTEST_EVEN:
    case CLI_SELFTEST_COUNT: break;
    }
    return random_expert(bits, loaded, 1, taken);
}

void cli_selftest_route(cli_examination *e, cli_selftest_routing routing) {
    uint32_t k_count = e->facts.shape.experts_per_token, loaded = e->facts.expert_count;
    uint64_t key = random_key(e->options->seed, "selftest routing");
    size_t slots = (size_t)e->token_count * k_count;
    int64_t *shares = cli_allocate(loaded, sizeof *shares);
    bool *taken = cli_allocate(loaded, sizeof *taken);
    free(e->input.expert_ids);
    free(e->input.expert_weights);
    e->input.expert_ids = cli_allocate(slots, sizeof(int32_t));
    e->input.expert_weights = cli_allocate(slots, sizeof(float));
    fill_shares(e, shares);
    for (uint32_t t = 0; t < e->token_count; t++) {
        bool none = routing == CLI_SELFTEST_EMPTY && t % 5 == 4;
        memset(taken, 0, loaded * sizeof *taken);
        for (uint32_t n = 0; n < k_count; n++) { /* slots rotate, so that the first is not always full */
            uint64_t bits = random_at(key, (uint64_t)t << 8 | n);
            size_t slot = (size_t)t * k_count + (t + n) % k_count;
            int64_t expert = none ? -1 : next_expert(routing, n, loaded, &bits, shares, taken);
            if (expert >= 0) taken[expert] = true;
            e->input.expert_ids[slot] = expert < 0 ? -1 : (int32_t)(e->facts.expert_first + (uint32_t)expert);
            e->input.expert_weights[slot] =
                expert < 0 ? 0.0f : (float)((0.1 + random_unit(random_mix(bits))) / k_count);
        }
    }
    free(shares);
    free(taken);
    e->batch = e->input.batch;
    e->batch.expert_ids = e->input.expert_ids;
    e->batch.expert_weights = e->input.expert_weights;
}
