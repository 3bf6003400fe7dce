"""Layers whose class is a subclass made at run time, so that their parts and the names of their state stay."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def cached_by_class(function: F) -> F:
    """Decorate a function of classes so that it is computed once for each."""
    return cast(F, cache(function))  # mypy takes classes for unhashable


class Altered:
    """Mixin of layers whose forward is altered; `original` is the class that they had."""

    mixin: type["Altered"]
    original: type[nn.Module]

    @classmethod
    def base_of(cls, kind: type[nn.Module]) -> tuple[type[nn.Module], dict[str, Any]]:
        """Return the class whose forward is altered, for layers of a class, and attributes of the subclass."""
        return kind, {}

    def __reduce__(self) -> Any:
        """Pickle by the original class: this class is made at run time."""
        return _new_altered, (self.mixin, self.original), self.__getstate__()


@cached_by_class
def altered_class(mixin: type[Altered], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass by which layers of a class are altered."""
    base, attributes = mixin.base_of(kind)
    name = mixin.__name__.removesuffix("Attention") + kind.__name__
    return type(name, (mixin, base), {"mixin": mixin, "original": kind, **attributes})


def _new_altered(mixin: type[Altered], kind: type[nn.Module]) -> nn.Module:
    altered = altered_class(mixin, kind)
    return altered.__new__(altered)


def copy_as(layer: nn.Module, kind: type[nn.Module]) -> Any:
    """Return a copy of a layer as one of another class; a configuration (of transformers) stays that of its model."""
    config = getattr(layer, "config", None)
    copied = copy.deepcopy(layer, {id(config): config})
    copied.__class__ = kind
    return copied
