# SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint gives the same bits, and what cannot be converted is refused by name."""
import json
import os
import unittest

from tool import Case, read_safetensors, write_safetensors

MXFP4 = ["deepseek-v4", "compressed-tensors"]


class Convert(Case):
    def output(self, checkpoint, layer, *options):
        out = self.path("y")
        self.good("run", checkpoint, "--layer", layer, "--tokens", 5, "--output", out, *options)
        with open(out, "rb") as file:
            return file.read()

    def converted(self, checkpoint, family, *options):
        out = self.path(f"{os.path.basename(checkpoint)}-{family}{''.join(options)}")
        made = self.good_json("convert", checkpoint, out, "--to", family, *options)
        self.assertEqual((made["path"], made["out"], made["to"]), (checkpoint, out, family))
        self.assertEqual(made["files"], len([n for n in os.listdir(out) if "-of-" in n]) or 1)
        self.assertEqual(self.good_json("inspect", out)["family"], family)
        return out

    def test_every_way_gives_the_same_bits(self):
        """With the router's own routes, by which the routers are compared too."""
        for model in ["deepseek-v4-flash", "deepseek-v4.1-flash", "gpt-oss-20b"]:
            checkpoint = self.synth(model, "--layers", "2", name=model)
            gpt_oss = ["gpt-oss"] if model.startswith("gpt-oss") else []
            expected = [self.output(checkpoint, layer, "--verify") for layer in (0, 1)]
            ways = [[family] for family in MXFP4 + gpt_oss + ["modelopt-nvfp4"]]
            ways.append(["compressed-tensors", "--format", "nvfp4"])
            for way in ways:
                with self.subTest(model=model, way=way):
                    out = self.converted(checkpoint, *way)
                    for layer in 0, 1:
                        self.assertEqual(self.output(out, layer), expected[layer])
                    a = self.good_json("inspect", checkpoint)["layers"]
                    b = self.good_json("inspect", out)["layers"]
                    for one, other in zip(a, b):
                        for key in ["layer", "hidden", "intermediate", "experts", "topk", "alpha",
                                    "offset", "limit", "bias", "router"]:
                            self.assertEqual(one[key], other[key])
            for family in MXFP4:
                for back in MXFP4 + gpt_oss:
                    with self.subTest(model=model, family=family, back=back):
                        out = self.converted(self.path(f"{model}-{family}"), back)
                        self.assertEqual(self.output(out, 1), expected[1])

    def test_nvfp4(self):
        checkpoint = self.synth("deepseek-v3")
        self.fails(2, ["global scale", "divisor", "experts."], "convert", checkpoint,
                   self.path("out"), "--to", "compressed-tensors")
        self.fails(2, ["NVFP4", "rounding"], "convert", checkpoint, self.path("out"), "--to",
                   "deepseek-v4")
        self.assertEqual(self.output(self.converted(checkpoint, "modelopt-nvfp4"), 3),
                         self.output(checkpoint, 3))
        self.assertFalse(os.path.exists(self.path("out")))

    def test_gguf(self):
        """Experts, biases, routers and what the metadata say of them; hash layers come first."""
        mxfp4 = [[family] for family in MXFP4 + ["modelopt-nvfp4"]]
        mxfp4.append(["compressed-tensors", "--format", "nvfp4"])
        for model, form, layers, ways in [
                ("deepseek-v4-flash", "mxfp4", (0, 3), mxfp4),
                ("gpt-oss-20b", "mxfp4", (0, 1), mxfp4 + [["gpt-oss"]]),
                ("qwen3-30b-a3b", "mxfp4", (0, 1), mxfp4),
                ("deepseek-v3", "nvfp4", (3, 4), [["modelopt-nvfp4"]]),
                ("qwen3-30b-a3b", "nvfp4", (0, 1), [["modelopt-nvfp4"]]),
                ("gpt-oss-20b", "nvfp4", (0, 1), [["modelopt-nvfp4"]])]:
            name = f"{model}-{form}"
            source = self.synth(model, "--container", "gguf", "--format", form, "--layers", "4",
                                name=name)
            told = self.good_json("inspect", source)["layers"]
            expected = [self.output(source, layer) for layer in layers]
            for way in ways:
                with self.subTest(model=name, way=way):
                    out = self.converted(source, *way)
                    self.assertEqual([self.output(out, layer) for layer in layers], expected)
                    made = self.good_json("inspect", out)["layers"]
                    for one, other in zip(told, made):
                        for key in ["layer", "hidden", "intermediate", "experts", "topk", "alpha",
                                    "offset", "limit", "bias", "router"]:
                            self.assertEqual(one[key], other[key])
            if ways is not mxfp4:
                continue
            with self.subTest(model=name, way="and on"):
                out = self.converted(self.path(f"{name}-compressed-tensors"), "deepseek-v4")
                self.assertEqual([self.output(out, layer) for layer in layers], expected)

    def test_gguf_config(self):
        for model, family, expected in [
                ("gpt-oss-20b", "gpt-oss", {
                    "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0,
                    "quantization_config": {"quant_method": "mxfp4"}}),
                ("deepseek-v4-flash", "deepseek-v4", {
                    "model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0,
                    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
                    "routed_scaling_factor": 1.5, "num_hash_layers": 3, "expert_dtype": "fp4"}),
                ("deepseek-v3", "modelopt-nvfp4", {
                    "model_type": "deepseek_v3", "hidden_act": "silu", "scoring_func": "sigmoid",
                    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
                    "topk_group": 4})]:
            with self.subTest(model):
                source = self.synth(model, "--container", "gguf", name=model)
                layer = self.good_json("inspect", source)["layers"][0]
                out = self.converted(source, family)
                with open(os.path.join(out, "config.json")) as file:
                    config = json.load(file)
                gpt_oss = family == "gpt-oss"
                sizes = {"hidden_size": layer["hidden"], "num_experts_per_tok": layer["topk"],
                         "intermediate_size" if gpt_oss else "moe_intermediate_size":
                             layer["intermediate"],
                         "num_local_experts" if gpt_oss else "n_routed_experts": layer["experts"]}
                self.assertGreater(config.pop("num_hidden_layers"), layer["layer"])
                if family == "modelopt-nvfp4":
                    self.assertEqual(config.pop("quantization_config")["quant_algo"], "NVFP4")
                self.assertEqual(config, {**expected, **sizes})

    def test_gguf_refusals(self):
        gguf = self.synth("deepseek-v4-flash", "--container", "gguf", name="v4")
        self.fails(2, ["model.gguf", "blk.0.", "no biases", "deepseek_v4"], "convert", gguf,
                   self.path("out"), "--to", "gpt-oss")
        gguf = self.synth("deepseek-v3", "--container", "gguf", name="v3")
        self.fails(2, ["model.gguf", "blk.3.ffn_", "expert", "global scale", "divisor"], "convert",
                   gguf, self.path("out"), "--to", "compressed-tensors")
        self.fails(2, ["model.gguf", "blk.3.ffn_", "NVFP4", "rounding"], "convert", gguf,
                   self.path("out"), "--to", "deepseek-v4")
        self.assertEqual(sorted(os.listdir(self.directory)), ["v3", "v4"])

    def test_scales_too_far_apart(self):
        checkpoint = self.synth("deepseek-v4-flash")
        file = os.path.join(checkpoint, "model.safetensors")
        tensors = read_safetensors(file)
        name = "layers.0.ffn.experts.4.w1.scale"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:77] + bytes([max(data) - 18]) + data[78:])
        write_safetensors(file, tensors)
        row, block = divmod(77, shape[1])
        self.fails(2, [name, f"row {row}, block {block}", "18 binades", "17"], "convert",
                   checkpoint, self.path("out"), "--to", "modelopt-nvfp4")
        self.converted(checkpoint, "compressed-tensors")

    def test_text(self):
        checkpoint = self.synth("deepseek-v4-flash")
        text = self.good("convert", checkpoint, self.path("out"), "--to", "compressed-tensors")
        for part in [self.path("out"), "1 file", "deepseek-v4 to compressed-tensors", "mxfp4"]:
            self.assertIn(part, text)

    def test_config_keeps_the_model(self):
        checkpoint = self.synth("deepseek-v4.1-flash")
        out = self.converted(checkpoint, "compressed-tensors")
        configs = []
        for path in checkpoint, out:
            with open(os.path.join(path, "config.json")) as file:
                configs.append(json.load(file))
        quantization = configs[1].pop("quantization_config")
        self.assertEqual(quantization["format"], "mxfp4-pack-quantized")
        for config in configs:
            config.get("text_config", config).pop("quantization_config", None)
            config.pop("quantization_config", None)
            config.pop("expert_dtype", None)
        self.assertEqual(*configs)

    def test_refusals(self):
        checkpoint = self.synth("deepseek-v4-flash")
        out = self.path("out")
        self.fails(2, ["--to", "missing"], "convert", checkpoint, out)
        self.fails(2, ["--to", "gguf", "gpt-oss"], "convert", checkpoint, out, "--to", "gguf")
        self.fails(2, ["PATH DIR", "missing"], "convert", checkpoint, "--to", "gpt-oss")
        self.fails(2, ["biases", "deepseek_v4"], "convert", checkpoint, out, "--to", "gpt-oss")
        self.fails(2, ["modelopt-nvfp4", "mxfp4"], "convert", checkpoint, out, "--to",
                   "modelopt-nvfp4", "--format", "mxfp4")
        self.fails(2, [checkpoint, "not empty"], "convert", checkpoint, checkpoint, "--to",
                   "compressed-tensors")
        self.fails(2, [self.path("no/out")], "convert", checkpoint, self.path("no/out"), "--to",
                   "compressed-tensors")
        self.fails(2, [self.path("nowhere")], "convert", self.path("nowhere"), out, "--to",
                   "compressed-tensors")
        self.assertEqual(sorted(os.listdir(self.directory)), ["checkpoint"])


if __name__ == "__main__":
    unittest.main()
