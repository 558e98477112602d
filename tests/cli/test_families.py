# SPDX-License-Identifier: Apache-2.0
"""A sample of every family: what inspect says of it, and that it runs or is refused by name."""
import json
import os
import shutil
import struct
import unittest

from test_quantize import widen
from tool import Case, read_safetensors, write_safetensors


class Families(Case):
    def changed(self, name, source, tensors, **config):
        """A checkpoint with the config of `source`, in which keys with the value None are dropped."""
        out = self.path(name)
        os.mkdir(out)
        write_safetensors(os.path.join(out, "model.safetensors"), tensors)
        with open(os.path.join(source, "config.json")) as file:
            merged = {**json.load(file), **config}
        with open(os.path.join(out, "config.json"), "w") as file:
            json.dump({k: v for k, v in merged.items() if v is not None}, file)
        return out

    def sample(self, name):
        """(path, model_type, format, rule of the router)"""
        if name.startswith("gguf"):
            model = name[5:]
            source = self.synth(model, "--container", "gguf", name=name)
            return os.path.join(source, "model.gguf"), *{
                "deepseek-v4-flash": ("deepseek4", "mxfp4", "sqrt-softplus"),
                "deepseek-v3": ("deepseek2", "nvfp4", "sigmoid"),
                "qwen3-30b-a3b": ("qwen3moe", "nvfp4", "softmax"),
                "gpt-oss-20b": ("gpt-oss", "mxfp4", "softmax-selected")}[model]
        if name == "modelopt-nvfp4":
            return self.synth("deepseek-v3", name=name), "deepseek_v3", "nvfp4", "sigmoid"
        if name == "gpt-oss":
            return self.synth("gpt-oss-20b", name=name), "gpt_oss", "mxfp4", "softmax-selected"
        v4 = self.synth("deepseek-v4-flash", name=name + "-source")
        tensors = read_safetensors(os.path.join(v4, "model.safetensors"))
        kind = "mxfp4"
        if name == "deepseek-v4":
            out = v4
        elif name.startswith("compressed-tensors"):
            kind, out = name[19:], self.path(name)
            self.good("convert", v4, out, "--to", "compressed-tensors", "--format", kind)
        elif name == "mimo-mxfp4":
            out = self.changed(name, v4, {
                n.replace(".scale", ".weight_scale"): ("U8" if d in ("I8", "F8_E8M0") else d, *rest)
                for n, (d, *rest) in tensors.items()}, expert_dtype=None,
                quantization_config={"quant_method": "fp8", "store_dtype": "mxfp4"})
        else:
            kind = name
            out = self.changed(name, v4, widen(tensors, name), expert_dtype=name,
                               quantization_config={"weight_block_size": [1, 32]})
        return out, "deepseek_v4", kind, "sqrt-softplus"

    def test_every_family_is_described_and_run(self):
        for name in ["deepseek-v4", "modelopt-nvfp4", "compressed-tensors-mxfp4",
                     "compressed-tensors-nvfp4", "gpt-oss", "mimo-mxfp4", "fp8", "bf16",
                     "gguf-deepseek-v4-flash", "gguf-deepseek-v3", "gguf-qwen3-30b-a3b",
                     "gguf-gpt-oss-20b"]:
            with self.subTest(name):
                path, model_type, kind, rule = self.sample(name)
                report = self.good_json("inspect", path)
                layer, = report["layers"]
                self.assertTrue(name.startswith(report["family"]))
                self.assertEqual((report["model_type"], layer["format"], layer["router"]["rule"]),
                                 (model_type, kind, rule))
                self.assertEqual(layer["bias"], "gpt-oss" in name)
                text = self.good("inspect", path)
                for part in [path, report["family"], kind, rule]:
                    self.assertIn(part, text)
                if kind in ("fp8", "bf16"):
                    self.fails(2, [path, kind.upper(), "--quantize"], "run", path)
                    path, wide = self.path(name + ".mmoe"), path
                    self.good("prepare", wide, "--quantize", "nvfp4", "--out", path)
                self.good("run", path, "--tokens", 3, "--verify")

    def test_a_format_that_is_not_read_is_named(self):
        v4 = self.synth("deepseek-v4-flash")
        tensors = read_safetensors(os.path.join(v4, "model.safetensors"))
        packed = {}
        for n, (d, s, data) in tensors.items():
            if d == "I8":
                packed[n + "_packed"] = ("I32", [s[0], s[1] // 4], data)
            elif d == "F8_E8M0":
                packed[n.replace(".scale", ".weight_scale")] = ("BF16", s, data * 2)
            else:
                packed[n] = (d, s, data)
        halves = {n: ("F16" if d == "BF16" else d, *rest)
                  for n, (d, *rest) in widen(tensors, "bf16").items()}
        for name, changed, part in [("int4", packed, "integer"), ("f16", halves, "FP16")]:
            with self.subTest(name):
                path = self.changed(name, v4, changed, expert_dtype=None, quantization_config=None)
                self.fails(2, [os.path.join(path, "model.safetensors"), part], "inspect", path)
        gguf = os.path.join(self.synth("qwen3-30b-a3b", "--container", "gguf", name="gguf"),
                            "model.gguf")
        with open(gguf, "rb") as file:
            data = file.read()
        for stem in [b"gate", b"up", b"down"]:
            # The type of the tensor, behind its name and three dimensions: 18 bytes for 32 values.
            name = b"blk.0.ffn_%s_exps.weight" % stem
            at = data.index(name) + len(name) + 4 + 3 * 8
            data = data[:at] + struct.pack("<I", 2) + data[at + 4:]
        shutil.rmtree(os.path.dirname(gguf))
        path = self.path("q4_0.gguf")
        with open(path, "wb") as file:
            file.write(data)
        self.fails(2, [path, "blk.0.ffn_down_exps.weight", "Q4_0"], "inspect", path)


if __name__ == "__main__":
    unittest.main()
