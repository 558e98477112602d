#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures layers that are spread over ranks on the CPU, and how soon faults are noticed.

    bench/measure_ranks.py [--build build/release] [--seconds 1] OUT

Leaves ranks.json, faults.json and OUT/README.md, made from them. Run it on a quiet machine.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess

ARMS = [
    ("a layer", [], "0,8,64,512"),
    ("dispatch and combine", ["--hidden", "4096", "--intermediate", "32", "--experts", "16"],
     "8,64,512"),
]
RANKS = (2, 4, 8)
ROUNDS = 4
FAULT_ROUNDS = 5
FAULT = re.compile(r"^  (killed|stopped) (.+): all others knew after (\d+) ms$", re.M)


def run(command):
    print(" ".join(command), flush=True)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return done.stdout


def merge(rounds):
    """One run made of several: a machine that others use disturbs some of them."""
    merged = dict(rounds[0])
    for name in ("comm_ms", "layer_ms", "workspace_ms"):
        merged[name] = min(one[name] for one in rounds)
    merged["points"] = []
    for points in zip(*(one["points"] for one in rounds)):
        merged["points"].append({
            "tokens": points[0]["tokens"], "runs": sum(point["runs"] for point in points),
            "min_ms": min(point["min_ms"] for point in points),
            "median_ms": statistics.median(point["median_ms"] for point in points),
            "p90_ms": statistics.median(point["p90_ms"] for point in points)})
    return merged


def measure_arm(build, more, tokens, seconds):
    bench = [f"{build}/bench/ranks_bench", *more, "--tokens", tokens, "--seconds", str(seconds)]
    launch = [f"{build}/tools/megamoe", "launch", "-n"]
    commands = [bench]
    for ranks in RANKS:
        commands += [[*bench, "--folded", str(ranks)], [*launch, str(ranks), "--", *bench]]
    rounds = [[json.loads(run(command)) for command in commands] for _ in range(ROUNDS)]
    return [merge(runs) for runs in zip(*rounds)]


def measure_faults(build):
    seen = {}
    for _ in range(FAULT_ROUNDS):
        for what, where, ms in FAULT.findall(run([f"{build}/tests/layer/test_layer_processes",
                                                  "a_rank_is"])):
            seen.setdefault(f"{what} {where}", []).append(int(ms))
    return seen


def points_table(runs):
    tokens = [point["tokens"] for point in runs[0]["points"]]
    yield "| ranks | threads each | " + " | ".join(f"{n} tokens" for n in tokens) + " |"
    yield "|---" * (2 + len(tokens)) + "|"
    for one in runs:
        cells = []
        for mine, alone in zip(one["points"], runs[0]["points"]):
            ratio = mine["min_ms"] / alone["min_ms"]
            cells.append(f"{mine['median_ms']:.3g} ({mine['min_ms']:.3g}; {ratio:.2f}x)")
        name = "1" if one["kind"] == "one" else f"{one['ranks']} {one['kind']}"
        yield f"| {name} | {one['threads_per_rank']} | " + " | ".join(cells) + " |"


def creation_table(runs):
    yield "| ranks | communicator, ms | layer, ms | workspace, ms | its MiB per rank | of all ranks |"
    yield "|---|---|---|---|---|---|"
    for one in runs:
        name = "1" if one["kind"] == "one" else f"{one['ranks']} {one['kind']}"
        mib = one["workspace_bytes_per_rank"] / 2**20
        yield (f"| {name} | {one['comm_ms']:.2f} | {one['layer_ms']:.0f} | {one['workspace_ms']:.2f} "
               f"| {mib:.1f} | {mib * one['ranks']:.1f} |")


def page(arms, faults, seconds):
    first = arms[0]["runs"][0]
    yield f"# Ranks on {first['model'].strip()}, {first['cores']} cores"
    yield ""
    yield (f"{first['date']}, megamoe {first['version']}, made by `bench/measure_ranks.py --seconds "
           f"{seconds:g}`, each {ROUNDS} times in turn. All ranks together have 2 threads, or one each where there are more ranks. "
           "*Folded* ranks are driven by one thread pool and never wait for each other; ranks that are "
           f"*processes* do, and on {first['cores']} cores more than {first['cores']} of them take "
           "turns. Where a machine is shared, medians tell of its other users: compare the least.")
    for arm in arms:
        shape = arm["runs"][0]
        yield ""
        yield (f"## {arm['name'].capitalize()}: hidden {shape['hidden']}, intermediate "
               f"{shape['intermediate']}, {shape['experts']} experts, top-{shape['topk']}, MXFP4")
        yield ""
        yield ("Staging and forward in ms at the same tokens in all: median of the medians (least; the "
               "least over that of one rank).")
        yield ""
        yield from points_table(arm["runs"])
    yield ""
    yield "## Creation and memory"
    yield ""
    yield (f"The first layer above, for {first['capacity_tokens_all_ranks']} tokens in all. Packing its "
           "experts is most of the layer's time; folded ranks do it one after the other. The least of "
           f"{ROUNDS}.")
    yield ""
    yield from creation_table(arms[0]["runs"])
    yield ""
    yield "## Faults"
    yield ""
    yield (f"One of 4 processes is killed (SIGKILL), or stopped (SIGSTOP) with deadlines of 400 ms: "
           f"ms until all others had their error, in {FAULT_ROUNDS} runs of "
           "`tests/layer/test_layer_processes a_rank_is`.")
    yield ""
    yield "| the rank was | median | most |"
    yield "|---|---|---|"
    for what, times in faults.items():
        yield f"| {what} | {statistics.median(times):g} | {max(times)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arms = [{"name": name, "runs": measure_arm(options.build, more, tokens, options.seconds)}
            for name, more, tokens in ARMS]
    faults = measure_faults(options.build)
    (options.out / "ranks.json").write_text(json.dumps(arms, indent=1) + "\n")
    (options.out / "faults.json").write_text(json.dumps(faults, indent=1) + "\n")
    (options.out / "README.md").write_text("\n".join(page(arms, faults, options.seconds)) + "\n")


if __name__ == "__main__":
    main()
