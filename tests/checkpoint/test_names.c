/* What tensor names mean, as a table, and that nothing but an exact number or component matches. */
#include "checkpoint/naming.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

typedef struct name_case {
    const char *name;
    mm_place place;
    uint32_t layer, expert;
    mm_projection projection;
    uint32_t part;
    const char *prefix;
    bool mtp;
} name_case;

static const name_case names[] = {
    {"layers.3.ffn.experts.17.w1.weight", MM_PLACE_EXPERT, 3, 17, MM_GATE, MM_PART_WEIGHT, "layers.3.ffn", false},
    {"layers.3.ffn.experts.17.w3.scale", MM_PLACE_EXPERT, 3, 17, MM_UP, MM_PART_NATIVE_SCALE, "layers.3.ffn", false},
    {"layers.3.ffn.experts.17.w2.weight_scale_2", MM_PLACE_EXPERT, 3, 17, MM_DOWN, MM_PART_GLOBAL, "layers.3.ffn",
     false},
    {"model.layers.10.mlp.experts.0.gate_proj.weight_scale", MM_PLACE_EXPERT, 10, 0, MM_GATE, MM_PART_SCALE,
     "model.layers.10.mlp", false},
    {"model.layers.1.mlp.experts.383.up_proj.input_scale", MM_PLACE_EXPERT, 1, 383, MM_UP, MM_PART_INPUT,
     "model.layers.1.mlp", false},
    {"model.language_model.layers.2.mlp.experts.4.down_proj.weight_packed", MM_PLACE_EXPERT, 2, 4, MM_DOWN,
     MM_PART_PACKED, "model.language_model.layers.2.mlp", false},
    {"language_model.model.layers.2.mlp.experts.4.down_proj.weight_global_scale", MM_PLACE_EXPERT, 2, 4, MM_DOWN,
     MM_PART_INVERSE_GLOBAL, "language_model.model.layers.2.mlp", false},
    {"model.layers.5.block_sparse_moe.experts.6.w2.weight_scale_inv", MM_PLACE_EXPERT, 5, 6, MM_DOWN,
     MM_PART_BLOCK_SCALE, "model.layers.5.block_sparse_moe", false},
    {"backbone.layers.7.mixer.experts.8.up_proj.input_global_scale", MM_PLACE_EXPERT, 7, 8, MM_UP,
     MM_PART_INVERSE_INPUT, "backbone.layers.7.mixer", false},
    {"model.decoder.layers.0.experts.1.gate_proj.weight", MM_PLACE_EXPERT, 0, 1, MM_GATE, MM_PART_WEIGHT,
     "model.decoder.layers.0", false},
    {"mtp.0.ffn.experts.1.w1.weight", MM_PLACE_EXPERT, 0, 1, MM_GATE, MM_PART_WEIGHT, "mtp.0.ffn", true},
    {"mtp.layers.1.mlp.experts.2.up_proj.weight", MM_PLACE_EXPERT, 1, 2, MM_UP, MM_PART_WEIGHT, "mtp.layers.1.mlp",
     true},
    {"model.layers.3.mlp.experts.gate_up_proj", MM_PLACE_STACK, 3, 0, MM_GATE_UP, MM_PART_WEIGHT, "model.layers.3.mlp",
     false},
    {"model.layers.3.mlp.experts.gate_up_proj_weight_scale", MM_PLACE_STACK, 3, 0, MM_GATE_UP, MM_PART_SCALE,
     "model.layers.3.mlp", false},
    {"model.layers.3.mlp.experts.gate_up_proj_weight_scale_2", MM_PLACE_STACK, 3, 0, MM_GATE_UP, MM_PART_GLOBAL,
     "model.layers.3.mlp", false},
    {"model.layers.3.mlp.experts.down_proj_input_scale", MM_PLACE_STACK, 3, 0, MM_DOWN, MM_PART_INPUT,
     "model.layers.3.mlp", false},
    {"model.layers.3.mlp.experts.gate_up_proj_blocks", MM_PLACE_STACK, 3, 0, MM_GATE_UP, MM_PART_BLOCKS,
     "model.layers.3.mlp", false},
    {"model.layers.3.mlp.experts.gate_up_proj_scales", MM_PLACE_STACK, 3, 0, MM_GATE_UP, MM_PART_BLOCKS_SCALE,
     "model.layers.3.mlp", false},
    {"model.layers.3.mlp.experts.down_proj_bias", MM_PLACE_STACK, 3, 0, MM_DOWN, MM_PART_BIAS, "model.layers.3.mlp",
     false},
    {"model.layers.3.mlp.experts.down_proj.weight", MM_PLACE_STACK, 3, 0, MM_DOWN, MM_PART_WEIGHT, "model.layers.3.mlp",
     false},
    {"layers.3.ffn.shared_experts.w2.scale", MM_PLACE_SHARED, 3, 0, MM_DOWN, MM_PART_NATIVE_SCALE, "layers.3.ffn",
     false},
    {"model.layers.3.mlp.shared_expert.up_proj.weight", MM_PLACE_SHARED, 3, 0, MM_UP, MM_PART_WEIGHT,
     "model.layers.3.mlp", false},
    {"layers.3.ffn.gate.weight", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_WEIGHT, "layers.3.ffn", false},
    {"layers.3.ffn.gate.bias", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_BIAS, "layers.3.ffn", false},
    {"layers.3.ffn.gate.tid2eid", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_TABLE, "layers.3.ffn", false},
    {"model.layers.3.mlp.router.bias", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_BIAS, "model.layers.3.mlp", false},
    {"model.layers.3.block_sparse_moe.e_score_correction_bias", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_BIAS,
     "model.layers.3.block_sparse_moe", false},
    {"model.layers.3.mlp.shared_expert_gate.weight", MM_PLACE_ROUTER, 3, 0, 0, MM_ROUTER_SHARED_GATE,
     "model.layers.3.mlp", false},
};

static void test_names(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const name_case *c = &names[i];
        mm_tensor_name parsed;
        mm_tensor_name_parse(c->name, &parsed);
        if (parsed.place != c->place || parsed.layer != c->layer || parsed.expert != c->expert ||
            parsed.projection != c->projection || parsed.part != c->part || parsed.mtp != c->mtp ||
            parsed.prefix_length != strlen(c->prefix) || strncmp(c->name, c->prefix, parsed.prefix_length) != 0)
            fail_msg("%s: place %d, layer %u, expert %u, projection %d, part %u, prefix %.*s", c->name,
                     (int)parsed.place, parsed.layer, parsed.expert, (int)parsed.projection, parsed.part,
                     (int)parsed.prefix_length, c->name);
    }
}

/* Not of an MoE layer, whatever they resemble. */
static const char *const others[] = {
    "",
    "layers",
    "layers.",
    "layers.3",
    "layers.3.",
    "layers.3.ffn",
    "embed.weight",
    "head.weight",
    "layers.3.attn.w1.weight",
    "model.layers.3.mlp.gate_proj.weight",
    "model.layers.3.mlp.gate_up_proj.weight",
    "xlayers.3.ffn.gate.weight",
    "model.xlayers.3.mlp.gate.weight",
    "layers.x.ffn.gate.weight",
    "layers.03.ffn.gate.weight",
    "layers.+3.ffn.gate.weight",
    "layers.-3.ffn.gate.weight",
    "layers. 3.ffn.gate.weight",
    "layers.65536.ffn.gate.weight",
    "layers.4294967299.ffn.gate.weight",
    "layers.3.ffnx.gate.weight",
    "layers.3.ffn.gate.weights",
    "layers.3.ffn.gate.weight.x",
    "vision.layers.3.mlp.gate.weight",
};

/* Inside experts, but no part we know: worth telling. */
static const char *const unknown[] = {
    "layers.3.ffn.experts.1.w1.weight_scale2",
    "layers.3.ffn.experts.1.w1",
    "layers.3.ffn.experts.1.w4.weight",
    "layers.3.ffn.experts.1.w11.weight",
    "layers.3.ffn.experts.01.w1.weight",
    "layers.3.ffn.experts.x.w1.weight",
    "layers.3.ffn.experts.1.gate_proj_weight",
    "layers.3.ffn.experts.65536.w1.weight",
    "layers.3.ffn.experts.",
    "model.layers.3.mlp.experts.gate_up_proj_weight_scale_3",
    "model.layers.3.mlp.experts.gate_up_projx",
    "model.layers.3.mlp.shared_experts.up_proj.weights",
};

static void test_what_is_no_name(void **state) {
    mm_tensor_name parsed;
    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        mm_tensor_name_parse(others[i], &parsed);
        if (parsed.place != MM_PLACE_NONE) fail_msg("%s", others[i]);
    }
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        mm_tensor_name_parse(unknown[i], &parsed);
        if (parsed.place != MM_PLACE_UNKNOWN) fail_msg("%s", unknown[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_names), cmocka_unit_test(test_what_is_no_name)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
