"""examples/layer.c: under 60 lines, it runs a layer, and its norm is that of the command's output."""

import math
import os
import re
import subprocess
import unittest

import fx
from command import Case

SOURCE = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "layer.c")


class Example(Case):
    def run_example(self, *arguments):
        return subprocess.run([os.environ["EXAMPLE"], *arguments], capture_output=True, text=True, check=False)

    def test_under_60_lines(self):
        with open(SOURCE, encoding="utf-8") as file:
            self.assertLess(len(file.readlines()), 60)

    def test_norm(self):
        self.command("synth", "--shape", "tiny", "t")
        done = self.run_example(self.path("t"))
        self.assertEqual(done.returncode, 0, done.stderr)
        fx.save_input(self.path("x"), [[math.sin(i) for i in range(160)]], token_ids=[0], dtype="F32")
        self.command("run", "t", "--layer", 0, "--input", "x", "--output", "y")
        norm = math.sqrt(sum(v * v for v in fx.values_of(self.path("y"), "output")))
        self.assertGreater(norm, 0)
        self.assertAlmostEqual(float(re.search(r"norm (\S+)", done.stdout)[1]), norm, delta=1e-3 * norm)

    def test_failure(self):
        done = self.run_example(self.path("nowhere"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("nowhere", done.stderr)


if __name__ == "__main__":
    unittest.main()
