#!/usr/bin/env python3
"""Includes point one way: each folder may include itself, the public header, and what this table allows."""
import re
import sys
from pathlib import PurePosixPath

from project import C_SUFFIXES, ROOT, files, report, text

BASE = ("error", "weights")  # src/error.*, src/weights.*
EDGES = {
    "error": (),
    "numerics": (),
    "weights": ("numerics", "error"),
    "checkpoint": BASE + ("numerics",),
    "routing": BASE + ("numerics",),
    "group": BASE + ("routing",),
    "backend": BASE,
    "backend/reference": BASE + ("backend",),  # the oracle shares nothing with what it judges
    "backend/cpu": BASE + ("backend", "numerics", "routing"),
    "backend/cuda": BASE + ("backend", "numerics", "routing"),
    "backend/sm90": BASE + ("backend", "numerics", "routing", "backend/cuda"),
    "backend/sm100": BASE + ("backend", "numerics", "routing", "backend/cuda"),
    "library": BASE + ("checkpoint", "routing", "group", "backend", "numerics"),  # other files of src/ itself
    "tools/megamoe": (),
}

# System headers that tie a file to a library or a machine, and the only folders that may.
EXTERNAL = {
    r"jansson\.h": ("checkpoint", "tools/megamoe"),
    r"(cuda|nvrtc|cupti|mma).*": ("backend/cuda", "backend/sm90", "backend/sm100"),
    r"(immintrin|x86intrin|arm_neon|arm_sve|cpuid)\.h": ("backend/cpu",),
    r"(mpi|nccl)\.h": ("group",),
}

# Names that would tie the oracle to the code it judges even without an include.
SHARED_CODE = re.compile(r"\bmm_((e2m1|e4m3|e8m0|bf16|nvfp4|score)_\w+|swiglu_apply|sigmoid|router_choose)\b")

# Present only where kernels are compiled for the host by the functional model in tests/.
MODEL_HEADERS = {"backend/cuda": ("sm100_model_ptx.h", "sm100_model_cuda.h")}

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def module(path):
    """The entry of EDGES that a file belongs to."""
    parts = PurePosixPath(path)
    if not path.startswith("src/"):
        return parts.parent.as_posix()
    inside = parts.relative_to("src")
    if inside.parent.as_posix() == ".":
        return inside.stem if inside.stem in EDGES else "library"
    return inside.parent.as_posix()


def target(path, name):
    """The file that a quoted include names, relative to the root; None if there is no such file."""
    for base in ("src", "include", PurePosixPath(path).parent.as_posix()):
        if (ROOT / base / name).is_file():
            return f"{base}/{name}"
    return None


def problems_of(path):
    own, source = module(path), text(path)
    if own not in EDGES:
        yield f"{path}: the folder {own} is not in the table of allowed includes"
        return
    for quote, name in INCLUDE.findall(source):
        if quote == "<":
            for pattern, allowed in EXTERNAL.items():
                if re.fullmatch(pattern, name) and own not in allowed:
                    yield f"{path}: <{name}> is only for {', '.join(allowed)}"
            continue
        if name in MODEL_HEADERS.get(own, ()):
            continue
        found = target(path, name)
        if not found:
            yield f'{path}: "{name}" is neither below src/ or include/ nor beside it'
        elif found != "include/megamoe/megamoe.h" and module(found) not in EDGES[own] + (own,):
            yield f'{path}: {own} may not include {module(found)} ("{name}")'
    if own == "backend/reference":
        for match in SHARED_CODE.finditer(COMMENT.sub("", source)):
            yield f"{path}: the oracle must not use {match[0]}"


def main():
    sources = files(*C_SUFFIXES, folders=("src", "tools"))
    return report([problem for path in sources for problem in problems_of(path)])


if __name__ == "__main__":
    sys.exit(main())
