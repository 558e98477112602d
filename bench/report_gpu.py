#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of a folder of measurements, from the JSON of `megamoe bench --device cuda`.

    megamoe bench --device cuda:0 --geometry flash --json > bench/results/h200/flash-mxfp4.json
    bench/report_gpu.py bench/results/h200 > bench/results/h200/README.md
"""
import json
import pathlib
import sys

NOTE = """Medians of `forward` alone in a CUDA graph; L2 is overwritten before each replay. Floor: bytes of
the experts that were active at 4.39 TB/s, or 6 T k H I operations at 1500 TFLOP/s, whichever takes
longer. "Public" is {source}. One GPU stands for one rank of eight; nothing crosses NVLink."""


def title_of(run):
    words = [run["layer"], run["format"]]
    if run["format"] == "nvfp4":
        words.append(run["nvfp4"])
    words.append("one scale per " + ("token" if run["input_scale"] == "token" else "128 channels"))
    return ", ".join(words)


def table_of(name, run):
    ceilings = run["ceilings"]
    print(f"\n## {title_of(run)}\n")
    print(f"[{name}]({name}), {run['date']}: `{run['command']}`. Read {ceilings['read_gbs'][0]:.0f} and "
          f"{ceilings['read_gbs'][1]:.0f} GB/s, E4M3 {ceilings['mma_tflops'][0]:.0f} and "
          f"{ceilings['mma_tflops'][1]:.0f} TFLOP/s, before and after. Workspace for "
          f"{run['capacity']} tokens: {run['workspace_bytes'] / 1e6:.0f} MB.\n")
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
    print("\nWhere the time of one forward goes, us (means over thread blocks):\n")
    print("| tokens | begin | dispatch | FC1 | FC2 | combine | idle | total |")
    print("|---|---|---|---|---|---|---|---|")
    for p in run["points"]:
        t = p["times_us"]
        print(f"| {p['tokens']} | " + " | ".join(
            f"{t[k]:.1f}" for k in ("begin", "dispatch", "fc1", "fc2", "combine", "idle", "total")) + " |")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    if not files:
        sys.exit(f"{sys.argv[1]}: no .json files")
    runs = [(f.name, json.loads(f.read_text())) for f in files]
    first = runs[0][1]
    gpu = first["gpu"]
    print(f"# {first['model']}\n")
    print(f"megamoe {first['version']}, driver {gpu['driver']}, {gpu['multiprocessors']} multiprocessors, "
          f"up to {gpu['sm_mhz_max']} MHz, memory {gpu['memory_mhz']} MHz, limit {gpu['power_limit_w']:.0f} W.\n")
    print(NOTE.format(source=first["public_source"]))
    for name, run in runs:
        table_of(name, run)


if __name__ == "__main__":
    main()
