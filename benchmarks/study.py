"""What the CIFAR studies share: the table of several kinds of runs over seeds, and lines of their means."""

import statistics

from interleave import spread
from isomorph.report.charts import Line


def of_kind(runs, kind):
    """The logs of one kind, of {(kind, seed): rows of the log}."""
    return [log for (k, _), log in runs.items() if k == kind]


def final_rows(runs, titles):
    """One row a kind: after the last epoch."""
    rows = []
    for kind, title in titles.items():
        logs = of_kind(runs, kind)
        row = {"network": title, "epochs": logs[0][-1]["epoch"], "seeds": len(logs)}
        for label, key in (("top-1", "top1"), ("NLL", "nll"), ("training loss", "loss")):
            row[label] = spread([log[-1][key] for log in logs])
        rows.append(row)
    return rows


def mean_line(curves, first=1):
    """Mean and range over seeds of curves of equal length, from `first` on."""
    columns = list(zip(*curves, strict=True))
    means, lows, highs = [statistics.mean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]
    return Line(list(range(first, first + len(columns))), means, lows, highs)
