/*
 * The numerics headers as CUDA. Compiling this file is the first half of the test; the second runs every
 * conversion and block quantization on a GPU and demands the host's bits, which the golden vectors judge.
 * Without a GPU it exits with 77 after saying so. expf and log1pf are the device's own, hence scores and
 * SwiGLU are held to a few ulp.
 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/nvfp4.h"
#include "numerics/scores.h"
#include "numerics/swiglu.h"

typedef struct sample {  /* what one fp32 pattern becomes */
    uint32_t decoded[3]; /* of the pattern's low byte: e2m1, e4m3, e8m0 */
    uint16_t bf16;
    uint8_t e2m1, e4m3;
    uint8_t codes[8], scale, report;
    float global, root, sigmoid, h;
} sample;

/* Pattern i: all upper halves with lower halves around a BF16 tie, as test_roundings sweeps them. */
MM_HD uint32_t pattern(uint32_t i) {
    const uint32_t lower = i % 6u;
    return (i / 6u) << 16 | (lower == 0 ? 0u : lower == 1 ? 1u : lower == 5 ? 0xFFFFu : 0x7FFDu + lower);
}

#define SAMPLES (65536u * 6u)

MM_HD sample take_sample(uint32_t i) {
    const mm_swiglu swiglu = {1.702f, 1.0f, 7.0f, 0};
    const float x = mm_f32_from_bits(pattern(i));
    float values[16];
    mm_nvfp4_block_report report;
    sample s;
    s.decoded[0] = mm_f32_bits(mm_e2m1_to_f32(i & 0xFFu));
    s.decoded[1] = mm_f32_bits(mm_e4m3_to_f32(i & 0xFFu));
    s.decoded[2] = mm_f32_bits(mm_e8m0_to_f32(i & 0xFFu));
    s.bf16 = mm_bf16_from_f32(x);
    s.e2m1 = (uint8_t)mm_e2m1_from_f32(x);
    s.e4m3 = (uint8_t)mm_e4m3_from_f32(x);
    for (unsigned k = 0; k < 16; k++) values[k] = x * (0.0625f * (float)k - 0.4375f);
    s.global = mm_nvfp4_global_from_amax(fabsf(x));
    report = mm_nvfp4_block_quantize(values, i % 2 ? s.global : 0.0371f, s.codes, &s.scale);
    s.report = (uint8_t)(report.saturated | report.nonfinite << 1);
    s.root = mm_score_sqrtsoftplus(x);
    s.sigmoid = mm_score_sigmoid(x);
    s.h = mm_swiglu_apply(&swiglu, x, 3.0f);
    return s;
}

static __global__ void sample_all(sample *out) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < SAMPLES) out[i] = take_sample(i);
}

static bool close_enough(float got, float expected) {
    if (got != got || expected != expected) return got != got && expected != expected;
    return got == expected || fabs((double)got - (double)expected) <= 1e-6 * fabs((double)expected) + 1e-37;
}

static bool same(const sample *got, const sample *expected) {
    return !memcmp(got->codes, expected->codes, 8) && got->bf16 == expected->bf16 && got->e2m1 == expected->e2m1 &&
           got->e4m3 == expected->e4m3 && got->scale == expected->scale && got->report == expected->report &&
           !memcmp(got->decoded, expected->decoded, sizeof got->decoded) &&
           mm_f32_bits(got->global) == mm_f32_bits(expected->global) && close_enough(got->root, expected->root) &&
           close_enough(got->sigmoid, expected->sigmoid) && close_enough(got->h, expected->h);
}

int main(void) {
    sample *device = NULL, *host = (sample *)malloc(sizeof(sample) * SAMPLES);
    unsigned bad = 0;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped numerics_on_device: there is no CUDA device\n");
        free(host);
        return 77;
    }
    if (!host || cudaMalloc((void **)&device, sizeof(sample) * SAMPLES) != cudaSuccess) return 1;
    sample_all<<<SAMPLES / 256u, 256u>>>(device);
    if (cudaMemcpy(host, device, sizeof(sample) * SAMPLES, cudaMemcpyDeviceToHost) != cudaSuccess) {
        printf("the kernel failed: %s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    for (uint32_t i = 0; i < SAMPLES; i++) {
        sample expected = take_sample(i);
        if (same(&host[i], &expected)) continue;
        if (bad++ < 10)
            printf("%08x: device bf16 %04x e2m1 %x e4m3 %02x scale %02x root %a sigmoid %a h %a,\n"
                   "            host bf16 %04x e2m1 %x e4m3 %02x scale %02x root %a sigmoid %a h %a\n",
                   pattern(i), host[i].bf16, host[i].e2m1, host[i].e4m3, host[i].scale, host[i].root, host[i].sigmoid,
                   host[i].h, expected.bf16, expected.e2m1, expected.e4m3, expected.scale, expected.root,
                   expected.sigmoid, expected.h);
    }
    printf("%u of %u patterns differ\n", bad, SAMPLES);
    cudaFree(device);
    free(host);
    return bad != 0;
}
