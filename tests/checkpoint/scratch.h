/* Files for C tests: a folder that is removed again, and files of given bytes in it. */
#ifndef SCRATCH_H
#define SCRATCH_H

#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char scratch_folder[64];

static int scratch_setup(void **state) {
    (void)state;
    strcpy(scratch_folder, "/tmp/megamoe-XXXXXX");
    return mkdtemp(scratch_folder) ? 0 : -1;
}

static int scratch_teardown(void **state) {
    DIR *folder = opendir(scratch_folder);
    const struct dirent *entry;
    char path[512];
    (void)state;
    while (folder && (entry = readdir(folder))) {
        snprintf(path, sizeof path, "%s/%s", scratch_folder, entry->d_name);
        unlink(path);
    }
    if (folder) closedir(folder);
    return rmdir(scratch_folder);
}

/* The path of a file in the folder; overwritten by the next call. */
static const char *scratch_path(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", scratch_folder, name);
    return path;
}

static const char *scratch_write(const char *name, const void *bytes, size_t count) {
    const char *path = scratch_path(name);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || write(file, bytes, count) != (ssize_t)count) abort();
    close(file);
    return path;
}

#endif
