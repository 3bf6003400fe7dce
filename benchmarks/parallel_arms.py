"""Train many small networks of one form at once, which keeps a GPU busy that a single small network cannot.

The weights of all networks are stacked and run by `torch.func.vmap`; one training step of the whole stack (batch,
forward, backward, optimiser) is one CUDA graph. On a CPU the same step runs without a graph. All images stay on the
device.

Letters: K networks (arms) in the stack, S seeds among them, B images in a batch, P parameters.
"""

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.optim import Lamb
from torch import Tensor, nn
from torch.func import functional_call, vmap

from interleave import synchronize
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source
from isomorph.layers.pyramid import Pyramid
from isomorph.training import parameter_groups

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PAD = 4
KINDS = ("branches", "pyramids", "decayed", "undecayed")
"""Kinds of parameters: pyramid weights before a BatchNorm, other pyramid weights, other weights, biases and norms."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "lamb": Lamb,
}


@dataclass(frozen=True)
class Arm:
    """One training run. Factors multiply the learning rate or the weight decay of a kind of parameters.

    `fuse_at` is the share of the epochs after which pyramids are fused, and `fused_lr` the factor of the learning rate
    from then on; `tf32` allows it on a GPU. `optimizer` is one of `OPTIMIZERS`, on a GPU "adamw". Weights of branches
    are trained for the share `branches_until` of the steps, and frozen from then on.
    """

    network: str
    form: str
    epochs: int
    lr: float
    seed: int
    batch: int = 256
    weight_decay: float = 0.05
    branch_lr: float = 1.0
    pyramid_lr: float = 1.0
    branch_decay: float = 1.0
    fuse_at: float = 1.0
    tf32: bool = True
    optimizer: str = "adamw"
    fused_lr: float = 1.0
    branches_until: float = 1.0

    def rate(self, kind: str) -> float:
        """Return the peak learning rate of a kind of parameters."""
        factors = {"branches": self.branch_lr * self.pyramid_lr, "pyramids": self.pyramid_lr}
        return self.lr * factors.get(kind, 1.0)

    def decay(self, kind: str) -> float:
        """Return the weight decay of a kind of parameters."""
        return self.weight_decay * {"undecayed": 0.0, "branches": self.branch_decay}.get(kind, 1.0)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Arm) if field.default is not MISSING}
"""The settings of an arm that need not be given."""


class Images:
    """CIFAR-10 on the device: 20,000 training images with a border, 5,000 others for validation, 10,000 for test."""

    crop_step = 1
    """Random crops start at multiples of this many pixels."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        images, labels = decoded("train")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(20))
        self.splits = {"val": _part(images, labels, order[:5000][:limit], device)}
        self.splits["test"] = tuple(t[:limit].to(device) for t in decoded("test"))  # type: ignore[assignment]
        train, self.labels = _part(images, labels, order[5000:25000][:limit], device)
        self.count, self.device = len(train), device
        self.padded = F.pad(train, (PAD,) * 4).flatten()  # zeros, as black borders
        self.mean, self.std = (255 * torch.tensor(t, device=device).view(3, 1, 1) for t in (MEAN, STD))

    def normalise(self, images: Tensor) -> Tensor:
        """Return uint8 images as normalised floats."""
        return (images.float() - self.mean) / self.std

    def answers(self, order: Tensor, offset: Tensor, flip: Tensor) -> Tensor:
        """Return what networks learn for images, cropped and flipped: labels. Shape: (S, B) three times -> (S, B)

        `offset` is where the crop starts in the padded image: row times width plus column.
        """
        return self.labels[order]


def _part(images: Tensor, labels: Tensor, chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    return images[chosen].to(device), labels[chosen].to(device)


@cache
def decoded(split: str) -> tuple[Tensor, Tensor]:
    """Return all images of a split as uint8 and their labels, decoded by all cores."""
    source = open_source("cifar10", split)
    cores = os.cpu_count() or 1
    with get_context("fork").Pool(cores) as pool:
        parts = pool.map(partial(_decode, source), [range(i, len(source), cores) for i in range(cores)])
    images = torch.empty(len(source), 3, 32, 32, dtype=torch.uint8)
    for i, part in enumerate(parts):
        images[i::cores] = torch.from_numpy(part)
    return images, torch.from_numpy(source.labels)


def _decode(source: Source, indices: range) -> np.ndarray:
    return np.stack([np.asarray(source.image(i)).transpose(2, 0, 1) for i in indices])


class Batches:
    """Random batches of each seed: shuffled, cropped out of the border and flipped. Networks of one seed share them."""

    def __init__(self, images: Images, seeds: Sequence[int], batch: int) -> None:
        self.images, self.batch = images, batch
        self.generators = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
        shape = (len(seeds), images.count)
        self.order, self.offset, self.flip = (torch.zeros(shape, dtype=torch.long, device=images.device) for _ in "ijk")
        self.steps = images.count // batch
        self.lines = torch.arange(32, device=images.device)
        self.planes = torch.arange(3, device=images.device).view(3, 1, 1) * (32 + 2 * PAD) ** 2

    def shuffle(self) -> None:
        """Draw the order and the augmentation of one epoch."""
        for row, generator in enumerate(self.generators):
            count = self.images.count
            step = self.images.crop_step
            crops = step * torch.randint(2 * PAD // step + 1, (2, count), generator=generator)
            self.order[row].copy_(torch.randperm(count, generator=generator))
            self.offset[row].copy_(crops[0] * (32 + 2 * PAD) + crops[1])
            self.flip[row].copy_(torch.randint(2, (count,), generator=generator))

    def draw(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and answers of a step, a tensor so that a graph can count.

        Shape: -> (S, B, 3, 32, 32), (S, B, ...)
        """
        width = 32 + 2 * PAD
        at = step % self.steps * self.batch + torch.arange(self.batch, device=step.device)
        order, offset, flip = (t[:, at] for t in (self.order, self.offset, self.flip))  # (S, B)
        first = (order * 3 * width**2 + offset)[..., None, None, None]
        columns = torch.where(flip[..., None].bool(), 31 - self.lines, self.lines)[..., None, None, :]
        index = first + self.planes + self.lines[:, None] * width + columns  # (S, B, 3, 32, 32)
        return self.images.normalise(self.images.padded[index]), self.images.answers(order, offset, flip)


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of every parameter, one of `KINDS`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, lr=1e-3, branch_lr="0.1x")
    kinds = {names[p]: group["name"] for group in groups for p in group["params"]}
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Pyramid))
    return {n: "pyramids" if kind == "decayed" and n.startswith(inside) else kind for n, kind in kinds.items()}


class Stack:
    """K networks of one form with their optimiser, trained from step `first` on, of `total` steps.

    `loss` maps (outputs of one network, answers of the images) to the mean loss.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        models: Sequence[nn.Module],
        images: Images,
        span: tuple[int, int],
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        self.arms, self.models, self.loss = list(arms), list(models), loss
        self.device, self.total = images.device, span[1]
        self.base = copy.deepcopy(models[0]).to(self.device).train()
        seeds = sorted({arm.seed for arm in arms})
        self.row = torch.tensor([seeds.index(arm.seed) for arm in arms], device=self.device)
        self.batches = Batches(images, seeds, arms[0].batch)
        self.fused = span[0] > 0
        self._stack_parameters()
        self.step_number = torch.tensor(span[0], device=self.device)
        self.losses = torch.zeros(len(arms), device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def _stack_parameters(self) -> None:
        """Copy the weights of all networks into one tensor (K, P), sorted by kind, and make the optimiser."""
        kinds = parameter_kinds(self.models[0])
        names = sorted(kinds, key=lambda name: KINDS.index(kinds[name]))
        states = [dict(model.named_parameters()) for model in self.models]
        columns = [torch.stack([state[name].detach().flatten() for state in states]) for name in names]
        self.flat = torch.cat(columns, 1).to(self.device)
        self.gradient = torch.zeros_like(self.flat)
        parts = self.flat.split([column.shape[1] for column in columns], 1)
        shapes = [states[0][name].shape for name in names]
        self.parameters = {
            name: part.unflatten(1, shape or (1,)).view(-1, *shape).detach().requires_grad_()
            for name, part, shape in zip(names, parts, shapes, strict=True)
        }
        buffers = [dict(model.named_buffers()) for model in self.models]
        self.buffers = {n: torch.stack([each[n] for each in buffers]).to(self.device) for n in buffers[0]}
        self._build_optimizer(
            [[c.shape[1] for n, c in zip(names, columns, strict=True) if kinds[n] == k] for k in KINDS]
        )

    def _build_optimizer(self, sizes: list[list[int]]) -> None:
        """Make the optimiser, with one group for each network and kind; rates are entries of one tensor (K, kinds).

        `sizes` are those of the parameters of each kind. LAMB needs them, as its steps depend on their lengths.
        """
        kind_of_optimizer, on_gpu = self.arms[0].optimizer, self.device.type == "cuda"
        if on_gpu and kind_of_optimizer != "adamw":
            raise ValueError(f"{kind_of_optimizer} cannot be part of a CUDA graph: run these arms on a CPU")
        factors = [arm.fused_lr if self.fused else 1.0 for arm in self.arms]
        peaks = [[f * arm.rate(kind) for kind in KINDS] for f, arm in zip(factors, self.arms, strict=True)]
        self.peaks = torch.tensor(peaks, device=self.device)
        self.rates = self.peaks.clone()
        lasts = [[arm.branches_until if kind == "branches" else 1.0 for kind in KINDS] for arm in self.arms]
        self.last_step = self.total * torch.tensor(lasts, device=self.device)
        groups = []
        totals = list(map(sum, sizes))
        pairs = zip(self.flat.split(totals, 1), self.gradient.split(totals, 1), sizes, KINDS, strict=True)
        for column, (weights, gradients, each, kind) in enumerate(pairs):
            lengths = each if kind_of_optimizer == "lamb" else [sum(each)]
            for row, arm in enumerate(self.arms if each else []):
                leaves = []
                for values, gradient in zip(weights[row].split(lengths), gradients[row].split(lengths), strict=True):
                    leaves.append(values.detach().requires_grad_())
                    leaves[-1].grad = gradient
                groups.append(dict(params=leaves, lr=self.rates[row, column], weight_decay=arm.decay(kind)))
        options = dict(fused=True, capturable=True) if on_gpu else dict(foreach=False)
        self.optimizer = OPTIMIZERS[kind_of_optimizer](groups, lr=torch.tensor(1e-3), **options)

    def _forward(self, images: Tensor, axis: int | None = 0) -> Tensor:
        """Run every network on its own images, or on the same ones (axis None). Shape: -> (K, B, outputs)"""

        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.base, (parameters, buffers), (x,))

        if len(self.arms) > 1:
            return vmap(call, (0, 0, axis))(self.parameters, self.buffers, images)
        own = ({name: tensor[0] for name, tensor in state.items()} for state in (self.parameters, self.buffers))
        return call(*own, images if axis is None else images[0]).unsqueeze(0)

    def _step(self) -> None:
        """Train all networks on their next batch; no value is read by the host."""
        warm, done = max(1, self.total // 20), self.step_number + 1
        cosine = 0.5 * (1 + torch.cos(math.pi * (done - warm) / max(1, self.total - warm)))
        self.rates.copy_(self.peaks * torch.where(done <= warm, done / warm, cosine) * (done <= self.last_step))
        images, answers = self.batches.draw(self.step_number)
        losses = vmap(self.loss)(self._forward(images[self.row]), answers[self.row])  # (K,)
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()), allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self.parameters.values(), strict=True)]
        torch.cat([g.flatten(1) for g in found], 1, out=self.gradient)
        self.optimizer.step()
        self.losses.add_(losses.detach())
        self.step_number.add_(1)

    def capture(self) -> None:
        """Record one step as a CUDA graph, after three steps to warm up that are undone."""
        kept = [self.flat, *self.buffers.values(), self.step_number]
        before = [tensor.clone() for tensor in kept]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._step()
        self.graph = graph
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.losses.zero_()
        torch.cuda.synchronize()

    def step(self) -> None:
        """Train one step, by the graph on a stream of the stack's own if there is one."""
        if self.device.type != "cuda":
            self._step()
            return
        with torch.cuda.stream(self.stream):
            self.graph.replay()  # type: ignore[union-attr]

    def state(self) -> dict[str, object]:
        """Return what training continues from, without a CUDA graph: weights, optimiser, generators and step number."""
        return {
            "tensors": [self.flat.detach(), self.step_number, *self.buffers.values()],
            "optimizer": [dict(self.optimizer.state[leaf]) for leaf in self._leaves()],
            "generators": [generator.get_state() for generator in self.batches.generators],
        }

    def _leaves(self) -> list[Tensor]:
        """Return the tensors that the optimiser changes, in order."""
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of a stack of the same arms."""
        for tensor, value in zip([self.flat, self.step_number, *self.buffers.values()], state["tensors"], strict=True):
            tensor.detach().copy_(value)
        self.optimizer.state.update(zip(self._leaves(), state["optimizer"], strict=True))
        for generator, value in zip(self.batches.generators, state["generators"], strict=True):
            generator.set_state(value)

    @torch.no_grad()
    def evaluate(self, images: Images, split: str, chunk: int = 2500) -> tuple[list[float], list[float]]:
        """Return top-1 in percent and negative log-likelihood of every network on a split."""
        pixels, labels = images.splits[split]
        with evaluating(self.base):
            parts = [self._forward(images.normalise(part), None) for part in pixels.split(chunk)]
        logits = torch.cat(parts, 1).float()  # (K, M, classes)
        top1 = (logits.argmax(-1) == labels).float().mean(1) * 100
        nll = vmap(F.cross_entropy, (0, None))(logits, labels)
        return top1.tolist(), nll.tolist()

    def trained(self) -> list[nn.Module]:
        """Return the networks with their trained weights, on the CPU in eval mode."""
        models = []
        for row, model in enumerate(self.models):
            own = {n: t[row].detach().cpu() for n, t in {**self.parameters, **self.buffers}.items()}
            twin = copy.deepcopy(model).cpu()
            twin.load_state_dict(own)
            models.append(twin.eval())
        return models


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the block."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def train_stacks(stacks: Sequence[Stack], epochs: int, after_epoch: Callable[[int], object], done: int = 0) -> None:
    """Train stacks with equally many steps side by side, each in its own stream, up to a number of epochs.

    `done` epochs are behind them.
    """
    for epoch in range(done + 1, epochs + 1):
        for stack in stacks:
            stack.batches.shuffle()
        synchronize(stacks[0].device)  # the order of the images is written on another stream than it is read on
        for _ in range(stacks[0].batches.steps):
            for stack in stacks:
                stack.step()
        synchronize(stacks[0].device)
        after_epoch(epoch)
