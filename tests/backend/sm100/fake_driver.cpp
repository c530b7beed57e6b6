// A libcuda.so.1 whose GPU is the functional model: the Blackwell kernels run on it, all others do nothing. With it in
// front of the library, the code between backend and driver, which no machine here can run otherwise, is run.
//   FAKE_CAPABILITY=100   compute capability times ten (default 100)
//   FAKE_FAULT=launch     launches of Blackwell kernels fail      FAKE_FAULT=flip   they give a wrong bit
//   FAKE_FAULT=launch_later, flip_later   the same in layers alone, so that the self-check passes
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <map>
#include <string>
#include <vector>

#include "backend/sm100/arguments.h"
#include "fake_capture.h"
#include "model_machine.h"
#include "sm100_model.h"

static struct model_state model;
static struct sm100_machine machine;
static std::map<uintptr_t, size_t> allocations;
static char context, stream, event;

// Functions and modules are addresses in here; 0 is any kernel that is not Blackwell's.
static char functions[SM100_KERNEL_COUNT + 1], modules[64];
static const char *const names[SM100_KERNEL_COUNT] = {"sm100_l1_small", "sm100_l1_large", "sm100_l2_small",
                                                      "sm100_l2_large", "sm100_l2_wide",  "sm100_plan",
                                                      "sm100_stage",    "sm100_combine"};

static bool fault(const char *name) {
    const char *wanted = getenv("FAKE_FAULT");
    return wanted && strcmp(wanted, name) == 0;
}

static int capability(void) {
    const char *wanted = getenv("FAKE_CAPABILITY");
    return wanted ? atoi(wanted) : 100;
}

// ---- capture: launches on one stream are kept instead of run, and replayed as often as the test likes. ----

// The arguments of any kernel, as a graph node copies them when it is captured.
struct kept_launch {
    struct sm100_launch launch;
    alignas(64) unsigned char args[2048];
};

static CUstream capturing; // NULL: no capture
static const char *broken; // the first call that a capture does not allow
static std::vector<kept_launch> graph;

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
    graph.push_back({launch, {}});
    memcpy(graph.back().args, launch.args, args_bytes(launch.kernel));
}

void fake_capture_begin(void *stream_captured) {
    capturing = (CUstream)stream_captured;
    broken = NULL;
    graph.clear();
}

const char *fake_capture_end(unsigned *launches) {
    capturing = NULL;
    *launches = (unsigned)graph.size();
    return broken;
}

int fake_replay(void) {
    for (kept_launch &node : graph) {
        node.launch.args = node.args;
        if (machine.launch(machine.context, &node.launch, NULL) != MEGAMOE_OK) return 0;
    }
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

CUresult cuModuleLoadData(CUmodule *module, const void *) {
    return *module = (CUmodule)modules, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) {
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
    int found = 0;
    for (int i = 0; i < SM100_KERNEL_COUNT; i++)
        if (strcmp(names[i], name) == 0) found = i + 1;
    if (!found && strncmp(name, "sm100_", 6) == 0) return CUDA_ERROR_NOT_FOUND;
    return *function = (CUfunction)&functions[found], CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction) {
    return *value = 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int value) {
    return value <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **) {
    const long number = (char *)function - functions - 1;
    if (capturing && config->hStream != capturing && forbidden("a launch on another stream"))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (number < 0) return CUDA_SUCCESS;
    const struct sm100_gemm_args *gemm = (const struct sm100_gemm_args *)arguments[0];
    const bool large = number == SM100_KERNEL_L2_LARGE, of_layer = large && gemm->output_rows; /* not the check's */
    if (fault("launch") || (fault("launch_later") && of_layer)) return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    uint32_t cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) cluster = config->attrs[i].value.clusterDim.x;
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
    if (type != CU_TENSOR_MAP_DATA_TYPE_UINT8 && type != CU_TENSOR_MAP_DATA_TYPE_UINT16) return CUDA_SUCCESS;
    struct sm100_map m = {base,
                          type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1u : 2u,
                          rank,
                          {0},
                          {0},
                          {0},
                          swizzle == CU_TENSOR_MAP_SWIZZLE_128B};
    for (cuuint32_t i = 0; i < rank; i++) {
        m.dims[i] = dims[i];
        m.box[i] = box[i];
        if (i + 1 < rank) m.strides[i] = strides[i];
    }
    return machine.map(machine.context, &m, (struct sm100_tensor_map *)(void *)map) == MEGAMOE_OK
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}
}

// What model_machine.cpp fails with; the fake driver's callers see a CUresult.
extern "C" megamoe_status mm_fail(megamoe_status status, const char *, ...);
extern "C" megamoe_status mm_fail(megamoe_status status, const char *, ...) {
    return status;
}
