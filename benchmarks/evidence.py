"""The studies of docs/evidence.md: for each method the paper's claim, its arms, and the control that could refute it.

    python benchmarks/evidence.py convit --hours 10     # or tcnn, tdrl, refiner, coatnet, insert, window
    python benchmarks/evidence.py convit --hours 0      # only the tables of what is trained

A cell is one network trained once: an arm, its number of training images and epochs, a learning rate, a seed. A
finished cell is a row of benchmarks/results/evidence_METHOD.json, so a second call goes on where the first stopped; an
unfinished one continues from its last epoch. The rate of an arm is the best of its grid on 5,000 validation images,
which are cut from the training images and never trained on, with seed 0: the search begins in the middle of the grid
and ends when both neighbours of the best rate, or the end of the grid, have been tried. Only public weights (`insert`,
and tcnn's arms with a public start) have seen these images. No choice looks at the test images.

On a GPU (`--device cuda`) several cells train at once, each step as a CUDA graph on a stream of its own; a cell that is
not finished when the time is up begins again. A cell draws the same numbers on every device.

Needs ISOMORPH_DATA with cifar10. One thread is used.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, NormMlpClassifierHead
from torch import Tensor, nn

import isomorph as iso
from interleave import RESULTS, processor, show
from isomorph.lab.data import open_source
from isomorph.lab.data.sources import decode

VALIDATION, BATCH, PAD = 5_000, 128, 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
RUNS = Path("runs/evidence")
VIT = dict(img_size=32, patch_size=4, embed_dim=64, depth=6, num_heads=4)
"""A grid of 8 x 8 patches, four heads of 16 channels."""


@dataclass(frozen=True)
class Cell:
    """One training. `images` are the first of a fixed permutation, so a smaller set is part of a larger one."""

    arm: str
    images: int
    epochs: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Setting:
    """Arms that are compared: as many images and epochs for all; `longer` overrides that for an arm.

    With `search`, the rate of an arm is the one that was found in that setting.
    """

    arms: tuple[str, ...]
    images: int
    epochs: int
    rates: tuple[float, ...]
    seeds: int = 3
    longer: dict[str, int] = field(default_factory=dict)
    search: "Setting | None" = None

    def cells(self, arm: str, rates: tuple[float, ...], seeds: range) -> Iterator[Cell]:
        epochs = self.longer.get(arm, self.epochs)
        return (Cell(arm, self.images, epochs, rate, seed) for seed in seeds for rate in rates)


@dataclass(frozen=True)
class Study:
    """A claim, its settings in the order in which they are trained, and how a cell is built and looked at.

    `control` begins the name of the arm, of each setting, whose seeds the others are paired with.
    """

    claim: str
    build: Callable[[Cell, "Images"], nn.Module]
    settings: tuple[Setting, ...]
    control: str
    look: Callable[[nn.Module, Tensor], dict[str, Any]] = lambda model, images: {}
    optimizer: Callable[[nn.Module, Cell], torch.optim.Optimizer] = lambda model, cell: adamw(
        model, cell
    )
    before_step: Callable[[nn.Module, Cell, float], None] = lambda model, cell, progress: None
    """Called with the share of the training that is done."""
    mixup: bool = False


def adamw(model: nn.Module, cell: Cell, **rates: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(iso.training.parameter_groups(model, lr=cell.rate, **rates))


class Draws(NamedTuple):
    """What chance decides about a batch: images, [B]; shifts, [2, B]; flips, [B]; the share of mixup."""

    index: Tensor
    moved: Tensor
    flipped: Tensor
    share: Tensor


class Images:
    """CIFAR-10 in memory: 45,000 training images in a fixed order, 5,000 validation images, 10,000 test images."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mean, self.std = (
            torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD)
        )
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
        pixels, labels = self.read("train")
        self.splits = {"test": self.read("test")}
        for name, part in (("val", order[:VALIDATION]), ("train", order[VALIDATION:])):
            self.splits[name] = (pixels[part], labels[part])
        self.splits = {
            name: (pixels.to(device), labels.to(device))
            for name, (pixels, labels) in self.splits.items()
        }
        self.padded = F.pad(self.splits["train"][0], (PAD,) * 4)

    @staticmethod
    def read(split: str) -> tuple[Tensor, Tensor]:
        """Pixels, uint8 of [N, 3, 32, 32], and labels; decoded once."""
        path = RUNS / f"cifar10_{split}.pt"
        if path.is_file():
            return torch.load(path, weights_only=True)
        source = open_source("cifar10", split)
        pixels = np.stack([np.asarray(decode(image)) for image in source.images])
        decoded = (
            torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
            torch.tensor(list(source.labels)),
        )
        torch.save(decoded, part := path.with_suffix(".part"))
        part.replace(path)
        return decoded

    def normalise(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - self.mean) / self.std

    def epoch(self, images: int, generator: torch.Generator) -> Iterator[Draws]:
        """What chance decides about the batches of an epoch; the last, smaller batch is left out."""
        size = min(BATCH, images)
        for index in torch.randperm(images, generator=generator).split(size)[: images // size]:
            moved = torch.randint(0, 2 * PAD + 1, (2, size), generator=generator)
            yield Draws(index, moved, torch.rand(size, generator=generator) < 0.5, torch.ones(()))

    def batch(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Images shifted by up to 4 pixels and flipped by chance, then normalised, [B, 3, 32, 32], and labels."""
        side, channels = (torch.arange(n, device=self.device) for n in (32, 3))
        rows, columns = side + draws.moved[0, :, None], side + draws.moved[1, :, None]
        columns = torch.where(draws.flipped[:, None], columns.flip(-1), columns)
        index = draws.index[:, None, None, None]
        pixels = self.padded[
            index, channels[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]
        return self.normalise(pixels), self.splits["train"][1][draws.index]

    @torch.no_grad()
    def score(self, model: nn.Module, split: str) -> tuple[float, float]:
        """Top-1 in percent, and negative log-likelihood in nats."""
        pixels, labels = self.splits[split]
        model.eval()
        parts = pixels.split(250 if self.device.type == "cpu" else 500)
        logits = torch.cat([model(self.normalise(part)) for part in parts])
        return 100 * (logits.argmax(-1) == labels).double().mean().item(), F.cross_entropy(
            logits, labels
        ).item()


def drawn_share(generator: torch.Generator) -> Tensor:
    """The share of mixup, one for the batch, from Beta(.2, .2)."""
    rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    return torch.tensor(rng.beta(0.2, 0.2), dtype=torch.float32)


def mixed(x: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup, and label smoothing of .1: DeiT's, scaled down."""
    targets = 0.9 * F.one_hot(y, 10).float() + 0.01
    return share * x + (1 - share) * x.flip(0), share * targets + (1 - share) * targets.flip(0)


class Training:
    """A cell in training: `begin_epoch`, then `finish_epoch`, until `row` is complete.

    On a GPU `begin_epoch` only queues the steps, and `finish_epoch` waits for them.
    """

    def __init__(self, study: Study, cell: Cell, images: Images, snapshot: Path) -> None:
        self.study, self.cell, self.images, self.snapshot = study, cell, images, snapshot
        self.on_gpu = images.device.type == "cuda"
        torch.manual_seed(cell.seed)
        self.generator = torch.Generator().manual_seed(1_000 + cell.seed)
        self.model = study.build(cell, images).to(images.device)
        self.optimizer = study.optimizer(self.model, cell)
        # timm's LAMB cannot be
        self.captures_update = self.on_gpu and isinstance(self.optimizer, torch.optim.AdamW)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.row: dict[str, Any] = asdict(cell) | dict(curve=[], seconds=0.0)
        self.pixels = images.normalise(images.splits["val"][0][:64])
        self.steps = cell.images // min(BATCH, cell.images)
        self.at = torch.zeros(1, dtype=torch.long, device=images.device)
        self.losses = torch.zeros(self.steps, device=images.device)
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.graph: torch.cuda.CUDAGraph | None = None
        if snapshot.is_file() and (state := torch.load(snapshot, weights_only=True))[
            "cell"
        ] == list(astuple(cell)):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"])
            self.row = json.loads(state["row"])
        else:
            self.row["looks"] = [dict(epoch=0) | study.look(self.model.eval(), self.pixels)]
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()  # all of the above is there for the cell's own stream

    @property
    def done(self) -> int:
        return len(self.row["curve"])

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self.stream) if self.on_gpu else contextlib.nullcontext()

    def begin_epoch(self) -> None:
        self.model.train()
        begun, device = time.process_time(), self.images.device
        rows = []
        for draws in self.images.epoch(self.cell.images, self.generator):
            rows.append(
                draws._replace(share=drawn_share(self.generator)) if self.study.mixup else draws
            )
        drawn = Draws(*(torch.stack(each).to(device) for each in zip(*rows, strict=True)))
        total = self.cell.epochs * self.steps
        shares = [(self.done * self.steps + i + 0.5) / total for i in range(self.steps)]
        factors = [
            min(1.0, s / 0.05) * (0.01 + 0.99 * (1 + math.cos(math.pi * s)) / 2) for s in shares
        ]
        self.at.zero_()
        if self.on_gpu:
            self.fill(drawn, factors)
        else:
            self.drawn = drawn
        for share, factor in zip(shares, factors, strict=True):
            self.study.before_step(self.model, self.cell, share)
            self.graph.replay() if self.graph else self.backward()
            if not self.captures_update:
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * factor
                self.optimizer.step()
        if not self.on_gpu:  # where the steps are over
            self.row["seconds"] += time.process_time() - begun

    def backward(self) -> None:
        """The gradients of step number `at`, which then grows by one. Runs on a CPU, and is captured on a GPU."""
        x, y = self.images.batch(
            here := Draws(*(each.index_select(0, self.at)[0] for each in self.drawn))
        )
        x, y = mixed(x, y, here.share) if self.study.mixup else (x, y)
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.losses.index_copy_(0, self.at, loss.detach()[None])
        self.at += 1

    def fill(self, drawn: Draws, factors: list[float]) -> None:
        """Write an epoch's draws and rates where the graph of a step, captured before the first, reads them."""
        if self.graph is None:
            self.drawn, self.factors = drawn, torch.zeros(self.steps, device=self.images.device)
            self.capture()
        for mine, new in zip(self.drawn, drawn, strict=True):
            mine.copy_(new)
        self.factors.copy_(torch.tensor(factors))

    def capture(self) -> None:
        """Capture a step; those that warm up leave no trace in weights, statistics and moments."""
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.captures_update:
            for group in self.optimizer.param_groups:
                group.update(
                    lr=torch.tensor(group["lr"], device=self.images.device),
                    capturable=True,
                    fused=True,
                )
                group["foreach"] = False

        def step() -> None:
            factor = self.factors.index_select(0, self.at)[0]
            self.backward()
            if self.captures_update:
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"].copy_(rate * factor)
                self.optimizer.step()

        for _ in range(3):
            step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            step()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            for moment in state.values():
                moment.zero_()
        self.at.zero_()

    def is_scored(self, epoch: int) -> bool:
        """About twenty times a training: where an epoch is a few steps, scoring takes longer."""
        return epoch % max(1, self.cell.epochs // 20) == 0 or epoch == self.cell.epochs

    def finish_epoch(self) -> None:
        """Score the network on the validation images; after the last epoch on the test images."""
        mean, cell, images = self.losses.mean().item(), self.cell, self.images
        validation: float | None = None
        if not math.isfinite(mean):
            validation = 0.0
        elif self.is_scored(self.done + 1):
            validation = round(images.score(self.model, "val")[0], 2)
        self.row["curve"].append([validation, round(mean, 4)])
        if math.isfinite(mean) and self.done % max(1, cell.epochs // 5) == 0:
            looked = self.study.look(self.model.eval(), self.pixels)
            self.row["looks"].append(dict(epoch=self.done) | looked)
        if validation is not None and (not self.on_gpu or self.done == cell.epochs):
            scored = f"loss {mean:.3f}, validation {validation}"
            print(f"  {cell.arm}, epoch {self.done} of {cell.epochs}: {scored}", flush=True)
        if not math.isfinite(mean):
            self.row["diverged"] = True
        if not math.isfinite(mean) or self.done == cell.epochs:
            self.row["val"] = self.row["curve"][-1][0]
            if math.isfinite(mean):
                self.row["test"], self.row["test_nll"] = (
                    round(v, 4) for v in images.score(self.model, "test")
                )
            self.row["seconds"] = round(self.row["seconds"], 1)
            self.snapshot.unlink(missing_ok=True)
        elif not self.on_gpu:
            state = dict(
                model=self.model.state_dict(),
                optimizer=self.optimizer.state_dict(),
                generator=self.generator.get_state(),
            )
            state |= dict(cell=list(astuple(cell)), row=json.dumps(self.row))
            torch.save(state, part := self.snapshot.with_suffix(".part"))
            part.replace(self.snapshot)


def train(
    study: Study,
    cells: Callable[[], Iterable[Cell]],
    images: Images,
    deadline: float,
    snapshot: Path,
    together: int = 1,
) -> Iterator[dict[str, Any]]:
    """Train what `cells` gives, as many together; yields the row of each that is finished before the deadline."""
    active: list[Training] = []
    while True:
        for cell in cells():
            if (
                len(active) < together
                and all(cell != each.cell for each in active)
                and time.time() < deadline
            ):
                print(
                    f"{cell.arm}: {cell.images} images, {cell.epochs} epochs, rate {cell.rate:g}, seed {cell.seed}"
                )
                begun = Training(study, cell, images, snapshot)
                with begun.on_stream():
                    begun.begin_epoch()
                active.append(begun)
        if not active:
            return
        for training in list(active):
            with training.on_stream():
                training.finish_epoch()
                if "val" in training.row:
                    active.remove(training)
                    yield training.row
                elif time.time() < deadline:
                    training.begin_epoch()
                else:
                    active.remove(training)


def open_cells(study: Study, rows: list[dict[str, Any]]) -> Iterator[Cell]:
    """The cells that can be trained now: setting by setting the search for its rate, then the seeds at the best one."""
    done = {tuple(row[name] for name in Cell.__dataclass_fields__) for row in rows}
    for setting in study.settings:
        for arm in setting.arms:
            yield from setting.cells(arm, untried_rates(setting, arm, rows), range(1))
        first_seed = 0 if setting.search else 1
        for seed in range(first_seed, setting.seeds):
            for arm in setting.arms:
                if rate_is_chosen(setting, arm, rows):
                    (cell,) = setting.cells(
                        arm, (best_rate(setting, arm, rows),), range(seed, seed + 1)
                    )
                    if astuple(cell) not in done:
                        yield cell


def of_setting(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    epochs = setting.longer.get(arm, setting.epochs)
    wanted = (arm, setting.images, epochs)
    return [row for row in rows if (row["arm"], row["images"], row["epochs"]) == wanted]


def grid_of(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        row
        for row in of_setting(setting, arm, rows)
        if row["seed"] == 0 and row["rate"] in setting.rates
    ]


def untried_rates(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> tuple[float, ...]:
    """The rates to train with next: the middle of the grid, then those next to the best so far."""
    if setting.search:
        return ()
    if not (tried := [row["rate"] for row in grid_of(setting, arm, rows)]):
        return setting.rates[len(setting.rates) // 2 :][:1]
    best = setting.rates.index(best_rate(setting, arm, rows))
    return tuple(rate for rate in setting.rates[max(0, best - 1) : best + 2] if rate not in tried)


def rate_is_chosen(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> bool:
    searched = setting.search or setting
    return bool(grid_of(searched, arm, rows)) and not untried_rates(searched, arm, rows)


def best_rate(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> float:
    """The rate with the best validation accuracy; of equal ones, the one with the lowest training loss."""
    if setting.search:
        return best_rate(setting.search, arm, rows)
    return max(grid_of(setting, arm, rows), key=lambda row: (row["val"], -row["curve"][-1][1]))[
        "rate"
    ]


def tested(setting: Setting, arm: str, rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rows of an arm at its best rate, by seed."""
    if not grid_of(setting.search or setting, arm, rows):
        return {}
    rate = best_rate(setting, arm, rows)
    return {
        row["seed"]: row
        for row in of_setting(setting, arm, rows)
        if row["rate"] == rate and "test" in row
    }


def paired_interval(differences: list[float]) -> str:
    """Mean of the differences, with the interval that holds the true one with 95%, by Student's t."""
    if len(differences) < 3:
        return ""
    centre = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = scipy.stats.t.ppf(0.975, len(differences) - 1) * error
    return f"{centre:+.2f} ({centre - half:+.2f} to {centre + half:+.2f})"


def table(study: Study, setting: Setting, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an arm: test accuracy at the rate chosen, and its difference to the control, seed by seed."""
    name = next((arm for arm in setting.arms if arm.startswith(study.control)), study.control)
    control, lines = tested(setting, name, rows), []
    for arm in setting.arms:
        if not (found := tested(setting, arm, rows)):
            continue
        scores = [row["test"] for row in found.values()]
        paired = [
            row["test"] - control[seed]["test"] for seed, row in found.items() if seed in control
        ]
        first = next(iter(found.values()))
        lines.append(
            {
                "arm": arm,
                "images": setting.images,
                "epochs": first["epochs"],
                "rate": f"{first['rate']:g}",
                "seeds": len(found),
                "test top-1": f"{statistics.mean(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})",
                f"minus {name}": " ".join(f"{d:+.2f}" for d in paired),
                "mean (95%)": paired_interval(paired) if arm != name else "",
                "training loss": f"{statistics.mean(row['curve'][-1][1] for row in found.values()):.3f}",
                "minutes": f"{statistics.mean(row['seconds'] for row in found.values()) / 60:.1f}",
            }
        )
    return lines


# --- ConViT: ahead of a ViT at little data ---------------------------------------------------------------------------


def build_convit(cell: Cell, images: Images) -> nn.Module:
    kind, start = cell.arm.split(", ")[:2]
    shape = VIT | (dict(embed_dim=128, num_heads=8) if "wide" in cell.arm else {})
    shape |= dict(depth=12) if "deep" in cell.arm else {}
    gated = (2 * shape["depth"] // 3) if kind == "ConViT" else 0
    weight_init = "jax" if start == "Xavier" else ""
    return timm.create_model(
        "convit_ti", num_classes=10, local_up_to_layer=gated, weight_init=weight_init, **shape
    )


def gate_values(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Share of position in the attention of each gated layer: its heads' mean, least and greatest."""
    try:
        layers = iso.gates(model).values()
    except iso.UserError:  # no gated layer
        return {}
    means = []
    ranges = []
    for gates in layers:
        means.append(round(float(gates.mean()), 4))
        ranges.append([round(float(gates.min()), 4), round(float(gates.max()), 4)])
    return dict(gates=means, gate_ranges=ranges)


CONVIT_ARMS = ("ConViT, Xavier", "ConViT, std .02", "ViT, Xavier", "ViT, std .02")
FEW_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
"""For few images: 1,200 to 1,500 steps, whatever their number, until the training loss is near 0."""
CONVIT = Study(
    "a ConViT is ahead of a ViT when there are few training images",
    build_convit,
    (
        Setting(CONVIT_ARMS, 5_000, 20, (1e-3, 2e-3, 4e-3)),
        Setting(CONVIT_ARMS, 1_000, 200, FEW_RATES),
        Setting(CONVIT_ARMS, 1_000, 200, FEW_RATES, seeds=5),
        Setting(CONVIT_ARMS, 500, 400, FEW_RATES, seeds=5),
        Setting(CONVIT_ARMS, 2_000, 100, FEW_RATES, seeds=5),
        Setting(CONVIT_ARMS, 45_000, 4, (1e-3, 2e-3, 4e-3)),
        Setting(tuple(f"{arm}, wide" for arm in CONVIT_ARMS), 5_000, 20, (5e-4, 1e-3, 2e-3)),
        Setting(tuple(f"{arm}, deep" for arm in CONVIT_ARMS), 5_000, 20, (5e-4, 1e-3, 2e-3)),
    ),
    "ViT, Xavier",
    gate_values,
    lambda model, cell: adamw(model, cell, gate_lr="10x"),
)


# --- CoAtNet: convolution generalises, attention has capacity --------------------------------------------------------

COATNET = dict(img_size=32, stem_stride=1, patch_size=4, head_dim=16)
WIDTHS = [16, 16, 32, 64, 128]
COATNET_ARMS: dict[str, dict[str, Any]] = {
    "C-C-C-C": dict(layout="SC-C-C-C", depths=[2, 1, 3, 4, 1], widths=WIDTHS),
    "C-C-T-T": dict(layout="SC-C-T-T", depths=[2, 1, 2, 3, 1], widths=WIDTHS),
    "C-T-T-T": dict(layout="SC-T-T-T", depths=[2, 1, 1, 3, 1], widths=WIDTHS),
    "ViT_REL": dict(layout="PT", depths=[1, 7], widths=[64, 64]),
}
"""Stages of 32, 16, 8 and 4 positions a side, 360,000 parameters within 3%, 23.6M MACs within 12%."""
COATNET_LAYOUTS = COATNET_ARMS | {
    "C-C-C-T": dict(layout="SC-C-C-T", depths=[2, 1, 4, 3, 1], widths=WIDTHS),
}


def build_coatnet(cell: Cell, images: Images) -> nn.Module:
    """An arm that ends with `hidden` has the hidden layer before its classes that the paper's sizes speak for."""
    layout = cell.arm.split(", ")[0]
    model = timm.create_model("coatnet_0", num_classes=10, **COATNET | COATNET_LAYOUTS[layout])
    if cell.arm.endswith(", hidden"):
        width = model.num_features
        model.head = NormMlpClassifierHead(width, 10, hidden_size=width, norm_layer=LayerNorm2d)
        model.head.apply(coatnet_weights)
    return model


def coatnet_weights(module: nn.Module) -> None:
    """The weights that the network's other linear layers begin with."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


HIDDEN = ("C-C-C-C, hidden", "C-C-T-T, hidden", "C-C-C-T, hidden")
FEW = Setting(HIDDEN, 5_000, 10, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), seeds=1)
"""Where the rates for 45,000 images are searched.

There an arm is trained in several lengths, so that the arms can be compared at equal training loss: what learns
slowly is trained for longer.
"""
COATNET_STUDY = Study(
    "convolution generalises better from few images, attention has more capacity, C-C-T-T has both",
    build_coatnet,
    (
        Setting(tuple(COATNET_ARMS), 2_000, 30, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
        FEW,
        Setting(HIDDEN, 45_000, 8, FEW.rates, seeds=2, search=FEW),
        Setting(HIDDEN[:1], 45_000, 4, FEW.rates, seeds=2, search=FEW),
        Setting(HIDDEN[1:], 45_000, 12, FEW.rates, seeds=2, search=FEW),
        Setting(tuple(COATNET_ARMS), 10_000, 10, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
        Setting(tuple(COATNET_ARMS), 45_000, 4, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    ),
    "C-C-C-C",
)


# --- Refiner: deep ViTs over-smooth; refined maps keep heads and layers apart ----------------------------------------

REFINER_FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(ratio=0, kernel=0),
    "refined": {},
    "talking heads": dict(ratio=1, kernel=1),
    "expansion without reduction": dict(kernel=1, reduce=False),
}


def build_refiner(cell: Cell, images: Images) -> nn.Module:
    form, depth = cell.arm.split(", ")[:2]
    shape = VIT | dict(embed_dim=48, depth=int(depth.split()[0]), mlp_ratio=3, weight_init="jax")
    return timm.create_model("refined_vit_b", num_classes=10, **shape | REFINER_FORMS[form])


@torch.no_grad()
def look_refiner(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Block by block: cosine of the heads' maps after centring over keys, and CKA of features with the last block's."""
    maps = iso.attention_maps(model, images[:16]).values()
    centred = [F.normalize(m.float() - m.float().mean(-1, keepdim=True), dim=-1) for m in maps]
    heads = [torch.einsum("bhqk,bgqk->hg", m, m) / (m.shape[0] * m.shape[2]) for m in centred]
    off = [(h.sum() - h.trace()) / (h.numel() - len(h)) for h in heads]
    evolution = iso.analysis.feature_evolution(model, images)
    return dict(
        heads=[round(float(v), 4) for v in off], features=[round(v, 4) for v in evolution.values()]
    )


DEEP = ("plain, 24 blocks", "refined, 24 blocks", "talking heads, 24 blocks")
DEEP_FEW = Setting(DEEP, 2_500, 8, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), seeds=1)
"""Where the rates of deep networks are searched: on 10,000 images the search alone would take five hours."""
REFINER = Study(
    "deep ViTs over-smooth; refining the maps keeps heads and layers apart, and helps",
    build_refiner,
    (
        Setting(
            tuple(f"{form}, 6 blocks" for form in REFINER_FORMS), 10_000, 8, (1e-3, 2e-3, 4e-3)
        ),
        Setting(
            ("plain, 6 blocks",), 10_000, 16, (2e-3, 4e-3)
        ),  # as long as 8 epochs with refined maps on a CPU
        DEEP_FEW,
        Setting(DEEP, 10_000, 8, DEEP_FEW.rates, seeds=2, search=DEEP_FEW),
    ),
    "plain",
    look_refiner,
)


# --- TDRL: pyramids train better than a plain layer of the same function ---------------------------------------------


def build_tdrl(cell: Cell, images: Images) -> nn.Module:
    """`fused start`: plain layers with the function of the untrained pyramid, normalised by a batch's statistics."""
    if cell.arm.endswith("trained start"):
        return build_from_trained(cell, images)
    arm = cell.arm.split(", ")[0]
    layout = {"plain": "plain", "BatchNorm only": "naive-W1"}.get(arm, "P-W2S")
    model = timm.create_model(
        "tdrl_vit_ti", num_classes=10, **VIT, layout=layout, weight_init="mae"
    )
    if arm == "fused start":
        draws = next(images.epoch(1_024, torch.Generator().manual_seed(cell.seed)))
        batch, _ = images.batch(Draws(*(each.to(images.device) for each in draws)))
        model = iso.fuse(iso.recalibrate(model, [batch.cpu()]).eval()).train()
    return model


def build_from_trained(cell: Cell, images: Images) -> nn.Module:
    """A trained plain ViT; with BatchNorm, of the same function, where the network from scratch has it."""
    plain = timm.create_model(
        "tdrl_vit_ti", num_classes=10, **VIT, layout="plain", weight_init="mae"
    )
    model = trained_base("tdrl", plain, Cell("base", 10_000, 15, 4e-3, 0), images)
    if cell.arm.startswith("BatchNorm only"):
        layers = ["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]
        model = iso.recast(model, iso.LinearToPyramid("naive-W1"), where=layers)
        drawn = images.epoch(1_280, torch.Generator().manual_seed(0))
        model = iso.recalibrate(model, [images.batch(draws)[0] for draws in drawn])
    return model.train()


def optimizer_tdrl(model: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    if cell.arm.endswith("LAMB"):
        return timm.optim.Lamb(iso.training.parameter_groups(model, lr=cell.rate))
    return adamw(model, cell)


TDRL_ARMS = ("plain", "P-W2S", "fused start", "BatchNorm only")
SAME_TIME = Setting(
    ("BatchNorm only", "plain"),
    images=2_000,
    epochs=100,
    rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    longer={"BatchNorm only": 64, "P-W2S": 57},
)
"""As long for every arm: a step with BatchNorm took 1.56 times the plain one's, with pyramids 1.75 times.

The times are those of 10 epochs on 10,000 images: 381 s, 410 s and 235 s of one core.
"""
SCRATCH = Setting(TDRL_ARMS, 10_000, 10, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3))
TRAINED_START = Setting(
    ("BatchNorm only, trained start", "plain, trained start"),
    images=20_000,
    epochs=5,
    rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
)
TDRL = Study(
    "pyramids train better than a plain layer of the same function",
    build_tdrl,
    (
        SCRATCH,
        Setting(
            ("plain", "fused start"), 10_000, 15, (1e-3, 2e-3, 4e-3)
        ),  # as long as 10 with pyramids on a GPU
        SAME_TIME,
        replace(SAME_TIME, images=10_000, epochs=47, longer={"BatchNorm only": 30}),
        Setting(
            ("BatchNorm only", "plain"),
            images=45_000,
            epochs=8,
            rates=SCRATCH.rates,
            seeds=2,
            longer={"BatchNorm only": 5},
            search=SCRATCH,
        ),
        Setting(TDRL_ARMS, 10_000, 30, (5e-4, 1e-3, 2e-3)),
        Setting(tuple(f"{arm}, LAMB" for arm in TDRL_ARMS), 10_000, 10, (4e-3, 8e-3, 1.6e-2)),
        TRAINED_START,
        replace(TRAINED_START, epochs=8, arms=TRAINED_START.arms[1:], search=TRAINED_START),
        replace(SAME_TIME, arms=("P-W2S",)),
        # about as long as 8 plain epochs: a step took 1.19 times as long as a plain one there
        Setting(("BatchNorm only",), 45_000, 7, SCRATCH.rates, seeds=2, search=SCRATCH),
    ),
    "plain",
    optimizer=optimizer_tdrl,
)


# --- T-CNN: a recast network, fine-tuned, beats its CNN --------------------------------------------------------------


def trained_base(name: str, model: nn.Module, cell: Cell, images: Images) -> nn.Module:
    """The network that the arms of a study start from, trained here once without the validation images."""
    path = RUNS / f"{name}_base.pt"
    if not path.is_file():
        print(f"base of {name}", flush=True)
        study, rows = Study("", lambda *_: model, (), ""), []
        rows.extend(
            train(
                study, lambda: [cell][len(rows) :], images, math.inf, RUNS / f"{name}_base_part.pt"
            )
        )
        torch.save(model.cpu().state_dict() | {"row": json.dumps(rows[0])}, path)
    model.load_state_dict(
        {k: v for k, v in torch.load(path, weights_only=True).items() if k != "row"}
    )
    return model.eval()


TCNN_SURGERY: dict[str, iso.ConvToGPSA | None] = {
    "CNN": None,
    "paper": iso.ConvToGPSA(init="paper"),
    "exact": iso.ConvToGPSA(init="exact", locality=5.0, gate=6.0),
    "position only": iso.ConvToGPSA(init="paper", content="none"),
    "gates at .1": iso.ConvToGPSA(init="paper"),
    "gates at .01": iso.ConvToGPSA(init="paper"),
    "gates frozen": iso.ConvToGPSA(init="paper"),
    "positions alone": iso.ConvToGPSA(init="paper", content="none"),
}


def build_tcnn(cell: Cell, images: Images) -> nn.Module:
    """The paper's surgery: the last stage at stride 1, the second convolution of its blocks recast."""
    form = cell.arm.split(", ")[0]
    public = cell.arm.endswith("public start")
    model = timm.create_model("cifar_resnet20", pretrained=public).eval()
    # the same sums, and a fifth less time on a CPU
    model = model.to(memory_format=torch.channels_last)
    if not public:
        model = trained_base("tcnn", model, Cell("base", 20_000, 20, 4e-3, 0), images)
    if cell.arm.endswith("stride 1"):
        model = iso.unstride(model, "layer3.0")
    if rule := TCNN_SURGERY[form]:
        model = iso.recast(model, rule, where="layer3.*.conv2")
    if form == "gates frozen":
        for name, parameter in model.named_parameters():
            if name.endswith(".gate"):
                parameter.requires_grad_(False)
    return model.train()


def optimizer_tcnn(model: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """Gates learn 1000 times as fast as weights, or at a peak that no arm's rate changes: the paper's number is .1."""
    peaks = {"gates at .1": 0.1, "gates at .01": 0.01}
    form = cell.arm.split(", ")[0]
    return adamw(model, cell, gate_lr=peaks.get(form, "1000x"))


GATE_ARMS = ("gates at .1", "positions alone", "CNN", "gates frozen", "gates at .01")
"""Whether content plays a part, at stride 2. In the order of what they say about it.

Their base was trained on another machine than that of the arms named with a stride: those are not paired with these.
"""
GATE_FEW = Setting(GATE_ARMS, 5_000, 6, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), seeds=1)
"""Where the rates of these arms are searched: on 20,000 images a cell takes four times as long."""
PUBLIC_START = tuple(f"{arm}, public start" for arm in GATE_ARMS)
"""From the public ResNet-20, in minutes: where gates go. Its weights have seen the validation images.

One rate for all arms, so that no choice looks at these.
"""
TCNN_ARMS = tuple(f"{form}, stride 1" for form in ("CNN", "paper", "exact", "position only"))
TCNN = Study(
    "fine-tuning a recast network beats its CNN",
    build_tcnn,
    (
        Setting(("CNN, stride 2", "paper, stride 2"), 20_000, 6, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        Setting(
            ("CNN, stride 2", "exact, stride 2", "position only, stride 2"), 20_000, 6, (3e-3,)
        ),
        Setting(("CNN, stride 2",), 20_000, 9, (3e-3,)),  # about as long as `paper` on a CPU
        Setting(PUBLIC_START, 5_000, 6, (3e-3,)),
        replace(GATE_FEW, arms=GATE_ARMS[:3]),
        Setting(GATE_ARMS[:3], 20_000, 6, GATE_FEW.rates, search=GATE_FEW),
        GATE_FEW,
        Setting(GATE_ARMS, 20_000, 6, GATE_FEW.rates, seeds=5, search=GATE_FEW),
        Setting((*TCNN_ARMS, "CNN, stride 2"), 5_000, 10, (3e-4, 1e-3)),
        Setting(("CNN, stride 1",), 5_000, 30, (3e-4, 1e-3)),  # about as long as `paper` on a CPU
    ),
    "CNN",
    gate_values,
    optimizer_tcnn,
    mixup=True,
)

# --- insert: a block into a trained network ---------------------------------------------------------------------------


def build_inserted(cell: Cell, images: Images) -> nn.Module:
    """Attention after the last stage of a trained CNN, with gamma = 0, or 1 as when a block is added in your own code.

    The public weights have seen the validation images, so these only choose a rate, for each arm in the same way.
    """
    model = timm.create_model("cifar_resnet20", pretrained=True).eval()
    if cell.arm != "no block":
        model = iso.insert(
            model, iso.layers.MapAttention, "layer3.2", example=torch.randn(1, 3, 32, 32)
        )
        nn.init.constant_(
            model.get_submodule("layer3.2").inserted.gamma, 1.0 if cell.arm == "gamma = 1" else 0.0
        )
    return model.train()


def gammas(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Mean absolute gamma of the inserted block."""
    return {
        name: round(p.abs().mean().item(), 5)
        for name, p in model.named_parameters()
        if name.endswith(".gamma")
    }


INSERT = Study(
    "a block that starts at gamma = 0 keeps what a trained network can do",
    build_inserted,
    (
        Setting(("no block", "gamma = 0", "gamma = 1"), 10_000, 3, (3e-4, 1e-3)),
        Setting(("no block",), 10_000, 4, (3e-4, 1e-3)),  # about as long as with attention
    ),
    "no block",
    gammas,
    lambda model, cell: adamw(model, cell, gamma_lr="10x"),
)


# --- window: a trained ViT moves to local attention -------------------------------------------------------------------


def build_windowed(cell: Cell, images: Images) -> nn.Module:
    """The trained ViT, 8 x 8 patches; with windows of 4 x 4 in five of six blocks in all arms but the first."""
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, weight_init="jax", **VIT)
    model = trained_base("window", vit, Cell("base", 10_000, 15, 2e-3, 0), images)
    if cell.arm != "global":
        model = iso.recast(model, iso.AttentionToWindow(window=4), where="blocks.[0-4].attn")
    return model.train()


def close_windows(model: nn.Module, cell: Cell, progress: float) -> None:
    """At once, or over the first half of the training."""
    if cell.arm != "global":
        iso.Anneal(steps=1000).apply(
            model, 1000 if cell.arm == "at once" else min(1000, round(2000 * progress))
        )


WINDOW = Study(
    "a ViT that is annealed to windows keeps more than one whose windows close at once",
    build_windowed,
    (Setting(("global", "annealed", "at once"), 10_000, 4, (3e-4, 1e-3)),),
    "global",
    before_step=close_windows,
)

STUDIES = {
    "tcnn": TCNN,
    "convit": CONVIT,
    "tdrl": TDRL,
    "refiner": REFINER,
    "coatnet": COATNET_STUDY,
    "insert": INSERT,
    "window": WINDOW,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=list(STUDIES))
    parser.add_argument("--hours", type=float, default=10, help="of wall time; 0 prints the tables")
    parser.add_argument("--out", type=Path, help="the file of rows; by default that of the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=8, help="cells that train at once on a GPU")
    parser.add_argument(
        "--settings",
        type=int,
        nargs="*",
        help="only these of the study's settings, from 1; by default all",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    iso.keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    study, deadline, device = (
        STUDIES[options.method],
        time.time() + 3600 * options.hours,
        torch.device(options.device),
    )
    if options.settings:
        study = replace(
            study, settings=tuple(study.settings[number - 1] for number in options.settings)
        )
    out = options.out or RESULTS / f"evidence_{options.method}.json"
    about = dict(claim=study.claim, machine=processor(), torch=torch.__version__)
    rows = json.loads(out.read_text())["rows"] if out.is_file() else []
    RUNS.mkdir(parents=True, exist_ok=True)
    if options.hours:
        together = options.together if device.type == "cuda" else 1
        cells, snapshot = partial(open_cells, study, rows), RUNS / f"{options.method}.pt"
        for row in train(study, cells, Images(device), deadline, snapshot, together):
            rows.append(row)
            text = json.dumps(about | dict(rows=rows)).replace('{"arm"', '\n{"arm"') + "\n"
            part = out.with_suffix(".part")
            part.write_text(text)
            part.replace(out)
    for setting in study.settings:
        if lines := table(study, setting, rows):
            show(f"{setting.images} images, {setting.epochs} epochs", lines)
    left = next(open_cells(study, rows), None)
    print("\nall cells are trained" if left is None else f"\nnext: {left}")


if __name__ == "__main__":
    main()
