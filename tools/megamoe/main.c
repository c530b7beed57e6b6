/* megamoe: finds the command and hands over. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

static const cli_command *const commands[] = {&cli_inspect, &cli_run,      &cli_check,  &cli_bench,
                                              &cli_synth,   &cli_quantize, &cli_doctor, &cli_selftest};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

/* Environment variables, in pairs of name and meaning. */
static const char *const environment[][2] = {
    {"MEGAMOE_BACKEND", "the backend when --backend is not given"},
    {"MEGAMOE_THREADS", "threads of the cpu when --threads is not given"},
    {"MEGAMOE_ISA", "caps the cpu level: scalar, avx2, avx512, amx"},
    {"MEGAMOE_DEBUG", "1: norms and timings of every stage on stderr (also MEGA_MOE_DEBUG)"},
    {"MEGA_MOE_STATIC", "1: skip the experts, their output is zero; to bisect a model"},
    {"MEGA_MOE_USE_CUTLASS", "accepted from earlier setups, without effect"},
};
enum { ENVIRONMENT_COUNT = sizeof environment / sizeof environment[0] };

static json_t *overview_json(void) {
    json_t *all = json_array(), *variables = json_array();
    for (unsigned i = 0; i < COMMAND_COUNT; i++) json_array_append_new(all, cli_help_json(commands[i]));
    for (unsigned i = 0; i < ENVIRONMENT_COUNT; i++)
        json_array_append_new(variables, json_pack("{s:s,s:s}", "name", environment[i][0], "help", environment[i][1]));
    return json_pack("{s:s,s:o,s:o}", "version", megamoe_version(), "commands", all, "environment", variables);
}

static void print_overview(FILE *stream) {
    fprintf(stream,
            "Usage: megamoe COMMAND [OPTION]...\n"
            "Runs the NVFP4 Mixture-of-Experts layers of published checkpoints, and shows that they are right.\n\n"
            "Commands:\n");
    for (unsigned i = 0; i < COMMAND_COUNT; i++)
        fprintf(stream, "  %-9s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(stream, "\nmegamoe COMMAND --help shows its options and an example. --version shows the version.\n"
                    "Exit status: 0 good, 1 the check failed, 2 bad usage or bad input.\n\n"
                    "Environment:\n");
    for (unsigned i = 0; i < ENVIRONMENT_COUNT; i++)
        fprintf(stream, "  %-20s  %s\n", environment[i][0], environment[i][1]);
}

static const cli_command *find_command(const char *name) {
    for (unsigned i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i]->name, name) == 0) return commands[i];
    return NULL;
}

static int unknown_command(const char *word) {
    const char *names[COMMAND_COUNT + 1] = {NULL};
    for (unsigned i = 0; i < COMMAND_COUNT; i++) names[i] = commands[i]->name;
    if (*word == '-') return cli_fail("'%s' stands where the command should, as in 'megamoe check model/'.", word);
    const char *nearest = cli_nearest(word, names);
    if (nearest) return cli_fail("there is no command '%s'; did you mean '%s'?", word, nearest);
    return cli_fail("there is no command '%s'; 'megamoe --help' lists them.", word);
}

#define SHRANK "a file of the checkpoint or of the input became shorter while it was read."

static volatile sig_atomic_t shrank_json;

/* The library checks lengths before each load and run; what shrinks in between arrives here: only write is safe. */
static void end_shrunk(int number) {
    static const char text[] = "megamoe: " SHRANK "\n";
    static const char json[] = "{\"error\": {\"status\": \"MEGAMOE_IO_ERROR\", \"message\": \"" SHRANK "\"}}\n";
    ssize_t written = shrank_json ? write(STDOUT_FILENO, json, sizeof json - 1) : 0;
    written += write(STDERR_FILENO, text, sizeof text - 1);
    (void)number, (void)written;
    _exit(CLI_BAD_INPUT);
}

int main(int argc, char **argv) {
    struct sigaction bus = {.sa_handler = end_shrunk};
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--json") == 0) {
            cli_json_errors(true);
            shrank_json = 1;
        }
    sigaction(SIGBUS, &bus, NULL);

    if (argc < 2) {
        print_overview(stderr);
        return CLI_BAD_INPUT;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("megamoe %s\n", megamoe_version());
        return cli_flush();
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || (strcmp(argv[1], "help") == 0 && argc == 2)) {
        if (argc == 3 && strcmp(argv[2], "--json") == 0) return cli_print_json(overview_json());
        print_overview(stdout);
        return cli_flush();
    }
    bool help = strcmp(argv[1], "help") == 0;
    const cli_command *command = find_command(argv[help ? 2 : 1]);
    if (!command) return unknown_command(argv[help ? 2 : 1]);

    cli_options options = {0};
    if (!help && cli_parse(command, argc - 2, argv + 2, &options) != CLI_GOOD) return CLI_BAD_INPUT;
    if (help || options.help) {
        if (options.json) return cli_print_json(cli_help_json(command));
        cli_print_help(command);
        return cli_flush();
    }
    if (cli_check_files(&options) != CLI_GOOD) return CLI_BAD_INPUT;
    options.arguments = argv + 1;
    return command->run(&options);
}
