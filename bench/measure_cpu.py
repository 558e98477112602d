#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the CPU benchmark of record: geometries A, B and C on each number of threads.

    bench/measure_cpu.py [--tool build/release/tools/megamoe] [--seconds 3] OUT

Leaves one JSON file per run and a table, OUT/README.md, made from them. Run it on a quiet machine.
"""
import argparse
import json
import pathlib
import subprocess

TOKENS = "1,4,16,64,256,1024"
ARMS = [("A", "mxfp4"), ("B", "mxfp4"), ("C", "mxfp4"), ("A", "nvfp4")]


def measure(tool, geometry, fmt, threads, seconds):
    command = [tool, "bench", "--geometry", geometry, "--format", fmt, "--threads", str(threads),
               "--tokens", TOKENS, "--seconds", str(seconds), "--json"]
    print(" ".join(command), flush=True)
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rows(run):
    for point in run["points"]:
        ceilings = [sum(point[name]) / len(point[name]) for name in ("read_gbs", "dot_gflops")]
        yield (f"| {run['threads']} | {point['tokens']} | {point['median_ms']:.3f} "
               f"| {point['weight_gbs']:.1f} | {100 * point['read_share']:.0f} % of {ceilings[0]:.1f} "
               f"| {point['gflops']:.0f} | {100 * point['dot_share']:.0f} % of {ceilings[1]:.0f} |")


def page(runs, seconds):
    first = runs[0][1]
    lines = [f"# {first['model'].strip()}, {first['tier']}", "",
             f"{first['date']}, megamoe {first['version']}, made by "
             f"`bench/measure_cpu.py --seconds {seconds:g}`. Medians; weights cold: routing is uniform "
             "and new in every iteration. Ceilings are measured before and after each point; a share "
             "is of their mean. GB/s counts each touched expert's weights once."]
    heading = None
    for name, run in runs:
        title = (f"{run['layer']}, {run['format']}: hidden {run['hidden']}, intermediate "
                 f"{run['intermediate']}, {run['experts']} experts, top-{run['topk']}")
        if title != heading:
            heading = title
            lines += ["", f"## {title}", "",
                      "| threads | tokens | ms | GB/s | of read | GFLOP/s | of dot |",
                      "|---|---|---|---|---|---|---|"]
        lines += rows(run)
    lines += ["", "Files: " + ", ".join(f"[{name}]({name})" for name, _ in runs) + "."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tool", default="build/release/tools/megamoe")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for geometry, fmt in ARMS:
        for threads in map(int, options.threads.split(",")):
            run = measure(options.tool, geometry, fmt, threads, options.seconds)
            name = f"{geometry.lower()}-{fmt}-{threads}.json"
            (options.out / name).write_text(json.dumps(run, indent=1) + "\n")
            runs.append((name, run))
    (options.out / "README.md").write_text(page(runs, options.seconds))


if __name__ == "__main__":
    main()
