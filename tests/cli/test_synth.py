"""synth writes the published layouts, the same bytes every time, and any subset of them."""

import json
import os
import unittest

import fx
from command import Case, contents


class Synth(Case):
    def make(self, name, *arguments):
        self.command("synth", name, *arguments)
        tensors, directory = {}, self.path(name)
        for file in sorted(os.listdir(directory)):
            if file.endswith(".safetensors"):
                tensors.update(fx.load(os.path.join(directory, file)))
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        with open(os.path.join(directory, "model.safetensors.index.json"), encoding="utf-8") as file:
            index = json.load(file)
        self.assertEqual(set(index["weight_map"]), set(tensors))
        self.assertEqual(index["metadata"]["total_size"], sum(len(data) for _, _, data in tensors.values()))
        return tensors

    def has(self, tensors, name, dtype, shape):
        self.assertEqual((tensors[name][0], tensors[name][1]), (dtype, shape), name)

    def test_v4_modelopt(self):
        t = self.make("a", "--shape", "v4-flash", "--experts", "3:5", "--layers", "3:4")
        e = "layers.3.ffn.experts.4"
        self.has(t, f"{e}.w1.weight", "U8", [2048, 2048])
        self.has(t, f"{e}.w2.weight", "U8", [4096, 1024])
        self.has(t, f"{e}.w3.weight_scale", "F8_E4M3", [2048, 256])
        self.has(t, f"{e}.w2.weight_scale", "F8_E4M3", [4096, 128])
        self.has(t, f"{e}.w1.weight_scale_2", "F32", [])
        self.has(t, f"{e}.w1.input_scale", "F32", [])
        self.assertEqual(t[f"{e}.w1.weight_scale_2"], t[f"{e}.w3.weight_scale_2"])
        self.has(t, "layers.3.ffn.gate.weight", "BF16", [256, 4096])
        self.has(t, "layers.3.ffn.gate.bias", "F32", [256])
        self.has(t, "layers.3.ffn.shared_experts.w1.weight", "F8_E4M3", [2048, 4096])
        self.has(t, "layers.3.ffn.shared_experts.w1.scale", "F8_E8M0", [16, 32])
        self.assertNotIn("layers.3.ffn.experts.0.w1.weight", t)
        self.assertEqual(self.config["megamoe_experts"], [3, 5])
        self.assertEqual(self.config["quantization_config"]["quant_method"], "fp8")
        self.assertEqual(self.config["quantization_config"]["moe_quant_algo"], "NVFP4")
        self.assertTrue(self.json("check", "a", "--layer", 3, "--tokens", 4)["pass"])

    def test_v4_hash_layer_and_mxfp4(self):
        t = self.make("a", "--shape", "v4-flash", "--experts", "0:1", "--format", "mxfp4")
        self.has(t, "layers.0.ffn.gate.tid2eid", "I64", [129280, 6])
        self.assertNotIn("layers.0.ffn.gate.bias", t)
        self.has(t, "layers.0.ffn.experts.0.w1.weight", "I8", [2048, 2048])
        self.has(t, "layers.0.ffn.experts.0.w1.scale", "F8_E8M0", [2048, 128])

    def test_compressed_tensors(self):
        t = self.make("a", "--shape", "qwen3-30b-a3b", "--experts", "0:2", "--format", "compressed-tensors")
        e = "model.layers.0.mlp.experts.1.gate_proj"
        self.has(t, f"{e}.weight_packed", "U8", [768, 1024])
        self.has(t, f"{e}.weight_scale", "F8_E4M3", [768, 128])
        self.has(t, f"{e}.weight_global_scale", "F32", [1])
        self.has(t, f"{e}.input_global_scale", "F32", [1])
        up = t["model.layers.0.mlp.experts.1.up_proj.weight_global_scale"]
        self.assertNotEqual(t[f"{e}.weight_global_scale"], up)
        self.assertEqual(self.config["quantization_config"]["format"], "nvfp4-pack-quantized")
        self.assertTrue(self.json("check", "a", "--layer", 0, "--tokens", 4)["pass"])

    def test_every_shape_opens_and_passes(self):
        for shape, layer in (("v4.1-flash", 0), ("r1", 3), ("kimi-k2", 1), ("gpt-oss-120b", 0)):
            self.command("synth", "--shape", shape, "--experts", "0:1", shape)
            layers = self.json("inspect", shape)["layers"]
            self.assertEqual([l["layer"] for l in layers], [layer], shape)
            self.assertTrue(self.json("check", shape, "--layer", layer, "--tokens", 2)["pass"], shape)

    def test_same_bytes_every_time_and_in_subsets(self):
        whole = self.make("whole", "--shape", "tiny")
        again = self.make("again", "--shape", "tiny", "--shard-size", "100k")
        self.assertEqual(whole, again)
        self.assertGreater(len(os.listdir(self.path("again"))), 10)
        part = self.make("part", "--shape", "tiny", "--experts", "5:7", "--layers", "1:3")
        for name, value in part.items():
            self.assertEqual(value, whole[name], name)
        other = self.make("other", "--shape", "tiny", "--seed", "1")
        self.assertNotEqual(other["layers.0.ffn.experts.0.w1.weight"], whole["layers.0.ffn.experts.0.w1.weight"])
        self.assertEqual(contents(self.path("whole", "config.json")), contents(self.path("again", "config.json")))

    def test_realistic_spread(self):
        """Codes as of Gaussian weights: every code, the large ones rare, each block reaching 6; many scales."""
        t = self.make("a", "--shape", "tiny")
        codes = t["layers.0.ffn.experts.3.w1.weight"][2]
        counts = [0] * 16
        for byte in codes:
            counts[byte & 15] += 1
            counts[byte >> 4] += 1
        self.assertTrue(all(counts[:8]) and all(counts[9:]))
        for start in range(0, len(codes), 8):
            block = codes[start : start + 8]
            self.assertIn(7, [c & 7 for b in block for c in (b, b >> 4)])
        scales = t["layers.0.ffn.experts.3.w1.weight_scale"][2]
        self.assertGreater(len(set(scales)), 20)
        self.assertTrue(all(0 < s < 0x7F for s in scales))
        table = t["layers.0.ffn.gate.tid2eid"][2]
        for token in range(512):
            row = [int.from_bytes(table[(3 * token + k) * 8 : (3 * token + k + 1) * 8], "little") for k in range(3)]
            self.assertEqual(len(set(row)), 3)
            self.assertTrue(all(e < 12 for e in row))

    def test_what_is_not_published_is_refused(self):
        self.refused("synth", "--shape", "gpt-oss-120b", "--format", "modelopt", "o", names=["mxfp4"])
        self.refused("synth", "--shape", "r1", "--format", "mxfp4", "o", names=["modelopt"])
        self.refused("synth", "--shape", "tiny", "--experts", "10:13", "o", names=["11", "12"])
        self.refused("synth", "--shape", "tiny", "--layers", "5", "o", names=["3", "4"])
        self.refused("synth", "--shape", "H=48,I=64,E=4,K=2", "--format", "mxfp4", "o", names=["H=48"])


if __name__ == "__main__":
    unittest.main()
