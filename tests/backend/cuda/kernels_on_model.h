// The portable kernels, and sm90's, as the fake driver launches them: found by name, with the driver's arguments.
#ifndef TESTS_CUDA_KERNELS_ON_MODEL_H
#define TESTS_CUDA_KERNELS_ON_MODEL_H

#include <stdint.h>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct cuda_kernel {
    const char *name;
    void (*run)(const void *arguments); // void *const[]: the kernel's parameters, as cuLaunchKernelEx takes them
    std::vector<size_t> sizes;          // of the parameters
};

// By name. Filled before main by the files that kernels_on_model.cpp is compiled into.
std::map<std::string, cuda_kernel> &cuda_kernels(void);

template <auto kernel, typename signature> struct cuda_kernel_caller;
template <auto kernel, typename... parameters> struct cuda_kernel_caller<kernel, void (*)(parameters...)> {
    template <size_t... i> static void call(void *const *arguments, std::index_sequence<i...>) {
        kernel(*static_cast<std::remove_reference_t<parameters> *>(arguments[i])...);
    }
    static std::vector<size_t> sizes(void) { return {sizeof(std::remove_reference_t<parameters>)...}; }
    static void run(const void *arguments) {
        call(static_cast<void *const *>(arguments), std::index_sequence_for<parameters...>());
    }
};

#endif
