"""Seconds to evaluate a network with one process and with several, and if the numbers are equal.

    python benchmarks/evaluate_scale.py [--images 10000] [--processes 1 2] [--rounds 3]

Needs ISOMORPH_DATA with cifar10 and the weights of cifar_resnet20; writes results/evaluate_scale.json. Every
measurement is the whole command, started by torchrun as a user would, with one thread per process; kinds take turns.
`command s` is the time from its start to its end, `evaluation s` that without the time of the same command on 100
images. Medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from interleave import show, write


def command(processes, images):
    weights = f"{os.environ['ISOMORPH_DATA']}/weights/cifar10_resnet20.safetensors"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = ["--data", "cifar10", "--weights", weights, "--device", "cpu", "--no-cost", "--json"]
    return [*launch, "-m", "isomorph", "evaluate", "cifar_resnet20", *options, "--max-images", str(images)]


def timed(processes, images):
    """Seconds of one command, and what it printed."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command(processes, images), capture_output=True, text=True, check=True, env=environment)
    return time.perf_counter() - start, json.loads(run.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    whole, start, answers = {}, {}, {}
    for _ in range(options.rounds):
        for processes in options.processes:
            start.setdefault(processes, []).append(timed(processes, 100)[0])
            seconds, answers[processes] = timed(processes, options.images)
            whole.setdefault(processes, []).append(seconds)
    rows = []
    for processes in options.processes:
        both = [statistics.median(times[processes]) for times in (whole, start)]
        rows.append(
            {"processes": processes, "command s": both[0], "evaluation s": both[0] - both[1], **answers[processes]}
        )
    equal = all(answer == answers[options.processes[0]] for answer in answers.values())
    show(f"{options.images:,} images of CIFAR-10", rows)
    print(f"metrics equal to the last digit: {equal}; load average {os.getloadavg()[0]:.1f}")
    write("evaluate_scale", {"options": vars(options), "equal": equal, "load average": os.getloadavg(), "rows": rows})


if __name__ == "__main__":
    main()
