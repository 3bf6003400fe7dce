"""The fine-tuning study of docs/methods/tcnn.md: CNN alone and T-CNNs, equal budget, clean and corrupted.

    python benchmarks/tcnn_cifar.py [--fraction 0.2] [--epochs 4] [--seeds 2] [--images 2000] [--out runs/study]

Needs ISOMORPH_DATA with cifar10 and weights. Each run resumes by itself; a second call only completes the table.
"""

import argparse
import statistics
from pathlib import Path

import timm
from timm.data import resolve_data_config

import isomorph as iso
from interleave import show, spread, write
from isomorph.data.corruptions.corrupt import CorruptedSource
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.recipes.cifar import SURGERIES

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "contrast", "pixelate")
SEVERITY = 1


def measure(model, images):
    """Top-1 on the whole clean test split and on the first images of it under each corruption."""
    source, config = open_source("cifar10", "test"), resolve_data_config(model=timm.create_model("cifar_resnet20"))
    found = iso.evaluate(model, eval_loader(source, config, 200))
    row = {"clean": found["top1"], "NLL": found["nll"]}
    part = source.subset(range(images))
    for name in CORRUPTIONS:
        row[name] = iso.evaluate(model, eval_loader(CorruptedSource(part, name, SEVERITY), config, 200))["top1"]
    row["corrupted"] = statistics.mean(row[name] for name in CORRUPTIONS)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--births", nargs="+", default=["cnn", "exact", "paper", "annealed"], choices=list(SURGERIES))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    rows = [
        {
            "run": "CNN, not fine-tuned",
            **{
                k: f"{v:.2f}"
                for k, v in measure(timm.create_model("cifar_resnet20", pretrained=True), options.images).items()
            },
        }
    ]
    results = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for birth in options.births:
            changes = [f"data.fraction={options.fraction}", f"epochs={options.epochs}", f"seed={seed}"]
            recipe = iso.load_recipe(
                f"cifar_{birth}", [*changes, f"out={options.out / f'{birth}_{seed}'}", f"name={birth}_{seed}"]
            )
            results.setdefault(birth, []).append(measure(iso.train(recipe).model, options.images))
    for birth, found in results.items():
        rows.append({"run": birth, **{key: spread([row[key] for row in found]) for key in found[0]}})
    show(f"fraction {options.fraction}, {options.epochs} epochs, {options.seeds} seeds: mean (half the range)", rows)
    tables = {
        "options": [{k: str(v) for k, v in vars(options).items()}],
        "table": rows,
        "by seed": [{"run": b, **row} for b, f in results.items() for row in f],
    }
    print(f"\nwrote {write('tcnn_cifar', tables)}")


if __name__ == "__main__":
    main()
