/*
 * The random weights. A pool of Gaussian blocks is quantized once; then every block costs one hash: it takes
 * a pool block's codes with random signs, and another pool block's scale. So codes and scales are distributed
 * as those of Gaussian weights, rows differ in spread, and one block in 512 is an outlier.
 */
#include <stdlib.h>

#include "formats.h"
#include "random.h"
#include "synth.h"

enum { POOL = 4096, ROW_LEVELS = 16, OUTLIER_ONE_IN = 512 };

static const double amax_bound = 4.88 * 1.5 * 4.0; /* of a pool block, times the row's spread, times the outlier's */

struct cli_blocks {
    uint8_t codes[2][POOL][16];        /* blocks of 16 use 8 bytes, blocks of 32 use 16 */
    uint8_t e4m3[2][ROW_LEVELS][POOL]; /* [outlier][row level] */
    int8_t exponents[POOL];            /* of MXFP4 blocks of spread 1 */
};

static double row_spread(unsigned level) {
    return 0.5 + (double)level / ROW_LEVELS;
}

/* Draws `group` Gaussian values and returns the largest magnitude. */
static double draw_block(uint64_t key, uint64_t block, unsigned group, double values[32]) {
    double amax = 0;
    for (unsigned i = 0; i < group; i++) {
        values[i] = random_gauss(random_at(key, block * group + i));
        if (fabs(values[i]) > amax) amax = fabs(values[i]);
    }
    return amax;
}

static void pack_block(const double *values, unsigned group, double step, uint8_t *codes) {
    for (unsigned i = 0; i < group; i += 2)
        codes[i / 2] = (uint8_t)(e2m1_nearest(values[i] / step) | e2m1_nearest(values[i + 1] / step) << 4);
}

cli_blocks *cli_blocks_new(void) {
    cli_blocks *blocks = cli_allocate(1, sizeof *blocks);
    uint64_t key = random_key(0, "pool of blocks");
    for (unsigned b = 0; b < POOL; b++) {
        double values[32], amax = draw_block(key, b, 16, values);
        pack_block(values, 16, amax / 6, blocks->codes[0][b]);
        for (unsigned level = 0; level < ROW_LEVELS; level++) {
            double scale = 448.0 * amax * row_spread(level) / amax_bound;
            blocks->e4m3[0][level][b] = (uint8_t)e4m3_nearest(scale);
            blocks->e4m3[1][level][b] = (uint8_t)e4m3_nearest(4 * scale);
        }
        amax = draw_block(key + 1, b, 32, values);
        int exponent;
        frexp(amax, &exponent); /* amax = f * 2^exponent with f in [1/2, 1): the OCP scale is 2^(exponent - 3) */
        pack_block(values, 32, ldexp(1, exponent - 3), blocks->codes[1][b]);
        blocks->exponents[b] = (int8_t)(exponent - 3);
    }
    return blocks;
}

void cli_blocks_free(cli_blocks *blocks) {
    free(blocks);
}

void cli_fill_codes(const cli_blocks *blocks, uint64_t key, unsigned group, uint64_t first_row, uint64_t rows,
                    uint64_t row_bytes, uint8_t *bytes) {
    unsigned width = group / 2;
    uint64_t per_row = row_bytes / width;
    for (uint64_t i = 0; i < rows * per_row; i++) {
        uint64_t bits = random_at(key, first_row * per_row + i), words[2];
        memcpy(words, blocks->codes[group == 32][bits % POOL], sizeof words);
        uint64_t signs = random_mix(bits), every_sign = 0x8888888888888888u;
        words[0] ^= signs & every_sign;
        words[1] ^= signs << 1 & every_sign;
        memcpy(bytes + i * width, words, width);
    }
}

void cli_fill_scales(const cli_blocks *blocks, uint64_t key, unsigned group, double sigma, uint64_t first_row,
                     uint64_t rows, uint64_t row_bytes, uint8_t *bytes) {
    int exponent;
    frexp(sigma, &exponent);
    for (uint64_t row = first_row; row < first_row + rows; row++) {
        unsigned level = (unsigned)(random_at(key + 1, row) % ROW_LEVELS);
        for (uint64_t i = 0; i < row_bytes; i++) {
            uint64_t bits = random_at(key, row * row_bytes + i);
            bool outlier = (bits >> 32) % OUTLIER_ONE_IN == 0;
            *bytes++ = group == 16
                           ? blocks->e4m3[outlier][level][bits % POOL]
                           : (uint8_t)(127 + blocks->exponents[bits % POOL] + exponent - (level < 5) + 2 * outlier);
        }
    }
}

float cli_weight_global(double sigma) {
    return (float)(sigma * amax_bound / 2688.0);
}
