"""
The command on the Blackwell kernels: on their functional model, and on a fake driver whose GPU makes mistakes
(FAKE_DRIVER names its folder; without it that part is skipped).
"""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cli"))

import fx  # noqa: E402
from command import Case  # noqa: E402

MODEL = ("--backend", "sm100-model")
DRIVER = os.environ.get("FAKE_DRIVER")


class OnModel(Case):
    def test_selftest(self):
        report = self.json("selftest", *MODEL, "--quick", "--tokens", "1,40")
        self.assertEqual((report["backend"], report["pass"], report["benches"]), ("sm100-model", True, []))
        self.assertIn("functional model", report["device"])
        self.assertEqual(len(report["cases"]), 12)

    def lossy(self):
        """MXFP4 whose layer 3, expert 4, down has blocks 18 and 30 octaves below its largest."""
        self.command("synth", "--shape", "tiny", "--format", "mxfp4", "in")
        path = self.path("in", "model-00001-of-00001.safetensors")
        tensors = fx.load(path)
        dtype, shape, data = tensors["layers.3.ffn.experts.4.w2.scale"]
        top = max(data)
        tensors["layers.3.ffn.experts.4.w2.scale"] = (dtype, shape, bytes([top - 18, top - 30]) + data[2:])
        fx.save(path, tensors)
        fx.save_input(self.path("x"), [fx.one_hot(160)])
        return ("run", "in", "--layer", 3, "--input", "x", "--output", "y", "--activations", "nvfp4", *MODEL)

    def test_strict_refuses_what_nvfp4_cannot_hold(self):
        run = self.lossy()
        message = self.refused(*run, "--strict", status="UNSUPPORTED_MODEL", names=["layer 3: expert 4, down: "])
        self.assertRegex(message, r"[1-9]\d* of 15360 MXFP4 values are too small .* which strict forbids")
        self.command(*run)

    def test_strict_takes_what_fits(self):
        self.command("synth", "--shape", "tiny", "--format", "mxfp4", "in")
        self.command("check", "in", "--layer", 3, "--tokens", 2, "--activations", "nvfp4", "--strict", *MODEL)


@unittest.skipUnless(DRIVER, "there is no fake driver: the GPU backends are not built")
class OnFakeDriver(Case):
    def selftest(self, fault, *arguments, status=1):
        environment = {"LD_LIBRARY_PATH": DRIVER, "FAKE_FAULT": fault}
        return self.command("selftest", "--quick", *arguments, status=status, env=environment)

    def report(self):
        with open(self.path("megamoe-selftest.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_best_backend_is_sm100(self):
        self.selftest("", "--tokens", 3, status=0)
        self.assertEqual(self.report()["backend"], "sm100")

    def test_one_wrong_bit_is_named(self):
        out = self.selftest("flip_later", "--tokens", "3,129")
        failed = [c for c in self.report()["cases"] if not c["pass"]]
        self.assertTrue(failed)
        self.assertEqual({(c["tokens"], c["first_stage"]) for c in failed}, {(129, "l2")})  # the large tiles alone
        self.assertFalse(self.report()["pass"])
        for text in ("FAIL", "sm100, shape", "129 tokens", "index 14 is", "the definition gives"):
            self.assertIn(text, " ".join(out.split()))
        for line in out.split("\n"):
            self.assertLessEqual(len(line), 80, line)

    def test_a_failed_self_check_is_the_report(self):
        out = self.selftest("flip", "--tokens", 3)
        self.assertIn("FAIL  opening the device: the self-check of GEMM instance", out)
        report = self.report()
        self.assertIn("the product of token row", report["error"]["message"])
        self.assertEqual((report["pass"], report["cases"]), (False, []))

    def test_a_kernel_that_fails_ends_the_sweep(self):
        self.selftest("launch_later", "--tokens", "3,129", "--json")
        report = self.report()
        self.assertEqual(report["error"]["during"], "shape awkward, nvfp4, 129 tokens, ragged routing")
        self.assertIn("sm100_l2_large", report["error"]["message"])
        self.assertEqual((report["complete"], report["pass"], len(report["cases"])), (False, False, 10))


if __name__ == "__main__":
    unittest.main()
