/* transform_nvfp4_weights_for_mega_moe: from experts in host memory to stacked operands in device memory. */
#include <stdlib.h>

#include "backend/sm100/mega_moe.h"
#include "backend/sm100/operands.h"
#include "error.h"

/* One matrix on its way: the host buffers that the operand is written to before it is copied. */
struct staging {
    uint8_t *codes, *scales;
};

static megamoe_status stack_open(const struct sm100_machine *machine, const mm_matrix *shape, uint32_t groups,
                                 const char *name, struct sm100_weights *stack) {
    *stack = (struct sm100_weights){.groups = groups, .rows = shape->rows, .columns = shape->columns};
    uint64_t codes = (uint64_t)groups * shape->rows * sm100_code_row_bytes(shape->columns);
    uint64_t scales = groups * sm100_scale_bytes(shape->rows, shape->columns);
    stack->codes = machine->alloc(machine->context, codes, name);
    stack->scales = machine->alloc(machine->context, scales, name);
    stack->globals = machine->alloc(machine->context, groups * sizeof(float), name);
    if (shape->bias)
        stack->biases = machine->alloc(machine->context, (uint64_t)groups * shape->rows * sizeof(float), name);
    if (stack->codes && stack->scales && stack->globals && (stack->biases || !shape->bias)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_OUT_OF_MEMORY, "the %s projections of %u experts take %llu bytes of device memory", name,
                   groups, (unsigned long long)(codes + scales));
}

static void stack_close(const struct sm100_machine *machine, struct sm100_weights *stack) {
    machine->release(machine->context, stack->codes);
    machine->release(machine->context, stack->scales);
    machine->release(machine->context, stack->globals);
    machine->release(machine->context, stack->biases);
    *stack = (struct sm100_weights){0};
}

static float bias_value(const mm_matrix *matrix, uint32_t row) {
    const uint8_t *at = (const uint8_t *)matrix->bias + row * matrix->bias_stride;
    uint16_t half;
    float value;
    memcpy(&half, at, sizeof half);
    if (matrix->bias_dtype == MEGAMOE_BF16) return mm_f32_from_bits((uint32_t)half << 16);
    memcpy(&value, at, sizeof value);
    return value;
}

static megamoe_status copy_biases(const struct sm100_machine *machine, const mm_matrix *matrix, float *target) {
    float *values = malloc(matrix->rows * sizeof *values);
    megamoe_status status;
    if (!values) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for %u biases", matrix->rows);
    for (uint32_t row = 0; row < matrix->rows; row++) values[row] = bias_value(matrix, row);
    status = machine->copy_in(machine->context, target, values, matrix->rows * sizeof *values);
    free(values);
    return status;
}

/* Experts of one layer have one shape; a stack could not hold another. */
static megamoe_status check_shape(const mm_matrix *matrix, const struct sm100_weights *stack) {
    if (matrix->rows == stack->rows && matrix->columns == stack->columns && !matrix->bias == !stack->biases)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_UNSUPPORTED_MODEL, "a matrix is %u x %u%s where the first expert's is %u x %u%s",
                   matrix->rows, matrix->columns, matrix->bias ? " with bias" : "", stack->rows, stack->columns,
                   stack->biases ? " with bias" : "");
}

static megamoe_status stack_write(const struct sm100_machine *machine, const mm_matrix *matrix, uint32_t group,
                                  const struct staging *staging, struct sm100_weights *stack, uint64_t *lost) {
    uint64_t codes = (uint64_t)stack->rows * sm100_code_row_bytes(stack->columns);
    uint64_t scales = sm100_scale_bytes(stack->rows, stack->columns);
    struct sm100_loss loss;
    float global;
    MM_TRY(check_shape(matrix, stack));
    MM_TRY(mm_sm100_matrix_write(matrix, staging->codes, staging->scales, &global, &loss));
    *lost += loss.values;
    MM_TRY(machine->copy_in(machine->context, stack->codes + group * codes, staging->codes, codes));
    MM_TRY(machine->copy_in(machine->context, stack->scales + group * scales, staging->scales, scales));
    if (matrix->bias) MM_TRY(copy_biases(machine, matrix, stack->biases + (uint64_t)group * stack->rows));
    return machine->copy_in(machine->context, stack->globals + group, &global, sizeof global);
}

static megamoe_status write_expert(const struct sm100_machine *machine, const mm_expert *expert, uint32_t group,
                                   bool static_intermediate, const struct staging *staging,
                                   struct mm_mega_moe_weights *weights, uint64_t *lost) {
    float h_global = static_intermediate ? expert->intermediate_global : 1.0f;
    if (weights->gate.codes) MM_TRY(stack_write(machine, &expert->gate, group, staging, &weights->gate, lost));
    MM_TRY(stack_write(machine, &expert->up, group, staging, &weights->up, lost));
    MM_TRY(stack_write(machine, &expert->down, group, staging, &weights->down, lost));
    return machine->copy_in(machine->context, weights->h_globals + group, &h_global, sizeof h_global);
}

static megamoe_status write_experts(const struct sm100_machine *machine, const mm_expert *experts, uint32_t count,
                                    bool static_intermediate, struct mm_mega_moe_weights *weights,
                                    struct mm_mega_moe_loss *loss) {
    const mm_matrix *up = &experts[0].up, *down = &experts[0].down;
    uint64_t up_codes = (uint64_t)up->rows * sm100_code_row_bytes(up->columns);
    uint64_t down_codes = (uint64_t)down->rows * sm100_code_row_bytes(down->columns);
    uint64_t up_scales = sm100_scale_bytes(up->rows, up->columns);
    uint64_t down_scales = sm100_scale_bytes(down->rows, down->columns);
    struct staging staging = {malloc(up_codes > down_codes ? up_codes : down_codes),
                              malloc(up_scales > down_scales ? up_scales : down_scales)};
    megamoe_status status = MEGAMOE_OK;
    if (!staging.codes || !staging.scales) status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for one matrix");
    for (uint32_t i = 0; i < count && status == MEGAMOE_OK; i++) {
        uint64_t before = loss->values;
        status = write_expert(machine, &experts[i], i, static_intermediate, &staging, weights, &loss->values);
        if (status != MEGAMOE_OK) mm_fail_in(status, "loaded expert %u", i);
        if (before == 0 && loss->values) loss->expert = i;
    }
    free(staging.codes);
    free(staging.scales);
    return status;
}

megamoe_status mm_transform_nvfp4_weights_for_mega_moe(const struct sm100_machine *machine, const mm_expert *experts,
                                                       uint32_t expert_count, bool static_intermediate,
                                                       struct mm_mega_moe_weights *weights,
                                                       struct mm_mega_moe_loss *loss) {
    struct mm_mega_moe_weights w = {0};
    megamoe_status status = MEGAMOE_OK;
    *loss = (struct mm_mega_moe_loss){0};
    if (experts[0].gate.codes) status = stack_open(machine, &experts[0].gate, expert_count, "gate", &w.gate);
    if (status == MEGAMOE_OK) status = stack_open(machine, &experts[0].up, expert_count, "up", &w.up);
    if (status == MEGAMOE_OK) status = stack_open(machine, &experts[0].down, expert_count, "down", &w.down);
    w.h_globals = machine->alloc(machine->context, expert_count * sizeof(float), "intermediate globals");
    if (status == MEGAMOE_OK && !w.h_globals)
        status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no device memory for %u intermediate globals", expert_count);
    if (status == MEGAMOE_OK) status = write_experts(machine, experts, expert_count, static_intermediate, &w, loss);
    if (status == MEGAMOE_OK)
        *weights = w;
    else
        mm_mega_moe_weights_free(machine, &w);
    return status;
}

void mm_mega_moe_weights_free(const struct sm100_machine *machine, struct mm_mega_moe_weights *weights) {
    stack_close(machine, &weights->gate);
    stack_close(machine, &weights->up);
    stack_close(machine, &weights->down);
    machine->release(machine->context, weights->h_globals);
    weights->h_globals = NULL;
}
