/* Memory for every stage of a layer. Nothing here is zero by chance: what a backend leaves alone stays
 * poisoned. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* NaN in F32 and BF16, and no expert: a field that nobody wrote cannot pass for a result. */
static void *poisoned(size_t count, size_t size) {
    void *memory = cli_allocate(count, size);
    memset(memory, 0xFF, count * size);
    return memory;
}

void cli_stages_allocate(megamoe_stages *stages, const megamoe_layer_facts *facts, uint32_t token_count, bool oracle) {
    const megamoe_shape *shape = &facts->shape;
    size_t tokens = token_count, slots = tokens * shape->experts_per_token;
    size_t hidden = shape->hidden, inner = shape->intermediate;
    *stages = (megamoe_stages){.struct_size = sizeof *stages,
                               .expert_ids = poisoned(slots, sizeof(int32_t)),
                               .expert_weights = poisoned(slots, sizeof(float)),
                               .l1 = poisoned(slots * 2 * inner, sizeof(float)),
                               .l2 = poisoned(slots * hidden, sizeof(float)),
                               .output = poisoned(tokens * hidden, sizeof(uint16_t))};
    if (facts->activations == MEGAMOE_ACTIVATIONS_NVFP4) {
        stages->x_codes = poisoned(tokens * hidden / 2, 1);
        stages->x_scales = poisoned(tokens * hidden / 16, 1);
        stages->x_globals = poisoned(tokens, sizeof(float));
        stages->h_codes = poisoned(slots * inner / 2, 1);
        stages->h_scales = poisoned(slots * inner / 16, 1);
        stages->h_globals = poisoned(slots, sizeof(float));
    } else {
        stages->h = poisoned(slots * inner, sizeof(uint16_t));
    }
    if (facts->has_shared_expert) stages->shared = poisoned(tokens * hidden, sizeof(float));
    if (facts->routes) stages->logits = poisoned(tokens * shape->expert_count, sizeof(float));
    if (oracle) {
        stages->l1_magnitude = poisoned(slots * 2 * inner, sizeof(float));
        stages->l2_magnitude = poisoned(slots * hidden, sizeof(float));
        if (facts->routes) stages->logits_magnitude = poisoned(tokens * shape->expert_count, sizeof(float));
    }
}

void cli_stages_free(megamoe_stages *stages) {
    void *const fields[] = {stages->expert_ids,
                            stages->expert_weights,
                            stages->x_codes,
                            stages->x_scales,
                            stages->x_globals,
                            stages->l1,
                            stages->h,
                            stages->h_codes,
                            stages->h_scales,
                            stages->h_globals,
                            stages->l2,
                            stages->shared,
                            stages->output,
                            stages->logits,
                            stages->l1_magnitude,
                            stages->l2_magnitude,
                            stages->logits_magnitude};
    for (unsigned i = 0; i < sizeof fields / sizeof fields[0]; i++) free(fields[i]);
    *stages = (megamoe_stages){.struct_size = sizeof *stages};
}
