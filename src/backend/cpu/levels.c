/* Which levels this machine runs: what CPUID offers, what the operating system saves (XCR0), and MEGAMOE_ISA.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "backend/cpu/kernels.h"
#include "numerics/e8m0.h"

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

typedef struct level {
    const char *name;
    bool (*runs)(void);
    void (*fill)(mm_kernels *kernels);
} level;

static bool runs_scalar(void) {
    return true;
}

#if defined(__x86_64__)

typedef struct cpuid_words {
    unsigned eax, ebx, ecx, edx;
} cpuid_words;

static cpuid_words cpuid(unsigned leaf, unsigned subleaf) {
    cpuid_words w = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &w.eax, &w.ebx, &w.ecx, &w.edx);
    return w;
}

/* Register state that the operating system saves; bits 1-2: ymm, 5-7: zmm and masks, 17-18: AMX tiles. */
static bool saves(unsigned wanted) {
    unsigned low, high;
    if (!(cpuid(1, 0).ecx >> 27 & 1)) return false; /* OSXSAVE: without it xgetbv is illegal */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return (low & wanted) == wanted;
}

static bool has(unsigned word, const unsigned *bits, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        if (!(word >> bits[i] & 1)) return false;
    return true;
}

/* AVX2, FMA and F16C. */
static bool runs_avx2(void) {
    static const unsigned leaf1_ecx[] = {12, 28, 29}, leaf7_ebx[] = {5};
    return saves(0x6) && has(cpuid(1, 0).ecx, leaf1_ecx, 3) && has(cpuid(7, 0).ebx, leaf7_ebx, 1);
}

/* AVX-512 F, DQ, BW, VL and VNNI: Cascade Lake, Ice Lake and later. */
static bool runs_avx512(void) {
    static const unsigned ebx[] = {16, 17, 30, 31}, ecx[] = {11};
    return runs_avx2() && saves(0xE6) && has(cpuid(7, 0).ebx, ebx, 4) && has(cpuid(7, 0).ecx, ecx, 1);
}

/* With VBMI and BF16 too: Zen 4, Sapphire Rapids and later. */
static bool runs_avx512_bf16(void) {
    static const unsigned ecx[] = {1}, sub1_eax[] = {5};
    return runs_avx512() && has(cpuid(7, 0).ecx, ecx, 1) && has(cpuid(7, 1).eax, sub1_eax, 1);
}

/* AMX tiles, AMX-BF16 and FP16, which every processor with AMX has. Linux grants the tile data of a process on request
 * only. */
static bool runs_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static const unsigned edx[] = {22, 23, 24};
    return runs_avx512_bf16() && saves(0x600E6) && has(cpuid(7, 0).edx, edx, 3) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#endif

static const level levels[] = {
    {"scalar", runs_scalar, mm_kernels_scalar},
#if defined(__x86_64__)
    {"avx2", runs_avx2, mm_kernels_avx2},
    {"avx512", runs_avx512, mm_kernels_avx512}, /* one level in two forms: the processor decides */
    {"avx512", runs_avx512_bf16, mm_kernels_avx512_bf16},
    {"amx", runs_amx, mm_kernels_amx},
#endif
};

enum { LEVEL_COUNT = sizeof levels / sizeof *levels };
_Static_assert(LEVEL_COUNT <= MM_LEVELS_MAX, "callers have room for every level");

uint32_t mm_kernels_levels(mm_kernels filled[MM_LEVELS_MAX]) {
    const char *cap = getenv("MEGAMOE_ISA");
    bool reached = false;
    uint32_t count = 0;
    for (; count < LEVEL_COUNT && levels[count].runs(); count++) {
        bool is_cap = cap && strcmp(cap, levels[count].name) == 0;
        if (reached && !is_cap) break;
        reached = is_cap;
        if (count > 0) filled[count] = filled[count - 1];
        levels[count].fill(&filled[count]);
        filled[count].isa = levels[count].name;
    }
    return count;
}

static void fill_table(mm_scale_table *table, float (*decode)(unsigned byte)) {
    for (unsigned byte = 0; byte < 256; byte++) {
        table->scales[byte] = decode(byte);
        uint16_t half = mm_bf16_from_f32(table->scales[byte]);
        table->bf16_low[byte] = (uint8_t)half;
        table->bf16_high[byte] = (uint8_t)(half >> 8);
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
