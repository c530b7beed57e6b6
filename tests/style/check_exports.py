#!/usr/bin/env python3
"""The library exports the functions of megamoe.h, no more and no less, and cannot print or end its caller.

    check_exports.py LIBRARY
"""
import re
import shutil
import subprocess
import sys

from project import report, skip, text

FORBIDDEN = {"printf", "fprintf", "vprintf", "vfprintf", "__printf_chk", "__fprintf_chk", "__vfprintf_chk",
             "puts", "putchar", "fputs", "perror", "stdout", "stderr",
             "exit", "_exit", "quick_exit", "abort", "signal", "sigaction", "atexit"}


def symbols(library, which):
    """Names by nm, without versions; the toolchain's own begin with an underscore."""
    nm = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True)
    return {line.split()[-1].split("@")[0] for line in nm.stdout.splitlines() if line.strip()}


def declared():
    """Every name right before a parenthesis in a declaration marked MEGAMOE_API."""
    header = re.sub(r"/\*.*?\*/", "", text("include/megamoe/megamoe.h"), flags=re.DOTALL)
    return set(re.findall(r"^MEGAMOE_API\b[^;(]*?(\w+)\s*\(", header, flags=re.MULTILINE))


def main():
    if not shutil.which("nm"):
        skip("style_exports", "nm is not installed")
    library, expected = sys.argv[1], declared()
    exported = {name for name in symbols(library, "--defined-only") if not name.startswith("_")}
    problems = [] if len(expected) > 20 else [f"megamoe.h seems to declare only {len(expected)} functions"]
    problems += [f"{name} is declared in megamoe.h but not exported" for name in sorted(expected - exported)]
    problems += [f"{name} is exported but not declared in megamoe.h" for name in sorted(exported - expected)]
    used = sorted(symbols(library, "--undefined-only") & FORBIDDEN)
    problems += [f"the library uses {name}: it must not print, exit or install handlers" for name in used]
    return report(problems)


if __name__ == "__main__":
    sys.exit(main())
