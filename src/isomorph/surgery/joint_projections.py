"""Joint projections (`qkv`) and their parts, each of which can be a target of a rule."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from isomorph.layers import JointPyramid

JOINT_PARTS: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "kv": ("k", "v")}
"""Last names of joint projections, and the names of their parts in order."""


@dataclass(frozen=True)
class JointPart:
    """One part of a joint projection as a target: `blocks.0.attn.v` of the layer `blocks.0.attn.qkv`."""

    joint: nn.Linear | JointPyramid
    joint_name: str
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts of the layer, in order."""
        return JOINT_PARTS[self.joint_name.rpartition(".")[2]]


def joint_parts(model: nn.Module) -> dict[str, JointPart]:
    """Return the parts of every joint projection by name, without names that are modules themselves."""
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
    """Return the module of that name, or else the part of a joint projection, or else None."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return joint_parts(model).get(name)


def joint_candidates(name: str) -> list[str]:
    """Return the names of the layers that a part of this name may belong to."""
    parent, dot, last = name.rpartition(".")
    return [f"{parent}{dot}{joint}" for joint, parts in JOINT_PARTS.items() if last in parts]
