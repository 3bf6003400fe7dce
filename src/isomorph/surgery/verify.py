"""Compare the outputs of two models in float32 and float64."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import count_calls
from isomorph.surgery.model_inputs import (
    Inputs,
    cast,
    cast_floats,
    check_not_empty,
    describe_shape,
    map_floats,
    normal_like,
    other_inputs,
    run_model,
)
from isomorph.surgery.outputs import (
    both_outputs,
    first_tensor,
    largest_difference,
    leaves,
    max_or_inf,
    noise_of,
    relative,
)
from isomorph.surgery.recast import check_model, edited_names
from isomorph.surgery.record import edits, edits_since, notes
from isomorph.surgery.where import list_names

ROUNDING = 8
"""Differences up to this many times what a model differs from itself in float64 are rounding."""


@dataclass(frozen=True)
class TargetDeviation:
    """Largest difference of one recast module's output from the original's, on the original's input.

    `rounding` is the difference that the rounding of its weights explains.
    """

    name: str
    kind: str
    deviation: float
    scale: float
    rounding: float = 0.0


@dataclass(frozen=True)
class InputDeviation:
    """Largest difference of the models' outputs for one input, in float32 and float64, and the largest finite output.

    `what` says what the input is, or how it was run, where there are several kinds. `rounding` is the difference that
    rounding explains.
    """

    shape: str
    fp32: float
    fp64: float
    scale: float
    what: str = ""
    rounding: float = 0.0

    @property
    def deviation(self) -> float:
        """The larger difference of both."""
        return max(self.fp32, self.fp64)

    @property
    def name(self) -> str:
        """What the input is."""
        return self.what or self.shape

    def __str__(self) -> str:
        what = f", {self.what}" if self.what else ""
        return f"input {self.shape}{what}: {self.fp32:.3g}, {self.fp64:.3g} of max |out| {self.scale:.3g}"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of comparing two models: largest differences by input, and by recast module in float64.

    It passes if every difference is at most `atol` times the largest output, or no larger than rounding explains (at
    most `atol`); both for the models' outputs and for each recast module's. The modules are compared too because a
    residual branch with a zero-initialised norm hides them from the output.

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

    tried: tuple[InputDeviation, ...] = ()
    """Differences in what `thorough` tries. One in lower precision is in place of `fp32`."""

    not_called: tuple[str, ...] = ()
    """Names of the recast modules whose weights the model reads without calling them."""

    @property
    def fp32(self) -> float:
        """Largest difference of the outputs in float32, over all inputs."""
        return max_or_inf(row.fp32 for row in self.inputs)

    @property
    def fp64(self) -> float:
        """Largest difference of the outputs in float64, over all inputs."""
        return max_or_inf(row.fp64 for row in self.inputs)

    @property
    def finite(self) -> bool:
        """False if a difference is not finite, because outputs are not."""
        return math.isfinite(self.fp32 + self.fp64)

    @property
    def passed(self) -> bool:
        """True if every difference is finite and within the tolerance, and every recast module was called."""
        return not self.not_called and not self._differing

    @property
    def _differing(self) -> list[InputDeviation | TargetDeviation]:
        def is_within(row: Any) -> bool:
            limit = max(self.atol * row.scale if row.scale else 0.0, row.rounding)
            return math.isfinite(row.deviation) and row.deviation <= limit

        rows: list[Any] = [*self.inputs, *self.targets, *self.tried]
        return [row for row in rows if not is_within(row)]

    @property
    def verdict(self) -> str:
        """One sentence: equal or not, within which tolerance, and the largest differences relative to the outputs."""
        if not self.finite:
            return "NOT equal: outputs are not finite"
        if self.not_called:
            return f"NOT equal: the model reads the weights of {list_names(self.not_called)} without calling it"
        single, double = (
            max_or_inf(relative(getattr(row, name), row.scale) for row in self.inputs) for name in ("fp32", "fp64")
        )
        apart = f"max |diff| / max |out| {single:.3g} (float32), {double:.3g} (float64)"
        if not (differing := self._differing):
            return f"equal within {f'{self.atol:g}' if max(single, double) <= self.atol else 'rounding'}: {apart}"
        worst = differing[0]
        hidden = f"; but {worst.name} differs by {relative(worst.deviation, worst.scale):.3g}"
        return f"NOT equal within {self.atol:g}: {apart}{'' if worst in self.inputs else hidden}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed}

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {row}" for row in (*self.inputs, *self.tried))]
        if self.targets:
            width = max(len(target.name) for target in self.targets)
            lines.append("  by module, on the original's own input (float64):")
            lines += [
                f"    {t.name:<{width}}  {t.kind}  max |diff| {t.deviation:.3g} of max |out| {t.scale:.3g}"
                for t in self.targets
            ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__


class NotEqual(UserError):
    """Error of `verify` for models that differ; its text is the report, which is also its attribute `report`.

    With `advice` it is the report's first line and the advice.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> try:
        ...     iso.verify(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32))
        ... except iso.surgery.NotEqual as error:
        ...     print(error.report.passed)
        False
    """

    def __init__(self, report: VerifyReport, advice: str | None = None) -> None:
        super().__init__(str(report) if advice is None else report.verdict + advice)
        self.report, self.exit_status = report, 2 if report.finite else 1


def compare_outputs(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
    what: str = "",
    thorough: bool = False,
) -> VerifyReport:
    """Compare two models on the same inputs, in eval mode, in float32 and float64; `verify` without the error.

    Copies are compared: both models are unchanged, and compiled ones are unwrapped.

    Args:
        original: the model before surgery.
        recast: the model made from it.
        inputs: a batch (B, C, H, W) or several, of any sizes that the models accept. A batch may also be a dict of the
            tensors that the models take by name, as the tokenisers of transformers return.
        atol: largest difference, relative to the largest output; by default the largest `atol` of the rules that made
            `recast`, or 1e-5 without rules.
        seeds: each seed adds a standard normal batch of the shape of every given batch; tensors of integers stay.
        what: what the given batches are, for the report.
        thorough: try also what these inputs cannot show: other sizes and batches, negative inputs, a second call,
            autocast, bfloat16 and train mode, which is only noted: most rules keep the function of eval mode.

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
    original, recast = check_model(original), check_model(recast)
    new_notes = notes(recast)[len(notes(original)) :]
    for batch in batches:
        check_not_empty(batch)
    named = [(what, batch) for batch in batches]
    for seed in seeds:
        redraw = partial(normal_like, generator=torch.Generator().manual_seed(seed))
        named += [(f"random, seed {seed}", map_floats(batch, redraw)) for batch in batches]
    if atol is None:
        atol = max([edit.rule.atol for edit in edits_since(recast, original)], default=1e-5)
    pair = _Pair(original, recast, atol)
    with count_calls(pair.models[torch.float32][1], pair.edited) as calls:
        rows = tuple(pair.row(batch, name) for name, batch in named)
    not_called, unused = pair.uncalled([name for name in pair.edited if not calls[name]], batches[0])
    targets = pair.targets(cast_floats(batches[0], torch.float64))
    tried, said = pair.thorough(batches[0], rows[0]) if thorough else ((), [])
    limits = [f"not compared besides tensors: {', '.join(sorted(pair.others))}"] if pair.others else []
    limits += [] if thorough else [_not_shown([batch for _, batch in named])]
    report = VerifyReport(atol, rows, targets, tried=tried, not_called=not_called)
    new_notes += (
        *_doubts(report, original, recast, pair, batches[0]),
        *unused,
        *said,
        *filter(None, ["; ".join(limits)]),
    )
    return VerifyReport(atol, rows, targets, new_notes, tried, not_called)


def _doubts(
    report: VerifyReport, original: nn.Module, recast: nn.Module, pair: "_Pair", batch: Inputs
) -> Iterator[str]:
    """Yield notes on what makes a result say less than it seems to."""
    scale = max(row.scale for row in report.inputs)
    if not report.finite:
        yield "outputs of the original are not finite; check the inputs, and the original's weights"
    if report.passed and not report.targets and scale == 0:
        yield "all outputs are 0, so they say nothing about the layers before them; a new head may have weights of 0"
    elif report.passed and scale < 1e-3:
        yield f"all outputs are below {scale:.1g}: a head with small random weights hides what the layers before it do"
    half = sorted({str(p.dtype).removeprefix("torch.") for m in (original, recast) for p in m.parameters()} & _HALF)
    if half and not report.passed:
        yield f"weights are in {' and '.join(half)}: rounding alone can explain the difference; compare in float32"
    if not report.passed and pair.is_random(batch):
        yield "the original is random: it differs from itself in a second call"


_HALF = {"float16", "bfloat16"}


def _not_shown(batches: Sequence[Inputs]) -> str:
    """Return a note on what the inputs of a comparison cannot show."""
    tensors = [x for batch in batches for x in ([batch] if isinstance(batch, Tensor) else batch.values())]
    floats = [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
    negative = [] if any((x < 0).any() for x in floats) or not floats else ["negative inputs"]
    return f"not tried: {', '.join(['other sizes and batches', *negative])}, {_CALLS}; thorough=True tries them"


_CALLS = "a second call, autocast, half precision, train mode"


def verify(
    original: nn.Module,
    recast: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    atol: float | None = None,
    seeds: Sequence[int] = (),
    thorough: bool = False,
) -> VerifyReport:
    """Check that two models compute the same function on the given inputs, and return the differences.

    Arguments as in `compare_outputs`. Outputs are compared in float32 and float64, in eval mode, and so is each recast
    module on the original's input.

    Raises: NotEqual (a UserError with the report as its text) if a difference is above `atol` times the largest output
        or not finite, or if the model reads the weights of a recast module and does not call it.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
        >>> iso.verify(cnn, tcnn, torch.randn(2, 3, 32, 32)).passed
        True
    """
    report = compare_outputs(original, recast, inputs, atol, seeds, thorough=thorough)
    if not report.passed:
        raise NotEqual(report)
    return report


def _eval_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model)._apply(partial(cast, dtype=dtype)).eval().requires_grad_(False)


class _Pair:
    """Two models in float32 and float64, and the names of the modules of the second that replaced one of the first."""

    def __init__(self, original: nn.Module, recast: nn.Module, atol: float) -> None:
        self.atol, self.others = atol, set[str]()
        self.models = {
            dtype: (_eval_copy(original, dtype), _eval_copy(recast, dtype)) for dtype in (torch.float32, torch.float64)
        }
        self.edited = edited_names(recast, len(edits(original)))

    @torch.no_grad()
    def row(self, batch: Inputs, what: str) -> InputDeviation:
        """Return the largest |a(x) - b(x)| in each precision. Raises: DoesNotRun if the original cannot read it."""
        single, double = (both_outputs(pair, cast_floats(batch, dtype)) for dtype, pair in self.models.items())
        self.others |= {type(leaf).__name__ for _, leaf in leaves(double[0]) if not isinstance(leaf, Tensor | None)}
        (fp32, _), (fp64, scale) = largest_difference(*single), largest_difference(*double)
        rounding = min(self.atol, ROUNDING * max(map(noise_of, single, double)))
        return InputDeviation(describe_shape(batch), fp32, fp64, scale, what, rounding)

    @torch.no_grad()
    def is_random(self, batch: Inputs) -> bool:
        """True if the original differs from itself in a second call."""
        model, x = self.models[torch.float32][0], cast_floats(batch, torch.float32)
        return bool(noise_of(run_model(model, x), run_model(model, x)))

    @torch.no_grad()
    def uncalled(self, names: Sequence[str], batch: Inputs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return which of the modules that were not called the model reads, and a note on the others."""
        read, x = [], cast_floats(batch, torch.float32)
        for name in names:
            model = copy.deepcopy(self.models[torch.float32][1])
            before, parts = run_model(model, x), set(model.get_submodule(name).modules())
            elsewhere = {p for part in model.modules() if part not in parts for p in part._parameters.values()}
            for parameter in {p for part in parts for p in part.parameters()} - elsewhere:
                parameter.fill_(math.nan)
            if largest_difference(before, run_model(model, x))[0]:
                read.append(name)
        unused = [name for name in names if name not in read]
        note = f"{list_names(unused)} was not called on these inputs, so they say nothing about it"
        return tuple(read), (note,) if unused else ()

    @torch.no_grad()
    def targets(self, batch: Inputs) -> tuple[TargetDeviation, ...]:
        """Return the difference of each recast module from the one that it replaced, on the original's input.

        For a part of a joint projection the whole layers are compared.
        """
        original, recast = self.models[torch.float64]
        found: dict[str, TargetDeviation] = {}

        def compare(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            module = recast.get_submodule(name)
            if type(module) is Attention:  # it has no use for the grid that a hook passes to gated attention
                kwargs = {name: value for name, value in kwargs.items() if name != "grid_size"}
            x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.zeros(1))
            output, other = first_tensor(output), first_tensor(module(*args, **kwargs))
            deviation, scale = math.inf, output.abs().max().item()
            if other.shape == output.shape:
                deviation, scale = largest_difference(output, other)
            rounding = min(self.atol, ROUNDING * torch.finfo(torch.float32).eps * x.abs().max().item())
            row = TargetDeviation(name, type(module).__name__, deviation, scale, rounding)
            found[name] = max(row, found.get(name, row), key=lambda row: relative(row.deviation, row.scale))

        present = dict(original.named_modules())
        names = [name for name in self.edited if name in present]
        handles = [present[name].register_forward_hook(partial(compare, name), with_kwargs=True) for name in names]
        try:
            run_model(recast, batch)  # sets grid_size of the layers that are called outside their model below
            run_model(original, batch)
        finally:
            for handle in handles:
                handle.remove()
        return tuple(found[name] for name in names if name in found)

    def thorough(self, batch: Inputs, base: InputDeviation) -> tuple[tuple[InputDeviation, ...], list[str]]:
        """Return the differences in all that a batch cannot show, and notes on what could not be compared."""
        attempts = {what: partial(self.row, other, what) for what, other in other_inputs(batch)}
        attempts |= {what: partial(self._lower, batch, base, what) for what in ("autocast to bfloat16", "bfloat16")}
        rows, said = [], [self._in_training(cast_floats(batch, torch.float32))]
        for what, attempt in attempts.items():
            try:
                rows.append(attempt())
            except DoesNotRun as error:
                said.append(f"{what} was not compared: {error}")
        return tuple(rows), said

    @torch.no_grad()
    def _lower(self, batch: Inputs, base: InputDeviation, what: str) -> InputDeviation:
        """Return the difference in lower precision, and what the original's own rounding explains of it."""
        models, x = list(self.models[torch.float32]), cast_floats(batch, torch.float32)
        exact = run_model(self.models[torch.float64][0], cast_floats(batch, torch.float64))
        device = next((p.device.type for p in models[0].parameters()), "cpu")
        if what == "bfloat16":
            models, x = [copy.deepcopy(model).bfloat16() for model in models], cast_floats(batch, torch.bfloat16)
        with torch.autocast(device, torch.bfloat16, enabled=what != "bfloat16"):
            y, z = both_outputs(models, x)
        rounding = ROUNDING * noise_of(y, exact)
        return InputDeviation(base.shape, largest_difference(y, z)[0], base.fp64, base.scale, what, rounding)

    def _in_training(self, x: Inputs) -> str:
        """Return a note on train mode, in which most rules do not keep the function."""

        def run(model: nn.Module, seed: int) -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return run_model(copy.deepcopy(model).train(), x)

        a, b = self.models[torch.float32]
        try:
            first, again, other = run(a, 0), run(a, 1), run(b, 0)
            if largest_difference(first, again)[0]:
                return "train mode was not compared: the original is random in it"
            return f"train mode: relative difference {relative(*largest_difference(first, other)):.3g}"
        except UserError as error:
            return f"train mode was not compared: {error}"
