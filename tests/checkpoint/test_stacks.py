#!/usr/bin/env python3
"""Stacks of all experts, other spellings, MTP blocks, mixed formats, and what config files declare."""

import os
import resource
import struct
import sys
import unittest

import numpy as np

import make_model as make
import make_sparse
from make_model import DOWN, E, GATE, H, I, K, UP
from support import CORRUPT, UNSUPPORTED, Case, dump, raw

P = "model.layers.1.mlp"


def stack(one, projection):
    """[E, ...] of one projection; gate_up is the pair of halves."""
    return np.stack([one(1, e, projection) for e in range(E)])


def gate_up(one, interleaved):
    gate, up = stack(one, GATE), stack(one, UP)
    if not interleaved:
        return np.concatenate([gate, up], axis=1)
    return np.stack([gate, up], axis=2).reshape(E, 2 * gate.shape[1], *gate.shape[2:])


def factors(kind, projection):
    return np.array([make.factor(kind, 1, e, projection) for e in range(E)], np.float32)


def fused_modelopt(model_type, interleaved, halves=False, scalar_shape=None):
    """ModelOpt's [E, 2I, H/2]; one global per expert, or one for each half."""
    weights = {}
    base = f"{P}.experts.gate_up_proj"
    weights[base] = gate_up(make.codes_fp4, interleaved)
    weights[f"{base}_weight_scale"] = make.as_e4m3(gate_up(make.scales_e4m3, interleaved))
    g = factors("global", GATE)
    weights[f"{base}_weight_scale_2"] = np.stack([g, factors("global", UP)], axis=1) if halves else g
    weights[f"{base}_input_scale"] = factors("input", GATE)[:1].reshape(())
    base = f"{P}.experts.down_proj"
    weights[base] = stack(make.codes_fp4, DOWN)
    weights[f"{base}_weight_scale"] = make.as_e4m3(stack(make.scales_e4m3, DOWN))
    weights[f"{base}_weight_scale_2"] = factors("global", DOWN).reshape(scalar_shape or (E,))
    weights[f"{base}_input_scale"] = factors("input", DOWN)
    make.router(weights, P, 1, bias=None)
    _, config = make.hf(model_type=model_type)
    return weights, config


def transposed_modelopt(model_type, interleaved):
    """The same weights for x @ W: what was a row is a column, so that pairs still lie along K."""
    weights, config = fused_modelopt(model_type, interleaved)
    for name in ("gate_up_proj", "down_proj"):
        for key in (f"{P}.experts.{name}", f"{P}.experts.{name}_weight_scale"):
            weights[key] = np.ascontiguousarray(weights[key].transpose(0, 2, 1))
    return weights, config


def gpt_oss(e8m0=False):
    weights = {}

    def blocks(codes):
        return codes.reshape(*codes.shape[:2], codes.shape[2] // 16, 16)

    def fp4(*place):
        return make.codes_fp4(*place, i=64)

    def scales(*place):
        return make.scales_e8m0(*place, i=64)

    def bias(*place):
        return make.bf16("bias", *place, shape=make.dims(place[-1], i=64)[0])

    for name, pick in (
        ("gate_up_proj", lambda one: gate_up(one, True)),
        ("down_proj", lambda one: stack(one, DOWN)),
    ):
        weights[f"{P}.experts.{name}_blocks"] = blocks(pick(fp4))
        weights[f"{P}.experts.{name}_scales"] = make.as_e8m0(pick(scales)) if e8m0 else pick(scales)
        weights[f"{P}.experts.{name}_bias"] = pick(bias)
    make.router(weights, P, 1, weight="router.weight", bias=None)
    weights[f"{P}.router.bias"] = make.bf16("router bias", shape=(E,))
    config = {
        "model_type": "gpt_oss",
        "hidden_size": H,
        "intermediate_size": 64,
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "num_hidden_layers": 2,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return weights, config, fp4, scales, bias


class Stacks(Case):
    def read(self, weights, config, layer=1, **options):
        found = dump(make.write(self.path, weights, config, **options), layer)
        self.assertNotIn("error", found, found.get("error"))
        return found

    def assert_nvfp4(self, expert, e, up_global=UP):
        for p in (GATE, UP, DOWN):
            self.assertEqual(expert[p]["codes"], raw(make.codes_fp4(1, e, p)), (e, p))
            self.assertEqual(expert[p]["scales"], raw(make.scales_e4m3(1, e, p)), (e, p))
            wanted = make.factor("global", 1, e, up_global if p == UP else p)
            self.assertEqual(np.float32(expert[p]["global"]), wanted)

    def test_fused_modelopt(self):
        for model_type, interleaved in (("qwen3_moe", False), ("gpt_oss", True), ("deepseek_v3", False)):
            for halves in (False, True):
                with self.subTest(model_type, halves=halves):
                    self.fresh()
                    weights, config = fused_modelopt(model_type, interleaved, halves, (E, 1))
                    found = self.read(weights, config)
                    self.assertEqual(
                        (found["layers"][0]["naming"], found["layers"][0]["format"]), ("fused", "nvfp4")
                    )
                    for e, expert in enumerate(found["source"]["experts"]):
                        self.assert_nvfp4(expert, e, UP if halves else GATE)
                        self.assertEqual(np.float32(expert["input"]), make.factor("input", 1, 0, GATE))
                        self.assertEqual(np.float32(expert["intermediate"]), make.factor("input", 1, e, DOWN))

    def test_the_row_order_matters(self):
        halves = self.read(*fused_modelopt("qwen3_moe", False))["source"]["experts"][0][GATE]["codes"]
        self.fresh()
        wrong = self.read(*fused_modelopt("qwen3_moe", True))["source"]["experts"][0][GATE]["codes"]
        self.assertNotEqual(halves, wrong)

    def test_unknown_row_order(self):
        weights, config = fused_modelopt("new_model", False)
        config["scoring_func"] = "softmax"
        found = dump(make.write(self.path, weights, config), 1)
        self.assert_refused(found, UNSUPPORTED, "new_model", "interleaved", "gpt_oss", "qwen3_moe")

    def test_separate_stacks_need_no_model_type(self):
        weights, config = fused_modelopt("new_model", False)
        config["scoring_func"] = "softmax"
        for key in [k for k in weights if "gate_up_proj" in k]:
            del weights[key]
        for p, name in ((GATE, "gate_proj"), (UP, "up_proj")):
            weights[f"{P}.experts.{name}"] = stack(make.codes_fp4, p)
            weights[f"{P}.experts.{name}_weight_scale"] = make.as_e4m3(stack(make.scales_e4m3, p))
            weights[f"{P}.experts.{name}_weight_scale_2"] = factors("global", p)
        for e, expert in enumerate(self.read(weights, config)["source"]["experts"]):
            self.assert_nvfp4(expert, e)

    def test_stack_of_a_range(self):
        weights, config = fused_modelopt("qwen3_moe", False)
        for key in [k for k in weights if ".experts." in k]:
            if weights[key].ndim:
                weights[key] = weights[key][2:4]
        config["megamoe_experts"] = [2, 4]
        source = self.read(weights, config)["source"]
        self.assertEqual((source["first"], len(source["experts"])), (2, 2))
        self.assert_nvfp4(source["experts"][1], 3, GATE)

    def test_gpt_oss(self):
        for e8m0 in (False, True):
            self.fresh()
            weights, config, fp4, scales, bias = gpt_oss(e8m0)
            found = self.read(weights, config)
            source = found["source"]
            self.assertEqual(
                (source["shape"]["alpha"], source["shape"]["beta"], source["shape"]["limit"]),
                (float(np.float32(1.702)), 1.0, 7.0),
            )
            self.assertEqual((source["shape"]["score"], source["shape"]["group_size"]), (4, 32))
            np.testing.assert_array_equal(
                np.float32(source["router"]["bias"]), weights[f"{P}.router.bias"].astype(np.float32)
            )
            for e, expert in enumerate(source["experts"]):
                for p in (GATE, UP, DOWN):
                    self.assertEqual(expert[p]["codes"], raw(fp4(1, e, p)))
                    self.assertEqual(expert[p]["scales"], raw(scales(1, e, p)))
                    self.assertEqual(expert[p]["bias"], raw(bias(1, e, p)))

    def test_nan_scale_in_a_stack(self):
        weights, config, *_ = gpt_oss()
        weights[f"{P}.experts.gate_up_proj_scales"][3, 7, 1] = 0xFF  # row 7 is the fourth up row
        self.assert_refused(
            dump(make.write(self.path, weights, config), 1),
            CORRUPT,
            "expert 3",
            "gate_up_proj_scales",
            "[3, 7, 1]",
        )

    def test_bf16_stacks(self):
        for model_type, flip in (
            ("qwen3_5_moe", False),
            ("qwen3_moe", False),
            ("qwen3_moe", True),
            ("llama4", True),
            ("gpt_oss", True),
        ):
            with self.subTest(model_type, flip=flip):
                interleaved = model_type == "gpt_oss"
                self.fresh()
                _, config = make.hf(model_type=model_type)
                config["moe_intermediate_size"] = 64  # with 48, gate_up would be square

                def one(*place):
                    return make.bf16("weight", *place, shape=make.dims(place[-1], i=64))

                weights = {
                    f"{P}.experts.gate_up_proj": gate_up(one, interleaved),
                    f"{P}.experts.down_proj": stack(one, DOWN),
                }
                if flip:
                    weights = {k: w.transpose(0, 2, 1) for k, w in weights.items()}
                make.router(weights, P, 1, bias=None)
                config["intermediate_size"] = 64
                found = self.read(weights, config)
                notes = [a["detail"] for a in found["anomalies"] if a["kind"] == "transposed-stack"]
                self.assertEqual(len(notes), flip)
                for e, expert in enumerate(found["source"]["experts"]):
                    for p in (GATE, UP, DOWN):
                        self.assertEqual(expert[p]["codes"], raw(one(1, e, p)))

    def test_transposed_modelopt(self):
        """As Llama-4 is published: [E, K/2, N] bytes, each a pair along K, and scales [E, K/16, N]."""
        for model_type, interleaved in (("llama4", False), ("gpt_oss", True)):
            with self.subTest(model_type):
                self.fresh()
                weights, config = transposed_modelopt(model_type, interleaved)
                found = self.read(weights, config)
                for e, expert in enumerate(found["source"]["experts"]):
                    self.assert_nvfp4(expert, e, GATE)
                layer = found["layers"][0]
                notes = [a for a in found["anomalies"] if a["kind"] == "transposed-stack"]
                self.assertEqual([a["is_error"] for a in notes], [False])
                for text in (f"[{E}, {I // 2}, {H}]", f"{layer['expert_bytes'] / 1e6:.2f} MB"):
                    self.assertIn(text, notes[0]["detail"])

    def test_scan_and_repair_of_a_transposed_stack(self):
        weights, config = transposed_modelopt("llama4", False)
        name = f"{P}.experts.gate_up_proj_weight_scale"
        weights[name].view(np.uint8)[3, 2, I + 5] = 0x7F  # the sixth up row of expert 3, third block
        path = make.write(self.path, weights, config)
        for found in (dump(path, 1), dump("--scan", path, 1)):
            text = str(found.get("error", "")) + str([a for a in found["anomalies"] if a["is_error"]])
            for part in ("expert 3", name, "[5, 2]") if "error" in found else (name, "[5, 2]"):
                self.assertIn(part, text)
        repaired = dump("--repair", path, 1)
        self.assertIn("repaired-scale", [a["kind"] for a in repaired["anomalies"]])
        wanted = make.scales_e4m3(1, 3, UP)
        wanted[5, 2] = 0x7E
        self.assertEqual(repaired["source"]["experts"][3][UP]["scales"], raw(wanted))

    def test_scales_that_lie_another_way(self):
        """Codes and scales must be turned alike; a stack whose parts disagree is refused by shape."""
        weights, config = transposed_modelopt("llama4", False)
        for key in (f"{P}.experts.down_proj", f"{P}.experts.down_proj_weight_scale"):
            with self.subTest(key):
                self.fresh()
                turned = dict(weights)
                turned[key] = turned[key].transpose(0, 2, 1)
                self.assert_refused(dump(make.write(self.path, turned, config), 1), CORRUPT, "down_proj")

    def test_square_stacks(self):
        square = make.H
        for model_type in ("qwen3_moe", "qwen3_5_moe", "llama4"):
            with self.subTest(model_type):
                self.fresh()
                _, config = make.hf(model_type=model_type)
                config.update(moe_intermediate_size=square, intermediate_size=square)
                weights = {
                    f"{P}.experts.{n}": make.bf16(n, shape=(E, square, square))
                    for n in ("gate_proj", "up_proj", "down_proj")
                }
                make.router(weights, P, 1, bias=None)
                found = dump(make.write(self.path, weights, config), 1)
                if model_type == "qwen3_moe":
                    self.assert_refused(found, UNSUPPORTED, "ambiguous")
                    continue
                self.assertNotIn("error", found)
                for e, expert in enumerate(found["source"]["experts"]):
                    stored = weights[f"{P}.experts.up_proj"][e]
                    self.assertEqual(expert[UP]["codes"], raw(stored.T if model_type == "llama4" else stored))

    def test_fp8_stacks(self):
        h, i, block = 96, 64, 32

        def values(*place):
            return make.rng_of("fp8", *place).integers(0, 0x7F, make.dims(place[-1], h, i), dtype=np.uint8)

        def grids(*place):
            n, k = make.dims(place[-1], h, i)
            return make.rng_of("g", *place).uniform(0.1, 1, (n // block, k // block)).astype(np.float32)

        _, config = make.hf(model_type="qwen3_moe")
        config["moe_intermediate_size"] = i
        weights = {
            f"{P}.experts.gate_up_proj": make.as_e4m3(gate_up(values, False)),
            f"{P}.experts.gate_up_proj_scale_inv": gate_up(grids, False),
            f"{P}.experts.down_proj": make.as_e4m3(stack(values, DOWN)),
            f"{P}.experts.down_proj_scale_inv": stack(grids, DOWN),
        }
        make.router(weights, P, 1, bias=None)
        for e, expert in enumerate(self.read(weights, config)["source"]["experts"]):
            for p in (GATE, UP, DOWN):
                self.assertEqual(expert[p]["codes"], raw(values(1, e, p)))
                self.assertEqual(expert[p]["scales"], raw(grids(1, e, p)))
                self.assertEqual((expert[p]["block_rows"], expert[p]["block_columns"]), (block, block))

    def test_stacks_of_another_size(self):
        for key, change in (
            (f"{P}.experts.down_proj_weight_scale", lambda t: t[:-1]),
            (f"{P}.experts.gate_up_proj_weight_scale_2", lambda t: t[:-1]),
            (f"{P}.experts.gate_up_proj_weight_scale", lambda t: t[:, :-2]),
            (f"{P}.experts.down_proj", lambda t: t[:-1]),
        ):
            with self.subTest(key):
                self.fresh()
                weights, config = fused_modelopt("qwen3_moe", False)
                weights[key] = change(weights[key])
                self.assert_refused(dump(make.write(self.path, weights, config), 1), CORRUPT, key)


class Names(Case):
    def read(self, weights, config, layer=1):
        found = dump(make.write(self.path, weights, config), layer)
        self.assertNotIn("error", found, found.get("error"))
        return found

    def test_block_sparse_moe(self):
        prefix = "model.layers.1.block_sparse_moe"
        for bias in ("e_score_correction_bias", "gate.e_score_correction_bias"):
            self.fresh()
            weights = {}
            make.experts(weights, prefix, 1, make.modelopt, make.W_NAMES)
            make.router(weights, prefix, 1, bias=bias)
            _, config = make.hf(model_type="minimax_m2")
            found = self.read(weights, config)
            self.assertEqual(found["layers"][0]["prefix"], prefix)
            self.assertEqual(found["source"]["experts"][2][UP]["codes"], raw(make.codes_fp4(1, 2, UP)))
            self.assertEqual(len(found["source"]["router"]["bias"]), E)

    def test_mixer_without_a_gate(self):
        prefix = "backbone.layers.1.mixer"
        weights = {}
        make.experts(weights, prefix, 1, make.modelopt, {UP: "up_proj", DOWN: "down_proj"})
        make.router(weights, prefix, 1, bias="gate.e_score_correction_bias")
        for p, name in ((UP, "up_proj"), (DOWN, "down_proj")):
            make.plain(weights, f"{prefix}.shared_experts.{name}", 1, p)
        _, config = make.hf(model_type="nemotron_h")
        config.update(mlp_hidden_act="relu2", time_step_limit=[0.0, float("inf")], n_group=1, topk_group=1)
        source = self.read(weights, config)["source"]
        self.assertTrue(source["shape"]["not_gated"])
        self.assertIsNone(source["experts"][0][GATE])
        self.assertIsNone(source["shared"][GATE])
        self.assertEqual(np.float32(source["experts"][4]["input"]), make.factor("input", 1, 4, UP))

    def test_groups(self):
        weights, config = make.hf()
        config.update(n_group=5, topk_group=2)
        shape = self.read(weights, config)["source"]["shape"]
        self.assertEqual((shape["groups"], shape["groups_per_token"], shape["score"]), (5, 2, 2))

    def test_odd_header_misaligns_everything(self):
        """Every tensor of wide elements begins at an odd address; copies must not change a bit."""
        for model in (
            make.hf(one=make.plain),
            make.hf(one=make.fp8, scales="f32", suffix="weight_scale_inv"),
        ):
            self.fresh()
            wanted = self.read(*model)["source"]
            path = f"{self.path}/model.safetensors"
            with open(path, "rb") as file:
                data = file.read()
            size = struct.unpack("<Q", data[:8])[0]
            with open(path, "wb") as file:
                file.write(struct.pack("<Q", size + 1) + data[8 : 8 + size] + b" " + data[8 + size :])
            self.assertEqual(dump(self.path, 1)["source"], wanted)

    def test_mtp_blocks(self):
        for mtp, number, layers in (
            ("mtp.0.ffn", 2, 2),
            ("layers.2.ffn", 2, 2),
            ("mtp.layers.0.mlp", 2, None),
            ("mtp.1.ffn", 3, 2),
        ):
            with self.subTest(mtp):
                self.fresh()
                weights, config = make.v4_modelopt()
                if layers is None:
                    del config["num_hidden_layers"]
                    number = 2
                make.experts(weights, mtp, 7, make.plain, make.W_NAMES)
                make.router(weights, mtp, 7)
                config["quantization_config"] = {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                    "ignore": ["*.ffn.shared_experts.*"],
                }
                found = self.read(weights, config, number)
                self.assertEqual(
                    [(x["layer"], x["format"]) for x in found["layers"]],
                    [(0, "nvfp4"), (1, "nvfp4"), (number, "bf16")],
                )
                self.assertFalse(found["source"]["shape"]["hash"])
                self.assertEqual(
                    found["source"]["experts"][3][UP]["codes"], raw(weights[f"{mtp}.experts.3.w3.weight"])
                )
                notes = [a for a in found["anomalies"] if a["kind"] == "config-contradiction"]
                self.assertEqual([a["layer"] for a in notes], [number])
                self.assertIn("bf16", notes[0]["detail"])

    def test_mtp_in_mxfp4_inside_nvfp4(self):
        weights, config = make.v4_modelopt()
        make.experts(weights, "mtp.0.ffn", 7, make.mxfp4, make.W_NAMES)
        config["quantization_config"] = {
            "quant_method": "fp8",
            "moe_quant_algo": "NVFP4",
            "ignore": ["mtp.*"],
        }
        found = self.read(weights, config, 2)
        self.assertEqual([x["format"] for x in found["layers"]], ["nvfp4", "nvfp4", "mxfp4"])
        # the draft block is wider here than the model; nothing else contradicts
        self.assertEqual(
            [
                a["detail"].split(", the")[0]
                for a in found["anomalies"]
                if a["kind"] == "config-contradiction"
            ],
            ["config.json declares moe_intermediate_size 48"],
        )


class Declarations(Case):
    """Lists of what is left alone, against a model whose layer 1 is NVFP4 and layer 10 BF16."""

    def contradictions(self, quantization, stem="model.", hf_quant=None, strict=False):
        self.fresh()
        weights, config = make.hf(f"{stem}layers.1.mlp")
        make.experts(weights, f"{stem}layers.10.mlp", 10, make.plain, make.HF_NAMES)
        make.router(weights, f"{stem}layers.10.mlp", 10)
        config["num_hidden_layers"] = 11
        if quantization:
            config["quantization_config"] = quantization
        beside = {"hf_quant_config": {"quantization": hf_quant}} if hf_quant else {}
        make.write(self.path, weights, config, **beside)
        found = dump(*(["--strict"] if strict else []), self.path)
        if strict:
            return found
        return [(a["layer"], a["detail"]) for a in found["anomalies"] if a["kind"] == "config-contradiction"]

    def test_lists(self):
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        compressed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        for stem in ("model.", "model.language_model.", ""):
            for quantization, key, entries, wanted in (
                (nvfp4, "ignore", ["lm_head", "*layers.10.mlp*"], []),
                (nvfp4, "exclude_modules", ["model.layers.10"], []),
                (nvfp4, "exclude_modules", ["model.layers.10.mlp.experts"], []),
                (nvfp4, "modules_to_not_convert", ["layers.10.mlp.experts*"], []),
                (compressed, "ignore", ["re:.*layers\\.10\\.mlp.*"], []),
                (compressed, "ignore", ["re:model.layers.(?:9|10).mlp.experts.\\d+.down_proj$"], []),
                (compressed, "ignore", [f"model.layers.10.mlp.experts.{e}.down_proj" for e in range(E)], []),
                (nvfp4, "ignore", ["lm_head"], [10]),
                (nvfp4, "ignore", ["model.layers.1"], [1, 10]),  # and not layer 10 by its beginning
                (nvfp4, "ignore", ["model.layers.*"], [1]),
                (compressed, "ignore", ["re:ayers.10"], [10]),  # anchored, as Python's re.match is
                (compressed, "ignore", ["re:.*layers.1\\..*", "re:.*layers.10\\..*"], [1]),
            ):
                with self.subTest(stem=stem, entries=entries[:2]):
                    found = [layer for layer, _ in self.contradictions({**quantization, key: entries}, stem)]
                    self.assertEqual(found, wanted)

    def test_strict(self):
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        self.assert_refused(self.contradictions(nvfp4, strict=True), CORRUPT, "strict", "layers.10")
        self.assertNotIn("error", self.contradictions({**nvfp4, "ignore": ["*layers.10.*"]}, strict=True))

    def test_quantized_layers(self):
        lists = {
            "quant_method": "fp8",
            "moe_quant_algo": "NVFP4",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.1.mlp.experts": {"quant_algo": "NVFP4"}},
        }
        self.assertEqual(self.contradictions(lists), [])
        lists["quantized_layers"] = {"model.layers.10.mlp.experts": {"quant_algo": "NVFP4"}}
        self.assertEqual([layer for layer, _ in self.contradictions(lists)], [1, 10])

    def test_what_nvidia_publishes_for_v4(self):
        """Both files say MIXED_PRECISION and list the modules; config.json also keeps the native fp8 around it."""
        weights, config = make.v4_modelopt()
        make.experts(weights, "mtp.0.ffn", 7, make.mxfp4, make.W_NAMES)
        config["moe_intermediate_size"] = None  # the draft block is wider in this fixture
        listed = {f"layers.{n}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for n in (0, 1)}
        ignore = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "moe_quant_algo": "NVFP4",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": listed,
            "ignore": ignore,
        }
        beside = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed, "exclude_modules": ignore}
        make.write(self.path, weights, config, hf_quant_config={"quantization": beside})
        found = dump("--strict", self.path)
        self.assertNotIn("error", found)
        self.assertEqual({a["kind"] for a in found["anomalies"]}, {"global-scales-differ"})

    def test_hf_quant_config_wins(self):
        stale = {"quant_method": "fp8"}
        own = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.10*"]}
        notes = self.contradictions(stale, hf_quant=own)
        self.assertEqual([layer for layer, _ in notes], [-1])
        self.assertIn("hf_quant_config.json declares nvfp4 experts, config.json fp8", notes[0][1])
        self.assertEqual(self.contradictions(None, hf_quant=own), [])

    def test_unreadable_pattern(self):
        self.fresh()
        weights, config = make.hf()
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["re:(((", "re:.*gate$"],
        }
        found = dump(make.write(self.path, weights, config))
        self.assertEqual(
            [a["kind"] for a in found["anomalies"] if "pattern" in a["kind"]], ["config-pattern"]
        )

    def test_declared_activations(self):
        for one, quantization, wanted in (
            (make.modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
            (make.modelopt, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, False),
            (
                make.compressed,
                {
                    "quant_method": "compressed-tensors",
                    "format": "nvfp4-pack-quantized",
                    "config_groups": {"group_0": {"input_activations": {"num_bits": 4}}},
                },
                True,
            ),
            (
                make.compressed,
                {
                    "quant_method": "compressed-tensors",
                    "format": "nvfp4-pack-quantized",
                    "config_groups": {"group_0": {"input_activations": None}},
                },
                False,
            ),
        ):
            with self.subTest(quantization):
                self.fresh()
                weights, config = make.hf(one=one, input_scale=False)
                config["quantization_config"] = quantization
                found = dump(make.write(self.path, weights, config), 1)
                self.assertEqual(found["source"]["w4a4"], wanted)
                self.assertEqual([a for a in found["anomalies"] if a["kind"] == "missing-input-scale"], [])


class Speed(Case):
    def test_headers_of_a_whole_model(self):
        """95 shards, 281,000 tensors, 870 GB of holes: opened from headers, in under a second of CPU."""
        make_sparse.main(self.path)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = dump(self.path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertEqual(len(found["layers"]), 61)
        self.assertEqual(found["layers"][60]["expert_bytes"], 37_158_912)
        self.assertEqual(found["anomalies"], [])
        if not os.environ.get("MEGAMOE_INSTRUMENTED"):
            self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1.0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
