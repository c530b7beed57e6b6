/* Which GPU takes which image, and what is said when none fits: asked of GPUs that are not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cuda/choose.h"

static const char all[] = "sm_90a,sm_100f,sm_120f";

static mm_gpu gpu(int major, int minor) {
    mm_gpu g = {
        .driver_version = 13000, .count = 1, .major = major, .minor = minor, .shared_bytes = 232448, .sm_count = 132};
    strcpy(g.name, "Test GPU");
    return g;
}

static void expect_image(int major, int minor, const char *built, bool native, const char *image) {
    mm_gpu g = gpu(major, minor);
    const char *found = "untouched";
    assert_int_equal(mm_gpu_choose(&g, built, native, &found), MEGAMOE_OK);
    assert_string_equal(found, image);
}

/* Refused, the result untouched, and the sentence has every one of the words. */
static void expect_refusal(const mm_gpu *g, const char *built, bool native, const char *const *words) {
    const char *found = "untouched";
    assert_int_equal(mm_gpu_choose(g, built, native, &found), MEGAMOE_UNSUPPORTED_DEVICE);
    assert_string_equal(found, "untouched");
    for (; *words; words++)
        if (!strstr(megamoe_error_message(), *words))
            fail_msg("'%s' does not say '%s'", megamoe_error_message(), *words);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_families(void **state) {
    (void)state;
    expect_image(9, 0, all, false, "sm_90a");
    expect_image(9, 0, all, true, "sm_90a");
    expect_image(10, 0, all, false, "sm_100f");
    expect_image(10, 3, all, false, "sm_100f");
    expect_image(12, 0, all, false, "sm_120f");
    expect_image(12, 1, all, false, "sm_120f");
    expect_image(12, 0, "sm_120f", false, "sm_120f");
}

/* Never "at least": 8.0 and 8.9 are too old, 11.0 is a family of its own. */
static void test_unknown_gpus(void **state) {
    static const int others[][2] = {{8, 0}, {8, 9}, {11, 0}, {13, 0}, {9, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        mm_gpu g = gpu(others[i][0], others[i][1]);
        char capability[8] = {(char)('0' + others[i][0] % 10), '.', (char)('0' + others[i][1])};
        expect_refusal(&g, all, false, WORDS("Test GPU", capability, all, "--backend cpu"));
    }
}

static void test_images_left_out(void **state) {
    mm_gpu g = gpu(10, 0);
    (void)state;
    expect_refusal(&g, "sm_90a,sm_120f", false, WORDS("10.0", "sm_100f", "sm_90a,sm_120f"));
    expect_refusal(&g, "sm_1000f", false, WORDS("sm_100f")); /* a longer name is not the image */
}

/* A request that cannot work is an error, never a silent swap. */
static void test_native_elsewhere(void **state) {
    mm_gpu blackwell = gpu(10, 0), ampere = gpu(8, 0);
    (void)state;
    expect_refusal(&blackwell, all, true, WORDS("9.0", "10.0", "cuda-portable"));
    expect_refusal(&ampere, all, true, WORDS("9.0", "8.0"));
}

static void test_machine(void **state) {
    mm_gpu old = gpu(9, 0), none = gpu(9, 0), second = gpu(9, 0), small = gpu(12, 0);
    (void)state;
    old.driver_version = 12040;
    expect_refusal(&old, all, false, WORDS("12.4", "13.0", "580"));
    none.count = 0;
    expect_refusal(&none, all, false, WORDS("no GPU 0", "0"));
    second.ordinal = 3;
    expect_refusal(&second, all, false, WORDS("GPU 3", "1"));
    small.shared_bytes = 65536;
    expect_refusal(&small, all, false, WORDS("65536", "98304"));
    small.shared_bytes = 101376; /* what sm_120 has */
    const char *found = NULL;
    assert_int_equal(mm_gpu_choose(&small, all, false, &found), MEGAMOE_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_families), cmocka_unit_test(test_unknown_gpus),
                                       cmocka_unit_test(test_images_left_out), cmocka_unit_test(test_native_elsewhere),
                                       cmocka_unit_test(test_machine)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
