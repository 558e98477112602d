#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of a folder of measured plans, from the JSON of `megamoe tune`.

    cd bench/results/h200/tune
    megamoe tune --device cuda:0 --geometry flash --tokens curve --json > flash-mxfp4.json
    bench/report_tune.py . > README.md
"""
import json
import pathlib
import sys

NOTE = """Medians of `forward` alone in a CUDA graph, L2 overwritten before each replay: with the built-in
choice, and with the fastest of all plans, measured anew beside it by turns. Gain: median of the paired
ratios, and its interval of {confidence:.1f} %. A plan is taken where that lies above zero and the gain
is at least half a percent. Where the built-in choice is the fastest, nothing is measured anew: both
times are its own, from the rounds of all plans. Every plan computed the same bits: {same}.

Turns follow each other without rest, among them those of slower plans: from a few hundred tokens on
clocks are others than in the tables of `megamoe bench`, mostly lower, and not the same in all rows.
Compare within a row only."""


def plan_of(plan):
    return f"{plan['token_tile']}, {'all' if plan['lag'] == 2**31 - 1 else plan['lag']}"


def percent(ratio):
    return f"{100 * (ratio - 1):.1f} %"


def table_of(name, run):
    key = run["key"]
    words = [run["layer"], key["format"]] + ([key["nvfp4"]] if key["format"] == "nvfp4" else [])
    words += [key["accumulate"], f"{key['ranks']} rank" + "s" * (key["ranks"] > 1), key["routing"]]
    print(f"\n## {', '.join(words)}\n")
    print(f"[{name}]({name}), {run['date']}, {run['device_model']}: `{run['command']}`\n")
    print("| tokens | built-in: tile, lag | us | fastest: tile, lag | us | gain | interval | taken |")
    print("|---|---|---|---|---|---|---|---|")
    for p in run["points"]:
        gain = p["gain"]
        beside = " | "
        if p["best"] != p["built_in"]:
            beside = f"{percent(gain['median'])} | {percent(gain['low'])} to {percent(gain['high'])}"
        print(f"| {p['tokens']} | {plan_of(p['built_in'])} | {p['default_us']:.1f} | "
              f"{plan_of(p['best'])} | {p['us']:.1f} | {beside} | {'yes' if p['wins'] else ''} |")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    runs = [(file.name, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    if not runs:
        sys.exit(f"{folder}: no .json files")
    points = [p for _, run in runs for p in run["points"]]
    print(f"# Plans on one {runs[0][1]['device_model']}\n")
    print(NOTE.format(confidence=100 * min(p["gain"]["confidence"] for p in points),
                      same="yes" if all(p["same_bits"] for p in points) else "NO"))
    for name, run in runs:
        table_of(name, run)


if __name__ == "__main__":
    main()
