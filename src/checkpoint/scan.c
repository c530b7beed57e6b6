/*
 * The scan reads a ninth of a layer's bytes when it is loaded, so the loop over good bytes has no branches;
 * only a chunk that holds a bad one is looked at byte by byte.
 */
#include "checkpoint/scan.h"

#include "error.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define CHUNK 4096

/* E4M3: 0x7F is NaN, 0x81 and above is negative or NaN; 0x80 is minus zero. Less 0x7F, the good bytes are 1
 * and 129..255. */
static bool e4m3_chunk_good(const uint8_t *bytes, size_t count) {
    unsigned bad = 0;
    for (size_t i = 0; i < count; i++) {
        uint8_t shifted = (uint8_t)(bytes[i] - 0x7Fu);
        bad |= (unsigned)(shifted <= 0x80u) & (unsigned)(shifted != 1u);
    }
    return bad == 0;
}

static bool e8m0_chunk_good(const uint8_t *bytes, size_t count) {
    unsigned bad = 0;
    for (size_t i = 0; i < count; i++) bad |= (unsigned)(bytes[i] == 0xFFu);
    return bad == 0;
}

static bool f32_chunk_good(const uint8_t *bytes, size_t count) {
    bool good = true;
    for (size_t i = 0; i < count; i += sizeof(float)) {
        float value;
        memcpy(&value, bytes + i, sizeof value);
        good &= isfinite(value) && value >= 0.0f;
    }
    return good;
}

static bool chunk_good(megamoe_dtype dtype, const uint8_t *bytes, size_t count) {
    if (dtype == MEGAMOE_E4M3) return e4m3_chunk_good(bytes, count);
    return dtype == MEGAMOE_F32 ? f32_chunk_good(bytes, count) : e8m0_chunk_good(bytes, count);
}

/* One scale: counts it if it is bad, or repairs it. */
static void scale_judge(megamoe_dtype dtype, const uint8_t *at, uint32_t row, uint32_t column, bool repair,
                        mm_scan_finding *finding) {
    bool nan, negative;
    if (dtype == MEGAMOE_E4M3 && *at == 0x7Fu && repair) {
        *(uint8_t *)(uintptr_t)at = 0x7Eu;
        finding->repaired_count++;
        return;
    }
    if (dtype == MEGAMOE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        nan = !isfinite(value);
        negative = !nan && value < 0.0f;
    } else {
        nan = dtype == MEGAMOE_E4M3 ? (*at & 0x7Fu) == 0x7Fu : *at == 0xFFu;
        negative = !nan && dtype == MEGAMOE_E4M3 && *at > 0x80u;
    }
    if ((nan || negative) && !finding->first) {
        finding->first = at;
        finding->row = row;
        finding->column = column;
    }
    finding->nan_count += nan;
    finding->negative_count += negative;
}

void mm_matrix_scan(const mm_matrix *matrix, bool repair, mm_scan_finding *finding) {
    size_t width = matrix->scale_dtype == MEGAMOE_F32 ? 4 : 1, row_bytes;
    uint32_t rows = matrix->rows, columns;
    *finding = (mm_scan_finding){0};
    if (!matrix->scales) return;
    switch (matrix->format) {
    case MM_NVFP4: columns = matrix->columns / 16; break;
    case MM_MXFP4: columns = matrix->columns / 32; break;
    default:
        rows = (matrix->rows + matrix->block_rows - 1) / matrix->block_rows;
        columns = (matrix->columns + matrix->block_columns - 1) / matrix->block_columns;
    }
    row_bytes = columns * width;
    for (uint32_t row = 0; row < rows; row++) {
        const uint8_t *scales = matrix->scales + row * matrix->scale_row_bytes;
        for (size_t begin = 0; begin < row_bytes; begin += CHUNK) {
            size_t count = row_bytes - begin < CHUNK ? row_bytes - begin : CHUNK;
            if (chunk_good(matrix->scale_dtype, scales + begin, count)) continue;
            for (size_t i = begin; i < begin + count; i += width)
                scale_judge(matrix->scale_dtype, scales + i, row, (uint32_t)(i / width), repair, finding);
        }
    }
}

void mm_tensor_index_text(const mm_tensor *tensor, const uint8_t *byte, char *text, size_t size) {
    uint64_t count = 1, index, place[4] = {0};
    uint32_t rank = tensor->rank < 4 ? tensor->rank : 4;
    size_t used = (size_t)snprintf(text, size, "[");
    for (uint32_t i = 0; i < rank; i++) count *= (uint64_t)tensor->extent[i];
    index = (uint64_t)(byte - tensor->data) / (count ? tensor->bytes / count : 1);
    for (uint32_t i = rank; i-- > 0; index /= (uint64_t)tensor->extent[i])
        place[i] = index % (uint64_t)tensor->extent[i];
    for (uint32_t i = 0; i < rank && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRIu64, i ? ", " : "", place[i]);
    if (used < size) snprintf(text + used, size - used, "]");
}

/* "has 2 NaN scales, the first (byte 0x7F) at [3, 2]" */
static void finding_text(const mm_matrix *matrix, const mm_tensor *tensor, const mm_scan_finding *finding, char *text,
                         size_t size) {
    char where[96], value[32], counts[96];
    float f32;
    if (finding->first >= tensor->data && finding->first < tensor->data + tensor->bytes)
        mm_tensor_index_text(tensor, finding->first, where, sizeof where);
    else /* an aligned copy */
        snprintf(where, sizeof where, "[%u, %u]", finding->row, finding->column);
    memcpy(&f32, finding->first, matrix->scale_dtype == MEGAMOE_F32 ? sizeof f32 : 0);
    if (matrix->scale_dtype == MEGAMOE_F32)
        snprintf(value, sizeof value, "%g", (double)f32);
    else
        snprintf(value, sizeof value, "byte 0x%02X", *finding->first);
    if (finding->nan_count && finding->negative_count)
        snprintf(counts, sizeof counts, "%" PRIu64 " NaN and %" PRIu64 " negative scales", finding->nan_count,
                 finding->negative_count);
    else
        snprintf(counts, sizeof counts, "%" PRIu64 " %s", finding->nan_count + finding->negative_count,
                 finding->nan_count ? "NaN scales" : "negative scales");
    snprintf(text, size, "holds %s, the first (%s) at %s", counts, value, where);
}

static megamoe_status projection_scan(mm_reading *reading, const mm_matrix *matrix, const mm_tensor *tensor,
                                      bool repair, bool report, mm_anomalies *anomalies) {
    mm_scan_finding finding;
    mm_anomaly_place place = {.tensor = tensor->name, .layer = (int32_t)reading->layer, .expert = reading->expert};
    char text[256];
    mm_matrix_scan(matrix, repair, &finding);
    if (finding.repaired_count) {
        place.kind = "repaired-scale";
        place.remedy = "Ask the publisher for a file without NaN scales; the repaired values are a guess.";
        MM_TRY(mm_anomalies_add(anomalies, &place, "%" PRIu64 " NaN scale bytes (0x7F) of %s are read as 448 (0x7E)",
                                finding.repaired_count, tensor->name));
    }
    if (!finding.first) return MEGAMOE_OK;
    finding_text(matrix, tensor, &finding, text, sizeof text);
    place.is_error = true;
    place.kind = finding.nan_count ? "nan-scale" : "negative-scale";
    if (!report) /* 0xFF is left alone by the repair, and so is E8M0 */
        return mm_reading_refuse(reading, MEGAMOE_CORRUPT_FILE, place.kind, tensor, "%s%s", text,
                                 matrix->scale_dtype == MEGAMOE_E4M3 && *finding.first == 0x7Fu
                                     ? "; --repair-nan-scales reads such bytes as 448"
                                     : "");
    place.remedy = finding.nan_count ? "Bytes 0x7F can be read as 448 with --repair-nan-scales; otherwise download the "
                                       "shard again or ask its publisher."
                                     : "Download the shard again or ask its publisher.";
    return mm_anomalies_add(anomalies, &place, "%s: tensor %s %s", reading->tensors->shards[tensor->shard].path,
                            tensor->name, text);
}

megamoe_status mm_expert_scan(mm_reading *reading, const mm_layer_tensors *layer, mm_place place, uint32_t expert,
                              const mm_expert *weights, bool repair, bool report, mm_anomalies *anomalies) {
    static const mm_projection projections[] = {MM_GATE, MM_UP, MM_DOWN};
    const mm_matrix *const matrices[] = {&weights->gate, &weights->up, &weights->down};
    megamoe_status status = MEGAMOE_OK;
    reading->expert = place == MM_PLACE_EXPERT ? (int32_t)expert : -1;
    for (size_t i = 0; i < 3 && status == MEGAMOE_OK; i++) {
        const mm_tensor *tensor = mm_scale_tensor(layer, place, expert, projections[i]);
        if (tensor && matrices[i]->codes)
            status = projection_scan(reading, matrices[i], tensor, repair, report, anomalies);
    }
    reading->expert = -1;
    return status;
}
