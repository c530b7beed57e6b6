// Staging: each token is quantized to NVFP4 once, by one warp, and written to every row that its slots have
// been given, scales in the layout of the tensor cores. With experts spread over ranks these writes become
// the dispatch.
#include "backend/sm100/device.h"
#include "backend/sm100/arguments.h"
#include "backend/sm100/layout.h"
#include "numerics/nvfp4.h"

// One block of 16 values of a token, rounded to BF16 as the layer's input is by definition.
SM100_DEVICE void read_block(const struct sm100_stage_args &args, uint32_t token, uint32_t block,
                             float (&values)[MM_NVFP4_BLOCK]) {
    const uint64_t first = (uint64_t)token * args.columns + block * MM_NVFP4_BLOCK;
    for (uint32_t i = 0; i < MM_NVFP4_BLOCK; i++)
        values[i] = args.hidden_f32 ? mm_bf16_round(((const float *)args.hidden)[first + i])
                                    : mm_bf16_to_f32(((const uint16_t *)args.hidden)[first + i]);
}

// The global scale of a token: given, or from its own largest finite value.
SM100_DEVICE float token_global(const struct sm100_stage_args &args, uint32_t token) {
    if (args.global != 0.0f) return args.global;
    uint32_t amax = 0; // of the bits: non-negative floats are ordered like integers
    for (uint32_t block = ptx::laneid(); block < args.columns / MM_NVFP4_BLOCK; block += 32) {
        float values[MM_NVFP4_BLOCK];
        read_block(args, token, block, values);
        for (uint32_t i = 0; i < MM_NVFP4_BLOCK; i++) {
            const uint32_t bits = ptx::mov_b32_f32(values[i]) & 0x7fffffffu;
            if (bits < 0x7f800000u && bits > amax) amax = bits;
        }
    }
    return mm_nvfp4_global_from_amax(ptx::mov_f32_b32(ptx::redux_sync_max(amax, 0xffffffffu)));
}

struct staged_block {
    uint8_t codes[MM_NVFP4_BLOCK / 2];
    uint8_t scale;
};

SM100_DEVICE void write_codes(uint8_t *target, const struct staged_block &b) {
    ptx::u32x2 words;
    words.x = b.codes[0] | b.codes[1] << 8 | b.codes[2] << 16 | (uint32_t)b.codes[3] << 24;
    words.y = b.codes[4] | b.codes[5] << 8 | b.codes[6] << 16 | (uint32_t)b.codes[7] << 24;
    ptx::st_global_v2_u32(target, words);
}

// To every row of the token. The lane with the last block also writes the padding of the scales, which meets
// codes that are zero and so only has to be finite.
SM100_DEVICE void write_rows(const struct sm100_stage_args &args, uint32_t token, uint32_t block,
                             const struct staged_block &b) {
    const uint32_t blocks_along_k = sm100_blocks_along_k(args.columns);
    const uint32_t last = block + 1 == args.columns / MM_NVFP4_BLOCK;
    for (uint32_t slot = 0; slot < args.slots; slot++) {
        const int32_t row = args.pair_row[(uint64_t)token * args.slots + slot];
        if (row < 0) continue;
        write_codes(args.codes + (uint64_t)row * args.row_bytes + block * (MM_NVFP4_BLOCK / 2), b);
        const uint32_t scale_row = args.row_scale_row[row];
        ptx::st_global_u8(args.scales + sm100_scale_offset(scale_row, block, blocks_along_k), b.scale);
        for (uint32_t g = block + 1; last && g % SM100_BLOCK_GROUPS; g++)
            ptx::st_global_u8(args.scales + sm100_scale_offset(scale_row, g, blocks_along_k), 0);
    }
}

// What the check wants to see: the token itself, whether or not an expert here wants it.
SM100_DEVICE void write_token(const struct sm100_stage_args &args, uint32_t token, uint32_t block,
                              const struct staged_block &b) {
    if (!args.token_codes) return;
    const uint64_t blocks = args.columns / MM_NVFP4_BLOCK;
    write_codes(args.token_codes + (token * blocks + block) * (MM_NVFP4_BLOCK / 2), b);
    ptx::st_global_u8(args.token_scales + token * blocks + block, b.scale);
}

SM100_DEVICE void write_globals(const struct sm100_stage_args &args, uint32_t token, float global) {
    if (args.token_codes) ptx::st_global_f32(args.token_globals + token, global);
    for (uint32_t slot = 0; slot < args.slots; slot++) {
        const int32_t row = args.pair_row[(uint64_t)token * args.slots + slot];
        if (row >= 0) ptx::st_global_f32(args.row_globals + row, global);
    }
}

SM100_DEVICE void stage_token(const struct sm100_stage_args &args, uint32_t token) {
    const float global = token_global(args, token);
    uint32_t saturated = 0, nonfinite = 0;
    for (uint32_t block = ptx::laneid(); block < args.columns / MM_NVFP4_BLOCK; block += 32) {
        float values[MM_NVFP4_BLOCK];
        struct staged_block b;
        read_block(args, token, block, values);
        const mm_nvfp4_block_report report = mm_nvfp4_block_quantize(values, global, b.codes, &b.scale);
        saturated += report.saturated;
        nonfinite += report.nonfinite;
        write_rows(args, token, block, b);
        write_token(args, token, block, b);
    }
    saturated = ptx::redux_sync_add(saturated, 0xffffffffu);
    nonfinite = ptx::redux_sync_add(nonfinite, 0xffffffffu);
    if (ptx::laneid() != 0) return;
    write_globals(args, token, global);
    if (saturated) ptx::atom_relaxed_gpu_add_u64(args.saturated_blocks, saturated);
    if (nonfinite) ptx::atom_relaxed_gpu_add_u64(args.nonfinite_blocks, nonfinite);
}

SM100_KERNEL(SM100_STAGE_THREADS) void sm100_stage(SM100_ARGS(struct sm100_stage_args, args)) {
    const uint32_t first = ptx::ctaid_x() * SM100_STAGE_TOKENS + ptx::tid_x() / 32;
    for (uint32_t token = first; token < args.token_count; token += ptx::nctaid_x() * SM100_STAGE_TOKENS)
        stage_token(args, token);
}
