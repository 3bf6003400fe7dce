"""What pruning saves: parameters and multiply-accumulates of every layer before and after."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isomorph.evaluation.cost import count_parameters


class LayerSaving(NamedTuple):
    """Parameters and multiply-accumulates (one image) of a layer before and after surgery, and its new class."""

    layer: str
    becomes: str
    parameters: tuple[int, int]
    macs: tuple[int, int]


def layer_macs(model: nn.Module, names: Iterable[str], input_size: tuple[int, ...]) -> dict[str, int]:
    """Return the multiply-accumulates of some layers for one image; a layer that runs twice counts twice.

    Shape: input_size is (channels, height, width)
    """
    twin = copy.deepcopy(model).to("meta").eval()
    counted = dict.fromkeys(names, 0)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:

        def start(name: str) -> Any:
            def hook(*_: Any) -> None:
                counted[name] -= counter.get_total_flops() // 2

            return hook

        def stop(name: str) -> Any:
            def hook(*_: Any) -> None:
                counted[name] += counter.get_total_flops() // 2

            return hook

        for name in counted:
            twin.get_submodule(name).register_forward_pre_hook(start(name))
            twin.get_submodule(name).register_forward_hook(stop(name))
        twin(torch.empty(1, *input_size, device="meta", dtype=next(twin.parameters()).dtype))
    return counted


def pruning_savings(
    model: nn.Module, pruned: nn.Module, names: Iterable[str], input_size: tuple[int, ...]
) -> list[LayerSaving]:
    """Return what each of the pruned layers saves.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.evaluation.pruning_cost import pruning_savings
    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv2")
    >>> saving = pruning_savings(tcnn, iso.prune(tcnn), ["layer3.0.conv2"], (3, 32, 32))[0]
    >>> saving.becomes, saving.parameters, saving.macs
    ('Conv2d', (49188, 36864), (5539328, 2359296))
    """
    names = list(names)
    before, after = layer_macs(model, names, input_size), layer_macs(pruned, names, input_size)
    return [
        LayerSaving(
            name,
            type(pruned.get_submodule(name)).__name__,
            (count_parameters(model.get_submodule(name)), count_parameters(pruned.get_submodule(name))),
            (before[name], after[name]),
        )
        for name in names
    ]
