"""How long the command line takes to answer, and `import isomorph` beside `import timm`.

    python benchmarks/startup.py [--rounds 9] [--write]

Every command runs in a process of its own, all in turn, round after round; medians in seconds. Run it on a quiet
machine: the goal is 0.7 s for a command, and 1.15 times timm for the import.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import torch

import isomorph_command
from interleave import interleaved, show, wall_clock, write

PROGRAM = isomorph_command.__file__
COMMANDS = {
    "--help": 0,
    "--version": 0,
    "recipes": 0,
    "recipes show digits_cnn": 0,
    "models": 0,
    "table": 0,
    "recast --help": 0,
    "train --help": 0,
    "evaluate --help": 0,
    "recats": 2,
    "evaluate resnet18 --dta digits": 2,
    "evaluate resnet18 --batch-size many": 2,
    "train digits_cnn --optim.lrr 3": 2,
}
"""Command lines with their exit codes."""


def run(arguments: list[str], code: int, folder: str) -> None:
    compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=compiled, capture_output=True, text=True
    )
    assert done.returncode == code, (arguments, done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write results/startup.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            f"isomorph {command}": lambda command=command, code=code: run(
                [PROGRAM, *command.split()], code, folder
            )
            for command, code in COMMANDS.items()
        }
        contenders |= {
            f"import {name}": lambda name=name: run(["-c", f"import {name}"], 0, folder)
            for name in ("timm", "isomorph")
        }
        with wall_clock():
            timed = interleaved(contenders, torch.device("cpu"), given.rounds)
        seconds = {name: ms / 1e3 for name, ms in timed.items()}
    ratio = seconds["import isomorph"] / seconds["import timm"]
    tables = {
        "seconds": [
            {"command": name, "seconds": round(value, 3)} for name, value in seconds.items()
        ],
        "imports": [
            {
                "ratio": "import isomorph / import timm",
                "value": round(ratio, 3),
                "rounds": given.rounds,
            }
        ],
    }
    for title, rows in tables.items():
        show(title, rows)
    if given.write:
        write("startup", tables)


if __name__ == "__main__":
    main()
