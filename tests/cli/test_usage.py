"""What a new user meets: help, typing mistakes, versions, error objects."""

import unittest

import fx
from command import Case

COMMANDS = ("inspect", "run", "check", "bench", "synth", "quantize", "selftest", "doctor")


class Help(Case):
    def test_overview_names_every_command(self):
        out = self.command("--help")
        for name in COMMANDS:
            self.assertIn(f"\n  {name} ", out)

    def test_every_command_shows_an_example(self):
        for name in COMMANDS:
            out = self.command(name, "--help")
            self.assertIn(f"megamoe {name}", out[out.index("Example") :])
            self.assertIn("--json", out)
            for line in out.split("\n"):
                self.assertLessEqual(len(line), 80, f"{name}: {line}")
            self.assertEqual(out, self.command("help", name))

    def test_version(self):
        self.assertRegex(self.command("--version"), r"^megamoe \d+\.\d+\.\d+\n$")

    def test_nothing_typed(self):
        self.assertEqual(self.command(status=2), "")
        self.assertIn("Usage: megamoe", self.stderr)


class Typing(Case):
    def test_misspelled_command(self):
        self.refused("chekc", names=["'chekc'", "'check'"])
        self.refused("frobnicate", names=["--help"])

    def test_misspelled_option(self):
        self.refused("check", "x", "--layr", 3, names=["--layr", "--layer"])
        self.refused("run", "x", "--thread=2", names=["--thread", "--threads"])

    def test_option_of_another_command(self):
        self.refused("inspect", "x", "--threads", 2, names=["inspect", "--threads"])

    def test_misspelled_word(self):
        self.refused("check", "x", "--backend", "cpus", names=["cpus", "'cpu'"])
        self.refused("check", "x", "--backend", "nothing", names=["reference", "sm100"])
        self.refused("synth", "--shape", "v4-por", "out", names=["v4-por", "v4-pro"])
        self.refused("check", "x", "--activations", "nvpf4", names=["nvfp4"])

    def test_values(self):
        self.refused("check", "x", "--layer", "three", names=["--layer", "three"])
        self.refused("check", "x", "--layer", names=["--layer", "value"])
        self.refused("check", "x", "--layer", "-1", names=["-1"])
        self.refused("check", "x", "--layer", "99999999999", names=["99999999999"])
        self.refused("check", "x", "--experts", "4:2", names=["--experts", "4:2"])
        self.refused("bench", "--shape", "tiny", "--tokens", "1,x", names=["--tokens", "1,x"])
        self.refused("bench", "--shape", "tiny", "--tokens", "0", names=["--tokens", "commas"])
        self.refused("check", "x", "--tokens", "0", names=["--tokens takes a positive number"])
        self.refused("synth", "--shape", "H=64,I=64,E=4", "out", names=["lacks K"])
        self.refused("synth", "--shape", "H=63,I=64,E=4,K=2", "out", names=["H=63", "16"])
        self.refused("synth", "--shape", "H=64,I=64,E=4,K=9", "out", names=["K=9", "E=4"])
        self.refused("synth", "--shape", "H=64,J=64", "out", names=["'J'"])
        self.refused("synth", "--shape", "tiny", "--shard-size", "7parsecs", "out", names=["7parsecs"])

    def test_empty_words(self):
        """A variable of the shell that is not set."""
        self.refused("inspect", "", names=["CKPT", "empty"])
        for empty in (["--input", ""], ["--input="]):
            self.refused("run", "x", *empty, names=["--input", "FILE"])

    def test_an_option_before_the_command(self):
        self.refused("--layer", 3, "check", names=["'--layer'", "command"])

    def test_missing_words(self):
        self.refused("inspect", names=["CKPT"])
        self.refused("inspect", "a", "b", names=["'b'"])
        self.refused("synth", "out", names=["--shape"])
        self.refused("run", "x", names=["--layer"])
        self.refused("bench", names=["--shape"])
        self.refused("check", "x", "--input", "y", names=["--layer"])
        self.refused("check", "x", "--against", "y", names=["--layer", "--input"])

    def test_environment(self):
        fx.FX().write(self.path("ckpt"))
        self.refused("check", "ckpt", env={"MEGAMOE_ISA": "sse2"}, names=["MEGAMOE_ISA", "sse2", "avx2"])
        for text in ("all", "2x", "-1", ""):
            self.refused("check", "ckpt", env={"MEGAMOE_THREADS": text}, names=["MEGAMOE_THREADS", f"'{text}'"])

    def test_backend_from_the_environment(self):
        self.refused("doctor", env={"MEGAMOE_BACKEND": "abacus"}, names=["MEGAMOE_BACKEND", "abacus"])

    def test_missing_files(self):
        for command in (
            ("inspect", "nowhere"),
            ("check", "nowhere"),
            ("run", "nowhere", "--layer", 0, "--input", "x", "--output", "y"),
        ):
            self.refused(*command, names=["nowhere"], status="IO_ERROR")


class Doctor(Case):
    def test_the_cpu_runs_at_its_best_level(self):
        """The system names the processor's features; the library asks the processor for bits."""
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = set(next((line for line in file if line.startswith("flags")), "").split())
        isa = "scalar"
        for level, needed in (
            ("avx2", "avx2 fma f16c"),
            ("avx512", "avx512f avx512dq avx512bw avx512vl avx512_vnni"),
            ("amx", "avx512vbmi avx512_bf16 amx_tile amx_bf16"),
        ):
            if not flags.issuperset(needed.split()):
                break
            isa = level
        backends = {b["backend"]: b["isa"] for b in self.json("doctor")["backends"]}
        self.assertEqual(backends["cpu"], isa)

    def test_json(self):
        report = self.json("doctor")
        self.assertIsInstance(report["images"], list)
        for finding in report["findings"]:
            self.assertEqual({"severity", "kind", "detail", "remedy"}, set(finding))
        runs = {b["backend"]: b["runs"] for b in report["backends"]}
        self.assertTrue(runs["reference"] and runs["cpu"])

    def test_zero_output_is_said(self):
        report = self.json("doctor", env={"MEGA_MOE_STATIC": "1"})
        self.assertIn("zero-output", [f["kind"] for f in report["findings"]])

    def test_impossible_backend_is_an_error_not_a_swap(self):
        self.command("synth", "--shape", "tiny", "t")
        runs = {b["backend"]: b["runs"] for b in self.json("doctor")["backends"]}
        for name in ("sm90", "sm100"):
            if not runs[name]:
                self.refused("check", "t", "--layer", 3, "--backend", name, names=[name], status="UNSUPPORTED_DEVICE")


class Environment(Case):
    def test_static_returns_zeros_and_says_so(self):
        fx.FX().write(self.path("fx"))
        fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
        self.command("run", "fx", "--layer", 0, "--input", "x", "--output", "y", env={"MEGA_MOE_STATIC": "1"})
        self.assertIn("MEGA_MOE_STATIC", self.stderr)
        self.assertEqual(set(fx.values_of(self.path("y"), "output")), {0.0})

    def test_debug_reports_stages(self):
        fx.FX().write(self.path("fx"))
        fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
        for name in ("MEGAMOE_DEBUG", "MEGA_MOE_DEBUG"):
            self.command("run", "fx", "--layer", 0, "--input", "x", "--output", "y", env={name: "1"})
            self.assertIn("l1", self.stderr)
            self.assertIn("l2", self.stderr)


if __name__ == "__main__":
    unittest.main()
