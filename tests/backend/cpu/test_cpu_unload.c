/* A program may load the library, use it and let it go: no thread and no fork handler of it stays behind. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "megamoe/megamoe.h"

typedef megamoe_status (*open_device)(const megamoe_device_options *options, megamoe_device **device);
typedef void (*close_device)(megamoe_device *device);

/* ISO C has no cast from dlsym's pointer to a function. */
static void find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

static void nothing_stays_behind(void **state) {
    (void)state;
    for (unsigned round = 0; round < 3; round++) {
        megamoe_device_options options = {
            .struct_size = sizeof options, .backend = MEGAMOE_CPU, .threads = 4, .max_tokens = 8};
        megamoe_device *device;
        open_device device_open;
        close_device device_close;
        int status = -1;
        void *library = dlopen(MEGAMOE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        assert_non_null(library);
        find(library, "megamoe_device_open", &device_open);
        find(library, "megamoe_device_close", &device_close);
        assert_int_equal(device_open(&options, &device), MEGAMOE_OK);
        device_close(device);
        assert_int_equal(dlclose(library), 0);
        assert_null(dlopen(MEGAMOE_LIBRARY, RTLD_NOW | RTLD_NOLOAD));
        pid_t child = fork();
        if (child == 0) _exit(0);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_stays_behind)};
    return cmocka_run_group_tests_name("cpu_unload", tests, NULL, NULL);
}
