"""Every layer form, network, operation and command as a multiple of the plain thing, and what became slower.

    python benchmarks/ledger.py --write                      # all rows but the long ones (under 20 minutes)
    python benchmarks/ledger.py --only 'layer/GPSA2d*'       # rows by name, shown
    python benchmarks/ledger.py --against benchmarks/results/ledger.json
    python benchmarks/ledger.py --code ../before             # another checkout, in turn with this one

A row is family/form/pass/batch, and the threads if they are more than one: the form's time over the plain one's,
interleaved in one process, the median over rounds, and half the range of the middle half of them. Memory is what a
training step keeps for the backward pass.
Operations are counted in forward passes of one image, commands next to `import timm`. `--against` and `--code` print
the rows that became more than 20% slower. Times of two machines do not compare: give another checkout with `--code`.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

SLOWER = 1.2

# Seconds after which no more rounds of a row begin, and most rounds.
SECONDS = 1.0
ROUNDS = 15

Found = dict[str, float | str]


def measure(name: str) -> Found:
    """Return the ratio of one row, its spread, and the plain pass in ms or MiB."""
    import torch

    import ledger_rows
    from interleave import interleaved_rounds, wall_clock

    row = ledger_rows.rows()[name]
    try:
        passes = row.make()
        if row.memory:
            sizes = {key: run() for key, run in passes.items()}
            return {
                "ratio": round(sizes["form"] / sizes["plain"], 3),
                "spread": 0.0,
                "MiB": round(sizes["plain"], 2),
            }
        slow = name.startswith(("operation/", "command/"))
        rounds = 3 if slow else ROUNDS
        warm_up = 0 if name.startswith("command/") else 1
        in_processes = name.startswith("command/")
        clock_of = contextlib.nullcontext() if not in_processes else wall_clock()
        with clock_of:
            times = interleaved_rounds(passes, torch.device("cpu"), rounds, warm_up, SECONDS)
    except Exception as error:  # a row of another checkout may not run
        return {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        }
    ratios = [form / plain for form, plain in zip(times["form"], times["plain"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    plain = statistics.median(times["plain"])
    return {
        "ratio": round(statistics.median(ratios), 3),
        "spread": round((high - low) / 2, 3),
        "ms": round(plain, 2),
    }


class Worker:
    """A process that measures rows with the code of one checkout."""

    def __init__(self, code: Path, threads: int) -> None:
        path = os.pathsep.join([str(code / "src"), str(HERE)])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": ""}
        environment = {**os.environ, **own}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", str(threads)]
        pipes: Any = dict(
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.process = subprocess.Popen(command, env=environment, **pipes)
        home = Path(self.ask("")["home"])
        if not home.is_relative_to(code.resolve()):
            raise SystemExit(f"isomorph came from {home}, not from {code}")

    def ask(self, row: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(row, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline() or '{"error": "the process ended"}')

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(threads: int) -> None:
    """Answer the names of rows on stdin with what was measured; an empty one with the package's folder."""
    import torch

    import isomorph

    torch.set_num_threads(threads)
    answers = sys.stdout
    for line in sys.stdin:
        name = line.strip()
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(name) if name else {"home": str(Path(isomorph.__file__).resolve())}
        print(json.dumps(found), file=answers, flush=True)


def row_names(only: list[str]) -> list[str]:
    import ledger_rows

    rows = ledger_rows.rows()
    if not only:
        return [name for name, row in rows.items() if not row.long]
    chosen = [name for name in rows if any(fnmatch.fnmatch(name, glob) for glob in only)]
    if not chosen:
        raise SystemExit(f"no row matches {' '.join(only)}")
    return chosen


def threads_of(name: str, threads: list[int]) -> list[int]:
    """Operations, commands and memory are measured once."""
    once = name.startswith(("operation/", "command/")) or "/memory/" in name
    return threads[:1] if once else threads


def show_slower(title: str, now: dict[str, Found], before: dict[str, Found]) -> None:
    """Print the rows whose ratio is more than 20% above what it was."""
    shared = [name for name in now if "ratio" in now[name] and "ratio" in before.get(name, {})]
    slower = [
        name for name in shared if float(now[name]["ratio"]) > SLOWER * float(before[name]["ratio"])
    ]
    print(f"\n{len(slower)} of {len(shared)} rows are more than 20% slower than {title}")
    for name in slower:
        print(f"  {name}: {now[name]['ratio']} was {before[name]['ratio']}")


def commit_of(code: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(code), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="rows by name")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--against", type=Path, metavar="JSON", help="print what is slower than in this file"
    )
    parser.add_argument(
        "--code", type=Path, metavar="DIR", help="another checkout, measured in turn with this one"
    )
    parser.add_argument(
        "--write", action="store_true", help="update results/ledger.json, row by row"
    )
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return

    sys.path[:0] = [str(HERE)]
    earlier = json.loads(given.against.read_text())["rows"] if given.against else {}
    codes = {"here": HERE.parent} | ({"there": given.code} if given.code else {})
    found: dict[str, dict[str, Found]] = {code: {} for code in codes}
    names = row_names(given.only)
    commit = commit_of(HERE.parent)  # before the file itself changes
    for threads in given.threads:
        workers = {code: Worker(folder, threads) for code, folder in codes.items()}
        for name in names:
            if threads not in threads_of(name, given.threads):
                continue
            key = name if threads == 1 else f"{name}/{threads} threads"
            for code, worker in workers.items():
                found[code][key] = worker.ask(name)
            shown = "   ".join(f"{code} {found[code][key]}" for code in codes)
            print(f"{key}: {shown}", flush=True)
            if given.write:
                write({key: found["here"][key]}, commit)
        for worker in workers.values():
            worker.close()
    if given.code:
        show_slower(f"with {given.code}", found["here"], found["there"])
    if given.against:
        show_slower(str(given.against), found["here"], earlier)


def write(rows: dict[str, Found], commit: str) -> None:
    """Update the file with these rows; the others stay, each with the commit at which it was measured."""
    import platform

    import torch

    from interleave import processor

    path = RESULTS / "ledger.json"
    earlier = json.loads(path.read_text())["rows"] if path.is_file() else {}
    stamped = {
        name: row | {"commit": commit, "date": str(date.today())} for name, row in rows.items()
    }
    about = {
        "machine": processor().partition(",")[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    whole = json.dumps({**about, "rows": {**earlier, **stamped}}, indent=1) + "\n"
    scratch = path.with_suffix(".partial")
    scratch.write_text(whole)
    scratch.replace(path)


if __name__ == "__main__":
    main()
