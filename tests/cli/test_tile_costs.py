# SPDX-License-Identifier: Apache-2.0
"""bench/tile_costs.py finds the costs again from which times were made, and what chooses well."""
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import unittest

from tool import Case

SCRIPT = os.path.join(os.environ["MEGAMOE_SOURCE"], "bench/tile_costs.py")
spec = importlib.util.spec_from_file_location("tile_costs", SCRIPT)
tile_costs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tile_costs)

READING = 90
TILES = [8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128]
COSTS = {("MM_CUDA_MXFP4", 0, n): 85 + 0.6 * n if n <= 40 else 60 + 1.3 * n for n in TILES}


class TileCosts(Case):
    def write_run(self, name, hidden, intermediate, experts, noise, **changes):
        key = {"format": "mxfp4", "nvfp4": "exact", "accumulate": "mma", "experts": experts,
               "hidden": hidden, "intermediate": intermediate, "topk": 6, "ranks": 1, **changes}
        run = {"key": key, "geometry": name, "layer": name, "dry_run": False, "points": []}
        for tokens in [2**i for i in range(14)]:
            point = tile_costs.Point(run, {"tokens": tokens, "candidates": []})
            times = [30 + 0.05 * tokens + noise() +
                     point.factor * tile_costs.cost_of(READING, COSTS, point, tile)
                     for tile in TILES]
            run["points"].append({"tokens": tokens, "candidates": [
                {"token_tile": tile, "lag": 2**31 - 1, "us": us} for tile, us in zip(TILES, times)
            ] + [{"token_tile": 8, "lag": 3, "us": 1}, {"token_tile": 8, "lag": 2**31 - 1}]})
        path = self.path(name + ".json")
        with open(path, "w") as file:
            json.dump(run, file)
        return path

    def run_script(self, *files):
        return subprocess.run([sys.executable, SCRIPT, *files], capture_output=True, text=True)

    def test_costs_are_found(self):
        generator = random.Random(3)
        noise = lambda: generator.gauss(0, 0.3)
        files = [self.write_run("flash", 4096, 2048, 32, noise),
                 self.write_run("pro", 7168, 3072, 48, noise)]
        points = tile_costs.measured(files)
        before = tile_costs.HEADER.read_text()
        reading, rows = tile_costs.fit(points, *tile_costs.read_header(before))
        self.assertAlmostEqual(reading, READING, delta=0.5)
        for kernel, cost in COSTS.items():
            self.assertAlmostEqual(rows[kernel], cost, delta=0.5)
        done = self.run_script(*files)
        self.assertEqual(done.returncode, 0, done.stderr)
        reading, rows = tile_costs.read_header(done.stdout)
        self.assertLess(sum(tile_costs.losses(points, reading, rows)) / len(points), 0.002)
        costs = [rows["MM_CUDA_MXFP4", 0, n] for n in TILES]
        self.assertEqual(costs, sorted(costs))
        # The rest of the file stays, and what was not measured.
        self.assertEqual({k: v for k, v in rows.items() if k not in COSTS},
                         {k: v for k, v in tile_costs.read_header(before)[1].items()
                          if k not in COSTS})
        self.assertIn("Source: flash.json pro.json", done.stdout)
        self.assertEqual(re.sub(r"\d[\d.]*|Source.*|[ \\\n]", "", before),
                         re.sub(r"\d[\d.]*|Source.*|[ \\\n]", "", done.stdout))
        self.assertTrue(all(len(line) <= 100 for line in done.stdout.splitlines()))
        self.assertIn("mean", done.stderr)

    def test_what_is_refused(self):
        done = self.run_script(self.write_run("two", 4096, 2048, 32, lambda: 0, ranks=2))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("one rank", done.stderr)
        path = self.path("empty.json")
        with open(path, "w") as file:
            json.dump({"key": {"ranks": 1}, "dry_run": False, "points": []}, file)
        self.assertIn("nothing to fit", self.run_script(path).stderr)


if __name__ == "__main__":
    unittest.main()
