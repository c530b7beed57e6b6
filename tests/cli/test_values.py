"""Values that are known by hand: themes A, B3, C1, D and E of the public reports, on every host backend."""

import struct
import unittest

import fx
from command import Case, close, contents

BF16_H = fx.from_bf16(fx.bf16(0.7640760))[0]


def close_rows(got, want):
    """As a whole, to half a percent of the norm."""
    error = sum((g - w) ** 2 for g, w in zip(got, want))
    return error <= 0.005**2 * sum(w * w for w in want)


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


class PowersOfTwo(Values):
    """B5: E8M0 scales of an MXFP4 layer, by value, at both ends of the range."""

    def layer(self, byte, spelling="F8_E8M0"):
        """One expert of relu2, so that h is the square of up; row 0 of up has `byte` in its first group of 32."""
        prefix, tensors = "backbone.layers.0.mixer", {}
        scales = bytearray(b"\x7f" * 128)
        scales[0] = byte
        for name, codes, exponents in (
            ("up_proj", b"\x22" * 2048, scales),
            ("down_proj", fx.identity_codes(64), b"\x7f" * 128),
        ):
            base = f"{prefix}.experts.0.{name}"
            tensors[f"{base}.weight"] = fx.tensor("I8", [64, 32], codes)
            if spelling == "F32":
                exponents = fx.f32(*[2.0 ** (b - 127) for b in exponents])
            tensors[f"{base}.scale"] = fx.tensor(spelling, [64, 2], exponents)
        tensors[f"{prefix}.gate.weight"] = fx.tensor("BF16", [1, 64], bytes(128))
        config = {
            "model_type": "nemotron_h",
            "mlp_hidden_act": "relu2",
            "hidden_size": 64,
            "moe_intermediate_size": 64,
            "n_routed_experts": 1,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 1,
        }
        fx.save_sharded(self.path("mx"), [tensors], config)
        return self.path("mx")

    def l1(self, checkpoint, value, backend, isa):
        fx.save_input(self.path("x"), [fx.one_hot(value=value)], [[0]], [[1.0]])
        arguments = ("--layer", 0, "--input", "x", "--output", "y", "--dump-stages", "s", "--backend", backend)
        self.command("run", checkpoint, *arguments, "--activations", "bf16", env={"MEGAMOE_ISA": isa})
        return fx.values_of(self.path("s"), "l1")[64:]  # behind the gate that relu2 has not

    def test_b5_every_scale(self):
        for byte in (0x00, 0x01, 0x67, 0x70, 0x78, 0x7F, 0x80, 0xFE):
            for spelling in ("F8_E8M0", "U8", "F32"):
                checkpoint = self.layer(byte, spelling)
                for backend, isa in (("reference", "amx"), ("cpu", "scalar"), ("cpu", "avx2"), ("cpu", "amx")):
                    with self.subTest(byte=byte, spelling=spelling, backend=backend, isa=isa):
                        up = self.l1(checkpoint, 1.0, backend, isa)
                        self.assertEqual(set(up[1:]), {1.0})
                        want = 2.0 ** (byte - 127)
                        # The report allows a flush after the multiplication only; numerics.md takes values below
                        # 2^-126 for zero, and the vector levels flush the weight itself.
                        flushes = byte == 0 and isa != "scalar" and backend == "cpu"
                        self.assertIn(up[0], (want, 0.0) if flushes else (want,))

    def test_b5_nan_scale(self):
        for spelling in ("F8_E8M0", "U8"):
            checkpoint = self.layer(0xFF, spelling)
            fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
            arguments = ("run", checkpoint, "--layer", 0, "--input", "x", "--output", "y")
            self.refused(*arguments, names=["up_proj.scale", "[0, 0]", "0xFF"], status="CORRUPT_FILE")
            self.refused(*arguments, "--repair-nan-scales", names=["[0, 0]"])


class Stacks(Values):
    """C2: the same layer as one stack, its rows interleaved or in halves as the model has them."""

    def stack(self, model_type, interleaved, unit=1.0):
        f = fx.FX()
        f.config.update(model_type=model_type, num_experts=2)
        single, tensors = f.tensors(), {}
        experts = f"{f.prefix}.experts"

        def rows(part, width):
            out = b""
            for e in range(2):
                gate, up = (single[f"{experts}.{e}.{p}_proj.{part}"][2] for p in ("gate", "up"))
                halves = [[d[i : i + width] for i in range(0, len(d), width)] for d in (gate, up)]
                out += b"".join(g + u for g, u in zip(*halves)) if interleaved else gate + up
            return out

        def both(part):
            return b"".join(single[f"{experts}.{e}.down_proj.{part}"][2] for e in range(2))

        tensors[f"{experts}.gate_up_proj"] = fx.tensor("U8", [2, 128, 32], rows("weight", 32))
        tensors[f"{experts}.gate_up_proj_weight_scale"] = fx.tensor("F8_E4M3", [2, 128, 4], rows("weight_scale", 4))
        tensors[f"{experts}.gate_up_proj_weight_scale_2"] = fx.tensor("F32", [2], fx.f32(0.125 * unit, 0.125 * unit))
        tensors[f"{experts}.gate_up_proj_input_scale"] = fx.tensor("F32", [2], fx.f32(1.0, 1.0))
        tensors[f"{experts}.down_proj"] = fx.tensor("U8", [2, 64, 32], both("weight"))
        tensors[f"{experts}.down_proj_weight_scale"] = fx.tensor("F8_E4M3", [2, 64, 4], both("weight_scale"))
        tensors[f"{experts}.down_proj_weight_scale_2"] = fx.tensor("F32", [2], fx.f32(unit, unit))
        tensors[f"{experts}.down_proj_input_scale"] = fx.tensor("F32", [2], fx.f32(1.0, 1.0))
        tensors[f"{f.prefix}.gate.weight"] = single[f"{f.prefix}.gate.weight"]
        fx.save_sharded(self.path("stack"), [tensors], f.config)
        return self.path("stack")

    def test_c2_halves_and_interleaved(self):
        self.all_equal(0.75, self.stack("qwen3_moe", False), "nvfp4")
        self.all_equal(BF16_H, self.stack("qwen3_moe", False), "bf16")
        # in the wrong order half the gates are ups, and half the rows are 1.5 * silu(1.5)
        wrong = set(self.outputs(self.stack("qwen3_moe", True), "nvfp4")[0])
        self.assertNotEqual(wrong, {0.75})

    def test_c2_interleaved(self):
        """gpt-oss has its own alpha and beta: gate 0.75, up 1.5: 0.75 sigmoid(1.702 * 0.75) * 2.5."""
        h = fx.from_bf16(fx.bf16(0.75 / (1 + 2.718281828459045 ** (-1.702 * 0.75)) * 2.5))[0]
        self.all_equal(h, self.stack("gpt_oss", True), "bf16")

    def test_c2_small_outputs_are_judged_by_themselves(self):
        """All global scales times 2^-16: h is gate * up / 2 to 2^-17, and an absolute tolerance would pass zeros."""
        unit = 2.0**-16
        row = self.outputs(self.stack("qwen3_moe", False, unit), "bf16")[0]
        self.assertTrue(close(row, [0.75 * unit * 1.5 * unit / 2 * unit] * 64, 2**-8), row[0])

    def test_c2_unknown_model_is_refused(self):
        fx.save_input(self.path("x"), [fx.one_hot()], [[0]], [[1.0]])
        arguments = ("run", self.stack("new_model", False), "--layer", 0, "--input", "x", "--output", "y")
        self.refused(*arguments, names=["new_model", "gpt_oss", "qwen3_moe"], status="UNSUPPORTED_MODEL")


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

    def test_d7_weight_before_l2_with_two_slots(self):
        """The report would have it refused; numerics.md weights h, which is as good for any K: two halves of 0.3."""
        f = fx.FX(experts=2, top_k=2)
        one = fx.FX()
        before = ["--routing-weight", "before"]
        single = self.outputs(one, "nvfp4", weights=[[0.3]], options=before)[0]
        double = self.outputs(f, "nvfp4", ids=[[0, 1]], weights=[[0.3, 0.3]], options=before)[0]
        self.assertEqual(set(double), {2 * single[0]})
        self.assertEqual(single[0], 0.234375)

    def test_d5_vanishing_scores_leave_the_shared_expert(self):
        """Every sigmoid is 0: weights 0, routed output exactly 0, and nothing of 0 / 0."""
        f = fx.FX(experts=8, top_k=2)
        f.config.update(
            model_type="deepseek_v3", scoring_func="sigmoid", routed_scaling_factor=2.5, n_shared_experts=1
        )
        # logits 6 * -20 for the first token, 6 * 0.25 for the second
        rows = [value for _ in range(8) for value in [-20.0, 0.25] + [0.0] * 62]
        f.extra[f"{f.prefix}.gate.weight"] = fx.tensor("BF16", [8, 64], fx.bf16(*rows))
        biases = [0.1, 0.7, 0.3, 0.2, 0.9, 0.4, 0.5, 0.6]
        f.extra[f"{f.prefix}.gate.e_score_correction_bias"] = fx.tensor("F32", [8], fx.f32(*biases))
        tokens = [fx.one_hot(), fx.one_hot(position=1)]
        routed = self.outputs(f, "nvfp4", rows=tokens, ids=None, weights=None)
        self.assertEqual(fx.values_of(self.path("y"), "expert_ids"), [4, 1, 4, 1])
        self.assertEqual(fx.values_of(self.path("y"), "expert_weights"), [0.0, 0.0, 1.25, 1.25])
        self.assertEqual((set(routed[0]), set(routed[1])), ({0.0}, {1.875}))
        for name, value in list(f.tensors().items()):
            if ".experts.0." in name:
                f.extra[name.replace(".experts.0.", ".shared_experts.")] = value
        both = self.outputs(f, "nvfp4", rows=tokens, ids=None, weights=None)
        self.assertEqual((set(both[0]), set(both[1])), ({0.75}, {2.625}))

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

    def test_e5_blocks_of_the_intermediate(self):
        """The same between L1 and L2, where h is up squared under relu2 and the scale of down is 1."""
        cases = {0.0: 0.0, 0.001: 0.0009765625, 0.006: 0.005859375, 3000.0: 2688.0}
        f = fx.FX()
        f.config.update(model_type="nemotron_h", mlp_hidden_act="relu2")
        f.prefix = "backbone.layers.0.mixer"
        f.without = {name for name in f.tensors() if "gate_proj" in name}
        for e in range(2):
            f.codes[e]["up"][:] = b"\x22" * len(f.codes[e]["up"])
            f.globals[e]["up"] = 1.0
        for h, stored in cases.items():
            x = fx.from_bf16(fx.bf16(h**0.5))[0]
            for backend in self.BACKENDS:
                f.write(self.path("ckpt"))
                fx.save_input(self.path("x"), [fx.one_hot(value=x)], [[0]], [[1.0]])
                arguments = ("--layer", 0, "--input", "x", "--output", "y", "--backend", backend)
                options = ("--activations", "nvfp4", "--input-global", "token", "--dump-stages", "s")
                report = self.json("run", "ckpt", *arguments, *options)
                up = fx.values_of(self.path("s"), "l1")[64]
                self.assertTrue(abs(up * up - h) <= 0.05 * h, up)
                self.assertEqual(set(fx.values_of(self.path("y"), "output")), {stored})
                self.assertEqual(report["counters"]["saturated_blocks"], 4 if h == 3000 else 0)

    def test_e5_token_of_zeros(self):
        """Its own global scale is 1, not 0: finite, and zero."""
        for options in ([], ["--input-global", "token"]):
            rows = self.outputs(
                fx.FX(),
                "nvfp4",
                rows=[[0.0] * 64, fx.one_hot()],
                ids=[[0]] * 2,
                weights=[[1.0]] * 2,
                options=options,
            )
            self.assertEqual((set(rows[0]), set(rows[1])), ({0.0}, {0.75}))

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


class Ranks(Values):
    def test_f4_the_static_scale_is_the_layers(self):
        """input_scale [1, 1, 4, 1]: a token is staged under 4 whatever experts are loaded, and whatever it visits."""
        f = fx.FX(experts=4)
        f.inputs[2].update(gate=4.0, up=4.0)
        f.write(self.path("ckpt"))
        small = 0.0029296875
        for experts, expert in (("0:4", 0), ("0:1", 0), ("0:2", 1), ("2:4", 3), ("3:4", 3), ("2:3", 2)):
            fx.save_input(self.path("x"), [[small] * 64], [[expert]], [[1.0]])
            for backend in self.BACKENDS:
                arguments = ("--layer", 0, "--input", "x", "--output", "y", "--dump-stages", "s")
                options = ("--activations", "nvfp4", "--experts", experts, "--backend", backend)
                self.command("run", "ckpt", *arguments, *options)
                self.assertEqual(fx.values_of(self.path("s"), "x_globals"), [4.0])
                self.assertEqual(set(fx.values_of(self.path("s"), "x_scales")), {0x01})
                # 0.5 * 2^-9 * 4 = 0.00390625; a rank that saw only its own scale of 1 would store 0.0029296875
                self.assertEqual(set(fx.values_of(self.path("s"), "x_codes")), {0x11})


class Bits(Case):
    def test_batch_invariant(self):
        """G4: eight tokens alone and inside larger batches; the flag is what makes them the same bits."""
        self.command("synth", "--shape", "tiny", "t")
        rows = [[((i * 41 + t * 13) % 103 - 51) / 8 for i in range(160)] for t in range(257)]

        def outputs(first, count, *options):
            fx.save_input(self.path("x"), rows[first : first + count])
            self.command("run", "t", "--layer", 3, "--input", "x", "--output", "y", *options)
            return fx.load(self.path("y"))["output"][2]

        for activations in ("bf16", "nvfp4"):
            options = ("--activations", activations, "--batch-invariant")
            whole = outputs(0, 257, *options)
            for first, count in ((0, 8), (0, 16), (100, 64), (249, 8), (256, 1)):
                part = outputs(first, count, *options)
                self.assertEqual(part, whole[first * 320 : (first + count) * 320])
            # without it still the same numbers, to what fp32 sums are good for
            alone, inside = outputs(0, 8, "--activations", activations), outputs(0, 64, "--activations", activations)
            self.assertTrue(close_rows(fx.from_bf16(alone), fx.from_bf16(inside[: 8 * 320])))


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
