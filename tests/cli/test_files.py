# SPDX-License-Identifier: Apache-2.0
"""inspect, prepare, verify and bench, and damaged files."""
import json
import os
import unittest

from tool import MODELS, Case, read_safetensors, write_safetensors


def damage(path, offset, mask=0x01):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


class Inspect(Case):
    def test_json(self):
        for model in MODELS:
            with self.subTest(model):
                checkpoint = self.synth(model, name=model)
                report = self.good_json("inspect", checkpoint)
                family, experts = next(
                    (what for start, what in {"deepseek-v4": ("deepseek-v4", 16),
                                              "gpt-oss": ("gpt-oss", 8)}.items()
                     if model.startswith(start)), ("modelopt-nvfp4", 16))
                self.assertEqual(report["family"], family)
                layer, = report["layers"]
                self.assertEqual(layer["experts"], experts)
                self.assertEqual([p["projection"] for p in layer["projections"]],
                                 ["gate", "up", "down"])
                block = 32 if layer["format"] == "mxfp4" else 16
                for p in layer["projections"]:
                    self.assertEqual(p["groups"],
                                     experts * layer["hidden"] * layer["intermediate"] // block)
                    self.assertEqual(p["inside"] + p["outside"], p["groups"])
                    self.assertEqual(sum(p["scale_bytes"].values()), p["groups"])
                    if layer["format"] == "nvfp4":
                        self.assertTrue(0.01 < p["folded_relative_rms"] < 0.05)

    def test_routers(self):
        rules = {"deepseek-v4-flash": ("sqrt-softplus", 129280, 1.5),
                 "deepseek-v4.1-flash": ("sqrt-softplus", 0, 1.5),
                 "deepseek-v3": ("sigmoid", 0, 2.5), "qwen3-30b-a3b": ("softmax", 0, 1)}
        for model, (rule, vocabulary, scaling) in rules.items():
            router = self.good_json("inspect", self.synth(model, name=model))["layers"][0]["router"]
            self.assertEqual((router["rule"], router["hash_vocab"], router["scaling"]),
                             (rule, vocabulary, scaling))
            self.assertTrue(router["normalize"])

    def test_gpt_oss(self):
        checkpoint = self.synth("gpt-oss-20b")
        layer, = self.good_json("inspect", checkpoint)["layers"]
        self.assertEqual([round(layer[k], 4) for k in ("alpha", "offset", "limit")], [1.702, 1, 7])
        self.assertTrue(layer["bias"])
        router = layer["router"]
        self.assertEqual((router["rule"], router["topk"], router["scaling"], router["normalize"]),
                         ("softmax-selected", 4, 1, False))
        text = self.good("inspect", checkpoint)
        for part in ["gpt-oss", "alpha 1.702, offset 1, limit 7", "biases", "softmax-selected"]:
            self.assertIn(part, text)

    def test_histogram_counts_the_bytes_of_the_file(self):
        checkpoint = self.synth("deepseek-v4-flash")
        tensors = read_safetensors(os.path.join(checkpoint, "model.safetensors"))
        counts = {}
        for name, (_, _, data) in tensors.items():
            if name.endswith("w2.scale"):
                for byte in data:
                    counts[str(byte)] = counts.get(str(byte), 0) + 1
        down = self.good_json("inspect", checkpoint)["layers"][0]["projections"][2]
        self.assertEqual(down["scale_bytes"], counts)

    def test_text(self):
        text = self.good("inspect", self.synth("deepseek-v4-flash"))
        for part in ["deepseek-v4", "mxfp4", "sqrt-softplus", "inside", "outside", "spread", "#"]:
            self.assertIn(part, text)

    def test_layers(self):
        checkpoint = self.synth("deepseek-v3", "--layers", "3")
        layers = self.good_json("inspect", checkpoint)["layers"]
        self.assertEqual([layer["layer"] for layer in layers], [3, 4, 5])
        one, = self.good_json("inspect", checkpoint, "--layer", 4)["layers"]
        self.assertEqual(one, layers[1])

    def test_prepared(self):
        checkpoint = self.synth()
        file = self.path("l.mmoe")
        self.good("prepare", checkpoint, "--out", file)
        a = self.good_json("inspect", checkpoint)["layers"][0]
        b = self.good_json("inspect", file)
        self.assertTrue(b["prepared"])
        self.assertEqual((b["device"], b["form"]), ("cpu", "exact"))
        for key in ["layer", "format", "hidden", "intermediate", "experts", "topk", "router"]:
            self.assertEqual(a[key], b["layers"][0][key])


class Prepare(Case):
    def test_all_layers(self):
        checkpoint = self.synth("deepseek-v4-flash", "--layers", "4")
        out = self.path("out")
        made = self.good_json("prepare", checkpoint, "--layer", "all", "--out", out)
        self.assertEqual(sorted(os.listdir(out)), [f"layer-00{i}.mmoe" for i in range(4)])
        for i, file in enumerate(made["files"]):
            self.assertEqual(file["layer"], i)
            self.assertEqual(file["bytes"], os.path.getsize(file["path"]))
            self.assertTrue(self.good_json("verify", file["path"])["whole"])

    def test_same_bytes_each_time(self):
        checkpoint = self.synth()
        for threads in [1, 3]:
            self.good("prepare", checkpoint, "--threads", threads, "--out", self.path(str(threads)))
        with open(self.path("1"), "rb") as a, open(self.path("3"), "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_refusals(self):
        checkpoint = self.synth("deepseek-v3", "--layers", "2")
        file = self.path("l.mmoe")
        self.fails(2, ["--out"], "prepare", checkpoint, "--layer", 3)
        for device in ["tpu", "", "cuda:", "cuda0", "cuda:0x", "cuda:-1", "cpu:0"]:
            self.fails(2, ["--device " + device, "cuda:N"], "prepare", checkpoint, "--device", device,
                       "--out", file)
        self.fails(2, ["--layer", "some"], "prepare", checkpoint, "--layer", "some", "--out", file)
        self.fails(2, ["2 expert layers"], "prepare", checkpoint, "--out", file)
        self.fails(2, [self.path("no/l")], "prepare", checkpoint, "--layer", 3, "--out",
                   self.path("no/l"))
        self.assertFalse(os.path.exists(file))
        self.good("prepare", checkpoint, "--layer", 3, "--out", file)
        self.fails(2, [file, "already"], "prepare", file, "--out", self.path("again"))

    def test_cuda(self):
        """Packing for the GPU needs none."""
        for model, form in [("deepseek-v4-flash", "exact"), ("gpt-oss-20b", "exact"), ("qwen3-30b-a3b", "exact"),
                            ("qwen3-30b-a3b", "folded")]:
            with self.subTest((model, form)):
                checkpoint = self.synth(model, name=f"{model}-{form}")
                file = self.path(f"{model}-{form}.mmoe")
                made = self.good_json("prepare", checkpoint, "--device", "cuda", "--nvfp4", form,
                                      "--round-outside-window", "--out", file)
                self.assertEqual((made["device"], made["nvfp4"]), ("cuda", form))
                self.assertTrue(self.good_json("verify", file)["whole"])
                report = self.good_json("inspect", file)
                self.assertEqual((report["device"], report["form"]), ("cuda", form))
                self.assertIn("for cuda", self.good("inspect", file))
                damage(file, os.path.getsize(file) // 2)
                self.fails(1, [file], "verify", file)

    def test_cuda_is_a_kind_of_device(self):
        checkpoint = self.synth()
        files = [self.path(f"{n}.mmoe") for n in range(2)]
        for device, file in zip(["cuda", "cuda:7"], files):
            made = self.good_json("prepare", checkpoint, "--device", device, "--out", file)
            self.assertEqual(made["device"], "cuda")
        with open(files[0], "rb") as a, open(files[1], "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_outside_the_window(self):
        checkpoint = self.synth("deepseek-v4-flash")
        model = os.path.join(checkpoint, "model.safetensors")
        tensors = read_safetensors(model)
        name = "layers.0.ffn.experts.4.w1.scale"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:77] + bytes([data[77] - 60]) + data[78:])
        write_safetensors(model, tensors)
        file = self.path("l.mmoe")
        self.fails(2, [name, "binades below", "groups outside: 1"], "prepare", checkpoint,
                   "--device", "cuda", "--out", file)
        self.assertFalse(os.path.exists(file))
        self.good("prepare", checkpoint, "--out", file)
        self.fails(2, ["round_outside_window", "cpu"], "prepare", checkpoint, "--out", file,
                   "--round-outside-window")
        self.good("prepare", checkpoint, "--device", "cuda", "--round-outside-window", "--out",
                  file)

    def test_no_temporary_files_are_left(self):
        checkpoint = self.synth()
        self.good("prepare", checkpoint, "--out", self.path("l.mmoe"))
        self.assertEqual(sorted(os.listdir(self.directory)), ["checkpoint", "l.mmoe"])


class Damage(Case):
    """Prepared files that are not what was written, and checkpoints with a mistake."""

    def prepared(self):
        file = self.path("l.mmoe")
        self.good("prepare", self.synth(), "--out", file)
        return file

    def test_flipped_bytes(self):
        file = self.prepared()
        size = os.path.getsize(file)
        self.good("verify", file)
        for offset in [size - 5000, size - 9000, size // 2, size * 3 // 4]:
            with self.subTest(offset):
                damage(file, offset)
                self.fails(1, [file], "verify", file)
                done = self.run_tool("verify", file, "--json")
                self.assertEqual(done.returncode, 1)
                self.assertFalse(json.loads(done.stdout)["whole"])
                damage(file, offset)
        self.good("verify", file)

    def test_flipped_header(self):
        file = self.prepared()
        for offset in [0, 9, 20, 40, 100]:
            with self.subTest(offset):
                damage(file, offset)
                done = self.run_tool("verify", file)
                self.assertIn(done.returncode, [1, 2])
                self.assertIn(file, done.stderr)
                damage(file, offset)

    def test_cut(self):
        file = self.prepared()
        size = os.path.getsize(file)
        for keep in [size - 1, size // 2, 5000, 4096, 100, 8, 0]:
            with self.subTest(keep):
                os.truncate(file, keep)
                self.fails(2, [file], "verify", file)
                self.fails(2, [file], "run", file)

    def test_verify_wants_a_prepared_file(self):
        checkpoint = self.synth()
        self.fails(2, [checkpoint, "checkpoint"], "verify", checkpoint)

    def edit(self, model, change, whole=True):
        """
        A checkpoint whose tensors `change` has altered is refused by each command; the message
        names the file, or the checkpoint where a tensor is in none of its files.
        """
        checkpoint = self.synth(model, name="edited")
        file = os.path.join(checkpoint, "model.safetensors")
        tensors = read_safetensors(file)
        parts = [file if whole else checkpoint, *change(tensors)]
        write_safetensors(file, tensors)
        out = self.path("out")
        self.fails(2, parts, "run", checkpoint, "--output", out)
        self.fails(2, parts, "prepare", checkpoint, "--out", out)
        self.fails(2, parts, "inspect", checkpoint)
        self.assertFalse(os.path.exists(out))

    def test_missing_scale(self):
        def change(tensors):
            del tensors["layers.0.ffn.experts.9.w2.scale"]
            return ["layers.0.ffn.experts.9.w2.scale", "missing"]
        self.edit("deepseek-v4-flash", change, whole=False)

    def test_missing_global(self):
        def change(tensors):
            del tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale_2"]
            return ["experts.2.up_proj.weight_scale_2", "missing"]
        self.edit("qwen3-30b-a3b", change, whole=False)

    def test_scale_that_is_not_a_number(self):
        def change(tensors):
            name = "layers.0.ffn.experts.4.w1.scale"
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, data[:77] + b"\xff" + data[78:])
            return [name]
        self.edit("deepseek-v4-flash", change)

    def test_negative_scale(self):
        for byte in [0x80, 0xb8, 0x7f]:
            with self.subTest(byte):
                def change(tensors):
                    name = "model.layers.0.mlp.experts.4.down_proj.weight_scale"
                    dtype, shape, data = tensors[name]
                    tensors[name] = (dtype, shape, data[:-1] + bytes([byte]))
                    return [name]
                self.edit("qwen3-30b-a3b", change)
                os.rename(self.path("edited"), self.path(f"edited-{byte}"))

    def test_wrong_dtype(self):
        def change(tensors):
            name = "layers.0.ffn.experts.0.w1.weight"
            dtype, shape, data = tensors[name]
            tensors[name] = ("F8_E4M3", shape, data)
            return [name, "F8_E4M3"]
        self.edit("deepseek-v4-flash", change)

    def test_wrong_shape(self):
        def change(tensors):
            name = "layers.0.ffn.experts.3.w3.weight"
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, [shape[0] // 2, shape[1]], data[:len(data) // 2])
            return [name]
        self.edit("deepseek-v4-flash", change)

    def test_config_that_disagrees(self):
        checkpoint = self.synth("deepseek-v4-flash")
        path = os.path.join(checkpoint, "config.json")
        with open(path) as file:
            config = json.load(file)
        for key, value in [("hidden_size", 256), ("n_routed_experts", 8), ("expert_dtype", "fp8")]:
            with self.subTest(key):
                with open(path, "w") as file:
                    json.dump({**config, key: value}, file)
                self.fails(2, [path], "run", checkpoint)
        with open(path, "w") as file:
            file.write("{")
        self.fails(2, [path], "run", checkpoint)


class Bench(Case):
    def check(self, report, tokens):
        self.assertEqual([p["tokens"] for p in report["points"]], tokens)
        for p in report["points"]:
            self.assertGreaterEqual(p["runs"], 5)
            self.assertTrue(0 < p["min_ms"] <= p["median_ms"] <= p["p90_ms"])
            self.assertGreater(p["weight_gbs"], 0)
            self.assertTrue(report["topk"] <= p["experts_touched"] <= report["experts"])
            self.assertEqual(len(p["read_gbs"]), 2)
            flops = 6 * report["hidden"] * report["intermediate"] * p["tokens"] * report["topk"]
            self.assertAlmostEqual(p["gflops"] * p["median_ms"] * 1e6 / flops, 1, places=4)
        self.assertIn("bench", report["command"])

    def test_path(self):
        checkpoint = self.synth("deepseek-v4-flash", "--layers", "2")
        report = self.good_json("bench", checkpoint, "--layer", 1, "--tokens", "1,3", "--seconds",
                                "0.01", "--threads", "1")
        self.check(report, [1, 3])
        self.assertEqual(report["threads"], 1)
        file = self.path("l.mmoe")
        self.good("prepare", checkpoint, "--layer", 1, "--out", file)
        for mapped in [], ["--mapped"]:
            self.check(
                self.good_json("bench", file, "--tokens", "2", "--seconds", "0", *mapped), [2])

    def test_a_share_of_a_model(self):
        report = self.good_json("bench", "--model", "qwen3-30b-a3b", "--memory", "0.03",
                                "--tokens", "1", "--seconds", "0")
        self.check(report, [1])
        self.assertEqual(report["experts_of_model"], 128)
        self.assertEqual(report["experts"], int(0.03e9 / (3 * 2048 * 768 * 4.5 / 8)))
        text = self.good("bench", "--geometry", "A", "--memory", "0.03", "--tokens", "1",
                         "--seconds", "0")
        self.assertIn("of 128 experts", text)
        self.assertIn("ceilings", text)

    def test_int8(self):
        int8 = ["bench", "--geometry", "A", "--memory", "0.03", "--tokens", "1,20", "--seconds", "0",
                "--activations", "int8"]
        report = self.good_json(*int8)
        self.check(report, [1, 20])
        self.assertEqual(report["activations"], "int8")
        self.assertIn("activations int8", self.good(*int8))
        self.fails(2, ["--input-scale block", "int8"], *int8, "--input-scale", "block")
        self.fails(2, ["--activations int8", "CPU", "cuda"], *int8[:3], "--activations", "int8",
                   "--device", "cuda")

    def test_refusals(self):
        self.fails(2, ["--memory"], "bench", "--geometry", "C", "--memory", "0.001")
        self.fails(2, ["gpt-9"], "bench", "--model", "gpt-9")
        self.fails(2, [self.path("nowhere")], "bench", self.path("nowhere"))


if __name__ == "__main__":
    unittest.main()
