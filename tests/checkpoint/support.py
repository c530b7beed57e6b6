"""What the tests of this folder share: the dump program, and a folder per test."""

import json
import os
import subprocess
import tempfile
import unittest

import numpy as np

DUMP = os.environ["MEGAMOE_DUMP"]
CORRUPT, IO, UNSUPPORTED = "MEGAMOE_CORRUPT_FILE", "MEGAMOE_IO_ERROR", "MEGAMOE_UNSUPPORTED_MODEL"
INVALID = "MEGAMOE_INVALID_ARGUMENT"


def dump(*arguments):
    """What the library found, as tests/checkpoint/dump.c prints it."""
    run = subprocess.run([DUMP, *map(str, arguments)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(f"dump {arguments}: exit {run.returncode}: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def raw(array):
    """The bytes of an array as dump prints them."""
    return np.ascontiguousarray(array).tobytes().hex()


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "m")

    def assert_refused(self, found, status, *substrings):
        self.assertIn("error", found, "it was accepted")
        self.assertEqual(found["error"]["status"], status, found["error"]["message"])
        for text in substrings:
            self.assertIn(text, found["error"]["message"])

    def fresh(self):
        """An empty folder for the next row of a table."""
        self.folder.cleanup()
        self.setUp()
