/* Memory, tensor maps and launches on a Blackwell GPU, through the driver. Launches go to the caller's stream
 * and wait for nothing; copies wait for everything, and belong to loading and to the check. */
#include "backend/sm100/gpu.h"

#include <stdlib.h>
#include <string.h>

#include "backend/sm100/arguments.h"
#include "backend/sm100/tiles.h"
#include "error.h"

/* Embedded by CMake. */
extern const unsigned char mm_kernels_sm100_gemm[], mm_kernels_sm100_plan[], mm_kernels_sm100_stage[],
    mm_kernels_sm100_combine[];

/* In the order of enum sm100_kernel: kernels of one image stand together. */
static const struct {
    const unsigned char *image;
    const char *name;
} kernels[SM100_KERNEL_COUNT] = {
    {mm_kernels_sm100_gemm, "sm100_l1_small"}, {mm_kernels_sm100_gemm, "sm100_l1_large"},
    {mm_kernels_sm100_gemm, "sm100_l2_small"}, {mm_kernels_sm100_gemm, "sm100_l2_large"},
    {mm_kernels_sm100_gemm, "sm100_l2_wide"},  {mm_kernels_sm100_plan, "sm100_plan"},
    {mm_kernels_sm100_stage, "sm100_stage"},   {mm_kernels_sm100_combine, "sm100_combine"},
};

static void *gpu_alloc(void *context, size_t bytes, const char *name) {
    struct sm100_gpu *gpu = context;
    CUdeviceptr memory = 0;
    (void)name; /* who asks says what for, if there is none */
    struct sm100_gpu_block *list = realloc(gpu->blocks, (gpu->block_count + 1) * sizeof *list);
    if (!list) return NULL;
    gpu->blocks = list;
    if (mm_cuda_enter(gpu->device) != MEGAMOE_OK) return NULL;
    CUresult result = gpu->device->driver->memory_allocate(&memory, bytes);
    mm_cuda_leave(gpu->device);
    if (result != CUDA_SUCCESS) return NULL;
    list[gpu->block_count++] = (struct sm100_gpu_block){(void *)(uintptr_t)memory, bytes};
    return (void *)(uintptr_t)memory;
}

static void gpu_release(void *context, void *memory) {
    struct sm100_gpu *gpu = context;
    if (!memory || mm_cuda_enter(gpu->device) != MEGAMOE_OK) return;
    gpu->device->driver->memory_free((CUdeviceptr)(uintptr_t)memory);
    mm_cuda_leave(gpu->device);
    for (uint32_t i = 0; i < gpu->block_count; i++)
        if (gpu->blocks[i].memory == memory) gpu->blocks[i] = gpu->blocks[--gpu->block_count];
}

uint64_t mm_sm100_gpu_bytes(const struct sm100_gpu *gpu) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < gpu->block_count; i++) bytes += gpu->blocks[i].bytes;
    return bytes;
}

static megamoe_status gpu_copy_in(void *context, void *target, const void *source, size_t bytes) {
    struct sm100_gpu *gpu = context;
    const mm_driver *driver = gpu->device->driver;
    MM_TRY(mm_cuda_enter(gpu->device));
    CUresult result = driver->context_wait();
    if (result == CUDA_SUCCESS)
        result = driver->copy_to_device((CUdeviceptr)(uintptr_t)target, source, bytes, gpu->device->stream);
    if (result == CUDA_SUCCESS) result = driver->stream_wait(gpu->device->stream);
    mm_cuda_leave(gpu->device);
    return mm_driver_status(driver, result, "copying to the GPU");
}

static megamoe_status gpu_copy_out(void *context, void *target, const void *source, size_t bytes) {
    struct sm100_gpu *gpu = context;
    const mm_driver *driver = gpu->device->driver;
    MM_TRY(mm_cuda_enter(gpu->device));
    CUresult result = driver->context_wait();
    if (result == CUDA_SUCCESS)
        result = driver->copy_to_host(target, (CUdeviceptr)(uintptr_t)source, bytes, gpu->device->stream);
    if (result == CUDA_SUCCESS) result = driver->stream_wait(gpu->device->stream);
    mm_cuda_leave(gpu->device);
    return mm_driver_status(driver, result, "reading GPU memory");
}

static megamoe_status gpu_map(void *context, const struct sm100_map *map, struct sm100_tensor_map *encoded) {
    const struct sm100_gpu *gpu = context;
    cuuint64_t dims[3] = {map->dims[0], map->dims[1], map->dims[2]}, strides[2] = {map->strides[0], map->strides[1]};
    const cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMapDataType type = map->element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
    _Static_assert(sizeof(CUtensorMap) == sizeof *encoded, "a tensor map has 128 bytes");
    return mm_driver_status(gpu->device->driver,
                            gpu->device->driver->tensor_map_encode(
                                (CUtensorMap *)(void *)encoded, type, map->rank, (void *)(uintptr_t)map->base, dims,
                                strides, map->box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                map->swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                            "describing an operand");
}

static megamoe_status gpu_launch(void *context, const struct sm100_launch *launch, void *stream) {
    const struct sm100_gpu *gpu = context;
    void *arguments[] = {(void *)(uintptr_t)launch->args};
    CUlaunchAttribute cluster = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                 .value = {.clusterDim = {launch->cluster, 1, 1}}};
    CUlaunchConfig config = {.gridDimX = launch->grid,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = launch->block,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = launch->shared_bytes,
                             .hStream = stream,
                             .attrs = &cluster,
                             .numAttrs = launch->cluster > 1};
    MM_TRY(mm_cuda_enter(gpu->device));
    CUresult result = gpu->device->driver->launch(&config, gpu->functions[launch->kernel], arguments, NULL);
    mm_cuda_leave(gpu->device);
    return mm_driver_status(gpu->device->driver, result, kernels[launch->kernel].name);
}

static megamoe_status load_kernel(struct sm100_gpu *gpu, uint32_t i) {
    const mm_driver *driver = gpu->device->driver;
    CUresult result = CUDA_SUCCESS;
    if (i == 0 || kernels[i].image != kernels[i - 1].image) {
        result = driver->module_load(&gpu->modules[gpu->module_count], kernels[i].image);
        gpu->module_count += result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = driver->module_function(&gpu->functions[i], gpu->modules[gpu->module_count - 1], kernels[i].name);
    if (result == CUDA_SUCCESS && i < SM100_TILE_COUNT)
        result = driver->function_set(gpu->functions[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      (int)sm100_shared_bytes(sm100_tiles[i]));
    return mm_driver_status(driver, result, kernels[i].name);
}

megamoe_status mm_sm100_gpu_open(mm_backend_state *device, struct sm100_gpu *gpu, struct sm100_machine *machine) {
    megamoe_status status;
    *gpu = (struct sm100_gpu){.device = device};
    MM_TRY(mm_cuda_enter(device));
    status = MEGAMOE_OK;
    for (uint32_t i = 0; i < SM100_KERNEL_COUNT && status == MEGAMOE_OK; i++) status = load_kernel(gpu, i);
    mm_cuda_leave(device);
    if (status != MEGAMOE_OK) {
        mm_sm100_gpu_close(gpu);
        return status;
    }
    *machine = (struct sm100_machine){gpu,         device->sm_count, gpu_alloc, gpu_release,
                                      gpu_copy_in, gpu_copy_out,     gpu_map,   gpu_launch};
    return MEGAMOE_OK;
}

void mm_sm100_gpu_close(struct sm100_gpu *gpu) {
    free(gpu->blocks);
    gpu->blocks = NULL;
    gpu->block_count = 0;
    if (mm_cuda_enter(gpu->device) != MEGAMOE_OK) return;
    for (uint32_t i = 0; i < gpu->module_count; i++) gpu->device->driver->module_unload(gpu->modules[i]);
    mm_cuda_leave(gpu->device);
    gpu->module_count = 0;
}

/* ---- the portable kernels, for the self-check ---- */

enum { PRODUCT_BLOCKS = 2 + 2 * 8 + 2 }; /* rows' codes and scales, eight groups', ends, results */

/* One product's device memory. */
struct product_memory {
    struct sm100_gpu *gpu;
    void *blocks[PRODUCT_BLOCKS];
    uint32_t count;
    megamoe_status status; /* of the first part that failed */
};

static void *product_part(struct product_memory *m, const void *data, size_t bytes) {
    if (m->status != MEGAMOE_OK) return NULL;
    void *block = gpu_alloc(m->gpu, bytes, "self-check");
    if (!block)
        m->status = mm_fail(MEGAMOE_OUT_OF_MEMORY, "no GPU memory for a self-check of %zu bytes", bytes);
    else
        m->blocks[m->count++] = block;
    if (block && data) m->status = gpu_copy_in(m->gpu, block, data, bytes);
    return block;
}

static megamoe_status product_run(struct product_memory *m, const struct sm100_product *p, float *results) {
    mm_matrix groups[8];
    const int64_t rows = p->rows, columns = p->columns, features = p->features;
    megamoe_tensor codes = {.dtype = MEGAMOE_E2M1X2, .rank = 2, .extent = {rows, columns}};
    megamoe_tensor scales = {.dtype = MEGAMOE_E4M3, .rank = 2, .extent = {rows, columns / 16}};
    megamoe_tensor output = {.dtype = MEGAMOE_F32, .rank = 2, .extent = {rows, features}};
    codes.data = product_part(m, p->codes, (size_t)(rows * columns) / 2);
    scales.data = product_part(m, p->scales, (size_t)(rows * columns) / 16);
    for (uint32_t g = 0; g < p->group_count; g++) {
        groups[g] = p->groups[g];
        groups[g].codes = product_part(m, p->groups[g].codes, (size_t)features * p->groups[g].row_bytes);
        groups[g].scales = product_part(m, p->groups[g].scales, (size_t)features * p->groups[g].scale_row_bytes);
    }
    const int32_t *ends = product_part(m, p->ends, p->group_count * sizeof *ends);
    output.data = product_part(m, NULL, (size_t)(rows * features) * sizeof *results);
    MM_TRY(m->status);
    MM_TRY(mm_cuda_grouped_gemm(m->gpu->device, &codes, &scales, groups, ends, p->group_count, &output,
                                m->gpu->device->stream));
    return gpu_copy_out(m->gpu, results, output.data, (size_t)(rows * features) * sizeof *results);
}

megamoe_status mm_sm100_gpu_multiply(void *gpu, const struct sm100_product *product, float *results) {
    struct product_memory memory = {.gpu = gpu, .status = MEGAMOE_OK};
    if (product->group_count > 8)
        return mm_fail(MEGAMOE_INVALID_ARGUMENT, "%u groups in a self-check of 8", product->group_count);
    megamoe_status status = product_run(&memory, product, results);
    for (uint32_t i = 0; i < memory.count; i++) gpu_release(gpu, memory.blocks[i]);
    return status;
}
