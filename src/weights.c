/* Names and sizes of weight matrices. */
#include "weights.h"

const char *mm_format_name(mm_format format) {
    switch (format) {
    case MM_NVFP4: return "nvfp4";
    case MM_MXFP4: return "mxfp4";
    case MM_BF16: return "bf16";
    case MM_FP8: return "fp8";
    }
    return "unknown";
}

uint64_t mm_scale_bytes(const mm_matrix *m) {
    uint64_t values = (uint64_t)m->rows * m->columns;
    switch (m->format) {
    case MM_NVFP4: return values / 16;
    case MM_MXFP4: return values / 32;
    case MM_BF16: return 0;
    case MM_FP8: {
        uint64_t blocks = (uint64_t)((m->rows + m->block_rows - 1) / m->block_rows) *
                          ((m->columns + m->block_columns - 1) / m->block_columns);
        return blocks * (m->scale_dtype == MEGAMOE_F32 ? 4 : 1);
    }
    }
    return 0;
}

uint64_t mm_matrix_bytes(const mm_matrix *m) {
    uint64_t values = (uint64_t)m->rows * m->columns;
    uint64_t codes = m->format == MM_BF16 ? values * 2 : m->format == MM_FP8 ? values : values / 2;
    return codes + mm_scale_bytes(m);
}
