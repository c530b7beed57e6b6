"""Writes small checkpoints in the published formats, with numpy and safetensors only.

Every element depends on its own place, scales differ and are no powers of two, gate and up differ, and no
size is a power of two: an exchanged row, expert, half or nibble cannot look right.
"""

import json
import os

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

H, I, E, K = 96, 48, 5, 2
GATE, UP, DOWN = "gate", "up", "down"
HF_NAMES = {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"}
W_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}


def rng_of(*place):
    """A generator for one place of the model, so that any tensor can be made again by itself."""
    return np.random.default_rng([sum(ord(c) for c in str(p)) * 7919 + i for i, p in enumerate(place)])


def dims(projection, h=H, i=I):
    return (h, i) if projection == DOWN else (i, h)


def codes_fp4(*place, h=H, i=I):
    n, k = dims(place[-1], h, i)
    return rng_of("codes", *place).integers(0, 256, (n, k // 2), dtype=np.uint8)


def scales_e4m3(*place, h=H, i=I):
    n, k = dims(place[-1], h, i)
    return rng_of("e4m3", *place).integers(1, 0x7F, (n, k // 16), dtype=np.uint8)


def scales_e8m0(*place, h=H, i=I):
    n, k = dims(place[-1], h, i)
    return rng_of("e8m0", *place).integers(100, 140, (n, k // 32), dtype=np.uint8)


def bf16(*place, shape):
    return rng_of("bf16", *place).standard_normal(shape).astype(ml_dtypes.bfloat16)


def factor(*place):
    return np.float32(rng_of("factor", *place).uniform(0.001, 0.01))


def as_e4m3(bytes_):
    return bytes_.view(ml_dtypes.float8_e4m3fn)


def as_e8m0(bytes_):
    return bytes_.view(ml_dtypes.float8_e8m0fnu)


def modelopt(weights, name, *place, shape=(), input_scale=True):
    """One projection in ModelOpt's NVFP4: code * scale * weight_scale_2."""
    weights[f"{name}.weight"] = codes_fp4(*place)
    weights[f"{name}.weight_scale"] = as_e4m3(scales_e4m3(*place))
    weights[f"{name}.weight_scale_2"] = np.full(shape, factor("global", *place), np.float32)
    if input_scale:
        weights[f"{name}.input_scale"] = np.full(shape, factor("input", *place), np.float32)


def compressed(weights, name, *place, shape=(1,), input_scale=True):
    """One projection in compressed-tensors' NVFP4: code * scale / weight_global_scale."""
    weights[f"{name}.weight_packed"] = codes_fp4(*place)
    weights[f"{name}.weight_scale"] = as_e4m3(scales_e4m3(*place))
    weights[f"{name}.weight_global_scale"] = np.full(shape, 1 / factor("global", *place), np.float32)
    if input_scale:
        weights[f"{name}.input_global_scale"] = np.full(shape, 1 / factor("input", *place), np.float32)


def mxfp4(weights, name, *place, codes=np.int8, scales="e8m0"):
    """One projection as DeepSeek-V4 publishes it."""
    raw = scales_e8m0(*place, h=H, i=64)
    weights[f"{name}.weight"] = codes_fp4(*place, h=H, i=64).view(codes)
    weights[f"{name}.scale"] = {
        "e8m0": as_e8m0(raw),
        "u8": raw,
        "f32": np.exp2(raw.astype(np.float64) - 127).astype(np.float32),
    }[scales]


def fp8(weights, name, *place, block=32, scales="e8m0", suffix="scale"):
    """One FP8 projection with a grid of scales whose last blocks are partial."""
    n, k = dims(place[-1])
    grid = (-(-n // block), -(-k // block))
    weights[f"{name}.weight"] = as_e4m3(rng_of("fp8", *place).integers(0, 0x7F, (n, k), dtype=np.uint8))
    exponents = rng_of("grid", *place).integers(110, 130, grid, dtype=np.uint8)
    values = rng_of("grid32", *place).uniform(0.01, 0.1, grid).astype(np.float32)
    weights[f"{name}.{suffix}"] = as_e8m0(exponents) if scales == "e8m0" else values


def plain(weights, name, *place):
    """One BF16 projection."""
    weights[f"{name}.weight"] = bf16("weight", *place, shape=dims(place[-1]))


def router(weights, prefix, layer, bias="gate.bias", e=E, h=H, weight="gate.weight"):
    weights[f"{prefix}.{weight}"] = bf16("router", layer, shape=(e, h))
    if bias:
        weights[f"{prefix}.{bias}"] = rng_of("bias", layer).uniform(6.8, 7.1, e).astype(np.float32)


def hash_table(weights, prefix, layer, vocabulary=37, dtype=np.int64):
    table = rng_of("table", layer).integers(0, E, (vocabulary, K)).astype(dtype)
    weights[f"{prefix}.gate.tid2eid"] = table
    return table


def experts(weights, prefix, layer, one, names, count=E, **options):
    for e in range(count):
        for projection, name in names.items():
            one(weights, f"{prefix}.experts.{e}.{name}", layer, e, projection, **options)


V4_CONFIG = {
    "model_type": "deepseek_v4",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
}


def v4_modelopt(**options):
    """Layer 0 routes by token id, layer 1 by scores and bias, with an FP8 shared expert each."""
    weights = {}
    for layer in (0, 1):
        prefix = f"layers.{layer}.ffn"
        experts(weights, prefix, layer, modelopt, W_NAMES, **options)
        router(weights, prefix, layer, bias="gate.bias" if layer else None)
        for projection, name in W_NAMES.items():
            fp8(weights, f"{prefix}.shared_experts.{name}", layer, "shared", projection)
    hash_table(weights, "layers.0.ffn", 0)
    weights["embed.weight"] = bf16("embed", shape=(7, H))
    return weights, dict(V4_CONFIG)


def hf(
    prefix="model.layers.1.mlp",
    one=modelopt,
    model_type="deepseek_v3",
    bias="gate.e_score_correction_bias",
    **options,
):
    """One layer under Hugging Face names."""
    weights = {}
    experts(weights, prefix, 1, one, HF_NAMES, **options)
    router(weights, prefix, 1, bias=bias)
    config = {
        "model_type": model_type,
        "hidden_size": H,
        "moe_intermediate_size": I,
        "n_routed_experts": E,
        "num_experts_per_tok": K,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return weights, config


def write(directory, weights, config=None, shards=1, index=True, **other_json):
    """Shards with an index (or one file), and the JSON files beside them."""
    os.makedirs(directory, exist_ok=True)
    names = sorted(weights)
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: np.ascontiguousarray(weights[name]) for name in names[s::shards]}
        part = {name: value.reshape(weights[name].shape) for name, value in part.items()}
        save_file(part, os.path.join(directory, file))
        weight_map |= {name: file for name in part}
    if shards > 1 and index:
        total = sum(w.nbytes for w in weights.values())
        other_json["model.safetensors.index"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if config is not None:
        other_json["config"] = config
    for name, value in other_json.items():
        with open(os.path.join(directory, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(value, file)
    return directory
