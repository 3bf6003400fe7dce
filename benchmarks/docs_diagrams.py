"""Diagrams of the docs, drawn from the layers themselves: a pyramid and its fused layer, the stages of CoAtNet-0."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import timm
import torch
from torch import Tensor, nn

import isomorph as iso

matplotlib.use("Agg")
INK = "#808890"
"""A grey that is readable on light and dark pages."""
LINEAR, NORM, PLAIN = "#2f72d8", "#d9651c", "#25694e"
PART_COLOURS = {"Linear": LINEAR, "BatchNorm": NORM}


def draw_box(
    axes: Any, x: float, y: float, label: str, colour: str, width: float = 1.0, height: float = 0.6
) -> None:
    """Draw a box with its label; (x, y) is its centre."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        matplotlib.patches.FancyBboxPatch(
            corner, width, height, boxstyle=style, fc=colour, ec=colour, alpha=0.28
        )
    )
    axes.text(x, y, label, ha="center", va="center", fontsize=8.5)


def draw_arrow(axes: Any, start: tuple[float, float], stop: tuple[float, float]) -> None:
    """Draw an arrow between two points."""
    axes.annotate(
        "", stop, start, arrowprops=dict(arrowstyle="-|>", lw=1, color=INK, shrinkA=0, shrinkB=0)
    )


def clear_axes(axes: Any, width: float, height: float) -> None:
    """Set axes of `width` x `height` units without ticks or frame."""
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")


def part_names(chain: Sequence[nn.Module]) -> list[str]:
    """Return short names of the layers of a branch."""
    return ["BatchNorm" if "Norm" in type(layer).__name__ else "Linear" for layer in chain]


def count(module: nn.Module) -> str:
    """Return the number of parameters of a module, with separators."""
    return f"{sum(p.numel() for p in module.parameters()):,}"


def draw_chains(axes: Any, chains: Sequence[Sequence[str]], bottom: float) -> None:
    """Draw the branches of a pyramid next to each other, from the input below to the sum above."""
    top = bottom + 0.85 * max(map(len, chains)) + 0.7
    middle = 1.6 * len(chains) / 2
    axes.text(middle, bottom - 1.25, "input", ha="center", va="center")
    draw_box(axes, middle, top, "+", INK, width=0.6)
    draw_arrow(axes, (middle, top + 0.3), (middle, top + 0.85))
    axes.text(middle, top + 1.0, "output", ha="center", va="bottom")
    for number, chain in enumerate(chains):
        x = 1.6 * number + 0.8
        draw_arrow(axes, (middle, bottom - 1.05), (x, bottom - 0.3))
        last = bottom + 0.85 * (len(chain) - 1)
        for step, name in enumerate(chain):
            y = bottom + 0.85 * step
            draw_box(axes, x, y, name, PART_COLOURS[name], width=1.3)
            if step:
                draw_arrow(axes, (x, y - 0.55), (x, y - 0.3))
        axes.plot((x, x), (last + 0.3, top - 0.8), color=INK, lw=1)
        draw_arrow(axes, (x, top - 0.8), (middle + 0.2 * (number - 1), top - 0.3))


def pyramid_diagram() -> Any:
    """Return the figure of a P-W2S pyramid of ViT-Ti's first MLP layer, and of the layer that it fuses into."""
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224")
    wide = iso.recast(vit, iso.LinearToPyramid("P-W2S"), where="blocks.0.mlp.fc1").eval()
    pyramid = wide.get_submodule("blocks.0.mlp.fc1")
    chains = [part_names(chain) for chain in pyramid.chains]
    fused = iso.fuse(wide).get_submodule("blocks.0.mlp.fc1")
    figure, axes = plt.subplots(figsize=(7.2, 4.9))
    draw_chains(axes, chains, bottom=2.1)
    axes.text(2.4, 0.2, f"in training: {count(pyramid)} parameters", ha="center")
    draw_arrow(axes, (5.3, 3.8), (6.9, 3.8))
    axes.text(6.1, 3.95, "iso.fuse", ha="center", va="bottom", family="monospace")
    axes.text(8.2, 0.85, "input", ha="center", va="center")
    draw_arrow(axes, (8.2, 1.05), (8.2, 3.5))
    draw_box(axes, 8.2, 3.8, "Linear", LINEAR, width=1.3)
    draw_arrow(axes, (8.2, 4.1), (8.2, 7.9))
    axes.text(8.2, 8.05, "output", ha="center", va="bottom")
    axes.text(8.2, 0.2, f"fused: {count(fused)} parameters", ha="center")
    clear_axes(axes, 10.2, 8.5)
    return figure


def record_stages(net: nn.Module, images: Tensor) -> list[tuple[int, ...]]:
    """Return the shape (C, H, W) after the stem and after every stage."""
    with torch.no_grad():
        return [
            tuple(level.shape[1:])
            for level in net.forward_intermediates(images, intermediates_only=True)
        ]


def coatnet_diagram() -> Any:
    """Return the figure of CoAtNet-0's stages: kind, width and grid at 224 px, and share of parameters."""
    net = timm.create_model("coatnet_0").eval()
    shapes = record_stages(net, torch.zeros(1, 3, 224, 224))
    kinds = ["convolution", "MBConv", "MBConv", "relative attention", "relative attention"]
    figure, axes = plt.subplots(figsize=(7.6, 3.0))
    x = 0.9
    draw_arrow(axes, (0.05, 2.2), (0.3, 2.2))
    for number, ((channels, height, width), kind) in enumerate(zip(shapes, kinds, strict=True)):
        side = 0.5 + 2.6 * height / shapes[0][1]
        draw_box(
            axes, x, 2.2, "", PLAIN if "attention" in kind else LINEAR, width=1.15, height=side
        )
        axes.text(
            x,
            2.2,
            f"S{number}\n{height} x {width}\n{channels} ch",
            ha="center",
            va="center",
            fontsize=8,
        )
        axes.text(x, 0.35, kind.replace(" ", "\n"), ha="center", va="center", fontsize=8)
        draw_arrow(axes, (x + 0.6, 2.2), (x + 0.95, 2.2))
        x += 1.55
    axes.text(x - 0.5, 2.2, "pool,\nclassifier", va="center", fontsize=8)
    clear_axes(axes, x + 0.6, 4.0)
    return figure
