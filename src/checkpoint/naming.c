/* The conventions of tensor names, as tables that a name is matched against from left to right. */
#include "checkpoint/naming.h"

#include <string.h>

/* What stands before the layer's number. Longer spellings come before their own beginnings. */
static const struct {
    const char *text;
    bool mtp;
} stems[] = {
    {"model.language_model.mtp.layers.", true},
    {"model.language_model.layers.", false},
    {"language_model.model.mtp.layers.", true},
    {"language_model.model.layers.", false},
    {"language_model.layers.", false},
    {"model.decoder.layers.", false},
    {"model.mtp.layers.", true},
    {"model.layers.", false},
    {"model.mtp.", true},
    {"backbone.layers.", false},
    {"mtp.layers.", true},
    {"mtp.", true},
    {"layers.", false},
};

static const char *const blocks[] = {"ffn.", "mlp.", "block_sparse_moe.", "mixer.", "feed_forward.", "moe."};

static const char *const shared_blocks[] = {"shared_experts.", "shared_expert."};

static const struct {
    const char *text;
    mm_projection projection;
    bool w_name;
} projections[] = {
    {"w1", MM_GATE, true},
    {"w3", MM_UP, true},
    {"w2", MM_DOWN, true},
    {"gate_proj", MM_GATE, false},
    {"up_proj", MM_UP, false},
    {"down_proj", MM_DOWN, false},
    {"gate_up_proj", MM_GATE_UP, false},
};

/* After ".", for one expert. */
static const struct {
    const char *text;
    mm_part part;
} parts[] = {
    {"weight", MM_PART_WEIGHT},
    {"weight_packed", MM_PART_PACKED},
    {"weight_scale", MM_PART_SCALE},
    {"scale", MM_PART_NATIVE_SCALE},
    {"weight_scale_inv", MM_PART_BLOCK_SCALE},
    {"weight_scale_2", MM_PART_GLOBAL},
    {"weight_global_scale", MM_PART_INVERSE_GLOBAL},
    {"input_scale", MM_PART_INPUT},
    {"input_global_scale", MM_PART_INVERSE_INPUT},
    {"bias", MM_PART_BIAS},
};

/* After the bare name, for a stack; "_" stands for "." as well. */
static const struct {
    const char *text;
    mm_part part;
} stack_parts[] = {
    {"", MM_PART_WEIGHT},
    {"_blocks", MM_PART_BLOCKS},
    {"_scales", MM_PART_BLOCKS_SCALE},
    {"_weight", MM_PART_WEIGHT},
    {"_weight_packed", MM_PART_PACKED},
    {"_weight_scale", MM_PART_SCALE},
    {"_weight_scale_inv", MM_PART_BLOCK_SCALE},
    {"_scale_inv", MM_PART_BLOCK_SCALE},
    {"_weight_scale_2", MM_PART_GLOBAL},
    {"_weight_global_scale", MM_PART_INVERSE_GLOBAL},
    {"_input_scale", MM_PART_INPUT},
    {"_input_global_scale", MM_PART_INVERSE_INPUT},
    {"_bias", MM_PART_BIAS},
};

static const struct {
    const char *text;
    mm_router_part part;
} router_parts[] = {
    {"gate.weight", MM_ROUTER_WEIGHT},
    {"router.weight", MM_ROUTER_WEIGHT},
    {"gate.bias", MM_ROUTER_BIAS},
    {"router.bias", MM_ROUTER_BIAS},
    {"gate.e_score_correction_bias", MM_ROUTER_BIAS},
    {"e_score_correction_bias", MM_ROUTER_BIAS},
    {"gate.tid2eid", MM_ROUTER_TABLE},
    {"shared_expert_gate.weight", MM_ROUTER_SHARED_GATE},
};

#define COUNT(table) (sizeof(table) / sizeof(table)[0])

static const char *after(const char *text, const char *beginning) {
    size_t length = strlen(beginning);
    return strncmp(text, beginning, length) == 0 ? text + length : NULL;
}

/* A decimal number without leading zeros that ends with a dot. NULL: there is none. */
static const char *number_read(const char *text, uint32_t *number) {
    const char *digit = text;
    uint32_t value = 0;
    for (; *digit >= '0' && *digit <= '9' && digit - text < 5; digit++) value = value * 10 + (uint32_t)(*digit - '0');
    if (digit == text || *digit != '.' || value > UINT16_MAX || (*text == '0' && digit - text > 1)) return NULL;
    *number = value;
    return digit + 1;
}

/* "gate_proj" and what follows it, which begins with one of `separators` or is the end. */
static const char *projection_read(const char *text, const char *separators, mm_tensor_name *parsed) {
    for (size_t i = 0; i < COUNT(projections); i++) {
        const char *rest = after(text, projections[i].text);
        if (!rest || (*rest && !strchr(separators, *rest))) continue;
        parsed->projection = projections[i].projection;
        parsed->w_names = projections[i].w_name;
        return rest;
    }
    return NULL;
}

/* "gate_proj.weight_scale" of one expert. */
static bool matrix_read(const char *text, mm_tensor_name *parsed) {
    const char *rest = projection_read(text, ".", parsed);
    if (!rest || *rest != '.') return false;
    for (size_t i = 0; i < COUNT(parts); i++)
        if (strcmp(rest + 1, parts[i].text) == 0) {
            parsed->part = parts[i].part;
            return true;
        }
    return false;
}

/* "gate_up_proj_weight_scale" of all experts. */
static bool stack_read(const char *text, mm_tensor_name *parsed) {
    const char *rest = projection_read(text, "._", parsed);
    if (!rest) return false;
    for (size_t i = 0; i < COUNT(stack_parts); i++) {
        const char *part = stack_parts[i].text;
        if (*rest && *part ? strcmp(rest + 1, part + 1) == 0 : *rest == *part) {
            parsed->part = stack_parts[i].part;
            return true;
        }
    }
    return false;
}

static mm_place router_read(const char *text, mm_tensor_name *parsed) {
    for (size_t i = 0; i < COUNT(router_parts); i++)
        if (strcmp(text, router_parts[i].text) == 0) {
            parsed->part = router_parts[i].part;
            return MM_PLACE_ROUTER;
        }
    return MM_PLACE_NONE;
}

/* What follows the block's name, such as "experts.7.w1.weight". */
static mm_place block_read(const char *text, mm_tensor_name *parsed) {
    const char *rest = after(text, "experts.");
    if (rest) {
        const char *numbered = number_read(rest, &parsed->expert);
        if (numbered) return matrix_read(numbered, parsed) ? MM_PLACE_EXPERT : MM_PLACE_UNKNOWN;
        return stack_read(rest, parsed) ? MM_PLACE_STACK : MM_PLACE_UNKNOWN;
    }
    for (size_t i = 0; i < COUNT(shared_blocks); i++)
        if ((rest = after(text, shared_blocks[i])))
            return matrix_read(rest, parsed) ? MM_PLACE_SHARED : MM_PLACE_UNKNOWN;
    return router_read(text, parsed);
}

void mm_tensor_name_parse(const char *name, mm_tensor_name *parsed) {
    const char *rest = NULL;
    memset(parsed, 0, sizeof *parsed);
    for (size_t i = 0; i < COUNT(stems) && !rest; i++) {
        const char *number = after(name, stems[i].text);
        rest = number ? number_read(number, &parsed->layer) : NULL;
        if (!rest) continue;
        parsed->mtp = stems[i].mtp;
        parsed->stem_length = (size_t)(strstr(name, stems[i].mtp ? "mtp." : "layers.") - name);
        parsed->numbered = true;
    }
    if (!rest) return;
    for (size_t i = 0; i < COUNT(blocks); i++) {
        const char *inside = after(rest, blocks[i]);
        if (!inside) continue;
        parsed->prefix_length = (size_t)(inside - name) - 1;
        parsed->place = block_read(inside, parsed);
        return;
    }
    /* a few models put the experts directly into the layer */
    if (!after(rest, "experts.") && !after(rest, "router.")) return;
    parsed->prefix_length = (size_t)(rest - name) - 1;
    parsed->place = block_read(rest, parsed);
}
