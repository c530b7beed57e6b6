/*
 * Which files a checkpoint consists of, and whether its tensors are all there: the index if there is one,
 * else the numbered shards, else every .safetensors file of the directory.
 */
#include "checkpoint/json_scan.h"
#include "checkpoint/safetensors.h"

#include "error.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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
            return mm_fail(MEGAMOE_CORRUPT_FILE, "%s holds two indexes, %s and %s", directory, list->index, name);
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
    while (status == MEGAMOE_OK && (entry = readdir(stream))) status = listing_add(list, directory, entry->d_name);
    closedir(stream);
    if (status != MEGAMOE_OK) return status;
    if (list->count) qsort(list->names, list->count, sizeof *list->names, by_text);
    list->chosen = calloc(list->count + 1, sizeof *list->chosen);
    return list->chosen ? MEGAMOE_OK : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to list %s", directory);
}

static bool listing_choose(listing *list, const char *name) {
    char **found = list->count ? bsearch(&name, list->names, list->count, sizeof *list->names, by_text) : NULL;
    if (found) list->chosen[found - list->names] = true;
    return found != NULL;
}

/* ---- the index -------------------------------------------------------------------------------------------
 */

/* The index is read twice, to choose the files and to check the tensors; neither pass keeps its entries. */
typedef struct index_scan {
    mm_json_scan scan;
    char key[MM_SCAN_STRING_MAX], file[MM_SCAN_STRING_MAX];
    const char *path;
    int64_t total_size; /* -1: not given */
} index_scan;

/* Calls entry for each pair of the weight_map; it may fail. */
typedef megamoe_status (*index_entry)(void *context, const char *tensor, const char *file);

static megamoe_status weight_map_scan(index_scan *x, index_entry entry, void *context) {
    bool first = true;
    mm_scan_open(&x->scan, '{');
    while (mm_scan_next_key(&x->scan, &first, x->key))
        if (mm_scan_string(&x->scan, x->file)) MM_TRY(entry(context, x->key, x->file));
    return MEGAMOE_OK;
}

static void metadata_scan(index_scan *x) {
    bool first = true;
    if (mm_scan_peek(&x->scan) != '{') {
        mm_scan_skip(&x->scan);
        return;
    }
    mm_scan_open(&x->scan, '{');
    while (mm_scan_next_key(&x->scan, &first, x->key)) {
        char c = mm_scan_peek(&x->scan);
        if (strcmp(x->key, "total_size") == 0 && c >= '0' && c <= '9')
            mm_scan_count(&x->scan, &x->total_size);
        else
            mm_scan_skip(&x->scan);
    }
}

static megamoe_status index_entries(index_scan *x, index_entry entry, void *context) {
    bool first = true, has_map = false;
    mm_scan_open(&x->scan, '{');
    while (mm_scan_next_key(&x->scan, &first, x->key)) {
        if (strcmp(x->key, "weight_map") == 0) {
            if (has_map) mm_scan_fail(&x->scan, "a second weight_map");
            has_map = true;
            MM_TRY(weight_map_scan(x, entry, context));
        } else if (strcmp(x->key, "metadata") == 0) {
            metadata_scan(x);
        } else {
            mm_scan_skip(&x->scan);
        }
    }
    if (mm_scan_end(&x->scan) && !has_map) mm_scan_fail(&x->scan, "there is no weight_map");
    if (!x->scan.problem) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: byte %" PRIu64 ": %s", x->path, x->scan.offset, x->scan.problem);
}

static megamoe_status index_read(const char *path, index_entry entry, void *context, int64_t *total_size) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    index_scan *x = malloc(sizeof *x);
    struct stat facts;
    megamoe_status status;
    if (!x) {
        status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to read %s", path);
    } else if (file < 0 || fstat(file, &facts) != 0) {
        status = mm_fail(MEGAMOE_IO_ERROR, "%s: %s", path, strerror(errno));
    } else {
        x->path = path;
        x->total_size = -1;
        mm_scan_begin(&x->scan, file, 0, (uint64_t)facts.st_size);
        status = index_entries(x, entry, context);
        *total_size = x->total_size;
    }
    free(x);
    if (file >= 0) close(file);
    return status;
}

typedef struct file_choice {
    listing *list;
    char last[MM_SCAN_STRING_MAX]; /* neighbors in the index are mostly in one file */
    mm_names missing;
} file_choice;

static megamoe_status file_choose(void *context, const char *tensor, const char *file) {
    file_choice *choice = context;
    (void)tensor;
    if (strcmp(file, choice->last) == 0) return MEGAMOE_OK;
    snprintf(choice->last, sizeof choice->last, "%s", file);
    if (!listing_choose(choice->list, file) && !mm_names_hold(&choice->missing, file))
        mm_names_add(&choice->missing, file);
    return MEGAMOE_OK;
}

/* Chooses the files that the index names; every one of them must be in the directory. */
static megamoe_status choose_by_index(const char *path, listing *list) {
    file_choice choice = {.list = list};
    int64_t total_size;
    MM_TRY(index_read(path, file_choose, &choice, &total_size));
    if (!choice.missing.count) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%s names files that are not in the directory (%u or more): %s", path,
                   choice.missing.count, choice.missing.text);
}

typedef struct tensor_tally {
    const mm_tensors *tensors;
    const char *path;
    bool *listed;    /* [tensors->count] */
    uint32_t cursor; /* indexes are mostly in order of name, as the tensors are */
    uint32_t listed_count;
    mm_names missing, elsewhere;
} tensor_tally;

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static megamoe_status tensor_tick(void *context, const char *name, const char *file) {
    tensor_tally *tally = context;
    const mm_tensors *all = tally->tensors;
    const mm_tensor *tensor = tally->cursor < all->count ? &all->tensors[tally->cursor] : NULL;
    if (!tensor || strcmp(tensor->name, name) != 0) tensor = mm_tensors_find(all, name);
    if (!tensor) {
        mm_names_add(&tally->missing, name);
        return MEGAMOE_OK;
    }
    tally->cursor = (uint32_t)(tensor - all->tensors);
    if (tally->listed[tally->cursor])
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: tensor %s is a duplicate key", tally->path, name);
    tally->listed[tally->cursor++] = true;
    tally->listed_count++;
    if (strcmp(file, file_name(all->shards[tensor->shard].path)) != 0) mm_names_add(&tally->elsewhere, name);
    return MEGAMOE_OK;
}

/* Index and shards must name the same tensors in the same files. */
static megamoe_status tally_judge(const tensor_tally *tally) {
    mm_names unlisted = {0};
    if (tally->missing.count)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s names %u tensors that are in no shard: %s", tally->path,
                       tally->missing.count, tally->missing.text);
    if (tally->elsewhere.count)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in another shard than %s says: %s", tally->elsewhere.count,
                       tally->path, tally->elsewhere.text);
    if (tally->listed_count == tally->tensors->count) return MEGAMOE_OK;
    for (uint32_t i = 0; i < tally->tensors->count; i++)
        if (!tally->listed[i]) mm_names_add(&unlisted, tally->tensors->tensors[i].name);
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in the shards but not in %s: %s", unlisted.count, tally->path,
                   unlisted.text);
}

/* Many tools copy total_size from the model they started with, so a wrong one is only worth a note. */
static megamoe_status total_size_check(int64_t declared, const mm_tensors *tensors, mm_anomalies *anomalies) {
    mm_anomaly_place place = {.kind = "index-size",
                              .layer = -1,
                              .expert = -1,
                              .remedy = "Nothing needs to be done: the shards themselves are complete."};
    uint64_t total = 0;
    for (uint32_t i = 0; i < tensors->count; i++) total += tensors->tensors[i].bytes;
    if (declared < 0 || (uint64_t)declared == total) return MEGAMOE_OK;
    return mm_anomalies_add(anomalies, &place,
                            "the index declares a total_size of %" PRId64 " bytes, the tensors have %" PRIu64, declared,
                            total);
}

static megamoe_status index_check(const char *path, const mm_tensors *tensors, mm_anomalies *anomalies) {
    tensor_tally tally = {.tensors = tensors, .path = path, .listed = calloc(tensors->count + 1ull, 1)};
    int64_t total_size = -1;
    megamoe_status status;
    if (!tally.listed) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to check %s", path);
    status = index_read(path, tensor_tick, &tally, &total_size);
    if (status == MEGAMOE_OK) status = tally_judge(&tally);
    if (status == MEGAMOE_OK) status = total_size_check(total_size, tensors, anomalies);
    free(tally.listed);
    return status;
}

/* ---- the files -------------------------------------------------------------------------------------------
 */

/* "model-00002-of-00095.safetensors": the number, the total, and how long the part before them is. */
static bool shard_number(const char *name, unsigned *number, unsigned *total, size_t *stem) {
    const char *of = strstr(name, "-of-");
    int end = 0;
    if (!of || of - name < 6 || of[-6] != '-') return false;
    *stem = (size_t)(of - name) - 6;
    return sscanf(of - 5, "%5u-of-%5u.safetensors%n", number, total, &end) == 2 && of[-5 + end] == '\0' && end > 0;
}

/* Without an index: if there are numbered shards, they are the checkpoint and must be complete. */
static megamoe_status choose_by_number(const char *directory, listing *list, bool *numbered) {
    unsigned number, total, last = 0, last_total = 0;
    size_t stem, last_stem = 0;
    const char *family = NULL;
    for (uint32_t i = 0; i < list->count; i++) {
        if (!shard_number(list->names[i], &number, &total, &stem)) continue;
        *numbered = list->chosen[i] = true;
        if (!family || stem != last_stem || total != last_total || strncmp(family, list->names[i], stem) != 0) {
            if (family && last != last_total) break;
            last = 0;
        }
        if (number != last + 1)
            return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has no shard %u of the %u that %s belongs to", directory, last + 1,
                           total, list->names[i]);
        family = list->names[i];
        last = number;
        last_total = total;
        last_stem = stem;
    }
    if (family && last != last_total)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s has no shard %u of the %u that %s belongs to", directory, last + 1,
                       last_total, family);
    if (!*numbered) memset(list->chosen, true, list->count * sizeof *list->chosen);
    return MEGAMOE_OK;
}

/*
 * Files that the checkpoint does not name are noted and left alone; so are directories that are called like
 * shards, unless an index or the numbering says that they are needed.
 */
static megamoe_status strays_note(const char *directory, listing *list, bool needed, mm_anomalies *anomalies) {
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
    return mm_anomalies_add(anomalies, &place, "%u entries called .safetensors are not part of the checkpoint: %s",
                            strays.count, strays.text);
}

static int by_name(const void *left, const void *right) {
    return strcmp(((const mm_tensor *)left)->name, ((const mm_tensor *)right)->name);
}

/* Brings the tensors into order of name; a name may be there only once, whether in one header or in two. */
static megamoe_status tensors_sort(mm_tensors *tensors) {
    mm_names names = {0};
    const mm_tensor *first = NULL;
    const char *one, *two;
    if (tensors->count) qsort(tensors->tensors, tensors->count, sizeof *tensors->tensors, by_name);
    for (uint32_t i = 1; i < tensors->count; i++) {
        const mm_tensor *tensor = &tensors->tensors[i];
        if (strcmp(tensor[-1].name, tensor->name) != 0) continue;
        if (i > 1 && strcmp(tensor[-2].name, tensor->name) == 0) continue; /* named already */
        if (!first) first = tensor;
        mm_names_add(&names, tensor->name);
    }
    if (!first) return MEGAMOE_OK;
    one = tensors->shards[first[-1].shard].path;
    two = tensors->shards[first->shard].path;
    if (one == two)
        return mm_fail(MEGAMOE_CORRUPT_FILE, "%s: %u tensors are duplicate keys: %s", one, names.count, names.text);
    return mm_fail(MEGAMOE_CORRUPT_FILE, "%u tensors are in two shards, the first in %s and %s: %s", names.count, one,
                   two, names.text);
}

static megamoe_status shards_allocate(mm_tensors *tensors, uint32_t count) {
    tensors->shards = calloc(count, sizeof *tensors->shards);
    if (!tensors->shards) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %u shards", count);
    tensors->shard_count = count;
    for (uint32_t i = 0; i < count; i++) tensors->shards[i].file = -1;
    return MEGAMOE_OK;
}

static megamoe_status chosen_open(const char *directory, const listing *list, bool writable, mm_tensors *tensors) {
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
    return MEGAMOE_OK;
}

static megamoe_status directory_open(const char *directory, listing *list, bool writable, mm_anomalies *anomalies,
                                     mm_tensors *tensors) {
    char *index = NULL;
    bool numbered = false;
    megamoe_status status = listing_read(directory, list);
    if (status == MEGAMOE_OK && list->index && !(index = path_join(directory, list->index)))
        status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to open %s", directory);
    if (status == MEGAMOE_OK)
        status = index ? choose_by_index(index, list) : choose_by_number(directory, list, &numbered);
    if (status == MEGAMOE_OK) status = strays_note(directory, list, index || numbered, anomalies);
    if (status == MEGAMOE_OK) status = chosen_open(directory, list, writable, tensors);
    if (status == MEGAMOE_OK) status = tensors_sort(tensors);
    if (status == MEGAMOE_OK && index) status = index_check(index, tensors, anomalies);
    free(index);
    return status;
}

megamoe_status mm_tensors_open(const char *path, bool writable, mm_anomalies *anomalies, mm_tensors *tensors) {
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
        if (status == MEGAMOE_OK) status = tensors_sort(tensors);
    }
    if (status != MEGAMOE_OK) mm_tensors_close(tensors);
    return status;
}

const mm_tensor *mm_tensors_find(const mm_tensors *tensors, const char *name) {
    mm_tensor key = {.name = name};
    return tensors->count ? bsearch(&key, tensors->tensors, tensors->count, sizeof key, by_name) : NULL;
}
