// Compiled once per file of kernels, with KERNEL_FILE its path and KERNELS_<file> defined as "0," (CMakeLists.txt): the
// same source that nvcc compiles, and its entries in the table that kernels.h is the list of.
#include KERNEL_FILE

#include "backend/cuda/kernels.h"
#include "kernels_on_model.h"

static void add(const char *name, void (*run)(const void *), std::vector<size_t> sizes) {
    cuda_kernels()[name] = {name, run, std::move(sizes)};
}

// The second argument: empty where KERNELS_<file> is not defined, because what stands before `add` is then no comma.
#define SECOND(first, second, ...) second
#define PICK(...) SECOND(__VA_ARGS__)
#define KERNEL(function) cuda_kernel_caller<function, decltype(&function)>
#define ROW(number, file, function)                                                                                    \
    PICK(KERNELS_##file add(#function, KERNEL(function)::run, KERNEL(function)::sizes()), , );

static const int added = [] {
    MM_KERNELS(ROW)
    return 0;
}();
