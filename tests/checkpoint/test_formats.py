#!/usr/bin/env python3
"""Whole formats: what the library finds is, byte for byte, what independent code wrote into the file."""

import sys
import unittest

import numpy as np

import make_model as make
from make_model import DOWN, E, GATE, H, I, K, UP
from support import Case, dump, raw

SCORES = {"sqrtsoftplus": 1, "sigmoid": 2, "softmax_topk": 3, "topk_softmax": 4}


class Formats(Case):
    def written(self, weights, config, **options):
        self.fresh()
        return make.write(self.path, weights, config, **options)

    def read(self, model, layer, *arguments, **options):
        path = self.written(*model, **options)
        found = dump(path, layer, *arguments)
        self.assertNotIn("error", found, found.get("error"))
        return found

    def assert_matrix(self, found, codes, scales=None, global_scale=1.0, **fields):
        self.assertEqual((found["rows"], found["columns"]), fields.pop("dims"))
        self.assertEqual(found["codes"], raw(codes))
        self.assertEqual(found.get("scales"), None if scales is None else raw(scales))
        self.assertEqual(np.float32(found["global"]), np.float32(global_scale))
        for key, value in fields.items():
            self.assertEqual(found[key], value, key)

    def assert_nvfp4(self, found, layer, e, inverse=False):
        for p in (GATE, UP, DOWN):
            g = make.factor("global", layer, e, p)
            if inverse:
                g = np.float32(1) / np.float32(1 / g)
            self.assert_matrix(
                found[p],
                make.codes_fp4(layer, e, p),
                make.scales_e4m3(layer, e, p),
                g,
                dims=make.dims(p),
                format="nvfp4",
            )

    # ---- NVFP4 ----

    def test_modelopt_v4(self):
        for shards in (1, 3):
            with self.subTest(shards=shards):
                weights, config = make.v4_modelopt()
                found = self.read((weights, config), 1, shards=shards)
                source = found["source"]
                self.assertEqual([layer["layer"] for layer in found["layers"]], [0, 1])
                self.assertEqual([a for a in found["anomalies"] if a["is_error"]], [])
                for e in range(E):
                    self.assert_nvfp4(source["experts"][e], 1, e)
                    self.assertEqual(
                        np.float32(source["experts"][e]["input"]),
                        max(make.factor("input", 1, e, GATE), make.factor("input", 1, e, UP)),
                    )
                    self.assertEqual(
                        np.float32(source["intermediate_scales"][e]), make.factor("input", 1, e, DOWN)
                    )
                self.assertEqual(source["router"]["weight"], raw(weights["layers.1.ffn.gate.weight"]))
                np.testing.assert_array_equal(
                    np.float32(source["router"]["bias"]), weights["layers.1.ffn.gate.bias"]
                )
                self.assertTrue(source["w4a4"])
                shape = source["shape"]
                self.assertEqual(
                    (shape["hidden"], shape["intermediate"], shape["experts"], shape["top_k"]), (H, I, E, K)
                )
                self.assertEqual(
                    (shape["score"], shape["scale"], shape["limit"], shape["hash"], shape["normalize"]),
                    (SCORES["sqrtsoftplus"], 2.5, 10.0, False, True),
                )

    def test_hash_table(self):
        for dtype in (np.int64, np.int32):
            with self.subTest(dtype=dtype):
                weights, config = make.v4_modelopt()
                table = make.hash_table(weights, "layers.0.ffn", 0, dtype=dtype)
                source = self.read((weights, config), 0)["source"]
                self.assertTrue(source["shape"]["hash"])
                self.assertEqual(source["router"]["table"], table.ravel().tolist())
                self.assertEqual(source["router"]["vocabulary"], table.shape[0])
                self.assertIsNone(source["router"]["bias"])

    def test_prefixes(self):
        for stem in ("model.", "model.language_model.", "language_model.model.", ""):
            with self.subTest(stem=stem):
                prefix = f"{stem}layers.1.mlp"
                found = self.read(make.hf(prefix), 1)
                self.assertEqual(found["layers"][0]["prefix"], prefix)
                self.assertEqual(found["layers"][0]["naming"], "modelopt")
                self.assert_nvfp4(found["source"]["experts"][3], 1, 3)

    def test_layer_1_is_not_layer_10(self):
        weights, config = make.hf("model.layers.1.mlp")
        make.experts(weights, "model.layers.10.mlp", 10, make.modelopt, make.HF_NAMES)
        make.router(weights, "model.layers.10.mlp", 10)
        self.assert_nvfp4(self.read((weights, config), 1)["source"]["experts"][1], 1, 1)
        self.assert_nvfp4(self.read((weights, config), 10)["source"]["experts"][1], 10, 1)

    def test_scalar_shapes(self):
        for one, inverse in ((make.modelopt, False), (make.compressed, True)):
            for shape in ((), (1,), (1, 1)):
                with self.subTest(one=one.__name__, shape=shape):
                    found = self.read(make.hf(one=one, shape=shape), 1)
                    for e in range(E):
                        self.assert_nvfp4(found["source"]["experts"][e], 1, e, inverse)

    def test_compressed_tensors(self):
        found = self.read(make.hf(one=make.compressed), 1)
        self.assertEqual(found["layers"][0]["naming"], "compressed-tensors")
        expert = found["source"]["experts"][2]
        wanted = max(1 / np.float32(1 / make.factor("input", 1, 2, p)) for p in (GATE, UP))
        self.assertEqual(np.float32(expert["input"]), np.float32(wanted))

    def test_powers_of_two_agree_between_conventions(self):
        both = []
        for one, name, value in (
            (make.modelopt, "weight_scale_2", 0.125),
            (make.compressed, "weight_global_scale", 8.0),
        ):
            weights, config = make.hf(one=one)
            for key in weights:
                if key.endswith(name):
                    weights[key][...] = value
            both.append(
                [
                    e[p]["global"]
                    for e in self.read((weights, config), 1)["source"]["experts"]
                    for p in (GATE, UP, DOWN)
                ]
            )
        self.assertEqual(both[0], both[1])
        self.assertEqual(set(both[0]), {0.125})

    def test_gate_and_up_keep_their_own_globals(self):
        weights, config = make.hf()
        name = "model.layers.1.mlp.experts.{}.{}.weight_scale_2"
        for e in range(E):
            weights[name.format(e, "gate_proj")][...] = 0.125
            weights[name.format(e, "up_proj")][...] = 0.5 if e == 4 else 0.125
        found = self.read((weights, config), 1)
        self.assertEqual(found["layers"][0]["pairs_differing"], 1)
        self.assertEqual(found["layers"][0]["ratio_max"], 4.0)
        self.assertEqual([found["source"]["experts"][4][p]["global"] for p in (GATE, UP)], [0.125, 0.5])

    # ---- other formats ----

    def test_mxfp4_native(self):
        for codes in (np.int8, np.uint8):
            for scales in ("e8m0", "u8", "f32"):
                with self.subTest(codes=codes, scales=scales):
                    weights, config = {}, dict(make.V4_CONFIG, moe_intermediate_size=64, num_hash_layers=0)
                    prefix = "layers.1.ffn"
                    make.experts(weights, prefix, 1, make.mxfp4, make.W_NAMES, codes=codes, scales=scales)
                    make.router(weights, prefix, 1)
                    found = self.read((weights, config), 1)
                    self.assertEqual(found["layers"][0]["naming"], "deepseek-native")
                    self.assertEqual(found["layers"][0]["format"], "mxfp4")
                    self.assertEqual(found["source"]["shape"]["group_size"], 32)
                    for e in range(E):
                        for p in (GATE, UP, DOWN):
                            self.assert_matrix(
                                found["source"]["experts"][e][p],
                                make.codes_fp4(1, e, p, i=64),
                                make.scales_e8m0(1, e, p, i=64),
                                dims=make.dims(p, i=64),
                                format="mxfp4",
                            )

    def test_bf16_and_fp8_experts(self):
        for one, options in (
            (make.plain, {}),
            (make.fp8, {"suffix": "weight_scale_inv", "scales": "f32"}),
            (make.fp8, {"block": 128}),
        ):
            with self.subTest(one=one.__name__, **options):
                weights, config = make.hf(one=one, **options)
                found = self.read((weights, config), 1)
                for e in range(E):
                    for p, name in make.HF_NAMES.items():
                        base = f"model.layers.1.mlp.experts.{e}.{name}"
                        matrix = found["source"]["experts"][e][p]
                        scale = weights.get(f"{base}.{options.get('suffix', 'scale')}")
                        self.assert_matrix(matrix, weights[f"{base}.weight"], scale, dims=make.dims(p))
                        if scale is not None:
                            block = options.get("block", 32)
                            self.assertEqual(-(-make.dims(p)[0] // matrix["block_rows"]), scale.shape[0])
                            self.assertEqual(matrix["block_columns"], block)
                self.assertIsNone(found["source"]["input_scales"])

    def test_shared_expert(self):
        for one, options in (
            (make.fp8, {}),
            (make.fp8, {"block": 128}),
            (make.fp8, {"scales": "f32", "suffix": "weight_scale_inv"}),
            (make.plain, {}),
            (make.modelopt, {}),
        ):
            with self.subTest(one=one.__name__, **options):
                weights, config = make.hf()
                for p, name in make.HF_NAMES.items():
                    one(weights, f"model.layers.1.mlp.shared_experts.{name}", 1, "shared", p, **options)
                found = self.read((weights, config), 1)
                shared = found["source"]["shared"]
                for p, name in make.HF_NAMES.items():
                    self.assertEqual(
                        shared[p]["codes"], raw(weights[f"model.layers.1.mlp.shared_experts.{name}.weight"])
                    )
                self.assertEqual(found["layers"][0]["shared_format"], shared[UP]["format"])

    # ---- subsets, single files ----

    def test_expert_range(self):
        weights, config = make.hf()
        for e in (0, 1, 4):
            for key in [k for k in weights if f".experts.{e}." in k]:
                del weights[key]
        config["megamoe_experts"] = [2, 4]
        found = self.read((weights, config), 1)
        source = found["source"]
        self.assertEqual((source["first"], len(source["experts"]), source["shape"]["experts"]), (2, 2, E))
        self.assert_nvfp4(source["experts"][0], 1, 2)
        self.assert_nvfp4(source["experts"][1], 1, 3)
        self.assertEqual(len(source["router"]["bias"]), E)

    def test_load_a_range(self):
        source = self.read(make.hf(), 1, 3, 2)["source"]
        self.assertEqual((source["first"], len(source["experts"]), len(source["input_scales"])), (3, 2, E))
        self.assert_nvfp4(source["experts"][1], 1, 4)

    def test_single_file(self):
        weights, config = make.hf()
        path = self.written(weights, config)
        self.assert_nvfp4(dump(f"{path}/model.safetensors", 1)["source"]["experts"][0], 1, 0)

    def test_plain_tensors_ignore_a_config_beside_them(self):
        path = self.written({"hidden": make.bf16("x", shape=(3, 8))}, None)
        with open(f"{path}/config.json", "w", encoding="utf-8") as file:
            file.write("{broken")
        self.assertEqual(
            dump("--tensor", "hidden", f"{path}/model.safetensors"), {"dtype": 1, "shape": [3, 8]}
        )


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
