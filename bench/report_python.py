#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of a folder of the evidence programs' results (examples/python/evidence_*.py).

    scripts/gpu-check full evidence-        writes evidence-NAME.json; keep them as NAME.json
    bench/report_python.py bench/results/python-h200 > bench/results/python-h200/README.md
"""
import json
import pathlib
import sys

TEXTS = {
    "logits": ("Logits", """`evidence_logits.py`. Models of random weights; relative distance from transformers' eager
path with the same dequantized weights."""),
    "perplexity": ("Perplexity", """`evidence_perplexity.py`. A small MoE model of bytes, trained there on the sources of
Python's standard library, on files that it has not seen; standard errors over sequences."""),
}

DECODE = """`evidence_decode.py`. {layers} layers of Qwen3-30B-A3B's geometry with random weights, a vocabulary of
32768, a static cache of 256 positions; one token of each sequence a step. "Graph": each arm's step is
one CUDA graph; "eager": no arm is captured or compiled, and the host sets the pace. Arms take turns:
medians of {rounds} rounds, of ratios within a round. BF16 is transformers' `grouped_mm`."""

MODULE = """One experts module of that model, a CUDA graph each, L2 emptied before by reading other memory; events
around the replay, medians of {rounds} rounds."""


def table(columns, rows):
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")


def arms_of(rows, what):
    """A row for each measurement, with a column for each arm."""
    return [{**{key: value for key, value in row.items() if not isinstance(value, dict)},
             **{name: f"{value:.0f}" if what == "tokens per second" else f"{value:.1f}"
                for name, value in row[what].items()},
             **{f"{name}, times": f"{value:.2f}" for name, value in row["times as fast"].items()}}
            for row in rows]


def columns_of(rows, *first):
    names = [name for name in rows[0]["us"]]
    return [*first, *names, *(f"{name}, times" for name in names[1:])]


def machine_of(run):
    machine = run["machine"]
    return (f"{machine['device']}, torch {machine['torch']}, transformers "
            f"{machine['transformers']}" + (f", {machine['date']}" if "date" in machine else ""))


def main(folder):
    runs = {name: json.loads((folder / f"{name}.json").read_text())
            for name in ("logits", "perplexity", "decode") if (folder / f"{name}.json").exists()}
    if not runs:
        sys.exit(f"report_python: {folder} has none of logits.json, perplexity.json, decode.json")
    print("# transformers on one " + next(iter(runs.values()))["machine"]["device"])
    print("\nThe programs are in `examples/python`, run by `scripts/gpu-check full evidence-`; this "
          "page is written\nby `bench/report_python.py`.")
    for name, (title, text) in TEXTS.items():
        if name in runs:
            print(f"\n## {title}\n\n[{name}.json]({name}.json), {machine_of(runs[name])}: {text}\n")
            table([column for column in dict.fromkeys(key for row in runs[name]["rows"]
                                                      for key in row) if column != "passed"],
                  runs[name]["rows"])
    if "decode" in runs:
        run = runs["decode"]
        rounds = len(next(iter(run["decode"][0]["rounds, us"].values()))) if run["decode"] else 0
        print(f"\n## Decode\n\n[decode.json](decode.json), {machine_of(run)}: "
              f"{DECODE.format(layers=run['model']['layers'], rounds=rounds)}")
        for mode in ("graph", "eager"):
            rows = [row for row in run["decode"] if row["mode"] == mode]
            if rows:
                print(f"\nTokens per second, {mode}:\n")
                table(columns_of(rows, "batch", "experts of a layer used"),
                      arms_of(rows, "tokens per second"))
        if run["module"]:
            rounds = len(next(iter(run["module"][0]["rounds, us"].values())))
            print(f"\n{MODULE.format(rounds=rounds)} Microseconds:\n")
            table(columns_of(run["module"], "tokens", "experts used"), arms_of(run["module"], "us"))
        for line in run["left out"]:
            print(f"\nLeft out: {line}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    main(pathlib.Path(sys.argv[1]))
