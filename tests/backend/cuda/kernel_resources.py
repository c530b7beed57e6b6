#!/usr/bin/env python3
"""Compares what every kernel takes and is made of with the committed table: kernel_resources.py TABLE LOG... [--update]

LOG: what ptxas said of a kernel file; the fatbin that the library embeds lies beside it. A kernel that grows, spills,
appears or disappears, or that lost the instructions it was written for, shows up here, in review, and not as a slower
layer. RULES hold whatever the table says, so that --update cannot hide a loss.
"""
import re
import shutil
import sys
from pathlib import Path

from machine_code import (TABLE_COMPILER, compiler_version, count_instructions, cubins, differences, find_nvdisasm,
                          read_table, write_table)

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
SPILL = re.compile(r"(\d+) bytes spill stores")
KEY = ("image", "kernel")

INSTRUCTIONS = {
    "local_loads": ((0x983,), "LDL"),
    "local_stores": ((0x387, 0x987), "STL"),
    "mma": ((0x23C,), "HMMA"),
    "ldmatrix": ((0x83B,), "LDSM"),
    "wgmma": ((0x9F0, 0xDF0), "HGMMA"),
    "bulk_copies": ((0x3BA,), "UBLKCP"),
    "bulk_prefetches": ((0x3BC,), "UBLKPF"),
    "tensor_copies": ((0x5B4,), "UTMALDG"),
    "barriers": ((0x5A7, 0x5B2, 0x9A7), "SYNCS"),
    "reallocations": ((0x9C8,), "USETMAXREG"),
}

# Kernel names, threads of a block (as run.c launches them), and what the machine code must hold, on every image.
# Rings of weights: tensor copies onto mbarriers; what L1 fetches for L2: plain ones.
RULES = (
    (r"mm_decode_", 640, ("mma", "tensor_copies", "barriers")),
    (r"mm_decode_l1_", 640, ("bulk_prefetches",)),
    (r"mm_dense_l\d_(bf16|fp8)_(8|16)$", 2 * 256, ("mma", "tensor_copies", "barriers")),  # two blocks at a time
    (r"mm_dense_l\d_(bf16|fp8)_32$", 256, ("mma", "tensor_copies", "barriers")),
    (r"mm_dense_l\d_wide", 384, ("wgmma", "tensor_copies", "barriers", "reallocations")),
    (r"mm_dense_l\d_(bf16|fp8)_(low|mid)", 512, ("wgmma", "tensor_copies", "barriers")),
    (r"mm_tile_", 256, ("mma", "ldmatrix")),
    (r"mm_mid_", 640, ("wgmma", "tensor_copies", "barriers", "reallocations")),
    (r"mm_wide_", 384, ("wgmma", "tensor_copies", "barriers", "reallocations")),
    (r"mm_gemm_bf16", 384, ("wgmma", "tensor_copies", "barriers", "reallocations")),
    (r"mm_route_logits", 256, ("mma",)),
    (r"mm_route_tile", 288, ("mma", "ldmatrix", "tensor_copies", "barriers")),
    (r"mm_route_wide_", 384, ("wgmma", "tensor_copies", "barriers", "reallocations")),
    (r"mm_route_choose", 256, ()),
    (r"mm_plan_", 1024, ()),
    (r"mm_(stage|dequantize)", 448, ()),
    (r"mm_(start|dense_widen|combine)", 256, ()),
)
EMPTY = {("sm_120f", f"mm_decode_l1_{form}") for form in ("nvfp4_14", "mxfp4_14")}  # no ring fits: see decode.cu
REGISTERS = 65536  # of a multiprocessor; a warp takes them in units of 256
SHARED_BYTES = 1024  # static: the rest of a block's memory belongs to rings and tiles (layer.c: DECODE_STATIC_BYTES)


def ptxas_facts(log):
    """{(image, kernel): facts} of a ptxas -v log."""
    facts, entry, spilled = {}, None, 0
    for line in Path(log).read_text(encoding="utf-8").splitlines():
        if found := ENTRY.search(line):
            entry = (found[2], found[1])
        elif found := SPILL.search(line):
            spilled = int(found[1])
        elif entry and (found := USED.search(line)):
            facts[entry] = {"image": entry[0], "kernel": entry[1], "registers": int(found[1]),
                            "shared_bytes": int(found[2] or 0), "spilled_bytes": spilled}
            entry = None
    return facts


def measure(logs, nvdisasm):
    """{(image, kernel): row}: what ptxas said, and what the embedded machine code holds."""
    rows = {}
    for log in logs:
        facts, held = ptxas_facts(log), {}
        for image, cubin in cubins(Path(log).with_suffix(".fatbin")):
            held |= {(image, kernel): counts
                     for kernel, counts in count_instructions(cubin, INSTRUCTIONS, nvdisasm).items()}
        if set(facts) != set(held):
            sys.exit(f"{log}: ptxas compiled {sorted(facts)}, and the fatbin holds {sorted(held)}")
        rows |= {key: facts[key] | held[key] for key in facts}
    return dict(sorted(rows.items()))


def broken_rules(rows):
    for (image, kernel), row in rows.items():
        if row["spilled_bytes"] or row["local_loads"]:
            yield f"{image} {kernel} spills: {row['spilled_bytes']} bytes, {row['local_loads']} loads of local memory"
        if row["shared_bytes"] > SHARED_BYTES and kernel != "mm_start":  # which has no ring
            yield f"{image} {kernel} has {row['shared_bytes']} bytes of static shared memory, more than {SHARED_BYTES}"
        for name, threads, needed in RULES:
            if not re.match(name, kernel):
                continue
            registers = (row["registers"] + 7) // 8 * 8 * threads
            if registers > REGISTERS:
                yield f"{image} {kernel}: {threads} threads take {registers} registers of {REGISTERS}"
            for instruction in needed if (image, kernel) not in EMPTY else ():
                if row[instruction] == 0:
                    yield f"{image} {kernel} has no {INSTRUCTIONS[instruction][1]}"


def main():
    table, *logs = [argument for argument in sys.argv[1:] if argument != "--update"]
    version, nvdisasm = compiler_version(shutil.which("nvcc")), find_nvdisasm()
    rows = measure(logs, nvdisasm)
    if "--update" in sys.argv:
        write_table(table, "", list(rows.values()))
    images = {image for image, _ in rows}
    committed = {key: row for key, row in read_table(table, KEY).items() if key[0] in images}
    problems = [*broken_rules(rows), *differences(rows, committed, version == TABLE_COMPILER)]
    how = "nvdisasm agrees" if nvdisasm else "opcodes"
    print("\n".join(problems) or f"{len(rows)} kernels as in the table ({how})")
    return bool(problems) or not rows


if __name__ == "__main__":
    sys.exit(main())
