# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what synth writes, and that inspect, prepare and run read it."""
import os
import shutil
import struct
import unittest

from tool import MODELS, Case

ARCHITECTURES = {"deepseek-v4": "deepseek4", "deepseek-v3": "deepseek2", "qwen3": "qwen3moe",
                 "gpt-oss": "gpt-oss"}
BLOCKS = {0: ("F32", 1, 4), 26: ("I32", 1, 4), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36)}
SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Reader:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.at = 0

    def take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text(self):
        return self.take(f"{self.take('Q')}s").decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            kind, n = self.take("IQ")
            return [self.value(kind) for _ in range(n)]
        return self.take(SIZES[kind])


def read_gguf(path):
    """({key: value}, {name: (type, shape, bytes)}), with shapes turned around."""
    r = Reader(path)
    magic, version, n_tensors, n_keys = r.take("4sIQQ")
    assert (magic, version) == (b"GGUF", 3)
    keys = {}
    for _ in range(n_keys):
        key = r.text()
        keys[key] = r.value(r.take("I"))
    infos = []
    for _ in range(n_tensors):
        name = r.text()
        dims = [r.take("Q") for _ in range(r.take("I"))]
        infos.append((name, dims, *r.take("IQ")))
    start, end, tensors = r.at + -r.at % 32, 0, {}
    for name, dims, kind, offset in infos:
        assert offset == end + -end % 32, name
        kind, values, size = BLOCKS[kind]
        assert dims[0] % values == 0, name
        n = size
        for dim in dims:
            n *= dim
        end = offset + n // values
        tensors[name] = (kind, dims[::-1], r.data[start + offset:start + end])
    assert len(r.data) == start + end + -end % 32
    return keys, tensors


class Synth(Case):
    def gguf(self, model, *options, name="gguf"):
        return os.path.join(self.synth(model, "--container", "gguf", *options, name=name),
                            "model.gguf")

    def test_files(self):
        for model in MODELS:
            with self.subTest(model):
                path = self.gguf(model, "--layers", "2", name=model)
                self.assertEqual(os.listdir(os.path.dirname(path)), ["model.gguf"])
                keys, tensors = read_gguf(path)
                architecture = next(a for start, a in ARCHITECTURES.items()
                                    if model.startswith(start))
                self.assertEqual(keys["general.architecture"], architecture)
                hidden, intermediate, experts = (
                    keys[f"{architecture}.{key}"] for key in
                    ("embedding_length", "expert_feed_forward_length", "expert_count"))
                first = 3 if model == "deepseek-v3" else 0
                kind = "NVFP4" if model in ("deepseek-v3",) or "qwen3" in model else "MXFP4"
                for layer in (first, first + 1):
                    for stem, shape in {"gate": [experts, intermediate, hidden],
                                        "up": [experts, intermediate, hidden],
                                        "down": [experts, hidden, intermediate]}.items():
                        name = f"blk.{layer}.ffn_{stem}_exps."
                        self.assertEqual(tensors[name + "weight"][:2], (kind, shape))
                        self.assertEqual(name + "scale" in tensors, kind == "NVFP4")
                        self.assertEqual(name + "bias" in tensors, architecture == "gpt-oss")
                    self.assertEqual(tensors[f"blk.{layer}.ffn_gate_inp.weight"][:2],
                                     ("F32", [experts, hidden]))

    def test_weights_are_those_of_safetensors(self):
        """Through another container the same model gives the same rows, to the bit."""
        for model in ("gpt-oss-20b", "deepseek-v4-flash", "deepseek-v3", "qwen3-30b-a3b"):
            with self.subTest(model):
                ways = [self.synth(model, name=model), self.gguf(model, name=model + "-gguf")]
                outputs = []
                for i, path in enumerate(ways):
                    out = self.path(f"{model}-{i}.safetensors")
                    self.good("run", path, "--tokens", "5", "--output", out)
                    with open(out, "rb") as file:
                        outputs.append(file.read())
                self.assertEqual(*outputs)

    def test_both_formats_of_every_model(self):
        for model in ("gpt-oss-20b", "deepseek-v4-flash", "qwen3-30b-a3b"):
            for form in ("mxfp4", "nvfp4"):
                with self.subTest(model=model, form=form):
                    path = self.gguf(model, "--format", form, name=model + form)
                    run = self.good_json("run", path, "--tokens", "3", "--ranks", "2", "--verify")
                    self.assertTrue(run["verify"]["equal"])
                    layer, = self.good_json("inspect", path)["layers"]
                    self.assertEqual(layer["format"], form)

    def test_requests(self):
        made = self.good_json("synth", "--model", "gpt-oss-20b", "--scale", "0.02", "--layers", "3",
                              "--container", "gguf", "--out", self.path("a"))
        self.assertEqual((made["files"], made["layers"]), (1, 3))
        self.fails(2, ["--container", "zip", "safetensors|gguf"], "synth", "--container", "zip")


class Read(Case):
    def test_inspect(self):
        directory = self.synth("gpt-oss-20b", "--container", "gguf")
        for path in (directory, os.path.join(directory, "model.gguf")):
            report = self.good_json("inspect", path)
            self.assertEqual((report["family"], report["model_type"]), ("gguf", "gpt-oss"))
            layer, = report["layers"]
            self.assertTrue(layer["bias"])
            self.assertEqual([round(layer[k], 4) for k in ("alpha", "offset", "limit")],
                             [1.702, 1, 7])
            self.assertEqual(layer["router"]["rule"], "softmax-selected")

    def test_prepare(self):
        path = self.synth("deepseek-v4-flash", "--container", "gguf", "--layers", "4")
        out = self.path("out")
        self.good("prepare", path, "--layer", "all", "--out", out)
        for layer in range(4):
            file = os.path.join(out, f"layer-00{layer}.mmoe")
            self.assertTrue(self.good_json("verify", file)["whole"])
            router = self.good_json("inspect", file)["layers"][0]["router"]
            self.assertEqual(router["hash_vocab"], 129280 if layer < 3 else 0)

    def test_content_decides_where_the_name_does_not(self):
        path = os.path.join(self.synth("qwen3-30b-a3b", "--container", "gguf"), "model.gguf")
        shutil.copy(path, self.path("other"))
        self.assertEqual(self.good_json("inspect", self.path("other"))["family"], "gguf")

    def test_beyond_4_gib(self):
        """The experts lie behind a tensor of 5 GiB, which is a hole that nobody reads."""
        path = os.path.join(self.synth("qwen3-30b-a3b", "--container", "gguf"), "model.gguf")
        want = self.good_json("inspect", path)["layers"]
        r, hole = Reader(path), 5 << 30
        magic, version, n_tensors, n_keys = r.take("4sIQQ")
        for _ in range(n_keys):
            r.text()
            r.value(r.take("I"))
        keys = r.data[24:r.at]
        entries = struct.pack("<Q4sIQIQ", 4, b"hole", 1, hole, 24, 0)
        for _ in range(n_tensors):
            begin = r.at
            r.text()
            r.take(f"{r.take('I')}Q")
            r.take("I")
            entries += r.data[begin:r.at] + struct.pack("<Q", r.take("Q") + hole)
        header = struct.pack("<4sIQQ", magic, version, n_tensors + 1, n_keys) + keys + entries
        with open(path, "wb") as file:
            file.write(header)
            file.seek(len(header) + -len(header) % 32 + hole)
            file.write(r.data[r.at + -r.at % 32:])
        self.assertEqual(self.good_json("inspect", path)["layers"], want)
        self.good("run", path, "--tokens", 3, "--verify")

    def test_damaged_files(self):
        path = os.path.join(self.synth("qwen3-30b-a3b", "--container", "gguf"), "model.gguf")
        with open(path, "rb") as file:
            data = file.read()
        cut = self.path("cut.gguf")
        for n in (0, 3, 23, 200, len(data) // 2):
            with open(cut, "wb") as file:
                file.write(data[:n])
            self.fails(2, [cut], "inspect", cut)
        with open(cut, "wb") as file:
            file.write(data.replace(b"qwen3moe", b"qwen9moe"))
        self.fails(2, [cut, "qwen9moe", "gpt-oss"], "inspect", cut)
        # The type of the gate's tensor, behind its name and three dimensions: Q8_0.
        name = b"blk.0.ffn_gate_exps.weight"
        at = data.index(name) + len(name) + 4 + 3 * 8
        with open(cut, "wb") as file:
            file.write(data[:at] + struct.pack("<I", 8) + data[at + 4:])
        self.fails(2, [cut], "inspect", cut)


if __name__ == "__main__":
    unittest.main()
