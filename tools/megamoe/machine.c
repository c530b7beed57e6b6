/* What /proc says about this machine. */
#include <string.h>

#include "cli.h"

bool cli_proc_line(const char *path, const char *name, char *value, size_t room) {
    FILE *file = fopen(path, "r");
    char line[512];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, name, strlen(name)) != 0 || !colon) continue;
        colon += strspn(colon, ": \t");
        snprintf(value, room, "%.*s", (int)strcspn(colon, "\n"), colon);
        found = true;
    }
    if (file) fclose(file);
    return found;
}
