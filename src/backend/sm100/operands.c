/* Weights as the kernels read them: scales into 128 x 4 blocks, MXFP4 into NVFP4. */
#include "backend/sm100/operands.h"
#include "error.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

/* E4M3 has the powers of two 2^-9 .. 2^8. */
enum { POWER_MIN = -9, POWER_MAX = 8, E8M0_BIAS = 127 };

static void write_codes(const mm_matrix *matrix, uint8_t *codes) {
    uint32_t row_bytes = sm100_code_row_bytes(matrix->columns), used = matrix->columns / 2;
    for (uint32_t row = 0; row < matrix->rows; row++, codes += row_bytes) {
        memcpy(codes, matrix->codes + row * matrix->row_bytes, used);
        memset(codes + used, 0, row_bytes - used);
    }
}

static void write_nvfp4_scales(const mm_matrix *matrix, uint8_t *scales) {
    uint32_t blocks = sm100_blocks_along_k(matrix->columns), groups = matrix->columns / 16;
    for (uint32_t row = 0; row < matrix->rows; row++)
        for (uint32_t group = 0; group < groups; group++)
            scales[sm100_scale_offset(row, group, blocks)] = matrix->scales[row * matrix->scale_row_bytes + group];
}

static bool is_zero_block(const uint8_t *codes) {
    unsigned magnitudes = 0;
    for (uint32_t i = 0; i < 16; i++) magnitudes |= codes[i] & 0x77u;
    return magnitudes == 0;
}

static const uint8_t *block_codes(const mm_matrix *matrix, uint32_t row, uint32_t block) {
    return matrix->codes + row * matrix->row_bytes + block * 16;
}

static unsigned block_exponent(const mm_matrix *matrix, uint32_t row, uint32_t block) {
    return matrix->scales[row * matrix->scale_row_bytes + block];
}

/* The largest and smallest exponent byte of blocks that hold anything; 0 octaves if none does. */
static unsigned largest_exponent(const mm_matrix *matrix, uint32_t *octaves) {
    unsigned largest = 0, smallest = MM_E8M0_NAN;
    for (uint32_t row = 0; row < matrix->rows; row++)
        for (uint32_t block = 0; block < matrix->columns / 32; block++) {
            unsigned byte = block_exponent(matrix, row, block);
            if (byte == MM_E8M0_NAN || is_zero_block(block_codes(matrix, row, block))) continue;
            if (byte > largest) largest = byte;
            if (byte < smallest) smallest = byte;
        }
    *octaves = smallest == MM_E8M0_NAN ? 0 : largest - smallest;
    return smallest == MM_E8M0_NAN ? E8M0_BIAS : largest;
}

/* Rounds a block's codes after its scale had to become 2^octaves larger; returns how many values changed. */
static uint64_t round_block(uint8_t *codes, unsigned octaves) {
    float factor = ldexpf(1.0f, -(int)octaves);
    uint64_t changed = 0;
    for (uint32_t i = 0; i < 32; i++) {
        unsigned shift = i % 2 * 4, code = mm_e2m1_unpack(codes, i);
        float value = mm_e2m1_to_f32(code) * factor;
        unsigned rounded = mm_e2m1_from_f32(value);
        changed += mm_e2m1_to_f32(rounded) != value;
        codes[i / 2] = (uint8_t)((codes[i / 2] & ~(15u << shift)) | rounded << shift);
    }
    return changed;
}

/* Each 32 under one E8M0 scale become two 16 under the same E4M3 power of two; codes are already at their
 * place. */
static void convert_mxfp4(const mm_matrix *matrix, uint8_t *codes, uint8_t *scales, float *global,
                          struct sm100_loss *loss) {
    uint32_t row_bytes = sm100_code_row_bytes(matrix->columns), blocks_along_k = sm100_blocks_along_k(matrix->columns);
    int largest = (int)largest_exponent(matrix, &loss->octaves) - E8M0_BIAS;
    *global = ldexpf(1.0f, largest - POWER_MAX);
    for (uint32_t row = 0; row < matrix->rows; row++)
        for (uint32_t block = 0; block < matrix->columns / 32; block++) {
            unsigned byte = block_exponent(matrix, row, block);
            int power = (int)byte - E8M0_BIAS - largest + POWER_MAX;
            uint8_t *target = codes + (uint64_t)row * row_bytes + block * 16;
            uint8_t scale = MM_E4M3_NAN;
            if (byte != MM_E8M0_NAN) {
                if (power > POWER_MAX) power = POWER_MAX; /* a block of zeros: any scale will do */
                if (power < POWER_MIN) {
                    loss->values += round_block(target, (unsigned)(POWER_MIN - power));
                    power = POWER_MIN;
                }
                scale = (uint8_t)mm_e4m3_from_f32(ldexpf(1.0f, power));
            }
            scales[sm100_scale_offset(row, 2 * block, blocks_along_k)] = scale;
            scales[sm100_scale_offset(row, 2 * block + 1, blocks_along_k)] = scale;
        }
}

megamoe_status mm_sm100_matrix_write(const mm_matrix *matrix, uint8_t *codes, uint8_t *scales, float *global,
                                     struct sm100_loss *loss) {
    uint32_t block = matrix->format == MM_MXFP4 ? 32 : 16;
    if (matrix->format != MM_NVFP4 && matrix->format != MM_MXFP4)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "a matrix is %s; the sm100 kernels take nvfp4, or mxfp4 to convert",
                       mm_format_name(matrix->format));
    if (matrix->columns % block)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "a matrix has %u columns, not a multiple of the %u that share a scale", matrix->columns, block);
    *loss = (struct sm100_loss){0};
    if (codes) write_codes(matrix, codes);
    memset(scales, 0, sm100_scale_bytes(matrix->rows, matrix->columns));
    if (matrix->format == MM_NVFP4) {
        write_nvfp4_scales(matrix, scales);
        *global = matrix->global;
    } else {
        convert_mxfp4(matrix, codes, scales, global, loss);
    }
    return MEGAMOE_OK;
}
