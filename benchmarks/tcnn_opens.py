"""Attention that opens: what makes the gates of a T-CNN open in fine-tuning, on 5,000 validation images of CIFAR-10.

    nice -n 19 python benchmarks/tcnn_opens.py [--arms tcnn principal] [--epochs 4] [--images 10000] [--seeds 1]
        [--noise 0.1]

Needs ISOMORPH_DATA with cifar10 and weights. The validation images are cut from the training images, and are no part of
the test images. With --noise, all images have noise of this standard deviation, of pixels in 0 to 1; that of training
images is drawn anew in every step. Arms run one at a time; each finished one is a line of the output file, and is
skipped by a later call.
Ends with a table of all finished arms, in benchmarks/results/tcnn_opens.json.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isomorph as iso
from interleave import show, spread, write
from isomorph.data.sources import spaced_images
from isomorph.layers import GPSA2d, PositionalConv2d, WindowGPSA2d
from isomorph.layers.eval_mode import eval_mode

VALIDATION, OPEN = 5_000, 0.5
"""Images of the validation split; and the share of position below which a head counts as open."""


@dataclass(frozen=True)
class Arm:
    """One way to start and to train; the rest is held equal."""

    about: str
    rule: dict[str, Any] | None = None
    where: str = "layer3.*.conv?"
    temperature: float | None = None  # queries and keys are principal directions of the layer's input
    apart: bool = False  # content reads values of its own, which start at zero
    rates: dict[str, str] = field(default_factory=dict)


SOFT = dict(locality=5.0, gate=6.0)
WINDOW = dict(content="window", window=5)
ARMS = {
    "cnn": Arm("the CNN"),
    "tcnn": Arm("T-CNN, global, closed gates", SOFT),
    "positions": Arm("positions only", dict(locality=5.0, content="none")),
    "positions everywhere": Arm("positions only, in all stages", dict(locality=5.0, content="none"), "layer?.*.conv?"),
    "window": Arm("windows, closed gates", SOFT | WINDOW),
    "principal": Arm("windows, principal directions, closed gates", SOFT | WINDOW, temperature=1.0),
    "half open": Arm("windows, principal directions, gate 1", dict(locality=5.0, gate=1.0) | WINDOW, temperature=1.0),
    "apart": Arm("windows, principal directions, values apart", SOFT | WINDOW, temperature=1.0, apart=True),
    "early": Arm("as apart, in the first stage", SOFT | WINDOW, "layer1.*.conv?", 1.0, True),
    "slow gates": Arm(
        "as apart, gates at the rate of the weights", SOFT | WINDOW, "layer3.*.conv?", 1.0, True, dict(gate_lr="1x")
    ),
}


class ApartGPSA2d(WindowGPSA2d):
    """Gated attention whose content has filters of its own: opening adds before it takes.

    y = sum_h P_h V weight_h + (1 - sigma(gate_h)) C_h V added_h
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.added = nn.Parameter(torch.zeros_like(self.weight))

    def distinct_filters(self, share: Tensor | None = None) -> Tensor:
        return self.added.flatten(2) if share is None else self.added.flatten(2) * share

    def forward(self, x: Tensor) -> Tensor:
        values = self.map_values(x).unflatten(-1, x.shape[-2:])
        return self.with_bias(self.position_taps(values) + self.content_taps(x, values, torch.sigmoid(-self.gate)))


def apart(layer: WindowGPSA2d) -> ApartGPSA2d:
    """The same layer with filters of its own for content, half open: the filters are zero."""
    size = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
    new = ApartGPSA2d(*size, bias=layer.bias is not None, window=layer.window)
    new.load_state_dict(layer.state_dict(), strict=False)
    new.set_gating(gate=0.0)
    return new


@torch.no_grad()
def principal_content(model: nn.Module, images: Tensor, temperature: float) -> None:
    """Let all heads attend to similar patches: queries and keys are the first principal directions of the input.

    They are scaled so that the scores of unrelated positions have this standard deviation.
    """
    inputs: dict[nn.Module, Tensor] = {}
    layers = [layer for layer in model.modules() if isinstance(layer, GPSA2d)]
    hooks = [layer.register_forward_pre_hook(lambda m, x: inputs.__setitem__(m, x[0])) for layer in layers]
    with eval_mode(model):
        model(images)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        tokens = inputs[layer].transpose(0, 1).flatten(1)  # (C, positions)
        values, directions = torch.linalg.eigh(torch.cov(tokens))  # ascending
        for head in range(layer.num_heads):
            for rank, row in enumerate(range(head, layer.query.out_features, layer.num_heads)):
                unit = directions[:, -1 - rank] / values[-1 - rank].clamp(min=1e-6).sqrt()
                layer.query.weight[row] = layer.key.weight[row] = unit * temperature**0.5


def build(arm: Arm, images: Tensor, seed: int) -> nn.Module:
    """The network of an arm, from the public weights."""
    model = timm.create_model("cifar_resnet20", pretrained=True)
    torch.manual_seed(seed)
    if arm.rule is None:
        return model
    model = iso.recast(model, iso.ConvToGPSA(**arm.rule), arm.where)
    for name, layer in list(model.named_modules()):
        if arm.apart and isinstance(layer, WindowGPSA2d):
            model.set_submodule(name, apart(layer))
    if arm.temperature:
        principal_content(model, images, arm.temperature)
    return model


def preprocessing() -> dict[str, Any]:
    """Return size, mean and standard deviation of the network's images."""
    return timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20"))


def images_of(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised training and validation images of CIFAR-10's training split, in memory."""
    source = iso.data.open_source("cifar10", "train")
    config = preprocessing()
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
    parts = {"val": source.subset(order[:VALIDATION]), "train": spaced_images(source.subset(order[VALIDATION:]), count)}
    found = {}
    for name, part in parts.items():
        batches = list(iso.data.eval_loader(part, config, 500))
        found[name] = tuple(torch.cat(each) for each in zip(*batches, strict=True))
    return found


def pixel_noise(noise: float) -> Tensor:
    """Return a standard deviation, of pixels in 0 to 1, as one of the network's inputs. Shape: -> (3, 1, 1)"""
    return noise / torch.tensor(preprocessing()["std"]).view(3, 1, 1)


def with_noise(images: dict[str, tuple[Tensor, Tensor]], noise: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the images with noise on those of the validation split, always the same."""
    x, y = images["val"]
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return images | {"val": (x + pixel_noise(noise) * drawn, y)}


def augment(images: Tensor, noise: Tensor) -> Tensor:
    """One flip and one shift of up to 4 pixels for a batch, and noise. Shape: (B, 3, 32, 32), (3, 1, 1)"""
    images = images.flip(-1) if torch.rand(()) < 0.5 else images
    top, left = torch.randint(0, 9, (2,)).tolist()
    images = F.pad(images, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
    return images + noise * torch.randn_like(images) if noise.any() else images


@torch.no_grad()
def observe(model: nn.Module, images: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Validation accuracy, gates and spans."""
    with eval_mode(model):
        logits = torch.cat([model(part) for part in images[0].split(250)])
    row: dict[str, Any] = {"top1": 100 * (logits.argmax(1) == images[1]).float().mean().item()}
    if gates := [layer.position_share for layer in model.modules() if isinstance(layer, GPSA2d)]:
        gates = torch.cat(gates)
        row |= {"gate": gates.mean().item(), "open": (gates < OPEN).float().mean().item()}
    if spans := [1 / m.locality for m in model.modules() if isinstance(m, GPSA2d | PositionalConv2d)]:
        row["span"] = torch.cat(spans).mean().item()
    return row


def run(arm: Arm, seed: int, epochs: int, images: dict[str, tuple[Tensor, Tensor]], noise: Tensor) -> dict[str, Any]:
    """Fine-tune one arm, and return what was observed after every epoch."""
    (x, y), started = images["train"], time.time()
    model = build(arm, x[:256], seed)
    rates = dict(lr=5e-4, gate_lr="100x", position_lr="20x") | arm.rates
    optimizer = torch.optim.AdamW(iso.training.parameter_groups(model, **rates))
    steps = epochs * (len(x) // 128)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=steps)
    curve = [observe(model, images["val"])]
    for epoch in range(epochs):
        torch.manual_seed(1000 * seed + epoch)  # the same batches and flips for every arm
        model.train()
        for batch in torch.randperm(len(x))[: len(x) // 128 * 128].split(128):
            F.cross_entropy(model(augment(x[batch], noise)), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        curve.append(observe(model, images["val"]))
        print(f"  epoch {epoch + 1}: {curve[-1]}", flush=True)
    return {"seconds": round(time.time() - started), "curve": curve}


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every finished arm and length: mean over seeds, half the range in brackets."""
    groups: dict[tuple[float, str, int, int], list[dict[str, Any]]] = {}
    for row in runs:
        groups.setdefault((row["noise"], row["arm"], row["epochs"], row["images"]), []).append(row)
    rows = []
    for (noise, name, epochs, count), found in groups.items():
        last = [row["curve"][-1] for row in found]
        row = {"arm": name, "what": ARMS[name].about, "noise": noise, "images": count, "epochs": epochs}
        row["seeds"] = len(found)
        row["before"] = spread([each["curve"][0]["top1"] for each in found])
        for title, key in (("validation top-1", "top1"), ("gate", "gate"), ("open heads", "open"), ("span", "span")):
            row[title] = spread([each[key] for each in last]) if key in last[0] else ""
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path("runs/tcnn_opens.jsonl"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    runs = [{"noise": 0.0} | json.loads(line) for line in lines]
    images = None
    for seed in range(given.seeds):
        for name in given.arms:
            key = {"arm": name, "seed": seed, "epochs": given.epochs, "images": given.images, "noise": given.noise}
            if any(key.items() <= row.items() for row in runs):
                continue
            images = images or with_noise(images_of(given.images), given.noise)
            print(f"{name}, seed {seed}, noise {given.noise}", flush=True)
            runs.append(key | run(ARMS[name], seed, given.epochs, images, pixel_noise(given.noise)))
            with given.out.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    if runs:
        rows = rows_of(runs)
        show("Attention that opens", rows)
        print(f"\nwrote {write('tcnn_opens', {'table': rows, 'runs': runs})}")


if __name__ == "__main__":
    main()
