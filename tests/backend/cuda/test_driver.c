/*
 * Machines without a driver that can be used, which is most: what a user is told. DRIVER says which machine this is:
 * "none", or "old" with old_driver.c in front of any other libcuda.so.1. Exit status 77 where there is a driver after
 * all.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "megamoe/megamoe.h"

static int expect(megamoe_status status, const char *words) {
    if (status == MEGAMOE_UNSUPPORTED_DEVICE && strstr(megamoe_error_message(), words)) return 0;
    fprintf(stderr, "%s: %s\n", megamoe_status_name(status), megamoe_error_message());
    return 1;
}

int main(void) {
    const bool old = strcmp(getenv("DRIVER"), "old") == 0;
    const char *words = old ? "the NVIDIA driver is too old: it has no cu" : "libcuda.so.1 was not found";
    const megamoe_backend backends[] = {MEGAMOE_CUDA_PORTABLE, MEGAMOE_SM90, MEGAMOE_SM100};
    int failures = 0;
    if (!old && dlopen("libcuda.so.1", RTLD_NOW)) return printf("skipped cuda_no_driver: there is a driver\n"), 77;
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        megamoe_device_options options = {.struct_size = sizeof options, .backend = backends[i], .max_tokens = 1};
        megamoe_device *device = NULL;
        failures += expect(megamoe_device_probe(backends[i], 0), words);
        failures += expect(megamoe_device_open(&options, &device), words);
        failures += device != NULL;
    }
    return failures != 0;
}
