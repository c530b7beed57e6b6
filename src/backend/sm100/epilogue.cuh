// What becomes of the products. A warp reads its 32 lanes of tensor memory: lane = output feature, column =
// token, 16 columns at a time, so each thread has one feature of 16 tokens in registers.
//
// Gate and up: global scales, clamp and SwiGLU are the thread's own; the 16 features of an NVFP4 block are 16
// lanes, so the block's maximum and the packing of its codes are butterflies among them. Down, and the plain
// GEMM: global scales, routing weight, then a row of BF16 or F32 values.
#ifndef MM_SM100_EPILOGUE_CUH
#define MM_SM100_EPILOGUE_CUH

#include "backend/sm100/cta.cuh"
#include "numerics/nvfp4.h"

static constexpr uint32_t CHUNK = 16;

// One warp's share of a tile: 16 columns from `first`, of the feature that this thread has.
struct chunk {
    uint32_t group, feature;
    uint32_t first_row; // of the first column, among all rows
    uint32_t row_in_group;
    uint32_t rows; // columns that are tokens; the rest is padding
};

// 16 columns as they come from tensor memory, in two loads.
struct columns {
    uint32_t half[2][CHUNK / 2];
};
SM100_DEVICE float column_value(const struct columns &d, uint32_t i) {
    return ptx::mov_f32_b32(d.half[i / (CHUNK / 2)][i % (CHUNK / 2)]);
}

// Starts the loads of 16 columns, or of the 8 that are left of the tile. Nothing may touch `d` before the
// wait.
SM100_DEVICE void columns_load(struct columns &d, uint32_t address, uint32_t left) {
    ptx::tcgen05_ld_32x32b<CHUNK / 2>(d.half[0], address);
    if (left >= CHUNK)
        ptx::tcgen05_ld_32x32b<CHUNK / 2>(d.half[1], address + CHUNK / 2);
    else
        for (uint32_t i = 0; i < CHUNK / 2; i++) d.half[1][i] = 0;
}

// The largest of 16 lanes for each of 16 columns; lane l ends up with that of column l % 16. Each step halves
// the columns: a lane keeps the half that its bit names and sends the other.
SM100_DEVICE uint32_t maximum_over_lanes(const uint32_t (&values)[CHUNK], uint32_t lane) {
    uint32_t v[CHUNK];
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) v[i] = values[i];
    SM100_UNROLL
    for (uint32_t half = CHUNK / 2; half > 0; half /= 2) {
        SM100_UNROLL
        for (uint32_t i = 0; i < half; i++) {
            const uint32_t upper = lane & half, keep = upper ? v[i + half] : v[i], send = upper ? v[i] : v[i + half];
            const uint32_t other = ptx::shfl_sync_bfly(send, half, 0xffffffffu);
            v[i] = keep > other ? keep : other;
        }
    }
    return v[0];
}

// A lane brings a nibble for each of 16 columns and leaves with the nibbles of 16 lanes for column lane % 16:
// the transpose of a 16 x 16 matrix, halved 4 times.
SM100_DEVICE uint64_t transpose_nibbles(uint64_t x, uint32_t lane) {
    SM100_UNROLL
    for (uint32_t half = CHUNK / 2; half > 0; half /= 2) {
        // The nibbles whose index has the bit `half` clear.
        const uint64_t lower = half == 8   ? 0x00000000ffffffffull
                               : half == 4 ? 0x0000ffff0000ffffull
                               : half == 2 ? 0x00ff00ff00ff00ffull
                                           : 0x0f0f0f0f0f0f0f0full;
        const uint64_t other = (uint64_t)ptx::shfl_sync_bfly((uint32_t)(x >> 32), half, 0xffffffffu) << 32 |
                               ptx::shfl_sync_bfly((uint32_t)x, half, 0xffffffffu);
        x = lane & half ? (x & ~lower) | (other & ~lower) >> 4 * half : (x & lower) | (other & lower) << 4 * half;
    }
    return x;
}

// The scale of one NVFP4 block from the bits of its largest magnitude: docs/numerics.md, "Activations".
SM100_DEVICE uint32_t block_scale(const struct sm100_gemm_args &args, uint32_t amax_bits, float global,
                                  uint32_t is_token) {
    if (amax_bits >= 0x7f800000u) { // an infinity or a NaN
        if (is_token) ptx::atom_relaxed_gpu_add_u64(args.nonfinite_blocks, 1);
        return MM_E4M3_NAN;
    }
    float target = ptx::div_rn_f32(ptx::div_rn_f32(ptx::mov_f32_b32(amax_bits), 6.0f), global);
    if (target > MM_NVFP4_SATURATED && is_token) ptx::atom_relaxed_gpu_add_u64(args.saturated_blocks, 1);
    if (target < MM_E4M3_MIN) target = MM_E4M3_MIN;
    return ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, target);
}

// h of one feature and 16 tokens to NVFP4: lane l writes block l / 16 of the warp's features for token l
// % 16.
SM100_DEVICE void quantize_chunk(const struct sm100_gemm_args &args, const struct sm100_work &work,
                                 const struct chunk &at, const float (&h)[CHUNK]) {
    const uint32_t lane = ptx::laneid(), column = lane % CHUNK;
    const float global = args.h_globals[at.group];
    uint32_t magnitudes[CHUNK];
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) magnitudes[i] = ptx::mov_b32_f32(h[i]) & 0x7fffffffu;
    const uint32_t amax = maximum_over_lanes(magnitudes, lane);
    const uint32_t first_feature = at.feature - column, mine = column < at.rows && first_feature < args.m_rows;
    const uint32_t scale = block_scale(args, amax, global, mine);
    const float step = scale == MM_E4M3_NAN ? 0.0f : ptx::mul_rn_f32(mm_e4m3_to_f32(scale), global);
    uint64_t codes = 0;
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) {
        const float s = ptx::mov_f32_b32(ptx::shfl_sync_idx(ptx::mov_b32_f32(step), (lane & CHUNK) + i, 0xffffffffu));
        const float value = s > 0.0f ? ptx::div_rn_f32(h[i], s) : 0.0f; // a block that is not finite has codes 0
        codes |= (uint64_t)(ptx::cvt_rn_satfinite_e2m1x2_f32(0.0f, value) & 15u) << 4 * i;
    }
    codes = transpose_nibbles(codes, lane);
    if (!mine) return;
    const uint64_t row = at.first_row + column;
    const ptx::u32x2 words = {(uint32_t)codes, (uint32_t)(codes >> 32)};
    ptx::st_global_v2_u32(args.h_codes + row * args.h_row_bytes + first_feature / 2, words);
    const uint32_t scale_row = work.first_stripe * SM100_STRIPE_ROWS + at.row_in_group + column;
    const uint32_t blocks = sm100_blocks_along_k(args.m_rows), groups = args.m_rows / MM_NVFP4_BLOCK;
    uint32_t group = first_feature / MM_NVFP4_BLOCK;
    ptx::st_global_u8(args.h_scales + sm100_scale_offset(scale_row, group, blocks), (uint8_t)scale);
    if (group + 1 < groups) return;
    while (++group % SM100_BLOCK_GROUPS) // padding meets codes that are zero, and must be finite
        ptx::st_global_u8(args.h_scales + sm100_scale_offset(scale_row, group, blocks), 0);
}

SM100_DEVICE float row_factor(const float *rows, uint32_t row) {
    return rows ? rows[row] : 1.0f;
}
SM100_DEVICE float bias_of(const struct sm100_gemm_args &args, uint32_t i, const struct chunk &at) {
    return args.biases[i] && at.feature < args.m_rows ? args.biases[i][(uint64_t)at.group * args.m_rows + at.feature]
                                                      : 0.0f;
}

// What multiplies the sums of one matrix: a number per column in the lane of that number, and one of the
// thread.
struct factors {
    float row, row_weight; // of column laneid % 16
    float weight, bias;
};
SM100_DEVICE struct factors factors_of(const struct sm100_gemm_args &args, uint32_t i, const struct chunk &at) {
    const uint32_t column = ptx::laneid() % CHUNK, row = at.first_row + column;
    struct factors f = {0.0f, 0.0f, args.weight_globals[i][at.group], bias_of(args, i, at)};
    if (column >= at.rows) return f;
    f.row = row_factor(args.row_globals, row) * row_factor(args.group_globals, at.group);
    f.row_weight = row_factor(args.row_weights, row);
    return f;
}
SM100_DEVICE float of_column(float value, uint32_t i) {
    return ptx::mov_f32_b32(ptx::shfl_sync_idx(ptx::mov_b32_f32(value), i, 0xffffffffu));
}

// Gate and up before the clamp, for the check.
SM100_DEVICE void store_l1(const struct sm100_gemm_args &args, const struct chunk &at, const struct columns &d,
                           const struct factors &f, uint32_t matrix) {
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) {
        const float value = column_value(d, i) * (of_column(f.row, i) * f.weight) + f.bias;
        if (i >= at.rows || at.feature >= args.m_rows) continue;
        ptx::st_global_f32(args.l1 + ((uint64_t)(at.first_row + i) * 2 + matrix) * args.m_rows + at.feature, value);
    }
}

SM100_DEVICE void swiglu_chunk(const struct sm100_gemm_args &args, const struct sm100_work &work,
                               const struct chunk &at, const struct columns &gate, const struct columns &up) {
    const struct factors of_gate = factors_of(args, 0, at);
    struct factors of_up = of_gate;
    of_up.weight = args.weight_globals[1][at.group];
    of_up.bias = bias_of(args, 1, at);
    if (args.l1) {
        store_l1(args, at, gate, of_gate, 0);
        store_l1(args, at, up, of_up, 1);
    }
    float h[CHUNK];
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) { // a column that is no token has the factor 0
        const float row = of_column(of_gate.row, i), row_weight = of_column(of_gate.row_weight, i);
        const float g = column_value(gate, i) * (row * of_gate.weight) + of_gate.bias;
        const float u = column_value(up, i) * (row * of_up.weight) + of_up.bias;
        h[i] = mm_swiglu_apply(&args.swiglu, g, u) * row_weight;
    }
    quantize_chunk(args, work, at, h);
}

// Two lanes swap halves so that each stores two neighboring features of one token in one word.
SM100_DEVICE void store_bf16_chunk(const struct sm100_gemm_args &args, const struct chunk &at,
                                   const float (&p)[CHUNK]) {
    const uint32_t odd = ptx::laneid() & 1, feature = at.feature - odd;
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i += 2) {
        const float keep = odd ? p[i + 1] : p[i], send = odd ? p[i] : p[i + 1];
        const float other = ptx::mov_f32_b32(ptx::shfl_sync_bfly(ptx::mov_b32_f32(send), 1, 0xffffffffu));
        const uint32_t word = odd ? ptx::cvt_rn_bf16x2_f32(keep, other) : ptx::cvt_rn_bf16x2_f32(other, keep);
        if (i + odd >= at.rows || feature >= args.m_rows) continue;
        const uint32_t row = at.first_row + i + odd, target = args.output_rows ? args.output_rows[row] : row;
        ptx::st_global_u32((uint16_t *)args.output + (uint64_t)target * args.m_rows + feature, word);
    }
}

SM100_DEVICE void store_f32_chunk(const struct sm100_gemm_args &args, const struct chunk &at, const float (&p)[CHUNK]) {
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++) {
        if (i >= at.rows || at.feature >= args.m_rows) continue;
        const uint32_t row = at.first_row + i, target = args.output_rows ? args.output_rows[row] : row;
        ptx::st_global_f32((float *)args.output + (uint64_t)target * args.m_rows + at.feature, p[i]);
    }
}

SM100_DEVICE void rows_chunk(const struct sm100_gemm_args &args, const struct chunk &at, const struct columns &d) {
    const struct factors f = factors_of(args, 0, at);
    float p[CHUNK];
    SM100_UNROLL
    for (uint32_t i = 0; i < CHUNK; i++)
        p[i] = (column_value(d, i) * (of_column(f.row, i) * f.weight) + f.bias) * of_column(f.row_weight, i);
    if (args.output_f32)
        store_f32_chunk(args, at, p);
    else
        store_bf16_chunk(args, at, p);
}

// The accumulator may be written again once this warp's reads are done.
template <int cta_group> SM100_DEVICE void release_accumulator(uint32_t barrier) {
    ptx::tcgen05_fence_before_thread_sync();
    ptx::bar_warp_sync(0xffffffffu);
    if (ptx::laneid() != 0) return;
    if (cta_group == 2)
        ptx::mbarrier_arrive_release_cluster(ptx::mapa_shared_cluster(barrier, 0));
    else
        ptx::mbarrier_arrive(barrier);
}

// One warp's part of one tile: every second chunk of its quadrant's lanes.
template <int name>
SM100_DEVICE void epilogue_tile(const struct cta &c, const struct sm100_gemm_args &args, const struct sm100_work &work,
                                uint32_t warp, uint32_t accumulator, uint32_t release) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    const uint32_t quadrant = warp % 4, lanes = c.tensor + accumulator + (quadrant * 32 << 16);
    const uint32_t m = (work.m_tile * t.cta_group + c.rank) * SM100_M + quadrant * 32;
    uint32_t first = (warp - EPILOGUE_FIRST_WARP) / 4 * CHUNK;
    if (first >= work.n) release_accumulator<t.cta_group>(release);
    for (; first < work.n; first += 2 * CHUNK) {
        struct columns d, up;
        columns_load(d, lanes + first, work.n - first);
        if (t.matrices == 2) columns_load(up, lanes + t.n_max + first, work.n - first);
        ptx::tcgen05_wait_ld();
        if (first + 2 * CHUNK >= work.n) release_accumulator<t.cta_group>(release);
        const uint32_t left = first < work.rows ? work.rows - first : 0;
        const struct chunk at = {work.group, m + ptx::laneid(), work.row + first, work.row_in_group + first,
                                 left < CHUNK ? left : CHUNK};
        if (t.matrices == 2)
            swiglu_chunk(args, work, at, d, up);
        else
            rows_chunk(args, at, d);
    }
}

// Eight warps: warp % 4 is the quadrant of lanes that a warp may read, and two warps share the columns of
// each.
template <int name>
SM100_DEVICE void epilogue_role(const struct cta &c, const struct sm100_gemm_args &args, struct sm100_watch &watch,
                                uint32_t warp) {
    constexpr struct sm100_tile t = sm100_tiles[name];
    struct sm100_cursor cursor = {0, 0, 0, 0};
    uint32_t tile_count = 0;
    for (uint32_t index = c.worker; sm100_schedule_find(&c.schedule, &cursor, index, &watch.work);
         index += c.stride, tile_count++) {
        const uint32_t a = tile_count % t.accumulators, parity = tile_count / t.accumulators & 1;
        const uint32_t ready = watch_wait(watch, c.accumulator_full, SM100_ACCUMULATOR_FULL, a, parity);
        if (ptx::vote_sync_ballot(ready, 0xffffffffu) != 0xffffffffu) return;
        ptx::tcgen05_fence_after_thread_sync();
        epilogue_tile<name>(c, args, watch.work, warp, a * sm100_accumulator_columns(t), c.accumulator_empty + 8 * a);
    }
}

#endif
