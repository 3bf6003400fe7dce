"""Proof that two models compute the same function, on the inputs that matter, in two precisions."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.recast import edits


@dataclass(frozen=True)
class TargetDeviation:
    """What one recast module does with the very input that the original received."""

    name: str
    kind: str
    deviation: float
    scale: float


@dataclass(frozen=True)
class Report:
    """Largest |difference| of the outputs in float32 and float64, per input, and per recast module in float64."""

    fp32: float
    fp64: float
    atol: float
    inputs: tuple[tuple[str, float, float], ...]
    targets: tuple[TargetDeviation, ...]

    @property
    def passed(self) -> bool:
        return math.isfinite(self.fp32 + self.fp64) and max(self.fp32, self.fp64) <= self.atol

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "NOT equal"
        lines = [f"{verdict} within {self.atol:g}: max |diff| {self.fp32:.3g} (float32), {self.fp64:.3g} (float64)"]
        lines += [f"  input {shape}: {fp32:.3g}, {fp64:.3g}" for shape, fp32, fp64 in self.inputs]
        if self.targets:
            width = max(len(target.name) for target in self.targets)
            lines.append("  by module, on the original's own input (float64):")
            lines += [
                f"    {t.name:<{width}}  {t.kind}  max |diff| {t.deviation:.3g} of max |out| {t.scale:.3g}"
                for t in self.targets
            ]
        return "\n".join(lines)


class NotEqual(UserError):
    """The models differ; `report` says where, and is the message."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def compare(
    original: nn.Module,
    recast: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    atol: float | None = None,
    seeds: Sequence[int] = (),
) -> Report:
    """Compares two models on the same inputs, in eval mode, in float32 and float64.

    `inputs`: one batch or several, of any sizes the models take; each seed adds a standard normal batch of every
    given size. `atol` defaults to the loosest tolerance of the rules that made `recast` from `original` (1e-5 if none).
    Both models are left as they were.
    """
    batches = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not batches:
        raise UserError("verify needs at least one input batch")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    batches += [torch.randn(b.shape, generator=g).to(b.device) for g in generators for b in batches[:]]
    if atol is None:
        atol = max([edit.rule.atol for edit in edits(recast)[len(edits(original)) :]], default=1e-5)
    models = {dtype: (frozen(original, dtype), frozen(recast, dtype)) for dtype in (torch.float32, torch.float64)}
    rows = []
    for batch in batches:
        fp32, fp64 = (difference(*pair, batch.to(dtype)) for dtype, pair in models.items())
        rows.append(("x".join(map(str, batch.shape)), fp32, fp64))
    return Report(
        fp32=worst(row[1] for row in rows),
        fp64=worst(row[2] for row in rows),
        atol=atol,
        inputs=tuple(rows),
        targets=target_deviations(*models[torch.float64], batches[0].double()),
    )


def verify(
    original: nn.Module,
    recast: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    atol: float | None = None,
    seeds: Sequence[int] = (),
) -> Report:
    """`compare`, as a proof: the Report when the models are equal within `atol`.

    Raises: NotEqual (a UserError with the Report as text and `.report`) when one is above `atol` or not finite.
    """
    report = compare(original, recast, inputs, atol, seeds)
    if not report.passed:
        raise NotEqual(report)
    return report


def worst(values: Any) -> float:
    """The maximum, where NaN counts as infinitely wrong."""
    return max(float("inf") if value != value else value for value in values)


def frozen(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in eval mode and the given precision."""
    return copy.deepcopy(model).to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def difference(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    """Largest |a(x) - b(x)|."""
    y, z = a(x), b(x)
    if y.shape != z.shape:
        raise UserError(f"the models' outputs have different shapes: {tuple(y.shape)} and {tuple(z.shape)}")
    return (y - z).abs().max().item()


@torch.no_grad()
def target_deviations(original: nn.Module, recast: nn.Module, x: Tensor) -> tuple[TargetDeviation, ...]:
    """Each recast module against the one it replaced, on the input that the latter sees in `original`."""
    names = [name for edit in edits(recast)[len(edits(original)) :] for name in edit.names]
    present = dict(original.named_modules())
    found: dict[str, TargetDeviation] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            module = recast.get_submodule(name)
            other = module(*args, **kwargs)
            deviation = (other - output).abs().max().item() if other.shape == output.shape else math.inf
            found[name] = TargetDeviation(name, type(module).__name__, deviation, output.abs().max().item())

        return hook

    handles = [present[name].register_forward_hook(watch(name), with_kwargs=True) for name in names if name in present]
    try:
        original(x)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[name] for name in names if name in found)
