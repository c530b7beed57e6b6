/* megamoe doctor: what this machine can run, and what to do about the rest. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

typedef struct diagnosis {
    json_t *findings, *backends;
} diagnosis;

static void add_finding(diagnosis *d, const char *severity, const char *kind, const char *detail, const char *remedy) {
    json_array_append_new(d->findings, json_pack("{s:s,s:s,s:s,s:s?}", "severity", severity, "kind", kind, "detail",
                                                 detail, "remedy", remedy));
}

static const struct {
    megamoe_backend id;
    const char *name, *remedy;
} backends[] = {
    {MEGAMOE_REFERENCE, "reference", NULL},
    {MEGAMOE_CPU, "cpu", NULL},
    {MEGAMOE_CUDA_PORTABLE, "cuda-portable",
     "On a machine with an NVIDIA GPU (Hopper or newer): install the driver, and use a megamoe built with CUDA. Otherwise use --backend cpu."},
    {MEGAMOE_SM90, "sm90",
     "It needs a Hopper GPU (H100, H200) and a megamoe built with CUDA. Otherwise use --backend cpu."},
    {MEGAMOE_SM100, "sm100",
     "It needs a Blackwell GPU (B200, B300) and a megamoe built with CUDA. Otherwise use --backend cpu."},
};

static void probe_backends(diagnosis *d) {
    for (unsigned i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        megamoe_device_options open = {.struct_size = sizeof open,
                                       .backend = backends[i].id,
                                       .max_tokens = 1,
                                       .group = {.struct_size = sizeof open.group}};
        megamoe_device *device = NULL;
        megamoe_status status = megamoe_device_probe(backends[i].id, 0);
        if (status == MEGAMOE_OK) status = megamoe_device_open(&open, &device);
        if (status == MEGAMOE_OK) {
            json_array_append_new(d->backends,
                                  json_pack("{s:s,s:b,s:s,s:s}", "backend", backends[i].name, "runs", 1, "isa",
                                            megamoe_device_isa(device), "detail", megamoe_device_describe(device)));
            megamoe_device_close(device);
        } else {
            const char *why = megamoe_error_message();
            json_array_append_new(d->backends, json_pack("{s:s,s:b,s:n,s:s}", "backend", backends[i].name, "runs", 0,
                                                         "isa", "detail", why));
            bool host = backends[i].id == MEGAMOE_REFERENCE || backends[i].id == MEGAMOE_CPU;
            add_finding(d, host ? "error" : "note", "backend-unavailable", why, backends[i].remedy);
        }
    }
}

static unsigned usable_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
}

/* Cores' worth of time that the container grants; 0: no limit. */
static double granted_cores(void) {
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    double quota = 0, period = 0;
    bool limited = file && fscanf(file, "%lf %lf", &quota, &period) == 2 && period > 0;
    if (file) fclose(file);
    return limited ? quota / period : 0;
}

static void examine_cpu(diagnosis *d) {
    double granted = granted_cores();
    unsigned cores = usable_cores();
    if (granted > 0 && granted < (double)cores) {
        char *detail =
            cli_format("this process may use %u cores, but its container grants the time of %.1f", cores, granted);
        char *remedy =
            cli_format("Set MEGAMOE_THREADS=%u, or raise the container's limit.", granted < 1 ? 1 : (unsigned)granted);
        add_finding(d, "warning", "cpu-quota", detail, remedy);
        free(detail);
        free(remedy);
    }
    char flags[8192] = "";
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[8192];
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "flags", 5) == 0) snprintf(flags, sizeof flags, "%s", line);
    if (file) fclose(file);
    if (*flags && !strstr(flags, " avx2"))
        add_finding(d, "warning", "no-simd", "this CPU has no AVX2, so only the scalar level runs",
                    "Use a CPU with AVX2, better AVX-512 or AMX.");
}

static void examine_environment(diagnosis *d) {
    const char *zero = getenv("MEGA_MOE_STATIC"), *isa = getenv("MEGAMOE_ISA");
    if (zero && strcmp(zero, "1") == 0)
        add_finding(d, "warning", "zero-output", "MEGA_MOE_STATIC=1 is set: every layer returns zeros",
                    "Unset MEGA_MOE_STATIC.");
    if (isa && *isa) {
        char *detail = cli_format("MEGAMOE_ISA=%s caps the cpu level", isa);
        add_finding(d, "note", "isa-capped", detail, "Unset MEGAMOE_ISA for full speed.");
        free(detail);
    }
}

static json_t *machine(void) {
    char cpu[256] = "unknown", driver[256] = "";
    cli_proc_line("/proc/cpuinfo", "model name", cpu, sizeof cpu);
    cli_proc_line("/proc/driver/nvidia/version", "NVRM version", driver, sizeof driver);
    return json_pack("{s:s,s:i,s:I,s:s?}", "cpu", cpu, "cores", (int)usable_cores(), "memory_bytes",
                     (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), "nvidia_driver",
                     *driver ? driver : NULL);
}

static void print_report(const json_t *report) {
    const json_t *about = json_object_get(report, "machine");
    char memory[16];
    size_t i;
    json_t *item;
    const char *driver = json_string_value(json_object_get(about, "nvidia_driver"));
    printf("megamoe %s\n%s, %lld cores for this process, %s of memory\nNVIDIA driver: %s\n\n", megamoe_version(),
           json_string_value(json_object_get(about, "cpu")),
           (long long)json_integer_value(json_object_get(about, "cores")),
           cli_bytes_text((double)json_integer_value(json_object_get(about, "memory_bytes")), memory),
           driver ? driver : "none");
    cli_table *table = cli_table_new("<backend|<runs|<with, or why not");
    json_array_foreach(json_object_get(report, "backends"), i, item) cli_table_add(
        table, "%s\t%s\t%s", json_string_value(json_object_get(item, "backend")),
        json_is_true(json_object_get(item, "runs")) ? "yes" : "no", json_string_value(json_object_get(item, "detail")));
    cli_table_print(table, 0);
    if (json_array_size(json_object_get(report, "findings")) == 0) {
        printf("\nNothing is missing.\n");
        return;
    }
    putchar('\n');
    table = cli_table_new("<severity|<finding and remedy");
    json_array_foreach(json_object_get(report, "findings"), i, item) {
        const char *remedy = json_string_value(json_object_get(item, "remedy"));
        cli_table_add(table, "%s\t%s. %s", json_string_value(json_object_get(item, "severity")),
                      json_string_value(json_object_get(item, "detail")), remedy ? remedy : "");
    }
    cli_table_print(table, 0);
}

static int run(const cli_options *options) {
    diagnosis d = {json_array(), json_array()};
    json_t *images = json_array();
    probe_backends(&d);
    examine_cpu(&d);
    examine_environment(&d);
    size_t i;
    json_t *item;
    json_array_foreach(d.backends, i, item) {
        const char *isa = json_string_value(json_object_get(item, "isa"));
        if (isa && strncmp(isa, "sm_", 3) == 0) json_array_append_new(images, json_string(isa));
    }
    json_t *report = json_pack("{s:s,s:o,s:o,s:o,s:o}", "version", megamoe_version(), "machine", machine(), "images",
                               images, "backends", d.backends, "findings", d.findings);
    if (options->json) return cli_print_json(report);
    print_report(report);
    json_decref(report);
    return cli_flush();
}

const cli_command cli_doctor = {
    .name = "doctor",
    .words = "",
    .summary = "what this machine can run, what is missing, and what to do",
    .details = "Opens every backend and says in words why one does not run. Changes nothing.",
    .examples = "  megamoe doctor\n",
    .options = "",
    .run = run,
};
