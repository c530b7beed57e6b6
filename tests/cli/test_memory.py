"""The experts are used from the mapped bytes: private memory does not grow by them, nor from run to run."""
import os
import re
import subprocess
import unittest

from command import Case


class Memory(Case):
    def probe(self, checkpoint, tokens):
        done = subprocess.run([os.environ["MEMORY_PROBE"], self.path(checkpoint), str(tokens)], capture_output=True,
                              text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def test_no_second_copy(self):
        self.command("synth", "--shape", "H=2048,I=1024,E=24,K=4", "c")
        files = sum(os.path.getsize(self.path("c", name)) for name in os.listdir(self.path("c")))
        self.assertGreater(files, 80e6)
        opened, loaded, _, first, second, *_ = self.probe("c", 64)
        self.assertLess(first - opened, 0.25 * files, "loading and running took a copy's worth of private memory")
        self.assertLess(loaded - opened, 0.25 * files)
        self.assertLess(second - first, 1 << 20, "a second run took more memory")

    def test_planned_at_4096_tokens(self):
        """What the device names when the layer is loaded is all that runs take, and the command names the same."""
        shape = "H=1024,I=512,E=8,K=2"
        self.command("synth", "--shape", shape, "c")
        opened, _, planned, first, second, *_ = self.probe("c", 4096)
        self.assertGreater(planned, 1024 * 3 * 1024 * 4)  # the results of L2 of 1024 tokens
        self.assertLess(first - opened, planned + (2 << 20), "runs took more than was planned")
        self.assertLess(second - first, 1 << 20, "a second run took more memory")
        told = self.command("bench", "--shape", shape, "--tokens", "1,4096", "--runs", 1)
        self.assertRegex(told, r"memory beyond the weights: [0-9.]+ MB, planned for 4096 tokens\n")
        megabytes = float(re.search("weights: ([0-9.]+) MB", told)[1])
        self.assertLess(abs(1e6 * megabytes - planned), 0.05 * planned)

    def test_flat_across_layers(self):
        self.command("synth", "--shape", "H=1024,I=512,E=16,K=4,layers=12", "--layers", 12, "c")
        _, _, _, first, second, *layers = self.probe("c", 64)
        self.assertEqual(len(layers), 11)
        self.assertLess(max(layers) - second, 1 << 20, f"memory grew from layer to layer: {first, second, layers}")

    def test_a_transposed_stack_is_the_exception(self):
        """Its rows are copies: counted, and gone with their layer."""
        shape = "H=1024,I=512,E=24,K=4,like=qwen3-30b-a3b"
        self.command("synth", "--shape", shape, "--format", "fused-transposed", "c")
        copies = 24 * 3 * 1024 * 512 * 9 // 16
        opened, loaded, *_ = self.probe("c", 64)
        self.assertGreater(loaded - opened, copies)
        self.assertLess(loaded - opened, 1.3 * copies + (8 << 20))


if __name__ == "__main__":
    unittest.main()
