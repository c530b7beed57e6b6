/* Which levels this machine runs: what CPUID offers, what the operating system saves (XCR0), and MEGAMOE_ISA.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "backend/cpu/kernels.h"
#include "numerics/e8m0.h"

typedef struct level {
    const char *name;
    bool (*runs)(void);
    void (*fill)(mm_kernels *kernels);
} level;

static bool runs_scalar(void) {
    return true;
}

static const level levels[] = {
    {"scalar", runs_scalar, mm_kernels_scalar},
};

enum { LEVEL_COUNT = sizeof levels / sizeof *levels };

uint32_t mm_kernels_levels(mm_kernels filled[MM_LEVELS_MAX]) {
    const char *cap = getenv("MEGAMOE_ISA");
    uint32_t count = 0;
    while (count < LEVEL_COUNT && levels[count].runs()) {
        if (count > 0) filled[count] = filled[count - 1];
        levels[count].fill(&filled[count]);
        filled[count].isa = levels[count].name;
        if (cap && strcmp(cap, levels[count].name) == 0) return count + 1;
        count++;
    }
    return count;
}

static void fill_table(mm_scale_table *table, float (*decode)(unsigned byte)) {
    for (unsigned byte = 0; byte < 256; byte++) {
        table->scales[byte] = decode(byte);
        for (unsigned code = 0; code < 16; code++)
            table->products_bf16[byte][code] = mm_bf16_from_f32(mm_e2m1_to_f32(code) * table->scales[byte]);
    }
}

void mm_scale_table_e4m3(mm_scale_table *table) {
    fill_table(table, mm_e4m3_to_f32);
}
void mm_scale_table_e8m0(mm_scale_table *table) {
    fill_table(table, mm_e8m0_to_f32);
}

size_t mm_panel_bytes(uint32_t columns) {
    size_t padded = ((size_t)columns + MM_OPERAND_PAD - 1) / MM_OPERAND_PAD * MM_OPERAND_PAD + MM_OPERAND_PAD;
    return MM_ROWS_MAX * padded * sizeof(float);
}
