/* The walk over planes of fp32 operands with AVX2. */
#ifndef MM_CPU_AVX2_PLANES_H
#define MM_CPU_AVX2_PLANES_H

#include "backend/cpu/planes.h"

/* gemm->packed by mm_avx2_planes_pack; NVFP4 or MXFP4 weights */
void mm_avx2_planes_gemm(const mm_gemm *gemm, unsigned planes);
void mm_avx2_planes_pack(const mm_gemm *gemm, uint32_t columns, uint32_t first, unsigned planes, uint8_t *packed);

#endif
