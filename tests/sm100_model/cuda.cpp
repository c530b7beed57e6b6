// What kernels in CUDA's own words (sm100_model_cuda.h) need beyond the PTX wrappers: places in the grid, variables in
// shared memory, atomics on plain pointers, and the warp-wide matrix instructions of Hopper and before.
#include "machine.h"
#include "numbers.h"
#include "sm100_model_ptx.h"
#include "sm100_model_cuda.h"
#include <math.h>
#include <string.h>

namespace model {

// ---- Places. ----

Index3 cta_index(void) {
    const uint32_t i = machine->current->cta->index, x = grid_size().x, y = grid_size().y;
    return {i % x, i / x % y, i / x / y};
}

Index3 grid_size(void) {
    const uint32_t all = machine->current->cta->launch->spec.grid;
    const uint32_t x = machine->options.grid_x ? machine->options.grid_x : all;
    const uint32_t y = machine->options.grid_y ? machine->options.grid_y : 1;
    return {x, y, all / x / y};
}

// ---- Shared memory. ----

// The first thread that asks decides the place; it is the same in every CTA. Static variables lie before the dynamic
// memory, so that what runs over the end of either is outside of all.
void *shared_variable(const void *key, uint32_t bytes, uint32_t alignment) {
    Cta &cta = *enter("__shared__").cta;
    Launch &launch = *cta.launch;
    for (const SharedVariable &variable : launch.variables)
        if (variable.key == key) return cta.shared.data() + variable.offset;
    const uint32_t offset = (launch.variables_end + alignment - 1) / alignment * alignment, end = offset + bytes;
    if (end > cta.dynamic_start)
        trap("%u bytes of static shared memory, but the launch left room for %u", end - shared_start,
             cta.dynamic_start - shared_start);
    if (end - shared_start + launch.spec.dynamic_shared_bytes > 232448)
        trap("%u bytes of static and %u of dynamic shared memory: at most 232448 together", end - shared_start,
             launch.spec.dynamic_shared_bytes);
    launch.variables_end = end;
    launch.variables.push_back({key, offset});
    return cta.shared.data() + offset;
}

void *shared_dynamic(void) {
    Cta &cta = *enter("extern __shared__").cta;
    return cta.shared.data() + cta.dynamic_start;
}

static bool is_shared(const Cta &cta, const void *address) {
    const uint8_t *p = static_cast<const uint8_t *>(address);
    return p >= cta.shared.data() + shared_start && p < cta.shared.data() + cta.shared_bytes;
}

// ---- Atomics through plain pointers. ----

// In shared memory nothing can come between the read and the write, for nothing yields there.
uint32_t atomic_add(uint32_t *address, uint32_t value) {
    Thread &thread = enter_synchronizing("atomicAdd");
    if (!is_shared(*thread.cta, address)) return ptx::atom_relaxed_gpu_add_u32(address, value);
    const uint32_t old = *address;
    *address = old + value;
    return old;
}
uint32_t atomic_max(uint32_t *address, uint32_t value) {
    enter_synchronizing("atomicMax");
    const uint32_t old = *address;
    ptx::atom_relaxed_gpu_exch_b32(address, old > value ? old : value);
    return old;
}

// ---- Warp-wide instructions. ----

// What a lane brings to one, and takes away.
struct MatrixLane {
    uint32_t a[4], b[2];
    float *d;
};

static float bf16_decode(uint32_t bits) {
    return ptx::mov_f32_b32(bits << 16);
}

// Row-major A 16x16 and column-major B 16x8, each word a pair along K; lane 4g + t holds rows g and g + 8 (PTX ISA
// 9.7.15.5.8). K is added in order, in fp32: the hardware's order is its own, and tests must not depend on it.
static void mma_compute(const Warp &warp) {
    float a[16][16], b[16][8];
    for (uint32_t lane = 0; lane < 32; lane++) {
        const MatrixLane &from = *static_cast<const MatrixLane *>(warp.threads[lane]->collective_pointer);
        const uint32_t g = lane / 4, t = lane % 4;
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t h = 0; h < 2; h++)
                a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + h] = bf16_decode(from.a[i] >> 16 * h & 0xFFFF);
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t h = 0; h < 2; h++) b[2 * t + 8 * i + h][g] = bf16_decode(from.b[i] >> 16 * h & 0xFFFF);
    }
    for (uint32_t row = 0; row < 16; row++) {
        float sum[8];
        for (uint32_t n = 0; n < 8; n++)
            sum[n] = static_cast<const MatrixLane *>(warp.threads[row % 8 * 4 + n / 2]->collective_pointer)
                         ->d[row / 8 * 2 + n % 2];
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t n = 0; n < 8; n++) sum[n] += a[row][k] * b[k][n];
        for (uint32_t n = 0; n < 8; n++)
            static_cast<const MatrixLane *>(warp.threads[row % 8 * 4 + n / 2]->collective_pointer)
                ->d[row / 8 * 2 + n % 2] = sum[n];
    }
}

uint32_t match_any(uint32_t mask, uint32_t value) {
    Thread &thread = enter("match.any.sync");
    thread.collective_in = value;
    if (!collective_gather("match.any.sync", mask)) return static_cast<uint32_t>(thread.collective_out);
    for (Thread *to : thread.warp->threads) {
        to->collective_out = 0;
        for (const Thread *other : thread.warp->threads)
            if (mask >> other->lane & 1 && other->collective_in == to->collective_in)
                to->collective_out |= 1u << other->lane;
    }
    collective_release(mask);
    return static_cast<uint32_t>(thread.collective_out);
}

} // namespace model

using namespace model;

namespace ptx {

void mma_m16n8k16_f32_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    Thread &thread = enter("mma.sync");
    MatrixLane lane = {{a0, a1, a2, a3}, {b0, b1}, d};
    thread.collective_pointer = &lane;
    if (!collective_gather("mma.sync", ~0u)) return;
    mma_compute(*thread.warp);
    machine->report->mma_count++;
    collective_release(~0u);
}

// Lane 8j + r brings row r of matrix j; lane 4r + c takes word c of row r of each (PTX ISA 9.7.15.5.15).
u32x4 ldmatrix_m8n8_x4_b16(uint32_t p) {
    uint32_t words[8];
    memcpy(words, shared_generic("ldmatrix", p, 16, false, Access::read), 16);
    Thread &thread = *machine->current;
    thread.collective_pointer = words;
    if (collective_gather("ldmatrix", ~0u)) {
        for (uint32_t lane = 0; lane < 32; lane++)
            for (uint32_t j = 0; j < 4; j++)
                static_cast<uint32_t *>(thread.warp->threads[lane]->collective_pointer)[4 + j] =
                    static_cast<uint32_t *>(thread.warp->threads[8 * j + lane / 4]->collective_pointer)[lane % 4];
        collective_release(~0u);
    }
    return {words[4], words[5], words[6], words[7]};
}

uint32_t cvta_to_shared(const void *a) {
    Cta &cta = *enter("cvta.to.shared").cta;
    if (!is_shared(cta, a)) model::trap("%p is not in this CTA's shared memory", a);
    return shared_address(cta, static_cast<uint32_t>(static_cast<const uint8_t *>(a) - cta.shared.data()));
}

float4 ld_shared_v4_f32(uint32_t a) {
    float4 d;
    memcpy(&d, shared_generic("ld.shared.v4.f32", a, 16, false, Access::read), sizeof d);
    return d;
}
void st_shared_v4_f32(uint32_t a, float b0, float b1, float b2, float b3) {
    const float4 b = {b0, b1, b2, b3};
    memcpy(shared_generic("st.shared.v4.f32", a, 16, false, Access::write), &b, sizeof b);
}

float min_NaN_f32(float a, float b) {
    return isnan(a) || isnan(b) ? NAN : a < b || (a == b && signbit(a)) ? a : b;
}
float max_NaN_f32(float a, float b) {
    return isnan(a) || isnan(b) ? NAN : a > b || (a == b && signbit(b)) ? a : b;
}
// The product is exact in fp32 unless it is subnormal there; then it is rounded to odd, so that the second rounding, to
// BF16, is the only one that counts.
static uint32_t mul_rn_bf16(uint32_t a, uint32_t b) {
    const double exact = static_cast<double>(bf16_decode(a)) * static_cast<double>(bf16_decode(b));
    const float product = static_cast<float>(exact);
    uint32_t bits = mov_b32_f32(product);
    if (static_cast<double>(product) < exact || static_cast<double>(product) > exact)
        bits = (bits - (fabs(static_cast<double>(product)) > fabs(exact))) | 1;
    return bf16_encode(mov_f32_b32(bits));
}
uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
    return mul_rn_bf16(a >> 16, b >> 16) << 16 | mul_rn_bf16(a & 0xFFFF, b & 0xFFFF);
}
uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t d = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t selector = c >> 4 * i & 15, byte = static_cast<uint32_t>(bytes >> 8 * (selector & 7)) & 255;
        d |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return d;
}

} // namespace ptx
