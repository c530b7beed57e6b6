/* The walk over planes of BF16 operands, for avx512_bf16.c and amx.c: on Intel, dot products of integers are
 * several times as fast as those of BF16. */
#ifndef MM_CPU_VNNI_H
#define MM_CPU_VNNI_H

#include "backend/cpu/planes.h"

void mm_vnni_gemm(const mm_gemm *gemm, unsigned planes); /* gemm->packed by mm_vnni_pack; NVFP4 or MXFP4 weights */
void mm_vnni_pack(const mm_gemm *gemm, uint32_t columns, uint32_t first, unsigned planes, uint8_t *packed);

#endif
