"""Two models in float32, float64 and other precisions, run on the same inputs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError
from isomorph.operations import ModuleCall, copy_module, in_eval_mode, leaves, observing, tensors_in
from isomorph.surgery.calls import (
    Inputs,
    call_model,
    cast,
    cast_floats,
    cast_model,
    copy_inputs,
    describe_shape,
    map_floats,
    relative,
    run_model,
)
from isomorph.surgery.choices import ChosenCall, record_choices, repeat_choices
from isomorph.surgery.comparison import (
    ROUNDING,
    Pair,
    TensorDifference,
    Tensors,
    as_number,
    compare_tensors,
    full_precision,
    largest_difference,
    structure_notes,
    tensors_by_path,
)
from isomorph.surgery.modules import list_names
from isomorph.surgery.recast import edited_names
from isomorph.surgery.rule import edits_since
from isomorph.surgery.verify_report import Difference

# Precision of each mode of `_in_mode`; others are in float32.
_DTYPE_OF_MODE = {"float16": torch.float16, "autocast to bfloat16": torch.bfloat16}
# Other inputs by which it is seen whether channels are on another scale.
_REDRAWN = 4


class NotCompared(Exception):
    """The original does not run on an input that was only tried, or gives no numbers to compare."""


def normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal values of the shape, dtype and device of a tensor."""
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)


class _Run(NamedTuple):
    """A model, the inputs that it gets, and the context in which it runs."""

    model: nn.Module
    inputs: Inputs
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Runs(NamedTuple):
    """Both models on one batch: in float32, or in another precision or memory format, and in float64."""

    original: _Run
    other: _Run
    exact: _Run
    exact_other: _Run


class ModelPair:
    """Two models in float32 and float64, and the names of the modules of the second that replaced one of the first."""

    def __init__(self, original: nn.Module, recast: nn.Module, atol: float) -> None:
        def prepared(model: nn.Module, dtype: torch.dtype) -> nn.Module:
            copied = cast_model(copy_module(model), dtype)
            return in_eval_mode(copied).requires_grad_(False)

        self.models = {
            t: (prepared(original, t), prepared(recast, t)) for t in (torch.float32, torch.float64)
        }
        self.edited = edited_names(recast, edits_since(recast, original))
        self.atol = atol
        # Classes of outputs that are not compared.
        self.others: set[str] = set()
        self.extra_notes: dict[str, None] = {}
        # Which of both models change their inputs in place.
        self.changing: set[str] = set()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # a caller's autocast would compute in half precision
    @torch.autocast("cuda", enabled=False)
    def difference(self, batch: Inputs, name: str, extra: bool = False) -> Difference:
        """Return the difference for a batch. `extra`: it is one that the user has not given."""
        single = cast_floats(batch, torch.float32)
        double = cast_floats(batch, torch.float64)
        original, other = self.models[torch.float32]
        exact, exact_other = self.models[torch.float64]
        runs = _Runs(
            original=_Run(original, single),
            other=_Run(other, single),
            exact=_Run(exact, double),
            exact_other=_Run(exact_other, double),
        )
        tensors, ties = self._compare(runs, batch, extra)
        full_name = ", ".join(filter(None, (describe_shape(batch), name)))
        return Difference.of(full_name, tensors, self.atol, ties=ties)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    @torch.autocast("cuda", enabled=False)
    def difference_in_mode(self, batch: Inputs, mode: str) -> Difference:
        """Return the difference in a precision or memory format, as far as the original in it is from float64."""
        x = cast_floats(batch, torch.float32)
        original, other = self.models[torch.float32]
        exact = _Run(self.models[torch.float64][0], cast_floats(batch, torch.float64))
        # the original in float64 on both sides: only the mode makes a difference
        runs = _Runs(_in_mode(original, x, mode), _in_mode(other, x, mode), exact, exact)
        tensors, ties = self._compare(runs, batch, extra=True)
        # the last rounding of numbers, also where the original's rounding averages out
        steps = 2 * torch.finfo(_DTYPE_OF_MODE.get(mode, torch.float32)).eps
        tensors = [replace(x, rounding=max(x.rounding, steps * x.scale)) for x in tensors]
        return Difference.of(describe_shape(batch), tensors, self.atol, mode=mode, ties=ties)

    def _compare(
        self, runs: _Runs, batch: Inputs, extra: bool
    ) -> tuple[list[TensorDifference], tuple[str, ...]]:
        """Return the differences, tensor by tensor, and where the other model would choose differently."""
        original = self._output(runs.original, is_original=True, extra=extra)
        other = self._output(runs.other, is_original=False, extra=extra)
        exact = self._output(runs.exact, is_original=True, extra=extra)
        exact_other = exact
        if runs.exact_other is not runs.exact:  # in a mode the original stands on both sides
            exact_other = self._output(runs.exact_other, is_original=False, extra=extra)
        if extra and not _has_numbers(original, exact):
            raise NotCompared("the original's outputs are not finite")
        for _, leaf in leaves(exact):
            is_compared = (
                leaf is None or isinstance(leaf, str | bytes) or as_number(leaf) is not None
            )
            if not is_compared:
                self.others.add(type(leaf).__name__)
        redraw = partial(self._redraw, batch)
        single = _named_alike(original, other)
        double = _named_alike(exact, exact_other)
        try:
            tensors = compare_tensors(single, double, self.atol, redraw)
        except UserError:  # other shapes, as when rounding decides how many boxes a detector finds
            chosen = self._compare_choices(runs, redraw)
            if chosen is None:
                raise
            return chosen
        self.extra_notes |= dict.fromkeys(structure_notes(original, other))
        if all(row.is_within(self.atol) for row in tensors):
            return tensors, ()
        return self._compare_choices(runs, redraw) or (tensors, ())

    def _output(self, run: _Run, is_original: bool, extra: bool) -> Any:
        """Return the output of a run. Raises: NotCompared if the original does not run on `extra` inputs."""
        inputs = copy_inputs(run.inputs)
        try:
            with run.context():
                output = call_model(run.model, inputs)
        except DoesNotRun as error:
            if is_original and extra:
                raise NotCompared(str(error)) from error
            if is_original:
                raise
            raise UserError(f"{error}; the original does") from error
        except UserError as error:
            if extra:  # a limit that the model states
                raise NotCompared(str(error)) from error
            raise
        if not _are_identical(run.inputs, inputs):
            self.changing.add("original" if is_original else "other model")
        return output

    def _compare_choices(
        self, runs: _Runs, redraw: Callable[[], list[Tensors]]
    ) -> tuple[list[TensorDifference], tuple[str, ...]] | None:
        """Return the differences with the choices of the original, and those that came out differently.

        None if a model does not choose among its numbers, or not at the same places.
        """
        exact_call = record_choices(runs.exact.model, partial(_call, runs.exact))
        if not exact_call.choices:
            return None
        try:
            repeated = [
                repeat_choices(run.model, partial(_call, run), exact_call)
                for run in (runs.original, runs.other, runs.exact_other)
            ]
        except DoesNotRun:
            # it chooses among tensors without shapes, as torch's fast path of encoders does
            return None
        if any(call.unmatched for call in repeated):
            return None
        single = _numbers_of(repeated[0]), _numbers_of(repeated[1])
        double = _numbers_of(exact_call), _numbers_of(repeated[2])
        try:
            tensors = compare_tensors(single, double, self.atol, redraw)
        except UserError:
            return None
        if not all(row.is_within(self.atol) for row in tensors):
            return tensors, ()
        changed: dict[str, None] = {}
        for call in repeated:
            changed |= dict.fromkeys(call.changed)
        places = tuple(changed)
        self.extra_notes[
            f"rounding decides between almost equal numbers in {list_names(places)}: {_REPEATED}"
        ] = None
        return tensors, places

    def _redraw(self, batch: Inputs) -> list[Tensors]:
        """Return outputs of the original for other inputs, none for inputs without floating-point numbers."""
        generator = torch.Generator().manual_seed(0)
        model = copy_module(self.models[torch.float64][0])  # a call may change it
        outputs = []
        exact = cast_floats(batch, torch.float64)
        if not any(x.is_floating_point() for x in tensors_in(exact)):
            return []
        with suppress(UserError):  # random inputs may not be any that the model takes
            for _ in range(_REDRAWN):
                other = map_floats(exact, partial(normal_like, generator=generator))
                outputs.append(tensors_by_path(run_model(model, other)))
        return outputs

    def notes(self) -> Iterator[str]:
        """Yield what differs besides values, and what was not compared."""
        yield from self.extra_notes
        for role in sorted(self.changing, reverse=True):
            yield f"the {role} changes its input in place: each call got a copy of its own"
        if self.others:
            yield f"not compared besides tensors: {', '.join(sorted(self.others))}"

    @torch.no_grad()
    def is_random(self, batch: Inputs) -> bool:
        """True if the original gives other outputs in a second call."""
        model = self.models[torch.float32][0]
        x = cast_floats(batch, torch.float32)
        with suppress(UserError):  # outputs of different shapes
            difference, _ = largest_difference(run_model(model, x), run_model(model, x))
            return 0 < difference < math.inf
        return False

    @torch.no_grad()
    def uncalled(self, names: Sequence[str], batch: Inputs) -> tuple[tuple[str, ...], list[str]]:
        """Return which of the modules that were not called the model reads, and a note on the others."""
        x = cast_floats(batch, torch.float32)
        read_names: list[str] = []
        unused: list[str] = []
        for name in names:
            model = copy_module(self.models[torch.float32][1])
            before = run_model(model, x)
            for parameter in _parameters_of_alone(model, model.get_submodule(name)):
                parameter.fill_(math.nan)
            if largest_difference(before, run_model(model, x))[0] > 0:
                read_names.append(name)
            else:
                unused.append(name)
        notes = []
        if unused:
            notes.append(
                f"{list_names(unused)} was not called on these inputs, so they say nothing about it"
            )
        return tuple(read_names), notes

    @torch.no_grad()
    def targets(self, batch: Inputs) -> tuple[Difference, ...]:
        """Return the differences of the recast modules, each called on what the original's module gets."""
        original, recast = self.models[torch.float64]
        rows: dict[str, Difference] = {}
        arguments: dict[str, list[Any]] = {}

        def keep(call: ModuleCall) -> None:
            arguments[call.name] = copy_inputs([call.args, call.kwargs])

        def compare(call: ModuleCall) -> None:
            name = call.name
            module = recast.get_submodule(name)
            args, kwargs = arguments.pop(name)
            # it has no use for the grid that a hook passes to gated attention
            if type(module) is Attention:
                kwargs.pop("grid_size", None)
            largest = 0.0
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                    largest = x.abs().max().item()
                    break
            row = _compare_module(
                name, module, call.output, module(*args, **kwargs), self.atol, largest
            )
            rows[name] = max(
                row, rows.get(name, row), key=lambda row: relative(row.fp64, row.scale)
            )

        modules = dict(original.named_modules())
        names = [name for name in self.edited if name in modules]
        # sets grid_size of the layers that are called outside their model below
        run_model(recast, batch)
        with observing(original, before=keep, after=compare, names=names):
            run_model(original, batch)
        return tuple(rows[name] for name in names if name in rows)


def _parameters_of_alone(model: nn.Module, module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module that no module outside of it has."""
    inside = set(module.modules())
    elsewhere: set[Any] = set()
    for part in model.modules():
        if part not in inside:
            elsewhere.update(part._parameters.values())
    return set(module.parameters()) - elsewhere


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
    shared = [
        path for path in outputs if path in others and outputs[path].shape == others[path].shape
    ]
    if first not in shared:
        shape = tuple(outputs[first].shape) if outputs else ()
        row = TensorDifference(
            first, shape, "", math.inf, math.inf, 0.0, problem="outputs have different shapes"
        )
        return Difference.of(name, [row], atol, kind=kind)
    pair = {path: outputs[path] for path in shared}, {path: others[path] for path in shared}
    rows = compare_tensors(pair, pair, atol, by_channel=False)
    rows = [replace(row, rounding=rounding) for row in rows]
    return Difference.of(name, rows, atol, kind=kind)


_REPEATED = (
    "compared with the choices of the original, and so are the numbers that they are made from"
)


def _named_alike(output: Any, other: Any) -> Pair:
    """Return the tensors of two outputs; a single one by the name that the first has for it, such as `logits`."""
    outputs = tensors_by_path(output)
    others = tensors_by_path(other)
    if len(outputs) == len(others) == 1:
        others = dict(zip(outputs, others.values(), strict=True))
    return outputs, others


def _call(run: _Run) -> Any:
    with run.context():
        return call_model(run.model, copy_inputs(run.inputs))


def _in_mode(model: nn.Module, x: Inputs, mode: str) -> _Run:
    """Return the run of a copy of a float32 model in another precision or memory format."""
    model = copy_module(model)
    if mode == "float16":
        return _Run(model._apply(partial(cast, dtype=torch.float16)), cast_floats(x, torch.float16))
    if mode == "channels_last":
        inputs = map_floats(x, _to_channels_last)
        return _Run(model.to(memory_format=torch.channels_last), inputs)
    devices = [tensor.device.type for tensor in tensors_in(x)]
    return _Run(model, x, partial(torch.autocast, devices[0] if devices else "cpu", torch.bfloat16))


def _to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _are_identical(inputs: Inputs, others: Inputs) -> bool:
    """True if two inputs have the same tensors, NaN at the same positions included."""
    tensors = tensors_in(inputs)
    other_tensors = tensors_in(others)
    if [x.shape for x in tensors] != [x.shape for x in other_tensors]:
        return False
    pairs = zip(tensors, other_tensors, strict=True)
    return all(torch.allclose(x, y, 0, 0, equal_nan=True) for x, y in pairs)


def _has_numbers(output: Any, exact: Any) -> bool:
    """True if the outputs of a model in two precisions have no NaN, and infinities, if any, at the same places."""
    tensors = tensors_by_path(output)
    for path, exact_values in tensors_by_path(exact).items():
        values = full_precision(exact_values)
        rounded = full_precision(tensors.get(path, exact_values))
        if rounded.isnan().any() or values.isnan().any():
            return False
        if rounded.shape == values.shape and not torch.equal(rounded.isinf(), values.isinf()):
            return False
    return True


def _numbers_of(call: ChosenCall) -> Tensors:
    """Return what the choices of a call were made from, by the place of the choice, and its outputs."""
    numbers: Tensors = {}
    for count, choice in enumerate(call.choices):
        for index, tensor in enumerate(choice.inputs):
            numbers[f"what {choice.place} reads (choice {count}, input {index})"] = tensor
    return numbers | tensors_by_path(call.output)
