"""quantize: values against a quantizer written here from the definition, MXFP4 without loss, all else copied."""

import math
import struct
import unittest

import fx
from command import Case, contents

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def nearest(table, value):
    return min(range(len(table)), key=lambda c: (abs(table[c] - abs(value)), c % 2))


def encode(values, scale, g):
    step = single(E4M3[scale] * g)
    codes = [nearest(E2M1, single(v / step)) | (8 if math.copysign(1, v) < 0 else 0) for v in values]
    error = sum((abs(v) - E2M1[c & 7] * step) ** 2 for v, c in zip(values, codes))
    return codes, error


def scale_of(amax, largest, g):
    return nearest(E4M3, min(max(single(single(amax / largest) / g), 2.0**-9), 448))


class Quantize(Case):
    HIDDEN, INNER = 64, 48

    def weights(self, seed, rows, columns):
        """Rough, and different everywhere; one outlier; one block of zeros."""
        out = [((i * 7919 + seed * 104729) % 2003 - 1001) / 9000 * (1 + i % 13) for i in range(rows * columns)]
        out[5] *= 9
        out[columns : columns + 16] = [0.0] * 16
        return fx.from_bf16(fx.bf16(*out))

    def bf16_checkpoint(self, name="in"):
        self.values, tensors = {}, {}
        for e in range(2):
            for n, (p, rows, columns) in enumerate(
                (
                    ("gate", self.INNER, self.HIDDEN),
                    ("up", self.INNER, self.HIDDEN),
                    ("down", self.HIDDEN, self.INNER),
                )
            ):
                key = f"model.layers.0.mlp.experts.{e}.{p}_proj."
                self.values[key] = (self.weights(3 * e + n, rows, columns), rows, columns)
                tensors[key + "weight"] = fx.tensor("BF16", [rows, columns], fx.bf16(*self.values[key][0]))
        tensors["model.layers.0.mlp.gate.weight"] = fx.tensor(
            "BF16", [2, 64], fx.bf16(*[0.01 * i for i in range(128)])
        )
        tensors["model.embed_tokens.weight"] = fx.tensor("F32", [3, 5], fx.f32(*range(15)))
        tensors["model.empty"] = fx.tensor("F32", [0], b"")
        config = {
            "model_type": "qwen3_moe",
            "hidden_size": 64,
            "moe_intermediate_size": self.INNER,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 1,
            "norm_topk_prob": True,
            "kept": "as it was",
        }
        fx.save_sharded(self.path(name), [tensors], config)
        with open(self.path(name, "tokenizer.json"), "w", encoding="utf-8") as file:
            file.write('{"a": 1}')
        return tensors

    def result(self, *options, source="in"):
        self.report = self.json("quantize", source, "out", *options)
        return fx.load(self.path("out", "model-00001-of-00001.safetensors"))

    def expected(self, key, g, rule):
        values, rows, columns = self.values[key]
        codes, scales, error = bytearray(), bytearray(), 0
        for start in range(0, rows * columns, 16):
            block = values[start : start + 16]
            amax = max(map(abs, block))
            tried = [scale_of(amax, 6, g)]
            if rule == "4over6":
                tried.append(scale_of(amax, 4, g))
            if rule == "search":
                tried += range(1, 127)
            best = min(tried, key=lambda s: encode(block, s, g)[1])
            found, off = encode(block, best, g)
            codes += bytes(found[i] | found[i + 1] << 4 for i in range(0, 16, 2))
            scales.append(best)
            error += off
        return bytes(codes), bytes(scales), error

    def check(self, rule, separate):
        source = self.bf16_checkpoint()
        out = self.result("--scale", rule, *(["--separate"] if separate else []))
        errors = 0
        for key, (values, rows, columns) in self.values.items():
            peers = (
                [key]
                if separate or "down" in key
                else [key, key.replace("gate", "up").replace("upup", "up"), key.replace("up_", "gate_")]
            )
            amax = max(max(map(abs, self.values[k][0])) for k in peers)
            g = single(amax / (1536 if rule == "4over6" else 2688))
            self.assertEqual(out[key + "weight_scale_2"], ("F32", [], fx.f32(g)))
            codes, scales, error = self.expected(key, g, rule)
            errors += error
            self.assertEqual(out[key + "weight_scale"], ("F8_E4M3", [rows, columns // 16], scales))
            self.assertEqual(out[key + "weight"], ("U8", [rows, columns // 2], codes))
            self.assertNotIn(key + "input_scale", out)
        for name in ("model.layers.0.mlp.gate.weight", "model.embed_tokens.weight", "model.empty"):
            self.assertEqual(out[name], source[name])
        return errors

    def test_max(self):
        self.check("max", False)
        self.assertEqual(contents(self.path("out", "tokenizer.json")), b'{"a": 1}')
        self.assertIn(b"as it was", contents(self.path("out", "config.json")))
        report = self.json("inspect", "out", "--scan")
        self.assertEqual((report["layers"][0]["format"], report["anomalies"]), ("nvfp4", []))
        self.assertTrue(self.json("check", "out", "--activations", "nvfp4")["pass"])

    def test_separate(self):
        self.check("max", True)

    def test_4over6(self):
        self.check("4over6", False)

    def test_search(self):
        self.check("search", False)

    def test_mxfp4_without_loss(self):
        self.command("synth", "--shape", "tiny", "--format", "mxfp4", "in")
        self.result()
        self.assertEqual(self.report["blocks_lost"], 0)
        rows = [[((i * 53 + t * 17) % 127 - 63) / 21 for i in range(160)] for t in range(8)]
        fx.save_input(self.path("x"), rows, token_ids=range(8))
        for layer in (1, 3):
            for name in ("in", "out"):
                self.command(
                    "run", name, "--layer", layer, "--input", "x", "--output", name + ".y", "--backend", "reference"
                )
            self.assertEqual(contents(self.path("in.y")), contents(self.path("out.y")))

    def test_mxfp4_with_loss_is_counted_or_refused(self):
        self.command("synth", "--shape", "tiny", "--format", "mxfp4", "in")
        path = self.path("in", "model-00001-of-00001.safetensors")
        tensors = fx.load(path)
        name = "layers.2.ffn.experts.4.w2.scale"
        dtype, shape, data = tensors[name]
        top = max(data)
        tensors[name] = (dtype, shape, bytes([top - 17, top - 18, top - 30]) + data[3:])
        fx.save(path, tensors)
        self.refused("quantize", "in", "out", "--strict", names=["2 MXFP4 blocks", "17 octaves"])
        self.result()
        self.assertEqual(self.report["blocks_lost"], 2)

    def test_fp8(self):
        source = self.bf16_checkpoint()
        table = [(-1 if c & 128 else 1) * E4M3[c & 127] if c & 127 != 127 else 0 for c in range(256)]
        tensors = {n: v for n, v in source.items() if ".experts." not in n}
        for key, (_, rows, columns) in list(self.values.items()):
            codes = bytes((i * 37 + len(key)) % 256 & 0xBF for i in range(rows * columns))
            self.values[key] = ([single(table[c] * single(0.01)) for c in codes], rows, columns)
            tensors[key + "weight"] = fx.tensor("F8_E4M3", [rows, columns], codes)
            tensors[key + "weight_scale_inv"] = fx.tensor("F32", [1, 1], fx.f32(0.01))
        fx.save_sharded(
            self.path("fp8"),
            [tensors],
            {
                "model_type": "qwen3_moe",
                "num_experts_per_tok": 1,
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
        )
        out = self.result("--separate", source="fp8")
        for key, (values, rows, columns) in self.values.items():
            g = single(max(map(abs, values)) / 2688)
            codes, scales, _ = self.expected(key, g, "max")
            self.assertEqual((out[key + "weight"][2], out[key + "weight_scale"][2]), (codes, scales))
            self.assertNotIn(key + "weight_scale_inv", out)

    def expected_h(self, expert, x):
        def rows(p):
            values, n, k = self.values[f"model.layers.0.mlp.experts.{expert}.{p}_proj."]
            return [sum(values[r * k + i] * x[i] for i in range(k)) for r in range(n)]

        return max(abs(g / (1 + math.exp(-g)) * u) for g, u in zip(rows("gate"), rows("up")))

    def test_calibration(self):
        """amax / 2688 of what each expert met, from tokens sent where the file says."""
        self.bf16_checkpoint()
        x = [[(i * 37 % 29 - 14) / 16 * (1 + t) for i in range(64)] for t in range(3)]
        ids = [[0], [0], [1]]
        fx.save_input(self.path("x"), x, ids, [[1.0]] * 3)
        out = self.result("--calibration", "x")
        self.assertEqual(self.report["experts_unmet"], 0)
        for e, met in ((0, (0, 1)), (1, (2,))):
            base = f"model.layers.0.mlp.experts.{e}."
            wanted = single(max(abs(v) for t in met for v in x[t]) / 2688)
            for p in ("gate", "up"):
                self.assertEqual(out[f"{base}{p}_proj.input_scale"], ("F32", [], fx.f32(wanted)))
            got = struct.unpack("<f", out[f"{base}down_proj.input_scale"][2])[0]
            want = max(self.expected_h(e, x[t]) for t in met) / 2688
            self.assertLess(abs(got / want - 1), 0.01, f"expert {e}: {got} against {want}")
        layer = self.json("inspect", "out", "--strict")["layers"][0]
        self.assertEqual(layer["input_scales_valid"], 2)
        self.assertTrue(self.json("check", "out", "--activations", "nvfp4", "--input-global", "static",
                                  "--intermediate-global", "static", "--tokens", 4)["pass"])

    def test_calibration_of_experts_without_tokens(self):
        self.bf16_checkpoint()
        fx.save_input(self.path("x"), [[0.5] * 64], [[1]], [[1.0]])
        out = self.result("--calibration", "x")
        self.assertEqual(self.report["experts_unmet"], 1)
        for p in ("gate", "down"):
            both = [out[f"model.layers.0.mlp.experts.{e}.{p}_proj.input_scale"] for e in (0, 1)]
            self.assertEqual(*both)
        self.assertIn("1 experts met no token", self.command("quantize", "in", "text", "--calibration", "x"))

    def test_calibration_by_layer_and_refusals(self):
        self.bf16_checkpoint()
        fx.save_input(self.path("a"), [[0.5] * 64], [[1]], [[1.0]])
        layer = {"layers.0." + name: value for name, value in fx.load(self.path("a")).items()}
        zeros = fx.load(fx.save_input(self.path("z"), [[0.0] * 64], [[1]], [[1.0]]))
        fx.save(self.path("both"), layer | zeros)
        one = self.result("--calibration", "a")
        self.command("quantize", "in", "out2", "--calibration", "both")
        self.assertEqual(one, fx.load(self.path("out2", "model-00001-of-00001.safetensors")))
        self.refused("quantize", "in", "o", "--calibration", "z", names=["layer 0", "calibrated"])
        fx.save_input(self.path("nan"), [[0.5] * 63 + [float("nan")]], [[1]], [[1.0]], dtype="F32")
        self.refused("quantize", "in", "o", "--calibration", "nan", names=["layer 0", "calibrated"])
        self.refused("quantize", "in", "o", "--calibration", "missing", names=["missing"])

    def test_refusals(self):
        self.command("synth", "--shape", "tiny", "nvfp4")
        self.refused("quantize", "nvfp4", "out", names=["nothing to quantize"])
        source = self.bf16_checkpoint()
        self.refused("quantize", "in", "nvfp4", names=["nvfp4 exists"])
        key = "model.layers.0.mlp.experts.1.up_proj.weight"
        source[key] = (*source[key][:2], fx.bf16(float("nan")) + source[key][2][2:])
        fx.save(self.path("in", "model-00001-of-00001.safetensors"), source)
        self.refused("quantize", "in", "out", names=["layer 0", "expert 1"])


if __name__ == "__main__":
    unittest.main()
