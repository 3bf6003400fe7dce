"""Joint projections, such as `qkv`, and their parts (`q`, `k`, `v`), each of which can be the target of a rule."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from isomorph.layers import JointPyramid

JOINT_PARTS: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "kv": ("k", "v")}
"""The last component of a joint projection's name, mapped to the names of its parts in order."""


@dataclass(frozen=True)
class JointPart:
    """One part of a joint projection: for example `blocks.0.attn.v`, a part of the layer `blocks.0.attn.qkv`."""

    joint: nn.Linear | JointPyramid
    joint_name: str
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts of the layer, in order."""
        return JOINT_PARTS[self.joint_name.rpartition(".")[2]]


def joint_parts(model: nn.Module) -> dict[str, JointPart]:
    """Return the parts of every joint projection by name, except where a module already has that name."""
    named = dict(model.named_modules(remove_duplicate=False))
    parts_by_name: dict[str, JointPart] = {}
    for name, module in named.items():
        parent, _, last = name.rpartition(".")
        if last in JOINT_PARTS and isinstance(module, nn.Linear | JointPyramid):
            parts_by_name |= {
                f"{parent}.{part}".lstrip("."): JointPart(module, name, part) for part in JOINT_PARTS[last]
            }
    return {name: part for name, part in parts_by_name.items() if name not in named}


def find_target(model: nn.Module, name: str) -> nn.Module | JointPart | None:
    """Return the module or the part of a joint projection with this name, or None if there is neither."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return joint_parts(model).get(name)


def joint_candidates(name: str) -> list[str]:
    """Return the names of the joint projections that a part with this name may belong to."""
    parent, dot, last = name.rpartition(".")
    return [f"{parent}{dot}{joint}" for joint, parts in JOINT_PARTS.items() if last in parts]
