"""The sample-efficiency study of docs/methods/convit.md: a narrow ConViT and the same ViT on 5% and 20% of CIFAR-10.

    python benchmarks/convit_cifar.py [--seeds 3] [--out runs/convit] [--figure docs/methods/convit_cifar.svg]
    python benchmarks/convit_cifar.py --weight-init usual --shares 5 --seeds 2 --figure usual.svg
    python benchmarks/convit_cifar.py --wide     # for a GPU: ConViT-Ti, 5, 10, 30 and 100%, 3 million images each

Needs ISOMORPH_DATA with cifar10. Each run resumes by itself; a second call only completes table and figure.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

import torch
from timm.data import resolve_data_config

import isomorph as iso
from interleave import show, spread, write
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.recipes.convit import CPU_PERCENTS, GPU_PERCENTS
from isomorph.report.charts import Line, Panel
from isomorph.report.figures import panels_figure

TITLES = {"convit": "ConViT", "vit": "ViT"}


def open_runs(out, seeds, wide, shares, weight_init):
    """Trains what is not trained yet: {(kind, share, seed): (folder, evaluated rows of the log, recipe)}."""
    runs = {}
    for seed in range(seeds):
        for share, kind in product(shares or (GPU_PERCENTS if wide else CPU_PERCENTS), TITLES):
            folder = out / f"{kind}_{share}_{seed}"
            name = f"cifar_{kind}_{'ti_' if wide else ''}{share}pct"
            usual = ["model.kwargs.weight_init="] if weight_init == "usual" else []
            recipe = iso.load_recipe(name, [f"seed={seed}", f"out={folder}", *usual])
            iso.train(recipe)
            rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            runs[kind, share, seed] = (folder, [row for row in rows if "top1" in row], recipe)
    return runs


def table(runs):
    """One row a network and share of the data: top-1, NLL and training loss after the last epoch."""
    rows = []
    for share, kind in dict.fromkeys((share, kind) for kind, share, _ in runs):
        logs = [log for (k, s, _), (_, log, _) in runs.items() if (k, s) == (kind, share)]
        row = {"network": TITLES[kind], "data": f"{share}%"}
        row |= {"top-1": spread([log[-1]["top1"] for log in logs]), "NLL": spread([log[-1]["nll"] for log in logs])}
        rows.append(row | {"training loss": spread([log[-1]["loss"] for log in logs])})
    return rows


def learning_curves(runs, share):
    """Mean top-1 over seeds, and their range around it."""
    lines = {}
    for kind, title in TITLES.items():
        logs = [log for (k, s, _), (_, log, _) in runs.items() if (k, s) == (kind, share)]
        tops = [[log[i]["top1"] for log in logs] for i in range(len(logs[0]))]
        shares = (min(values) for values in tops), (max(values) for values in tops)
        epochs = [row["epoch"] for row in logs[0]]
        lines[title] = Line(epochs, [statistics.mean(values) for values in tops], *map(list, shares))
    return Panel(f"{share}% of the data", "epoch", "top-1, %", lines)


def through_training(folder, recipe, look):
    """What `look(model)` gives at birth and at every kept epoch: {name: Line}, heads averaged."""
    stages = {0: build_born(recipe)}
    stages |= {int(path.stem.partition("-")[2]): iso.load(path) for path in folder.glob("epoch-*.safetensors")}
    found = {epoch: look(model) for epoch, model in sorted(stages.items())}
    return {
        f"block {name.split('.')[1]}": Line(list(found), [float(v[name].mean()) for v in found.values()])
        for name in found[0]
    }


def build_born(recipe):
    """The network of a run before its first step."""
    from isomorph.distributed import seed_everything
    from isomorph.training.build import build_model

    seed_everything("birth", recipe.seed)
    return build_model(recipe.model, 10, recipe.drop_path)


def figure(runs, share):
    """Learning curves, nonlocality and gates along training, seed 0 where there is one line a block."""
    folders = {kind: runs[kind, share, 0] for kind in TITLES}
    config = resolve_data_config({"input_size": (3, 32, 32)}, model=build_born(folders["vit"][2]))
    images = next(iter(eval_loader(open_source("cifar10", "test").subset(range(256)), config, 256)))[0]
    panels = [learning_curves(runs, part) for part in dict.fromkeys(s for _, s, _ in runs)]
    for kind, title in TITLES.items():
        lines = through_training(folders[kind][0], folders[kind][2], lambda model: iso.nonlocality(model, images))
        panels.append(Panel(f"{title}: nonlocality", "epoch", "patches", lines, ordered=True))
    gates = through_training(folders["convit"][0], folders["convit"][2], iso.gates)
    panels.append(Panel("ConViT: gates", "epoch", "sigma(gate)", gates, ordered=True))
    return panels_figure(panels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="ConViT-Ti's depth and width, for a GPU")
    parser.add_argument("--shares", type=int, nargs="+", help="percent of the data, of those that have a recipe")
    parser.add_argument("--weight-init", choices=["recipe", "usual"], default="recipe", help="usual: normal, std .02")
    parser.add_argument("--out", type=Path, default=Path("runs/convit"))
    parser.add_argument("--figure", type=Path, default=Path("docs/methods/convit_cifar.svg"))
    options = parser.parse_args()
    runs = open_runs(options.out, options.seeds, options.wide, options.shares, options.weight_init)
    rows = table(runs)
    show(f"{options.seeds} seeds: mean (half the range)", rows)
    options.figure.write_text(figure(runs, next(reversed(runs))[1]) + "\n")
    by_seed = [{"run": f"{k} {s}% seed {seed}", **log[-1]} for (k, s, seed), (_, log, _) in runs.items()]
    curves = [
        {"run": f"{k} {s}% seed {seed}", "top1": [r["top1"] for r in log]} for (k, s, seed), (_, log, _) in runs.items()
    ]
    tables = {"table": rows, "by seed": by_seed, "curves": curves}
    kind = "_wide" if options.wide else "_usual" if options.weight_init == "usual" else ""
    path = write(f"convit_cifar{kind}", tables)
    print(f"\nwrote {path} and {options.figure}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
