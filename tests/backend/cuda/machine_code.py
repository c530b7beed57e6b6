"""What machine code says of itself without a GPU: the cubins in a fatbin, their kernels, which instructions occur.

Instructions are found by opcode, which needs no tool; where nvdisasm is found (PATH, or tests/requirements.txt) it must
agree. Registers and counts depend on the compiler, so a table is exact for the compiler that made it, and another
version is only held to what must not change: no spill, and every instruction that makes a kernel what it is.
"""
import csv
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TABLE_COMPILER = "13.0"
IMAGES = {90: "sm_90a", 100: "sm_100f", 120: "sm_120f"}
ALWAYS_EXACT = ("spilled_bytes", "local_loads")


def compiler_version(nvcc):
    """The release of nvcc, as 13.0; empty if there is none."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout if nvcc else ""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def find_nvdisasm():
    """Its path, or None: from PATH, or from the Python package that tests/requirements.txt lists."""
    packaged = (Path(folder) / "nvidia/cu13/bin/nvdisasm" for folder in sys.path)
    return shutil.which("nvdisasm") or next((str(path) for path in packaged if path.is_file()), None)


def cubins(fatbin):
    """(image, bytes of the ELF file) of every cubin in a fatbin: a header of 16 bytes, then entries with their own."""
    data, at = Path(fatbin).read_bytes(), 16
    while at < len(data):
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        capability, = struct.unpack_from("<I", data, at + 28)
        code = data[at + header:at + header + size]
        if kind != 2 or capability not in IMAGES or code[:4] != b"\x7fELF":
            sys.exit(f"{fatbin}: the entry at byte {at} is no plain cubin of a known image "
                     f"(kind {kind}, capability {capability})")
        yield IMAGES[capability], code
        at += header + size


def code_sections(cubin):
    """{kernel: bytes} of the .text sections of an ELF file."""
    offset, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, _, _, _, start, length in headers:
        text = cubin[names + name:cubin.index(b"\0", names + name)].decode()
        if text.startswith(".text."):
            sections[text[6:]] = cubin[start:start + length]
    return sections


def count_opcodes(code, instructions):
    """{name: how often}; instructions: {name: (low 12 bits in every form, word in a disassembly)}."""
    found = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
    return {name: sum(map(found.count, opcodes)) for name, (opcodes, _) in instructions.items()}


def count_words(nvdisasm, cubin, instructions):
    """{kernel: counts} by the disassembler's words."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([nvdisasm, file.name], capture_output=True, text=True, check=True).stdout
    counts = {}
    for section in re.split(r"\.section\s+\.text\.", text)[1:]:
        words = re.findall(r"/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", section)
        counts[re.match(r"\w+", section)[0]] = {name: words.count(word) for name, (_, word) in instructions.items()}
    return counts


def count_instructions(cubin, instructions, nvdisasm):
    """{kernel: {name: how often}}; ends the test where opcodes and nvdisasm (None: not asked) disagree."""
    counts = {kernel: count_opcodes(code, instructions) for kernel, code in code_sections(cubin).items()}
    by_word = count_words(nvdisasm, cubin, instructions) if nvdisasm else counts
    for kernel, found in counts.items():
        if by_word[kernel] != found:
            sys.exit(f"{kernel}: opcodes say {found}, nvdisasm says {by_word[kernel]}")
    return counts


def read_table(path, key):
    """{values of the key columns: row} of a committed table, comments left out."""
    with open(path, encoding="utf-8") as file:
        return {tuple(row[name] for name in key): row
                for row in csv.DictReader(line for line in file if not line.startswith("#"))}


def write_table(path, comment, rows):
    """rows: dicts with the same keys in the same order."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(comment)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def differences(rows, table, exact):
    """Sentences on where rows, keyed as the table is, differ from it by more than another compiler may differ."""
    for key in sorted(set(rows) ^ set(table)):
        yield f"{' '.join(key)}: {'not in the table' if key in rows else 'in the table, but not built'}"
    for key in sorted(set(rows) & set(table)):
        for column, value in rows[key].items():
            got, want = str(value), table[key].get(column, "missing")
            must = exact or column in ALWAYS_EXACT or want == "missing" or (got == "0") != (want == "0")
            if got != want and must:
                yield f"{' '.join(key)}: {column} is {got}, and the table has {want}"
