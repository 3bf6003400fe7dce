"""The study of docs/methods/refiner.md: a narrow ViT on CIFAR-10 with local attention, talking heads, both, neither.

    python benchmarks/refiner_cifar.py [--seeds 3] [--out runs/refiner] [--figures docs/methods]

Needs ISOMORPH_DATA with cifar10. Each run resumes by itself; a second call only completes table and figures.
"""

import argparse
import json
from pathlib import Path

import torch

import isomorph as iso
from interleave import show, write
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.report.charts import Panel
from isomorph.report.figures import matrices_figure, panels_figure
from study import final_rows, mean_line

KINDS = {
    "plain": ("plain", []),
    "plain_long": ("plain", ["epochs=13"]),
    "dla": ("dla", []),
    "talking_heads": ("talking_heads", []),
    "both": ("both", []),
}
TITLES = {
    "plain": "ViT",
    "plain_long": "ViT longer",
    "dla": "+ DLA",
    "talking_heads": "+ talking heads",
    "both": "+ both",
}
FEWER = {"plain_long": 2}
"""Kinds with fewer seeds: they take long, and only set the others in proportion."""
CURVES = ("plain", "dla", "talking_heads", "both")
DRAWS, IMAGES = 10, 32
"""Of the curves: ten draws of 32 test images, as in the paper."""


def open_runs(out, seeds):
    """Trains what is not trained yet: {(kind, seed): rows of the log}."""
    runs = {}
    for seed in range(seeds):
        for kind, (form, changes) in KINDS.items():
            if seed >= FEWER.get(kind, seeds):
                continue
            folder = out / f"{kind}_{seed}"
            fields = [f"seed={seed}", f"out={folder}", "evaluate_every=4", *changes]
            iso.train(iso.load_recipe(f"cifar_refined_{form}", fields))
            runs[kind, seed] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return runs


def batches(model):
    """Ten draws of test images."""
    config = dict(input_size=(3, 32, 32), mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"])
    source = open_source("cifar10", "test").subset(torch.randperm(10_000)[: DRAWS * IMAGES].tolist())
    return [images for images, _ in eval_loader(source, config, IMAGES)]


def looks(out, seeds):
    """F_k, similarity of maps between blocks and between heads, and the maps of one image, by kind."""
    evolution, between, within, maps = {}, {}, {}, {}
    for kind in CURVES:
        models = [iso.load(out / f"{kind}_{seed}/model.safetensors") for seed in range(seeds)]
        images = batches(models[0])
        evolution[kind] = [list(iso.analysis.feature_evolution(model, images).values()) for model in models]
        neighbours = [iso.analysis.map_similarity(model, images[0]).diagonal(1).tolist() for model in models]
        between[kind] = neighbours
        heads = [iso.analysis.head_similarity(model, images[0]).values() for model in models]
        within[kind] = [[off_diagonal(found) for found in blocks] for blocks in heads]
        found = iso.attention_maps(models[0], images[0][:1])
        maps[TITLES[kind]] = {f"block {i + 1}": m[0].mean(0) for i, m in enumerate(found.values())}
    return evolution, between, within, maps


def off_diagonal(matrix):
    return float((matrix.sum() - matrix.diagonal().sum()) / (matrix.numel() - len(matrix)))


def panel(title, label, curves, first=1):
    """One line a kind, mean and range over seeds."""
    lines = {TITLES[kind]: mean_line(found, first) for kind, found in curves.items()}
    return Panel(title, "block", label, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/refiner"))
    parser.add_argument("--figures", type=Path, default=Path("docs/methods"))
    options = parser.parse_args()
    runs = open_runs(options.out, options.seeds)
    rows = final_rows(runs, TITLES)
    show("mean (half the range over seeds)", rows)
    evolution, between, within, maps = looks(options.out, options.seeds)
    panels = [
        panel("feature evolution", "F_k", evolution),
        panel("maps of neighbouring blocks", "cosine, to the block before", between, first=2),
        panel("maps of a block's heads", "cosine, mean of pairs", within),
    ]
    (options.figures / "refiner_evolution.svg").write_text(panels_figure(panels) + "\n")
    (options.figures / "refiner_maps.svg").write_text(matrices_figure(maps) + "\n")
    by_seed = [{"run": f"{TITLES[k]}, seed {seed}", **log[-1]} for (k, seed), log in runs.items()]
    curves = [{"F_k": evolution, "between blocks": between, "between heads": within}]
    path = write("refiner_cifar", {"table": rows, "by seed": by_seed, "curves": curves})
    print(f"\nwrote {path} and two figures in {options.figures}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
