/* From the tensors that a caller holds (megamoe_layer_desc) to weight matrices: shapes, strides and scalars.
 */
#include "layer_tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

/* ---- tensors in general ---- */

static uint64_t dtype_bits(megamoe_dtype dtype) {
    switch (dtype) {
    case MEGAMOE_I64: return 64;
    case MEGAMOE_F32:
    case MEGAMOE_I32: return 32;
    case MEGAMOE_BF16:
    case MEGAMOE_F16: return 16;
    case MEGAMOE_E4M3:
    case MEGAMOE_E8M0:
    case MEGAMOE_U8:
    case MEGAMOE_I8: return 8;
    case MEGAMOE_E2M1X2: return 4;
    }
    return 0;
}

/* The byte pitch of dimension d; strides that are all zero mean contiguous. */
uint64_t mm_tensor_pitch(const megamoe_tensor *t, uint32_t d) {
    uint64_t bits = dtype_bits(t->dtype), pitch = bits;
    bool strided = false;
    for (uint32_t i = 0; i < t->rank; i++) strided |= t->stride[i] != 0;
    if (strided) return (uint64_t)t->stride[d] * (t->dtype == MEGAMOE_E2M1X2 ? 8 : bits) / 8;
    for (uint32_t i = d + 1; i < t->rank; i++) pitch *= (uint64_t)t->extent[i];
    return pitch / 8;
}

/* A tensor whose rows can be walked: data, a known dtype, no negative extent or stride, and a dense last
 * dimension. */
megamoe_status mm_tensor_check(const megamoe_tensor *t, const char *name, uint32_t rank) {
    if (!t->data) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has no data", name);
    if (dtype_bits(t->dtype) == 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has unknown dtype %d", name, (int)t->dtype);
    if (t->rank != rank)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has %u dimensions instead of %u", name, t->rank, rank);
    for (uint32_t d = 0; d < rank; d++)
        if (t->extent[d] < 0 || t->stride[d] < 0)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has extent %lld and stride %lld in dimension %u", name,
                           (long long)t->extent[d], (long long)t->stride[d], d);
    if (rank > 0 && t->dtype != MEGAMOE_E2M1X2 && t->stride[rank - 1] > 1)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has stride %lld in its last dimension instead of 1", name,
                       (long long)t->stride[rank - 1]);
    return MEGAMOE_OK;
}

static megamoe_status expect_extents(const megamoe_tensor *t, const char *name, uint32_t leading, uint64_t rows,
                                     uint64_t columns) {
    uint32_t d = leading ? 1 : 0;
    if ((leading && t->extent[0] != leading) || (uint64_t)t->extent[d] != rows || (uint64_t)t->extent[d + 1] != columns)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "%s ends in [%lld, %lld] instead of [%llu, %llu], or has not %u experts", name,
                       (long long)t->extent[d], (long long)t->extent[d + 1], (unsigned long long)rows,
                       (unsigned long long)columns, leading ? leading : 1u);
    return MEGAMOE_OK;
}

/* ---- one projection ---- */

/* What is known of a projection before one of its experts is cut out of it. */
typedef struct stack {
    const megamoe_projection *projection;
    const char *name;
    uint32_t expert_count; /* 0: tensors without the leading dimension */
    uint32_t rows, columns;
} stack;

static megamoe_status decide_format(const stack *s, mm_matrix *m) {
    const megamoe_tensor *codes = &s->projection->codes, *scales = &s->projection->scales;
    bool packed = codes->dtype == MEGAMOE_U8 || codes->dtype == MEGAMOE_I8;
    uint32_t last = codes->rank - 1;
    char name[64];
    snprintf(name, sizeof name, "%s codes", s->name);
    MM_TRY(mm_tensor_check(codes, name, s->expert_count ? 3 : 2));
    MM_TRY(expect_extents(codes, name, s->expert_count, s->rows, packed ? s->columns / 2 : s->columns));
    m->row_bytes = mm_tensor_pitch(codes, last - 1);
    m->scale_dtype = scales->dtype;
    if (codes->dtype == MEGAMOE_BF16) {
        m->format = MM_BF16;
        return MEGAMOE_OK;
    }
    if (codes->dtype == MEGAMOE_E4M3)
        m->format = MM_FP8;
    else if (packed || codes->dtype == MEGAMOE_E2M1X2)
        m->format = scales->dtype == MEGAMOE_E4M3 ? MM_NVFP4 : MM_MXFP4;
    else
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s have dtype %d; they can be E2M1X2, U8, I8, BF16 or E4M3", name,
                       (int)codes->dtype);
    return MEGAMOE_OK;
}

/* FP8 scales come per 128 x 128 or per 32 x 32: whichever gives the extents that are there. */
static megamoe_status decide_blocks(const stack *s, mm_matrix *m) {
    const megamoe_tensor *scales = &s->projection->scales;
    uint32_t d = s->expert_count ? 1 : 0;
    for (uint32_t size = 128; size >= 32; size /= 4) {
        if ((uint64_t)scales->extent[d] != (s->rows + size - 1) / size) continue;
        if ((uint64_t)scales->extent[d + 1] != (s->columns + size - 1) / size) continue;
        m->block_rows = m->block_columns = size;
        return MEGAMOE_OK;
    }
    return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                   "%s scales [%lld, %lld] are neither 128 x 128 nor 32 x 32 blocks of [%u, %u]", s->name,
                   (long long)scales->extent[d], (long long)scales->extent[d + 1], s->rows, s->columns);
}

static megamoe_status decide_scales(const stack *s, mm_matrix *m) {
    const megamoe_tensor *scales = &s->projection->scales;
    uint32_t group = m->format == MM_NVFP4 ? 16 : 32;
    char name[64];
    snprintf(name, sizeof name, "%s scales", s->name);
    if (m->format == MM_BF16) return MEGAMOE_OK;
    MM_TRY(mm_tensor_check(scales, name, s->expert_count ? 3 : 2));
    m->scale_row_bytes = mm_tensor_pitch(scales, scales->rank - 2);
    if (m->format == MM_FP8) {
        if (scales->dtype != MEGAMOE_F32 && scales->dtype != MEGAMOE_E8M0)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s of FP8 weights must be F32 or E8M0", name);
        return decide_blocks(s, m);
    }
    if (m->format == MM_MXFP4 && scales->dtype != MEGAMOE_E8M0 && scales->dtype != MEGAMOE_U8)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s of E2M1 codes must be E4M3 (NVFP4) or E8M0 (MXFP4)", name);
    if (m->format == MM_MXFP4) m->scale_dtype = MEGAMOE_E8M0;
    if (s->columns % group != 0)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s: K = %u is not a multiple of the group of %u", name, s->columns,
                       group);
    return expect_extents(scales, name, s->expert_count, s->rows, s->columns / group);
}

/* Reads element e of a scalar tensor [E], [1] or []; absent: `missing`. */
static megamoe_status read_scalar(const mm_memory *memory, const megamoe_tensor *t, const char *name, uint32_t e,
                                  float missing, float *value) {
    const uint8_t *at = t->data;
    *value = missing;
    if (!at) return MEGAMOE_OK;
    if (t->dtype != MEGAMOE_F32 || t->rank > 1)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s must be F32 [E], [1] or []", name);
    if (t->rank == 1 && t->extent[0] != 1) {
        if ((uint64_t)t->extent[0] <= e)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s has %lld elements, but there is an expert %u", name,
                           (long long)t->extent[0], e);
        at += e * mm_tensor_pitch(t, 0);
    }
    if (!memory->backend->read) {
        memcpy(value, at, sizeof *value);
        return MEGAMOE_OK;
    }
    return memory->backend->read(memory->state, value, at, sizeof *value);
}

static megamoe_status attach_bias(const stack *s, uint32_t e, mm_matrix *m) {
    const megamoe_tensor *bias = &s->projection->bias;
    char name[64];
    if (!bias->data) return MEGAMOE_OK;
    snprintf(name, sizeof name, "%s bias", s->name);
    MM_TRY(mm_tensor_check(bias, name, s->expert_count ? 2 : 1));
    if ((bias->dtype != MEGAMOE_BF16 && bias->dtype != MEGAMOE_F32) || bias->extent[bias->rank - 1] != s->rows)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s must be BF16 or F32 with %u elements per expert", name, s->rows);
    m->bias = (const uint8_t *)bias->data + (s->expert_count ? e * mm_tensor_pitch(bias, 0) : 0);
    m->bias_dtype = bias->dtype;
    m->bias_stride = dtype_bits(bias->dtype) / 8;
    return MEGAMOE_OK;
}

/* Cuts expert e out of a projection. input_global: its input scale, or NaN. */
static megamoe_status cut_matrix(const mm_memory *memory, const stack *s, uint32_t e, mm_matrix *m,
                                 float *input_global) {
    const megamoe_projection *p = s->projection;
    mm_matrix made = {.rows = s->rows, .columns = s->columns, .global = 1.0f};
    MM_TRY(decide_format(s, &made));
    MM_TRY(decide_scales(s, &made));
    made.codes = (const uint8_t *)p->codes.data + (s->expert_count ? e * mm_tensor_pitch(&p->codes, 0) : 0);
    if (made.format != MM_BF16)
        made.scales = (const uint8_t *)p->scales.data + (s->expert_count ? e * mm_tensor_pitch(&p->scales, 0) : 0);
    if (made.format == MM_NVFP4 && !p->global.data)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                       "%s has NVFP4 weights and no global scale; it is never assumed to be 1", s->name);
    MM_TRY(read_scalar(memory, &p->global, "a global scale", e, 1.0f, &made.global));
    if (!isfinite(made.global) || made.global < 0.0f)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s of expert %u has global scale %g", s->name, e,
                       (double)made.global);
    MM_TRY(read_scalar(memory, &p->input_global, "an input global scale", e, NAN, input_global));
    if (!(*input_global >= 1.17549435e-38f) || isinf(*input_global)) *input_global = NAN; /* zero, denormal, negative */
    MM_TRY(attach_bias(s, e, &made));
    *m = made;
    return MEGAMOE_OK;
}

megamoe_status mm_expert_from_tensors(const mm_memory *memory, const mm_projections *p, const megamoe_shape *shape,
                                      uint32_t expert_count, uint32_t e, mm_expert *expert) {
    stack gate = {p->gate, p->names[0], expert_count, shape->intermediate, shape->hidden};
    stack up = {p->up, p->names[1], expert_count, shape->intermediate, shape->hidden};
    stack down = {p->down, p->names[2], expert_count, shape->hidden, shape->intermediate};
    float gate_global, up_global;
    mm_expert made = {0};
    MM_TRY(cut_matrix(memory, &up, e, &made.up, &up_global));
    MM_TRY(cut_matrix(memory, &down, e, &made.down, &made.intermediate_global));
    gate_global = up_global;
    if (!shape->not_gated) MM_TRY(cut_matrix(memory, &gate, e, &made.gate, &gate_global));
    /* fmaxf would hide a missing one of the two */
    made.input_global = isnan(gate_global) || isnan(up_global) ? NAN : fmaxf(gate_global, up_global);
    *expert = made;
    return MEGAMOE_OK;
}

/* ---- the router ---- */

static megamoe_status read_array(const mm_memory *memory, const megamoe_tensor *t, size_t bytes, void **copy) {
    *copy = malloc(bytes ? bytes : 1);
    if (!*copy) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for %zu bytes of router tables", bytes);
    if (memory->backend->read) return memory->backend->read(memory->state, *copy, t->data, bytes);
    memcpy(*copy, t->data, bytes);
    return MEGAMOE_OK;
}

static megamoe_status read_hash_table(const mm_memory *memory, const megamoe_tensor *t, const megamoe_shape *shape,
                                      int32_t **table) {
    size_t count = (size_t)t->extent[0] * shape->experts_per_token;
    void *raw;
    MM_TRY(read_array(memory, t, count * (size_t)(dtype_bits(t->dtype) / 8), &raw));
    *table = malloc((count ? count : 1) * sizeof **table);
    for (size_t i = 0; i < count && *table; i++) {
        int64_t id = t->dtype == MEGAMOE_I64 ? ((const int64_t *)raw)[i] : ((const int32_t *)raw)[i];
        if (id < 0 || id >= shape->expert_count) {
            free(raw);
            return mm_fail(MEGAMOE_INVALID_ARGUMENT, "the hash table sends token %zu to expert %lld of %u",
                           i / shape->experts_per_token, (long long)id, shape->expert_count);
        }
        (*table)[i] = (int32_t)id;
    }
    free(raw);
    return *table ? MEGAMOE_OK : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the hash table");
}

megamoe_status mm_router_from_tensors(const mm_memory *memory, const megamoe_layer_desc *desc, mm_router *router,
                                      float **bias, int32_t **token_experts) {
    const megamoe_tensor *weight = &desc->router_weight, *b = &desc->router_bias, *t = &desc->token_experts;
    const megamoe_shape *shape = &desc->shape;
    if (!weight->data) return MEGAMOE_OK;
    MM_TRY(mm_tensor_check(weight, "the router weight", 2));
    MM_TRY(expect_extents(weight, "the router weight", 0, shape->expert_count, shape->hidden));
    if ((weight->dtype != MEGAMOE_BF16 && weight->dtype != MEGAMOE_F32) ||
        mm_tensor_pitch(weight, 0) != shape->hidden * dtype_bits(weight->dtype) / 8)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "the router weight must be contiguous BF16 or F32");
    router->weight = weight->data;
    router->weight_dtype = weight->dtype;
    if (b->data) {
        MM_TRY(mm_tensor_check(b, "the router bias", 1));
        if (b->dtype != MEGAMOE_F32 || b->extent[0] != shape->expert_count)
            return mm_fail(MEGAMOE_INVALID_ARGUMENT,
                           "the router bias must be F32 [%u]; rounded to BF16 it chooses other experts",
                           shape->expert_count);
        MM_TRY(read_array(memory, b, shape->expert_count * sizeof(float), (void **)bias));
        router->bias = *bias;
    }
    if (!shape->hash_routed) return MEGAMOE_OK;
    MM_TRY(mm_tensor_check(t, "the hash table", 2));
    if ((t->dtype != MEGAMOE_I32 && t->dtype != MEGAMOE_I64) || t->extent[1] != shape->experts_per_token ||
        t->extent[0] > INT32_MAX)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "the hash table must be I32 or I64 [vocabulary, %u]",
                       shape->experts_per_token);
    MM_TRY(read_hash_table(memory, t, shape, token_experts));
    router->token_experts = *token_experts;
    router->vocabulary = (uint32_t)t->extent[0];
    return MEGAMOE_OK;
}

megamoe_status mm_matrix_from_projection(const mm_memory *memory, const megamoe_projection *projection,
                                         const char *name, uint32_t expert_count, uint32_t e, mm_matrix *matrix) {
    const megamoe_tensor *codes = &projection->codes;
    bool packed = codes->dtype == MEGAMOE_U8 || codes->dtype == MEGAMOE_I8;
    float ignored;
    if (codes->rank != 3)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%s must be [groups, N, K] and has %u dimensions", name, codes->rank);
    stack s = {projection, name, expert_count, (uint32_t)codes->extent[1],
               (uint32_t)codes->extent[2] * (packed ? 2u : 1u)};
    return cut_matrix(memory, &s, e, matrix, &ignored);
}
