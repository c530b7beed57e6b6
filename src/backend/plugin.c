/* Loads a backend from a shared object beside the library. It stays loaded: handles may live until the end.
 */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "backend/plugin.h"
#include "error.h"

static megamoe_status fail(megamoe_status status, const char *sentence) {
    return mm_fail(status, "%s", sentence);
}

static megamoe_status fail_in(megamoe_status status, const char *context) {
    return mm_fail_in(status, "%s", context);
}

/* The folder of the object that holds this function, with its last slash. */
static size_t own_folder(char *path, size_t room) {
    Dl_info info;
    static const char here;
    if (!dladdr(&here, &info) || !info.dli_fname) return 0;
    const char *slash = strrchr(info.dli_fname, '/');
    size_t length = slash ? (size_t)(slash - info.dli_fname) + 1 : 0;
    if (length >= room) return 0;
    memcpy(path, info.dli_fname, length);
    return length;
}

megamoe_status mm_plugin_load(const char *file, const mm_backend **backend) {
    static const mm_plugin_host host = {sizeof(mm_backend), fail, fail_in};
    char path[PATH_MAX];
    size_t length = own_folder(path, sizeof path);
    if (length == 0 || (size_t)snprintf(path + length, sizeof path - length, "%s", file) >= sizeof path - length)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "the folder of this library is not known, so %s is not found", file);
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!object)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                       "this backend is a plugin for tests, made beside the command and never installed: %s",
                       dlerror());
    mm_plugin_entry *entry;
    *(void **)&entry = dlsym(object, MM_PLUGIN_ENTRY); /* the cast that POSIX gives for a function */
    const mm_backend *found = entry ? entry(&host) : NULL;
    if (!found) {
        dlclose(object);
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "%s was made for another build of this library", path);
    }
    MM_TRY(found->probe(0));
    *backend = found;
    return MEGAMOE_OK;
}
