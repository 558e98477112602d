#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the time of a forward against the batch, from the JSON of `megamoe bench --device cuda`.

    megamoe bench --device cuda:0 --tokens curve --json > flash.json
    bench/plot_gpu.py flash.json [more.json ...] --out flash.svg

All files are of one shape; of a file with several arms each is a line. Beside each measured line stands its floor; public kernels and targets
are marks, where they are known. Needs the standard library alone. Prints, for each file, where the
time over its floor rises most from one batch to the next.
"""
import argparse
import html
import json
import math
import pathlib
import sys

from result import arms_of

WIDTH, HEIGHT = 860, 560
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 56
COLOURS = ["#0b62a4", "#c0392b", "#27864a", "#8e44ad", "#b9770e"]
GREY = "#666666"


def label_of(run):
    words = [run["format"]]
    if run["format"] == "nvfp4":
        words.append(run["nvfp4"])
    if run["input_scale"] == "block":
        words.append("scales per 128")
    if run["accumulate"] == "promote":
        words.append("promote")
    if run.get("arm", "base") != "base":
        words.append(f"({run['arm']})")
    return " ".join(words)


def shape_of(run):
    return tuple(run[k] for k in ("hidden", "intermediate", "experts", "topk"))


def times(run):
    return [(p["tokens"], p["forward_us"]["median"]) for p in run["points"]]


def floors(run):
    return [(p["tokens"], p["floor_us"]) for p in run["points"]]


def marks(runs, name):
    return sorted({(p["tokens"], p[name]) for run in runs for p in run["points"] if name in p})


def largest_rise(run):
    """(rise of time over floor, from tokens, to tokens), the largest between neighbours."""
    points = sorted(run["points"], key=lambda p: p["tokens"])
    over = [(p["tokens"], p["forward_us"]["median"] / p["floor_us"]) for p in points]
    return max(((b[1] / a[1] - 1, a[0], b[0]) for a, b in zip(over, over[1:])),
               default=(0, 0, 0))


def ticks(low, high):
    """1, 2 and 5 times the powers of ten inside low..high."""
    found = []
    power = 10 ** math.floor(math.log10(low))
    while power <= high:
        found += [m * power for m in (1, 2, 5) if low <= m * power <= high]
        power *= 10
    return found


class Chart:
    """Two logarithmic axes."""

    def __init__(self, xs, ys):
        self.x = min(xs) / 1.1, max(xs) * 1.1
        self.y = min(ys) / 1.3, max(ys) * 1.3
        self.parts = []

    def at(self, x, y):
        def place(value, low, high, start, end):
            return start + (end - start) * math.log(value / low) / math.log(high / low)
        return (place(x, *self.x, LEFT, WIDTH - RIGHT), place(y, *self.y, HEIGHT - BOTTOM, TOP))

    def text(self, x, y, words, anchor="middle", size=13, colour="#222222", turn=None):
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn is not None else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
                          f' fill="{colour}"{turned}>{html.escape(words)}</text>')

    def segment(self, x1, y1, x2, y2, colour, width=1.0, dash=""):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
                          f' stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>')

    def grid(self):
        tokens = [2 ** i for i in range(21) if self.x[0] <= 2 ** i <= self.x[1]]
        for x in tokens:
            place = self.at(x, self.y[0])[0]
            self.segment(place, HEIGHT - BOTTOM, place, TOP, "#e4e4e4")
            self.text(place, HEIGHT - BOTTOM + 18, str(x), size=11)
        for y in ticks(*self.y):
            place = self.at(self.x[0], y)[1]
            self.segment(LEFT, place, WIDTH - RIGHT, place, "#e4e4e4")
            self.text(LEFT - 6, place + 4, f"{y:g}", anchor="end", size=11)
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "tokens")
        self.text(18, (TOP + HEIGHT - BOTTOM) / 2, "microseconds", turn=-90)

    def line(self, points, colour, width=2.2, dash=""):
        places = " ".join("{:.1f},{:.1f}".format(*self.at(*p)) for p in sorted(points))
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}"'
                          f' stroke-width="{width}" stroke-dasharray="{dash}"/>')

    def mark(self, x, y, colour, filled):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}"'
                          f' fill="{colour if filled else "white"}"/>')

    def dots(self, points, colour, filled):
        for point in points:
            self.mark(*self.at(*point), colour, filled)

    def svg(self, title):
        self.text(WIDTH / 2, 26, title, size=15)
        return ('<!-- SPDX-License-Identifier: Apache-2.0 -->\n'
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
                ' font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
                + "\n".join(self.parts) + "\n</svg>\n")


def draw(runs):
    public, target = marks(runs, "public_us"), marks(runs, "target_us")
    everything = [p for run in runs for p in times(run) + floors(run)] + public + target
    chart = Chart([x for x, _ in everything], [y for _, y in everything])
    chart.grid()
    legend = []
    for run, colour in zip(runs, COLOURS):
        chart.line(floors(run), colour, width=1.2, dash="2 4")
        chart.line(times(run), colour)
        legend += [(label_of(run), colour, ""), (label_of(run) + ", floor", colour, "2 4")]
    chart.dots(public, GREY, filled=True)
    chart.dots(target, GREY, filled=False)
    for i, (words, colour, dash) in enumerate(legend):
        y = TOP + 18 + 18 * i
        chart.segment(LEFT + 12, y - 4, LEFT + 40, y - 4, colour, 2.2 if not dash else 1.2, dash)
        chart.text(LEFT + 48, y, words, anchor="start", size=12)
    for points, words, filled in [(public, "public", True), (target, "target", False)]:
        if points:
            y += 18
            chart.mark(LEFT + 26, y - 4, GREY, filled)
            chart.text(LEFT + 48, y, words, anchor="start", size=12)
    first = runs[0]
    return chart.svg(f"{first['layer']}, {first['hidden']}/{first['intermediate']}, "
                     f"{first['experts']} experts, top-{first['topk']}, {first['model']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    read = [(file, arm) for file in options.files for arm in arms_of(json.loads(file.read_text()))]
    runs = [run for _, run in read]
    for file, run in read:
        if "forward_us" not in run["points"][0]:
            sys.exit(f"{file}: is no result of a GPU")
        if shape_of(run) != shape_of(runs[0]):
            sys.exit(f"{file}: shape {shape_of(run)}; {options.files[0]} has {shape_of(runs[0])}")
    if len(runs) > len(COLOURS):
        sys.exit(f"{len(runs)} arms; a plot shows up to {len(COLOURS)}")
    options.out.write_text(draw(runs))
    for file, run in read:
        rise, before, after = largest_rise(run)
        print(f"{file}: {run.get('geometry', run['layer'])}, {label_of(run)}: time over floor "
              f"rises by at most {100 * rise:.0f} %, from {before} to {after} tokens")


if __name__ == "__main__":
    main()
