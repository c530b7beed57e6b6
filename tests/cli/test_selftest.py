"""selftest sweeps what it says it sweeps, and its report has the keys that a reader of it relies on."""

import json
import os
import unittest

from command import Case

SMALL = ("--shape", "H=96,I=64,E=5,K=2")
CASE = {"shape", "format", "tokens", "routing", "near_boundary", "cosine", "pass"}
ABOUT = {"version", "backend", "isa", "device", "activations", "seed", "quick"}
REPORT = ABOUT | {"error", "cases", "benches", "complete", "pass"}


class Selftest(Case):
    def report(self, name="megamoe-selftest.json"):
        with open(self.path(name), encoding="utf-8") as file:
            return json.load(file)

    def test_every_case_of_a_shape(self):
        report = self.json("selftest", "--backend", "cpu", *SMALL, "--tokens", "1,9,40")
        self.assertEqual(set(report), REPORT)
        self.assertEqual((report["backend"], report["activations"], report["benches"]), ("cpu", "nvfp4", []))
        wanted = [
            (form, tokens, routing)
            for form in ("nvfp4", "mxfp4")
            for tokens in (1, 9, 40)
            for routing in ("even", "ragged", "hot", "empty")
        ]
        self.assertEqual([(c["format"], c["tokens"], c["routing"]) for c in report["cases"]], wanted)
        for case in report["cases"]:
            self.assertEqual(set(case), CASE)
            self.assertTrue(case["pass"] and case["cosine"] > 0.9999, case)
        self.assertEqual((report["error"], report["complete"], report["pass"]), (None, True, True))
        self.assertEqual(self.report(), report)

    def test_quick_table_for_people(self):
        out = self.command("selftest", "--backend", "cpu", "--quick", "--report", "mine.json")
        self.assertEqual(os.listdir(self.directory), ["mine.json"])
        for line in out.split("\n"):
            self.assertLessEqual(len(line), 80, line)
        cases = self.report("mine.json")["cases"]
        self.assertEqual({c["shape"] for c in cases}, {"small", "awkward"})
        self.assertIn(f"{len(cases)} cases, 0 failed. The file to send back is mine.json.", out)

    def test_bf16_activations_and_another_seed(self):
        report = self.json(
            "selftest", "--backend", "cpu", *SMALL, "--tokens", 7, "--activations", "bf16", "--seed", 5, "--quick"
        )
        self.assertEqual((report["activations"], report["seed"], report["pass"]), ("bf16", 5, True))

    def test_sizes_that_mxfp4_cannot_have(self):
        report = self.json("selftest", "--backend", "cpu", "--shape", "H=96,I=80,E=3,K=2", "--tokens", 3)
        self.assertEqual({c["format"] for c in report["cases"]}, {"nvfp4"})

    def test_refusals(self):
        self.refused("selftest", "--backend", "cpu", "--shape", "H=96", names=["lacks I"])
        self.refused("selftest", "--backend", "cpu", "--tokens", "1,x", names=["--tokens", "1,x"])
        self.refused("selftest", "model", names=["model"])
        self.refused("selftest", "--backend", "cpu", *SMALL, "--report", "no/such.json", names=["no/such"])


if __name__ == "__main__":
    unittest.main()
