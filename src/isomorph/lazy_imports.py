"""Public names of a package that are imported when they are first used (PEP 562), so that importing it stays fast."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(
    package: str, homes: Mapping[str, Iterable[str]], subpackages: Iterable[str] = ()
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it imports a name from its module, or a subpackage, at the first use.

    `homes` has the names of each module. Static tools read the same names from imports under `TYPE_CHECKING`.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in home_of:
            value = getattr(import_module(home_of[name]), name)
        elif name in subpackages:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
