/*
 * E2M1 codes to BF16 pairs, exactly, and the order of K that makes it cheap.
 *
 * In BF16 the target bits of an E2M1 code are 15 (sign) and 8..6 (exponent, mantissa): read so, it is value * 2^-126,
 * subnormals included. One multiplication by 2^12 + 2^6 places sign and magnitude of the nibbles n0 and n4 of a word
 * at once; one BF16 multiplication by scale * 2^118 turns the pair into value * scale * 2^-8: at most 6 significant
 * bits, never subnormal, so never rounded. The 2^8 goes to the fp32 epilogue (MM_CODE_FACTOR).
 *
 * The pairs that fall out are (n0,n4) (n1,n5) (n2,n6) (n3,n7). So K is permuted within groups of 128: lane t of an MMA
 * quad owns k = 32t..32t+31, word w of it is k = 32t + 8w + 0..7, and activations are staged to match
 * (mm_staged_place).
 */
#ifndef MM_CUDA_CONVERT_CUH
#define MM_CUDA_CONVERT_CUH

#include "backend/cuda/device.cuh"

#define MM_CODE_FACTOR 256.0f

/* Eight codes of a word times one scale: pair j is (n_j, n_{j+4}). */
MM_DEVICE void mm_codes_convert(uint32_t q, uint32_t scale, uint32_t (&pair)[4]) {
    uint32_t q8 = q >> 8;
    pair[0] = ptx::mul_rn_bf16x2(((q & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pair[1] = ptx::mul_rn_bf16x2(((q & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, scale);
    pair[2] = ptx::mul_rn_bf16x2(((q8 & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    pair[3] = ptx::mul_rn_bf16x2(((q8 & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, scale);
}

/*
 * Two E4M3 bytes, in bits 10..4 of each half of a word, to two BF16 = scale * 2^118. Bits 10..4 of a BF16 read exponent
 * and mantissa of the code as a number scaled by 2^-120, subnormals included; two multiplications by 2^119 reach 2^118
 * without overflow. The sign is dropped: negative scales are refused when a layer is made, and 0x80 is zero.
 */
MM_DEVICE uint32_t mm_e4m3_scales(uint32_t halves) {
    return ptx::mul_rn_bf16x2(ptx::mul_rn_bf16x2(halves & 0x07F007F0u, 0x7B007B00u), 0x7B007B00u);
}

/* One E8M0 byte to a pair of BF16 = 2^(b-127) * 2^118. Layers with b > 136 are refused when made. */
#define MM_E8M0_LARGEST 136u
MM_DEVICE uint32_t mm_e8m0_scale(uint32_t byte) {
    return (min(byte, MM_E8M0_LARGEST) * 0x00010001u + 0x00760076u) << 7;
}

/* Both halves of a word twice: ptxas makes them part of the multiplication that they go into. */
MM_DEVICE uint2 mm_halves_twice(uint32_t s) {
    return make_uint2(ptx::mov_b32_low_twice(s), ptx::mov_b32_high_twice(s));
}

/* Scales of lane t's 32 values of a 128-group: .x for words 0 and 1, .y for words 2 and 3. */
template <bool MX> MM_DEVICE uint2 mm_group_scales(uint32_t bytes) {
    if (MX) {
        uint32_t s = mm_e8m0_scale(bytes);
        return make_uint2(s, s);
    }
    return mm_halves_twice(mm_e4m3_scales(bytes << 4 | bytes << 12));
}
/* Two bytes' scales. */
template <bool MX> MM_DEVICE uint2 mm_two_scales(uint32_t first, uint32_t second) {
    if (MX) return make_uint2(mm_e8m0_scale(first), mm_e8m0_scale(second));
    return mm_halves_twice(mm_e4m3_scales(first << 4 | second << 20));
}
template <bool MX> MM_DEVICE uint32_t mm_block_scale(uint32_t byte) {
    return mm_two_scales<MX>(byte, 0).x;
}

/* Bytes 0, 1 (or 2, 3) of a word of E4M3 codes to a BF16 pair: as a number scaled by 2^-120, then times 2^120. */
template <bool UPPER> MM_DEVICE uint32_t mm_fp8_pair(uint32_t word) {
    const uint32_t z = ptx::prmt_b32(word, 0, UPPER ? 0xB3A2 : 0x9180); /* each byte below eight copies of its sign */
    return ptx::mul_rn_bf16x2(z << 4 & 0x87F087F0u, 0x7B807B80u);
}

/* Where value k of a row stands in the staged row. k = 32t + 8w + i goes to 16 (2w + i/2%2) + 8 (i%2) + 2t + i/4. */
MM_DEVICE uint32_t mm_staged_place(uint32_t k) {
    return (k & ~127u) | (k >> 3 & 3u) << 5 | (k >> 1 & 1u) << 4 | (k & 1u) << 3 | (k >> 5 & 3u) << 1 | (k >> 2 & 1u);
}

/* Lane t of a quad holds row t of a 4x4 matrix of words and receives column t. Its own inverse. Whole quads take part.
 */
MM_DEVICE uint4 mm_quad_transpose(uint4 v, uint32_t t, uint32_t lanes) {
    bool odd = t & 1u, high = t & 2u;
    uint32_t a = __shfl_xor_sync(lanes, odd ? v.x : v.y, 1), b = __shfl_xor_sync(lanes, odd ? v.z : v.w, 1);
    uint4 u = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    uint32_t c = __shfl_xor_sync(lanes, high ? u.x : u.z, 2), d = __shfl_xor_sync(lanes, high ? u.y : u.w, 2);
    return high ? make_uint4(c, d, u.z, u.w) : make_uint4(u.x, u.y, c, d);
}

#endif
