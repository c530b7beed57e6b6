// One grouped GEMM on the model. Nothing of the code under test is used for the expected values: decoding,
// rounding and the scale layout are written again, from tables and by search.
#include "gemm_problem.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "megamoe/megamoe.h"

static const double e2m1_values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static double e2m1_value(uint32_t code) {
    return code & 8 ? -e2m1_values[code & 7] : e2m1_values[code & 7];
}

static double e4m3_value(uint32_t code) {
    const int e = code >> 3, m = code & 7;
    return e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
}

static size_t scale_place(uint32_t row, uint32_t group, uint32_t k) {
    const size_t blocks = (k + 63) / 64;
    return ((row / 128) * blocks + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

static std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));
static std::string format(const char *text, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

double nvfp4_matrix::value(uint32_t row, uint32_t column) const {
    const uint32_t byte = codes[(size_t)row * columns / 2 + column / 2];
    return e2m1_value(byte >> column % 2 * 4 & 15) * e4m3_value(scales[(size_t)row * columns / 16 + column / 16]);
}

uint32_t gemm_problem::random() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

static float power_of_two(int e) {
    return ldexpf(1.0f, e);
}

gemm_problem::gemm_problem(enum sm100_tile_name tile_, const std::vector<uint32_t> &rows_, uint32_t m_rows_,
                           uint32_t k_, bool exact_, uint64_t seed, const struct gemm_options &options_)
    : tile(tile_), rows(rows_), m_rows(m_rows_), k(k_), exact(exact_), options(options_), random_state(seed) {
    const struct sm100_tile t = sm100_tiles[tile];
    machine = model_machine(&state, 2);
    for (uint32_t r : rows) {
        row_count += r;
        ends.push_back((int32_t)row_count);
    }
    for (uint32_t i = 0; i < t.matrices; i++) make_weights(i);
    make_tokens();
    const struct sm100_weights *both[2] = {&device_weights[0], &device_weights[1]};
    const void *device_ends = upload(ends.data(), ends.size() * 4, "ends");
    if (mm_sm100_gemm_prepare(&machine, tile, both, &device_tokens, (const int32_t *)device_ends, &args))
        printf("%s\n", megamoe_error_message());
    args.row_globals = (const float *)upload(row_globals.data(), row_globals.size() * 4, "row globals");
    const struct sm100_record none = {};
    args.record = (struct sm100_record *)upload(&none, sizeof none, "record");
    args.timeout_ns = 1000000000;
    const uint64_t zero = 0;
    args.saturated_blocks = (uint64_t *)upload(&zero, 8, "saturated");
    args.nonfinite_blocks = (uint64_t *)upload(&zero, 8, "nonfinite");
    args.output = upload(NULL, (size_t)row_count * m_rows * 4, "output");
    args.output_f32 = 1;
    if (options.bf16) add_extras();
    if (t.matrices == 2) add_h();
}

// Everything that a layer adds to a plain product.
void gemm_problem::add_extras() {
    for (uint32_t r = 0; r < row_count; r++) {
        output_rows.push_back(row_count - 1 - r);
        row_weights.push_back(exact ? power_of_two((int)(random() % 3) - 1) : 0.01f * (float)(1 + random() % 100));
    }
    for (uint32_t group = 0; group < rows.size(); group++) group_globals.push_back(power_of_two((int)(random() % 3)));
    args.output_rows = (const uint32_t *)upload(output_rows.data(), output_rows.size() * 4, "output rows");
    args.row_weights = (const float *)upload(row_weights.data(), row_weights.size() * 4, "row weights");
    args.group_globals = (const float *)upload(group_globals.data(), group_globals.size() * 4, "group globals");
    args.output_f32 = 0;
    for (uint32_t i = 0; i < sm100_tiles[tile].matrices; i++) {
        for (size_t j = 0; j < rows.size() * m_rows; j++) biases[i].push_back((float)(random() % 65) - 32.0f);
        args.biases[i] = (const float *)upload(biases[i].data(), biases[i].size() * 4, "biases");
    }
}

void gemm_problem::add_h() {
    for (uint32_t group = 0; group < rows.size(); group++) h_globals.push_back(0.25f + (float)(random() % 64));
    args.l1 = (float *)upload(NULL, (size_t)row_count * 2 * m_rows * 4, "l1");
    args.h_row_bytes = sm100_code_row_bytes(m_rows);
    args.h_codes = (uint8_t *)upload(NULL, (size_t)row_count * args.h_row_bytes, "h codes");
    args.h_scales = (uint8_t *)upload(NULL, sm100_scale_bytes(device_tokens.stripes_max * 128, m_rows), "h scales");
    args.h_globals = (const float *)upload(h_globals.data(), h_globals.size() * 4, "h globals");
    args.swiglu = {1.0f, 0.0f, 10.0f, options.relu2};
}

gemm_problem::~gemm_problem() {
    for (void *m : memory) machine.release(machine.context, m);
}

void *gemm_problem::upload(const void *data, size_t bytes, const char *name) {
    void *m = machine.alloc(machine.context, bytes ? bytes : 16, name);
    memory.push_back(m);
    if (data) memcpy(m, data, bytes);
    return m;
}

void gemm_problem::make_weights(uint32_t i) {
    std::vector<uint8_t> codes, scales;
    for (uint32_t group = 0; group < rows.size(); group++) {
        nvfp4_matrix w = {m_rows, k, std::vector<uint8_t>((size_t)m_rows * k / 2),
                          std::vector<uint8_t>((size_t)m_rows * k / 16)};
        for (uint8_t &c : w.codes) c = (uint8_t)random();
        for (uint8_t &s : w.scales) s = (uint8_t)(exact ? 0x30 + 8 * (random() % 3) : 1 + random() % 0x6F);
        mm_matrix matrix = {};
        matrix.codes = w.codes.data();
        matrix.scales = w.scales.data();
        matrix.row_bytes = k / 2;
        matrix.scale_row_bytes = k / 16;
        matrix.rows = m_rows;
        matrix.columns = k;
        matrix.format = MM_NVFP4;
        matrix.global = exact ? power_of_two((int)(random() % 5) - 3) : 0.01f + (float)(random() % 1000) * 0.001f;
        std::vector<uint8_t> own_codes((size_t)m_rows * sm100_code_row_bytes(k), 0xAA);
        std::vector<uint8_t> own_scales(sm100_scale_bytes(m_rows, k), 0x7F);
        float global;
        struct sm100_loss loss;
        mm_sm100_matrix_write(&matrix, own_codes.data(), own_scales.data(), &global, &loss);
        codes.insert(codes.end(), own_codes.begin(), own_codes.end());
        scales.insert(scales.end(), own_scales.begin(), own_scales.end());
        globals[i].push_back(global);
        weights[i].push_back(w);
    }
    struct sm100_weights &d = device_weights[i];
    d.codes = (uint8_t *)upload(codes.data(), codes.size(), "weight codes");
    d.scales = (uint8_t *)upload(scales.data(), scales.size(), "weight scales");
    d.globals = (float *)upload(globals[i].data(), globals[i].size() * 4, "weight globals");
    d.groups = (uint32_t)rows.size();
    d.rows = m_rows;
    d.columns = k;
}

// Token scales as staging leaves them: real rows and the padding along K written, padding rows whatever was
// there.
void gemm_problem::make_tokens() {
    const uint32_t pitch = sm100_code_row_bytes(k), stripes = sm100_stripes_max(row_count, (uint32_t)rows.size());
    tokens = {row_count, k, std::vector<uint8_t>((size_t)row_count * k / 2),
              std::vector<uint8_t>((size_t)row_count * k / 16)};
    for (uint8_t &c : tokens.codes) c = (uint8_t)random();
    for (uint8_t &s : tokens.scales) s = (uint8_t)(exact ? 0x30 + 8 * (random() % 3) : 1 + random() % 0x6F);
    std::vector<uint8_t> codes((size_t)row_count * pitch, 0xAA);
    std::vector<uint8_t> scales(sm100_scale_bytes(stripes * 128, k), options.padding);
    if (options.nan_row >= 0) tokens.scales[(size_t)options.nan_row * k / 16] = 0x7F;
    uint32_t row = 0, stripe = 0;
    for (uint32_t r : rows) {
        for (uint32_t i = 0; i < r; i++, row++) {
            memcpy(&codes[(size_t)row * pitch], &tokens.codes[(size_t)row * k / 2], k / 2);
            for (uint32_t group = 0; group < (k + 63) / 64 * 4; group++)
                scales[scale_place(stripe * 128 + i, group, k)] =
                    group < k / 16 ? tokens.scales[(size_t)row * k / 16 + group] : 0;
            row_globals.push_back(exact ? power_of_two((int)(random() % 4) - 2)
                                        : 0.1f + (float)(random() % 100) * 0.01f);
        }
        stripe += (r + 127) / 128;
    }
    device_tokens.codes = (uint8_t *)upload(codes.data(), codes.size(), "token codes");
    device_tokens.scales = (uint8_t *)upload(scales.data(), scales.size(), "token scales");
    device_tokens.rows_max = row_count ? row_count : 1;
    device_tokens.stripes_max = stripes ? stripes : 1;
    device_tokens.columns = k;
}

// The sums of one matrix: element (row, m) of `got` is got[row * stride + m].
std::string gemm_problem::compare(uint32_t matrix, const float *got, uint32_t stride) {
    std::vector<double> x((size_t)row_count * k), w((size_t)k);
    for (uint32_t r = 0; r < row_count; r++)
        for (uint32_t i = 0; i < k; i++) x[(size_t)r * k + i] = tokens.value(r, i);
    for (uint32_t group = 0; group < rows.size(); group++)
        for (uint32_t m = 0; m < m_rows; m++) {
            for (uint32_t i = 0; i < k; i++) w[i] = weights[matrix][group].value(m, i);
            for (uint32_t r = (uint32_t)ends[group] - rows[group]; r < (uint32_t)ends[group]; r++) {
                const uint32_t at = options.bf16 && sm100_tiles[tile].matrices == 1 ? output_rows[r] : r;
                const std::string problem =
                    compare_row(matrix, group, r, m, w.data(), &x[(size_t)r * k], got[(size_t)at * stride + m]);
                if (!problem.empty()) return problem;
            }
        }
    return "";
}

// In fp32, in the order of the definition: the sum times the global scales, the bias, the routing weight.
double gemm_problem::expected(uint32_t matrix, uint32_t group, uint32_t row, uint32_t m, double sum) const {
    const bool plain = sm100_tiles[tile].matrices == 1;
    float global = row_globals[row] * (options.bf16 ? group_globals[group] : 1.0f);
    float value = (float)sum * (global * globals[matrix][group]);
    if (options.bf16) value += biases[matrix][(size_t)group * m_rows + m];
    return plain && options.bf16 ? value * row_weights[row] : value;
}

static double to_bf16(double value) {
    const double step = ldexp(1, ilogb(value) - 7);
    return value == 0 ? 0 : nearbyint(value / step) * step;
}

std::string gemm_problem::compare_row(uint32_t matrix, uint32_t group, uint32_t row, uint32_t m, const double *w,
                                      const double *x, float value) const {
    double sum = 0, size = 0;
    for (uint32_t i = 0; i < k; i++) {
        sum += w[i] * x[i];
        size += fabs(w[i] * x[i]);
    }
    const bool bf16 = options.bf16 && sm100_tiles[tile].matrices == 1;
    // K / 64 instructions of 4 group sums, then at most 5 operations on the sum, one of them with the bias.
    const double units = (5 * (k / 64 + 1) + 6) * ldexp(1, -24);
    double bound = exact ? 0 : fabs(expected(matrix, group, row, m, size)) * units + 200 * ldexp(1, -24);
    double want = expected(matrix, group, row, m, sum);
    if ((int)row == options.nan_row) return isnan(value) ? "" : format("row %u is not NaN", row);
    if (bf16) {
        bound += exact ? 0 : (fabs(want) + bound) * ldexp(1, -8);
        want = exact ? to_bf16(want) : want;
    }
    if (fabs((double)value - want) <= bound) return "";
    return format("matrix %u group %u row %u feature %u is %.9g and should be %.9g +- %.3g", matrix, group, row, m,
                  (double)value, want, bound);
}

// The nearest of 127 scales or 8 magnitudes, ties to the even code; *margin: relative distance from the tie.
static uint32_t nearest(double value, double (*decode)(uint32_t), uint32_t codes, double *margin) {
    uint32_t best = 0;
    for (uint32_t c = 1; c < codes; c++) {
        const double closer = fabs(decode(c) - value) - fabs(decode(best) - value);
        if (closer < 0 || (closer == 0 && c % 2 == 0)) best = c;
    }
    *margin = INFINITY;
    for (uint32_t c = best ? best - 1 : 0; c < best + 1 && c + 1 < codes; c++) {
        const double middle = (decode(c) + decode(c + 1)) / 2, distance = fabs(value - middle) / middle;
        if (distance < *margin) *margin = distance;
    }
    return best;
}

static double magnitude(uint32_t code) {
    return e2m1_values[code];
}

double gemm_problem::activated(uint32_t row, uint32_t m) const {
    const double limit = (double)args.swiglu.limit, weight = options.bf16 ? row_weights[row] : 1;
    double g = l1[(size_t)row * 2 * m_rows + m], u = l1[(size_t)row * 2 * m_rows + m_rows + m];
    if (options.relu2) return u > 0 ? u * u * weight : 0;
    g = fmin(g, limit);
    u = fmax(fmin(u, limit), -limit);
    return g / (1 + exp(-g)) * u * weight;
}

// A token with a NaN has it in every block, as the scale, with codes 0.
std::string gemm_problem::compare_nan(uint32_t row, uint32_t block, uint32_t scale) const {
    for (uint32_t j = 0; j < 8; j++)
        if (args.h_codes[(size_t)row * args.h_row_bytes + block * 8 + j]) return format("NaN row %u has codes", row);
    return scale == 0x7F ? "" : format("NaN row %u block %u has scale %02x", row, block, scale);
}

// h, requantized: from the kernel's own gate and up, so that this judges only what follows them.
std::string gemm_problem::compare_h() {
    const uint32_t pitch = args.h_row_bytes;
    uint32_t stripe = 0, row = 0;
    for (uint32_t group = 0; group < rows.size(); stripe += (rows[group] + 127) / 128, group++)
        for (uint32_t i = 0; i < rows[group]; i++, row++)
            for (uint32_t block = 0; block < m_rows / 16; block++) {
                double h[16], amax = 0, margin;
                for (uint32_t j = 0; j < 16; j++) {
                    h[j] = activated(row, block * 16 + j);
                    amax = fmax(amax, fabs(h[j]));
                }
                const uint32_t got = args.h_scales[scale_place(stripe * 128 + i, block, m_rows)];
                if ((int)row == options.nan_row) {
                    const std::string problem = compare_nan(row, block, got);
                    if (!problem.empty()) return problem;
                    continue;
                }
                const double target = fmin(fmax(amax / 6 / h_globals[group], ldexp(1, -9)), 448);
                const uint32_t scale = nearest(target, e4m3_value, 127, &margin);
                if (got != scale && margin > 1e-5)
                    return format("h scale of row %u block %u is %02x and should be %02x", row, block, got, scale);
                for (uint32_t j = 0; j < 16; j++) {
                    const double value = h[j] / (e4m3_value(got) * h_globals[group]);
                    const uint32_t code = nearest(fabs(value), magnitude, 8, &margin);
                    const uint8_t byte = args.h_codes[(size_t)row * pitch + block * 8 + j / 2];
                    const uint32_t nibble = byte >> j % 2 * 4 & 15;
                    if (margin > 1e-5 && ((nibble & 7) != code || (code && nibble >> 3 != (value < 0))))
                        return format("h of row %u feature %u is %x, of magnitude %u for %g", row, block * 16 + j,
                                      nibble, code, value);
                }
            }
    return "";
}

// The padding of scales along K is zero in every row that was written.
std::string gemm_problem::compare_padding() {
    uint32_t stripe = 0;
    for (uint32_t group = 0; group < rows.size(); stripe += (rows[group] + 127) / 128, group++)
        for (uint32_t i = 0; i < rows[group]; i++)
            for (uint32_t block = m_rows / 16; block % 4; block++)
                if (args.h_scales[scale_place(stripe * 128 + i, block, m_rows)])
                    return format("the padding of h scales, group %u row %u block %u, is not 0", group, i, block);
    return "";
}

std::string gemm_problem::run(uint32_t sms, uint64_t seed) {
    machine.multiprocessors = sms;
    state.seed = seed;
    if (mm_sm100_gemm_launch(&machine, tile, &args, row_count, 0, NULL)) return megamoe_error_message();
    if (args.record->claimed) return "a wait timed out";
    if (sm100_tiles[tile].matrices == 1) {
        output.resize((size_t)row_count * m_rows);
        for (size_t i = 0; i < output.size(); i++) {
            const uint32_t half = options.bf16 ? ((const uint16_t *)args.output)[i] : 0, word = half << 16;
            memcpy(&output[i], options.bf16 ? &word : (const uint32_t *)args.output + i, 4);
        }
        return compare(0, output.data(), m_rows);
    }
    l1.assign(args.l1, args.l1 + (size_t)row_count * 2 * m_rows);
    std::string problem = compare(0, l1.data(), 2 * m_rows);
    if (problem.empty()) problem = compare(1, l1.data() + m_rows, 2 * m_rows);
    if (problem.empty()) problem = compare_padding();
    return problem.empty() ? compare_h() : problem;
}
