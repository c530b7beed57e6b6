/* The walk over planes of BF16 operands with AVX-512 VNNI, for the amx level. */
#ifndef MM_CPU_VNNI_H
#define MM_CPU_VNNI_H

#include "backend/cpu/planes.h"

void mm_vnni_gemm(const mm_gemm *gemm); /* gemm->packed by mm_vnni_pack; NVFP4 or MXFP4 weights */
void mm_vnni_pack(const mm_gemm *gemm, uint32_t columns, uint32_t first, uint8_t *packed);

#endif
