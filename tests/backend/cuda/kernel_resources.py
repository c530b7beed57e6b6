#!/usr/bin/env python3
"""Compares what ptxas used for every kernel with the committed table: kernel_resources.py TABLE LOG... [--update]

A kernel that grows, spills, appears or disappears shows up here, in review, and not as a slower layer.
"""
import re
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
SPILL = re.compile(r"(\d+) bytes spill stores")


def kernels(logs):
    """Rows (image, kernel, registers, static shared bytes, spilled bytes) of ptxas -v logs, sorted."""
    rows, entry, spilled = set(), None, 0
    for path in logs:
        with open(path, encoding="utf-8") as log:
            for line in log:
                if found := ENTRY.search(line):
                    entry = found.groups()
                elif found := SPILL.search(line):
                    spilled = int(found[1])
                elif entry and (found := USED.search(line)):
                    rows.add((entry[1], entry[0], int(found[1]), int(found[2] or 0), spilled))
                    entry = None
    return [",".join(map(str, row)) for row in sorted(rows)]


def main():
    update = "--update" in sys.argv
    table, *logs = [argument for argument in sys.argv[1:] if argument != "--update"]
    found = ["image,kernel,registers,shared_bytes,spilled_bytes"] + kernels(logs)
    if update:
        with open(table, "w", encoding="utf-8") as out:
            out.write("\n".join(found) + "\n")
        return 0
    with open(table, encoding="utf-8") as committed:
        expected = committed.read().splitlines()
    images = {row.split(",")[0] for row in found[1:]}
    expected = expected[:1] + [row for row in expected[1:] if row.split(",")[0] in images]
    for row in sorted(set(expected) - set(found)):
        print(f"- {row}")
    for row in sorted(set(found) - set(expected)):
        print(f"+ {row}")
    return 0 if len(found) > 1 and found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
