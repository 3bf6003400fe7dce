"""Compare the outputs of two models in float32 and float64."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.operations import unwrap
from isomorph.surgery.model_inputs import Inputs, check_inputs, check_not_empty, describe_shape, run_model
from isomorph.surgery.recast import check_model
from isomorph.surgery.record import edits_since, notes
from isomorph.surgery.where import joint_parts


def _max_or_inf(values: Iterable[float]) -> float:
    return max(float("inf") if value != value else value for value in values)


@dataclass(frozen=True)
class TargetDeviation:
    """Largest difference of one recast module's output from the original's, on the original's input."""

    name: str
    kind: str
    deviation: float
    scale: float


@dataclass(frozen=True)
class InputDeviation:
    """Largest difference of the models' outputs for one input, in float32 and float64, and the largest output.

    `what` says what the input is, where there are several kinds.
    """

    shape: str
    fp32: float
    fp64: float
    scale: float
    what: str = ""

    def __str__(self) -> str:
        what = f", {self.what}" if self.what else ""
        return f"input {self.shape}{what}: {self.fp32:.3g}, {self.fp64:.3g} of max |out| {self.scale:.3g}"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of comparing two models: largest differences by input, and by recast module in float64.

    It passes if every difference is at most `atol * max(1, largest output)`, both of the models' outputs and of each
    recast module's. The modules are compared too because a residual branch with a zero-initialised norm hides them
    from the output.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
        >>> report = iso.verify(cnn, tcnn, torch.randn(1, 3, 32, 32))
        >>> report.passed, report.fp64 < 1e-4, len(report.targets)
        (True, True, 6)
    """

    atol: float
    inputs: tuple[InputDeviation, ...]
    targets: tuple[TargetDeviation, ...]
    notes: tuple[str, ...] = ()
    """Notes on the recast model, such as parameters that are no longer tied, and on what the result does not show."""

    @property
    def fp32(self) -> float:
        """Largest difference of the outputs in float32, over all inputs."""
        return _max_or_inf(row.fp32 for row in self.inputs)

    @property
    def fp64(self) -> float:
        """Largest difference of the outputs in float64, over all inputs."""
        return _max_or_inf(row.fp64 for row in self.inputs)

    @property
    def passed(self) -> bool:
        """True if every difference is finite and within the tolerance."""
        return self._outputs_agree and all(self._is_within(row.deviation, row.scale) for row in self.targets)

    @property
    def _outputs_agree(self) -> bool:
        finite = math.isfinite(self.fp32 + self.fp64)
        return finite and all(self._is_within(max(row.fp32, row.fp64), row.scale) for row in self.inputs)

    def _is_within(self, difference: float, scale: float) -> bool:
        return difference <= self.atol * max(1.0, scale)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed}

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "NOT equal"
        largest = _max_or_inf(row.scale for row in self.inputs)
        share = f", of outputs up to {largest:.3g}" if largest > 1 else ""
        hidden = "" if self.passed or not self._outputs_agree else ", but modules differ"
        lines = [
            f"{verdict} within {self.atol:g}: "
            f"max |diff| {self.fp32:.3g} (float32), {self.fp64:.3g} (float64){share}{hidden}"
        ]
        lines += [f"  {row}" for row in self.inputs]
        if self.targets:
            width = max(len(target.name) for target in self.targets)
            lines.append("  by module, on the original's own input (float64):")
            lines += [
                f"    {t.name:<{width}}  {t.kind}  max |diff| {t.deviation:.3g} of max |out| {t.scale:.3g}"
                for t in self.targets
            ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


class NotEqual(UserError):
    """Error of `verify` for models that differ; its text is the report, which is also its attribute `report`.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> try:
        ...     iso.verify(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32))
        ... except iso.surgery.NotEqual as error:
        ...     print(error.report.passed)
        False
    """

    def __init__(self, report: VerifyReport) -> None:
        super().__init__(str(report))
        self.report = report


def compare_outputs(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
    what: str = "",
) -> VerifyReport:
    """Compare two models on the same inputs, in eval mode, in float32 and float64; `verify` without the error.

    Copies are compared: both models are unchanged, and compiled ones are unwrapped.

    Args:
        original: the model before surgery.
        recast: the model made from it.
        inputs: a batch (B, C, H, W) or several, of any sizes that the models accept. A batch may also be a dict of the
            tensors that the models take by name, as the tokenisers of transformers return.
        atol: largest difference; by default the largest `atol` of the rules that made `recast`, or 1e-5 without rules.
        seeds: each seed adds a standard normal batch of the shape of every given batch; tensors of integers stay.
        what: what the given batches are, for the report.

    Raises: UserError if there is no batch or an empty one, for a negative `atol`, for what is not a model, or if the
        outputs differ in structure or shapes.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> wide = iso.unstride(cnn, where="layer3")
        >>> iso.surgery.compare_outputs(cnn, wide, torch.randn(1, 3, 32, 32)).passed
        False
    """
    batches = [inputs] if isinstance(inputs, Tensor | Mapping) else list(inputs)
    if not batches:
        raise UserError("verify needs at least one batch of inputs")
    if atol is not None and not atol >= 0:
        raise UserError(f"atol {atol:g} must be at least 0")
    check_model(original)
    check_model(recast)
    for batch in batches:
        check_not_empty(batch)
    named = [(what, batch) for batch in batches]
    for seed in seeds:
        redraw = partial(_normal_like, generator=torch.Generator().manual_seed(seed))
        named += [(f"random, seed {seed}", _map_floats(batch, redraw)) for batch in batches]
    if atol is None:
        atol = max([edit.rule.atol for edit in edits_since(recast, original)], default=1e-5)
    new_notes = notes(recast)[len(notes(original)) :]
    original, recast = unwrap(original), unwrap(recast)
    models = {
        dtype: (_eval_copy(original, dtype), _eval_copy(recast, dtype)) for dtype in (torch.float32, torch.float64)
    }
    rows = tuple(_input_deviation(models, batch, name) for name, batch in named)
    targets = _target_deviations(*models[torch.float64], cast_floats(batches[0], torch.float64))
    report = VerifyReport(atol=atol, inputs=rows, targets=targets, notes=new_notes)
    return replace(report, notes=(*new_notes, *_doubts(report, original, recast)))


def _doubts(report: VerifyReport, original: nn.Module, recast: nn.Module) -> Iterator[str]:
    """Yield notes on what makes a result say less than it seems to."""
    if not all(math.isfinite(row.scale) for row in report.inputs):
        yield "outputs of the original are not finite; check the inputs, and the original's weights"
    if report.passed and not report.targets and all(row.scale == 0 for row in report.inputs):
        yield "all outputs are 0, so they say nothing about the layers before them; a new head may have weights of 0"
    half = sorted({str(p.dtype).removeprefix("torch.") for m in (original, recast) for p in m.parameters()} & _HALF)
    if half and not report.passed:
        yield f"weights are in {' and '.join(half)}: rounding alone can explain the difference; compare in float32"


_HALF = {"float16", "bfloat16"}


def verify(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
) -> VerifyReport:
    """Check that two models compute the same function on the given inputs, and return the differences.

    Arguments as in `compare_outputs`. Outputs are compared in float32 and float64, in eval mode, and so is each recast
    module on the original's input.

    Raises: NotEqual (a UserError with the report as its text) if a difference is above `atol` or not finite.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
        >>> iso.verify(cnn, tcnn, torch.randn(2, 3, 32, 32)).passed
        True
    """
    report = compare_outputs(original, recast, inputs, atol, seeds)
    if not report.passed:
        raise NotEqual(report)
    return report


def _eval_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype).eval().requires_grad_(False)


def _map_floats(batch: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return a batch with its floating-point tensors changed; tensors of integers, such as token ids, stay."""
    check_inputs(batch)
    if isinstance(batch, Tensor):
        return change(batch) if batch.is_floating_point() else batch
    return {name: change(x) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}


def cast_floats(batch: Inputs, dtype: torch.dtype) -> Inputs:
    """Return a batch with its floating-point tensors in the given precision."""
    return _map_floats(batch, lambda x: x.to(dtype))


def _normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator).to(x.device)


def _tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with their names: of a tensor, or of any dicts, lists and data classes of them."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for name, part in output.items():
            yield from _tensors(part, f"{path}.{name}")
    elif isinstance(output, list | tuple):
        for i, part in enumerate(output):
            yield from _tensors(part, f"{path}.{i}")
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name), f"{path}.{field.name}")


def _output_difference(output: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of two outputs, over all their tensors, and the largest value of the first.

    Raises: UserError if the outputs have different shapes, or no tensors.
    """
    pairs, others = list(_tensors(output)), dict(_tensors(other))
    shapes, other_shapes = ({name: tuple(x.shape) for name, x in both} for both in (pairs, others.items()))
    if shapes != other_shapes:
        if set(shapes) == set(other_shapes) == {""}:
            shapes, other_shapes = shapes[""], other_shapes[""]  # type: ignore[assignment]
        raise UserError(f"the outputs of the models have different shapes: {shapes} and {other_shapes}")
    if not pairs:
        raise UserError(f"the output of the model has no tensors: {type(output).__name__}")
    full = [(y.double(), others[name].double()) for name, y in pairs if y.numel()]
    differences = [(y - z).abs().max().item() for y, z in full]
    return _max_or_inf([*differences, 0.0]), _max_or_inf([*(y.abs().max().item() for y, _ in full), 0.0])


@torch.no_grad()
def _input_deviation(
    models: dict[torch.dtype, tuple[nn.Module, nn.Module]], batch: Inputs, what: str
) -> InputDeviation:
    """Return the largest |a(x) - b(x)| in each precision."""
    differences, scale = {}, 0.0
    for dtype, (a, b) in models.items():
        x = cast_floats(batch, dtype)
        differences[dtype], scale = _output_difference(run_model(a, x), run_model(b, x))
    return InputDeviation(describe_shape(batch), differences[torch.float32], differences[torch.float64], scale, what)


@torch.no_grad()
def _target_deviations(original: nn.Module, recast: nn.Module, batch: Inputs) -> tuple[TargetDeviation, ...]:
    """Return the difference of each recast module from the one that it replaced, on the original's input.

    For a part of a joint projection the whole layers are compared.
    """
    parts = joint_parts(original)
    edited = (name for edit in edits_since(recast, original) for name in edit.names)
    names = list(dict.fromkeys(parts[name].joint_name if name in parts else name for name in edited))
    present = dict(original.named_modules())
    left = {name for name, _ in recast.named_modules()}  # merging branches later removes modules
    deviations: dict[str, TargetDeviation] = {}

    def compare_with(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            module = recast.get_submodule(name)
            if type(module) is Attention:  # it has no use for the grid that a hook passes to gated attention
                kwargs = {name: value for name, value in kwargs.items() if name != "grid_size"}
            output, other = _first_tensor(output), _first_tensor(module(*args, **kwargs))
            deviation = (other - output).abs().max().item() if other.shape == output.shape else math.inf
            deviations[name] = TargetDeviation(name, type(module).__name__, deviation, output.abs().max().item())

        return hook

    handles = [
        present[name].register_forward_hook(compare_with(name), with_kwargs=True)
        for name in names
        if name in present and name in left
    ]
    try:
        run_model(recast, batch)  # sets grid_size of the layers that are called outside their model below
        run_model(original, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(deviations[name] for name in names if name in deviations)


def _first_tensor(output: Any) -> Tensor:
    """Return the output of a module, or the first of several, as of torch's and MViT's attention."""
    return output if isinstance(output, Tensor) else output[0]
