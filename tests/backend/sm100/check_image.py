#!/usr/bin/env python3
"""Compiles the Blackwell kernels for sm_100f and looks at what came out: nothing has to run.

Per kernel: registers and spills (ptxas), and how often the instructions occur that make it what it is: block-scaled
MMA, copies of scales to tensor memory, TMA, tensor-memory loads. All of it is compared with budgets.csv, which
--write makes anew. Registers and counts depend on the compiler, so another version is only held to the rules:
no spill, every instruction there. Instructions are found by opcode; where nvdisasm is found it must agree.
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.append(str(ROOT / "tests/backend/cuda"))
from machine_code import (TABLE_COMPILER, compiler_version, count_instructions, differences,
                          find_nvdisasm, read_table, write_table)

TABLE = HERE / "budgets.csv"
SOURCES = ("gemm", "plan", "stage", "combine")
INSTRUCTIONS = {"mma": ((0x5EA,), "UTCOMMA"), "scale_copies": ((0x9E7,), "UTCCP"), "commits": ((0x3E9,), "UTCBAR"),
                "tensor_loads": ((0x9EE,), "LDTM"), "tma_loads": ((0x5B4,), "UTMALDG")}
SPILL = re.compile(r"(\d+) bytes spill (?:stores|loads)")


def compile_kernels(nvcc, source, cubin):
    """The cubin, and {kernel: (registers, spilled bytes)}."""
    command = [nvcc, "-O3", "-std=c++17", "-fmad=false", f"-I{ROOT}/src", f"-I{ROOT}/include",
               "-gencode=arch=compute_100f,code=sm_100f", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin", "-o",
               cubin, f"{ROOT}/src/backend/sm100/{source}.cu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    facts, name = {}, None
    for line in done.stderr.split("\n"):
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
            facts[name] = [0, 0]
        elif "bytes spill" in line:
            facts[name][1] += sum(int(n) for n in SPILL.findall(line))
        elif match := re.search(r"Used (\d+) registers", line):
            facts[name][0] = int(match[1])
    return facts


def measure(nvcc, nvdisasm):
    """{(kernel,): row}"""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            cubin = f"{folder}/{source}.cubin"
            facts = compile_kernels(nvcc, source, cubin)
            counts = count_instructions(Path(cubin).read_bytes(), INSTRUCTIONS, nvdisasm)
            for kernel, (registers, spilled) in facts.items():
                rows[kernel,] = {"kernel": kernel, "registers": registers, "spilled_bytes": spilled, **counts[kernel]}
    return rows


def main():
    nvcc = shutil.which("nvcc")
    version = compiler_version(nvcc)
    if not re.match(r"1[3-9]\.", version):
        print("skipped sm100_image: no nvcc 13 or later")
        return 77
    nvdisasm = find_nvdisasm()
    rows = measure(nvcc, nvdisasm)
    if "--write" in sys.argv:
        write_table(TABLE, f"# sm_100f by nvcc {version}, written by check_image.py --write; shared and tensor memory: "
                           "test_descriptors.c.\n", list(rows.values()))
    problems = list(differences(rows, read_table(TABLE, ("kernel",)), version == TABLE_COMPILER))
    how = "nvdisasm agrees" if nvdisasm else "opcodes"
    print("\n".join(problems) or f"{len(rows)} kernels as in the table ({how})")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
