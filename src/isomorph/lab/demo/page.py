"""The page of the demo."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from isomorph.analysis import attention_spans, gates
from isomorph.analysis.cost import count_macs
from isomorph.lab.data.loaders import mean_and_std
from isomorph.lab.demo.run import LAYERS, SHOWN, VERIFIED, Demo
from isomorph.lab.report.attention_viewer import (
    Viewer,
    ViewerModel,
    build_viewer,
    capture_layer_maps,
)
from isomorph.lab.report.charts import Chart, Dots, Line, Panel
from isomorph.lab.report.html import Section, write_page
from isomorph.lab.report.page_images import PageImage
from isomorph.layers import GPSA, GPSA2d


def write_demo_page(demo: Demo, path: Path) -> int:
    """Write the page of a demo; return its size in bytes. Raises: UserError when it cannot be written."""
    sections = [_equality_section(demo), _attention_section(demo), _start_section(demo)]
    title = "A CNN becomes attention, and a ViT starts as a convolution"
    lead = f"{demo.equality} {demo.start}"
    footer = (
        f"{demo.seconds:.0f} s on one thread, torch {torch.__version__}. Made by:\n"
        f"isomorph demo --out {shlex.quote(str(path))}"
    )
    return write_page(path, title, lead, sections, footer)


def _equality_section(demo: Demo) -> Section:
    size = demo.config["input_size"]
    ratio = count_macs(demo.tcnn, size) / count_macs(demo.cnn.model, size)
    text = (
        f"A CNN was trained on digits ({demo.cnn.top1[-1]:.1f}% top-1). The six convolutions of its last stage "
        f"({LAYERS}) were then recast as gated self-attention, without training. The outputs of both networks were "
        f"compared on {VERIFIED} test images and on cropped ones, in two precisions and layer by layer, and their "
        f"classes on all test images. The T-CNN needs {ratio:.2f} times the CNN's MACs: it is for training "
        "further, not for speed."
    )
    return Section("The same function", text, finding=demo.equality, listing=str(demo.report))


def _attention_section(demo: Demo) -> Section:
    finding = (
        f"A head of the T-CNN gives {demo.weight:.1%} of its attention to one position, as a convolution does "
        "(mean over layers, heads and patches)."
    )
    guide = (
        "A 3 x 3 convolution is attention with nine heads: each attends to one neighbour of the patch, or to the "
        "patch itself. Gate 1.00 means that a head attends by position only."
    )
    return Section(
        "What each head attends to",
        "Point at a patch of the digit, or choose another layer.",
        finding=finding,
        guide=guide,
        viewer=_viewer(demo, {"T-CNN": demo.tcnn}),
    )


def _viewer(demo: Demo, models: Mapping[str, nn.Module]) -> Viewer | None:
    batch = demo.images[:SHOWN]
    mean, std = mean_and_std(demo.config)
    images = []
    for number, image in enumerate(batch, 1):
        images.append(PageImage(f"digit {number}", image * std + mean))
    shown = []
    for name, model in models.items():
        by_layer = {}
        if any(isinstance(layer, GPSA | GPSA2d) for layer in model.modules()):
            by_layer = _as_lists(gates(model))
        maps, _ = capture_layer_maps(model, batch)
        shown.append(ViewerModel(name, maps, by_layer))
    return build_viewer(shown, images)


def _as_lists(values: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {layer: heads.tolist() for layer, heads in values.items()}


def _start_section(demo: Demo) -> Section:
    lines = {}
    for vit in demo.vits:
        epochs = range(1, len(vit.top1) + 1)
        lines[vit.name] = Line(epochs, vit.top1)
    conv = demo.vits[-1]
    gates_of_heads = _as_lists(gates(conv.model))
    spans_of_heads = _as_lists(attention_spans(conv.model))
    charts: list[Chart] = [
        Panel("Top-1 on the test images", "epoch", "%", lines),
        Dots("Gates", "sigma(gate)", {conv.name: gates_of_heads}, 1.0),
        Dots("Spans", "1 / locality", {conv.name: spans_of_heads}),
    ]
    points = 100 / len(demo.images)
    text = (
        "Two ViTs with the same images, epochs and learning rate; they differ in their first two attention layers, "
        "which start as convolutions in one of them (ConViT). One seed; one image is "
        f"{points:.2f} points. A lead here is a faster start: docs/training.md has what longer "
        "training makes of it, and another seed."
    )
    guide = (
        "Gate: the share of position in a head's attention, 1 for position only. Span: how far from its centre "
        "a head attends by position, in patches. The maps show what the heads of both ViTs attend to after training."
    )
    return Section(
        "A start as convolutions",
        text,
        demo.table(),
        finding=demo.start,
        guide=guide,
        charts=charts,
        viewer=_viewer(demo, {vit.name: vit.model for vit in demo.vits}),
    )
