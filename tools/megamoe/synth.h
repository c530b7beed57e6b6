/* Random weights of realistic spread, as files (synth) or in memory (bench --shape). */
#ifndef CLI_SYNTH_H
#define CLI_SYNTH_H

#include "cli.h"
#include "shapes.h"

/* Blocks of Gaussian weights quantized once; every synthetic block is one of them with other signs and
 * another scale. */
typedef struct cli_blocks cli_blocks;
cli_blocks *cli_blocks_new(void);
void cli_blocks_free(cli_blocks *blocks);

/* Rows of E2M1 codes, blocks of 16 (NVFP4) or 32 (MXFP4), as a function of (key, row, column) alone. */
void cli_fill_codes(const cli_blocks *blocks, uint64_t key, unsigned group, uint64_t first_row, uint64_t rows,
                    uint64_t row_bytes, uint8_t *bytes);
/* The rows' block scales: E4M3 for groups of 16, E8M0 around weights of spread `sigma` for groups of 32. */
void cli_fill_scales(const cli_blocks *blocks, uint64_t key, unsigned group, double sigma, uint64_t first_row,
                     uint64_t rows, uint64_t row_bytes, uint8_t *bytes);
/* The global scale under which cli_fill_scales' E4M3 scales give weights of spread `sigma`. */
float cli_weight_global(double sigma);

/* The format of the experts in an MTP block beside layers of `format`: publishers leave those unquantized. */
unsigned cli_mtp_format(const cli_shape *shape, unsigned format);

/* config.json of a synthetic checkpoint, and hf_quant_config.json or NULL where the producer writes none. */
json_t *cli_synth_config(const cli_shape *shape, unsigned format, const cli_options *options, uint32_t layer_first,
                         uint32_t layer_end);
json_t *cli_synth_quant_config(const cli_shape *shape, unsigned format, const cli_options *options,
                               uint32_t layer_first, uint32_t layer_end);

/* The quantization_config of config.json alone; NULL if nothing is quantized. */
json_t *cli_quantization_config(const cli_shape *shape, unsigned format, uint32_t layer_first, uint32_t layer_end);

#endif
