/*
 * Where scale factors lie in memory, the only thing that Blackwell wants otherwise than the checkpoint has
 * it.
 *
 * The tensor cores take scales in blocks of 512 bytes: 128 rows x 4 groups of 16 along K. Inside a block, row
 * r is in the 16 bytes at 16 * (r % 32), as the four bytes at 4 * (r / 32), one byte per group. Blocks of one
 * stripe of 128 rows follow each other along K, stripes follow each other along the rows. Rows are padded to
 * 128 and groups to 4 with zeros: a padding byte meets codes that are zero, so it only has to be finite.
 *
 * Every group of a grouped GEMM (an expert's weights, an expert's tokens) begins at a stripe of its own. Pure
 * functions of integers, for the host and the device; tested against tables made from the vendor's layout
 * algebra.
 */
#ifndef MM_SM100_LAYOUT_H
#define MM_SM100_LAYOUT_H

#include "numerics/host_device.h"

/* Functions that also size arrays at compile time where the language can. */
#ifdef __cplusplus
#    define SM100_PURE MM_HD constexpr
#else
#    define SM100_PURE MM_HD
#endif

#define SM100_STRIPE_ROWS 128u
#define SM100_BLOCK_GROUPS 4u  /* scales of a row that share a block */
#define SM100_BLOCK_VALUES 64u /* along K: the K of one instruction */
#define SM100_BLOCK_BYTES 512u
#define SM100_CODE_ALIGNMENT 16u /* of a row of codes: what a tensor map can stride over */

SM100_PURE uint32_t sm100_round_up(uint32_t value, uint32_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

SM100_PURE uint32_t sm100_stripes(uint32_t rows) {
    return (rows + SM100_STRIPE_ROWS - 1) / SM100_STRIPE_ROWS;
}

SM100_PURE uint32_t sm100_blocks_along_k(uint32_t k) {
    return (k + SM100_BLOCK_VALUES - 1) / SM100_BLOCK_VALUES;
}

/* Bytes of the scales of `rows` rows that begin at a stripe of their own. */
SM100_PURE uint64_t sm100_scale_bytes(uint32_t rows, uint32_t k) {
    return (uint64_t)sm100_stripes(rows) * sm100_blocks_along_k(k) * SM100_BLOCK_BYTES;
}

/* The byte of group `group` (16 values along K) of row `row`, counted from the first stripe. */
SM100_PURE uint64_t sm100_scale_offset(uint32_t row, uint32_t group, uint32_t blocks_along_k) {
    return ((uint64_t)(row / SM100_STRIPE_ROWS) * blocks_along_k + group / SM100_BLOCK_GROUPS) * SM100_BLOCK_BYTES +
           row % 32 * 16 + row % SM100_STRIPE_ROWS / 32 * 4 + group % SM100_BLOCK_GROUPS;
}

/* Bytes from one row of codes to the next. */
SM100_PURE uint32_t sm100_code_row_bytes(uint32_t k) {
    return sm100_round_up(k / 2, SM100_CODE_ALIGNMENT);
}

/* Stripes that `rows` rows in `groups` groups can take at most, each group at a stripe of its own. */
SM100_PURE uint32_t sm100_stripes_max(uint32_t rows, uint32_t groups) {
    return rows / SM100_STRIPE_ROWS + (rows < groups ? rows : groups);
}

#endif
