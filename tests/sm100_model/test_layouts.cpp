// The model's layouts against golden tables that were computed by other code: swizzles as TMA writes them and as the
// mma reads them, scale factors in memory and in tensor memory, tcgen05.ld, instruction descriptors, number formats.
#include "sm100_model.h"
#include "layout_kernel.h"
#include "numbers.h"
#include "test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

typedef std::vector<std::vector<long>> Table;

static Table read_table(const char *name, uint32_t text_columns = 0) {
    Table table;
    const std::string path = std::string(SM100_MODEL_DIR "/golden/") + name;
    FILE *file = fopen(path.c_str(), "r");
    if (!file) {
        printf("cannot open %s\n", path.c_str());
        exit(2);
    }
    char line[256];
    bool header = true;
    while (fgets(line, sizeof line, file)) {
        if (!header) {
            table.emplace_back();
            const char *p = line;
            for (uint32_t i = 0; i < text_columns; i++) { // a letter counts as its code
                table.back().push_back(*p);
                p = strchr(p, ',') + 1;
            }
            for (char *end;; p = end + 1) {
                table.back().push_back(strtol(p, &end, 10));
                if (*end != ',') break;
            }
        }
        header = false;
    }
    fclose(file);
    return table;
}

struct Memory { // registered for the length of a test
    uint8_t *p;
    explicit Memory(size_t bytes, const char *name)
        : p((uint8_t *)sm100_model_memory_alloc(bytes, name, SM100_MODEL_READ_WRITE)) {}
    ~Memory() { sm100_model_memory_free(p); }
};

template <void (*kernel)(const struct layout_args &)> static std::string run(struct layout_args &args) {
    const struct sm100_model_launch launch = {"layout", SM100_MODEL_THUNK(kernel, struct layout_args), &args, 1, 1, 128,
                                              41100};
    struct sm100_model_report report;
    return sm100_model_run(&launch, 1, nullptr, &report) ? report.message : "";
}

static void test_tma(void) {
    const Table table = read_table("swizzle_k_major.csv");
    for (long bytes = 128; bytes >= 32; bytes /= 2) {
        Memory in((size_t)bytes * 16, "in"), out((size_t)bytes * 16, "out");
        for (long i = 0; i < bytes * 16; i++) in.p[i] = (uint8_t)(i * 151 + i / 256);
        struct layout_args args = {};
        const uint64_t dims[] = {(uint64_t)bytes, 16}, strides[] = {(uint64_t)bytes};
        const uint32_t box[] = {(uint32_t)bytes, 16};
        sm100_model_tensor_map_encode(&args.map, SM100_MODEL_U8, 2, in.p, dims, strides, box,
                                      bytes == 128  ? SM100_MODEL_SWIZZLE_128B
                                      : bytes == 64 ? SM100_MODEL_SWIZZLE_64B
                                                    : SM100_MODEL_SWIZZLE_32B);
        args.out = out.p;
        args.bytes_b = (uint32_t)bytes * 16;
        std::string problem = run<layout_tma_kernel>(args);
        size_t entries = 0;
        for (const auto &row : table) {
            if (row[0] != bytes || !problem.empty()) continue;
            entries++;
            if (out.p[row[3]] != in.p[row[1] * bytes + row[2]]) problem = "row " + std::to_string(row[1]) + " differs";
        }
        test_case("TMA swizzle of " + std::to_string(bytes) + " bytes, " + std::to_string(entries) + " entries",
                  problem);
    }
}

// Scale factors in memory (sf_layout), through tcgen05.cp, to where the mma wants them (tensor_memory_scales), read
// back with tcgen05.ld (tensor_memory_load): three tables must agree with the model at once.
static void test_scales(const char *name, uint32_t rows, uint32_t groups) {
    const Table layout = read_table(name), target = read_table("tensor_memory_scales.csv", 1);
    const Table load = read_table("tensor_memory_load.csv");
    const uint32_t blocks = rows / 128 * groups / 4;
    std::string problem;
    size_t entries = 0;
    Memory in(512 * blocks, "scales"), out(128 * 16 * 8, "out");
    for (uint32_t i = 0; i < 512 * blocks; i++) in.p[i] = (uint8_t)((i * 37 + i / 128 * 11) & 0x7F);
    std::vector<long> offset(rows * groups);
    for (const auto &row : layout) offset[(size_t)row[0] * groups + (size_t)row[1]] = row[2];
    for (uint32_t first = 0; first < blocks && problem.empty(); first += 8) {
        struct layout_args args = {};
        args.scales = in.p + 512 * first;
        args.out = out.p;
        args.blocks = blocks - first < 8 ? blocks - first : 8;
        problem = run<layout_scales_kernel>(args);
        for (uint32_t b = 0; b < args.blocks && problem.empty(); b++) {
            const uint32_t row0 = (first + b) / (groups / 4) * 128, group0 = (first + b) % (groups / 4) * 4;
            for (const auto &t : target) { // operand a, step 0: row, group, replica -> lane, column, byte
                if (t[0] != 'a' || t[1] != 0) continue;
                const long thread = t[5] % 32, slot = t[6];
                if (load[(size_t)(thread * 4 + slot)][2] != thread || load[(size_t)(thread * 4 + slot)][3] != slot)
                    problem = "tcgen05.ld table";
                const uint8_t found = out.p[4 * (((size_t)t[5] * args.blocks + b) * 4 + (size_t)slot) + (size_t)t[7]];
                const uint8_t wanted = in.p[offset[(row0 + (size_t)t[2]) * groups + group0 + (size_t)t[3]]];
                entries++;
                if (found != wanted)
                    problem = "row " + std::to_string(row0 + t[2]) + " group " + std::to_string(group0 + t[3]);
            }
        }
    }
    test_case(std::string(name) + " to tensor memory, " + std::to_string(entries) + " entries", problem);
}

// SFB: two copies give the 256 rows of the table; and the next step follows at +4 (A) or +8 (B) columns.
static void test_scale_table(void) {
    std::string problem;
    for (const auto &t : read_table("tensor_memory_scales.csv", 1)) {
        const long per_step = t[0] == 'a' ? 4 : 8;
        if (t[5] != t[2] % 32 + 32 * t[4] || t[6] != per_step * t[1] + t[2] / 32 || t[7] != t[3])
            problem = "row " + std::to_string(t[2]);
    }
    test_case("where the mma reads scale factors", problem);
}

static void test_operand(uint32_t swizzle, uint64_t desc, uint32_t step) {
    const Table table = read_table("operand_k_major_e2m1.csv");
    const uint32_t k_count = swizzle == 128 ? 256 : swizzle == 64 ? 128 : 64;
    Memory a(16384, "a"), b(2048, "b"), scales(512, "scales"), out(128 * 64, "out");
    std::vector<uint8_t> codes_a(128 * 256), codes_b(16 * 256);
    Random random = {swizzle + 9};
    for (uint8_t &c : codes_a) c = (uint8_t)random.below(16);
    for (uint8_t &c : codes_b) c = (uint8_t)random.below(16);
    memset(a.p, 0, 16384);
    memset(b.p, 0, 2048);
    memset(scales.p, 0x38, 512); // one
    for (const auto &t : table) {
        if (t[0] == 128)
            for (long tile = 0; tile < 8; tile++)
                a.p[2048 * tile + t[3]] |= (uint8_t)(codes_a[(size_t)((16 * tile + t[1]) * 256 + t[2])] << 4 * t[4]);
        if (t[0] == (long)swizzle) b.p[t[3]] |= (uint8_t)(codes_b[(size_t)(t[1] * 256 + t[2])] << 4 * t[4]);
    }
    struct layout_args args = {};
    args.a = a.p, args.b = b.p, args.scales = scales.p, args.out = out.p;
    args.desc_b = desc, args.steps = k_count / 64, args.step_b = step, args.bytes_b = 8 * k_count;
    std::string problem = run<layout_mma_kernel>(args);
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    for (uint32_t m = 0; m < 128 && problem.empty(); m++)
        for (uint32_t n = 0; n < 16; n++) {
            float sum = 0, found;
            for (uint32_t k = 0; k < k_count; k++) sum += values[codes_a[m * 256 + k]] * values[codes_b[n * 256 + k]];
            memcpy(&found, out.p + 4 * (m * 16 + n), 4);
            if (found != sum && problem.empty())
                problem = "row " + std::to_string(m) + " column " + std::to_string(n) + " is " +
                          std::to_string((double)found) + " and should be " + std::to_string((double)sum);
        }
    test_case("mma operand, swizzle of " + std::to_string(swizzle) + " bytes", problem);
}

static void test_instruction_desc(void) {
    std::string problem;
    size_t entries = 0;
    for (const auto &t : read_table("instruction_desc.csv")) {
        entries++;
        if (t[2] != (0x480 | (t[1] >> 3) << 17 | (t[0] >> 4) << 24)) problem = "N " + std::to_string(t[1]);
    }
    test_case("instruction descriptors, " + std::to_string(entries) + " entries", problem);
}

static void test_numbers(void) {
    static const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    static const struct {
        float value;
        uint32_t code;
    } edges[] = {{0.25f, 0}, {0.26f, 1}, {0.75f, 2},    {1.25f, 2}, {1.75f, 4},      {2.5f, 4},  {3.5f, 6}, {5, 6},
                 {5.01f, 7}, {100, 7},   {INFINITY, 7}, {-5, 14},   {-INFINITY, 15}, {-0.0f, 8}, {NAN, 7}};
    std::string problem;
    for (uint32_t c = 0; c < 16; c++)
        if (e2m1_decode(c) != (c & 8 ? -e2m1[c & 7] : e2m1[c & 7]) || e2m1_encode(e2m1_decode(c)) != c)
            problem = std::to_string(c);
    for (const auto &e : edges)
        if (e2m1_encode(e.value) != e.code) problem = "value " + std::to_string((double)e.value);
    test_case("E2M1", problem);
    problem = "";
    if (e4m3_decode(0x7E) != 448 || e4m3_decode(1) != ldexpf(1, -9) || e4m3_decode(0x38) != 1 ||
        !isnan(e4m3_decode(0x7F)))
        problem = "a known value";
    for (uint32_t c = 0; c < 256; c++) {
        if ((c & 0x7F) == 0x7F) continue;
        if (e4m3_encode(e4m3_decode(c)) != c) problem = "code " + std::to_string(c);
        if ((c & 0x7F) < 0x7E && fabsf(e4m3_decode(c)) >= fabsf(e4m3_decode(c + 1)))
            problem = "order at " + std::to_string(c);
        const float middle = (e4m3_decode(c) + e4m3_decode(c + 1)) / 2;
        if ((c & 0x7F) < 0x7E && e4m3_encode(middle) != (c % 2 ? c + 1 : c)) problem = "tie at " + std::to_string(c);
    }
    test_case("E4M3", problem);
}

int main(void) {
    test_tma();
    test_scales("sf_layout_256x192.csv", 256, 12);
    test_scales("sf_layout_384x1024.csv", 384, 64);
    test_scale_table();
    test_operand(128, 0x4000404000010000ull, 2);
    test_operand(64, 0x8000402000010000ull, 2);
    test_operand(32, 0xC000401000010000ull, 2);
    test_operand(0, 0x0000400800100000ull, 2); // 256 bytes from one 16-byte column to the next, 128 between row groups
    test_instruction_desc();
    test_numbers();
    return test_summary("test_layouts");
}
