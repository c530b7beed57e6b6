/*
 * megamoe quantize: the routed experts of a checkpoint become NVFP4 in ModelOpt's layout, everything else is
 * copied. First every projection is read once for its global scale, then the output is written tensor by
 * tensor.
 */
#include "quantize.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "calibrate.h"
#include "shards.h"
#include "synth.h"

typedef enum part { COPY, CODES, SCALES, GLOBAL, INPUT_SCALE } part;

typedef struct source { /* what an output tensor is made of */
    part part;
    megamoe_tensor tensor; /* COPY */
    size_t matrix;
} source;

typedef struct conversion {
    const cli_options *options;
    megamoe_checkpoint *checkpoint;
    megamoe_layer_info *layers;
    uint32_t layer_count, quantized_first, quantized_end;
    cli_source_matrix *matrices; /* [layer][expert][gate, up, down] */
    uint32_t experts;            /* the most of any layer */
    cli_planned *tensors;
    source *sources;
    size_t count, capacity;
    uint64_t matrices_converted, blocks_lost;
    uint32_t experts_unmet; /* by the calibration's tokens */
} conversion;

/* ---- names ---- */

typedef struct expert_name {
    size_t matrix;
    const char *suffix; /* "weight", "scale", ... */
    size_t stem;        /* length of the name up to the suffix, with its dot */
} expert_name;

static bool to_quantize(const megamoe_layer_info *info) {
    return strcmp(info->format, "nvfp4") != 0;
}

/* "PREFIX.experts.12.up_proj.weight" of a layer that is to be quantized. */
static bool parse_name(const conversion *c, const char *name, expert_name *parsed) {
    static const char *const projections[] = {"gate_proj.", "up_proj.", "down_proj.", "w1.", "w3.", "w2."};
    for (uint32_t layer = 0; layer < c->layer_count; layer++) {
        size_t length = strlen(c->layers[layer].prefix);
        if (!to_quantize(&c->layers[layer]) || strncmp(name, c->layers[layer].prefix, length) != 0 ||
            strncmp(name + length, ".experts.", 9) != 0 || !isdigit((unsigned char)name[length + 9]))
            continue;
        char *rest;
        unsigned long expert = strtoul(name + length + 9, &rest, 10);
        for (unsigned p = 0; *rest == '.' && expert < c->experts && p < 6; p++) {
            size_t width = strlen(projections[p]);
            if (strncmp(rest + 1, projections[p], width) != 0) continue;
            parsed->suffix = rest + 1 + width;
            parsed->stem = (size_t)(parsed->suffix - name);
            parsed->matrix = ((size_t)layer * c->experts + expert) * 3 + p % 3;
            return true;
        }
    }
    return false;
}

/* ---- the plan ---- */

static const char *dtype_name(megamoe_dtype dtype) {
    switch (dtype) {
    case MEGAMOE_BF16: return "BF16";
    case MEGAMOE_F32: return "F32";
    case MEGAMOE_E4M3: return "F8_E4M3";
    case MEGAMOE_E8M0: return "F8_E8M0";
    case MEGAMOE_I32: return "I32";
    case MEGAMOE_I64: return "I64";
    case MEGAMOE_I8: return "I8";
    case MEGAMOE_F16: return "F16";
    case MEGAMOE_E2M1X2:
    case MEGAMOE_U8: break;
    }
    return "U8";
}

static void add(conversion *c, char *name, const char *dtype, uint32_t rank, const uint64_t *extent, uint64_t element,
                source from) {
    if (c->count == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : 256;
        c->tensors = realloc(c->tensors, c->capacity * sizeof *c->tensors);
        c->sources = realloc(c->sources, c->capacity * sizeof *c->sources);
        if (!c->tensors || !c->sources) abort(); /* 250 bytes a tensor */
    }
    cli_planned planned = {
        .name = name, .dtype = dtype, .rank = rank, .rows = 1, .row_bytes = element, .tag = c->count};
    for (uint32_t axis = 0; axis < rank; axis++) {
        planned.extent[axis] = extent[axis];
        *(axis + 1 == rank ? &planned.row_bytes : &planned.rows) *= extent[axis];
    }
    c->tensors[c->count] = planned;
    c->sources[c->count++] = from;
}

static void add_copy(conversion *c, const char *name, const megamoe_tensor *tensor) {
    static const uint64_t sizes[] = {
        [MEGAMOE_BF16] = 2, [MEGAMOE_F32] = 4, [MEGAMOE_E2M1X2] = 1, [MEGAMOE_E4M3] = 1, [MEGAMOE_E8M0] = 1,
        [MEGAMOE_I32] = 4,  [MEGAMOE_I64] = 8, [MEGAMOE_U8] = 1,     [MEGAMOE_I8] = 1,   [MEGAMOE_F16] = 2};
    uint64_t extent[4];
    for (uint32_t axis = 0; axis < tensor->rank; axis++) extent[axis] = (uint64_t)tensor->extent[axis];
    add(c, cli_format("%s", name), dtype_name(tensor->dtype), tensor->rank, extent, sizes[tensor->dtype],
        (source){.part = COPY, .tensor = *tensor});
}

static void add_matrix(conversion *c, const char *name, size_t stem, size_t index) {
    const cli_source_matrix *m = &c->matrices[index];
    int length = (int)stem;
    add(c, cli_format("%.*sweight", length, name), "U8", 2, (uint64_t[]){m->rows, m->columns / 2}, 1,
        (source){.part = CODES, .matrix = index});
    add(c, cli_format("%.*sweight_scale", length, name), "F8_E4M3", 2, (uint64_t[]){m->rows, m->columns / 16}, 1,
        (source){.part = SCALES, .matrix = index});
    add(c, cli_format("%.*sweight_scale_2", length, name), "F32", 0, NULL, 4,
        (source){.part = GLOBAL, .matrix = index});
    if (c->options->calibration)
        add(c, cli_format("%.*sinput_scale", length, name), "F32", 0, NULL, 4,
            (source){.part = INPUT_SCALE, .matrix = index});
    c->matrices_converted++;
}

/* Every tensor of the input: an expert's weight and scale go into its matrix, others are copied. */
static int plan(conversion *c) {
    const char *name;
    for (uint64_t i = 0; (name = megamoe_checkpoint_tensor_name(c->checkpoint, i)); i++) {
        megamoe_tensor tensor;
        expert_name parsed;
        megamoe_status status = megamoe_checkpoint_tensor(c->checkpoint, name, &tensor);
        if (status != MEGAMOE_OK) return cli_fail_status(status);
        if (!parse_name(c, name, &parsed)) {
            add_copy(c, name, &tensor);
            continue;
        }
        cli_source_matrix *m = &c->matrices[parsed.matrix];
        if (strcmp(parsed.suffix, "weight") != 0) {
            m->scale = tensor; /* the only other tensor that these formats have */
            continue;
        }
        m->weight = tensor;
        m->rows = (uint64_t)tensor.extent[0];
        m->columns = (uint64_t)tensor.extent[1] * (cli_matrix_is_mxfp4(m) && tensor.dtype != MEGAMOE_E2M1X2 ? 2 : 1);
        add_matrix(c, name, parsed.stem, parsed.matrix);
    }
    if (c->matrices_converted) return CLI_GOOD;
    return cli_fail(
        "%s has no expert weights in tensors of their own in BF16, FP8 or MXFP4, so there is nothing to quantize.",
        c->options->words[0]);
}

/* ---- global scales ---- */

static int choose_globals(conversion *c) {
    cli_progress progress;
    size_t count = (size_t)c->layer_count * c->experts * 3;
    int result = CLI_GOOD;
    cli_progress_start(&progress, "reading weights");
    for (size_t i = 0; i < count && result == CLI_GOOD; i++) {
        cli_source_matrix *m = &c->matrices[i];
        if (!m->weight.data) continue;
        cli_matrix_measure(m);
        if (!isfinite(m->amax))
            result =
                cli_fail("layer %u, expert %zu has a weight that is not a number or infinite, which NVFP4 cannot hold.",
                         c->layers[i / 3 / c->experts].layer, i / 3 % c->experts);
        cli_progress_update(&progress, i, count);
    }
    cli_progress_end(&progress);
    for (size_t i = 0; i < count; i += 3) { /* gate and up share one global scale, as engines that fuse them expect */
        cli_source_matrix *gate = &c->matrices[i], *up = gate + 1;
        if (!c->options->separate && gate->weight.data && up->weight.data) {
            gate->amax = up->amax = fmaxf(gate->amax, up->amax);
            gate->exponent = up->exponent = gate->exponent > up->exponent ? gate->exponent : up->exponent;
        }
        for (unsigned p = 0; p < 3; p++)
            if (c->matrices[i + p].weight.data) cli_matrix_choose_global(&c->matrices[i + p], c->options->scale);
    }
    return result;
}

/* ---- input scales ---- */

static int calibrate(conversion *c) {
    int result = CLI_GOOD;
    for (uint32_t i = 0; c->options->calibration && i < c->layer_count && result == CLI_GOOD; i++) {
        const megamoe_layer_info *info = &c->layers[i];
        float *scales = cli_allocate(2 * (size_t)c->experts, sizeof *scales);
        uint32_t unmet = 0;
        if (to_quantize(info))
            result = cli_calibrate(c->options->calibration, c->checkpoint, info, scales, scales + c->experts, &unmet);
        c->experts_unmet += unmet;
        for (uint32_t e = 0; e < c->experts; e++) {
            cli_source_matrix *gate = &c->matrices[((size_t)i * c->experts + e) * 3];
            gate[0].input_scale = gate[1].input_scale = scales[e];
            gate[2].input_scale = scales[c->experts + e];
        }
        free(scales);
    }
    return result;
}

/* ---- writing ---- */

static bool fill(void *context, const cli_planned *tensor, uint64_t first, uint64_t count, uint8_t *bytes) {
    conversion *c = context;
    const source *from = &c->sources[tensor->tag];
    cli_source_matrix *m = &c->matrices[from->matrix];
    switch (from->part) {
    case COPY:
        memcpy(bytes, (const uint8_t *)from->tensor.data + first * tensor->row_bytes, count * tensor->row_bytes);
        break;
    case CODES: cli_matrix_quantize(m, c->options->scale, first, count, bytes, NULL); break;
    case SCALES: cli_matrix_quantize(m, c->options->scale, first, count, NULL, bytes); break;
    case GLOBAL: memcpy(bytes, &m->global, sizeof m->global); break;
    case INPUT_SCALE: memcpy(bytes, &m->input_scale, sizeof m->input_scale); break;
    }
    return true;
}

static int copy_file(const cli_output_directory *directory, const char *folder, const char *name) {
    char *path = cli_format("%s/%s", folder, name), *to = cli_format("%s/%s", directory->temporary, name);
    FILE *in = fopen(path, "rb"), *out = in ? fopen(to, "wb") : NULL;
    static char chunk[1 << 16];
    bool good = in && out;
    for (size_t got; good && (got = fread(chunk, 1, sizeof chunk, in)) > 0;) good = fwrite(chunk, 1, got, out) == got;
    good = good && !ferror(in);
    if (in) fclose(in);
    if (out && fclose(out) != 0) good = false;
    int result = good ? CLI_GOOD : cli_fail("%s cannot be copied to %s: %s.", path, to, strerror(errno));
    free(path);
    free(to);
    return result;
}

/* Tokenizers and the like. What is written anew is left out, and so are shards. */
static int copy_files(const conversion *c, const cli_output_directory *directory) {
    const char *folder = c->options->words[0];
    DIR *list = opendir(folder);
    struct dirent *entry;
    int result = CLI_GOOD;
    while (list && result == CLI_GOOD && (entry = readdir(list))) {
        const char *name = entry->d_name;
        char *path = cli_format("%s/%s", folder, name);
        struct stat info;
        bool plain = stat(path, &info) == 0 && S_ISREG(info.st_mode);
        free(path);
        if (!plain || strstr(name, ".safetensors") || strcmp(name, "config.json") == 0 ||
            strcmp(name, "hf_quant_config.json") == 0)
            continue;
        result = copy_file(directory, folder, name);
    }
    if (list) closedir(list);
    return result;
}

/* The input's config.json with the quantization that the output has. */
static int write_configs(const conversion *c, const cli_output_directory *directory) {
    char *path = cli_format("%s/config.json", c->options->words[0]);
    json_t *config = json_load_file(path, 0, NULL);
    free(path);
    if (!json_is_object(config)) {
        json_decref(config);
        config = json_object();
    }
    const json_t *block = json_object_get(json_object_get(config, "quantization_config"), "weight_block_size");
    cli_shape shape = {.naming = strstr(c->layers[0].prefix, ".ffn") ? CLI_NATIVE : CLI_HF,
                       .shared_block =
                           json_is_array(block) ? (uint32_t)json_integer_value(json_array_get(block, 0)) : 128};
    json_t *quantization = cli_quantization_config(&shape, CLI_FORMAT_MODELOPT, c->quantized_first, c->quantized_end);
    json_t *beside =
        cli_synth_quant_config(&shape, CLI_FORMAT_MODELOPT, c->options, c->quantized_first, c->quantized_end);
    json_object_del(config, "expert_dtype");
    json_object_set_new(config, "quantization_config", quantization);
    char *text = json_dumps(config, JSON_INDENT(2)), *beside_text = json_dumps(beside, JSON_INDENT(2));
    int result = cli_output_text(directory, "config.json", text);
    if (result == CLI_GOOD) result = cli_output_text(directory, "hf_quant_config.json", beside_text);
    free(text);
    free(beside_text);
    json_decref(config);
    json_decref(beside);
    return result;
}

static int count_lost(conversion *c) {
    for (size_t i = 0; i < (size_t)c->layer_count * c->experts * 3; i++) c->blocks_lost += c->matrices[i].lost;
    if (!c->options->strict || !c->blocks_lost) return CLI_GOOD;
    return cli_fail(
        "%llu MXFP4 blocks lie more than 17 octaves below the largest of their projection and cannot become NVFP4 without "
        "loss; without --strict they are rounded.",
        (unsigned long long)c->blocks_lost);
}

static int write_output(conversion *c) {
    cli_output_directory directory;
    int result = cli_output_begin(c->options->words[1], &directory);
    if (result != CLI_GOOD) return result;
    result = cli_write_shards(&directory, c->tensors, c->count, 5000000000u, fill, c);
    if (result == CLI_GOOD) result = count_lost(c);
    if (result == CLI_GOOD) result = write_configs(c, &directory);
    if (result == CLI_GOOD) result = copy_files(c, &directory);
    if (result == CLI_GOOD) result = cli_output_commit(&directory);
    cli_output_discard(&directory);
    return result;
}

/* ---- the command ---- */

static int read_layers(conversion *c) {
    c->layer_count = megamoe_checkpoint_layer_count(c->checkpoint);
    c->layers = cli_allocate(c->layer_count, sizeof *c->layers);
    c->quantized_first = UINT32_MAX;
    for (uint32_t i = 0; i < c->layer_count; i++) {
        megamoe_layer_info *info = &c->layers[i];
        info->struct_size = sizeof *info;
        megamoe_status status = megamoe_checkpoint_layer(c->checkpoint, i, info);
        if (status != MEGAMOE_OK) return cli_fail_status(status);
        if (info->shape.expert_count > c->experts) c->experts = info->shape.expert_count;
        if (!to_quantize(info)) continue;
        if (info->layer < c->quantized_first) c->quantized_first = info->layer;
        c->quantized_end = info->layer + 1;
    }
    if (!c->quantized_end)
        return cli_fail("%s has no MoE layer in BF16, FP8 or MXFP4, so there is nothing to quantize.",
                        c->options->words[0]);
    c->matrices = cli_allocate((size_t)c->layer_count * c->experts * 3, sizeof *c->matrices);
    return CLI_GOOD;
}

static int run(const cli_options *options) {
    conversion c = {.options = options};
    double started = cli_seconds();
    megamoe_status status = cli_open_checkpoint(options, options->words[0], &c.checkpoint);
    int result = status == MEGAMOE_OK ? read_layers(&c) : cli_fail_status(status);
    if (result == CLI_GOOD) result = plan(&c);
    if (result == CLI_GOOD) result = choose_globals(&c);
    if (result == CLI_GOOD) result = calibrate(&c);
    if (result == CLI_GOOD) result = write_output(&c);
    if (result == CLI_GOOD && options->json) {
        result = cli_print_json(json_pack("{s:s,s:I,s:I,s:i,s:f}", "path", options->words[1], "projections",
                                          (json_int_t)c.matrices_converted, "blocks_lost", (json_int_t)c.blocks_lost,
                                          "experts_unmet", (int)c.experts_unmet, "seconds", cli_seconds() - started));
    } else if (result == CLI_GOOD) {
        printf("%s: %llu projections in NVFP4 in %.1f s\n", options->words[1], (unsigned long long)c.matrices_converted,
               cli_seconds() - started);
        if (c.blocks_lost)
            printf("%llu MXFP4 blocks were too small to be kept exactly and were rounded\n",
                   (unsigned long long)c.blocks_lost);
        if (c.experts_unmet)
            printf("%u experts met no token of %s: their input scales are their layer's largest\n", c.experts_unmet,
                   options->calibration);
        result = cli_flush();
    }
    for (size_t i = 0; i < c.count; i++) free(c.tensors[i].name);
    free(c.tensors);
    free(c.sources);
    free(c.matrices);
    free(c.layers);
    megamoe_checkpoint_close(c.checkpoint);
    return result;
}

const cli_command cli_quantize = {
    .name = "quantize",
    .words = "IN OUT",
    .summary = "turn BF16, FP8 or MXFP4 experts into NVFP4",
    .details =
        "Writes ModelOpt's layout, which every NVFP4 engine loads; all other tensors and files are copied. MXFP4 is kept "
        "without loss where its exponents span at most 17 octaves; blocks beyond that are counted and rounded, or refused "
        "with --strict. Input scales are not invented: without --calibration nvfp4 activations take theirs from each token.",
    .examples = "  megamoe quantize model-bf16/ model-nvfp4\n  megamoe quantize model/ out --scale search --separate\n",
    .options = "scale separate calibration strict",
    .words_min = 2,
    .words_max = 2,
    .run = run,
};
