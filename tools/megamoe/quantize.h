/* One projection of an expert: from what its file holds to NVFP4. */
#ifndef CLI_QUANTIZE_H
#define CLI_QUANTIZE_H

#include "cli.h"

typedef struct cli_source_matrix {
    megamoe_tensor weight, scale; /* scale.data NULL: BF16 */
    uint64_t rows, columns;
    float input_scale; /* calibrated, or 0 */
    float global;      /* of the NVFP4 weights; 0 until it is known */
    int exponent;      /* MXFP4: the largest in use, of the whole pair if gate and up share one */
    float amax;
    uint64_t lost; /* MXFP4: blocks that could not be kept as they were */
} cli_source_matrix;

bool cli_matrix_is_mxfp4(const cli_source_matrix *m);
/* Reads the whole matrix: its amax, or the largest exponent of MXFP4 blocks that are not all zeros. */
void cli_matrix_measure(cli_source_matrix *m);
/* Sets the global scale from amax or exponent, under the --scale rule. */
void cli_matrix_choose_global(cli_source_matrix *m, unsigned scale_rule);
/* Rows of codes [columns / 2] and scales [columns / 16]; either may be NULL. Counts what is lost if `scales`
 * is given. */
void cli_matrix_quantize(cli_source_matrix *m, unsigned scale_rule, uint64_t row, uint64_t count, uint8_t *codes,
                         uint8_t *scales);

#endif
