"""What users and libraries do to a module besides training it: every way is a row of a table."""

import types

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm


class Quantised(torch.Tensor):
    """A tensor that is more than its values, as quantised and sharded ones are."""


def look(*_, **__):
    """A hook that only looks."""


def shift(module, args, output):
    """A hook that changes what comes out."""
    return output + 0.1


def reclass(module):
    """Makes the module one of a subclass with another forward, as adapters and standardised layers are."""
    known = type(module)
    module.__class__ = type(
        f"Other{known.__name__}",
        (known,),
        {"forward": lambda self, *a: known.forward(self, *a) + 0.1},
    )


def rename(module):
    """Makes the module one of a subclass that changes nothing: it may be taken."""
    module.__class__ = type(f"Same{type(module).__name__}", (type(module),), {})


def reload(module):
    """Makes the module one of a subclass that stores its tensors otherwise."""
    known = type(module)._save_to_state_dict
    body = {"_save_to_state_dict": lambda self, *args: known(self, *args)}
    module.__class__ = type("Stored", (type(module),), body)


def patch(module):
    """Sets a forward on the instance, as libraries that wrap models do."""
    known = type(module).forward
    module.forward = types.MethodType(lambda self, *args: known(self, *args) + 0.1, module)


def adapt(module):
    """Adds parameters and a hook that uses them, as adapters do."""
    module.down = nn.Parameter(torch.ones(()))
    module.register_forward_hook(lambda m, args, output: output + 0.1 * m.down)


def weighted(change):
    """A change of the weight, for modules that have one."""

    return lambda module: isinstance(module, nn.Linear | nn.Conv2d) and change(module)


def replace_weight(make):
    """A weight of another kind in the place of the parameter."""

    def change(module):
        module.weight = nn.Parameter(make(module.weight.detach()), requires_grad=False)

    return weighted(change)


ALTERATIONS = {
    "forward hook": lambda m: m.register_forward_hook(shift),
    "forward hook, always called": lambda m: m.register_forward_hook(look, always_call=True),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(look),
    "backward hook": lambda m: m.register_full_backward_hook(look),
    "state-dict hook": lambda m: m._register_state_dict_hook(lambda *args: None),
    "state-dict pre-hook": lambda m: m.register_state_dict_pre_hook(look),
    "load-state-dict pre-hook": lambda m: m.register_load_state_dict_pre_hook(look),
    "forward of its own": patch,
    "another class": reclass,
    "a class that stores otherwise": reload,
    "a class that changes nothing": rename,
    "adapter": adapt,
    "parametrized weight norm": weighted(parametrizations.weight_norm),
    "orthogonal": weighted(
        lambda m: parametrizations.orthogonal(m) if isinstance(m, nn.Linear) else False
    ),
    "spectral norm": weighted(spectral_norm),
    "pruned": weighted(lambda m: prune.l1_unstructured(m, "weight", 0.5)),
    "tensor subclass": replace_weight(lambda w: w.as_subclass(Quantised)),
    "whole numbers": replace_weight(lambda w: w.to(torch.int8)),
}

BRIEF = (
    "forward hook",
    "state-dict hook",
    "forward of its own",
    "another class",
    "adapter",
    "orthogonal",
)
"""A row of each kind, for layers with many parts."""


def attachments(model):
    """How many hooks, own forwards and parametrizations a model has, all in all."""
    hooks = (
        len(h)
        for m in model.modules()
        for name, h in vars(m).items()
        if name.endswith("_hooks") and h
    )
    own = ("forward" in vars(module) for module in model.modules())
    return (
        sum(hooks)
        + sum(own)
        + sum(hasattr(module, "parametrizations") for module in model.modules())
    )
