/* The launches of staging (stage.cuh) by itself, and dequantization. */
#include "backend/cuda/stage.cuh"

MM_DEVICE uint32_t stage_row_expert(const mm_cuda_stage_args &p, uint32_t row) {
    uint32_t low = 0, high = p.expert_count; /* offsets[low] <= row < offsets[high] */
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if ((uint32_t)p.offsets[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Is the row of this pair its token's first one on this rank? Counters see each token once. */
MM_DEVICE bool stage_counts(const mm_cuda_stage_args &p, uint32_t pair) {
    if (!p.counters) return false;
    if (!p.row_pair || !p.pair_row) return true;
    for (uint32_t i = pair - pair % p.slots_per_token; i < pair; i++)
        if (p.pair_row[i] >= 0) return false;
    return true;
}

/* The pair of a row, which tells where it comes from. */
MM_DEVICE uint32_t stage_pair(const mm_cuda_stage_args &p, uint32_t row, uint32_t rows) {
    return p.row_pair && row < rows ? (uint32_t)p.row_pair[row] : row * p.slots_per_token;
}

MM_DEVICE void stage_row(const mm_cuda_stage_args &p, uint32_t row, uint32_t pair, stage_blocks *blocks) {
    const size_t source = pair / p.slots_per_token;
    const uint32_t thread = threadIdx.x, t = thread & 3;
    const bool counts = stage_counts(p, pair);
    float global = p.global;
    if (p.quantize && p.global_mode == MEGAMOE_GLOBAL_TOKEN)
        global = mm_nvfp4_global_from_amax(stage_row_amax(p, source));
    if (p.experts) global = p.experts[stage_row_expert(p, row)].h_global;
    if (p.globals && thread == 0) p.globals[row] = global;
    for (uint32_t group = thread >> 3; group * 128 < p.pitch; group += blockDim.x / 8) {
        const uint32_t k = group * 128 + stage_offset();
        float value[STAGE_VALUES];
        if (k < p.columns) {
            stage_read(p, source * p.columns + k, value);
            if (p.quantize) {
                const mm_nvfp4_block_report report = stage_quantize(p, (size_t)row * p.columns + k, global, value);
                if (counts) blocks->saturated += report.saturated, blocks->nonfinite += report.nonfinite;
            }
        } else
#pragma unroll
            for (int i = 0; i < STAGE_VALUES; i++) value[i] = 0.0f;
        if (!p.staged) continue;
        const uint4 word[2] = {stage_word(value, t), stage_word(value + 8, t)};
        stage_pair_store(p, row, k, word);
    }
}

extern "C" __global__ void __launch_bounds__(STAGE_THREADS_MAX) mm_stage(MM_GRID_CONSTANT(mm_cuda_stage_args, p)) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const uint32_t rows = p.plan ? (uint32_t)p.plan->rows : p.row_count;
    stage_blocks blocks = {0, 0};
    uint32_t next = stage_pair(p, blockIdx.x, rows);
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint32_t pair = next;
        next = stage_pair(p, row + gridDim.x, rows);
        stage_row(p, row, pair, &blocks);
    }
    if (p.quantize && p.counters) stage_blocks_add(p, blocks);
}

/* Eight values of BF16 as stage_word makes them of eight floats. */
MM_DEVICE uint4 stage_word_bf16(const uint4 &v) {
    return mm_quad_transpose(make_uint4(ptx::prmt_b32(v.x, v.z, 0x5410), ptx::prmt_b32(v.x, v.z, 0x7632),
                                        ptx::prmt_b32(v.y, v.w, 0x5410), ptx::prmt_b32(v.y, v.w, 0x7632)),
                             threadIdx.x & 3, 0xFu << (threadIdx.x & 28));
}

/* The same for BF16 that is not quantized, in few registers: traffic needs many threads at once. */
extern "C" __global__ void __launch_bounds__(STAGE_THREADS_MAX) mm_stage_bf16(MM_GRID_CONSTANT(mm_cuda_stage_args, p)) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const uint32_t rows = p.plan ? (uint32_t)p.plan->rows : p.row_count;
    uint32_t next = stage_pair(p, blockIdx.x, rows);
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint16_t *from = (const uint16_t *)p.source + (size_t)(next / p.slots_per_token) * p.columns;
        next = stage_pair(p, row + gridDim.x, rows);
        for (uint32_t group = threadIdx.x >> 3; group * 128 < p.pitch; group += blockDim.x / 8) {
            const uint32_t k = group * 128 + stage_offset();
            uint4 v[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
            if (k < p.columns) v[0] = *(const uint4 *)(from + k), v[1] = *(const uint4 *)(from + k + 8);
            const uint4 word[2] = {stage_word_bf16(v[0]), stage_word_bf16(v[1])};
            stage_pair_store(p, row, k, word);
        }
    }
}

/* values[r][k] = code * scale * global: megamoe_dequantize. One row per block, 16 values per thread. */
extern "C" __global__ void __launch_bounds__(STAGE_THREADS_MAX)
    mm_dequantize(const uint8_t *codes, const uint8_t *scales, const float *globals, unsigned global_stride,
                  unsigned e8m0, unsigned rows, unsigned columns, unsigned f32, void *values) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (unsigned k = threadIdx.x; k < columns; k += blockDim.x) {
            const size_t at = row * columns + k;
            const float scale = e8m0 ? mm_e8m0_to_f32(scales[at / 32]) : mm_e4m3_to_f32(scales[at / 16]);
            const float value =
                mm_e2m1_to_f32(mm_e2m1_unpack(codes, at)) * scale * (globals ? globals[row * global_stride] : 1.0f);
            if (f32)
                ((float *)values)[at] = value;
            else
                ((uint16_t *)values)[at] = mm_bf16_from_f32(value);
        }
}
