/* The walk over planes of BF16 operands for the levels that have VBMI too. */
#include "backend/cpu/vnni.h"

#include "backend/cpu/avx512_planes.h"

void mm_vnni_gemm(const mm_gemm *g, unsigned planes) {
    planes_gemm(g, planes);
}

void mm_vnni_pack(const mm_gemm *g, uint32_t columns, uint32_t first, unsigned planes, uint8_t *packed) {
    pack_planes(g, columns, first, true, planes, packed);
}
