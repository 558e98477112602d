# SPDX-License-Identifier: Apache-2.0
"""Layers small enough to be computed by hand, where readers of other projects went wrong."""
import json
import os
import struct
import unittest

from tool import Case, bf16, f32, i32, read_safetensors, write_safetensors

SIZE = 32  # hidden and intermediate
EXPERTS = 2
ONE, SIX, MINUS_SIX = 2, 7, 15  # E2M1


def column(code):
    """Codes that take x[0] in every row."""
    return bytes([code] + [0] * (SIZE // 2 - 1)) * SIZE


def identity():
    rows = []
    for row in range(SIZE):
        codes = bytearray(SIZE // 2)
        codes[row // 2] = ONE << 4 * (row % 2)
        rows.append(bytes(codes))
    return b"".join(rows)


class Values(Case):
    def checkpoint(self, name, tensors, config):
        path = self.path(name)
        os.mkdir(path)
        write_safetensors(os.path.join(path, "model.safetensors"), tensors)
        with open(os.path.join(path, "config.json"), "w") as file:
            json.dump(config, file)
        return path

    def output(self, checkpoint, x, weight=1.0):
        """Row of the output for a token that is x, 0, 0, ... and goes to expert 1."""
        source, out = self.path("x"), self.path("y")
        write_safetensors(source, {"hidden_states": ("BF16", [1, SIZE], bf16([x] + [0] * 31)),
                                   "topk_ids": ("I32", [1, 1], i32([1])),
                                   "topk_weights": ("F32", [1, 1], f32([weight]))})
        self.good("run", checkpoint, "--input", source, "--output", out, "--verify")
        data = read_safetensors(out)["output"][2]
        return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]

    def mxfp4(self, matrices, config):
        """{w1, w3, w2: (codes, scale byte)} as DeepSeek-V4 stores them."""
        tensors = {}
        for expert in range(EXPERTS):
            for name, (codes, scale) in matrices.items():
                name = f"layers.0.ffn.experts.{expert}.{name}"
                tensors[f"{name}.weight"] = ("I8", [SIZE, SIZE // 2], codes)
                tensors[f"{name}.scale"] = ("F8_E8M0", [SIZE, 1], bytes([scale]) * SIZE)
        return self.checkpoint(config["model_type"], tensors, config)

    def nvfp4(self, matrices, config):
        """{gate_proj, up_proj, down_proj: (codes, scale byte, global)} as ModelOpt stores them."""
        tensors = {}
        for expert in range(EXPERTS):
            for name, (codes, scale, scale_2) in matrices.items():
                name = f"model.layers.0.mlp.experts.{expert}.{name}"
                tensors[f"{name}.weight"] = ("U8", [SIZE, SIZE // 2], codes)
                tensors[f"{name}.weight_scale"] = ("F8_E4M3", [SIZE, 2], bytes([scale]) * SIZE * 2)
                tensors[f"{name}.weight_scale_2"] = ("F32", [], f32([scale_2]))
        return self.checkpoint(config["model_type"], tensors, config)

    def gpt_oss(self, gate, up, down_bias):
        """Gate and up rows in turn, each of one code and the scale 2."""
        rows = b"".join(bytes([code] + [0] * (SIZE // 2 - 1)) for _ in range(SIZE)
                        for code in (gate, up))
        fused = "model.layers.0.mlp.experts."
        return self.checkpoint("gpt_oss", {
            f"{fused}gate_up_proj_blocks": ("U8", [EXPERTS, 2 * SIZE, 1, 16], rows * EXPERTS),
            f"{fused}gate_up_proj_scales": ("U8", [EXPERTS, 2 * SIZE, 1],
                                            bytes([128]) * 2 * SIZE * EXPERTS),
            f"{fused}gate_up_proj_bias": ("BF16", [EXPERTS, 2 * SIZE],
                                          bytes(2 * 2 * SIZE * EXPERTS)),
            f"{fused}down_proj_blocks": ("U8", [EXPERTS, SIZE, 1, 16], identity() * EXPERTS),
            f"{fused}down_proj_scales": ("U8", [EXPERTS, SIZE, 1], bytes([127]) * SIZE * EXPERTS),
            f"{fused}down_proj_bias": ("BF16", [EXPERTS, SIZE], bf16([down_bias] * SIZE * EXPERTS)),
        }, {"model_type": "gpt_oss"})

    def test_activation_of_each_model(self):
        """
        Gate 12, up -12. DeepSeek-V4 limits both to 10: -99.9955; gpt-oss to 7, and adds 1 to up:
        -41.9997; others do not: -143.9991. FC2 reads these as E4M3: -96, -40, -144. Gate and up
        the other way round would give almost 0.
        """
        gate, up, down = (column(SIX), 128), (column(MINUS_SIX), 128), (identity(), 127)
        v4 = self.mxfp4({"w1": gate, "w3": up, "w2": down}, {"model_type": "deepseek_v4"})
        self.assertEqual(self.output(v4, 1), [-96] * SIZE)
        self.assertEqual(self.output(self.gpt_oss(SIX, MINUS_SIX, 0), 1), [-40] * SIZE)
        two, one = 0x40, 0x38  # E4M3
        for model, names, expected in [("qwen3_moe", {}, -144), ("deepseek_v3", {}, -144),
                                       ("glm4_moe", {"swiglu_limit": 10}, -96),
                                       ("minimax_m3", {}, -40)]:
            with self.subTest(model):
                checkpoint = self.nvfp4({"gate_proj": (column(SIX), two, 1),
                                         "up_proj": (column(MINUS_SIX), two, 1),
                                         "down_proj": (identity(), one, 1)},
                                        {"model_type": model, **names})
                self.assertEqual(self.output(checkpoint, 1), [expected] * SIZE)

    def test_bias_of_down_is_weighted(self):
        os.rename(self.gpt_oss(SIX, MINUS_SIX, 1), self.path("biased"))
        self.assertEqual(self.output(self.path("biased"), 1, 0.5), [-19.5] * SIZE)

    def test_sums_before_the_global_scale_exceed_fp16(self):
        """6 * 448 * 100 = 268800 in FP16 is infinite; E4M3 with a scale makes it 256 * 2^10."""
        largest, one = 0x7E, 0x38
        checkpoint = self.nvfp4({"gate_proj": (column(SIX), largest, 1),
                                 "up_proj": (column(ONE), one, 0.01),
                                 "down_proj": (identity(), one, 2.0 ** -10)},
                                {"model_type": "qwen3_moe"})
        self.assertEqual(self.output(checkpoint, 100), [256] * SIZE)

    def test_gate_and_up_have_global_scales_of_their_own(self):
        """14 * 56 = 784, in E4M3 768. With one scale for both it would be 192 or 3072."""
        one, eight = 0x38, 0x50
        checkpoint = self.nvfp4({"gate_proj": (column(ONE), eight, 0.5),
                                 "up_proj": (column(ONE), eight, 2),
                                 "down_proj": (identity(), one, 1)}, {"model_type": "qwen3_moe"})
        self.assertEqual(self.output(checkpoint, 3.5), [768] * SIZE)


if __name__ == "__main__":
    unittest.main()
