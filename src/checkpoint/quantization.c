/* Quantization as config files declare it, in the dialects of ModelOpt, compressed-tensors, DeepSeek and
 * gpt-oss. */
#include "checkpoint/quantization.h"

#include "checkpoint/json_file.h"
#include "error.h"

#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mm_ignore {
    char *text;
    regex_t regex;
    bool is_regex, has_wildcard;
};

/* The names of a module under the spellings of the part before "layers." that lists use. */
#define SPELLINGS 5
static const char *const stems[SPELLINGS - 1] = {"", "model.", "model.language_model.", "language_model.model."};

static bool wildcard_matches(const char *pattern, const char *text) {
    const char *star = NULL, *resume = NULL;
    while (*text) {
        if (*pattern == '*') {
            star = pattern++;
            resume = text;
        } else if (*pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star + 1;
            text = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*') pattern++;
    return *pattern == '\0';
}

/* The module itself or one that contains it: "a.layers.1" holds "a.layers.1.mlp" but not "a.layers.10". */
static bool name_holds(const char *name, const char *module) {
    size_t length = strlen(name);
    return strncmp(name, module, length) == 0 && (module[length] == '\0' || module[length] == '.');
}

static bool entry_matches(const mm_ignore *entry, const char *module) {
    regmatch_t match;
    if (entry->is_regex) return regexec(&entry->regex, module, 1, &match, 0) == 0 && match.rm_so == 0;
    return entry->has_wildcard ? wildcard_matches(entry->text, module) : name_holds(entry->text, module);
}

/* One of the names that lists may use for a module. */
static void spelling_make(const char *module, size_t stem_length, uint32_t which, char *text, size_t size) {
    if (which == 0)
        snprintf(text, size, "%s", module);
    else
        snprintf(text, size, "%s%s", stems[which - 1], module + stem_length);
}

bool mm_quantization_ignores(const mm_quantization *declared, const char *module, size_t stem_length) {
    char spelling[512];
    for (uint32_t s = 0; s < SPELLINGS; s++) {
        spelling_make(module, stem_length, s, spelling, sizeof spelling);
        for (uint32_t i = 0; i < declared->ignored_count; i++)
            if (entry_matches(&declared->ignored[i], spelling)) return true;
    }
    return false;
}

static mm_format format_of(const char *text) {
    if (!text) return 0;
    if (strstr(text, "NVFP4") || strstr(text, "nvfp4")) return MM_NVFP4;
    if (strstr(text, "MXFP4") || strstr(text, "mxfp4")) return MM_MXFP4;
    if (strstr(text, "FP8") || strstr(text, "fp8") || strcmp(text, "float-quantized") == 0) return MM_FP8;
    return 0;
}

mm_format mm_quantization_format(const mm_quantization *declared, const char *module, size_t stem_length) {
    char spelling[512];
    const char *name;
    json_t *listed;
    if (mm_quantization_ignores(declared, module, stem_length)) return 0;
    if (!declared->listed) return declared->experts;
    for (uint32_t s = 0; s < SPELLINGS; s++) {
        spelling_make(module, stem_length, s, spelling, sizeof spelling);
        json_object_foreach((json_t *)declared->listed, name, listed) {
            mm_format format = format_of(json_string_value(json_object_get(listed, "quant_algo")));
            if (name_holds(name, spelling)) return format ? format : declared->experts;
        }
    }
    return 0;
}

/* Python's regular expressions to POSIX extended ones, as far as ignore lists use them. */
static void regex_translate(const char *python, char *posix, size_t size) {
    size_t used = 0;
    for (; *python && used + 8 < size; python++) {
        if (python[0] == '\\' && (python[1] == 'd' || python[1] == 'w')) {
            used += (size_t)sprintf(posix + used, "%s", python[1] == 'd' ? "[0-9]" : "\\w");
            python++;
        } else if (strncmp(python, "(?:", 3) == 0) {
            posix[used++] = '(';
            python += 2;
        } else {
            posix[used++] = *python;
            if (python[0] == '\\' && python[1]) posix[used++] = *++python;
        }
    }
    posix[used] = '\0';
}

static megamoe_status ignore_add(const char *text, mm_anomalies *anomalies, mm_quantization *declared) {
    mm_ignore *entry = &declared->ignored[declared->ignored_count];
    char posix[1024];
    *entry = (mm_ignore){.text = strdup(text), .has_wildcard = strchr(text, '*') != NULL};
    if (!entry->text) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for an ignore list");
    if (strncmp(text, "re:", 3) == 0) {
        regex_translate(text + 3, posix, sizeof posix);
        if (regcomp(&entry->regex, posix, REG_EXTENDED) != 0) {
            mm_anomaly_place place = {.kind = "config-pattern",
                                      .layer = -1,
                                      .expert = -1,
                                      .remedy = "The entry is not used; the tensors decide what is quantized."};
            free(entry->text);
            return mm_anomalies_add(anomalies, &place, "%s: the ignore entry '%.200s' cannot be understood",
                                    declared->file, text);
        }
        entry->is_regex = true;
    }
    declared->ignored_count++;
    return MEGAMOE_OK;
}

static megamoe_status ignored_read(const json_t *section, mm_anomalies *anomalies, mm_quantization *declared) {
    static const char *const keys[] = {"ignore", "exclude_modules", "modules_to_not_convert"};
    size_t count = 0, index;
    json_t *value;
    for (size_t k = 0; k < 3; k++) count += json_array_size(json_object_get(section, keys[k]));
    declared->ignored = calloc(count + 1, sizeof *declared->ignored);
    if (!declared->ignored) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for an ignore list");
    for (size_t k = 0; k < 3; k++)
        json_array_foreach(json_object_get(section, keys[k]), index, value) if (json_is_string(value))
            MM_TRY(ignore_add(json_string_value(value), anomalies, declared));
    return MEGAMOE_OK;
}

/* ModelOpt's name for what it did to the experts. MIXED_PRECISION says it module by module. NULL: it does not
 * say. */
static const char *experts_algorithm(const json_t *section) {
    static const char *const keys[] = {"moe_quant_algo", "quant_algo"};
    const char *name, *algorithm;
    json_t *module;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        algorithm = json_string_value(json_object_get(section, keys[i]));
        if (format_of(algorithm)) return algorithm;
    }
    json_object_foreach(json_object_get(section, "quantized_layers"), name, module) {
        algorithm = json_string_value(json_object_get(module, "quant_algo"));
        if (strstr(name, "experts") && format_of(algorithm)) return algorithm;
    }
    return NULL;
}

/* The format of the routed experts that one section declares: the most specific key first. */
static mm_format section_format(const json_t *section, const mm_config *config) {
    const char *dtype = json_string_value(json_object_get(section, "expert_dtype"));
    mm_format format = format_of(experts_algorithm(section));
    if (!format) format = format_of(json_string_value(json_object_get(section, "format")));
    if (format) return format;
    /* DeepSeek-V4 says fp8 of everything and means FP4 experts unless expert_dtype says otherwise */
    if (!dtype) dtype = json_string_value(json_object_get(config->text, "expert_dtype"));
    if (dtype) return strcmp(dtype, "fp4") == 0 ? MM_MXFP4 : strcmp(dtype, "fp8") == 0 ? MM_FP8 : 0;
    if (strcmp(config->model_type, "deepseek_v4") == 0) return MM_MXFP4;
    return format_of(json_string_value(json_object_get(section, "quant_method")));
}

/* W4A4: a config group with 4-bit input activations, or ModelOpt's NVFP4 without a word about weights only.
 */
static bool section_nvfp4_activations(const json_t *section) {
    const char *name, *algorithm = experts_algorithm(section);
    json_t *group;
    json_object_foreach(json_object_get(section, "config_groups"), name, group) {
        const json_t *activations = json_object_get(group, "input_activations");
        if (json_integer_value(json_object_get(activations, "num_bits")) == 4) return true;
    }
    return algorithm && strcmp(algorithm, "NVFP4") == 0;
}

megamoe_status mm_quantization_read(const char *directory, const mm_config *config, mm_anomalies *anomalies,
                                    mm_quantization *declared) {
    const json_t *section, *beside = json_object_get(config->root, "quantization_config");
    char *path = malloc(strlen(directory) + sizeof "/hf_quant_config.json");
    mm_format format;
    megamoe_status status;
    *declared = (mm_quantization){.file = "config.json"};
    if (!path) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read hf_quant_config.json");
    sprintf(path, "%s/hf_quant_config.json", directory);
    status = mm_json_file_read(path, &declared->root);
    free(path);
    if (status != MEGAMOE_OK) return status;
    if (!beside) beside = json_object_get(config->text, "quantization_config");
    section = json_object_get(declared->root, "quantization");
    if (section)
        declared->file = "hf_quant_config.json";
    else
        section = beside;
    declared->experts = section ? section_format(section, config) : 0;
    declared->nvfp4_activations = declared->experts == MM_NVFP4 && section_nvfp4_activations(section);
    if (json_is_object(json_object_get(section, "quantized_layers")))
        declared->listed = json_object_get(section, "quantized_layers");
    status = ignored_read(section, anomalies, declared);
    format = section != beside && beside ? section_format(beside, config) : 0;
    if (status == MEGAMOE_OK && format && declared->experts && format != declared->experts) {
        mm_anomaly_place place = {.kind = "config-contradiction",
                                  .layer = -1,
                                  .expert = -1,
                                  .remedy = "hf_quant_config.json is believed; correct config.json."};
        status = mm_anomalies_add(anomalies, &place, "hf_quant_config.json declares %s experts, config.json %s",
                                  mm_format_name(declared->experts), mm_format_name(format));
    }
    if (status != MEGAMOE_OK) mm_quantization_free(declared);
    return status;
}

void mm_quantization_free(mm_quantization *declared) {
    for (uint32_t i = 0; i < declared->ignored_count; i++) {
        if (declared->ignored[i].is_regex) regfree(&declared->ignored[i].regex);
        free(declared->ignored[i].text);
    }
    free(declared->ignored);
    json_decref(declared->root);
    *declared = (mm_quantization){0};
}
