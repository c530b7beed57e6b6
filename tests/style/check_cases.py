#!/usr/bin/env python3
"""tests/CASES.md promises tests by name: every name in backquotes is there, in a source of the tests or as a file."""
import re
import sys

from project import files, report, text

CASES = "tests/CASES.md"


def main():
    paths = [path for path in files(".c", ".cpp", ".py", ".txt") if path.startswith("tests/")]
    words = "\n".join(paths + [text(path) for path in paths if not path.endswith((".txt", "check_cases.py"))])
    problems = []
    for name in sorted(set(re.findall(r"`([^`]+)`", text(CASES)))):
        pattern = re.escape(name).replace(r"\*", r"\w+")
        if not name.endswith("/") and not re.search(rf"(?<!\w){pattern}(?!\w)", words):
            problems.append(f"{CASES}: there is no test {name}")
    return report(problems)


if __name__ == "__main__":
    sys.exit(main())
