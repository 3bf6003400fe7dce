"""Parents that read the weights of a layer instead of calling it: found by their code, or made to call it."""

import dis
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from torch.nn import functional as F

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


_READ: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("self_attn.out_proj", "linear1", "linear2"), nn.Linear),
    **dict.fromkeys(("norm1", "norm2"), nn.LayerNorm),
    "self_attn": nn.MultiheadAttention,
}
"""Layers of torch's TransformerEncoderLayer whose weights its fast path reads, in eval mode without gradients."""


def make_parents_call(model: nn.Module, names: Iterable[str]) -> None:
    """Turn the fast paths of torch's encoders off where they would pass by a layer that was replaced, or on again.

    Both are attributes of the encoder, and so are kept in copies; `replay` sets them in a model that is loaded.

    Args:
        names: names of the modules that were replaced.
    """
    for path, module in reversed(list(model.named_modules())):  # the layers before their encoder
        if not any(f"{name}.".startswith(f"{path}." if path else "") for name in names):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            known = {F.relu: 1, nn.ReLU: 1, F.gelu: 2, nn.GELU: 2}
            activation: Any = module.activation
            usual = known.get(activation) or known.get(type(activation), 0)
            module.activation_relu_or_gelu = usual if _is_plain(module) else 0
        elif isinstance(module, nn.TransformerEncoder) and len(module.layers):
            layers: Any = module.layers
            plain = all(isinstance(layer, nn.TransformerEncoderLayer) and _is_plain(layer) for layer in layers)
            module.use_nested_tensor = plain and _takes_nested(layers[0], module.enable_nested_tensor)


def _is_plain(layer: nn.TransformerEncoderLayer) -> bool:
    """True if all weights that the fast path reads belong to layers of torch."""
    parts = dict(layer.named_modules())
    return all(getattr(type(parts.get(name)), "forward", None) is kind.forward for name, kind in _READ.items())


def _takes_nested(layer: nn.TransformerEncoderLayer, enabled: bool) -> bool:
    """Return what torch's encoder of such layers decides when it is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, 0, enable_nested_tensor=enabled).use_nested_tensor


SEPARATE_BIAS = "qkv_bias_separate"
"""Attribute of timm's attention with biases outside of its qkv: True to call the qkv, False to read its weight."""


def call_joint_projections(model: nn.Module) -> None:
    """Make timm's attention with separate biases (BEiT, EVA, Swin V2) call its qkv where that was replaced."""
    for module in model.modules():
        if hasattr(module, SEPARATE_BIAS) and type(getattr(module, "qkv", None)) is not nn.Linear:
            setattr(module, SEPARATE_BIAS, True)
