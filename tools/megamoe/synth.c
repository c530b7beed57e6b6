/*
 * megamoe synth: a checkpoint in the published layout with random weights. First a plan (every tensor, its
 * shape and the recipe of its values), then the shards one after another.
 */
#include "synth.h"

#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "formats.h"
#include "random.h"
#include "shards.h"

typedef enum filling {
    CODES,
    SCALES,
    CONSTANT,
    GAUSS_BF16,
    BIAS_F32,
    BIAS_BF16,
    FP8,
    FP8_SCALES, /* powers of two */
    FP8_SCALES_F32,
    FACTORS, /* one per expert around the constant */
    TOKEN_EXPERTS
} filling;

enum { FP8_POOL = 4096 };

typedef struct recipe {
    filling fill;
    unsigned group; /* values per scale: 16 or 32 */
    double value;   /* the spread, or the constant itself */
    uint64_t key;
    uint64_t row_offset; /* of stacked experts: the rows (FACTORS: values) before the first one written */
} recipe;

typedef struct plan {
    cli_shape shape;
    unsigned format;
    bool mtp;
    uint32_t expert_first, expert_end, layer_first, layer_end;
    uint64_t seed;
    cli_planned *tensors;
    recipe *recipes;
    size_t count, capacity;
    cli_blocks *blocks;
    uint8_t fp8[FP8_POOL]; /* Gaussian values as E4M3, to choose from */
} plan;

/* Adds a tensor whose rows are all axes but the last. Its values depend on the seed and its name. */
static recipe *add(plan *p, filling fill, double value, const char *dtype, unsigned rank, const uint64_t *extent,
                   char *name) {
    if (p->count == p->capacity) {
        p->capacity = p->capacity ? 2 * p->capacity : 256;
        p->tensors = realloc(p->tensors, p->capacity * sizeof *p->tensors);
        p->recipes = realloc(p->recipes, p->capacity * sizeof *p->recipes);
        if (!p->tensors || !p->recipes) abort(); /* 200 bytes a tensor */
    }
    cli_planned tensor = {.name = name, .dtype = dtype, .rank = rank, .rows = 1, .row_bytes = 1, .tag = p->count};
    for (unsigned axis = 0; axis < rank; axis++) {
        tensor.extent[axis] = extent[axis];
        *(axis + 1 == rank ? &tensor.row_bytes : &tensor.rows) *= extent[axis];
    }
    tensor.row_bytes *= strcmp(dtype, "I64") == 0    ? 8
                        : strcmp(dtype, "F32") == 0  ? 4
                        : strcmp(dtype, "BF16") == 0 ? 2
                                                     : 1;
    p->tensors[p->count] = tensor;
    p->recipes[p->count] = (recipe){.fill = fill, .group = 16, .value = value, .key = random_key(p->seed, name)};
    return &p->recipes[p->count++];
}

static recipe *add_matrix(plan *p, filling fill, double value, const char *dtype, uint64_t rows, uint64_t columns,
                          char *name) {
    return add(p, fill, value, dtype, 2, (uint64_t[]){rows, columns}, name);
}

static void add_scalar(plan *p, double value, unsigned rank, char *name) {
    add(p, CONSTANT, value, "F32", rank, (uint64_t[]){1}, name);
}

/* A factor between 0.7 and 1.4 that belongs to a name. */
static double variation(const plan *p, const char *name) {
    return 0.7 + 0.7 * random_unit(random_key(p->seed + 1, name));
}

typedef struct projection {
    const char *prefix, *name;
    uint64_t rows, columns;
    double spread, input_scale;
} projection;

static void add_mxfp4(plan *p, const projection *w) {
    add_matrix(p, CODES, 0, "I8", w->rows, w->columns / 2, cli_format("%s.%s.weight", w->prefix, w->name))->group = 32;
    add_matrix(p, SCALES, w->spread, "F8_E8M0", w->rows, w->columns / 32, cli_format("%s.%s.scale", w->prefix, w->name))
        ->group = 32;
}

static void add_nvfp4(plan *p, const projection *w) {
    bool compressed = p->format == CLI_FORMAT_COMPRESSED_TENSORS;
    double global = (double)cli_weight_global(w->spread);
    add_matrix(p, CODES, 0, "U8", w->rows, w->columns / 2,
               cli_format("%s.%s.%s", w->prefix, w->name, compressed ? "weight_packed" : "weight"));
    add_matrix(p, SCALES, 0, "F8_E4M3", w->rows, w->columns / 16, cli_format("%s.%s.weight_scale", w->prefix, w->name));
    if (compressed) { /* the globals are the inverses */
        add_scalar(p, 1 / global, 1, cli_format("%s.%s.weight_global_scale", w->prefix, w->name));
        add_scalar(p, 1 / w->input_scale, 1, cli_format("%s.%s.input_global_scale", w->prefix, w->name));
    } else {
        add_scalar(p, global, 0, cli_format("%s.%s.weight_scale_2", w->prefix, w->name));
        add_scalar(p, w->input_scale, 0, cli_format("%s.%s.input_scale", w->prefix, w->name));
    }
}

static void add_fp8_blocks(plan *p, const projection *w, bool powers_of_two, const char *suffix) {
    uint64_t block = p->shape.shared_block ? p->shape.shared_block : 128;
    add_matrix(p, FP8, 0, "F8_E4M3", w->rows, w->columns, cli_format("%s.%s.weight", w->prefix, w->name));
    add_matrix(p, powers_of_two ? FP8_SCALES : FP8_SCALES_F32, w->spread, powers_of_two ? "F8_E8M0" : "F32",
               (w->rows + block - 1) / block, (w->columns + block - 1) / block,
               cli_format("%s.%s.%s", w->prefix, w->name, suffix));
}

static void add_fp8_e8m0(plan *p, const projection *w) {
    add_fp8_blocks(p, w, true, "scale");
}

static void add_fp8_f32(plan *p, const projection *w) {
    add_fp8_blocks(p, w, false, "weight_scale_inv");
}

static void add_bf16(plan *p, const projection *w) {
    add_matrix(p, GAUSS_BF16, w->spread, "BF16", w->rows, w->columns, cli_format("%s.%s.weight", w->prefix, w->name));
}

typedef void (*add_projection)(plan *, const projection *);

/* How one expert's projections are written in a format that does not stack them. */
static add_projection routed_writer(unsigned format) {
    switch (format) {
    case CLI_FORMAT_MXFP4: return add_mxfp4;
    case CLI_FORMAT_BF16: return add_bf16;
    case CLI_FORMAT_FP8: return add_fp8_f32;
    case CLI_FORMAT_FP8_E8M0: return add_fp8_e8m0;
    default: return add_nvfp4;
    }
}

/* V4 keeps its shared expert in FP8 whatever became of the others; R1's is NVFP4 too; elsewhere it stays BF16. */
static add_projection shared_writer(const plan *p) {
    bool fp8 = p->format == CLI_FORMAT_FP8 || p->format == CLI_FORMAT_FP8_E8M0;
    if (p->format == CLI_FORMAT_BF16) return add_bf16;
    if (p->shape.naming == CLI_NATIVE && p->format != CLI_FORMAT_COMPRESSED_TENSORS) return add_fp8_e8m0;
    if (fp8) return routed_writer(p->format);
    return strcmp(p->shape.name, "r1") == 0 ? add_nvfp4 : add_bf16;
}

/*
 * Gate, up and down under `prefix`. ModelOpt gives gate and up of V4 one amax, hence one global scale;
 * elsewhere each projection has its own. Input scales fit the activations that random weights produce.
 */
static void add_expert(plan *p, const char *prefix, uint32_t intermediate, add_projection writer) {
    static const char *const names[2][3] = {{"w1", "w3", "w2"}, {"gate_proj", "up_proj", "down_proj"}};
    const megamoe_shape *s = &p->shape.shape;
    bool w_names = p->shape.naming == CLI_NATIVE || p->shape.naming == CLI_BLOCK_SPARSE;
    bool shared_amax = p->shape.naming == CLI_NATIVE && p->format == CLI_FORMAT_MODELOPT;
    for (unsigned i = s->not_gated ? 1 : 0; i < 3; i++) {
        bool down = i == 2;
        const char *name = names[!w_names][i];
        char *full = cli_format("%s.%s", prefix, shared_amax && !down ? "w13" : name);
        char *inputs = cli_format("%s.%s", prefix, down ? "h" : "x");
        double columns = down ? intermediate : s->hidden;
        projection w = {.prefix = prefix,
                        .name = name,
                        .rows = down ? s->hidden : intermediate,
                        .columns = down ? intermediate : s->hidden,
                        .spread = (down ? 1.0 : 1.5) / sqrt(columns) * variation(p, full),
                        .input_scale = (down ? 100.0 : 60.0) / 2688.0 * variation(p, inputs)};
        writer(p, &w);
        free(full);
        free(inputs);
    }
}

/* All experts of a layer in one NVFP4 stack. Llama-4's is turned, and has one global scale for all of them. */
static void add_nvfp4_stack(plan *p, const char *prefix, const char *name, uint64_t rows, uint64_t columns,
                            double spread, double input_scale) {
    uint64_t experts = p->expert_end - p->expert_first;
    bool turned = p->format == CLI_FORMAT_TRANSPOSED;
    uint64_t outer = turned ? columns / 2 : rows, inner = turned ? rows : columns / 2;
    add(p, CODES, 0, "U8", 3, (uint64_t[]){experts, outer, inner}, cli_format("%s.%s", prefix, name))->row_offset =
        p->expert_first * outer;
    outer = turned ? columns / 16 : rows;
    inner = turned ? rows : columns / 16;
    add(p, SCALES, 0, "F8_E4M3", 3, (uint64_t[]){experts, outer, inner}, cli_format("%s.%s_weight_scale", prefix, name))
        ->row_offset = p->expert_first * outer;
    add(p, turned ? CONSTANT : FACTORS, (double)cli_weight_global(spread), "F32", !turned, &experts,
        cli_format("%s.%s_weight_scale_2", prefix, name))
        ->row_offset = p->expert_first;
    add_scalar(p, input_scale, 0, cli_format("%s.%s_input_scale", prefix, name));
}

static void add_nvfp4_stacks(plan *p, const char *prefix) {
    const megamoe_shape *s = &p->shape.shape;
    uint64_t hidden = s->hidden, intermediate = s->intermediate;
    char *experts = cli_format("%s.experts", prefix);
    add_nvfp4_stack(p, experts, s->not_gated ? "up_proj" : "gate_up_proj", (s->not_gated ? 1 : 2) * intermediate,
                    hidden, 1.5 / sqrt(s->hidden), 60.0 / 2688.0);
    add_nvfp4_stack(p, experts, "down_proj", hidden, intermediate, 1.0 / sqrt(s->intermediate), 100.0 / 2688.0);
    free(experts);
}

static void add_stacked(plan *p, const char *prefix, const char *name, uint64_t rows, uint64_t columns, double spread) {
    uint64_t experts = p->expert_end - p->expert_first, before = p->expert_first * rows;
    recipe *codes = add(p, CODES, 0, "U8", 4, (uint64_t[]){experts, rows, columns / 32, 16},
                        cli_format("%s.%s_blocks", prefix, name));
    codes->group = 32;
    codes->row_offset = before * columns / 32; /* a row of this tensor is one block */
    recipe *scales = add(p, SCALES, spread, "U8", 3, (uint64_t[]){experts, rows, columns / 32},
                         cli_format("%s.%s_scales", prefix, name));
    scales->group = 32;
    scales->row_offset = before;
    add(p, BIAS_BF16, 0.1, "BF16", 2, (uint64_t[]){experts, rows}, cli_format("%s.%s_bias", prefix, name))->row_offset =
        p->expert_first;
}

static void add_gpt_oss_layer(plan *p, uint32_t layer) {
    const megamoe_shape *s = &p->shape.shape;
    char *experts = cli_format("model.layers.%u.mlp.experts", layer);
    add_matrix(p, GAUSS_BF16, 1.0 / sqrt(s->hidden), "BF16", s->expert_count, s->hidden,
               cli_format("model.layers.%u.mlp.router.weight", layer));
    add(p, BIAS_BF16, 0.3, "BF16", 1, (uint64_t[]){s->expert_count},
        cli_format("model.layers.%u.mlp.router.bias", layer));
    add_stacked(p, experts, "gate_up_proj", 2 * (uint64_t)s->intermediate, s->hidden, 1.5 / sqrt(s->hidden));
    add_stacked(p, experts, "down_proj", s->hidden, s->intermediate, 1.0 / sqrt(s->intermediate));
    free(experts);
}

static void add_router(plan *p, const char *prefix, bool hashed) {
    static const char *const biases[] = {[CLI_NATIVE] = "gate.bias",
                                         [CLI_HF] = "gate.e_score_correction_bias",
                                         [CLI_BLOCK_SPARSE] = "e_score_correction_bias",
                                         [CLI_MIXER] = "gate.e_score_correction_bias"};
    const megamoe_shape *s = &p->shape.shape;
    add_matrix(p, GAUSS_BF16, 1.0 / sqrt(s->hidden), "BF16", s->expert_count, s->hidden,
               cli_format("%s.gate.weight", prefix));
    if (hashed)
        add_matrix(p, TOKEN_EXPERTS, 0, "I64", p->shape.vocabulary, s->experts_per_token,
                   cli_format("%s.gate.tid2eid", prefix));
    else if (p->shape.router_bias)
        add(p, BIAS_F32, 0.25, "F32", 1, (uint64_t[]){s->expert_count},
            cli_format("%s.%s", prefix, biases[p->shape.naming]));
}

/* The routed experts, in `format`. */
static void add_routed(plan *p, const char *prefix, unsigned format) {
    if (format == CLI_FORMAT_FUSED || format == CLI_FORMAT_TRANSPOSED) {
        add_nvfp4_stacks(p, prefix);
        return;
    }
    for (uint32_t expert = p->expert_first; expert < p->expert_end; expert++) {
        char *name = cli_format("%s.experts.%u", prefix, expert);
        add_expert(p, name, p->shape.shape.intermediate, routed_writer(format));
        free(name);
    }
}

static void add_block(plan *p, const char *prefix, bool hashed, unsigned format) {
    add_router(p, prefix, hashed);
    add_routed(p, prefix, format);
    if (!p->shape.shared) return;
    uint32_t own = p->shape.shared_intermediate;
    char *name = cli_format("%s.shared_experts", prefix);
    add_expert(p, name, own ? own : p->shape.shape.intermediate, shared_writer(p));
    free(name);
}

static void add_layer(plan *p, uint32_t layer) {
    static const char *const before[] = {
        [CLI_NATIVE] = "", [CLI_HF] = "model.", [CLI_BLOCK_SPARSE] = "model.", [CLI_MIXER] = "backbone."};
    static const char *const block[] = {
        [CLI_NATIVE] = "ffn", [CLI_HF] = "mlp", [CLI_BLOCK_SPARSE] = "block_sparse_moe", [CLI_MIXER] = "mixer"};
    bool extra = layer == p->layer_end, native = p->shape.naming == CLI_NATIVE;
    char *prefix = extra && native
                       ? cli_format("mtp.0.ffn")
                       : cli_format("%slayers.%u.%s", before[p->shape.naming], layer, block[p->shape.naming]);
    add_block(p, prefix, layer < p->shape.hash_layers && !extra,
              extra ? cli_mtp_format(&p->shape, p->format) : p->format);
    free(prefix);
}

/* K distinct experts for every token id. */
static void fill_token_experts(const plan *p, uint64_t key, uint64_t first, uint64_t count, uint8_t *bytes) {
    const megamoe_shape *s = &p->shape.shape;
    for (uint64_t token = first; token < first + count; token++) {
        int64_t chosen[32];
        uint64_t draw = token << 20;
        for (uint32_t k = 0; k < s->experts_per_token;) {
            chosen[k] = random_below(random_at(key, draw++), s->expert_count);
            uint32_t seen = 0;
            while (chosen[seen] != chosen[k]) seen++;
            k += seen == k;
        }
        memcpy(bytes, chosen, s->experts_per_token * sizeof chosen[0]);
        bytes += s->experts_per_token * sizeof chosen[0];
    }
}

/* Values one by one: `position` counts them through the whole tensor. */
static void fill_value(const plan *p, const recipe *r, uint64_t position, uint8_t **at) {
    double gauss = random_gauss(random_at(r->key, position));
    float wide;
    uint16_t half;
    int exponent;
    switch (r->fill) {
    case CONSTANT: wide = (float)r->value; break;
    case FACTORS:
    case FP8_SCALES_F32:
        wide =
            (float)(r->value / (r->fill == FACTORS ? 1 : 64) * (0.7 + 0.7 * random_unit(random_at(r->key, position))));
        break;
    case BIAS_F32: wide = (float)(8.0 + r->value * gauss); break; /* near 8 with a small spread, as published */
    case FP8: *(*at)++ = p->fp8[random_at(r->key, position) % FP8_POOL]; return;
    case FP8_SCALES:
        frexp(r->value / 64.0, &exponent);
        *(*at)++ = (uint8_t)(127 + exponent - (gauss > 0));
        return;
    default:
        half = bf16_nearest(r->value * gauss);
        memcpy(*at, &half, sizeof half);
        *at += sizeof half;
        return;
    }
    memcpy(*at, &wide, sizeof wide);
    *at += sizeof wide;
}

static bool fill_rows(void *context, const cli_planned *tensor, uint64_t first, uint64_t count, uint8_t *bytes) {
    const plan *p = context;
    const recipe *r = &p->recipes[tensor->tag];
    uint64_t row = first + r->row_offset;
    if (r->fill == CODES) {
        cli_fill_codes(p->blocks, r->key, r->group, row, count, tensor->row_bytes, bytes);
    } else if (r->fill == SCALES) {
        cli_fill_scales(p->blocks, r->key, r->group, r->value, row, count, tensor->row_bytes, bytes);
    } else if (r->fill == TOKEN_EXPERTS) {
        fill_token_experts(p, r->key, row, count, bytes);
    } else {
        uint64_t columns = tensor->rank ? tensor->extent[tensor->rank - 1] : 1;
        uint64_t position = r->fill == FACTORS ? r->row_offset : row * columns;
        for (uint64_t i = 0; i < count * columns; i++) fill_value(p, r, position + i, &bytes);
    }
    return true;
}

static int choose_layers(const cli_options *options, plan *p) {
    const cli_shape *shape = &p->shape;
    uint32_t end = shape->first_layer + shape->layer_count;
    bool small = shape->shape.hidden <= 1024;
    p->layer_first = shape->first_layer;
    p->layer_end = small ? end : shape->first_layer + 1;
    if (options->layers.end) {
        p->layer_first = options->layers.first ? options->layers.first : shape->first_layer;
        p->layer_end = options->layers.first ? options->layers.end : shape->first_layer + options->layers.end;
    }
    if (p->layer_first < shape->first_layer || p->layer_end > end)
        return cli_fail("%s has MoE layers %u to %u, and --layers asks for %u to %u.", shape->name, shape->first_layer,
                        end - 1, p->layer_first, p->layer_end - 1);
    return CLI_GOOD;
}

static int choose_mtp(const cli_options *options, plan *p) {
    const cli_shape *shape = &p->shape;
    p->mtp = options->mtp;
    if (!p->mtp) return CLI_GOOD;
    if (shape->naming != CLI_NATIVE && shape->naming != CLI_HF)
        return cli_fail("%s is published without multi-token-prediction blocks.", shape->name);
    if (options->experts.end) return cli_fail("--mtp writes a whole block, so it cannot stand beside --experts.");
    if (cli_mtp_format(shape, p->format) == CLI_FORMAT_MXFP4 &&
        shape->shape.hidden % 32 + shape->shape.intermediate % 32)
        return cli_fail("the MTP block is mxfp4, which has blocks of 32, and H=%u or I=%u is not a multiple.",
                        shape->shape.hidden, shape->shape.intermediate);
    return CLI_GOOD;
}

static int choose_format(const cli_options *options, plan *p) {
    const cli_shape *shape = &p->shape;
    bool gpt_oss = shape->naming == CLI_GPT_OSS;
    p->format = options->format ? options->format : gpt_oss ? CLI_FORMAT_MXFP4 : CLI_FORMAT_MODELOPT;
    if (gpt_oss && p->format != CLI_FORMAT_MXFP4) return cli_fail("%s is published as mxfp4 only.", shape->name);
    if (shape->naming != CLI_NATIVE && !gpt_oss && p->format == CLI_FORMAT_MXFP4)
        return cli_fail("%s is not published as mxfp4; choose modelopt or compressed-tensors.", shape->name);
    const megamoe_shape *s = &shape->shape;
    if (p->format == CLI_FORMAT_MXFP4 && (s->hidden % 32 || s->intermediate % 32))
        return cli_fail("mxfp4 has blocks of 32, and %s=%u is not a multiple.", s->hidden % 32 ? "H" : "I",
                        s->hidden % 32 ? s->hidden : s->intermediate);
    p->expert_first = options->experts.first;
    p->expert_end = options->experts.end ? options->experts.end : s->expert_count;
    if (p->expert_end > s->expert_count)
        return cli_fail("%s has experts 0 to %u, and --experts asks for %u to %u.", shape->name, s->expert_count - 1,
                        p->expert_first, p->expert_end - 1);
    return CLI_GOOD;
}

static int read_size(const char *text, uint64_t *bytes) {
    char *end;
    double value = text ? strtod(text, &end) : 5;
    double unit = !text || *end == 'G' ? 1e9 : *end == 'M' ? 1e6 : *end == 'k' || *end == 'K' ? 1e3 : 1;
    if (text && (end == text || (*end && end[1] && strcmp(end + 1, "B") != 0) || (*end && unit == 1) ||
                 !(value * unit >= 1) || value * unit > 1e15))
        return cli_fail("--shard-size takes a size such as 500M or 5G, not '%s'.", text);
    *bytes = (uint64_t)(value * unit);
    return CLI_GOOD;
}

static int check_space(const char *path, uint64_t bytes) {
    struct statvfs disk;
    char needed[16], available[16];
    if (statvfs(path, &disk) != 0) return CLI_GOOD; /* the writing itself will say what is wrong */
    double free_bytes = (double)disk.f_bavail * (double)disk.f_frsize;
    if ((double)bytes < free_bytes) return CLI_GOOD;
    return cli_fail("this checkpoint takes %s and the disk of %s has %s; write fewer --layers or --experts.",
                    cli_bytes_text((double)bytes, needed), path, cli_bytes_text(free_bytes, available));
}

static int write_config(const plan *p, const cli_options *options, const cli_output_directory *directory) {
    json_t *configs[2] = {cli_synth_config(&p->shape, p->format, options, p->layer_first, p->layer_end),
                          cli_synth_quant_config(&p->shape, p->format, options, p->layer_first, p->layer_end)};
    static const char *const names[2] = {"config.json", "hf_quant_config.json"};
    int result = CLI_GOOD;
    for (unsigned i = 0; i < 2; i++) {
        if (!configs[i]) continue;
        char *text = json_dumps(configs[i], JSON_INDENT(2));
        if (result == CLI_GOOD) result = cli_output_text(directory, names[i], text);
        free(text);
        json_decref(configs[i]);
    }
    return result;
}

static int write_checkpoint(plan *p, const cli_options *options, uint64_t shard_bytes, uint64_t *total) {
    cli_output_directory directory;
    for (size_t i = 0; i < p->count; i++) *total += p->tensors[i].rows * p->tensors[i].row_bytes;
    int result = cli_output_begin(options->words[0], &directory);
    if (result != CLI_GOOD) return result;
    result = check_space(directory.temporary, *total);
    if (result == CLI_GOOD) result = cli_write_shards(&directory, p->tensors, p->count, shard_bytes, fill_rows, p);
    if (result == CLI_GOOD) result = write_config(p, options, &directory);
    if (result == CLI_GOOD) result = cli_output_commit(&directory);
    cli_output_discard(&directory);
    return result;
}

static int report(const plan *p, const cli_options *options, uint64_t total, double seconds) {
    const char *format = cli_format_name(p->format);
    char text[16];
    if (options->json)
        return cli_print_json(json_pack("{s:s,s:s,s:s,s:I,s:I,s:f}", "path", options->words[0], "shape", p->shape.name,
                                        "format", format, "tensors", (json_int_t)p->count, "bytes", (json_int_t)total,
                                        "seconds", seconds));
    printf("%s: %s as %s, layers %u to %u, experts %u to %u of %u, %s in %.1f s\n", options->words[0], p->shape.name,
           format, p->layer_first, p->layer_end - 1, p->expert_first, p->expert_end - 1, p->shape.shape.expert_count,
           cli_bytes_text((double)total, text), seconds);
    return cli_flush();
}

static int run(const cli_options *options) {
    plan p = {.seed = options->seed};
    uint64_t shard_bytes = 0, total = 0;
    double started = cli_seconds();
    if (!options->shape) return cli_fail("synth needs --shape; 'megamoe synth --help' shows the names.");
    if (cli_shape_parse(options->shape, &p.shape) != CLI_GOOD || choose_format(options, &p) != CLI_GOOD ||
        choose_layers(options, &p) != CLI_GOOD || choose_mtp(options, &p) != CLI_GOOD ||
        read_size(options->shard_size, &shard_bytes) != CLI_GOOD)
        return CLI_BAD_INPUT;
    for (uint32_t layer = p.layer_first; layer < p.layer_end + p.mtp; layer++)
        p.shape.naming == CLI_GPT_OSS ? add_gpt_oss_layer(&p, layer) : add_layer(&p, layer);
    p.blocks = cli_blocks_new();
    for (unsigned i = 0; i < FP8_POOL; i++) p.fp8[i] = (uint8_t)e4m3_nearest(64.0 * random_gauss(random_at(p.seed, i)));
    int result = write_checkpoint(&p, options, shard_bytes, &total);
    if (result == CLI_GOOD) result = report(&p, options, total, cli_seconds() - started);
    for (size_t i = 0; i < p.count; i++) free(p.tensors[i].name);
    free(p.tensors);
    free(p.recipes);
    cli_blocks_free(p.blocks);
    return result;
}

const cli_command cli_synth = {
    .name = "synth",
    .words = "OUT",
    .summary = "write a checkpoint in a published layout with random weights",
    .details =
        "Names, dtypes, shapes, index and config.json are those of the published files; weights are random with "
        "realistic spread and outliers, and depend only on --seed, tensor and position: a subset of experts has the "
        "same bytes. tiny and custom shapes get all their layers, others the first one unless --layers says more.",
    .examples = "  megamoe synth --shape tiny --format modelopt /tmp/tiny\n"
                "  megamoe synth --shape v4-pro --experts 0:48 --layers 1 /tmp/v4-pro-rank0\n",
    .options = "shape format experts layers mtp shard-size seed",
    .words_min = 1,
    .words_max = 1,
    .run = run,
};
