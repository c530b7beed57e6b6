/*
 * libFuzzer harness: any bytes as a safetensors file. The first byte says how the rest is used: 0, as a whole
 * file; otherwise as a header, with its length put in front and that many bytes of data behind, so that the
 * fuzzer need not guess eight bytes to get past the first check. Whatever opens is read to its ends: every
 * tensor, and every matrix of every layer, whose last bytes must lie in the mapping.
 */
#include "checkpoint/checkpoint.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static char path[96];
static volatile uint8_t sink;

/* A model whose config lets the layers be read, in a folder of its own. */
static void folder_make(void) {
    static const char config[] =
        "{\"model_type\":\"gpt_oss\",\"num_experts_per_tok\":1,\"num_hidden_layers\":2,\"n_group\":1}";
    char folder[] = "/dev/shm/megamoe-fuzz-XXXXXX", name[96]; /* in memory: a run writes a file */
    FILE *file;
    if (!mkdtemp(folder)) abort();
    snprintf(name, sizeof name, "%s/config.json", folder);
    file = fopen(name, "w");
    if (!file || fwrite(config, 1, sizeof config - 1, file) != sizeof config - 1) abort();
    fclose(file);
    snprintf(path, sizeof path, "%s/x.safetensors", folder);
}

static void file_make(const uint8_t *bytes, size_t size) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    uint8_t length[8] = {0};
    ssize_t put;
    if (file < 0) abort();
    if (bytes[0] != 0) {
        for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)(size - 1) >> 8 * i);
        if (write(file, length, 8) != 8) abort();
    }
    put = write(file, bytes + 1, size - 1);
    if (put < 0 || (bytes[0] != 0 && ftruncate(file, (off_t)(8 + size - 1 + bytes[0])) != 0)) abort();
    close(file);
}

static void touch(const uint8_t *at, uint64_t bytes) {
    if (bytes) sink = (uint8_t)(at[0] ^ at[bytes - 1]);
}

static void matrix_touch(const mm_matrix *m) {
    uint64_t row_bytes = m->format == MM_BF16 ? 2ull * m->columns : m->format == MM_FP8 ? m->columns : m->columns / 2;
    if (!m->codes) return;
    touch(m->codes, (m->rows - 1) * m->row_bytes + row_bytes);
    if (m->bias) touch(m->bias, (m->rows - 1) * m->bias_stride + (m->bias_dtype == MEGAMOE_F32 ? 4 : 2));
}

static void layer_touch(const megamoe_checkpoint *checkpoint, uint32_t layer) {
    mm_layer_source source;
    if (mm_checkpoint_read_layer(checkpoint, layer, 0, 0, NULL, &source) != MEGAMOE_OK) return;
    for (uint32_t i = 0; i < source.expert_count; i++) {
        matrix_touch(&source.experts[i].gate);
        matrix_touch(&source.experts[i].up);
        matrix_touch(&source.experts[i].down);
    }
    mm_layer_source_free(&source);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    megamoe_checkpoint_options options = {.struct_size = sizeof options};
    megamoe_checkpoint *checkpoint;
    megamoe_tensor tensor;
    const char *name;
    if (size == 0) return -1;
    if (!path[0]) folder_make();
    options.repair_nan_scales = size % 2;
    file_make(bytes, size);
    if (megamoe_checkpoint_open(path, &options, &checkpoint) != MEGAMOE_OK) return 0;
    for (uint64_t i = 0; (name = megamoe_checkpoint_tensor_name(checkpoint, i)); i++)
        if (megamoe_checkpoint_tensor(checkpoint, name, &tensor) == MEGAMOE_OK && tensor.rank == 1 &&
            tensor.dtype == MEGAMOE_U8)
            touch(tensor.data, (uint64_t)tensor.extent[0]);
    for (uint32_t i = 0; i < megamoe_checkpoint_layer_count(checkpoint); i++) {
        megamoe_layer_info info = {.struct_size = sizeof info};
        if (megamoe_checkpoint_layer(checkpoint, i, &info) == MEGAMOE_OK) layer_touch(checkpoint, info.layer);
    }
    megamoe_checkpoint_close(checkpoint);
    return 0;
}
