/* The self-check on the functional model: it passes as the kernels are, and every planted fault is found and
 * named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <string.h>
#include <cmocka.h>

#include "backend/sm100/gemm.h"
#include "backend/sm100/self_check.h"
#include "error.h"
#include "model_machine.h"

enum fault {
    NONE,
    SCALES_SHIFTED,
    CODES_SHIFTED,
    TOKENS_UNSWIZZLED,
    BIT_FLIPPED,
    LAUNCH_FAILS,
    H_BYTE_WRONG,
    NEVER_RAN,
    PORTABLE_BIT_FLIPPED,
    PORTABLE_GROUPS_SWAPPED,
    PORTABLE_FAILS
};

/* A machine with something wrong in it. */
struct faulty {
    struct model_state state;
    struct sm100_machine inner;
    enum fault fault;
    uint32_t launches;
};

static void *faulty_alloc(void *context, size_t bytes, const char *name) {
    struct faulty *f = context;
    return f->inner.alloc(f->inner.context, bytes, name);
}

static void faulty_release(void *context, void *memory) {
    struct faulty *f = context;
    f->inner.release(f->inner.context, memory);
}

static megamoe_status faulty_copy(void *context, void *target, const void *source, size_t bytes) {
    struct faulty *f = context;
    return f->inner.copy_in(f->inner.context, target, source, bytes);
}

static megamoe_status faulty_map(void *context, const struct sm100_map *map, struct sm100_tensor_map *encoded) {
    struct faulty *f = context;
    struct sm100_map wrong = *map;
    if (f->fault == SCALES_SHIFTED && map->element_bytes == 2 && map->dims[1] > 2) {
        wrong.base = (const uint8_t *)map->base + 512; /* one block of scales too far */
        wrong.dims[1]--;
    }
    if (f->fault == CODES_SHIFTED && map->rank == 3) wrong.strides[1] = map->strides[0] * (map->dims[1] - 1);
    if (f->fault == TOKENS_UNSWIZZLED && map->rank == 2 && map->element_bytes == 1) wrong.swizzled = false;
    return f->inner.map(f->inner.context, &wrong, encoded);
}

static megamoe_status faulty_launch(void *context, const struct sm100_launch *launch, void *stream) {
    struct faulty *f = context;
    const struct sm100_gemm_args *args = launch->args;
    bool gated = sm100_tiles[launch->kernel].matrices == 2;
    f->launches++;
    if (f->fault == LAUNCH_FAILS) return mm_fail(MEGAMOE_DEVICE_ERROR, "an illegal instruction was encountered");
    if (f->fault == NEVER_RAN) return MEGAMOE_OK;
    MM_TRY(f->inner.launch(f->inner.context, launch, stream));
    if (f->fault == BIT_FLIPPED && !gated) ((uint32_t *)args->output)[17 * 144 + 5] ^= 1;
    if (f->fault == H_BYTE_WRONG && gated) args->h_codes[5 * 72 + 40] ^= 0x10;
    return MEGAMOE_OK;
}

/* The portable kernels' part, in double by the definition: sums of at most 24 bits, so that its order is all the same.
 */
static megamoe_status multiply(void *context, const struct sm100_product *p, float *results) {
    static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const enum fault fault = ((struct faulty *)context)->fault;
    if (fault == PORTABLE_FAILS) return mm_fail(MEGAMOE_DEVICE_ERROR, "an illegal address was encountered");
    for (uint32_t row = 0; row < p->rows; row++) {
        const uint32_t group = (row >= (uint32_t)p->ends[0]) ^ (fault == PORTABLE_GROUPS_SWAPPED);
        const mm_matrix *m = &p->groups[group];
        for (uint32_t n = 0; n < p->features; n++) {
            double sum = 0;
            for (uint32_t k = 0; k < p->columns; k++) {
                const uint8_t w = m->codes[n * m->row_bytes + k / 2], x = p->codes[(row * p->columns + k) / 2];
                const int ws = m->scales[n * m->scale_row_bytes + k / 16], xs = p->scales[(row * p->columns + k) / 16];
                sum += ldexp((double)e2m1[k % 2 ? w >> 4 : w & 15] * (double)e2m1[k % 2 ? x >> 4 : x & 15],
                             (ws + xs - 0x70) / 8); /* powers of two: 0x38 is 1 */
            }
            results[row * p->features + n] = (float)(sum * (double)m->global);
        }
    }
    if (fault == PORTABLE_BIT_FLIPPED) ((uint32_t *)(void *)results)[17 * p->features + 5] ^= 1;
    return MEGAMOE_OK;
}

static megamoe_status check_with(enum fault fault, uint32_t *launches) {
    struct faulty f = {.fault = fault};
    f.inner = model_machine(&f.state, 4);
    struct sm100_machine machine = {&f,          4,           faulty_alloc, faulty_release,
                                    faulty_copy, faulty_copy, faulty_map,   faulty_launch};
    const struct sm100_portable portable = {&f, multiply};
    megamoe_status status = mm_sm100_self_check(&machine, &portable);
    *launches = f.launches;
    return status;
}

static void passes(void **state) {
    uint32_t launches;
    (void)state;
    assert_int_equal(check_with(NONE, &launches), MEGAMOE_OK);
    assert_int_equal(launches, SM100_TILE_COUNT);
}

static void expect_failure(enum fault fault, const char *words) {
    uint32_t launches;
    assert_int_equal(check_with(fault, &launches), MEGAMOE_DEVICE_ERROR);
    if (!strstr(megamoe_error_message(), words)) fail_msg("%s", megamoe_error_message());
}

static void faults_are_named(void **state) {
    (void)state;
    expect_failure(SCALES_SHIFTED, "the product of token row");
    expect_failure(CODES_SHIFTED, "the product of token row");
    expect_failure(TOKENS_UNSWIZZLED, "the product of token row");
    expect_failure(BIT_FLIPPED, "instance 2 of sm100 failed: the product of token row 17, feature 5");
    expect_failure(H_BYTE_WRONG, "the code byte of h of token row 5, feature 80");
    expect_failure(LAUNCH_FAILS, "an illegal instruction");
    expect_failure(NEVER_RAN, "the product of token row 0, feature 0 is ");
}

static void expect_portable_failure(enum fault fault, const char *words) {
    uint32_t launches;
    assert_int_equal(check_with(fault, &launches), MEGAMOE_UNSUPPORTED_DEVICE);
    if (!strstr(megamoe_error_message(), words)) fail_msg("%s", megamoe_error_message());
}

/* Where the portable kernels are wrong, nothing may fall back to them: another status says so. */
static void faults_of_the_portable_kernels_are_named(void **state) {
    (void)state;
    expect_portable_failure(PORTABLE_BIT_FLIPPED, "portable kernels failed: the product of token row 17, feature 5");
    expect_portable_failure(PORTABLE_GROUPS_SWAPPED, "portable kernels failed: the product of token row 0");
    expect_portable_failure(PORTABLE_FAILS, "an illegal address was encountered");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(passes), cmocka_unit_test(faults_are_named),
                                       cmocka_unit_test(faults_of_the_portable_kernels_are_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
