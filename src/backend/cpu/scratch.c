/* The scratch memory of a CPU device: one mapping, carved once per growth, and none of it touched here:
 * what belongs to one thread lies on the NUMA node of that thread, which touches it first. */
#define _GNU_SOURCE
#include "backend/cpu/cpu.h"

#include <sys/mman.h>

#include "error.h"

/* Hands out consecutive 64-byte aligned pieces; a NULL base only counts. */
typedef struct carver {
    uint8_t *base;
    size_t used;
} carver;

static void *carve(carver *c, size_t bytes) {
    void *piece = c->base ? c->base + c->used : NULL;
    c->used += (bytes + 63) / 64 * 64;
    return piece;
}

static mm_cpu_thread carve_thread(carver *c, const mm_cpu_extent *e, uint32_t group_rows) {
    uint32_t columns = e->hidden > e->intermediate ? e->hidden : e->intermediate;
    mm_cpu_thread thread;
    thread.panel = carve(c, MM_PANEL_BYTES);
    thread.values = carve(c, columns * sizeof *thread.values);
    thread.codes = carve(c, columns / 2);
    thread.scales = carve(c, columns / 16);
    thread.sums = carve(c, (size_t)group_rows * 2 * MM_ROWS_MAX * sizeof *thread.sums);
    return thread;
}

/* Operand rows are spread over the sets of a cache by an odd number of lines. */
static size_t spread(size_t bytes) {
    return bytes / 64 % 2 ? bytes : bytes + 64;
}

static void carve_all(carver *c, const mm_backend_state *state, const mm_cpu_extent *e, mm_cpu_scratch *s) {
    size_t chunk = e->tokens < MM_CHUNK_TOKENS ? e->tokens : MM_CHUNK_TOKENS;
    size_t pairs = chunk * e->experts_per_token, rows = pairs + chunk;
    carver thread = {NULL, 0};
    s->x_pitch = spread(mm_cpu_operand_bytes(&state->kernels, e->hidden));
    s->h_pitch = spread(mm_cpu_operand_bytes(&state->kernels, e->intermediate));
    s->l2_pitch = spread(e->hidden * sizeof(float)) / sizeof(float);
    carve_thread(&thread, e, state->kernels.group_rows);
    s->thread_bytes = (thread.used + 4095) / 4096 * 4096;
    s->thread_memory = carve(c, state->threads * s->thread_bytes); /* first, so that it begins and ends with a page */
    s->x = carve(c, chunk * s->x_pitch);
    s->x_nvfp4 = carve(c, chunk * s->x_pitch);
    s->x_globals = carve(c, chunk * sizeof *s->x_globals);
    s->logits = carve(c, chunk * e->expert_count * sizeof *s->logits);
    s->ids = carve(c, (size_t)e->tokens * e->experts_per_token * sizeof *s->ids);
    s->weights = carve(c, (size_t)e->tokens * e->experts_per_token * sizeof *s->weights);
    s->expert_rows = carve(c, e->loaded_count * sizeof *s->expert_rows);
    s->row_token = carve(c, rows * sizeof *s->row_token);
    s->pair_row = carve(c, pairs * sizeof *s->pair_row);
    s->groups = carve(c, ((size_t)e->loaded_count + 1 + rows / state->kernels.group_rows) * sizeof *s->groups);
    s->h = carve(c, rows * s->h_pitch);
    if (state->kernels.pack) { /* each expert's rows fill whole blocks */
        uint32_t columns = e->hidden > e->intermediate ? e->hidden : e->intermediate;
        size_t blocks = rows / MM_PACK_ROWS + 2 * ((size_t)e->loaded_count + 1); /* one block per expert may be wide */
        s->packed = carve(c, blocks * packed_block_bytes(columns, 2));
    }
    s->l2 = carve(c, rows * s->l2_pitch * sizeof *s->l2);
}

/* Only hints. Small pages where threads lie side by side: a huge one would put several threads' memory on the node of
 * the first of them that touches it. */
static void advise_pages(uint8_t *memory, size_t thread_bytes, size_t all_bytes) {
    madvise(memory, thread_bytes, MADV_NOHUGEPAGE);
    madvise(memory + thread_bytes, all_bytes - thread_bytes, MADV_HUGEPAGE);
}

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

megamoe_status mm_cpu_scratch_grow(mm_backend_state *state, const mm_cpu_extent *wanted) {
    const mm_cpu_extent *had = &state->extent;
    mm_cpu_extent e = {.tokens = larger(had->tokens, wanted->tokens),
                       .hidden = larger(had->hidden, wanted->hidden),
                       .intermediate = larger(had->intermediate, wanted->intermediate),
                       .expert_count = larger(had->expert_count, wanted->expert_count),
                       .loaded_count = larger(had->loaded_count, wanted->loaded_count),
                       .experts_per_token = larger(had->experts_per_token, wanted->experts_per_token)};
    uint32_t chunk = e.tokens < MM_CHUNK_TOKENS ? e.tokens : MM_CHUNK_TOKENS;
    mm_cpu_scratch made = {0};
    carver counter = {NULL, 0}, maker;
    void *memory;
    if (state->scratch.memory && memcmp(&e, had, sizeof e) == 0) return MEGAMOE_OK;
    carve_all(&counter, state, &e, &made);
    MM_TRY(mm_plan_create(chunk * e.experts_per_token, e.loaded_count, &made.plan));
    memory = mmap(NULL, counter.used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        mm_plan_free(&made.plan);
        return mm_fail(MEGAMOE_OUT_OF_MEMORY, "no %zu bytes of scratch memory for %u tokens", counter.used, e.tokens);
    }
    advise_pages(memory, state->threads * made.thread_bytes, counter.used);
    maker = (carver){memory, 0};
    carve_all(&maker, state, &e, &made);
    made.memory = memory;
    made.bytes = counter.used;
    made.plan_bytes = ((size_t)chunk * e.experts_per_token + e.loaded_count + 1) * sizeof(uint32_t);
    mm_cpu_scratch_free(&state->scratch);
    state->scratch = made;
    state->extent = e;
    return MEGAMOE_OK;
}

void mm_cpu_scratch_free(mm_cpu_scratch *s) {
    if (s->memory) munmap(s->memory, s->bytes);
    mm_plan_free(&s->plan);
    memset(s, 0, sizeof *s);
}

mm_cpu_thread mm_cpu_scratch_thread(const mm_backend_state *state, uint32_t thread) {
    carver c = {state->scratch.thread_memory + thread * state->scratch.thread_bytes, 0};
    return carve_thread(&c, &state->extent, state->kernels.group_rows);
}
