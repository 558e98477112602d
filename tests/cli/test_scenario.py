# SPDX-License-Identifier: Apache-2.0
"""Steps of a stack of layers under arriving requests, and the routing profiles."""
import json
import os
import subprocess
import sys
import unittest

from tool import TOOL, Case, f32, i32, write_safetensors

try:
    import jsonschema
except ImportError:  # python3-jsonschema
    jsonschema = None

SOURCE = os.environ["MEGAMOE_SOURCE"]
FAKE = {"LD_LIBRARY_PATH": os.environ["MEGAMOE_FAKE_CUDA"]}


class Scenario(Case):
    def scenario(self, *arguments, env=None):
        done = self.good_json("scenario", *arguments, env=env)
        self.assertEqual(done["scenario"], dict(zip(arguments[::2], arguments[1::2]))["--workload"])
        self.check(done)
        return done

    def check(self, done):
        """What holds of every result."""
        if jsonschema:
            with open(os.path.join(SOURCE, "docs/schema/scenario.schema.json")) as file:
                schema = json.load(file)
            jsonschema.Draft202012Validator.check_schema(schema)
            errors = jsonschema.Draft202012Validator(schema).iter_errors(done)
            self.assertEqual([e.message for e in errors], [])
        self.assertEqual(sum(b["steps"] for b in done["batches"]), done["steps"])
        tokens = done["tokens_decoded"] + done["tokens_prefilled"]
        self.assertAlmostEqual(done["step_tokens"]["mean"] * done["steps"] / tokens, 1)
        self.assertAlmostEqual(done["tokens_per_s"] * done["busy_seconds"] / tokens, 1, places=5)
        self.assertLessEqual(done["busy_seconds"], done["seconds"] * (1 + 1e-6))
        for name in ["step_us", "step_tokens", "running", "waiting", "wait_ms", "answer_ms",
                     "request_ms"]:
            d = done[name]
            self.assertLessEqual(d["p50"], d["p90"])
            self.assertLessEqual(d["p90"], d["p99"])
            self.assertLessEqual(d["p99"], d["max"])
        self.assertEqual(done["step_us"]["n"], done["steps"])
        self.assertEqual(done["request_ms"]["n"], done["requests_ended"])
        self.assertLessEqual(done["running"]["max"], done["sequences"])
        for name in ["version", "date", "command", "device", "seed", "routing"]:
            self.assertIn(name, done)

    def test_decode(self):
        done = self.scenario("--workload", "decode", "--output-tokens", 5, "--requests", 10,
                             "--sequences", 4, "--layers", 3)
        self.assertEqual((done["steps"], done["tokens_decoded"], done["tokens_prefilled"],
                          done["requests_ended"]), (15, 50, 0, 10))
        self.assertEqual((done["layers"], done["layers_distinct"]), (3, 3))
        self.assertEqual([(b["tokens_min"], b["tokens_max"], b["steps"]) for b in done["batches"]],
                         [(2, 2, 5), (3, 4, 10)])
        self.assertEqual(done["waiting"]["max"], 6)
        self.assertNotIn("prompt_tokens", done)

    def test_prefill(self):
        done = self.scenario("--workload", "prefill", "--prompt-tokens", 30, "--requests", 4,
                             "--chunk", 40)
        self.assertEqual((done["steps"], done["tokens_decoded"], done["tokens_prefilled"]),
                         (3, 0, 120))
        self.assertEqual(done["step_tokens"]["max"], 40)

    def test_mixed_with_arrivals(self):
        done = self.scenario("--workload", "mixed", "--arrivals", 500, "--seed", 7,
                             "--prompt-tokens", "lognormal:20:0.5", "--output-tokens", "1-8",
                             "--chunk", 32, "--requests", 12)
        self.assertEqual(done["requests_ended"], 12)
        self.assertGreater(done["tokens_decoded"], 0)
        self.assertGreater(done["tokens_prefilled"], 0)
        self.assertLessEqual(done["step_tokens"]["max"], 32)

    def test_time_is_virtual(self):
        done = self.scenario("--workload", "decode", "--arrivals", 0.001, "--requests", 3,
                             "--output-tokens", 1)
        self.assertGreater(done["seconds"], 60)
        self.assertLess(done["busy_seconds"], 10)

    def test_end_after_steps(self):
        done = self.scenario("--workload", "decode", "--steps", 3, "--output-tokens", "10")
        self.assertEqual((done["steps"], done["requests_ended"]), (3, 0))

    def test_memory_for_some_of_the_layers(self):
        all_layers = self.scenario("--workload", "decode", "--steps", 2, "--layers", 4)
        gigabytes = 2.5 * all_layers["layer_bytes"] / 1e9
        done = self.scenario("--workload", "decode", "--steps", 2, "--layers", 4, "--memory",
                             gigabytes)
        self.assertEqual((all_layers["layers_distinct"], done["layers_distinct"]), (4, 2))
        self.assertIn("weights of 2 layers", self.good("scenario", "--steps", 2, "--layers", 4,
                                                       "--memory", gigabytes))

    def test_text(self):
        text = self.good("scenario", "--workload", "mixed", "--arrivals", 1000, "--seed", 11)
        for part in ["tiny", "step us", "p99", "requests waiting", "seed        11", "random",
                     "tokens in a step", "1000 in a second", "of 24 requests"]:
            self.assertIn(part, text)

    def test_formats(self):
        for option in [["--format", "nvfp4"], ["--format", "nvfp4", "--nvfp4", "folded"],
                       ["--input-scale", "block"], ["--activations", "int8"],
                       ["--experts", 8], ["--accumulate", "promote"]]:
            self.scenario("--workload", "decode", "--steps", 2, *option)
        done = self.scenario("--workload", "decode", "--steps", 1, "--layers", 1, "--model",
                             "qwen3-30b-a3b", "--experts", 8)
        self.assertEqual((done["hidden"], done["experts"], done["format"], done["nvfp4"]),
                         (2048, 8, "nvfp4", "exact"))

    def test_files(self):
        checkpoint = self.synth("qwen3-30b-a3b", "--layers", 2)
        file = self.path("layer.mmoe")
        self.good("prepare", checkpoint, "--layer", 1, "--nvfp4", "folded", "--out", file)
        for path, distinct, nvfp4 in [(checkpoint, 2, "exact"), (file, 1, "folded")]:
            done = self.good_json("scenario", path, "--layers", 3, "--steps", 2)
            self.assertEqual((done["layer"], done["layers"], done["layers_distinct"],
                              done["format"], done["nvfp4"]), (path, 3, distinct, "nvfp4", nvfp4))
        self.assertIn(f"3 of {file}", self.good("scenario", file, "--layers", 3, "--steps", 2))
        self.fails(2, ["--format", checkpoint], "scenario", checkpoint, "--format", "mxfp4")
        self.fails(2, ["--model", "PATH"], "scenario", checkpoint, "--model", "x")
        self.fails(2, ["/no/file"], "scenario", "/no/file")

    def test_ranks(self):
        text = self.good("launch", "-n", 2, "--", TOOL, "scenario", "--workload", "mixed", "--json",
                         "--arrivals", 500, "--layers", 3, "--threads", 2, "--routing", "zipf")
        done = json.loads(text)
        self.check(done)
        self.assertEqual((done["ranks"], done["experts"], done["requests_ended"],
                          done["layers_distinct"]), (2, 64, 24, 3))

    def test_report(self):
        done = self.scenario("--workload", "mixed", "--steps", 4)
        with open(self.path("small-mixed.json"), "w") as file:
            json.dump(done, file)
        page = subprocess.run([sys.executable, os.path.join(SOURCE, "bench/report_scenarios.py"),
                               self.directory], capture_output=True, text=True)
        self.assertEqual((page.returncode, page.stderr), (0, ""))
        for part in ["[small-mixed](small-mixed.json) | mixed | 4 |", "a tiny geometry",
                     "routing random"]:
            self.assertIn(part, page.stdout)

    def test_all_measurements_of_a_gpu(self):
        if not self.good_json("info")["cuda_built"]:
            self.skipTest("this build has no CUDA kernels")
        run = os.path.join(SOURCE, "bench/run_gpu")
        env = {**os.environ, **FAKE, "MEGAMOE_TOOL": TOOL}
        done = subprocess.run([run, self.directory,
                               "^(qwen3-30b-mxfp4|scenarios/flash-decode|flash-(arms|64-trace))$"],
                              capture_output=True, text=True, env=env)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for name in ["qwen3-30b-mxfp4", "scenarios/flash-decode"]:
            with open(self.path(name + ".json")) as file:
                self.assertEqual(json.load(file)["format"], "mxfp4")
        with open(self.path("flash-arms.json")) as file:
            self.assertEqual(len(json.load(file)["arms"]), 5)
        with open(self.path("flash-64-trace.json")) as file:
            self.assertTrue(json.load(file)["traceEvents"])
        self.assertEqual(sorted(os.listdir(self.directory)),
                         ["flash-64-trace.json", "flash-arms.json", "qwen3-30b-mxfp4.json",
                          "scenarios", "tune"])
        for arguments, device, code in [(["nothing"], "cuda", 2), (["flash-mxfp4$"], "cuda:7", 1)]:
            done = subprocess.run([run, self.directory, *arguments], capture_output=True,
                                  env={**env, "MEGAMOE_DEVICE": device})
            self.assertEqual(done.returncode, code)

    def test_bad_input(self):
        for option, value in [("--workload", "train"), ("--prompt-tokens", "0"),
                              ("--output-tokens", "9-3"), ("--prompt-tokens", "lognormal:x:1"),
                              ("--arrivals", "0"), ("--sequences", "0"), ("--routing", "fair"),
                              ("--geometry", "small"), ("--model", "gpt-9")]:
            with self.subTest(option=option, value=value):
                self.fails(2, [option, value], "scenario", option, value)
        self.fails(2, ["--chunk 7", "--sequences 8"], "scenario", "--workload", "mixed", "--chunk",
                   7, "--sequences", 8)
        self.fails(2, ["--model", "--geometry"], "scenario", "--model", "x", "--geometry", "A")
        self.fails(2, ["int8", "cuda"], "scenario", "--device", "cuda", "--activations", "int8")
        self.fails(2, ["b"], "scenario", "a", "b")

    def test_gpu(self):
        if not self.good_json("info")["cuda_built"]:
            self.skipTest("this build has no CUDA kernels")
        done = self.scenario("--workload", "mixed", "--device", "cuda", "--layers", 2, "--experts",
                             8, "--requests", 5, "--prompt-tokens", 50, "--output-tokens", 3,
                             env=FAKE)
        self.assertEqual((done["requests_ended"], done["chunk"]), (5, 2048))
        # The fake driver's events are 10 us apart.
        self.assertAlmostEqual(done["step_us"]["p50"], 10, places=3)
        gpu = done["gpu"]
        self.assertEqual(gpu["driver"], "999.1")
        self.assertLess(gpu["after"]["sm_mhz"], gpu["before"]["sm_mhz"])


class Routing(Case):
    def loads(self, profile, *arguments):
        """Active experts and largest load, of 32 experts with top-4."""
        done = self.good_json("scenario", "--routing", profile, "--output-tokens", 4,
                              "--sequences", 16, "--requests", 16, "--layers", 2, *arguments)
        self.assertEqual(done["step_tokens"]["mean"], 16)
        return done["routing"], done["experts_active_mean"], done["load_imbalance_mean"]

    def test_profiles(self):
        self.assertEqual(self.loads("balanced"), ("balanced", 32, 1))
        self.assertEqual(self.loads("permuted"), ("permuted", 32, 1))
        self.assertEqual(self.loads("hot")[2], 8)
        name, active, imbalance = self.loads("zipf:1.5")
        self.assertEqual(name, "zipf:1.5")
        self.assertLess(active, self.loads("random")[1])
        self.assertGreater(imbalance, self.loads("random")[2])

    def test_recorded(self):
        path = self.path("routes.safetensors")
        write_safetensors(path, {"topk_ids": ("I32", [2, 4], i32([0, 1, 2, 3, 0, 1, 2, -1]))})
        name, active, imbalance = self.loads("file:" + path)
        self.assertEqual((name, active), ("file:" + path, 4))
        self.assertAlmostEqual(imbalance, 32 * 16 / 56)
        self.fails(2, [path, "topk_ids", "4 columns", "top-8"], "scenario", "--routing",
                   "file:" + path, "--model", "qwen3-30b-a3b", "--experts", 8, "--layers", 1)
        write_safetensors(path, {"topk_ids": ("I32", [1, 4], i32([0, 1, 2, 32]))})
        self.fails(2, [path, "id 32", "-1..31"], "scenario", "--routing", "file:" + path)
        write_safetensors(path, {"topk_ids": ("F32", [1, 4], f32([0, 1, 2, 3]))})
        self.fails(2, [path, "F32", "I32"], "scenario", "--routing", "file:" + path)
        self.fails(2, ["/no/file"], "scenario", "--routing", "file:/no/file")

    def test_recorded_by_run(self):
        checkpoint = self.synth()
        out = self.path("out.safetensors")
        done = self.good_json("run", checkpoint, "--tokens", 20, "--output", out)
        done = self.good_json("scenario", "--routing", "file:" + out, "--steps", 2, "--model",
                              "qwen3-30b-a3b", "--experts", 8 * done["topk"], "--layers", 1)
        self.assertEqual(done["steps"], 2)


if __name__ == "__main__":
    unittest.main()
