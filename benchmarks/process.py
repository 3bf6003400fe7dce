"""What freed memory and waiting threads cost a training step on a CPU.

    python benchmarks/process.py memory    # a TDRL step with iso.keep_freed_memory() and without, results/memory.json
    python benchmarks/process.py threads   # a step alone and next to busy processes, results/threads.json

Every measurement is a process of its own, without MALLOC_* and OMP_* in its environment; kinds take turns. Times are
medians of the steps in milliseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager

from interleave import show, write

MEMORY = """
import json, sys
from isomorph.process import keep_freed_memory
keep = sys.argv[1] == "kept"
assert not keep or keep_freed_memory()
import timm, torch
import isomorph
from interleave import interleaved, step
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
forms = {"plain": timm.create_model("tdrl_vit_ti", layout="plain"), "pyramids": timm.create_model("tdrl_vit_ti")}
x = torch.randn(32, 3, 224, 224)
times = interleaved({name: step(model, x) for name, model in forms.items()}, torch.device("cpu"), int(sys.argv[3]))
print(json.dumps(times))
"""

THREADS = """
import json, sys, time, statistics
import timm, torch
import isomorph
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
model, x, times = timm.create_model("cifar_resnet20"), torch.randn(64, 3, 24, 24), []
begin = time.perf_counter()
while time.perf_counter() - begin < float(sys.argv[2]) or len(times) < 5:
    start = time.perf_counter()
    model(x).sum().backward()
    times.append(time.perf_counter() - start)
print(json.dumps(1e3 * statistics.mean(times[2:])))
"""

WAITING = {"1 thread": (1, {}), "all threads": (0, {}), "all threads, passive": (0, {"OMP_WAIT_POLICY": "passive"})}


def measure(script, *arguments, **variables):
    """Run a script in a process of its own and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_"))} | variables
    given = [sys.executable, "-c", script, *map(str, arguments)]
    here = os.path.dirname(os.path.abspath(__file__))
    return json.loads(subprocess.run(given, capture_output=True, text=True, env=env, check=True, cwd=here).stdout)


def memory_table(options):
    """Rows of medians over all processes: plain step, step with pyramids, their ratio, and the gain of each."""
    found = {"returned to the system (default)": [], "kept": []}
    for _ in range(options.processes):
        for name, times in found.items():
            times.append(measure(MEMORY, name, options.threads, options.rounds))
    rows = []
    for name, times in found.items():
        plain, pyramids = (statistics.median(each[form] for each in times) for form in ("plain", "pyramids"))
        rows.append({"freed memory": name, "plain ms": plain, "pyramids ms": pyramids, "ratio": pyramids / plain})
    return rows


@contextmanager
def crowd(number):
    """Keep a number of other processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def threads_table(options):
    """Rows of a step's mean time by threads, alone and in a crowd; the mean, as a crowd makes some steps very long."""
    rows = []
    for name, (threads, variables) in WAITING.items():
        threads = threads or os.cpu_count()
        alone = measure(THREADS, threads, options.seconds, **variables)
        with crowd(options.busy):
            crowded = measure(THREADS, threads, options.seconds, **variables)
        rows.append(
            {"threads": name, "alone ms": alone, f"next to {options.busy} ms": crowded, "ratio": crowded / alone}
        )
        show("so far", rows[-1:])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("memory", "threads"))
    parser.add_argument("--threads", type=int, default=1, help="of a memory measurement")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each form in a process")
    parser.add_argument("--processes", type=int, default=2, help="of each kind")
    parser.add_argument("--seconds", type=float, default=8, help="of a thread measurement")
    parser.add_argument("--busy", type=int, default=8, help="other processes")
    options = parser.parse_args()
    rows = memory_table(options) if options.table == "memory" else threads_table(options)
    show(options.table, rows)
    print(f"\nwrote {write(options.table, {options.table: rows, 'arguments': vars(options)})}")


if __name__ == "__main__":
    main()
