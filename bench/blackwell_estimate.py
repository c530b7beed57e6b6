#!/usr/bin/env python3
"""Estimates, not measurements: what one V4-Pro layer of 48 experts asks of a B200, from tiles and published peaks.

Prints the tables of docs/blackwell.md. Nothing in it has run on the hardware. Peaks: 9 PFLOP/s dense FP4 and 8 TB/s
over 148 SMs at 1.85 GHz, so 32,768 FLOP and 29 bytes of memory a clock and SM; 128 bytes of shared memory too
(as on earlier GPUs).

Instructions of the epilogue are counted in the disassembly of the image, by hand: `nvdisasm -c` of gemm.cu as
check_image.py compiles it (nvcc 13.0), the loop of sm100_l1_large and sm100_l2_large that begins with the tensor
loads, along the path of 16 columns that are all tokens and the last of their tile. Instructions whose predicate is
false count, and so do both sides of a branch that divides a warp (transpose_nibbles). Not counted: slow paths of
divisions, and what is not asked for (the dump of L1, relu2, counters of rare blocks, F32 rows). L1: 1,634, 102 per
value, of them 52 the factors and SwiGLU with its exact division and 24 the division that gives the code. L2: 318,
20 per value.
"""
SMS, CLOCK, MEMORY, FLOP_CLK, SHARED_CLK = 148, 1.85e9, 8.0e12, 32768, 128
HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 7168, 3072, 48, 6
BYTES = 0.5625  # of an NVFP4 value: code and scale
STAGE_K, STAGE_BYTES = 256, 128  # values and bytes of a row
SCALE_STAGE = 2048  # bytes of scales of 128 rows
EPILOGUE = {"L1": 1634, "L2": 318}  # instructions of a warp for 32 features x 16 tokens
LAUNCHES, LAUNCH = 5, 4e-6

# As in tiles.h: CTAs, matrices, n_max, n_step, stripes of token scales.
TILES = {"L1 small": (1, 2, 64, 32, 1), "L1 large": (2, 2, 96, 32, 2),
         "L2 small": (1, 1, 64, 32, 1), "L2 large": (2, 1, 192, 32, 2)}


def up(value, step):
    return -(-value // step) * step


def token_tiles(tile, rows):
    """The N of each token tile of an expert with this many rows."""
    ctas, _, n_max, step, _ = TILES[tile]
    tiles = -(-rows // n_max)
    n = up(rows, 8 * ctas) if tiles <= 1 else up(-(-rows // tiles), step)
    return [min(n, up(rows - at, 8 * ctas)) for at in range(0, rows, n)]


def tile_cost(tile, n, k):
    """Clocks of one CTA for one tile, by resource; bytes from memory are the weights', read once per expert."""
    ctas, matrices, _, _, stripes = TILES[tile]
    stages = k / STAGE_K
    operands = matrices * 128 * STAGE_BYTES + n // ctas * STAGE_BYTES
    scales = (matrices + min(stripes, -(-n // 128))) * SCALE_STAGE
    chunks = -(-n // 16) * 4  # of 16 tokens, in four quadrants of 32 features
    return {
        "tensor": stages * 128 * n * STAGE_K * matrices * 2 / FLOP_CLK,
        "shared reads": stages * (operands + scales) / SHARED_CLK,
        "shared writes": stages * (operands + scales) / SHARED_CLK,
        "epilogue": chunks * EPILOGUE[tile[:2]] / 4,  # four schedulers
        # accumulators read once by the epilogue; scales written to all four quadrants; MMA's own traffic is internal
        "tensor memory bytes": matrices * n * 512 + stages * 4 * scales,
        "weight bytes": matrices * 128 * k * BYTES,
    }


def gemm(tile, rows, m, k):
    """Seconds of one GEMM over all experts with `rows` tokens each, by resource."""
    ctas = TILES[tile][0]
    workers, m_tiles = SMS // ctas, -(-m // (128 * ctas))
    costs = [tile_cost(tile, n, k) for n in token_tiles(tile, rows)]
    total = {what: sum(c[what] for c in costs) * EXPERTS * m_tiles / workers / CLOCK for what in costs[0]}
    busiest = -(-EXPERTS * m_tiles * len(costs) // workers) / (EXPERTS * m_tiles * len(costs) / workers)
    matrices = TILES[tile][1]
    total["memory"] = EXPERTS * matrices * m * k * BYTES / MEMORY
    del total["weight bytes"], total["tensor memory bytes"]
    return total, busiest


def per_tile():
    print("| tile | N | stages of K | MFLOP | tensor | shared reads | shared writes | epilogue | weights from memory "
          "| KiB into and out of tensor memory |")
    print("| --- |" + " ---: |" * 9)
    for tile, n in (("L1 small", 8), ("L1 small", 64), ("L1 large", 80), ("L1 large", 96),
                    ("L2 small", 8), ("L2 small", 64), ("L2 large", 128), ("L2 large", 192)):
        k = HIDDEN if tile.startswith("L1") else INTERMEDIATE
        c = tile_cost(tile, n, k)
        memory = c["weight bytes"] / (MEMORY / SMS / CLOCK)
        flop = 2 * TILES[tile][1] * 128 * n * k / 1e6
        print(f"| {tile} | {n} | {k // STAGE_K} | {flop:,.0f} | {c['tensor']:,.0f} | {c['shared reads']:,.0f} | "
              f"{c['shared writes']:,.0f} | {c['epilogue']:,.0f} | {memory:,.0f} | "
              f"{c['tensor memory bytes'] / 1024:,.0f} |")


def per_layer():
    print("| tokens per rank | rows per expert | tiles | L1 memory / tensor / epilogue | L2 memory / tensor / epilogue "
          "| staging, partials | whole, at these peaks | binds |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |")
    for tokens in (64, 512, 2048, 8192):
        rows = tokens * SLOTS // EXPERTS
        size = "small" if rows < 64 else "large"
        pairs = tokens * SLOTS
        l1, tail1 = gemm(f"L1 {size}", rows, INTERMEDIATE, HIDDEN)
        l2, tail2 = gemm(f"L2 {size}", rows, HIDDEN, INTERMEDIATE)
        other = (tokens * HIDDEN * 4 + pairs * (HIDDEN + INTERMEDIATE) * BYTES * 2 + pairs * HIDDEN * 4) / MEMORY
        parts = [max(g, key=g.get) for g in (l1, l2)]
        whole = max(l1.values()) * tail1 + max(l2.values()) * tail2 + other + LAUNCHES * LAUNCH
        show = [" / ".join(f"{g[w] * 1e6:.0f}" for w in ("memory", "tensor", "epilogue")) for g in (l1, l2)]
        print(f"| {tokens} | {rows} | {size} | {show[0]} | {show[1]} | {other * 1e6:.0f} | {whole * 1e6:.0f} | "
              f"L1: {parts[0]}, L2: {parts[1]} |")


if __name__ == "__main__":
    per_tile()
    print()
    per_layer()
