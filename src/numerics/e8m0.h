/* E8M0: a power of two. Byte b is 2^(b-127); 0 is 2^-127, not zero; 0xFF is NaN. */
#ifndef MM_NUMERICS_E8M0_H
#define MM_NUMERICS_E8M0_H

#include "numerics/host_device.h"

#define MM_E8M0_NAN 0xFFu

MM_HD float mm_e8m0_to_f32(unsigned byte) {
    if (byte == MM_E8M0_NAN) return mm_f32_from_bits(0x7FC00000u);
    return mm_f32_from_bits(byte == 0 ? 0x00400000u /* 2^-127 is subnormal */ : (uint32_t)byte << 23);
}

#endif
