/* Input scales of one layer's experts from sample hidden states. */
#ifndef CLI_CALIBRATE_H
#define CLI_CALIBRATE_H

#include "cli.h"

/*
 * Writes the scales [expert_count] of gate and up (input) and of down (intermediate), which are zero before, and how
 * many experts met no token. CLI_GOOD, or CLI_BAD_INPUT after the message.
 */
int cli_calibrate(const char *path, megamoe_checkpoint *checkpoint, const megamoe_layer_info *info, float *input,
                  float *intermediate, uint32_t *unmet);

#endif
