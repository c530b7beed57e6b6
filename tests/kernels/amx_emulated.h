/*
 * The tile instructions in C, so that amx.c can be tested where there are none: tests/kernels compiles it a
 * second time with this header in front. Sums as the manual has them: even and odd columns apart, then added
 * to the tile.
 */
#ifndef TEST_AMX_EMULATED_H
#define TEST_AMX_EMULATED_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define mm_kernels_amx mm_kernels_amx_emulated

static _Thread_local struct {
    uint8_t rows[16];
    uint16_t row_bytes[16];
    uint8_t data[8][16][64];
} emulated;

static void emulated_configure(const void *config) {
    memcpy(emulated.row_bytes, (const uint8_t *)config + 16, sizeof emulated.row_bytes);
    memcpy(emulated.rows, (const uint8_t *)config + 48, sizeof emulated.rows);
    memset(emulated.data, 0, sizeof emulated.data);
}

static void emulated_load(int t, const void *base, size_t stride) {
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy(emulated.data[t][r], (const uint8_t *)base + (size_t)r * stride, emulated.row_bytes[t]);
}

static void emulated_store(int t, void *base, size_t stride) {
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy((uint8_t *)base + (size_t)r * stride, emulated.data[t][r], emulated.row_bytes[t]);
}

static float emulated_bf16(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void emulated_multiply(int c, int a, int b) {
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int n = 0; n < emulated.row_bytes[c] / 4; n++) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < emulated.row_bytes[a] / 4; k++) {
                const uint8_t *x = emulated.data[a][m] + 4 * k, *w = emulated.data[b][k] + 4 * n;
                even += emulated_bf16(x) * emulated_bf16(w);
                odd += emulated_bf16(x + 2) * emulated_bf16(w + 2);
            }
            memcpy(&sum, emulated.data[c][m] + 4 * n, sizeof sum);
            sum += even + odd;
            memcpy(emulated.data[c][m] + 4 * n, &sum, sizeof sum);
        }
}

/* Products of FP16, which these machines lack as well; exact ones in amx.c. */
static inline __m512i emulated_multiply_halves(__m512i a, __m512i b) {
    __m512 low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(a)), _mm512_cvtph_ps(_mm512_castsi512_si256(b)));
    __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1)),
                                _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, 0)), _mm512_cvtps_ph(high, 0), 1);
}

#define _mm512_castsi512_ph(v) (v)
#define _mm512_castph_si512(v) (v)
#define _mm512_mul_ph(a, b) emulated_multiply_halves(a, b)
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_configure(config)
#define _tile_release() memset(&emulated, 0, sizeof emulated)
#define _tile_zero(t) memset(emulated.data[t], 0, sizeof emulated.data[t])
#define _tile_loadd(t, base, stride) emulated_load(t, base, stride)
#define _tile_stored(t, base, stride) emulated_store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_multiply(c, a, b)

#endif
