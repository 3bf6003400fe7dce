"""FastViT-T8 before and after iso.fuse, compared with torch.compile and timm's own method, and the picture of it.

    OMP_NUM_THREADS=1 python benchmarks/before_after.py [--picture]

One image of 224 x 224, one thread, processor time, median of 15 interleaved rounds in one process, with random weights
and running statistics. Writes benchmarks/results/before_after.json; --picture only draws docs/pictures/before-after.svg
from it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from docs_diagrams import INK, LINEAR, NORM
from interleave import RESULTS, forward, interleaved, processor

NAME = "fastvit_t8"
PICTURE = Path(__file__).parents[1] / "docs/pictures/before-after.svg"


def trained_like() -> nn.Module:
    """Return the network with running statistics and norms that are not the identity, as after training."""
    torch.manual_seed(0)
    model = timm.create_model(NAME).eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def kinds_of(model: nn.Module) -> list[str]:
    """Return the kind of every layer with parameters, in order."""
    kinds = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kinds.append("norm")
        elif isinstance(module, nn.Conv2d | nn.Linear):
            kinds.append("layer")
    return kinds


def measure() -> dict[str, Any]:
    model = trained_like()
    x = torch.randn(1, 3, 224, 224)
    fused = iso.fuse(model, x)
    (row,) = iso.verify(model, fused, x).inputs
    contenders = {
        "before": model,
        "iso.fuse": fused,
        "timm": reparameterize_model(model),
        "torch.compile": torch.compile(model),
        "iso.fuse, then torch.compile": torch.compile(fused),
    }
    runs = {name: forward(network, x) for name, network in contenders.items()}
    times = interleaved(runs, torch.device("cpu"), rounds=15, warm_up=4)
    return {
        "model": NAME,
        "size": 224,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "milliseconds": {name: round(value, 1) for name, value in times.items()},
        "parameters": [sum(p.numel() for p in each.parameters()) for each in (model, fused)],
        "layers": [kinds_of(each) for each in (model, fused)],
        "float32": row.fp32 / row.scale,
        "float64": row.fp64 / row.scale,
    }


def draw_layers(axes: Any, kinds: list[str], left: float, caption: str) -> None:
    """Draw one small box for each layer, row by row from the input, with a caption above."""
    colours = {"layer": LINEAR, "norm": NORM}
    columns = 16
    for number, kind in enumerate(kinds):
        row, column = divmod(number, columns)
        corner = (left + 0.32 * column, 4.9 - 0.32 * row)
        axes.add_patch(plt.Rectangle(corner, 0.26, 0.26, fc=colours[kind], ec="none", alpha=0.75))
    axes.text(left, 6.35, caption, ha="left", va="center", fontsize=11, color=INK)
    counts = f"{kinds.count('layer')} convolutions and linear layers, {kinds.count('norm')} norms"
    axes.text(left, 5.75, counts, ha="left", va="center", fontsize=8.5, color=INK)


def picture(result: dict[str, Any]) -> Any:
    """Return the figure: every layer of the network before and after, and the time of one image."""
    before, after = result["layers"]
    times = result["milliseconds"]
    figure, axes = plt.subplots(figsize=(8.4, 4.6))
    draw_layers(axes, before, 0.2, f"{result['model']}: {times['before']:.1f} ms")
    draw_layers(axes, after, 7.2, f"after iso.fuse: {times['iso.fuse']:.1f} ms")
    compiled = times["iso.fuse, then torch.compile"]
    lines = [
        f"compiled too: {compiled:.1f} ms",
        f"torch.compile alone: {times['torch.compile']:.1f} ms",
        f"timm's own method: {times['timm']:.1f} ms",
        "",
        "largest difference of the outputs,",
        "relative to the largest:",
        f"{result['float32']:.0e} in float32, {result['float64']:.0e} in float64",
    ]
    for number, line in enumerate(lines):
        axes.text(7.2, 2.6 - 0.38 * number, line, fontsize=9, color=INK, va="center")
    axes.set(xlim=(0, 12.6), ylim=(-0.2, 6.7), aspect="equal")
    axes.axis("off")
    figure.legend(
        handles=[
            matplotlib.patches.Patch(color=LINEAR, alpha=0.75, label="convolution or linear layer"),
            matplotlib.patches.Patch(color=NORM, alpha=0.75, label="BatchNorm"),
        ],
        loc="lower left",
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        ncols=2,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", action="store_true")
    stored = RESULTS / "before_after.json"
    if not parser.parse_args().picture:
        torch.set_num_threads(1)
        measured = {"machine": processor(), **measure()}
        stored.write_text(json.dumps(measured, indent=1) + "\n")
    result = json.loads(stored.read_text())
    matplotlib.rcParams["svg.hashsalt"] = "isomorph"
    picture(result).savefig(PICTURE, bbox_inches="tight", transparent=True, metadata={"Date": None})
    print({key: value for key, value in result.items() if key != "layers"})


if __name__ == "__main__":
    main()
