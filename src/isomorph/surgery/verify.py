"""Compare the outputs of two models in float32 and float64."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import count_calls
from isomorph.surgery.calls import (
    Inputs,
    call_model,
    cast,
    cast_floats,
    check_not_empty,
    copy_inputs,
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
from isomorph.surgery.choices import ChosenCall, record_choices, repeat_choices
from isomorph.surgery.comparison import (
    ROUNDING,
    Fidelity,
    TensorDifference,
    Tensors,
    as_number,
    compare_tensors,
    measure_fidelity,
    structure_notes,
    tensors_by_path,
)
from isomorph.surgery.modules import list_names
from isomorph.surgery.recast import check_model, edited_names
from isomorph.surgery.rule import edits, edits_since, notes
from isomorph.terminal_tables import json_values

# Largest difference of exported files and of models without rules, relative to the largest output.
ATOL = 1e-5
# Sides up to which images are tried at twice the size too.
_DOUBLED = 256
_TWICE = "twice the size"
# Other inputs by which it is seen whether channels are on another scale.
_REDRAWN = 4


@dataclass(frozen=True)
class Difference:
    """Largest difference of two outputs in float32 and float64, and the largest finite output.

    Of the models for one input, which the `name` describes; or of one recast module, of the class `kind`, from the
    original's, on the original's own input in float64. They are those of the tensor that differs most, relative to what
    is allowed for it; `where` is its path in the outputs if it differs by more, and `tensors` are all. `rounding` is the difference that
    rounding explains. `mode` names another precision or memory format, whose difference is then `fp32`. `ties` says
    where rounding decided between almost equal numbers, as the order of boxes: the models were compared with the
    choices of the first.
    """

    name: str
    fp32: float
    fp64: float
    scale: float
    rounding: float = 0.0
    kind: str = ""
    where: str = ""
    mode: str = ""
    tensors: tuple[TensorDifference, ...] = ()
    ties: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, tensors: Sequence[TensorDifference], atol: float, kind: str = "", **facts: Any
    ) -> "Difference":
        """Return the difference of outputs, which is that of the tensor that differs most."""
        worst = max(tensors, key=lambda row: (row.excess(atol), row.scale))
        where = "" if worst.is_within(atol) else worst.path
        numbers = (worst.fp32, worst.fp64, worst.scale, worst.rounding)
        return cls(name, *numbers, kind=kind, where=where, tensors=tuple(tensors), **facts)

    @property
    def deviation(self) -> float:
        """The larger difference of both."""
        return max(self.fp32, self.fp64)

    def is_within(self, atol: float) -> bool:
        """True if no tensor differs by more than the tolerance, or than rounding explains."""
        return all(row.is_within(atol) for row in self.tensors)

    def __str__(self) -> str:
        scale = f"where max |out| is {self.scale:.3g}"
        place = f", in {self.where}" if self.where else ""
        if self.kind:
            return f"module {self.name}, {self.kind}: max |diff| {self.fp64:.3g} {scale}{place}"
        if self.mode:
            return f"input {self.name}, {self.mode}: max |diff| {self.fp32:.3g} {scale}{place}"
        return f"input {self.name}: max |diff| {self.fp32:.3g}, {self.fp64:.3g} {scale}{place}"

    def details(self, atol: float) -> list[str]:
        """Return a line for each tensor that differs, where there are several."""
        differing = [row for row in self.tensors if not row.is_within(atol)]
        lines = [f"  {row}" for row in differing[:8]] if len(self.tensors) > 1 else []
        return [*lines, f"  and {len(differing) - 8} more"] if len(differing) > 8 else lines


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of comparing two models: largest differences by input, and by recast module in float64.

    It passes if in every tensor of the outputs the difference is at most `atol` times its largest value, or no larger
    than rounding explains; and in each recast module's. The modules are compared too because a residual branch with a
    zero-initialised norm hides them from the output.

    An int8 file is rounded on purpose: `fidelity` says how close it is, and `stored` how close it was to its model when
    it was made; it passes if it is as close.

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
    """Notes on the recast model, such as parameters that are no longer tied, on what differs besides values, and on
    what the result does not show."""

    not_called: tuple[str, ...] = ()
    """Names of the recast modules whose weights the model reads without calling them."""

    fidelity: Fidelity | None = None
    stored: Fidelity | None = None

    @property
    def fp32(self) -> float:
        """Largest difference of the outputs in float32, over all inputs."""
        return max_or_inf(row.fp32 for row in self.inputs if not row.mode)

    @property
    def fp64(self) -> float:
        """Largest difference of the outputs in float64, over all inputs."""
        return max_or_inf(row.fp64 for row in self.inputs if not row.mode)

    @property
    def finite(self) -> bool:
        """False if a difference is not finite, because outputs are not."""
        return all(math.isfinite(row.fp32 + row.fp64) for row in self.inputs)

    @property
    def passed(self) -> bool:
        """True if every difference is finite and within the tolerance, and every recast module was called."""
        if self.fidelity and self.stored:
            return self.finite and self.fidelity.is_like(self.stored)
        return self.finite and not self.not_called and not self._differing

    @property
    def _differing(self) -> list[Difference]:
        return [row for row in (*self.inputs, *self.targets) if not row.is_within(self.atol)]

    @property
    def verdict(self) -> str:
        """One sentence: equal or not, within which tolerance, and the largest differences relative to the outputs."""
        if not self.finite:
            return f"NOT equal: outputs are not finite{self._not_finite}"
        if self.fidelity and self.stored:
            start = "as close as when it was made" if self.passed else "NOT as close as when it was made"
            return f"{start}: int8 outputs at {self.fidelity}; then {self.stored}"
        if self.not_called:
            return f"NOT equal: the model reads the weights of {list_names(self.not_called)} without calling it"
        plain = [row for row in self.inputs if not row.mode]
        single = max_or_inf(relative(row.fp32, row.scale) for row in plain)
        double = max_or_inf(relative(row.fp64, row.scale) for row in plain)
        apart = f"max |diff| / max |out| {single:.3g} (float32), {double:.3g} (float64)"
        differing = self._differing
        if differing:
            return f"NOT equal within {self.atol:g}: {apart}{self._place(differing[0])}"
        if self.atol >= 1:
            return f"any difference is accepted, as atol is {self.atol:g}: {apart}"
        within = f"{self.atol:g}" if max(single, double) <= self.atol else "rounding"
        ties = ", with the choices of the original" if any(row.ties for row in self.inputs) else ""
        return f"equal within {within}: {apart}{ties}"

    @property
    def _not_finite(self) -> str:
        rows = [row for each in self.inputs for row in each.tensors if row.problem]
        return f"; {rows[0].path or 'the output'}: {rows[0].problem}" if rows else ""

    def _place(self, worst: Difference) -> str:
        """Return where a difference is, if it is not the one of all inputs that the verdict names."""
        place = f" in {worst.where}" if worst.where else ""
        if not (worst.kind or worst.mode):
            return place
        name = worst.name if worst.kind else worst.mode
        return f"; but {name} differs by {relative(worst.deviation, worst.scale):.3g}{place}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, with None for what is not finite."""
        return json_values({**asdict(self), "fp32": self.fp32, "fp64": self.fp64, "passed": self.passed})

    def __str__(self) -> str:
        lines = [self.verdict]
        for row in (*self.inputs, *self.targets):
            lines.append(f"  {row}")
            lines += [f"  {line}" for line in row.details(self.atol)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

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

    Copies are compared, on copies of the inputs: models and inputs are unchanged, and compiled models are unwrapped.
    Every tensor is compared by its own scale, and channels by theirs where it is smaller by orders of magnitude. Where
    outputs differ and a model chooses among its numbers, as detectors do, the other repeats the choices of the first:
    then the numbers that these are made from are compared, and the outputs one by one.

    Args:
        original: the model before surgery.
        recast: the model made from it.
        inputs: a batch (B, C, H, W) or several, of any sizes that the models accept. A batch may also be a dict of the
            tensors that the models take by name, as the tokenisers of transformers return.
        atol: largest difference of a tensor, relative to its largest value; by default the largest `atol` of the rules
            that made `recast`, or 1e-5 without rules, as for exported files. An int8 file is compared with what it was
            when it was made, unless `atol` is given.
        seeds: each seed adds a standard normal batch of the shape of every given batch; tensors of integers stay.
        what: what the given batches are, for the report.
        thorough: try the first batch a second time too, with the other sign, as zeros, at other sizes and another batch
            size, in float16, under autocast to bfloat16, and in channels_last.

    Raises: UserError if there is no batch or an empty one, for a negative `atol`, for what is not a model, or if the
        outputs differ in structure or shapes.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> iso.surgery.compare_outputs(cnn, iso.unstride(cnn, where="layer3"), torch.randn(1, 3, 32, 32)).passed
    False
    """
    original, recast = check_model(original), check_model(recast)
    batches = _check_batches(inputs, atol)
    if atol is None and getattr(recast, "fidelity", None) is not None:
        return _compare_int8(original, recast, batches)
    if atol is None:
        atol = max([edit.rule.atol for edit in edits_since(recast, original)], default=ATOL)
    named = [(what, batch) for batch in batches]
    for seed in seeds:
        redraw = partial(_normal_like, generator=torch.Generator().manual_seed(seed))
        named += [(f"random, seed {seed}", map_floats(batch, redraw)) for batch in batches]
    pair = _Pair(original, recast, atol)
    with count_calls(pair.models[torch.float32][1], pair.edited) as calls:
        rows = [pair.row(batch, name) for name, batch in named]
    not_called, unused = pair.uncalled([name for name in pair.edited if not calls[name]], batches[0])
    said = [*notes(recast)[len(notes(original)) :], *unused]
    if thorough:
        further, skipped = _try_further(pair, batches[0])
        rows += further
        said += skipped
    else:
        said.append("not tried: other sizes, batch sizes and signs, or a second call; thorough=True tries them")
    targets = pair.targets(cast_floats(batches[0], torch.float64))
    report = VerifyReport(atol, tuple(rows), targets, not_called=not_called)
    return replace(report, notes=(*said, *pair.notes(), *_doubts(report, pair, batches[0])))


def _check_batches(inputs: Inputs | Sequence[Inputs], atol: float | None) -> list[Inputs]:
    several = isinstance(inputs, Iterable) and not isinstance(inputs, Tensor | Mapping)
    batches = list(inputs) if several else [inputs]
    if not batches:
        raise UserError("verify needs at least one batch of inputs")
    if isinstance(atol, str) or (atol is not None and not atol >= 0):
        raise UserError(f"atol {atol!r} must be a number of at least 0")
    for batch in batches:
        check_not_empty(batch)
    return batches


@torch.no_grad()
def _compare_int8(original: nn.Module, recast: nn.Module, batches: Sequence[Inputs]) -> VerifyReport:
    """Compare a file with rounded weights by how close it was to its model when it was made."""
    model = copy.deepcopy(original)._apply(partial(cast, dtype=torch.float32)).eval()
    pairs = []
    rows = []
    for batch in batches:
        x = cast_floats(batch, torch.float32)
        outputs = (tensors_by_path(run_model(model, x)), tensors_by_path(run_model(recast, x)))
        tensors = compare_tensors(outputs, outputs, ATOL)
        rows.append(Difference.of(describe_shape(batch), tensors, ATOL))
        pairs.append(outputs)
    stored: Any = recast.fidelity
    found = measure_fidelity(pairs, getattr(original, "num_classes", None))
    said = [] if found.is_like(stored) else ["give images as those that it was calibrated on, or atol"]
    return VerifyReport(ATOL, tuple(rows), notes=tuple(said), fidelity=found, stored=stored)


def _normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)


def _try_further(pair: "_Pair", batch: Inputs) -> tuple[list[Difference], list[str]]:
    """Return the differences for what a batch cannot show, and notes on what was not compared, and on what is left."""
    rows = []
    said = []
    attempts = [(name, partial(pair.row, inputs, name, extra=True)) for name, inputs in _further_inputs(batch)]
    attempts += [(mode, partial(pair.mode_row, batch, mode)) for mode in _modes(batch)]
    for name, attempt in attempts:
        if name == _TWICE and rows and not rows[-1].is_within(pair.atol):
            continue  # another size has shown that sizes matter
        try:
            rows.append(attempt())
        except _NotCompared as error:
            said.append(f"{name} was not compared: {error}")
    sizes = [row.name.partition(",")[0] for row in rows]
    tried = f" than {', '.join(dict.fromkeys(sizes))}" if sizes else ""
    said.append(
        f"not tried: larger inputs and batches{tried}, images of one colour but zeros, train mode and gradients, "
        "buffers that calls change, and other methods than forward"
    )
    return rows, said


class _NotCompared(Exception):
    """The original does not run on an input that was only tried, or gives no numbers to compare."""


def _further_inputs(batch: Inputs) -> Iterator[tuple[str, Inputs]]:
    yield from other_inputs(batch)
    is_images = isinstance(batch, Tensor) and batch.ndim == 4 and batch.is_floating_point()
    if is_images and max(batch.shape[-2:]) <= _DOUBLED:
        yield _TWICE, F.interpolate(batch[:2].float(), scale_factor=2).to(batch.dtype)
    yield "zeros", map_floats(batch, torch.zeros_like)


def _modes(batch: Inputs) -> list[str]:
    modes = ["float16", "autocast to bfloat16"]
    is_images = any(isinstance(x, Tensor) and x.ndim == 4 for _, x in leaves(batch))
    return [*modes, "channels_last"] if is_images else modes


def _doubts(report: VerifyReport, pair: "_Pair", batch: Inputs) -> Iterator[str]:
    scale = max(row.scale for row in report.inputs)
    if report.passed and scale < 1e-3:
        yield f"all outputs are at most {scale:.1g}: a head with small weights hides what the layers before it do"
    hidden = list_names([row.name for row in report.targets if row.fp64 > 1e-12 * row.scale])
    if hidden and not any(row.deviation for row in report.inputs if not row.mode):
        yield f"the outputs do not depend on {hidden} here (a zero weight, as by zero_init_last?); give trained weights"
    if report.passed:
        return
    if pair.is_random(batch):
        yield "the original is random: it differs from itself in a second call"
    rows = [row for each in report.inputs for row in each.tensors if not each.mode]
    agree = [row for row in rows if not row.is_within(report.atol) and row.fp64 <= 1e-7 * row.scale]
    if agree and all(row in agree or row.is_within(report.atol) for row in rows):
        names = list_names([row.path or "the output" for row in agree])
        yield f"{names}: float64 agrees and float32 does not, so rounding decides, as between almost equal numbers"


class _Run(NamedTuple):
    """A model, the inputs that it gets, and the context in which it runs."""

    model: nn.Module
    inputs: Inputs
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Pair:
    """Two models in float32 and float64, and the names of the modules of the second that replaced one of the first."""

    def __init__(self, original: nn.Module, recast: nn.Module, atol: float) -> None:
        def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
            return copy.deepcopy(model)._apply(partial(cast, dtype=dtype)).eval().requires_grad_(False)

        self.models = {t: (prepared(original, t), prepared(recast, t)) for t in (torch.float32, torch.float64)}
        self.edited = edited_names(recast, len(edits(original)))
        self.atol = atol
        self.others: set[str] = set()
        self.said: dict[str, None] = {}
        self.changing: set[str] = set()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # a caller's autocast would compute in half precision
    @torch.autocast("cuda", enabled=False)
    def row(self, batch: Inputs, what: str, extra: bool = False) -> Difference:
        """Return the difference for a batch. `extra`: it is one that the user has not given."""
        single = cast_floats(batch, torch.float32)
        double = cast_floats(batch, torch.float64)
        runs = [_Run(model, single) for model in self.models[torch.float32]]
        runs += [_Run(model, double) for model in self.models[torch.float64]]
        tensors, ties = self._compare(runs, batch, extra)
        name = ", ".join(filter(None, (describe_shape(batch), what)))
        return Difference.of(name, tensors, self.atol, ties=ties)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    @torch.autocast("cuda", enabled=False)
    def mode_row(self, batch: Inputs, mode: str) -> Difference:
        """Return the difference in a precision or memory format, as far as the original in it is from float64."""
        x = cast_floats(batch, torch.float32)
        exact = _Run(self.models[torch.float64][0], cast_floats(batch, torch.float64))
        runs = [_in_mode(model, x, mode) for model in self.models[torch.float32]]
        tensors, ties = self._compare([*runs, exact, exact], batch, extra=True)
        return Difference.of(describe_shape(batch), tensors, self.atol, mode=mode, ties=ties)

    def _compare(
        self, runs: Sequence[_Run], batch: Inputs, extra: bool
    ) -> tuple[list[TensorDifference], tuple[str, ...]]:
        """Return the differences, tensor by tensor, and where the second model would choose differently.

        `runs` are those of both models in float32, or another precision, and in float64.
        """
        outputs = [self._output(run, first=number % 2 == 0, extra=extra) for number, run in enumerate(runs)]
        if extra and not all(_is_finite(outputs[number]) for number in (0, 2)):
            raise _NotCompared("the original's outputs are not finite")
        self.others |= {type(leaf).__name__ for _, leaf in leaves(outputs[2]) if not _is_known(leaf)}
        redraw = partial(self._redraw, batch)
        o, r, exact, other = map(tensors_by_path, outputs)
        try:
            tensors = compare_tensors((o, r), (exact, other), self.atol, redraw)
        except UserError:
            chosen = self._compare_choices(runs, redraw)
            if chosen is None:
                raise
            return chosen
        self.said |= dict.fromkeys(structure_notes(outputs[0], outputs[1]))
        if all(row.is_within(self.atol) for row in tensors):
            return tensors, ()
        return self._compare_choices(runs, redraw) or (tensors, ())

    def _output(self, run: _Run, first: bool, extra: bool) -> Any:
        given = copy_inputs(run.inputs)
        try:
            with run.around():
                output = call_model(run.model, given)
        except DoesNotRun as error:
            if first and extra:
                raise _NotCompared(str(error)) from error
            if first:
                raise
            raise UserError(f"{error}; the original does") from error
        except UserError as error:
            if extra:  # a limit that the model states
                raise _NotCompared(str(error)) from error
            raise
        if not _is_same(run.inputs, given):
            self.changing.add("original" if first else "other model")
        return output

    def _compare_choices(
        self, runs: Sequence[_Run], redraw: Callable[[], list[Tensors]]
    ) -> tuple[list[TensorDifference], tuple[str, ...]] | None:
        """Return the differences with the choices of the original, and those that came out differently.

        None if a model does not choose among its numbers, or not at the same places.
        """
        exact = runs[2]
        made = record_choices(exact.model, partial(_call, exact))
        if not made.choices:
            return None
        again = [repeat_choices(run.model, partial(_call, run), made) for run in (runs[0], runs[1], runs[3])]
        if any(call.unmatched for call in again):
            return None
        o, r, exact_values, other = map(_numbers_of, (again[0], again[1], made, again[2]))
        try:
            tensors = compare_tensors((o, r), (exact_values, other), self.atol, redraw)
        except UserError:
            return None
        if not all(row.is_within(self.atol) for row in tensors):
            return tensors, ()
        changed = list(dict.fromkeys((*again[0].changed, *again[1].changed, *again[2].changed)))
        self.said[f"rounding decides between almost equal numbers in {list_names(changed)}: {_REPEATED}"] = None
        return tensors, tuple(changed)

    def _redraw(self, batch: Inputs) -> list[Tensors]:
        """Return outputs of the original for other inputs, none for inputs without floating-point numbers."""
        generator = torch.Generator().manual_seed(0)
        model = copy.deepcopy(self.models[torch.float64][0])  # a call may change it
        drawn = []
        exact = cast_floats(batch, torch.float64)
        if not any(isinstance(x, Tensor) and x.is_floating_point() for _, x in leaves(exact)):
            return []
        for _ in range(_REDRAWN):
            other = map_floats(exact, partial(_normal_like, generator=generator))
            drawn.append(tensors_by_path(run_model(model, other)))
        return drawn

    def notes(self) -> Iterator[str]:
        """Yield what differs besides values, and what was not compared."""
        yield from self.said
        for which in sorted(self.changing, reverse=True):
            yield f"the {which} changes its input in place: each call got a copy of its own"
        if self.others:
            yield f"not compared besides tensors: {', '.join(sorted(self.others))}"

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

        given: dict[str, list[Any]] = {}

        def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[name] = copy_inputs([args, kwargs])

        def compare(name: str, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: Any) -> None:
            module = recast.get_submodule(name)
            args, kwargs = given.pop(name)
            if type(module) is Attention:  # it has no use for the grid that a hook passes to gated attention
                kwargs = {name: value for name, value in kwargs.items() if name != "grid_size"}
            x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.zeros(1))
            largest = x.abs().max().item()
            row = _compare_module(name, module, output, module(*args, **kwargs), self.atol, largest)
            found[name] = max(row, found.get(name, row), key=lambda row: relative(row.fp64, row.scale))

        present = dict(original.named_modules())
        names = [name for name in self.edited if name in present]
        with ExitStack() as hooks:
            for name in names:
                module = present[name]
                hooks.enter_context(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(compare, name), with_kwargs=True))
            run_model(recast, batch)  # sets grid_size of the layers that are called outside their model below
            run_model(original, batch)
        return tuple(found[name] for name in names if name in found)


def _compare_module(
    name: str, module: nn.Module, output: Any, other: Any, atol: float, largest_input: float
) -> Difference:
    """Return the difference of a recast module's outputs in float64, of those that both have, the first at least."""
    kind = type(module).__name__
    eps = torch.finfo(torch.float32).eps
    rounding = min(atol, ROUNDING * eps * largest_input)
    outputs = tensors_by_path(output)
    others = tensors_by_path(other)
    first = next(iter(outputs), "")
    shared = [path for path in outputs if path in others and outputs[path].shape == others[path].shape]
    if first not in shared:
        shape = tuple(outputs[first].shape) if outputs else ()
        row = TensorDifference(first, shape, "", math.inf, math.inf, 0.0, problem="outputs have different shapes")
        return Difference.of(name, [row], atol, kind)
    chosen = {path: outputs[path] for path in shared}
    counterparts = {path: others[path] for path in shared}
    rows = compare_tensors((chosen, counterparts), (chosen, counterparts), atol)
    return Difference.of(name, [replace(row, rounding=rounding) for row in rows], atol, kind)


_REPEATED = "compared with the choices of the original, and so are the numbers that they are made from"


def _call(run: _Run) -> Any:
    with run.around():
        return call_model(run.model, copy_inputs(run.inputs))


def _in_mode(model: nn.Module, x: Inputs, mode: str) -> _Run:
    """Return the run of a copy of a float32 model in another precision or memory format."""
    model = copy.deepcopy(model)
    if mode == "float16":
        return _Run(model._apply(partial(cast, dtype=torch.float16)), cast_floats(x, torch.float16))
    if mode == "channels_last":
        inputs = map_floats(x, _to_channels_last)
        return _Run(model.to(memory_format=torch.channels_last), inputs)
    devices = [tensor.device.type for _, tensor in leaves(x) if isinstance(tensor, Tensor)]
    return _Run(model, x, partial(torch.autocast, devices[0] if devices else "cpu", torch.bfloat16))


def _to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _is_same(inputs: Inputs, others: Inputs) -> bool:
    before = [x for _, x in leaves(inputs) if isinstance(x, Tensor)]
    after = [x for _, x in leaves(others) if isinstance(x, Tensor)]
    return len(before) == len(after) and all(map(_is_identical, before, after))


def _is_identical(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    return bool(((x == y) | ((x != x) & (y != y))).all())  # NaN is not equal to itself


def _is_finite(output: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_by_path(output).values())


def _is_known(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, str | bytes) or as_number(leaf) is not None


def _numbers_of(call: ChosenCall) -> Tensors:
    """Return what the choices of a call were made from, by the place of the choice, and its outputs."""
    numbers: Tensors = {}
    for count, choice in enumerate(call.choices):
        for index, tensor in enumerate(choice.inputs):
            numbers[f"what {choice.place} reads (choice {count}, input {index})"] = tensor
    return numbers | tensors_by_path(call.output)
