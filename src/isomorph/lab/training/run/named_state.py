"""The tensors of a run by name: weights, averaged weights, and the optimiser's state of every parameter.

By name, so that state stays with its parameter when groups, a recast or the sharding change.
"""

from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isomorph.json_values import JsonObject

# Tensors of a run by name.
Tensors = dict[str, Tensor]

# How the names of a run's tensors begin.
MODEL_PREFIX = "model."
AVERAGED_PREFIX = "ema."
OPTIMIZER_PREFIX = "optimizer."
GROUP_PREFIX = "group:"


def model_tensors(model: nn.Module, prefix: str) -> Tensors:
    """Return parameters and buffers by prefixed name."""
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}


def owner_name(name: str) -> str:
    """Return the name of the parameter, or `group:` and the group, that a tensor of the optimiser belongs to."""
    return name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")[0]


def split_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, JsonObject]:
    """Return the optimiser's state by parameter name and key: tensors, and plain values (also those of groups)."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: Tensors = {}
    values: JsonObject = {}
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER_PREFIX}{names[parameter]}.{key}"] = value
            else:
                values.setdefault(names[parameter], {})[key] = value
    groups: JsonObject = {}
    # some optimisers change numbers of their groups during training
    for group in optimizer.param_groups:
        name = group["name"]
        groups[name] = {}
        for key, value in group.items():
            if isinstance(value, bool | int | float):
                groups[name][key] = value
            elif isinstance(value, Tensor):
                tensors[f"{OPTIMIZER_PREFIX}{GROUP_PREFIX}{name}.{key}"] = value
    return tensors, {"state": values, "groups": groups}


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Tensors, values: JsonObject
) -> None:
    """Load the optimiser's state by parameter name; parameters without saved state start without any."""
    state: dict[str, JsonObject] = {name: dict(kept) for name, kept in values["state"].items()}
    for name, tensor in tensors.items():
        key = name.rpartition(".")[2]
        state.setdefault(owner_name(name), {})[key] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    # torch numbers the parameters in the order of the groups
    in_order = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state_dict = optimizer.state_dict()
    state_dict["state"] = {}
    for number, parameter in enumerate(in_order):
        if names[parameter] in state:
            state_dict["state"][number] = state[names[parameter]]
    for saved in state_dict["param_groups"]:
        saved.update(values["groups"].get(saved["name"], {}))
        saved.update(state.get(f"{GROUP_PREFIX}{saved['name']}", {}))
    optimizer.load_state_dict(state_dict)


def allocate_tensor(
    name: str, shape: torch.Size, dtype: torch.dtype, parameters: Tensors
) -> Tensor:
    """Return zeros for a tensor of the optimiser, sharded like its parameter if it has the parameter's shape."""
    parameter = parameters.get(owner_name(name))
    if parameter is not None and parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)
