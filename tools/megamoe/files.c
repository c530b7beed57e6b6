/* No file that a command writes may replace one that it reads, or another one that it writes. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

typedef struct named_file {
    const char *name, *path; /* path NULL: not given */
} named_file;

/* By name or by links. */
static bool same_file(const char *one, const char *other) {
    struct stat facts[2];
    if (strcmp(one, other) == 0) return true;
    if (stat(one, &facts[0]) != 0 || stat(other, &facts[1]) != 0) return false;
    return facts[0].st_dev == facts[1].st_dev && facts[0].st_ino == facts[1].st_ino;
}

/* `checkpoint`: one file, or a directory of them. */
static bool in_checkpoint(const char *path, const char *checkpoint) {
    DIR *directory = opendir(checkpoint);
    bool found = !directory && same_file(path, checkpoint);
    for (struct dirent *entry; !found && directory && (entry = readdir(directory));) {
        char *member = cli_format("%s/%s", checkpoint, entry->d_name);
        found = same_file(path, member);
        free(member);
    }
    if (directory) closedir(directory);
    return found;
}

int cli_check_files(const cli_options *o) {
    const named_file written[] = {
        {"output", o->output}, {"dump-stages", o->dump_stages}, {"html", o->html}, {"csv", o->csv}};
    const named_file read[] = {{"the input", o->input}, {"--against", o->against}, {"--calibration", o->calibration}};
    const unsigned written_count = sizeof written / sizeof written[0], read_count = sizeof read / sizeof read[0];
    for (unsigned i = 0; i < written_count; i++) {
        const named_file *w = &written[i];
        if (!w->path) continue;
        for (unsigned j = 0; j < read_count; j++)
            if (read[j].path && same_file(w->path, read[j].path))
                return cli_fail("--%s would replace %s %s; choose another name.", w->name, read[j].name, read[j].path);
        for (unsigned j = 0; j < i; j++)
            if (written[j].path && same_file(w->path, written[j].path))
                return cli_fail("--%s and --%s are one file, %s; choose two names.", written[j].name, w->name, w->path);
        if (o->words[0] && in_checkpoint(w->path, o->words[0]))
            return cli_fail("--%s would replace %s, a file of the checkpoint; choose another name.", w->name, w->path);
    }
    return CLI_GOOD;
}
