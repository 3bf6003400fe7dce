"""Feature layers of a model and their outputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isomorph.analysis.layer_attention import run_observed
from isomorph.errors import UserError
from isomorph.operations import ModuleCall
from isomorph.surgery.calls import Inputs
from isomorph.surgery.modules import outermost_modules
from isomorph.surgery.site import Where, matches_where, nearest_names


def feature_layers(model: nn.Module, where: Where | None, least: int = 2) -> dict[str, nn.Module]:
    """Return the modules of `where`, else of timm's `feature_info`, else the blocks: items of the outermost sequences.

    Raises: UserError for fewer than `least`.
    """
    modules = dict(model.named_modules())
    if where is None:
        names = [info["module"] for info in getattr(model, "feature_info", ())] or _blocks(model)
    else:
        names = [
            name for name, module in modules.items() if name and matches_where(where, name, module)
        ]
    layers = {name: modules[name] for name in names if name in modules}
    if len(layers) < least:
        hint = "; give where, like 'blocks.?' or 'layer?'"
        if where:
            hint = nearest_names(where, list(modules))
        raise UserError(
            f"{len(layers)} layers are selected for features, and at least {least} are needed{hint}"
        )
    return layers


def _blocks(model: nn.Module) -> list[str]:
    """Return the items of each Sequential or ModuleList that is inside no other: those made of modules, if any are."""
    sequences = outermost_modules(
        model, lambda module: isinstance(module, nn.Sequential | nn.ModuleList)
    )
    every: list[str] = []
    made_of_modules: list[str] = []
    for name, sequence in sequences.items():
        for item, block in sequence.named_children():
            if next(block.parameters(), None) is None:
                continue
            every.append(f"{name}.{item}".lstrip("."))
            if next(block.children(), None) is not None:
                made_of_modules.append(every[-1])
    return made_of_modules or every


@torch.no_grad()
def features(
    model: nn.Module, batch: Inputs, layers: dict[str, nn.Module], read: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return `read(output)` of every layer in eval mode, maps as (B, C, H, W). Shape: -> {name: (B, features)}"""
    values: dict[str, Tensor] = {}

    def keep(call: ModuleCall) -> None:
        x = call.output[0] if isinstance(call.output, tuple) else call.output
        is_convolution = isinstance(call.module, nn.Conv2d)
        if getattr(model, "output_fmt", "") == "NHWC" and x.ndim == 4 and not is_convolution:
            x = x.movedim(-1, 1)
        values[call.name] = read(x)

    run_observed(model, batch, after=keep, names=layers)
    return {name: values[name] for name in layers if name in values}
