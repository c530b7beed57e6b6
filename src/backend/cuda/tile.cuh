/*
 * Expert GEMMs for any number of rows, any weight format and any K and N that are multiples of 16, on mma.sync: the
 * path every GPU can take, and the judge of the faster ones.
 *
 * A tile is 128 weight rows x 64 tokens, K in chunks of one 128-group. Weights are converted to BF16 on their way from
 * registers to shared memory, in the staged order of K; the next chunk is in flight while one is multiplied. MMA rows
 * g and g + 8 are a gate and an up row of one feature (L1) or rows 8 apart (L2). Shared rows are 256 bytes; their
 * 16-byte chunks are XORed with the row so that ldmatrix and the stores meet no bank twice.
 */
#ifndef MM_CUDA_TILE_CUH
#define MM_CUDA_TILE_CUH

#include "backend/cuda/args.h"
#include "backend/cuda/convert.cuh"
#include "backend/cuda/epilogue.cuh"

enum {
    TILE_THREADS = 256, /* 4 x 2 warps of 32 rows x 32 tokens */
    TILE_ROWS = 128,
    TILE_TOKENS = MM_CUDA_MID_ROWS,
    TILE_ROW_BYTES = 256,
    TILE_BUFFER = (TILE_ROWS + TILE_TOKENS) * TILE_ROW_BYTES, /* two of them: 96 KiB, what sm_120 has */
};

struct tile_work {
    mm_cuda_entry entry;
    int block;
};

MM_DEVICE int tile_count(const mm_cuda_gemm_args &p, int blocks) {
    const int entries = p.plan ? p.plan->count[p.list] : ((int)p.row_count + TILE_TOKENS - 1) / TILE_TOKENS;
    return entries * blocks;
}

MM_DEVICE tile_work tile_find(const mm_cuda_gemm_args &p, int index, int blocks) {
    const int i = index / blocks;
    if (p.plan) return {p.entries[i], index % blocks};
    return {{i * TILE_TOKENS, min((int)p.row_count - i * TILE_TOKENS, (int)TILE_TOKENS), 0, 0}, index % blocks};
}

/* What a thread loads of a chunk: of one row, words 2w and 2w + 1 of all four lanes t, and a share of the tokens. */
template <int FORMAT> struct tile_fetch {
    static constexpr int vectors = FORMAT == MM_BF16 ? 2 : 1; /* uint4 per (t): 2 words of 8 values */
    uint4 code[4][vectors];
    uint32_t scale[4];
    uint4 token[4];
};

/* One FP8 block scale as fp32. */
MM_DEVICE float tile_block_scale(const mm_cuda_matrix *m, uint32_t row, uint32_t k) {
    const uint8_t *from = m->scales + (size_t)(row / m->block_rows) * m->scale_row_bytes;
    return m->scale_f32 ? ((const float *)from)[k / m->block_columns]
                        : __uint_as_float((uint32_t)from[k / m->block_columns] << 23);
}

template <int FORMAT>
MM_DEVICE void tile_weights_load(const mm_cuda_gemm_args &p, tile_fetch<FORMAT> &f, const mm_cuda_matrix *m,
                                 uint32_t row, uint32_t chunk, uint32_t w) {
    const uint8_t *codes = m->codes + (size_t)row * m->row_bytes,
                  *scales = m->scales + (size_t)row * m->scale_row_bytes;
    const bool exists = row < p.n;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const uint32_t k = chunk * 128 + t * 32 + w * 16;
        f.scale[t] = 0;
#pragma unroll
        for (int i = 0; i < tile_fetch<FORMAT>::vectors; i++) f.code[t][i] = make_uint4(0, 0, 0, 0);
        if (!exists || k >= p.k) continue;
        if (FORMAT == MM_NVFP4 || FORMAT == MM_MXFP4) {
            const uint2 v = *(const uint2 *)(codes + k / 2);
            f.code[t][0].x = v.x, f.code[t][0].y = v.y;
            f.scale[t] = scales[k / (FORMAT == MM_NVFP4 ? 16 : 32)];
        } else if (FORMAT == MM_BF16) {
            f.code[t][0] = *(const uint4 *)(codes + k * 2), f.code[t][1] = *(const uint4 *)(codes + k * 2 + 16);
        } else {
            f.code[t][0] = *(const uint4 *)(codes + k);
            if (!m->scale_f32)
                f.scale[t] = m->scales[(size_t)(row / m->block_rows) * m->scale_row_bytes + k / m->block_columns];
        }
    }
}

/* E4M3 bytes j and j + 4 of eight to a BF16 pair: exponent and mantissa as a number scaled by 2^-120, then 2^120. */
MM_DEVICE uint32_t tile_fp8_pair(uint32_t low, uint32_t high, int j, uint32_t scale) {
    const uint32_t z = ptx::prmt_b32(low, high, (uint32_t)j | (uint32_t)(j + 4) << 8);
    const uint32_t v = (z & 0x007F007Fu) << 4 | (z & 0x00800080u) << 8;
    return ptx::mul_rn_bf16x2(ptx::mul_rn_bf16x2(v, 0x7B807B80u), scale);
}

/* The four pairs of word i (0, 1) of lane t. */
template <int FORMAT>
MM_DEVICE void tile_word_convert(const tile_fetch<FORMAT> &f, int t, int i, bool scale_f32, uint32_t (&pair)[4]) {
    const uint4 v = f.code[t][FORMAT == MM_BF16 ? i : 0];
    if (FORMAT == MM_NVFP4 || FORMAT == MM_MXFP4) {
        mm_codes_convert(i ? v.y : v.x, mm_block_scale<FORMAT == MM_MXFP4>(f.scale[t]), pair);
    } else if (FORMAT == MM_BF16) {
        pair[0] = ptx::prmt_b32(v.x, v.z, 0x5410), pair[1] = ptx::prmt_b32(v.x, v.z, 0x7632);
        pair[2] = ptx::prmt_b32(v.y, v.w, 0x5410), pair[3] = ptx::prmt_b32(v.y, v.w, 0x7632);
    } else {
        const uint32_t s = scale_f32 ? 0x3F803F80u : (f.scale[t] ? f.scale[t] << 7 : 0x40u) * 0x00010001u;
#pragma unroll
        for (int j = 0; j < 4; j++) pair[j] = tile_fp8_pair(i ? v.z : v.x, i ? v.w : v.y, j, s);
    }
}

MM_DEVICE uint32_t tile_place(uint32_t base, uint32_t row, uint32_t chunk) {
    return base + row * TILE_ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

/* Word w's pairs j of all four lanes are the staged chunk 4w + j. */
template <int FORMAT>
MM_DEVICE void tile_weights_store(const tile_fetch<FORMAT> &f, uint32_t base, uint32_t row, uint32_t w,
                                  bool scale_f32) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t pair[4][4];
#pragma unroll
        for (int t = 0; t < 4; t++) tile_word_convert<FORMAT>(f, t, i, scale_f32, pair[t]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            ptx::st_shared_v4_u32(tile_place(base, row, (w * 2 + i) * 4 + j),
                                  make_uint4(pair[0][j], pair[1][j], pair[2][j], pair[3][j]));
    }
}

/* Sixteen threads per token row, four rows apart by 16. */
template <int FORMAT>
MM_DEVICE void tile_tokens_load(const mm_cuda_gemm_args &p, tile_fetch<FORMAT> &f, const mm_cuda_entry &e,
                                uint32_t chunk) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = (int)threadIdx.x / 16 + i * 16;
        f.token[i] = make_uint4(0, 0, 0, 0);
        if (token < e.count)
            f.token[i] =
                *(const uint4 *)(p.x + (size_t)(e.row + token) * p.x_pitch + chunk * 128 + threadIdx.x % 16 * 8);
    }
}

template <int FORMAT> MM_DEVICE void tile_tokens_store(const tile_fetch<FORMAT> &f, uint32_t base) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        ptx::st_shared_v4_u32(tile_place(base, threadIdx.x / 16 + i * 16, threadIdx.x % 16), f.token[i]);
}

/* One chunk: 8 k16-steps of a warp's 2 x 4 MMA tiles. */
MM_DEVICE void tile_multiply(float (&sum)[2][4][4], uint32_t weights, uint32_t tokens) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = (warp >> 1) * 32, token = (warp & 1) * 32;
#pragma unroll
    for (int s = 0; s < 8; s++) {
        uint4 a[2], b[2];
#pragma unroll
        for (int m = 0; m < 2; m++)
            a[m] = ptx::ldmatrix_m8n8_x4_b16(tile_place(weights, row + m * 16 + (lane & 15), s * 2 + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 2; n++)
            b[n] = ptx::ldmatrix_m8n8_x4_b16(
                tile_place(tokens, token + n * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + (lane >> 3 & 1)));
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                ptx::mma_m16n8k16_f32_bf16(sum[m][n * 2], a[m].x, a[m].y, a[m].z, a[m].w, b[n].x, b[n].y);
                ptx::mma_m16n8k16_f32_bf16(sum[m][n * 2 + 1], a[m].x, a[m].y, a[m].z, a[m].w, b[n].z, b[n].w);
            }
    }
}

/* The feature of MMA row r (0..7; r + 8 is its partner) of the warp's m-th sub-tile. */
template <bool L1> MM_DEVICE int tile_feature(int block, int m, int g) {
    const int tile = (threadIdx.x / 64) * 2 + m;
    return L1 ? block * (TILE_ROWS / 2) + tile * 8 + g : block * TILE_ROWS + tile * 16 + g;
}

/* FP8 with fp32 block scales: a chunk's sums are scaled before they are added, since the product would not fit BF16. */
template <bool L1>
MM_DEVICE void tile_promote(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, float (&total)[2][4][4],
                            const float (&part)[2][4][4], int block, uint32_t k) {
    const int g = threadIdx.x % 32 >> 2;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint32_t first = tile_feature<L1>(block, m, g), second = L1 ? first : first + 8;
        const float s0 = first < p.n ? tile_block_scale(L1 ? &e->gate : &e->down, first, k) : 0.0f;
        const float s1 = second < p.n ? tile_block_scale(L1 ? &e->up : &e->down, second, k) : 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            total[m][n][0] += s0 * part[m][n][0], total[m][n][1] += s0 * part[m][n][1];
            total[m][n][2] += s1 * part[m][n][2], total[m][n][3] += s1 * part[m][n][3];
        }
    }
}

template <bool L1, int FORMAT>
MM_DEVICE void tile_store(const mm_cuda_gemm_args &p, const mm_cuda_expert *e, const tile_work &work,
                          const float (&sum)[2][4][4]) {
    constexpr float factor = FORMAT == MM_NVFP4 || FORMAT == MM_MXFP4 ? MM_CODE_FACTOR : 1.0f;
    const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, token0 = (threadIdx.x / 32 & 1) * 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int feature = tile_feature<L1>(work.block, m, g);
        mm_l1_feature f1;
        mm_l2_feature f2;
        if (L1)
            f1 = mm_l1_feature_read(p, e, feature);
        else
            f2 = mm_l2_feature_read(p, e, feature, 8);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = token0 + n * 8 + 2 * t, row = work.entry.row + token, left = work.entry.count - token;
            const float *s = sum[m][n];
            if (L1) {
                const mm_row_terms r = mm_row_terms_read(p, row, left);
                mm_l1_store<true>(p, f1, r, factor, feature - g, s[0], s[1], s[2], s[3], row, left, g);
            } else
                mm_l2_store<true>(p, f2, factor, feature, 8, s[0], s[1], s[2], s[3], row, left);
        }
    }
}

template <bool L1, int FORMAT>
MM_DEVICE void tile_run(const mm_cuda_gemm_args &p, const tile_work &work, uint32_t shared) {
    const mm_cuda_expert *e = p.experts + work.entry.expert;
    const uint32_t shared_row = threadIdx.x / 2, w = threadIdx.x & 1, in_tile = shared_row & 15;
    const bool second = in_tile >= 8;
    const mm_cuda_matrix *m = L1 ? (second ? &e->up : &e->gate) : &e->down;
    const uint32_t row =
        L1 ? work.block * (TILE_ROWS / 2) + shared_row / 16 * 8 + (in_tile & 7) : work.block * TILE_ROWS + shared_row;
    const bool absent = L1 && !second && !p.gated, promote = FORMAT == MM_FP8 && (L1 ? e->up : e->down).scale_f32;
    const int chunks = ((int)p.k + 127) / 128;
    float sum[2][4][4] = {};
    tile_fetch<FORMAT> f;
    auto load = [&](int chunk) {
        tile_weights_load<FORMAT>(p, f, absent ? &e->up : m, absent ? p.n : row, chunk, w);
        tile_tokens_load<FORMAT>(p, f, work.entry, chunk);
    };
    auto store = [&](int chunk) {
        const uint32_t base = shared + (chunk & 1) * TILE_BUFFER;
        tile_weights_store<FORMAT>(f, base, shared_row, w, promote);
        tile_tokens_store<FORMAT>(f, base + TILE_ROWS * TILE_ROW_BYTES);
    };
    load(0);
    __syncthreads(); /* the tile before may still be read */
    store(0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const uint32_t base = shared + (chunk & 1) * TILE_BUFFER;
        if (chunk + 1 < chunks) load(chunk + 1);
        __syncthreads();
        if (promote) {
            float part[2][4][4] = {};
            tile_multiply(part, base, base + TILE_ROWS * TILE_ROW_BYTES);
            tile_promote<L1>(p, e, sum, part, work.block, chunk * 128);
        } else
            tile_multiply(sum, base, base + TILE_ROWS * TILE_ROW_BYTES);
        if (chunk + 1 < chunks) store(chunk + 1);
    }
    tile_store<L1, FORMAT>(p, e, work, sum);
}

template <bool L1, int FORMAT> MM_DEVICE void tile_kernel(const mm_cuda_gemm_args &p) {
    MM_SHARED_DYNAMIC(char, dynamic, 1024);
    const int rows = L1 ? TILE_ROWS / 2 : TILE_ROWS, blocks = ((int)p.n + rows - 1) / rows;
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const int tiles = tile_count(p, blocks);
    for (int i = blockIdx.x; i < tiles; i += gridDim.x)
        tile_run<L1, FORMAT>(p, tile_find(p, i, blocks), ptx::cvta_to_shared(dynamic));
}

#endif
