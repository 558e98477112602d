# SPDX-License-Identifier: Apache-2.0
"""The tool's way to a GPU: what it says without one, and its calls of a driver that computes
nothing. That results are right is for tests on a GPU."""
import json
import os
import shutil
import unittest

from tool import TOOL, Case

FAKE = {"LD_LIBRARY_PATH": os.environ["MEGAMOE_FAKE_CUDA"]}


class NoGpu(Case):
    def setUp(self):
        super().setUp()
        info = self.good_json("info")
        if "gpus" in info:
            self.skipTest("this machine has a GPU")
        self.why = info["no_gpus"]

    def test_commands_say_why(self):
        checkpoint = self.synth()
        for name in ["cuda", "cuda:0"]:
            self.fails(2, [self.why], "info", "--device", name)
            self.fails(2, [self.why], "bench", "--device", name)
            self.fails(2, [self.why], "run", checkpoint, "--device", name)

    def test_info_of_the_cpu_says_why(self):
        self.assertIn(self.why, self.good("info"))


class Names(Case):
    def test_malformed(self):
        checkpoint = self.synth()
        for name in ["gpu", "cuda:", "cuda:x", "cudas"]:
            with self.subTest(name):
                self.fails(2, [f"'{name}'", "cuda:N"], "bench", "--device", name)
                self.fails(2, [f"'{name}'", "cuda:N"], "run", checkpoint, "--device", name)


class FakeGpu(Case):
    def setUp(self):
        super().setUp()
        info = self.good_json("info", env=FAKE)
        if not info["cuda_built"]:
            self.skipTest("this build has no CUDA kernels")
        self.assertEqual(info["gpus"][0]["model"], "Fake H200")

    def test_no_such_gpu(self):
        self.fails(2, ["cuda:1", "1 GPU"], "bench", "--device", "cuda:1", env=FAKE)

    def test_run(self):
        checkpoint = self.synth()
        for ranks in [1, 3, 8]:
            done = self.good_json("run", checkpoint, "--device", "cuda:0", "--ranks", ranks,
                                  "--tokens", 5, env=FAKE)
            self.assertEqual((done["device"], done["tier"], done["ranks"]),
                             ("cuda:0", "sm_90a", ranks))
            self.assertEqual(done["received"], {"rank_min": 0, "rank_max": 0, "expert_min": 0,
                                                "expert_max": 0})
        self.fails(2, ["9 folded ranks", "8"], "run", checkpoint, "--device", "cuda", "--ranks", 9,
                   env=FAKE)

    def test_run_finds_that_nothing_was_computed(self):
        checkpoint = self.synth()
        out = self.path("out")
        self.fails(1, ["4 of 4 rows differ"], "run", checkpoint, "--device", "cuda", "--tokens", 4,
                   "--verify", "--output", out, env=FAKE)
        self.assertFalse(os.path.exists(out))

    def test_prepared_files(self):
        checkpoint = self.synth()
        for device, other in [("cuda", "cpu"), ("cpu", "cuda")]:
            file = self.path(device + ".mmoe")
            self.good("prepare", checkpoint, "--device", device, "--out", file)
            self.good("verify", file)
            self.good("run", file, "--device", device, env=FAKE)
            self.fails(2, [f'"{device}"', f'"{other}"'], "run", file, "--device", other, env=FAKE)

    def bench(self, *arguments):
        return self.good_json("bench", "--device", "cuda", "--iterations", 3, *arguments, env=FAKE)

    def test_bench(self):
        done = self.bench("--tokens", "1,64", "--format", "nvfp4", "--nvfp4", "folded")
        self.assertEqual((done["geometry"], done["format"], done["nvfp4"], done["capacity"]),
                         ("flash", "nvfp4", "folded", 8192))
        self.assertEqual(done["stored_expert_bytes"], 3 * 4096 * 2048 * 9 // 16)
        one, many = done["points"]
        self.assertEqual((one["tokens"], one["experts_active"]), (1, 6))
        self.assertEqual((many["tokens"], many["experts_active"]), (64, 32))
        # The fake driver's events are 10 us apart.
        for name in ["forward_us", "stage_us"]:
            for value in many[name].values():
                self.assertAlmostEqual(value, 10, places=3)
        self.assertAlmostEqual(many["tflops"], 6 * 64 * 6 * 4096 * 2048 / 1e7, places=3)
        self.assertAlmostEqual(many["nominal_floor_us"],
                               32 * done["stored_expert_bytes"] / 4390e3, places=3)
        self.assertEqual((many["public_us"], many["target_us"]), (222.1, 125))

    def test_bench_of_other_experts_has_no_public_numbers(self):
        done = self.bench("--tokens", "64", "--experts", "8")
        self.assertEqual(done["experts"], 8)
        self.assertNotIn("public_us", done["points"][0])

    def test_bench_geometries(self):
        for geometry, shape in {"glm-5": (6144, 2048, 32, 8),
                                "qwen3-235b": (4096, 1536, 16, 8),
                                "qwen3-next": (2048, 512, 64, 10),
                                "mimo-v2.5-pro": (6144, 2048, 48, 8),
                                "gpt-oss": (2880, 2880, 16, 4)}.items():
            done = self.bench("--geometry", geometry, "--tokens", 2, "--capacity", 16)
            self.assertEqual(tuple(done[k] for k in ["hidden", "intermediate", "experts", "topk"]),
                             shape)
            self.assertEqual(done["capacity"], 16)

    def test_bench_capacity_grows_with_the_batch(self):
        self.assertEqual(self.bench("--model", "qwen3-30b-a3b", "--experts", 8, "--tokens",
                                    9000)["capacity"], 16384)

    def test_bench_of_a_file(self):
        checkpoint = self.synth()
        file = self.path("layer.mmoe")
        self.good("prepare", checkpoint, "--device", "cuda", "--nvfp4", "folded", "--out", file)
        done = self.bench(file, "--tokens", 3, "--input-scale", "block", "--accumulate", "promote")
        self.assertEqual((done["nvfp4"], done["input_scale"], done["accumulate"]),
                         ("folded", "block", "promote"))
        self.fails(2, ["--experts 99"], "bench", file, "--device", "cuda", "--experts", 99,
                   env=FAKE)

    def test_bench_text(self):
        text = self.good("bench", "--device", "cuda", "--tokens", "1,32", "--iterations", 2,
                         env=FAKE)
        for part in ["DeepSeek-V4-Flash", "Fake H200", "floor us", "206.5", "DeepGEMM", "ceilings"]:
            self.assertIn(part, text)

    def launch(self, ranks, *arguments):
        return self.good_json("launch", "-n", ranks, "--", TOOL, *arguments, env=FAKE)

    def test_ranks_that_are_processes(self):
        checkpoint = self.synth()
        done = self.launch(3, "run", checkpoint, "--device", "cuda", "--tokens", 7)
        self.assertEqual((done["device"], done["ranks"], done["tokens"]), ("cuda:0", 3, 7))
        done = self.launch(2, "bench", "--device", "cuda", "--iterations", 3, "--tokens", "1,64")
        self.assertEqual((done["ranks"], done["experts"]), (2, 64))
        one, many = done["points"]
        self.assertLessEqual(one["experts_active"], 12)
        self.assertEqual(many["experts_active"], 32)
        self.assertAlmostEqual(many["routes_received"], 64 * 6, delta=60)
        self.assertAlmostEqual(many["forward_us"]["median"], 10, places=3)
        self.assertAlmostEqual(many["skew_us"], 0, places=3)
        self.assertNotIn("public_us", many)

    def test_trace(self):
        """Of a device that computes nothing: nothing lasts, but all blocks are there."""
        path = self.path("trace.json")
        done = self.good_json("trace", "--device", "cuda", "--tokens", 8, "--out", path, env=FAKE)
        self.assertEqual((done["ranks"], done["dropped"]), (1, 0))
        with open(path) as file:
            trace = json.load(file)
        self.assertEqual(trace["workers"], "multiprocessor")
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        self.assertEqual(len(spans), done["spans"])
        self.assertEqual({event["cat"] for event in spans}, {"count", "dispatch", "combine"})
        gpu = trace["otherData"]["gpu"]
        self.assertEqual(gpu["driver"], "999.1")
        self.assertLess(gpu["after"]["sm_mhz"], gpu["before"]["sm_mhz"])
        done = self.launch(2, "trace", "--device", "cuda", "--tokens", 8, "--warm", "--token-tile",
                           16, "--out", path)
        self.assertEqual(done["ranks"], 2)

    def test_curve_and_plot(self):
        done = self.bench("--tokens", "curve", "--capacity", 64)
        self.assertEqual([p["tokens"] for p in done["points"]],
                         [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64])
        file, picture = self.path("bench.json"), self.path("picture.svg")
        with open(file, "w") as stream:
            json.dump(done, stream)
        if shutil.which("gnuplot"):
            self.good("plot", file, "--out", picture)
            with open(picture) as stream:
                svg = stream.read()
            for part in ["<svg", "floor", "published", "</svg>"]:
                self.assertIn(part, svg)


if __name__ == "__main__":
    unittest.main()
