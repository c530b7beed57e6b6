/* The host half of sm90_common.cu: the same few functions over the CUDA runtime and over the model, then the cases. */

#if defined(__CUDACC__)
#    include <cuda.h>
#    include <cuda_runtime.h>

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    printf("# %s: %s\n", what, cudaGetErrorString(error));
    fflush(stdout);
    exit(1);
}
static bool device_lost; // after a fault nothing but a new process helps: see main
static uint8_t *device_alloc(size_t bytes, const char *) {
    void *p = nullptr;
    check(cudaMalloc(&p, bytes), "cudaMalloc");
    return (uint8_t *)p;
}
static void device_free(uint8_t *p) {
    cudaFree(p);
}
static void device_write(uint8_t *to, const std::vector<uint8_t> &from) {
    check(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}
static void device_read(std::vector<uint8_t> &to, const uint8_t *from) {
    if (!device_lost) check(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
}

enum data_type { type_u8, type_u16, type_u32, type_f32, type_bf16 };
static bool encode(struct sm100_tensor_map *map, data_type type, uint32_t rank, void *address, const uint64_t *dims,
                   const uint64_t *strides, const uint32_t *box, uint32_t swizzle) {
    static const CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                                CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                                CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                        const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill);
    static encode_function function = nullptr;
    if (!function) {
        cudaDriverEntryPointQueryResult result;
        void *entry = nullptr;
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result),
              "cuTensorMapEncodeTiled");
        function = (encode_function)entry;
    }
    const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
    return function((CUtensorMap *)map, types[type], rank, address, (const cuuint64_t *)dims,
                    (const cuuint64_t *)strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                    (CUtensorMapSwizzle)swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
static std::string launch(const char *name, const void *kernel, struct common_args *args, uint32_t grid,
                          uint32_t cluster, uint32_t block) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_total), name);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared_total;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    void *parameters[] = {args};
    cudaError_t error = cudaLaunchKernelExC(&config, kernel, parameters);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    device_lost = error != cudaSuccess;
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
#    define TEXT_OF(name) #    name
#    define LAUNCH(kernel, ...) launch(TEXT_OF(kernel), (const void *)kernel, __VA_ARGS__)

static void header_print(void) {
    cudaDeviceProp properties;
    int driver = 0, runtime = 0;
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    printf("# GPU: %s, compute capability %d.%d; CUDA driver %d, runtime %d\n", properties.name, properties.major,
           properties.minor, driver, runtime);
}

#else
#    include "sm100_model.h"

static struct sm100_model_options model_options = {sizeof(struct sm100_model_options), 0, 0, 0, 0, 0, 0, 0, 0};

static uint8_t *device_alloc(size_t bytes, const char *name) {
    return (uint8_t *)sm100_model_memory_alloc(bytes, name, SM100_MODEL_READ_WRITE);
}
static void device_free(uint8_t *p) {
    sm100_model_memory_free(p);
}
static void device_write(uint8_t *to, const std::vector<uint8_t> &from) {
    memcpy(to, from.data(), from.size());
}
static void device_read(std::vector<uint8_t> &to, const uint8_t *from) {
    memcpy(to.data(), from, to.size());
}

enum data_type { type_u8, type_u16, type_u32, type_f32, type_bf16 };
static bool encode(struct sm100_tensor_map *map, data_type type, uint32_t rank, void *address, const uint64_t *dims,
                   const uint64_t *strides, const uint32_t *box, uint32_t swizzle) {
    return sm100_model_tensor_map_encode(map, (enum sm100_model_data_type)type, rank, address, dims, strides, box,
                                         (enum sm100_model_swizzle)swizzle) == 0;
}
template <void (*kernel)(const struct common_args &)>
static std::string launch(const char *name, struct common_args *args, uint32_t grid, uint32_t cluster, uint32_t block) {
    const struct sm100_model_launch spec = {
        name, SM100_MODEL_THUNK(kernel, struct common_args), args, grid, cluster, block, shared_total};
    struct sm100_model_report report;
    sm100_model_run(&spec, 1, &model_options, &report);
    return report.message;
}
#    define TEXT_OF(name) #    name
#    define LAUNCH(kernel, ...) launch<kernel>(TEXT_OF(kernel), __VA_ARGS__)

static void header_print(void) {}
#endif

// ---- What a case leaves behind. ----

static std::vector<std::string> case_lines;

static void record(const std::string &line) {
    case_lines.push_back(line);
    printf("%s\n", line.c_str());
    fflush(stdout);
}

static void record_bytes(const std::string &name, const std::vector<uint8_t> &bytes, const std::string &problem = "") {
    uint64_t digest = 0xCBF29CE484222325u; // FNV-1a
    for (uint8_t b : bytes) digest = (digest ^ b) * 0x100000001B3u;
    char text[64];
    snprintf(text, sizeof text, " bytes=%zu digest=%016llx first=", bytes.size(), (unsigned long long)digest);
    std::string line = "case " + name + text;
    for (size_t i = 0; i < bytes.size() && i < 24; i++) {
        snprintf(text, sizeof text, "%02x", bytes[i]);
        line += text;
    }
    // How a machine stops is its own affair; that it stops must agree.
    if (!problem.empty()) {
        printf("# %s\n", problem.c_str());
        line = "case " + name + " stopped";
    }
    record(line);
}

// On a GPU a fault ends the process, so there each case can be run by a child of its own: main counts them first.
static int case_index, case_only = -1;
static bool selected(void) {
    const int index = case_index++;
    return case_only < 0 || index == case_only;
}

struct Buffer {
    uint8_t *device;
    std::vector<uint8_t> host;
    Buffer(size_t bytes, const char *name, uint32_t seed) : device(device_alloc(bytes, name)), host(bytes, 0xCC) {
        uint32_t x = seed;
        if (seed)
            for (uint8_t &b : host) b = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
        upload();
    }
    ~Buffer() { device_free(device); }
    void upload() { device_write(device, host); }
    const std::vector<uint8_t> &download() {
        device_read(host, device);
        return host;
    }
};

// ---- The cases. ----

static const uint32_t element_bytes[] = {1, 2, 4, 4, 2};

struct LoadCase {
    const char *name;
    data_type type;
    uint32_t rank, swizzle;
    uint64_t dims[3];
    uint32_t box[3];
    int32_t at[3];
};

// Coordinates before, across and after every edge; each swizzle; each element size.
static const LoadCase load_cases[] = {
    {"u8 none inside", type_u8, 2, 0, {256, 64, 1}, {64, 32, 1}, {16, 8, 0}},
    {"u8 none 48 wide", type_u8, 2, 0, {256, 64, 1}, {48, 20, 1}, {16, 8, 0}},
    {"u8 none 200 columns", type_u8, 2, 0, {200, 64, 1}, {64, 32, 1}, {16, 8, 0}},
    {"u8 none from 8", type_u8, 2, 0, {256, 64, 1}, {64, 32, 1}, {8, 8, 0}},
    {"u8 none from 4", type_u8, 2, 0, {256, 64, 1}, {64, 32, 1}, {4, 8, 0}},
    {"u8 none from 1", type_u8, 2, 0, {256, 64, 1}, {64, 32, 1}, {1, 8, 0}},
    {"u8 none odd offset", type_u8, 2, 0, {200, 64, 1}, {48, 20, 1}, {7, 3, 0}},
    {"u8 sw32 inside", type_u8, 2, 1, {256, 64, 1}, {32, 64, 1}, {32, 0, 0}},
    {"u8 sw64 inside", type_u8, 2, 2, {256, 64, 1}, {64, 64, 1}, {64, 0, 0}},
    {"u8 sw128 inside", type_u8, 2, 3, {256, 64, 1}, {128, 64, 1}, {128, 0, 0}},
    {"u8 sw128 rows odd", type_u8, 2, 3, {256, 64, 1}, {128, 13, 1}, {0, 5, 0}},
    {"u8 sw32 past the right", type_u8, 2, 1, {250, 40, 1}, {32, 24, 1}, {230, 8, 0}},
    {"u8 sw64 past the bottom", type_u8, 2, 2, {256, 40, 1}, {64, 32, 1}, {64, 25, 0}},
    {"u8 sw128 past both", type_u8, 2, 3, {250, 40, 1}, {128, 32, 1}, {131, 25, 0}},
    {"u8 sw128 negative", type_u8, 2, 3, {256, 40, 1}, {128, 16, 1}, {-37, -5, 0}},
    {"u8 none negative", type_u8, 2, 0, {256, 40, 1}, {96, 16, 1}, {-20, -3, 0}},
    {"u8 sw128 all outside", type_u8, 2, 3, {256, 40, 1}, {128, 16, 1}, {300, 0, 0}},
    {"u8 none all above", type_u8, 2, 0, {256, 40, 1}, {64, 16, 1}, {0, -100, 0}},
    {"u16 none", type_u16, 2, 0, {120, 40, 1}, {40, 16, 1}, {90, 30, 0}},
    {"u16 sw128", type_u16, 2, 3, {120, 40, 1}, {64, 24, 1}, {-3, 20, 0}},
    {"bf16 sw64", type_bf16, 2, 2, {120, 40, 1}, {32, 24, 1}, {100, 2, 0}},
    {"u32 sw32", type_u32, 2, 1, {60, 40, 1}, {8, 64, 1}, {55, 10, 0}},
    {"u32 sw128", type_u32, 2, 3, {60, 40, 1}, {32, 40, 1}, {40, -1, 0}},
    {"f32 sw128", type_f32, 2, 3, {60, 40, 1}, {32, 17, 1}, {30, 30, 0}},
    {"u8 3d none", type_u8, 3, 0, {96, 12, 7}, {48, 5, 3}, {60, 9, 5}},
    {"u8 3d sw128", type_u8, 3, 3, {300, 12, 7}, {128, 8, 4}, {200, 6, 2}},
    {"u8 3d sw64 negative", type_u8, 3, 2, {300, 12, 7}, {64, 5, 4}, {-10, -2, -1}},
    {"u8 3d sw32 corner", type_u8, 3, 1, {300, 12, 7}, {32, 16, 3}, {290, 5, 6}},
    {"u16 3d sw128", type_u16, 3, 3, {150, 12, 7}, {64, 3, 5}, {100, 10, -2}},
    // The same with boxes that start at a multiple of 16 bytes, as they must.
    {"u8 sw32 right edge", type_u8, 2, 1, {250, 40, 1}, {32, 24, 1}, {224, 8, 0}},
    {"u8 sw128 corner", type_u8, 2, 3, {250, 40, 1}, {128, 32, 1}, {128, 25, 0}},
    {"u8 sw128 left of all", type_u8, 2, 3, {256, 40, 1}, {128, 16, 1}, {-48, -5, 0}},
    {"u8 sw128 right of all", type_u8, 2, 3, {256, 40, 1}, {128, 16, 1}, {320, 0, 0}},
    {"u8 none corner", type_u8, 2, 0, {201, 40, 1}, {96, 16, 1}, {144, 30, 0}},
    {"u16 sw128 edge", type_u16, 2, 3, {121, 40, 1}, {64, 24, 1}, {72, 20, 0}},
    {"bf16 sw64 edge", type_bf16, 2, 2, {121, 40, 1}, {32, 24, 1}, {104, 2, 0}},
    {"u32 sw32 edge", type_u32, 2, 1, {59, 40, 1}, {8, 64, 1}, {56, 10, 0}},
    {"f32 sw128 corner", type_f32, 2, 3, {61, 40, 1}, {32, 17, 1}, {44, 30, 0}},
    {"u8 3d none corner", type_u8, 3, 0, {96, 12, 7}, {48, 5, 3}, {64, 9, 5}},
    {"u8 3d sw128 corner", type_u8, 3, 3, {301, 12, 7}, {128, 8, 4}, {208, 6, 5}},
    {"u8 3d sw64 before all", type_u8, 3, 2, {300, 12, 7}, {64, 5, 4}, {-16, -2, -1}},
    {"u16 3d sw128 corner", type_u16, 3, 3, {151, 12, 7}, {64, 3, 5}, {96, 10, 4}},
    // Rows narrower than the swizzle: whether they are packed or padded is the hardware's to say.
    {"u8 sw128 narrow 64", type_u8, 2, 3, {256, 64, 1}, {64, 32, 1}, {0, 0, 0}},
    {"u8 sw128 narrow 16", type_u8, 2, 3, {256, 64, 1}, {16, 64, 1}, {0, 0, 0}},
    {"u8 sw64 narrow 32", type_u8, 2, 2, {256, 64, 1}, {32, 32, 1}, {0, 0, 0}},
    {"u16 sw128 narrow 96", type_u16, 2, 3, {120, 64, 1}, {48, 24, 1}, {0, 0, 0}},
};

static uint64_t map_for(struct sm100_tensor_map *map, const LoadCase &c, uint8_t *address) {
    const uint64_t row = (c.dims[0] * element_bytes[c.type] + 15) / 16 * 16 + 16; // a pitch wider than the row
    const uint64_t strides[] = {row, row * (c.dims[1] + 2)};
    if (!encode(map, c.type, c.rank, address, c.dims, strides, c.box, c.swizzle)) return 0;
    return c.rank == 2 ? row * c.dims[1] : strides[1] * c.dims[2];
}

static void print_raw(const std::vector<uint8_t> &bytes, size_t first, size_t count);

static void run_loads(void) {
    for (const LoadCase &c : load_cases) {
        if (!selected()) continue;
        Buffer in(200000, "in", 77), out(20480, "out", 0);
        struct common_args args = {};
        const std::string name = std::string("tensor load ") + c.name;
        if (!map_for(&args.map, c, in.device)) {
            record("case " + name + " refused by the encoder");
            continue;
        }
        args.out = out.device;
        args.u[0] = c.rank;
        args.u[1] = c.box[0] * c.box[1] * (c.rank == 3 ? c.box[2] : 1) * element_bytes[c.type];
        args.u[3] = 1024;
        args.u[2] = 20480;
        for (int i = 0; i < 3; i++) args.c[i] = c.at[i];
        const std::string problem = LAUNCH(tensor_load_kernel, &args, 1, 1, 128);
        record_bytes(name, out.download(), problem);
        if (strstr(c.name, "narrow")) print_raw(out.host, 1024, 1024);
    }
}

static void run_stores(void) {
    for (size_t i = 0; i < sizeof load_cases / sizeof *load_cases - 4; i++) {
        const LoadCase &c = load_cases[i];
        if (!selected()) continue;
        Buffer in(65536, "in", 99), tensor(200000, "tensor", 5);
        struct common_args args = {};
        if (!map_for(&args.map, c, tensor.device)) continue;
        args.in = in.device;
        args.u[0] = c.rank;
        args.u[1] = c.box[0] * c.box[1] * (c.rank == 3 ? c.box[2] : 1) * element_bytes[c.type];
        for (int k = 0; k < 3; k++) args.c[k] = c.at[k];
        const std::string problem = LAUNCH(tensor_store_kernel, &args, 1, 1, 128);
        record_bytes(std::string("tensor store ") + c.name, tensor.download(), problem);
    }
}

static void run_multicasts(void) {
    const uint32_t masks[] = {0xF, 0x5, 0x8, 0x3, 0x6};
    for (uint32_t i = 0; i < 30; i++) { // the first half starts at byte 140 of a row, which is not allowed
        if (!selected()) continue;
        const uint32_t kind = i % 3;
        const LoadCase c = {
            "", type_u8, kind == 2 ? 3u : 2u, kind == 2 ? 2u : 3u, {250, 60, 5}, {kind == 2 ? 64u : 128u, 12, 4}, {}};
        Buffer in(200000, "in", 31 + i), out(4 * (8192 + 256), "out", 0);
        struct common_args args = {};
        map_for(&args.map, c, in.device);
        args.in = in.device;
        args.out = out.device;
        args.u[0] = masks[i / 3 % 5];
        args.u[1] = i % 4;
        args.u[2] = kind == 0 ? 128 * 12 : kind == 1 ? 2048 : 64 * 12 * 4;
        args.u[3] = kind;
        args.c[0] = i < 15 ? 140 : 144;
        args.c[1] = 53;
        args.c[2] = 2;
        const std::string problem = LAUNCH(multicast_kernel, &args, 4, 4, 32);
        static const char *const kinds[] = {"2d", "bulk", "3d"};
        record_bytes(std::string("multicast ") + kinds[kind] + " mask " + std::to_string(masks[i / 3 % 5]) + " from " +
                         std::to_string(i % 4) + (i < 15 ? "" : " aligned"),
                     out.download(), problem);
    }
}

static void run_synchronization(void) {
    struct common_args args = {};
    if (selected()) {
        Buffer in(65536, "in", 123);
        args.in = in.device;
        Buffer out(1024, "out", 0);
        args.out = out.device;
        const std::string problem = LAUNCH(mbarrier_kernel, &args, 1, 1, 32);
        record_bytes("mbarrier phases", out.download(), problem);
    }
    for (uint32_t cluster : {2u, 4u, 8u}) {
        if (!selected()) continue;
        Buffer out(256 * 8, "out", 0);
        args.out = out.device;
        const std::string problem = LAUNCH(cluster_kernel, &args, 8, cluster, 32);
        record_bytes("cluster of " + std::to_string(cluster), out.download(), problem);
    }
    for (uint32_t bytes : {32u, 992u, 8192u, 16384u}) {
        if (!selected()) continue;
        Buffer in(65536, "in", 123);
        args.in = in.device;
        Buffer out(4 * bytes, "out", 0);
        args.out = out.device;
        args.u[0] = bytes;
        const std::string problem = LAUNCH(bulk_kernel, &args, 4, 4, 32);
        record_bytes("bulk copies of " + std::to_string(bytes), out.download(), problem);
    }
    if (selected()) {
        Buffer out(1536, "out", 0);
        args.out = out.device;
        const std::string problem = LAUNCH(named_barrier_kernel, &args, 1, 1, 128);
        record_bytes("named barriers", out.download(), problem);
    }
    if (selected()) {
        Buffer out(32 * 48, "out", 0);
        args.out = out.device;
        const std::string problem = LAUNCH(warp_kernel, &args, 1, 1, 32);
        record_bytes("warp-wide instructions", out.download(), problem);
    }
}

static void run_counters(void) {
    struct common_args args = {};
    if (selected()) {
        Buffer out(64 + 4 * 64 * 16, "out", 0);
        std::fill(out.host.begin(), out.host.end(), (uint8_t)0);
        out.upload();
        args.out = out.device;
        const std::string problem = LAUNCH(counter_kernel, &args, 16, 1, 64);
        record_bytes("grid counters", out.download(), problem);
    }
    if (selected()) {
        Buffer out(256, "out", 0);
        std::fill(out.host.begin(), out.host.end(), (uint8_t)0);
        out.upload();
        args.out = out.device;
        const std::string problem = LAUNCH(flag_kernel, &args, 2, 1, 32);
        record_bytes("flags between CTAs", out.download(), problem);
    }
    for (uint32_t swizzle = 0; swizzle < 4; swizzle++) {
        if (!selected()) continue;
        Buffer in(200000, "in", 7), out(128, "out", 0);
        const LoadCase c = {"", type_u8, 2, swizzle, {128, 500, 1}, {swizzle ? 16u << swizzle : 128, 40, 1}, {}};
        map_for(&args.map, c, in.device);
        args.out = out.device;
        args.u[0] = 13;
        args.u[1] = c.box[0] * 40;
        args.u[2] = 40;
        const std::string problem = LAUNCH(pipeline_kernel, &args, 1, 1, 64);
        record_bytes("pipeline, swizzle " + std::to_string(swizzle), out.download(), problem);
    }
}

// All BF16 values as fp32, each also half a step, and just under and over half a step, above.
static void run_arithmetic(void) {
    if (!selected()) return;
    const uint32_t count = 1u << 17;
    Buffer in(8 * count, "in", 0), out(32 * count, "out", 0);
    static const uint32_t tails[] = {0, 0x8000, 0x7FFF, 0x8001};
    uint32_t x = 1;
    for (uint32_t i = 0; i < 2 * count; i++) {
        uint32_t bits = (i / 4) << 16 | tails[i % 4];
        x = x * 1664525u + 1013904223u;
        if (i % 2) bits = (x & 0x807FFFFFu) | (110 + (x >> 8) % 30) << 23;
        memcpy(in.host.data() + 4 * i, &bits, 4);
    }
    in.upload();
    struct common_args args = {};
    args.in = in.device;
    args.out = out.device;
    args.u[0] = count;
    const std::string problem = LAUNCH(arithmetic_kernel, &args, 4, 1, 128);
    out.download();
    // One digest per result, so that a difference names the instruction.
    static const struct {
        const char *name;
        uint32_t first, bytes;
    } parts[] = {{"cvt e4m3x2", 0, 2}, {"cvt f16x2.e4m3x2", 4, 4},
                 {"cvt bf16x2", 8, 4}, {"add", 12, 4},
                 {"mul", 16, 4},       {"fma", 20, 4},
                 {"div", 24, 4},       {"cvt f32.f16", 28, 4}};
    for (const auto &part : parts) {
        std::vector<uint8_t> bytes;
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t b = 0; b < part.bytes; b++) bytes.push_back(out.host[32 * i + part.first + b]);
        record_bytes(part.name, bytes, problem);
    }
}

static void run_wgmma(void) {
    for (uint32_t swizzle = 0; swizzle < 4; swizzle++)
        for (uint32_t first_b = 0; first_b <= 64; first_b += 24) {
            if (!selected()) continue;
            const uint32_t pitch = swizzle == 0 ? 64 : 256u >> swizzle; // descriptor codes: 1 is 128 bytes, 3 is 32
            Buffer a(64 * 128, "a", 3 + swizzle), b(128 * 128, "b", 17 + swizzle), out(64 * 64 * 4, "out", 0);
            static const uint8_t values[] = {0x00, 0x38, 0x40, 0xB8, 0xC0, 0x44, 0x30, 0xC4}; // 0 1 2 -1 -2 3 .5 -3
            for (Buffer *buffer : {&a, &b}) {
                for (uint8_t &v : buffer->host) v = values[v & 7];
                buffer->upload();
            }
            struct common_args args = {};
            const uint64_t dims_a[] = {128, 64}, dims_b[] = {128, 128}, strides[] = {128};
            const uint32_t box_a[] = {swizzle ? pitch : 16, 64}, box_b[] = {swizzle ? pitch : 16, 128};
            const uint32_t tma_swizzle = swizzle ? 4 - swizzle : 0;
            encode(&args.map, type_u8, 2, a.device, dims_a, strides, box_a, tma_swizzle);
            encode(&args.map2, type_u8, 2, b.device, dims_b, strides, box_b, tma_swizzle);
            args.out = out.device;
            args.u[0] = swizzle;
            args.u[1] = pitch;
            args.u[2] = pitch / 32;
            args.u[3] = first_b;
            const std::string problem = LAUNCH(wgmma_kernel, &args, 1, 1, 128);
            record_bytes("wgmma, rows of " + std::to_string(swizzle ? pitch : 0) + " bytes, B from row " +
                             std::to_string(first_b),
                         out.download(), problem);
        }
}

static void run_encodings(void) {
    struct EncodeCase {
        const char *name;
        data_type type;
        uint32_t rank;
        uint64_t dims[3], strides[2];
        uint32_t box[3], swizzle, shift;
    };
    static const EncodeCase cases[] = {
        {"plain", type_u8, 2, {256, 64, 1}, {256, 0}, {64, 32, 1}, 0, 0},
        {"address not a multiple of 16", type_u8, 2, {256, 64, 1}, {256, 0}, {64, 32, 1}, 0, 8},
        {"stride not a multiple of 16", type_u8, 2, {256, 64, 1}, {264, 0}, {64, 32, 1}, 0, 0},
        {"box of 257", type_u8, 2, {512, 64, 1}, {512, 0}, {257, 32, 1}, 0, 0},
        {"box of 256", type_u8, 2, {512, 64, 1}, {512, 0}, {256, 32, 1}, 0, 0},
        {"box rows 257", type_u8, 2, {512, 640, 1}, {512, 0}, {64, 257, 1}, 0, 0},
        {"box of 0", type_u8, 2, {512, 64, 1}, {512, 0}, {0, 32, 1}, 0, 0},
        {"box row of 8 bytes", type_u8, 2, {512, 64, 1}, {512, 0}, {8, 32, 1}, 0, 0},
        {"box row of 24 bytes", type_u8, 2, {512, 64, 1}, {512, 0}, {24, 32, 1}, 0, 0},
        {"sw128 with 256-byte rows", type_u8, 2, {512, 64, 1}, {512, 0}, {256, 32, 1}, 3, 0},
        {"sw64 with 128-byte rows", type_u8, 2, {512, 64, 1}, {512, 0}, {128, 32, 1}, 2, 0},
        {"sw32 with 64-byte rows", type_u8, 2, {512, 64, 1}, {512, 0}, {64, 32, 1}, 1, 0},
        {"sw128 with 64-byte rows", type_u8, 2, {512, 64, 1}, {512, 0}, {64, 32, 1}, 3, 0},
        {"dimension of 0", type_u8, 2, {512, 0, 1}, {512, 0}, {64, 32, 1}, 0, 0},
        {"dimension of 2^32", type_u8, 2, {512, 1ull << 32, 1}, {512, 0}, {64, 32, 1}, 0, 0},
        {"dimension over 2^32", type_u8, 2, {512, (1ull << 32) + 1, 1}, {512, 0}, {64, 32, 1}, 0, 0},
        {"stride of 2^40", type_u8, 2, {512, 64, 1}, {1ull << 40, 0}, {64, 32, 1}, 0, 0},
        {"stride under 2^40", type_u8, 2, {512, 64, 1}, {(1ull << 40) - 16, 0}, {64, 32, 1}, 0, 0},
        {"stride under the row", type_u8, 2, {512, 64, 1}, {256, 0}, {64, 32, 1}, 0, 0},
        {"stride of 0", type_u8, 2, {512, 64, 1}, {0, 0}, {64, 32, 1}, 0, 0},
        {"strides that do not nest", type_u8, 3, {64, 8, 4}, {96, 1008}, {64, 8, 4}, 0, 0},
        {"box over the dimension", type_u8, 2, {32, 4, 1}, {32, 0}, {64, 32, 1}, 0, 0},
        {"u32 row of 8 bytes", type_u32, 2, {64, 64, 1}, {256, 0}, {2, 32, 1}, 0, 0},
        {"f32 sw128 with 33 columns", type_f32, 2, {64, 64, 1}, {256, 0}, {33, 32, 1}, 3, 0},
        {"rank 0", type_u8, 0, {64, 64, 1}, {256, 0}, {64, 32, 1}, 0, 0},
        {"box of 196608 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 256, 3}, 0, 0},
        {"box of 229376 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 224, 4}, 0, 0},
        {"box of 232448 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 227, 4}, 0, 0},
        {"box of 233472 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 228, 4}, 0, 0},
        {"box of 261120 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 255, 4}, 0, 0},
        {"box of 262144 bytes", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 256, 4}, 0, 0},
        {"box larger than shared memory", type_u8, 3, {512, 512, 512}, {512, 262144}, {256, 256, 16}, 0, 0},
    };
    if (!selected()) return;
    Buffer memory(65536, "memory", 1);
    for (const EncodeCase &c : cases) {
        struct sm100_tensor_map map;
        const bool accepted =
            encode(&map, c.type, c.rank, memory.device + c.shift, c.dims, c.strides, c.box, c.swizzle);
        record(std::string("case encode ") + c.name + (accepted ? " accepted" : " refused"));
    }
}

// The line without its results.
static std::string case_name(const std::string &line) {
    for (const char *end : {" bytes=", " stopped", " accepted", " refused"}) {
        const size_t at = line.rfind(end);
        if (at != std::string::npos) return line.substr(0, at);
    }
    return line;
}

#if defined(__CUDACC__)
// Questions to the hardware whose answers the model does not need to repeat: comment lines, not cases.
static void run_questions(void) {
    const LoadCase c = {"", type_u8, 2, 3, {256, 64, 1}, {128, 24, 1}, {}};
    for (uint32_t offset = 1024; offset <= 2048; offset += 128) {
        if (!selected()) continue;
        Buffer in(200000, "in", 77), out(20480, "out", 0);
        struct common_args args = {};
        const uint64_t pitch = (c.dims[0] + 15) / 16 * 16 + 16;
        map_for(&args.map, c, in.device);
        args.out = out.device;
        args.u[0] = 2;
        args.u[1] = 128 * 24;
        args.u[2] = 20480;
        args.u[3] = offset;
        const std::string problem = LAUNCH(tensor_load_kernel, &args, 1, 1, 128);
        out.download();
        if (!problem.empty()) {
            printf("# 128-byte swizzle at base + %u: %s\n", offset, problem.c_str());
            continue;
        }
        bool by_address = true, by_row = true;
        for (uint32_t r = 0; r < 24; r++)
            for (uint32_t b = 0; b < 128; b++) {
                const uint8_t value = in.host[r * pitch + b];
                const uint32_t at = offset + r * 128 + b;
                by_address = by_address && out.host[at ^ ((at >> 7) & 7) << 4] == value;
                by_row = by_row && out.host[at ^ (r & 7) << 4] == value;
            }
        printf("# 128-byte swizzle at base + %u: by address %s, by row %s\n", offset, by_address ? "yes" : "no",
               by_row ? "yes" : "no");
    }
}
static void print_raw(const std::vector<uint8_t> &bytes, size_t first, size_t count) {
    printf("# raw ");
    for (size_t i = first; i < first + count; i++) printf("%02x", bytes[i]);
    printf("\n");
}
#else
static void run_questions(void) {}
static void print_raw(const std::vector<uint8_t> &, size_t, size_t) {}
#endif

// By name: a case that the GPU has not run yet is said to be so, and does not count as agreement.
static int compare(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) {
        printf("cannot open %s\n", path);
        return 1;
    }
    std::vector<std::string> recorded;
    char text[512];
    while (fgets(text, sizeof text, file)) {
        text[strcspn(text, "\n")] = 0;
        if (!strncmp(text, "case ", 5)) recorded.push_back(text);
    }
    fclose(file);
    size_t agreed = 0, different = 0, unrecorded = 0;
    for (const std::string &line : case_lines) {
        const std::string name = case_name(line);
        const std::string *found = nullptr;
        for (const std::string &r : recorded)
            if (case_name(r) == name) found = &r;
        if (!found) {
            unrecorded++;
            printf("SKIP %s: not recorded on a GPU yet\n", name.c_str());
        } else if (*found == line) {
            agreed++;
        } else {
            different++;
            printf("FAIL recorded: %s\n     this run: %s\n", found->c_str(), line.c_str());
        }
    }
    const bool complete = agreed + different == recorded.size();
    printf("%zu cases agree with the recording, %zu differ, %zu not recorded%s\n", agreed, different, unrecorded,
           complete ? "" : "; some recorded cases did not run");
    return different != 0 || !complete;
}

static void run_all(void) {
    case_index = 0;
    run_encodings();
    run_loads();
    run_stores();
    run_multicasts();
    run_synchronization();
    run_counters();
    run_arithmetic();
    run_wgmma();
    run_questions();
}

int main(int argc, char **argv) {
    const char *recorded = nullptr;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--compare")) recorded = argv[i + 1];
        if (!strcmp(argv[i], "--only")) case_only = atoi(argv[i + 1]);
#if !defined(__CUDACC__)
        if (!strcmp(argv[i], "--seed")) model_options.seed = strtoull(argv[i + 1], nullptr, 10);
#endif
    }
#if defined(__CUDACC__)
    if (case_only < 0 && argc == 1) { // a process per case
        case_only = 1 << 30;
        run_all();
        const int count = case_index;
        for (int i = -1; i < count; i++) {
            const std::string command =
                std::string(argv[0]) + (i < 0 ? " --header" : " --only") + " " + std::to_string(i);
            if (system(("timeout 20 " + command).c_str())) printf("# process of case %d failed\n", i);
            fflush(stdout);
        }
        return 0;
    }
#endif
    if (argc > 1 && !strcmp(argv[1], "--header"))
        header_print();
    else
        run_all();
    return recorded ? compare(recorded) : 0;
}
