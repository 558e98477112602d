#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of a folder of JSON files of `megamoe scenario`.

    bench/report_scenarios.py bench/results/h200/scenarios > bench/results/h200/scenarios/README.md
"""
import json
import pathlib
import sys

NOTE = """Steps of a stack of expert layers under requests that arrive in virtual time; what is in them
and how it is measured: [docs/scenarios.md]({root}docs/scenarios.md). Each file has the command."""


def load_of(run):
    words = [f"at most {run['sequences']} of {run['requests']} requests at once"]
    words.append(f"{run['arrivals_per_s']:g} arriving in a second" if run["arrivals_per_s"]
                 else "all there at the beginning")
    if "prompt_tokens" in run:
        words.append(f"prompts {run['prompt_tokens']} in chunks of {run['chunk']}")
    if "output_tokens" in run:
        words.append(f"outputs {run['output_tokens']}")
    words.append(f"routing {run['routing']}")
    return ", ".join(words)


def title_of(run):
    form = " ".join(run[k] for k in ("format", "nvfp4") if k in run)
    return f"{run['layers']} layers of {run['layer']}, {form}, {run['experts']} experts"


def spread(distribution, digits):
    return " | ".join(f"{distribution[k]:.{digits}f}" for k in ("p50", "p90", "p99"))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    folder = pathlib.Path(sys.argv[1])
    runs = [(f.name, json.loads(f.read_text())) for f in sorted(folder.glob("*.json"))]
    runs = [(name, run) for name, run in runs if "scenario" in run]
    if not runs:
        sys.exit(f"{folder}: no results of megamoe scenario")
    project = pathlib.Path(__file__).resolve().parents[1]
    inside = project in folder.resolve().parents
    root = "../" * len(folder.resolve().relative_to(project).parts) if inside else f"{project}/"
    first = runs[0][1]
    print(f"# Scenarios: {first['model']}\n\nmegamoe {first['version']}.\n")
    print(NOTE.format(root=root))
    for title in dict.fromkeys(title_of(run) for _, run in runs):
        mine = [(name, run) for name, run in runs if title_of(run) == title]
        print(f"\n## {title}\n")
        print("| file | workload | steps | us p50 | p90 | p99 | tokens p50 | p90 | p99 | waiting p99 | "
              "answered ms p50 | p90 | p99 | busy | tokens/s |")
        print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
        for name, run in mine:
            print(f"| [{name[:-5]}]({name}) | {run['scenario']} | {run['steps']} | "
                  f"{spread(run['step_us'], 0)} | {spread(run['step_tokens'], 0)} | "
                  f"{run['waiting']['p99']:.0f} | {spread(run['answer_ms'], 1)} | "
                  f"{100 * run['busy_seconds'] / run['seconds']:.0f} % | {run['tokens_per_s']:.0f} |")
        print()
        for name, run in mine:
            print(f"- {name[:-5]}: {load_of(run)}; {run['experts_active_mean']:.1f} experts active, "
                  f"largest load {run['load_imbalance_mean']:.1f} times the mean")


if __name__ == "__main__":
    main()
