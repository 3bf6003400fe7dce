"""The logs in the folder of a training run: lines of JSON by epoch (log) and by step (steps)."""

import json
import statistics


def read_log(folder, name):
    """The rows of a log; none before the first is written."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def speed(folder):
    """The median of the examples per second, whatever stopped or slowed the run for a while."""
    return statistics.median(row["images_per_second"] for row in read_log(folder, "steps"))
