"""Memory that a forward pass saves for the backward pass."""

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 1) -> int:
    """Return the bytes per image that autograd saves in the forward pass of a training step.

    Every storage counts once, however many saved tensors are views of it. Parameters and buffers are left out; the
    images count if they are saved. BatchNorm's running statistics are restored.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.evaluation import saved_bytes
    >>> saved_bytes(timm.create_model("cifar_resnet20"), (3, 32, 32), batch_size=2) > 0
    True
    """
    parameter = next(model.parameters())
    x = torch.randn(batch_size, *input_size, device=parameter.device, dtype=parameter.dtype)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(x)  # noqa: F841 (keeps graph and storages alive, so that no address is used twice)
    finally:
        for module, training in modes:
            module.training = training
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])
    return sum(saved.values()) // batch_size
