/*
 * The kernels on rows with AVX2: load, amax, quantize, activate, combine. The wider levels keep them, for
 * next to the GEMMs they cost nothing. All but activate give the bits of scalar.c.
 */
#include <immintrin.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/unroll.h"

static inline __m256 absolute(__m256 v) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}

/* Rounds to BF16 as numerics/bf16.h does; the result is in the upper halves, the lower ones are not cleared.
 */
static inline __m256i round_bf16(__m256 v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

static void load(const void *hidden, megamoe_dtype dtype, uint32_t count, float *values) {
    for (uint32_t i = 0; i < count; i += 8) {
        __m256i bits;
        if (dtype == MEGAMOE_F32) {
            bits = round_bf16(_mm256_loadu_ps((const float *)hidden + i));
            bits = _mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000));
        } else {
            __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)hidden + i));
            bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        }
        _mm256_storeu_si256((__m256i *)(values + i), bits);
    }
}

static inline float largest_lane(__m256 v) {
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}

static float amax(const float *values, uint32_t count) {
    __m256 largest = _mm256_setzero_ps();
    for (uint32_t i = 0; i < count; i += 8) {
        __m256 a = absolute(_mm256_loadu_ps(values + i));
        __m256 finite = _mm256_cmp_ps(a, _mm256_set1_ps(INFINITY), _CMP_LT_OQ);
        largest = _mm256_max_ps(largest, _mm256_and_ps(a, finite));
    }
    return largest_lane(largest);
}

/* ---- quantize ---- */

/*
 * E2M1 codes of eight values: twice the magnitude of the code is the number of midpoints passed, counted by
 * subtracting comparison masks; a tie goes to the even code, hence the mix of > and >=.
 */
static inline __m256i encode_e2m1(__m256 v) {
    __m256 a = absolute(v);
    __m256i code = _mm256_srli_epi32(_mm256_castps_si256(v), 31);
    code = _mm256_slli_epi32(code, 3);
#define MM_PASSED(midpoint, how)                                                                                       \
    code = _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_set1_ps(midpoint), how)))
    MM_PASSED(0.25f, _CMP_GT_OQ);
    MM_PASSED(0.75f, _CMP_GE_OQ);
    MM_PASSED(1.25f, _CMP_GT_OQ);
    MM_PASSED(1.75f, _CMP_GE_OQ);
    MM_PASSED(2.5f, _CMP_GT_OQ);
    MM_PASSED(3.5f, _CMP_GE_OQ);
    MM_PASSED(5.0f, _CMP_GT_OQ);
#undef MM_PASSED
    return code;
}

/* What eight codes are worth, times the scale: the mirror of numerics/e2m1.h in integer steps of a half. */
static inline __m256 decode_e2m1(__m256i code, float scale) {
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, code); /* reads the low three bits */
    __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31));
    return _mm256_mul_ps(_mm256_or_ps(magnitude, sign), _mm256_set1_ps(scale));
}

/* Sixteen codes, a dword each, to eight bytes; the even element is the low nibble. */
static inline void pack_codes(__m256i first, __m256i second, uint8_t *codes) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* even + 16 * odd */
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(pairs, pairs));
}

static void quantize(float *values, uint32_t count, float g, uint8_t *codes, uint8_t *scales,
                     mm_quantize_counts *counts) {
    for (uint32_t b = 0; b < count / MM_NVFP4_BLOCK; b++) {
        float *block = values + b * MM_NVFP4_BLOCK;
        __m256 v0 = _mm256_loadu_ps(block), v1 = _mm256_loadu_ps(block + 8), a0 = absolute(v0), a1 = absolute(v1);
        __m256 infinite = _mm256_set1_ps(INFINITY);
        __m256 odd = _mm256_or_ps(_mm256_cmp_ps(a0, infinite, _CMP_NLT_UQ), _mm256_cmp_ps(a1, infinite, _CMP_NLT_UQ));
        if (_mm256_movemask_ps(odd)) { /* a NaN or an infinity: leave it to the definition */
            mm_nvfp4_block_report report = mm_nvfp4_block_quantize(block, g, codes + b * 8, scales + b);
            counts->nonfinite_blocks += report.nonfinite;
            for (uint32_t i = 0; i < MM_NVFP4_BLOCK; i++) block[i] = mm_e4m3_to_f32(scales[b]);
            continue;
        }
        float target = (largest_lane(_mm256_max_ps(a0, a1)) / 6.0f) / g;
        counts->saturated_blocks += target > MM_NVFP4_SATURATED;
        if (target < MM_E4M3_MIN) target = MM_E4M3_MIN;
        scales[b] = (uint8_t)mm_e4m3_from_f32(target);
        float scale = mm_e4m3_to_f32(scales[b]);
        __m256 step = _mm256_set1_ps(scale * g);
        __m256i c0 = encode_e2m1(_mm256_div_ps(v0, step)), c1 = encode_e2m1(_mm256_div_ps(v1, step));
        pack_codes(c0, c1, codes + b * 8);
        _mm256_storeu_ps(block, decode_e2m1(c0, scale));
        _mm256_storeu_ps(block + 8, decode_e2m1(c1, scale));
    }
}

/* ---- activate ---- */

/*
 * exp(x) for x <= 0 within 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts,
 * so that r is exact), a polynomial of degree 6 in r, and n added to the exponent. Below -87.3 the result is
 * 0.
 */
static inline __m256 exp_negative(__m256 x) {
    const __m256 ln2_high = _mm256_set1_ps(0.693359375f), ln2_low = _mm256_set1_ps(-2.12194440e-4f);
    __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, ln2_low, _mm256_fnmadd_ps(n, ln2_high, x));
    __m256 p = _mm256_set1_ps(1.3888889e-3f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3333333e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1666667e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666667e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    __m256 value = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    __m256 vanishes = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_LT_OQ);
    value = _mm256_andnot_ps(vanishes, value);
    return _mm256_blendv_ps(value, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); /* NaN stays */
}

static inline __m256 sigmoid(__m256 x) {
    __m256 e = exp_negative(_mm256_or_ps(x, _mm256_set1_ps(-0.0f))), one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(_mm256_blendv_ps(one, e, x), _mm256_add_ps(one, e)); /* x < 0: e */
}

/* min and max return their second operand if either is NaN, so NaN passes the clamps as it does in swiglu.h.
 */
static void activate(const mm_swiglu *f, const float *gate, const float *up, float weight, uint32_t count, float *h) {
    __m256 limit = _mm256_set1_ps(f->limit), floor = _mm256_set1_ps(-f->limit), w = _mm256_set1_ps(weight);
    for (uint32_t i = 0; i < count; i += 8) {
        __m256 u = _mm256_loadu_ps(up + i), result;
        if (f->relu2) {
            __m256 r = _mm256_max_ps(_mm256_setzero_ps(), u);
            result = _mm256_mul_ps(r, r);
        } else {
            __m256 g = _mm256_min_ps(limit, _mm256_loadu_ps(gate + i));
            u = _mm256_max_ps(floor, _mm256_min_ps(limit, u));
            result = _mm256_mul_ps(g, sigmoid(_mm256_mul_ps(_mm256_set1_ps(f->alpha), g)));
            result = _mm256_mul_ps(result, _mm256_add_ps(u, _mm256_set1_ps(f->beta)));
        }
        _mm256_storeu_ps(h + i, _mm256_mul_ps(result, w));
    }
}

/* ---- combine ---- */

/* Products are rounded before they are added, as the definition says. */
static void combine(const mm_combine *c) {
    for (uint32_t n = 0; n < c->columns; n += 16) {
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (uint32_t k = 0; k < c->count; k++) MM_UNROLL for (unsigned i = 0; i < 2; i++) {
                __m256 term = _mm256_loadu_ps(c->rows[k] + n + 8 * i);
                if (c->weights) term = _mm256_mul_ps(_mm256_set1_ps(c->weights[k]), term);
                sum[i] = _mm256_add_ps(sum[i], term);
            }
        for (unsigned i = 0; i < 2 && c->shared; i++)
            sum[i] = _mm256_add_ps(sum[i], _mm256_loadu_ps(c->shared + n + 8 * i));
        __m256i low = _mm256_srli_epi32(round_bf16(sum[0]), 16), high = _mm256_srli_epi32(round_bf16(sum[1]), 16);
        _mm256_storeu_si256((__m256i *)(c->output + n), _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8));
    }
}

void mm_kernels_avx2_rows(mm_kernels *kernels) {
    kernels->load = load;
    kernels->amax = amax;
    kernels->quantize = quantize;
    kernels->activate = activate;
    kernels->combine = combine;
}
