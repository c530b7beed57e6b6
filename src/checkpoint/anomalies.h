/*
 * What is odd in a checkpoint, as a list that only grows: found when it is opened, when a layer is scanned,
 * and when a scale is repaired. The list has its own lock, because a checkpoint is shared by threads that
 * load layers.
 */
#ifndef MM_CHECKPOINT_ANOMALIES_H
#define MM_CHECKPOINT_ANOMALIES_H

#include "megamoe/megamoe.h"

typedef struct mm_anomalies mm_anomalies;

/* Where an anomaly is and what to do about it; kind and remedy are string constants, tensor is copied. */
typedef struct mm_anomaly_place {
    bool is_error;
    const char *kind;
    const char *tensor;    /* or NULL */
    int32_t layer, expert; /* -1: not about one */
    const char *remedy;    /* or NULL */
} mm_anomaly_place;

mm_anomalies *mm_anomalies_create(void); /* NULL: out of memory */
void mm_anomalies_free(mm_anomalies *anomalies);

/* An anomaly that is already in the list (same kind, tensor, layer, expert and sentence) is not added again.
 */
megamoe_status mm_anomalies_add(mm_anomalies *anomalies, const mm_anomaly_place *place, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

uint32_t mm_anomalies_count(mm_anomalies *anomalies);
bool mm_anomalies_get(mm_anomalies *anomalies, uint32_t index, megamoe_anomaly *anomaly); /* false: past the end */

/* A sentence's list of names: the first ten, and how many there were. */
#define MM_NAMES_SHOWN 10
typedef struct mm_names {
    char text[800];
    uint32_t count;
} mm_names;
void mm_names_add(mm_names *names, const char *name);
bool mm_names_hold(const mm_names *names, const char *name); /* among the first ten */
void mm_names_add_number(mm_names *names, uint32_t number);

#endif
