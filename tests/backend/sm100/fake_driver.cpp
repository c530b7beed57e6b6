// A libcuda.so.1 whose GPU is the functional model: Blackwell's kernels and the portable ones run on it. With it in
// front of the library, the code between backend and driver, which no machine here can run otherwise, is run.
//   FAKE_CAPABILITY=100   compute capability times ten (default 100)
//   FAKE_FAULT=launch     launches of Blackwell kernels fail      FAKE_FAULT=flip   they give a wrong bit
//   FAKE_FAULT=launch_later, flip_later   the same in layers alone, so that the self-check passes
//   FAKE_FAULT=portable   a portable GEMM gives a wrong bit
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "backend/cuda/args.h"
#include "backend/cuda/kernels_on_model.h"
#include "backend/sm100/arguments.h"
#include "fake_capture.h"
#include "model_machine.h"
#include "sm100_model.h"

static struct model_state model;
static struct sm100_machine machine;
static std::map<uintptr_t, size_t> allocations;
static char context, stream, event;

// A function is an address in here, or a cuda_kernel; a module is any address.
static char functions[SM100_KERNEL_COUNT], modules[64];
static const char *const names[SM100_KERNEL_COUNT] = {"sm100_l1_small", "sm100_l1_large", "sm100_l2_small",
                                                      "sm100_l2_large", "sm100_l2_wide",  "sm100_plan",
                                                      "sm100_stage",    "sm100_combine"};

std::map<std::string, cuda_kernel> &cuda_kernels(void) {
    static std::map<std::string, cuda_kernel> kernels;
    return kernels;
}

static bool fault(const char *name) {
    const char *wanted = getenv("FAKE_FAULT");
    return wanted && strcmp(wanted, name) == 0;
}

static int capability(void) {
    const char *wanted = getenv("FAKE_CAPABILITY");
    return wanted ? atoi(wanted) : 100;
}

// ---- capture: launches on one stream are kept instead of run, and replayed as often as the test likes. ----

// A Blackwell kernel's arguments, as a graph node copies them when it is captured.
struct kept_launch {
    struct sm100_launch launch;
    alignas(64) unsigned char args[2048];
};
// A portable kernel's: one copy per parameter.
struct kept_cuda_launch {
    CUlaunchConfig config;
    uint32_t cluster;
    const cuda_kernel *kernel;
    std::vector<std::vector<unsigned char>> args;
};

static CUstream capturing; // NULL: no capture
static const char *broken; // the first call that a capture does not allow
static std::vector<std::variant<kept_launch, kept_cuda_launch>> graph;

// Calls that allocate, wait or touch host memory have no place in a run that a graph holds.
static bool forbidden(const char *call) {
    if (capturing && !broken) broken = call;
    return capturing != NULL;
}

static size_t args_bytes(int kernel) {
    return kernel == SM100_KERNEL_PLAN      ? sizeof(struct sm100_plan_args)
           : kernel == SM100_KERNEL_STAGE   ? sizeof(struct sm100_stage_args)
           : kernel == SM100_KERNEL_COMBINE ? sizeof(struct sm100_combine_args)
                                            : sizeof(struct sm100_gemm_args);
}
static_assert(sizeof(struct sm100_gemm_args) <= sizeof(kept_launch::args), "room for the largest arguments");

static void keep(const struct sm100_launch &launch) {
    kept_launch node = {launch, {}};
    memcpy(node.args, launch.args, args_bytes(launch.kernel));
    graph.push_back(node);
}

static void keep(const CUlaunchConfig &config, uint32_t cluster, const cuda_kernel &kernel, void **arguments) {
    kept_cuda_launch node = {config, cluster, &kernel, {}};
    for (size_t i = 0; i < kernel.sizes.size(); i++) {
        const unsigned char *from = (const unsigned char *)arguments[i];
        node.args.emplace_back(from, from + kernel.sizes[i]);
    }
    graph.push_back(std::move(node));
}

void fake_capture_begin(void *stream_captured) {
    capturing = (CUstream)stream_captured;
    broken = NULL;
    graph.clear();
}

const char *fake_capture_end(unsigned *launches) {
    capturing = NULL;
    *launches = 0;
    for (const auto &node : graph) *launches += std::holds_alternative<kept_launch>(node);
    return broken;
}

extern "C" {
static CUresult cuda_launch(const CUlaunchConfig *config, uint32_t cluster, const cuda_kernel &kernel,
                            void **arguments);
}

static bool replay(kept_launch &node) {
    node.launch.args = node.args;
    return machine.launch(machine.context, &node.launch, NULL) == MEGAMOE_OK;
}

static bool replay(kept_cuda_launch &node) {
    std::vector<void *> arguments;
    for (auto &argument : node.args) arguments.push_back(argument.data());
    return cuda_launch(&node.config, node.cluster, *node.kernel, arguments.data()) == CUDA_SUCCESS;
}

int fake_replay(void) {
    for (auto &node : graph)
        if (!std::visit([](auto &kept) { return replay(kept); }, node)) return 0;
    return 1;
}

extern "C" {
CUresult cuInit(unsigned) {
    machine = model_machine(&model, 4);
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
    return *version = 13000, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char **words) {
    return *words = "the fake driver refused", CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
    return *count = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int) {
    return *device = 0, CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int room, CUdevice) {
    return strncpy(name, "functional model", (size_t)room), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR            ? capability() / 10
             : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR          ? capability() % 10
             : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT              ? 4
             : which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448
                                                                              : 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice) {
    return *out = (CUcontext)&context, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext) {
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *out) {
    return *out = (CUcontext)&context, CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    if (forbidden("cuCtxSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

static CUresult failed(const char *kernel, const char *sentence) {
    fprintf(stderr, "fake driver: %s: %s\n", kernel, sentence);
    return CUDA_ERROR_LAUNCH_FAILED;
}

// A kernel written in CUDA's own words. Eight CTAs at a time: a grid may have thousands.
static CUresult cuda_launch(const CUlaunchConfig *config, uint32_t cluster, const cuda_kernel &kernel,
                            void **arguments) {
    if (capturing) return keep(*config, cluster, kernel, arguments), CUDA_SUCCESS;
    const struct sm100_model_launch launch = {kernel.name,
                                              kernel.run,
                                              arguments,
                                              config->gridDimX * config->gridDimY * config->gridDimZ,
                                              cluster,
                                              config->blockDimX,
                                              config->sharedMemBytes};
    struct sm100_model_options options = {};
    static struct sm100_model_report report;
    options.struct_size = sizeof options;
    options.seed = model.seed++;
    options.resident_ctas = 8;
    options.grid_x = config->gridDimX;
    options.grid_y = config->gridDimY;
    options.static_shared_bytes = 20480;
    if (sm100_model_run(&launch, 1, &options, &report) != SM100_MODEL_OK) return failed(kernel.name, report.message);
    if (fault("portable") && strcmp(kernel.name, "mm_tile_l2_nvfp4") == 0)
        ((uint32_t *)((const mm_cuda_gemm_args *)arguments[0])->y)[7] ^= 0x100;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *) {
    return *module = (CUmodule)modules, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) {
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
    for (int i = 0; i < SM100_KERNEL_COUNT; i++)
        if (strcmp(names[i], name) == 0) return *function = (CUfunction)&functions[i], CUDA_SUCCESS;
    if (strncmp(name, "sm100_", 6) == 0) return CUDA_ERROR_NOT_FOUND;
    // sm90's own, which are not here, can be loaded and not launched.
    return *function = (CUfunction)&cuda_kernels().try_emplace(name, cuda_kernel{name, NULL, {}}).first->second,
           CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction) {
    return *value = 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int value) {
    return value <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **) {
    const char *at = (const char *)function;
    if (capturing && config->hStream != capturing && forbidden("a launch on another stream"))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    uint32_t cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) cluster = config->attrs[i].value.clusterDim.x;
    if (at < functions || at >= functions + SM100_KERNEL_COUNT)
        return cuda_launch(config, cluster, *(const cuda_kernel *)function, arguments);
    const long number = at - functions;
    const struct sm100_gemm_args *gemm = (const struct sm100_gemm_args *)arguments[0];
    const bool large = number == SM100_KERNEL_L2_LARGE, of_layer = large && gemm->output_rows; /* not the check's */
    if (fault("launch") || (fault("launch_later") && of_layer)) return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    const struct sm100_launch launch = {(enum sm100_kernel)number, config->gridDimX, cluster, config->blockDimX,
                                        config->sharedMemBytes,    arguments[0],     0};
    if (capturing) {
        keep(launch);
        return CUDA_SUCCESS;
    }
    if (machine.launch(machine.context, &launch, NULL) != MEGAMOE_OK) return CUDA_ERROR_LAUNCH_FAILED;
    if ((fault("flip") && large) || (fault("flip_later") && of_layer)) ((uint32_t *)gemm->output)[7] ^= 0x100;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes) {
    if (forbidden("cuMemAlloc")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *memory =
        (CUdeviceptr)(uintptr_t)sm100_model_memory_alloc((bytes + 15) / 16 * 16, "device", SM100_MODEL_READ_WRITE);
    allocations[(uintptr_t)*memory] = bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr memory) {
    if (forbidden("cuMemFree")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    allocations.erase((uintptr_t)memory);
    sm100_model_memory_free((void *)(uintptr_t)memory);
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    if (forbidden("cuMemHostAlloc")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return (*memory = malloc(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFreeHost(void *memory) {
    return free(memory), CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute *, void **data, CUdeviceptr pointer) {
    auto next = allocations.upper_bound((uintptr_t)pointer);
    const bool ours = next != allocations.begin() && (--next)->first + next->second > (uintptr_t)pointer;
    *(unsigned *)data[0] = ours ? CU_MEMORYTYPE_DEVICE : 0;
    return CUDA_SUCCESS;
}
static CUresult copy(void *target, const void *source, size_t bytes) {
    return memmove(target, source, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream) {
    if (forbidden("cuMemcpyHtoDAsync")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return copy((void *)(uintptr_t)to, from, bytes);
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream) {
    if (forbidden("cuMemcpyDtoHAsync")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return copy(to, (const void *)(uintptr_t)from, bytes);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
    return copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream) {
    return memset((void *)(uintptr_t)to, byte, bytes), CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream *out, unsigned) {
    return *out = (CUstream)&stream, CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream) {
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) {
    if (forbidden("cuStreamSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) {
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *out, unsigned) {
    return *out = (CUevent)&event, CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent) {
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent, CUstream) {
    return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent) {
    if (forbidden("cuEventSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}
// cuda.h may map this name to a newer one; the library asks for the name it was compiled with.
CUresult cuEventElapsedTime(float *ms, CUevent, CUevent) {
    return *ms = 1.0f, CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    static const std::map<CUtensorMapDataType, enum sm100_model_data_type> types = {
        {CU_TENSOR_MAP_DATA_TYPE_UINT8, SM100_MODEL_U8},
        {CU_TENSOR_MAP_DATA_TYPE_UINT16, SM100_MODEL_U16},
        {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, SM100_MODEL_BF16},
        {CU_TENSOR_MAP_DATA_TYPE_FLOAT64, SM100_MODEL_U64}};
    const auto found = types.find(type);
    if (found == types.end()) return CUDA_ERROR_INVALID_VALUE;
    uint64_t pitches[4] = {0};
    for (cuuint32_t i = 0; i + 1 < rank; i++) pitches[i] = strides[i];
    if (sm100_model_tensor_map_encode(
            (struct sm100_tensor_map *)(void *)map, found->second, rank, base, dims, pitches, box,
            swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? SM100_MODEL_SWIZZLE_128B : SM100_MODEL_SWIZZLE_NONE))
        return failed("a tensor map", sm100_model_error()), CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
}

// What model_machine.cpp fails with; the fake driver's callers see a CUresult.
extern "C" megamoe_status mm_fail(megamoe_status status, const char *, ...);
extern "C" megamoe_status mm_fail(megamoe_status status, const char *, ...) {
    return status;
}
