/* transform_nvfp4_weights_for_mega_moe: from experts in host or device memory to stacked operands in device
 * memory. */
#include <stdlib.h>

#include "backend/sm100/mega_moe.h"
#include "backend/sm100/operands.h"
#include "error.h"

enum { GATE, UP, DOWN, PROJECTIONS };

static const char *const names[PROJECTIONS] = {"gate", "up", "down"};

/* What goes through the steps below: the layer, and one matrix at a time in host memory. */
struct transform {
    const struct sm100_machine *machine;
    const mm_layer_weights *layer;
    bool on_device;
    struct sm100_weights *stacks[PROJECTIONS];
    uint8_t *codes, *scales; /* as the kernels want them, on their way to the device */
    struct mm_mega_moe_loss *loss;
};

static const mm_matrix *matrix_of(const struct transform *t, int projection, uint32_t expert) {
    const mm_expert *e = &t->layer->experts[expert];
    return projection == GATE ? &e->gate : projection == UP ? &e->up : &e->down;
}

/* The number of a loaded expert in the model. */
static uint32_t expert_number(const mm_layer_weights *layer, uint32_t loaded) {
    uint32_t number = 0;
    while (number + 1 < layer->shape.expert_count && layer->local_index[number] != (int32_t)loaded) number++;
    return number;
}

/* ---- stacks in device memory ---- */

static bool is_aligned(uint64_t value) {
    return value % SM100_CODE_ALIGNMENT == 0;
}

/* Codes that tensor copies can read where they lie: all rows at one pitch, and all experts at a multiple of it. */
static bool can_lend(const struct transform *t, int projection, struct sm100_weights *stack) {
    const mm_matrix *first = matrix_of(t, projection, 0);
    uint64_t pitch = first->rows * first->row_bytes;
    if (!t->on_device || !is_aligned((uintptr_t)first->codes) || !is_aligned(first->row_bytes)) return false;
    if (stack->groups > 1) pitch = (uint64_t)(matrix_of(t, projection, 1)->codes - first->codes);
    for (uint32_t i = 0; i < stack->groups; i++) {
        const mm_matrix *m = matrix_of(t, projection, i);
        if (m->format != MM_NVFP4 || m->row_bytes != first->row_bytes || m->codes != first->codes + i * pitch)
            return false;
    }
    stack->lent_row_bytes = first->row_bytes;
    stack->lent_group_bytes = pitch;
    return pitch > 0 && pitch % first->row_bytes == 0;
}

static megamoe_status stack_open(const struct transform *t, int projection) {
    const struct sm100_machine *m = t->machine;
    const mm_matrix *shape = matrix_of(t, projection, 0);
    const char *name = names[projection];
    struct sm100_weights *stack = t->stacks[projection];
    uint32_t groups = t->layer->expert_count;
    if (!shape->codes) return MEGAMOE_OK; /* no gate */
    *stack = (struct sm100_weights){.groups = groups, .rows = shape->rows, .columns = shape->columns};
    uint64_t codes = (uint64_t)groups * shape->rows * sm100_code_row_bytes(shape->columns);
    uint64_t scales = groups * sm100_scale_bytes(shape->rows, shape->columns);
    stack->lent = can_lend(t, projection, stack);
    stack->codes = stack->lent ? (uint8_t *)(uintptr_t)shape->codes : m->alloc(m->context, codes, name);
    stack->scales = m->alloc(m->context, scales, name);
    stack->globals = m->alloc(m->context, groups * sizeof(float), name);
    if (shape->bias) stack->biases = m->alloc(m->context, (uint64_t)groups * shape->rows * sizeof(float), name);
    if (stack->codes && stack->scales && stack->globals && (stack->biases || !shape->bias)) return MEGAMOE_OK;
    return mm_fail(MEGAMOE_OUT_OF_MEMORY, "the %s projections of %u experts take %llu bytes of device memory", name,
                   groups, (unsigned long long)(scales + (stack->lent ? 0 : codes)));
}

static void stack_close(const struct sm100_machine *machine, struct sm100_weights *stack) {
    if (!stack->lent) machine->release(machine->context, stack->codes);
    machine->release(machine->context, stack->scales);
    machine->release(machine->context, stack->globals);
    machine->release(machine->context, stack->biases);
    *stack = (struct sm100_weights){0};
}

/* ---- a matrix from device memory ---- */

/* Rows at a pitch, with what lies between them. */
static megamoe_status rows_fetch(const struct sm100_machine *machine, const void *rows, uint32_t count, uint64_t pitch,
                                 uint64_t row_bytes, uint8_t **copy) {
    uint64_t bytes = (count - 1) * pitch + row_bytes;
    *copy = malloc(bytes);
    if (!*copy) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for %llu bytes", (unsigned long long)bytes);
    return machine->copy_out(machine->context, *copy, rows, bytes);
}

/* What the host has to see of a matrix; codes that are lent stay unseen. The caller frees the parts. */
static megamoe_status matrix_fetch(const struct transform *t, const struct sm100_weights *stack, mm_matrix *m,
                                   uint8_t *parts[3]) {
    uint64_t scales = m->columns / (m->format == MM_MXFP4 ? 32 : 16);
    if (!stack->lent) {
        MM_TRY(rows_fetch(t->machine, m->codes, m->rows, m->row_bytes, m->columns / 2, &parts[0]));
        m->codes = parts[0];
    }
    MM_TRY(rows_fetch(t->machine, m->scales, m->rows, m->scale_row_bytes, scales, &parts[1]));
    m->scales = parts[1];
    if (!m->bias) return MEGAMOE_OK;
    MM_TRY(rows_fetch(t->machine, m->bias, m->rows, m->bias_stride, m->bias_dtype == MEGAMOE_BF16 ? 2 : 4, &parts[2]));
    m->bias = parts[2];
    return MEGAMOE_OK;
}

/* ---- one matrix to its place ---- */

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

/* Values that changed are counted, or refused where the layer is strict. */
static megamoe_status account(const struct transform *t, int projection, uint32_t expert, uint64_t changed) {
    const mm_matrix *m = matrix_of(t, projection, expert);
    if (changed == 0) return MEGAMOE_OK;
    if (t->layer->strict)
        return mm_fail(MEGAMOE_UNSUPPORTED_MODEL,
                       "%llu of %llu MXFP4 values are too small beside others of this matrix for NVFP4 and would be "
                       "rounded, which strict forbids",
                       (unsigned long long)changed, (unsigned long long)m->rows * m->columns);
    if (t->loss->values == 0) {
        t->loss->expert = expert_number(t->layer, expert);
        t->loss->matrix = names[projection];
    }
    t->loss->values += changed;
    return MEGAMOE_OK;
}

static megamoe_status write_host_matrix(const struct transform *t, int projection, const mm_matrix *matrix,
                                        uint32_t group) {
    const struct sm100_machine *m = t->machine;
    const struct sm100_weights *stack = t->stacks[projection];
    uint64_t codes = (uint64_t)stack->rows * sm100_code_row_bytes(stack->columns);
    uint64_t scales = sm100_scale_bytes(stack->rows, stack->columns);
    struct sm100_loss loss;
    float global;
    MM_TRY(mm_sm100_matrix_write(matrix, stack->lent ? NULL : t->codes, t->scales, &global, &loss));
    MM_TRY(account(t, projection, group, loss.values));
    if (!stack->lent) MM_TRY(m->copy_in(m->context, stack->codes + group * codes, t->codes, codes));
    MM_TRY(m->copy_in(m->context, stack->scales + group * scales, t->scales, scales));
    if (matrix->bias) MM_TRY(copy_biases(m, matrix, stack->biases + (uint64_t)group * stack->rows));
    return m->copy_in(m->context, stack->globals + group, &global, sizeof global);
}

static megamoe_status write_matrix(const struct transform *t, int projection, uint32_t group) {
    mm_matrix matrix = *matrix_of(t, projection, group);
    uint8_t *parts[3] = {NULL, NULL, NULL};
    megamoe_status status = check_shape(&matrix, t->stacks[projection]);
    if (status == MEGAMOE_OK && t->on_device) status = matrix_fetch(t, t->stacks[projection], &matrix, parts);
    if (status == MEGAMOE_OK) status = write_host_matrix(t, projection, &matrix, group);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
    if (status == MEGAMOE_OK) return status;
    return mm_fail_in(status, "expert %u, %s", expert_number(t->layer, group), names[projection]);
}

static megamoe_status write_experts(struct transform *t, float *h_globals) {
    const mm_layer_weights *w = t->layer;
    uint64_t codes = 0, scales = 0;
    for (int p = 0; p < PROJECTIONS; p++) {
        const struct sm100_weights *stack = t->stacks[p];
        uint64_t c = (uint64_t)stack->rows * sm100_code_row_bytes(stack->columns);
        uint64_t s = sm100_scale_bytes(stack->rows, stack->columns);
        if (c > codes) codes = c;
        if (s > scales) scales = s;
    }
    t->codes = malloc(codes);
    t->scales = malloc(scales);
    if (!t->codes || !t->scales) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no host memory for one matrix");
    for (uint32_t i = 0; i < w->expert_count; i++) {
        float h_global = w->intermediate_mode == MEGAMOE_GLOBAL_STATIC ? w->experts[i].intermediate_global : 1.0f;
        for (int p = 0; p < PROJECTIONS; p++)
            if (t->stacks[p]->codes) MM_TRY(write_matrix(t, p, i));
        MM_TRY(t->machine->copy_in(t->machine->context, h_globals + i, &h_global, sizeof h_global));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_transform_nvfp4_weights_for_mega_moe(const struct sm100_machine *machine,
                                                       const mm_layer_weights *layer, bool on_device,
                                                       struct mm_mega_moe_weights *weights,
                                                       struct mm_mega_moe_loss *loss) {
    struct mm_mega_moe_weights w = {0};
    struct transform t = {machine, layer, on_device, {&w.gate, &w.up, &w.down}, NULL, NULL, loss};
    megamoe_status status = MEGAMOE_OK;
    *loss = (struct mm_mega_moe_loss){0};
    for (int p = 0; p < PROJECTIONS && status == MEGAMOE_OK; p++) status = stack_open(&t, p);
    w.h_globals = machine->alloc(machine->context, layer->expert_count * sizeof(float), "intermediate globals");
    if (status == MEGAMOE_OK && !w.h_globals)
        status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no device memory for %u intermediate globals", layer->expert_count);
    if (status == MEGAMOE_OK) status = write_experts(&t, w.h_globals);
    free(t.codes);
    free(t.scales);
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
