#!/usr/bin/env python3
"""Writes the headers of DeepSeek-V4-Pro in NVFP4 in front of holes: 870 GB to stat, a few MB on disk.

Usage: make_sparse.py FOLDER [LAYERS [EXPERTS]]. Scalars and the bias are written, so that the files open;
codes and scales are holes, that is zeros.
"""

import json
import os
import struct
import sys

H, I, K, SHARDS = 7168, 3072, 6, 95


def tensors_of(layer, experts):
    prefix = f"layers.{layer}.ffn"
    for e in range(experts):
        for name, (n, k) in {"w1": (I, H), "w2": (H, I), "w3": (I, H)}.items():
            base = f"{prefix}.experts.{e}.{name}"
            yield f"{base}.weight", "U8", [n, k // 2], n * k // 2
            yield f"{base}.weight_scale", "F8_E4M3", [n, k // 16], n * k // 16
            yield f"{base}.weight_scale_2", "F32", [], 4
            yield f"{base}.input_scale", "F32", [], 4
    yield f"{prefix}.gate.weight", "BF16", [experts, H], 2 * experts * H
    yield f"{prefix}.gate.bias", "F32", [experts], 4 * experts


def write_shard(path, tensors):
    # the reference writer's order: wide elements first, so that all scalars of a shard are neighbors
    order = sorted(tensors, key=lambda t: ({"F32": 0, "BF16": 1, "F8_E4M3": 2, "U8": 2}[t[1]], t[0]))
    header, end, scalars = {}, 0, b""
    for name, dtype, shape, size in order:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
        if dtype == "F32":
            scalars += struct.pack("<f", 0.25) * (size // 4)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + scalars)
        file.truncate(8 + len(text) + end)


def main(folder, layers=61, experts=384):
    os.makedirs(folder, exist_ok=True)
    tensors = [t for layer in range(layers) for t in tensors_of(layer, experts)]
    share = -(-len(tensors) // SHARDS)
    weight_map = {}
    for s in range(SHARDS):
        file = f"model-{s + 1:05}-of-{SHARDS:05}.safetensors"
        part = tensors[s * share : (s + 1) * share]
        write_shard(os.path.join(folder, file), part)
        weight_map |= {t[0]: file for t in part}
    total = sum(t[3] for t in tensors)
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": H,
        "moe_intermediate_size": I,
        "n_routed_experts": experts,
        "num_experts_per_tok": K,
        "num_hidden_layers": layers,
        "num_hash_layers": 0,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
    }
    for name, value in {
        "config": config,
        "model.safetensors.index": {"metadata": {"total_size": total}, "weight_map": weight_map},
    }.items():
        with open(os.path.join(folder, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(value, file)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
