"""The study of docs/methods/coatnet.md: CoAtNet's five layouts on CIFAR-10 without augmentation, matched in size.

    python benchmarks/coatnet_cifar.py [--seeds 2] [--out runs/coatnet] [--figures docs/methods]

Needs ISOMORPH_DATA with cifar10. Each run resumes by itself; a second call only completes table and figures.
"""

import argparse
import json
from pathlib import Path

import torch

import isomorph as iso
from interleave import show, spread, write
from isomorph.evaluation.cost import count_macs, count_parameters
from isomorph.report.charts import Line, Panel
from isomorph.report.figures import panels_figure
from study import final_rows, mean_line, of_kind

TITLES = {
    "c_c_c_c": "C-C-C-C",
    "c_c_c_t": "C-C-C-T",
    "c_c_t_t": "C-C-T-T",
    "c_t_t_t": "C-T-T-T",
    "vit_rel": "ViT_REL",
    "c_c_t_t_placeblind": "C-C-T-T without",
    "vit_rel_placeblind": "ViT_REL without",
}
LAYOUTS = list(TITLES)[:5]
FEWER = {"c_c_t_t_placeblind": 1, "vit_rel_placeblind": 1}
"""Kinds with fewer seeds."""


def open_runs(out, seeds):
    """Trains what is not trained yet: {(kind, seed): rows of the log}."""
    runs = {}
    for seed in range(seeds):
        for kind in TITLES:
            if seed >= FEWER.get(kind, seeds):
                continue
            folder = out / f"{kind}_{seed}"
            iso.train(iso.load_recipe(f"cifar_coatnet_{kind}", [f"seed={seed}", f"out={folder}"]))
            runs[kind, seed] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return runs


def evaluated(log):
    """The epochs after which the test images were looked at."""
    return [row for row in log if "top1" in row]


def whole_rows(out, seeds):
    """One row a kind: test images as whole as those it was trained on, not cropped as the model's config says."""
    rows = []
    for kind, title in TITLES.items():
        tops, likelihoods = [], []
        for seed in range(min(seeds, FEWER.get(kind, seeds))):
            model = iso.load(out / f"{kind}_{seed}/model.safetensors")
            config = dict(input_size=(3, 32, 32), mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"])
            loader = iso.data.eval_loader(iso.data.open_source("cifar10", "test"), config, 250, rfc=1.0)
            found = iso.evaluate(model.eval(), loader)
            tops.append(found["top1"])
            likelihoods.append(found["nll"])
        rows.append({"network": title, "seeds": len(tops), "top-1": spread(tops), "NLL": spread(likelihoods)})
    return rows


def size_rows(out):
    """What each network costs."""
    rows = []
    for kind in TITLES:
        model = iso.load(out / f"{kind}_0/model.safetensors")
        macs = count_macs(model, (3, 32, 32)) / 1e6
        rows.append({"network": TITLES[kind], "parameters": count_parameters(model), "MMAC": macs})
    return rows


def best_rows(runs):
    """One row a kind: at the evaluated epoch with the best accuracy, as early stopping would have it."""
    rows = []
    for kind, title in TITLES.items():
        tops = [max(evaluated(log), key=lambda row: row["top1"]) for log in of_kind(runs, kind)]
        means = {name: sum(row[name] for row in tops) / len(tops) for name in ("epoch", "loss", "top1", "nll")}
        rows.append({"network": title, **means})
    return rows


def panels(runs):
    """Training loss, test accuracy, and one against the other, by layout; with and without relative attention."""
    losses, accuracies, against, relative = {}, {}, {}, {}
    for kind, title in TITLES.items():
        logs = of_kind(runs, kind)
        looks = [evaluated(log) for log in logs]
        epochs = [row["epoch"] for row in looks[0]]
        curve = mean_line([[row["top1"] for row in rows] for rows in looks])._replace(x=epochs)
        mean_loss = mean_line([[row["loss"] for row in rows] for rows in looks]).y
        if kind in LAYOUTS:
            losses[title] = mean_line([[row["loss"] for row in log] for log in logs])
            accuracies[title] = curve
            against[title] = Line(mean_loss, curve.y)
        if kind.removesuffix("_placeblind") in ("c_c_t_t", "vit_rel"):
            relative[title] = curve
    return [
        Panel("training", "epoch", "training loss", losses),
        Panel("generalisation", "epoch", "test top-1", accuracies),
        Panel("accuracy at a training loss", "training loss", "test top-1", against),
        Panel("relative attention", "epoch", "test top-1", relative),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/coatnet"))
    parser.add_argument("--figures", type=Path, default=Path("docs/methods"))
    options = parser.parse_args()
    runs = open_runs(options.out, options.seeds)
    tables = {
        "after the last epoch, mean (half the range over seeds)": final_rows(runs, TITLES),
        "after the last epoch, on whole images": whole_rows(options.out, options.seeds),
        "at the best evaluated epoch, mean": best_rows(runs),
        "cost": size_rows(options.out),
    }
    for title, rows in tables.items():
        show(title, rows)
    (options.figures / "coatnet_layouts.svg").write_text(panels_figure(panels(runs), columns=2) + "\n")
    tables["by seed"] = [{"run": f"{TITLES[k]}, seed {s}", "log": log} for (k, s), log in runs.items()]
    print(f"\nwrote {write('coatnet_cifar', tables)} and a figure in {options.figures}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
