/*
 * Which files a checkpoint consists of, and whether its tensors are all there: the index if there is one,
 * else the numbered shards, else every .safetensors file of the directory.
 */
#include "checkpoint/json_file.h"
#include "checkpoint/safetensors.h"

#include "error.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The file names of a directory that matter, sorted. */
typedef struct listing {
    char **names;
    bool *chosen; /* belongs to the checkpoint */
    uint32_t count;
    char *index; /* name of the index, or NULL */
} listing;

static bool ends_with(const char *text, const char *end) {
    size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

static char *path_join(const char *directory, const char *name) {
    size_t length = strlen(directory);
    char *path = malloc(length + strlen(name) + 2);
    if (path) sprintf(path, "%s%s%s", directory, length && directory[length - 1] == '/' ? "" : "/", name);
    return path;
}

static void listing_free(listing *list) {
    for (uint32_t i = 0; i < list->count; i++) free(list->names[i]);
    free(list->names);
    free(list->chosen);
    free(list->index);
}

static int by_text(const void *left, const void *right) {
    return strcmp(*(char *const *)left, *(char *const *)right);
}

static megamoe_status listing_add(listing *list, const char *directory, const char *name) {
    if (ends_with(name, ".safetensors.index.json")) {
        if (list->index)
            return mm_fail(MEGAMOE_CORRUPT_FILE, "%s holds two indexes, %s and %s", directory, list->index,
                           name);
        list->index = strdup(name);
        if (list->index) return MEGAMOE_OK;
    } else if (ends_with(name, ".safetensors")) {
        char **grown = realloc(list->names, (list->count + 1) * sizeof *grown);
        if (grown) list->names = grown;
        if (grown && (grown[list->count] = strdup(name))) {
            list->count++;
            return MEGAMOE_OK;
        }
    } else {
        return MEGAMOE_OK;
    }
    return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to list %s", directory);
}

static megamoe_status listing_read(const char *directory, listing *list) {
    DIR *stream = opendir(directory);
    const struct dirent *entry;
    megamoe_status status = MEGAMOE_OK;
    if (!stream) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", directory, strerror(errno));
    while (status == MEGAMOE_OK && (entry = readdir(stream)))
        status = listing_add(list, directory, entry->d_name);
    closedir(stream);
    if (status != MEGAMOE_OK) return status;
    if (list->count) qsort(list->names, list->count, sizeof *list->names, by_text);
    list->chosen = calloc(list->count + 1, sizeof *list->chosen);
    return list->chosen ? MEGAMOE_OK : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to list %s", directory);
}

static bool listing_choose(listing *list, const char *name) {
    char **found =
        list->count ? bsearch(&name, list->names, list->count, sizeof *list->names, by_text) : NULL;
    if (found) list->chosen[found - list->names] = true;
    return found != NULL;
}

/* Chooses the files that the index names; every one of them must be in the directory. */
static megamoe_status choose_by_index(const char *path, const json_t *weight_map, listing *list) {
    json_t *absent = json_object(); /* used as a set: a missing shard is named once, not once per tensor */
    mm_names names = {0};
    const char *name, *last = "";
    json_t *value;
    megamoe_status status = MEGAMOE_OK;
    if (!absent) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read %s", path);
    if (!json_is_object(weight_map)) status = mm_fail(MEGAMOE_CORRUPT_FILE, "%s has no weight_map", path);
    json_object_foreach((json_t *)weight_map, name, value) {
        const char *file = json_string_value(value);
        if (!file) {
            status = mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s is mapped to no file", path, name);
            break;
        }
        if (strcmp(file, last) != 0 && !listing_choose(list, file))
            json_object_set_new(absent, file, json_true());
        last = file;
    }
    json_object_foreach(absent, name, value) mm_names_add(&names, name);
    json_decref(absent);
    if (status == MEGAMOE_OK && names.count)
        status = mm_fail(MEGAMOE_CORRUPT_FILE, "%s names %u files that are not in the directory: %s", path,
                         names.count, names.text);
    return status;
}

/* "model-00002-of-00095.safetensors": the number, the total, and how long the part before them is. */
static bool shard_number(const char *name, unsigned *number, unsigned *total, size_t *stem) {
    const char *of = strstr(name, "-of-");
    int end = 0;
    if (!of || of - name < 6 || of[-6] != '-') return false;
    *stem = (size_t)(of - name) - 6;
    return sscanf(of - 5, "%5u-of-%5u.safetensors%n", number, total, &end) == 2 && of[-5 + end] == '\0' &&
           end > 0;
}

/* Without an index: if there are numbered shards, they are the checkpoint and must be complete. */
static megamoe_status choose_by_number(const char *directory, listing *list, bool *numbered) {
    unsigned number, total, last = 0, last_total = 0;
    size_t stem, last_stem = 0;
    const char *family = NULL;
    for (uint32_t i = 0; i < list->count; i++) {
        if (!shard_number(list->names[i], &number, &total, &stem)) continue;
        *numbered = list->chosen[i] = true;
        if (!family || stem != last_stem || total != last_total ||
            strncmp(family, list->names[i], stem) != 0) {
            if (family && last != last_total) break;
            last = 0;
        }
        if (number != last + 1)
            return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has no shard %u of the %u that %s belongs to", directory,
                           last + 1, total, list->names[i]);
        family = list->names[i];
        last = number;
        last_total = total;
        last_stem = stem;
    }
    if (family && last != last_total)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has no shard %u of the %u that %s belongs to", directory,
                       last + 1, last_total, family);
    if (!*numbered) memset(list->chosen, true, list->count * sizeof *list->chosen);
    return MEGAMOE_OK;
}

/*
 * Files that the checkpoint does not name are noted and left alone; so are directories that are called like
 * shards, unless an index or the numbering says that they are needed.
 */
static megamoe_status strays_note(const char *directory, listing *list, bool needed,
                                  mm_anomalies *anomalies) {
    mm_anomaly_place place = {.kind = "stray-file",
                              .layer = -1,
                              .expert = -1,
                              .remedy = "Nothing needs to be done; remove the file if it is a leftover."};
    mm_names strays = {0};
    for (uint32_t i = 0; i < list->count; i++) {
        struct stat facts;
        char *path = path_join(directory, list->names[i]);
        bool regular = path && stat(path, &facts) == 0 && S_ISREG(facts.st_mode);
        if (!regular && !needed) list->chosen[i] = false;
        free(path);
        if (!list->chosen[i]) mm_names_add(&strays, list->names[i]);
    }
    if (!strays.count) return MEGAMOE_OK;
    return mm_anomalies_add(anomalies, &place,
                            "%u entries called .safetensors are not part of the checkpoint: %s", strays.count,
                            strays.text);
}

static int by_name(const void *left, const void *right) {
    return strcmp(((const mm_tensor *)left)->name, ((const mm_tensor *)right)->name);
}

static megamoe_status duplicates_refuse(const mm_tensors *tensors) {
    mm_names names = {0};
    const mm_tensor *first = NULL;
    for (uint32_t i = 1; i < tensors->count; i++) {
        const mm_tensor *tensor = &tensors->tensors[i];
        if (strcmp(tensor[-1].name, tensor->name) != 0) continue;
        if (!first) first = tensor;
        mm_names_add(&names, tensor->name);
    }
    if (!first) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in two shards, the first in %s and %s: %s",
                   names.count, tensors->shards[first[-1].shard].path, tensors->shards[first->shard].path,
                   names.text);
}

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Index and shards must name the same tensors in the same files. */
static megamoe_status index_check(const char *path, const json_t *weight_map, const mm_tensors *tensors) {
    mm_names unlisted = {0}, elsewhere = {0}, missing = {0};
    const char *name;
    json_t *value;
    for (uint32_t i = 0; i < tensors->count; i++) {
        const mm_tensor *tensor = &tensors->tensors[i];
        const char *file = json_string_value(json_object_get(weight_map, tensor->name));
        if (!file)
            mm_names_add(&unlisted, tensor->name);
        else if (strcmp(file, file_name(tensors->shards[tensor->shard].path)) != 0)
            mm_names_add(&elsewhere, tensor->name);
    }
    if (json_object_size(weight_map) > tensors->count - unlisted.count)
        json_object_foreach((json_t *)weight_map, name, value) if (!mm_tensors_find(tensors, name))
            mm_names_add(&missing, name);
    if (missing.count)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s names %u tensors that are in no shard: %s", path,
                       missing.count, missing.text);
    if (unlisted.count)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in the shards but not in %s: %s", unlisted.count,
                       path, unlisted.text);
    if (elsewhere.count)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in another shard than %s says: %s",
                       elsewhere.count, path, elsewhere.text);
    return MEGAMOE_OK;
}

/* Many tools copy total_size from the model they started with, so a wrong one is only worth a note. */
static megamoe_status total_size_check(const json_t *index, const mm_tensors *tensors,
                                       mm_anomalies *anomalies) {
    const json_t *declared = json_object_get(json_object_get(index, "metadata"), "total_size");
    mm_anomaly_place place = {.kind = "index-size",
                              .layer = -1,
                              .expert = -1,
                              .remedy = "Nothing needs to be done: the shards themselves are complete."};
    uint64_t total = 0;
    for (uint32_t i = 0; i < tensors->count; i++) total += tensors->tensors[i].bytes;
    if (!json_is_number(declared) || json_number_value(declared) == (double)total) return MEGAMOE_OK;
    return mm_anomalies_add(anomalies, &place,
                            "the index declares a total_size of %.0f bytes, the tensors have %" PRIu64,
                            json_number_value(declared), total);
}

static megamoe_status shards_allocate(mm_tensors *tensors, uint32_t count) {
    tensors->shards = calloc(count, sizeof *tensors->shards);
    if (!tensors->shards) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u shards", count);
    tensors->shard_count = count;
    for (uint32_t i = 0; i < count; i++) tensors->shards[i].file = -1;
    return MEGAMOE_OK;
}

static megamoe_status chosen_open(const char *directory, const listing *list, bool writable,
                                  mm_tensors *tensors) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < list->count; i++) count += list->chosen[i];
    if (count == 0) return mm_fail(MEGAMOE_IO_ERROR, "%s holds no .safetensors file", directory);
    MM_TRY(shards_allocate(tensors, count));
    count = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        char *path;
        megamoe_status status;
        if (!list->chosen[i]) continue;
        path = path_join(directory, list->names[i]);
        status = path ? mm_shard_open(path, writable, count++, tensors)
                      : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", directory);
        free(path);
        MM_TRY(status);
    }
    qsort(tensors->tensors, tensors->count, sizeof *tensors->tensors, by_name);
    return duplicates_refuse(tensors);
}

static megamoe_status directory_open(const char *directory, listing *list, bool writable,
                                     mm_anomalies *anomalies, mm_tensors *tensors) {
    char *path = NULL;
    json_t *index = NULL;
    bool numbered = false;
    megamoe_status status = listing_read(directory, list);
    if (status == MEGAMOE_OK && list->index) {
        path = path_join(directory, list->index);
        status = path ? mm_json_file_read(path, &index)
                      : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", directory);
    }
    if (status == MEGAMOE_OK)
        status = index ? choose_by_index(path, json_object_get(index, "weight_map"), list)
                       : choose_by_number(directory, list, &numbered);
    if (status == MEGAMOE_OK) status = strays_note(directory, list, index || numbered, anomalies);
    if (status == MEGAMOE_OK) status = chosen_open(directory, list, writable, tensors);
    if (status == MEGAMOE_OK && index)
        status = index_check(path, json_object_get(index, "weight_map"), tensors);
    if (status == MEGAMOE_OK && index) status = total_size_check(index, tensors, anomalies);
    json_decref(index);
    free(path);
    return status;
}

megamoe_status mm_tensors_open(const char *path, bool writable, mm_anomalies *anomalies,
                               mm_tensors *tensors) {
    struct stat facts;
    megamoe_status status;
    *tensors = (mm_tensors){0};
    if (stat(path, &facts) != 0) return mm_fail(MEGAMOE_IO_ERROR, "%s: %s", path, strerror(errno));
    if (S_ISDIR(facts.st_mode)) {
        listing list = {0};
        status = directory_open(path, &list, writable, anomalies, tensors);
        listing_free(&list);
    } else {
        status = shards_allocate(tensors, 1);
        if (status == MEGAMOE_OK) status = mm_shard_open(path, writable, 0, tensors);
        if (status == MEGAMOE_OK && tensors->count)
            qsort(tensors->tensors, tensors->count, sizeof *tensors->tensors, by_name);
    }
    if (status != MEGAMOE_OK) mm_tensors_close(tensors);
    return status;
}

const mm_tensor *mm_tensors_find(const mm_tensors *tensors, const char *name) {
    mm_tensor key = {.name = name};
    return tensors->count ? bsearch(&key, tensors->tensors, tensors->count, sizeof key, by_name) : NULL;
}
