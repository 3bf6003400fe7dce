"""The study of docs/methods/tdrl.md: a narrow ViT on CIFAR-10 with and without pyramids, equal epochs, and equal time.

    python benchmarks/tdrl_cifar.py [--seeds 3] [--out runs/tdrl] [--figure docs/methods/tdrl_cifar.svg]

Needs ISOMORPH_DATA with cifar10. Each run resumes by itself; a second call only completes table and figure.
"""

import argparse
import json
from pathlib import Path

import torch

import isomorph as iso
from interleave import show, write
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.report.charts import Line, Panel
from isomorph.report.figures import panels_figure
from study import final_rows, mean_line, of_kind

KINDS = {
    "plain": ("cifar_tdrl_plain", []),
    "plain_long": ("cifar_tdrl_plain", ["epochs=13"]),
    "pyramid": ("cifar_tdrl", []),
    "pyramid_slow": ("cifar_tdrl", ["optim.branch_lr=3e-4"]),
}
TITLES = {"plain": "ViT", "plain_long": "ViT longer", "pyramid": "P-W2S", "pyramid_slow": "P-W2S slow"}


def open_runs(out, seeds):
    """Trains what is not trained yet: {(kind, seed): rows of the log}."""
    runs = {}
    for seed in range(seeds):
        for kind, (name, changes) in KINDS.items():
            folder = out / f"{kind}_{seed}"
            iso.train(iso.load_recipe(name, [f"seed={seed}", f"out={folder}", "evaluate_every=4", *changes]))
            runs[kind, seed] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return runs


def loss_panel(runs):
    """Training loss along the epochs, mean and range over seeds."""
    lines = {t: mean_line([[row["loss"] for row in log] for log in of_kind(runs, k)]) for k, t in TITLES.items()}
    return Panel("training loss", "epoch", "nats", lines)


def similarity_panel(found):
    """CKA between the branches of every pyramid, block by block: seed 0 after training."""
    layers = {"fc1": "mlp.fc1", "fc2": "mlp.fc2", "q": "attn.qkv", "v": "attn.qkv"}
    lines = {}
    for title, name in layers.items():
        maps = [value for key, value in found.items() if key.endswith(name)]
        maps = [m if m.ndim == 2 else m[0 if title == "q" else 2] for m in maps]
        off = [float((m.sum() - m.diagonal().sum()) / (m.numel() - len(m))) for m in maps]
        lines[title] = Line(list(range(len(off))), off)
    return Panel("CKA between branches", "block", "mean of pairs", lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/tdrl"))
    parser.add_argument("--figure", type=Path, default=Path("docs/methods/tdrl_cifar.svg"))
    options = parser.parse_args()
    runs = open_runs(options.out, options.seeds)
    rows = final_rows(runs, TITLES)
    show("mean (half the range over seeds)", rows)
    model = iso.load(options.out / "pyramid_slow_0/model.safetensors")
    config = dict(input_size=(3, 32, 32), mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"])
    images = next(iter(eval_loader(open_source("cifar10", "test").subset(range(256)), config, 256)))[0]
    found = iso.analysis.branch_similarity(model, images)
    options.figure.write_text(panels_figure([loss_panel(runs), similarity_panel(found)]) + "\n")
    by_seed = [{"run": f"{TITLES[k]}, seed {seed}", **log[-1]} for (k, seed), log in runs.items()]
    similarities = {name: value.tolist() for name, value in found.items()}
    path = write("tdrl_cifar", {"table": rows, "by seed": by_seed, "branch similarity": [similarities]})
    print(f"\nwrote {path} and {options.figure}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
