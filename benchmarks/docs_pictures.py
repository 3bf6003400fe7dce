"""The pictures of the documentation and the README, made from real images, real layers and the stored results.

    python benchmarks/docs_pictures.py [NAME ...] [--runs runs/docs]

Without names all pictures are made. Needs ISOMORPH_DATA with imagenet_samples, cifar10 and weights. The pictures of
T-CNN train short runs (some minutes on two cores); they resume, and a second call only draws. That of the page of
`isomorph analyze` needs Chromium.
"""

import argparse
import copy
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import isomorph as iso
from docs_diagrams import INK, LINEAR, NORM, PLAIN, coatnet_diagram, pyramid_diagram
from evidence import STUDIES, tested

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
RESULTS = Path(__file__).parent / "results"
PELICAN = ("imagenet_samples-000.tar", "0144_n02051845_pelican.jpg")
QUERY: tuple[float, float] = (0.42, 0.62)
"""The query of all maps, as fractions of height and width: the pelican's neck."""
STYLE: dict[str, Any] = {
    **dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        INK,
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "grid.alpha": 0.2,
    "svg.fonttype": "none",
    "axes.prop_cycle": plt.cycler("color", (LINEAR, NORM, PLAIN)),
    "axes.axisbelow": True,
}
"""matplotlib's style of all pictures: no box, a transparent background."""


class QueryMaps(NamedTuple):
    """The map of every head from one query, and the query's row and column. Shape: maps (heads, h, w)"""

    maps: np.ndarray
    query: tuple[int, int]


def read_image(size: int) -> np.ndarray:
    """Return the middle of a real photograph. Shape: -> (size, size, 3) in 0..1"""
    shard, name = PELICAN
    with tarfile.open(
        Path(os.environ.get("ISOMORPH_DATA", "data")) / "imagenet_samples" / shard
    ) as archive:
        data = archive.extractfile(name)
        assert data is not None
        picture = Image.open(io.BytesIO(data.read())).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return np.asarray(picture.crop((left, top, left + side, top + side)).resize((size, size))) / 255


def as_batch(image: np.ndarray, model: nn.Module) -> Tensor:
    """Return an image as the model's input. Shape: (H, W, 3) -> (1, 3, H, W)"""
    config = model.pretrained_cfg  # type: ignore[union-attr]
    mean, std = torch.tensor(config["mean"]), torch.tensor(config["std"])
    return ((torch.tensor(image, dtype=torch.float32) - mean) / std).permute(2, 0, 1)[None]


def maps_from_query(maps: Tensor, grid: tuple[int, int], prefix: int = 0) -> QueryMaps:
    """Return the map of every head from the query. Shape: maps (heads, queries, keys), prefix tokens first"""
    row, column = int(QUERY[0] * grid[0]), int(QUERY[1] * grid[1])
    values = maps[:, prefix + row * grid[1] + column, prefix:].unflatten(-1, grid)
    return QueryMaps(values.numpy(), (row, column))


def maps_figure(image: np.ndarray, rows: Mapping[str, QueryMaps]) -> Any:
    """Return a figure of maps by head (columns), next to the image with the query framed. Shape: image (H, W, 3)"""
    heads = max(len(row.maps) for row in rows.values())
    figure, axes = plt.subplots(
        len(rows), heads + 1, figsize=(0.92 * (heads + 1), 1.0 * len(rows)), squeeze=False
    )
    for number, cell in enumerate(axes[0, 1:], 1):
        cell.set_title(f"head {number}", fontsize=7, pad=3)
    for line, (name, (maps, (row, column))) in zip(axes, rows.items(), strict=True):
        for cell, values in zip(line, [image, *maps], strict=False):
            cell.imshow(
                values,
                cmap="magma",
                vmin=0,
                interpolation="nearest",
                extent=(0, maps.shape[2], maps.shape[1], 0),
            )
            remove_ticks(cell)
        line[0].add_patch(plt.Rectangle((column, row), 1, 1, fill=False, ec="#ff3b30", lw=1.2))
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    figure.subplots_adjust(wspace=0.06, hspace=0.08)
    return figure


def bars_figure(title: str, label: str, series: Mapping[str, Mapping[str, float]]) -> Any:
    """Return a figure of bars: {series: {group: value}}, all with the same groups."""
    groups = list(next(iter(series.values())))
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(4.6, (0.14 * len(series) + 0.1) * len(groups) + 0.9))
    for i, (name, values) in enumerate(series.items()):
        middles = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * height
        axes.barh(middles, [values[group] for group in groups], 0.9 * height, label=name)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=label)
    axes.grid(axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@torch.no_grad()
def tcnn_maps(model: nn.Module, layer: str, image: np.ndarray) -> QueryMaps:
    """Return the maps of a recast convolution, without the padding that it may attend to."""
    model.eval()
    side = image.shape[0] // 4
    maps = iso.attention_maps(model, as_batch(image, model), where=layer)[layer][0]
    padded = int(maps.shape[-1] ** 0.5)
    border = (padded - side) // 2
    inner = maps.unflatten(-1, (padded, padded))[
        ..., border : padded - border, border : padded - border
    ]
    return maps_from_query(inner.flatten(-2), (side, side))


def trained_run(runs: Path, fraction: float = 0.05) -> Path:
    """Fine-tune a T-CNN from the paper's start on a part of CIFAR-10, if it is not there yet; return its folder."""
    changes = ["epochs=4", f"data.fraction={fraction}", "keep_every=1", "evaluate_every=4"]
    iso.train(iso.load_recipe("cifar_paper", [*changes, f"out={runs / f'cifar_paper_{fraction}'}"]))
    return runs / f"cifar_paper_{fraction}"


def tcnn_heads(runs: Path) -> Any:
    """Return the maps of a convolution's nine heads: exact, at the paper's start, and fine-tuned from there."""
    layer, image = "layer3.2.conv2", read_image(64)
    cnn = timm.create_model("cifar_resnet20", pretrained=True)
    exact, paper = (
        iso.recast(cnn, iso.ConvToGPSA(init=init), where="layer3.*.conv?")
        for init in ("exact", "paper")
    )
    models = {
        "recast, exact": exact,
        "recast, paper's start": paper,
        "after fine-tuning": iso.load(trained_run(runs) / "model.safetensors"),
    }
    return maps_figure(
        image, {title: tcnn_maps(model, layer, image) for title, model in models.items()}
    )


@torch.no_grad()
def readme_heads(runs: Path) -> Any:
    """Return the maps of two heads (rows): of a convolution, and both halves of those of the fine-tuned T-CNN."""
    layer, query, cnn = (
        "layer3.0.conv1",
        (0.32, 0.68),
        timm.create_model("cifar_resnet20", pretrained=True).eval(),
    )
    tcnn, batch = (
        iso.load(trained_run(runs, 0.2) / "model.safetensors").eval(),
        as_batch(read_image(64), cnn),
    )
    halves = [copy.deepcopy(tcnn), copy.deepcopy(tcnn)]
    for half, gate_value in zip(halves, (20.0, -20.0), strict=True):
        nn.init.constant_(half.get_submodule(layer).gate, gate_value)  # type: ignore[arg-type]
    models = [iso.recast(cnn, iso.ConvToGPSA(), where="layer3.*.conv?"), *halves]
    maps = [
        iso.analysis.attention_from(model, batch, query, where=layer)[layer][0].numpy()
        for model in models
    ]
    figure, axes = plt.subplots(2, 4, figsize=(7.6, 4.0))
    for line, (name, head) in zip(
        axes, {"head 2 (up)": 1, "head 4 (left)": 3}.items(), strict=True
    ):
        share = iso.gates(tcnn)[layer][head].item()
        titles = (
            "",
            "convolution",
            f"T-CNN, position: {share:.0%}",
            f"T-CNN, content: {1 - share:.0%}",
        )
        pictures = [read_image(256), *(each[head] for each in maps)]
        for cell, values, title in zip(line, pictures, titles, strict=True):
            draw_map(cell, values, title, (16, 16), query)
        line[0].set_ylabel(name, fontsize=8)
    figure.subplots_adjust(wspace=0.06, hspace=0.2)
    return figure


def analyze_page(runs: Path) -> Image.Image:
    """Return a screenshot of the page of `isomorph analyze`: the exact recast against the fine-tuned T-CNN."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        raise SystemExit(
            "needs Chromium for the picture of the page; on Debian: apt-get install chromium"
        )
    cnn, tuned = timm.create_model("cifar_resnet20", pretrained=True).eval(), trained_run(runs, 0.2)
    with TemporaryDirectory() as name:
        folder = Path(name)
        Image.fromarray((read_image(256) * 255).astype(np.uint8)).save(folder / "pelican.png")
        iso.save(
            iso.recast(cnn, iso.ConvToGPSA(), where="layer3.*.conv?"), folder / "recast.safetensors"
        )
        shutil.copy(tuned / "model.safetensors", folder / "fine-tuned.safetensors")
        models = ["recast.safetensors", "--against", "fine-tuned.safetensors", "--size", "96"]
        command = [
            sys.executable,
            "-m",
            "isomorph",
            "analyze",
            *models,
            "--image",
            "pelican.png",
            "--out",
            "page.html",
        ]
        subprocess.run(command, check=True, cwd=folder)
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=8000",
        ]
        picture = [
            f"--screenshot={folder / 'page.png'}",
            "--window-size=1100,1500",
            (folder / "page.html").as_uri(),
        ]
        subprocess.run([browser, *options, *picture], check=True, capture_output=True)
        return (
            Image.open(folder / "page.png").convert("RGBA").quantize(160, Image.Quantize.FASTOCTREE)
        )


def gates_and_spans(runs: Path) -> Any:
    """Return gates and spans of the six recast layers along the training of a T-CNN from the paper's start."""
    folder = trained_run(runs)
    tcnn = iso.load(folder / "model.safetensors")
    fresh = iso.recast(
        timm.create_model("cifar_resnet20"), iso.ConvToGPSA(init="paper"), where="layer3.*.conv?"
    )
    history = iso.training.gating_history(folder)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8))
    shades = plt.get_cmap("viridis")(np.linspace(0.9, 0.15, len(history.gates)))
    starts = (iso.gates(fresh), iso.analysis.attention_spans(fresh))
    for cell, start, later in zip(axes, starts, (history.gates, history.spans), strict=True):
        for (name, values), colour in zip(later.items(), shades, strict=True):
            means = [start[name].mean(), *values.nanmean(-1)]
            cell.plot(range(len(means)), means, "o-", ms=3, color=colour, label=name)
        cell.set_xlabel("epoch")
        cell.set_xticks(range(len(history.epochs) + 1))
        cell.grid()
    axes[0].set_title("gate: share of positional attention")
    axes[1].set_title("span of positional attention, grid steps")
    axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    assert set(history.gates) == set(iso.gates(tcnn))
    return figure


@torch.no_grad()
def convit_heads(runs: Path) -> Any:
    """Return the maps of a ViT's first block as timm initialises it, and recast with ConViT's initialisation."""
    torch.manual_seed(0)
    image = read_image(224)
    vit = timm.create_model("vit_tiny_patch16_224", num_heads=4, embed_dim=192).eval()
    convit = iso.recast(vit, iso.AttentionToGPSA(init="paper"), where="blocks.[0-9].attn").eval()
    rows = {}
    for title, model in {"plain ViT": vit, "recast, ConViT's start": convit}.items():
        maps = iso.attention_maps(model, as_batch(image, model), where="blocks.0.attn")[
            "blocks.0.attn"
        ][0]
        rows[title] = maps_from_query(maps, (14, 14), prefix=1)
    return maps_figure(image, rows)


def positional_map(
    locality: float, centre: tuple[float, float], grid: tuple[int, int]
) -> np.ndarray:
    """Return the positional attention of one head from the query, by the layer's own closed form. Shape: -> grid"""
    from isomorph.layers.gated.positions import centred_axis_attention
    from isomorph.layers.grid import axis_offsets

    rows, columns = (
        centred_axis_attention(axis_offsets(n, n), torch.tensor([c]), torch.tensor([locality]))[0]
        for n, c in zip(grid, centre, strict=True)
    )
    row, column = int(QUERY[0] * grid[0]), int(QUERY[1] * grid[1])
    return torch.outer(rows[row], columns[column]).numpy()


def remove_ticks(cell: Any) -> None:
    """Remove ticks and frame from axes that show an image."""
    cell.set(xticks=[], yticks=[])
    cell.spines[:].set_visible(False)


def draw_map(
    cell: Any,
    values: np.ndarray,
    title: str,
    grid: tuple[int, int],
    query: tuple[float, float] = QUERY,
) -> None:
    """Draw a map or an image with the query framed, one position of a grid."""
    cell.imshow(
        values, cmap="magma", vmin=0, interpolation="nearest", extent=(0, grid[1], grid[0], 0)
    )
    row, column = (int(part * size) for part, size in zip(query, grid, strict=True))
    cell.add_patch(plt.Rectangle((column, row), 1, 1, fill=False, ec="#ff3b30", lw=1.2))
    cell.set_title(title, fontsize=8)
    remove_ticks(cell)


def locality(runs: Path) -> Any:
    """Return one head's positional attention at five localities."""
    grid, localities = (14, 14), (20.0, 2.0, 1.0, 0.25, 0.05)
    figure, axes = plt.subplots(1, len(localities) + 1, figsize=(8.2, 1.7))
    axes[0].imshow(read_image(224))
    axes[0].set_title("image", fontsize=8)
    axes[0].axis("off")
    for cell, value in zip(axes[1:], localities, strict=True):
        draw_map(cell, positional_map(value, (0.0, 1.0), grid), f"locality {value:g}", grid)
    return figure


@torch.no_grad()
def gate(runs: Path) -> Any:
    """Return content attention, positional attention, and their mixture at three gates, of one trained head."""
    layer, image = "layer3.2.conv2", read_image(56)
    model = iso.load(trained_run(runs) / "model.safetensors").eval()
    module = model.get_submodule(layer)
    maps = {}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = 30.0 if share == 1 else -30.0 if share == 0 else float(np.log(share / (1 - share)))
        module.gate.fill_(value)  # type: ignore[union-attr, operator]
        maps[share] = tcnn_maps(model, layer, image).maps[8]
    figure, axes = plt.subplots(1, len(maps) + 1, figsize=(8.2, 1.7))
    axes[0].imshow(image)
    axes[0].set_title("image", fontsize=8)
    axes[0].axis("off")
    names = {0.0: "0: content", 1.0: "1: position"}
    for cell, (share, values) in zip(axes[1:], maps.items(), strict=True):
        draw_map(cell, values, f"gate {names.get(share, f'{share:g}')}", (14, 14))
    return figure


@torch.no_grad()
def refiner(runs: Path) -> Any:
    """Return four attention maps of a ConViT, expanded to twelve, convolved, and reduced to four."""
    torch.manual_seed(3)
    image = read_image(224)
    model = timm.create_model("convit_ti").eval()
    maps = iso.attention_maps(model, as_batch(image, model), where="blocks.0.attn")[
        "blocks.0.attn"
    ]  # (1, 4, N, N)
    layer = iso.layers.Refiner(maps.shape[1], ratio=3, kernel_size=3, init="paper")
    expanded = torch.einsum("mi,bijk->bmjk", layer.expand, maps)
    local = torch.nn.functional.conv2d(
        expanded, layer.local()[:, None], padding=1, groups=expanded.shape[1]
    )
    steps = {"4 maps": maps, "expanded": expanded, "convolved": local, "reduced": layer(maps)}
    figure, axes = plt.subplots(4, 4, figsize=(5.0, 5.2))
    for line, (title, maps_after) in zip(axes, steps.items(), strict=True):
        line[0].set_ylabel(title, rotation=0, ha="right", va="center")
        for cell, values in zip(line, maps_from_query(maps_after[0], (14, 14)).maps, strict=False):
            top = float(np.abs(values).max())
            cell.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
            remove_ticks(cell)
    figure.subplots_adjust(wspace=0.06, hspace=0.1)
    return figure


def rows_of(name: str, table: str) -> list[dict[str, Any]]:
    """Return the rows of the first table of a result file whose title contains `table`."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return next(rows for title, rows in found.items() if table in title)


def cost(runs: Path) -> Any:
    """Return the time and the memory of a training step, relative to the plain network, from the stored results."""
    tdrl = rows_of("tdrl_cpu", "Training step")[0]
    networks = {row["form"]: row for row in rows_of("refiner_cpu", "Networks")}
    convit = next(row for row in rows_of("convit_cpu", "Networks") if row["batch"] == 32)
    coatnet = {row["network"]: row for row in rows_of("coatnet_cpu_kept", "Training step")}
    deit, refined = networks["deit_small"], networks["refined_vit_s"]
    timm_row, ours = coatnet["timm, channels last"], coatnet["ours, channels last"]
    times = {
        "ConViT-S / ViT": 1 / convit["step vs DeiT"],
        "ViT-Ti, pyramids / plain": tdrl["closed form"],
        "Refined-ViT-S / DeiT-S": refined["step ms"] / deit["step ms"],
        "CoAtNet-0 / timm's": ours["ms"] / timm_row["ms"],
    }
    memory = {
        "ConViT-S / ViT": convit["saved vs DeiT"],
        "ViT-Ti, pyramids / plain": tdrl["closed MiB an image"] / tdrl["plain MiB an image"],
        "Refined-ViT-S / DeiT-S": refined["MiB an image"] / deit["MiB an image"],
        "CoAtNet-0 / timm's": ours["MiB an image"] / timm_row["MiB an image"],
    }
    figure = bars_figure(
        "A training step", "times the plain network", {"time": times, "memory": memory}
    )
    figure.axes[0].axvline(1, color=INK, lw=1)
    return figure


def robustness(runs: Path) -> Any:
    """Return top-1 by corruption of a CNN and its T-CNN, fine-tuned alike, from the stored results."""
    rows = {row["top-1 (%)"]: row for row in rows_of("robustness_cifar", "top-1")}
    names = list(rows)[: list(rows).index("jpeg_compression") + 1]
    columns = {"CNN": "first of the pairs", "T-CNN": "second of the pairs"}
    series: Mapping[str, Mapping[str, float]] = {
        title: {name: float(rows[name][column]) for name in names}
        for title, column in columns.items()
    }
    return bars_figure("CIFAR-10, mean over five severities", "top-1 (%)", series)


def study_figure(method: str, runs: Path) -> Any:
    """Return test accuracy in a study of docs/evidence.md: one dot per seed, each arm at its best rate."""
    panels: dict[str, dict[str, list[float]]] = {}
    rows = json.loads((RESULTS / f"evidence_{method}.json").read_text())["rows"]
    settings = STUDIES[method].settings
    for setting in settings:
        epochs = next(each.epochs for each in settings if each.images == setting.images)
        panel = panels.setdefault(f"{setting.images:,} images, {epochs} epochs", {})
        for arm in setting.arms:
            own_epochs = setting.longer.get(arm, setting.epochs)
            longer = "" if own_epochs == epochs else f", {own_epochs} epochs"
            tests = [row["test"] for row in tested(setting, arm, rows).values()]
            if tests:
                # the setting with the whole grid of rates comes first
                panel.setdefault(arm + longer, tests)
    panels = {title: arms for title, arms in panels.items() if arms}
    heights = [len(arms) for arms in panels.values()]
    size = (4.2, 0.2 * sum(heights) + 0.55 * len(panels))
    figure, axes = plt.subplots(
        len(panels), figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    for cell, (title, arms) in zip(axes[:, 0], panels.items(), strict=True):
        for line, tests in enumerate(arms.values()):
            cell.plot(tests, [line] * len(tests), "o", ms=4, alpha=0.7, color=LINEAR)
            cell.plot(np.mean(tests), line, "|", ms=11, color=INK)
        cell.set_yticks(range(len(arms)), list(arms), fontsize=7)
        cell.tick_params(axis="x", labelsize=7)
        cell.set(ylim=(len(arms) - 0.4, -0.6))
        cell.set_title(title, loc="left")
        cell.grid()
    axes[-1, 0].set_xlabel("test top-1 (%), one dot per seed; a bar is the mean", fontsize=7)
    return figure


def refiner_by_epoch(runs: Path) -> Any:
    """Return two charts of Refiner's study with 24 blocks, by epoch: similarity of heads, and of first and last block.

    Lines are means over seeds, bands their range.
    """
    rows = json.loads((RESULTS / "evidence_refiner.json").read_text())["rows"]
    setting = STUDIES["refiner"].settings[-1]
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.6), layout="constrained")
    for arm in setting.arms:
        seeds = tested(setting, arm, rows).values()
        heads = np.array([[np.mean(each["heads"]) for each in row["looks"]] for row in seeds])
        # F_k is CKA(k, last) / CKA(first, last), and CKA(last, last) is 1
        layers = np.array([[1 / each["features"][-1] for each in row["looks"]] for row in seeds])
        epochs = [each["epoch"] for each in next(iter(seeds))["looks"]]
        for cell, values in zip(axes, (heads, layers), strict=True):
            (line,) = cell.plot(epochs, values.mean(0), "o-", ms=3, label=arm.partition(",")[0])
            cell.fill_between(
                epochs, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, lw=0
            )
    axes[0].set_title("Cosine of two heads' maps, mean of all blocks", loc="left")
    axes[1].set_title("CKA of the features of block 1 and block 24", loc="left")
    axes[0].legend()
    for cell in axes:
        cell.set_xlabel("epoch")
        cell.grid()
    return figure


PICTURES: dict[str, Callable[[Path], Any]] = {
    "heads.png": readme_heads,
    "analyze.png": analyze_page,
    "pyramid.svg": lambda runs: pyramid_diagram(),
    "coatnet.svg": lambda runs: coatnet_diagram(),
    "tcnn-heads.png": tcnn_heads,
    "gates-spans.svg": gates_and_spans,
    "convit-heads.png": convit_heads,
    "locality.png": locality,
    "gate.png": gate,
    "refiner.png": refiner,
    "refiner-by-epoch.svg": refiner_by_epoch,
    "cost.svg": cost,
    "robustness.svg": robustness,
    **{f"study-{method}.svg": partial(study_figure, method) for method in STUDIES},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--runs", type=Path, default=Path("runs/docs"))
    options = parser.parse_args()
    for name in options.names or PICTURES:
        with plt.style.context(STYLE):
            picture = PICTURES[name](options.runs)
            if isinstance(picture, Image.Image):
                picture.save(FOLDER / name, optimize=True)
            else:
                picture.savefig(FOLDER / name, dpi=110, bbox_inches="tight")
                plt.close(picture)
        print(f"wrote {FOLDER / name}, {(FOLDER / name).stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
