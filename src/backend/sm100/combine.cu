// Combine: each token's partial rows, in the order of its slots, in fp32, with one rounding at the end.
#include "backend/sm100/device.h"
#include "backend/sm100/arguments.h"
#include "numerics/bf16.h"

SM100_DEVICE void combine_token(const struct sm100_combine_args &args, uint64_t token) {
    for (uint32_t column = 2 * ptx::tid_x(); column < args.columns; column += 2 * SM100_COMBINE_THREADS) {
        float low = 0.0f, high = 0.0f;
        for (uint32_t slot = 0; slot < args.slots; slot++) {
            const uint64_t pair = token * args.slots + slot;
            if (args.pair_row[pair] < 0) continue;
            const float weight = args.pair_weights ? args.pair_weights[pair] : 1.0f;
            const uint32_t two = ptx::ld_global_nc_u32(args.partials + pair * args.columns + column);
            low += weight * mm_bf16_to_f32((uint16_t)two);
            high += weight * mm_bf16_to_f32((uint16_t)(two >> 16));
        }
        if (args.shared) {
            low += args.shared[token * args.columns + column];
            high += args.shared[token * args.columns + column + 1];
        }
        ptx::st_global_u32(args.output + token * args.columns + column, ptx::cvt_rn_bf16x2_f32(high, low));
    }
}

SM100_KERNEL(SM100_COMBINE_THREADS) void sm100_combine(SM100_ARGS(struct sm100_combine_args, args)) {
    for (uint64_t token = ptx::ctaid_x(); token < args.token_count; token += ptx::nctaid_x())
        combine_token(args, token);
}
