/* Every kernel by number, and the embedded images they are found in. */
#ifndef MM_CUDA_KERNELS_H
#define MM_CUDA_KERNELS_H

#include "backend/cuda/driver.h"

/* number, file, function. Files of sm90 come last: they are loaded for backend sm90 alone. */
#define MM_KERNELS(X)                                                                                                  \
    X(PLAN_WHOLE, plan, mm_plan_whole)                                                                                 \
    X(PLAN_COUNT, plan, mm_plan_count)                                                                                 \
    X(PLAN_SCAN, plan, mm_plan_scan)                                                                                   \
    X(PLAN_PLACE, plan, mm_plan_place)                                                                                 \
    X(PLAN_GROUPS, plan, mm_plan_groups)                                                                               \
    X(START, start, mm_start)                                                                                          \
    X(STAGE, stage, mm_stage)                                                                                          \
    X(STAGE_BF16, stage, mm_stage_bf16)                                                                                \
    X(DEQUANTIZE, stage, mm_dequantize)                                                                                \
    X(ROUTE_LOGITS_FEW, route, mm_route_logits_few)                                                                    \
    X(ROUTE_LOGITS, route, mm_route_logits)                                                                            \
    X(ROUTE_LOGITS_F32_FEW, route, mm_route_logits_f32_few)                                                            \
    X(ROUTE_LOGITS_F32, route, mm_route_logits_f32)                                                                    \
    X(ROUTE_TILE, route, mm_route_tile)                                                                                \
    X(ROUTE_CHOOSE, route, mm_route_choose)                                                                            \
    X(COMBINE, combine, mm_combine)                                                                                    \
    X(SCALE_LARGEST, measure, mm_scale_largest)                                                                        \
    X(COPY, measure, mm_copy)                                                                                          \
    X(TILE_L1_NVFP4, tile, mm_tile_l1_nvfp4)                                                                           \
    X(TILE_L1_MXFP4, tile, mm_tile_l1_mxfp4)                                                                           \
    X(TILE_L1_BF16, tile, mm_tile_l1_bf16)                                                                             \
    X(TILE_L1_FP8, tile, mm_tile_l1_fp8)                                                                               \
    X(TILE_L2_NVFP4, tile, mm_tile_l2_nvfp4)                                                                           \
    X(TILE_L2_MXFP4, tile, mm_tile_l2_mxfp4)                                                                           \
    X(TILE_L2_BF16, tile, mm_tile_l2_bf16)                                                                             \
    X(TILE_L2_FP8, tile, mm_tile_l2_fp8)                                                                               \
    X(DECODE_L1_NVFP4_14, decode, mm_decode_l1_nvfp4_14)                                                               \
    X(DECODE_L1_NVFP4_10, decode, mm_decode_l1_nvfp4_10)                                                               \
    X(DECODE_L1_NVFP4_8, decode, mm_decode_l1_nvfp4_8)                                                                 \
    X(DECODE_L1_NVFP4_6, decode, mm_decode_l1_nvfp4_6)                                                                 \
    X(DECODE_L1_NVFP4_4, decode, mm_decode_l1_nvfp4_4)                                                                 \
    X(DECODE_L2_NVFP4_6, decode, mm_decode_l2_nvfp4_6)                                                                 \
    X(DECODE_L2_NVFP4_5, decode, mm_decode_l2_nvfp4_5)                                                                 \
    X(DECODE_L2_NVFP4_4, decode, mm_decode_l2_nvfp4_4)                                                                 \
    X(DECODE_L2_NVFP4_3, decode, mm_decode_l2_nvfp4_3)                                                                 \
    X(DECODE_L2_NVFP4_2, decode, mm_decode_l2_nvfp4_2)                                                                 \
    X(DECODE_L1_MXFP4_14, decode, mm_decode_l1_mxfp4_14)                                                               \
    X(DECODE_L1_MXFP4_8, decode, mm_decode_l1_mxfp4_8)                                                                 \
    X(DECODE_L1_MXFP4_4, decode, mm_decode_l1_mxfp4_4)                                                                 \
    X(DECODE_L2_MXFP4_6, decode, mm_decode_l2_mxfp4_6)                                                                 \
    X(DECODE_L2_MXFP4_4, decode, mm_decode_l2_mxfp4_4)                                                                 \
    X(DECODE_L2_MXFP4_2, decode, mm_decode_l2_mxfp4_2)                                                                 \
    X(DENSE_L1_FP8_8, dense, mm_dense_l1_fp8_8)                                                                        \
    X(DENSE_L1_FP8_16, dense, mm_dense_l1_fp8_16)                                                                      \
    X(DENSE_L1_FP8_32, dense, mm_dense_l1_fp8_32)                                                                      \
    X(DENSE_L1_BF16_8, dense, mm_dense_l1_bf16_8)                                                                      \
    X(DENSE_L1_BF16_16, dense, mm_dense_l1_bf16_16)                                                                    \
    X(DENSE_L1_BF16_32, dense, mm_dense_l1_bf16_32)                                                                    \
    X(DENSE_L2_FP8_8, dense, mm_dense_l2_fp8_8)                                                                        \
    X(DENSE_L2_FP8_16, dense, mm_dense_l2_fp8_16)                                                                      \
    X(DENSE_L2_FP8_32, dense, mm_dense_l2_fp8_32)                                                                      \
    X(DENSE_L2_BF16_8, dense, mm_dense_l2_bf16_8)                                                                      \
    X(DENSE_L2_BF16_16, dense, mm_dense_l2_bf16_16)                                                                    \
    X(DENSE_L2_BF16_32, dense, mm_dense_l2_bf16_32)                                                                    \
    X(MID_L1_NVFP4, sm90_mid, mm_mid_l1_nvfp4)                                                                         \
    X(MID_L2_NVFP4, sm90_mid, mm_mid_l2_nvfp4)                                                                         \
    X(MID_L1_MXFP4, sm90_mid, mm_mid_l1_mxfp4)                                                                         \
    X(MID_L2_MXFP4, sm90_mid, mm_mid_l2_mxfp4)                                                                         \
    X(WIDE_L1_NVFP4, sm90_wide, mm_wide_l1_nvfp4)                                                                      \
    X(WIDE_L2_NVFP4, sm90_wide, mm_wide_l2_nvfp4)                                                                      \
    X(WIDE_L1_MXFP4, sm90_wide, mm_wide_l1_mxfp4)                                                                      \
    X(WIDE_L2_MXFP4, sm90_wide, mm_wide_l2_mxfp4)                                                                      \
    X(DENSE_L1_WIDE, sm90_dense, mm_dense_l1_wide)                                                                     \
    X(DENSE_L2_WIDE, sm90_dense, mm_dense_l2_wide)                                                                     \
    X(DENSE_L1_FP8_MID, sm90_dense, mm_dense_l1_fp8_mid)                                                               \
    X(DENSE_L2_FP8_MID, sm90_dense, mm_dense_l2_fp8_mid)                                                               \
    X(DENSE_L1_FP8_LOW, sm90_dense, mm_dense_l1_fp8_low)                                                               \
    X(DENSE_L2_FP8_LOW, sm90_dense, mm_dense_l2_fp8_low)                                                               \
    X(DENSE_L1_BF16_MID, sm90_dense, mm_dense_l1_bf16_mid)                                                             \
    X(DENSE_L2_BF16_MID, sm90_dense, mm_dense_l2_bf16_mid)                                                             \
    X(DENSE_L1_BF16_LOW, sm90_dense, mm_dense_l1_bf16_low)                                                             \
    X(DENSE_L2_BF16_LOW, sm90_dense, mm_dense_l2_bf16_low)                                                             \
    X(DENSE_WIDEN, sm90_dense, mm_dense_widen)                                                                         \
    X(ROUTE_WIDE_128, sm90_route, mm_route_wide_128)                                                                   \
    X(ROUTE_WIDE_192, sm90_route, mm_route_wide_192)                                                                   \
    X(ROUTE_WIDE_256, sm90_route, mm_route_wide_256)                                                                   \
    X(GEMM_BF16, sm90_measure, mm_gemm_bf16)

typedef enum mm_kernel {
#define MM_KERNEL_NUMBER(number, file, function) MM_##number,
    MM_KERNELS(MM_KERNEL_NUMBER)
#undef MM_KERNEL_NUMBER
        MM_KERNEL_COUNT,
    MM_KERNEL_NATIVE = MM_MID_L1_NVFP4 /* the first of sm90 */
} mm_kernel;

typedef struct mm_kernels {
    CUmodule modules[16];
    uint32_t module_count;
    CUfunction function[MM_KERNEL_COUNT]; /* NULL: not loaded */
} mm_kernels;

/* Loads the images into the current context; native: those of sm90 too. On failure nothing stays loaded. */
megamoe_status mm_kernels_load(const mm_driver *driver, bool native, mm_kernels *kernels);
void mm_kernels_unload(const mm_driver *driver, mm_kernels *kernels);

/* As the image spells it. */
const char *mm_kernel_name(mm_kernel kernel);

#endif
