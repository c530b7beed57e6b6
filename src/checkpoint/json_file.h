/* JSON beside the shards (index, config.json, hf_quant_config.json), read whole. */
#ifndef MM_CHECKPOINT_JSON_FILE_H
#define MM_CHECKPOINT_JSON_FILE_H

#include "megamoe/megamoe.h"

#include <jansson.h>

/*
 * *root is NULL if there is no such file; otherwise it is an object. Duplicate keys are refused. Python
 * writes Infinity and NaN, which JSON does not have: they are read as empty strings, so that they are no
 * error in a field that nobody reads and the wrong type in one that somebody does.
 */
megamoe_status mm_json_file_read(const char *path, json_t **root);

#endif
