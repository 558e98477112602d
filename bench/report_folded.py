#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a folder that holds results of folded_bench to standard output.

    bench/report_folded.py bench/results/h200-folded > bench/results/h200-folded/README.md
"""
import json
import pathlib
import sys

NOTE = """\
Ranks folded into one launch on one GPU, against one rank with the same layer and the same batch: experts
and tokens are spread evenly over the ranks, which share the multiprocessors. us are medians of `forward`
alone in a CUDA graph with L2 overwritten before each replay; the ratio is that to one rank in the same
round, its median and, in brackets, the 10th and 90th percentiles. Outputs are the same bits, which is
checked before each measurement. What ranks cost here is their waiting for each other, tiles that are
less full, and blocks that stay with their rank; GPUs of their own add the link
([two H200](../h200-x2/README.md))."""


def table(name, run):
    print(f"\n## {run['geometry']}: hidden {run['hidden']}, intermediate {run['intermediate']}, "
          f"{run['experts']} experts, top-{run['topk']}, MXFP4\n")
    print(f"[{name}]({name}), {run['date']}: `{run['command']}`, {run['rounds']} rounds.\n")
    ranks = [arm["ranks"] for arm in run["points"][0]["ranks"]]
    print("| tokens of all ranks | 1 rank, us | " +
          " | ".join(f"{n} ranks, us: ratio" for n in ranks[1:]) + " |")
    print("|---" * (len(ranks) + 1) + "|")
    for point in run["points"]:
        alone, *others = point["ranks"]
        print(f"| {point['tokens']} | {alone['median_us']:.1f} | " + " | ".join(
            f"{arm['median_us']:.1f}: {arm['ratio']:.2f} ({arm['ratio_p10']:.2f} to "
            f"{arm['ratio_p90']:.2f})" for arm in others) + " |")
    most = max(point["tokens"] for point in run["points"])
    print(f"\nFor {most} tokens in all:\n")
    print("| ranks | creating all layers, ms | workspaces and prewarm, ms | "
          "a rank's workspace, MB | those of all, MB |")
    print("|---|---|---|---|---|")
    for one in run["creation"]:
        mb = one["workspace_bytes_per_rank"] / 1e6
        print(f"| {one['ranks']} | {one['layer_ms']:.0f} | {one['workspace_ms']:.1f} | {mb:.1f} | "
              f"{mb * one['ranks']:.1f} |")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    if not files:
        sys.exit(f"{sys.argv[1]}: no .json files")
    runs = [(file.name, json.loads(file.read_text())) for file in files]
    first = runs[0][1]
    print(f"# Folded ranks on one {first['model']}\n")
    print(f"megamoe {first['version']}, driver {first['driver']}, "
          f"{first['multiprocessors']} multiprocessors.\n")
    print(NOTE)
    for name, run in runs:
        table(name, run)


if __name__ == "__main__":
    main()
