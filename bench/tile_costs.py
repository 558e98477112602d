#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes src/cuda/tile_costs.h, what the built-in choice of token tiles believes, from measurements.

    megamoe tune --device cuda:0 --geometry flash --tokens curve --json > flash.json
    megamoe tune --device cuda:0 --geometry pro --tokens curve --json > pro.json
    bench/tile_costs.py flash.json pro.json > tile_costs.h && mv tile_costs.h src/cuda/tile_costs.h

A forward of T tokens with tiles of n takes o(T) + E max(c, r) + E (tiles(n) - 1) c: E experts, c the
cost of a tile, r of reading an expert, o what does not depend on the tile. All of these are fitted by
least squares of relative errors, over the candidates whose FC2 comes after all of FC1. These, and the
numbers of before, are then moved in small steps as long as the tiles that they choose become faster,
and the better ones stay: times go up in waves of tiles, of which o and c know nothing. Kernels without
measurements keep their numbers. On standard error: what the numbers of before and these would lose
against the fastest tile of each batch.
"""
import argparse
import json
import math
import pathlib
import re
import sys
import textwrap

HEADER = pathlib.Path(__file__).resolve().parent.parent / "src/cuda/tile_costs.h"
ALL = 2**31 - 1              # the lag of FC2 after all of FC1
UNIT = 32 * 4096 * 2048      # experts and weights of the unit of costs
GAIN = 0.99                  # what a wider tile has to gain: src/plan/plan.c
FORMATS = {"mxfp4": "MM_CUDA_MXFP4", "exact": "MM_CUDA_NVFP4_EXACT", "folded": "MM_CUDA_NVFP4_FOLDED"}


def expected_tiles(n, routes):
    """As in src/plan/plan.c."""
    deviation = math.sqrt(routes)
    if deviation > n:
        return (routes - 0.5) / n + 0.5
    tiles, full = 1, n
    while full < routes + 6 * deviation:
        tiles += 0.5 * math.erfc((full + 0.5 - routes) / (deviation * math.sqrt(2)))
        full += n
    return tiles


def read_header(text):
    reading = float(re.search(r"MM_TILE_READING_COST ([\d.]+)", text).group(1))
    rows = re.findall(r"X\((\w+), ([01]), (\d+), ([\d.]+)\)", text)
    return reading, {(f, int(p), int(n)): float(cost) for f, p, n, cost in rows}


class Point:
    """One batch size: the fastest time of each tile."""

    def __init__(self, run, point):
        key = run["key"]
        name = "mxfp4" if key["format"] == "mxfp4" else key["nvfp4"]
        self.kind = (FORMATS[name], int(key["accumulate"] == "promote"))
        self.tokens = point["tokens"]
        self.routes = self.tokens * key["topk"] / key["experts"]
        self.factor = key["experts"] * key["hidden"] * key["intermediate"] / UNIT
        self.us = {c["token_tile"]: c["us"] for c in point["candidates"]
                   if "us" in c and c["lag"] == ALL}
        self.what = f"{run['geometry'] or run['layer']} {name} {key['accumulate']}"

    def row(self, tile):
        return (*self.kind, tile)


def measured(files):
    points = []
    for file in files:
        run = json.loads(pathlib.Path(file).read_text())
        if run["key"]["ranks"] != 1 or run["dry_run"]:
            sys.exit(f"{file}: expected one rank, measured")
        points += [Point(run, p) for p in run["points"]]
    return [p for p in points if len(p.us) > 1]


def cost_of(reading, rows, point, tile):
    c = rows[point.row(tile)]
    return max(c, reading) + (expected_tiles(tile, point.routes) - 1) * c


def choose(reading, rows, point):
    best, least = None, math.inf
    for tile in sorted(point.us):
        cost = cost_of(reading, rows, point, tile)
        if cost < GAIN * least:
            best, least = tile, cost
    return best


def solve(matrix, vector):
    """Gauss-Jordan elimination of a positive definite system."""
    rows = [row[:] + [value] for row, value in zip(matrix, vector)]
    n = len(rows)
    for i in range(n):
        at = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[at] = rows[at], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for k in range(n):
            if k != i and rows[k][i]:
                rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i])]
    return [row[n] for row in rows]


def least_squares(lines, start):
    """x that makes all lines, as {index: coefficient}, as near to 1 as can be. What the lines leave
    open stays as it is in `start`."""
    n = len(start)
    size = [math.sqrt(sum(line.get(i, 0)**2 for line in lines)) or 1 for i in range(n)]
    matrix = [[1e-9 if i == k else 0.0 for k in range(n)] for i in range(n)]
    vector = [0.0] * n
    for line in lines:
        rest = 1 - sum(value * start[i] for i, value in line.items())
        for i, value in line.items():
            vector[i] += value / size[i] * rest
            for k, other in line.items():
                matrix[i][k] += value / size[i] * other / size[k]
    return [x + step / s for x, step, s in zip(start, solve(matrix, vector), size)]


def fit(points, reading, rows):
    """Linear once it is known which tiles take longer than reading; found by repetition."""
    kernels = sorted({p.row(tile) for p in points for tile in p.us})
    column = {kernel: 1 + i for i, kernel in enumerate(kernels)}
    first = 1 + len(kernels)
    x = [reading] + [rows[kernel] for kernel in kernels] + [0.0] * len(points)
    for _ in range(100):
        lines = []
        for i, p in enumerate(points):
            for tile, us in p.us.items():
                at, tiles = column[p.row(tile)], expected_tiles(tile, p.routes)
                waits = x[at] < x[0]
                line = {at: p.factor * (tiles - waits), first + i: 1, **({0: p.factor} if waits else {})}
                lines.append({k: value / us for k, value in line.items()})
        # Half a step, so that the set of tiles that wait for memory settles.
        found = [(a + b) / 2 for a, b in zip(x, least_squares(lines, x))]
        change = max(abs(a - b) for a, b in zip(x, found))
        x = found
        if change < 1e-6:
            break
    return x[0], {**rows, **{kernel: x[column[kernel]] for kernel in kernels}}


def losses(points, reading, rows):
    """Of the chosen tiles against the fastest."""
    return [p.us[choose(reading, rows, p)] / min(p.us.values()) - 1 for p in points]


def refine(points, reading, rows):
    """Each number up or down by a fixed share, while that lowers the mean loss. A wider tile costs no
    less."""
    best = {None: reading, **rows}
    kernels = sorted({p.row(tile) for p in points for tile in p.us})

    def loss(numbers):
        return sum(losses(points, numbers[None], {k: c for k, c in numbers.items() if k}))

    def rises(numbers):
        return all(a[:2] != b[:2] or numbers[a] <= numbers[b] for a, b in zip(kernels, kernels[1:]))

    least = loss(best)
    for step in (0.08, 0.04, 0.02, 0.01):
        moved = True
        while moved:
            moved = False
            for which in [None] + kernels:
                for by in (1 + step, 1 / (1 + step)):
                    tried = {**best, which: best[which] * by}
                    if rises(tried) and loss(tried) < least - 1e-6:
                        best, least, moved = tried, loss(tried), True
    return best.pop(None), best


def report(points, before, after):
    print(f"{'':30} {'tokens':>7} {'fastest':>8} {'before':>8} {'loses':>7} {'now':>8} {'loses':>7}",
          file=sys.stderr)
    sums = [0, 0]
    for p in points:
        fastest = min(p.us, key=p.us.get)
        chosen = [choose(*numbers, p) for numbers in (before, after)]
        lost = [p.us[tile] / p.us[fastest] - 1 for tile in chosen]
        sums = [s + loss for s, loss in zip(sums, lost)]
        print(f"{p.what:30} {p.tokens:7} {fastest:8} {chosen[0]:8} {100 * lost[0]:6.2f}% "
              f"{chosen[1]:8} {100 * lost[1]:6.2f}%", file=sys.stderr)
    print(f"{'mean':30} {'':7} {'':8} {'':8} {100 * sums[0] / len(points):6.2f}% {'':8} "
          f"{100 * sums[1] / len(points):6.2f}%", file=sys.stderr)


def write(text, source, reading, rows):
    lines = [f"    X({f}, {p}, {n}, {cost:.4g})" for (f, p, n), cost in rows.items()]
    table = "\n".join(["#define MM_TILE_COSTS(X)".ljust(99) + "\\"] +
                      [line.ljust(99) + "\\" for line in lines[:-1]] + [lines[-1]])
    source = textwrap.fill("Source: " + source, 100, initial_indent=" * ", subsequent_indent=" * ")
    text = re.sub(r" \* Source: [^\n]*(\n \* [^\n]+)*", source, text)
    text = re.sub(r"(MM_TILE_READING_COST) [\d.]+", rf"\1 {reading:.4g}", text)
    return re.sub(r"#define MM_TILE_COSTS\(X\).*?(?=\n\n)", lambda _: table, text, flags=re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    files = parser.parse_args().files
    text = HEADER.read_text()
    before = read_header(text)
    points = measured(files)
    if not points:
        sys.exit("nothing to fit: no batch with two tiles whose FC2 comes after all of FC1")
    after = min((refine(points, *start) for start in (before, fit(points, *before))),
                key=lambda numbers: sum(losses(points, *numbers)))
    if after[0] <= 0 or min(after[1].values()) <= 0:
        sys.exit(f"no sensible costs fit these times: {after}")
    report(points, before, after)
    names = " ".join(pathlib.Path(f).name for f in files)
    print(write(text, names, *after), end="")


if __name__ == "__main__":
    main()
