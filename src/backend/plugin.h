/*
 * A backend that lives outside the library: a shared object beside libmegamoe.so that fills the same table.
 * Made for the functional model of Blackwell, which is a test and not a product, and so must not be in the
 * library.
 */
#ifndef MM_PLUGIN_H
#define MM_PLUGIN_H

#include "backend/backend.h"

/* What the library lends the plugin: the way to fail (error.h), with the sentence already made. */
typedef struct mm_plugin_host {
    size_t backend_size; /* sizeof(mm_backend), so that a plugin of another build is refused */
    megamoe_status (*fail)(megamoe_status status, const char *sentence);
    megamoe_status (*fail_in)(megamoe_status status, const char *context);
} mm_plugin_host;

/* The one symbol that a plugin exports; NULL: made for another build. The host stays valid. */
#define MM_PLUGIN_ENTRY "megamoe_plugin"
typedef const mm_backend *mm_plugin_entry(const mm_plugin_host *host);

/* Loads `file` from the library's own folder, once, and probes it. UNSUPPORTED_DEVICE if it is not there. */
megamoe_status mm_plugin_load(const char *file, const mm_backend **backend);

#endif
