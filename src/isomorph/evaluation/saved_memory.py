"""What a step of a model keeps in memory for its backward pass."""

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1) -> int:
    """Bytes that one image keeps from the forward pass for the backward pass, in training mode.

    Every storage once, however many views of it are kept; parameters and buffers left out, the images themselves
    counted where they are kept. BatchNorm's running statistics are as before afterwards.
    """
    parameter = next(model.parameters())
    x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = model(x)  # noqa: F841 (keeps its graph, and the storages, alive: no address is used twice)
    finally:
        for module, training in modes:
            module.training = training
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])
    return sum(kept.values()) // batch_size
