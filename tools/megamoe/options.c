/*
 * Every option of every command, once: its name, what it takes, where it goes and what --help says about it.
 * Parsing, help and suggestions all read this table.
 */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef enum value_kind { FLAG, TEXT, NUMBER, RANGE, LAYERS, WORD } value_kind;

typedef struct option_spec {
    const char *name, *argument;
    value_kind kind;
    size_t offset;
    const char *const *words; /* WORD: the position is the value */
    const char *help;
} option_spec;

static const char *const backends[] = {"auto", "reference", "cpu",         "cuda", "cuda-portable",
                                       "sm90", "sm100",     "sm100-model", NULL};
static const unsigned backend_values[] = {MEGAMOE_BACKEND_AUTO, MEGAMOE_REFERENCE,     MEGAMOE_CPU,
                                          MEGAMOE_CUDA,         MEGAMOE_CUDA_PORTABLE, MEGAMOE_SM90,
                                          MEGAMOE_SM100,        MEGAMOE_SM100_ON_MODEL};
static const char *const activations[] = {"auto", "bf16", "nvfp4", NULL};
static const char *const input_globals[] = {"auto", "static", "token", "unit", NULL};
static const char *const intermediate_globals[] = {"auto", "static", "", "unit", NULL};
static const char *const routing_weights[] = {"after", "before", NULL};
static const char *const routings[] = {"ep", "local", NULL};
static const char *const formats[] = {"",     "modelopt", "compressed-tensors", "mxfp4", "fused", "fused-transposed",
                                      "bf16", "fp8",      "fp8-e8m0",           NULL};
static const char *const scales[] = {"max", "4over6", "search", NULL};

#define AT(field) offsetof(cli_options, field)
static const option_spec specs[] = {
    {"json", NULL, FLAG, AT(json), NULL, "print JSON for other programs"},
    {"help", NULL, FLAG, AT(help), NULL, "print this text"},
    {"layer", "N", NUMBER, AT(layer), NULL, "the layer, numbered as in the model"},
    {"input", "FILE", TEXT, AT(input), NULL,
     "safetensors with hidden [T, H] in BF16 or F32, and optionally token_ids [T], expert_ids and expert_weights [T, K]"},
    {"output", "FILE", TEXT, AT(output), NULL, "safetensors to write: output, expert_ids, expert_weights"},
    {"dump-stages", "FILE", TEXT, AT(dump_stages), NULL, "also write every stage of the run"},
    {"against", "FILE", TEXT, AT(against), NULL,
     "judge the stages in this safetensors file instead of a backend: any of expert_ids, expert_weights, x_codes, x_scales, l1, h, l2, output"},
    {"tokens", "LIST", TEXT, AT(tokens), NULL,
     "tokens in the batch; bench and selftest take a list such as 1,8,64,512"},
    {"html", "FILE", TEXT, AT(html), NULL, "also write the report as one self-contained page"},
    {"scan", NULL, FLAG, AT(scan), NULL, "read every scale byte, not only headers and scalars"},
    {"shape", "SHAPE", TEXT, AT(shape), NULL,
     "v4-pro, v4-flash, v4.1-flash, qwen3-30b-a3b, r1, kimi-k2, minimax-m2, nemotron-3-nano, gpt-oss-120b, tiny, or H=..,I=..,E=..,K=.. with like=SHAPE, shared=1, hash=N, layers=N, limit=X, scale=X if wanted"},
    {"format", "FORMAT", WORD, AT(format), formats,
     "modelopt, compressed-tensors or mxfp4, the shape's own if not given; also fused and fused-transposed (ModelOpt's stacks of all experts), bf16, fp8 (blocks with F32 scales) and fp8-e8m0"},
    {"mtp", NULL, FLAG, AT(mtp), NULL, "add a multi-token-prediction block after the last layer"},
    {"layers", "N|A:B", LAYERS, AT(layers), NULL, "the first N MoE layers, or model layers A to B-1"},
    {"shard-size", "SIZE", TEXT, AT(shard_size), NULL, "bytes of one file, such as 500M or 5G (default 5G)"},
    {"seed", "N", NUMBER, AT(seed), NULL, "another set of random values (default 0)"},
    {"routing", "KIND", WORD, AT(routing), routings,
     "ep: K of all experts, of which the loaded ones count; local: K of the loaded ones"},
    {"runs", "N", NUMBER, AT(runs), NULL, "timed runs of each batch (default: about a second of them)"},
    {"csv", "FILE", TEXT, AT(csv), NULL, "also write the results as CSV"},
    {"quick", NULL, FLAG, AT(quick), NULL,
     "fewer shapes, batches and routings, and no benchmark: seconds instead of minutes"},
    {"report", "FILE", TEXT, AT(report), NULL, "the file to send back (default megamoe-selftest.json)"},
    {"scale", "HOW", WORD, AT(scale), scales, "max, 4over6 or search: how a block's scale is chosen"},
    {"separate", NULL, FLAG, AT(separate), NULL, "gate and up get global scales of their own"},
    {"calibration", "FILE", TEXT, AT(calibration), NULL,
     "safetensors with hidden [T, H] (or layers.N.hidden for layer N), as for run: the layers run on it, and the largest values give the input scales"},
    {"backend", "NAME", WORD, AT(backend), backends,
     "auto, reference, cpu, cuda, cuda-portable, sm90, sm100, or sm100-model (a plugin for tests)"},
    {"activations", "KIND", WORD, AT(activations), activations, "auto, bf16 or nvfp4"},
    {"input-global", "KIND", WORD, AT(input_global), input_globals,
     "global scale of nvfp4 inputs: auto, static, token or unit"},
    {"intermediate-global", "KIND", WORD, AT(intermediate_global), intermediate_globals,
     "global scale of nvfp4 intermediates: auto, static or unit"},
    {"routing-weight", "WHERE", WORD, AT(routing_weight), routing_weights, "after L2 (default) or before"},
    {"shared-unclamped", NULL, FLAG, AT(shared_unclamped), NULL,
     "no swiglu_limit on the shared expert (the first V4 release)"},
    {"experts", "A:B", RANGE, AT(experts), NULL, "only experts A to B-1; the router stays as it is"},
    {"ranks", "N", NUMBER, AT(ranks), NULL, "expert-parallel ranks inside this process (this version: 1)"},
    {"threads", "N", NUMBER, AT(threads), NULL, "threads of the cpu (default: the cores this process may use)"},
    {"batch-invariant", NULL, FLAG, AT(batch_invariant), NULL, "a token's bits do not depend on the rest of the batch"},
    {"strict", NULL, FLAG, AT(strict), NULL,
     "contradictions between config.json and the tensors are errors; so are values that change because quantize or sm100 makes NVFP4 of them"},
    {"no-strict-routing", NULL, FLAG, AT(lax_routing), NULL,
     "expert ids out of range are skipped and counted, not refused"},
    {"repair-nan-scales", NULL, FLAG, AT(repair_nan_scales), NULL, "read NaN scale bytes as 448, and count them"},
    {"no-scan", NULL, FLAG, AT(no_scan), NULL, "do not look for NaN scale bytes when a layer is loaded"},
};
const char *cli_format_name(unsigned format) {
    return formats[format];
}

enum { SPEC_COUNT = sizeof specs / sizeof specs[0] };

/* Is `name` one of the words of `list`? --json and --help belong to every command. */
static bool takes(const cli_command *command, const char *name) {
    if (strcmp(name, "json") == 0 || strcmp(name, "help") == 0) return true;
    size_t length = strlen(name);
    for (const char *at = command->options; (at = strstr(at, name)); at += length)
        if ((at == command->options || at[-1] == ' ') && (at[length] == ' ' || !at[length])) return true;
    return false;
}

static unsigned minimum(unsigned a, unsigned b) {
    return a < b ? a : b;
}

/* Insertions, deletions and replacements that lead from a to b; both shorter than 32. */
static unsigned edit_distance(const char *a, const char *b) {
    unsigned row[33], length = (unsigned)strlen(b);
    for (unsigned j = 0; j <= length; j++) row[j] = j;
    for (unsigned i = 1; a[i - 1]; i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (unsigned j = 1; j <= length; j++) {
            unsigned replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = minimum(minimum(row[j], row[j - 1]) + 1, replaced);
        }
    }
    return row[length];
}

const char *cli_nearest(const char *word, const char *const *candidates) {
    const char *nearest = NULL;
    unsigned best = (unsigned)strlen(word) / 3 + 2;
    if (strlen(word) > 32) return NULL;
    for (; *candidates; candidates++) {
        if (!**candidates || strlen(*candidates) > 32) continue;
        unsigned distance = edit_distance(word, *candidates);
        if (distance < best) {
            best = distance;
            nearest = *candidates;
        }
    }
    return nearest;
}

static int unknown_option(const cli_command *command, const char *argument, size_t length) {
    const char *names[SPEC_COUNT + 1];
    unsigned count = 0;
    for (unsigned i = 0; i < SPEC_COUNT; i++)
        if (takes(command, specs[i].name)) names[count++] = specs[i].name;
    names[count] = NULL;
    char *word = cli_format("%.*s", (int)length, argument);
    const char *nearest = cli_nearest(word, names);
    int result = nearest ? cli_fail("%s does not take --%s; did you mean --%s?", command->name, word, nearest)
                         : cli_fail("%s does not take --%s; 'megamoe %s --help' lists its options.", command->name,
                                    word, command->name);
    free(word);
    return result;
}

static bool read_number(const char *text, const char **end, uint32_t *number) {
    char *stop;
    errno = 0;
    unsigned long long value = strtoull(text, &stop, 10);
    if (text[0] < '0' || text[0] > '9' || errno || value > UINT32_MAX) return false;
    *number = (uint32_t)value;
    *end = stop;
    return true;
}

static int parse_range(const option_spec *spec, const char *text, cli_range *range) {
    const char *end;
    bool good = read_number(text, &end, &range->first);
    if (good && spec->kind == LAYERS && !*end && range->first) {
        *range = (cli_range){0, range->first}; /* a count; the command adds where the layers begin */
        return CLI_GOOD;
    }
    good = good && *end == ':' && read_number(end + 1, &end, &range->end) && !*end && range->end > range->first;
    if (good) return CLI_GOOD;
    return cli_fail("--%s takes %s, A below B, not '%s'.", spec->name,
                    spec->kind == LAYERS ? "a count or a range A:B" : "a range A:B", text);
}

static int parse_word(const option_spec *spec, const char *text, unsigned *value) {
    for (unsigned i = 0; spec->words[i]; i++)
        if (*text && strcmp(spec->words[i], text) == 0) {
            *value = spec->words == backends ? backend_values[i] : i;
            return CLI_GOOD;
        }
    const char *nearest = cli_nearest(text, spec->words);
    if (nearest) return cli_fail("--%s cannot be '%s'; did you mean '%s'?", spec->name, text, nearest);
    char list[256] = "";
    for (unsigned i = 0; spec->words[i]; i++)
        if (*spec->words[i])
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "", spec->words[i]);
    return cli_fail("--%s cannot be '%s'; it is one of: %s.", spec->name, text, list);
}

static int parse_value(const option_spec *spec, const char *text, cli_options *options) {
    char *field = (char *)options + spec->offset;
    const char *end;
    switch (spec->kind) {
    case FLAG: *(bool *)(void *)field = true; return CLI_GOOD;
    case TEXT: *(const char **)(void *)field = text; return CLI_GOOD;
    case RANGE:
    case LAYERS: return parse_range(spec, text, (cli_range *)(void *)field);
    case WORD: return parse_word(spec, text, (unsigned *)(void *)field);
    case NUMBER: break;
    }
    if (!read_number(text, &end, (uint32_t *)(void *)field) || *end)
        return cli_fail("--%s takes a whole number, not '%s'.", spec->name, text);
    if (spec->offset == AT(layer)) options->layer_given = true;
    return CLI_GOOD;
}

/* One --option at arguments[*index]; moves on over its value. */
static int parse_option(const cli_command *command, int count, char **arguments, int *index, cli_options *options) {
    const char *argument = arguments[*index] + 2, *equals = strchr(argument, '=');
    size_t length = equals ? (size_t)(equals - argument) : strlen(argument);
    const option_spec *spec = NULL;
    for (unsigned i = 0; i < SPEC_COUNT; i++)
        if (strlen(specs[i].name) == length && strncmp(specs[i].name, argument, length) == 0) spec = &specs[i];
    if (!spec || !takes(command, spec->name)) return unknown_option(command, argument, length);
    if (spec->kind == FLAG) {
        if (equals) return cli_fail("--%s takes no value.", spec->name);
        return parse_value(spec, "", options);
    }
    const char *value = equals ? equals + 1 : ++*index < count ? arguments[*index] : "";
    if (!*value) return cli_fail("--%s needs a value: --%s %s.", spec->name, spec->name, spec->argument);
    return parse_value(spec, value, options);
}

static int apply_environment(cli_options *options) {
    const char *backend = getenv("MEGAMOE_BACKEND");
    if (options->backend || !backend || !*backend) return CLI_GOOD;
    for (unsigned i = 0; backends[i]; i++)
        if (strcmp(backends[i], backend) == 0) {
            options->backend = backend_values[i];
            return CLI_GOOD;
        }
    return cli_fail("the environment variable MEGAMOE_BACKEND is '%s', which is no backend.", backend);
}

int cli_parse(const cli_command *command, int count, char **arguments, cli_options *options) {
    unsigned words = 0;
    for (int i = 0; i < count; i++) {
        if (strcmp(arguments[i], "-h") == 0) {
            options->help = true;
        } else if (strncmp(arguments[i], "--", 2) == 0 && arguments[i][2]) {
            if (parse_option(command, count, arguments, &i, options) != CLI_GOOD) return CLI_BAD_INPUT;
        } else if (arguments[i][0] == '-' && arguments[i][1] && strcmp(arguments[i], "--") != 0) {
            return cli_fail("there is no option '%s'; options are spelled out, as in --layer 3.", arguments[i]);
        } else if (!*arguments[i]) {
            return cli_fail("%s takes %s, not an empty word; is a variable of the shell unset?", command->name,
                            *command->words ? command->words : "no words");
        } else if (words == command->words_max) {
            return cli_fail("%s takes %s, and '%s' is one word too many.", command->name,
                            *command->words ? command->words : "no words", arguments[i]);
        } else {
            options->words[words++] = arguments[i];
        }
    }
    if (options->help) return CLI_GOOD;
    if (words < command->words_min)
        return cli_fail("%s needs %s; 'megamoe %s --help' shows an example.", command->name, command->words,
                        command->name);
    if (options->ranks > 1)
        return cli_fail("--ranks %u asks for more than the 1 rank that this version runs inside one process.",
                        options->ranks);
    return apply_environment(options);
}

unsigned cli_parse_list(const char *text, const char *option, uint32_t *numbers, unsigned capacity) {
    unsigned count = 0;
    const char *at = text;
    for (;; at++) {
        if (count == capacity || !read_number(at, &at, &numbers[count]) || numbers[count] == 0) break;
        count++;
        if (!*at) return count;
        if (*at != ',') break;
    }
    if (capacity == 1)
        cli_fail("--%s takes a positive number, not '%s'.", option, text);
    else
        cli_fail("--%s takes positive numbers separated by commas (at most %u), not '%s'.", option, capacity, text);
    return 0;
}

enum { OPTION_COLUMNS = 31 };

static void print_option(const option_spec *spec) {
    char left[48];
    snprintf(left, sizeof left, "--%s%s%s", spec->name, spec->argument ? " " : "",
             spec->argument ? spec->argument : "");
    printf("  %-*s", OPTION_COLUMNS - 2, left);
    cli_print_wrapped(spec->help, OPTION_COLUMNS);
}

void cli_print_help(const cli_command *command) {
    printf("Usage: megamoe %s%s%s [OPTION]...\n%c%s.\n\n", command->name, *command->words ? " " : "", command->words,
           command->summary[0] - ('a' <= command->summary[0] && command->summary[0] <= 'z' ? 'a' - 'A' : 0),
           command->summary + 1);
    cli_print_wrapped(command->details, 0);
    printf("\nExample:\n%s\nOptions:\n", command->examples);
    for (unsigned i = 0; i < SPEC_COUNT; i++)
        if (takes(command, specs[i].name)) print_option(&specs[i]);
}

static json_t *option_json(const option_spec *spec) {
    json_t *words = spec->words ? json_array() : NULL;
    for (unsigned i = 0; words && spec->words[i]; i++)
        if (*spec->words[i]) json_array_append_new(words, json_string(spec->words[i]));
    return json_pack("{s:s,s:s?,s:s,s:o?}", "name", spec->name, "argument", spec->argument, "help", spec->help, "words",
                     words);
}

json_t *cli_help_json(const cli_command *command) {
    json_t *options = json_array();
    for (unsigned i = 0; i < SPEC_COUNT; i++)
        if (takes(command, specs[i].name)) json_array_append_new(options, option_json(&specs[i]));
    return json_pack("{s:s,s:s,s:s,s:s,s:s,s:o}", "name", command->name, "words", command->words, "summary",
                     command->summary, "details", command->details, "examples", command->examples, "options", options);
}
