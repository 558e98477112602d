# SPDX-License-Identifier: Apache-2.0
"""compare: pairs, intervals and exit codes of results whose answer is known."""
import copy
import json
import os
import unittest

from tool import Case

STORED = os.path.join(os.environ["MEGAMOE_SOURCE"], "bench/results")
NOISE = [1.00, 1.02, 0.99, 1.01, 0.98, 1.03, 1.00, 0.97, 1.01, 1.00]


def result(slower=1.0, arms=("base",), seed=1, rounds=10, tokens=(1, 64)):
    def point(n):
        us = [100 * n * noise * slower for noise in NOISE[:rounds]]
        return {"tokens": n, "forward_us": {"median": sorted(us)[len(us) // 2], "min": min(us),
                                            "p90": max(us)}, "rounds_us": us}
    each = [{"arm": arm, "format": "mxfp4", "device": "cuda:0", "model": "Some GPU",
             "points": [point(n) for n in tokens]} for arm in arms]
    run = {"schema_version": 1, "hidden": 64, "intermediate": 32, "experts": 8, "topk": 2,
           "seed": seed, "iterations": 20, "date": "2026-01-01T00:00:00Z"}
    return {**run, "arms": each} if len(each) > 1 else {**run, **each[0]}


class CompareCase(Case):
    def file(self, name, content):
        path = self.path(name)
        with open(path, "w") as file:
            json.dump(content, file)
        return path

    def both(self, a, b):
        return self.file("a.json", a), self.file("b.json", b)


class Compare(CompareCase):
    def test_rounds_are_paired(self):
        done = self.good_json("compare", *self.both(result(), result(1.05)))
        self.assertEqual([p["tokens"] for p in done["points"]], [1, 64])
        for p in done["points"]:
            self.assertEqual((p["method"], p["b_is"], p["failed"]), ("rounds", "slower", False))
            for name in ["ratio", "low", "high"]:  # noise that both have falls out
                self.assertAlmostEqual(p[name], 1.05, places=6)
            self.assertAlmostEqual(p["confidence"], 1 - 22 / 1024, places=6)
        self.assertEqual(done["arms"], [{"arm": "base", "differs": {}}])

    def test_other_seeds_are_not(self):
        done = self.good_json("compare", *self.both(result(), result(1.5, seed=2)))
        p = done["points"][0]
        self.assertEqual((p["method"], p["b_is"]), ("bootstrap", "slower"))
        self.assertAlmostEqual(p["ratio"], 1.5, places=6)
        self.assertTrue(1.4 < p["low"] < 1.5 < p["high"] < 1.6)
        self.assertEqual(done["arms"][0]["differs"], {"seed": [1, 2]})

    def test_other_numbers_of_rounds_are_not(self):
        done = self.good_json("compare", *self.both(result(), result(rounds=9)))
        self.assertEqual({p["method"] for p in done["points"]}, {"bootstrap"})
        self.assertEqual({p["b_is"] for p in done["points"]}, {"same"})

    def test_arms_are_matched_by_name(self):
        a, b = result(arms=("base", "x", "y")), result(0.5, arms=("base", "y", "z"))
        done = self.good_json("compare", *self.both(a, b))
        self.assertEqual({p["arm"] for p in done["points"]}, {"base", "y"})
        self.assertEqual({p["method"] for p in done["points"]}, {"bootstrap"})
        self.assertEqual({p["b_is"] for p in done["points"]}, {"faster"})

    def test_single_arms_are_compared(self):
        a, b = result(), result(arms=("l2=warm",))
        b["model"] = "Another GPU"
        text = self.good("compare", *self.both(a, b))
        for part in ['"Some GPU" in A', '"Another GPU" in B', "rounds", "same"]:
            self.assertIn(part, text)

    def test_only_common_batch_sizes(self):
        done = self.good_json("compare", *self.both(result(), result(tokens=(64, 128))))
        self.assertEqual([p["tokens"] for p in done["points"]], [64])
        self.fails(2, ["in common"], "compare", *self.both(result(), result(tokens=(2,))))

    def test_bound(self):
        files = self.both(result(), result(1.05))
        self.good("compare", *files, "--fail-above", 5.1)
        done = self.run_tool("compare", *files, "--fail-above", 4.9)
        self.assertEqual(done.returncode, 1)
        self.assertIn("2 of 2 points", done.stderr)
        self.assertIn("FAILED", done.stdout)
        done = self.run_tool("compare", *files, "--fail-above", 0, "--json")
        self.assertEqual((done.returncode, json.loads(done.stdout)["failed"]), (1, 2))
        self.good("compare", *reversed(files), "--fail-above", 0)
        # What may be noise does not fail.
        self.good("compare", *self.both(result(), result(1.001, seed=2)), "--fail-above", 0)

    def test_results_of_before(self):
        """Results of before there were rounds have only medians."""
        h200 = os.path.join(STORED, "h200")
        a, b = (os.path.join(h200, name) for name in ("flash-mxfp4.json", "flash-mxfp4-block.json"))
        done = self.good_json("compare", a, b)
        self.assertEqual({p["method"] for p in done["points"]}, {"rounds"})
        self.assertEqual(done["arms"][0]["differs"]["input_scale"], ["token", "block"])
        with open(b) as file:
            before = json.load(file)
        for point in before["points"]:
            del point["rounds_us"]
        done = self.good_json("compare", a, self.file("before.json", before))
        self.assertEqual({p["method"] for p in done["points"]}, {"medians"})
        self.fails(2, ["hidden 4096", "7168", "one geometry"], "compare", a,
                   os.path.join(h200, "pro-mxfp4.json"))
        cpu = os.path.join(STORED, "zen4-2core", "a-mxfp4-1.json")
        self.assertEqual({p["ratio"] for p in self.good_json("compare", cpu, cpu)["points"]}, {1.0})

    def test_results_of_this_tool(self):
        files = []
        for name in ["a.json", "b.json"]:
            files.append(self.file(name, self.good_json(
                "bench", "--geometry", "A", "--memory", "0.03", "--tokens", 1, "--rounds", 6)))
        done = self.good_json("compare", *files)
        self.assertEqual(done["points"][0]["method"], "rounds")
        self.assertEqual(done["arms"][0]["differs"], {})


class Refusals(CompareCase):
    def test_files(self):
        good = self.file("good.json", result())
        self.fails(2, ["nowhere"], "compare", good, self.path("nowhere"))
        for content in [[], {}, 3, {"points": []}, {"points": 3}, {"arms": []}, {"arms": 1},
                        {"arms": [1]}, {"points": [1]}, {"points": [{"tokens": 1}]}]:
            with self.subTest(content):
                self.fails(2, ["bad.json"], "compare", good, self.file("bad.json", content))
        with open(self.path("bad.json"), "w") as file:
            file.write("{")
        self.fails(2, ["bad.json: line 1"], "compare", self.path("bad.json"), good)

    def test_damaged_rounds(self):
        for rounds, fits in [([], True), (3, True), (["x"], False), ([0] * 10, False),
                             ([-1.0] * 10, False), ([1e308] * 10, True)]:
            spoilt = copy.deepcopy(result())
            spoilt["points"][0]["rounds_us"] = rounds
            files = self.both(spoilt, result())
            with self.subTest(rounds):
                if fits:
                    self.assertEqual(len(self.good_json("compare", *files)["points"]), 2)
                else:
                    self.fails(2, ["a.json", "rounds_us"], "compare", *files)


if __name__ == "__main__":
    unittest.main()
