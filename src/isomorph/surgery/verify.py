"""Proof that two models compute the same function, on the inputs that matter, in two precisions."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.compiled import unwrap_compiled
from isomorph.surgery.joint_projections import joint_parts
from isomorph.surgery.notes import notes
from isomorph.surgery.recast import edits_since


def _max_or_inf(values: Iterable[float]) -> float:
    """The maximum, where NaN counts as infinitely wrong."""
    return max(float("inf") if value != value else value for value in values)


@dataclass(frozen=True)
class TargetDeviation:
    """What one recast module does with the very input that the original received."""

    name: str
    kind: str
    deviation: float
    scale: float


@dataclass(frozen=True)
class InputDeviation:
    """Largest |difference| of the outputs for one input, in float32 and float64, and the largest |output|."""

    shape: str
    fp32: float
    fp64: float
    scale: float


@dataclass(frozen=True)
class VerifyReport:
    """Largest |difference| of the outputs in float32 and float64, per input, and per recast module in float64.

    It passes when every difference, of outputs and of recast modules alike, is within `atol` of outputs up to 1 and
    within that share of larger ones. The modules count too because a residual branch that is still switched off (a
    zero-initialised norm) hides them from the output.
    """

    atol: float
    inputs: tuple[InputDeviation, ...]
    targets: tuple[TargetDeviation, ...]
    notes: tuple[str, ...] = ()
    """What else surgery has changed, as `notes` of the recast model says: ties between parameters."""

    @property
    def fp32(self) -> float:
        return _max_or_inf(row.fp32 for row in self.inputs)

    @property
    def fp64(self) -> float:
        return _max_or_inf(row.fp64 for row in self.inputs)

    @property
    def passed(self) -> bool:
        outputs = [(max(row.fp32, row.fp64), row.scale) for row in self.inputs]
        modules = [(row.deviation, row.scale) for row in self.targets]
        finite = math.isfinite(self.fp32 + self.fp64)
        return finite and all(difference <= self.atol * max(1.0, scale) for difference, scale in outputs + modules)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed}

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "NOT equal"
        largest = _max_or_inf(row.scale for row in self.inputs)
        share = f", of outputs up to {largest:.3g}" if largest > 1 else ""
        lines = [
            f"{verdict} within {self.atol:g}: max |diff| {self.fp32:.3g} (float32), {self.fp64:.3g} (float64){share}"
        ]
        lines += [f"  input {r.shape}: {r.fp32:.3g}, {r.fp64:.3g} of max |out| {r.scale:.3g}" for r in self.inputs]
        if self.targets:
            width = max(len(target.name) for target in self.targets)
            lines.append("  by module, on the original's own input (float64):")
            lines += [
                f"    {t.name:<{width}}  {t.kind}  max |diff| {t.deviation:.3g} of max |out| {t.scale:.3g}"
                for t in self.targets
            ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


class NotEqual(UserError):
    """The models differ; `report` says where, and is the message."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__(str(report))
        self.report = report


def compare_outputs(
    original: nn.Module,
    recast: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    atol: float | None = None,
    seeds: Sequence[int] = (),
) -> VerifyReport:
    """Compares two models on the same inputs, in eval mode, in float32 and float64.

    `inputs`: one batch or several, of any sizes the models take; each seed adds a standard normal batch of every
    given size. `atol` defaults to the loosest tolerance of the rules that made `recast` from `original` (1e-5 if none).
    Both models are left as they were; of a compiled one the model inside is compared.
    """
    batches = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not batches:
        raise UserError("verify needs at least one input batch")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    batches += [torch.randn(b.shape, generator=g).to(b.device) for g in generators for b in batches[:]]
    if atol is None:
        atol = max([edit.rule.atol for edit in edits_since(recast, original)], default=1e-5)
    noted = notes(recast)[len(notes(original)) :]
    original, recast = unwrap_compiled(original), unwrap_compiled(recast)
    models = {
        dtype: (_eval_copy(original, dtype), _eval_copy(recast, dtype)) for dtype in (torch.float32, torch.float64)
    }
    return VerifyReport(
        atol=atol,
        inputs=tuple(_input_deviation(models, batch) for batch in batches),
        targets=_target_deviations(*models[torch.float64], batches[0].double()),
        notes=noted,
    )


def verify(
    original: nn.Module,
    recast: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    atol: float | None = None,
    seeds: Sequence[int] = (),
) -> VerifyReport:
    """`compare_outputs`, as a proof: the Report when the models are equal within `atol`.

    Raises: NotEqual (a UserError with the Report as text and `.report`) when one is above `atol` or not finite.
    """
    report = compare_outputs(original, recast, inputs, atol, seeds)
    if not report.passed:
        raise NotEqual(report)
    return report


def _eval_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in eval mode and the given precision."""
    return copy.deepcopy(model).to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def _input_deviation(models: dict[torch.dtype, tuple[nn.Module, nn.Module]], batch: Tensor) -> InputDeviation:
    """Largest |a(x) - b(x)| in each precision."""
    found, scale = {}, 0.0
    for dtype, (a, b) in models.items():
        y, z = a(batch.to(dtype)), b(batch.to(dtype))
        if y.shape != z.shape:
            raise UserError(f"the models' outputs have different shapes: {tuple(y.shape)} and {tuple(z.shape)}")
        found[dtype], scale = (y - z).abs().max().item(), y.abs().max().item()
    shape = "x".join(map(str, batch.shape))
    return InputDeviation(shape, found[torch.float32], found[torch.float64], scale)


@torch.no_grad()
def _target_deviations(original: nn.Module, recast: nn.Module, x: Tensor) -> tuple[TargetDeviation, ...]:
    """Each recast module against the one it replaced, on the input that the latter sees in `original`.

    A part of a joint projection is compared as the whole layer.
    """
    parts = joint_parts(original)
    edited = (name for edit in edits_since(recast, original) for name in edit.names)
    names = list(dict.fromkeys(parts[name].joint_name if name in parts else name for name in edited))
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
        recast(x)  # layers that follow the image's grid now stand on this one
        original(x)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[name] for name in names if name in found)
