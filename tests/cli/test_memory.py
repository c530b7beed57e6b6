"""The experts are used from the mapped bytes: private memory does not grow by them, nor from run to run."""
import os
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
        opened, loaded, first, second = self.probe("c", 64)
        self.assertLess(first - opened, 0.25 * files, "loading and running took a copy's worth of private memory")
        self.assertLess(loaded - opened, 0.25 * files)
        self.assertLess(second - first, 256 << 10, "a second run took more memory")


if __name__ == "__main__":
    unittest.main()
