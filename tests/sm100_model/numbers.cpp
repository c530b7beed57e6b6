// See numbers.h. Encoders search or scale in double, where every step is exact, and round once.
#include "numbers.h"
#include "machine.h"
#include "sm100_model_ptx.h"
#include <math.h>
#include <string.h>

float e2m1_decode(uint32_t code) {
    const int exponent = static_cast<int>(code >> 1 & 3), mantissa = static_cast<int>(code & 1);
    const float magnitude = exponent ? ldexpf(1.0f + 0.5f * static_cast<float>(mantissa), exponent - 1)
                                     : 0.5f * static_cast<float>(mantissa);
    return code & 8 ? -magnitude : magnitude;
}

float e4m3_decode(uint32_t code) {
    const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
    if ((code & 0x7F) == 0x7F) return NAN;
    const float magnitude = exponent ? ldexpf(1.0f + static_cast<float>(mantissa) / 8, exponent - 7)
                                     : ldexpf(static_cast<float>(mantissa), -9);
    return code & 0x80 ? -magnitude : magnitude;
}

uint32_t e2m1_encode(float value) {
    if (isnan(value)) return 7;
    const uint32_t sign = signbit(value) ? 8 : 0;
    const double x = fabs(static_cast<double>(value));
    if (x >= 6) return sign | 7;
    uint32_t best = 0;
    for (uint32_t code = 1; code < 8; code++) {
        const double closer =
            fabs(x - static_cast<double>(e2m1_decode(best))) - fabs(x - static_cast<double>(e2m1_decode(code)));
        if (closer > 0 || (closer == 0 && code % 2 == 0)) best = code;
    }
    return sign | best;
}

// Magnitude to a format with `mantissa` bits, smallest exponent `low`; returns the number of units of the last place.
static double round_to_units(double x, int mantissa, int low, int *exponent) {
    int e = 0;
    frexp(x, &e);
    *exponent = e - 1 < low ? low : e - 1;
    return nearbyint(ldexp(x, mantissa - *exponent));
}

uint32_t e4m3_encode(float value) {
    if (isnan(value)) return 0x7F;
    const uint32_t sign = signbit(value) ? 0x80 : 0;
    const double x = fabs(static_cast<double>(value));
    if (x >= 448) return sign | 0x7E;
    if (x == 0) return sign;
    int exponent = 0;
    const uint32_t units = static_cast<uint32_t>(round_to_units(x, 3, -6, &exponent));
    // A carry out of the mantissa moves into the exponent by itself; a subnormal has no hidden bit.
    const uint32_t code = exponent == -6 ? units : static_cast<uint32_t>(exponent + 7) * 8 + units - 8;
    return sign | (code > 0x7E ? 0x7E : code);
}

uint32_t fp16_encode(float value) {
    if (isnan(value)) return 0x7FFF;
    const uint32_t sign = signbit(value) ? 0x8000 : 0;
    const double x = fabs(static_cast<double>(value));
    if (x >= 65520) return sign | 0x7C00;
    if (x == 0) return sign;
    int exponent = 0;
    const uint32_t units = static_cast<uint32_t>(round_to_units(x, 10, -14, &exponent));
    return sign | (exponent == -14 ? units : static_cast<uint32_t>(exponent + 15) * 1024 + units - 1024);
}

float fp16_decode(uint32_t code) {
    const int exponent = static_cast<int>(code >> 10 & 31), mantissa = static_cast<int>(code & 1023);
    float magnitude;
    if (exponent == 31)
        magnitude = mantissa ? NAN : INFINITY;
    else
        magnitude = exponent ? ldexpf(1.0f + static_cast<float>(mantissa) / 1024, exponent - 15)
                             : ldexpf(static_cast<float>(mantissa), -24);
    return code & 0x8000 ? -magnitude : magnitude;
}

uint32_t bf16_encode(float value) {
    if (isnan(value)) return 0x7FFF;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

namespace ptx {

uint8_t cvt_rn_satfinite_e2m1x2_f32(float a, float b) {
    return static_cast<uint8_t>(e2m1_encode(a) << 4 | e2m1_encode(b));
}
uint16_t cvt_rn_satfinite_e4m3x2_f32(float a, float b) {
    return static_cast<uint16_t>(e4m3_encode(a) << 8 | e4m3_encode(b));
}
uint32_t cvt_rn_f16x2_e4m3x2(uint16_t a) {
    return fp16_encode(e4m3_decode(a >> 8)) << 16 | fp16_encode(e4m3_decode(a & 255));
}
float cvt_f32_f16(uint16_t a) {
    return fp16_decode(a);
}
uint32_t cvt_rn_bf16x2_f32(float a, float b) {
    return bf16_encode(a) << 16 | bf16_encode(b);
}

static float flush(float value) {
    return fabsf(value) < 1.17549435e-38f ? copysignf(0.0f, value) : value;
}
float ex2_approx_ftz_f32(float a) {
    return flush(exp2f(flush(a)));
}
float lg2_approx_ftz_f32(float a) {
    return flush(log2f(flush(a)));
}
float rcp_approx_ftz_f32(float a) {
    return flush(1.0f / flush(a));
}

// ---- Special registers. ----

using model::machine;

uint32_t tid_x(void) {
    return machine->current->tid;
}
uint32_t ntid_x(void) {
    return machine->current->cta->launch->spec.block;
}
uint32_t ctaid_x(void) {
    return machine->current->cta->index;
}
uint32_t nctaid_x(void) {
    return machine->current->cta->launch->spec.grid;
}
uint32_t laneid(void) {
    return machine->current->lane;
}
uint32_t smid(void) {
    return machine->current->cta->index;
}
uint32_t clusterid_x(void) {
    return machine->current->cta->index / machine->current->cta->launch->spec.cluster;
}
uint32_t nclusterid_x(void) {
    return machine->current->cta->launch->spec.grid / machine->current->cta->launch->spec.cluster;
}
uint32_t cluster_ctarank(void) {
    return machine->current->cta->rank;
}
uint32_t cluster_nctarank(void) {
    return machine->current->cta->launch->spec.cluster;
}
uint64_t globaltimer(void) {
    model::enter("globaltimer");
    return machine->time_ns;
}

} // namespace ptx
