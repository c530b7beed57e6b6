// One wrapper per function of mm_driver, made from its own list, so that a new function is covered without a word here.
#include "faulty_driver.h"

#include <cstring>

#include "backend/cuda/args.h"

faulty_driver faults;

namespace {

// What each function does to the books: +1 takes something that must be given back, -1 gives it back.
constexpr struct {
    const char *name;
    int held;
} books[] = {{"context_retain", 1}, {"context_release", -1}, {"context_push", 1},    {"context_pop", -1},
             {"module_load", 1},    {"module_unload", -1},   {"stream_create", 1},   {"stream_destroy", -1},
             {"event_create", 1},   {"event_destroy", -1},   {"memory_allocate", 1}, {"memory_free", -1},
             {"host_allocate", 1},  {"host_free", -1}};

int held_by(const char *name) {
    for (const auto &row : books)
        if (std::strcmp(row.name, name) == 0) return row.held;
    return 0;
}

// Giving back never fails: what a failure there leaves behind is the driver's.
bool fails(const char *name) {
    if (held_by(name) < 0 || std::strcmp(name, "error_string") == 0) return false;
    if (faults.only && std::strcmp(faults.only, name) != 0) return false;
    const uint32_t call = ++faults.calls;
    if (faults.fail_at == 0 || (faults.ever_after ? call < faults.fail_at : call != faults.fail_at)) return false;
    faults.failed = name;
    return true;
}

// Notes what a call asked for; by its types, which tell apart the functions that matter.
template <typename... A> void note(const char *, A...) {}
void note(const char *name, CUdeviceptr *, size_t bytes) {
    if (std::strcmp(name, "memory_allocate") == 0) faults.allocations++, faults.allocated_bytes += bytes;
}
void note(const char *, CUdeviceptr, const void *, size_t bytes, CUstream) {
    faults.copies++, faults.copied_bytes += bytes;
}
void note(const char *, CUdeviceptr, unsigned char, size_t, CUstream stream) {
    faults.fill_stream = stream;
}
void note(const char *, const CUlaunchConfig *config, CUfunction, void **, void **) {
    faults.launches++;
    if (config->sharedMemBytes > faults.shared_bytes_max) faults.shared_bytes_max = config->sharedMemBytes;
}

// Stages are gathered by the plan, so one must be there though no kernel runs: that of a batch whose slots are all
// skipped.
char plan;
template <typename... A> void stand_in(const char *, A...) {}
void stand_in(const char *, CUfunction *function, CUmodule, const char *kernel) {
    if (std::strcmp(kernel, "mm_plan_whole") == 0 || std::strcmp(kernel, "mm_start") == 0)
        *function = reinterpret_cast<CUfunction>(&plan);
}
void stand_in(const char *, const CUlaunchConfig *, CUfunction function, void **arguments, void **) {
    if (function != reinterpret_cast<CUfunction>(&plan)) return;
    const auto *args = static_cast<const mm_cuda_plan_args *>(arguments[0]);
    std::memset(args->pair_row, 0xFF, sizeof *args->pair_row * args->token_count * args->slots_per_token);
}

template <int N, typename F> struct wrapper;
template <int N, typename... A> struct wrapper<N, CUresult (*)(A...)> {
    static inline CUresult (*real)(A...);
    static inline const char *name;
    static CUresult call(A... arguments) {
        if (fails(name)) return faults.result;
        note(name, arguments...);
        const CUresult result = std::strcmp(name, "launch") == 0 ? CUDA_SUCCESS : real(arguments...);
        if (result == CUDA_SUCCESS) faults.held += held_by(name), stand_in(name, arguments...);
        return result;
    }
};

template <int N, typename F> void wrap(F &member, const char *name) {
    wrapper<N, F>::real = member;
    wrapper<N, F>::name = name;
    member = wrapper<N, F>::call;
}

} // namespace

mm_driver *faulty_driver_install(void) {
    const mm_driver *found = nullptr;
    if (mm_driver_load(&found) != MEGAMOE_OK) return nullptr;
    mm_driver *table = const_cast<mm_driver *>(found); // of the library, which keeps it in memory that can be written
    enum { FIRST = __COUNTER__ };
#define WRAP(field, symbol) wrap<__COUNTER__ - FIRST>(table->field, #field);
    MM_DRIVER_FUNCTIONS(WRAP)
#undef WRAP
    return table;
}
