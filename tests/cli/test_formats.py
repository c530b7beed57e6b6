"""Every --format of synth, judged by code that shares nothing with it: the tensors a publisher's file has, and the
layer computed from their bytes with numpy and ml_dtypes. Each opens with --strict and passes check."""

import json
import os
import unittest

import ml_dtypes
import numpy as np

import fx
from command import Case

H, I, E, K, VOCABULARY = 160, 96, 12, 3, 1024
HF = ("gate_proj", "up_proj", "down_proj")
W = ("w1", "w3", "w2")
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F32": np.float32,
    "U8": np.uint8,
    "I8": np.int8,
    "I64": np.int64,
}
NAMES = {  # like: stem and block, projections, the router's bias
    "tiny": ("layers.{}.ffn", W, "gate.bias"),
    "r1": ("model.layers.{}.mlp", HF, "gate.e_score_correction_bias"),
    "qwen3-30b-a3b": ("model.layers.{}.mlp", HF, None),
    "minimax-m2": ("model.layers.{}.block_sparse_moe", W, "e_score_correction_bias"),
    "nemotron-3-nano": ("backbone.layers.{}.mixer", HF, "gate.e_score_correction_bias"),
}
FIRST = {"r1": 3, "nemotron-3-nano": 1}
UNSTACKED = ("modelopt", "compressed-tensors", "mxfp4", "bf16", "fp8", "fp8-e8m0")
STACKED = ("fused", "fused-transposed")


def experts_of(like):
    return 16 if like == "r1" else E  # eight groups


def one_matrix(fmt, name, n, k):
    """The tensors of one weight [n, k], as its producer names and types them."""
    grid = [-(-n // 128), -(-k // 128)]
    return {
        "modelopt": {
            ".weight": ("U8", [n, k // 2]),
            ".weight_scale": ("F8_E4M3", [n, k // 16]),
            ".weight_scale_2": ("F32", []),
            ".input_scale": ("F32", []),
        },
        "compressed-tensors": {
            ".weight_packed": ("U8", [n, k // 2]),
            ".weight_scale": ("F8_E4M3", [n, k // 16]),
            ".weight_global_scale": ("F32", [1]),
            ".input_global_scale": ("F32", [1]),
        },
        "mxfp4": {".weight": ("I8", [n, k // 2]), ".scale": ("F8_E8M0", [n, k // 32])},
        "bf16": {".weight": ("BF16", [n, k])},
        "fp8": {".weight": ("F8_E4M3", [n, k]), ".weight_scale_inv": ("F32", grid)},
        "fp8-e8m0": {".weight": ("F8_E4M3", [n, k]), ".scale": ("F8_E8M0", grid)},
    }[fmt]


def stack(fmt, count, n, k):
    turned = fmt == "fused-transposed"
    shape = lambda group: [count, k // group, n] if turned else [count, n, k // group]
    return {
        "": ("U8", shape(2)),
        "_weight_scale": ("F8_E4M3", shape(16)),
        "_weight_scale_2": ("F32", [] if turned else [count]),
        "_input_scale": ("F32", []),
    }


def shared_format(like, fmt):
    if fmt == "bf16" or like in ("nemotron-3-nano",) and fmt not in ("fp8", "fp8-e8m0"):
        return "bf16"
    if like == "tiny" and fmt != "compressed-tensors":
        return "fp8-e8m0"
    return fmt if fmt in ("fp8", "fp8-e8m0") else "bf16"


def expected(like, fmt, layer, prefix=None):
    """name -> (dtype, shape) of one layer."""
    stem, names, bias = NAMES[like]
    prefix = prefix or stem.format(layer)
    count = experts_of(like)
    wanted = {f"{prefix}.gate.weight": ("BF16", [count, H])}
    if bias:
        wanted[f"{prefix}.{bias}"] = ("F32", [count])
    dims = dict(zip(names, ((I, H), (I, H), (H, I))))
    if like == "nemotron-3-nano":
        del dims["gate_proj"]

    def add(base, parts):
        wanted.update({base + suffix: value for suffix, value in parts.items()})

    if fmt in STACKED:
        first = ("up_proj", I) if like == "nemotron-3-nano" else ("gate_up_proj", 2 * I)
        add(f"{prefix}.experts.{first[0]}", stack(fmt, count, first[1], H))
        add(f"{prefix}.experts.down_proj", stack(fmt, count, H, I))
    else:
        for e in range(count):
            for name, (n, k) in dims.items():
                add(f"{prefix}.experts.{e}.{name}", one_matrix(fmt, name, n, k))
    if like in ("tiny", "r1", "nemotron-3-nano"):
        for name, (n, k) in dims.items():
            add(f"{prefix}.shared_experts.{name}", one_matrix(shared_format(like, fmt), name, n, k))
    return wanted


def decoded(tensors, name):
    dtype, shape, data = tensors[name]
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def fp4_values(codes):
    """Bytes along the last axis to twice as many values, the low nibble first."""
    codes = codes.view(np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def weight_of(tensors, base):
    """A single weight from whatever tensors begin with its name."""

    def get(suffix):
        return decoded(tensors, base + suffix).astype(np.float64)

    packed = f"{base}.weight_packed" in tensors
    codes = decoded(tensors, base + (".weight_packed" if packed else ".weight"))
    if codes.dtype in (np.uint8, np.int8):
        values = fp4_values(codes)
        if f"{base}.scale" in tensors:
            return values * np.repeat(get(".scale"), 32, axis=1)
        factor = 1 / get(".weight_global_scale") if packed else get(".weight_scale_2")
        return values * np.repeat(get(".weight_scale"), 16, axis=1) * factor.reshape(())
    values = codes.astype(np.float64)
    for suffix in (".scale", ".weight_scale_inv"):
        if base + suffix in tensors:
            grid = np.repeat(np.repeat(get(suffix), 128, axis=0), 128, axis=1)
            return values * grid[: values.shape[0], : values.shape[1]]
    return values


def stack_of(tensors, base, e):
    """One expert [N, K] of a stack, whichever way it lies."""
    codes, scales = decoded(tensors, base)[e], decoded(tensors, base + "_weight_scale")[e].astype(np.float64)
    if codes.shape[1] != 8 * scales.shape[1]:  # K is outermost: turn both
        codes, scales = np.ascontiguousarray(codes.T), scales.T
    factor = decoded(tensors, base + "_weight_scale_2")
    return fp4_values(codes) * np.repeat(scales, 16, axis=1) * float(factor[e] if factor.shape else factor)


def swiglu(like, x, gate, up, down):
    if gate is None:
        h = np.maximum(x @ up.T, 0) ** 2
    else:
        g, u = x @ gate.T, x @ up.T
        if like == "tiny":
            g, u = np.minimum(g, 10), np.clip(u, -10, 10)
        h = g / (1 + np.exp(-g)) * u
    return h.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) @ down.T


def expert_weights(tensors, like, fmt, prefix, e):
    names = NAMES[like][1]
    gated = like != "nemotron-3-nano"
    if fmt not in STACKED:
        found = [weight_of(tensors, f"{prefix}.experts.{e}.{n}") for n in names[0 if gated else 1 :]]
        return found if gated else [None, *found]
    down = stack_of(tensors, f"{prefix}.experts.down_proj", e)
    if not gated:
        return [None, stack_of(tensors, f"{prefix}.experts.up_proj", e), down]
    both = stack_of(tensors, f"{prefix}.experts.gate_up_proj", e)
    return [both[:I], both[I:], down]


class Formats(Case):
    def synth(self, like, fmt, *arguments):
        name = f"{like}-{fmt}"
        shape = f"H={H},I={I},E={experts_of(like)},K={K},like={like}"
        self.command("synth", "--shape", shape, "--format", fmt, *arguments, name)
        tensors = {}
        for file in sorted(os.listdir(self.path(name))):
            if file.endswith(".safetensors"):
                tensors.update(fx.load(self.path(name, file)))
        return name, tensors

    def assert_layer(self, name, tensors, like, fmt, layer):
        """The command's output for given experts against the same in double precision."""
        prefix = NAMES[like][0].format(layer)
        rng = np.random.default_rng(len(name))
        x = (rng.standard_normal((4, H)) * rng.uniform(0.5, 2, (4, 1))).astype(ml_dtypes.bfloat16)
        ids = [rng.permutation(experts_of(like))[:K].tolist() for _ in range(4)]
        factors = rng.uniform(0.1, 1, (4, K)).astype(np.float32)
        fx.save_input(self.path("x"), x.astype(np.float64).tolist(), ids, factors.tolist())
        self.command("run", name, "--layer", layer, "--input", "x", "--output", "y", "--activations", "bf16")
        got = np.array(fx.values_of(self.path("y"), "output")).reshape(4, H)
        want = np.zeros((4, H))
        for t in range(4):
            row = x[t].astype(np.float64)
            for e, factor in zip(ids[t], factors[t]):
                want[t] += float(factor) * swiglu(like, row, *expert_weights(tensors, like, fmt, prefix, e))
            shared = [weight_of(tensors, n) for n in self.shared_names(tensors, prefix, like)]
            if shared:
                want[t] += swiglu(like, row, *([None] * (3 - len(shared)) + shared))
        cosine = (got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)
        self.assertGreater(cosine, 0.99999, name)
        self.assertAlmostEqual(np.linalg.norm(got) / np.linalg.norm(want), 1, delta=1e-3, msg=name)

    @staticmethod
    def shared_names(tensors, prefix, like):
        names = [f"{prefix}.shared_experts.{n}" for n in NAMES[like][1]]
        return [n for n in names if f"{n}.weight" in tensors or f"{n}.weight_packed" in tensors]

    def assert_good(self, like, fmt):
        layer = FIRST.get(like, 0)
        name, tensors = self.synth(like, fmt)
        found = {n: (dtype, shape) for n, (dtype, shape, _) in tensors.items()}
        self.assertEqual(found, expected(like, fmt, layer))
        report = self.json("inspect", name, "--strict", "--scan")
        kinds = {a["kind"] for a in report["anomalies"]}
        self.assertLessEqual(kinds, {"global-scales-differ", "transposed-stack"}, name)
        self.assertEqual("transposed-stack" in kinds, fmt == "fused-transposed")
        family = {"fused": "nvfp4", "fused-transposed": "nvfp4", "fp8-e8m0": "fp8"}
        wanted = family.get(fmt, "nvfp4" if fmt in ("modelopt", "compressed-tensors") else fmt)
        self.assertEqual(report["layers"][0]["format"], wanted)
        self.assertTrue(self.json("check", name, "--strict", "--tokens", 3)["layers"][0]["pass"], name)
        self.assert_layer(name, tensors, like, fmt, layer)

    def test_deepseek_v4(self):
        for fmt in UNSTACKED + STACKED:
            with self.subTest(fmt):
                self.assert_good("tiny", fmt)

    def test_hugging_face_names(self):
        for like, fmt in (("r1", "modelopt"), ("r1", "fp8"), ("r1", "fused"), ("qwen3-30b-a3b", "compressed-tensors"),
                          ("qwen3-30b-a3b", "fused"), ("qwen3-30b-a3b", "fused-transposed"), ("qwen3-30b-a3b", "bf16")):
            with self.subTest(like=like, fmt=fmt):
                self.assert_good(like, fmt)

    def test_block_sparse_moe_and_mixer(self):
        for like in ("minimax-m2", "nemotron-3-nano"):
            for fmt in ("modelopt", "fp8", "fused-transposed"):
                with self.subTest(like=like, fmt=fmt):
                    self.assert_good(like, fmt)

    def test_gpt_oss(self):
        name, tensors = self.synth("gpt-oss-120b", "mxfp4")
        found = {n: (dtype, shape) for n, (dtype, shape, _) in tensors.items()}
        p = "model.layers.0.mlp"
        wanted = {f"{p}.router.weight": ("BF16", [E, H]), f"{p}.router.bias": ("BF16", [E])}
        for projection, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            wanted[f"{p}.experts.{projection}_blocks"] = ("U8", [E, n, k // 32, 16])
            wanted[f"{p}.experts.{projection}_scales"] = ("U8", [E, n, k // 32])
            wanted[f"{p}.experts.{projection}_bias"] = ("BF16", [E, n])
        self.assertEqual(found, wanted)
        self.json("inspect", name, "--strict", "--scan")
        self.assertTrue(self.json("check", name, "--strict", "--tokens", 3)["layers"][0]["pass"])

    def test_mtp(self):
        """The block keeps what quantizers leave alone: MXFP4 in V4's files, BF16 in the others'."""
        for like, fmt, own, prefix in (
            ("tiny", "modelopt", "mxfp4", "mtp.0.ffn"),
            ("tiny", "bf16", "bf16", "mtp.0.ffn"),
            ("r1", "modelopt", "bf16", "model.layers.4.mlp"),
            ("r1", "compressed-tensors", "bf16", "model.layers.4.mlp"),
        ):
            with self.subTest(like=like, fmt=fmt):
                name, tensors = self.synth(like, fmt, "--mtp")
                layer = FIRST.get(like, 0)
                wanted = expected(like, own, layer + 1, prefix)
                got = {n: v[:2] for n, v in tensors.items() if n.startswith(prefix)}
                own_experts = {n: v for n, v in wanted.items() if "shared" not in n}
                self.assertEqual({n: v for n, v in got.items() if "shared" not in n}, own_experts)
                report = self.json("inspect", name, "--strict", "--scan")
                self.assertEqual([l["format"] for l in report["layers"]][1], own)
                self.assertTrue(self.json("check", name, "--strict", "--tokens", 2)["pass"])
                with open(self.path(name, "config.json"), encoding="utf-8") as file:
                    self.assertEqual(json.load(file)["num_nextn_predict_layers"], 1)

    def test_refused(self):
        self.refused("synth", "--shape", "gpt-oss-120b", "--mtp", "o", names=["multi-token"])
        self.refused("synth", "--shape", "v4-pro", "--mtp", "--experts", "0:2", "o", names=["--experts"])
        self.refused("synth", "--shape", "H=48,I=48,E=4,K=2", "--mtp", "o", names=["H=48"])
        self.refused("synth", "--shape", "H=64,I=64,E=12,K=2,like=r1", "o", names=["8 groups"])
        self.refused("synth", "--shape", "H=64,I=64,E=12,K=2,like=r2", "o", names=["'r2'"])
        self.refused("synth", "--shape", "tiny", "--format", "bf-16", "o", names=["bf16"])


if __name__ == "__main__":
    unittest.main()
