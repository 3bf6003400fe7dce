"""The calls by which a model in float64 is compared with what surgery made of it, each on a copy of its own."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.models import get_model_input_config
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, NotFinite, UserError, first_line
from isomorph.layers.modes import noise
from isomorph.operations import (
    Flow,
    copy_module,
    left_no_trace,
    observing,
    see,
    state_of,
    tensors_in,
)
from isomorph.spec import spec_of
from isomorph.surgery.calls import (
    Inputs,
    at_length,
    batches_of,
    cast_floats,
    copy_inputs,
    describe_shape,
    map_tensors,
    own_inputs,
    run_model,
    to_model,
    with_other_count,
)
from isomorph.surgery.choices import ChosenCall, record_choices, repeat_choices
from isomorph.surgery.comparison import relative_difference
from isomorph.surgery.entry_points import FORWARD, EntryPoint, entry_points, untried_arguments
from isomorph.surgery.merge_plan import MergePlan, plan_merges
from isomorph.surgery.modules import copy_tensors

# Largest difference in float64, relative to the largest output, that is rounding: models may round inside.
TOLERANCE = 1e-6
# Sides in pixels at which a network with larger images is tried first.
SMALL = 64


def own_example(model: nn.Module) -> Inputs | None:
    """Return a random input of the size that timm or the model itself knows, or None. Shape: -> (1, C, H, W)"""
    inputs = own_inputs(model, 1)
    if inputs:
        return to_model(inputs, model)
    if spec_of(model).input_size is None:
        return None
    size = get_model_input_config(model)["input_size"]
    return to_model(noise(1, *size), model)


class ReferenceCall(NamedTuple):
    """An entry point of a model, a batch, what the model gave for it, its choices among numbers, and what can merge."""

    entry: EntryPoint
    inputs: Inputs
    outputs: list[Tensor]
    chosen: ChosenCall
    plan: MergePlan


def _is_finite(call: ReferenceCall) -> bool:
    return all(torch.isfinite(output).all() for output in call.outputs)


class ReferenceCalls:
    """The calls by which a model in float64 is compared: its forward at several sizes, and its other entry points.

    A model that chooses among its numbers, as detectors do, repeats the choices of the reference, so that rounding does
    not decide between boxes that tie; the numbers that it chooses by are compared too, and the outputs of the modules
    around code that branches on numbers. A call that leaves a trace in the model, such as a counter or a cache, runs on
    a copy of its own.

    Raises: DoesNotRun if the model does not run on the example or gives no numbers; NotFinite if they are not.
    """

    calls: list[ReferenceCall]
    entries: list[str]

    def __init__(
        self,
        model: nn.Module,
        example: Inputs | Sequence[Inputs],
        only_forward: bool,
        affine: bool,
        show_step: Callable[[str], None],
    ) -> None:
        first, *others = [cast_floats(x, torch.float64) for x in batches_of(example)]
        # The difference that the last comparison without a fault has found.
        self.largest = 0.0
        self._show_step = show_step
        self._number_of_calls = 0
        self.only_forward = only_forward
        self._affine = affine
        self._model = model
        self._leaves_traces = False
        self._watched: list[str] = []
        copied = copy_module(model)
        before = state_of(copied)
        try:
            call, flow = self._record(copied, FORWARD, first)
        except Exception:
            run_model(copied, first)  # raises an error that says what was given
            raise
        self._watched = _modules_around_choices(copied, flow)
        del flow  # with all tensors of the call
        # The copy of the model that all calls run on, None if each needs one of its own.
        self._shared: nn.Module | None = copied if state_of(copied) == before else None
        may_keep_call = self._shared is not None and not self._watched
        self._try_all(model, first, others, call if may_keep_call else None)
        if self._shared is not None and not left_no_trace(copied, before, model):
            self._shared = None  # the calls after one that leaves a trace ran on another model
            self._try_all(model, first, others)
        self._shared = None
        self.untried = untried_arguments(model, first)
        self._keep_comparable(first)

    def _try_all(
        self,
        model: nn.Module,
        first: Inputs,
        others: Sequence[Inputs],
        call_of_example: ReferenceCall | None = None,
    ) -> None:
        """Make the calls: the example, unless it was made, other sizes, other entry points at the smallest."""
        self.calls = []
        self.entries = [str(FORWARD)]
        for inputs in others:
            if not self._try(model, FORWARD, inputs):
                run_model(copy_module(model), inputs)  # raises an error that says what was given
        self._try_other_sizes(model, first)
        if call_of_example is None:
            self._try(model, FORWARD, first)
        else:
            self.calls.append(call_of_example)
        if self.only_forward:
            return
        smallest = min((call.inputs for call in self.calls), key=_numbers_in, default=first)
        for entry in entry_points(model, smallest):
            if self._try(model, entry, smallest):
                self.entries.append(str(entry))

    def _try_other_sizes(self, model: nn.Module, first: Inputs) -> None:
        """Add calls at other sizes than the example's, or where it runs at one size only of another batch size."""
        for inputs in _other_sizes(first):
            self._try(model, FORWARD, inputs)
        if not self.calls:
            self._try(model, FORWARD, with_other_count(first))

    def _keep_comparable(self, first: Inputs) -> None:
        """Keep the calls whose outputs can be compared. Raises: DoesNotRun and NotFinite, as the class."""
        self.calls = [call for call in self.calls if call.outputs]
        if not self.calls:
            raise DoesNotRun("the model's outputs hold no floating-point numbers to compare")
        if not all(
            _is_finite(call)
            for call in self.calls
            if call.inputs is first and call.entry == FORWARD
        ):
            raise NotFinite(
                "the model's outputs are not finite; check its weights and statistics, and the example"
            )
        # at other sizes a model may divide by 0
        self.calls = [call for call in self.calls if _is_finite(call)]
        self.calls.sort(key=lambda call: (call.inputs is not first, call.entry != FORWARD))
        self.sizes = tuple(dict.fromkeys(describe_shape(call.inputs) for call in self.calls))

    def _try(self, model: nn.Module, entry: EntryPoint, inputs: Inputs) -> bool:
        """Add a call unless it raises an error: this model has other sizes, or another method of that name."""
        copied = copy_module(model) if self._shared is None else self._shared
        before = state_of(copied) if self._shared is None else []
        try:
            call, _ = self._record(copied, entry, inputs)
        except Exception:  # of any code that is called in a way it may not be meant for
            return False
        if self._shared is None and not left_no_trace(copied, before, model):
            self._leaves_traces = True
        self.calls.append(call)
        return bool(call.outputs) and _is_finite(call)

    def _record(
        self, model: nn.Module, entry: EntryPoint, inputs: Inputs
    ) -> tuple[ReferenceCall, Flow]:
        """Make a call; return it, and what happens in it."""
        flows: list[Flow] = []

        def run(model: nn.Module, call: Callable[[], Any]) -> ChosenCall:
            flow = see(model, partial(record_choices, model, call))
            flows.append(flow)
            return flow.result

        outputs, chosen = self._outputs(model, entry, inputs, run)
        plan = plan_merges(model, flows[0], self._affine)
        return ReferenceCall(entry, inputs, outputs, chosen, plan), flows[0]

    def _count_call(self) -> None:
        self._number_of_calls += 1
        self._show_step(f"call {self._number_of_calls}")

    def _to_call(self, model: nn.Module) -> nn.Module:
        """Return the model, or a copy of it if calls leave traces."""
        return copy_module(model) if self._leaves_traces else model

    @torch.no_grad()
    def _outputs(
        self, model: nn.Module, entry: EntryPoint, inputs: Inputs, run: Callable[..., ChosenCall]
    ) -> tuple[list[Tensor], ChosenCall]:
        """Return the floating-point outputs of a call, and those of the watched modules; and its choices.

        `run` makes the call: it records choices, repeats those of another call, or does neither.
        """
        self._count_call()
        watched_outputs: list[Any] = []
        watching = observing(
            model, after=lambda call: watched_outputs.append(call.output), names=self._watched
        )
        with watching, torch.random.fork_rng():
            torch.manual_seed(0)
            chosen = run(model, partial(entry, model, copy_inputs(inputs)))
        return _numbers_of(watched_outputs, chosen.output), chosen

    def _compare(self, call: ReferenceCall, model: nn.Module) -> float:
        """Return the difference of a model's outputs in a call, infinity if it makes other choices.

        Outputs that differ are compared again with the choices of the reference, and so are the numbers chosen by.
        """
        try:
            outputs, _ = self._outputs(self._to_call(model), call.entry, call.inputs, _run_plainly)
            plain = relative_difference(call.outputs, outputs)
        except UserError:  # a detector finds another number of objects
            plain = math.inf
        if plain <= TOLERANCE or not call.chosen.choices:
            return plain
        repeat = partial(repeat_choices, recorded=call.chosen)
        outputs, chosen = self._outputs(self._to_call(model), call.entry, call.inputs, repeat)
        if chosen.unmatched:
            return math.inf
        reference_numbers = _numbers_of(call.chosen.read), _numbers_of(chosen.read)
        return relative_difference(
            [call.outputs, reference_numbers[0]], [outputs, reference_numbers[1]]
        )

    def plans(self, model: nn.Module, avoid: frozenset[str]) -> Iterator[MergePlan]:
        """Yield what each call shows of a model; of the one that was given it is known."""
        for call in self.calls:
            if model is self._model and not avoid:
                yield call.plan
                continue
            called = self._to_call(model)
            self._count_call()
            flow = see(called, partial(call.entry, called, copy_inputs(call.inputs)))
            yield plan_merges(called, flow, self._affine, avoid)

    def difference(self, model: nn.Module, limit: float = math.inf) -> float:
        """Return the largest difference of a model's outputs, relative to the largest value of each.

        Above the limit the comparison ends with the first difference that is.

        Raises: whatever a model raises that cannot be run.
        """
        largest = 0.0
        for call in sorted(self.calls, key=lambda call: _numbers_in(call.inputs)):
            largest = max(largest, self._compare(call, model))
            if not largest <= limit:
                break
        return largest

    def fault(self, change: Callable[[], nn.Module]) -> str | None:
        """Return how the model that `change` gives differs, or None if it does not."""
        try:
            difference = self.difference(change(), TOLERANCE)
        except Exception as error:  # of any code that meets another module than before
            return f"the model does not run with it merged: {first_line(error)[:100]}"
        if not difference <= TOLERANCE:
            if math.isinf(difference):
                return "with it merged, the model chooses among other numbers"
            return f"with it merged, outputs differ by {difference:.1e} of the largest"
        self.largest = difference
        return None

    def rounding(self, exact: nn.Module, model: nn.Module) -> float | None:
        """Return the difference that rounding weights makes, at the smallest inputs; None for other numbers of objects.

        `exact` is the model in float64, and gets the weights of `model`, which are rounded to its precision.
        """
        copy_tensors(model, exact)
        forwards = [call for call in self.calls if call.entry == FORWARD]
        call = min(forwards or self.calls, key=lambda call: _numbers_in(call.inputs))
        try:
            return self._compare(call, exact)
        except UserError:  # rounded, a detector may find other objects
            return None


def _modules_around_choices(model: nn.Module, flow: Flow) -> list[str]:
    """Return the children of modules whose own code branches on numbers of a batch."""
    watched = []
    for name in flow.branches_on_data:
        watched += [
            f"{name}.{child}".lstrip(".") for child, _ in model.get_submodule(name).named_children()
        ]
    return watched


def _run_plainly(_: nn.Module, call: Callable[[], Any]) -> ChosenCall:
    return ChosenCall(call(), ())


def _numbers_of(*values: Any) -> list[Tensor]:
    """Return the floating-point tensors in values, in float64."""
    numbers = []
    for tensor in tensors_in(*values):
        if tensor.is_floating_point() and tensor.numel():
            dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
            numbers.append(dense.double())
    return numbers


def _numbers_in(inputs: Inputs) -> int:
    return sum(tensor.numel() for tensor in tensors_in(inputs))


def _other_sizes(inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs of other sizes: shorter sides, of which one is odd, longer ones, one example and two.

    The sizes are those of images or, without any, of tokens; what has the same sides, such as a mask, gets the others.
    """
    lead = _lead_of(inputs)
    if lead is None:
        return
    for count, sides in _changed_sides(lead):
        yield map_tensors(inputs, partial(_resized_examples, lead=lead, count=count, sides=sides))


def _lead_of(inputs: Inputs) -> Tensor | None:
    """Return the tensor whose sizes are changed: that with the most axes, two or more; None without any."""
    candidates = [x for x in tensors_in(inputs) if x.ndim > 1 and x.numel()]
    return max(candidates, key=lambda x: (x.ndim, x.is_floating_point()), default=None)


def _changed_sides(lead: Tensor) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield a number of examples and new lengths by axis; negative axes are sides of images, videos or signals."""
    length = lead.shape[1]
    if lead.ndim != 4:
        yield from [(2, {}), (1, {})]
    if lead.ndim >= 4:
        height, width = lead.shape[-2:]
        yield 2, {-2: _shorter(height, 3) | 1, -1: _shorter(width, 2) | 1}
        yield 1, {-2: max(_shorter(height, 2), 1), -1: max(_shorter(width, 3), 1)}
        yield 1, {-2: _longer(height), -1: _longer(width)}
    if lead.ndim in (3, 5):
        side = lead.shape[2]
        yield 2, {2 - lead.ndim: (side * 3 // 4) | 1}
        yield 1, {2 - lead.ndim: max(side // 2, 1)}
    if lead.ndim != 4:
        yield 2, {1: length // 2 + 1}
        yield 1, {1: length + length // 2}


def _resized_examples(x: Tensor, lead: Tensor, count: int, sides: Mapping[int, int]) -> Tensor:
    """Return the last example of a tensor and its mirror image, as many as `count`, with other lengths of its axes.

    Longer axes repeat numbers. A tensor of other lengths than the lead's keeps them.
    """
    if not x.ndim or len(x) != len(lead):
        return x
    last = x[-1:]
    mirrored = last.flip(-1) if x.ndim > 1 else last
    two = torch.cat([last, mirrored]) if count == 2 else mirrored
    if not all(_length_of(x, axis) == lead.shape[axis] for axis in sides):
        return two
    for axis, length in sides.items():
        two = at_length(two, axis, length)
    return two


def _length_of(x: Tensor, axis: int) -> int | None:
    return x.shape[axis] if -x.ndim <= axis < x.ndim else None


def _shorter(side: int, quarters: int) -> int:
    """Return a number of quarters of a side; of a long side, quarters of twice `SMALL`."""
    return min(side, 2 * SMALL) * quarters // 4


def _longer(side: int) -> int:
    return side + max(side // 4, min(side // 2, SMALL // 2))
