"""Parents that read the weights of a layer instead of calling it: found by their code, or made to call it."""

import dis
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

from isomorph.surgery.attention_layers import functions_of

_FORMS = {"dtype", "device", "shape", "size", "ndim", "dim", "is_meta", "requires_grad", "numel"}
"""What code reads of a weight besides its values."""


def reading_parent(model: nn.Module, name: str) -> str | None:
    """Return that the parents of a layer read its weight and never call it, or None."""
    path = name.split(".")
    found = None
    for depth in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[:-depth]))
        reads, uses = _uses(type(parent), tuple(path[-depth:]))  # type: ignore[arg-type]
        if uses:
            return None
        found = found or (f"{type(parent).__name__} reads its weight without calling it" if reads else None)
    return found


@cache
def _uses(kind: type, path: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether the forward of a class reads the weight of a module inside, and whether it uses it otherwise."""
    reads = uses = False
    for function in functions_of(kind):
        steps: list[Any] = [None, *dis.get_instructions(function)]
        names = [s.argval if s and s.opname in ("LOAD_ATTR", "LOAD_METHOD") else None for s in steps] + [None] * 2
        for i in range(len(steps) - len(path) + 1):
            if tuple(names[i : i + len(path)]) == path:
                after, form = names[i + len(path)], names[i + len(path) + 1]
                reads |= after == "weight" and form not in _FORMS
                uses |= after is None
    return reads, uses


def make_parents_call(model: nn.Module, names: Iterable[str]) -> None:
    """Turn off the fast paths of torch's encoders around replaced modules, whose weights they read without a call."""
    for path, module in model.named_modules():
        if any(name != path and f"{name}.".startswith(f"{path}." if path else "") for name in names):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


SEPARATE_BIAS = "qkv_bias_separate"
"""Attribute of timm's attention with biases outside of its qkv: True to call the qkv, False to read its weight."""


def call_joint_projections(model: nn.Module) -> None:
    """Make timm's attention with separate biases (BEiT, EVA, Swin V2) call its qkv where that was replaced."""
    for module in model.modules():
        if hasattr(module, SEPARATE_BIAS) and type(getattr(module, "qkv", None)) is not nn.Linear:
            setattr(module, SEPARATE_BIAS, True)
