"""Detectors: cost of a windowed ViT-Tiny without, with and with fused pyramids; and the AP of a run, epoch by epoch.

    python benchmarks/detection.py                       # cost at 512 px: results/detection.json
    python benchmarks/detection.py --sizes 512 1024      # at both
    isomorph train mask_rcnn_bccd --data.root bccd       # blood cells; then
    python benchmarks/detection.py --run runs/mask_rcnn_bccd   # its log, in results/detection.json too

The backbone is that of `timm.create_model("mask_rcnn")`: windows of 14 x 14 patches, every third block on the whole
map, 12 heads. Times are medians over interleaved passes of one image; of processor time on one thread.
"""

import argparse
import json
from pathlib import Path

import timm
import torch
from torch import nn

import isomorph as iso
from interleave import forward, interleaved, saved_mib, show, update

FORMS = ("plain", "pyramids", "fused")


def backbone(layout: str, size: int) -> nn.Module:
    """The windowed ViT-Tiny of a detector."""
    torch.manual_seed(0)
    detector = timm.create_model(
        "mask_rcnn", backbone="tdrl_vit_ti", backbone_kwargs={"layout": layout}, img_size=size, masks=False
    )
    return detector.backbone


def training_step(module: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward through parameters and image."""
    module.train().zero_grad()
    module(x.requires_grad_())[0].square().mean().backward()


def cost(size: int, rounds: int) -> list[dict[str, object]]:
    """Seconds a step and an image, and MiB kept for the backward pass, of each form."""
    x = torch.randn(1, 3, size, size)
    training = {"plain": backbone("plain", size), "pyramids": backbone("P-W2S", size)}
    steps = interleaved({n: lambda m=m: training_step(m, x) for n, m in training.items()}, x.device, rounds)
    kept = {name: saved_mib(_First(module.train()), x) for name, module in training.items()}
    testing = {name: module.eval() for name, module in training.items()}
    testing["fused"] = iso.fuse(testing["pyramids"])
    passes = interleaved({name: forward(module, x) for name, module in testing.items()}, x.device, rounds)
    return [
        {
            "size": size,
            "form": form,
            "step (s)": steps[form] / 1e3 if form in steps else "-",
            "kept (MiB)": round(kept[form]) if form in kept else "-",
            "inference (s)": passes[form] / 1e3,
            "parameters (M)": sum(p.numel() for p in testing[form].parameters()) / 1e6,
        }
        for form in FORMS
    ]


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path)
    given = parser.parse_args()
    if given.run:
        table = {given.run.name: read_run(given.run)}
    else:
        torch.set_num_threads(1)
        table = {"cost": [row for size in given.sizes for row in cost(size, given.rounds)]}
    for title, rows in table.items():
        show(title, rows)
    print(update("detection", table))
