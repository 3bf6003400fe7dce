"""Watching the modules of a model while it is called: who runs, what each module is given and what it returns."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn


class ModuleCall(NamedTuple):
    """A call of a module: its name in the model, what it is given, and what it returns, None before that."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def input(self) -> Any:
        """The first argument, None without any."""
        return next(iter((*self.args, *self.kwargs.values())), None)


class Running:
    """The names of the modules that run at a moment, the outermost first; the model itself is ""."""

    def __init__(self) -> None:
        self.names: list[str] = [""]

    @property
    def innermost(self) -> str:
        """Name of the module whose own code runs."""
        return self.names[-1]


Notice = Callable[[ModuleCall], None]


@contextmanager
def observing(
    model: nn.Module,
    before: Notice | None = None,
    after: Notice | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[Running]:
    """Context in which every call of the named modules, by default of all, is shown to `before` and `after`.

    A call that raises is not shown to `after`. Hooks of the model's own come first.

    >>> from isomorph.operations import observing
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    >>> shapes = {}
    >>> with observing(model, after=lambda call: shapes.update({call.name: tuple(call.output.shape)})):
    ...     y = model(torch.zeros(2, 3))
    >>> shapes
    {'0': (2, 4), '1': (2, 4), '': (2, 4)}
    """
    running = Running()

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.names.append(name)
        if before is not None:
            before(ModuleCall(name, module, args, kwargs))

    def leave(
        notice: Notice,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        notice(ModuleCall(name, module, args, kwargs, output))

    def end(*_: Any) -> None:
        running.names.pop()

    watched = dict(model.named_modules())
    if names is not None:
        watched = {name: model.get_submodule(name) for name in names}
    with ExitStack() as hooks:
        for name, module in watched.items():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            )
            if after is not None:
                hooks.enter_context(
                    module.register_forward_hook(partial(leave, after, name), with_kwargs=True)
                )
            hooks.enter_context(module.register_forward_hook(end, always_call=True))
        yield running
