/* The numerics headers as C++17: they are shared with device code, which is C++. Compiled, never run. */
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/nvfp4.h"
#include "numerics/scores.h"
#include "numerics/swiglu.h"

float touch_every_header(const float *values, uint8_t *codes, uint8_t *scale) {
    const mm_swiglu swiglu = {1.702f, 1.0f, 7.0f, 0};
    const mm_nvfp4_block_report report = mm_nvfp4_block_quantize(values, 1.0f, codes, scale);
    float sum = mm_e2m1_to_f32(mm_e2m1_unpack(codes, 3)) * mm_e4m3_to_f32(*scale) * mm_e8m0_to_f32(codes[1]);
    sum += mm_swiglu_apply(&swiglu, values[0], values[1]) + mm_bf16_round(values[2]);
    sum += mm_score_sqrtsoftplus(values[3]) + mm_score_sigmoid(values[4]) + mm_nvfp4_global_from_amax(values[5]);
    return report.nonfinite ? 0.0f : sum;
}
