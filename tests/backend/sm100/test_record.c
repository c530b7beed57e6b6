/* The record of a wait that never ended: every field of it is in the sentence, and under its own name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "backend/sm100/record.h"
#include "backend/sm100/tiles.h"

static const struct sm100_record full = {.claimed = 1,
                                         .kernel = SM100_L2_LARGE,
                                         .barrier = SM100_STAGE_EMPTY,
                                         .index = 3,
                                         .parity = 1,
                                         .cta = 71,
                                         .thread = 32,
                                         .group = 17,
                                         .m_tile = 5,
                                         .row = 4711};

static void every_field(void **state) {
    char sentence[256];
    (void)state;
    mm_sm100_record_describe(&full, sentence, sizeof sentence);
    assert_string_equal(sentence,
                        "kernel L2 (large tiles): thread 32 of CTA 71 gave up waiting for the instructions that "
                        "read stage 3 (phase 1) at expert 17, weight tile 5, token row 4711");
}

/* Kernels in the order of the tile table, barriers in that of their enum. */
static void every_name(void **state) {
    const char *const kernels[SM100_TILE_COUNT] = {
        "kernel L1 (small tiles):", "kernel L1 (large tiles):", "kernel L2 (small tiles):", "kernel L2 (large tiles):",
        "kernel L2 (wide tiles):"};
    const char *const barriers[SM100_BARRIER_COUNT] = {
        "for the bytes of stage 3", "for the instructions that read stage 3",
        "for the multiplication into accumulator 3", "for the epilogue's reading of accumulator 3"};
    char sentence[256];
    (void)state;
    for (uint32_t kernel = 0; kernel < SM100_TILE_COUNT; kernel++)
        for (uint32_t barrier = 0; barrier < SM100_BARRIER_COUNT; barrier++) {
            struct sm100_record record = full;
            record.kernel = kernel;
            record.barrier = barrier;
            mm_sm100_record_describe(&record, sentence, sizeof sentence);
            assert_non_null(strstr(sentence, kernels[kernel]));
            assert_non_null(strstr(sentence, barriers[barrier]));
        }
}

static void nothing_and_rubbish(void **state) {
    struct sm100_record record = full;
    char sentence[256] = "not empty", little[12];
    (void)state;
    mm_sm100_record_describe(&record, little, sizeof little); /* cut off, and still a string */
    assert_string_equal(little, "kernel L2 (");
    record.kernel = SM100_TILE_COUNT;
    mm_sm100_record_describe(&record, sentence, sizeof sentence);
    assert_non_null(strstr(sentence, "damaged (kernel 5, barrier 1)"));
    record.claimed = 0;
    mm_sm100_record_describe(&record, sentence, sizeof sentence);
    assert_string_equal(sentence, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_field), cmocka_unit_test(every_name),
                                       cmocka_unit_test(nothing_and_rubbish)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
