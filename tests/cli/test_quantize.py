# SPDX-License-Identifier: Apache-2.0
"""FP8 and BF16 experts: inspect describes them, prepare rounds them by name, others refuse."""
import json
import os
import struct
import unittest

from tool import Case, read_safetensors, write_safetensors

E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6]
# The E4M3 codes of these values.
E4M3 = [0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C]


def bf16_bytes(exponent, code):
    value = E2M1[code & 7] * 2.0 ** exponent
    return struct.pack("<f", -value if code & 8 else value)[2:]


def widen(tensors, wide):
    """MXFP4 experts as BF16 or as FP8 with a scale for 1 x 32, of the same values."""
    widened = {}
    for name, (dtype, shape, data) in tensors.items():
        if dtype == "F8_E8M0":
            continue
        if dtype != "I8":
            widened[name] = (dtype, shape, data)
            continue
        scale_dtype, scale_shape, scales = tensors[name.replace(".weight", ".scale")]
        codes = [nibble for byte in data for nibble in (byte & 15, byte >> 4)]
        shape = [shape[0], shape[1] * 2]
        if wide == "fp8":
            widened[name] = ("F8_E4M3", shape,
                             bytes(E4M3[c & 7] | (c & 8) << 4 for c in codes))
            widened[name + "_scale_inv"] = ("F32", scale_shape, struct.pack(
                f"<{len(scales)}f", *(2.0 ** (byte - 127) for byte in scales)))
        else:
            table = {byte: [bf16_bytes(byte - 127, c) for c in range(16)] for byte in set(scales)}
            widened[name] = ("BF16", shape, b"".join(table[scales[i // 32]][c]
                                                     for i, c in enumerate(codes)))
    return widened


class Quantize(Case):
    def setUp(self):
        super().setUp()
        self.checkpoint = self.synth("deepseek-v4-flash")

    def widened(self, wide):
        out = self.path(wide)
        os.mkdir(out)
        write_safetensors(os.path.join(out, "model.safetensors"), widen(
            read_safetensors(os.path.join(self.checkpoint, "model.safetensors")), wide))
        with open(os.path.join(self.checkpoint, "config.json")) as file:
            config = json.load(file)
        config["expert_dtype"] = wide
        config["quantization_config"]["weight_block_size"] = [1, 32]
        with open(os.path.join(out, "config.json"), "w") as file:
            json.dump(config, file)
        return out

    def output(self, path):
        out = self.path("y")
        self.good("run", path, "--tokens", 5, "--output", out)
        with open(out, "rb") as file:
            return file.read()

    def test_weights_that_4_bits_hold_give_the_same_bits(self):
        expected = self.output(self.checkpoint)
        for wide in "fp8", "bf16":
            checkpoint = self.widened(wide)
            for format in "mxfp4", "nvfp4":
                with self.subTest((wide, format)):
                    file = self.path(f"{wide}-{format}.mmoe")
                    made = self.good_json("prepare", checkpoint, "--quantize", format, "--out",
                                          file)
                    self.assertEqual(made["quantized"], format)
                    report = self.good_json("inspect", file)["layers"][0]
                    self.assertEqual(report["format"], format)
                    self.assertEqual(report["router"]["rule"], "sqrt-softplus")
                    if format == "mxfp4":
                        self.assertEqual(self.output(file), expected)
            text = self.good("prepare", checkpoint, "--quantize", "mxfp4", "--layer", "all",
                             "--out", self.path(f"{wide}-all"))
            self.assertIn("rounded to mxfp4", text)

    def test_inspect_tells_what_it_found(self):
        for wide, says in ("fp8", "1 x 32"), ("bf16", "not run as they are"):
            checkpoint = self.widened(wide)
            report = self.good_json("inspect", checkpoint)
            self.assertEqual(report["family"], wide)
            layer, = report["layers"]
            narrow, = self.good_json("inspect", self.checkpoint)["layers"]
            self.assertEqual(layer["format"], wide)
            self.assertEqual(layer.get("block"), [1, 32] if wide == "fp8" else None)
            for key in "layer", "hidden", "intermediate", "experts", "topk", "limit", "router":
                self.assertEqual(layer[key], narrow[key])
            text = self.good("inspect", checkpoint)
            for part in [wide, says, "--quantize mxfp4|nvfp4", "sqrt-softplus"]:
                self.assertIn(part, text)

    def test_refusals(self):
        file = self.path("l.mmoe")
        for wide in "fp8", "bf16":
            checkpoint = self.widened(wide)
            for command in ["prepare", "--out", file], ["run"], ["bench"]:
                self.fails(2, [checkpoint, "layer 0", wide.upper(), "--quantize mxfp4 or nvfp4"],
                           command[0], checkpoint, *command[1:])
        self.fails(2, [self.checkpoint, "4 bits already"], "prepare", self.checkpoint,
                   "--quantize", "nvfp4", "--out", file)
        self.fails(2, ["--quantize", "int4", "mxfp4|nvfp4"], "prepare", self.checkpoint,
                   "--quantize", "int4", "--out", file)
        self.assertFalse(os.path.exists(file))


if __name__ == "__main__":
    unittest.main()
