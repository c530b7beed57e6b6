/* layer CKPT: opens a checkpoint, runs its first MoE layer on one token and prints the norm of the output. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "megamoe/megamoe.h"

static void check(megamoe_status status) {
    if (status == MEGAMOE_OK) return;
    fprintf(stderr, "%s: %s\n", megamoe_status_name(status), megamoe_error_message());
    exit(2);
}

static double norm_of_bf16(const uint16_t *values, uint32_t count) {
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)values[i] << 16; /* BF16 is the upper half of a float */
        float value;
        memcpy(&value, &bits, sizeof value);
        sum += (double)value * (double)value;
    }
    return sqrt(sum);
}

int main(int argc, char **argv) {
    megamoe_checkpoint *checkpoint;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_layer_info info = {.struct_size = sizeof info};
    megamoe_device_options options = {.struct_size = sizeof options, .max_tokens = 1};
    if (argc != 2) return fprintf(stderr, "Usage: layer CKPT\n"), 2;

    check(megamoe_checkpoint_open(argv[1], NULL, &checkpoint));
    check(megamoe_checkpoint_layer(checkpoint, 0, &info));
    check(megamoe_device_open(&options, &device));
    check(megamoe_layer_load(device, checkpoint, info.layer, NULL, &layer));

    uint32_t hidden = info.shape.hidden;
    float *x = malloc(hidden * sizeof *x);
    uint16_t *y = malloc(hidden * sizeof *y);
    for (uint32_t i = 0; x && i < hidden; i++) x[i] = sinf((float)i); /* rounded to BF16 when it is read */
    int32_t token_id = 0;
    megamoe_batch batch = {.struct_size = sizeof batch, .token_count = 1, .token_ids = &token_id};
    batch.hidden = x;
    batch.hidden_dtype = MEGAMOE_F32;
    batch.output = y;
    check(megamoe_layer_run(layer, &batch, NULL));
    printf("layer %u on %s: norm %.6g\n", info.layer, megamoe_device_describe(device), norm_of_bf16(y, hidden));

    free(x);
    free(y);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    megamoe_checkpoint_close(checkpoint);
    return 0;
}
