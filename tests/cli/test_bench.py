"""bench counts what it says it counts. Times are only asked to be times."""

import csv
import unittest

from command import Case, contents

RESULT = {
    "tokens",
    "pairs",
    "experts_hit",
    "activations",
    "seconds_median",
    "seconds_min",
    "seconds_p90",
    "runs",
    "weight_gb_s",
    "tflop_s",
    "fraction_of_bandwidth",
    "fraction_of_matrix_rate",
    "layer_seconds_median",
}


class Bench(Case):
    def test_keys_and_counts(self):
        report = self.json("bench", "--shape", "tiny", "--tokens", "1,4,32", "--runs", 3, "--routing", "local")
        self.assertLessEqual(
            {"backend", "isa", "device", "threads", "shape", "limits", "routing", "results"}, set(report)
        )
        self.assertEqual(report["routing"], "local")
        self.assertLessEqual({"read_gb_s", "matrix_tflop_s"}, set(report["limits"]))
        self.assertEqual([r["tokens"] for r in report["results"]], [1, 4, 32])
        for r in report["results"]:
            self.assertLessEqual(RESULT, set(r))
            self.assertEqual((r["pairs"], r["runs"]), (3 * r["tokens"], 3))
            self.assertTrue(3 <= r["experts_hit"] <= min(12, r["pairs"]))
            self.assertTrue(0 < r["seconds_min"] <= r["seconds_median"] <= r["seconds_p90"])
            expert = 3 * 160 * 96 * 9 / 16
            self.assertAlmostEqual(
                r["weight_gb_s"],
                1e-9 * r["experts_hit"] * expert / r["seconds_median"],
                delta=1e-3 * r["weight_gb_s"],
            )
            self.assertAlmostEqual(
                r["tflop_s"], 1e-12 * 6 * 160 * 96 * r["pairs"] / r["seconds_median"], delta=1e-3 * r["tflop_s"]
            )

    def test_ep_counts_local_pairs_only(self):
        report = self.json("bench", "--shape", "tiny", "--tokens", "1,64", "--runs", 3, "--experts", "0:3")
        for r in report["results"]:
            self.assertTrue(1 <= r["pairs"] < 3 * r["tokens"] or r["tokens"] == 1)
            self.assertLessEqual(r["experts_hit"], 3)
        self.assertEqual(report["shape"]["experts_loaded"], 3)

    def test_csv_says_all_that_makes_a_measurement(self):
        """The path holds a comma and a quote, so a row that is not quoted breaks."""
        path = 't,"1"'
        self.command("synth", "--shape", "tiny", path)
        words = ["bench", path, "--layer", 3, "--tokens", "2,5", "--runs", 4, "--activations", "nvfp4"]
        report = self.json(*words, "--csv", "b.csv")
        rows = list(csv.DictReader(contents(self.path("b.csv")).decode().splitlines()))
        self.assertEqual([row["tokens"] for row in rows], ["2", "5"])
        for row, result in zip(rows, report["results"]):
            self.assertNotIn(None, {*row, *row.values()})
            self.assertEqual((row["shape"], row["activations"], row["runs"]), (path, "nvfp4", "4"))
            self.assertEqual((row["backend"], row["device"]), (report["backend"], report["device"]))
            for key in RESULT - {"activations"}:
                self.assertAlmostEqual(float(row[key]), result[key], delta=1e-3 * result[key])
            for key in ("load", "read_gb_s", "matrix_tflop_s"):
                self.assertGreaterEqual(float(row[key]), 0)
            self.assertTrue(row["machine"] and row["version"])
            command = " ".join(str(word) for word in words)
            self.assertIn(command, row["command"])

    def test_refusals(self):
        self.refused("bench", "t", "--shape", "tiny", names=["either"])
        self.refused("bench", "--shape", "tiny", "--experts", "11:13", names=["11", "12"])
        self.refused("bench", "--shape", "H=65520,I=65520,E=512,K=8", "--experts", "0:512", names=["available"])


if __name__ == "__main__":
    unittest.main()
