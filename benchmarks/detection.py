"""Detectors: cost of a windowed ViT-Tiny without, with and with fused pyramids; and the AP of a run, epoch by epoch.

    python benchmarks/detection.py                       # cost at 512 px: results/detection.json
    python benchmarks/detection.py --sizes 512 1024      # at both
    python benchmarks/detection.py --whole               # of the whole detector, with neck and heads
    python benchmarks/detection.py --loading bccd        # reading and augmenting images
    isomorph train mask_rcnn_bccd --data.root bccd       # blood cells; then
    python benchmarks/detection.py --run runs/mask_rcnn_bccd   # its log, in results/detection.json too

The backbone is that of `timm.create_model("mask_rcnn")`: windows of 14 x 14 patches, every third block on the whole
map, 12 heads. Times are medians over interleaved passes of one image; of processor time on one thread.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data import IMAGENET_DEFAULT_STD as STD
from torch import nn
from torch.utils.data import DataLoader

import isomorph as iso
from interleave import forward, interleaved, kept_mib, saved_mib, show, update
from isomorph.tasks.detection.dataset import open_split
from isomorph.tasks.detection.transforms import TrainTransform

LAYOUTS = {"plain": "plain", "pyramids": "P-W2S"}
Times = dict[str, float]


def detector(layout: str, size: int, masks: bool = True) -> nn.Module:
    """A detector of 80 classes with the windowed ViT-Tiny."""
    torch.manual_seed(0)
    arguments = {"layout": layout}
    return timm.create_model(
        "mask_rcnn", backbone="tdrl_vit_ti", backbone_kwargs=arguments, num_classes=80, img_size=size, masks=masks
    )


def training_step(module: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward through parameters and image."""
    module.train().zero_grad()
    module(x.requires_grad_())[0].square().mean().backward()


def losses(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The sum of a detector's losses on an image with eight objects."""
    side, device = x.shape[-1] // 8, x.device
    corners = torch.arange(8, device=device)[:, None] * side * torch.tensor([0.5, 0.5], device=device)
    masks = torch.zeros(8, *x.shape[-2:], dtype=torch.uint8, device=device)
    for mask, (left, top) in zip(masks, corners.int().tolist(), strict=True):
        mask[top : top + 2 * side, left : left + 2 * side] = 1
    labels = torch.arange(8, device=device)
    target = {"boxes": torch.cat([corners, corners + 2 * side], 1), "labels": labels, "masks": masks}
    return sum(network.train()(x, [target]).values())


def whole(size: int, rounds: int, warm_up: int) -> list[dict[str, object]]:
    """Seconds a step and an image, and MiB kept for the backward pass, of the whole detector in each form."""
    x = torch.randn(1, 3, size, size)
    training = {name: detector(layout, size) for name, layout in LAYOUTS.items()}
    steps = interleaved(
        {n: lambda m=m: losses(m, x).backward() for n, m in training.items()}, x.device, rounds, warm_up
    )
    kept = {name: kept_mib(network, lambda m=network: losses(m, x)) for name, network in training.items()}
    testing = {name: network.eval() for name, network in training.items()}
    testing["fused"] = iso.fuse(testing["pyramids"])
    passes = interleaved(
        {n: torch.no_grad()(lambda m=m: m.detect(x)) for n, m in testing.items()}, x.device, rounds, warm_up
    )
    return table(size, testing, steps, kept, passes)


def cost(size: int, rounds: int) -> list[dict[str, object]]:
    """Seconds a step and an image, and MiB kept for the backward pass, of the backbone in each form."""
    x = torch.randn(1, 3, size, size)
    training = {name: detector(layout, size, False).backbone for name, layout in LAYOUTS.items()}
    steps = interleaved({n: lambda m=m: training_step(m, x) for n, m in training.items()}, x.device, rounds)
    kept = {name: saved_mib(_First(module.train()), x) for name, module in training.items()}
    testing = {name: module.eval() for name, module in training.items()}
    testing["fused"] = iso.fuse(testing["pyramids"])
    passes = interleaved({name: forward(module, x) for name, module in testing.items()}, x.device, rounds)
    return table(size, testing, steps, kept, passes)


def table(size: int, networks: dict[str, nn.Module], steps: Times, kept: Times, passes: Times) -> list[dict]:
    """A row for each form; the fused one is not trained."""
    return [
        {
            "size": size,
            "form": form,
            "step (s)": steps[form] / 1e3 if form in steps else "-",
            "kept (MiB)": round(kept[form]) if form in kept else "-",
            "inference (s)": passes[form] / 1e3,
            "parameters (M)": sum(p.numel() for p in network.parameters()) / 1e6,
        }
        for form, network in networks.items()
    ]


def loading(root: Path, size: tuple[int, int], workers: int = 2) -> list[dict[str, object]]:
    """Milliseconds of a processor to read and augment an image, and images a second of a loader with workers."""
    source = open_split(root, "train", masks=False)
    source.transform = TrainTransform({"input_size": (3, *size), "mean": MEAN, "std": STD}, (0.8, 1.25), 0.5)
    alone = interleaved({"image": lambda: source[0]}, torch.device("cpu"))["image"]
    batches = iter(DataLoader(source, 4, num_workers=workers, collate_fn=list))
    next(batches)  # the workers have started
    start = time.perf_counter()
    seen = sum(len(batch) for batch in batches)
    rate = seen / (time.perf_counter() - start)
    return [{"size": f"{size[0]} x {size[1]}", "image (ms)": alone, "workers": workers, "images/s": rate}]


class _First(nn.Module):
    """A module that returns the first of its outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


def read_run(folder: Path) -> list[dict[str, object]]:
    """The loss and AP after each epoch that was tested."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    wanted = ("epoch", "loss", "box_ap", "box_ap50", "box_ap75", "box_ap_small", "box_ap_medium", "box_ap_large")
    return [{name: row[name] for name in wanted if name in row} for row in rows if "box_ap" in row]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds of the whole detector that are not counted")
    parser.add_argument("--whole", action="store_true", help="the whole detector, not its backbone alone")
    parser.add_argument("--loading", type=Path, help="folder of BCCD: measure its loading")
    parser.add_argument("--run", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.run:
        tables = {given.run.name: read_run(given.run)}
    elif given.loading:
        tables = {"loading": loading(given.loading, (192, 256))}
    elif given.whole:
        tables = {"detector": [row for size in given.sizes for row in whole(size, given.rounds, given.warm_up)]}
    else:
        tables = {"cost": [row for size in given.sizes for row in cost(size, given.rounds)]}
    for title, rows in tables.items():
        show(title, rows)
    print(update("detection", tables))
