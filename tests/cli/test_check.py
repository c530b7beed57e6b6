"""check passes what is right, names the stage, token, slot and index of what is wrong, and keeps its JSON keys."""

import math
import os
import struct
import unittest

import fx
from command import Case

STAGES = ["route", "stage", "l1", "activation", "l2", "shared", "combine", "layer"]
KEYS = {"stage", "compared", "elements", "mismatches", "cosine", "norm_ratio", "max_rel_error", "pass"}


class Passes(Case):
    def test_keys(self):
        self.command("synth", "--shape", "tiny", "t")
        for activations in ("bf16", "nvfp4"):
            report = self.json("check", "t", "--layer", 3, "--activations", activations)
            self.assertLessEqual(
                {"layer", "backend", "isa", "activations", "tokens", "stages", "reference_unquantized", "pass"},
                set(report),
            )
            self.assertEqual((report["layer"], report["tokens"], report["activations"]), (3, 64, activations))
            self.assertEqual([s["stage"] for s in report["stages"]], STAGES)
            for stage in report["stages"]:
                self.assertLessEqual(KEYS, set(stage))
                self.assertIn(stage["compared"], ("exact", "close", "fused"))
                self.assertEqual((stage["mismatches"], stage["pass"]), (0, True))
            self.assertTrue(report["pass"])
            distance = report["reference_unquantized"]
            if activations == "bf16":
                self.assertIsNone(distance)
            else:  # far enough to be a quantized layer, near enough to be the same one
                self.assertTrue(0.97 < distance["cosine"] < 0.99999, distance)

    def test_every_layer_of_every_format(self):
        for form in ("modelopt", "compressed-tensors", "mxfp4"):
            self.command("synth", "--shape", "tiny", "--format", form, form)
            for activations in ("bf16", "nvfp4"):
                report = self.json("check", form, "--activations", activations, "--tokens", 17)
                self.assertEqual([layer["layer"] for layer in report["layers"]], [0, 1, 2, 3])
                self.assertTrue(report["pass"])

    def test_few_experts_loaded(self):
        self.command("synth", "--shape", "tiny", "t")
        for experts in ("4:5", "7:9", "0:12"):
            report = self.json("check", "t", "--layer", 3, "--experts", experts, "--tokens", 9)
            self.assertTrue(report["pass"])

    def test_before_and_unclamped_and_globals(self):
        self.command("synth", "--shape", "tiny", "t")
        for options in (
            ["--routing-weight", "before"],
            ["--shared-unclamped"],
            ["--input-global", "token"],
            ["--input-global", "unit", "--intermediate-global", "unit"],
        ):
            self.assertTrue(self.json("check", "t", "--layer", 3, "--activations", "nvfp4", *options)["pass"])

    def test_own_input(self):
        self.command("synth", "--shape", "tiny", "t")
        rows = [[((i * 29 + t * 7) % 91 - 45) / 11 for i in range(160)] for t in range(12)]
        fx.save_input(self.path("x"), rows, token_ids=range(12))
        self.assertEqual(self.json("check", "t", "--layer", 0, "--input", "x")["tokens"], 12)

    def test_reference_backend(self):
        self.command("synth", "--shape", "tiny", "t")
        report = self.json("check", "t", "--layer", 3, "--backend", "reference", "--tokens", 5)
        self.assertEqual((report["backend"], report["pass"]), ("reference", True))

    def test_the_serving_path_is_judged(self):
        """`layer` is megamoe_layer_run, which this variable makes return zeros; the stages beside it stay right."""
        self.command("synth", "--shape", "tiny", "t")
        report = self.json("check", "t", "--layer", 3, status=1, env={"MEGA_MOE_STATIC": "1"})
        self.assertEqual([s["stage"] for s in report["stages"] if not s["pass"]], ["layer"])

    def test_tables_fit_a_terminal(self):
        self.command("synth", "--shape", "tiny", "t")
        for arguments in (["check", "t"], ["check", "t", "--layer", "3", "--activations", "nvfp4"]):
            for line in self.command(*arguments).split("\n"):
                self.assertLessEqual(len(line), 80, line)


class ScaledGlobals(Case):
    """Relative measures only: nothing changes when the global scales are multiplied by 2^-16."""

    def scaled(self, which):
        self.command("synth", "--shape", "H=96,I=64,E=6,K=2,limit=10", "t")
        path = self.path("t", "model-00001-of-00001.safetensors")
        tensors = fx.load(path)
        for name, (dtype, shape, data) in tensors.items():
            if name.endswith(".weight_scale_2") and any(f".{w}." in name for w in which):
                tensors[name] = (dtype, shape, fx.f32(struct.unpack("<f", data)[0] * 2.0**-16))
        fx.save(path, tensors)

    def test_bf16_all_of_them(self):
        self.scaled(("w1", "w2", "w3"))
        self.assertTrue(self.json("check", "t", "--activations", "bf16")["pass"])

    def test_nvfp4_down_only(self):
        self.scaled(("w2",))
        self.assertTrue(self.json("check", "t", "--activations", "nvfp4")["pass"])


class Against(Case):
    """Somebody else's kernel: our own stages pass, and each kind of damage is charged to the stage that has it."""

    def setUp(self):
        super().setUp()
        self.command("synth", "--shape", "tiny", "t")
        rows = [[((i * 53 + t * 17) % 127 - 63) / 21 for i in range(160)] for t in range(8)]
        fx.save_input(self.path("x"), rows)

    def dump(self, activations):
        self.command(
            "run",
            "t",
            "--layer",
            3,
            "--input",
            "x",
            "--output",
            "y",
            "--dump-stages",
            "s",
            "--activations",
            activations,
        )
        return fx.load(self.path("s"))

    def judge(self, tensors, activations, status):
        fx.save(self.path("f"), tensors)
        report = self.json(
            "check", "t", "--layer", 3, "--input", "x", "--against", "f", "--activations", activations, status=status
        )
        self.assertEqual(report["backend"], "file")
        return report

    def first_failure(self, report):
        return next(stage for stage in report["stages"] if not stage["pass"])

    def damaged(self, activations, name, index, change):
        """Changes one element of one tensor; returns the first stage that fails."""
        tensors = self.dump(activations)
        dtype, shape, data = tensors[name]
        size, data = fx.SIZES[dtype], bytearray(data)
        data[index * size : (index + 1) * size] = change(bytes(data[index * size : (index + 1) * size]))
        tensors[name] = (dtype, shape, bytes(data))
        return self.first_failure(self.judge(tensors, activations, 1))

    def test_own_stages_pass(self):
        for activations in ("bf16", "nvfp4"):
            self.assertTrue(self.judge(self.dump(activations), activations, 0)["pass"])

    def test_output_alone(self):
        report = self.judge({"output": self.dump("bf16")["output"]}, "bf16", 0)
        self.assertEqual([s["compared"] for s in report["stages"] if s["stage"] in ("l1", "l2")], ["fused", "fused"])

    def test_another_order_of_slots(self):
        tensors = self.dump("bf16")
        turned = {}
        for name, (dtype, shape, data) in tensors.items():
            if len(shape) > 1 and shape[1] == 3 and name not in ("logits",):
                step = len(data) // (8 * 3)
                rows = [data[i : i + step] for i in range(0, len(data), step)]
                data = b"".join(rows[t * 3 + k] for t in range(8) for k in (2, 0, 1))
            turned[name] = (dtype, shape, data)
        del turned["logits"]
        self.judge(turned, "bf16", 0)

    def test_l1(self):
        off = self.damaged("bf16", "l1", 1000, lambda b: fx.f32(struct.unpack("<f", b)[0] * 1.01 + 0.01))
        self.assertEqual((off["stage"], off["mismatches"]), ("l1", 1))
        # [T, K, 2, I] = [8, 3, 2, 96]: element 1000 is token 1, slot 2, index 40
        self.assertIn("token 1, slot 2, index 40", off["first_mismatch"])

    def test_l2_and_combine(self):
        self.assertEqual(
            self.damaged("bf16", "l2", 777, lambda b: fx.f32(struct.unpack("<f", b)[0] + 1))["stage"], "l2"
        )
        self.assertEqual(
            self.damaged("bf16", "output", 99, lambda b: fx.bf16(fx.from_bf16(b)[0] + 1))["stage"], "combine"
        )

    def rounded_l2(self, change=lambda i, value: value):
        """What a backend shows that keeps L2 as BF16; nothing after it, which it would have computed from that."""
        tensors = self.dump("bf16")
        dtype, shape, data = tensors["l2"]
        values = struct.unpack(f"<{len(data) // 4}f", data)
        stored = fx.from_bf16(b"".join(fx.bf16(change(i, value)) for i, value in enumerate(values)))
        tensors["l2"] = (dtype, shape, fx.f32(*stored))
        del tensors["output"]
        return tensors, values, stored

    def test_l2_stored_as_bf16(self):
        report = self.judge(self.rounded_l2()[0], "bf16", 0)
        l2 = next(s for s in report["stages"] if s["stage"] == "l2")
        self.assertLess(abs(l2["norm_ratio"] - 1), 1e-6)  # as one that was rounded likewise
        for factor in (1 + 2**-11, 1 - 2**-11):  # an eighth of BF16's step
            off = self.first_failure(self.judge(self.rounded_l2(lambda i, x, f=factor: f * x)[0], "bf16", 1))
            self.assertEqual(off["stage"], "l2")
            self.assertLess(abs(off["norm_ratio"] - factor), 1e-4)

    def test_the_wrong_neighbor_in_bf16(self):
        """Of the two nearest BF16 only one is right, however small the step is."""
        _, values, stored = self.rounded_l2()
        index = max(range(len(values)), key=lambda i: abs(values[i] / 2 ** math.frexp(values[i])[1]))
        step = math.ldexp(1, math.frexp(values[index])[1] - 8)
        toward = step if values[index] > stored[index] else -step
        tensors, _, _ = self.rounded_l2(lambda i, x: stored[i] + toward if i == index else x)
        off = self.first_failure(self.judge(tensors, "bf16", 1))
        self.assertEqual((off["stage"], off["mismatches"]), ("l2", 1))

    def test_activation_one_step(self):
        off = self.damaged("bf16", "h", 123, lambda b: struct.pack("<H", struct.unpack("<H", b)[0] ^ 1))
        self.assertEqual((off["stage"], off["mismatches"]), ("activation", 1))
        off = self.damaged("nvfp4", "h_codes", 321, lambda b: bytes([b[0] ^ 1]))
        self.assertEqual(off["stage"], "activation")
        off = self.damaged("nvfp4", "h_scales", 21, lambda b: bytes([b[0] + 1]))
        self.assertEqual(off["stage"], "activation")

    def test_staging(self):
        self.assertEqual(self.damaged("nvfp4", "x_codes", 33, lambda b: bytes([b[0] ^ 16]))["stage"], "stage")
        self.assertEqual(self.damaged("nvfp4", "x_scales", 3, lambda b: bytes([b[0] ^ 1]))["stage"], "stage")

    def test_routing(self):
        self.assertEqual(
            self.damaged("bf16", "expert_weights", 5, lambda b: fx.f32(struct.unpack("<f", b)[0] * 1.01))["stage"],
            "route",
        )
        tensors = self.dump("bf16")
        used = fx.values_of(self.path("s"), "expert_ids")[:3]
        other = next(e for e in range(12) if e not in used)
        off = self.damaged("bf16", "expert_ids", 1, lambda b: fx.i32(other))
        self.assertEqual(off["stage"], "route")
        self.assertIn("token 0, slot 1", off["first_mismatch"])
        self.assertEqual(len(tensors), 8)

    def test_a_constant_factor_is_seen(self):
        tensors = self.dump("bf16")
        dtype, shape, data = tensors["output"]
        doubled = fx.bf16(*[2 * value for value in fx.from_bf16(data)])
        report = self.judge({"output": (dtype, shape, doubled)}, "bf16", 1)
        whole = self.first_failure(report)
        self.assertEqual(whole["stage"], "layer")
        self.assertAlmostEqual(whole["norm_ratio"], 2.0, 4)
        self.assertGreater(whole["cosine"], 0.99999)

    def test_swapped_gate_and_up(self):
        tensors = self.dump("bf16")
        dtype, shape, data = tensors["l1"]
        half = 96 * 4
        swapped = b"".join(data[i + half : i + 2 * half] + data[i : i + half] for i in range(0, len(data), 2 * half))
        tensors["l1"] = (dtype, shape, swapped)
        self.assertEqual(self.first_failure(self.judge(tensors, "bf16", 1))["stage"], "l1")

    def test_wrong_files(self):
        fx.save(self.path("f"), {"output": fx.tensor("BF16", [7, 160], bytes(7 * 320))})
        self.refused("check", "t", "--layer", 3, "--input", "x", "--against", "f", names=["[7, 160]", "[8, 160]"])
        fx.save(self.path("f"), {"something": fx.tensor("F32", [1], fx.f32(1))})
        self.refused("check", "t", "--layer", 3, "--input", "x", "--against", "f", names=["expert_ids"])


class Damage(Case):
    def test_a_broken_weight_is_no_mistake_of_the_backend(self):
        """check judges the computation, not the weights: both sides read the same bytes."""
        self.command("synth", "--shape", "tiny", "t")
        path = self.path("t", "model-00001-of-00001.safetensors")
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            file.write(b"\x12" * 64)
        self.assertTrue(self.json("check", "t", "--layer", 1)["pass"])


if __name__ == "__main__":
    unittest.main()
