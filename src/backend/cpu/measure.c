/* The machine's limits as this backend meets them: streaming reads, and its own tile loop fed from L2. */
#define _GNU_SOURCE

#include <stdlib.h>
#include <sys/mman.h>

#include "backend/cpu/cores.h"
#include "backend/cpu/cpu.h"
#include "error.h"

#define READ_BYTES ((size_t)1 << 30)
#define READ_UNIT ((size_t)1 << 20)
#define REPEATS 7

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, unsigned count) {
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

/* ---- reading ---- */

typedef struct read_job {
    const uint8_t *memory;
    uint64_t sums[MM_THREADS_MAX];
} read_job;

static void touch_unit(void *context, uint32_t unit, uint32_t thread) {
    (void)thread;
    memset((uint8_t *)(uintptr_t)((read_job *)context)->memory + unit * READ_UNIT, 1, READ_UNIT);
}

/* Four streams side by side, as the decode loops walk four weight rows. */
static void read_unit(void *context, uint32_t unit, uint32_t thread) {
    read_job *job = context;
    const uint64_t *p = (const uint64_t *)(job->memory + unit * READ_UNIT);
    size_t stride = READ_UNIT / 4 / sizeof *p;
    uint64_t sum = 0;
    for (size_t i = 0; i < stride; i += 8)
        for (unsigned s = 0; s < 4; s++) {
            const uint64_t *line = p + s * stride + i;
            __builtin_prefetch(line + 288);
            sum += line[0] ^ line[1] ^ line[2] ^ line[3] ^ line[4] ^ line[5] ^ line[6] ^ line[7];
        }
    job->sums[thread] += sum;
}

static megamoe_status measure_reading(mm_pool *pool, double *gb_s) {
    double times[REPEATS];
    read_job *job = calloc(1, sizeof *job);
    void *memory = mmap(NULL, READ_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!job || memory == MAP_FAILED) {
        free(job);
        if (memory != MAP_FAILED) munmap(memory, READ_BYTES);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no %zu bytes to measure read bandwidth", READ_BYTES);
    }
    job->memory = memory;
    mm_pool_run(pool, READ_BYTES / READ_UNIT, READ_BYTES, touch_unit, job);
    for (unsigned i = 0; i < REPEATS; i++) {
        double start = mm_cpu_seconds();
        mm_pool_run(pool, READ_BYTES / READ_UNIT, READ_BYTES, read_unit, job);
        times[i] = mm_cpu_seconds() - start;
    }
    munmap(memory, READ_BYTES);
    free(job);
    *gb_s = (double)READ_BYTES / median(times, REPEATS) * 1e-9;
    return MEGAMOE_OK;
}

/* ---- the tile loop ---- */

enum { TILE_COLUMNS = 4096, TILE_OPERANDS = 48, TILE_ROUNDS = 24 }; /* panel and operands together fit L2 */

typedef struct tile_job {
    const mm_kernels *kernels;
    uint8_t *memory;
    size_t thread_bytes, panel_bytes, operand_pitch;
} tile_job;

static void tile_unit(void *context, uint32_t unit, uint32_t thread) {
    const tile_job *job = context;
    uint8_t *own = job->memory + thread * job->thread_bytes;
    mm_gemm gemm = {.row_count = MM_ROWS_MAX,
                    .operands = own + job->panel_bytes,
                    .operand_pitch = job->operand_pitch,
                    .count = TILE_OPERANDS,
                    .sums = (float *)(own + job->panel_bytes + TILE_OPERANDS * job->operand_pitch),
                    .sums_pitch = MM_ROWS_MAX,
                    .panel = own};
    (void)unit;
    for (unsigned i = 0; i < TILE_ROUNDS; i++) job->kernels->tiles(&gemm, TILE_COLUMNS);
}

static megamoe_status measure_tiles(mm_backend_state *state, double *tflop_s) {
    const double flops = 2.0 * TILE_COLUMNS * TILE_OPERANDS * TILE_ROUNDS * MM_ROWS_MAX;
    const mm_kernels *kernels = &state->kernels;
    uint32_t units = state->threads * 8;
    double times[REPEATS];
    tile_job job = {.kernels = kernels,
                    .panel_bytes = MM_PANEL_BYTES,
                    .operand_pitch = TILE_COLUMNS * (kernels->operands_bf16 ? 2 : 4) + 64};
    *tflop_s = 0.0;
    if (!kernels->tiles) return MEGAMOE_OK;
    job.thread_bytes = job.panel_bytes + TILE_OPERANDS * (job.operand_pitch + MM_ROWS_MAX * sizeof(float));
    job.thread_bytes = (job.thread_bytes + 63) / 64 * 64;
    job.memory = aligned_alloc(64, state->threads * job.thread_bytes);
    if (!job.memory) return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no memory to measure the tile loop");
    memset(job.memory, 0, state->threads * job.thread_bytes);
    for (unsigned i = 0; i < REPEATS; i++) {
        double start = mm_cpu_seconds();
        mm_pool_run(state->pool, units, units * job.thread_bytes * TILE_ROUNDS, tile_unit, &job);
        times[i] = mm_cpu_seconds() - start;
    }
    free(job.memory);
    *tflop_s = flops * units / median(times, REPEATS) * 1e-12;
    return MEGAMOE_OK;
}

megamoe_status mm_cpu_measure(mm_backend_state *state, megamoe_limits *limits) {
    double gb_s = 0.0, tflop_s = 0.0;
    MM_TRY(measure_reading(state->pool, &gb_s));
    MM_TRY(measure_tiles(state, &tflop_s));
    limits->read_gb_s = gb_s;
    limits->matrix_tflop_s = tflop_s;
    return MEGAMOE_OK;
}
