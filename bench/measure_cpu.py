#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the CPU benchmark of record: geometries A, B and C on each number of threads.

    bench/measure_cpu.py [--tool build/release/tools/megamoe] [--seconds 3] [--activations int8] OUT

Leaves one JSON file per run and a table made from them, OUT/README.md or OUT/int8.md. Run it on a
quiet machine; what int8 gains over E4M3 is measured in pairs and bears neighbours.
"""
import argparse
import json
import pathlib
import subprocess

from result import arms_of

TOKENS = "1,4,16,64,256,1024"
ARMS = [("A", "mxfp4"), ("B", "mxfp4"), ("C", "mxfp4"), ("A", "nvfp4")]


def measure(options, geometry, fmt, threads):
    command = [options.tool, "bench", "--geometry", geometry, "--format", fmt, "--threads",
               str(threads), "--tokens", TOKENS, "--seconds", str(options.seconds), "--json"]
    if options.activations == "int8":
        command += ["--activations", "int8", "--arm", "activations=e4m3"]
    print(" ".join(command), flush=True)
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rows(run):
    for point in run["points"]:
        ceilings = [sum(point[name]) / len(point[name]) for name in ("read_gbs", "dot_gflops")]
        yield (f"| {run['threads']} | {point['tokens']} | {point['median_ms']:.3f} "
               f"| {point['weight_gbs']:.1f} | {100 * point['read_share']:.0f} % of {ceilings[0]:.1f} "
               f"| {point['gflops']:.0f} | {100 * point['dot_share']:.0f} % of {ceilings[1]:.0f} |")


def int8_rows(run):
    int8, e4m3 = arms_of(run)
    for point, beside, gain in zip(int8["points"], e4m3["points"], run["ratios"]):
        yield (f"| {int8['threads']} | {point['tokens']} | {point['median_ms']:.3f} "
               f"| {beside['median_ms']:.3f} | {gain['median']:.2f} "
               f"| {gain['low']:.2f}..{gain['high']:.2f} | {gain['pairs']} "
               f"| {point['gflops']:.0f} | {100 * point['dot_share']:.0f} % |")


E4M3_HEAD = ["| threads | tokens | ms | GB/s | of read | GFLOP/s | of dot |",
             "|---|---|---|---|---|---|---|"]
INT8_HEAD = ["| threads | tokens | int8 ms | E4M3 ms | gain | 95 % | pairs | GOP/s | of dot |",
             "|---|---|---|---|---|---|---|---|---|"]
E4M3_TEXT = ("Medians; weights cold: routing is uniform and new in every iteration. Ceilings are "
             "measured before and after each point; a share is of their mean. GB/s counts each "
             "touched expert's weights once.")
INT8_TEXT = ("Int8 activations beside E4M3: forwards alternate; gain is the median over pairs of "
             "E4M3's time by int8's with its interval of 95 %, which what else runs on the machine disturbs less than the times "
             "themselves. Weights cold: routing is uniform and new in every iteration. "
             "A share is of the int8 peak, measured before and after each point. What int8 does to "
             "accuracy: [numerics](../../../docs/numerics.md), section 1.")


def page(runs, options):
    first = arms_of(runs[0][1])[0]
    int8 = options.activations == "int8"
    arguments = f"--seconds {options.seconds:g}" + (" --activations int8" if int8 else "")
    lines = [f"# {first['model'].strip()}, {first['tier']}" + (", int8 activations" if int8 else ""),
             "",
             f"{first['date']}, megamoe {first['version']}, made by "
             f"`bench/measure_cpu.py {arguments}`. " + (INT8_TEXT if int8 else E4M3_TEXT)]
    heading = None
    for name, result in runs:
        run = arms_of(result)[0]
        title = (f"{run['layer']}, {run['format']}: hidden {run['hidden']}, intermediate "
                 f"{run['intermediate']}, {run['experts']} experts, top-{run['topk']}")
        if title != heading:
            heading = title
            lines += ["", f"## {title}", ""] + (INT8_HEAD if int8 else E4M3_HEAD)
        lines += int8_rows(result) if int8 else rows(run)
    lines += ["", "Files: " + ", ".join(f"[{name}]({name})" for name, _ in runs) + "."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tool", default="build/release/tools/megamoe")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--activations", choices=["e4m3", "int8"], default="e4m3")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for geometry, fmt in ARMS:
        for threads in map(int, options.threads.split(",")):
            run = measure(options, geometry, fmt, threads)
            suffix = "-int8" if options.activations == "int8" else ""
            name = f"{geometry.lower()}-{fmt}{suffix}-{threads}.json"
            (options.out / name).write_text(json.dumps(run, indent=1) + "\n")
            runs.append((name, run))
    name = "int8.md" if options.activations == "int8" else "README.md"
    (options.out / name).write_text(page(runs, options))


if __name__ == "__main__":
    main()
