#!/usr/bin/env python3
"""Seeds for fuzz_checkpoint: headers of small layers in several formats. Usage: make_seeds.py FOLDER."""

import json
import os
import sys


def header(tensors):
    """tensors: (name, dtype, shape, bytes), laid out one after another."""
    entries, end = {}, 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return json.dumps(entries, separators=(",", ":")).encode(), end


def nvfp4(base, h=16, i=16):
    for name, n, k in (("w1", i, h), ("w2", h, i), ("w3", i, h)):
        yield f"{base}.{name}.weight", "U8", [n, k // 2], n * k // 2
        yield f"{base}.{name}.weight_scale", "F8_E4M3", [n, k // 16], n * k // 16
        yield f"{base}.{name}.weight_scale_2", "F32", [], 4


SEEDS = {
    "plain": [("a", "U8", [3], 3), ("b", "F32", [2, 0], 0), ("c", "BF16", [2], 4)],
    "nvfp4": list(nvfp4("layers.0.ffn.experts.0")),
    "router": [
        ("layers.0.ffn.gate.weight", "BF16", [1, 16], 32),
        ("layers.0.ffn.gate.bias", "F32", [1], 4),
        ("layers.0.ffn.gate.tid2eid", "I64", [2, 1], 16),
    ],
    "stack": [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", [1, 2, 1, 16], 32),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", "U8", [1, 2, 1], 2),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "BF16", [1, 2], 4),
        ("model.layers.0.mlp.experts.down_proj_blocks", "U8", [1, 16, 1, 1], 16),
    ],
    "fp8": [
        ("mtp.0.ffn.experts.0.w1.weight", "F8_E4M3", [2, 16], 32),
        ("mtp.0.ffn.experts.0.w1.scale", "F8_E8M0", [1, 1], 1),
    ],
}


def main(folder):
    os.makedirs(folder, exist_ok=True)
    for name, tensors in SEEDS.items():
        text, size = header(tensors)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(bytes([min(size, 255)]) + text)
        with open(os.path.join(folder, name + ".file"), "wb") as file:
            file.write(b"\0" + len(text).to_bytes(8, "little") + text + bytes(size))


if __name__ == "__main__":
    main(sys.argv[1])
