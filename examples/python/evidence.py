# SPDX-License-Identifier: Apache-2.0
"""What the evidence programs share: their arguments, tables, and where results go."""
import argparse
import json
import os
import platform
import sys
import time

BEGIN = time.monotonic()  # before what takes seconds to import

import megamoe
import torch
import transformers


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU in seconds")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    return parser


def seconds() -> float:
    """Since the program began."""
    return time.monotonic() - BEGIN


def device_of(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def machine(device: str) -> dict:
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "megamoe": megamoe.__version__,
            "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor()}


def table(title: str, rows: list[dict]) -> None:
    """Prints rows as Markdown; the keys of the first are the columns."""
    columns = list(rows[0])
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    print(f"\n{title}\n")
    for line in (columns, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
    sys.stdout.flush()


def save(path: str | None, results: dict) -> None:
    if path:
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
        os.replace(path + ".part", path)
