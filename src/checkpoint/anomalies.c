/* The list of anomalies, and the lists of names that sentences hold. */
#include "checkpoint/anomalies.h"

#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    mm_anomaly_place place;
    char *tensor, *detail;
} entry;

struct mm_anomalies {
    pthread_mutex_t lock;
    entry *entries;
    uint32_t count, capacity;
};

mm_anomalies *mm_anomalies_create(void) {
    mm_anomalies *anomalies = calloc(1, sizeof *anomalies);
    if (anomalies) pthread_mutex_init(&anomalies->lock, NULL);
    return anomalies;
}

void mm_anomalies_free(mm_anomalies *anomalies) {
    if (!anomalies) return;
    for (uint32_t i = 0; i < anomalies->count; i++) {
        free(anomalies->entries[i].tensor);
        free(anomalies->entries[i].detail);
    }
    free(anomalies->entries);
    pthread_mutex_destroy(&anomalies->lock);
    free(anomalies);
}

static bool entry_equal(const entry *e, const mm_anomaly_place *place, const char *detail) {
    return e->place.layer == place->layer && e->place.expert == place->expert &&
           strcmp(e->place.kind, place->kind) == 0 && strcmp(e->detail, detail) == 0;
}

/* The caller holds the lock. */
static megamoe_status entry_append(mm_anomalies *anomalies, const mm_anomaly_place *place, const char *detail) {
    entry *e;
    for (uint32_t i = 0; i < anomalies->count; i++)
        if (entry_equal(&anomalies->entries[i], place, detail)) return MEGAMOE_OK;
    if (anomalies->count == anomalies->capacity) {
        uint32_t capacity = anomalies->capacity ? 2 * anomalies->capacity : 16;
        entry *grown = realloc(anomalies->entries, capacity * sizeof *grown);
        if (!grown) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a list of %u anomalies", capacity);
        anomalies->entries = grown;
        anomalies->capacity = capacity;
    }
    e = &anomalies->entries[anomalies->count];
    e->place = *place;
    e->tensor = place->tensor ? strdup(place->tensor) : NULL;
    e->detail = strdup(detail);
    if (!e->detail || (place->tensor && !e->tensor)) {
        free(e->tensor);
        free(e->detail);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the text of an anomaly");
    }
    anomalies->count++;
    return MEGAMOE_OK;
}

megamoe_status mm_anomalies_add(mm_anomalies *anomalies, const mm_anomaly_place *place, const char *format, ...) {
    char detail[1024];
    megamoe_status status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&anomalies->lock);
    status = entry_append(anomalies, place, detail);
    pthread_mutex_unlock(&anomalies->lock);
    return status;
}

uint32_t mm_anomalies_count(mm_anomalies *anomalies) {
    uint32_t count;
    pthread_mutex_lock(&anomalies->lock);
    count = anomalies->count;
    pthread_mutex_unlock(&anomalies->lock);
    return count;
}

bool mm_anomalies_get(mm_anomalies *anomalies, uint32_t index, megamoe_anomaly *anomaly) {
    bool found;
    pthread_mutex_lock(&anomalies->lock);
    found = index < anomalies->count;
    if (found) {
        const entry *e = &anomalies->entries[index];
        anomaly->is_error = e->place.is_error;
        anomaly->kind = e->place.kind;
        anomaly->tensor = e->tensor;
        anomaly->layer = e->place.layer;
        anomaly->expert = e->place.expert;
        anomaly->detail = e->detail;
        anomaly->remedy = e->place.remedy;
    }
    pthread_mutex_unlock(&anomalies->lock);
    return found;
}

void mm_names_add(mm_names *names, const char *name) {
    size_t used = strlen(names->text), room = sizeof names->text - used;
    if (names->count == MM_NAMES_SHOWN)
        snprintf(names->text + used, room, ", ...");
    else if (names->count < MM_NAMES_SHOWN)
        snprintf(names->text + used, room, "%s%s", names->count ? ", " : "", name);
    names->count++;
}

bool mm_names_hold(const mm_names *names, const char *name) {
    size_t length = strlen(name);
    for (const char *at = names->text; (at = strstr(at, name)); at += length)
        if ((at == names->text || at[-1] == ' ') && (at[length] == ',' || at[length] == '\0')) return true;
    return false;
}

void mm_names_add_number(mm_names *names, uint32_t number) {
    char text[16];
    snprintf(text, sizeof text, "%u", number);
    mm_names_add(names, text);
}
