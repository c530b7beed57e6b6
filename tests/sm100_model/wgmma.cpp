// Hopper's warpgroup mma as sm90_common.cu uses it (PTX ISA 9.7.15). Each warp computes its own sixteen rows at once;
// the asynchrony of wgmma is not modeled, only its operand layouts and the fence that ordinary stores need before it.
#include "machine.h"
#include "numbers.h"
#include "sm100_model_ptx.h"
#include "ptx_wgmma.cuh"

namespace model {

struct HopperOperand {
    uint32_t start, leading, stride, swizzle;
    uint32_t offset(uint32_t row, uint32_t unit) const {
        static const uint32_t pitches[] = {16, 128, 64, 32}, masks[] = {0, 7, 3, 1};
        const uint32_t group = start + row / 8 * stride;
        if (!swizzle) return group + row % 8 * 16 + unit * leading;
        const uint32_t logical = group + row % 8 * pitches[swizzle] + unit * 16;
        return logical ^ ((logical >> 7) & masks[swizzle]) << 4;
    }
};

static HopperOperand hopper_operand(uint64_t desc) {
    const uint32_t low = static_cast<uint32_t>(desc), high = static_cast<uint32_t>(desc >> 32);
    if (high >> 17 & 7) trap("a base offset in a wgmma descriptor is not modeled");
    return {(low & 0x3FFF) << 4, (low >> 16 & 0x3FFF) << 4, (high & 0x3FFF) << 4, high >> 30};
}

static void read_rows(Cta &cta, const HopperOperand &o, uint32_t first, uint32_t count, float (*to)[32]) {
    Thread &thread = *machine->current;
    const Actor actor = actor_async(thread, {thread.warp->agent, thread.warp->time});
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t unit = 0; unit < 2; unit++) {
            const uint32_t offset = o.offset(first + row, unit);
            shared_access(cta, offset, 16, actor, Access::read);
            for (uint32_t i = 0; i < 16; i++) to[row][16 * unit + i] = e4m3_decode(cta.shared[offset + i]);
        }
}

static void wgmma_for_warp(Warp &warp, uint64_t a_desc, uint64_t b_desc, bool accumulate) {
    static float a[16][32], b[64][32];
    const uint32_t rows = 16 * (warp.index % 4);
    read_rows(*warp.cta, hopper_operand(a_desc), rows, 16, a);
    read_rows(*warp.cta, hopper_operand(b_desc), 0, 64, b);
    for (const Thread *thread : warp.threads) {
        float *d = static_cast<float *>(thread->collective_pointer);
        for (uint32_t i = 0; i < 32; i++) {
            const uint32_t row = thread->lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + thread->lane % 4 * 2 + i % 2;
            float sum = accumulate ? d[i] : 0;
            for (uint32_t k = 0; k < 32; k++) sum += a[row][k] * b[column][k];
            d[i] = sum;
        }
    }
}

} // namespace model

using namespace model;

namespace ptx {

static void whole_warp(const char *instruction) {
    enter(instruction);
    if (collective_gather(instruction, ~0u)) collective_release(~0u);
}
void wgmma_fence(void) {
    whole_warp("wgmma.fence");
}
void wgmma_commit_group(void) {
    whole_warp("wgmma.commit_group");
}
void wgmma_wait_group_0(void) {
    whole_warp("wgmma.wait_group");
}

void wgmma_m64n64k32_f32_e4m3_e4m3(float (&d)[32], uint64_t a_desc, uint64_t b_desc, uint32_t scale_d) {
    Thread &thread = enter("wgmma.mma_async");
    thread.collective_pointer = d;
    if (!collective_gather("wgmma.mma_async", ~0u)) return;
    wgmma_for_warp(*thread.warp, a_desc, b_desc, scale_d != 0);
    collective_release(~0u);
}

} // namespace ptx
