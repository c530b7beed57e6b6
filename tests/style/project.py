"""The files of the project that have a style, shared by the checks beside it."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("include", "src", "tools", "tests", "python", "bench", "examples", "scripts", "docs")
C_SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh")
SKIPPED = re.compile(r"(^|/)(build[^/]*|__pycache__|\.[^/]+)(/|$)")


def files(*suffixes, folders=FOLDERS):
    """Paths relative to the root, sorted; those at the root too when all folders are meant."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    if folders == FOLDERS:
        found += [p for p in ROOT.iterdir() if p.is_file()]
    paths = sorted(p.relative_to(ROOT).as_posix() for p in found)
    return [p for p in paths if not SKIPPED.search(p) and p.endswith(suffixes)]


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def report(problems):
    """Prints one line for each problem; the exit status."""
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def skip(name, reason):
    print(f"skipped {name}: {reason}")
    sys.exit(77)
