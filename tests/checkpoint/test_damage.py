#!/usr/bin/env python3
"""Damage, as a table: what is broken, the status it must be refused with, and what the sentence must name."""

import json
import os
import resource
import struct
import subprocess
import sys
import unittest

import numpy as np

import make_model as make
from support import CORRUPT, DUMP, INVALID, IO, UNSUPPORTED, Case, dump

P = "model.layers.1.mlp"


# ---- bytes: one file, built by hand ------------------------------------------------------------------------


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=None, dtype="U8", **more):
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


GOOD = {"a": entry(0, 4), "b": entry(4, 10)}
TEN = bytes(range(10))
NESTED = b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"

BAD_FILES = {  # name: (bytes, substrings beside the file's name)
    "empty file": (b"", ["0 bytes"]),
    "seven bytes": (b"\x02\0\0\0\0\0\0", ["7 bytes"]),
    "eight bytes": (b"\x02\0\0\0\0\0\0\0", ["8 bytes"]),
    "length 2^64-1": (file_of(GOOD, TEN, 2**64 - 1), ["18446744073709551615"]),
    "length 2^63": (file_of(GOOD, TEN, 2**63), ["9223372036854775808"]),
    "length of the file": (file_of(b"{}", b"x" * 90, 100), ["100"]),
    "length of all the rest, not JSON to the end": (file_of(b"{}", b"x" * 90, 92), ["more follows"]),
    "length 0": (file_of(GOOD, TEN, 0), ["0 bytes"]),
    "length 1": (file_of(GOOD, TEN, 1), ["1 bytes"]),
    "not an object": (file_of(b"[1, 2]"), ["'{'"]),
    "a space before the brace": (file_of(b" {}"), ["'{'"]),
    "200 levels": (file_of(NESTED), ["tensor a", "object"]),
    "200 levels of metadata": (file_of(b'{"__metadata__":' + NESTED + b"}"), ["too deeply"]),
    "not UTF-8": (file_of(b'{"\xff":{}}'), ["UTF-8"]),
    "an overlong slash": (file_of(b'{"\xc0\xaf":{}}'), ["UTF-8"]),
    "half a surrogate pair": (file_of(b'{"\\ud800":{}}'), ["surrogate"]),
    "a NUL in a name": (file_of(b'{"a\\u0000":{}}'), ["NUL"]),
    "NUL padding": (file_of(json.dumps(GOOD).encode() + b"\0\0", TEN), ["more follows"]),
    "a trailing comma": (
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}', b"x"),
        ["string"],
    ),
    "cut JSON": (file_of(b'{"a":{"dtype":"U8"'), ["tensor a", "too early"]),
    "one byte too many": (file_of(GOOD, TEN + b"x"), ["byte 10", "byte 11"]),
    "one byte too few": (file_of(GOOD, TEN[:-1]), ["tensor b", "[4, 10]", "9 bytes"]),
    "overlap": (file_of({"a": entry(0, 6), "b": entry(4, 10)}, TEN), ["tensor b", "byte 4", "tensor a", "6"]),
    "the same range twice": (
        file_of({"a": entry(0, 10), "b": entry(0, 10)}, TEN),
        ["begins at byte 0", "10"],
    ),
    "a hole": (file_of({"a": entry(0, 4), "b": entry(5, 10)}, TEN), ["bytes 4 to 5", "tensor b"]),
    "a hole at the start": (file_of({"a": entry(1, 10)}, TEN), ["bytes 0 to 1"]),
    "end before begin": (file_of({"a": entry(4, 0, [4]), "b": entry(4, 10)}, TEN), ["tensor a", "[4, 0]"]),
    "end 2^64-1": (
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}}', b"x"),
        ["tensor a", "63 bits"],
    ),
    "end past the file": (file_of({"a": entry(0, 2**62)}, TEN), ["tensor a", str(2**62)]),
    "negative offset": (file_of({"a": entry(-1, 10)}, TEN), ["tensor a", "whole number"]),
    "fractional offset": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.5]}}, b"x"),
        ["tensor a"],
    ),
    "three offsets": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x"),
        ["tensor a"],
    ),
    "one offset": (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1]}}, b"x"), ["tensor a"]),
    "no offsets": (file_of({"a": {"dtype": "U8", "shape": [1]}}, b"x"), ["tensor a", "data_offsets"]),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"), ["tensor a", "dtype"]),
    "no shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"), ["tensor a", "shape"]),
    "shape over four bytes": (
        file_of({"a": entry(0, 4, [1000, 1000])}, b"abcd"),
        ["tensor a", "[1000, 1000]", "4"],
    ),
    "product past 64 bits": (file_of({"a": entry(0, 0, [2**33, 2**33])}), ["tensor a", "64 bits"]),
    "product that wraps to the size": (
        file_of({"a": entry(0, 4, [2**62 + 1, 4])}, b"abcd"),
        ["tensor a", "64 bits"],
    ),
    "size in bits past 64": (
        file_of({"a": entry(0, 8, [2**61 + 1], "F64")}, b"a" * 8),
        ["tensor a", "64 bits"],
    ),
    "unknown dtype": (file_of({"a": entry(0, 4, dtype="F8_E9M9")}, b"abcd"), ["tensor a", "F8_E9M9"]),
    "unknown dtype, bad offsets": (file_of({"a": entry(0, 400, dtype="F8_E9M9")}, b"abcd"), ["tensor a"]),
    "half a byte": (file_of({"a": entry(0, 2, [3], "F4")}, b"ab"), ["tensor a", "F4"]),
    "duplicate tensor": (
        file_of(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"xy",
        ),
        ["duplicate", "a"],
    ),
    "duplicate key in an entry": (
        file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        ["tensor a", "duplicate"],
    ),
    "33 dimensions": (file_of({"a": entry(0, 1, [1] * 33)}, b"x"), ["tensor a", "32"]),
}

PADDED = [99_993, 99_994, 100_000, 100_001, 1_048_576]


class Files(Case):
    def file(self, data):
        path = os.path.join(self.folder.name, "x.safetensors")
        with open(path, "wb") as file:
            file.write(data)
        return path

    def test_bad_files(self):
        for name, (data, substrings) in BAD_FILES.items():
            with self.subTest(name):
                self.assert_refused(dump(self.file(data)), CORRUPT, "x.safetensors", *substrings)

    def test_header_above_the_limit(self):
        path = self.file(file_of(GOOD, TEN, 100_000_001))
        os.truncate(path, 200_000_000)
        self.assert_refused(dump(path), CORRUPT, "100000001", "200000000")

    def test_bad_headers_cost_nothing(self):
        for length in (2**64 - 1, 2**63, 100_000_001, 90_000_000):
            path = self.file(struct.pack("<Q", length) + b'{"a":1')
            os.truncate(path, 200_000_000)
            run = subprocess.run(
                [DUMP, path],
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=None if os.environ.get("MEGAMOE_INSTRUMENTED") else limit_memory,
            )
            self.assert_refused(json.loads(run.stdout), CORRUPT, "x.safetensors")

    def test_padded_headers(self):
        for size in PADDED:
            text = json.dumps(GOOD).encode()
            path = self.file(file_of(text + b" " * (size - len(text)), TEN))
            self.assertNotIn("error", dump(path), size)
            self.assertEqual(dump("--tensor", "b", path), {"dtype": 8, "shape": [6]})

    def test_accepted(self):
        for name, header, data in (
            (
                "zero-size tensors",
                {"a": entry(0, 0, [0, 5]), "b": entry(0, 3), "c": entry(3, 3, [0])},
                b"abc",
            ),
            ("any order", {"b": entry(4, 10), "a": entry(0, 4)}, TEN),
            ("no tensors", {}, b""),
            ("metadata", {"__metadata__": {"format": "pt"}, **GOOD}, TEN),
            (
                "keys of others",
                {"a": entry(0, 10, note={"x": [1, -2.5e3, None, True, "\u00e9\U0001f600"]})},
                TEN,
            ),
            ("five dimensions", {"a": entry(0, 10, [1, 1, 1, 2, 5])}, TEN),
            ("names in any script", {"\u540d\u524d": entry(0, 10)}, TEN),
        ):
            with self.subTest(name):
                self.assertNotIn("error", dump(self.file(file_of(header, data))))

    def test_escaped_name(self):
        path = self.file(
            file_of(b'{"\\u00e9\\ud83d\\ude00\\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
        )
        self.assertEqual(dump("--tensor", "\u00e9\U0001f600\n", path)["shape"], [1])

    def test_not_a_file(self):
        self.assert_refused(dump(self.folder.name + "/absent"), IO, "absent")
        self.assert_refused(dump(self.folder.name), IO, "no .safetensors")
        os.mkfifo(self.folder.name + "/pipe")
        self.assert_refused(dump(self.folder.name + "/pipe"), IO, "pipe")


def limit_memory():
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 22, 1 << 22))


# ---- shards and index --------------------------------------------------------------------------------------


def index_edit(change):
    def edit(path):
        name = os.path.join(path, "model.safetensors.index.json")
        with open(name, encoding="utf-8") as file:
            index = json.load(file)
        change(index)
        with open(name, "w", encoding="utf-8") as file:
            json.dump(index, file)

    return edit


def shard(number):
    return f"model-{number:05}-of-00003.safetensors"


def only_index(path, keep=None):
    """Without the index."""
    os.remove(os.path.join(path, "model.safetensors.index.json"))
    if keep:
        keep(path)


def add_tensor(path, name=shard(1), tensor="extra"):
    """Writes a tensor into a shard behind the index's back."""
    file = os.path.join(path, name)
    with open(file, "rb") as stream:
        data = stream.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    end = len(data) - 8 - size
    header[tensor] = entry(end, end + 1)
    with open(file, "wb") as stream:
        stream.write(file_of(header, data[8 + size :] + b"x"))


BAD_SETS = {  # name: (damage to a folder of three shards, status, substrings)
    "shard missing": (lambda p: os.remove(f"{p}/{shard(2)}"), CORRUPT, [shard(2), "not in the directory"]),
    "shard cut": (
        lambda p: os.truncate(f"{p}/{shard(2)}", os.path.getsize(f"{p}/{shard(2)}") - 1),
        CORRUPT,
        [shard(2)],
    ),
    "tensor missing in its shard": (
        index_edit(lambda i: i["weight_map"].update({"ghost": shard(1)})),
        CORRUPT,
        ["1 tensors", "in no shard", "ghost"],
    ),
    "many missing tensors": (
        index_edit(lambda i: i["weight_map"].update({f"ghost{n:02}": shard(1) for n in range(15)})),
        CORRUPT,
        ["15 tensors", "ghost00", "ghost09", "..."],
    ),
    "tensor missing in the index": (add_tensor, CORRUPT, ["1 tensors", "not in", "extra"]),
    "tensor in another shard": (
        index_edit(
            lambda i: i["weight_map"].update(
                {f"{P}.gate.weight": shard(1 if i["weight_map"][f"{P}.gate.weight"] != shard(1) else 2)}
            )
        ),
        CORRUPT,
        ["another shard", f"{P}.gate.weight"],
    ),
    "shard outside": (
        index_edit(lambda i: i["weight_map"].update({f"{P}.gate.weight": "../x.safetensors"})),
        CORRUPT,
        ["../x.safetensors"],
    ),
    "no weight_map": (index_edit(lambda i: i.pop("weight_map")), CORRUPT, ["weight_map"]),
    "weight_map is a list": (
        index_edit(lambda i: i.update(weight_map=[])),
        CORRUPT,
        ["index.json", "object"],
    ),
    "file is a number": (
        index_edit(lambda i: i["weight_map"].update(x=3)),
        CORRUPT,
        ["index.json", "string"],
    ),
    "index is not JSON": (
        lambda p: os.truncate(f"{p}/model.safetensors.index.json", 100),
        CORRUPT,
        ["index.json"],
    ),
    "two indexes": (
        lambda p: os.link(f"{p}/model.safetensors.index.json", f"{p}/b.safetensors.index.json"),
        CORRUPT,
        ["two indexes"],
    ),
    "shard is a folder": (
        lambda p: (os.remove(f"{p}/{shard(3)}"), os.mkdir(f"{p}/{shard(3)}")),
        IO,
        [shard(3)],
    ),
    "no index, shard missing": (
        lambda p: only_index(p, lambda q: os.remove(f"{q}/{shard(2)}")),
        CORRUPT,
        ["shard 2 of the 3"],
    ),
    "no index, last shard missing": (
        lambda p: only_index(p, lambda q: os.remove(f"{q}/{shard(3)}")),
        CORRUPT,
        ["shard 3 of the 3"],
    ),
    "no index, one name in two shards": (
        lambda p: only_index(p, lambda q: (add_tensor(q, shard(1)), add_tensor(q, shard(3)))),
        CORRUPT,
        ["two shards", "extra", shard(1), shard(3)],
    ),
}


class Sets(Case):
    def test_bad_sets(self):
        for name, (damage, status, substrings) in BAD_SETS.items():
            with self.subTest(name):
                self.fresh()
                make.write(self.path, *make.hf(), shards=3)
                damage(self.path)
                self.assert_refused(dump(self.path), status, *substrings)

    def kinds(self, *arguments):
        found = dump(*arguments)
        self.assertNotIn("error", found)
        return {a["kind"]: a["detail"] for a in found["anomalies"]}

    def test_strays_are_noted(self):
        make.write(self.path, *make.hf(), shards=3)
        make.write(self.path, {f"{P}.gate.weight": np.zeros((2, 2), np.float64)})
        os.mkdir(f"{self.path}/folder.safetensors")
        for index in (True, False):
            if not index:
                only_index(self.path)
            with self.subTest(index=index):
                note = self.kinds(self.path, 1)["stray-file"]
                self.assertIn("model.safetensors", note)
                self.assertIn("folder.safetensors", note)

    def test_without_index(self):
        make.write(self.path, *make.hf(), shards=3, index=False)
        self.assertEqual(set(self.kinds(self.path, 1)), {"global-scales-differ"})

    def test_wrong_total_size(self):
        make.write(self.path, *make.hf(), shards=3)
        index_edit(lambda i: i["metadata"].update(total_size=7))(self.path)
        self.assertIn("7 bytes", self.kinds(self.path)["index-size"])

    def test_misspelled_tensor(self):
        weights, config = make.hf()
        weights[f"{P}.experts.3.up_proj.weight_scale2"] = weights.pop(f"{P}.experts.3.up_proj.weight_scale_2")
        make.write(self.path, weights, config)
        found = dump(self.path, 1)
        self.assert_refused(
            found, CORRUPT, "layer 1, expert 3", f"{P}.experts.3.up_proj.weight", "weight_scale_2"
        )
        kinds = {a["kind"]: a for a in found["anomalies"]}
        self.assertIn("weight_scale2", kinds["unknown-tensor"]["detail"])
        self.assertTrue(kinds["missing-global-scale"]["is_error"])
        self.assertEqual(kinds["missing-global-scale"]["expert"], 3)


# ---- layers ------------------------------------------------------------------------------------------------


def tensor(name, change):
    """Damages one tensor of the layer; change gives its new value, or None to remove it."""

    def edit(weights, config):
        del config
        old = weights.pop(f"{P}.{name}")
        new = change(old)
        if new is not None:
            weights[f"{P}.{name}"] = new

    return edit


def scalar(value):
    return lambda old: np.full(old.shape, value, np.float32)


def poke(index, byte):
    def change(old):
        new = old.copy()
        new.view(np.uint8)[index] = byte
        return new

    return change


def add(name, value):
    return lambda weights, config: weights.update({f"{P}.{name}": value})


def remove(*fragments):
    def edit(weights, config):
        del config
        for key in [k for k in weights if any(f in k for f in fragments)]:
            del weights[key]

    return edit


def config(**values):
    return lambda weights, settings: settings.update(values)


def scale_of(value, inner):
    """A second spelling of one tensor's global scale."""
    return add(f"experts.1.up_proj.{inner}", np.full((1,), value, np.float32))


G1 = "experts.1.up_proj"
BAD_LAYERS = {  # name: (damage to one layer in ModelOpt's NVFP4, status, substrings)
    "weight missing": (
        tensor(f"{G1}.weight", lambda t: None),
        CORRUPT,
        ["layer 1, expert 1", G1, "no weight"],
    ),
    "scale missing": (
        tensor(f"{G1}.weight_scale", lambda t: None),
        CORRUPT,
        ["expert 1", f"{G1}.weight", "scale"],
    ),
    "global missing": (
        tensor(f"{G1}.weight_scale_2", lambda t: None),
        CORRUPT,
        ["expert 1", "weight_scale_2"],
    ),
    "global zero": (
        tensor(f"{G1}.weight_scale_2", scalar(0)),
        CORRUPT,
        ["expert 1", f"{G1}.weight_scale_2", "is 0"],
    ),
    "global denormal": (tensor(f"{G1}.weight_scale_2", scalar(1e-40)), CORRUPT, ["expert 1", "e-41"]),
    "global negative": (tensor(f"{G1}.weight_scale_2", scalar(-2)), CORRUPT, ["expert 1", "-2"]),
    "global infinite": (tensor(f"{G1}.weight_scale_2", scalar(np.inf)), CORRUPT, ["expert 1", "inf"]),
    "global NaN": (tensor(f"{G1}.weight_scale_2", scalar(np.nan)), CORRUPT, ["expert 1", "nan"]),
    "global of two values": (
        tensor(f"{G1}.weight_scale_2", lambda t: np.ones(2, np.float32)),
        CORRUPT,
        ["expert 1", "[2]", "one F32 value"],
    ),
    "global is BF16": (
        tensor(f"{G1}.weight_scale_2", lambda t: make.bf16("g", shape=())),
        CORRUPT,
        ["expert 1", "BF16"],
    ),
    "two globals that disagree": (
        scale_of(3.0, "weight_global_scale"),
        CORRUPT,
        ["expert 1", f"{G1}.weight_scale_2", f"{G1}.weight_global_scale", "inverse"],
    ),
    "two codes": (
        add(f"{G1}.weight_packed", make.codes_fp4(1, 1, make.UP)),
        CORRUPT,
        ["expert 1", "two spellings"],
    ),
    "two namings": (
        add("experts.1.w3.weight", make.codes_fp4(1, 1, make.UP)),
        CORRUPT,
        ["expert 1", "experts.1.w3.weight", "second"],
    ),
    "codes one byte short": (
        tensor(f"{G1}.weight", lambda t: t[:, :-1]),
        CORRUPT,
        ["expert 1", G1, "multiple of 16"],
    ),
    "codes one row short": (
        tensor(f"{G1}.weight", lambda t: t[:-1]),
        CORRUPT,
        ["expert 1", f"{G1}.weight_scale", "47"],
    ),
    "scales one column short": (
        tensor(f"{G1}.weight_scale", lambda t: t[:, :-1]),
        CORRUPT,
        ["expert 1", f"{G1}.weight_scale", "[48, 5]", "[48, 6]"],
    ),
    "down of another size": (
        lambda w, c: w.update(
            {
                f"{P}.experts.1.down_proj.weight": w[f"{P}.experts.1.down_proj.weight"][:-16],
                f"{P}.experts.1.down_proj.weight_scale": w[f"{P}.experts.1.down_proj.weight_scale"][:-16],
            }
        ),
        CORRUPT,
        ["expert 1", "down_proj", "[80, 48]", "[96, 48]"],
    ),
    "scales are U8 beside a global": (
        tensor(f"{G1}.weight_scale", lambda t: t.view(np.uint8)),
        CORRUPT,
        ["expert 1", "U8", "F8_E4M3"],
    ),
    "codes are F32": (
        tensor(f"{G1}.weight", lambda t: t.astype(np.float32)),
        UNSUPPORTED,
        ["expert 1", "F32"],
    ),
    "codes in one dimension": (
        tensor(f"{G1}.weight", lambda t: t.ravel()),
        CORRUPT,
        ["expert 1", "[rows, columns]"],
    ),
    "F16 weights": (
        tensor("experts.1.up_proj.weight", lambda t: np.zeros((t.shape[0], 2 * t.shape[1]), np.float16)),
        UNSUPPORTED,
        ["expert 1", "experts.1.up_proj.weight", "F16", "BF16"],
    ),
    "one expert is BF16": (
        lambda w, c: (
            remove("experts.1.")(w, c),
            [make.plain(w, f"{P}.experts.1.{name}", 1, 1, p) for p, name in make.HF_NAMES.items()],
        ),
        UNSUPPORTED,
        ["expert 1", "bf16", "nvfp4"],
    ),
    "BF16 with scales": (
        tensor(f"{G1}.weight", lambda t: make.bf16("w", shape=(make.I, make.H))),
        CORRUPT,
        ["expert 1", f"{G1}.weight_scale", "BF16"],
    ),
    "scale NaN": (
        tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0x7F)),
        CORRUPT,
        ["layer 1, expert 1", "experts.1.down_proj.weight_scale", "[3, 2]", "0x7F", "NaN"],
    ),
    "scale negative NaN": (
        tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0xFF)),
        CORRUPT,
        ["[3, 2]", "0xFF"],
    ),
    "scale negative": (
        tensor(f"{G1}.weight_scale", poke((47, 5), 0x81)),
        CORRUPT,
        ["expert 1", "[47, 5]", "negative"],
    ),
    "scale -448": (
        tensor(f"{G1}.weight_scale", poke((0, 0), 0xFE)),
        CORRUPT,
        ["expert 1", "[0, 0]", "negative"],
    ),
    "an expert missing": (remove("experts.2."), CORRUPT, ["layer 1", "lacks 1 of 5 experts", "2"]),
    "the last expert missing": (remove("experts.4."), CORRUPT, ["4 experts", "5"]),
    "more experts than the router": (tensor("gate.weight", lambda t: t[:-1]), CORRUPT, ["5 experts", "4"]),
    "router of another width": (tensor("gate.weight", lambda t: t[:, :-16]), CORRUPT, ["80", "96"]),
    "router is F64": (
        tensor("gate.weight", lambda t: t.astype(np.float64)),
        UNSUPPORTED,
        ["gate.weight", "F64"],
    ),
    "bias too short": (
        tensor("gate.e_score_correction_bias", lambda t: t[:-1]),
        CORRUPT,
        ["e_score_correction_bias", "[4]", "[5]"],
    ),
    "bias NaN": (
        tensor(
            "gate.e_score_correction_bias",
            lambda t: np.where(np.arange(5) == 3, np.nan, t).astype(np.float32),
        ),
        CORRUPT,
        ["e_score_correction_bias", "[3]"],
    ),
    "two biases": (add("gate.bias", np.zeros(5, np.float32)), CORRUPT, ["second"]),
    "no gate, config says more experts": (
        lambda w, c: (remove("gate.weight", "gate.e_")(w, c), c.update(n_routed_experts=6)),
        CORRUPT,
        ["5 experts", "config.json", "6"],
    ),
    "gated shared expert": (
        lambda w, c: (
            make.plain(w, f"{P}.shared_expert.gate_proj", 1, make.GATE),
            make.plain(w, f"{P}.shared_expert.up_proj", 1, make.UP),
            make.plain(w, f"{P}.shared_expert.down_proj", 1, make.DOWN),
            add("shared_expert_gate.weight", make.bf16("s", shape=(1, make.H)))(w, c),
        ),
        UNSUPPORTED,
        ["shared_expert_gate"],
    ),
    "half a shared expert": (
        lambda w, c: make.plain(w, f"{P}.shared_expert.gate_proj", 1, make.GATE),
        CORRUPT,
        ["shared expert", "up_proj"],
    ),
    "no K": (lambda w, c: c.pop("num_experts_per_tok"), UNSUPPORTED, ["num_experts_per_tok"]),
    "K above E": (config(num_experts_per_tok=6), UNSUPPORTED, ["6", "5"]),
    "more layers than there can be": (config(num_hidden_layers=70000), CORRUPT, ["num_hidden_layers", "70000"]),
    "K is text": (config(num_experts_per_tok="2"), CORRUPT, ["config.json", "num_experts_per_tok"]),
    "limit negative": (config(swiglu_limit=-1.0), CORRUPT, ["config.json", "swiglu_limit"]),
    "limit infinite": (config(swiglu_limit=float("inf")), CORRUPT, ["config.json", "swiglu_limit"]),
    "limit NaN": (config(swiglu_limit=float("nan")), CORRUPT, ["config.json", "swiglu_limit"]),
    "activation gelu": (config(hidden_act="gelu"), UNSUPPORTED, ["gelu"]),
    "relu2 with a gate": (config(hidden_act="relu2"), CORRUPT, ["relu2", "gate"]),
    "no gate projection": (remove("gate_proj"), CORRUPT, ["gate_proj"]),
    "groups that do not divide": (config(n_group=2, topk_group=1), CORRUPT, ["n_group", "2", "5"]),
    "range past the file": (config(megamoe_experts=[0, 4]), CORRUPT, ["megamoe_experts", "5"]),
    "range is empty": (config(megamoe_experts=[3, 3]), CORRUPT, ["megamoe_experts"]),
}


# What headers and scalars cannot show: it is found when the layer is loaded or scanned.
ONLY_ON_LOAD = {"scale NaN", "scale negative NaN", "scale negative", "scale -448", "bias NaN"}


class Layers(Case):
    def model(self, damage=None):
        weights, settings = make.hf()
        if damage:
            damage(weights, settings)
        make.write(self.path, weights, settings)
        return self.path

    def test_bad_layers(self):
        for name, (damage, status, substrings) in BAD_LAYERS.items():
            with self.subTest(name):
                self.fresh()
                found = dump(self.model(damage), 1)
                self.assert_refused(found, status, *substrings)
                if "layers" in found:
                    told = [a["kind"] for a in found["anomalies"] if a["is_error"]]
                    self.assertEqual(bool(told), name not in ONLY_ON_LOAD, told)

    def test_two_globals_that_agree(self):
        g = float(make.factor("global", 1, 1, make.UP))
        self.assertNotIn("error", dump(self.model(scale_of(1 / g, "weight_global_scale")), 1))

    def test_minus_zero_scale_is_zero(self):
        self.assertNotIn("error", dump(self.model(tensor(f"{G1}.weight_scale", poke((0, 0), 0x80))), 1))

    def test_finite_exponent_15(self):
        self.assertNotIn("error", dump(self.model(tensor(f"{G1}.weight_scale", poke((0, 0), 0x7E))), 1))

    def test_repair(self):
        path = self.model(tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0x7F)))
        self.assertNotIn("error", dump("--no-scan", path, 1))
        found = dump("--repair", path, 1)
        self.assertNotIn("error", found)
        scales = bytes.fromhex(found["source"]["experts"][1]["down"]["scales"])
        self.assertEqual(scales[3 * 3 + 2], 0x7E)
        wanted = make.scales_e4m3(1, 1, make.DOWN).copy()
        wanted[3, 2] = 0x7E
        self.assertEqual(scales, wanted.tobytes())
        note = [a for a in found["anomalies"] if a["kind"] == "repaired-scale"]
        self.assertEqual(len(note), 1)
        self.assertIn("1 NaN", note[0]["detail"])
        with open(f"{path}/model.safetensors", "rb") as file:
            self.assertIn(bytes([0x7F]), file.read())  # the file itself is as it was
        self.assert_refused(dump(path, 1), CORRUPT, "[3, 2]")

    def test_repair_does_not_touch_negative_nan(self):
        path = self.model(tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0xFF)))
        self.assert_refused(dump("--repair", path, 1), CORRUPT, "0xFF")

    def test_scan_lists_everything(self):
        def damage(weights, settings):
            tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0x7F))(weights, settings)
            tensor("experts.3.up_proj.weight_scale", poke((1, 1), 0x99))(weights, settings)

        path = self.model(damage)
        self.assertEqual([a for a in dump(path)["anomalies"] if a["is_error"]], [])
        found = {
            (a["kind"], a["expert"]): a["tensor"]
            for a in dump("--scan", path, 1)["anomalies"]
            if a["is_error"]
        }
        self.assertEqual(
            found,
            {
                ("nan-scale", 1): f"{P}.experts.1.down_proj.weight_scale",
                ("negative-scale", 3): f"{P}.experts.3.up_proj.weight_scale",
            },
        )

    def test_only_loaded_experts_are_scanned(self):
        path = self.model(tensor("experts.1.down_proj.weight_scale", poke((3, 2), 0x7F)))
        self.assertNotIn("error", dump(path, 1, 2, 2))
        self.assert_refused(dump(path, 1, 1, 2), CORRUPT, "expert 1")

    def test_ranges(self):
        path = self.model()
        self.assert_refused(dump(path, 1, 4, 2), INVALID, "4 to 5", "0 to 4")
        self.assert_refused(dump(path, 7), INVALID, "no MoE layer 7", "1")

    def test_input_scales(self):
        name = "experts.1.gate_proj.input_scale"
        for label, damage in {
            "missing": lambda t: None,
            "0": scalar(0),
            "denormal": scalar(1e-40),
            "NaN": scalar(np.nan),
            "inf": scalar(np.inf),
            "negative": scalar(-1),
            "two values": lambda t: np.ones(2, np.float32),
            "BF16": lambda t: make.bf16("input", shape=()),
        }.items():
            with self.subTest(label):
                self.fresh()
                found = dump(self.model(tensor(name, damage)), 1)
                self.assertNotIn("error", found)
                source = found["source"]
                self.assertEqual(
                    [e["input"] is None for e in source["experts"]], [False, True, False, False, False]
                )
                self.assertEqual(
                    [s is None for s in source["input_scales"]], [False, True, False, False, False]
                )
                note = [a for a in found["anomalies"] if a["kind"] == "missing-input-scale"]
                self.assertEqual(len(note), 1)
                self.assertIn("1 of 5 experts", note[0]["detail"])
                self.assertTrue(note[0]["detail"].endswith(": 1"))
                self.assertFalse(note[0]["is_error"])

    def test_inverse_input_scales(self):
        for value in (0.0, np.inf, np.nan):
            self.fresh()
            weights, settings = make.hf(one=make.compressed)
            tensor("experts.1.down_proj.input_global_scale", scalar(value))(weights, settings)
            source = dump(make.write(self.path, weights, settings), 1)["source"]
            self.assertIsNone(source["experts"][1]["intermediate"])

    def test_mxfp4_scales(self):
        for scales, change, text in (
            ("e8m0", poke((5, 1), 0xFF), "0xFF"),
            ("u8", poke((5, 1), 0xFF), "0xFF"),
            ("f32", lambda t: np.where(np.arange(3) == 1, np.float32(3), t), "3 at [0, 1]"),
        ):
            with self.subTest(scales):
                self.fresh()
                weights, settings = {}, dict(make.V4_CONFIG, moe_intermediate_size=64, num_hash_layers=0)
                make.experts(weights, P, 1, make.mxfp4, make.W_NAMES, scales=scales)
                make.router(weights, P, 1)
                tensor("experts.2.w1.scale", change)(weights, settings)
                self.assert_refused(
                    dump(make.write(self.path, weights, settings), 1),
                    CORRUPT,
                    "expert 2",
                    "experts.2.w1.scale",
                    text,
                )
                errors = [a for a in dump("--scan", self.path, 1)["anomalies"] if a["is_error"]]
                self.assertEqual([a["expert"] for a in errors], [2])
                self.assertIn(text, errors[0]["detail"])

    def test_scan_of_f32_exponents(self):
        """Values, not bytes: a scan of good ones finds nothing."""
        weights, settings = {}, dict(make.V4_CONFIG, moe_intermediate_size=64, num_hash_layers=0)
        make.experts(weights, P, 1, make.mxfp4, make.W_NAMES, scales="f32")
        make.router(weights, P, 1)
        path = make.write(self.path, weights, settings)
        self.assertEqual([a for a in dump("--scan", path, 1)["anomalies"] if a["is_error"]], [])

    def test_token_tables(self):
        for label, change, substrings in (
            ("entry is E", lambda t: np.where(np.arange(2) == 1, 5, t), ["names expert 5", "[0, 1]", "5"]),
            ("entry is -1", lambda t: np.where(np.arange(2) == 0, -1, t), ["names expert -1", "[0, 0]"]),
            ("entry is 2^40", lambda t: np.where(np.arange(2) == 0, 2**40, t), [str(2**40)]),
            ("table is F32", lambda t: t.astype(np.float32), ["F32", "I64"]),
            ("table missing", lambda t: None, ["tid2eid", "num_hash_layers"]),
        ):
            with self.subTest(label):
                self.fresh()
                weights, settings = make.v4_modelopt()
                old = weights.pop("layers.0.ffn.gate.tid2eid")
                if change(old) is not None:
                    weights["layers.0.ffn.gate.tid2eid"] = change(old)
                self.assert_refused(
                    dump(make.write(self.path, weights, settings), 0), CORRUPT, "layer 0", *substrings
                )


class Contradictions(Case):
    def test_config_against_tensors(self):
        for key, value, text in (
            ("hidden_size", 128, "128"),
            ("moe_intermediate_size", 64, "64"),
            ("n_routed_experts", 3, "3"),
        ):
            with self.subTest(key):
                self.fresh()
                weights, settings = make.hf()
                settings[key] = value
                make.write(self.path, weights, settings)
                found = dump(self.path, 1)
                self.assertNotIn("error", found)
                note = [a for a in found["anomalies"] if a["kind"] == "config-contradiction"]
                self.assertEqual(len(note), 1)
                self.assertIn(text, note[0]["detail"])
                self.assert_refused(dump("--strict", self.path), CORRUPT, text, "strict")

    def test_unknown_router(self):
        weights, settings = make.hf(model_type="new_model")
        make.write(self.path, weights, settings)
        found = dump(self.path, 1)
        self.assertNotIn("error", found)
        self.assertIsNone(found["source"]["router"]["weight"])
        self.assertFalse(found["layers"][0]["router"])
        self.assertIn(
            "new_model", [a for a in found["anomalies"] if a["kind"] == "unknown-router"][0]["detail"]
        )
        settings["scoring_func"] = "softmax"
        make.write(self.path, weights, settings)
        self.assertTrue(dump(self.path, 1)["layers"][0]["router"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
