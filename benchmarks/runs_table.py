"""A table of runs from their folders: what each was measured at, epoch by epoch.

    python benchmarks/runs_table.py NAME TITLE=FOLDER ...     (writes benchmarks/results/NAME.json)

The studies of docs/training.md and of docs/methods/tcnn.md (late recast) are runs of named recipes.
"""

import sys
from pathlib import Path

from interleave import show, write
from isomorph.training.run.log import read_log

KEYS = ("top1", "nll", "reconstruction", "alignment")


def main():
    name, *runs = sys.argv[1:]
    rows, logs = [], []
    for run in runs:
        title, _, folder = run.partition("=")
        log = read_log(Path(folder) / "log.jsonl")
        logs += [{"run": title, **row} for row in log]
        measured = [row for row in log if any(key in row for key in KEYS)]
        row = {"run": title, "epochs": log[-1]["epoch"], "training loss": f"{log[-1]['loss']:.4f}"}
        for key in KEYS:
            points = [f"{r[key]:.2f}" if key == "top1" else f"{r[key]:.4f}" for r in measured if key in r]
            row[key] = " ".join(points) or "-"
        rows.append(row)
    show(name, rows)
    print(f"\nwrote {write(name, {'table': rows, 'log': logs})}")


if __name__ == "__main__":
    main()
