# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that synth writes: geometry, names, dtypes, config, weights, reproducibility."""
import json
import os
import struct
import unittest
from math import ceil

from tool import MODELS, Case, read_safetensors

# hidden, intermediate, experts, top-k, first expert layer, format, tensor prefix
FACTS = {
    "deepseek-v4-flash": (4096, 2048, 256, 6, 0, "mxfp4", "layers.0.ffn.experts"),
    "deepseek-v4-pro": (7168, 3072, 384, 6, 0, "mxfp4", "layers.0.ffn.experts"),
    "deepseek-v4.1-flash": (5120, 2304, 384, 6, 0, "mxfp4", "layers.0.ffn.experts"),
    "deepseek-v3": (7168, 2048, 256, 8, 3, "nvfp4", "model.layers.3.mlp.experts"),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0, "nvfp4", "model.layers.0.mlp.experts"),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0, "nvfp4", "model.layers.0.mlp.experts"),
    "gpt-oss-20b": (2880, 2880, 32, 4, 0, "mxfp4", "model.layers.0.mlp.experts"),
    "gpt-oss-120b": (2880, 2880, 128, 4, 0, "mxfp4", "model.layers.0.mlp.experts"),
}


def scaled(value, scale, multiple):
    return ceil(value * scale / multiple - 1e-9) * multiple


def config_of(checkpoint):
    with open(os.path.join(checkpoint, "config.json")) as file:
        return json.load(file)


def tensors_of(checkpoint):
    tensors = {}
    for name in os.listdir(checkpoint):
        if name.endswith(".safetensors"):
            tensors.update(read_safetensors(os.path.join(checkpoint, name)))
    return tensors


def nibbles(data):
    for byte in data:
        yield byte & 15
        yield byte >> 4


class Geometry(Case):
    def test_list_holds_the_public_models(self):
        models = {m["model"]: m for m in self.good_json("synth", "--list")["models"]}
        self.assertEqual(set(models), set(MODELS))
        for name, (hidden, intermediate, experts, topk, _, form, _) in FACTS.items():
            with self.subTest(name):
                m = models[name]
                self.assertEqual(
                    (m["hidden"], m["intermediate"], m["experts"], m["topk"], m["format"]),
                    (hidden, intermediate, experts, topk, form))
        text = self.good("synth", "--list")
        for name in MODELS:
            self.assertIn(f"\n{name} ", text)

    def test_scale(self):
        for name, (hidden, intermediate, experts, topk, *_) in FACTS.items():
            for scale in ["0.001", "0.03", "0.0625"]:
                with self.subTest(name=name, scale=scale):
                    made = self.good_json("synth", "--model", name, "--scale", scale, "--out",
                                          self.path(name + scale))
                    s = float(scale)
                    self.assertEqual(made["hidden"], scaled(hidden, s, 64))
                    self.assertEqual(made["intermediate"], scaled(intermediate, s, 64))
                    self.assertEqual(made["experts"],
                                     max(scaled(experts, s, 8), scaled(2 * topk, 1, 8)))
                    self.assertEqual(made["topk"], topk)

    def test_tensors(self):
        for model, (_, _, _, topk, _, form, prefix) in FACTS.items():
            with self.subTest(model):
                checkpoint = self.synth(model, name=model)
                if model.startswith("gpt-oss"):
                    self.check_gpt_oss(tensors_of(checkpoint))
                    continue
                self.check_tensors(tensors_of(checkpoint), prefix, form, model, topk)

    def test_nvfp4_of_deepseek_v4(self):
        checkpoint = self.synth("deepseek-v4-flash", "--format", "nvfp4")
        self.check_tensors(tensors_of(checkpoint), "layers.0.ffn.experts", "nvfp4",
                           "deepseek-v4-flash", 6)
        quantization = config_of(checkpoint)["quantization_config"]
        self.assertEqual(quantization["quant_method"], "fp8")
        self.assertEqual(quantization["moe_quant_algo"], "NVFP4")
        self.assertEqual(quantization["group_size"], 16)

    def check_gpt_oss(self, tensors):
        h, i, e = 64, 64, 8
        block = "model.layers.0.mlp."
        expected = {"router.weight": ("BF16", [e, h]), "router.bias": ("BF16", [e])}
        for part, rows, columns in [("gate_up_proj", 2 * i, h), ("down_proj", h, i)]:
            expected[f"experts.{part}_blocks"] = ("U8", [e, rows, columns // 32, 16])
            expected[f"experts.{part}_scales"] = ("U8", [e, rows, columns // 32])
            expected[f"experts.{part}_bias"] = ("BF16", [e, rows])
        self.assertEqual({name: t[:2] for name, t in tensors.items()},
                         {block + name: what for name, what in expected.items()})
        for name, (_, _, data) in tensors.items():
            half = len(data) // 2  # experts differ
            self.assertNotEqual(data[:half], data[half:], name)
        codes_of_all = tensors[block + "experts.gate_up_proj_blocks"][2]
        for at in range(0, len(codes_of_all), 16):
            codes = nibbles(codes_of_all[at:at + 16])
            self.assertGreaterEqual(max(c & 7 for c in codes), 5)

    def check_tensors(self, tensors, prefix, form, model, topk):
        v4 = prefix.startswith("layers.")
        gate, up, down = ("w1", "w3", "w2") if v4 else ("gate_proj", "up_proj", "down_proj")
        intermediate, half = tensors[f"{prefix}.0.{gate}.weight"][1]
        hidden, experts = 2 * half, 0
        while f"{prefix}.{experts}.{gate}.weight" in tensors:
            for matrix, rows, columns in [(gate, intermediate, hidden), (up, intermediate, hidden),
                                          (down, hidden, intermediate)]:
                name = f"{prefix}.{experts}.{matrix}"
                expected = {".weight": ("I8", [rows, columns // 2]),
                            ".scale": ("F8_E8M0", [rows, columns // 32])}
                if form == "nvfp4":
                    expected = {".weight": ("U8", [rows, columns // 2]),
                                ".weight_scale": ("F8_E4M3", [rows, columns // 16]),
                                ".weight_scale_2": ("F32", []), ".input_scale": ("F32", [])}
                for suffix, what in expected.items():
                    self.assertEqual(tensors.pop(name + suffix)[:2], what, name + suffix)
            experts += 1
        router = prefix.replace("experts", "gate.")
        expected = {"weight": ("BF16", [experts, hidden])}
        if model in ("deepseek-v4-flash", "deepseek-v4-pro"):
            expected["tid2eid"] = ("I64", [129280, topk])
        elif model == "deepseek-v4.1-flash":
            expected["bias"] = expected["bias_vl"] = ("F32", [experts])
        elif model == "deepseek-v3":
            expected["e_score_correction_bias"] = ("F32", [experts])
        self.assertEqual({name: t[:2] for name, t in tensors.items()},
                         {router + part: what for part, what in expected.items()})

    def test_hash_layers_are_the_first_three(self):
        tensors = tensors_of(self.synth("deepseek-v4-flash", "--layers", "4"))
        for layer in range(4):
            self.assertEqual(f"layers.{layer}.ffn.gate.tid2eid" in tensors, layer < 3)
            self.assertEqual(f"layers.{layer}.ffn.gate.bias" in tensors, layer == 3)
        table = tensors["layers.1.ffn.gate.tid2eid"][2]
        for row in struct.iter_unpack("<6q", table[:48 * 1000]):
            self.assertEqual(len(set(row)), 6)
            self.assertTrue(all(0 <= expert < 16 for expert in row))


class Config(Case):
    def test_deepseek_v4(self):
        config = config_of(self.synth("deepseek-v4-flash"))
        for key, value in {"model_type": "deepseek_v4", "hidden_size": 128,
                           "moe_intermediate_size": 64, "n_routed_experts": 16,
                           "num_experts_per_tok": 6, "num_hidden_layers": 43,
                           "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
                           "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
                           "norm_topk_prob": True, "expert_dtype": "fp4"}.items():
            self.assertEqual(config[key], value, key)
        self.assertEqual(config["quantization_config"]["weight_block_size"], [128, 128])

    def test_deepseek_v4_pro_does_not_name_the_expert_dtype(self):
        config = config_of(self.synth("deepseek-v4-pro"))
        self.assertNotIn("expert_dtype", config)
        self.assertEqual(config["routed_scaling_factor"], 2.5)

    def test_deepseek_v41_nests(self):
        config = config_of(self.synth("deepseek-v4.1-flash"))
        self.assertNotIn("hidden_size", config)
        self.assertEqual(config["text_config"]["hidden_size"], 128)
        self.assertEqual(config["text_config"]["model_type"], "deepseek_v41_text")
        self.assertEqual(config["quantization_config"]["expert_dtype"], "fp4")
        self.assertEqual(config["quantization_config"]["weight_block_size"], [32, 32])

    def test_deepseek_v3(self):
        checkpoint = self.synth("deepseek-v3")
        config = config_of(checkpoint)
        for key, value in {"n_group": 8, "topk_group": 4, "scoring_func": "sigmoid",
                           "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}.items():
            self.assertEqual(config[key], value, key)
        self.assertEqual(config["quantization_config"]["quant_method"], "modelopt")
        with open(os.path.join(checkpoint, "hf_quant_config.json")) as file:
            quantization = json.load(file)["quantization"]
        self.assertEqual((quantization["quant_algo"], quantization["group_size"]), ("NVFP4", 16))

    def test_gpt_oss(self):
        config = config_of(self.synth("gpt-oss-120b"))
        for key, value in {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
                           "num_local_experts": 8, "num_experts_per_tok": 4,
                           "num_hidden_layers": 36, "swiglu_limit": 7.0}.items():
            self.assertEqual(config[key], value, key)
        self.assertEqual(config["quantization_config"]["quant_method"], "mxfp4")

    def test_qwen3(self):
        config = config_of(self.synth("qwen3-235b-a22b"))
        for key, value in {"model_type": "qwen3_moe", "num_experts": 16, "norm_topk_prob": True,
                           "num_experts_per_tok": 8, "num_hidden_layers": 94}.items():
            self.assertEqual(config[key], value, key)


class Weights(Case):
    def test_mxfp4_uses_the_smallest_scale_that_does_not_saturate(self):
        tensors = tensors_of(self.synth("deepseek-v4-flash"))
        for matrix in ["w1", "w2", "w3"]:
            codes = list(nibbles(tensors[f"layers.0.ffn.experts.5.{matrix}.weight"][2]))
            for block in range(0, len(codes), 32):
                # The largest value is above half of 6 times the scale.
                self.assertGreaterEqual(max(c & 7 for c in codes[block:block + 32]), 5)

    def test_nvfp4_blocks_reach_the_largest_code(self):
        tensors = tensors_of(self.synth("qwen3-30b-a3b"))
        largest = {}
        for matrix in ["gate_proj", "up_proj", "down_proj"]:
            name = f"model.layers.0.mlp.experts.3.{matrix}"
            codes = list(nibbles(tensors[name + ".weight"][2]))
            for block in range(0, len(codes), 16):
                self.assertEqual(max(c & 7 for c in codes[block:block + 16]), 7)
            scales = tensors[name + ".weight_scale"][2]
            self.assertGreater(min(scales), 0)
            largest[matrix] = max(scales)
        # 448: the global scale is amax / (6 * 448), of gate and up together.
        self.assertEqual(max(largest["gate_proj"], largest["up_proj"]), 0x7e)
        self.assertEqual(largest["down_proj"], 0x7e)

    def test_gate_and_up_share_their_global_scale(self):
        tensors = tensors_of(self.synth("qwen3-30b-a3b"))
        prefix = "model.layers.0.mlp.experts."
        globals_ = [[tensors[f"{prefix}{e}.{m}_proj.weight_scale_2"][2]
                     for m in ("gate", "up", "down")] for e in range(16)]
        for gate, up, _ in globals_:
            self.assertEqual(gate, up)
        self.assertEqual(len({gate for gate, _, _ in globals_}), 16)

    def test_values_are_spread_like_a_normal_distribution(self):
        tensors = tensors_of(self.synth("qwen3-235b-a22b"))
        codes = list(nibbles(tensors["model.layers.0.mlp.experts.0.gate_proj.weight"][2]))
        share = [sum(c & 7 == k for c in codes) / len(codes) for k in range(8)]
        self.assertTrue(0.4 < sum(c >> 3 for c in codes) / len(codes) < 0.6, "signs")
        self.assertTrue(all(s > 0.02 for s in share), share)

    def test_seed(self):
        first = tensors_of(self.synth(name="a"))
        self.assertEqual(first, tensors_of(self.synth(name="b")))
        other = tensors_of(self.synth("qwen3-30b-a3b", "--seed", "2", name="c"))
        self.assertEqual(first.keys(), other.keys())
        for name, tensor in first.items():
            if not name.endswith("input_scale"):
                self.assertNotEqual(tensor, other[name], name)

    def test_threads_do_not_matter(self):
        for model in ["deepseek-v4-pro", "deepseek-v3", "gpt-oss-20b"]:
            one = tensors_of(self.synth(model, "--threads", "1", name=model + "1"))
            many = tensors_of(self.synth(model, "--threads", "7", name=model + "7"))
            self.assertEqual(one, many)

    def test_layers_and_experts_differ(self):
        tensors = tensors_of(self.synth("qwen3-30b-a3b", "--layers", "2"))
        weights = [t[2] for name, t in tensors.items() if name.endswith("_proj.weight")]
        self.assertEqual(len(weights), 2 * 16 * 3)
        self.assertEqual(len(set(weights)), len(weights))


class Directory(Case):
    def test_one_layer_is_one_file(self):
        checkpoint = self.synth()
        self.assertEqual(sorted(os.listdir(checkpoint)),
                         ["config.json", "hf_quant_config.json", "model.safetensors"])

    def test_layers_are_shards_with_an_index(self):
        checkpoint = self.synth("deepseek-v3", "--layers", "3")
        shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        self.assertEqual(sorted(os.listdir(checkpoint)),
                         sorted(shards + ["config.json", "hf_quant_config.json",
                                          "model.safetensors.index.json"]))
        with open(os.path.join(checkpoint, "model.safetensors.index.json")) as file:
            index = json.load(file)
        total = 0
        for i, shard in enumerate(shards):
            tensors = read_safetensors(os.path.join(checkpoint, shard))
            total += sum(len(t[2]) for t in tensors.values())
            for name in tensors:
                self.assertEqual(index["weight_map"].pop(name), shard)
                self.assertIn(f".{3 + i}.", name)
        self.assertEqual(index["weight_map"], {})
        self.assertEqual(index["metadata"]["total_size"], total)

    def test_an_empty_directory_is_taken(self):
        os.mkdir(self.path("checkpoint"))
        self.synth()
        self.assertEqual(os.listdir(self.directory), ["checkpoint"])

    def test_trailing_slash(self):
        self.good("synth", "--model", "qwen3-30b-a3b", "--scale", "0.01", "--out",
                  self.path("a/"))
        self.assertEqual(os.listdir(self.directory), ["a"])

    def test_nothing_is_overwritten(self):
        out = self.path("out")
        os.mkdir(out)
        with open(os.path.join(out, "mine"), "w") as file:
            file.write("mine")
        self.fails(2, [out], "synth", "--model", "deepseek-v3", "--scale", "0.01", "--out", out)
        self.fails(2, [os.path.join(out, "mine")], "synth", "--model", "deepseek-v3", "--scale",
                   "0.01", "--out", os.path.join(out, "mine"))
        self.assertEqual(os.listdir(out), ["mine"])
        self.assertEqual(os.listdir(self.directory), ["out"])

    def test_parent_is_missing(self):
        out = self.path("no/where")
        self.fails(2, [out], "synth", "--model", "deepseek-v3", "--scale", "0.01", "--out", out)
        self.assertEqual(os.listdir(self.directory), [])

    def test_bad_requests(self):
        out = self.path("out")
        self.fails(2, ["--model"], "synth", "--out", out)
        self.fails(2, ["--out"], "synth", "--model", "deepseek-v3")
        self.fails(2, ["deepseek-v9"], "synth", "--model", "deepseek-v9", "--out", out)
        self.fails(2, ["--layers 59", "58"], "synth", "--model", "deepseek-v3", "--layers", "59",
                   "--out", out)
        self.fails(2, ["nvfp4", "mxfp4", "gpt-oss-20b"], "synth", "--model", "gpt-oss-20b",
                   "--format", "nvfp4", "--out", out)
        self.fails(2, ["mxfp4", "nvfp4", "qwen3-30b-a3b"], "synth", "--model", "qwen3-30b-a3b",
                   "--format", "mxfp4", "--out", out)
        self.assertEqual(os.listdir(self.directory), [])


if __name__ == "__main__":
    unittest.main()
