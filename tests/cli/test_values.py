"""Values that are known by hand: themes A, B3, C1, D and E of the public reports, on every host backend."""

import struct
import unittest

import fx
from command import Case, close, contents

BF16_H = fx.from_bf16(fx.bf16(0.7640760))[0]


class Values(Case):
    BACKENDS = ("cpu", "reference")

    def outputs(self, checkpoint, activations, rows=None, ids=((0,),), weights=((1.0,),), options=(), token_ids=None):
        """The outputs of all rows, which every backend must agree about; {backend: [row, ...]} as one list."""
        checkpoint = checkpoint.write(self.path("ckpt")) if isinstance(checkpoint, fx.FX) else checkpoint
        rows = rows or [fx.one_hot()]
        fx.save_input(self.path("x"), rows, ids, weights, token_ids)
        seen = []
        for backend in self.BACKENDS:
            self.command(
                "run",
                checkpoint,
                "--layer",
                0,
                "--input",
                "x",
                "--output",
                "y",
                "--backend",
                backend,
                "--activations",
                activations,
                *options,
            )
            seen.append(fx.values_of(self.path("y"), "output"))
        for other in seen[1:]:
            self.assertTrue(close(other, seen[0], 2**-8), "backends disagree")
        width = len(seen[0]) // len(rows)
        return [seen[0][i : i + width] for i in range(0, len(seen[0]), width)]

    def all_equal(self, value, *arguments, **named):
        for row in self.outputs(*arguments, **named):
            self.assertEqual(set(row), {value})


class GlobalScales(Values):
    def test_fixture(self):
        self.all_equal(0.75, fx.FX(), "nvfp4")
        self.all_equal(BF16_H, fx.FX(), "bf16")

    def test_a1_conventions_and_shapes(self):
        for style in ("modelopt", "compressed-tensors"):
            for shape in ([], [1], [1, 1]):
                f = fx.FX(style=style)
                f.scalar_shape = shape
                self.all_equal(0.75, f, "nvfp4")
                self.all_equal(BF16_H, f, "bf16")

    def test_a2_gate_and_up_differ(self):
        for style in ("modelopt", "compressed-tensors"):
            f = fx.FX(style=style)
            f.globals[0]["up"] = 0.5
            self.all_equal(3.0, f, "nvfp4")
            self.all_equal(fx.from_bf16(fx.bf16(3.0563041))[0], f, "bf16")
            layer = self.json("inspect", "ckpt")["layers"][0]
            self.assertEqual(layer["global_pairs_differing"], 1)
            self.assertEqual(layer["global_ratio_max"], 4.0)

    def test_a4_every_expert_its_own(self):
        f = fx.FX()
        f.globals[1] = {"gate": 0.5, "up": 0.5, "down": 0.25}
        self.all_equal(4.125, f, "nvfp4", ids=[[1]])
        self.all_equal(0.75, f, "nvfp4", ids=[[0]])

    def test_b3_subnormal_scales(self):
        f = fx.FX()
        f.scales[0]["gate"][:] = b"\x01" * len(f.scales[0]["gate"])
        f.globals[0]["gate"] = 64.0
        self.all_equal(0.75, f, "nvfp4")
        self.all_equal(BF16_H, f, "bf16")


class Layout(Values):
    def test_c1_swapped_halves_are_seen(self):
        f = fx.FX()
        f.codes[0]["gate"], f.codes[0]["up"] = f.codes[0]["up"], f.codes[0]["gate"]
        self.all_equal(0.9375, f, "nvfp4")

    def test_c1_block_scales_stay_with_their_half(self):
        f = fx.FX()
        f.codes[0]["up"][:] = b"\x22" * len(f.codes[0]["up"])
        f.scales[0]["up"][:] = b"\x40" * len(f.scales[0]["up"])
        self.all_equal(0.75, f, "nvfp4")

    def test_c1_low_nibble_is_the_even_element(self):
        f = fx.FX()
        f.codes[0]["gate"][0:32] = b"\x72" * 32  # row 0: even elements 1.0, odd ones 6.0
        f.globals[0] = {"gate": 1.0, "up": 0.125, "down": 1.0}
        f.write(self.path("ckpt"))
        for position, gate in ((0, 6.0), (1, 36.0)):
            fx.save_input(self.path("x"), [fx.one_hot(position=position)], [[0]], [[1.0]])
            self.command(
                "run",
                "ckpt",
                "--layer",
                0,
                "--input",
                "x",
                "--output",
                "y",
                "--dump-stages",
                "s",
                "--activations",
                "nvfp4",
            )
            self.assertEqual(fx.values_of(self.path("s"), "l1")[0], gate)

    def test_shards_do_not_matter(self):
        self.outputs(fx.FX().write(self.path("one")), "nvfp4")
        fx.FX().write(self.path("three"), shards=3)
        fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
        for name in ("one", "three"):
            self.command("run", name, "--layer", 0, "--input", "x", "--output", name + ".y")
        self.assertEqual(contents(self.path("one.y")), contents(self.path("three.y")))


class Routing(Values):
    def test_d1_bias_stays_fp32(self):
        f = fx.FX()
        f.extra[f"{f.prefix}.gate.e_score_correction_bias"] = fx.tensor("F32", [2], fx.f32(6.90, 6.91))
        f.write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        for backend in self.BACKENDS:
            self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y", "--backend", backend)
            self.assertEqual(fx.values_of(self.path("y"), "expert_ids"), [1])
            self.assertEqual(fx.values_of(self.path("y"), "expert_weights"), [1.0])

    def test_d1_238_biases(self):
        f = fx.FX(experts=238, hidden=16, inner=16, top_k=8)
        biases = [6.817 + i * 0.001038 for i in range(238)]
        f.extra[f"{f.prefix}.gate.e_score_correction_bias"] = fx.tensor("F32", [238], fx.f32(*biases))
        f.write(self.path("ckpt"))
        fx.save_input(self.path("x"), [[1.0] * 16])
        self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y")
        self.assertEqual(fx.values_of(self.path("y"), "expert_ids"), list(range(237, 229, -1)))

    def test_d2_ties_go_to_the_lower_id(self):
        for experts, top_k in ((30, 8), (384, 6), (1, 1), (5, 5)):
            f = fx.FX(experts=experts, hidden=16, inner=16, top_k=top_k)
            f.write(self.path(f"e{experts}"))
            fx.save_input(self.path("x"), [[1.0] * 16, [-1.0] * 16])
            self.command("run", f"e{experts}", "--layer", 0, "--input", "x", "--output", "y")
            self.assertEqual(fx.values_of(self.path("y"), "expert_ids"), list(range(top_k)) * 2)

    def test_d3_nan_logits_unroute_one_token(self):
        f = fx.FX(experts=4, top_k=2)
        f.extra[f"{f.prefix}.gate.weight"] = fx.tensor(
            "BF16", [4, 64], fx.bf16(*[0.01 * (i % 7) for i in range(256)])
        )
        f.write(self.path("ckpt"))
        rows = [fx.one_hot(), [float("nan")] * 64, fx.one_hot(position=3)]
        fx.save_input(self.path("x"), rows)
        counters = self.json("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y")["counters"]
        self.assertEqual(counters["unrouted_tokens"], 1)
        self.assertEqual(fx.values_of(self.path("y"), "expert_ids")[2:4], [-1, -1])
        output = fx.values_of(self.path("y"), "output")
        self.assertEqual(set(output[64:128]), {0.0})
        fx.save_input(self.path("x"), [rows[0], rows[2]])
        self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y")
        self.assertEqual(fx.values_of(self.path("y"), "output"), output[:64] + output[128:])

    def test_d7_each_factor_once(self):
        f = fx.FX()
        f.config["routed_scaling_factor"] = 2.5
        self.all_equal(1.875, f, "nvfp4", ids=None, weights=None)
        self.all_equal(0.375, f, "nvfp4", weights=[[0.5]])
        after = fx.from_bf16(fx.bf16(0.75 * struct.unpack("f", fx.f32(0.3))[0]))[0]
        self.all_equal(after, f, "nvfp4", weights=[[0.3]])
        self.all_equal(0.234375, f, "nvfp4", weights=[[0.3]], options=["--routing-weight", "before"])

    def test_d7_the_factor_spares_the_shared_expert(self):
        f = fx.FX()
        f.config.update(routed_scaling_factor=2.5, n_shared_experts=1)
        for name, value in list(f.tensors().items()):
            if ".experts.0." in name:
                f.extra[name.replace(".experts.0.", ".shared_experts.")] = value
        self.all_equal(1.875 + 0.75, f, "nvfp4", ids=None, weights=None)

    def test_d8_hash_layers(self):
        f = fx.FX(experts=4, top_k=2)
        f.prefix = "layers.0.ffn"
        table = [[(i + 1) % 4, (i + 3) % 4] for i in range(8)]
        f.config.update(num_hash_layers=1, vocab_size=8)
        f.extra["layers.0.ffn.gate.tid2eid"] = fx.tensor("I64", [8, 2], fx.i64(*[e for row in table for e in row]))
        f.write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()] * 2, token_ids=[0, 7])
        self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y")
        self.assertEqual(fx.values_of(self.path("y"), "expert_ids"), table[0] + table[7])
        self.assertEqual(fx.values_of(self.path("y"), "expert_weights"), [0.5] * 4)
        for bad in (8, -1, 2147483647, 2**40):
            fx.save_input(self.path("x"), [fx.one_hot()] * 2, token_ids=[0, bad])
            self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "z", names=["token 1"])
        fx.save_input(self.path("x"), [fx.one_hot()])
        self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "z", names=["token_ids"])

    def test_d10_bad_expert_ids(self):
        f = fx.FX(experts=4, top_k=2)
        f.write(self.path("ckpt"))
        rows = [fx.one_hot()] * 5
        ids = [[-1, 0], [4, 1], [1000004, 0], [-2147483648, 2], [-1, -1]]
        fx.save_input(self.path("x"), rows, ids, [[0.5, 0.5]] * 5)
        self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "z", names=["token 1", "slot 0", "4"])
        counters = self.json(
            "run",
            "ckpt",
            "--layer",
            0,
            "--input",
            "x",
            "--output",
            "y",
            "--no-strict-routing",
            "--activations",
            "nvfp4",
        )["counters"]
        self.assertEqual((counters["bad_slots"], counters["skipped_slots"]), (3, 3))
        output = fx.values_of(self.path("y"), "output")
        self.assertEqual(set(output[: 4 * 64]), {0.375})
        self.assertEqual(set(output[4 * 64 :]), {0.0})

    def test_no_tokens(self):
        fx.FX().write(self.path("ckpt"))
        fx.save(self.path("x"), {"hidden": fx.tensor("BF16", [0, 64], b"")})
        self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y")
        self.assertEqual(fx.load(self.path("y"))["output"][1], [0, 64])


class Activation(Values):
    """E1 and E2: gate and up of one row are set through the block scales and codes of that row."""

    CASES = {
        (12, 3): 29.99864,
        (-12, 3): -0.0002211903,
        (3, 12): 28.57722,
        (3, -12): -28.57722,
        (-12, -12): 0.000737301,
        (12, 12): 99.99546,
    }

    def clamped(self, unit, limit=10.0):
        """Gate and up reach the wanted values as 12 = 6 * 2 and 3 = 6 * 0.5, under global scales of `unit`."""
        f = fx.FX()
        if limit is not None:
            f.config["swiglu_limit"] = limit
        for row, pair in enumerate(self.CASES):
            for projection, value in zip(("gate", "up"), pair):
                code = {12: 0x4, 3: 0x1, -12: 0xC, -3: 0x9}[value]
                f.codes[0][projection][row * 32 : row * 32 + 32] = bytes([code | code << 4]) * 32
        f.globals[0].update(gate=unit, up=unit)
        return f

    def test_e1_asymmetric_and_before_silu(self):
        for unit in (1.0, 0.125, 8.0):
            rows = self.outputs(self.clamped(unit), "bf16", rows=[fx.one_hot(value=6.0 / unit)])
            self.assertTrue(close(rows[0][:6], list(self.CASES.values()), 2**-8), rows[0][:6])

    def test_e1_no_limit(self):
        for limit in (None, 0.0):
            row = self.outputs(self.clamped(1.0, limit), "bf16")[0]
            self.assertTrue(close(row[:1], [12 * 3 / (1 + 2.718281828**-12)], 2**-8), row[:1])

    def test_e1_bad_limits(self):
        for limit in (-1.0, float("nan"), float("inf")):
            self.clamped(1.0, limit).write(self.path("ckpt"))
            fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
            self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "z")

    def test_e2_the_shared_expert_is_clamped_too(self):
        f = self.clamped(1.0)
        f.config["n_shared_experts"] = 1
        for name, value in list(f.tensors().items()):
            if ".experts.0." in name:
                f.extra[name.replace(".experts.0.", ".shared_experts.")] = value
        row = self.outputs(f, "bf16", ids=[[-1]], weights=[[0.0]])[0]
        self.assertTrue(close(row[:6], list(self.CASES.values()), 2**-8), row[:6])
        row = self.outputs(f, "bf16", ids=[[-1]], weights=[[0.0]], options=["--shared-unclamped"])[0]
        self.assertTrue(close(row[:1], [36.0], 2**-7), row[:1])

    def test_e5_blocks(self):
        """The layer's own input blocks: floor, rounding and saturation, as staged."""
        f = fx.FX()
        f.write(self.path("ckpt"))
        rows = [[0.0] * 64, fx.one_hot(value=0.001), fx.one_hot(value=0.006), fx.one_hot(value=3000.0)]
        fx.save_input(self.path("x"), rows, [[0]] * 4, [[1.0]] * 4)
        for backend in self.BACKENDS:
            counters = self.json(
                "run",
                "ckpt",
                "--layer",
                0,
                "--input",
                "x",
                "--output",
                "y",
                "--dump-stages",
                "s",
                "--activations",
                "nvfp4",
                "--input-global",
                "unit",
                "--backend",
                backend,
            )["counters"]
            codes, scales = fx.values_of(self.path("s"), "x_codes"), fx.values_of(self.path("s"), "x_scales")
            self.assertEqual([codes[32 * t] for t in range(4)], [0, 1, 5, 7])
            self.assertEqual([scales[4 * t] for t in range(4)], [0x01, 0x01, 0x01, 0x7E])
            self.assertGreaterEqual(counters["saturated_blocks"], 1)

    def test_e5_nonfinite_stays_in_its_row(self):
        for bad in (float("inf"), float("nan")):
            rows = self.outputs(
                fx.FX(),
                "nvfp4",
                rows=[fx.one_hot(), fx.one_hot(value=bad), fx.one_hot()],
                ids=[[0]] * 3,
                weights=[[1.0]] * 3,
            )
            self.assertEqual(set(rows[0] + rows[2]), {0.75})
            self.assertTrue(all(value != value for value in rows[1]))


class Bits(Case):
    def test_threads_do_not_change_bits(self):
        self.command("synth", "--shape", "tiny", "t")
        rows = [[((i * 37 + t * 11) % 101 - 50) / 9 for i in range(160)] for t in range(33)]
        fx.save_input(self.path("x"), rows, token_ids=list(range(33)))
        seen = set()
        for layer in (0, 3):
            for activations in ("bf16", "nvfp4"):
                seen.clear()
                for threads in (1, 2, 3, 7):
                    self.command(
                        "run",
                        "t",
                        "--layer",
                        layer,
                        "--input",
                        "x",
                        "--output",
                        "y",
                        "--threads",
                        threads,
                        "--activations",
                        activations,
                    )
                    seen.add(contents(self.path("y")))
                self.assertEqual(len(seen), 1)

    def test_f32_input_is_rounded_to_bf16(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot(value=6.001)], [[0]], [[1.0]], dtype="F32")
        self.command("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y", "--activations", "nvfp4")
        self.assertEqual(set(fx.values_of(self.path("y"), "output")), {0.75})


if __name__ == "__main__":
    unittest.main()
