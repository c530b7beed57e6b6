"""
Checkpoints for the tests of the command, written without the library: safetensors by hand, numbers from their
definition. `FX` is the fixture of the public bug reports: one MoE layer with E = 2, H = I = 64 and top-1, whose answers
are known by hand; its fields can be changed before it is written.

    fx.py modelopt|compressed-tensors DIRECTORY
"""

import json
import os
import struct
import sys

SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


def f32(*values):
    return struct.pack(f"<{len(values)}f", *values)


def bf16(*values):
    """Nearest, ties to even."""
    out = bytearray()
    for value in values:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        bits += 0x7FFF + (bits >> 16 & 1)
        out += struct.pack("<H", bits >> 16 & 0xFFFF)
    return bytes(out)


def from_bf16(data):
    words = struct.unpack(f"<{len(data) // 2}H", data)
    return [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]


def i32(*values):
    return struct.pack(f"<{len(values)}i", *values)


def i64(*values):
    return struct.pack(f"<{len(values)}q", *values)


def tensor(dtype, shape, data):
    return dtype, list(shape), bytes(data)


def header_bytes(header, pad=8):
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) + -len(text) % pad) + text + b" " * (-len(text) % pad)


def save(path, tensors):
    """One safetensors file; tensors: name -> (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    with open(path, "wb") as file:
        file.write(header_bytes(header))
        for _, _, data in tensors.values():
            file.write(data)


def load(path):
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        body = file.read()
    return {
        name: (t["dtype"], t["shape"], body[t["data_offsets"][0] : t["data_offsets"][1]])
        for name, t in header.items()
        if name != "__metadata__"
    }


def values_of(path, name):
    dtype, _, data = load(path)[name]
    if dtype == "BF16":
        return from_bf16(data)
    code = {"F32": "f", "I32": "i", "U8": "B", "F8_E4M3": "B", "I64": "q"}[dtype]
    return list(struct.unpack(f"<{len(data) // SIZES[dtype]}{code}", data))


def save_sharded(directory, shards, config):
    """shards: one dict of tensors for each file."""
    os.makedirs(directory, exist_ok=True)
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save(os.path.join(directory, name), tensors)
        for key, (_, _, data) in tensors.items():
            index["weight_map"][key] = name
            index["metadata"]["total_size"] += len(data)
    for name, value in (("model.safetensors.index.json", index), ("config.json", config)):
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)


def identity_codes(size):
    """Row n has +1.0 in column n only."""
    rows = bytearray()
    for n in range(size):
        row = bytearray(size // 2)
        row[n // 2] = 0x02 if n % 2 == 0 else 0x20
        rows += row
    return bytes(rows)


class FX:
    """The fixture, with everything that a test may want to change."""

    def __init__(self, experts=2, hidden=64, inner=64, top_k=1, style="modelopt"):
        self.experts, self.hidden, self.inner, self.top_k, self.style = experts, hidden, inner, top_k, style
        self.scalar_shape = [] if style == "modelopt" else [1]
        self.config = {
            "model_type": "deepseek_v4",
            "hidden_size": hidden,
            "moe_intermediate_size": inner,
            "n_routed_experts": experts,
            "num_experts_per_tok": top_k,
            "num_hidden_layers": 1,
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
        self.prefix = "model.layers.0.mlp"
        self.codes, self.scales, self.globals, self.inputs = {}, {}, {}, {}
        for e in range(experts):
            self.codes[e] = {
                "gate": bytearray(b"\x22" * (inner * hidden // 2)),
                "up": bytearray(b"\x44" * (inner * hidden // 2)),
                "down": bytearray(identity_codes(hidden)),
            }
            self.scales[e] = {p: bytearray(b"\x38" * (hidden * inner // 16)) for p in ("gate", "up", "down")}
            self.globals[e] = {"gate": 0.125, "up": 0.125, "down": 1.0}
            self.inputs[e] = {p: 1.0 for p in ("gate", "up", "down")}
        self.extra = {}
        self.without = set()  # names to leave out at the end

    def global_names(self):
        if self.style == "modelopt":
            return "weight", "weight_scale", "weight_scale_2", "input_scale"
        return "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"

    def scalar(self, value):
        if self.style != "modelopt":
            value = 1.0 / value if value else 0.0
        return tensor("F32", self.scalar_shape, f32(value))

    def tensors(self):
        weight, scale, global_scale, input_scale = self.global_names()
        out = {}
        for e in range(self.experts):
            for projection in ("gate", "up", "down"):
                rows, columns = (self.hidden, self.inner) if projection == "down" else (self.inner, self.hidden)
                name = f"{self.prefix}.experts.{e}.{projection}_proj"
                out[f"{name}.{weight}"] = tensor("U8", [rows, columns // 2], self.codes[e][projection])
                out[f"{name}.{scale}"] = tensor("F8_E4M3", [rows, columns // 16], self.scales[e][projection])
                out[f"{name}.{global_scale}"] = self.scalar(self.globals[e][projection])
                if self.inputs[e][projection] is not None:
                    out[f"{name}.{input_scale}"] = self.scalar(self.inputs[e][projection])
        out[f"{self.prefix}.gate.weight"] = tensor(
            "BF16", [self.experts, self.hidden], bf16(*[0.0] * (self.experts * self.hidden))
        )
        out.update(self.extra)
        return {name: value for name, value in out.items() if name not in self.without}

    def write(self, directory, shards=1):
        names = list(self.tensors().items())
        step = -(-len(names) // shards)
        save_sharded(directory, [dict(names[i : i + step]) for i in range(0, len(names), step)], self.config)
        return directory


def one_hot(hidden=64, position=0, value=6.0):
    row = [0.0] * hidden
    row[position] = value
    return row


def save_input(path, rows, ids=None, weights=None, token_ids=None, dtype="BF16"):
    """rows: hidden states; ids and weights: one list for each row."""
    flat = [value for row in rows for value in row]
    width = len(rows[0]) if rows else 64
    tensors = {"hidden": tensor(dtype, [len(rows), width], bf16(*flat) if dtype == "BF16" else f32(*flat))}
    if ids is not None:
        tensors["expert_ids"] = tensor("I32", [len(ids), len(ids[0])], i32(*[i for row in ids for i in row]))
        tensors["expert_weights"] = tensor(
            "F32", [len(weights), len(weights[0])], f32(*[w for row in weights for w in row])
        )
    if token_ids is not None:
        tensors["token_ids"] = tensor("I64", [len(token_ids)], i64(*token_ids))
    save(path, tensors)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("modelopt", "compressed-tensors"):
        sys.exit(__doc__.strip())
    FX(style=sys.argv[1]).write(sys.argv[2])
