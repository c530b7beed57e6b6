/*
 * Loads a layer and runs it twice, then the other layers one after another; prints the private memory of the process
 * (RssAnon, bytes) when the checkpoint is open, when the layer is loaded and after each run, for test_memory.py. Third
 * comes what the device says it holds. Usage: memory_probe CHECKPOINT TOKENS
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "megamoe/megamoe.h"

static unsigned long long private_bytes(void) {
    char line[256];
    unsigned long long kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "RssAnon: %llu", &kilobytes);
    if (status) fclose(status);
    return 1024 * kilobytes;
}

static void need(megamoe_status status) {
    if (status == MEGAMOE_OK) return;
    fprintf(stderr, "%s\n", megamoe_error_message());
    exit(1);
}

int main(int argc, char **argv) {
    megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_CPU};
    megamoe_batch batch = {.struct_size = sizeof batch};
    megamoe_checkpoint *checkpoint;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_shape shape;
    if (argc != 3) return 2;
    batch.token_count = options.max_tokens = (uint32_t)atoi(argv[2]);
    need(megamoe_checkpoint_open(argv[1], NULL, &checkpoint));
    need(megamoe_checkpoint_shape(checkpoint, 0, &shape));
    size_t values = (size_t)batch.token_count * shape.hidden;
    uint16_t *hidden = malloc(2 * values), *output = malloc(2 * values);
    if (!hidden || !output) return 1;
    for (size_t i = 0; i < values; i++) hidden[i] = (uint16_t)(0x3C00 + i * 37 % 512 + (i % 3 == 0 ? 0x8000 : 0));
    memset(output, 0, 2 * values);
    batch.hidden = hidden;
    batch.output = output;

    printf("%llu", private_bytes());
    need(megamoe_device_open(&options, &device));
    need(megamoe_layer_load(device, checkpoint, 0, NULL, &layer));
    printf(" %llu", private_bytes());
    uint64_t planned = 0, held = 0;
    megamoe_device_memory(device, &planned, NULL);
    printf(" %llu", (unsigned long long)planned);
    for (int run = 0; run < 2; run++) {
        need(megamoe_layer_run(layer, &batch, NULL));
        printf(" %llu", private_bytes());
    }
    megamoe_device_memory(device, &held, NULL);
    if (held != planned) return 1;
    megamoe_layer_close(layer);
    for (uint32_t other = 1; other < megamoe_checkpoint_layer_count(checkpoint); other++) {
        need(megamoe_layer_load(device, checkpoint, other, NULL, &layer));
        need(megamoe_layer_run(layer, &batch, NULL));
        printf(" %llu", private_bytes());
        megamoe_layer_close(layer);
    }
    printf("\n");
    megamoe_device_close(device);
    megamoe_checkpoint_close(checkpoint);
    free(hidden);
    free(output);
    return 0;
}
