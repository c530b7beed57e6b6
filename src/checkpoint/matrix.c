/* Formats are told apart by what is there: element types, and which scales stand beside the codes. */
#include "checkpoint/matrix.h"

#include "error.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

megamoe_status mm_reading_refuse(mm_reading *reading, megamoe_status status, const char *kind, const mm_tensor *tensor,
                                 const char *format, ...) {
    char what[768], expert[32] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    reading->kind = kind;
    reading->refused = tensor ? tensor->name : NULL;
    if (reading->expert >= 0) snprintf(expert, sizeof expert, ", expert %d", reading->expert);
    if (!tensor) return mm_fail(status, "layer %u%s: %s", reading->layer, expert, what);
    return mm_fail(status, "%s: layer %u%s: tensor %s %s", reading->tensors->shards[tensor->shard].path, reading->layer,
                   expert, tensor->name, what);
}

void mm_reading_use(mm_reading *reading, const mm_tensor *tensor) {
    if (tensor && reading->shard_used) reading->shard_used[tensor->shard] = true;
}

void *mm_reading_own(mm_reading *reading, size_t bytes) {
    void **grown = realloc(reading->owned, (reading->owned_count + 1) * sizeof *grown);
    void *memory = grown ? malloc(bytes ? bytes : 1) : NULL;
    if (grown) reading->owned = grown;
    if (memory) grown[reading->owned_count++] = memory;
    return memory;
}

/* Elements as they lie in the file: row n begins at data + n * pitch and has row_bytes bytes. */
typedef struct view {
    const mm_tensor *tensor;
    const uint8_t *data;
    uint64_t rows, columns, row_bytes, pitch;
} view;

static megamoe_status shape_refuse(mm_reading *reading, const mm_tensor *tensor, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static megamoe_status shape_refuse(mm_reading *reading, const mm_tensor *tensor, const char *format, ...) {
    char shape[128], expected[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(expected, sizeof expected, format, arguments);
    va_end(arguments);
    mm_tensor_shape_text(tensor, shape, sizeof shape);
    return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", tensor, "is %s %s, expected %s",
                             mm_tensor_dtype_name(tensor), shape, expected);
}

/*
 * The slice of a tensor [rows, columns] or a stack [experts, rows, columns]. The blocks of gpt-oss have one
 * dimension more, [experts, rows, groups, bytes], whose last two are one row.
 */
static megamoe_status view_make(mm_reading *reading, const mm_tensor *tensor, const mm_slice *slice, view *out) {
    uint32_t first = slice->stacked ? 1 : 0;
    bool split = slice->stacked && tensor->rank == 4;
    if ((tensor->rank != first + 2 && !split) || tensor->bytes == 0)
        return shape_refuse(reading, tensor, "%s", slice->stacked ? "[experts, rows, columns]" : "[rows, columns]");
    if (slice->stacked && tensor->extent[0] != slice->experts)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "expert-count", tensor,
                                 "stacks %" PRId64 " experts, expected %u", tensor->extent[0], slice->experts);
    mm_reading_use(reading, tensor);
    out->tensor = tensor;
    out->rows = (uint64_t)tensor->extent[first];
    out->columns = (uint64_t)tensor->extent[first + 1] * (split ? (uint64_t)tensor->extent[3] : 1);
    out->row_bytes = out->pitch = tensor->bytes / out->rows / (slice->stacked ? slice->experts : 1);
    out->data = tensor->data + (slice->stacked ? slice->expert * out->rows * out->pitch : 0);
    if (slice->half == MM_WHOLE) return MEGAMOE_OK;
    if (out->rows % 2) return shape_refuse(reading, tensor, "an even number of rows, gate and up");
    out->rows /= 2;
    if (slice->half == MM_SECOND_HALF) out->data += slice->interleaved ? out->pitch : out->rows * out->pitch;
    if (slice->interleaved) out->pitch *= 2;
    return MEGAMOE_OK;
}

/* Bytes of one element, as a transposition moves them: two FP4 values that lie along K count as one. */
static size_t element_bytes(const mm_tensor *tensor) {
    switch (mm_tensor_dtype(tensor)) {
    case MEGAMOE_F32: return 4;
    case MEGAMOE_BF16: return 2;
    default: return 1;
    }
}

/* to[c][r] = from[r][c] in tiles, so that neither side is walked a page at a time. */
static void transpose(const uint8_t *from, size_t from_pitch, size_t rows, size_t columns, size_t step, size_t size,
                      uint8_t *to) {
    enum { TILE = 64 };
    for (size_t top = 0; top < rows; top += TILE)
        for (size_t left = 0; left < columns; left += TILE)
            for (size_t c = left; c < columns && c < left + TILE; c++)
                for (size_t r = top; r < rows && r < top + TILE; r++)
                    memcpy(to + (c * rows + r) * size, from + r * from_pitch + c * step * size, size);
}

/*
 * The slice of a stack [experts, in, out]. Rows of the weight are its columns, which no pitch can describe:
 * they are copied, when they are wanted at all. This is the one layout whose weights are not used in place.
 */
static megamoe_status view_transposed(mm_reading *reading, const mm_tensor *tensor, const mm_slice *slice, bool wanted,
                                      view *out) {
    size_t size = element_bytes(tensor), in = (size_t)tensor->extent[1], width = (size_t)tensor->extent[2];
    bool half = slice->half != MM_WHOLE;
    const uint8_t *first = tensor->data + slice->expert * in * width * size;
    uint8_t *copy;
    if (tensor->rank != 3 || tensor->bytes == 0 || tensor->extent[0] != slice->experts)
        return shape_refuse(reading, tensor, "[%u, in, out] like the transposed stack beside it", slice->experts);
    if (half && width % 2) return shape_refuse(reading, tensor, "an even number of columns, gate and up");
    mm_reading_use(reading, tensor);
    *out = (view){tensor, first, half ? width / 2 : width, in, in * size, in * size};
    if (slice->half == MM_SECOND_HALF) first += (slice->interleaved ? 1 : width / 2) * size;
    if (!wanted) return MEGAMOE_OK;
    copy = mm_reading_own(reading, out->rows * out->row_bytes);
    if (!copy)
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for a copy of expert %u of the transposed tensor %s",
                       slice->expert, tensor->name);
    transpose(first, width * size, in, out->rows, half && slice->interleaved ? 2 : 1, size, copy);
    reading->copied_bytes += out->rows * out->row_bytes;
    out->data = copy;
    return MEGAMOE_OK;
}

/* A contiguous copy in aligned memory. NULL: no memory. */
static uint8_t *view_copy(mm_reading *reading, const view *from) {
    uint8_t *copy = mm_reading_own(reading, from->rows * from->row_bytes);
    for (uint64_t row = 0; copy && row < from->rows; row++)
        memcpy(copy + row * from->row_bytes, from->data + row * from->pitch, from->row_bytes);
    return copy;
}

/* Elements of more than one byte are promised to be aligned; a file with an odd header does not keep that. */
static megamoe_status view_align(mm_reading *reading, view *v, size_t alignment) {
    if (((uintptr_t)v->data % alignment == 0 && v->pitch % alignment == 0) || reading->copies < MM_COPY_ALL)
        return MEGAMOE_OK;
    v->data = view_copy(reading, v);
    v->pitch = v->row_bytes;
    return v->data ? MEGAMOE_OK : mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to align tensor %s", v->tensor->name);
}

/* The one part of several spellings that is there; *found is NULL if none is. */
static megamoe_status part_choose(mm_reading *reading, const mm_parts *parts, const mm_part *spellings, uint32_t count,
                                  const mm_tensor **found) {
    *found = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const mm_tensor *tensor = parts->part[spellings[i]];
        if (!tensor) continue;
        if (*found)
            return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "two-spellings", tensor,
                                     "and tensor %s are two spellings of one thing", (*found)->name);
        *found = tensor;
    }
    return MEGAMOE_OK;
}

/* One F32 value of this expert: a tensor of one element, or of one per expert (and half) in a stack. */
static megamoe_status scalar_read(mm_reading *reading, const mm_tensor *tensor, const mm_slice *slice, float *value) {
    uint64_t count = tensor->bytes / sizeof *value, index = 0;
    if (mm_tensor_dtype(tensor) != MEGAMOE_F32) return shape_refuse(reading, tensor, "one F32 value");
    if (slice->stacked && count == slice->experts)
        index = slice->expert;
    else if (slice->stacked && slice->half != MM_WHOLE && count == 2ull * slice->experts)
        index = 2ull * slice->expert + (slice->half == MM_SECOND_HALF);
    else if (count != 1)
        return shape_refuse(reading, tensor, slice->stacked ? "one F32 value, or one per expert" : "one F32 value");
    mm_reading_use(reading, tensor);
    memcpy(value, tensor->data + index * sizeof *value, sizeof *value);
    return MEGAMOE_OK;
}

/* Usable as a factor: zero, denormals, infinities and NaN are what uncalibrated and uninitialized slots hold.
 */
static bool factor_usable(float value) {
    return isnormal(value) && value > 0.0f;
}

/*
 * A factor that ModelOpt stores and compressed-tensors stores the inverse of. *present says whether either is
 * there; if both are, they must agree.
 */
static megamoe_status factor_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice,
                                  mm_part direct_part, mm_part inverse_part, float *factor, const mm_tensor **present) {
    const mm_tensor *direct = parts->part[direct_part], *inverse = parts->part[inverse_part];
    float value = 0.0f, divisor = 0.0f;
    *present = direct ? direct : inverse;
    if (direct) MM_TRY(scalar_read(reading, direct, slice, &value));
    if (inverse) MM_TRY(scalar_read(reading, inverse, slice, &divisor));
    if (direct && inverse && !(fabsf(value * divisor - 1.0f) <= 1e-6f))
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "two-spellings", direct,
                                 "is %g, but tensor %s is %g and should be its inverse", (double)value, inverse->name,
                                 (double)divisor);
    *factor = direct ? value : 1.0f / divisor;
    if (!direct && !factor_usable(divisor)) *factor = NAN;
    return MEGAMOE_OK;
}

static megamoe_status global_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice,
                                  const mm_tensor *codes, float *global) {
    const mm_tensor *tensor;
    float raw;
    MM_TRY(factor_read(reading, parts, slice, MM_PART_GLOBAL, MM_PART_INVERSE_GLOBAL, global, &tensor));
    if (!tensor)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-global-scale", codes,
                                 "has no global scale beside it (weight_scale_2 or weight_global_scale)");
    if (factor_usable(*global)) return MEGAMOE_OK;
    MM_TRY(scalar_read(reading, tensor, slice, &raw));
    return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "bad-global-scale", tensor,
                             "is %g, expected a positive normal number", (double)raw);
}

float mm_input_scale_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice) {
    const mm_tensor *tensor;
    float scale = NAN;
    if (factor_read(reading, parts, slice, MM_PART_INPUT, MM_PART_INVERSE_INPUT, &scale, &tensor) != MEGAMOE_OK)
        return NAN;
    return tensor && factor_usable(scale) ? scale : NAN;
}

/* Scales [rows, columns / group] of FP4 codes, or the other way around like their codes. */
static megamoe_status fp4_scales_read(mm_reading *reading, const mm_tensor *tensor, const mm_slice *slice,
                                      const view *codes, uint32_t group, mm_matrix *matrix) {
    view scales = {0};
    const mm_tensor *stack = codes->tensor;
    if (slice->transposed)
        MM_TRY(view_transposed(reading, tensor, slice, reading->copies >= MM_COPY_SCALES, &scales));
    else
        MM_TRY(view_make(reading, tensor, slice, &scales));
    if (matrix->columns % group)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "shape", stack,
                                 "has K = %u, which is not a multiple of %u", matrix->columns, group);
    if (scales.rows != matrix->rows || scales.columns != matrix->columns / group)
        return shape_refuse(reading, tensor, "%s[%u, %u]%s beside the codes of %s",
                            slice->stacked ? "[experts] of " : "", matrix->rows * (slice->half == MM_WHOLE ? 1u : 2u),
                            matrix->columns / group, slice->transposed ? " (transposed)" : "", stack->name);
    matrix->scales = scales.data;
    matrix->scale_row_bytes = scales.pitch;
    return MEGAMOE_OK;
}

/* Scales of MXFP4 given as F32 are values, not bytes; powers of two become the bytes that the backends read.
 */
static megamoe_status mxfp4_values_convert(mm_reading *reading, const mm_tensor *tensor, mm_matrix *matrix) {
    uint32_t groups = matrix->columns / 32;
    uint8_t *bytes;
    if (reading->copies < MM_COPY_SCALES) return MEGAMOE_OK;
    bytes = mm_reading_own(reading, (size_t)matrix->rows * groups);
    if (!bytes) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory for the scales of tensor %s", tensor->name);
    for (uint32_t row = 0; row < matrix->rows; row++)
        for (uint32_t group = 0; group < groups; group++) {
            float value;
            int exponent;
            memcpy(&value, matrix->scales + row * matrix->scale_row_bytes + group * sizeof value, sizeof value);
            if (!(value > 0.0f) || isinf(value) || frexpf(value, &exponent) != 0.5f || exponent < -126)
                return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "bad-scale", tensor,
                                         "holds %g at [%u, %u], expected a power of two from 2^-127", (double)value,
                                         row, group);
            bytes[(size_t)row * groups + group] = (uint8_t)(exponent + 126);
        }
    matrix->scales = bytes;
    matrix->scale_row_bytes = groups;
    return MEGAMOE_OK;
}

static megamoe_status fp4_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice, const view *codes,
                               const mm_tensor *scale, mm_matrix *matrix) {
    const mm_tensor *global =
        parts->part[MM_PART_GLOBAL] ? parts->part[MM_PART_GLOBAL] : parts->part[MM_PART_INVERSE_GLOBAL];
    if (!scale)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-scale", codes->tensor,
                                 "holds FP4 codes, but there is no scale tensor beside it");
    matrix->scale_dtype = mm_tensor_dtype(scale);
    if (matrix->scale_dtype == MEGAMOE_E4M3) {
        matrix->format = MM_NVFP4;
        MM_TRY(fp4_scales_read(reading, scale, slice, codes, 16, matrix));
        return global_read(reading, parts, slice, codes->tensor, &matrix->global);
    }
    if (global)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "format", scale,
                                 "is %s, but beside the global scale %s NVFP4 scales are F8_E4M3",
                                 mm_tensor_dtype_name(scale), global->name);
    if (matrix->scale_dtype != MEGAMOE_E8M0 && matrix->scale_dtype != MEGAMOE_U8 && matrix->scale_dtype != MEGAMOE_F32)
        return shape_refuse(reading, scale, "scales that are F8_E4M3, F8_E8M0, U8 or F32");
    matrix->format = MM_MXFP4;
    MM_TRY(fp4_scales_read(reading, scale, slice, codes, 32, matrix));
    if (matrix->scale_dtype == MEGAMOE_F32) MM_TRY(mxfp4_values_convert(reading, scale, matrix));
    matrix->scale_dtype = MEGAMOE_E8M0;
    return MEGAMOE_OK;
}

/*
 * Which way a stack lies. FP4 scales, which have a side per row, say it; without them the sizes do: H from
 * elsewhere, else the model type. Values that are packed along their last side cannot be turned.
 */
static megamoe_status orientation_find(mm_reading *reading, const mm_slice *slice, const mm_tensor *tensor,
                                       const mm_tensor *scale, bool *transposed) {
    int64_t out = tensor->extent[1], in = tensor->extent[2], hidden = slice->hidden;
    bool as_rows = !hidden || (slice->is_down ? out : in) == hidden;
    bool as_transposed = !hidden || (slice->is_down ? in : out) == hidden;
    megamoe_dtype dtype = mm_tensor_dtype(tensor);
    char shape[128];
    *transposed = false;
    if (!slice->stacked || tensor->rank != 3 || dtype == MEGAMOE_E2M1X2) return MEGAMOE_OK;
    if (dtype == MEGAMOE_U8 || dtype == MEGAMOE_I8) {
        int64_t group = scale && mm_tensor_dtype(scale) == MEGAMOE_E4M3 ? 16 : 32;
        *transposed = scale && scale->rank == 3 && scale->extent[2] == in && scale->extent[1] * group == out * 2;
        return MEGAMOE_OK;
    }
    *transposed = as_transposed;
    if (as_rows != as_transposed) return MEGAMOE_OK;
    *transposed = as_rows && reading->config->stacks == MM_ORIENTATION_TRANSPOSED;
    if (!as_rows || reading->config->stacks) return MEGAMOE_OK;
    mm_tensor_shape_text(tensor, shape, sizeof shape);
    return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "ambiguous-stack", tensor,
                             "is %s, which is ambiguous: [experts, out, in] and [experts, in, out] both fit, and "
                             "model_type '%s' does not say which it is",
                             shape, reading->config->model_type);
}

/* The size of one block along a side of `extent` elements that has `blocks` scales. 0: none fits. */
static uint32_t block_size(uint64_t extent, uint64_t blocks, uint32_t declared) {
    const uint32_t sizes[] = {declared, 128, 32, 64, 256, 16};
    if (blocks == extent) return 1;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i] && (extent + sizes[i] - 1) / sizes[i] == blocks) return sizes[i];
    return blocks == 1 ? (uint32_t)extent : 0;
}

static uint32_t declared_block(const mm_config *config, size_t side) {
    const json_t *sizes = json_object_get(json_object_get(config->root, "quantization_config"), "weight_block_size");
    json_int_t size = json_integer_value(json_array_get(sizes, side));
    return size > 0 && size <= 65536 ? (uint32_t)size : 0;
}

/* FP8 scales: one value for the matrix (or per expert of a stack), or a grid of blocks whose last ones may be
 * partial. */
static megamoe_status fp8_read(mm_reading *reading, const mm_slice *slice, const view *codes, const mm_tensor *scale,
                               mm_matrix *matrix) {
    view grid = {0};
    uint64_t count, offset_rows = 0;
    uint32_t experts = slice->stacked ? slice->experts : 1;
    if (!scale)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-scale", codes->tensor,
                                 "holds FP8 values, but there is no scale tensor beside it");
    matrix->format = MM_FP8;
    matrix->scale_dtype = mm_tensor_dtype(scale) == MEGAMOE_U8 ? MEGAMOE_E8M0 : mm_tensor_dtype(scale);
    if (matrix->scale_dtype != MEGAMOE_F32 && matrix->scale_dtype != MEGAMOE_E8M0)
        return shape_refuse(reading, scale, "scales that are F32 or F8_E8M0");
    count = scale->bytes / (matrix->scale_dtype == MEGAMOE_F32 ? 4 : 1);
    if (count == 1 || (slice->stacked && count == experts)) {
        grid = (view){scale, scale->data, 1, 1, scale->bytes / count, scale->bytes / count};
        if (count > 1) grid.data += slice->expert * grid.pitch;
        mm_reading_use(reading, scale);
    } else if (slice->transposed) {
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "transposed-stack", scale,
                                 "scales blocks of %s, which is transposed; a transposed FP8 stack can have "
                                 "one scale per expert",
                                 codes->tensor->name);
    } else {
        mm_slice whole = *slice;
        whole.half = MM_WHOLE;
        MM_TRY(view_make(reading, scale, &whole, &grid));
    }
    matrix->block_columns = block_size(matrix->columns, grid.columns, declared_block(reading->config, 1));
    if (slice->half != MM_WHOLE && grid.rows > 1) {
        matrix->block_rows = block_size(2ull * matrix->rows, grid.rows, declared_block(reading->config, 0));
        if (slice->interleaved || (matrix->block_rows && matrix->rows % matrix->block_rows))
            return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "shape", scale,
                                     "has blocks of %u rows that gate and up rows share", matrix->block_rows);
        offset_rows = slice->half == MM_SECOND_HALF ? grid.rows / 2 : 0;
        grid.rows /= 2;
    } else {
        matrix->block_rows = block_size(matrix->rows, grid.rows, declared_block(reading->config, 0));
    }
    if (!matrix->block_rows || !matrix->block_columns)
        return shape_refuse(reading, scale, "a grid of blocks (such as 128x128) over [%u, %u]", matrix->rows,
                            matrix->columns);
    grid.data += offset_rows * grid.pitch;
    if (matrix->scale_dtype == MEGAMOE_F32) MM_TRY(view_align(reading, &grid, sizeof(float)));
    matrix->scales = grid.data;
    matrix->scale_row_bytes = grid.pitch;
    return MEGAMOE_OK;
}

/* [rows], or [experts, rows] of a stack, with gate and up taking turns or in halves. */
static megamoe_status bias_read(mm_reading *reading, const mm_tensor *tensor, const mm_slice *slice,
                                mm_matrix *matrix) {
    uint32_t rank = slice->stacked ? 2 : 1, halves = slice->half == MM_WHOLE ? 1 : 2;
    view bias = {.tensor = tensor, .rows = matrix->rows, .columns = 1};
    if (tensor->rank != rank || tensor->extent[rank - 1] != (int64_t)matrix->rows * halves ||
        (slice->stacked && tensor->extent[0] != slice->experts))
        return shape_refuse(reading, tensor, "%s[%u]", slice->stacked ? "[experts] of " : "", matrix->rows * halves);
    matrix->bias_dtype = mm_tensor_dtype(tensor);
    if (matrix->bias_dtype != MEGAMOE_BF16 && matrix->bias_dtype != MEGAMOE_F32)
        return shape_refuse(reading, tensor, "a bias that is BF16 or F32");
    mm_reading_use(reading, tensor);
    bias.row_bytes = bias.pitch = matrix->bias_dtype == MEGAMOE_F32 ? 4 : 2;
    bias.data = tensor->data + (slice->stacked ? (uint64_t)slice->expert * matrix->rows * halves * bias.row_bytes : 0);
    if (slice->half == MM_SECOND_HALF) bias.data += slice->interleaved ? bias.pitch : matrix->rows * bias.pitch;
    if (slice->half != MM_WHOLE && slice->interleaved) bias.pitch *= 2;
    MM_TRY(view_align(reading, &bias, bias.row_bytes));
    matrix->bias = bias.data;
    matrix->bias_stride = bias.pitch;
    return MEGAMOE_OK;
}

static megamoe_status codes_read(mm_reading *reading, const mm_parts *parts, const mm_slice *given,
                                 const mm_tensor *tensor, mm_matrix *matrix) {
    static const mm_part scale_parts[] = {MM_PART_SCALE, MM_PART_NATIVE_SCALE, MM_PART_BLOCK_SCALE,
                                          MM_PART_BLOCKS_SCALE};
    const mm_tensor *scale;
    mm_slice found = *given, *slice = &found;
    megamoe_dtype dtype = mm_tensor_dtype(tensor);
    view codes = {0};
    bool packed = dtype == MEGAMOE_U8 || dtype == MEGAMOE_I8;
    MM_TRY(part_choose(reading, parts, scale_parts, 4, &scale));
    MM_TRY(orientation_find(reading, slice, tensor, scale, &slice->transposed));
    if (slice->transposed)
        MM_TRY(view_transposed(reading, tensor, slice, reading->copies == MM_COPY_ALL, &codes));
    else
        MM_TRY(view_make(reading, tensor, slice, &codes));
    if (packed) codes.columns *= 2;
    if (codes.rows > INT32_MAX || codes.columns > INT32_MAX) return shape_refuse(reading, tensor, "extents below 2^31");
    matrix->rows = (uint32_t)codes.rows;
    matrix->columns = (uint32_t)codes.columns;
    if (packed || dtype == MEGAMOE_E2M1X2) {
        MM_TRY(fp4_read(reading, parts, slice, &codes, scale, matrix));
    } else if (dtype == MEGAMOE_E4M3) {
        MM_TRY(fp8_read(reading, slice, &codes, scale, matrix));
    } else if (dtype == MEGAMOE_BF16) {
        matrix->format = MM_BF16;
        if (scale)
            return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "format", scale, "scales tensor %s, which is BF16",
                                     tensor->name);
        MM_TRY(view_align(reading, &codes, sizeof(uint16_t)));
    } else {
        return mm_reading_refuse(reading, MEGAMOE_UNSUPPORTED_MODEL, "format", tensor,
                                 "is %s; expert weights are FP4 codes (U8 or I8), F8_E4M3 or BF16",
                                 mm_tensor_dtype_name(tensor));
    }
    matrix->codes = codes.data;
    matrix->row_bytes = codes.pitch;
    if (slice->transposed) reading->transposed = tensor;
    return MEGAMOE_OK;
}

megamoe_status mm_matrix_read(mm_reading *reading, const mm_parts *parts, const mm_slice *slice, mm_matrix *matrix) {
    static const mm_part code_parts[] = {MM_PART_WEIGHT, MM_PART_PACKED, MM_PART_BLOCKS};
    const mm_tensor *codes;
    *matrix = (mm_matrix){.global = 1.0f};
    if (parts->rival)
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "two-spellings", parts->rival,
                                 "is a second tensor for the same part of one weight");
    MM_TRY(part_choose(reading, parts, code_parts, 3, &codes));
    if (!codes) {
        const mm_tensor *other = NULL;
        for (uint32_t i = 0; i < MM_PART_COUNT && !other; i++) other = parts->part[i];
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, "missing-weight", other, "has no weight beside it");
    }
    MM_TRY(codes_read(reading, parts, slice, codes, matrix));
    if (parts->part[MM_PART_BIAS]) MM_TRY(bias_read(reading, parts->part[MM_PART_BIAS], slice, matrix));
    return MEGAMOE_OK;
}
