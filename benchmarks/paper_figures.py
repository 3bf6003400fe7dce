"""Small versions of the papers' figures, for docs/guides/figures.md.

    python benchmarks/paper_figures.py [NAME ...] [--runs runs/figures]

Networks are narrow, data is digits (scikit-learn's) or a part of CIFAR-10 (ISOMORPH_DATA), photographs
(ISOMORPH_DATA/imagenet_samples) for convit-3 and convit-7, and each run has one seed:
the pictures show what a command draws, not what the papers found. Runs that are there are not repeated.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from matplotlib.colors import LogNorm

import isomorph as iso
from docs_pictures import FOLDER, STYLE, as_batch, maps_figure, maps_from_query, read_image
from isomorph.analysis import branch_similarity, logit_stats, nonlocality
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.recipes.tables import find_table
from isomorph.lab.training.run.log import read_log
from isomorph.models.input_sizes import evaluation_config

GRID = (14, 14)
# A ViT of TDRL that digits train in seconds.
TINY: dict[str, Any] = dict(img_size=24, patch_size=4, embed_dim=48, depth=6, num_heads=4)


def run_of(runs: Path, name: str, recipe: str, *changes: str) -> Path:
    """Train a recipe with changes, if its run is not there, and return the run's folder."""
    folder = runs / name
    if not (folder / "model.safetensors").is_file():
        iso.train(iso.load_recipe(recipe, [*changes, f"out={folder}"]))
    return folder


def tdrl_run(runs: Path, name: str, monitor: bool = False, **arguments: Any) -> Path:
    """Train TINY with pyramids on digits."""
    kwargs = json.dumps(TINY | arguments)
    changes = ["model.name=tdrl_vit_ti", f"model.kwargs={kwargs}", "epochs=1", "optim.lr=1e-3"]
    if monitor:
        changes.append("monitor_every=4")
    return run_of(runs, name, "digits_vit", *changes)


def digits(model: torch.nn.Module, count: int = 256) -> torch.Tensor:
    """Return test images of the digits as a batch that the model was trained on."""
    config = evaluation_config(model) | dict(crop_pct=1.0, crop_mode="squash")
    batch, *_ = next(iter(eval_loader(open_source("digits", "test", None, None), config, count)))
    return batch


def with_grids(figure: Any) -> Any:
    for axes in figure.axes:
        axes.grid()
    return figure


def by_epoch(cell: Any, history: Mapping[str, Any], epochs: Sequence[int], title: str) -> None:
    """Draw the mean over heads of each layer along training."""
    shades = plt.get_cmap("viridis")(np.linspace(0.9, 0.15, len(history)))
    for (name, values), colour in zip(history.items(), shades, strict=True):
        heads = torch.as_tensor(np.asarray(values, dtype=float))
        cell.plot(epochs, heads.nanmean(-1), "o-", ms=3, color=colour, label=name)
        if heads.ndim == 2:
            cell.plot(epochs, heads, lw=0.4, alpha=0.5, color=colour)
    cell.set_title(title)
    cell.set_xlabel("epoch")
    cell.grid()


def tcnn_1(runs: Path) -> Any:
    """T-CNN Fig. 1: robustness against accuracy, the printed numbers."""
    rows = find_table("T-CNN Fig. 1").rows
    figure, axes = plt.subplots(1, 3, figsize=(8.2, 2.6), layout="constrained")
    columns = {"imagenet_c": "ImageNet-C", "imagenet_a": "ImageNet-A", "imagenet_r": "ImageNet-R"}
    for cell, (column, title) in zip(axes, columns.items(), strict=True):
        for part in ("Transformers", "CNNs", "T-CNNs"):
            own = [row.values for row in rows if row.values["part"] == part]
            cell.plot(
                [row["top1"] for row in own], [row[column] for row in own], "o", ms=4, label=part
            )
        cell.set(title=title, xlabel="ImageNet-1k top-1 (%)")
        cell.grid()
    axes[0].set_ylabel("top-1 (%)")
    axes[0].legend()
    return figure


@torch.no_grad()
def convit_3(runs: Path) -> Any:
    """ConViT Fig. 3: an untrained layer, and positional attention at two strengths, four heads."""
    torch.manual_seed(0)
    image = read_image(224)
    vit = timm.create_model("vit_tiny_patch16_224", num_heads=4).eval()
    rows = {}
    models = {"untrained SA": vit}
    for strength in (1.0, 2.0):
        rule = iso.AttentionToGPSA(init="paper", locality=strength, gate=20.0)
        models[f"strength {strength:g}"] = iso.recast(vit, rule, where="blocks.0.attn").eval()
    for title, model in models.items():
        maps = iso.attention_maps(model, as_batch(image, model), where="blocks.0.attn")[
            "blocks.0.attn"
        ][0]
        rows[title] = maps_from_query(maps, GRID, prefix=1)
    return maps_figure(image, rows)


def convit_runs(runs: Path) -> dict[str, Path]:
    """Train a ViT and a ConViT on digits, with a model saved every epoch."""
    return {
        "ViT": run_of(runs, "digits_vit", "digits_vit", "keep_every=1"),
        "ConViT": run_of(runs, "digits_convit", "digits_convit", "keep_every=1"),
    }


def convit_5(runs: Path) -> Any:
    """ConViT Fig. 5: nonlocality of every layer along training, 360 test images."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), sharey=True, layout="constrained")
    for cell, (title, folder) in zip(axes, convit_runs(runs).items(), strict=True):
        saved = sorted(
            folder.glob("epoch-*.safetensors"), key=lambda path: int(path.stem.split("-")[1])
        )
        models = list(map(iso.load, saved))
        found = [nonlocality(model, digits(model, 360)) for model in models]
        layers = {name: [each[name].mean().item() for each in found] for name in found[0]}
        series = {name: [[value] for value in values] for name, values in layers.items()}
        by_epoch(cell, series, range(1, len(saved) + 1), title)
    axes[0].set_ylabel("nonlocality, grid steps")
    axes[1].legend(fontsize=7)
    return figure


def convit_6(runs: Path) -> Any:
    """ConViT Fig. 6: gates of every head along training, their mean in bold."""
    history = iso.training.gating_history(convit_runs(runs)["ConViT"])
    figure, cell = plt.subplots(figsize=(4.4, 2.8), layout="constrained")
    by_epoch(cell, history.gates, history.epochs, "gate: share of positional attention")
    cell.legend(fontsize=7)
    return figure


@torch.no_grad()
def convit_7(runs: Path) -> Any:
    """ConViT Fig. 7: maps of an untrained network in logarithmic colours."""
    torch.manual_seed(0)
    image = read_image(224)
    model = timm.create_model("convit_ti").eval()
    figure, axes = plt.subplots(2, 5, figsize=(5.4, 2.4))
    for line, layer in zip(axes, ("blocks.1.attn", "blocks.9.attn"), strict=True):
        maps = iso.attention_maps(model, as_batch(image, model), where=layer)[layer][0]
        line[0].imshow(image)
        for cell, values in zip(line[1:], maps_from_query(maps, GRID).maps, strict=True):
            cell.imshow(values, cmap="magma", norm=LogNorm(values.max() / 255, values.max()))
        for cell in line:
            cell.axis("off")
    return figure


def top1_by_epoch(folder: Path) -> list[float]:
    """Return the test accuracy of a run after each epoch."""
    rows = read_log(folder / "log.jsonl")
    return [row["top1"] for row in rows if row["epoch"]]


def gpsa_run(runs: Path, layers: int, strength: float) -> Path:
    """Train a ViT on digits whose first layers are GPSA of a locality strength."""
    where = f"blocks.[0-{layers - 1}].attn"
    changes = [f"model.recast.where={where}", f"model.recast.locality={strength}"]
    return run_of(runs, f"digits_gpsa_{layers}_{strength:g}", "digits_convit", *changes)


def convit_8(runs: Path) -> Any:
    """ConViT Fig. 8: top-1 by locality strength and number of GPSA layers, and along training."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), layout="constrained")
    strengths = (0.5, 1.0, 2.0)
    plain = top1_by_epoch(convit_runs(runs)["ViT"])
    axes[0].axhline(plain[-1], lw=1, ls="--", color="grey", label="no GPSA")
    axes[1].plot(range(1, len(plain) + 1), plain, "--", color="grey")
    for layers in (1, 2, 3):
        tops = {strength: top1_by_epoch(gpsa_run(runs, layers, strength)) for strength in strengths}
        axes[0].plot(
            strengths,
            [tops[strength][-1] for strength in strengths],
            "o-",
            ms=3,
            label=f"{layers} GPSA",
        )
        axes[1].plot(range(1, len(plain) + 1), tops[1.0], "o-", ms=3)
    axes[0].set(title="a) after training", xlabel="locality strength", ylabel="test top-1 (%)")
    axes[1].set(title="b) along training, strength 1", xlabel="epoch")
    axes[0].legend(fontsize=7)
    return with_grids(figure)


MLP = ["blocks.*.mlp.fc?"]


def tdrl_2c(runs: Path) -> Any:
    """TDRL Fig. 2c: similarity of the branches of a pyramid, and of equal branches."""
    figure, axes = plt.subplots(1, 2, figsize=(5.4, 2.5), layout="constrained")
    for cell, layout in zip(axes, ("P-W3S", "R-D1W3S"), strict=True):
        folder = tdrl_run(runs, f"tdrl_{layout}", layout=layout, where=MLP)
        model = iso.load(folder / "model.safetensors")
        found = branch_similarity(model, digits(model))
        mean = torch.stack(list(found.values())).mean(0)[:3, :3]
        cell.imshow(mean, vmin=0, vmax=1, cmap="viridis")
        for (row, column), value in np.ndenumerate(mean.numpy()):
            cell.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="white" if value < 0.6 else "black",
            )
        cell.set(title=f"{layout}, mean of all FFN layers", xticks=range(3), yticks=range(3))
    return figure


QK = ["blocks.*.attn.q", "blocks.*.attn.k"]


def tdrl_3(runs: Path) -> Any:
    """TDRL Fig. 3 a to c: largest logits and attention by block, and along training."""
    plain = tdrl_run(runs, "tdrl_plain", monitor=True, layout="plain")
    folders = {"baseline": plain}
    for rectify in ("none", "rescale", "batchnorm"):
        folders[rectify] = tdrl_run(
            runs,
            f"tdrl_{rectify}",
            monitor=True,
            layout="R-D1W4",
            rectify=rectify,
            where=QK,
            weight_init="mae",
        )
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.6), layout="constrained")
    for name, folder in folders.items():
        model = iso.load(folder / "model.safetensors")
        stats = logit_stats(model, digits(model))
        blocks = range(1, len(stats) + 1)
        axes[0].plot(
            blocks, [each.max_logit.mean() for each in stats.values()], "o-", ms=3, label=name
        )
        axes[1].plot(blocks, [each.max_attention.mean() for each in stats.values()], "o-", ms=3)
        rows = read_log(folder / "monitor.jsonl")
        tops = [max(row["max_logit"].values()) for row in rows]
        axes[2].plot([row["step"] for row in rows], tops)
    axes[0].set(title="a) largest logit", xlabel="block")
    axes[1].set(title="b) largest attention", xlabel="block")
    axes[2].set(title="c) largest logit of all blocks", xlabel="step")
    axes[0].legend(fontsize=7)
    return with_grids(figure)


SHAPES: dict[str, tuple[str, list[int], list[int]]] = {
    "C-C-C-C": ("c_c_c_c", [2, 1, 1, 1, 1], [16, 16, 32, 64, 64]),
    "C-C-C-T": ("c_c_c_t", [2, 1, 1, 1, 1], [16, 16, 32, 64, 64]),
    "C-C-T-T": ("c_c_t_t", [2, 1, 1, 1, 1], [16, 16, 32, 64, 64]),
    "C-T-T-T": ("c_t_t_t", [2, 1, 1, 1, 1], [16, 16, 32, 64, 64]),
    "ViT_REL": ("vit_rel", [1, 3], [64, 64]),
}


def coatnet_1(runs: Path) -> Any:
    """CoAtNet Fig. 1: training loss and test accuracy of five layouts, on 500 images of CIFAR-10."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), layout="constrained")
    small = [
        "data.source=cifar10",
        "data.size=[64,64]",
        "data.fraction=0.01",
        "data.test_images=200",
    ]
    small += [
        "data.batch_size=50",
        "data.workers=0",
        "epochs=3",
        "optim.warmup_epochs=1",
        "amp=none",
    ]
    for title, (name, depths, widths) in SHAPES.items():
        shape = [f"model.kwargs.depths={depths}", f"model.kwargs.widths={widths}"]
        folder = run_of(runs, f"coatnet_{name}", f"coatnet_layout_{name}", *small, *shape)
        rows = read_log(folder / "log.jsonl")
        rows = [row for row in rows if row["epoch"]]
        epochs = [row["epoch"] for row in rows]
        axes[0].plot(epochs, [row["loss"] for row in rows], "o-", ms=3, label=title)
        axes[1].plot(epochs, [row["top1"] for row in rows], "o-", ms=3)
    axes[0].set(xlabel="epoch", ylabel="training loss")
    axes[1].set(xlabel="epoch", ylabel="test top-1 (%)")
    axes[0].legend(fontsize=7)
    return with_grids(figure)


FIGURES: dict[str, Callable[[Path], Any]] = {
    "tcnn-1": tcnn_1,
    "convit-3": convit_3,
    "convit-5": convit_5,
    "convit-6": convit_6,
    "convit-7": convit_7,
    "convit-8": convit_8,
    "tdrl-2c": tdrl_2c,
    "tdrl-3": tdrl_3,
    "coatnet-1": coatnet_1,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"))
    options = parser.parse_args()
    for name in options.names or FIGURES:
        with plt.style.context(
            STYLE | {"axes.prop_cycle": plt.cycler("color", plt.get_cmap("tab10").colors)}
        ):
            figure = FIGURES[name](options.runs)
            kind = "png" if name in ("convit-3", "convit-7") else "svg"
            figure.savefig(FOLDER / f"figure-{name}.{kind}", dpi=110, bbox_inches="tight")
            plt.close(figure)
            print(name, flush=True)


if __name__ == "__main__":
    main()
