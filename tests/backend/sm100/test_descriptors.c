/* Descriptors against the words that two public kernels and the manual's tables give, and the budgets of the
 * tiles. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "backend/sm100/arguments.h"
#include "backend/sm100/tiles.h"

static void instruction(void **state) {
    (void)state;
    assert_int_equal(sm100_instruction_descriptor(128, 256), 0x08400480);
    assert_int_equal(sm100_instruction_descriptor(128, 128), 0x08200480);
    assert_int_equal(sm100_instruction_descriptor(256, 256), 0x10400480);
    for (uint32_t n = 8; n <= 256; n += 8) {
        uint32_t d = sm100_instruction_descriptor(128, n);
        assert_int_equal(d >> 17 & 63, n / 8);
        assert_int_equal(d & ~(63u << 17), 0x08000480);
    }
}

static void operand(void **state) {
    (void)state;
    assert_int_equal(sm100_operand_descriptor(0), 0x4000404000010000);
    assert_int_equal(sm100_operand_descriptor(0x4400), 0x4000404000010440);
    /* The next 64 values of K are 32 bytes further: two units. */
    assert_int_equal(sm100_operand_descriptor(0x4420), 0x4000404000010442);
    /* The CTA's window above bit 18 is not part of the address. */
    assert_int_equal(sm100_operand_descriptor(0x01004400), 0x4000404000010440);
}

static void scale(void **state) {
    (void)state;
    assert_int_equal(sm100_scale_descriptor(0), 0x0000400800000000);
    assert_int_equal(sm100_scale_descriptor(0x8200), 0x0000400800000820);
}

/* Each budget in bytes and columns, so that a change of a tile is seen here and in the committed table. */
static void budgets(void **state) {
    (void)state;
    const uint32_t shared[SM100_TILE_COUNT] = {188672, 188672, 200960, 209152, 221440};
    const uint32_t columns[SM100_TILE_COUNT] = {448, 512, 352, 480, 448};
    for (uint32_t i = 0; i < SM100_TILE_COUNT; i++) {
        assert_int_equal(sm100_shared_bytes(sm100_tiles[i]), shared[i]);
        assert_int_equal(sm100_tensor_columns(sm100_tiles[i]), columns[i]);
        assert_true(sm100_shared_bytes(sm100_tiles[i]) <= SM100_SHARED_BYTES_MAX);
        assert_int_equal(sm100_tensor_columns_allocated(sm100_tiles[i]), 512);
        assert_int_equal(sm100_stage_bytes(sm100_tiles[i]) % 1024, 0); /* the swizzle's period */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(instruction),
        cmocka_unit_test(operand),
        cmocka_unit_test(scale),
        cmocka_unit_test(budgets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
