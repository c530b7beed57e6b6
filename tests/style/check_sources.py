#!/usr/bin/env python3
"""Sources open by saying what they own, lines are short, functions fit a screen, no file knows a machine."""
import re
import sys

from project import C_SUFFIXES, files, report, text

COLUMNS = 120  # as .clang-format has it
FUNCTION_LINES = 70

# Functions that are longer, with the lines they may have and why: (path, name): (lines, reason).
LONGER = {}

CODE = C_SUFFIXES + (".py", ".sh", ".cmake", "CMakeLists.txt")
PROSE = (".md", ".toml", ".yml", ".yaml", ".gp", ".html")

MACHINE = re.compile(r"/(?:work|home|root)/[A-Za-z0-9_.-]+")
REGISTRY = re.compile(r"\b(?:pypi|pythonhosted|debian|nvcr|ghcr|docker)[.](?:org|io)\b")

FUNCTION_NAME = re.compile(r"(\w+)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*\{$")


def opens_with_comment(path, lines):
    first = lines[0] if lines else ""
    if path.endswith(C_SUFFIXES):
        return first.startswith(("/*", "//"))
    if first.startswith("#!"):
        first = lines[1] if len(lines) > 1 else ""
    return first.startswith(("#", '"""', 'r"""'))


def long_functions(path, lines):
    """A definition begins in column 0 (clang-format sees to that) and ends with a brace in column 0."""
    head, start = "", 0
    for number, line in enumerate(lines, 1):
        if line and line[0] not in " \t}#/*{":
            head, start = line, number
        elif head and not head.endswith(("{", ";")) and line.startswith(" "):
            head += line
        name = FUNCTION_NAME.search(head)
        if line.startswith("}") and name and start:
            length = number - start + 1
            allowed, _ = LONGER.get((path, name[1]), (FUNCTION_LINES, ""))
            if length > allowed:
                yield f"{path}:{start}: {name[1]} has {length} lines, more than {allowed}"
            head, start = "", 0


def problems_of(path):
    lines = text(path).split("\n")
    if path.endswith(CODE) and not path.endswith("CMakeLists.txt") and not opens_with_comment(path, lines):
        yield f"{path}:1: does not open with a comment that says what it owns"
    if lines[-1] != "":
        yield f"{path}: does not end with a newline"
    for number, line in enumerate(lines, 1):
        # A sentence stays in one piece, so that it can be searched for.
        in_one_piece = path.endswith(C_SUFFIXES) and line.lstrip().startswith('"')
        if path.endswith(CODE) and len(line) > COLUMNS and not in_one_piece:
            yield f"{path}:{number}: {len(line)} columns, more than {COLUMNS}"
        if "\t" in line:
            yield f"{path}:{number}: a tab"
        if line != line.rstrip():
            yield f"{path}:{number}: space at the end of the line"
        for pattern, what in ((MACHINE, "a path of one machine"), (REGISTRY, "the host of a registry")):
            if pattern.search(line):
                yield f"{path}:{number}: {what}: {pattern.search(line)[0]}"
    if path.endswith(C_SUFFIXES):
        yield from long_functions(path, lines)


def main():
    problems = [problem for path in files(*CODE, *PROSE) for problem in problems_of(path)]
    known = set(files(*C_SUFFIXES))
    problems += [f"LONGER names {path}, which does not exist" for path, _ in LONGER if path not in known]
    return report(problems)


if __name__ == "__main__":
    sys.exit(main())
