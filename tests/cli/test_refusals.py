"""Damage, of themes A1, B1, B2, D, H1, H2 and H3: each kind has its answer by value, or one sentence and no output."""

import json
import os
import shutil
import struct
import subprocess
import time
import unittest

import fx
from command import MEGAMOE, Case, contents


class Refusals(Case):
    def attempt(self, checkpoint, activations="nvfp4", ids=((0,),), names=(), status=None, options=()):
        fx.save_input(self.path("x"), [fx.one_hot()] * len(ids), ids, [[1.0]] * len(ids))
        return self.refused(
            "run",
            checkpoint,
            "--layer",
            0,
            "--input",
            "x",
            "--output",
            "y",
            "--activations",
            activations,
            *options,
            names=names,
            status=status,
        )

    def output(self, checkpoint, activations="nvfp4", ids=((0,),), options=()):
        fx.save_input(self.path("x"), [fx.one_hot()] * len(ids), ids, [[1.0]] * len(ids))
        self.command(
            "run", checkpoint, "--layer", 0, "--input", "x", "--output", "y", "--activations", activations, *options
        )
        return set(fx.values_of(self.path("y"), "output"))


class Scales(Refusals):
    def test_a1_missing_global_scales(self):
        for style, name in (("compressed-tensors", "weight_global_scale"), ("modelopt", "weight_scale_2")):
            f = fx.FX(style=style)
            f.without = {key for key in f.tensors() if key.endswith(name)}
            self.attempt(f.write(self.path(style)), names=[name])

    def test_a1_both_conventions_that_disagree(self):
        f = fx.FX()
        f.extra[f"{f.prefix}.experts.1.up_proj.weight_global_scale"] = fx.tensor("F32", [1], fx.f32(3.0))
        self.attempt(f.write(self.path("ckpt")), ids=[[1]], names=["expert"])

    def test_b1_bad_input_scales(self):
        values = {
            "missing": None,
            "zero": 0.0,
            "denormal": 1e-40,
            "nan": float("nan"),
            "inf": float("inf"),
            "negative": -1.0,
        }
        for name, value in values.items():
            f = fx.FX()
            f.inputs[1]["gate"] = value
            f.write(self.path(name))
            self.attempt(name, names=["input_scale", "experts 1", "--input-global"])
            for options in (["--input-global", "token"], ["--input-global", "unit"]):
                self.assertEqual(self.output(name, options=options), {0.75})
            fx.FX().write(self.path("whole"))
            for expert in (0, 1):  # bf16 activations never look at input_scale: the same bits, and nothing said
                self.assertEqual(self.output(name, "bf16", ids=[[expert]]), self.output("whole", "bf16"))
                self.assertEqual(self.stderr, "")

    def test_b1_bad_intermediate_scale(self):
        f = fx.FX()
        f.inputs[1]["down"] = 0.0
        self.attempt(f.write(self.path("ckpt")), names=["down", "experts 1", "--intermediate-global"])
        self.assertEqual(self.output("ckpt", options=["--intermediate-global", "unit"]), {0.75})

    def test_b1_compressed_tensors(self):
        """The inverse: 0 would be an infinite scale, infinity a scale of 0."""
        for name, value in (("zero", 0.0), ("inf", float("inf")), ("nan", float("nan")), ("negative", -1.0)):
            f = fx.FX(style="compressed-tensors")
            key = f"{f.prefix}.experts.1.gate_proj.input_global_scale"
            f.extra[key] = fx.tensor("F32", [1], fx.f32(value))
            self.attempt(f.write(self.path(name)), names=["gate and up", "experts 1", "--input-global"])
            for options in (["--input-global", "token"], ["--input-global", "unit"]):
                for expert in (0, 1):
                    self.assertEqual(self.output(name, ids=[[expert]], options=options), {0.75})
            whole = fx.FX(style="compressed-tensors").write(self.path("whole"))
            for expert in (0, 1):
                self.assertEqual(self.output(name, "bf16", ids=[[expert]]), self.output(whole, "bf16"))

    def test_b1_an_expert_that_no_token_visits(self):
        """The scale is the layer's: refused whether or not a token goes to expert 1, and whether it is loaded."""
        f = fx.FX()
        f.inputs[1]["up"] = None
        f.write(self.path("ckpt"))
        self.attempt("ckpt", names=["experts 1"], options=["--experts", "0:1"])

    def nan_scale(self, code):
        f = fx.FX()
        f.scales[1]["down"][3 * 4 + 2] = 0x7F
        row = 3 * 32 + 2 * 8
        f.codes[1]["down"][row : row + 8] = bytes([code] + [0] * 7)
        return f

    def test_b2_nan_scale_is_refused_with_its_place(self):
        self.nan_scale(0).write(self.path("ckpt"))
        self.attempt(
            "ckpt",
            ids=[[1]],
            names=["experts.1.down_proj.weight_scale holds 1 NaN scales", "[3, 2]", "--repair-nan-scales"],
            status="CORRUPT_FILE",
        )
        self.command("inspect", "ckpt", "--scan", "--html", "page.html")
        kinds = {a["kind"]: a for a in self.json("inspect", "ckpt", "--scan")["anomalies"]}
        self.assertIn("nan-scale", kinds)
        self.assertEqual((kinds["nan-scale"]["layer"], kinds["nan-scale"]["expert"]), (0, 1))

    def test_b2_repaired(self):
        """Read as 448: nothing where the codes are zero, 448 times the code elsewhere; never 480, never NaN."""
        fx.FX().write(self.path("whole"))
        self.nan_scale(0).write(self.path("zeros"))
        self.nan_scale(2).write(self.path("one"))
        for backend in ("cpu", "reference"):
            for activations, h in (("nvfp4", 0.75), ("bf16", fx.from_bf16(fx.bf16(0.7640760))[0])):
                options = ["--repair-nan-scales", "--backend", backend]
                self.assertEqual(self.output("zeros", activations, [[1]], options), {h})
                repaired = fx.from_bf16(fx.bf16(448 * h + h))[0]  # column 32 of row 3, and the identity's own 1
                self.assertEqual(self.output("one", activations, [[1]], options), {h, repaired})
                values = fx.values_of(self.path("y"), "output")
                self.assertEqual((values[3], values.count(h)), (repaired, 63))
        kinds = {a["kind"]: a["detail"] for a in self.json("inspect", "one", "--scan")["anomalies"]}
        self.assertIn("[3, 2]", kinds["nan-scale"])

    def test_negative_scale(self):
        f = fx.FX()
        f.scales[1]["up"][5] = 0xB8
        self.attempt(f.write(self.path("ckpt")), ids=[[1]], names=["up_proj.weight_scale", "[1, 1]"])


class Headers(Refusals):
    """H1. Bad ones are refused; padded ones load."""

    def file(self, data):
        with open(self.path("f.safetensors"), "wb") as file:
            file.write(data)
        return "f.safetensors"

    def test_bad_lengths(self):
        body = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' + b"x"
        size = len(body) + 8
        for length in (2**64 - 1, 2**63, size, size - 7, 0, 1, 100 * 1000 * 1000 + 1):
            self.refused("inspect", self.file(struct.pack("<Q", length) + body), names=["f.safetensors"])
        for data in (b"", b"1234567", b"\0" * 8):
            self.refused("inspect", self.file(data), names=["f.safetensors"])

    def test_bad_syntax(self):
        nested = b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"
        one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
        twice = b"{" + one + b"," + one + b"}"
        for text in (b"x", b"[]", b"{", nested, b'{"a":1}', twice, b'{"a":{"dtype":"U8"}}'):
            self.refused("inspect", self.file(struct.pack("<Q", len(text)) + text + b"x"), names=["f.safetensors"])

    def test_padded_headers_load(self):
        tensors = fx.FX().tensors()
        for length in (99993, 99994, 100000, 100001, 1048576):
            fx.save(self.path("g.safetensors"), tensors)
            with open(self.path("g.safetensors"), "rb") as file:
                data = file.read()
            old = struct.unpack("<Q", data[:8])[0]
            self.file(struct.pack("<Q", length) + data[8 : 8 + old].ljust(length) + data[8 + old :])
            self.assertEqual(self.json("inspect", "f.safetensors")["layers"][0]["experts"], 2)


class Bytes(Refusals):
    """H2. Bytes on disk that disagree with the header."""

    def shard(self):
        fx.FX().write(self.path("ckpt"))
        return self.path("ckpt", "model-00001-of-00001.safetensors")

    def edit(self, change):
        path = self.shard()
        with open(path, "rb") as file:
            data = bytearray(file.read())
        length = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        change(header, body)
        with open(path, "wb") as file:
            file.write(fx.header_bytes(header) + bytes(body))

    def test_cut_and_trailing(self):
        for change in (lambda size: size - 1, lambda size: size // 2, lambda size: size + 1):
            path = self.shard()
            os.truncate(path, change(os.path.getsize(path)))
            self.attempt("ckpt", names=["model-00001-of-00001.safetensors"], status="CORRUPT_FILE")

    def test_offsets(self):
        name = "model.layers.0.mlp.experts.1.up_proj.weight"

        def offsets(begin, end):
            return lambda header, body: header[name].update(data_offsets=[begin, end])

        first = "model.layers.0.mlp.experts.0.gate_proj.weight"
        changes = [
            offsets(0, 2048),
            offsets(9000, 8000),
            offsets(0, 2**64 - 1),
            offsets(-5, 2043),
            lambda header, body: header[name].update(shape=[2**40, 2**40]),
            lambda header, body: header[name].update(shape=[64, 31]),
            lambda header, body: header[name].update(dtype="U7"),
            lambda header, body: header.pop(first),
        ]  # a hole
        for number, change in enumerate(changes):
            with self.subTest(number):
                self.edit(change)
                self.attempt("ckpt", names=["model-00001-of-00001.safetensors"])

    def test_weight_that_does_not_fit(self):
        f = fx.FX()
        f.extra[f"{f.prefix}.experts.1.up_proj.weight"] = fx.tensor("U8", [64, 31], b"\x44" * (64 * 31))
        self.attempt(f.write(self.path("ckpt")), ids=[[1]], names=["up_proj.weight"])

    def test_zero_size_tensors_are_legal(self):
        f = fx.FX()
        f.extra["empty"] = fx.tensor("F32", [0, 7], b"")
        self.assertEqual(self.output(f.write(self.path("ckpt"))), {0.75})


class Accounts(Refusals):
    """H3. Every tensor is accounted for."""

    def test_missing_shard(self):
        fx.FX().write(self.path("ckpt"), shards=3)
        os.remove(self.path("ckpt", "model-00002-of-00003.safetensors"))
        self.attempt("ckpt", names=["model-00002-of-00003.safetensors"])

    def test_index_and_shards_disagree(self):
        fx.FX().write(self.path("ckpt"), shards=3)
        path = self.path("ckpt", "model-00002-of-00003.safetensors")
        tensors = fx.load(path)
        lost = sorted(tensors)[0]
        fx.save(path, {name: value for name, value in tensors.items() if name != lost})
        self.attempt("ckpt", names=[lost])

    def test_tensor_outside_the_index(self):
        fx.FX().write(self.path("ckpt"))
        path = self.path("ckpt", "model.safetensors.index.json")
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        gone = "model.layers.0.mlp.experts.1.down_proj.weight_scale"
        del index["weight_map"][gone]
        with open(path, "w", encoding="utf-8") as file:
            json.dump(index, file)
        self.attempt("ckpt", names=[gone])

    def test_misspelled_scale(self):
        f = fx.FX()
        name = f"{f.prefix}.experts.1.down_proj.weight_scale"
        f.extra[name + "2"] = f.tensors()[name + "_2"]
        f.without = {name + "_2"}
        self.attempt(
            f.write(self.path("ckpt")), ids=[[1]], names=["expert 1", f"{f.prefix}.experts.1.down_proj.weight"]
        )

    def test_expert_counts(self):
        f = fx.FX()
        f.config["n_routed_experts"] = 3  # alone against the tensors: they decide, and strictness refuses
        self.assertEqual(self.output(f.write(self.path("config"))), {0.75})
        self.attempt("config", options=["--strict"], names=["2", "3"])
        self.assertIn("config-contradiction", [a["kind"] for a in self.json("inspect", "config")["anomalies"]])
        f.extra[f"{f.prefix}.gate.weight"] = fx.tensor("BF16", [3, 64], fx.bf16(*[0.0] * 192))
        self.attempt(f.write(self.path("more")), names=["2", "3"])
        f = fx.FX(experts=3)
        f.config["n_routed_experts"] = 2
        f.extra[f"{f.prefix}.gate.weight"] = fx.tensor("BF16", [2, 64], fx.bf16(*[0.0] * 128))
        self.attempt(f.write(self.path("fewer")), names=["2", "3"])

    def test_stray_files(self):
        f = fx.FX()
        f.write(self.path("ckpt"))
        fx.save(self.path("ckpt", "model.safetensors"), {"other": fx.tensor("F32", [1], fx.f32(1.0))})
        os.mkdir(self.path("ckpt", "x.safetensors"))
        self.assertEqual(self.output("ckpt"), {0.75})

    def test_layers_there_are(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        self.refused("run", "ckpt", "--layer", 7, "--input", "x", "--output", "y", names=["7", "0"])
        self.refused("check", "ckpt", "--layer", 7, names=["7"])
        self.refused("inspect", "ckpt", "--layer", 7, names=["7"])


class Inputs(Refusals):
    def test_bad_inputs(self):
        fx.FX().write(self.path("ckpt"))
        hidden = fx.tensor("BF16", [1, 64], fx.bf16(*fx.one_hot()))
        cases = [
            ({}, ["x has no tensor 'hidden'", "no tensors"]),
            ({"states": hidden}, ["x has no tensor 'hidden'", "states"]),
            ({"hidden": fx.tensor("BF16", [1, 32], fx.bf16(*[0.0] * 32))}, ["[1, 32]", "[1, 64]"]),
            ({"hidden": fx.tensor("F16", [1, 64], bytes(128))}, ["BF16 or F32"]),
            ({"hidden": hidden, "expert_ids": fx.tensor("I32", [1, 1], fx.i32(0))}, ["expert_weights"]),
            (
                {
                    "hidden": hidden,
                    "expert_ids": fx.tensor("I32", [2, 1], fx.i32(0, 0)),
                    "expert_weights": fx.tensor("F32", [2, 1], fx.f32(1, 1)),
                },
                ["[2, 1]", "[1, 1]"],
            ),
            (
                {
                    "hidden": hidden,
                    "expert_ids": fx.tensor("F32", [1, 1], fx.f32(0)),
                    "expert_weights": fx.tensor("F32", [1, 1], fx.f32(1)),
                },
                ["expert_ids", "I32"],
            ),
            ({"hidden": hidden, "token_ids": fx.tensor("I64", [3], fx.i64(1, 2, 3))}, ["token_ids", "[3]", "[1]"]),
        ]
        for tensors, names in cases:
            fx.save(self.path("x"), tensors)
            self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "y", names=names)

    def test_output_that_cannot_be_written(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        self.refused("run", "ckpt", "--layer", 0, "--input", "x", "--output", "no/such/y", names=["no/such/y"])

    def test_no_file_replaces_another(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        os.link(self.path("x"), self.path("link"))
        before = contents(self.path("x"))
        run = ("run", "ckpt", "--layer", 0, "--input", "x")
        for output in ("x", "./x", self.path("x"), "link"):
            self.refused(*run, "--output", output, names=["--output", "the input x"])
            self.refused(*run, "--output", "y", "--dump-stages", output, names=["--dump-stages", "the input x"])
        self.refused(*run, "--output", "y", "--dump-stages", "y", names=["--output", "--dump-stages", "y"])
        self.assertEqual(contents(self.path("x")), before)

    def test_no_file_replaces_one_of_the_checkpoint(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        shard = next(name for name in os.listdir(self.path("ckpt")) if name.endswith(".safetensors"))
        os.symlink(self.path("ckpt", shard), self.path("link"))
        before = contents(self.path("ckpt", shard))
        for checkpoint, file in (("ckpt", f"ckpt/{shard}"), (f"ckpt/{shard}", "link"), ("ckpt", "ckpt/config.json")):
            names = [f"would replace {file}, a file of the checkpoint"]
            self.refused("run", checkpoint, "--layer", 0, "--input", "x", "--output", file, names=["--output", *names])
            self.refused("inspect", checkpoint, "--html", file, names=["--html", *names])
            self.refused("bench", checkpoint, "--csv", file, names=["--csv", *names])
        self.assertEqual(contents(self.path("ckpt", shard)), before)

    def test_the_output_is_written_last(self):
        fx.FX().write(self.path("ckpt"))
        fx.save_input(self.path("x"), [fx.one_hot()])
        run = ("run", "ckpt", "--layer", 0, "--input", "x")
        self.refused(*run, "--output", "y", "--dump-stages", "no/s", names=["no/s cannot be written: No such file"])

    def test_existing_output_of_synth_is_kept(self):
        self.command("synth", "--shape", "tiny", "t")
        self.refused("synth", "--shape", "tiny", "t", names=["t exists"])

    def test_a_file_that_shrinks_while_it_is_read(self):
        """Before a run it is a status, within one a signal; the command ends with a sentence either way."""
        work_for_a_minute = ",".join(str(count) for count in range(1, 100))
        for delay in (0, 0.3, 1.5):
            self.command("synth", "--shape", "H=1024,I=1024,E=8,K=2", "c")
            shard = next(name for name in os.listdir(self.path("c")) if name.endswith(".safetensors"))
            work = subprocess.Popen([MEGAMOE, "bench", self.path("c"), "--tokens", work_for_a_minute],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            maps = f"/proc/{work.pid}/maps"
            while work.poll() is None and shard not in contents(maps).decode():
                time.sleep(0.01)
            time.sleep(delay)
            os.truncate(self.path("c", shard), 4096)
            _, stderr = work.communicate(timeout=300)
            self.assertEqual(work.returncode, 2, stderr)
            self.assertTrue(stderr.startswith("megamoe: ") and stderr.count("\n") == 1, stderr)
            shutil.rmtree(self.path("c"))


if __name__ == "__main__":
    unittest.main()
