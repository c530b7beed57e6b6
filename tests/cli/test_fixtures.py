"""Real checkpoints: each captured layer against the framework's own block, and every stage of every layer."""
import glob
import math
import os
import unittest

import fx
from command import Case

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")
CAPTURES = sorted(glob.glob(os.path.join(FIXTURES, "*", "captures", "layer_*.safetensors")))
CHECKPOINTS = sorted({os.path.dirname(os.path.dirname(capture)) for capture in CAPTURES})


def cosine_and_ratio(got, want):
    dot = math.fsum(g * w for g, w in zip(got, want))
    got_norm, want_norm = math.sqrt(math.fsum(g * g for g in got)), math.sqrt(math.fsum(w * w for w in want))
    return dot / (got_norm * want_norm), got_norm / want_norm


class Fixtures(Case):
    def run_capture(self, capture, *options):
        layer = os.path.basename(capture).removeprefix("layer_").removesuffix(".safetensors")
        checkpoint = os.path.dirname(os.path.dirname(capture))
        self.command("run", checkpoint, "--layer", layer, "--input", capture, "--output", "y", *options)
        return fx.values_of(self.path("y"), "output")

    def test_all_are_here(self):
        self.assertEqual((len(CHECKPOINTS), len(CAPTURES)), (4, 11))

    def test_against_the_framework(self):
        """transformers' own block in float32, weights dequantized by the producer's own code."""
        for capture in CAPTURES:
            with self.subTest(capture=capture):
                cosine, ratio = cosine_and_ratio(self.run_capture(capture, "--activations", "bf16"),
                                                 fx.values_of(capture, "output"))
                self.assertGreaterEqual(cosine, 0.99999)
                self.assertLess(abs(ratio - 1), 1e-3)

    def test_nvfp4_against_the_oracle(self):
        for capture in CAPTURES:
            with self.subTest(capture=capture):
                cosine, ratio = cosine_and_ratio(
                    self.run_capture(capture, "--activations", "nvfp4"),
                    self.run_capture(capture, "--activations", "nvfp4", "--backend", "reference"))
                self.assertGreaterEqual(cosine, 0.9999)
                self.assertLess(abs(ratio - 1), 1e-3)

    def test_check_every_layer(self):
        for checkpoint in CHECKPOINTS:
            for activations in ("bf16", "nvfp4"):
                with self.subTest(checkpoint=checkpoint, activations=activations):
                    self.assertTrue(self.json("check", checkpoint, "--activations", activations)["pass"])

    def test_the_same_bits_for_every_thread_count(self):
        for capture in CAPTURES[::3]:
            one = self.run_capture(capture, "--threads", 1)
            self.assertEqual(one, self.run_capture(capture, "--threads", 3))


if __name__ == "__main__":
    unittest.main()
