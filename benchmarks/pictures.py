"""The two pictures of the README: what heads of a T-CNN attend to, and the page of `isomorph analyze`.

    isomorph train cifar_paper --data.fraction 0.2 --epochs 4 --out runs/pictures        # some 10 minutes on 2 cores
    python benchmarks/pictures.py runs/pictures/model.safetensors

The image is read from $ISOMORPH_DATA/imagenet_samples. The picture of the page needs Chromium.
"""

import argparse
import copy
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import isomorph as iso
from docs_pictures import FOLDER, STYLE, as_batch, read_image

LAYER = "layer3.0.conv1"
"""The layer that is shown; its queries are a quarter of the image, its keys half of it."""
HEADS = {"head 2 (up)": 1, "head 4 (left)": 3}
SIDE = 64
"""Side of the image in pixels."""
QUERY = (0.32, 0.68)
"""Row and column of the query as fractions of the image: the pelican's neck."""
CNN_RECAST = (iso.ConvToGPSA(), "layer3.*.conv?")


def maps_of(model: nn.Module, batch: Tensor, gate: float | None = None) -> Tensor:
    """Return what every head of LAYER attends to from QUERY: all of it, or with a high or low `gate` one half.

    Shape: batch (1, 3, H, W) -> (heads, h, w)
    """
    model = copy.deepcopy(model).eval()
    if gate is not None:
        torch.nn.init.constant_(model.get_submodule(LAYER).gate, gate)
    return iso.analysis.attention_from(model, batch, QUERY, where=LAYER)[LAYER][0]


def draw_map(cell: Any, values: np.ndarray, title: str = "") -> None:
    """Draw one map on its own colour scale, or an image."""
    cell.imshow(
        values, cmap="magma", interpolation="nearest", extent=(0, 1, 1, 0), vmin=0 if values.ndim == 2 else None
    )
    cell.set_title(title, fontsize=8, pad=4)
    cell.set_xticks([])
    cell.set_yticks([])


def frame_query(cell: Any, grid: tuple[int, int]) -> None:
    """Frame the pixels that the query stands for."""
    row, column = (int(part * size) for part, size in zip(QUERY, grid, strict=True))
    corner = (column / grid[1], row / grid[0])
    cell.add_patch(plt.Rectangle(corner, 1 / grid[1], 1 / grid[0], fill=False, ec="#ff3b30", lw=1.2))


def heads_figure(cnn: nn.Module, tcnn: nn.Module) -> Any:
    """Return a figure of two heads (rows): of the convolution, and both halves of the fine-tuned T-CNN's."""
    batch = as_batch(read_image(SIDE), cnn)
    convolution = maps_of(iso.recast(cnn, CNN_RECAST[0], where=CNN_RECAST[1]), batch)
    position, content = maps_of(tcnn, batch, 20.0), maps_of(tcnn, batch, -20.0)
    shares = iso.gates(tcnn)[LAYER].tolist()
    figure, axes = plt.subplots(len(HEADS), 4, figsize=(7.6, 2.0 * len(HEADS)))
    for line, (name, head) in zip(axes, HEADS.items(), strict=True):
        draw_map(line[0], read_image(4 * SIDE))
        draw_map(line[1], convolution[head].numpy(), "convolution")
        draw_map(line[2], position[head].numpy(), f"T-CNN, position: {shares[head]:.0%}")
        draw_map(line[3], content[head].numpy(), f"T-CNN, content: {1 - shares[head]:.0%}")
        line[0].set_ylabel(name, fontsize=8)
        for cell in line:
            frame_query(cell, (SIDE // 4, SIDE // 4))
    figure.subplots_adjust(wspace=0.06, hspace=0.2)
    return figure


def photograph_page(cnn: nn.Module, checkpoint: Path, path: Path) -> None:
    """Write the page of the exact recast against the fine-tuned T-CNN, and photograph its top."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        raise SystemExit("needs Chromium for the picture of the page; on Debian: apt-get install chromium")
    with TemporaryDirectory() as folder:
        photo, exact, page = (Path(folder) / name for name in ("pelican.png", "recast.safetensors", "page.html"))
        Image.fromarray((read_image(256) * 255).astype(np.uint8)).save(photo)
        iso.save(iso.recast(cnn, CNN_RECAST[0], where=CNN_RECAST[1]), exact)
        tuned = Path(shutil.copy(checkpoint, Path(folder) / "fine-tuned.safetensors"))
        models = [str(exact), "--against", str(tuned), "--size", "96"]
        command = [sys.executable, "-m", "isomorph", "analyze", *models, "--image", str(photo), "--out", str(page)]
        subprocess.run(command, check=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        picture = [f"--screenshot={path}", "--window-size=1100,1500", page.as_uri()]
        subprocess.run([browser, *options, *picture], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    checkpoint = parser.parse_args().checkpoint
    cnn, tcnn = timm.create_model("cifar_resnet20", pretrained=True).eval(), iso.load(checkpoint)
    with plt.style.context(STYLE):
        figure = heads_figure(cnn, tcnn)
        figure.savefig(FOLDER / "heads.png", dpi=110, bbox_inches="tight", transparent=True)
        plt.close(figure)
    photograph_page(cnn, checkpoint, FOLDER / "analyze.png")
    for name in ("heads.png", "analyze.png"):
        picture = Image.open(FOLDER / name).convert("RGBA")
        picture.quantize(160, Image.Quantize.FASTOCTREE).save(FOLDER / name, optimize=True)
        print(f"wrote {FOLDER / name}, {(FOLDER / name).stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
