# SPDX-License-Identifier: Apache-2.0
"""The forward over ranks: same bits however it is run, inputs and outputs, and bad inputs."""
import json
import os
import struct
import unittest

from tool import (MODELS, SCALE, Case, bf16, f32, i32, i64, read_safetensors, safetensors_bytes,
                  write_safetensors)


def compress(checkpoint, tensors, codec):
    """Rewrites a checkpoint of one file as compressed-tensors stores it."""
    parts = {"weight": "weight_packed", "scale": "weight_scale",
             "weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    out = {}
    for name, (dtype, shape, data) in tensors.items():
        if ".experts." in name:
            module, part = name.rsplit(".", 1)
            name = f"{module}.{parts.get(part, part)}"
            dtype = {"I8": "U8", "F8_E8M0": "U8"}.get(dtype, dtype)
            if dtype == "F32":
                shape, data = [1], f32([1 / struct.unpack("<f", data)[0]])
        out[name] = (dtype, shape, data)
    write_safetensors(os.path.join(checkpoint, "model.safetensors"), out)
    with open(os.path.join(checkpoint, "config.json")) as file:
        config = json.load(file)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": f"{codec}-pack-quantized",
        "version": "0.14.0", "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}
    with open(os.path.join(checkpoint, "config.json"), "w") as file:
        json.dump(config, file)
    quantized = os.path.join(checkpoint, "hf_quant_config.json")
    if os.path.exists(quantized):
        os.remove(quantized)


class SameBits(Case):
    def test_ranks(self):
        for model in MODELS:
            with self.subTest(model):
                checkpoint = self.synth(model, name=model)
                outputs = set()
                for ranks in [1, 2, 4, 8]:
                    out = self.path(f"{model}-{ranks}.safetensors")
                    done = self.good_json("run", checkpoint, "--ranks", ranks, "--tokens", 13,
                                          "--verify", "--output", out)
                    self.assertEqual(done["verify"],
                                     {"equal": True, "rows": 13, "rows_differing": 0})
                    self.assertEqual(done["ranks"], ranks)
                    with open(out, "rb") as file:
                        outputs.add(file.read())
                self.assertEqual(len(outputs), 1)

    def test_more_ranks_than_tokens_and_experts(self):
        checkpoint = self.synth()
        alone = self.good_json("run", checkpoint, "--tokens", 3)
        many = self.good_json("run", checkpoint, "--tokens", 3, "--ranks", 20)
        self.assertEqual(alone["checksum"], many["checksum"])
        self.assertEqual(many["received"]["rank_min"], 0)

    def test_tiers_and_threads(self):
        for model in ["deepseek-v4-flash", "qwen3-30b-a3b"]:
            checkpoint = self.synth(model, name=model)
            sums = {self.good_json("run", checkpoint, "--tokens", 9, "--threads", threads,
                                   env={"MEGAMOE_CPU": tier})["checksum"]
                    for tier in ["scalar", "avx2", "avx512"] for threads in [1, 3]}
            self.assertEqual(len(sums), 1)

    def test_int8_activations(self):
        for model in ["deepseek-v4-flash", "qwen3-30b-a3b", "gpt-oss-20b"]:
            with self.subTest(model):
                checkpoint = self.synth(model, name=model)
                int8 = ["run", checkpoint, "--tokens", 9, "--activations", "int8"]
                sums = {self.good_json(*int8, "--verify", "--ranks", ranks, "--threads", threads,
                                       env={"MEGAMOE_CPU": tier})["checksum"]
                        for tier, ranks, threads in [("scalar", 1, 1), ("avx2", 3, 1),
                                                     ("avx512", 2, 4)]}
                self.assertEqual(len(sums), 1)
                e4m3 = self.good_json("run", checkpoint, "--tokens", 9, "--activations", "e4m3")
                self.assertNotIn(e4m3["checksum"], sums)
        qwen = self.path("qwen3-30b-a3b")
        self.fails(2, ["int8", "folded NVFP4"], "run", qwen, "--nvfp4", "folded", "--activations",
                   "int8")
        self.fails(2, ["--input-scale block", "int8"], "run", qwen, "--input-scale", "block",
                   "--activations", "int8")
        self.fails(2, ["int8", "for the CPU", "cuda:1"], "run", qwen, "--device", "cuda:1",
                   "--activations", "int8")

    def test_prepared(self):
        for model in MODELS:
            with self.subTest(model):
                checkpoint = self.synth(model, name=model)
                file = self.path(model + ".mmoe")
                self.good("prepare", checkpoint, "--out", file)
                a = self.good_json("run", checkpoint, "--ranks", 2)
                b = self.good_json("run", file, "--ranks", 3, "--verify")
                self.assertEqual((a["checksum"], a["prepared"]), (b["checksum"], not b["prepared"]))

    def test_compressed_tensors(self):
        """The same weights under the names, types and reciprocals of compressed-tensors."""
        for model, codec in [("qwen3-30b-a3b", "nvfp4"), ("deepseek-v4-flash", "mxfp4")]:
            with self.subTest(codec):
                checkpoint = self.synth(model, name=model)
                path = os.path.join(checkpoint, "model.safetensors")
                tensors = {name: (dtype, shape, f32([2 ** -12]) if name.endswith("_scale_2")
                                  else data)
                           for name, (dtype, shape, data) in read_safetensors(path).items()}
                write_safetensors(path, tensors)
                before = self.good_json("run", checkpoint, "--tokens", 5)
                compress(checkpoint, tensors, codec)
                report = self.good_json("inspect", checkpoint)
                self.assertEqual((report["family"], report["layers"][0]["format"]),
                                 ("compressed-tensors", codec))
                file = self.path(codec + ".mmoe")
                self.good("prepare", checkpoint, "--out", file)
                for source in [checkpoint, file]:
                    after = self.good_json("run", source, "--tokens", 5, "--ranks", 2, "--verify")
                    self.assertTrue(after["verify"]["equal"])
                    self.assertEqual(before["checksum"], after["checksum"])

    def test_folded(self):
        checkpoint = self.synth()
        file = self.path("folded.mmoe")
        self.good("prepare", checkpoint, "--nvfp4", "folded", "--out", file)
        self.assertEqual(self.good_json("inspect", file)["form"], "folded")
        exact = self.good_json("run", checkpoint)
        folded = self.good_json("run", checkpoint, "--nvfp4", "folded", "--verify")
        prepared = self.good_json("run", file, "--ranks", 2, "--verify")
        self.assertNotEqual(exact["checksum"], folded["checksum"])
        self.assertEqual(folded["checksum"], prepared["checksum"])

    def test_one_safetensors_file(self):
        checkpoint = self.synth()
        a = self.good_json("run", checkpoint)
        b = self.good_json("run", os.path.join(checkpoint, "model.safetensors"))
        self.assertEqual(a["checksum"], b["checksum"])

    def test_original_names_of_gpt_oss(self):
        checkpoint = self.synth("gpt-oss-20b")
        alone = self.good_json("run", checkpoint, "--tokens", 9)
        model = os.path.join(checkpoint, "model.safetensors")
        tensors = {}
        for name, tensor in read_safetensors(model).items():
            for old, new in [("model.layers.", "block."), ("experts.gate_up_proj", "mlp1"),
                             ("experts.down_proj", "mlp2"), ("_blocks", "_weight.blocks"),
                             ("_scales", "_weight.scales"), ("router.", "gate.")]:
                name = name.replace(old, new)
            tensors[name] = tensor
        write_safetensors(model, tensors)
        with open(os.path.join(checkpoint, "config.json"), "w", encoding="utf-8") as file:
            file.write('{"num_hidden_layers": 24, "num_experts": 8, "experts_per_token": 4, '
                       '"hidden_size": 64, "intermediate_size": 64, "swiglu_limit": 7.0}')
        renamed = self.good_json("run", checkpoint, "--tokens", 9, "--verify")
        self.assertEqual(alone["checksum"], renamed["checksum"])

    def test_seed(self):
        checkpoint = self.synth()
        sums = [self.good_json("run", checkpoint, "--seed", s)["checksum"] for s in [1, 1, 2]]
        self.assertEqual(sums[0], sums[1])
        self.assertNotEqual(sums[0], sums[2])

    def test_drawn_tokens_do_not_depend_on_their_number(self):
        checkpoint = self.synth("deepseek-v4-flash")
        for tokens in [5, 11]:
            self.good("run", checkpoint, "--tokens", tokens, "--output", self.path(f"{tokens}.st"))
        few = read_safetensors(self.path("5.st"))
        many = read_safetensors(self.path("11.st"))
        for name, (dtype, shape, data) in few.items():
            self.assertEqual((dtype, data), (many[name][0], many[name][2][:len(data)]), name)


class Layers(Case):
    def setUp(self):
        super().setUp()
        self.checkpoint = self.synth("deepseek-v4-flash", "--layers", "4")

    def test_each_layer(self):
        sums = {self.good_json("run", self.checkpoint, "--layer", layer, "--verify")["checksum"]
                for layer in range(4)}
        self.assertEqual(len(sums), 4)

    def test_a_choice_is_needed(self):
        self.fails(2, [self.checkpoint, "4 expert layers", "--layer"], "run", self.checkpoint)

    def test_missing_layer(self):
        self.fails(2, [self.checkpoint, "7"], "run", self.checkpoint, "--layer", 7)

    def test_prepared_file_of_another_layer(self):
        file = self.path("l2.mmoe")
        self.good("prepare", self.checkpoint, "--layer", 2, "--out", file)
        self.good("run", file, "--layer", 2)
        self.fails(2, [file, "layer 2", "layer 1"], "run", file, "--layer", 1)


class Inputs(Case):
    TOKENS = 5
    TOPK = 8

    def setUp(self):
        super().setUp()
        self.checkpoint = self.synth()
        self.hidden = 64
        self.input = self.path("in.safetensors")
        self.out = self.path("out.safetensors")
        t, k, h = self.TOKENS, self.TOPK, self.hidden
        self.x = ("BF16", [t, h], bf16([(i % 17 - 8) / 8 for i in range(t * h)]))
        self.ids = [[(token * 3 + slot * 5) % 16 for slot in range(k)] for token in range(t)]
        self.weights = ("F32", [t, k], f32([(1 + i % 4) / 8 for i in range(t * k)]))

    def flat_ids(self):
        return [expert for row in self.ids for expert in row]

    def run_input(self, tensors, *options):
        write_safetensors(self.input, tensors)
        self.good("run", self.checkpoint, "--input", self.input, "--output", self.out, "--verify",
                  *options)
        return read_safetensors(self.out)

    def refused(self, parts, tensors, checkpoint=None):
        write_safetensors(self.input, tensors)
        self.fails(2, [self.input, *parts], "run", checkpoint or self.checkpoint, "--input",
                   self.input, "--output", self.out)
        self.assertFalse(os.path.exists(self.out))

    def given(self, ids=None, weights=None):
        shape = [self.TOKENS, self.TOPK]
        return {"hidden_states": self.x, "topk_ids": ids or ("I32", shape, i32(self.flat_ids())),
                "topk_weights": weights or self.weights}

    def test_output_holds_all_rows_and_the_routes_given(self):
        out = self.run_input(self.given())
        self.assertEqual({name: t[:2] for name, t in out.items()},
                         {"output": ("BF16", [5, 64]), "topk_ids": ("I32", [5, 8]),
                          "topk_weights": ("F32", [5, 8])})
        self.assertEqual(out["topk_ids"][2], i32(self.flat_ids()))
        self.assertEqual(out["topk_weights"][2], self.weights[2])
        self.assertNotEqual(out["output"][2], bytes(5 * 64 * 2))

    def test_i64_ids(self):
        narrow = self.run_input(self.given())
        wide = self.run_input(self.given(("I64", [5, 8], i64(self.flat_ids()))), "--ranks", 3)
        self.assertEqual(wide["output"], narrow["output"])
        self.assertEqual(wide["topk_ids"][0], "I64")

    def test_own_router(self):
        out = self.run_input({"hidden_states": self.x})
        for row in struct.iter_unpack("<8i", out["topk_ids"][2]):
            self.assertEqual(len(set(row)), 8)
        for row in struct.iter_unpack("<8f", out["topk_weights"][2]):
            self.assertAlmostEqual(sum(row), 1, places=5)
            self.assertEqual(list(row), sorted(row, reverse=True))
        again = self.run_input({"hidden_states": self.x, "topk_ids": out["topk_ids"],
                                "topk_weights": out["topk_weights"]}, "--ranks", 2)
        self.assertEqual(again, out)

    def test_another_number_of_slots(self):
        out = self.run_input({"hidden_states": self.x,
                              "topk_ids": ("I32", [5, 2], i32([3, 9] * 5)),
                              "topk_weights": ("F32", [5, 2], f32([.25, .5] * 5))})
        self.assertEqual(out["topk_ids"][1], [5, 2])

    def test_masked_and_repeated_routes(self):
        ids = [-1] * 40
        ids[8:10] = [4, 4]
        out = self.run_input(self.given(("I32", [5, 8], i32(ids))), "--ranks", 4)
        rows = [out["output"][2][i * 128:(i + 1) * 128] for i in range(5)]
        self.assertEqual([any(row) for row in rows], [False, True, False, False, False])

    def test_nan_rows_stay_alone(self):
        clean = self.run_input(self.given())
        data = bytearray(self.x[2])
        data[2 * 128:2 * 128 + 2] = b"\xc0\x7f"
        self.x = ("BF16", [5, 64], bytes(data))
        dirty = self.run_input(self.given(), "--ranks", 2)
        for token in range(5):
            a, b = (o["output"][2][token * 128:(token + 1) * 128] for o in (clean, dirty))
            if token == 2:
                self.assertTrue(all(v & 0x7fff > 0x7f80 for v, in struct.iter_unpack("<H", b)))
            else:
                self.assertEqual(a, b)

    def test_no_tokens(self):
        out = self.run_input({"hidden_states": ("BF16", [0, 64], b"")}, "--ranks", 2)
        self.assertEqual(out["output"], ("BF16", [0, 64], b""))

    def test_hidden_states(self):
        t, h = self.TOKENS, self.hidden
        self.refused(["hidden_states", "missing"], {"x": self.x})
        self.refused(["hidden_states", "F32", "BF16"],
                     {"hidden_states": ("F32", [t, h], bytes(t * h * 4))})
        self.refused(["hidden_states", "63", "64"],
                     {"hidden_states": ("BF16", [t, 63], bytes(t * 63 * 2))})
        self.refused(["hidden_states", "dimensions"],
                     {"hidden_states": ("BF16", [t * h], bytes(t * h * 2))})

    def test_topk_ids(self):
        shape = [self.TOKENS, self.TOPK]
        self.refused(["topk_ids", "U8", "I32", "I64"], self.given(("U8", shape, bytes(40))))
        self.refused(["topk_ids", "4 rows", "5"], self.given(("I32", [4, 8], bytes(128))))
        self.refused(["topk_ids", "65 columns"], {**self.given(("I32", [5, 65], bytes(1300))),
                                                  "topk_weights": ("F32", [5, 65], bytes(1300))})
        self.refused(["topk_ids", "0 columns"], {**self.given(("I32", [5, 0], b"")),
                                                 "topk_weights": ("F32", [5, 0], b"")})
        self.refused(["topk_ids", "dimensions"], self.given(("I32", [40], bytes(160))))

    def test_ids_out_of_range(self):
        for bad in [16, -2, 2**31 - 1, -2**31]:
            with self.subTest(bad):
                ids = self.flat_ids()
                ids[2 * 8 + 3] = bad
                self.refused(["topk_ids", "token 2", "slot 3", bad, "-1..15"],
                             self.given(("I32", [5, 8], i32(ids))))
        ids = self.flat_ids()
        ids[39] = 2**32
        self.refused(["topk_ids", "token 4", "slot 7", 2**32],
                     self.given(("I64", [5, 8], i64(ids))))

    def test_topk_weights(self):
        self.refused(["topk_weights", "missing"],
                     {"hidden_states": self.x, "topk_ids": ("I32", [5, 8], bytes(160))})
        self.refused(["topk_ids", "missing"],
                     {"hidden_states": self.x, "topk_weights": self.weights})
        self.refused(["topk_weights", "BF16", "F32"],
                     self.given(weights=("BF16", [5, 8], bytes(80))))
        self.refused(["topk_weights", "7 columns", "8"],
                     self.given(weights=("F32", [5, 7], bytes(140))))
        self.refused(["topk_weights", "6 rows", "5"],
                     self.given(weights=("F32", [6, 8], bytes(192))))

    def test_hash_layer_needs_token_ids(self):
        checkpoint = self.synth("deepseek-v4-flash", name="v4")
        x = ("BF16", [5, 128], bytes(5 * 128 * 2))
        refused = lambda parts, ids: self.refused(
            ["input_ids", *parts], {"hidden_states": x, **ids}, checkpoint)
        refused(["missing"], {})
        refused(["F32", "I32", "I64"], {"input_ids": ("F32", [5], bytes(20))})
        refused(["4 rows", "5"], {"input_ids": ("I32", [4], bytes(16))})
        refused(["token 1", "129280"], {"input_ids": ("I32", [5], i32([0, 129280, 0, 0, 0]))})
        refused(["token 4", "-1"], {"input_ids": ("I64", [5], i64([0, 0, 0, 0, -1]))})

    def test_hash_layer_follows_its_table(self):
        checkpoint = self.synth("deepseek-v4-flash", name="v4")
        tokens = [7, 129279, 0, 7, 4242]
        tensors = {"hidden_states": ("BF16", [5, 128], bf16([(i % 5 - 2) / 2
                                                             for i in range(5 * 128)]))}
        table = read_safetensors(os.path.join(checkpoint, "model.safetensors"))[
            "layers.0.ffn.gate.tid2eid"][2]
        expected = [x for t in tokens for x in struct.unpack("<6q", table[t * 48:t * 48 + 48])]
        for dtype, pack in [("I32", i32), ("I64", i64)]:
            write_safetensors(self.input, {**tensors, "input_ids": (dtype, [5], pack(tokens))})
            self.good("run", checkpoint, "--input", self.input, "--output", self.out, "--verify")
            ids = read_safetensors(self.out)["topk_ids"][2]
            self.assertEqual(list(struct.unpack("<30i", ids)), expected)

    def test_broken_files(self):
        good = safetensors_bytes(self.given())
        for what, data in {"empty": b"", "short": good[:5], "cut": good[:-1],
                           "longer": good + b"\0", "huge header": b"\xff" * 8 + good[8:],
                           "no JSON": good[:8] + b"[" + good[9:]}.items():
            with self.subTest(what):
                with open(self.input, "wb") as file:
                    file.write(data)
                self.fails(2, [self.input], "run", self.checkpoint, "--input", self.input,
                           "--output", self.out)
                self.assertFalse(os.path.exists(self.out))
        self.fails(2, [self.path("nowhere")], "run", self.checkpoint, "--input",
                   self.path("nowhere"))

    def test_output_cannot_be_written(self):
        out = self.path("no/where.safetensors")
        self.fails(2, [out], "run", self.checkpoint, "--output", out)


class Router(Case):
    def test_a_layer_without_router_needs_routes(self):
        checkpoint = self.synth()
        file = os.path.join(checkpoint, "model.safetensors")
        tensors = {name: t for name, t in read_safetensors(file).items() if ".gate." not in name}
        write_safetensors(file, tensors)
        self.fails(2, [checkpoint, "router", "topk_ids"], "run", checkpoint)
        given = self.path("in.safetensors")
        write_safetensors(given, {"hidden_states": ("BF16", [2, 64], bytes(256)),
                                  "topk_ids": ("I32", [2, 1], i32([3, 4])),
                                  "topk_weights": ("F32", [2, 1], f32([1, 1]))})
        self.good("run", checkpoint, "--input", given, "--verify")


class Paths(Case):
    def test_nothing_there(self):
        for command in ["run", "inspect", "verify"]:
            self.fails(2, [self.path("nowhere")], command, self.path("nowhere"))

    def test_neither_checkpoint_nor_prepared(self):
        file = self.path("text")
        with open(file, "w") as stream:
            stream.write("This is a text of some length, and not a prepared file." * 200)
        for command in ["run", "inspect", "verify"]:
            self.fails(2, [file], command, file)
        self.fails(2, [self.directory], "run", self.directory)


if __name__ == "__main__":
    unittest.main()
