"""Fine-tuning of benchmarks/tcnn_opens.py: validation accuracy, gates and spans after every epoch, and snapshots."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isomorph as iso
from isomorph.checkpoints.files import write_atomically
from isomorph.layers import GPSA2d, SimilarGPSA2d
from isomorph.layers.eval_mode import eval_mode
from isomorph.layers.tap_heads import PositionHeads

OPEN = 0.5
"""The share of position below which a head counts as open."""
Split = tuple[Tensor, Tensor]
"""Images and labels. Shape: (N, 3, H, W), (N,)"""
Row = dict[str, Any]
MARGIN = 4
"""Pixels by which an image may extend beyond the border of the canvas in training."""


@torch.no_grad()
def top1(model: nn.Module, split: Split) -> float:
    """Top-1 accuracy in percent."""
    with eval_mode(model):
        logits = torch.cat([model(part) for part in split[0].split(250)])
    return 100 * (logits.argmax(1) == split[1]).float().mean().item()


def paste(images: Tensor, canvas: int) -> Tensor:
    """Paste every image at a random position on a canvas of zeros, the same positions in each call.

    Shape: (N, C, h, w) -> (N, C, H, H)
    """
    size = images.shape[-1]
    if canvas == size:
        return images
    positions = torch.randint(0, canvas - size + 1, (len(images), 2), generator=torch.Generator().manual_seed(0))
    pasted = images.new_zeros(*images.shape[:2], canvas, canvas)
    for image, target, (top, left) in zip(images, pasted, positions.tolist(), strict=True):
        target[:, top : top + size, left : left + size] = image
    return pasted


def augment(images: Tensor, noise: Tensor, canvas: int) -> Tensor:
    """Flip a batch at random and shift it on a canvas of zeros, all images alike, and add noise.

    Shape: (B, 3, h, w), (3, 1, 1) -> (B, 3, H, H)
    """
    images = images.flip(-1) if torch.rand(()) < 0.5 else images
    around = canvas - images.shape[-1] + MARGIN
    top, left = torch.randint(0, around + MARGIN + 1, (2,)).tolist()
    images = F.pad(images, (around,) * 4)[:, :, top : top + canvas, left : left + canvas]
    return images + noise * torch.randn_like(images) if noise.any() else images


@torch.no_grad()
def observe(model: nn.Module, images: Split) -> Row:
    """Validation accuracy, gates and spans."""
    row: Row = {"top1": top1(model, images)}
    if gates := [m.position_share for m in model.modules() if isinstance(m, GPSA2d | SimilarGPSA2d)]:
        gates = torch.cat(gates)
        row |= {"gate": gates.mean().item(), "open": (gates < OPEN).float().mean().item()}
    if spans := [1 / m.locality for m in model.modules() if isinstance(m, PositionHeads)]:
        row["span"] = torch.cat(spans).mean().item()
    if sharpness := [m.sharpness.item() for m in model.modules() if isinstance(m, SimilarGPSA2d)]:
        row["sharpness"] = sum(sharpness) / len(sharpness)
    return row


class FineTuning:
    """Fine-tune with AdamW and a one-cycle schedule; a later call resumes after the last finished epoch."""

    def __init__(self, model: nn.Module, rates: dict[str, str], seed: int, epochs: int, images: dict[str, Split]):
        self.canvas = images["val"][0].shape[-1]
        self.model, self.seed, self.epochs, self.images = model, seed, epochs, images
        rates = dict(lr=5e-4, gate_lr="100x", position_lr="20x") | rates
        self.optimizer = torch.optim.AdamW(iso.training.parameter_groups(model, **rates))
        steps = max(1, epochs * (len(images["train"][0]) // 128))
        peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, peaks, total_steps=steps)
        self.curve: list[Row] = []
        self.seconds = 0.0

    def run(self, noise: Tensor, snapshot: Path) -> Row:
        """Train to the end, and return what was observed before and after every epoch. Shape: noise (3, 1, 1)"""
        if snapshot.is_file():
            self.load(torch.load(snapshot, weights_only=True))
        started = time.process_time() - self.seconds
        self.curve = self.curve or [observe(self.model, self.images["val"])]
        for epoch in range(len(self.curve) - 1, self.epochs):
            self.train(epoch, noise)
            self.curve.append(observe(self.model, self.images["val"]))
            self.seconds = time.process_time() - started
            write_atomically(snapshot, lambda file: torch.save(self.state(), file))
            print(f"  epoch {epoch + 1}: {self.curve[-1]}", flush=True)
        return {"seconds": round(self.seconds), "curve": self.curve}

    def train(self, epoch: int, noise: Tensor) -> None:
        """Train for one epoch."""
        x, y = self.images["train"]
        torch.manual_seed(1000 * self.seed + epoch)  # the same batches and flips for every arm
        self.model.train()
        for batch in torch.randperm(len(x))[: len(x) // 128 * 128].split(128):
            F.cross_entropy(self.model(augment(x[batch], noise, self.canvas)), y[batch]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def state(self) -> Row:
        """Return the state of model, optimizer and schedule, with the curve so far."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        return parts | {"curve": self.curve, "seconds": self.seconds}

    def load(self, state: Row) -> None:
        """Restore such a state."""
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.curve, self.seconds = state["curve"], state["seconds"]
