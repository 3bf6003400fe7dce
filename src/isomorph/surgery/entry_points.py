"""The ways to call a model with one batch: its forward, flags of it, and other public methods that take the same."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from isomorph.surgery.calls import Inputs, in_own_precision

# Outputs that transformers' models add when they are asked to, also where their signature does not name them.
_OUTPUT_FLAGS = ("output_hidden_states", "output_attentions")
# First words of the names of methods that change a model, write files or send something.
_CHANGES = {
    "configure",
    "dump",
    "export",
    "finetune",
    "fit",
    "freeze",
    "init",
    "initialise",
    "initialize",
    "load",
    "log",
    "logging",
    "prune",
    "push",
    "register",
    "reset",
    "resize",
    "save",
    "set",
    "setup",
    "test",
    "train",
    "training",
    "unfreeze",
    "validate",
    "validating",
    "validation",
    "write",
}
# Second words after which a logarithm is meant.
_LOGARITHMS = {"density", "likelihood", "prob", "probability", "probs", "softmax"}


@dataclass(frozen=True)
class EntryPoint:
    """A method of a model that takes a batch, and further arguments by name.

    `inputs`: which entries of a batch of several inputs it takes; None for all.
    """

    method: str = "forward"
    arguments: tuple[tuple[str, Any], ...] = ()
    inputs: tuple[str, ...] | None = None

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.method}({arguments})" if arguments else self.method

    def __call__(self, model: Any, batch: Inputs) -> Any:
        method = model if self.method == "forward" else getattr(model, self.method)
        arguments = dict(self.arguments)
        with in_own_precision(model):
            if isinstance(batch, Tensor):
                return method(batch, **arguments)
            inputs = batch if self.inputs is None else {name: batch[name] for name in self.inputs}
            return method(**inputs, **arguments)


class PooledFeatures(EntryPoint):
    """The features of a model of timm that its classifier reads."""

    def __call__(self, model: Any, batch: Inputs) -> Any:
        with in_own_precision(model):
            return model.forward_head(model.forward_features(batch), pre_logits=True)


FORWARD = EntryPoint()


def entry_points(model: nn.Module, batch: Inputs) -> list[EntryPoint]:
    """Return the ways to call a model with a batch other than its plain forward; some may raise or give no numbers.

    They are its forward with each flag turned, and the public methods that take the same, but for those whose names say
    that they change the model or write files.
    """
    points = [*_flags(model, batch), *_methods(model, batch)]
    if callable(getattr(model, "forward_head", None)) and isinstance(batch, Tensor):
        points.append(PooledFeatures("forward_head"))
    return points


def untried_arguments(model: nn.Module, batch: Inputs) -> list[str]:
    """Return the arguments of a model's forward that may choose what it computes by something else than yes or no."""
    untried = []
    for name, parameter in _arguments(model.forward, batch):
        default = parameter.default
        defaults_to_none = default is None and "bool" not in str(parameter.annotation)
        takes_any = parameter.kind is parameter.VAR_KEYWORD
        if takes_any or defaults_to_none or isinstance(default, str) or type(default) is int:
            untried.append(_shown(name, parameter))
    return untried


def names_not_given(model: nn.Module, batch: Inputs) -> list[str]:
    """Return the arguments of a model's forward that a batch does not give."""
    return [_shown(name, parameter) for name, parameter in _arguments(model.forward, batch)]


def _shown(name: str, parameter: inspect.Parameter) -> str:
    return f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name


def _arguments(method: Any, batch: Inputs) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the parameters of a method that a batch does not fill."""
    try:
        parameters = list(inspect.signature(method).parameters.items())
    except (TypeError, ValueError):  # a method written in C
        return
    names_of_batch = (
        [name for name, _ in parameters[:1]] if isinstance(batch, Tensor) else list(batch)
    )
    for name, parameter in parameters:
        if name not in names_of_batch:
            yield name, parameter


def _flags(model: nn.Module, batch: Inputs) -> Iterator[EntryPoint]:
    """Yield calls of forward with one yes-or-no argument turned, also those that transformers takes unnamed."""
    takes_any = False
    named = set()
    for name, parameter in _arguments(model.forward, batch):
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
        default = parameter.default
        named.add(name)
        if isinstance(default, bool):
            yield EntryPoint(arguments=((name, not default),))
        elif default is None and _may_be_bool(parameter):
            yield EntryPoint(arguments=((name, True),))
    if takes_any:
        for name in _OUTPUT_FLAGS:
            if name not in named and hasattr(getattr(model, "config", None), name):
                yield EntryPoint(arguments=((name, True),))


def _may_be_bool(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is parameter.empty or "bool" in str(parameter.annotation)


def _methods(model: nn.Module, batch: Inputs) -> Iterator[EntryPoint]:
    """Yield the public methods of a model and its base classes that take the batch and change nothing."""
    names: dict[str, None] = {}
    for kind in type(model).__mro__:
        if kind not in nn.Module.__mro__:
            names |= dict.fromkeys(vars(kind))
    for name in names:
        method = getattr(type(model), name, None)
        if hasattr(nn.Module, name) or not inspect.isfunction(method):
            continue
        if name.startswith("_") or _says_change(name):
            continue
        if isinstance(batch, Tensor):
            if _takes_one_tensor(method):
                yield EntryPoint(name)
        else:
            inputs = _inputs_of(method, batch)
            if inputs:
                yield EntryPoint(name, inputs=inputs)


def _says_change(name: str) -> bool:
    """True if the name of a method begins with a word for a change: `log_images`, and not `logits` or `log_prob`."""
    first, *others = re.findall("[a-z]+", name) or [""]
    if first == "log" and others and others[0] in _LOGARITHMS:
        return False
    return first in _CHANGES


def _required(method: Any) -> list[inspect.Parameter]:
    """Return the parameters of a method, without self, that a call must give."""
    _, *parameters = inspect.signature(method).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variable
    ]


def _takes_one_tensor(method: Any) -> bool:
    required = _required(method)
    if len(required) != 1:
        return False
    annotation = required[0].annotation
    return annotation is inspect.Parameter.empty or "Tensor" in str(annotation)


def _inputs_of(method: Any, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which entries of a batch a method takes, none if it needs others."""
    if not all(parameter.name in batch for parameter in _required(method)):
        return ()
    parameters = inspect.signature(method).parameters
    return tuple(name for name in batch if name in parameters)
