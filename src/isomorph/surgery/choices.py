"""Where a model chooses among its numbers: to sort, select or suppress by them, or to round them.

Two models that compute the same function choose differently where numbers are almost equal, as rounding decides between
these: a detector returns its boxes in another order, or another of two boxes at the same place. So a call of the first
model is recorded with its choices, and the other model repeats them. Then every number has its counterpart: those that
the choices are made from, and the outputs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from isomorph.operations import observing, tensors_in
from isomorph.operations.observe import Running

# Operations from floating-point numbers to others that jump at some of them.
_STEPS = {
    "ceil",
    "floor",
    "floor_divide",
    "fmod",
    "frac",
    "heaviside",
    "remainder",
    "round",
    "sgn",
    "sign",
    "trunc",
}


@dataclass(frozen=True)
class Choice:
    """An operation by which floating-point numbers become indices, other integers or booleans, or are rounded.

    `inputs` are the numbers that it reads, `results` all tensors that it makes, `settings` its other arguments, and
    `module` the name of the module that runs it.
    """

    operation: str
    module: str
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    settings: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What the same choice of two models has in common: the operation, and the shapes that it reads."""
        return self.operation, tuple(x.shape for x in self.inputs)

    @property
    def place(self) -> str:
        """The operation and its module, in words."""
        return f"{self.operation} in {self.module}" if self.module else self.operation


@dataclass(frozen=True)
class ChosenCall:
    """What a call of a model returned, and its choices in the order of the call that was recorded.

    Of a call that repeats those of another, `changed` says where it would have chosen differently, and `unmatched`
    which choices only one of both made, or made with other settings: numbers after these have no counterpart.
    """

    output: Any
    choices: tuple[Choice, ...]
    changed: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def read(self) -> list[Tensor]:
        """The numbers that the choices were made from; those of two calls have the same order and shapes."""
        return [x for choice in self.choices for x in choice.inputs]


@torch.no_grad()
def record_choices(model: nn.Module, call: Callable[[], Any]) -> ChosenCall:
    """Call a model, and record where it chooses among its numbers.

    Example:
        >>> from isomorph.surgery.choices import record_choices
        >>> model = torch.nn.Linear(2, 3)
        >>> recorded = record_choices(model, lambda: model(torch.randn(1, 2)).argmax(1))
        >>> [choice.operation for choice in recorded.choices], recorded.read[0].shape
        (['argmax'], torch.Size([1, 3]))
    """
    mode = _Recorder()
    with observing(model) as mode.running, mode:
        output = call()
    return ChosenCall(output, tuple(mode.choices))


@torch.no_grad()
def repeat_choices(model: nn.Module, call: Callable[[], Any], recorded: ChosenCall) -> ChosenCall:
    """Call a model, and let it choose as another did in a call that was recorded.

    Example:
        >>> from isomorph.surgery.choices import record_choices, repeat_choices
        >>> first, second = torch.tensor([0.5, 0.5, 0.1]), torch.tensor([0.5, 0.5001, 0.1])
        >>> model = torch.nn.Identity()
        >>> recorded = record_choices(model, lambda: model(first).argsort(descending=True))
        >>> repeated = repeat_choices(model, lambda: model(second).argsort(descending=True), recorded)
        >>> repeated.output.tolist(), repeated.changed
        ([0, 1, 2], ('sort',))
    """
    mode = _Repeater(recorded.choices)
    with observing(model) as mode.running, mode:
        output = call()
    choices = tuple(mode.repeated[number] for number in sorted(mode.repeated))
    missing = [choice.place for queue in mode.queues.values() for _, choice in queue]
    return ChosenCall(output, choices, tuple(mode.changed), (*mode.unmatched, *missing))


class _Recorder(TorchDispatchMode):
    """Context in which every choice is recorded: an operation that makes integers of floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Choice] = []
        self.running = Running()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in tensors_in(args, kwargs) if x.is_floating_point()]
        operation = func.__name__.partition(".")[0].strip("_")
        reads_shapes = operation.endswith("_like") or operation.startswith("new_")
        if not operands or reads_shapes:
            return func(*args, **kwargs)
        jumps = operation in _STEPS
        if jumps:  # it may be in place
            operands = [x.clone() for x in operands]
        output = func(*args, **kwargs)
        results = tensors_in(output)
        if not (jumps or any(map(_is_chosen, results))):
            return output
        settings = repr(tree_map_only(Tensor, lambda _: "tensor", (args, kwargs)))
        inputs = tuple(x.clone() for x in operands)
        copies = tuple(x.clone() for x in results)
        choice = Choice(operation, self.running.innermost, inputs, copies, settings)
        return self.decide(choice, output)

    def decide(self, choice: Choice, output: Any) -> Any:
        """Return the output of an operation that chooses."""
        self.choices.append(choice)
        return output


class _Repeater(_Recorder):
    """Context in which every choice has the results of a recorded one, where there is one."""

    def __init__(self, recorded: Sequence[Choice]) -> None:
        super().__init__()
        # Recorded choices that are not repeated yet, with their numbers, by what they have in common with the call's.
        self.queues: dict[Any, deque[tuple[int, Choice]]] = defaultdict(deque)
        for number, choice in enumerate(recorded):
            self.queues[choice.key].append((number, choice))
        # The call's own choices by number.
        self.repeated: dict[int, Choice] = {}
        # Operations that would have chosen otherwise, and those without a recorded choice.
        self.changed: list[str] = []
        self.unmatched: list[str] = []

    def decide(self, choice: Choice, output: Any) -> Any:
        """Return an output with the recorded choice in place of the call's own."""
        queue = self.queues[choice.key]
        if not queue:
            self.unmatched.append(choice.place)
            return output
        number, recorded = queue.popleft()
        self.repeated[number] = choice
        if recorded.settings != choice.settings:
            self.unmatched.append(choice.place)
        jumps = choice.operation in _STEPS
        results = iter(recorded.results)
        changed = False

        def replaced(x: Any) -> Any:
            nonlocal changed
            if not isinstance(x, Tensor):
                return x
            result = next(results)
            if result.shape != x.shape:
                changed = True
                return result.to(x.dtype, copy=True)
            # the largest values are nearly the same, whichever they are
            if not (jumps or _is_chosen(x)):
                return x
            changed |= not torch.equal(result.to(x.dtype), x)
            return x.copy_(result)  # of an operation in place it is the tensor that was given

        output = tree_map(replaced, output)
        if changed:
            self.changed.append(choice.place)
        return output


def _is_chosen(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
