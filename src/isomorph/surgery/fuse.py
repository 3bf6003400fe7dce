"""The way back: every layer that knows its fused form gives it, and the model computes what it computed."""

import copy

from torch import nn

from isomorph.errors import UserError


def fuse(model: nn.Module) -> nn.Module:
    """A copy of the model with every module that has a `fuse()` replaced by its result, root included, outermost first.

    `fuse()` on a layer returns a new module and needs no rule, so it works on any checkpoint; a layer whose way back
    holds only under a condition has a named method instead (`GPSA2d.to_conv()`) and is left alone here.

    Raises: UserError in train mode: BatchNorm would fuse the statistics of one batch.
    """
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise UserError(
            f"fuse needs eval mode, and {training or 'the model'} is in train mode; call model.eval() first"
        )
    return fuse_within(copy.deepcopy(model), {})


def fuse_within(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Pre-order walk: a layer fuses what it holds itself. `done` keeps a module used in several places one module."""
    if module in done:
        return done[module]
    fused = module.fuse().eval() if callable(getattr(module, "fuse", None)) else module  # type: ignore[operator]
    done[module] = fused
    for name, child in fused._modules.items():  # named_children() would skip the second name of a shared module
        if child is not None:
            fused._modules[name] = fuse_within(child, done)
    return fused
