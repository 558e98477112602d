# SPDX-License-Identifier: Apache-2.0
"""megamoe tune: its file of plans on any machine, and its measuring with a driver that computes
nothing. That plans are measured well is for a GPU."""
import json
import os
import subprocess
import sys
import unittest

from tool import TOOL, Case

FAKE = {"LD_LIBRARY_PATH": os.environ["MEGAMOE_FAKE_CUDA"]}
ALL = 2**31 - 1

KEY = {"library": "0.1.0", "routing": "random", "layout": 1, "capability_major": 9,
       "capability_minor": 0, "multiprocessors": 132, "max_ctas": 132, "l2_bytes": 52428800,
       "clock_khz": 1980000, "memory_clock_khz": 3201000, "memory_bus_bits": 6144, "hidden": 4096,
       "intermediate": 2048, "experts": 32, "topk": 6, "ranks": 1, "format": "mxfp4",
       "nvfp4": "exact", "accumulate": "mma", "input_scale": "token", "capacity": 8192}
PLANS = [{"tokens": 1, "token_tile": 0, "lag": 0, "default_us": 20.5, "us": 20.5, "gain": 1.0},
         {"tokens": 64, "token_tile": 24, "lag": ALL, "default_us": 150, "us": 120, "gain": 1.25}]


def entry(**changes):
    return {"version": 1, "key": {**KEY, **changes}, "plans": PLANS}


class Tune(Case):
    def setUp(self):
        super().setUp()
        self.cache = {"MEGAMOE_CACHE_DIR": self.path("cache")}
        self.file = self.path("cache/plans.json")

    def write(self, *entries):
        os.makedirs(self.path("cache"), exist_ok=True)
        with open(self.file, "w") as file:
            json.dump({"tuned": entries}, file)

    def read(self):
        with open(self.file) as file:
            return json.load(file)["tuned"]


class File(Tune):
    def show(self, *options):
        return self.good_json("tune", "--show", *options, env=self.cache)["entries"]

    def test_there_is_none(self):
        self.assertEqual(self.show(), [])
        text = self.good("tune", "--show", env=self.cache)
        self.assertIn(self.file, text)
        self.assertIn("none", text)
        self.assertEqual(self.good_json("tune", "--forget", env=self.cache)["removed"], 0)
        self.assertFalse(os.path.exists(self.path("cache")))

    def test_entries_are_shown_and_forgotten(self):
        self.write(entry(), entry(format="nvfp4", nvfp4="folded"),
                   entry(hidden=7168, intermediate=3072, experts=48), entry(capacity=512))
        shown = self.show()
        self.assertEqual(len(shown), 4)
        self.assertEqual(shown[0]["plans"], PLANS)
        for name in ["hidden", "topk", "format", "nvfp4", "capacity", "routing", "library"]:
            self.assertEqual(shown[0]["key"][name], KEY[name])
        text = self.good("tune", "--show", "--geometry", "pro", env=self.cache)
        for part in ["7168 x 3072", "48 experts", "25.00%", "built-in", "all", "random"]:
            self.assertIn(part, text)
        self.assertNotIn("4096", text)
        self.assertEqual(len(self.show("--geometry", "flash")), 3)
        self.assertEqual(len(self.show("--geometry", "flash", "--format", "mxfp4")), 2)
        self.assertEqual(len(self.show("--capacity", 512)), 1)
        self.assertEqual(self.good_json("tune", "--forget", "--format", "nvfp4",
                                        env=self.cache)["removed"], 1)
        self.assertEqual(len(self.read()), 3)
        text = self.good("tune", "--forget", env=self.cache)
        self.assertIn("3 entries", text)
        self.assertEqual(self.read(), [])

    def test_another_file(self):
        self.write(entry())
        other = self.path("other.json")
        os.rename(self.file, other)
        self.assertEqual(self.show(), [])
        self.assertEqual(len(self.show("--cache", other)), 1)

    def test_what_cannot_be_read_is_a_warning(self):
        self.write(entry(), {**entry(), "version": 7}, entry(hidden="wide"))
        done = self.run_tool("tune", "--show", "--json", env=self.cache)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(len(json.loads(done.stdout)["entries"]), 1)
        self.assertIn("warning", done.stderr)
        self.assertIn("2 of 3 entries", done.stderr)
        self.assertIn("version is 7", done.stderr)
        with open(self.file, "w") as file:
            file.write('{"tuned": [{"ver')
        done = self.run_tool("tune", "--show", env=self.cache)
        self.assertEqual(done.returncode, 0)
        self.assertIn("none", done.stdout)
        self.assertIn("line 1", done.stderr)

    def test_no_place(self):
        nowhere = {"MEGAMOE_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": ""}
        self.fails(2, ["MEGAMOE_CACHE_DIR"], "tune", "--show", env=nowhere)

    def test_usage(self):
        self.fails(2, ["--show", "--forget"], "tune", "--show", "--forget")
        self.fails(2, ["--geometry"], "tune", "--show", "--model", "qwen3-30b-a3b")
        self.fails(2, ["exclude"], "tune", "x", "--geometry", "flash")
        self.fails(2, ["nowhere"], "tune", "--show", "--geometry", "nowhere")
        self.fails(2, ["CPU", "cuda"], "tune", "--device", "cpu")

    def test_without_a_gpu(self):
        info = self.good_json("info")
        if "gpus" in info:
            self.skipTest("this machine has a GPU")
        self.fails(2, [info["no_gpus"]], "tune", env=self.cache)
        self.fails(2, [info["no_gpus"]], "tune", "--dry-run", env=self.cache)
        self.assertFalse(os.path.exists(self.path("cache")))


class Measuring(Tune):
    def setUp(self):
        super().setUp()
        if not self.good_json("info", env=FAKE)["cuda_built"]:
            self.skipTest("this build has no CUDA kernels")
        self.env = {**FAKE, **self.cache}

    # Few experts are made fast.
    FAST = ["tune", "--experts", 8, "--rounds", 9, "--iterations", 3]

    def tune(self, *options, **env):
        return self.good_json(*self.FAST, *options, env={**self.env, **env})

    def test_candidates(self):
        done = self.good_json(*self.FAST, "--dry-run", "--tokens", "1,64", "--capacity", 100,
                              env=self.env)
        self.assertEqual(done["key"]["capacity"], 100)
        one, many = [[(c["token_tile"], c["lag"]) for c in p["candidates"]] for p in done["points"]]
        self.assertEqual(one[0], (8, ALL))
        self.assertEqual({lag for _, lag in one}, {ALL})
        self.assertGreater(len(many), len(one))
        self.assertEqual({tile for tile, _ in one}, {tile for tile, _ in many})
        self.assertEqual(len(many), len(set(many)))
        text = self.good("tune", "--dry-run", env=self.env)
        for part in ["24/all", "\n      1  ", "\n   8192  "]:
            self.assertIn(part, text)
        self.assertFalse(os.path.exists(self.file))

    def test_nothing_is_faster(self):
        done = self.tune("--tokens", "1,64")
        for point in done["points"]:
            self.assertEqual(point["best"], point["built_in"])
            self.assertFalse(point["wins"])
            self.assertTrue(point["same_bits"])
            self.assertAlmostEqual(point["us"], 10, places=3)
        stored, = self.read()
        self.assertEqual([(p["tokens"], p["token_tile"]) for p in stored["plans"]],
                         [(1, 0), (64, 0)])
        self.assertEqual(done["gpu"]["driver"], "999.1")
        self.assertLess(done["gpu"]["after"]["sm_mhz"], done["gpu"]["before"]["sm_mhz"])
        for name in ["host", "version", "commit"]:
            self.assertTrue(done[name])

    def test_the_fastest_is_stored(self):
        done = self.tune("--tokens", "1,64", FAKE_CUDA_FAST_LAG="17")
        one, many = done["points"]
        self.assertFalse(one["wins"])
        self.assertEqual(many["best"]["lag"], 17)
        self.assertTrue(many["wins"])
        for name in ["median", "low", "high"]:
            self.assertAlmostEqual(many["gain"][name], 2, places=3)
        self.assertGreaterEqual(many["gain"]["confidence"], 0.99)
        rounds = {c["lag"]: c["rounds"] for c in many["candidates"][1:]}
        self.assertEqual((rounds[17], rounds[25], many["candidates"][0]["rounds"]), (3, 1, 3))
        plan = self.read()[0]["plans"][1]
        self.assertEqual((plan["tokens"], plan["lag"]), (64, 17))
        self.assertAlmostEqual(plan["gain"], 2, places=3)
        # Another run adds, and takes the place of what it has measured too.
        self.tune("--tokens", "64,8192")
        stored, = self.read()
        self.assertEqual([(p["tokens"], p["token_tile"]) for p in stored["plans"]],
                         [(1, 0), (64, 0), (8192, 0)])
        self.tune("--tokens", 64, "--format", "nvfp4", "--nvfp4", "folded", "--accumulate",
                  "promote", "--input-scale", "block")
        self.tune("--tokens", 64, "--routing", "zipf")
        self.assertEqual(self.read()[2]["key"]["routing"], "zipf:1")
        self.assertEqual(len(self.good_json("tune", "--show", "--routing", "zipf:1",
                                            env=self.env)["entries"]), 1)
        self.fails(2, ["routing"], "tune", "--routing", "nowhere", env=self.env)
        key = self.read()[1]["key"]
        self.assertEqual((key["format"], key["nvfp4"], key["accumulate"], key["input_scale"]),
                         ("nvfp4", "folded", "promote", "block"))
        text = self.good(*self.FAST, "--tokens", 64,
                         env={**self.env, "FAKE_CUDA_FAST_LAG": "17"})
        for part in ["taken", "100.00%", "Fake H200", self.file]:
            self.assertIn(part, text)
        os.mkdir(self.path("results"))
        with open(self.path("results/flash.json"), "w") as file:
            json.dump(done, file)
        report = subprocess.run(
            [sys.executable, os.path.join(os.environ["MEGAMOE_SOURCE"], "bench/report_tune.py"),
             self.path("results")], capture_output=True, text=True)
        self.assertEqual((report.returncode, report.stderr), (0, ""))
        self.assertRegex(report.stdout, r"\| 64 \| \d+, all \| 10.0 \| 8, 17 \| 5.0 \| 100.0 % \|")
        # The built-in choice is the fastest: a gain would be one over itself.
        self.assertRegex(report.stdout, r"\| 1 \| \d+, all \| 10.0 \| \d+, all \| 10.0 \|  \|  \|  \|")

    def test_clocks_that_change(self):
        done = self.tune("--tokens", 64, FAKE_CUDA_DRIFT="600")
        point, = done["points"]
        for c in point["candidates"]:
            self.assertEqual(c["rounds"], 3)
            self.assertAlmostEqual(c["ratio"], 1, delta=0.04)
        done = self.tune("--tokens", 64, FAKE_CUDA_DRIFT="600", FAKE_CUDA_FAST_LAG="17")
        point, = done["points"]
        self.assertTrue(point["wins"])
        self.assertEqual(point["best"]["lag"], 17)
        for c in point["candidates"]:
            self.assertAlmostEqual(c["ratio"], 2 if c["lag"] == 17 else 1, delta=0.08)

    def test_a_plan_of_other_bits_is_an_error(self):
        done = self.fails_after("--tokens", "64", "--json", FAKE_CUDA_WRONG_LAG="17",
                                FAKE_CUDA_FAST_LAG="17")
        self.assertIn("token tile 8 and lag 17", done.stderr)
        point, = json.loads(done.stdout)["points"]
        self.assertFalse(point["same_bits"])
        self.assertFalse(point["wins"])
        self.assertEqual(self.read()[0]["plans"][0]["token_tile"], 0)

    def fails_after(self, *options, **env):
        done = self.run_tool(*self.FAST, *options, env={**self.env, **env})
        self.assertEqual(done.returncode, 1, done.stderr)
        return done

    def test_ranks_that_are_processes(self):
        done = self.good_json("launch", "-n", 2, "--", TOOL, "tune", "--rounds", 9, "--iterations",
                              3, "--tokens", 64, env={**self.env, "FAKE_CUDA_FAST_LAG": "17"})
        self.assertEqual((done["key"]["ranks"], done["key"]["experts"]), (2, 32))
        self.assertTrue(done["points"][0]["wins"])
        self.assertEqual(self.read()[0]["key"]["ranks"], 2)


if __name__ == "__main__":
    unittest.main()
