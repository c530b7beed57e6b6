/* The smallest user of an installed megamoe. */
#include <megamoe/megamoe.h>
#include <stdio.h>

int main(void) {
    megamoe_device *device = NULL;
    megamoe_device_options options = {.struct_size = sizeof options, .backend = MEGAMOE_CPU, .max_tokens = 1};
    if (megamoe_device_open(&options, &device) != MEGAMOE_OK) {
        fprintf(stderr, "%s\n", megamoe_error_message());
        return 1;
    }
    printf("megamoe %s: %s\n", megamoe_version(), megamoe_device_describe(device));
    megamoe_device_close(device);
    return 0;
}
