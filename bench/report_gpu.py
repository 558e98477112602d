#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of a folder of measurements, from the JSON of `megamoe bench --device cuda`.

    megamoe bench --device cuda:0 --geometry flash --json > bench/results/h200/flash-mxfp4.json
    bench/report_gpu.py bench/results/h200 > bench/results/h200/README.md

Of several ranks (`megamoe launch -n 2 -- megamoe bench --device cuda ...`) NAME.json stands beside
NAME-alone.json, one rank with the same load, and links.json has `megamoe info --measure --json`.
"""
import collections
import json
import pathlib
import sys

from result import arms_of

NOTE = """Medians of `forward` alone in a CUDA graph; L2 is overwritten before each replay. Floor: bytes of
the experts that were active at 4.39 TB/s, or 6 T k H I operations at 1500 TFLOP/s, whichever takes
longer. Back to back, calls with many tokens meet the power limit and clocks fall. DeepGEMM's benchmark
of several ranks rests about 10 ms before each call, and so do the tables that say so; whether the public
numbers rested is not known. "Public" is {source}. One GPU stands for one rank of eight; nothing crosses NVLink."""

RANKS_NOTE = """Medians of `forward` alone in a CUDA graph on every rank at once, of each call the time
of the slowest rank, which waits for the others where they begin later; L2 is overwritten before each
replay. "Alone" is one GPU with the load of one rank and no other ranks, measured in the same call."""


def title_of(run):
    words = [run["layer"], run["format"]]
    if run["format"] == "nvfp4":
        words.append(run["nvfp4"])
    words.append("one scale per " + ("token" if run["input_scale"] == "token" else "128 channels"))
    return ", ".join(words)


def is_curve(run):
    return "--tokens curve" in run["command"]


def rest_of(run):
    rest = run.get("padding_us", 0)
    return f"{rest / 1000:g} ms of rest" if rest else "back to back"


def heading_of(run, of_several):
    """Of a section of its own: what is measured, and how. `of_several`: an arm among others."""
    arm = run.get("arm", "base")
    words = [arm] if of_several or arm != "base" else []
    words += [title_of(run), rest_of(run)] + (["curve"] if is_curve(run) else [])
    return ", ".join(words)


def calls_of(run):
    rounds = len(run["points"][0].get("rounds_us", [])) or 1
    calls = f"{run['iterations']} calls" if rounds == 1 else f"{rounds} rounds of {run['iterations']} calls"
    calls += " of each batch"
    if "warm_ups" in run:
        calls += f", after {run['warm_ups']}"
    return calls + (", each after " if run.get("padding_us", 0) else ", ") + rest_of(run)


def usual_build_of(runs):
    """The commit of most arms in a folder."""
    builds = collections.Counter(arm["commit"] for _, run in runs for arm in arms_of(run) if "commit" in arm)
    return builds.most_common(1)[0][0] if builds else None


def steepest_of(points, floor):
    """Between which neighbours time over floor rises most, in words. `floor`: its name in a point."""
    over = [p["forward_us"]["median"] / p[floor] for p in points]
    rise, i = max((b / a - 1, i) for i, (a, b) in enumerate(zip(over, over[1:])))
    return f"{100 * rise:.1f} % ({points[i]['tokens']} to {points[i + 1]['tokens']} tokens)"


def table_of(name, run, heading, usual_build):
    ceilings = run["ceilings"]
    print(f"\n## {heading}\n")
    print(f"[{name}]({name}), {run['date']}, build {run['commit']}: `{run['command']}`: {calls_of(run)}. Read {ceilings['read_gbs'][0]:.0f} and "
          f"{ceilings['read_gbs'][1]:.0f} GB/s, E4M3 {ceilings['mma_tflops'][0]:.0f} and "
          f"{ceilings['mma_tflops'][1]:.0f} TFLOP/s, before and after. Workspace for "
          f"{run['capacity']} tokens: {run['workspace_bytes'] / 1e6:.0f} MB.\n")
    if run["commit"] != usual_build:
        print(f"Of another build than most of this page, {usual_build}.\n")
    print("| tokens | experts | us | min | p90 | stage us | floor us | of floor | TFLOP/s | public us | times |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for p in run["points"]:
        t = p["forward_us"]
        floor = p.get("nominal_floor_us", p["floor_us"])
        public = p.get("public_us")
        beside = f"{public:.1f} | {public / t['median']:.2f}" if public else " | "
        print(f"| {p['tokens']} | {p['experts_active']} | {t['median']:.1f} | {t['min']:.1f} | "
              f"{t['p90']:.1f} | {p['stage_us']['median']:.1f} | {floor:.1f} | "
              f"{100 * floor / t['median']:.0f} % | {p['tflops']:.0f} | {beside} |")
    if is_curve(run):
        print("\nFrom one batch to the next, time over floor rises by at most "
              f"{steepest_of(run['points'], 'nominal_floor_us')}; over floors by the ceilings that were "
              f"measured here, {steepest_of(run['points'], 'floor_us')}.")
    print("\nWhere the time of one forward goes, us (means over thread blocks):\n")
    print("| tokens | begin | dispatch | FC1 | FC2 | combine | idle | total |")
    print("|---|---|---|---|---|---|---|---|")
    for p in run["points"]:
        t = p["times_us"]
        print(f"| {p['tokens']} | " + " | ".join(
            f"{t[k]:.1f}" for k in ("begin", "dispatch", "fc1", "fc2", "combine", "idle", "total")) + " |")


def ratios_of(run):
    print(f"\nTime of an arm by that of the first, paired by {run['paired_by']}:\n")
    print("| arm | tokens | ratio | from | to | confidence | pairs |")
    print("|---|---|---|---|---|---|---|")
    for r in run["ratios"]:
        print(f"| {r['arm']} | {r['tokens']} | {r['median']:.4f} | {r['low']:.4f} | {r['high']:.4f} | "
              f"{100 * r['confidence']:.1f} % | {r['pairs']} |")


def links_of(name, run):
    print(f"\n## Between the GPUs\n")
    for link in run["links"]:
        print(f"[{name}]({name}): a flag there and back {link['round_trip_us']:.2f} us, a barrier "
              f"{link['barrier_us']:.2f} us. Pushed, GB/s of each direction:\n")
        print("| multiprocessors | bulk copies | stores | bulk, both ways | stores, both ways |")
        print("|---|---|---|---|---|")
        for p in link["push"]:
            print(f"| {p['multiprocessors']} | {p['bulk_gbs']:.0f} | {p['store_gbs']:.0f} | "
                  f"{p['bulk_both_gbs']:.0f} | {p['store_both_gbs']:.0f} |")


def ranks_of(name, run, alone):
    print(f"\n## {run['ranks']} ranks: {title_of(run)}\n")
    print(f"[{name}]({name}), {run['date']}: `megamoe launch -n {run['ranks']} -- {run['command']}`.\n")
    print("| tokens per rank | us | alone us | ratio | skew us | begin | dispatch | FC1 | FC2 | combine | idle |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for p, q in zip(run["points"], alone["points"]):
        us, t = p["forward_us"]["median"], p["times_us"]
        by = q["forward_us"]["median"]
        print(f"| {p['tokens']} | {us:.1f} | {by:.1f} | {us / by:.2f} | {p['skew_us']:.1f} | " + " | ".join(
            f"{t[k]:.1f}" for k in ("begin", "dispatch", "fc1", "fc2", "combine", "idle")) + " |")


def pictures_of(folder):
    """Those that bench/pages.sh has drawn of this folder."""
    images = pathlib.Path(__file__).parent.parent / "docs" / "images"
    for picture in sorted([*images.glob(f"{folder.name}-*.svg"), *images.glob(f"{folder.name}-*.png")]):
        print(f"\n![{picture.stem}](../../../docs/images/{picture.name})")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    if not files:
        sys.exit(f"{sys.argv[1]}: no .json files")
    runs = [(f.name, json.loads(f.read_text())) for f in files if not f.name.endswith("-trace.json")]
    runs.sort(key=lambda run: "ratios" in run[1])  # comparisons after what is compared
    by_name = dict(runs)
    first = next(arm for name, run in runs if "links" not in run for arm in arms_of(run))
    several = any("ranks" in run for _, run in runs)
    usual_build = usual_build_of(runs)
    gpu = first["gpu"]
    print(f"# {first['model']}\n")
    print(f"megamoe {first['version']}, driver {gpu['driver']}, {gpu['multiprocessors']} multiprocessors, "
          f"up to {gpu['sm_mhz_max']} MHz, memory {gpu['memory_mhz']} MHz, limit {gpu['power_limit_w']:.0f} W.\n")
    print(RANKS_NOTE if several else NOTE.format(source=first["public_source"]))
    for name, run in runs:
        if "links" in run:
            links_of(name, run)
        elif "ranks" in run:
            ranks_of(name, run, by_name[name.replace(".json", "-alone.json")])
        elif not several:
            for arm in arms_of(run):
                table_of(name, arm, heading_of(arm, "ratios" in run), usual_build)
            if "ratios" in run:
                ratios_of(run)
    pictures_of(pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
