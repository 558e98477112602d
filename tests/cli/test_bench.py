# SPDX-License-Identifier: Apache-2.0
"""bench: arms beside each other, processes, the shape of its output. Times themselves are not judged."""
import csv
import io
import json
import os
import unittest

from tool import TOOL, Case, i32, write_safetensors

try:
    import jsonschema
except ImportError:  # python3-jsonschema
    jsonschema = None

SOURCE = os.environ["MEGAMOE_SOURCE"]
FAKE = {"LD_LIBRARY_PATH": os.environ["MEGAMOE_FAKE_CUDA"]}
SMALL = ["bench", "--geometry", "A", "--memory", "0.03", "--tokens", "2"]


class BenchCase(Case):
    def validate(self, result):
        if not jsonschema:
            return
        with open(os.path.join(SOURCE, "docs/schema/bench.schema.json")) as file:
            schema = json.load(file)
        jsonschema.Draft202012Validator.check_schema(schema)
        errors = jsonschema.Draft202012Validator(schema).iter_errors(result)
        self.assertEqual([e.message for e in errors], [])

    def result(self, *arguments, env=None):
        """The JSON of a run, which the schema must allow."""
        result = self.good_json(*arguments, env=env)
        self.validate(result)
        return result

    def check_ratios(self, result, arms, pairs, paired_by):
        tokens = [p["tokens"] for p in result["arms"][0]["points"]]
        self.assertEqual([(r["arm"], r["tokens"]) for r in result["ratios"]],
                         [(arm, n) for arm in arms for n in tokens])
        self.assertEqual(result["paired_by"], paired_by)
        for ratio in result["ratios"]:
            self.assertEqual((ratio["base"], ratio["pairs"], ratio["paired_by"]),
                             ("base", pairs, paired_by))
            self.assertTrue(0 < ratio["low"] <= ratio["median"] <= ratio["high"])


class Schema(BenchCase):
    def test_it_refuses(self):
        if not jsonschema:
            self.skipTest("no python3-jsonschema")
        result = self.result(*SMALL, "--rounds", 1)
        for spoil in [lambda r: r.update(more=1), lambda r: r.pop("seed"),
                      lambda r: r["points"][0].update(more=1),
                      lambda r: r["points"][0].pop("rounds_us"), lambda r: r.update(format="fp8")]:
            spoilt = json.loads(json.dumps(result))
            spoil(spoilt)
            with self.assertRaises(AssertionError):
                self.validate(spoilt)


class Arms(BenchCase):
    def test_one_arm_stands_at_the_top(self):
        result = self.result(*SMALL, "--rounds", 3)
        self.assertNotIn("arms", result)
        self.assertEqual((result["schema_version"], result["arm"]), (1, "base"))
        for p in result["points"]:
            self.assertEqual((len(p["rounds_us"]), p["runs"]), (3, 3))
            self.assertAlmostEqual(sorted(p["rounds_us"])[1] / 1e3, p["median_ms"], places=6)

    def test_several(self):
        arms = ["activations=int8", "threads=1", "format=nvfp4"]
        words = [word for arm in arms for word in ("--arm", arm)]
        result = self.result(*SMALL, "--experts", 10, "--tokens", "1,3", "--rounds", 7,
                             "--iterations", 2, *words)
        self.assertNotIn("points", result)
        base, int8, one, nvfp4 = result["arms"]
        self.assertEqual([a["arm"] for a in result["arms"]], ["base"] + arms)
        self.assertEqual((base["activations"], int8["activations"]), ("e4m3", "int8"))
        self.assertEqual(one["threads"], 1)
        self.assertEqual((base["format"], nvfp4["format"], nvfp4["nvfp4"]),
                         ("mxfp4", "nvfp4", "exact"))
        for arm in result["arms"]:
            self.assertEqual([(len(p["rounds_us"]), p["runs"]) for p in arm["points"]],
                             [(7, 14), (7, 14)])
        self.check_ratios(result, arms, 7, "round")
        for ratio in result["ratios"]:
            self.assertAlmostEqual(ratio["confidence"], 1 - 2 / 2 ** 7, places=6)

    def test_tiers(self):
        result = self.result(*SMALL, "--tokens", 1, "--rounds", 1, "--arm", "tier=scalar")
        self.assertEqual(result["arms"][1]["tier"], "scalar")
        self.assertEqual(result["arms"][0]["tier"], self.good_json("info")["tier"])

    def test_ratios_are_those_of_rounds(self):
        result = self.result(*SMALL, "--rounds", 5, "--arm", "activations=int8")
        base, int8 = (arm["points"][0]["rounds_us"] for arm in result["arms"])
        ratios = sorted(b / a for a, b in zip(base, int8))
        ratio = result["ratios"][0]
        for name, value in zip(["low", "median", "high"], [ratios[0], ratios[2], ratios[4]]):
            self.assertAlmostEqual(ratio[name], value, delta=1e-6 * value)

    def test_text_and_csv(self):
        arms = ["--rounds", 2, "--arm", "activations=int8"]
        text = self.good(*SMALL, *arms)
        for part in ["arm", "activations=int8", "ratio", "ceilings", "host", "of each round"]:
            self.assertIn(part, text)
        rows = list(csv.DictReader(io.StringIO(self.good(*SMALL, "--csv", *arms))))
        self.assertEqual([(r["arm"], r["tokens"]) for r in rows],
                         [("base", "2"), ("activations=int8", "2")])
        self.assertEqual((rows[0]["ratio"], rows[0]["stage_us"]), ("", ""))
        self.assertGreater(float(rows[1]["ratio"]), 0)
        self.assertGreater(float(rows[1]["median_us"]), 0)

    def test_flags_are_yes_or_no(self):
        file = self.path("l.mmoe")
        self.good("prepare", self.synth(), "--out", file)
        result = self.result("bench", file, "--tokens", 1, "--rounds", 1, "--arm", "mapped=yes")
        self.assertEqual(len(result["arms"]), 2)
        self.fails(2, ["mapped=1", "yes, no"], *SMALL, "--arm", "mapped=1")

    def test_live(self):
        result = self.result(*SMALL, "--tokens", "8", "--live", 1, "--rounds", 2)
        self.assertEqual(result["live"], 1)
        self.assertEqual(result["points"][0]["experts_touched"], result["topk"])

    def test_cooldown_and_warm_up(self):
        result = self.result(*SMALL, "--rounds", 1, "--cooldown", 0.01, "--warm-up", 1,
                             "--padding", 500)
        self.assertEqual((result["cooldown_s"], result["warm_ups"], result["padding_us"]),
                         (0.01, 1, 500))


class Refusals(BenchCase):
    def test_arms(self):
        for arm, parts in {"foo=1": ["'foo'", "token-tile", "library"], "lag": ["'lag'", "key=value"],
                           "format=fp8": ["fp8", "mxfp4|nvfp4"], "threads=0": ["threads 0", "1024"],
                           "device=cuda": ["device cuda beside cpu"], "lag=3": ["lag", "GPU", "cpu"],
                           "": ["key=value"], "ranks=2": ["ranks", "GPU"], "ranks=65": ["1 to 64"],
                           "activations=int8,input-scale=block": ["block", "int8"]}.items():
            with self.subTest(arm):
                self.fails(2, parts, *SMALL, "--arm", arm)
        self.fails(2, ["activations=int8", "twice"], *SMALL, *["--arm", "activations=int8"] * 2)
        self.fails(2, ["at most 16"], *SMALL, *["--arm", "threads=1"] * 17)

    def test_a_tier_that_the_machine_lacks(self):
        if self.good_json("info")["tier"] != "scalar":
            self.skipTest("this machine has them")
        self.fails(2, ["tier avx2", "scalar"], *SMALL, "--arm", "tier=avx2")

    def test_arms_of_other_sizes(self):
        self.fails(2, ["--experts 8"], "bench", "--memory", 0.04, "--format", "nvfp4", "--arm",
                   "nvfp4=folded")

    def test_options(self):
        self.fails(2, ["--json", "--csv"], *SMALL, "--json", "--csv")
        self.fails(2, ["--rounds", "--seconds"], *SMALL, "--rounds", 1, "--seconds", 1)
        self.fails(2, ["--dry-run", "--processes"], *SMALL, "--dry-run", "--processes", 1)


class Processes(BenchCase):
    def test_rounds_of_processes_are_pooled(self):
        result = self.result(*SMALL, "--rounds", 2, "--processes", 3, "--arm", "activations=int8")
        self.assertEqual(result["processes"], 3)
        for arm in result["arms"]:
            for p in arm["points"]:
                self.assertEqual((len(p["rounds_us"]), len(p["processes_us"]), p["runs"]), (6, 3, 6))
        self.check_ratios(result, ["activations=int8"], 6, "round")
        self.assertIn("--processes 3", result["command"])

    def test_other_builds(self):
        library = os.path.realpath(os.path.join(os.path.dirname(TOOL), "../src/libmegamoe.so.0"))
        arms = [f"binary={TOOL},activations=int8", f"library={library}"]
        # A library loaded first comes before the sanitizer's, which then asks for this.
        env = {"ASAN_OPTIONS": "verify_asan_link_order=0"}
        result = self.result(*SMALL, "--rounds", 2, "--processes", 2,
                             *[word for arm in arms for word in ("--arm", arm)], env=env)
        self.assertEqual([a["activations"] for a in result["arms"]], ["e4m3", "int8", "e4m3"])
        self.check_ratios(result, arms, 2, "process")
        self.assertIn("of each process", self.good(*SMALL, "--rounds", 1, "--processes", 1, "--arm",
                                                   arms[1], env=env))

    def test_a_build_that_is_not_there(self):
        self.fails(2, ["nowhere", "started"], *SMALL, "--arm", "binary=nowhere", "--processes", 1,
                   "--rounds", 1)

    def test_not_by_ranks(self):
        self.fails(2, ["--processes", "one process"], *SMALL, "--processes", 2,
                   env={"WORLD_SIZE": "2", "RANK": "0"})

    def test_errors_of_processes(self):
        self.fails(2, ["small"], "bench", "--geometry", "small", "--processes", 2)


class Plan(BenchCase):
    def test_cpu(self):
        result = self.result("bench", "--dry-run", "--tokens", "1,64", "--arm", "format=nvfp4",
                             "--experts", 16)
        self.assertTrue(result["dry_run"])
        one = result["arms"][0]["points"][0]
        self.assertEqual((one["tokens"], one["experts_active"], one["routes_received"]), (1, 8, 8))
        self.assertEqual(one["operations"], 6 * 8 * 2048 * 768)
        self.assertNotIn("forward_us", one)

    def test_gpu_without_one(self):
        result = self.result("bench", "--dry-run", "--device", "cuda:0", "--token-tile", 32,
                             "--tokens", "64,1024")
        bytes_of_expert = 3 * 4096 * 2048 * 17 // 32
        p, large = result["points"]
        self.assertEqual(p["weight_bytes"], 32 * bytes_of_expert)
        self.assertAlmostEqual(p["nominal_floor_us"], p["weight_bytes"] / 4390e3, places=3)
        self.assertEqual(p["token_tiles"], 32)
        self.assertGreater(large["token_tiles"], 6 * 1024 / 32 - 1)
        self.fails(2, ["tiles of 88 tokens", "8, 16, 24"], "bench", "--dry-run", "--device", "cuda:0",
                   "--token-tile", 88)
        text = self.good("bench", "--dry-run", "--device", "cuda:0")
        self.assertIn("floor", text)
        chosen = self.result("bench", "--dry-run", "--device", "cuda:0", "--tokens", "1,8192")
        first, last = (p["token_tile"] for p in chosen["points"])
        self.assertLess(first, last)

    def test_a_file(self):
        file = self.path("l.mmoe")
        self.good("prepare", self.synth("deepseek-v4-flash", "--format", "nvfp4"), "--nvfp4", "folded",
                  "--device", "cuda", "--out", file)
        result = self.result("bench", file, "--dry-run", "--device", "cuda", "--tokens", 2)
        self.assertEqual(result["nvfp4"], "folded")


class Routing(BenchCase):
    def plan(self, profile, *arguments):
        """Routing, active experts and load of 64 tokens among 32 experts with top-4."""
        result = self.result("bench", "--geometry", "tiny", "--tokens", 64, "--dry-run",
                             "--routing", profile, *arguments)
        point, = result["points"]
        return result["routing"], point["experts_active"], point["load_imbalance"]

    def test_profiles(self):
        self.assertEqual(self.plan("balanced"), ("balanced", 32, 1))
        self.assertEqual(self.plan("permuted:8"), ("permuted:8", 32, 1))
        self.assertEqual(self.plan("hot")[2], 8)
        self.assertEqual(self.plan("zipf")[0], "zipf:1")
        self.assertGreater(self.plan("zipf:2")[2], self.plan("random")[2])
        self.assertLess(self.plan("hot:0.5", "--live", 32)[2], 8)
        for profile in ["fair", "hot:2", "file:/no/file"]:
            with self.subTest(profile):
                self.fails(2, [profile.removeprefix("file:")], *SMALL, "--routing", profile)

    def test_recorded(self):
        path = self.path("routes.safetensors")
        write_safetensors(path, {"topk_ids": ("I32", [2, 4], i32([0, 1, 2, 3, 0, 1, 2, -1]))})
        name, active, load = self.plan("file:" + path)
        self.assertEqual((name, active), ("file:" + path, 4))
        self.assertAlmostEqual(load, 64 * 32 / (64 * 3.5))

    def test_measured(self):
        result = self.result("bench", "--geometry", "tiny", "--tokens", 8, "--rounds", 2,
                             "--routing", "hot")
        self.assertEqual(result["routing"], "hot:1")
        self.assertEqual(result["points"][0]["load_imbalance"], 8)
        self.assertIn("routing     hot:1", self.good("bench", "--geometry", "tiny", "--tokens", 8,
                                                     "--rounds", 1, "--routing", "hot"))


class FakeGpu(BenchCase):
    def setUp(self):
        super().setUp()
        if not self.good_json("info", env=FAKE)["cuda_built"]:
            self.skipTest("this build has no CUDA kernels")

    def test_arms(self):
        arms = ["format=nvfp4,nvfp4=folded,input-scale=block", "token-tile=64,launch=eager",
                "l2=clean", "l2=warm,accumulate=promote"]
        result = self.result("bench", "--device", "cuda", "--tokens", "1,64", "--rounds", 6,
                             "--iterations", 3, *[w for arm in arms for w in ("--arm", arm)], env=FAKE)
        self.check_ratios(result, arms, 6, "round")
        self.assertEqual([(a["l2"], a["launch"]) for a in result["arms"]],
                         [("cold", "graph"), ("cold", "graph"), ("cold", "eager"),
                          ("clean", "graph"), ("warm", "graph")])
        self.assertEqual(result["arms"][2]["token_tile"], 64)
        for arm in result["arms"]:
            for p in arm["points"]:
                self.assertAlmostEqual(p["forward_us"]["median"], 10, places=3)

    def test_live(self):
        result = self.result("bench", "--device", "cuda", "--tokens", "64", "--rounds", 1,
                             "--iterations", 1, "--live", 2, "--padding", 10, env=FAKE)
        p = result["points"][0]
        self.assertEqual(p["routes_received"], 12)
        self.assertLessEqual(p["experts_active"], 12)
        self.assertNotIn("public_us", p)

    def test_processes(self):
        result = self.result("bench", "--device", "cuda", "--tokens", "1", "--rounds", 2,
                             "--iterations", 2, "--processes", 2, env=FAKE)
        self.assertEqual(len(result["points"][0]["rounds_us"]), 4)

    def test_clocks_and_what_holds_them(self):
        arguments = ["bench", "--device", "cuda", "--tokens", "1", "--rounds", 3, "--iterations", 2]
        result = self.result(*arguments, env=FAKE)
        state, p = result["gpu"]["before"], result["points"][0]
        self.assertEqual(result["gpu"]["driver"], "999.1")
        self.assertEqual((state["power_w"], state["temperature_c"], state["memory_mhz"]),
                         (695.5, 61, 3201))
        self.assertEqual(state["clocks_held_by"], ["gpu_idle", "sw_power_cap"])
        self.assertEqual(p["clocks_held_by"], ["gpu_idle", "sw_power_cap"])
        # One question in each round, after that before, and each is answered 10 MHz lower.
        self.assertEqual((p["sm_mhz_most"], p["sm_mhz"], result["gpu"]["after"]["sm_mhz"]),
                         (state["sm_mhz"] - 10, state["sm_mhz"] - 30, state["sm_mhz"] - 40))
        self.assertIn("held by gpu_idle, sw_power_cap", self.good(*arguments, env=FAKE))

    def test_arms_of_ranks(self):
        result = self.good_json("launch", "-n", 2, "--", TOOL, "bench", "--device", "cuda", "--tokens",
                                "1,8", "--rounds", 2, "--iterations", 2, "--arm", "lag=2", env=FAKE)
        self.validate(result)
        self.assertEqual((result["ranks"], result["experts"]), (2, 64))
        self.check_ratios(result, ["lag=2"], 2, "round")
        self.assertIn("skew_us", result["arms"][1]["points"][0])

    def test_ranks_as_an_arm(self):
        result = self.result("bench", "--device", "cuda", "--tokens", "8", "--rounds", 2,
                             "--iterations", 2, "--processes", 2, "--arm", "ranks=2,lag=1", env=FAKE)
        self.check_ratios(result, ["ranks=2,lag=1"], 2, "process")
        base, ranks = result["arms"]
        self.assertEqual((result["experts"], ranks["experts"], ranks["ranks"]), (32, 64, 2))
        self.assertNotIn("ranks", base)

    def test_plan_knows_the_gpu(self):
        result = self.result("bench", "--device", "cuda", "--dry-run", env=FAKE)
        self.assertEqual(result["model"], "Fake H200")


if __name__ == "__main__":
    unittest.main()
