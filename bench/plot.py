#!/usr/bin/env python3
"""Draws the pictures of docs/performance.md from the results beside it: how long, and how far from the limits.

    bench/plot.py            writes docs/pictures/*.svg and *.png (needs matplotlib)
    bench/plot.py --check    says whether they show the results as they are now (needs nothing but Python)

Each picture carries the SHA-256 of the files that it was drawn from, and no date of its own: the same results give
the same SVG, so a change of a picture is a change of a number.
"""

import csv
import hashlib
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "bench" / "results", ROOT / "docs" / "pictures"

EXPERTS, PER_TOKEN, HIDDEN, INTERMEDIATE = 48, 6, 7168, 3072  # V4-Pro on one rank of eight
WEIGHTS = 3 * HIDDEN * INTERMEDIATE  # of one expert
EXPERT_BYTES = WEIGHTS * 9 / 16  # NVFP4: codes, and a scale for 16 of them

# Okabe and Ito's colors, which stay apart for color-blind eyes; marks and dashes say the same once more.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip


def read(name):
    """The rows of a result, and its comments of the form "# key: value"."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    about = dict(re.findall(r"^# (\w+): (.*)$", "\n".join(lines), re.MULTILINE))
    return list(csv.DictReader(line for line in lines if not line.startswith("#"))), about


def stamp(names):
    digest = hashlib.sha256()
    for name in names:
        digest.update((RESULTS / name).read_bytes())
    return f"drawn by bench/plot.py from {', '.join(names)}, sha256 {digest.hexdigest()}"


def medians(rows, column="seconds_median", **wanted):
    """Tokens to the median over all rounds of what `wanted` names."""
    cells = {}
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()):
            cells.setdefault(int(row["tokens"]), []).append(float(row[column]))
    return {tokens: statistics.median(values) for tokens, values in sorted(cells.items())}


def limit_of(rows, column, threads):
    return statistics.median(float(r[column]) for r in rows if r["threads"] == threads and r[column])


def label_axes(axes, tokens, y_label):
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{t:,}" for t in tokens])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set_ylabel(y_label)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


CPU = "experts_cpu_zen4.csv"
CPU_SYSTEMS = (  # system, type, label, color, mark, dashes
    ("megamoe", "nvfp4", "megamoe, NVFP4, nvfp4 activations", BLUE, "o", "-"),
    ("megamoe", "bf16", "megamoe, NVFP4, bf16 activations", SKY, "s", "-"),
    ("ik_llama.cpp", "mxfp4_r8", "ik_llama.cpp, MXFP4_R8, int8 activations", VERMILION, "^", "--"),
    ("ggml", "nvfp4", "ggml, NVFP4, int8 activations", ORANGE, "v", "--"),
)


def draw_cpu(plt):
    rows, about = read(CPU)
    rows = [row for row in rows if row["isa"] != "avx2"]
    threads = sorted({row["threads"] for row in rows})
    figure, grid = plt.subplots(2, len(threads), figsize=(10, 7.4), sharex=True, sharey="row", squeeze=False,
                                height_ratios=(3, 2), layout="constrained")  # fmt: skip
    for (top, bottom), count in zip(grid.T, threads):
        peer = medians(rows, system="ik_llama.cpp", threads=count)
        tokens = sorted(peer)
        every = [2 ** (i / 8) for i in range(8 * 9 + 1)]
        gb_s, tflop_s = limit_of(rows, "read_gb_s", count), limit_of(rows, "matrix_tflop_s", count)
        hit = [EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** t) for t in every]
        top.plot(every, [1e-6 * h * EXPERT_BYTES / gb_s for h in hit], color=BLACK, linewidth=1, linestyle=":",
                 label="limit: weights of the experts hit, read once")  # fmt: skip
        top.plot(every, [1e-9 * 2 * WEIGHTS * PER_TOKEN * t / tflop_s for t in every], color=BLACK, linewidth=1,
                 linestyle="-.", label="limit: the matrix rate of megamoe's BF16 loop")  # fmt: skip
        for system, kind, label, color, mark, dashes in CPU_SYSTEMS:
            times = medians(rows, system=system, type=kind, threads=count)
            style = {"color": color, "marker": mark, "linestyle": dashes, "markersize": 5, "linewidth": 1.4}
            top.plot(list(times), [1e3 * s for s in times.values()], label=label, **style)
            shared = [t for t in times if t in peer]
            bottom.plot(shared, [peer[t] / times[t] for t in shared], **style)
        if count == "1":
            bottom.axhline(1.6, color=GREEN, linewidth=1, linestyle=":")
            bottom.text(1.05, 1.62, "goal: 1.6", color=GREEN, fontsize=8, verticalalignment="bottom")
        top.set_yscale("log")
        top.set_title(f"{count} thread{'s' if count != '1' else ''}: reads {gb_s:.0f} GB/s, {tflop_s:.2f} TFLOP/s",
                      fontsize=10)  # fmt: skip
        label_axes(top, tokens, "ms for L1 + activation + L2")
        label_axes(bottom, tokens, "times as fast as ik_llama.cpp")
        bottom.set_xlabel("tokens in the batch, 6 experts of 48 each")
        bottom.set_ylim(0, 2)
    for axes in grid[:, 1:].flat:
        axes.set_ylabel("")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8,
                  frameon=False)  # fmt: skip
    commits = ", ".join(f"{s} {c}" for s, c in dict.fromkeys((row["system"], row["commit"]) for row in rows))
    figure.supxlabel(f"V4-Pro rank (48 experts, H 7168, I 3072). {about['machine']}.\n{commits}. {about['date']}. "
                     f"Medians of {about['rounds']} interleaved rounds.", fontsize=8)  # fmt: skip
    return figure


H200, REFERENCE, H200_PEERS = "experts_h200.csv", "experts_h200_reference.csv", "experts_h200_peers.csv"
H200_DRAWN = (  # systems (of several, each token's best), weights, activations, label, color, mark
    (("Marlin",), "nvfp4", "bf16", "Marlin NVFP4", ORANGE, "v"),
    (("Humming grouped", "Humming indexed"), "nvfp4", "bf16", "Humming NVFP4", VERMILION, "^"),
    (("triton_kernels", "triton_kernels 4 warps", "triton_kernels matmul_ogs"), "mxfp4", "bf16",
     "triton_kernels MXFP4", PURPLE, "D"),
    (("Humming grouped",), "mxfp4", "fp8", "Humming MXFP4 x FP8 (inexact: FP8 activations)", SKY, "x"),
)


def draw_h200(plt):
    rows, _ = read(H200)
    rows = [row for row in rows if row["shape"] == "v4-pro" and row["activations"] == "bf16"]
    reference, _ = read(REFERENCE)
    peers, about = read(H200_PEERS)
    tokens = [int(key) for key in reference[0] if key.isdigit()]
    lines = {row["kind"]: [float(row[str(t)]) for t in tokens] for row in reference}
    cool = medians(rows, "experts_us_median", state="cool") | medians(peers, "us_median", system="megamoe")
    cool = dict(sorted(cool.items()))
    loaded = medians(rows, "experts_us_median", state="loaded")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8.2), sharex=True, height_ratios=(3, 2),
                                         layout="constrained")  # fmt: skip
    floor = dict(zip(tokens, lines["floor"]))

    def draw(times, label, **style):
        style = {"linewidth": 1.4, "markersize": 5, **style}
        top.plot(list(times), list(times.values()), label=label, **style)
        known = [t for t in times if t in floor]
        bottom.plot(known, [floor[t] / times[t] for t in known], **style)

    top.plot(tokens, lines["floor"], color=BLACK, linewidth=1, linestyle=":", label="floor: copy rate or cuBLAS rate")
    draw(dict(zip(tokens, lines["goal"])), "goal", color=GREEN, linestyle=(0, (4, 2)), marker="_", markersize=8)
    draw(cool, "megamoe, NVFP4, after a pause", color=BLUE, marker="o")
    draw(loaded, "megamoe, NVFP4, under load (power limit)", color=BLUE, marker="o", markerfacecolor="white",
         linewidth=0.8)  # fmt: skip
    for systems, weights, activations, label, color, mark in H200_DRAWN:
        each = [medians(peers, "us_median", system=s, weights=weights, activations=activations) for s in systems]
        best = {t: min(times[t] for times in each if t in times) for t in sorted(set().union(*each))}
        draw(best, label, color=color, marker=mark, linestyle="--", linewidth=1)
    top.set_yscale("log")
    label_axes(top, tokens, "microseconds for L1 + activation + L2")
    label_axes(bottom, tokens, "fraction of the floor's rate")
    bottom.set_ylim(0, 1.3)
    bottom.axhline(1, color=BLACK, linewidth=1, linestyle=":")
    bottom.set_xlabel("tokens in the batch, 6 experts of 384 each, of which 48 are here")
    top.legend(loc="upper left", fontsize=8, frameon=False)
    commits = ", ".join(dict.fromkeys(row["version"] for row in peers if row["system"] == "megamoe"))
    figure.supxlabel(f"V4-Pro rank (48 experts, H 7168, I 3072). {about['machine']}. megamoe {commits}. "
                     f"{about['date']}.\nMedians of {about['rounds']} interleaved rounds on the same draws; "
                     f"versions: {H200_PEERS}.", fontsize=8)  # fmt: skip
    return figure


DRAWINGS = {"experts_cpu_zen4": ((CPU,), draw_cpu), "experts_h200": ((H200, REFERENCE, H200_PEERS), draw_h200)}


def write():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "megamoe", "svg.fonttype": "none"})
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9})
    PICTURES.mkdir(exist_ok=True)
    for name, (sources, draw) in DRAWINGS.items():
        figure = draw(plt)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None, "Description": stamp(sources)})
        figure.savefig(PICTURES / f"{name}.png", dpi=88, metadata={"Description": stamp(sources)})
    return 0


def check():
    stale = [
        f"docs/pictures/{name}.{kind} does not show bench/results as it is: run bench/plot.py"
        for name, (sources, _) in DRAWINGS.items()
        for kind in ("svg", "png")
        if stamp(sources).encode() not in (PICTURES / f"{name}.{kind}").read_bytes()
    ]
    print("\n".join(stale), end="\n" if stale else "")
    return 1 if stale else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    sys.exit(check() if sys.argv[1:] else write())
