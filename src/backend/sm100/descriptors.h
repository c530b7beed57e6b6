/*
 * The words that tell tcgen05 what it multiplies: instruction descriptor, shared-memory descriptors, and the
 * columns of tensor memory that scales take. PTX ISA manual 9.7.16.4 (descriptors), 9.7.16.10.7 (block
 * scaling).
 */
#ifndef MM_SM100_DESCRIPTORS_H
#define MM_SM100_DESCRIPTORS_H

#include "numerics/host_device.h"

/* kind::mxf4nvf4, dense, K = 64, E2M1 x E2M1 (type code 1 for this kind), UE4M3 scales, both operands
 * K-major. */
MM_HD uint32_t sm100_instruction_descriptor(uint32_t m, uint32_t n) {
    return 1u << 7 | 1u << 10 | n >> 3 << 17 | m >> 7 << 27;
}

/*
 * A K-major operand with rows of 128 bytes and 128-byte swizzle: groups of eight rows are 1024 bytes apart.
 * `address` may point 32, 64 or 96 bytes into a row (a later step of K); the hardware swizzles the final
 * address.
 */
MM_HD uint64_t sm100_operand_descriptor(uint32_t address) {
    const uint64_t leading = 1, stride = 1024 / 16, version = 1, swizzle_128b = 2;
    return (address & 0x3FFFFu) >> 4 | leading << 16 | stride << 32 | version << 46 | swizzle_128b << 61;
}

/* A block of scales for tcgen05.cp.32x128b: 32 rows of 16 bytes, not swizzled, groups of eight 128 bytes
 * apart. */
MM_HD uint64_t sm100_scale_descriptor(uint32_t address) {
    const uint64_t stride = 128 / 16, version = 1;
    return (address & 0x3FFFFu) >> 4 | stride << 32 | version << 46;
}

#define SM100_SCALE_COLUMNS 4u /* of tensor memory, per stripe of 128 rows and step of K = 64 */

#endif
