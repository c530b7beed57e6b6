/* MEGAMOE_DEBUG=1: every run also logs the size of each stage, to find where a model goes wrong. */
#ifndef MM_DEBUG_H
#define MM_DEBUG_H

#include "backend/backend.h"

/* As backend->run, and then one line per stage to the log: root mean square, largest value, how many are not
 * finite. */
megamoe_status mm_debug_run(const mm_backend *backend, mm_backend_layer *layer, const mm_layer_weights *weights,
                            const megamoe_batch *batch, const megamoe_device_options *options);

#endif
