// The instances of the grouped GEMM, one kernel per row of the tile table. The reasons are in tiles.h.
#include "backend/sm100/gemm.cuh"

SM100_KERNEL(384) void sm100_l1_small(SM100_ARGS(struct sm100_gemm_args, args)) {
    gemm_kernel<SM100_L1_SMALL>(args);
}
SM100_KERNEL(384) void sm100_l1_large(SM100_ARGS(struct sm100_gemm_args, args)) {
    gemm_kernel<SM100_L1_LARGE>(args);
}
SM100_KERNEL(384) void sm100_l2_small(SM100_ARGS(struct sm100_gemm_args, args)) {
    gemm_kernel<SM100_L2_SMALL>(args);
}
SM100_KERNEL(384) void sm100_l2_large(SM100_ARGS(struct sm100_gemm_args, args)) {
    gemm_kernel<SM100_L2_LARGE>(args);
}
SM100_KERNEL(384) void sm100_l2_wide(SM100_ARGS(struct sm100_gemm_args, args)) {
    gemm_kernel<SM100_L2_WIDE>(args);
}
