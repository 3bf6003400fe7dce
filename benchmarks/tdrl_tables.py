"""Tables and figure of the TDRL study, from the finished runs of tdrl_study.py.

    python benchmarks/tdrl_tables.py runs/tdrl_study.jsonl --step-ratio 1.9

`--step-ratio` is the time of a training step with pyramids, in plain steps, by which the figure's second panel compares
the forms at equal time.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from interleave import RESULTS, read_rows, show, spread, write
from isomorph.report.figures import Line, Panel, panels_figure
from parallel_arms import DEFAULTS
from tdrl_networks import CONVOLUTIONS
from tdrl_study import Row, read_results

TITLES = {"plain": "plain", "plain xavier": "plain, Xavier"}
TITLES |= {"plain xavier small-proj": "plain, better start", "P-W2S": "P-W2S"}
TITLES |= {"plain xavier small-proj drop-path": "plain, drop path", "P-W2S drop-path": "P-W2S, drop path"}


def select(rows: Iterable[Row], **fields: object) -> list[Row]:
    """Return the rows with these fields."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def by_rate(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """Return the rows of each learning rate."""
    return {rate: select(rows, lr=rate) for rate in sorted({row["lr"] for row in rows})}


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the rate with the best mean validation accuracy, of the rates with the most seeds."""
    rates = by_rate(rows)
    most = max(map(len, rates.values()))
    full = [found for found in rates.values() if len(found) == most]
    return max(full, key=lambda found: statistics.mean(row["val"] for row in found))


def main_table(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each length and form, at the rate chosen on the validation images."""
    table = []
    for epochs in sorted({row["epochs"] for row in rows}):
        for form, title in TITLES.items():
            if found := select(rows, form=form, epochs=epochs):
                best = chosen(found)
                entry: Row = {"epochs": epochs, "network": title, "rate": f"{best[0]['lr']:g}", "seeds": len(best)}
                entry |= {name: spread([row[name] for row in best]) for name in ("val", "test", "test_nll")}
                table.append(entry | {"training loss": spread([row["curve"][-1][2] for row in best])})
    return table


def rate_table(rows: Sequence[Row]) -> list[Row]:
    """Return the mean validation accuracy of every rate."""
    rates = sorted({row["lr"] for row in rows})
    table = []
    for epochs in sorted({row["epochs"] for row in rows}):
        for form, title in TITLES.items():
            found = by_rate(select(rows, form=form, epochs=epochs))
            means = {
                f"{rate:g}": f"{statistics.mean(row['val'] for row in found[rate]):.2f}" if rate in found else ""
                for rate in rates
            }
            table += [{"epochs": epochs, "network": title, **means}] if found else []
    return table


def change_of(row: Row) -> str:
    """Return what is special about a run, in words."""
    names = {"batch": "batch", "branch_lr": "branch_lr x", "pyramid_lr": "rate of pyramids x", "fuse_at": "fused at"}
    names |= {"branch_decay": "decay of scale-free layers x", "tf32": "TF32", "optimizer": "optimiser"}
    names |= {"fused_lr": "rate after fusing x", "weight_decay": "weight decay"}
    names |= {"branches_until": "branches frozen from"}
    changed = [name for name, value in DEFAULTS.items() if row[name] != value]
    changes = [f"{names[n]} {row[n]:.2g}" if isinstance(row[n], float) else f"{names[n]} {row[n]}" for n in changed]
    return ", ".join([row["form"], *changes])


def change_table(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each change at 30 epochs, at its better rate, on the same seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(change_of(row), []).append(row)
    table = []
    for name, found in groups.items():
        best = chosen([row for row in found if row["seed"] in (0, 1)])
        loss = spread([row["curve"][-1][2] for row in best])
        rate = f"{best[0]['lr']:g}"
        table.append({"run": name, "rate": rate, "val": spread([row["val"] for row in best]), "training loss": loss})
    return table


def form_table(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each network, length and form, at the rate chosen on the validation images."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["epochs"], change_of(row)), []).append(row)
    table = []
    for (network, epochs, name), found in groups.items():
        best, rates = chosen(found), len(by_rate(found))
        entry: Row = {"network": network, "form": name, "epochs": epochs, "rates": rates, "rate": f"{best[0]['lr']:g}"}
        entry |= {"seeds": len(best)} | {name: spread([row[name] for row in best]) for name in ("val", "test")}
        entry |= {"training loss": spread([row["curve"][-1][2] for row in best])}
        table.append(entry | {"seconds": spread([row["seconds"] for row in best])})
    return table


def panels(rows: Sequence[Row], step_ratio: float) -> list[Panel]:
    """Return test accuracy along epochs and along time, and the training loss, of the chosen runs."""
    lengths = sorted({row["epochs"] for row in rows})

    def line(form: str, value: str, factor: float = 1.0) -> Line:
        at = [
            (epochs, chosen(select(rows, form=form, epochs=epochs)))
            for epochs in lengths
            if select(rows, form=form, epochs=epochs)
        ]
        values = [[row["curve"][-1][2] if value == "loss" else row[value] for row in found] for _, found in at]
        x = [epochs * factor for epochs, _ in at]
        return Line(x, [statistics.mean(v) for v in values], [min(v) for v in values], [max(v) for v in values])

    return [
        Panel("test accuracy, equal epochs", "epochs", "top-1", {t: line(f, "test") for f, t in TITLES.items()}),
        Panel(
            "test accuracy, equal time",
            "time, in epochs of the plain network",
            "top-1",
            {t: line(f, "test", step_ratio if f.startswith("P-W2S") else 1.0) for f, t in TITLES.items()},
        ),
        Panel("training loss", "epochs", "nats", {t: line(f, "loss") for f, t in TITLES.items()}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--step-ratio", type=float, required=True)
    parser.add_argument("--figure", type=Path, default=Path("docs/methods/tdrl_study.svg"))
    options = parser.parse_args()
    rows = read_results(read_rows(options.runs))
    if not rows:
        parser.error(f"{options.runs} has no finished runs; benchmarks/tdrl_study.py --out {options.runs} makes them")
    vits = select(rows, network="vit")
    short = select(vits, epochs=10)
    main_rows = [row for row in select(vits, **DEFAULTS) if row["form"] in TITLES]
    tables = {
        "by length": main_table(main_rows),
        "rates": rate_table(main_rows),
        "changes at 30 epochs": change_table(select(vits, epochs=30)),
    }
    more = {
        "pyramids in parts, 10 epochs": [row for row in select(short, optimizer="adamw") if "xavier" in row["form"]],
        "changes at 10 epochs": [
            row for row in select(short, seed=0) if row["form"].startswith("plain") or "xavier" not in row["form"]
        ],
        "sampled statistics, 6 epochs": select(vits, epochs=6),
        "batch 1024": select(vits, batch=1024),
        "long runs": [row for row in vits if row["epochs"] >= 50 and row["batch"] == 256],
        "64 tokens": select(rows, network="vit patch 4"),
        "convolutions": [row for name in CONVOLUTIONS for row in select(rows, network=name)],
    }
    tables |= {title: form_table(found) for title, found in more.items() if found}
    for title, table in tables.items():
        show(title, table)
    largest = max(row["fused_fp32"] or 0.0 for row in rows)  # none for a run that diverged
    print(f"\nlargest difference of a fused network: {largest:.2g}")
    options.figure.write_text(panels_figure(panels(main_rows, options.step_ratio)) + "\n")
    about = [{"trained on": rows[0]["device"], "step ratio": options.step_ratio, "largest difference, fused": largest}]
    earlier = json.loads((RESULTS / "tdrl_study.json").read_text())["runs on 45,000 images"]  # an earlier training set
    tables |= {"about": about, "runs": rows, "runs on 45,000 images": earlier}
    print(f"wrote {write('tdrl_study', tables)} and {options.figure}")


if __name__ == "__main__":
    main()
