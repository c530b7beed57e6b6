#!/usr/bin/env python3
"""Compiles the Blackwell kernels for sm_100f and looks at what came out: nothing has to run.

Per kernel: registers and spills (ptxas), and how often the instructions occur that make it what it is: block-scaled
MMA, copies of scales to tensor memory, TMA, tensor-memory loads. All of it is compared with budgets.csv, which
--write makes anew. Registers and counts depend on the compiler, so another version is only held to the rules:
no spill, every instruction there. Instructions are found by opcode; where nvdisasm is found it must agree.
"""
import csv
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TABLE = HERE / "budgets.csv"
SOURCES = ("gemm", "plan", "stage", "combine")
COLUMNS = ("kernel", "registers", "spilled_bytes", "mma", "scale_copies", "commits", "tensor_loads", "tma_loads")

# The low 12 bits of an instruction, and its name in a disassembly.
OPCODES = {"mma": (0x5EA, "UTCOMMA"), "scale_copies": (0x9E7, "UTCCP"), "commits": (0x3E9, "UTCBAR"),
           "tensor_loads": (0x9EE, "LDTM"), "tma_loads": (0x5B4, "UTMALDG")}
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


def code_sections(cubin):
    """{kernel: bytes} of the .text sections of an ELF file."""
    data = Path(cubin).read_bytes()
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, _, _, _, start, length in headers:
        text = data[names + name:data.index(b"\0", names + name)].decode()
        if text.startswith(".text."):
            sections[text[6:]] = data[start:start + length]
    return sections


def count_opcodes(code):
    found = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
    return {name: found.count(opcode) for name, (opcode, _) in OPCODES.items()}


def count_names(nvdisasm, cubin):
    """{kernel: counts} by the disassembler's names."""
    text = subprocess.run([nvdisasm, cubin], capture_output=True, text=True, check=True).stdout
    counts = {}
    for section in re.split(r"\.section\s+\.text\.", text)[1:]:
        name = re.match(r"\w+", section)[0]
        counts[name] = {what: len(re.findall(rf"\b{word}\b", section)) for what, (_, word) in OPCODES.items()}
    return counts


def measure(nvcc, nvdisasm):
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            cubin = f"{folder}/{source}.cubin"
            facts, sections = compile_kernels(nvcc, source, cubin), code_sections(cubin)
            by_name = count_names(nvdisasm, cubin) if nvdisasm else {}
            for kernel, (registers, spilled) in facts.items():
                counts = count_opcodes(sections[kernel])
                if by_name and by_name[kernel] != counts:
                    sys.exit(f"{kernel}: opcodes say {counts}, nvdisasm says {by_name[kernel]}")
                rows[kernel] = {"kernel": kernel, "registers": registers, "spilled_bytes": spilled, **counts}
    return rows


def problems_of(rows, exact):
    with TABLE.open(encoding="utf-8") as file:
        table = {row["kernel"]: row for row in csv.DictReader(line for line in file if not line.startswith("#"))}
    if set(table) != set(rows):
        yield f"kernels are {sorted(rows)}, and the table has {sorted(table)}"
    for kernel in sorted(set(table) & set(rows)):
        for column in COLUMNS[1:]:
            got, want = int(rows[kernel][column]), int(table[kernel][column])
            must = exact or column == "spilled_bytes" or (got == 0) != (want == 0)
            if got != want and must:
                yield f"{kernel}: {column} is {got}, and the table has {want}"


def main():
    nvcc = shutil.which("nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout if nvcc else ""
    if not re.search(r"release 1[3-9]", version):
        print("skipped sm100_image: no nvcc 13 or later")
        return 77
    nvdisasm = shutil.which("nvdisasm")
    rows = measure(nvcc, nvdisasm)
    if "--write" in sys.argv:
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            file.write("# sm_100f by nvcc 13.0, written by check_image.py --write; shared and tensor memory: "
                       "test_descriptors.c.\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
    problems = list(problems_of(rows, exact="release 13.0" in version))
    how = "nvdisasm agrees" if nvdisasm else "opcodes"
    print("\n".join(problems) or f"{len(rows)} kernels as in the table ({how})")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
