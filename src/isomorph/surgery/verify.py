"""Compare the outputs of two models in float32 and float64."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import count_calls
from isomorph.surgery.calls import (
    Inputs,
    cast,
    cast_floats,
    check_not_empty,
    describe_shape,
    largest_difference,
    leaves,
    map_floats,
    max_or_inf,
    noise_of,
    other_inputs,
    relative,
    run_model,
)
from isomorph.surgery.modules import list_names
from isomorph.surgery.recast import check_model, edited_names
from isomorph.surgery.rule import edits, edits_since, notes

# Differences up to this many times what a model differs from itself in float64 are rounding.
ROUNDING = 8


@dataclass(frozen=True)
class Difference:
    """Largest difference of two outputs in float32 and float64, and the largest finite output.

    Of the models for one input, which the `name` describes; or of one recast module, of the class `kind`, from the
    original's, on the original's own input in float64. `rounding` is the difference that rounding explains.
    """

    name: str
    fp32: float
    fp64: float
    scale: float
    rounding: float = 0.0
    kind: str = ""

    @property
    def deviation(self) -> float:
        """The larger difference of both."""
        return max(self.fp32, self.fp64)

    def __str__(self) -> str:
        scale = f"where max |out| is {self.scale:.3g}"
        if self.kind:
            return f"module {self.name}, {self.kind}: max |diff| {self.fp64:.3g} {scale}"
        return f"input {self.name}: max |diff| {self.fp32:.3g}, {self.fp64:.3g} {scale}"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of comparing two models: largest differences by input, and by recast module in float64.

    It passes if every difference is at most `atol` times the largest output, or no larger than rounding explains (at
    most `atol`); both for the models' outputs and for each recast module's. The modules are compared too because a
    residual branch with a zero-initialised norm hides them from the output.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> report = iso.verify(cnn, tcnn, torch.randn(1, 3, 32, 32))
    >>> report.passed, report.fp64 < 1e-4, len(report.targets)
    (True, True, 6)
    """

    atol: float
    inputs: tuple[Difference, ...]
    targets: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the recast model, such as parameters that are no longer tied, and on what the result does not show."""

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
    def _differing(self) -> list[Difference]:
        def is_within(row: Difference) -> bool:
            limit = max(self.atol * row.scale if row.scale else 0.0, row.rounding)
            return math.isfinite(row.deviation) and row.deviation <= limit

        return [row for row in (*self.inputs, *self.targets) if not is_within(row)]

    @property
    def verdict(self) -> str:
        """One sentence: equal or not, within which tolerance, and the largest differences relative to the outputs."""
        if not self.finite:
            return "NOT equal: outputs are not finite"
        if self.not_called:
            return f"NOT equal: the model reads the weights of {list_names(self.not_called)} without calling it"
        single = max_or_inf(relative(row.fp32, row.scale) for row in self.inputs)
        double = max_or_inf(relative(row.fp64, row.scale) for row in self.inputs)
        apart = f"max |diff| / max |out| {single:.3g} (float32), {double:.3g} (float64)"
        if not (differing := self._differing):
            if self.atol >= 1:
                return f"any difference is accepted, as atol is {self.atol:g}: {apart}"
            return f"equal within {f'{self.atol:g}' if max(single, double) <= self.atol else 'rounding'}: {apart}"
        worst = differing[0]
        hidden = f"; but {worst.name} differs by {relative(worst.deviation, worst.scale):.3g}" if worst.kind else ""
        return f"NOT equal within {self.atol:g}: {apart}{hidden}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed}

    def __str__(self) -> str:
        rows = [*self.inputs, *self.targets, *(f"note: {note}" for note in self.notes)]
        return "\n".join([self.verdict, *(f"  {row}" for row in rows)])

    __repr__ = __str__


class NotEqual(UserError):
    """Error of `verify` for models that differ; its text is the report, which is also its attribute `report`.

    With `advice` it is the report's first line and the advice.

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

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.*.conv?")
    >>> iso.verify(cnn, tcnn, torch.randn(2, 3, 32, 32)).passed
    True
    """
    report = compare_outputs(original, recast, inputs, atol, seeds, thorough=thorough)
    if not report.passed:
        raise NotEqual(report)
    return report


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
        thorough: try the first batch a second time too, with the other sign, and at another size and batch size.

    Raises: UserError if there is no batch or an empty one, for a negative `atol`, for what is not a model, or if the
        outputs differ in structure or shapes.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.compare_outputs(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32)).passed
    False
    """
    original, recast = check_model(original), check_model(recast)
    batches = list(inputs) if isinstance(inputs, Iterable) and not isinstance(inputs, Tensor | Mapping) else [inputs]
    if not batches:
        raise UserError("verify needs at least one batch of inputs")
    if isinstance(atol, str) or (atol is not None and not atol >= 0):
        raise UserError(f"atol {atol!r} must be a number of at least 0")
    for batch in batches:
        check_not_empty(batch)
    if atol is None:
        atol = max([edit.rule.atol for edit in edits_since(recast, original)], default=1e-5)
    named = [(what, batch) for batch in batches]
    for seed in seeds:
        redraw = partial(_normal_like, generator=torch.Generator().manual_seed(seed))
        named += [(f"random, seed {seed}", map_floats(batch, redraw)) for batch in batches]
    pair = _Pair(original, recast, atol)
    with count_calls(pair.models[torch.float32][1], pair.edited) as calls:
        rows = [pair.row(batch, name) for name, batch in named]
    not_called, unused = pair.uncalled([name for name in pair.edited if not calls[name]], batches[0])
    said = [*notes(recast)[len(notes(original)) :], *unused]
    for name, batch in other_inputs(batches[0]) if thorough else ():
        try:
            rows.append(pair.row(batch, name))
        except DoesNotRun as error:
            said.append(f"{name} was not compared: {error}")
    if not thorough:
        said.append("not tried: other sizes, batch sizes and signs, or a second call; thorough=True tries them")
    targets = pair.targets(cast_floats(batches[0], torch.float64))
    report = VerifyReport(atol, tuple(rows), targets, not_called=not_called)
    return replace(report, notes=(*said, *_doubts(report, pair, batches[0])))


def _normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)


def _doubts(report: VerifyReport, pair: "_Pair", batch: Inputs) -> Iterator[str]:
    if pair.others:
        yield f"not compared besides tensors: {', '.join(sorted(pair.others))}"
    scale = max(row.scale for row in report.inputs)
    if report.passed and scale < 1e-3:
        yield f"all outputs are at most {scale:.1g}: a head with small weights hides what the layers before it do"
    hidden = list_names([row.name for row in report.targets if row.fp64 > 1e-12 * row.scale])
    if hidden and not any(row.deviation for row in report.inputs):
        yield f"the outputs do not depend on {hidden} here (a zero weight, as by zero_init_last?); give trained weights"
    if not report.passed and pair.is_random(batch):
        yield "the original is random: it differs from itself in a second call"


class _Pair:
    """Two models in float32 and float64, and the names of the modules of the second that replaced one of the first."""

    def __init__(self, original: nn.Module, recast: nn.Module, atol: float) -> None:
        def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
            return copy.deepcopy(model)._apply(partial(cast, dtype=dtype)).eval().requires_grad_(False)

        self.models = {t: (prepared(original, t), prepared(recast, t)) for t in (torch.float32, torch.float64)}
        self.edited = edited_names(recast, len(edits(original)))
        self.atol, self.others = atol, set[str]()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # a caller's autocast would compute in half precision
    @torch.autocast("cuda", enabled=False)
    def row(self, batch: Inputs, what: str) -> Difference:
        outputs = []
        for dtype, (original, recast) in self.models.items():
            x = cast_floats(batch, dtype)
            outputs.append([run_model(original, x)])
            try:
                outputs[-1].append(run_model(recast, x))
            except DoesNotRun as error:
                raise UserError(f"{error}; the original does") from error
        single, double = outputs
        self.others |= {type(leaf).__name__ for _, leaf in leaves(double[0]) if not isinstance(leaf, Tensor | None)}
        (fp32, _), (fp64, scale) = largest_difference(*single), largest_difference(*double)
        rounding = min(self.atol, ROUNDING * max(map(noise_of, single, double)))
        return Difference(", ".join(filter(None, (describe_shape(batch), what))), fp32, fp64, scale, rounding)

    @torch.no_grad()
    def is_random(self, batch: Inputs) -> bool:
        model, x = self.models[torch.float32][0], cast_floats(batch, torch.float32)
        return bool(noise_of(run_model(model, x), run_model(model, x)))

    @torch.no_grad()
    def uncalled(self, names: Sequence[str], batch: Inputs) -> tuple[tuple[str, ...], list[str]]:
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
        unused = list_names([name for name in names if name not in read])
        return tuple(read), [f"{unused} was not called on these inputs, so they say nothing about it"] if unused else []

    @torch.no_grad()
    def targets(self, batch: Inputs) -> tuple[Difference, ...]:
        original, recast = self.models[torch.float64]
        found: dict[str, Difference] = {}

        def compare(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            module = recast.get_submodule(name)
            if type(module) is Attention:  # it has no use for the grid that a hook passes to gated attention
                kwargs = {name: value for name, value in kwargs.items() if name != "grid_size"}
            x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.zeros(1))
            output, other = (y if isinstance(y, Tensor) else y[0] for y in (output, module(*args, **kwargs)))
            same = other.shape == output.shape
            deviation, scale = largest_difference(output, other) if same else (math.inf, output.abs().max().item())
            rounding = min(self.atol, ROUNDING * torch.finfo(torch.float32).eps * x.abs().max().item())
            row = Difference(name, deviation, deviation, scale, rounding, type(module).__name__)
            found[name] = max(row, found.get(name, row), key=lambda row: relative(row.fp64, row.scale))

        present = dict(original.named_modules())
        names = [name for name in self.edited if name in present]
        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(present[name].register_forward_hook(partial(compare, name), with_kwargs=True))
            run_model(recast, batch)  # sets grid_size of the layers that are called outside their model below
            run_model(original, batch)
        return tuple(found[name] for name in names if name in found)
