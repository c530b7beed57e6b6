"""inspect says what the tensors are, with the keys that tools rely on."""

import json
import os
import unittest

import fx
from command import Case, contents

LAYER = {"layer", "experts", "hidden", "intermediate", "format", "naming", "router", "shared_expert", "bytes"}


class Inspect(Case):
    def test_keys(self):
        for form, naming, kind, shared in (
            ("modelopt", "modelopt", "nvfp4", "fp8"),
            ("mxfp4", "deepseek-native", "mxfp4", "fp8"),
            ("compressed-tensors", "compressed-tensors", "nvfp4", "bf16"),
        ):
            self.command("synth", "--shape", "tiny", "--format", form, form)
            report = self.json("inspect", form)
            self.assertLessEqual({"model_type", "layers", "anomalies"}, set(report))
            self.assertEqual(report["model_type"], "deepseek_v4")
            self.assertEqual([l["layer"] for l in report["layers"]], [0, 1, 2, 3])
            for layer in report["layers"]:
                self.assertLessEqual(LAYER, set(layer))
                self.assertEqual((layer["experts"], layer["hidden"], layer["intermediate"]), (12, 160, 96))
                self.assertEqual((layer["naming"], layer["format"]), (naming, kind))
                self.assertEqual(layer["shared_expert"], {"format": shared})
                self.assertEqual(
                    layer["router"], {"score": "sqrtsoftplus", "hash": layer["layer"] < 3, "top_k": 3, "scale": 2.5}
                )
            size = sum(len(v[2]) for v in fx.load(self.path(form, "model-00001-of-00001.safetensors")).values())
            scalars = 2 * 4 * 36 * 4 if kind == "nvfp4" else 0
            table = 3 * 512 * 3 * 8
            self.assertAlmostEqual(
                sum(l["bytes"] for l in report["layers"]), size - scalars, delta=scalars + table + 1
            )
            self.assertEqual([a for a in report["anomalies"] if a["severity"] == "error"], [])

    def test_synth_has_no_contradictions(self):
        for form in ("modelopt", "mxfp4", "compressed-tensors"):
            self.command("synth", "--shape", "tiny", "--format", form, form)
            kinds = {a["kind"] for a in self.json("inspect", form, "--scan")["anomalies"]}
            self.assertLessEqual(kinds, {"global-scales-differ"}, form)

    def test_one_layer(self):
        self.command("synth", "--shape", "tiny", "t")
        self.assertEqual([l["layer"] for l in self.json("inspect", "t", "--layer", 2)["layers"]], [2])

    def test_readable_at_80_columns(self):
        self.command("synth", "--shape", "tiny", "--format", "compressed-tensors", "t")
        for line in self.command("inspect", "t").split("\n"):
            self.assertLessEqual(len(line), 80, line)

    def test_anomalies_have_remedies(self):
        f = fx.FX()
        f.inputs[1]["gate"] = None
        f.write(self.path("ckpt"))
        found = [a for a in self.json("inspect", "ckpt")["anomalies"] if a["expert"] == 1 or "input" in a["kind"]]
        self.assertTrue(found)
        for anomaly in found:
            self.assertLessEqual({"severity", "kind", "tensor", "layer", "expert", "detail"}, set(anomaly))
            self.assertTrue(anomaly["remedy"])
        out = self.command("inspect", "ckpt")
        self.assertIn("Remedy: ", out)

    def test_page(self):
        f = fx.FX()
        f.config["model_type"] = "<script>alert(1)</script>"
        f.write(self.path("ckpt"))
        self.command("inspect", "ckpt", "--html", "page.html")
        page = contents(self.path("page.html")).decode()
        self.assertIn("64", page)
        self.assertNotIn("<script", page)
        for outside in ("http://", "https://", " src="):
            self.assertNotIn(outside, page)
        self.refused("inspect", "ckpt", "--html", "no/such/page.html", names=["no/such/page.html"])

    def test_names_do_not_steer_the_terminal(self):
        """Whoever wrote the file chose its names: no escape sequence may reach the screen."""
        f = fx.FX()
        f.config["model_type"] = "evil\x1b[2J\x07\u009b31m"
        f.write(self.path("ckpt"))
        path = self.path("ckpt", "model-00001-of-00001.safetensors")
        if not os.path.exists(path):
            path = [self.path("ckpt", n) for n in os.listdir(self.path("ckpt")) if n.endswith(".safetensors")][0]
        tensors = fx.load(path)
        tensors["layers.0.ffn.experts.0.w1.\x1b]0;owned\x07"] = ("F32", [], b"\0\0\0\0")
        os.makedirs(self.path("evil"))
        fx.save(self.path("evil", "model.safetensors"), tensors)
        with open(self.path("evil", "config.json"), "w", encoding="utf-8") as file:
            json.dump(f.config, file)
        for out in (self.command("inspect", "evil"), self.command("inspect", "evil", "--json")):
            self.assertIn("evil", out)
            for character in ("\x1b", "\x07", "\u009b"):
                self.assertNotIn(character, out)

    def test_errors_come_first(self):
        f = fx.FX()
        f.inputs[1]["gate"] = None
        f.write(self.path("ckpt"))
        os.makedirs(self.path("bad"))
        tensors = {}
        for name in os.listdir(self.path("ckpt")):
            if name.endswith(".safetensors"):
                tensors.update(fx.load(self.path("ckpt", name)))
        scale = next(n for n in tensors if n.endswith("weight_scale"))
        dtype, shape, data = tensors[scale]
        tensors[scale] = (dtype, shape, b"\x7f" + data[1:])
        fx.save(self.path("bad", "model.safetensors"), tensors)
        out = self.command("inspect", "bad", "--scan")
        self.assertIn("Error: router", out)  # without config.json K is not known: shown, and no reason to stop
        with open(self.path("bad", "config.json"), "w", encoding="utf-8") as file:
            json.dump(f.config, file)
        out = self.command("inspect", "bad", "--scan")
        self.assertLess(out.index("Error: nan-scale"), out.index("Warning: "))

    def test_memory_per_rank(self):
        self.command("synth", "--shape", "tiny", "t")
        report = self.json("inspect", "t")
        ranks = {r["ranks"]: r["bytes"] for r in report["memory_per_rank"]}
        self.assertEqual(sorted(ranks), [1, 2, 4, 8, 16, 32, 64])
        self.assertEqual(ranks[1], report["bytes"])
        expert = report["layers"][0]["expert_bytes"]
        self.assertEqual(ranks[1] - ranks[4], 4 * 9 * expert)  # four layers, 12 experts against 3
        self.assertEqual(ranks[64], ranks[16])  # nobody holds less than one expert


if __name__ == "__main__":
    unittest.main()
