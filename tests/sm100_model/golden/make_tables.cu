// Writes the tables tensor_memory_scales.csv, tensor_memory_load.csv, operand_k_major_e2m1.csv and instruction_desc.csv
// by evaluating the vendor's public layout algebra (CuTe, of CUTLASS 7107b05, BSD-3) on the host. Kept beside the
// tables so that they can be made again; not part of any build.
//   nvcc -std=c++17 --expt-relaxed-constexpr -I cutlass/include -o make_tables make_tables.cu && ./make_tables
#include <cute/tensor.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <stdio.h>

using namespace cute;
using e2m1 = cutlass::float_e2m1_t;
using ue4m3 = cutlass::float_ue4m3_t;

// Scale of (row, group of K, step of 64) -> lane, column, byte, for each of the four replicas.
template <int rows, bool is_a> static void scales(FILE *file, const char *operand) {
    auto shape = make_shape(make_shape(Int<rows>{}, make_shape(_16{}, _4{})), _1{}, _4{});
    auto tensor = UMMA::tmem_sf_frg<ue4m3, 16, 1, is_a>::make(shape);
    auto layout = tensor.layout();
    for (int step = 0; step < 2; step++)
        for (int row = 0; row < rows; row++)
            for (int group = 0; group < 4; group++)
                for (int replica = 0; replica < 4; replica++) {
                    auto coordinate = make_coord(
                        make_coord(make_coord(make_coord(row % 32, row / 32), replica), make_coord(0, group)), 0, step);
                    const unsigned at = (unsigned)layout(coordinate), address = at / 4;
                    fprintf(file, "%s,%d,%d,%d,%d,%u,%u,%u\n", operand, step, row, group, replica, address >> 16,
                            address & 0xffff, at % 4);
                }
}

// Element (row, k) of a K-major tile -> byte, nibble.
template <class Atom, int k_count> static void operand(FILE *file, int swizzle) {
    // CuTe's swizzles act on byte addresses; this turns them into ones on element offsets.
    auto layout = as_position_independent_swizzle_layout(tile_to_shape(Atom{}, make_shape(_16{}, Int<k_count>{})));
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < k_count; k++) {
            const int at = (int)layout(row, k);
            fprintf(file, "%d,%d,%d,%d,%d\n", swizzle, row, k, at / 2, at % 2);
        }
}

// tcgen05.ld.32x32b.x4: (thread, register) -> lane, column.
static void loads(FILE *file) {
    using traits = Copy_Traits<SM100_TMEM_LOAD_32dp32b4x>;
    auto ids = traits::ValID{};
    auto registers = traits::DstLayout{};
    for (int thread = 0; thread < 32; thread++)
        for (int r = 0; r < 4; r++) {
            const unsigned bit = (unsigned)ids(registers(thread, 32 * r));
            fprintf(file, "%d,%d,%u,%u\n", thread, r, bit / 32 >> 16, bit / 32 & 0xffff);
        }
}

template <int m, int n> static void idesc(FILE *file) {
    const auto desc =
        UMMA::make_instr_desc_block_scaled<e2m1, e2m1, float, ue4m3, m, n, UMMA::Major::K, UMMA::Major::K>();
    fprintf(file, "%d,%d,%u\n", m, n, (unsigned)uint32_t(desc));
}
template <int n> static void idescs(FILE *file) {
    idesc<128, n>(file);
    if constexpr (n % 16 == 0) idesc<256, n>(file);
    if constexpr (n < 256) idescs<n + 8>(file);
}

int main() {
    FILE *file = fopen("tensor_memory_scales.csv", "w");
    fprintf(file, "operand,step,row,k_group,replica,lane,column,byte\n");
    scales<128, true>(file, "a");
    scales<256, false>(file, "b");
    fclose(file);
    file = fopen("operand_k_major_e2m1.csv", "w");
    fprintf(file, "swizzle_bytes,row,k,byte,nibble\n");
    operand<UMMA::Layout_K_INTER_Atom<e2m1>, 64>(file, 0);
    operand<UMMA::Layout_K_SW32_Atom<e2m1>, 64>(file, 32);
    operand<UMMA::Layout_K_SW64_Atom<e2m1>, 128>(file, 64);
    operand<UMMA::Layout_K_SW128_Atom<e2m1>, 256>(file, 128);
    fclose(file);
    file = fopen("tensor_memory_load.csv", "w");
    fprintf(file, "thread,register,lane,column\n");
    loads(file);
    fclose(file);
    file = fopen("instruction_desc.csv", "w");
    fprintf(file, "m,n,descriptor\n");
    idescs<8>(file);
    fclose(file);
    return 0;
}
