#!/usr/bin/env python3
"""Every C-like source is as clang-format would have it."""
import shutil
import subprocess
import sys

from project import C_SUFFIXES, ROOT, files, skip


def main():
    if not shutil.which("clang-format"):
        skip("style_format", "clang-format is not installed")
    command = ["clang-format", "--dry-run", "-Werror", "--ferror-limit=1", "--style=file"]
    return subprocess.run(command + files(*C_SUFFIXES), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
